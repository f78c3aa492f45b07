"""Many clients: pgbench against the server, jobs a second and latencies."""

import glob
import os

import peers
from server import maintain, measured, median, percentile

ENQUEUE_BATCHES = (1, 20, 1000)
WORK_BATCHES = (1, 20, 100)


def pgbench(cluster, db, script, clients, seconds, variables=None):
    """(transactions, seconds, p50 ms, p99 ms)."""
    path = cluster.dir / "script.sql"
    path.write_text(script)
    for old in glob.glob(str(cluster.dir / "times.*")):
        os.remove(old)
    definitions = [text for name, value in (variables or {}).items() for text in ("-D", f"{name}={value}")]
    cluster.program(
        "pgbench", "-h", cluster.dir, "-U", "postgres", "-n", "-M", "prepared", "-c", clients, "-j", min(clients, 2),
        "-T", seconds, "-f", path, "-l", "--log-prefix", cluster.dir / "times", *definitions, db.name,
    )
    times, first, last = [], None, 0.0
    for name in glob.glob(str(cluster.dir / "times.*")):
        with open(name) as file:
            for line in file:
                fields = line.split()
                spent, end = int(fields[2]), int(fields[4]) + int(fields[5]) / 1e6
                times.append(spent / 1000)
                first = end - spent / 1e6 if first is None else min(first, end - spent / 1e6)
                last = max(last, end)
    return len(times), (last - first if times else seconds), median(times), percentile(times, 0.99)


def _lane(lanes):
    return f"\\set lane random(1, {lanes})\n" if lanes > 1 else "\\set lane 1\n"


def enqueue_script(peer, lanes, n):
    if n == 1:
        return _lane(lanes) + peer.enqueue_one.format(lane=":lane", job=":job") + ";\n"
    return _lane(lanes) + peer.enqueue.format(lane=":lane", jobs=":jobs") + ";\n"


def work_script(peer, lanes, n, fused):
    # The rows are counted in the server, for all alike: what is measured is the queue, not pgbench's reading.
    if fused:
        call = peer.fused.format(receipts=":r", lane=":lane", n=n)
        return (
            _lane(lanes)
            + f"SELECT coalesce(array_agg(receipt), '{{}}') AS r, count(args) AS n FROM {call} \\gset\n"
        )
    return (
        _lane(lanes)
        + f"SELECT coalesce(array_agg(receipt), '{{}}') AS r, count(args) AS n FROM {peer.claim.format(lane=':lane', n=n)} \\gset\n"
        + f"SELECT count(*) FROM {peer.complete.format(receipts=':r')};\n"
    )


DONE = {
    "awa_queue": "SELECT coalesce(sum(n), 0) FROM (SELECT sum(n) AS n FROM awa_internal.closures WHERE outcome = 'c'"
                 " UNION ALL SELECT sum(n) FROM awa_internal.queue_totals WHERE outcome = 'c') AS t",
    "plpgsql, same tables": "SELECT coalesce(sum(n), 0) FROM fold.closures",
    "SKIP LOCKED table": "SELECT count(*) FROM skip.jobs WHERE state = 'completed'",
}


# Receipts of claims that were left open: a fused worker that stops still holds its last batch.
OPEN = (
    "SELECT (c.claim_no << 16) | (c.slot::bigint << 10) | i FROM awa_internal.claims AS c"
    " LEFT JOIN awa_internal.closures AS e USING (slot, claim_no), generate_series(0, c.n - 1) AS i WHERE e.claim_no IS NULL"
)


def finish_all(db, lanes):
    """Completes all that is left in awa_queue, so that its slots can be emptied, and lets maintenance do it."""
    connection = db.connect(settings={"synchronous_commit": "off"})
    connection.execute(f"SELECT count(*) FROM awa.complete(ARRAY({OPEN}))")
    queues = "ARRAY[" + ",".join(f"'q{lane}'" for lane in range(1, lanes + 1)) + "]"
    connection.execute(
        "DO $$ DECLARE r bigint[] := '{}'; BEGIN LOOP"
        f" SELECT coalesce(array_agg(receipt), '{{}}') INTO r FROM awa.complete_and_claim(r, {queues}, 1000);"
        " COMMIT; EXIT WHEN r = '{}'; END LOOP; END $$"
    )
    connection.close()
    for _ in range(3):  # seal, close and empty are a step each
        maintain(db)


def _clear(db, peer, lanes):
    """The others begin each cell with empty tables; awa_queue keeps its ring as it is and has its maintenance."""
    if peer is peers.AWA:
        finish_all(db, lanes)
    elif "plpgsql" in peer.name:
        db.sql("TRUNCATE fold.ready, fold.segments, fold.claims, fold.closures")
    else:
        db.sql("TRUNCATE skip.jobs")


def _backlog(db, peer, lanes, jobs):
    connection = db.connect(settings={"synchronous_commit": "off"})
    for lane in range(1, lanes + 1):
        call = peer.enqueue.format(lane=lane, jobs="p").replace("SELECT", "PERFORM", 1)
        connection.execute(
            "DO $$ DECLARE p jsonb[] := (SELECT jobs FROM turns.payload WHERE n = 20); BEGIN"
            f" FOR i IN 1..{max(1, jobs // lanes // 20)} LOOP {call}; IF i % 50 = 0 THEN COMMIT; END IF; END LOOP; END $$"
        )
    if peer.name == "SKIP LOCKED table":
        connection.execute("VACUUM ANALYZE skip.jobs")
    connection.close()


def enqueue(cluster, db, cells, seconds, rounds, progress):
    """{(peer, batch, clients, lanes): (jobs/s, p50, p99, WAL bytes per job, statements per job)}."""
    found = {}
    for turn in range(rounds):
        for n, clients, lanes in cells:
            for peer in peers.PEERS:
                progress(f"enqueue {n}, {clients} clients, {lanes} lanes, {peer.name}, round {turn + 1} of {rounds}")
                _clear(db, peer, lanes)
                variables = {"job": peers.JOB} if n == 1 else {"jobs": peers.array_of(n)}
                with measured(db) as seen:
                    calls, spent, p50, p99 = pgbench(cluster, db, enqueue_script(peer, lanes, n), clients, seconds, variables)
                jobs = calls * n
                found.setdefault((peer.name, n, clients, lanes), []).append(
                    (jobs / spent, p50, p99, seen.wal / jobs, seen.statements / jobs))
    return {key: tuple(median(c) for c in zip(*values)) for key, values in found.items()}


def work(cluster, db, cells, seconds, rounds, backlog, progress):
    """As enqueue, for claim and complete; the key ends with whether both were one statement."""
    found = {}
    for turn in range(rounds):
        for n, clients, lanes in cells:
            for peer in peers.PEERS:
                for fused in (False, True) if peer.fused else (False,):
                    progress(f"work {n}, {clients} clients, {lanes} lanes, {peer.name}{', fused' if fused else ''},"
                             f" round {turn + 1} of {rounds}")
                    _clear(db, peer, lanes)
                    _backlog(db, peer, lanes, min(backlog, int(n * seconds * 6000)))
                    done = db.value(DONE[peer.name])
                    with measured(db) as seen:
                        _, spent, p50, p99 = pgbench(cluster, db, work_script(peer, lanes, n, fused), clients, seconds,
                                                     {"r": "{}"} if fused else None)
                    jobs = int(db.value(DONE[peer.name]) - done) or 1
                    found.setdefault((peer.name, n, clients, lanes, fused), []).append(
                        (jobs / spent, p50, p99, seen.wal / jobs, seen.statements / jobs))
    return {key: tuple(median(c) for c in zip(*values)) for key, values in found.items()}
