"""A producer: business transactions that enqueue jobs, some of which roll back."""

import time

import psycopg
from psycopg.types.json import Jsonb

import corpus

QUEUE = "lines"
# One order in so many fails and is placed again; one in so many rolls back to a savepoint half-way.
FAILS_EVERY, SAVEPOINT_EVERY = 20, 33

ENQUEUE = "SELECT awa.enqueue_batch(%s, %s)"
PLACE = "INSERT INTO orders (order_no, file, stream, job_ids) VALUES (%s, %s, %s, %s)"
# What was given out and then rolled back is noted in a transaction of its own: the proof looks for it.
NOTE = "INSERT INTO rolled_back (job_id, why) SELECT unnest(%s::bigint[]), %s"


class Declined(Exception):
    """The business says no."""


def _jobs(order):
    return [Jsonb({"file": order.file, "line": line, "text": text}) for line, text in order.lines]


def place(connection, order, stream, noted):
    """One order in one transaction: its row, and a job for each of its lines."""
    jobs = _jobs(order)

    def enqueue():
        return connection.execute(ENQUEUE, [QUEUE, jobs]).fetchone()[0]

    if order.number % FAILS_EVERY == 0:
        try:
            with connection.transaction():
                ids = enqueue()
                connection.execute(PLACE, [order.number, order.file, stream, ids])
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
        connection.execute(PLACE, [order.number, order.file, stream, enqueue()])
    if dropped:
        connection.execute(NOTE, [dropped, "savepoint"])
        noted(len(dropped))


def run(conninfo, part, parts, total, streamed, rate, shared):
    """Places this producer's share: all but the last `streamed` lines as fast as it can, those at `rate` jobs a second."""
    # Mine, with the number of lines that come before each: it decides where the stream begins.
    work, before = [], 0
    for order in corpus.orders(total):
        if order.number % parts == part:
            work.append((before, order))
        before += len(order.lines)
    backlog = [order for before, order in work if before < total - streamed]
    stream = [order for before, order in work if before >= total - streamed]

    def noted(n):
        with shared.rolled_back.get_lock():
            shared.rolled_back.value += n

    with psycopg.connect(conninfo, autocommit=True, application_name=f"demo producer {part}") as connection:
        shared.ready.wait()
        for order in backlog:
            place(connection, order, False, noted)
            with shared.enqueued.get_lock():
                shared.enqueued.value += len(order.lines)
        shared.stream.wait()
        begun, done = time.monotonic(), 0
        for order in stream:
            time.sleep(max(0.0, begun + done * parts / rate - time.monotonic()))
            place(connection, order, True, noted)
            done += len(order.lines)
            with shared.enqueued.get_lock():
                shared.enqueued.value += len(order.lines)
