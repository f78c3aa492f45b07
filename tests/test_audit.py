"""Audits: many producers and workers at once, and every job accounted for. See audit/load.py."""

import pytest

from audit.load import Load
from audit.servers import server

# Naps where a race has its window: between the slots and entries of a claim's scans, and around a producer's reservation. A
# claim begins anew when the ring changes under it, so the slots must go round more slowly than a claim with its naps takes.
NAPS = (
    "claim.between_slots:1000:6,claim.between_entries:300:30,claim.before_lock:1000:10,"
    "enqueue.slot_chosen:2000:8,enqueue.rows_written:2000:8,close.before_lock:500:10"
)
MIXED, STRICT, ORDERED = 1, 2, 3


@pytest.fixture(scope="module")
def cluster():
    yield from server(flavour="injection")


@pytest.fixture(scope="module")
def preload_cluster():
    yield from server(flavour="injection", preload=True)


@pytest.fixture(scope="module")
def crowded_cluster():
    """Shared memory for two lanes only: the others go by the index and by the sessions' own lists, beside them."""
    yield from server(flavour="injection", preload=True, settings={"awa_queue.shared_lanes": "2"})


@pytest.fixture(scope="module")
def graceful_cluster():
    """Slots that an old snapshot may want are left alone, as by default."""
    yield from server(flavour="release", settings={"awa_queue.snapshot_grace": "21600"})


def check(load, at_least=2000):
    load.settle()
    assert load.faults() == []
    assert load.jobs() >= at_least, "too little happened for an audit"
    assert load.steps.get("sealed", 0) > 3 and load.steps.get("closed", 0) > 3, load.steps
    return load


def test_lanes_with_rollbacks_and_order(any_db):
    """A mixed, a strict and a relaxed lane, slots going round."""
    load = Load(any_db, ['{"priority": 1}', '{"ordering": "strict"}', "{}"])
    load.run(
        8,
        [("savepoints", [MIXED], 4), ("plain", [STRICT, ORDERED], 4), ("own", [MIXED], 1)],
        [("rollbacks", [MIXED, STRICT], 3), ("next", [MIXED, STRICT], 1), ("commits", [ORDERED], 2)],
        cut_off=[MIXED],
        watch=[MIXED],
    )
    check(load)
    assert load.steps.get("emptied", 0) > 3, load.steps
    violations, pairs = load.out_of_order_strict(STRICT)
    assert pairs > 1000 and violations == 0, (violations, pairs)
    violations, overtakes = load.out_of_order_relaxed(ORDERED)
    assert violations == 0, (violations, overtakes)


@pytest.mark.parametrize("kind", ["cluster", "crowded_cluster"])
def test_many_lanes(request, kind):
    """Shards, priorities with ageing, several queues; more lanes than there is room for in shared memory."""
    db = request.getfixturevalue(kind).database()
    load = Load(db, ['{"shards": 4, "aging_interval": "1 s"}', '{"shards": 2}', "{}"])
    load.run(
        6,
        [("priorities", [1, 2, 3], 3), ("savepoints", [1, 2, 3], 2), ("own", [1, 2, 3], 1)],
        [("rollbacks", [1, 2, 3], 3), ("next", [1, 2, 3], 1)],
        cut_off=[1, 2, 3],
        watch=[1, 2, 3],
    )
    check(load, 1000)


def test_one_lane_with_naps(any_db):
    """All on one lane, with naps where races have their windows and slots going round quickly."""
    load = Load(any_db, ['{"priority": 1}'], {"awa_queue.sleep_at": NAPS})
    load.run(
        6,
        [("savepoints", [1], 3), ("own", [1], 1), ("aborting", [1], 1)],
        [("rollbacks", [1], 2), ("commits", [1], 1)],
        rotate=0.2,
        cut_off=[1],
        watch=[1],
    )
    check(load, 500)


def test_tail_of_a_lane(any_db):
    """More workers than jobs: every race at the end of the lane is met."""
    load = Load(any_db, ['{"priority": 1}'], {"awa_queue.sleep_at": NAPS, "synchronous_commit": "off"})
    load.run(
        6, [("singles", [1], 3), ("aborting", [1], 2)], [("all", [1], 1)],
        rotate=0.15, clients=10, worker_clients=6, watch=[1],
    )  # fmt: skip
    check(load, 500)


def test_release_build_with_snapshot_grace(graceful_cluster):
    load = Load(graceful_cluster.database(), ["{}", '{"ordering": "strict"}'])
    load.run(
        5,
        [("savepoints", [1, 2], 3), ("own", [1], 1)],
        [("rollbacks", [1, 2], 3), ("next", [1, 2], 1)],
        cut_off=[1],
        watch=[1],
    )
    check(load)


@pytest.mark.parametrize("mutant", ["own_claims", "segment_in_progress"])
def test_the_account_notices_a_fault(preload_cluster, mutant):
    """With a safety test taken out the account must not add up."""
    settings = {"awa_queue.mutant": mutant, "statement_timeout": "20s"}
    load = Load(preload_cluster.database(), ['{"priority": 1}'], settings)
    load.run(3, [("savepoints", [1], 2), ("own", [1], 1)], [("rollbacks", [1], 3), ("all", [1], 1)], watch=[1])
    load.settle()
    assert load.faults() != []
