"""Waking (RULES 7, 13, 22, 29, 30; CASES 24, 49 to 51): CALL awa.wait, who wakes it, what it holds, and NOTIFY.

Which tests would fail without the wake: with preload a waiter looks again every second by itself, so a test of a wake asserts that
the wait ended well below that (LOOK); without preload it polls, and there only the outcome counts.
"""

import os
import signal
import threading
import time

import psycopg
import psycopg.sql
import pytest

from harness import wait_until

E = psycopg.errors

WAIT = "CALL awa.wait(%s, %s::interval)"
# Seconds: half of the regular look of a waiter.
LOOK = 0.5


def wait(session, queues=("q",), timeout="10 s"):
    return session.value(WAIT, [list(queues), timeout])


def sleeps(db, session):
    """Returns once the session sleeps in its wait."""
    wait_until(lambda: (db.activity(session.pid) or [None] * 3)[1:3] == ("Extension", "Extension"), what="the session to sleep")


def start(db, queues=("q",), timeout="10 s", **options):
    """A session that sleeps in awa.wait, and its Pending."""
    session = db.session(**options)
    pending = session.start(WAIT, [list(queues), timeout])
    sleeps(db, session)
    return session, pending


def woken(pending, since):
    """The wait ended with true, by a wake and not by the regular look."""
    assert pending.result() == [(True,)]
    took = time.monotonic() - since
    assert took < LOOK, f"took {took:.3f} s"


def is_preloaded(db):
    return db.value("SHOW shared_preload_libraries") == "awa_queue"


# ------------------------------------------------------------------------------------------------------- what it is


def test_a_job_that_is_there_is_found_at_once(any_db):
    any_db.sql("SELECT awa.enqueue('q')")
    session = any_db.session()
    assert wait(session) is True
    # It took nothing.
    assert len(session.sql("SELECT * FROM awa.claim('q', 10)")) == 1
    assert wait(session, timeout="0 s") is False


def test_the_deadline_ends_it_with_false(any_db):
    any_db.sql("SELECT awa.create_queue('q')")
    began = time.monotonic()
    assert wait(any_db.session(), timeout="300 ms") is False
    assert 0.29 < time.monotonic() - began < 2


def test_a_commit_ends_it_with_true(any_db):
    any_db.sql("SELECT awa.create_queue('q')")
    session, pending = start(any_db)
    assert not pending.done
    since = time.monotonic()
    any_db.sql("SELECT awa.enqueue('q')")
    woken(pending, since)


def test_rule_22_nothing_is_held_while_it_waits(any_db):
    any_db.sql("SELECT awa.create_queue('q')")
    session, pending = start(any_db)
    seen = any_db.row("SELECT backend_xmin, backend_xid FROM pg_stat_activity WHERE pid = %s", [session.pid])
    assert seen == (None, None)
    locks = any_db.sql("SELECT locktype, relation::regclass FROM pg_locks WHERE pid = %s AND locktype <> 'virtualxid'", [session.pid])
    assert locks == []
    any_db.sql("SELECT awa.enqueue('q')")
    assert pending.result() == [(True,)]


@pytest.mark.parametrize(
    "before, statement",
    [
        ("BEGIN", "CALL awa.wait('{q}')"),
        (None, "DO $$DECLARE r boolean; BEGIN PERFORM 1; BEGIN CALL awa.wait('{q}', '1 s', r); EXCEPTION WHEN division_by_zero THEN NULL; END; END$$"),
        (None, "SELECT waits()"),
        (None, "SELECT 1; CALL awa.wait('{q}')"),
    ],
)
def test_rule_22_inside_a_transaction_block_it_is_refused(db, before, statement):
    db.sql("CREATE FUNCTION waits() RETURNS boolean LANGUAGE plpgsql AS $$DECLARE r boolean; BEGIN CALL awa.wait('{q}', '1 s', r); RETURN r; END$$")
    session = db.session()
    if before:
        session.sql(before)
    with pytest.raises(E.ActiveSqlTransaction) as error:
        session.sql(statement)
    assert "autocommit" in error.value.diag.message_hint


def test_in_a_do_block_of_its_own_it_may_commit(any_db):
    """A DO block outside a transaction block is as good as autocommit."""
    any_db.sql("SELECT awa.enqueue('q')")
    any_db.sql("DO $$DECLARE r boolean; BEGIN CALL awa.wait('{q}', '1 s', r); IF r IS NOT TRUE THEN RAISE 'not ready'; END IF; END$$")


def test_psycopg_without_autocommit_is_told_what_to_do(db):
    connection = db.connect(autocommit=False)
    with pytest.raises(E.ActiveSqlTransaction):
        connection.execute("CALL awa.wait('{q}')")


def test_simple_protocol(any_db):
    any_db.sql("SELECT awa.enqueue('q')")
    result = any_db.connect().pgconn.exec_(b"CALL awa.wait('{q}', '1 s')")
    assert result.get_value(0, 0) == b"t"
    assert result.fname(0) == b"ready"


@pytest.mark.parametrize("timeout", ["-1 s", "25 h", "1 year"])
def test_bad_timeouts(db, timeout):
    with pytest.raises(E.InvalidParameterValue):
        wait(db.session(), timeout=timeout)


def test_null_elements_and_options(db):
    with pytest.raises(E.NullValueNotAllowed):
        db.sql("CALL awa.wait(ARRAY['q', NULL])")
    with pytest.raises(E.ArraySubscriptError):
        db.sql("CALL awa.wait(ARRAY[['q'],['r']])")
    with pytest.raises(E.InvalidParameterValue):
        db.sql("CALL awa.wait('{q}', '1 s', NULL, '{\"what\": 1}')")


@pytest.mark.parametrize("queues", ["NULL", "'{}'"])
def test_no_queue_never_is_ready_but_does_not_spin(any_db, queues):
    began = time.monotonic()
    assert any_db.value(f"CALL awa.wait({queues}, '200 ms')") is False
    assert time.monotonic() - began > 0.19


def test_a_null_timeout_is_the_default(db):
    db.sql("SELECT awa.enqueue('q')")
    assert db.value("CALL awa.wait('{q}', NULL)") is True


def test_an_unknown_queue_is_waited_for_with_one_warning(any_db):
    session = any_db.session()
    warned = []
    session.connection.add_notice_handler(lambda d: warned.append((d.sqlstate, d.message_primary)))
    assert wait(session, ["nobody"], "200 ms") is False
    assert wait(session, ["nobody"], "10 ms") is False
    assert warned == [("01000", 'queue "nobody" does not exist')]


@pytest.mark.parametrize("how", ["enqueue", "create first"])
def test_rule_13_the_first_job_of_a_new_queue_wakes(any_db, how):
    session, pending = start(any_db, ["new", "newer"])
    if how == "create first":
        any_db.sql("SELECT awa.create_queue('new')")
        sleeps(any_db, session)
        time.sleep(0.05)  # it looks and registers anew
        assert not pending.done
    since = time.monotonic()
    any_db.sql("SELECT awa.enqueue('new')")
    woken(pending, since)


def test_a_paused_queue_does_not_count_and_resuming_wakes(any_db):
    any_db.sql("SELECT awa.enqueue('q')")
    any_db.sql("SELECT awa.pause_queue('q')")
    session = any_db.session()
    assert wait(session, timeout="50 ms") is False
    session, pending = start(any_db)
    since = time.monotonic()
    any_db.sql("SELECT awa.resume_queue('q')")
    woken(pending, since)


# ------------------------------------------------------------------------------------------------------- who wakes


def test_rule_30_rollback_of_a_claim_wakes(any_db):
    any_db.sql("SELECT awa.enqueue('q')")
    claimer = any_db.session(autocommit=False)
    assert len(claimer.sql("SELECT * FROM awa.claim('q')")) == 1
    session, pending = start(any_db)
    since = time.monotonic()
    claimer.connection.rollback()
    woken(pending, since)


def test_rule_30_claims_of_several_transactions_are_not_left_alone_in_the_last_look(any_db):
    """Many open claims share one range, which claims look at again after 50 ms only."""
    any_db.sql("SELECT awa.enqueue_batch('q', array_fill('1'::jsonb, ARRAY[30]))")
    claimers = [any_db.session(autocommit=False) for _ in range(30)]
    for claimer in claimers:
        assert len(claimer.sql("SELECT * FROM awa.claim('q')")) == 1
    session, pending = start(any_db)
    since = time.monotonic()
    claimers[20].connection.rollback()
    woken(pending, since)
    for claimer in claimers:
        claimer.connection.rollback()


def test_rule_30_rollback_to_a_savepoint_wakes(any_db):
    any_db.sql("SELECT awa.enqueue('q')")
    claimer = any_db.session(autocommit=False)
    claimer.sql("SAVEPOINT a")
    assert len(claimer.sql("SELECT * FROM awa.claim('q')")) == 1
    session, pending = start(any_db)
    since = time.monotonic()
    claimer.sql("ROLLBACK TO a")
    woken(pending, since)
    claimer.connection.rollback()


def test_rule_30_a_session_that_dies_with_its_claim_wakes(any_db):
    any_db.sql("SELECT awa.enqueue('q')")
    claimer = any_db.session(autocommit=False)
    claimer.sql("SELECT * FROM awa.claim('q')")
    session, pending = start(any_db)
    since = time.monotonic()
    any_db.sql("SELECT pg_terminate_backend(%s)", [claimer.pid])
    woken(pending, since)


def test_rule_30_release_wakes(any_db):
    any_db.sql("SELECT awa.enqueue('q')")
    receipt = any_db.value("SELECT receipt FROM awa.claim('q')")
    session, pending = start(any_db)
    since = time.monotonic()
    any_db.sql("SELECT * FROM awa.release(ARRAY[%s::int8])", [receipt])
    woken(pending, since)


def test_a_released_savepoint_wakes_at_commit_and_a_rolled_back_one_leaves_it_asleep(any_db):
    any_db.sql("SELECT awa.create_queue('q')")
    producer = any_db.session(autocommit=False)
    session, pending = start(any_db)
    producer.sql("SAVEPOINT a")
    producer.sql("SELECT awa.enqueue('q')")
    producer.sql("ROLLBACK TO a")
    producer.connection.commit()
    sleeps(any_db, session)
    assert not pending.done
    producer.sql("SAVEPOINT a")
    producer.sql("SELECT awa.enqueue('q')")
    producer.sql("RELEASE a")
    since = time.monotonic()
    producer.connection.commit()
    woken(pending, since)


def test_an_aborted_producer_opens_a_strict_lane(any_db):
    any_db.sql("SELECT awa.create_queue('q', '{\"ordering\": \"strict\"}')")
    producer = any_db.session(autocommit=False)
    producer.sql("SELECT awa.enqueue('q')")
    any_db.sql("SELECT awa.enqueue('q')")
    session, pending = start(any_db)
    since = time.monotonic()
    producer.connection.rollback()
    woken(pending, since)


def test_rule_7_a_prepared_job_is_found_by_the_regular_look(any_db):
    any_db.sql("SELECT awa.create_queue('q')")
    producer = any_db.session()
    session, pending = start(any_db)
    for statement in ("BEGIN", "SELECT awa.enqueue('q')", "PREPARE TRANSACTION 'p'"):
        producer.sql(statement)
    sleeps(any_db, session)
    assert not pending.done
    since = time.monotonic()
    producer.sql("COMMIT PREPARED 'p'")
    assert pending.result() == [(True,)]
    assert time.monotonic() - since < 3


def test_more_queues_than_a_transaction_or_a_waiter_names_one_by_one(any_db):
    names = [f"many.{i}" for i in range(70)]
    for name in names:
        any_db.sql("SELECT awa.create_queue(%s)", [name])
    wide, of_wide = start(any_db, names)
    narrow, of_narrow = start(any_db, names[66:67])
    producer = any_db.session(autocommit=False)
    for name in names:
        producer.sql("SELECT awa.enqueue(%s)", [name])
    since = time.monotonic()
    producer.connection.commit()
    woken(of_wide, since)
    woken(of_narrow, since)


def test_other_queues_do_not_wake(any_db):
    any_db.sql("SELECT awa.create_queue('q')")
    session, pending = start(any_db, timeout="400 ms")
    any_db.sql("SELECT awa.enqueue('other')")
    assert pending.result() == [(False,)]


# ------------------------------------------------------------------------------------------- never missing a wake


@pytest.mark.parametrize("point", ["wait.registered", "wait.before_sleep"])
def test_a_commit_between_the_last_look_and_the_sleep_wakes(any_db, point):
    any_db.sql("SELECT awa.create_queue('q')")
    session = any_db.session()
    wait(session, timeout="0 s")  # what a first wait reads is known
    with any_db.gate() as gate:
        session.pause_at(point)
        pending = gate.hold(session, WAIT, [["q"], "10 s"])
        any_db.sql("SELECT awa.enqueue('q')")
        since = time.monotonic()
        gate.open()
        woken(pending, since)


def test_200_waiters_and_one_job_at_a_time(make_cluster):
    """Each job is taken by one of them within a moment; nobody sleeps through."""
    cluster = make_cluster(flavour="injection", preload=True, settings={"max_connections": "230"})
    db = cluster.start().database()
    db.sql("SELECT awa.create_queue('q')")
    stop, taken, failed = threading.Event(), [], []
    lock = threading.Lock()

    def work(connection):
        try:
            while not stop.is_set():
                if connection.execute("CALL awa.wait('{q}', '60 s')").fetchone()[0]:
                    rows = connection.execute("SELECT job_id FROM awa.claim('q')").fetchall()
                    with lock:
                        taken.extend((time.monotonic(), job) for (job,) in rows)
        except psycopg.Error as error:
            if not stop.is_set():
                failed.append(error)

    connections = [db.connect() for _ in range(200)]
    threads = [threading.Thread(target=work, args=(c,), daemon=True) for c in connections]
    for thread in threads:
        thread.start()
    pids = [c.info.backend_pid for c in connections]
    try:
        asleep = "SELECT count(*) FROM pg_stat_activity WHERE pid = ANY(%s) AND wait_event = 'Extension'"
        wait_until(lambda: db.value(asleep, [pids]) == 200, what="all to sleep")
        late = []
        for i in range(100):
            sent = time.monotonic()
            db.sql("SELECT awa.enqueue('q')")
            wait_until(lambda: len(taken) == i + 1 or failed, timeout=10, what=f"job {i} to be taken")
            assert not failed
            late.append(taken[-1][0] - sent)
        # One that was missed would take until the regular look, half a second later on average.
        assert sorted(late)[90] < LOOK, sorted(late)[-20:]
    finally:
        stop.set()
        db.sql("SELECT pg_terminate_backend(p) FROM unnest(%s::int[]) p", [pids])
        for thread in threads:
            thread.join(30)


def test_one_job_wakes_one_waiter(preload_db):
    db = preload_db
    db.sql("SELECT awa.create_queue('q')")
    waiters = [start(db, timeout="600 ms") for _ in range(5)]
    db.sql("SELECT awa.enqueue('q')")
    # Its owner is quick: the others find nothing at their deadline.
    wait_until(lambda: any(p.done for _, p in waiters), what="one to wake")
    db.sql("SELECT * FROM awa.claim('q')")
    assert sorted(p.result()[0][0] for _, p in waiters) == [False] * 4 + [True]


def test_a_wake_that_is_not_looked_after_is_passed_on(preload_db):
    """The first waiter is woken and cancelled before it looks; the second one gets its wake."""
    db = preload_db
    db.sql("SELECT awa.create_queue('q')")
    first = db.session()
    wait(first, timeout="0 s")
    with db.gate() as gate:
        first.pause_at("wait.before_sleep")
        held = gate.hold(first, WAIT, [["q"], "10 s"])
        db.sql("SELECT awa.enqueue('q')")  # wakes the first, which is the only one
        claimer, second = db.session(), db.session()
        for statement in ("BEGIN", "SELECT * FROM awa.claim('q')", "PREPARE TRANSACTION 'c'"):
            claimer.sql(statement)
        pending = second.start(WAIT, [["q"], "10 s"])
        sleeps(db, second)
        claimer.sql("ROLLBACK PREPARED 'c'")  # frees the job and wakes nobody
        since = time.monotonic()
        db.sql("SELECT pg_cancel_backend(%s)", [first.pid])
        assert isinstance(held.error(), E.QueryCanceled)
        woken(pending, since)


def test_terminated_waiters_free_their_entries(make_cluster):
    cluster = make_cluster(flavour="injection", preload=True, settings={"awa_queue.max_waiters": "2"})
    cluster.start()
    db = cluster.database()
    db.sql("SELECT awa.create_queue('q')")
    for how in ("pg_terminate_backend", "pg_cancel_backend", "kill"):
        for _ in range(2):
            session, pending = start(db)
            if how == "kill":
                os.kill(session.pid, signal.SIGTERM)
            else:
                db.sql(f"SELECT {how}(%s)", [session.pid])
            assert isinstance(pending.error(), (E.QueryCanceled, E.AdminShutdown, psycopg.OperationalError))
    # Two fit, and both are woken; a third polls.
    waiters = [start(db) for _ in range(3)]
    since = time.monotonic()
    db.sql("SELECT awa.enqueue_batch('q', '{1,2,3}')")
    for _, pending in waiters:
        woken(pending, since)


# ------------------------------------------------------------------------------------- timeouts, cancel, discard


def test_it_ends_half_a_second_before_statement_timeout(any_db):
    session = any_db.session()
    session.sql("SELECT awa.create_queue('q')")
    session.sql("SET statement_timeout = '1s'")
    began = time.monotonic()
    assert wait(session) is False
    assert 0.4 < time.monotonic() - began < 0.95
    session.sql("SET statement_timeout = '200ms'")
    assert wait(session) is False


def test_lock_timeout_and_idle_timeout_do_not_end_it(any_db):
    session = any_db.session()
    session.sql("SELECT awa.create_queue('q')")
    session.sql("SET lock_timeout = '20ms'; SET idle_in_transaction_session_timeout = '20ms'; SET idle_session_timeout = '100ms'")
    assert wait(session, timeout="300 ms") is False


@pytest.mark.majors(18)
def test_transaction_timeout_does_not_end_it(any_db):
    session = any_db.session()
    session.sql("SELECT awa.create_queue('q')")
    session.sql("SET transaction_timeout = '300ms'")
    assert wait(session, timeout="2 s") is False


def test_cancel_ends_it_at_once_and_the_session_goes_on(any_db):
    any_db.sql("SELECT awa.create_queue('q')")
    session, pending = start(any_db, timeout="1 min")
    since = time.monotonic()
    session.cancel()
    assert isinstance(pending.error(), E.QueryCanceled)
    assert time.monotonic() - since < LOOK
    session.sql("DISCARD ALL")
    any_db.sql("SELECT awa.enqueue('q')")
    assert wait(session) is True


def test_terminate_ends_it_at_once(any_db):
    any_db.sql("SELECT awa.create_queue('q')")
    session, pending = start(any_db, timeout="1 min")
    since = time.monotonic()
    any_db.sql("SELECT pg_terminate_backend(%s)", [session.pid])
    assert isinstance(pending.error(), psycopg.OperationalError)
    assert time.monotonic() - since < LOOK


def test_a_read_only_session_may_wait(any_db):
    """It takes nothing."""
    any_db.sql("SELECT awa.enqueue('q')")
    session = any_db.session()
    session.sql("SET default_transaction_read_only = on; SET default_transaction_isolation = 'serializable'")
    assert wait(session) is True


def test_who_may_execute_it_needs_no_other_right(any_db):
    any_db.sql("SELECT awa.enqueue('q')")
    any_db.sql("CREATE ROLE waiter LOGIN")
    try:
        any_db.sql("GRANT USAGE ON SCHEMA awa TO waiter; GRANT EXECUTE ON ALL ROUTINES IN SCHEMA awa TO waiter")
        connection = any_db.connect(user="waiter")
        assert connection.execute("CALL awa.wait('{q}')").fetchone() == (True,)
        connection.close()
    finally:
        any_db.sql("DROP OWNED BY waiter; DROP ROLE waiter")


def test_case_24_a_waiter_without_work_reads_next_to_nothing(preload_db):
    """Looks of an idle second, in buffers of the queue's tables. Not of the whole database: autovacuum reads the catalogs."""
    db = preload_db
    db.sql("SELECT awa.enqueue_batch('q', array_fill(to_jsonb(repeat('x', 1000)), ARRAY[1000]))")
    db.sql("SELECT * FROM awa.claim('q', 1000)")
    session = db.session()
    wait(session, timeout="0 s")

    def buffers():
        for reading in (db, session):  # what was read so far is counted late
            reading.sql("SELECT pg_stat_force_next_flush()")
            reading.sql("SELECT 1")
        return db.value("SELECT sum(heap_blks_hit + heap_blks_read + coalesce(idx_blks_hit + idx_blks_read, 0))::int8"
                        " FROM pg_statio_all_tables WHERE schemaname = 'awa_internal'")

    before = buffers()
    assert wait(session, timeout="2500 ms") is False
    idle = buffers() - before
    db.sql("SELECT count(*) FROM awa.jobs")
    whole = buffers() - before - idle
    assert idle < whole / 2, (idle, whole)
    assert idle < 50, idle


# ------------------------------------------------------------------------------------------------------------- NOTIFY

NAMES = ["Mixed Case", 'with "quotes"', "it's", "ä" * 200, "x" * 200, "plain"]


def heard(connection, timeout=0.0):
    return [(n.channel, n.payload) for n in connection.notifies(timeout=timeout)]


def listen(db, *queues):
    connection = db.connect()
    for queue in queues:
        channel = db.value("SELECT awa.channel(%s)", [queue])
        connection.execute(psycopg.sql.SQL("LISTEN {}").format(psycopg.sql.Identifier(channel)))
    return connection


def test_case_49_maintenance_notifies_for_the_queues_that_ask(any_db):
    db = any_db
    listener = listen(db, *NAMES, "quiet")
    for name in NAMES:
        db.sql("SELECT awa.create_queue(%s, '{\"notify\": true}')", [name])
        db.sql("SELECT awa.enqueue(%s)", [name])
    db.sql("SELECT awa.enqueue('quiet')")
    assert heard(listener, 0.1) == []  # not by the producer's commit
    db.sql("CALL awa.maintain()")
    wanted = sorted((db.value("SELECT awa.channel(%s)", [name]), "") for name in NAMES)
    assert sorted(heard(listener, 0.5)) == wanted


def test_case_50_notifications_are_coalesced(any_db):
    db = any_db
    db.sql("SELECT awa.create_queue('q', '{\"notify\": true}')")
    listener = listen(db, "q")
    db.sql("SET awa_queue.clock_offset = 0")
    for _ in range(5):
        db.sql("SELECT awa.enqueue('q')")
        db.sql("CALL awa.maintain()")
        db.sql("SELECT awa.enqueue('q')")
    sent = len(heard(listener, 0.3))
    assert 1 <= sent < 5
    # What came within the window is announced after it.
    db.sql("SET awa_queue.clock_offset = 1000")
    db.sql("CALL awa.maintain()")
    assert heard(listener, 0.3) == [("awa:q", "")]


def test_with_preload_no_news_no_notification(preload_db):
    db = preload_db
    db.sql("SELECT awa.create_queue('q', '{\"notify\": true}')")
    db.sql("CALL awa.maintain()")
    db.sql("SELECT awa.enqueue('q')")
    db.sql("CALL awa.maintain()")
    listener = listen(db, "q")
    db.sql("SET awa_queue.clock_offset = 1000")
    db.sql("CALL awa.maintain()")
    assert heard(listener, 0.2) == []


def test_the_setting_can_be_changed(any_db):
    db = any_db
    listener = listen(db, "q")
    db.sql("SELECT awa.create_queue('q', '{\"notify\": true}')")
    assert db.value("SELECT settings->'notify' FROM awa.queues") is True
    assert db.value("SELECT awa.alter_queue('q', '{\"notify\": false}')->'notify'") is False
    db.sql("SELECT awa.enqueue('q')")
    db.sql("CALL awa.maintain()")
    assert heard(listener, 0.2) == []
    with pytest.raises(E.InvalidParameterValue):
        db.sql("SELECT awa.alter_queue('q', '{\"notify\": \"yes\"}')")


def test_case_49_a_producer_takes_no_lock_of_notify(preload_db):
    """Another session sits in the lock that notifying commits share; a producer of a notifying queue passes."""
    db = preload_db
    db.sql("SELECT awa.create_queue('q', '{\"notify\": true}')")
    holder = db.session(autocommit=False)
    # The lock is on database 0, class pg_database, object 0: LOCK TABLE can not take it, a prepared NOTIFY can not either;
    # a commit that notifies holds it to its end, so look at what a producer's transaction has at its commit.
    holder.sql("SELECT awa.enqueue('q')")
    locks = db.sql("SELECT locktype, classid::regclass::text FROM pg_locks WHERE pid = %s AND locktype = 'object' AND database = 0", [holder.pid])
    assert locks == []
    holder.sql("PREPARE TRANSACTION 'n'")  # refused for a transaction that sends NOTIFY
    db.sql("ROLLBACK PREPARED 'n'")
