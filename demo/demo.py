"""Starts a private server, puts some 200,000 real jobs through a queue, and proves that each was done once."""

import argparse
import multiprocessing
import os
import shutil
import sys
import time
from types import SimpleNamespace

import corpus
import producer
import proof
import worker
from harness import Cluster

TABLES = """
CREATE TABLE orders (order_no int PRIMARY KEY, file text NOT NULL, stream boolean NOT NULL, job_ids bigint[] NOT NULL);
CREATE TABLE rolled_back (job_id bigint NOT NULL, why text NOT NULL);
-- No unique key on job_id, on purpose: a job that is done twice shall be seen, not refused.
CREATE TABLE results (job_id bigint, file text, line int, words int, letters int,
                      enqueued_at timestamptz, claimed_at timestamptz, finished_at timestamptz);
CREATE TABLE expected (file text PRIMARY KEY, lines bigint, words bigint, letters bigint);
"""

SETTINGS = {
    # As a server that is meant to keep its data: commits reach the disk.
    "fsync": "on",
    "synchronous_commit": "on",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "30min",
    "shared_preload_libraries": "awa_queue,pg_stat_statements",
    "pg_stat_statements.track": "top",
    # Small slots, so that the ring turns while one looks.
    "awa_queue.slot_size": "8MB",
}


def arguments():
    parser = argparse.ArgumentParser(prog="demo/run", description=__doc__)
    parser.add_argument("--jobs", type=int, default=200_000, help="lines of text to work on (default: %(default)s)")
    parser.add_argument("--producers", type=int, default=4)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate", type=int, default=2000, help="jobs a second of the steady stream at the end")
    parser.add_argument("--keep", action="store_true", help="leave the server running for a look around until Enter or Ctrl-C")
    chosen = parser.parse_args()
    for name in ("jobs", "producers", "workers", "rate"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name} must be at least 1")
    # Five seconds of stream, but never more than a tenth of the jobs.
    chosen.streamed = min(5 * chosen.rate, chosen.jobs // 10)
    return chosen


class Progress:
    """A bar on a terminal; a line every three seconds otherwise."""

    def __init__(self, total):
        self.total = total
        self.begun = time.monotonic()
        self.live = sys.stdout.isatty()
        self.due = 0.0

    def show(self, shared, end=False):
        now = time.monotonic() - self.begun
        if not end and now < self.due:
            return
        self.due = now + (0.2 if self.live else 3.0)
        done, made = sum(shared.completed), sum(shared.enqueued)
        text = f"{now:5.1f} s  enqueued {made:>7,}  completed {done:>7,} of {self.total:,}"
        if self.live:
            width = max(10, min(40, shutil.get_terminal_size().columns - len(text) - 5))
            filled = width * done // self.total
            ahead = max(0, width * made // self.total - filled)
            print(f"\r[{'#' * filled}{'-' * ahead}{' ' * (width - filled - ahead)}] {text}", end="\n" if end else "", flush=True)
        else:
            print(text, flush=True)


def start(context, chosen, conninfo, shared):
    processes = []
    for part in range(chosen.producers):
        settings = (conninfo, part, chosen.producers, chosen.saved, chosen.jobs, chosen.streamed, chosen.rate, shared)
        processes.append(context.Process(target=producer.run, args=settings, name=f"producer {part}", daemon=True))
    for number in range(chosen.workers):
        processes.append(context.Process(target=worker.run, args=(conninfo, number, shared), name=f"worker {number}", daemon=True))
    for process in processes:
        process.start()
    return processes


def watch(processes, until, tick):
    """Waits for a condition; ends the demo when a process has failed."""
    while not until():
        for process in processes:
            if process.exitcode not in (None, 0):
                raise SystemExit(f"demo: the {process.name} failed")
        tick()
        time.sleep(0.05)


def run(server, database, chosen):
    context = multiprocessing.get_context("spawn")
    shared = SimpleNamespace(
        ready=context.Event(), stream=context.Event(), over=context.Event(),
        # One number per process, so that none waits for another to count.
        **{name: context.RawArray("q", chosen.producers) for name in ("enqueued", "rolled_back")},
        **{name: context.RawArray("q", chosen.workers) for name in ("completed", "redone")},
    )
    processes = start(context, chosen, server.conninfo(database.name), shared)
    backlog = None
    try:
        watch(processes, lambda: database.value("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'demo %%'")
              == len(processes), lambda: None)
        database.sql("CHECKPOINT")
        database.sql("SELECT pg_stat_statements_reset()")
        wal = database.value("SELECT pg_current_wal_insert_lsn()")
        print(f"\n{chosen.producers} producers and {chosen.workers} workers start.")
        progress = Progress(chosen.jobs)
        shared.ready.set()
        upkeep = time.monotonic() + 1.0

        def tick():
            nonlocal upkeep
            progress.show(shared)
            # What the background worker of a later version will do; today cron, or somebody, calls it.
            if time.monotonic() > upkeep:
                database.sql("CALL awa.maintain()")
                upkeep = time.monotonic() + 1.0

        first = chosen.jobs - chosen.streamed
        # An order that straddles the border counts to the first part, hence "about".
        watch(processes, lambda: sum(shared.completed) >= first - 50, tick)
        backlog = (sum(shared.completed), time.monotonic() - progress.begun)
        shared.stream.set()
        watch(processes, lambda: sum(shared.completed) >= chosen.jobs, tick)
        shared.over.set()
        watch(processes, lambda: all(process.exitcode is not None for process in processes), tick)
        watch(processes, lambda: True, tick)
        progress.show(shared, end=True)
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
        for process in processes:
            process.join(10)
    return SimpleNamespace(shared=shared, backlog=backlog, wal=wal)


LATENCY = """
SELECT 1000 * percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM {0} - enqueued_at)),
       1000 * percentile_cont(0.99) WITHIN GROUP (ORDER BY extract(epoch FROM {0} - enqueued_at))
FROM results JOIN (SELECT unnest(job_ids) AS job_id FROM orders WHERE stream) AS streamed USING (job_id)
"""


def milliseconds(p50, p99):
    # Of a few jobs, none may be part of the stream.
    return "-" if p50 is None else f"p50 {p50:.1f} ms, p99 {p99:.1f} ms"


def report(database, chosen, ran):
    shared = ran.shared
    wal, images = database.row(
        "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), %s), (SELECT wal_fpi FROM pg_stat_wal)", [ran.wal]
    )
    calls = database.sql(
        "SELECT CASE WHEN query LIKE '%%complete_and_claim%%' OR query LIKE '%%INTO results%%' THEN 'w'"
        " WHEN query LIKE '%%enqueue_batch%%' OR query LIKE '%%INTO orders%%' OR query LIKE '%%rolled_back%%' THEN 'p'"
        " WHEN query ~ '^(BEGIN|COMMIT|ROLLBACK|SAVEPOINT|RELEASE)' THEN 't' END AS who, sum(calls)"
        " FROM pg_stat_statements WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())"
        " GROUP BY 1"
    )
    statements = sum(n for who, n in calls if who)
    verbs = database.value(
        "SELECT sum(calls) FROM pg_stat_statements WHERE query ~ 'awa\\.(enqueue_batch|complete_and_claim)'")
    # Counters of the last second reach the statistics when a session is idle or ends; all of them have ended.
    dead, changed = database.row(
        "SELECT sum(pg_stat_get_dead_tuples(c.oid)), sum(pg_stat_get_tuples_updated(c.oid) + pg_stat_get_tuples_deleted(c.oid))"
        " FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid WHERE inhparent IN ('awa_internal.ready'::regclass,"
        " 'awa_internal.segments'::regclass, 'awa_internal.claims'::regclass, 'awa_internal.closures'::regclass)"
    )
    events = dict(database.sql("SELECT event::text, count(*) FROM awa_internal.ring GROUP BY 1"))
    claim, finish = (database.row(LATENCY.format(column)) for column in ("claimed_at", "finished_at"))
    done, seconds = ran.backlog
    words, files = database.row("SELECT sum(words), count(DISTINCT file) FROM results")
    return [
        ("enqueued and committed", f"{database.value('SELECT sum(cardinality(job_ids)) FROM orders'):,}"),
        ("enqueued and rolled back", f"{sum(shared.rolled_back):,}"),
        ("completed", f"{database.value('SELECT count(*) FROM results'):,}"),
        ("done again after the worker's error", f"{sum(shared.redone):,}"),
        ("words counted", f"{words:,} in {files:,} files"),
        ("", ""),
        ("through the queue, at full speed", f"{done / seconds:,.0f} jobs/s ({done:,} jobs in {seconds:.1f} s)"),
        (f"enqueue to claim, at {chosen.rate:,} jobs/s", milliseconds(*claim)),
        (f"enqueue to completion, at {chosen.rate:,} jobs/s", milliseconds(*finish)),
        ("", ""),
        ("calls of awa_queue per job", f"{verbs / chosen.jobs:.3f}"),
        ("statements per job, all clients", f"{statements / chosen.jobs:.3f} (BEGIN, COMMIT and the demo's own tables count)"),
        ("WAL per job, all tables", f"{wal / chosen.jobs:,.0f} bytes, orders and results included"),
        ("rows updated or deleted in the four logs", f"{changed:,}"),
        ("dead tuples in the four logs", f"{dead:,} (left by the transactions that rolled back)"),
        ("slots of the ring", f"{events.get('o', 0)} sealed, {events.get('c', 0)} closed"),
    ]


def table(rows):
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"  {name:<{width}}   {value}".rstrip())


def main():
    chosen = arguments()
    begun = time.monotonic()
    print("A private PostgreSQL starts, with awa_queue in shared_preload_libraries ...", flush=True)
    with Cluster(int(os.environ.get("AWA_MAJOR", "15")), "release", preload=True, settings=SETTINGS) as server:
        database = server.database(name="demo")
        database.sql("CREATE EXTENSION pg_stat_statements")
        database.sql(TABLES)
        print("PostgreSQL", database.value("SHOW server_version"), "and awa_queue",
              database.value("SELECT extversion FROM pg_extension WHERE extname = 'awa_queue'"))
        chosen.saved = str(server.dir / "orders.jsonl")
        orders = list(corpus.orders(chosen.jobs))
        corpus.save(chosen.saved, orders)
        files = proof.expect(database.connection, orders)
        print(f"{chosen.jobs:,} lines of {files:,} text files of this machine are the jobs; an order is {corpus.ORDER_LINES} lines.")
        print(f"Of the orders, one in {producer.FAILS_EVERY} rolls back at first and one in {producer.SAVEPOINT_EVERY} rolls back to a"
              f" savepoint;\nof the workers' transactions, one in {worker.BREAKS_EVERY}.")
        ran = run(server, database, chosen)
        print()
        table(report(database, chosen, ran))
        print("\nProof, by SQL over the tables:")
        found = proof.check(database.connection)
        for what, number in found:
            print(f"  {'ok  ' if number == 0 else 'FAIL'}  {number:,} {what}")
        good = all(number == 0 for _, number in found)
        print(f"\n{'Every committed job was completed exactly once.' if good else 'The proof FAILED.'}"
              f" ({time.monotonic() - begun:.0f} s in all)")
        psql = f"{server.bin / 'psql'} -h {server.dir} -U postgres demo"
        if chosen.keep:
            print(f"\nLook around, in another terminal:\n  {psql}\nThen press Enter here: the server ends and its folder is deleted.")
            try:
                sys.stdin.readline()
            except KeyboardInterrupt:
                pass
        else:
            print("\nThe server is gone. To look around in it: tools/with-15 demo/run --keep")
            print("It prints a line for psql; start with: SELECT * FROM awa.queue_stats; SELECT * FROM awa.ring_status;")
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
