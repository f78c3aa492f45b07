"""A worker: counts the words of a line, stores the result and finishes the job in one transaction."""

import json
import time

import psycopg
from psycopg.types.json import Jsonb

import life

BATCH = 100
# One batch in so many hits an error after its results were stored, rolls back, and is done again.
BREAKS_EVERY = 97

# The results go as one JSON document, which is cheaper for Python than an array per column.
STORE = (
    "INSERT INTO results (job_id, attempt, file, line, words, letters, enqueued_at, claimed_at, finished_at)"
    " SELECT r.*, clock_timestamp() FROM jsonb_to_recordset(%s::jsonb) AS r (job_id bigint, attempt int, file text, line int,"
    " words int, letters int, enqueued_at timestamptz, claimed_at timestamptz)"
)
# strict: if a job is not ours any more, nothing of this transaction may stand.
FAIL = (
    "INSERT INTO failures (job_id, attempt, state) SELECT job_id, attempt, state"
    " FROM awa.fail(%s, 'the handler failed', details => %s, permanent => %s, strict => true) RETURNING state"
)
NEXT = (
    "SELECT receipt, job_id, attempt, args, enqueued_at::text, claimed_at::text"
    " FROM awa.complete_and_claim(%s, ARRAY[%s], %s, worker => %s, strict => true)"
)


class Broken(Exception):
    """Anything that can go wrong in a worker's transaction."""


class Failed(Exception):
    """The handler could not do the job; again: whether it may be worth another try."""

    def __init__(self, again):
        self.again = again


def handle(args, attempt):
    """The work itself."""
    fails = args.get("fails", 0)
    if fails == life.NEVER_AGAIN or attempt <= fails:
        raise Failed(again=fails != life.NEVER_AGAIN)
    words = args["text"].split()
    return len(words), sum(map(len, words))


def note(outside, jobs):
    """What a handler does outside of the database (a mail, a call) can't be rolled back: here, a line in a file."""
    outside.write("".join(f"{job_id}\t{attempt}\n" for _, job_id, attempt, *_ in jobs))
    outside.flush()


class Batch:
    """What was claimed, and how its jobs ended."""

    def __init__(self, jobs, outside):
        self.held, self.results, self.done, self.failed, self.refused = len(jobs), [], [], [], []
        for receipt, job_id, attempt, args, enqueued_at, claimed_at in jobs:
            try:
                words, letters = handle(args, attempt)
                self.done.append(receipt)
                self.results.append({"job_id": job_id, "attempt": attempt, "file": args["file"], "line": args["line"], "words": words,
                                     "letters": letters, "enqueued_at": enqueued_at, "claimed_at": claimed_at})
            except Failed as failed:
                (self.failed if failed.again else self.refused).append((receipt, {"line": args["line"]}))
        note(outside, jobs)

    def store(self, connection):
        """Stores the results and reports the failures; returns how many jobs will be tried again."""
        again = 0
        if self.results:
            connection.execute(STORE, [json.dumps(self.results)])
        for jobs, permanent in ((self.failed, False), (self.refused, True)):
            if jobs:
                states = connection.execute(FAIL, [[r for r, _ in jobs], [Jsonb(d) for _, d in jobs], permanent]).fetchall()
                again += states.count(("retryable",))
        return again


def run(conninfo, number, outside, can_wait, doomed, shared):
    """doomed: this worker stops in the middle of its work when shared.trap is set, and is killed there."""
    name = f"demo worker {number}"
    with psycopg.connect(conninfo, autocommit=True, application_name=name) as connection, open(outside, "a") as outside:
        shared.ready.wait()
        claimed, batches = [], 0
        while True:
            batch = Batch(claimed, outside)
            batches += bool(claimed)
            broken = bool(claimed) and batches % BREAKS_EVERY == 0
            trapped = doomed and claimed and shared.trap.is_set()
            while True:
                try:
                    if not claimed:  # a claim alone needs no transaction block
                        following = connection.execute(NEXT, [[], life.QUEUE, BATCH, name]).fetchall()
                        break
                    with connection.transaction():
                        again = batch.store(connection)
                        if trapped:
                            shared.held_when_killed.value = batch.held
                            shared.caught.set()
                            time.sleep(600)
                        following = connection.execute(NEXT, [batch.done, life.QUEUE, BATCH, name]).fetchall()
                        if broken:
                            raise Broken
                    shared.ended[number] += batch.held - again
                    break
                except Broken:
                    # Results and completion are gone together, and what this transaction had claimed is free again.
                    broken = False
                    shared.redone[number] += batch.held
                    note(outside, claimed)
                except psycopg.errors.ObjectNotInPrerequisiteState:
                    # A lease ended before we did, on a machine that stood still for so long: others have these jobs.
                    shared.stale[number] += 1
                    following = []
                    break
            claimed = following
            if not claimed:
                if shared.over.is_set():
                    return
                if can_wait:
                    connection.execute("CALL awa.wait(ARRAY[%s], '1 s')", [life.QUEUE])
                else:
                    # This version has no awa.wait, so an idle worker looks again after a moment.
                    time.sleep(0.005)
