"""Faults of the design's prototypes and of this engine's first versions, each as a directed test that runs without preload and
with it."""

import os
import shutil

import psycopg
import pytest

from audit import scenarios
from audit.play import Gates, Play
from audit.servers import server
from harness import wait_until


@pytest.fixture(scope="module")
def cluster():
    yield from server(flavour="injection")


@pytest.fixture(scope="module")
def preload_cluster():
    yield from server(flavour="injection", preload=True)


SCENARIOS = [
    scenarios.own_claims_rolled_back,
    scenarios.own_segments_rolled_back,
    scenarios.own_jobs_of_a_savepoint,
    scenarios.own_jobs_in_one_statement,
    scenarios.segment_in_progress,
    scenarios.claim_in_progress,
    scenarios.numbers_of_an_aborted_tail,
    scenarios.numbers_given_out_again,
    scenarios.full_list_beside_a_tail,
    scenarios.claim_across_a_border,
    scenarios.claim_across_the_end_of_a_first_walk,
    scenarios.hole_before_a_long_claim,
    scenarios.second_look,
    scenarios.seal_before_the_reservation,
    scenarios.seal_before_the_claim,
    scenarios.slot_gone_before_its_tables_are_locked,
    scenarios.caches_from_before_the_emptying,
    scenarios.older_segment_open_at_the_emptying,
    scenarios.steps_rolled_back,
    scenarios.all_steps_in_one_transaction,
    scenarios.producer_open_through_rotations,
    scenarios.errors_in_exception_blocks,
    scenarios.queue_made_and_rolled_back,
    scenarios.released_in_rolled_back_transactions,
    scenarios.hundreds_of_savepoints,
    scenarios.ring_seen_by_a_failed_statement,
    scenarios.seal_during_a_first_look,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_scenario(any_db, scenario):
    assert scenario(any_db) == []


# ------------------------------------------------------------------------------------------------ a call that is ended

POINTS = {
    "enqueue.slot_chosen": "enqueue",
    "enqueue.rows_written": "enqueue",
    "enqueue.reserved": "enqueue",
    "claim.before_lock": "claim",
    "claim.between_slots": "claim",
    "claim.between_entries": "claim",
    "close.before_lock": "complete",
    "close.locked": "complete",
}


@pytest.mark.parametrize("end", ["cancel", "timeout", "terminate"])
@pytest.mark.parametrize("inside", ["alone", "savepoint"])
def test_a_call_ended_at_each_of_its_steps(any_db, end, inside):
    """Whatever a call held or had noted is given back: the same session and others go on, and no job is lost or doubled."""
    play = Play(any_db)
    other = play.part()
    other.value("SELECT awa_internal.seal()")  # two live slots
    expected, taken = set(), {}
    for point, verb in POINTS.items():
        victim = play.part()
        expected |= set(other.enqueue(3))
        expected |= set(other.enqueue(2))
        mine = victim.claim(2)
        call = {
            "enqueue": play.enqueue_call(4),
            "claim": play.claim_call(10),
            "complete": ("SELECT * FROM awa.complete(%s)", [list(mine.values())]),
        }[verb]
        if inside == "savepoint":
            victim.begin()
            kept = victim.enqueue(2)
            victim.savepoint()
        victim.at_gate(point)
        with Gates(any_db) as gates:
            if end == "timeout":
                victim.sql("SET statement_timeout = '300ms'")
            pending = victim.session.start(*call)
            if end != "timeout":
                play.db.wait_waiting(victim.pid, "advisory")
                victim.session.cancel() if end == "cancel" else play.db.sql(
                    "SELECT pg_terminate_backend(%s)", [victim.pid]
                )
            error = pending.error()
            assert isinstance(error, (psycopg.errors.QueryCanceled, psycopg.errors.AdminShutdown)), error
            gates.open()
        if end == "terminate":
            wait_until(lambda: play.db.activity(victim.pid) is None)  # noqa: B023
            victim = play.part()
        elif inside == "savepoint":
            victim.rollback_to()
            victim.sql("SET LOCAL awa_queue.pause_at = ''; SET LOCAL statement_timeout = '30s'")
            expected |= set(kept) | set(victim.enqueue(1))
            taken |= victim.claim(1)
            victim.commit()
            victim.sql("RESET ALL")
        else:
            victim.sql("RESET ALL")
        expected |= set(victim.enqueue(1))
        # What could not be completed is still held by its receipts; they can be completed by anybody, once.
        other.complete(mine)
        victim.sql("SELECT pg_sleep(0.06)")
        more = {**other.claim(3), **victim.claim()}
        other.complete(more)
        assert not set(more) & set(taken), point
        taken |= mine | more
        left = expected - set(taken)
        assert not left and set(taken) <= expected, (point, left, set(taken) - expected)
    assert other.claim() == {}
    locks = any_db.sql("SELECT objsubid FROM pg_locks WHERE locktype = 'advisory' AND objsubid > 2")
    assert locks == []


def test_lock_timeout(any_db):
    """A wait that is given up changes nothing."""
    play = Play(any_db)
    holder, worker = play.parts(2)
    jobs = holder.enqueue(4)
    held = holder.claim(2)
    holder.begin()
    holder.complete(held)
    worker.sql("SET lock_timeout = '100ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        worker.complete(held)
    holder.rollback()
    worker.complete(held)
    assert holder.sql("SELECT state, changed FROM awa.complete(%s)", [list(held.values())]) == [("completed", False)] * 2
    # A claim that waits for another one's short lock, and a producer for another one's.
    worker.value("SELECT awa_internal.seal()")
    for point, verb in (("claim.between_slots", play.claim_call(1)), ("enqueue.reserved", play.enqueue_call(1))):
        with Gates(any_db) as gates:
            holder.at_gate(point)
            pending = gates.hold(holder, *verb)
            with pytest.raises(psycopg.errors.LockNotAvailable):
                worker.sql(*verb)
            gates.open()
            pending.result()
        holder.at_gate()
    made = worker.enqueue(1)
    assert len(made) == 1
    rest = worker.claim()
    ids = {job for (job,) in any_db.sql("SELECT job_id FROM awa.jobs WHERE state = 'running'")}
    assert set(rest) <= ids and len(ids) == len(jobs) - 2 + 1 + 1


@pytest.mark.parametrize("end", ["cancel", "terminate"])
def test_an_emptying_that_is_ended(any_db, end):
    """All of it is undone, and the sessions that waited for it or came after find the slot as it was."""
    play = Play(any_db)
    keeper, worker, producer = play.parts(3)
    jobs = producer.enqueue(4)
    held = worker.claim()
    worker.complete(held)
    keeper.value("SELECT awa_internal.seal()")
    keeper.value("SELECT awa_internal.close(0)")
    jobs = producer.enqueue(3)
    with Gates(any_db) as gates:
        keeper.at_gate("maintain.emptied")
        pending = gates.hold(keeper, 'SELECT awa_internal."empty"(0, true)')
        repeated = worker.session.start_waiting("SELECT state FROM awa.complete(%s)", [list(held.values())])
        made = producer.session.start(*play.enqueue_call(2))
        if end == "cancel":
            keeper.session.cancel()
        else:
            any_db.sql("SELECT pg_terminate_backend(%s)", [keeper.pid])
        pending.error()
        gates.open()
    assert repeated.result() == [("completed",)] * 4
    jobs += made.result()[0][0]
    assert set(worker.claim()) == set(jobs)
    assert producer.value('SELECT awa_internal."empty"(0, true)') == "emptied"
    assert worker.sql("SELECT state FROM awa.complete(%s)", [list(held.values())]) == [("stale",)] * 4


# ------------------------------------------------------------------------------------------------ transactions of all kinds


@pytest.mark.parametrize("preload", [False, True], ids=["plain", "preload"])
def test_prepared_transactions_outlive_a_restart(make_cluster, preload):
    cluster = make_cluster(flavour="injection", preload=preload, settings={"awa_queue.snapshot_grace": "0"}).start()
    db = cluster.database()
    play = Play(db)
    a, b, worker = play.parts(3)
    jobs = a.enqueue(12)
    held = worker.claim(4)
    plans = {}
    for name in ("kept", "dropped"):
        a.begin()
        made = a.enqueue(3)
        claimed = a.claim(5)  # of the twelve, then of its own
        mine = dict(list(held.items())[:2]) if name == "kept" else dict(list(held.items())[2:])
        a.complete(mine)
        a.sql(f"PREPARE TRANSACTION '{name}'")
        plans[name] = (made, claimed, mine)
    soon = b.enqueue(2)
    assert set(worker.claim()) == set(soon)
    with pytest.raises(psycopg.errors.FeatureNotSupported):
        b.begin()
        b.sql("SELECT awa_internal.seal()")
        b.sql("PREPARE TRANSACTION 'never'")
    db.connection.close()
    cluster.restart()
    play = Play(db, queue="q2")
    play.queue = "q"
    a, b, worker = play.parts(3)
    assert worker.claim() == {}
    late = b.enqueue(2)
    assert set(b.claim()) == set(late)
    b.sql("COMMIT PREPARED 'kept'")
    b.sql("ROLLBACK PREPARED 'dropped'")
    made, claimed, mine = plans["kept"]
    free = (set(jobs) | set(made)) - set(held) - set(claimed)
    worker.sql("SELECT pg_sleep(0.06)")
    taken = worker.claim()
    assert set(taken) == free
    assert worker.sql("SELECT changed FROM awa.complete(%s)", [list(mine.values())]) == [(False,)] * 2
    worker.complete(plans["dropped"][2])
    worker.complete(claimed)
    worker.complete(taken)
    assert a.claim() == b.claim() == {}
    assert set(b.enqueue(3)) == set(a.claim())


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_isolation_levels(any_db, level):
    """A claim sees what is committed now, not what its transaction's snapshot shows, and gets nothing that is taken."""
    play = Play(any_db)
    producer, a, b = play.parts(3)
    first = producer.enqueue(4)
    any_db.sql("CREATE TABLE other AS SELECT 1 AS n")
    for part in (a, b):
        part.sql(f"BEGIN ISOLATION LEVEL {level}")
        part.sql("SELECT n FROM other")  # takes its snapshot
    second = producer.enqueue(4)
    taken = [a.claim(3), b.claim(3), a.claim(), b.claim()]
    a.complete(taken[0] | taken[2])
    made = b.enqueue(2)
    own = b.claim()
    a.commit()
    b.commit()
    got = [job for part in taken for job in part]
    assert sorted(got) == sorted(first + second)
    assert set(own) == set(made)
    producer.complete(taken[1] | taken[3] | own)
    assert producer.claim() == {}


def test_cursors_and_pooled_sessions(any_db):
    play = Play(any_db)
    worker, other = play.parts(2)
    jobs = worker.enqueue(10)
    worker.begin()
    worker.sql("DECLARE c SCROLL CURSOR FOR SELECT job_id, receipt FROM awa.claim('q', 6)")
    seen = worker.sql("FETCH 2 FROM c") + worker.sql("FETCH BACKWARD ALL FROM c") + worker.sql("FETCH ALL FROM c")
    assert {job for job, _ in seen} == set(jobs[:6])
    assert set(other.claim()) == set(jobs[6:])
    worker.rollback()
    assert set(other.claim(3)) == set(jobs[:3])
    # Not read to its end: it holds all that it took.
    worker.begin()
    worker.sql("DECLARE c CURSOR WITH HOLD FOR SELECT job_id, receipt FROM awa.claim('q', 3)")
    worker.commit()
    assert other.claim() == {}
    rest = worker.sql("FETCH ALL FROM c")
    assert [job for job, _ in rest] == jobs[3:6]
    worker.sql("DISCARD ALL")
    worker.complete(dict(rest))
    more = worker.enqueue(2)
    worker.sql("DISCARD ALL")
    assert set(worker.claim()) == set(more) and other.claim() == {}


def test_two_databases_of_one_server(any_db):
    """They have the same lane numbers and share the server's memory, and know nothing of one another."""
    second = any_db.cluster.database()
    plays = [Play(any_db), Play(second)]
    parts = [play.parts(2) for play in plays]
    jobs, taken = [[], []], [{}, {}]
    for i in range(12):
        for k, (worker, keeper) in enumerate(parts):
            jobs[k] += worker.enqueue(3 + k)
            if (i + k) % 3 == 0:
                scenarios.rotate(keeper, *range(16))
            mine = worker.claim(2 + 3 * k)
            worker.complete(mine)
            taken[k] |= mine
    for k, (worker, keeper) in enumerate(parts):
        taken[k] |= keeper.claim() | worker.claim()
        assert len(taken[k]) == len(jobs[k]) and set(taken[k]) == set(jobs[k])
    second.drop()


@pytest.mark.parametrize("preload", [False, True], ids=["plain", "preload"])
def test_transaction_ids_wrap(make_cluster, preload):
    """Ranges that hang on a transaction outlive the wrap of its 32-bit id."""
    cluster = make_cluster(flavour="injection", preload=preload, settings={"autovacuum": "off"}).start()
    cluster.program("vacuumdb", "-h", cluster.dir, "-U", "postgres", "--all", "--freeze", "--quiet")
    cluster.stop()
    # The last few hundred ids of an epoch. Their part of the commit log is there in a server that has counted so far.
    last = 2**32 - 300
    segment = cluster.data / "pg_xact" / f"{last // (32 * 32768):04X}"
    segment.write_bytes(bytes(32 * 8192))
    if os.geteuid() == 0:
        shutil.chown(segment, "postgres", "postgres")
    cluster.program("pg_resetwal", "-D", cluster.data, "-x", last, "-u", last - 1000)
    cluster.start()
    db = cluster.database()
    play = Play(db)
    slow, holder, producer, worker = play.parts(4)
    jobs = producer.enqueue(10)
    slow.begin()
    late = slow.enqueue(5)
    holder.begin()
    held = holder.claim(4)
    taken = {}
    epochs = set()
    for _ in range(250):
        jobs += producer.enqueue(1)
        mine = worker.claim()
        worker.complete(mine)
        taken |= mine
        epochs.add(int(db.value("SELECT pg_current_xact_id()::text")) >> 32)
    assert epochs == {0, 1}
    assert set(taken) == set(jobs) - set(held)
    slow.commit()
    holder.rollback()
    assert set(worker.claim()) == set(late) | set(held)


# ------------------------------------------------------------------------------------------------ sizes


@pytest.mark.timeout(300)
def test_a_hundred_thousand_jobs_in_one_claim(any_db):
    play = Play(any_db)
    worker = play.part()
    jobs = []
    for n in (5000, 1, 5000, 1024, 1025):
        jobs += worker.enqueue(n)
    taken = {}
    while mine := worker.claim(3000):
        assert list(mine) == jobs[len(taken) : len(taken) + 3000]  # whole, and in order
        taken |= mine
    assert set(taken) == set(jobs)
    worker.complete(taken)
    jobs = worker.enqueue(100_000)
    worker.begin()
    assert list(worker.claim(2**63 - 1)) == jobs
    worker.rollback()
    mine = worker.claim(100_000)
    assert list(mine) == jobs
    worker.complete(mine)
    assert worker.claim() == {}
    said = scenarios.rotate(worker, 0)
    assert said[1:] == ["closed", "emptied"], said


@pytest.mark.timeout(300)
def test_thousands_of_lanes(any_db):
    """More lanes than there is room for in shared memory, all through one claim."""
    queues = [f"lanes{i}" for i in range(10)]
    for queue in queues:
        any_db.sql("SELECT awa.create_queue(%s, '{\"shards\": 64}')", [queue])
    made = any_db.sql(
        "SELECT job_id FROM awa.enqueue_jobs((SELECT jsonb_agg(jsonb_build_object('queue', q, 'priority', p,"
        " 'ordering_key', 'key ' || k)) FROM unnest(%s::text[]) q, generate_series(1, 4) p, generate_series(1, 150) k))",
        [queues],
    )
    jobs = {job for (job,) in made}
    lanes = any_db.value("SELECT count(DISTINCT lane_id) FROM awa_internal.segments")
    assert len(jobs) == 6000 and lanes > 2048
    a, b = any_db.session(), any_db.session()
    claim = "SELECT receipt, job_id FROM awa.claim_from(%s, %s)"
    a.sql("BEGIN")
    assert len(a.sql(claim, [queues, 100_000])) == 6000
    a.sql("ROLLBACK")
    rows = a.sql(claim, [queues, 1000]) + b.sql(claim, [queues, 2000])
    any_db.sql("SELECT awa_internal.seal()")
    rows += b.sql(claim, [queues, 100_000]) + a.sql(claim, [queues, 100_000])
    assert len(rows) == 6000 and {job for _, job in rows} == jobs
    a.sql("SELECT awa.complete(%s)", [[receipt for receipt, _ in rows]])
    assert any_db.value("SELECT awa_internal.close(0)") == "closed"
    assert any_db.value('SELECT awa_internal."empty"(0, true)') == "emptied"
    assert b.sql(claim, [queues, 10]) == []
    more = any_db.value("SELECT awa.enqueue('lanes3', ordering_key => 'key 7')")
    assert [job for _, job in b.sql(claim, [queues, 10])] == [more]


def test_wide_payloads_outlive_their_slot(any_db):
    """What a claim has returned is whole: the slot's TOAST table is emptied and used again, with the same value ids."""
    play = Play(any_db)
    worker, producer = play.parts(2)
    wide = (
        "SELECT awa.enqueue('q', jsonb_build_object('n', %(n)s::int, 'wide',"
        " (SELECT string_agg(md5(%(n)s || ':' || i), '') FROM generate_series(1, 3000) i)))"
    )
    whole = (
        "SELECT count(*) FROM kept WHERE args->>'wide' ="
        " (SELECT string_agg(md5((args->>'n') || ':' || i), '' ORDER BY i) FROM generate_series(1, 3000) i)"
    )
    worker.sql("CREATE TEMP TABLE kept AS SELECT receipt, args FROM awa.claim('q', 0)")
    for round_ in range(3):
        for n in range(5):
            producer.value(wide, {"n": round_ * 5 + n})
        worker.begin()
        worker.sql("DECLARE c CURSOR WITH HOLD FOR SELECT args FROM awa.claim('q', 2)")
        worker.rollback()
        worker.sql("INSERT INTO kept SELECT receipt, args FROM awa.claim('q', 100)")
        worker.sql("SELECT awa.complete(array_agg(receipt)) FROM kept")
        scenarios.rotate(producer, 0, 1, 2)
        assert worker.value(whole) == (round_ + 1) * 5
    assert any_db.value("SELECT count(*) FROM awa_internal.ready") == 0


# ------------------------------------------------------------------------------------------------ cost of what stays open


def buffers(part, statement, parameters):
    """How many buffers a statement looks at."""
    rows = part.sql("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + statement, parameters)
    plan = rows[0][0][0]["Plan"]
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


def cost_of_claims(play, worker, producer):
    """The most that one of some claims behind whatever is open looks at, once the worker has seen it."""
    seen = []
    for _ in range(6):
        producer.enqueue(2)
        producer.enqueue(1)
        seen.append(buffers(worker, *play.claim_call(2)))
    return max(seen[2:])


def test_a_bulk_load_left_open_is_not_walked_by_every_claim(any_db):
    play = Play(any_db)
    loader, producer, worker = play.parts(3)
    before = cost_of_claims(play, worker, producer)
    loader.begin()
    jobs = []
    for _ in range(1000):
        jobs += loader.enqueue(1)
    assert cost_of_claims(play, worker, producer) < before + 200
    # And at the tail, where nothing committed lies above it.
    worker.claim()
    for _ in range(1000):
        jobs += loader.enqueue(1)
    worker.claim()
    assert buffers(worker, *play.claim_call(2)) < before + 200
    loader.commit()
    assert set(worker.claim(5000)) == set(jobs)


def test_a_claimer_left_open_is_not_walked_by_every_claim(any_db):
    play = Play(any_db)
    holder, producer, worker = play.parts(3)
    before = cost_of_claims(play, worker, producer)
    worker.claim()
    jobs = []
    for _ in range(1000):
        jobs += producer.enqueue(1)
    holder.begin()
    held = {}
    while mine := holder.claim(1):
        held |= mine
    assert set(held) == set(jobs)
    cost_of_claims(play, worker, producer)
    worker.sql("SELECT pg_sleep(0.06)")
    cost_of_claims(play, worker, producer)
    worker.sql("SELECT pg_sleep(0.06)")
    assert cost_of_claims(play, worker, producer) < before + 200
    holder.rollback()
    worker.sql("SELECT pg_sleep(0.06)")
    assert set(jobs) <= set(worker.claim(5000))
