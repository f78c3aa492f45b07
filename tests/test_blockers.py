"""The rules of the review against PostgreSQL's source, one test (or more) for each rule that touches what is built.

Rules that are tested elsewhere, or that have no case yet:

====  ==================================================================================================================
 4    in test_worker.py; what a restore does is in test_restore.py
 5    also in test_restore.py: ids and claim numbers after a restore
 8    the verbs on waiting jobs are not built; release, which has the same shape, is in test_rule_08
11    in test_restore.py
16    a session would have to live through 2^31 transactions; widen() is pure, and a unit test in src/ is the place for it
19    in test_rule_19, as far as complete and release go; rescue is not built
20    drop_queue is not built
25    rescue of expired leases is not built
26    test_rule_26 covers the totals that emptying leaves; the views' counts are in test_ring.py
29    nothing can be made to fail inside the callback from outside; the crash audit (test_crash.py) would show a PANIC
30    there is no wait yet
31    strict lanes have specs in pg_test (claim-claim-strict, producer-claim-strict)
32    in test_cancel_retry.py
33    uniqueness is not built; the part about create_queue under REPEATABLE READ is in test_rule_13
34    in test_worker.py
35    queue_grants is not built
36    a unit test in src/policy.rs; the worker's back-off in test_worker.py
38    the rest is below; that a block of ids is dropped after a minute is not waited for
39    in test_worker.py
40    ageing is in pg_test/sql/priority.sql
42    in test_deferred.py
43    in test_ring.py
47    a figure, see bench
48    pg_upgrade needs two installations in one place; the dump of 15 into 18 is in test_restore.py
====  ==================================================================================================================
"""

import json
import os
import random
import signal
import threading
import time

import psycopg
import pytest

from harness import Database, wait_until

E = psycopg.errors


# ---------------------------------------------------------------------------------------------------------- helpers


def enqueue(session, numbers, queue="q"):
    """Puts jobs with these numbers as args and returns their ids."""
    numbers = list(numbers)
    return session.sql(
        "SELECT unnest(awa.enqueue_batch(%s, ARRAY(SELECT to_jsonb(n) FROM unnest(%s::int8[]) n)))", [queue, numbers]
    )


def claim(session, n=1000, queue="q"):
    """Claims and returns (receipt, args) pairs."""
    return session.sql("SELECT receipt, args FROM awa.claim(%s, %s)", [queue, n])


def drain(session, queue="q", n=1000):
    """Claims until nothing is left; the args in the order in which they came."""
    seen = []
    while rows := claim(session, n, queue):
        seen.extend(args for _, args in rows)
    return seen


def complete(session, rows):
    """Completes what claim() returned; the states."""
    return [s for (s,) in session.sql("SELECT state FROM awa.complete(%s::int8[])", [[r for r, _ in rows]])]


def seal(session):
    answer = session.value("SELECT awa_internal.seal()")
    assert answer.startswith("sealed: slot "), answer
    return int(answer.split()[2])


def current_slot(session):
    """The current slot as the ring's table tells it."""
    rows = session.sql("SELECT slot FROM awa_internal.ring WHERE event = 'o' ORDER BY event_no DESC LIMIT 1")
    return rows[0][0] if rows else 0


def close(session, slot):
    return session.value("SELECT awa_internal.close(%s)", [slot])


def empty(session, slot, ignore_retention=True):
    return session.value('SELECT awa_internal."empty"(%s, %s)', [slot, ignore_retention])


def must_empty(session, slot):
    """Nothing of the test's holds it. For a moment an autovacuum worker or a session that is just ending may."""
    wait_until(lambda: (said := empty(session, slot)) == "emptied" or (said not in ("snapshot", "blocked") and pytest.fail(said)),
               what=f"slot {slot} to be emptied")


def maintain_until(session, slot):
    """CALL awa.maintain() until it has emptied the slot: once, unless an autovacuum worker is just there."""
    def emptied():
        session.sql("CALL awa.maintain()")
        return session.sql("SELECT event FROM awa_internal.ring WHERE slot = %s", [slot]) == [("e",)]

    wait_until(emptied, what=f"slot {slot} to be emptied")


def ring_and_lanes(db):
    return (
        db.sql("SELECT event_no, slot, event, generation FROM awa_internal.ring ORDER BY 1"),
        db.sql("SELECT * FROM awa_internal.lanes ORDER BY 1"),
    )


def overlaps(db):
    """Pairs of committed segments of one lane that share a seq."""
    return db.sql(
        "SELECT a.lane_id, a.first_seq, a.n, b.first_seq, b.n"
        " FROM awa_internal.segments a JOIN awa_internal.segments b ON a.lane_id = b.lane_id"
        " AND (a.first_seq, a.first_entry_id) < (b.first_seq, b.first_entry_id) AND b.first_seq < a.first_seq + a.n"
    )


def log_indexes(db):
    """(index, table) of all indexes of the four logs."""
    return db.sql(
        "SELECT i.indexrelid::regclass::text, i.indrelid::regclass::text FROM pg_index i"
        " JOIN pg_inherits h ON h.inhrelid = i.indrelid"
        " WHERE h.inhparent IN ('awa_internal.ready'::regclass, 'awa_internal.segments'::regclass,"
        " 'awa_internal.claims'::regclass, 'awa_internal.closures'::regclass)"
    )


def amcheck(db):
    """Every btree of the logs: in order, and with an entry for each row of its table."""
    db.sql("CREATE EXTENSION IF NOT EXISTS amcheck")
    checked = db.sql(
        "SELECT c.relname, bt_index_check(c.oid, true) FROM pg_class c JOIN pg_am a ON a.oid = c.relam"
        " JOIN pg_index i ON i.indexrelid = c.oid"
        " WHERE c.relnamespace = 'awa_internal'::regnamespace AND a.amname = 'btree' AND i.indisvalid"
    )
    assert len(checked) >= 16 * 6


class Load:
    """Producers and workers in threads; what they were told is kept, for drain_and_check()."""

    def __init__(self, db, producers=2, workers=2, queue="q", settings=None):
        self.db, self.queue, self.settings = db, queue, settings
        self.stopping = threading.Event()
        self.numbers = iter(range(10**9))
        self.lock = threading.Lock()
        self.enqueued, self.delivered, self.errors = [], [], []
        targets = [self._produce] * producers + [self._work] * workers
        self.threads = [threading.Thread(target=self._guarded, args=[t], daemon=True) for t in targets]

    def __enter__(self):
        for t in self.threads:
            t.start()
        return self

    def __exit__(self, kind, *_):
        self.stop()
        if kind is None:
            assert self.errors == []

    def stop(self):
        self.stopping.set()
        for t in self.threads:
            t.join(60)
            assert not t.is_alive()

    def _guarded(self, work):
        session = self.db.session(settings=self.settings)
        try:
            while not self.stopping.is_set():
                work(session)
        except Exception as error:
            self.errors.append(error)
        finally:
            session.close()

    def _produce(self, session):
        with self.lock:
            numbers = [next(self.numbers) for _ in range(random.choice([1, 3, 20]))]
        enqueue(session, numbers, self.queue)
        with self.lock:
            self.enqueued.extend(numbers)

    def _work(self, session):
        rows = claim(session, random.choice([1, 5, 30]), self.queue)
        with self.lock:
            self.delivered.extend(args for _, args in rows)
        if rows:
            assert set(complete(session, rows)) == {"completed"}

    def progress(self, n):
        """Waits until n more jobs were put and n more delivered."""
        put, got = len(self.enqueued), len(self.delivered)
        wait_until(
            lambda: self.errors or (len(self.enqueued) >= put + n and len(self.delivered) >= got + n), 60, "the load"
        )
        assert self.errors == []

    def drain_and_check(self, session=None):
        """After stop(): every job that was put came exactly once."""
        rest = drain(session or self.db.session(), self.queue)
        got = sorted(self.delivered + rest)
        assert got == sorted(self.enqueued)
        assert overlaps(self.db) == []


# ------------------------------------------------------------------------------------------------------------ rule 1


@pytest.mark.parametrize("log", ["ready", "segments", "claims", "closures"])
def test_rule_01_reindex_concurrently_while_an_old_snapshot_holds_it(any_db, log, pg):
    s, rebuilding, old = any_db.session(), any_db.session(), any_db.session()
    enqueue(s, range(10))
    held = claim(s, 4)
    # The new indexes exist and take inserts, but are not valid until this snapshot has gone.
    old.sql("BEGIN ISOLATION LEVEL REPEATABLE READ")
    old.sql("SELECT count(*) FROM awa_internal.queues")
    pending = rebuilding.start_waiting(f"REINDEX TABLE CONCURRENTLY awa_internal.{log}_0", event="virtualxid")
    ready = any_db.value(
        f"SELECT bool_and(indisready) FROM pg_index WHERE indrelid = 'awa_internal.{log}_0'::regclass AND NOT indisvalid"
    )
    assert ready
    enqueue(s, range(10, 20))
    other = any_db.session()
    held += claim(other, 3)
    complete(other, held[:2])
    s.sql("SELECT * FROM awa.release(%s::int8[])", [[held[2][0]]])
    assert not pending.done
    old.sql("COMMIT")
    pending.result()
    enqueue(s, range(20, 25))
    complete(s, held[3:])
    # Old sessions go on with what they know, a new one starts cold: together they get the rest, each job once.
    got = [a for _, a in claim(s, 3)] + [a for _, a in claim(other, 3)] + drain(any_db.session())
    done = {a for _, a in held} - {held[2][1]}
    assert sorted(got) == [n for n in range(25) if n not in done]
    assert set(complete(s, held)) <= {"completed", "stale"}
    if pg == 15:
        amcheck(any_db)


@pytest.mark.timeout(120)
def test_rule_01_reindexdb_concurrently_under_load(any_db, pg):
    with Load(any_db, 3, 3) as load:
        load.progress(50)
        any_db.cluster.client("reindexdb", "--concurrently", "--schema=awa_internal", dbname=any_db.name)
        seal(any_db)
        load.progress(50)
    load.drain_and_check()
    if pg == 15:
        amcheck(any_db)


EVERY_NUMBER = "generate_series(0, 300) n JOIN awa_internal.ready_0 ON args @> to_jsonb(n)"
DBA_INDEXES = [
    # name, definition, what it is asked for, from its table
    ("dba_plain", "INDEX dba_plain ON awa_internal.segments_0 (enqueued_at)",
     "awa_internal.segments_0 WHERE enqueued_at > '2000-01-01'"),
    ("dba_later", "INDEX CONCURRENTLY dba_later ON awa_internal.claims_0 (worker)",
     "awa_internal.claims_0 WHERE worker IS NULL"),
    ("dba_expression", "INDEX dba_expression ON awa_internal.ready_0 ((args->>0))",
     "awa_internal.ready_0 WHERE args->>0 >= ''"),
    ("dba_partial", "INDEX CONCURRENTLY dba_partial ON awa_internal.closures_0 (closed_at) WHERE outcome = 'c'",
     "awa_internal.closures_0 WHERE outcome = 'c' AND closed_at > '2000-01-01'"),
    ("dba_unique", "UNIQUE INDEX dba_unique ON awa_internal.ready_0 (entry_id)", "awa_internal.ready_0 WHERE entry_id > 0"),
    ("dba_gin", "INDEX CONCURRENTLY dba_gin ON awa_internal.ready_0 USING gin (args)", EVERY_NUMBER),
    ("dba_hash", "INDEX dba_hash ON awa_internal.segments_0 USING hash (n)", "awa_internal.segments_0 WHERE n = 3"),
    ("dba_include", "INDEX dba_include ON awa_internal.claims_0 (lane_id, first_seq) INCLUDE (n)",
     "awa_internal.claims_0 WHERE lane_id > 0"),
    ("dba_backward", "INDEX dba_backward ON awa_internal.segments_0 (lane_id, first_seq DESC)",
     "awa_internal.segments_0 WHERE lane_id > 0"),
]


@pytest.mark.timeout(120)
def test_rule_01_indexes_that_a_dba_adds_while_jobs_flow(any_db, pg):
    with Load(any_db) as load:
        load.progress(20)
        for _, definition, _ in DBA_INDEXES:
            any_db.sql("CREATE " + definition)
            load.progress(20)
    # Compared with what a scan of the table finds; an index that lacks rows answers with fewer. The planner would often
    # take one of ours, so the others are out of its sight for the moment.
    reader = any_db.session()
    for name, _, what in DBA_INDEXES:
        query = f"SELECT count(*) FROM {what}"
        reader.sql("BEGIN")
        reader.sql(
            "UPDATE pg_index SET indisvalid = false WHERE indexrelid <> %s::regclass AND indrelid ="
            " (SELECT indrelid FROM pg_index WHERE indexrelid = %s::regclass)",
            [f"awa_internal.{name}"] * 2,
        )
        reader.sql("SET LOCAL enable_indexscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_indexonlyscan = off")
        by_table = reader.value(query)
        reader.sql("SET LOCAL enable_indexscan = on; SET LOCAL enable_bitmapscan = on; SET LOCAL enable_indexonlyscan = on;"
                   " SET LOCAL enable_seqscan = off")
        plan = "\n".join(r[0] for r in reader.sql("EXPLAIN " + query))
        assert name in plan, plan
        assert (reader.value(query), by_table > 0) == (by_table, True), name
        reader.sql("ROLLBACK")
    load.drain_and_check()
    if pg == 15:
        amcheck(any_db)


@pytest.mark.parametrize("log", ["segments", "claims"])
def test_rule_01_a_backward_index_does_not_turn_the_lane_round(any_db, log):
    # Ours is rebuilt, so that the DBA's comes first in the table's list.
    any_db.sql(f"CREATE INDEX dba_backward ON awa_internal.{log}_0 (lane_id, first_seq DESC)")
    (ours,) = [
        i for i, t in log_indexes(any_db)
        if t == f"awa_internal.{log}_0" and "lane_id" in i and "first_seq" in i
    ]
    any_db.sql(f"REINDEX INDEX CONCURRENTLY {ours}")
    s = any_db.session()
    for n in range(0, 30, 3):
        enqueue(s, range(n, n + 3))
    got = [a for _, a in claim(s, 2)] + [a for _, a in claim(any_db.session(), 5)]
    enqueue(any_db.session(), range(30, 40))
    got += drain(any_db.session(), n=4)
    assert got == list(range(40))
    assert overlaps(any_db) == []


def test_rule_01_a_unique_index_of_a_dba_refuses_and_nothing_stays(db):
    s = db.session()
    db.sql("CREATE UNIQUE INDEX dba_once ON awa_internal.ready_0 ((args->>'key')) WHERE args ? 'key'")
    s.sql("""SELECT awa.enqueue('q', '{"key": "a"}')""")
    with pytest.raises(E.UniqueViolation):
        s.sql("""SELECT awa.enqueue_batch('q', ARRAY['{"key": "b"}', '{"key": "a"}']::jsonb[])""")
    s.sql("""SELECT awa.enqueue('q', '{"key": "b"}')""")
    assert drain(s) == [{"key": "a"}, {"key": "b"}]


def test_rule_01_without_our_index_nothing_is_written(db):
    s = db.session()
    enqueue(s, [1])
    (ours,) = [i for i, t in log_indexes(db) if t == "awa_internal.segments_0" and "first_seq" in i]
    definition = db.value("SELECT pg_get_indexdef(%s::regclass)", [ours])
    db.sql(f"ALTER EXTENSION awa_queue DROP TABLE awa_internal.segments_0; DROP INDEX {ours}")
    for session in (s, db.session()):
        with pytest.raises(psycopg.Error, match="has no valid index") as refused:
            enqueue(session, [2])
        assert refused.value.diag.message_hint
    assert db.value("SELECT count(*) FROM awa_internal.ready") == 1
    db.sql(definition)
    enqueue(s, [3])
    assert drain(s) == [1, 3]


# ------------------------------------------------------------------------------------------------------------ rule 2


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_rule_02_steps_outside_read_committed_are_refused(db, level):
    s = db.session()
    enqueue(s, range(5))
    seal(s)
    enqueue(s, range(5))
    seal(s)
    assert close(s, 0) == "closed"
    complete(s, claim(s))
    before = ring_and_lanes(db)
    for call in ("seal()", "close(1)", '"empty"(0, true)'):
        with pytest.raises(E.ActiveSqlTransaction) as refused:
            s.sql(f"BEGIN ISOLATION LEVEL {level}")
            s.sql(f"SELECT awa_internal.{call}")
        s.sql("ROLLBACK")
        assert refused.value.diag.message_hint
        # Once more by the session's default, without a BEGIN.
        other = db.session(settings={"default_transaction_isolation": level.lower()})
        with pytest.raises(E.ActiveSqlTransaction):
            other.sql(f"SELECT awa_internal.{call}")
    assert ring_and_lanes(db) == before
    assert close(s, 1) == "closed"
    must_empty(s, 0)


def test_rule_02_a_producer_that_commits_after_an_old_snapshot_keeps_its_seqs(any_db):
    s, old, producer = any_db.session(), any_db.session(), any_db.session()
    producer.sql("BEGIN")
    enqueue(producer, range(10))
    seal(s)
    old.sql("BEGIN ISOLATION LEVEL REPEATABLE READ")
    old.sql("SELECT 1")
    producer.sql("COMMIT")
    with pytest.raises(E.ActiveSqlTransaction):
        old.sql("SELECT awa_internal.close(0)")
    old.sql("ROLLBACK")
    assert close(old, 0) == "closed"
    enqueue(s, range(10, 20))
    assert overlaps(any_db) == []
    assert drain(s) == list(range(20))


@pytest.mark.parametrize("step", ["close", "empty"])
def test_rule_02_a_step_in_a_statement_that_began_before(any_db, step):
    """The statement's own snapshot is older than what the step must see: it waits for an advisory lock first."""
    s, late, producer = any_db.session(), any_db.session(), any_db.session()
    producer.sql("BEGIN")
    enqueue(producer, range(10))
    seal(s)
    gate = any_db.session()
    gate.sql("SELECT pg_advisory_lock(77)")
    call = {"close": "awa_internal.close(0)", "empty": 'awa_internal."empty"(0, true)'}[step]
    pending = late.start_waiting(
        f"WITH held AS MATERIALIZED (SELECT pg_advisory_xact_lock_shared(77)) SELECT {call} FROM held", event="advisory"
    )
    producer.sql("COMMIT")
    if step == "empty":
        assert close(s, 0) == "closed"
    gate.sql("SELECT pg_advisory_unlock(77)")
    assert pending.result() == [("closed" if step == "close" else "open: 10 of 10",)]
    enqueue(s, range(10, 20))
    assert overlaps(any_db) == []
    assert drain(any_db.session()) == list(range(20))


DEFAULTS = [
    "default_transaction_isolation = 'repeatable read'",
    "default_transaction_isolation = 'serializable'",
    "default_transaction_read_only = on",
]


@pytest.mark.parametrize("of", ["database", "role"])
def test_rule_02_maintain_sets_its_own_transactions(db, of):
    s = db.session()
    s.sql("SELECT awa.create_queue('q', '{\"retention\": \"0 s\"}')")
    db.sql("CREATE ROLE keeper SUPERUSER LOGIN")
    try:
        for turn, default in enumerate(DEFAULTS):
            slot = current_slot(s)
            enqueue(s, range(10))
            seal(s)
            complete(s, claim(s, 10))
            db.sql(f"ALTER {of} {db.name if of == 'database' else 'keeper'} SET {default}")
            caller = db.session(user="keeper")
            name, value = default.split(" = ")
            assert caller.value(f"SHOW {name}") == value.strip("'")
            maintain_until(caller, slot)
            assert db.value("SELECT appended_through FROM awa_internal.lanes") == 10 * (turn + 1)
            # The session is as it was.
            assert caller.value(f"SHOW {name}") == value.strip("'")
            db.sql(f"ALTER {of} {db.name if of == 'database' else 'keeper'} RESET ALL")
            caller.close()
    finally:
        db.sql("DROP ROLE keeper")


# ------------------------------------------------------------------------------------------------------------ rule 3


def test_rule_03_an_idle_reader_of_everything_stops_nobody(any_db):
    reader, s = any_db.session(autocommit=False), any_db.session()
    enqueue(s, range(20))
    reader.sql("SELECT * FROM awa_internal.ring")
    relations = any_db.sql(
        "SELECT c.oid::regclass::text FROM pg_class c WHERE relkind IN ('r', 'p', 'v') AND c.relnamespace IN"
        " ('awa'::regnamespace, 'awa_internal'::regnamespace)"
    )
    assert ("awa_internal.ring",) in relations
    for (relation,) in relations:
        reader.sql(f"SELECT count(*) FROM {relation}")
    # From here on the reader is idle in its transaction and holds ACCESS SHARE on all of it. Whoever waited would fail.
    impatient = {"lock_timeout": "3s"}
    keeper = any_db.session(settings=impatient)
    seal(keeper)
    assert close(keeper, 0) == "closed"
    seal(keeper)
    for _ in range(3):
        new = any_db.session(settings=impatient)
        enqueue(new, range(20, 22))
        complete(new, claim(new, 10))
    complete(keeper, claim(keeper))
    assert empty(keeper, 0) in ("blocked", "snapshot")
    keeper.sql("CALL awa.maintain()")
    reader.connection.commit()
    must_empty(keeper, 0)
    enqueue(keeper, [1])
    assert drain(keeper) == [1]


def test_rule_03_a_running_dump_stops_nobody(db):
    s = db.session()
    enqueue(s, range(10))
    db.sql("CREATE TABLE zz_last (a int)")
    gate = db.session(autocommit=False)
    gate.sql("LOCK TABLE zz_last IN ACCESS EXCLUSIVE MODE")
    dumped = []
    dump = threading.Thread(
        target=lambda: dumped.append(db.cluster.client("pg_dump", "-Fp", dbname=db.name)), daemon=True
    )
    dump.start()
    wait_until(
        lambda: db.sql(
            "SELECT 1 FROM pg_stat_activity WHERE application_name = 'pg_dump' AND wait_event_type = 'Lock'"
        ),
        what="the dump to stand",
    )
    keeper = db.session(settings={"lock_timeout": "3s"})
    seal(keeper)
    assert close(keeper, 0) == "closed"
    for n in range(3):
        new = db.session(settings={"lock_timeout": "3s"})
        enqueue(new, [100 + n])
        complete(new, claim(new, 4))
    complete(keeper, claim(keeper))
    assert empty(keeper, 0) in ("blocked", "snapshot")
    gate.connection.commit()
    dump.join(60)
    assert dumped and "COPY awa_internal.ready_0" in dumped[0]
    # The jobs that waited at the dump's snapshot are in it.
    rows = dumped[0].split("COPY awa_internal.ready_0", 1)[1].split("\n\\.", 1)[0].splitlines()[1:]
    assert len(rows) == 10
    must_empty(keeper, 0)


# ------------------------------------------------------------------------------------------------------------ rule 5


def claim_number(receipt):
    return receipt >> 16


@pytest.mark.crash
@pytest.mark.parametrize("preload", [False, True], ids=["plain", "preload"])
def test_rule_05_no_claim_number_twice_after_a_crash(make_cluster, preload):
    # With preload a claim does not wait for its flush; the writer that would flush it soon is made slow.
    server = make_cluster(flavour="injection", preload=preload, settings={"wal_writer_delay": "10s"}).start()
    db = server.database()
    enqueue(db.session(), range(600))
    given = []
    for _ in range(3):
        workers = [db.session() for _ in range(4)]
        for _ in range(8):
            for w in workers:
                given += [r for r, _ in claim(w, 2)]
        numbers = [claim_number(r) for r in given]
        server.kill9()
        server.start()
        s = db.session()
        fresh = claim(s, 1)
        assert claim_number(fresh[0][0]) > max(numbers)
        given.append(fresh[0][0])
    # What became of the old receipts is certain: either their claim is there, or it is lost and its job free.
    states = s.sql("SELECT state, args FROM awa.complete(%s::int8[]) c LEFT JOIN LATERAL (SELECT null) n(args) ON true",
                   [given])
    assert {state for state, _ in states} <= {"completed", "stale"}
    done = sum(state == "completed" for state, _ in states)
    rest = drain(s)
    assert done + len(rest) == 600
    assert len(set(given)) == len(given)


def test_rule_05_no_claim_number_twice_after_promotion_and_restore(make_cluster):
    primary = make_cluster(flavour="injection").start()
    db = primary.database()
    enqueue(db.session(), range(200))
    given = [claim_number(r) for r, _ in claim(db.session(), 5)]
    older = primary.standby()
    try:
        with primary.standby() as standby:
            wait_until(
                lambda: primary.psql("SELECT count(*) FROM pg_stat_replication") == "1", what="the standby to follow"
            )
            # The standby is away, so the numbers that are given out from now on are lost with the primary.
            standby.stop()
            for _ in range(5):
                given += [claim_number(r) for r, _ in claim(db.session(), 1)]
            last_second = int(time.time())
            primary.kill9()
            # The floor counts by the second: no failover is done within the second of the last claim.
            wait_until(lambda: int(time.time()) > last_second, 5)
            standby.start()
            standby.promote()
            after = Database(standby, db.name)
            got = [claim_number(r) for r, _ in claim(after.session(), 3)]
            assert min(got) > max(given)
            last_second = int(time.time())
        # The older backup by itself: its sequences are those of the past.
        wait_until(lambda: int(time.time()) > last_second, 5)
        older.start()
        older.promote()
        again = Database(older, db.name)
        assert min(claim_number(r) for r, _ in claim(again.session(), 3)) > max(given + got)
    finally:
        older.remove()


# ------------------------------------------------------------------------------------------------------------ rule 6


@pytest.mark.timeout(120)
@pytest.mark.parametrize("preload", [False, True], ids=["plain", "preload"])
def test_rule_06_a_session_that_read_on_the_standby_is_right_after_promotion(make_cluster, preload):
    primary = make_cluster(flavour="injection", preload=preload).start()
    db = primary.database()
    s = db.session()
    ids = enqueue(s, range(20))
    first = claim(s, 10)
    with primary.standby() as standby:
        there = Database(standby, db.name)

        def replayed():
            at = db.value("SELECT pg_current_wal_flush_lsn()")
            wait_until(lambda: there.value("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", [at]), 30, "the replay")

        replayed()
        pooled = there.session()

        def read(session):
            session.sql("SELECT awa_internal.lane_state(lane_id) FROM awa_internal.segments GROUP BY lane_id")
            for (view,) in session.sql("SELECT oid::regclass::text FROM pg_class WHERE relkind = 'v'"
                                       " AND relnamespace = 'awa'::regnamespace"):
                session.sql(f"SELECT * FROM {view}")
            if session.sql("SELECT 1 FROM pg_proc WHERE pronamespace = 'awa'::regnamespace AND proname = 'job'"):
                return session.sql("SELECT job_id, args FROM awa.job(%s)", [ids[0][0]])
            return []

        assert read(pooled) in ([], [(ids[0][0], 0)])
        for verb in (
            "awa.enqueue('q', '1')",
            "awa.enqueue_batch('q', ARRAY['1']::jsonb[])",
            "awa.enqueue_jobs('[{\"queue\": \"q\"}]')",
            "awa.claim('q')",
            "awa.claim_from(ARRAY['q'])",
            f"awa.complete(ARRAY[{first[0][0]}])",
            f"awa.release(ARRAY[{first[0][0]}])",
            f"awa.cancel_claimed(ARRAY[{first[0][0]}])",
            f"awa.complete_and_claim(ARRAY[{first[0][0]}], ARRAY['q'])",
            "awa.create_queue('other')",
            "awa.alter_queue('q', '{}')",
            "awa.pause_queue('q')",
            "awa.resume_queue('q')",
            "awa_internal.seal()",
            "awa_internal.close(0)",
            'awa_internal."empty"(0)',
        ):
            with pytest.raises(E.ReadOnlySqlTransaction, match="standby") as refused:
                pooled.sql(f"SELECT * FROM {verb}")
            assert "primary" in refused.value.diag.message_hint
        with pytest.raises(E.ReadOnlySqlTransaction) as refused:
            pooled.sql("CALL awa.maintain()")
        assert refused.value.diag.message_hint
        # Slots are sealed, closed and emptied on the primary behind the session's back, and used again.
        complete(s, first + claim(s))
        seal(s)
        assert close(s, 0) == "closed"
        must_empty(s, 0)
        enqueue(s, range(20, 30))
        replayed()
        read(pooled)
        seal(s)
        assert close(s, 1) == "closed"
        complete(s, claim(s, 10))
        must_empty(s, 1)
        enqueue(s, range(30, 35))
        replayed()
        primary.kill9()
        standby.promote()
        wait_until(lambda: not pooled.value("SELECT pg_is_in_recovery()"), 30, "the promotion")
        enqueue(pooled, range(35, 40))
        assert there.sql("SELECT DISTINCT slot FROM awa_internal.ready") == [(current_slot(there),)]
        enqueue(there.session(), range(40, 45))
        got = [a for _, a in claim(pooled, 7)] + drain(there.session())
        assert got == list(range(30, 45))
        assert overlaps(there) == []


# ------------------------------------------------------------------------------------------------------------ rule 7


@pytest.mark.timeout(120)
@pytest.mark.parametrize("preload", [False, True], ids=["plain", "preload"])
def test_rule_07_prepared_verbs_over_a_restart(make_cluster, preload):
    server = make_cluster(flavour="injection", preload=preload).start()
    db = server.database()
    s = db.session()
    enqueue(s, range(40))
    to_complete, to_release, to_cancel = claim(s, 5), claim(s, 5), claim(s, 5)
    free = list(range(15, 40))

    def prepare(name):
        p = db.session()
        p.sql("BEGIN")
        enqueue(p, range(100, 103) if name == "kept" else range(200, 203))
        taken = claim(p, 4)
        half = slice(0, 2) if name == "kept" else slice(2, 5)
        complete(p, to_complete[half])
        p.sql("SELECT * FROM awa.release(%s::int8[])", [[r for r, _ in to_release[half]]])
        p.sql("SELECT * FROM awa.cancel_claimed(%s::int8[])", [[r for r, _ in to_cancel[half]]])
        p.sql(f"PREPARE TRANSACTION '{name}'")
        return taken

    kept, undone = prepare("kept"), prepare("undone")
    assert [a for _, a in kept] == free[:4] and [a for _, a in undone] == free[4:8]
    # Undecided work of others is passed over, before and after a restart.
    assert [a for _, a in claim(s, 2)] == free[8:10]
    server.restart()
    s = db.session()
    assert [a for _, a in claim(s, 2)] == free[10:12]
    enqueue(s, [300])
    seal(s)
    assert close(s, 0) == "writers left"
    s.sql("COMMIT PREPARED 'kept'")
    assert close(s, 0) == "writers left"
    s.sql("ROLLBACK PREPARED 'undone'")
    assert close(s, 0) == "closed"
    rest = drain(s)
    released = [a for _, a in to_release[:2]]
    assert sorted(rest) == sorted(free[4:8] + free[12:] + [100, 101, 102, 300] + released)
    states = lambda rows: complete(s, rows)  # noqa: E731
    assert states(to_complete) == ["completed"] * 5
    assert states(to_release) == ["stale"] * 2 + ["completed"] * 3
    assert states(to_cancel) == ["stale"] * 2 + ["completed"] * 3
    assert states(kept) == ["completed"] * 4
    assert set(states(undone)) <= {"stale", "unknown"}
    assert overlaps(db) == []


def test_rule_07_a_prepared_producer_over_promotion_is_not_lost(make_cluster):
    primary = make_cluster(flavour="injection").start()
    db = primary.database()
    p = db.session()
    enqueue(p, [0])
    p.sql("BEGIN")
    enqueue(p, range(1, 4))
    p.sql("PREPARE TRANSACTION 'later'")
    with primary.standby() as standby:
        there = Database(standby, db.name)
        primary.kill9()
        standby.promote()
        s = there.session()
        enqueue(s, [4])
        assert [a for _, a in claim(s, 10)] == [0, 4]
        s.sql("COMMIT PREPARED 'later'")
        assert drain(s) == [1, 2, 3]
        assert overlaps(there) == []


@pytest.mark.parametrize("call", ["seal()", "close(0)", '"empty"(0, true)'])
def test_rule_07_a_ring_step_can_not_be_prepared(any_db, call):
    s = any_db.session()
    enqueue(s, range(3))
    complete(s, claim(s))
    seal(s)
    if "empty" in call:
        assert close(s, 0) == "closed"
    before = ring_and_lanes(any_db)
    s.sql("BEGIN")
    said = s.value(f"SELECT awa_internal.{call}")
    assert said.split(":")[0] in ("sealed", "closed", "emptied")
    with pytest.raises(E.FeatureNotSupported):
        s.sql("PREPARE TRANSACTION 'never'")
    assert any_db.sql("SELECT * FROM pg_prepared_xacts WHERE database = current_database()") == []
    assert ring_and_lanes(any_db) == before
    # The ring is free again, for this session and for others.
    s.sql("ROLLBACK")
    enqueue(any_db.session(settings={"lock_timeout": "3s"}), [7])
    assert s.value(f"SELECT awa_internal.{call}") == said
    assert drain(s) == [7]


# ------------------------------------------------------------------------------------------------------------ rule 8


def test_rule_08_two_releases_make_one_entry(db):
    a, b = db.session(), db.session()
    enqueue(a, [1])
    receipt = claim(a)[0][0]
    a.sql("BEGIN")
    a.sql("SELECT * FROM awa.release(ARRAY[%s]::int8[])", [receipt])
    second = b.start_waiting("SELECT state, changed FROM awa.release(ARRAY[%s]::int8[])", [receipt], event="transactionid")
    a.sql("COMMIT")
    assert second.result() == [("ready", False)]
    assert drain(b) == [1]


# ------------------------------------------------------------------------------------------------------------ rule 9


def test_rule_09_a_slot_is_kept_for_an_old_snapshot(any_db):
    s, old = any_db.session(), any_db.session()
    enqueue(s, range(10))
    seal(s)
    old.sql("BEGIN ISOLATION LEVEL REPEATABLE READ")
    old.sql("SELECT 1")
    complete(s, claim(s))
    assert close(s, 0) == "closed"
    assert empty(s, 0) == "snapshot"
    s.sql("CALL awa.maintain()")
    with old.connection.cursor().copy("COPY awa_internal.ready_0 (args) TO STDOUT") as copy:
        assert b"".join(copy) == b"".join(b"%d\n" % n for n in range(10))
    old.sql("COMMIT")
    must_empty(s, 0)


def test_rule_09_the_grace_ends(db):
    s, old = db.session(), db.session()
    enqueue(s, range(10))
    seal(s)
    old.sql("BEGIN ISOLATION LEVEL REPEATABLE READ")
    old.sql("SELECT 1")
    complete(s, claim(s))
    assert close(s, 0) == "closed"
    assert empty(s, 0) == "snapshot"
    s.sql("ALTER SYSTEM SET awa_queue.snapshot_grace = 0")
    try:
        s.sql("SELECT pg_reload_conf()")
        wait_until(lambda: s.value("SHOW awa_queue.snapshot_grace") == "0")
        must_empty(s, 0)
        assert old.value("SELECT count(*) FROM awa_internal.ready_0") == 0
    finally:
        s.sql("ALTER SYSTEM RESET awa_queue.snapshot_grace")
        s.sql("SELECT pg_reload_conf()")


# ----------------------------------------------------------------------------------------------------------- rule 10


def pooled_sessions(db, numbers):
    """Sessions that have done everything once, so that they remember all there is to remember."""
    sessions = [db.session() for _ in range(3)]
    for i, s in enumerate(sessions):
        enqueue(s, numbers[i * 10 : i * 10 + 10])
        complete(s, claim(s, 5))
        s.sql("SELECT awa_internal.lane_state(lane_id) FROM awa_internal.segments GROUP BY lane_id")
    return sessions


def use_and_check(db, sessions, expected=()):
    """Old sessions and a new one put and take jobs; none is lost, no id comes twice."""
    ids, numbers = [], []
    sessions = [*sessions, db.session()]
    for turn in range(3):
        for i, s in enumerate(sessions):
            mine = range(10_000 + turn * 100 + i * 10, 10_000 + turn * 100 + i * 10 + 5)
            ids += [i for (i,) in enqueue(s, mine)]
            numbers += mine
    got = []
    for s in sessions:
        got += claim(s, 7)
        assert set(complete(s, got[-2:])) == {"completed"}
    for s in sessions:
        got += claim(s, 7)
    got += [(None, a) for a in drain(db.session())]
    assert sorted(a for _, a in got) == sorted([*numbers, *expected])
    receipts = [r for r, _ in got if r]
    assert len(set(receipts)) == len(receipts)
    assert len(set(ids)) == len(ids)
    old_ids = {i for (i,) in db.sql("SELECT entry_id FROM awa_internal.ready")}
    assert len(old_ids) == db.value("SELECT count(*) FROM awa_internal.ready")
    assert overlaps(db) == []


def test_rule_10_drop_and_create_extension_under_pooled_sessions(any_db):
    sessions = pooled_sessions(any_db, range(30))
    for _ in range(2):
        any_db.sql("DROP EXTENSION awa_queue")
        for s in sessions:
            with pytest.raises(psycopg.Error):
                s.sql("SELECT awa.enqueue('q')")
        any_db.sql("CREATE EXTENSION awa_queue")
        use_and_check(any_db, sessions)


def test_rule_10_drop_and_create_in_one_transaction(any_db):
    sessions = pooled_sessions(any_db, range(30))
    any_db.sql("BEGIN; DROP EXTENSION awa_queue; CREATE EXTENSION awa_queue; SELECT awa.enqueue('q', '77'); COMMIT")
    use_and_check(any_db, sessions, [77])


def test_rule_10_a_create_that_is_rolled_back(any_db):
    sessions = pooled_sessions(any_db, range(30))
    any_db.sql("DROP EXTENSION awa_queue")
    one = sessions[0]
    one.sql("BEGIN")
    one.sql("CREATE EXTENSION awa_queue")
    enqueue(one, range(50))
    complete(one, claim(one, 20))
    seal(one)
    one.sql("ROLLBACK")
    any_db.sql("CREATE EXTENSION awa_queue")
    use_and_check(any_db, sessions)


def test_rule_10_a_drop_and_create_that_is_rolled_back(any_db):
    sessions = pooled_sessions(any_db, range(30))
    one = sessions[0]
    one.sql("BEGIN")
    one.sql("DROP EXTENSION awa_queue")
    one.sql("CREATE EXTENSION awa_queue")
    enqueue(one, range(500, 550))
    complete(one, claim(one, 20))
    one.sql("ROLLBACK")
    # 30 were put and 15 taken before; the old installation goes on with the rest.
    taken = {r[0] for r in any_db.sql(
        "SELECT (r.args #>> '{}')::int FROM awa_internal.ready r JOIN awa_internal.segments g"
        " ON r.entry_id BETWEEN g.first_entry_id AND g.first_entry_id + g.n - 1 JOIN awa_internal.claims c"
        " ON c.lane_id = g.lane_id AND g.first_seq + (r.entry_id - g.first_entry_id) BETWEEN c.first_seq"
        " AND c.first_seq + c.n - 1")}
    assert len(taken) == 15
    use_and_check(any_db, sessions, [n for n in range(30) if n not in taken])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("options", [(), ("-1",)], ids=["steps", "one-transaction"])
def test_rule_10_pg_restore_clean_under_pooled_sessions(any_db, options):
    sessions = pooled_sessions(any_db, range(30))
    left = 15
    cluster = any_db.cluster
    file = cluster.dir / f"{any_db.name}-{'one' if options else 'steps'}.dump"
    cluster.client("pg_dump", "-Fc", "-f", file, dbname=any_db.name)
    # After the dump life goes on: these jobs are not in it, and what the sessions remember is ahead of it.
    for i, s in enumerate(sessions):
        enqueue(s, range(1000 + i * 10, 1000 + i * 10 + 10))
    seal(any_db)
    drain(sessions[1])
    cluster.client("pg_restore", "--clean", "--if-exists", "-e", *options, file, dbname=any_db.name)
    waiting = [r[0] for r in any_db.sql("SELECT (args #>> '{}')::int FROM awa_internal.ready ORDER BY entry_id")]
    assert sorted(waiting) == list(range(30))
    claimed = any_db.value("SELECT sum(n) FROM awa_internal.claims")
    assert 30 - claimed == left
    taken = {r[0] for r in any_db.sql(
        "SELECT (r.args #>> '{}')::int FROM awa_internal.ready r JOIN awa_internal.segments g"
        " ON r.entry_id BETWEEN g.first_entry_id AND g.first_entry_id + g.n - 1 JOIN awa_internal.claims c"
        " ON c.lane_id = g.lane_id AND g.first_seq + (r.entry_id - g.first_entry_id) BETWEEN c.first_seq"
        " AND c.first_seq + c.n - 1")}
    use_and_check(any_db, sessions, [n for n in range(30) if n not in taken])


# ----------------------------------------------------------------------------------------------------------- rule 12

WRITE_VERBS = [
    "SELECT awa.enqueue('q', '1')",
    "SELECT awa.enqueue_batch('q', ARRAY['1']::jsonb[])",
    "SELECT * FROM awa.enqueue_jobs('[{\"queue\": \"q\"}]')",
    "SELECT * FROM awa.claim('q')",
    "SELECT * FROM awa.claim_from(ARRAY['q'])",
    "SELECT * FROM awa.complete(ARRAY[{receipt}])",
    "SELECT * FROM awa.release(ARRAY[{receipt}])",
    "SELECT * FROM awa.cancel_claimed(ARRAY[{receipt}])",
    "SELECT * FROM awa.complete_and_claim(ARRAY[{receipt}], ARRAY['q'])",
    "SELECT awa.create_queue('other')",
    "SELECT awa.alter_queue('q', '{\"priority\": 1}')",
    "SELECT awa.pause_queue('q')",
    "SELECT awa.resume_queue('q')",
    "SELECT awa_internal.seal()",
    "SELECT awa_internal.close(0)",
    "SELECT awa_internal.\"empty\"(1, true)",
    "CALL awa.maintain()",
]


def everything(db):
    """All rows of all our tables."""
    found = {}
    for (table,) in db.sql("SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'awa_internal'::regnamespace"
                           " AND relkind = 'r' AND relname <> 'world'"):
        found[table] = db.sql(f"SELECT t::text FROM {table} t ORDER BY 1")
    return found


def test_rule_12_a_library_that_does_not_know_the_tables_writes_nothing(any_db):
    old = any_db.session()
    enqueue(old, range(10))
    seal(old)
    enqueue(old, range(10, 12))
    seal(old)
    receipt = claim(old)[0][0]
    complete(old, claim(old))
    assert close(old, 1) == "closed"
    before = everything(any_db)
    for column in ("protocol", "layout"):
        any_db.sql(f"UPDATE awa_internal.world SET {column} = {column} + 1")
        for session in (old, any_db.session()):
            for verb in WRITE_VERBS:
                statement = verb.replace("{receipt}", str(receipt))
                with pytest.raises(E.ObjectNotInPrerequisiteState) as refused:
                    session.sql(statement)
                    pytest.fail(f"not refused: {statement}")
                assert "does not know" in refused.value.diag.message_primary, statement
                assert "Reconnect" in refused.value.diag.message_hint
        assert everything(any_db) == before
        any_db.sql(f"UPDATE awa_internal.world SET {column} = {column} - 1")
    enqueue(old, [20])
    assert drain(any_db.session()) == [20]


# ----------------------------------------------------------------------------------------------------------- rule 13


@pytest.mark.parametrize("how", ["enqueue", "create_queue"])
def test_rule_13_a_new_queue_in_an_open_transaction_holds_up_only_itself(db, how):
    opener, other = db.session(), db.session(settings={"lock_timeout": "500ms"})
    enqueue(other, [1], "known")
    opener.sql("BEGIN")
    if how == "enqueue":
        enqueue(opener, [0], "fresh")
    else:
        opener.sql("SELECT awa.create_queue('fresh')")
    # Others go on: known queues, new ones, and new lanes of both.
    enqueue(other, [2], "known")
    enqueue(other, [3], "another")
    other.sql("SELECT awa.enqueue('known', '4', priority => 1)")
    other.sql("SELECT awa.create_queue('third')")
    assert sorted(drain(other, "known")) == [1, 2, 4]
    assert drain(other, "fresh") == []
    # The same new queue: an error after a moment, not a wait for somebody's COMMIT.
    other.sql("SET lock_timeout = 0")
    for attempt in ("SELECT awa.enqueue('fresh', '5')", "SELECT awa.create_queue('fresh')"):
        with pytest.raises(E.LockNotAvailable) as refused:
            other.sql(attempt)
        assert "create_queue" in refused.value.diag.message_hint
    opener.sql("ROLLBACK")
    enqueue(other, [6], "fresh")
    assert drain(other, "fresh") == [6]
    assert db.value("SELECT count(*) FROM awa_internal.queues WHERE name = 'fresh'") == 1


def test_rule_13_the_first_commits_and_the_second_goes_on(db):
    first, second = db.session(), db.session()
    first.sql("BEGIN")
    enqueue(first, [1], "fresh")
    pending = second.start("SELECT awa.enqueue('fresh', '2')")
    first.sql("COMMIT")
    pending.result()
    assert sorted(drain(second, "fresh")) == [1, 2]


def test_rule_13_a_new_lane_in_an_open_transaction_holds_up_nobody(any_db):
    opener, other = any_db.session(), any_db.session(settings={"lock_timeout": "500ms"})
    enqueue(other, [1])
    opener.sql("BEGIN")
    opener.sql("SELECT awa.enqueue('q', '10', priority => 1)")
    other.sql("SELECT awa.enqueue('q', '11', priority => 1)")
    other.sql("SELECT awa.enqueue('q', '12', priority => 3)")
    assert drain(other) == [11, 1, 12]
    opener.sql("COMMIT")
    assert drain(other) == [10]
    assert any_db.value("SELECT count(*) FROM awa_internal.lanes") == 0


def test_rule_13_and_33_a_queue_created_after_the_snapshot(db):
    for level in ("REPEATABLE READ", "SERIALIZABLE"):
        late, other = db.session(), db.session()
        late.sql(f"BEGIN ISOLATION LEVEL {level}")
        late.sql("SELECT count(*) FROM awa_internal.queues")
        enqueue(other, [1], level)
        enqueue(late, [2], level)
        assert late.value("SELECT awa.create_queue(%s)", [level]) is False
        assert [a for _, a in claim(late, 1, level)] == [1]
        late.sql("COMMIT")
        assert drain(other, level) == [2]


def test_rule_13_queue_ids_are_not_used_again(db):
    s = db.session()
    enqueue(s, [1], "a")
    s.sql("BEGIN")
    enqueue(s, [1], "b")
    s.sql("ROLLBACK")
    enqueue(s, [1], "c")
    a, c = (db.value("SELECT queue_id FROM awa_internal.queues WHERE name = %s", [n]) for n in "ac")
    assert c > a + 1
    assert drain(s, "c") == [1]


# ----------------------------------------------------------------------------------------------------------- rule 14


@pytest.mark.timeout(120)
@pytest.mark.parametrize("lanes", [0, 1])
def test_rule_14_more_lanes_than_shared_entries(make_cluster, lanes):
    server = make_cluster(flavour="injection", preload=True, settings={"awa_queue.shared_lanes": str(lanes)}).start()
    db = server.database()
    for i in range(4):
        db.sql("SELECT awa.create_queue(%s, %s)", [f"q{i}", json.dumps({"shards": 4})])
    stopping = threading.Event()
    lock = threading.Lock()
    put, got, errors = [], [], []
    numbers = iter(range(10**9))

    def produce():
        s = db.session()
        while not stopping.is_set():
            with lock:
                mine = [next(numbers) for _ in range(random.choice([1, 7]))]
            rollback = random.random() < 0.2
            s.sql("BEGIN")
            s.sql(
                "SELECT awa.enqueue_batch(%s, ARRAY(SELECT to_jsonb(n) FROM unnest(%s::int8[]) n), priority => %s)",
                [f"q{random.randrange(4)}", mine, random.randrange(1, 5)],
            )
            s.sql("ROLLBACK" if rollback else "COMMIT")
            if not rollback:
                with lock:
                    put.extend(mine)

    def work():
        s = db.session()
        while not stopping.is_set():
            rows = s.sql("SELECT receipt, args FROM awa.claim_from(ARRAY['q0', 'q1', 'q2', 'q3'], 20)")
            with lock:
                got.extend(a for _, a in rows)
            complete(s, rows)

    def keep():
        s = db.session()
        while not stopping.is_set():
            if s.value("SELECT awa_internal.seal()").startswith("sealed"):
                for slot in range(16):
                    s.sql("SELECT awa_internal.close(%s)", [slot])
                    s.sql('SELECT awa_internal."empty"(%s, true)', [slot])
            stopping.wait(0.1)

    def guarded(target):
        try:
            target()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=[t], daemon=True) for t in [produce] * 3 + [work] * 2 + [keep]]
    for t in threads:
        t.start()
    wait_until(lambda: errors or (len(put) > 2000 and len(got) > 1000), 90, "the load")
    stopping.set()
    for t in threads:
        t.join(60)
    assert errors == []
    s = db.session()
    for i in range(4):
        got += drain(s, f"q{i}")
    assert sorted(got) == sorted(put)
    assert overlaps(db) == []


# ----------------------------------------------------------------------------------------------------------- rule 15


def test_rule_15_retention_gives_way_when_no_slot_is_empty(db):
    s = db.session()
    for n in range(15):
        enqueue(s, [n])
        seal(s)
    complete(s, claim(s))
    enqueue(s, [15])
    assert s.value("SELECT awa_internal.seal()") == "no empty slot"
    # The default retention is a day, and all ended just now. The oldest go, as few as are needed.
    maintain_until(s, 0)
    slots = dict(db.sql(
        "SELECT DISTINCT ON (slot) slot, event FROM awa_internal.ring ORDER BY slot, event_no DESC"))
    assert slots[0] == "e"
    assert [slots[i] for i in range(1, 15)] == ["c"] * 14
    assert drain(s) == [15]


# ----------------------------------------------------------------------------------------------------------- rule 17


def test_rule_17_a_savepoint_that_is_rolled_back_frees_at_once(any_db):
    holder, other = any_db.session(), any_db.session()
    enqueue(other, range(10))
    holder.sql("BEGIN")
    holder.sql("SAVEPOINT a")
    assert len(claim(holder, 6)) == 6
    holder.sql("SAVEPOINT b")
    enqueue(holder, range(10, 13))
    assert [a for _, a in claim(other, 2)] == [6, 7]
    holder.sql("ROLLBACK TO a")
    # The outer transaction is still open; what hung on the savepoint is not.
    enqueue(holder, range(20, 22))
    enqueue(other, range(30, 32))
    got = [a for _, a in claim(other, 1000)]
    assert sorted(got) == [0, 1, 2, 3, 4, 5, 8, 9, 30, 31]
    holder.sql("COMMIT")
    assert drain(other) == [20, 21]
    assert overlaps(any_db) == []


# ----------------------------------------------------------------------------------------------------------- rule 18


def test_rule_18_autovacuum_leaves_the_logs_alone(db):
    options = db.sql(
        "SELECT c.relname, c.reloptions, t.reloptions FROM pg_class c LEFT JOIN pg_class t ON t.oid = c.reltoastrelid"
        " WHERE c.relnamespace = 'awa_internal'::regnamespace AND c.relispartition AND c.relkind = 'r'"
    )
    assert len(options) == 64
    wanted = {"autovacuum_enabled=off", "vacuum_truncate=off"}
    for name, own, toast in options:
        assert wanted <= set(own), name
        assert toast is not None or name.startswith("segments_"), name
        assert toast is None or wanted <= set(toast), name


@pytest.mark.timeout(120)
def test_rule_18_vacuum_freeze_under_load(any_db):
    with Load(any_db, 3, 3) as load:
        load.progress(20)
        for slot in range(3):
            for log in ("ready", "segments", "claims", "closures"):
                any_db.sql(f"VACUUM (FREEZE) awa_internal.{log}_{slot}")
            seal(any_db)
            load.progress(20)
        any_db.sql("VACUUM (FREEZE)")
        load.progress(20)
    load.drain_and_check()


def test_rule_18_a_waiting_finish_holds_no_pin(db):
    """Two that finish the same attempt: the second waits, and VACUUM passes all the same."""
    a, b = db.session(), db.session()
    enqueue(a, range(3))
    rows = claim(a)
    a.sql("BEGIN")
    complete(a, rows)
    pending = b.start_waiting(
        "SELECT state, changed FROM awa.complete(%s::int8[])", [[r for r, _ in rows]], event="transactionid"
    )
    keeper = db.session(settings={"lock_timeout": "3s", "statement_timeout": "20s"})
    for log in ("ready", "segments", "claims", "closures"):
        keeper.sql(f"VACUUM (FREEZE) awa_internal.{log}_0")
    a.sql("COMMIT")
    assert pending.result() == [("completed", False)] * 3


def test_rule_18_a_slot_that_is_being_vacuumed_is_blocked(db):
    s, vacuum = db.session(), db.session(autocommit=False)
    enqueue(s, range(3))
    complete(s, claim(s))
    seal(s)
    assert close(s, 0) == "closed"
    # What VACUUM holds.
    vacuum.sql("LOCK TABLE awa_internal.claims_0 IN SHARE UPDATE EXCLUSIVE MODE")
    assert empty(s, 0) == "blocked"
    enqueue(s, [7])
    assert drain(s) == [7]
    vacuum.connection.commit()
    must_empty(s, 0)


# ----------------------------------------------------------------------------------------------------------- rule 19


def test_rule_19_finishing_in_opposite_order_is_a_deadlock_that_one_survives(db):
    a, b = db.session(), db.session()
    enqueue(a, range(2))
    (first, _), (second, _) = claim(a, 1)[0], claim(a, 1)[0]
    for s in (a, b):
        s.sql("BEGIN")
        s.sql("SET LOCAL deadlock_timeout = '100ms'")
    a.sql("SELECT * FROM awa.complete(ARRAY[%s]::int8[])", [first])
    b.sql("SELECT * FROM awa.complete(ARRAY[%s]::int8[])", [second])
    waits = a.start_waiting("SELECT state FROM awa.complete(ARRAY[%s]::int8[])", [second], event="transactionid")
    other = b.start("SELECT state FROM awa.complete(ARRAY[%s]::int8[])", [first])
    wait_until(lambda: waits.done or other.done)
    failed = []
    for session, pending in ((a, waits), (b, other)):
        try:
            pending.result()
            session.sql("COMMIT")
        except E.DeadlockDetected:
            failed.append(session)
            session.sql("ROLLBACK")
    assert len(failed) == 1
    assert set(complete(b, [(first, 0), (second, 0)])) == {"completed"}


def test_rule_19_a_wait_for_another_finish_ends_at_lock_timeout(db):
    a, b = db.session(), db.session(settings={"lock_timeout": "100ms"})
    enqueue(a, range(2))
    rows = claim(a)
    a.sql("BEGIN")
    complete(a, rows)
    with pytest.raises(E.LockNotAvailable):
        complete(b, rows)
    a.sql("ROLLBACK")
    assert complete(b, rows) == ["completed"] * 2


# ----------------------------------------------------------------------------------------------------------- rule 21


def test_rule_21_complete_and_claim_with_and_without_strict(db):
    s = db.session()
    enqueue(s, range(10))
    rows = claim(s, 2)
    s.sql("SELECT * FROM awa.release(%s::int8[])", [[rows[0][0]]])
    receipts = [r for r, _ in rows]
    with pytest.raises(E.ObjectNotInPrerequisiteState) as stale:
        s.sql("SELECT * FROM awa.complete_and_claim(%s::int8[], ARRAY['q'], 3, strict => true)", [receipts])
    assert stale.value.diag.message_hint
    # Nothing happened: the one that was held still is.
    assert db.value("SELECT coalesce(sum(n), 0) FROM awa_internal.closures WHERE outcome = 'c'") == 0
    got = s.sql("SELECT args FROM awa.complete_and_claim(%s::int8[], ARRAY['q'], 3)", [receipts])
    assert got == [(2,), (3,), (4,)]
    assert db.value("SELECT sum(n) FROM awa_internal.closures WHERE outcome = 'c'") == 1
    assert db.value("SELECT stale_total FROM awa.queue_stats WHERE queue = 'q'") == 1


@pytest.mark.parametrize("verb", ["claim", "complete_and_claim"])
def test_rule_21_a_lost_row_is_closed_as_failed_and_the_lane_goes_on(db, verb):
    s = db.session()
    enqueue(s, range(10))
    held = claim(s, 1)
    db.sql("DELETE FROM awa_internal.ready_0 WHERE args IN ('3', '4')")
    db.sql("VACUUM awa_internal.ready_0")  # a row that is only marked as deleted is still there
    notices = []
    s.connection.add_notice_handler(lambda d: notices.append((d.severity, d.message_primary)))
    if verb == "claim":
        got = s.sql("SELECT args FROM awa.claim('q', 20)")
    else:
        got = s.sql("SELECT args FROM awa.complete_and_claim(%s::int8[], ARRAY['q'], 20)", [[held[0][0]]])
        assert db.value("SELECT sum(n) FROM awa_internal.closures WHERE outcome = 'c'") == 1
    assert [a for (a,) in got] == [1, 2, 5, 6, 7, 8, 9]
    assert [severity for severity, _ in notices] == ["WARNING"]
    assert db.sql("SELECT sum(n), min(reason) FROM awa_internal.closures WHERE outcome = 'f'") == [(2, "row lost")]
    assert drain(db.session()) == []


# ----------------------------------------------------------------------------------------------------------- rule 22


def test_rule_22_maintain_in_a_transaction_block(db):
    s = db.session(autocommit=False)
    with pytest.raises(E.ActiveSqlTransaction) as refused:
        s.sql("CALL awa.maintain()")
    assert "autocommit" in refused.value.diag.message_hint
    s.connection.rollback()
    with pytest.raises(E.ActiveSqlTransaction):
        db.sql("CREATE FUNCTION wrapped() RETURNS void LANGUAGE plpgsql AS 'BEGIN CALL awa.maintain(); END'")
        db.sql("SELECT wrapped()")
    db.sql("CALL awa.maintain()")
    db.sql("DO 'BEGIN CALL awa.maintain(); END'")


def test_rule_22_procedures_are_invokers_without_settings(db):
    rows = db.sql("SELECT proname, prosecdef, proconfig FROM pg_proc WHERE prokind = 'p'"
                  " AND pronamespace = 'awa'::regnamespace ORDER BY 1")
    assert rows == [("maintain", False, None), ("wait", False, None), ("wait_for", False, None)]


# ----------------------------------------------------------------------------------------------------------- rule 24


def test_rule_24_runs_stay_small_and_inline(db):
    assert db.sql("SELECT DISTINCT attstorage FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid"
                  " WHERE c.relnamespace = 'awa_internal'::regnamespace AND attname = 'runs' AND c.relispartition"
                  ) == [("p",)]
    assert db.sql("SELECT 1 FROM pg_class WHERE relname ~ '^segments_[0-9]+$' AND reltoastrelid <> 0") == []
    # 1,000 rows that fill a page by threes make some 350 runs: more than one segment holds them.
    s = db.session()
    ids = s.sql("SELECT unnest(awa.enqueue_batch('q', ARRAY(SELECT jsonb_build_object('n', n, 'x', repeat(md5(n::text), 50))"
                " FROM generate_series(1, 1000) n)))")
    assert len(ids) == 1000
    assert db.value("SELECT max(length(runs)) FROM awa_internal.segments") <= 200 * 8
    assert db.value("SELECT count(*) FROM awa_internal.segments") > 1
    rows = s.sql("SELECT job_id, args->'n' FROM awa.claim('q', 2000)")
    assert rows == [(i, n) for (i,), n in zip(ids, range(1, 1001))]


# ----------------------------------------------------------------------------------------------------------- rule 26


def test_rule_26_totals_that_emptying_leaves_are_exact(db):
    s = db.session()
    enqueue(s, range(20))
    s.sql("BEGIN")
    enqueue(s, range(100))
    s.sql("ROLLBACK")
    rows = claim(s, 12)
    complete(s, rows[:6])
    s.sql("SELECT * FROM awa.cancel_claimed(%s::int8[])", [[r for r, _ in rows[6:9]]])
    s.sql("SELECT * FROM awa.release(%s::int8[])", [[r for r, _ in rows[9:]]])
    complete(s, rows[9:])
    complete(s, claim(s))
    seal(s)
    assert close(s, 0) == "closed"
    must_empty(s, 0)
    totals = dict(db.sql("SELECT outcome, n FROM awa_internal.queue_totals"))
    assert totals == {"e": 23, "c": 6 + 8 + 3, "x": 3, "r": 3}
    # Late finishes are no endings of the slot's and are counted apart.
    assert db.sql("SELECT what, sum(n) FROM awa_internal.count_changes GROUP BY 1") == [("s", 3)]


# ----------------------------------------------------------------------------------------------------------- rule 27


def test_rule_27_every_mutable_table_has_a_primary_key(db):
    assert db.sql(
        "SELECT relname FROM pg_class c WHERE relnamespace = 'awa_internal'::regnamespace AND relkind = 'r'"
        " AND NOT relispartition AND NOT EXISTS (SELECT 1 FROM pg_index WHERE indrelid = c.oid AND indisprimary)"
    ) == []


def test_rule_27_all_verbs_work_while_all_tables_are_published(make_cluster):
    server = make_cluster(flavour="injection", settings={"wal_level": "logical"}).start()
    db = server.database()
    db.sql("CREATE PUBLICATION everything FOR ALL TABLES")
    s = db.session()
    enqueue(s, range(10))
    rows = claim(s, 6)
    complete(s, rows[:2])
    s.sql("SELECT * FROM awa.release(%s::int8[])", [[r for r, _ in rows[2:4]]])
    s.sql("SELECT * FROM awa.cancel_claimed(%s::int8[])", [[r for r, _ in rows[4:]]])
    s.sql("SELECT awa.alter_queue('q', '{\"shards\": 2}')")
    s.sql("SELECT awa.pause_queue('q')")
    s.sql("SELECT awa.resume_queue('q')")
    complete(s, claim(s))
    for slot in (0, 1):
        seal(s)
        assert close(s, slot) == "closed"
        must_empty(s, slot)
        enqueue(s, [slot])
        complete(s, claim(s))
    s.sql("CALL awa.maintain()")


# ----------------------------------------------------------------------------------------------------------- rule 28


@pytest.mark.parametrize("point, statement", [
    ("enqueue.reserved", "SELECT awa.enqueue('q', '99')"),
    ("claim.between_entries", "SELECT * FROM awa.claim('q', 3)"),
    ("close.locked", "SELECT * FROM awa.complete(ARRAY[{receipt}]::int8[])"),
])
def test_rule_28_an_interrupt_under_a_short_lock_leaves_nothing_behind(any_db, point, statement):
    other = any_db.session(settings={"lock_timeout": "5s"})
    for how in ("cancel", "terminate"):
        s = any_db.session()
        for n in range(5):
            enqueue(s, range(n * 2, n * 2 + 2))
        receipt = claim(s, 1)[0][0]
        s.pause_at(point)
        with any_db.gate() as gate:
            pending = gate.hold(s, statement.format(receipt=receipt))
            any_db.sql(f"SELECT pg_{how}_backend(%s)", [s.pid])
            assert isinstance(pending.error(), psycopg.OperationalError)
        wait_until(lambda: not any_db.sql("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND pid = %s", [s.pid]))
        enqueue(other, [50])
        assert complete(other, [(receipt, 0)]) == ["completed"]
        assert drain(other) == [*range(1, 10), 50]
        if how == "cancel":
            s.pause_at()
            enqueue(s, [51])
            assert drain(s) == [51]
    assert overlaps(any_db) == []


# ----------------------------------------------------------------------------------------------------------- rule 37


@pytest.mark.crash
def test_rule_37_after_a_crash_claims_are_flushed(make_cluster):
    """A job that brings the server down within the moment in which its claim is not on disk would come back for ever."""
    server = make_cluster(flavour="injection", preload=True, settings={"wal_writer_delay": "10s"}).start()
    db = server.database()
    victim = db.session()
    enqueue(victim, range(10))
    start = server.log_position()
    os.kill(victim.pid, signal.SIGKILL)
    wait_until(lambda: "database system is ready to accept connections" in server.log(start), 30, "the restart")
    db.connection.close()
    worker = db.session()
    rows = claim(worker, 3)
    server.kill9()
    server.start()
    s = db.session()
    assert complete(s, rows) == ["completed"] * 3
    assert drain(s) == list(range(3, 10))


# ----------------------------------------------------------------------------------------------------------- rule 38


def test_rule_38_every_function_is_parallel_unsafe(db):
    # Verbs and readers take snapshots of their own; what only computes from its arguments may be IMMUTABLE.
    assert db.sql("SELECT oid::regprocedure::text FROM pg_proc WHERE proparallel <> 'u' AND provolatile <> 'i'"
                  " AND pronamespace IN ('awa'::regnamespace, 'awa_internal'::regnamespace)") == []


def test_rule_38_ids_are_unique_over_sessions(db):
    sessions = [db.session() for _ in range(4)]
    ids = []
    for turn in range(4):
        for s in sessions:
            ids += [i for (i,) in enqueue(s, range([1, 700, 1024, 1500][turn]))]
    assert len(set(ids)) == len(ids)
    assert all(i > 0 for i in ids)


# ----------------------------------------------------------------------------------------------------------- rule 41


def test_rule_41_forged_receipts_are_refused(db):
    s = db.session()
    enqueue(s, range(3))
    receipt = claim(s)[0][0]
    number, slot = receipt >> 16, receipt >> 10 & 63
    forged = {
        "an index beyond the claim": receipt + 3,
        "the last index": receipt | 1023,
        "a number of the future": (number + (1 << 40)) << 16,
        "nothing": 0,
        "negative": -receipt,
        "the largest bigint": 2**63 - 1,
    }
    for what, r in forged.items():
        assert s.sql("SELECT state, job_id, changed FROM awa.complete(ARRAY[%s]::int8[])", [r]) == [
            ("unknown", None, False)], what
    # Another slot's, and a number below: such claims may have been emptied, so they count as stale.
    for r in (receipt + (1 << 10), (number - 1) << 16 | slot << 10):
        assert s.sql("SELECT state, changed FROM awa.complete(ARRAY[%s]::int8[])", [r])[0] in (
            ("stale", False), ("unknown", False))
    assert s.sql("SELECT receipt, state FROM awa.complete(ARRAY[NULL]::int8[])") == [(None, "unknown")]
    assert db.value("SELECT count(*) FROM awa_internal.closures") == 0
    assert complete(s, [(receipt + i, i) for i in range(3)]) == ["completed"] * 3


def test_rule_41_a_receipt_of_an_emptied_slot_does_not_touch_its_next_user(any_db):
    s = any_db.session()
    enqueue(s, range(3))
    old = claim(s)
    complete(s, old)
    first = seal(s)
    assert close(s, 0) == "closed"
    must_empty(s, 0)
    for _ in range(15):
        slot = seal(s)
        if slot == 0:
            break
        assert close(s, first) == "closed"
        must_empty(s, first)
        first = slot
    assert slot == 0
    enqueue(s, range(10, 13))
    new = claim(s)
    assert [r >> 10 & 63 for r, _ in new] == [0] * 3
    assert set(complete(s, old)) == {"stale"}
    assert complete(s, new) == ["completed"] * 3


def test_rule_41_slots_of_the_ring_are_bounded(db):
    with pytest.raises(E.CheckViolation):
        db.sql("INSERT INTO awa_internal.ring VALUES (1000, 64, 'o', 1000, 0)")
    for call in ("close(64)", "close(-1)", '"empty"(64)', "close(NULL)"):
        with pytest.raises((E.InvalidParameterValue, E.NullValueNotAllowed)):
            db.sql(f"SELECT awa_internal.{call}")
    assert db.value("SELECT awa_internal.close(63)") == "not open"


# ----------------------------------------------------------------------------------------------------------- rule 44


@pytest.mark.crash
def test_rule_44_a_transaction_that_wrote_more_than_claims_is_durable(make_cluster):
    server = make_cluster(flavour="injection", preload=True, settings={"wal_writer_delay": "10s"}).start()
    db = server.database()
    db.sql("CREATE TABLE effects (n int)")
    s = db.session()
    enqueue(s, range(40))

    def in_one(*statements):
        s.sql("BEGIN")
        for statement in statements:
            s.sql(statement)
        s.sql("COMMIT")

    take = "SELECT * FROM awa.claim('q')"
    in_one(take, "INSERT INTO effects VALUES (1)")
    in_one("INSERT INTO effects VALUES (2)", take)
    in_one(take, take, "INSERT INTO effects VALUES (3)", take)
    s.sql("WITH taken AS MATERIALIZED (SELECT * FROM awa.claim('q')) INSERT INTO effects SELECT 4 FROM taken")
    s.sql("DO $$ BEGIN PERFORM * FROM awa.claim('q'); INSERT INTO effects VALUES (5); PERFORM * FROM awa.claim('q'); END $$")
    in_one(take, "SELECT awa.enqueue('q', '100')")
    server.kill9()
    server.start()
    assert db.sql("SELECT n FROM effects ORDER BY 1") == [(n,) for n in (1, 2, 3, 4, 5)]
    assert 100 in drain(db.session())


# ----------------------------------------------------------------------------------------------------------- rule 45


def test_rule_45_claim_numbers_that_run_out_are_an_error(db):
    s = db.session()
    enqueue(s, range(3))
    db.sql("SELECT setval('awa_internal.claim_blocks', ((1::int8 << 47) / 64) - 1)")
    for _ in range(2):
        with pytest.raises(E.ProgramLimitExceeded) as refused:
            claim(s)
        assert refused.value.diag.message_hint
    assert db.value("SELECT count(*) FROM awa_internal.claims") == 0
    db.sql("SELECT setval('awa_internal.claim_blocks', 1)")
    assert drain(s) == [0, 1, 2]


# ----------------------------------------------------------------------------------------------------------- rule 46


def test_rule_46_what_a_limit_hides_is_held_all_the_same(db):
    s = db.session()
    enqueue(s, range(10))
    assert s.sql("SELECT args FROM awa.claim('q', 6) LIMIT 2") == [(0,), (1,)]
    assert db.value("SELECT sum(n) FROM awa_internal.claims") == 6
    s.sql("BEGIN")
    s.sql("DECLARE c CURSOR FOR SELECT args FROM awa.claim('q', 2)")
    assert s.sql("FETCH 1 FROM c") == [(6,)]
    s.sql("COMMIT")
    assert drain(s) == [8, 9]
