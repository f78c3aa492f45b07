"""A worker: counts the words of a line, stores the result and finishes the job in one transaction."""

import time

import psycopg

from producer import QUEUE

BATCH = 100
# One batch in so many hits an error after its results were stored, rolls back, and is done again.
BREAKS_EVERY = 97

STORE = (
    "INSERT INTO results (job_id, file, line, words, letters, enqueued_at, claimed_at, finished_at)"
    " SELECT *, clock_timestamp() FROM unnest(%s::bigint[], %s::text[], %s::int[], %s::int[], %s::int[],"
    " %s::timestamptz[], %s::timestamptz[])"
)
# strict: if a job is not ours any more, nothing of this transaction may stand.
NEXT = (
    "SELECT receipt, job_id, args, enqueued_at::text, claimed_at::text"
    " FROM awa.complete_and_claim(%s, ARRAY[%s], %s, worker => %s, strict => true)"
)


class Broken(Exception):
    """Anything that can go wrong in a handler."""


def count(args):
    """The work itself."""
    words = args["text"].split()
    return len(words), sum(map(len, words))


def run(conninfo, number, shared):
    name = f"demo worker {number}"
    with psycopg.connect(conninfo, autocommit=True, application_name=name) as connection:
        shared.ready.wait()
        held, batches = [], 0
        while True:
            results = []
            for receipt, job_id, args, enqueued_at, claimed_at in held:
                results.append((job_id, args["file"], args["line"], *count(args), enqueued_at, claimed_at))
            receipts = [row[0] for row in held]
            batches += bool(held)
            broken = bool(held) and batches % BREAKS_EVERY == 0
            while True:
                try:
                    if not held:  # a claim alone needs no transaction block
                        following = connection.execute(NEXT, [[], QUEUE, BATCH, name]).fetchall()
                        break
                    with connection.transaction():
                        connection.execute(STORE, [list(column) for column in zip(*results)])
                        following = connection.execute(NEXT, [receipts, QUEUE, BATCH, name]).fetchall()
                        if broken:
                            raise Broken
                    break
                except Broken:
                    # Results and completion are gone together, and what this transaction had claimed is free again.
                    broken = False
                    with shared.redone.get_lock():
                        shared.redone.value += len(held)
            if held:
                # Counted by the worker, proved from the tables.
                with shared.completed.get_lock():
                    shared.completed.value += len(held)
            held = following
            if not held:
                if shared.over.is_set():
                    return
                # 0.1.0 has no awa.wait yet, so an idle worker looks again after a moment.
                time.sleep(0.005)
