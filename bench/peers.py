"""The same operations for awa_queue and for what it is measured against (peers.sql)."""

from collections import namedtuple

# enqueue(lane, jobs), claim(lane, n), complete(receipts): SQL with placeholders; fused where a peer has it.
Peer = namedtuple("Peer", "name enqueue_one enqueue claim complete fused")

PEERS = [
    Peer(
        "awa_queue",
        "SELECT awa.enqueue('q' || {lane}, {job})",
        "SELECT awa.enqueue_batch('q' || {lane}, {jobs})",
        "awa.claim('q' || {lane}, {n})",
        "awa.complete({receipts})",
        "awa.complete_and_claim({receipts}, ARRAY['q' || {lane}], {n})",
    ),
    Peer(
        "plpgsql, same tables",
        "SELECT fold.enqueue({lane}, ARRAY[{job}::jsonb])",
        "SELECT fold.enqueue({lane}, {jobs})",
        "fold.claim({lane}, {n})",
        "fold.complete({receipts})",
        None,
    ),
    Peer(
        "SKIP LOCKED table",
        "SELECT skip.enqueue('q' || {lane}, ARRAY[{job}::jsonb])",
        "SELECT skip.enqueue('q' || {lane}, {jobs})",
        "skip.claim('q' || {lane}, {n})",
        "skip.complete({receipts})",
        None,
    ),
]
AWA = PEERS[0]

# About 100 bytes as jsonb, as in the published figures.
JOB = '{"order": 12345678, "customer": 87654321, "note": "' + "x" * 27 + '"}'


def array_of(n):
    escaped = JOB.replace("\\", "\\\\").replace('"', '\\"')
    return "{" + ",".join([f'"{escaped}"'] * n) + "}"


def loops():
    """Procedures turns.<peer>_<verb>: a plain loop of calls, one COMMIT after each."""
    for i, peer in enumerate(PEERS):
        enqueue_one = peer.enqueue_one.format(lane=1, job="p[1]").replace("SELECT", "PERFORM", 1)
        enqueue = peer.enqueue.format(lane=1, jobs="p").replace("SELECT", "PERFORM", 1)
        claim = peer.claim.format(lane=1, n="n")
        complete = peer.complete.format(receipts="r")
        head = "(n int, turns int) LANGUAGE plpgsql AS $$ DECLARE r bigint[] := '{}'; p jsonb[];"
        load = "SELECT jobs INTO p FROM turns.payload AS q WHERE q.n = $1;"
        yield f"CREATE PROCEDURE turns.enqueue_{i} {head} BEGIN {load} FOR i IN 1..turns LOOP" \
              f" IF n = 1 THEN {enqueue_one}; ELSE {enqueue}; END IF; COMMIT; END LOOP; END $$"
        yield f"CREATE PROCEDURE turns.work_{i} {head} BEGIN FOR i IN 1..turns LOOP" \
              f" SELECT array_agg(receipt) INTO r FROM {claim}; COMMIT; PERFORM count(*) FROM {complete}; COMMIT; END LOOP; END $$"
        if peer.fused:
            fused = peer.fused.format(receipts="r", lane=1, n="n")
            yield f"CREATE PROCEDURE turns.fused_{i} {head} BEGIN FOR i IN 1..turns LOOP" \
                  f" SELECT array_agg(receipt) INTO r FROM {fused}; COMMIT; END LOOP; END $$"
