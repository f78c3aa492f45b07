"""What the rest of a job's life costs: scheduled jobs, retries by size of the payload, heartbeats, rescue; and how fast
promotion is. One session, times of its own server; promotion is called by hand, so that nothing else is in its figures."""

import argparse
import os
import time
from contextlib import contextmanager
from types import SimpleNamespace

import results
from report import number, table
from server import database, lsn, server

QUEUE = "life"
# 1 MiB is the most that args may have by default, as jsonb.
SIZES = (("100 bytes", 100, 2000, 20), ("10 kB", 10_000, 400, 20), ("1 MiB", 1_048_000, 10, 1))


class Life:
    def __init__(self, db):
        self.db = db
        settings = {"synchronous_commit": "off", "pg_stat_statements.track": "all"}
        self.connection = db.connect(settings=settings)
        policy = '{"max_attempts": 1000, "max_args_bytes": 2000000, "lease": "1 hour", "backoff": {"base": "1 hour", "jitter": 0}}'
        self.connection.execute("SELECT awa.create_queue(%s, %s::jsonb)", [QUEUE, policy])

    def value(self, sql, parameters=None):
        return self.connection.execute(sql, parameters).fetchone()[0]

    @contextmanager
    def per_job(self, jobs):
        """WAL bytes, statements of the client and statements that these ran inside the server, per job; jobs a second."""
        counts = ("SELECT coalesce(sum(calls) FILTER (WHERE toplevel), 0), coalesce(sum(calls) FILTER (WHERE NOT toplevel), 0)"
                  " FROM pg_stat_statements WHERE query !~ 'pg_stat_|wal_lsn'"
                  " AND dbid = (SELECT oid FROM pg_database WHERE datname = current_database())")
        seen = SimpleNamespace()
        before = (lsn(self.db), *self.db.row(counts), time.perf_counter())
        yield seen
        seconds = time.perf_counter() - before[3]
        outer, inner = self.db.row(counts)
        seen.wal = float(lsn(self.db) - before[0]) / jobs
        seen.outer, seen.inner = float(outer - before[1]) / jobs, float(inner - before[2]) / jobs
        seen.rate = jobs / seconds

    def payload(self, size):
        """args of about so many bytes as jsonb, which compression makes little smaller."""
        return self.value(
            "SELECT jsonb_build_object('p', left(string_agg(encode(sha512((i || random()::text)::bytea), 'base64'), ''), %s))::text"
            " FROM generate_series(1, %s) AS i", [size - 20, size // 88 + 1])

    def enqueue(self, jobs, args, batch, run_at=None):
        with self.per_job(jobs) as seen:
            for _ in range(jobs // batch):
                self.connection.execute("SELECT cardinality(awa.enqueue_batch(%s, array_fill(%s::jsonb, ARRAY[%s]), run_at => %s))",
                                        [QUEUE, args, batch, run_at])
        return seen

    def deferred(self):
        return self.value("SELECT count(*) FROM awa_internal.deferred")

    def promote(self, jobs, due):
        """Waits for the time `due` of all deferred jobs, and promotes them."""
        assert self.deferred() == jobs, "the machine was too slow: some jobs were due before all were there"
        time.sleep(max(0.0, self.value("SELECT extract(epoch FROM %s::timestamptz - clock_timestamp())::float8", [due]) + 0.1))
        with self.per_job(jobs) as seen:
            self.connection.execute("CALL awa.maintain()")
        assert self.deferred() == 0, "not all were promoted"
        return seen

    def soon(self, seconds):
        return self.value("SELECT clock_timestamp() + make_interval(secs => %s)", [seconds])

    def claim(self, batch, lease=None):
        return self.value("SELECT array_agg(receipt) FROM awa.claim(%s, %s, lease => %s::interval)", [QUEUE, batch, lease])

    def finish_all(self):
        receipts = []
        while receipts is not None:
            receipts = self.value("SELECT array_agg(receipt) FROM awa.complete_and_claim(%s::bigint[], ARRAY[%s], 1000)", [receipts, QUEUE])
        self.connection.execute("CALL awa.maintain()")


def scheduled(life, progress):
    """[(what, seen)]"""
    args, rows = life.payload(100), []
    for batch in (1, 20):
        progress(f"scheduled jobs, {batch} a call")
        jobs = 1000 * (1 if batch == 1 else 4)
        rows.append((f"enqueue of {batch}, ready at once", life.enqueue(jobs, args, batch)))
        life.finish_all()
        due = life.soon(15)
        rows.append((f"enqueue of {batch}, scheduled", life.enqueue(jobs, args, batch, due)))
        rows.append(("its promotion", life.promote(jobs, due)))
        life.finish_all()
    return rows


def promotion(life, jobs, progress):
    progress(f"promotion of {jobs:,} jobs")
    # Time enough to put them in on a slow machine.
    due = life.soon(10 + jobs / 2500)
    life.enqueue(jobs, life.payload(100), 1000, due)
    seen = life.promote(jobs, due)
    life.finish_all()
    return seen


def retries(life, progress):
    """[(size, enqueue, fail, promotion)]"""
    rows = []
    for name, size, jobs, batch in SIZES:
        progress(f"retries of {name}")
        put_in = life.enqueue(jobs, life.payload(size), batch)
        held = [life.claim(batch) for _ in range(jobs // batch)]
        pause = 15
        due = life.soon(pause + 1)
        with life.per_job(jobs) as fail:
            for receipts in held:
                life.connection.execute(
                    "SELECT count(*) FROM awa.fail(%s, 'connection refused by the other side', retry_in => make_interval(secs => %s))",
                    [receipts, pause])
        again = life.promote(jobs, max(due, life.value("SELECT max(run_at) FROM awa_internal.deferred")))
        rows.append((name, put_in, fail, again))
        life.finish_all()
    return rows


def heartbeats(life, progress):
    """[(what, seen)]"""
    progress("heartbeats")
    rows, turns = [], 300
    for batch in (1, 20):
        life.enqueue(batch * 50, life.payload(100), batch)
        held = [life.claim(batch) for _ in range(50)]
        for what, times in (("the first of an attempt", 1), ("each further one", turns // 50)):
            with life.per_job(batch * 50 * times) as seen:
                for _ in range(times):
                    for receipts in held:
                        life.connection.execute("SELECT count(*) FROM awa.heartbeat(%s)", [receipts])
            rows.append((f"heartbeat of {batch}, {what}", seen))
        for receipts in held:
            life.connection.execute("SELECT count(*) FROM awa.complete(%s)", [receipts])
        life.finish_all()
    return rows


def rescue(life, jobs, progress):
    progress(f"rescue of {jobs:,} jobs")
    life.enqueue(jobs, life.payload(100), 1000)
    for _ in range(jobs // 20):
        life.claim(20, "1 second")
    time.sleep(1.5)
    with life.per_job(jobs) as seen:
        life.connection.execute("CALL awa.maintain()")
    assert life.value("SELECT rescued_total FROM awa.queue_stats WHERE queue = %s", [QUEUE]) == jobs, "not all were rescued"
    return seen


def cost(seen):
    return seen.wal, f"{seen.outer:.3f}", f"{seen.inner:.3f}"


def tables(found):
    head = ["", "WAL bytes per job", "statements of clients per job", "statements inside per job"]
    rows = [(what, *cost(seen)) for what, seen in [*found["scheduled"], *found["heartbeats"]]]
    rows.append((f"rescue, {found['rescued jobs']:,} jobs whose leases are over", *cost(found["rescue"])))
    sizes = []
    for name, put_in, fail, again in found["retries"]:
        sizes.append((name, put_in.wal, fail.wal, again.wal, fail.wal + again.wal, f"x {(fail.wal + again.wal) / put_in.wal:.1f}",
                      f"{fail.outer + again.outer:.3f}", f"{fail.inner + again.inner:.3f}"))
    return "\n".join([
        "## Scheduled jobs, retries, heartbeats, rescue\n",
        f"{found['where']}. {found['note']} One session, commits included, args of 100 bytes where no size is given. Promotion and rescue are one"
        " `CALL awa.maintain()`, with whatever else it found to do. Statements inside are those that the extension runs on its own"
        " tables.\n",
        table(head, rows),
        "A retry, by size of the args (random text). `fail` writes the body into the table of deferred jobs, promotion writes it into"
        " the ring again:\n",
        table(["args", "WAL of its enqueue", "of fail", "of promotion", "of a retry in all", "against the enqueue",
               "statements of clients", "statements inside"], sizes),
        f"Promotion: {number(found['promotion'].rate)} jobs/s with {found['promoted jobs']:,} due at once, {number(found['promotion'].wal)}"
        f" bytes of WAL a job. Rescue: {number(found['rescue'].rate)} jobs/s, claimed by 20.\n",
    ])


def main(arguments):
    parser = argparse.ArgumentParser(prog="bench/run life", description=__doc__)
    parser.add_argument("--jobs", type=int, default=100_000, help="jobs that are due at once (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="put the tables into bench/RESULTS.md")
    parser.add_argument("--note", default="", help="a sentence about the machine")
    chosen = parser.parse_args(arguments)
    begun = time.monotonic()

    def progress(text):
        print(f"{time.monotonic() - begun:6.1f} s  {text}", flush=True)

    with server(int(os.environ.get("AWA_MAJOR", "15"))) as cluster:
        db = database(cluster)
        life = Life(db)
        version = db.value("SELECT extversion FROM pg_extension WHERE extname = 'awa_queue'")
        found = {
            "note": chosen.note,
            "where": f"awa_queue {version} on PostgreSQL {db.value('SHOW server_version').split(' ')[0]}, {time.strftime('%Y-%m-%d')},"
                     f" {os.cpu_count()} cores, preloaded",
            "scheduled": scheduled(life, progress),
            "heartbeats": heartbeats(life, progress),
            "retries": retries(life, progress),
            "promotion": promotion(life, chosen.jobs, progress),
            "promoted jobs": chosen.jobs,
            "rescue": rescue(life, 10_000, progress),
            "rescued jobs": 10_000,
        }
    text = tables(found)
    print("\n" + text)
    if chosen.write:
        results.put("life", text)
    return 0
