"""A worker: counts the words of a line, stores the result and finishes the job in one transaction."""

import json
import time

import psycopg

from producer import QUEUE

BATCH = 100
# One batch in so many hits an error after its results were stored, rolls back, and is done again.
BREAKS_EVERY = 97

# The results go as one JSON document, which is cheaper for Python than an array per column.
STORE = (
    "INSERT INTO results (job_id, file, line, words, letters, enqueued_at, claimed_at, finished_at)"
    " SELECT r.*, clock_timestamp() FROM jsonb_to_recordset(%s::jsonb) AS r (job_id bigint, file text, line int,"
    " words int, letters int, enqueued_at timestamptz, claimed_at timestamptz)"
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
                words, letters = count(args)
                results.append({"job_id": job_id, "file": args["file"], "line": args["line"], "words": words,
                                "letters": letters, "enqueued_at": enqueued_at, "claimed_at": claimed_at})
            receipts = [row[0] for row in held]
            batches += bool(held)
            broken = bool(held) and batches % BREAKS_EVERY == 0
            while True:
                try:
                    if not held:  # a claim alone needs no transaction block
                        following = connection.execute(NEXT, [[], QUEUE, BATCH, name]).fetchall()
                        break
                    with connection.transaction():
                        connection.execute(STORE, [json.dumps(results)])
                        following = connection.execute(NEXT, [receipts, QUEUE, BATCH, name]).fetchall()
                        if broken:
                            raise Broken
                    break
                except Broken:
                    # Results and completion are gone together, and what this transaction had claimed is free again.
                    broken = False
                    shared.redone[number] += len(held)
            shared.completed[number] += len(held)
            held = following
            if not held:
                if shared.over.is_set():
                    return
                # 0.1.0 has no awa.wait yet, so an idle worker looks again after a moment.
                time.sleep(0.005)
