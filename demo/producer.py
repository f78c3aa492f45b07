"""A producer: business transactions that enqueue jobs, some of which roll back."""

import json
import time

import psycopg

import corpus
import life

# One order in so many fails and is placed again; one in so many rolls back to a savepoint half-way.
FAILS_EVERY, SAVEPOINT_EVERY = 20, 33

# One JSON document that the server takes apart costs Python a tenth of what a list of Jsonb does.
ENQUEUE = "SELECT awa.enqueue_batch(%s, ARRAY(SELECT jsonb_array_elements(%s::jsonb)), run_in => make_interval(secs => %s))"
PLACE = (
    "INSERT INTO orders (order_no, file, stream, job_ids, fails, not_before)"
    " VALUES (%s, %s, %s, %s, %s, now() + make_interval(secs => %s))"
)
# What was given out and then rolled back is noted in a transaction of its own: the proof looks for it.
NOTE = "INSERT INTO rolled_back (job_id, why) SELECT unnest(%s::bigint[]), %s"


class Declined(Exception):
    """The business says no."""


def place(connection, order, stream, noted):
    """One order in one transaction: its row, and a job for each of its lines."""
    fails = [life.fails(order.before + i) for i in range(len(order.lines))]
    jobs = json.dumps([{"file": order.file, "line": line, "text": text, **({"fails": n} if n else {})}
                       for (line, text), n in zip(order.lines, fails)])
    run_in = life.LATER if life.later(order) else None

    def enqueue():
        return connection.execute(ENQUEUE, [life.QUEUE, jobs, run_in]).fetchone()[0]

    def keep(ids):
        connection.execute(PLACE, [order.number, order.file, stream, ids, fails, run_in])

    if order.number % FAILS_EVERY == 0:
        try:
            with connection.transaction():
                ids = enqueue()
                keep(ids)
                raise Declined
        except Declined:
            connection.execute(NOTE, [ids, "transaction"])
            noted(len(ids))

    dropped = []
    with connection.transaction():
        if order.number % SAVEPOINT_EVERY == 0:
            try:
                with connection.transaction():
                    dropped = enqueue()
                    raise Declined
            except Declined:
                pass
        keep(enqueue())
    if dropped:
        connection.execute(NOTE, [dropped, "savepoint"])
        noted(len(dropped))


def run(conninfo, part, parts, saved, total, streamed, rate, shared):
    """Places this producer's share: all but the last `streamed` lines as fast as it can, those at `rate` jobs a second."""
    work = list(corpus.share(saved, part, parts))
    backlog = [order for order in work if order.before < total - streamed]
    stream = [order for order in work if order.before >= total - streamed]

    def noted(n):
        shared.rolled_back[part] += n

    with psycopg.connect(conninfo, autocommit=True, application_name=f"demo producer {part}") as connection:
        shared.ready.wait()
        for order in backlog:
            place(connection, order, False, noted)
            shared.enqueued[part] += len(order.lines)
        shared.stream.wait()
        begun, done = time.monotonic(), 0
        for order in stream:
            time.sleep(max(0.0, begun + done * parts / rate - time.monotonic()))
            place(connection, order, True, noted)
            done += len(order.lines)
            shared.enqueued[part] += len(order.lines)
