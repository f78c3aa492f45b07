"""Producers that hold their transaction, retained jobs, old snapshots, open transactions, a job by its id."""

import random
import time

import peers
from load import finish_all, pgbench
from server import buffers, dead_tuples, median, percentile


def held(cluster, db, seconds, rounds, progress):
    """32 producers on one lane, each transaction held open for 50 ms: {way: transactions a second}."""
    wait = "\\sleep 50 ms\nCOMMIT;\n"
    ways = {
        "awa_queue": "BEGIN;\n" + peers.AWA.enqueue.format(lane=1, jobs=":jobs") + ";\n" + wait,
        # The same engine, made to keep a lock of the lane until COMMIT.
        "awa_queue, lane lock held to COMMIT": "BEGIN;\nSELECT pg_advisory_xact_lock(77);\n"
        + peers.AWA.enqueue.format(lane=1, jobs=":jobs") + ";\n" + wait,
        "plpgsql, same tables (held to COMMIT)": "BEGIN;\n" + peers.PEERS[1].enqueue.format(lane=1, jobs=":jobs") + ";\n" + wait,
    }
    found = {way: [] for way in ways}
    for turn in range(rounds):
        for way, script in ways.items():
            progress(f"transactions held 50 ms, {way}, round {turn + 1} of {rounds}")
            calls, spent, p50, p99 = pgbench(cluster, db, script, 32, seconds, {"jobs": peers.array_of(20)})
            found[way].append((calls / spent, p50, p99))
    finish_all(db, 1)
    return {way: tuple(median(c) for c in zip(*values)) for way, values in found.items()}


def retain(db, jobs):
    """Completes that many jobs of 20 a call, and lets the ring turn meanwhile."""
    connection = db.connect(settings={"synchronous_commit": "off"})
    left = jobs
    while left > 0:
        turns = min(2000, max(1, left // 20))
        connection.execute(f"CALL turns.enqueue_0(20, {turns})")
        connection.execute(f"CALL turns.fused_0(20, {turns})")
        left -= turns * 20
        finish_all(db, 1)
    connection.close()


def claim_cost(db, samples=200):
    """A fresh session claims 20 of a small backlog: us of its first claim, us of a claim and of a completion after it,
    buffers of a claim. Times are taken in the server, by clock_timestamp() around the call."""
    producer = db.connect(settings={"synchronous_commit": "off"})
    producer.execute(f"CALL turns.enqueue_0(20, {samples + 40})")
    producer.close()
    firsts = []
    for _ in range(5):
        newcomer = db.connect()
        newcomer.execute("SELECT count(*) FROM awa_internal.queues")
        begun = time.perf_counter()
        newcomer.execute("SELECT count(*) FROM awa.claim('q1', 1)")
        firsts.append((time.perf_counter() - begun) * 1e6)
        newcomer.close()
    worker = db.connect(settings={"synchronous_commit": "off"})
    worker.execute(
        "CREATE OR REPLACE FUNCTION pg_temp.one(OUT claim_us float8, OUT complete_us float8) LANGUAGE plpgsql AS $$"
        " DECLARE r bigint[]; a timestamptz := clock_timestamp(); b timestamptz; BEGIN"
        " SELECT array_agg(receipt) INTO r FROM awa.claim('q1', 20); b := clock_timestamp();"
        " PERFORM count(*) FROM awa.complete(r);"
        " claim_us := extract(epoch FROM b - a) * 1e6; complete_us := extract(epoch FROM clock_timestamp() - b) * 1e6; END $$"
    )
    times = [worker.execute("SELECT * FROM pg_temp.one()").fetchone() for _ in range(samples)]
    touched = [buffers(worker, "SELECT receipt FROM awa.claim('q1', 20)") for _ in range(20)]
    worker.close()
    return {
        "first claim us": median(firsts),
        "claim us": median([t[0] for t in times[20:]]),
        "complete us": median([t[1] for t in times[20:]]),
        "claim buffers": median(touched),
    }


def retained(cluster, db, sizes, progress):
    """[(situation, retained jobs, claim_cost, dead tuples)], the last ones with something left open."""
    rows, so_far = [], 0
    for size in sizes:
        progress(f"claims with {size:,} retained jobs")
        retain(db, size - so_far)
        so_far = size
        kept = db.value("SELECT completed FROM awa.queue_stats WHERE queue = 'q1'")
        assert kept >= size, f"only {kept} jobs are retained"
        # What was just written reaches the disk first: a claim's time shall not be that of the load before it.
        db.sql("CHECKPOINT")
        time.sleep(3)
        rows.append(("", size, claim_cost(db), dead_tuples(db)))
        finish_all(db, 1)

    reader = db.connect(autocommit=False)
    reader.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    reader.execute("SELECT count(*) FROM awa_internal.queues")
    producer = db.connect(autocommit=False)
    claimer = db.connect(autocommit=False)
    for situation, session, sql in (
        ("an old snapshot held open", reader, None),
        ("a producer left open as well", producer, "CALL_ENQUEUE"),
        ("a claimer left open as well", claimer, "SELECT count(*) FROM awa.claim('q1', 20)"),
    ):
        progress(situation)
        if sql == "CALL_ENQUEUE":
            session.execute("SELECT awa.enqueue_batch('q1', jobs) FROM turns.payload WHERE n = 20")
        elif sql:
            db.sql("SELECT awa.enqueue_batch('q1', jobs) FROM turns.payload WHERE n = 20")
            session.execute(sql)
        # Some traffic while it is open: what would pile up does.
        retain(db, min(40_000, sizes[-1]))
        rows.append((situation, so_far, claim_cost(db), dead_tuples(db)))
        finish_all(db, 1)
    for session in (producer, claimer, reader):
        session.rollback()
        session.close()
    finish_all(db, 1)
    return rows


def by_id(db, jobs):
    """awa.job(id) of random jobs among those retained: p50, p99 in ms, buffers."""
    low, high = db.row("SELECT min(first_entry_id), max(first_entry_id) FROM awa_internal.segments")
    connection = db.connect()
    chosen = [r[0] for r in connection.execute(
        "SELECT first_entry_id + floor(random() * n)::int FROM awa_internal.segments ORDER BY random() LIMIT 500")]
    times, missing = [], 0
    for job_id in chosen:
        begun = time.perf_counter()
        rows = connection.execute("SELECT job_id, state FROM awa.job(%s)", [job_id]).fetchall()
        times.append((time.perf_counter() - begun) * 1000)
        missing += rows[0][0] != job_id if rows else 1
    touched = median([buffers(connection, f"SELECT * FROM awa.job({job_id})") for job_id in random.sample(chosen, 50)])
    connection.close()
    assert low and high and not missing, f"{missing} of 500 jobs were not found by id"
    return median(times[20:]), percentile(times[20:], 0.99), touched, jobs


