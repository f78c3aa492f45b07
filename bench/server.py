"""The server under measurement, and its counters."""

import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import peers
from harness import Cluster

SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "1h",
    "max_connections": "120",
    "shared_preload_libraries": "awa_queue,pg_stat_statements",
    "pg_stat_statements.track": "top",
}


@contextmanager
def server(major):
    with Cluster(major, "release", preload=True, settings=SETTINGS) as cluster:
        yield cluster


def database(cluster):
    made = cluster.database()
    made.sql("CREATE EXTENSION pg_stat_statements")
    cluster.psql((Path(__file__).parent / "peers.sql").read_text(), made.name)
    # Beforehand, so that no producer waits for another that just creates its queue.
    made.sql("SELECT awa.create_queue('q' || i) FROM generate_series(1, 8) AS i")
    size = made.value("SELECT pg_column_size(%s::jsonb)", [peers.JOB])
    assert 98 <= size <= 102, f"a job has {size} bytes"
    for n in (1, 20, 100, 1000):
        made.sql("INSERT INTO turns.payload VALUES (%s, %s::text::jsonb[])", [n, peers.array_of(n)])
    for procedure in peers.loops():
        made.sql(procedure)
    return made


def maintain(db):
    """As cron would; the slot that is full is sealed, what is finished and pressed for goes."""
    db.sql("CALL awa.maintain()")


def lsn(db):
    return db.value("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')")


def cpu_seconds(pid):
    # In nanoseconds, where /proc/PID/stat counts hundredths of a second.
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


@contextmanager
def measured(db, pid=None):
    """WAL bytes and full-page images of the database's server, statements of its clients, CPU of one backend."""
    seen = SimpleNamespace()
    images = "SELECT wal_fpi FROM pg_stat_wal"
    statements = "SELECT coalesce(sum(calls), 0) FROM pg_stat_statements WHERE dbid = (SELECT oid FROM pg_database" \
                 " WHERE datname = current_database()) AND query !~ 'pg_stat_|wal_lsn'"
    before = (lsn(db), db.value(images), db.value(statements), cpu_seconds(pid) if pid else 0, time.perf_counter())
    yield seen
    seen.seconds = time.perf_counter() - before[4]
    seen.cpu = (cpu_seconds(pid) if pid else 0) - before[3]
    seen.wal = int(lsn(db) - before[0])
    # A backend hands its WAL counters in when it has been idle for a second or ends, so they may be late.
    seen.images = int(db.value(images) - before[1])
    seen.statements = int(db.value(statements) - before[2])


LOGS = ("ready", "segments", "claims", "closures")


def dead_tuples(db):
    return int(db.value(
        "SELECT sum(pg_stat_get_dead_tuples(inhrelid)) FROM pg_inherits WHERE inhparent = ANY (%s::regclass[])",
        [[f"awa_internal.{log}" for log in LOGS]],
    ))


def buffers(connection, sql):
    """Shared buffers that one statement touched."""
    plan = connection.execute("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + sql).fetchone()[0][0]["Plan"]
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")


def median(values):
    return percentile(values, 0.5)
