"""One session: time, WAL and buffers of a call in the server."""

import peers
from server import buffers, measured, median


def _turns(db, connection, procedure, n, turns):
    """(wall us, CPU us, WAL bytes) per turn."""
    with measured(db, connection.info.backend_pid) as seen:
        connection.execute(f"CALL turns.{procedure}({n}, {turns})" if n else f"CALL turns.{procedure}({turns})")
    return seen.seconds / turns * 1e6, seen.cpu / turns * 1e6, seen.wal / turns


def run(db, scale, rounds, progress):
    """{(peer, what, batch): (wall, cpu, wal bytes)}: medians of interleaved rounds."""
    connection = db.connect(settings={"synchronous_commit": "off"})
    found = {}

    def note(key, value):
        found.setdefault(key, []).append(value)

    for turn in range(rounds + 1):
        for i, peer in enumerate(peers.PEERS):
            progress(f"calls, {peer.name}, round {turn} of {rounds}")
            for n, turns in ((1, 3000), (20, 2000), (1000, 60)):
                turns = max(20, int(turns * scale))
                value = _turns(db, connection, f"enqueue_{i}", n, turns)
                if turn:  # the first round warms up
                    note((peer.name, "enqueue", n), value)
            for n, turns in ((1, 1000), (20, 1000), (100, 300)):
                turns = max(20, int(turns * scale))
                value = _turns(db, connection, f"work_{i}", n, turns)
                if turn:
                    note((peer.name, "claim + complete", n), value)
                if peer.fused:
                    value = _turns(db, connection, f"fused_{i}", n, turns)
                    if turn:
                        note((peer.name, "complete_and_claim", n), value)
        value = _turns(db, connection, "nothing", 0, int(3000 * scale))
        if turn:
            note(("", "COMMIT alone", 0), value)
    connection.close()
    return {key: tuple(median(column) for column in zip(*values)) for key, values in found.items()}


def images(db):
    """WAL bytes and full-page images per job where a checkpoint has just been: what a busy lane pays once per page."""
    connection = db.connect(settings={"synchronous_commit": "off"})
    found = {}
    for what, procedure, n, turns in (("enqueue", "enqueue_0", 20, 1000), ("claim + complete", "work_0", 20, 1000)):
        connection.execute(f"CALL turns.enqueue_0(20, {turns})")
        db.sql("CHECKPOINT")
        with measured(db) as seen:
            connection.execute(f"CALL turns.{procedure}({n}, {turns})")
            connection.execute("SELECT pg_stat_force_next_flush()")
        found[what] = (seen.wal / (n * turns), seen.images, n * turns)
    connection.close()
    return found


def touched(db):
    """{(peer, call, batch): shared buffers per call}."""
    connection = db.connect()
    found = {}
    for peer in peers.PEERS:
        for n in (1, 20, 1000):
            jobs = f"(SELECT jobs FROM turns.payload WHERE n = {n})"
            idle = buffers(connection, "SELECT " + jobs)
            seen = [buffers(connection, peer.enqueue.format(lane=1, jobs=jobs)) - idle for _ in range(12)]
            found[(peer.name, "enqueue", n)] = median(seen[2:])
        for n in (1, 20, 100):
            claims, completes = [], []
            for _ in range(12):
                connection.execute("CREATE TEMP TABLE IF NOT EXISTS held (receipt bigint)")
                connection.execute("TRUNCATE held")
                claims.append(buffers(connection, "SELECT receipt FROM " + peer.claim.format(lane=1, n=n)))
                # EXPLAIN throws the rows away, so what is completed is claimed again, out of the measurement.
                rows = connection.execute("SELECT receipt FROM " + peer.claim.format(lane=1, n=n)).fetchall()
                receipts = "'{" + ",".join(str(r[0]) for r in rows) + "}'"
                completes.append(buffers(connection, "SELECT * FROM " + peer.complete.format(receipts=receipts)))
            found[(peer.name, "claim", n)] = median(claims[2:])
            found[(peer.name, "complete", n)] = median(completes[2:])
    connection.close()
    return found
