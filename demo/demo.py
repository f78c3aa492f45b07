"""Starts a private server, puts some 200,000 real jobs through a queue, lets some fail, kills a worker, and proves that
each job ended exactly once."""

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import corpus
import life
import producer
import proof
import worker
from harness import Cluster
from psycopg.types.json import Jsonb

TABLES = """
CREATE TABLE orders (order_no int PRIMARY KEY, file text NOT NULL, stream boolean NOT NULL, job_ids bigint[] NOT NULL,
                     fails smallint[] NOT NULL, not_before timestamptz);
CREATE TABLE rolled_back (job_id bigint NOT NULL, why text NOT NULL);
-- No unique key on job_id, on purpose: a job that is done twice shall be seen, not refused.
CREATE TABLE results (job_id bigint, attempt int, file text, line int, words int, letters int,
                      enqueued_at timestamptz, claimed_at timestamptz, finished_at timestamptz);
CREATE TABLE failures (job_id bigint, attempt int, state text);
CREATE TABLE expected (file text PRIMARY KEY, lines bigint, words bigint, letters bigint);
-- What handlers did outside of the database, loaded at the end.
CREATE TABLE handled (job_id bigint, attempt int);
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
    # The worker in the server promotes, rescues and turns the ring; the harness has it off for its tests.
    "awa_queue.worker": "on",
    # Small slots, so that the ring turns while one looks.
    "awa_queue.slot_size": "8MB",
}

# The worker that is killed goes when this share of the jobs is done.
KILL_AT = 0.4
# Nothing happens for longer than a lease, a back-off and a slow machine explain.
STUCK = 60.0


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
        done, made = sum(shared.ended), sum(shared.enqueued)
        text = f"{now:5.1f} s  enqueued {made:>7,}  ended {done:>7,} of {self.total:,}"
        if self.live:
            width = max(10, min(40, shutil.get_terminal_size().columns - len(text) - 5))
            filled = width * done // self.total
            ahead = max(0, width * made // self.total - filled)
            print(f"\r[{'#' * filled}{'-' * ahead}{' ' * (width - filled - ahead)}] {text}", end="\n" if end else "", flush=True)
        else:
            print(text, flush=True)

    def say(self, text):
        print(f"\n{text}" if self.live else text, flush=True)


class Crew:
    """The processes, and the worker among them that is killed."""

    def __init__(self, chosen, conninfo, folder, can_wait):
        self.context = multiprocessing.get_context("spawn")
        self.chosen, self.conninfo, self.folder, self.can_wait = chosen, conninfo, folder, can_wait
        self.killed_at = None
        self.processes = []
        workers = chosen.workers + 1  # the one that comes for the killed one
        array = self.context.RawArray
        self.shared = SimpleNamespace(
            **{name: self.context.Event() for name in ("ready", "stream", "over", "trap", "caught")},
            # One number per process, so that none waits for another to count.
            **{name: array("q", chosen.producers) for name in ("enqueued", "rolled_back")},
            **{name: array("q", workers) for name in ("ended", "redone", "stale")},
            held_when_killed=self.context.RawValue("q", 0),
        )
        for part in range(chosen.producers):
            self._start(f"producer {part}", producer.run, conninfo, part, chosen.producers, chosen.saved, chosen.jobs,
                        chosen.streamed, chosen.rate)
        for number in range(chosen.workers):
            self._worker(number)
        self.doomed = self.processes[-1]

    def _start(self, name, what, *settings):
        process = self.context.Process(target=what, args=(*settings, self.shared), name=name, daemon=True)
        process.start()
        self.processes.append(process)

    def outside(self, number):
        return self.folder / f"handled-{number}.txt"

    def _worker(self, number):
        self._start(f"worker {number}", worker.run, self.conninfo, number, str(self.outside(number)), self.can_wait,
                    number == self.chosen.workers - 1)

    def kill(self):
        """SIGKILL for the worker that waits in the middle of its transaction; a new one takes its place."""
        os.kill(self.doomed.pid, signal.SIGKILL)
        self.doomed.join()
        self.processes.remove(self.doomed)
        self._worker(self.chosen.workers)

    def watch(self, until, tick):
        """Waits for a condition; ends the demo when a process has failed or nothing moves any more."""
        seen, since = None, time.monotonic()
        while not until():
            for process in self.processes:
                if process.exitcode not in (None, 0):
                    raise SystemExit(f"demo: the {process.name} failed")
            tick()
            moved = (sum(self.shared.ended), sum(self.shared.enqueued))
            if moved != seen:
                seen, since = moved, time.monotonic()
            elif time.monotonic() - since > STUCK:
                raise SystemExit(f"demo: nothing has moved for {STUCK:.0f} s, {moved[0]:,} jobs have ended")
            time.sleep(0.05)

    def end(self):
        for process in self.processes:
            if process.is_alive():
                process.terminate()
        for process in self.processes:
            process.join(10)


def run(server, database, chosen):
    can_wait = database.value("SELECT awa.has_feature('wait')")
    crew = Crew(chosen, server.conninfo(database.name), Path(chosen.saved).parent, can_wait)
    shared, clients = crew.shared, len(crew.processes)
    try:
        crew.watch(lambda: database.value("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'demo %%'")
                   == clients, lambda: None)
        database.sql("CHECKPOINT")
        database.sql("SELECT pg_stat_statements_reset()")
        wal = database.value("SELECT pg_current_wal_insert_lsn()")
        print(f"\n{chosen.producers} producers and {chosen.workers} workers start.")
        progress = Progress(chosen.jobs)
        shared.ready.set()

        def tick():
            progress.show(shared)
            if sum(shared.ended) >= KILL_AT * chosen.jobs:
                shared.trap.set()
            if shared.caught.is_set() and crew.killed_at is None:
                crew.killed_at = database.value("SELECT clock_timestamp()")
                progress.say(f"  kill -9 of {crew.doomed.name} (pid {crew.doomed.pid}), in the middle of a transaction, with"
                             f" {shared.held_when_killed.value} jobs; a new worker starts.")
                crew.kill()

        first = chosen.jobs - chosen.streamed
        placed = shared.enqueued
        # An order that straddles the border counts to the first part, and some jobs wait for their time: hence "about".
        crew.watch(lambda: sum(placed) >= first - 50 and sum(shared.ended) >= 0.97 * first, tick)
        backlog = (sum(shared.ended), time.monotonic() - progress.begun)
        shared.stream.set()
        crew.watch(lambda: sum(shared.ended) >= chosen.jobs, tick)
        shared.over.set()
        crew.watch(lambda: all(process.exitcode is not None for process in crew.processes), tick)
        crew.watch(lambda: True, tick)
        progress.show(shared, end=True)
    finally:
        crew.end()
    proof.load(database.connection, [path for path in map(crew.outside, range(chosen.workers + 1)) if path.exists()])
    database.sql("ANALYZE")
    return SimpleNamespace(shared=shared, backlog=backlog, wal=wal, killed_at=crew.killed_at)


# Of jobs that were ready at once and done at their first attempt.
LATENCY = """
SELECT 1000 * percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM {0} - enqueued_at)),
       1000 * percentile_cont(0.99) WITHIN GROUP (ORDER BY extract(epoch FROM {0} - enqueued_at))
FROM results JOIN placed USING (job_id) WHERE stream AND not_before IS NULL AND attempt = 1
"""

# How long after its time a scheduled job of the stream was taken.
LATE = """
SELECT 1000 * percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM claimed_at - not_before)),
       1000 * percentile_cont(0.99) WITHIN GROUP (ORDER BY extract(epoch FROM claimed_at - not_before))
FROM results JOIN placed USING (job_id) WHERE stream AND not_before IS NOT NULL AND attempt = 1
"""
# How long after the kill the last job of the killed worker was taken by another.
BACK = """
SELECT max(extract(epoch FROM claimed_at - %s)) FROM results WHERE job_id IN (SELECT job_id FROM unfinished)
"""


def milliseconds(p50, p99):
    # Of a few jobs, none may be part of the stream.
    return "-" if p50 is None else f"p50 {p50:.1f} ms, p99 {p99:.1f} ms"


def seconds(value):
    return "-" if value is None else f"{value:.1f} s"


def report(database, chosen, ran):
    shared = ran.shared
    wal = database.value("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), %s)", [ran.wal])
    calls = database.sql(
        "SELECT CASE WHEN query LIKE '%%complete_and_claim%%' OR query LIKE '%%INTO results%%' OR query LIKE '%%awa.fail%%' THEN 'w'"
        " WHEN query LIKE '%%enqueue_batch%%' OR query LIKE '%%INTO orders%%' OR query LIKE '%%rolled_back%%' THEN 'p'"
        " WHEN query ~ '^(BEGIN|COMMIT|ROLLBACK|SAVEPOINT|RELEASE)' THEN 't' END AS who, sum(calls)"
        " FROM pg_stat_statements WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())"
        " GROUP BY 1"
    )
    statements = sum(n for who, n in calls if who)
    verbs = database.value(
        "SELECT sum(calls) FROM pg_stat_statements WHERE query ~ 'awa\\.(enqueue_batch|complete_and_claim|fail)'")
    # Counters of the last second reach the statistics when a session is idle or ends; all of them have ended.
    dead, changed = database.row(
        "SELECT sum(pg_stat_get_dead_tuples(c.oid)), sum(pg_stat_get_tuples_updated(c.oid) + pg_stat_get_tuples_deleted(c.oid))"
        " FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid WHERE inhparent IN ('awa_internal.ready'::regclass,"
        " 'awa_internal.segments'::regclass, 'awa_internal.claims'::regclass, 'awa_internal.closures'::regclass)"
    )
    used, closed = database.row(
        "SELECT count(*) FILTER (WHERE state <> 'empty'), count(*) FILTER (WHERE state = 'closed') FROM awa.ring_status")
    claim, finish = (database.row(LATENCY.format(column)) for column in ("claimed_at", "finished_at"))
    late = database.row(LATE)
    done, took = ran.backlog
    words, files = database.row("SELECT sum(words), count(DISTINCT file) FROM results")
    placed, put_off = database.row("SELECT count(*), count(not_before) FROM placed")
    refused, used_up = database.row(
        "SELECT count(*) FILTER (WHERE fails = %s), count(*) FILTER (WHERE fails = %s)"
        " FROM awa.dead_letters JOIN placed USING (job_id)", [life.NEVER_AGAIN, life.ALWAYS])
    retries = database.value("SELECT count(*) FROM failures WHERE state = 'retryable'")
    rescued, retried_jobs = database.row(
        "SELECT (SELECT rescued_total FROM awa.queue_stats WHERE queue = 'lines'),"
        " (SELECT count(DISTINCT job_id) FROM failures WHERE state = 'retryable')")
    lost = database.value(proof.LOST)
    lease = life.SETTINGS["lease"]
    rows = [
        ("enqueued", f"{placed:,} jobs of committed transactions"),
        ("  scheduled", f"{put_off:,} of them, for {life.LATER:.0f} s later"),
        ("  rolled back", f"{sum(shared.rolled_back):,} more jobs, with their transaction or savepoint: no worker saw them"),
        ("completed", f"{database.value('SELECT count(*) FROM results'):,}"),
        ("failed for good", f"{refused + used_up:,}, kept in awa.dead_letters: {used_up:,} after {life.SETTINGS['max_attempts']} attempts,"
                            f" {refused:,} refused by their handler"),
        ("lost", f"{lost:,}"),
        ("", ""),
        ("retried", f"{retries:,} times after a failure, {retried_jobs:,} jobs; they came back after a growing pause"),
        ("rescued", f"{rescued:,} held by the killed worker, given to others when their lease ({lease}) was over"),
    ]
    if rescued:
        back = database.value(BACK, [ran.killed_at]) if ran.killed_at else None
        rows += [("", f"(the last one {seconds(back)} after the kill: a pause, and then its turn behind what had waited)."),
                 ("", "Their handlers ran twice: a queue delivers at least once. What the first run had stored was"),
                 ("", "rolled back with it, so each result is there once.")]
    rows += [("done again", f"{sum(shared.redone):,}, because their worker's transaction rolled back after an error")]
    if sum(shared.stale):
        rows += [("came too late", f"{sum(shared.stale):,} batches whose lease was over before their worker was; rolled back")]
    rows += [
        ("words counted", f"{words:,} in {files:,} files"),
        ("", ""),
        ("through the queue, at full speed", f"{done / took:,.0f} jobs/s ({done:,} jobs in {took:.1f} s)"),
        (f"enqueue to claim, at {chosen.rate:,} jobs/s", milliseconds(*claim)),
        (f"enqueue to completion, at {chosen.rate:,} jobs/s", milliseconds(*finish)),
        (f"scheduled time to claim, at {chosen.rate:,} jobs/s", milliseconds(*late)),
        ("", ""),
        ("calls of awa_queue per job", f"{verbs / chosen.jobs:.3f}"),
        ("statements per job, all clients", f"{statements / chosen.jobs:.3f} (BEGIN, COMMIT and the demo's own tables count)"),
        ("WAL per job, all tables", f"{wal / chosen.jobs:,.0f} bytes, orders and results included"),
        ("rows updated or deleted in the four logs", f"{changed:,}"),
        ("dead tuples in the four logs", f"{dead:,} (left by the transactions that rolled back)"),
        ("slots of the ring", f"{used:,} used; {closed:,} were full and closed by the worker in the server"),
    ]
    return rows


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
        database.sql(proof.VIEWS)
        database.sql("SELECT awa.create_queue(%s, %s)", [life.QUEUE, Jsonb(life.SETTINGS)])
        print("PostgreSQL", database.value("SHOW server_version"), "and awa_queue",
              database.value("SELECT extversion FROM pg_extension WHERE extname = 'awa_queue'"))
        chosen.saved = str(server.dir / "orders.jsonl")
        orders = list(corpus.orders(chosen.jobs))
        corpus.save(chosen.saved, orders)
        files = proof.expect(database.connection, orders)
        print(f"{chosen.jobs:,} lines of {files:,} text files of this machine are the jobs; an order is {corpus.ORDER_LINES} lines.")
        print(f"Of the orders, one in {producer.FAILS_EVERY} rolls back at first, one in {producer.SAVEPOINT_EVERY} rolls back to a"
              f" savepoint,\nand one in {life.LATER_EVERY} is scheduled for {life.LATER:.0f} s later; of the workers' transactions, one in"
              f" {worker.BREAKS_EVERY} rolls back.\nOf the jobs, one in {life.FAILS_ONCE} fails once, one in {life.FAILS_TWICE} twice, one in"
              f" {life.FAILS_ALWAYS:,} always, and one in {life.REFUSED:,} is refused for good.")
        ran = run(server, database, chosen)
        print()
        table(report(database, chosen, ran))
        print("\nProof, by SQL over the tables:")
        found = proof.check(database.connection)
        for what, number in found:
            print(f"  {'ok  ' if number == 0 else 'FAIL'}  {number:,} {what}")
        good = all(number == 0 for _, number in found)
        print(f"\n{'Every committed job ended exactly once: completed, or failed for good as it had to. None was lost.' if good else 'The proof FAILED.'}"
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
