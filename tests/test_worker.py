"""The launcher, the workers and the duties they run.

The server of most tests is preloaded with its workers on. Nothing here waits for a duty's period: the clock of the
workers is set ahead (awa_queue.clock_offset), or CALL awa.maintain() runs the same steps.
"""

import os
import signal
import time
from pathlib import Path

import psycopg
import pytest

from harness import Cluster, Database, wait_until
from harness.cluster import _children

from conftest import MAJOR

E = psycopg.errors
ON = {"awa_queue.worker": "on", "autovacuum": "off", "awa_queue.slot_age": "1"}


@pytest.fixture(scope="module")
def server():
    settings = dict(ON)
    if MAJOR == 15:  # contrib is there on 15 only
        settings.update({"shared_preload_libraries": "awa_queue,pg_stat_statements", "pg_stat_statements.track": "all"})
    cluster = Cluster(MAJOR, flavour="injection", preload=True, settings=settings)
    try:
        yield cluster.start()
    finally:
        cluster.remove()


@pytest.fixture
def wdb(server):
    """A database of the server with workers."""
    if not server.running:
        server._server = None
        server.start()
    database = server.database()
    yield database
    close(database)
    if server.running:
        server.psql(f'DROP DATABASE IF EXISTS "{database.name}" WITH (FORCE)')


def close(db):
    """Closes the database's own connection, so that nobody but a worker is in it."""
    if db._own is not None:
        db._own.close()
        db._own = None


def worker(db):
    """The pid of the database's worker, or None; asked from another database."""
    found = db.cluster.psql(
        f"SELECT pid FROM pg_stat_activity WHERE backend_type = 'awa_queue worker' AND datname = '{db.name}'"
    )
    assert "\n" not in found, "one worker a database"
    return int(found) if found else None


def launcher(cluster):
    found = cluster.psql("SELECT pid FROM pg_stat_activity WHERE backend_type = 'awa_queue launcher'")
    return int(found) if found else None


def started(db, other_than=None):
    """The pid of a worker that has looked at its duties."""
    return wait_until(lambda: (pid := worker(db)) and pid != other_than and pid, 20, "a worker")


def duty(db, name, what="last_run"):
    rows = db.sql(f"SELECT {what} FROM awa_internal.duties WHERE duty = %s", [name])
    return rows[0][0] if rows else None


def use(db, n=1, queue="q"):
    return db.sql("SELECT unnest(awa.enqueue_batch(%s, ARRAY(SELECT to_jsonb(i) FROM generate_series(1, %s) i)))", [queue, n])


def finish_all(db, queue="q"):
    while receipts := [r for (r,) in db.sql("SELECT receipt FROM awa.claim(%s, 1000)", [queue])]:
        db.sql("SELECT * FROM awa.complete(%s::int8[])", [receipts])


def states(db):
    return dict(db.sql("SELECT DISTINCT ON (slot) slot, event::text FROM awa_internal.ring ORDER BY slot, event_no DESC"))


def complaints(cluster, since):
    """Lines of the log that a DBA would look at."""
    return [line for line in cluster.log(since).splitlines()
            if any(w in line for w in ("ERROR:", "FATAL:", "PANIC:", "WARNING:"))]


def ahead(cluster, seconds):
    """Sets the clock of the workers."""
    wanted = str(int(seconds * 1000))
    cluster.configure(**{"awa_queue.clock_offset": wanted})
    cluster.reload()
    show = "SELECT setting FROM pg_settings WHERE name = 'awa_queue.clock_offset'"
    wait_until(lambda: cluster.psql(show) == wanted, what="the clock to be set")


# ------------------------------------------------------------------------------------------------------- who is there


def test_a_worker_comes_with_the_first_verb(wdb):
    assert launcher(wdb.cluster)
    assert worker(wdb) is None
    use(wdb)
    started(wdb)
    wait_until(lambda: duty(wdb, "ring"), what="the duties to have run")
    assert wdb.row("SELECT system_id = s.system_identifier, w.database = d.oid FROM awa_internal.world w,"
                   " pg_control_system() s, pg_database d WHERE d.datname = current_database()") == (True, True)


def test_a_first_verb_that_rolls_back_leaves_the_database_as_it_was(wdb):
    s = wdb.session(autocommit=False)
    s.sql("SELECT awa.enqueue('q', '1')")
    s.connection.rollback()
    assert wdb.row("SELECT system_id, database FROM awa_internal.world") == (None, None)
    # A second one while the first is open is not kept waiting.
    s.sql("SELECT awa.enqueue('q', '1')")
    other = wdb.session()
    other.sql("SET statement_timeout = '10s'")
    other.sql("SELECT awa.enqueue('q2', '2')")
    s.connection.commit()
    use(wdb)
    assert wdb.value("SELECT system_id IS NOT NULL FROM awa_internal.world")
    started(wdb)


def test_the_first_verb_can_be_prepared(wdb):
    s = wdb.session()
    s.sql("BEGIN")
    s.sql("SELECT awa.enqueue('q', '1')")
    s.sql("PREPARE TRANSACTION 'first'")
    s.sql("COMMIT PREPARED 'first'")
    assert wdb.value("SELECT system_id IS NOT NULL FROM awa_internal.world")
    use(wdb)
    started(wdb)


def test_workers_are_found_at_start(wdb):
    use(wdb)
    started(wdb)
    plain = wdb.cluster.database(extension=False)
    try:
        close(plain)
        close(wdb)
        wdb.cluster.restart()
        started(wdb)
        assert wdb.cluster.psql(
            "SELECT string_agg(datname, ',') FROM pg_stat_activity WHERE backend_type = 'awa_queue worker'") == wdb.name
    finally:
        plain.cluster.psql(f'DROP DATABASE "{plain.name}"')


@pytest.mark.parametrize("late", ["a commit", "a commit of a prepared transaction", "a rollback"])
def test_a_due_job_that_the_last_look_could_not_see_is_found_in_an_idle_database(wdb, late):
    """A producer that commits behind what was promoted last; a cancel that had it in hand and is rolled back."""
    wdb.sql("SELECT awa.create_queue('q')")
    started(wdb)
    session = wdb.session()
    if late.startswith("a commit"):
        session.sql("BEGIN")
        (job,) = session.row("SELECT awa.enqueue('q', run_in => '200 ms')")
        if late != "a commit":
            session.sql("PREPARE TRANSACTION 'late'")
    else:
        job = wdb.value("SELECT awa.enqueue('q', run_in => '1 s')")
        session.sql("BEGIN")
        session.sql("SELECT awa.cancel(ARRAY[%s::int8])", [job])
    # Others keep the worker busy, so that it has just looked at all of them when the last is let go.
    until = time.monotonic() + 4.2
    while time.monotonic() < until:
        wdb.sql("SELECT awa.enqueue('other', run_in => '50 ms')")
        time.sleep(0.1)
    assert wdb.sql("SELECT awa.claim('q')") == []
    session.sql({"a commit": "COMMIT", "a rollback": "ROLLBACK"}.get(late, "COMMIT PREPARED 'late'"))
    wait_until(lambda: wdb.value("SELECT state FROM awa.job(%s)", [job]) == "ready", 20, "the job to be promoted")


def counts(db):
    transactions = db.cluster.psql(f"SELECT xact_commit, xact_rollback FROM pg_stat_database WHERE datname = '{db.name}'")
    statements = ""
    if MAJOR == 15:
        statements = db.cluster.psql("SELECT coalesce(sum(s.calls), 0) FROM pg_stat_statements s JOIN pg_database d"
                                     f" ON d.oid = s.dbid WHERE d.datname = '{db.name}'")
    return transactions, statements


@pytest.mark.parametrize("jobs", ["none", "waiting", "finished and retained"])
def test_an_idle_database_costs_nothing(wdb, jobs):
    """Zero statements and zero transactions, also while jobs wait and while finished ones are retained."""
    if MAJOR == 15:
        wdb.cluster.psql("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
    wdb.sql("SELECT awa.create_queue('q', '{\"retention\": \"1 day\"}')")
    if jobs != "none":
        use(wdb, 20)
    if jobs != "waiting":
        finish_all(wdb)
    pid = started(wdb)
    wait_until(lambda: duty(wdb, "ring"), what="the duties to have run")
    if jobs == "finished and retained":
        wdb.sql("SELECT awa_internal.seal()")
        use(wdb)
        finish_all(wdb)
        wait_until(lambda: states(wdb).get(0) == "c", what="slot 0 to be closed")
    close(wdb)
    seen = [None, 0.0]

    def quiet():
        now = counts(wdb)
        if now != seen[0]:
            seen[:] = now, time.monotonic()
        return time.monotonic() - seen[1] > 7

    wait_until(quiet, 60, "the worker to have nothing to do")
    before = counts(wdb)
    time.sleep(15)  # what is measured is that nothing happens
    assert counts(wdb) == before
    assert worker(wdb) == pid


# ------------------------------------------------------------------------------------------------------- what it does


def test_slots_are_sealed_closed_and_emptied(wdb):
    wdb.sql("SELECT awa.create_queue('q', '{\"retention\": \"0 s\"}')")
    use(wdb, 50)
    finish_all(wdb)
    started(wdb)
    wait_until(lambda: states(wdb).get(0) == "e", 30, "slot 0 to be emptied")
    assert wdb.value("SELECT count(*) FROM awa_internal.ready") == 0
    wait_until(lambda: duty(wdb, "ring", "done"), what="the duty to be noted")
    assert wdb.row("SELECT done > 0, failures, last_done IS NOT NULL FROM awa_internal.duties WHERE duty = 'ring'") == (
        True, 0, True)
    # An empty current slot is left alone.
    assert list(states(wdb).values()).count("o") == 1


def test_an_open_writer_is_waited_for(wdb):
    """Nobody tells when it ends by a rollback, so the worker looks again by itself."""
    wdb.sql("SELECT awa.create_queue('q', '{\"retention\": \"0 s\"}')")
    use(wdb)
    finish_all(wdb)
    writer = wdb.session(autocommit=False)
    writer.sql("SELECT awa.enqueue('q', '7')")
    started(wdb)
    use(wdb)
    wait_until(lambda: wdb.value("SELECT count(*) FROM awa_internal.ring WHERE event = 'o'"), 20, "the slot to be sealed")
    assert states(wdb).get(0) != "c"
    writer.connection.rollback()
    wait_until(lambda: states(wdb).get(0) in ("c", "e"), 30, "slot 0 to be closed")


def broken(db):
    db.sql("ALTER TABLE awa_internal.count_changes RENAME COLUMN what TO broken")


def mended(db):
    db.sql("ALTER TABLE awa_internal.count_changes RENAME COLUMN broken TO what")


def test_one_failing_duty_does_not_stop_the_others(wdb):
    wdb.sql("SELECT awa.create_queue('q', '{\"retention\": \"0 s\"}')")
    since = wdb.cluster.log_position()
    broken(wdb)
    use(wdb)
    finish_all(wdb)
    pid = started(wdb)
    wait_until(lambda: states(wdb).get(0) == "e", 30, "slot 0 to be emptied all the same")
    failures = wait_until(lambda: (n := duty(wdb, "counts", "failures")) and n > 1 and n, 30, "the duty to fail again")
    assert "what" in duty(wdb, "counts", "last_error")
    assert worker(wdb) == pid, "an error does not end the worker"
    said = [line for line in wdb.cluster.log(since).splitlines() if 'duty "counts" failed' in line]
    assert len(said) == 1, f"{failures} failures are one line: {said}"
    mended(wdb)
    ahead(wdb.cluster, 3600)
    try:
        wait_until(lambda: duty(wdb, "counts", "failures") == 0, 30, "the duty to go on")
    finally:
        ahead(wdb.cluster, 0)


def test_maintain_goes_on_after_a_failing_duty(db):
    """The same in CALL awa.maintain(): a rollback in the middle of a procedure, told as a WARNING."""
    db.sql("SELECT awa.create_queue('q', '{\"retention\": \"0 s\"}')")
    use(db)
    finish_all(db)
    db.sql("SELECT awa_internal.seal()")
    broken(db)
    s = db.session()
    notices = []
    s.connection.add_notice_handler(lambda d: notices.append((d.severity, d.message_primary)))
    s.sql("CALL awa.maintain()")
    assert [n for n in notices if n[0] == "WARNING" and 'duty "counts" failed' in n[1]] == notices
    assert len(notices) == 1
    wait_until(lambda: s.sql("CALL awa.maintain()") is not None and states(db).get(0) == "e", what="slot 0 to be emptied")
    assert duty(db, "counts", "failures") > 0 and duty(db, "ring", "failures") == 0
    # The session is as good as before.
    mended(db)
    s.sql("CALL awa.maintain()")
    assert duty(db, "counts", "failures") == 0
    assert s.sql("SELECT current_setting('lock_timeout'), current_setting('search_path')") == [("0", '"$user", public')]


@pytest.mark.parametrize("table, duty_name", [("ring", "ring"), ("duties", None)])
def test_maintain_goes_on_after_an_error_in_the_middle_of_a_statement(db, table, duty_name):
    """An error inside a running statement left its snapshot behind, and the rollback of the procedure refused:
    "portal snapshots (0) did not account for all active snapshots (1)"."""
    db.sql("SELECT awa.create_queue('q', '{\"retention\": \"0 s\"}')")
    use(db)
    finish_all(db)
    db.sql("SELECT awa_internal.seal()")
    db.sql("SELECT awa_internal.close(0)")
    db.sql("CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''no''; END'")
    db.sql(f"CREATE TRIGGER fail BEFORE INSERT ON awa_internal.{table} FOR EACH ROW EXECUTE FUNCTION fail()")
    s = db.session()
    notices = []
    s.connection.add_notice_handler(lambda d: notices.append(d.message_primary))
    s.sql("CALL awa.maintain()")
    if duty_name:
        assert f'duty "{duty_name}" failed: no' in notices
        assert duty(db, "ring", "failures") == 1
    db.sql(f"DROP TRIGGER fail ON awa_internal.{table}")
    wait_until(lambda: s.sql("CALL awa.maintain()") is not None and states(db).get(0) == "e", what="slot 0 to be emptied")


def test_maintain_cancelled_while_it_notes_what_it_did(db):
    """A cancel that meets the note of a duty ends the call all the same, and is what the caller is told."""
    db.sql("CREATE FUNCTION nap() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(60); RETURN NEW; END'")
    db.sql("CREATE TRIGGER nap BEFORE INSERT ON awa_internal.duties FOR EACH ROW EXECUTE FUNCTION nap()")
    s = db.session()
    pending = s.start("CALL awa.maintain()")
    wait_until(lambda: (a := db.activity(s.pid)) and a[2] == "PgSleep", what="the note to be under way")
    s.cancel()
    assert isinstance(pending.error(), E.QueryCanceled)
    assert s.sql("SELECT 1") == [(1,)]


def test_maintain_is_ended_by_a_cancel(db):
    """A cancel of the caller is not taken for a duty that failed."""
    db.sql("SELECT awa.create_queue('q', '{\"retention\": \"0 s\"}')")
    use(db)
    finish_all(db)
    db.sql("SELECT awa_internal.seal()")
    db.sql("SELECT awa_internal.close(0)")
    s = db.session()
    s.pause_at("maintain.emptied")
    s.sql("SET awa_queue.pause_key = 77")
    with db.gate(77) as gate:
        # lock_timeout is the step's own, so the pause ends as a failing step; a cancel ends the call.
        db.sql("CREATE FUNCTION nap() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(60); RETURN NEW; END'")
        db.sql("CREATE TRIGGER nap BEFORE INSERT ON awa_internal.ring FOR EACH ROW WHEN (NEW.event = 'e') EXECUTE FUNCTION nap()")
        pending = s.start("CALL awa.maintain()")
        wait_until(lambda: (a := db.activity(s.pid)) and a[2] == "PgSleep", what="the step to sleep")
        s.cancel()
        assert isinstance(pending.error(), E.QueryCanceled)
        gate.open()
    db.sql("DROP TRIGGER nap ON awa_internal.ring")
    s.pause_at()
    wait_until(lambda: s.sql("CALL awa.maintain()") is not None and states(db).get(0) == "e", what="slot 0 to be emptied")


def test_rule_39_a_duty_is_done_by_one_at_a_time(db):
    db.sql("SELECT awa.create_queue('q', '{\"retention\": \"0 s\"}')")
    use(db)
    finish_all(db)
    db.sql("SELECT awa_internal.seal()")
    db.sql("SELECT awa_internal.close(0)")
    db.sql("CREATE FUNCTION nap() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(60); RETURN NEW; END'")
    db.sql("CREATE TRIGGER nap BEFORE INSERT ON awa_internal.ring FOR EACH ROW WHEN (NEW.event = 'e') EXECUTE FUNCTION nap()")
    one, other = db.session(), db.session()
    pending = one.start("CALL awa.maintain()")
    wait_until(lambda: (a := db.activity(one.pid)) and a[2] == "PgSleep", what="the first to be in its step")
    assert db.value("SELECT count(*) FROM pg_locks WHERE pid = %s AND locktype = 'advisory' AND objsubid = 88", [one.pid]) == 1
    other.sql("SET statement_timeout = '10s'")
    other.sql("CALL awa.maintain()")  # waits for nobody
    assert not pending.done
    one.cancel()
    pending.error()


def test_rule_02_maintain_and_worker_set_their_own_transactions(wdb):
    """Settings of the database reach the worker's sessions; its steps go by their own."""
    for name, value in [("default_transaction_isolation", "serializable"), ("default_transaction_read_only", "on"),
                        ("statement_timeout", "1ms"), ("search_path", "nowhere"), ("session_replication_role", "replica"),
                        ("lock_timeout", "1ms")]:
        wdb.cluster.psql(f'ALTER DATABASE "{wdb.name}" SET {name} = \'{value}\'')
    s = wdb.session(settings={"default_transaction_read_only": "off", "default_transaction_isolation": "read committed",
                              "statement_timeout": "0", "search_path": "public"})
    s.sql("SELECT awa.create_queue('q', '{\"retention\": \"0 s\"}')")
    use(s)
    finish_all(s)
    started(wdb)
    wait_until(lambda: states(s).get(0) == "e", 30, "slot 0 to be emptied")
    assert s.value("SELECT sum(failures) FROM awa_internal.duties") == 0


def test_statistics_of_the_parents(db):
    use(db, 3000)
    finish_all(db)
    db.sql("SELECT pg_stat_force_next_flush()")
    db.sql("CALL awa.maintain()")
    rows = dict(db.sql("SELECT relname::text, reltuples FROM pg_class WHERE oid = ANY (ARRAY['awa_internal.ready',"
                       " 'awa_internal.closures']::regclass[])"))
    assert rows["ready"] == 3000
    assert duty(db, "statistics", "done") >= 1
    # Nothing moved since: nothing is analysed again.
    before = db.value("SELECT analyze_count FROM pg_stat_all_tables WHERE relid = 'awa_internal.ready'::regclass")
    db.sql("CALL awa.maintain()")
    assert db.value("SELECT analyze_count FROM pg_stat_all_tables WHERE relid = 'awa_internal.ready'::regclass") == before


def test_statistics_are_skipped_where_a_table_is_locked_and_it_is_said(db):
    use(db, 3000)
    db.sql("SELECT pg_stat_force_next_flush()")
    holder = db.session(autocommit=False)
    holder.sql("LOCK TABLE awa_internal.ready_3 IN SHARE UPDATE EXCLUSIVE MODE")
    db.sql("CALL awa.maintain()")
    assert "locked: ready" in duty(db, "statistics", "last_error")
    holder.connection.rollback()
    db.sql("CALL awa.maintain()")
    assert db.value("SELECT reltuples FROM pg_class WHERE oid = 'awa_internal.ready'::regclass") == 3000
    assert duty(db, "statistics", "failures") == 0


def test_rule_18_old_slots_are_frozen_and_an_old_current_one_is_sealed(make_cluster):
    cluster = make_cluster(flavour="injection", preload=True, settings={
        **ON, "autovacuum_freeze_max_age": "100000", "awa_queue.slot_age": "86400"}).start()
    db = cluster.database()
    use(db, 10)
    db.sql("SELECT awa_internal.seal()")
    use(db, 10)
    wait_until(lambda: db.value("SELECT awa_internal.close(0)") in ("closed", "not open"), what="slot 0 to be closed")
    started(db)
    wait_until(lambda: duty(db, "freeze"), what="the duties to have run")
    db.sql("CREATE TEMP TABLE burn (i int)")
    db.sql("DO $$ BEGIN FOR i IN 1..26000 LOOP BEGIN INSERT INTO burn VALUES (i); EXCEPTION WHEN others THEN NULL; END;"
           " END LOOP; END $$")
    age = "SELECT max(age(relfrozenxid)) FROM pg_class WHERE relname ~ '^(ready|segments|claims|closures)_0$'"
    assert db.value(age) > 25000
    ahead(cluster, 2 * 3600)
    use(db)
    wait_until(lambda: db.value(age) < 25000, 30, "slot 0 to be frozen")
    wait_until(lambda: db.value("SELECT count(*) FROM awa_internal.ring WHERE event = 'o'") >= 2, 30,
               "the current slot to be sealed")
    assert db.value("SELECT count(*) FROM awa.claim('q', 100)") == 21


# ------------------------------------------------------------------------------------------------------- coming and going


@pytest.fixture
def stuck(wdb):
    """A database whose worker sleeps in the middle of a step."""
    wdb.sql("SELECT awa.create_queue('q', '{\"retention\": \"0 s\"}')")
    use(wdb)
    started(wdb)
    wait_until(lambda: duty(wdb, "ring"), what="the duties to have run")
    wdb.sql("CREATE FUNCTION nap() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(60); RETURN NEW; END'")
    wdb.sql("CREATE TRIGGER nap BEFORE INSERT ON awa_internal.ring FOR EACH ROW EXECUTE FUNCTION nap()")
    pid = worker(wdb)

    def sleeps():
        use(wdb)
        return wdb.activity(pid)[2] == "PgSleep"

    wait_until(sleeps, 30, "the worker to sleep in a step")
    return wdb, pid


def test_sigterm_ends_the_worker_and_another_comes(wdb):
    use(wdb)
    pid = started(wdb)
    wait_until(lambda: duty(wdb, "ring"), what="the duties to have run")
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: worker(wdb) != pid, 5, "the worker to end")
    started(wdb, other_than=pid)


def test_sigterm_in_the_middle_of_a_step(stuck):
    wdb, pid = stuck
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: worker(wdb) != pid, 5, "the worker to end")
    wdb.sql("DROP TRIGGER nap ON awa_internal.ring")
    started(wdb, other_than=pid)


def test_a_launcher_that_ends_comes_back_and_finds_its_workers(wdb):
    use(wdb)
    pid, first = started(wdb), launcher(wdb.cluster)
    os.kill(first, signal.SIGTERM)
    wait_until(lambda: launcher(wdb.cluster) not in (None, first), 20, "another launcher")
    assert worker(wdb) == pid
    os.kill(pid, signal.SIGTERM)
    started(wdb, other_than=pid)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "in a step"])
def test_fast_shutdown(request, wdb, busy):
    if busy:
        request.getfixturevalue("stuck")
    else:
        use(wdb)
        started(wdb)
        wait_until(lambda: duty(wdb, "ring"), what="the duties to have run")
    begin = time.monotonic()
    wdb.cluster.stop("fast")
    # The promise is one second; the machine may be busy with other tests.
    assert time.monotonic() - begin < 5
    wdb.cluster.start()
    if busy:
        wdb.sql("DROP TRIGGER nap ON awa_internal.ring")


def test_the_worker_ends_with_the_postmaster(make_cluster):
    cluster = make_cluster(flavour="injection", preload=True, settings=ON).start()
    db = cluster.database()
    use(db)
    pids = [started(db), launcher(cluster)]
    os.kill(cluster.pid, signal.SIGKILL)
    cluster._server.wait()
    wait_until(lambda: not any(os.path.exists(f"/proc/{p}") for p in pids), 10, "both to end")


def test_a_crash_of_another_process_brings_the_worker_back(make_cluster):
    cluster = make_cluster(flavour="injection", preload=True, settings=ON).start()
    db = cluster.database()
    use(db)
    pid = started(db)
    victim = db.session()
    os.kill(victim.pid, signal.SIGKILL)
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"), 20, "the worker to be gone with the others")
    close(db)

    def back():
        try:
            return worker(db)
        except AssertionError:
            return None  # in recovery

    wait_until(back, 30, "the worker to be back")


def test_reload_turns_the_workers_off_and_on(wdb):
    use(wdb)
    started(wdb)
    try:
        wdb.cluster.configure(**{"awa_queue.worker": "off"})
        wdb.cluster.reload()
        wait_until(lambda: worker(wdb) is None, what="the worker to end")
        use(wdb)
        assert launcher(wdb.cluster)
    finally:
        wdb.cluster.configure(**{"awa_queue.worker": "on"})
        wdb.cluster.reload()
    started(wdb)


def test_a_reload_that_meets_a_starting_worker_is_not_lost(make_cluster):
    """PostgreSQL ignores SIGHUP in a background process until that has installed its handlers; what the reload said was
    not heard of until the next one: a worker that was turned off just then went on."""
    cluster = make_cluster(flavour="injection", preload=True, settings=ON).start()
    db = cluster.database()
    use(db)
    first = started(db)

    def others():
        return [pid for pid in _children(cluster.pid) if pid != first and b"awa_queue worker" in title(pid)]

    wait_until(lambda: others() == [], 20, "workers of databases without the extension to leave")
    cluster.configure(post_auth_delay="3")  # it comes before the handlers
    cluster.reload()
    wait_until(lambda: 'parameter "post_auth_delay" changed' in cluster.log(), what="the reload")
    os.kill(first, signal.SIGTERM)
    wait_until(others, 20, "another worker to start", step=0.001)
    cluster.configure(**{"awa_queue.worker": "off"})
    cluster.reload()
    wait_until(lambda: others() == [], 20, "the worker to leave")


@pytest.mark.parametrize("look", ["the first", "a later one"])
def test_a_first_verb_that_commits_in_the_middle_of_the_workers_look_is_not_lost(make_cluster, look):
    """The worker read the count of activities after its look: the take-over that came between them was counted as seen,
    and the worker waited for a first use that had been. It found the queues only when something else was written."""
    cluster = make_cluster(flavour="injection", preload=True, settings={"autovacuum": "off"}).start()
    db = cluster.database()
    with db.gate() as gate:
        cluster.configure(**{
            "awa_queue.worker": "on", "awa_queue.pause_at": "worker.looked", "awa_queue.pause_key": str(gate.key)})
        cluster.reload()

        def held():
            pid = worker(db)
            return pid and gate.connection.info.backend_pid in db.blockers(pid)

        wait_until(held, 20, "the worker to stand behind its look")
        if look != "the first":
            gate.open()
            wait_until(lambda: "waits for the first use" in cluster.log(), 20, "the worker to have looked")
            gate.close()
            # Activity that takes nothing over: the tables stay nobody's.
            db.sql("BEGIN; SELECT awa.enqueue('q', '1'); UPDATE awa_internal.world SET system_id = 1; COMMIT")
            wait_until(held, 20, "the worker to look again")
        use(db)
        cluster.configure(**{"awa_queue.pause_at": None})
        cluster.reload()
        gate.open()
        wait_until(lambda: duty(db, "ring"), 20, "the duties to have run")


def title(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_rule_34_drop_database(server):
    db = server.database()
    use(db)
    started(db)
    wait_until(lambda: duty(db, "ring"), what="the duties to have run")
    close(db)
    since = server.log_position()
    server.psql(f'DROP DATABASE "{db.name}"')
    # Nobody tries to connect to what has gone: another database's worker comes and nothing is complained about.
    other = server.database()
    use(other)
    started(other)
    assert complaints(server, since) == []
    close(other)
    server.psql(f'DROP DATABASE "{other.name}"')


def test_rule_34_drop_database_in_the_middle_of_a_step(stuck):
    wdb, _ = stuck
    close(wdb)
    wdb.cluster.psql(f'DROP DATABASE "{wdb.name}"')
    assert wdb.cluster.psql(f"SELECT count(*) FROM pg_database WHERE datname = '{wdb.name}'") == "0"


def test_rule_34_the_worker_comes_back_when_the_drop_fails(wdb):
    use(wdb)
    pid = started(wdb)
    user = wdb.connect()
    close(wdb)
    admin = wdb.cluster.connect()
    admin.execute("SET statement_timeout = '1s'")  # DROP DATABASE waits five seconds for others to leave
    with pytest.raises((E.ObjectInUse, E.QueryCanceled)):
        admin.execute(f'DROP DATABASE "{wdb.name}"')
    started(wdb, other_than=pid)
    user.close()


def test_rule_34_rename_database(wdb):
    use(wdb)
    pid = started(wdb)
    close(wdb)
    wdb.cluster.psql(f'ALTER DATABASE "{wdb.name}" RENAME TO renamed')
    try:
        renamed = Database(wdb.cluster, "renamed")
        started(renamed, other_than=pid)
        close(renamed)
    finally:
        wdb.cluster.psql(f'ALTER DATABASE renamed RENAME TO "{wdb.name}"')


def test_rule_04_a_clone_waits_for_its_first_verb(wdb):
    """CREATE DATABASE ... TEMPLATE of a database with jobs and a worker: both work, neither disturbs the other."""
    use(wdb, 30)
    pid = started(wdb)
    wait_until(lambda: duty(wdb, "ring"), what="the duties to have run")
    close(wdb)
    server = wdb.cluster
    server.psql(f'CREATE DATABASE clone TEMPLATE "{wdb.name}"')
    clone = Database(server, "clone")
    try:
        started(wdb, other_than=pid)
        close(wdb)
        server.restart()
        started(clone)  # found by the scan at start
        before = clone.sql("SELECT * FROM awa_internal.duties ORDER BY 1"), clone.sql("SELECT * FROM awa_internal.ring ORDER BY 1")
        wait_until(lambda: "waits for the first use" in server.log(), what="the worker to say that it waits")
        assert before == (clone.sql("SELECT * FROM awa_internal.duties ORDER BY 1"),
                          clone.sql("SELECT * FROM awa_internal.ring ORDER BY 1"))
        for d in (clone, wdb):
            assert d.value("SELECT count(*) FROM awa.claim('q', 20)") == 20
            assert d.value("SELECT count(*) FROM awa.claim('q', 20)") == 10
        wait_until(lambda: duty(clone, "ring") > max(r[1] for r in before[0]), 20, "the clone's duties to run")
    finally:
        close(clone)
        server.psql("DROP DATABASE clone")


def test_rule_04_nothing_is_written_while_a_restore_runs(wdb):
    """The launcher finds the extension before the data are in; the worker waits for the first verb after them."""
    wdb.sql("SELECT awa.create_queue('q', '{\"retention\": \"0 s\"}')")
    use(wdb, 30)
    taken = [r for (r,) in wdb.sql("SELECT receipt FROM awa.claim('q', 10)")]
    wdb.sql("SELECT * FROM awa.complete(%s::int8[])", [taken])
    server = wdb.cluster
    wait_until(lambda: states(wdb).get(0) == "c", 30, "slot 0 to be closed")
    file = server.dir / f"{wdb.name}.dump"
    close(wdb)
    server.client("pg_dump", "-Fc", "-f", file, dbname=wdb.name)
    copy = server.database()
    try:
        close(copy)
        server.restart()
        started(copy)
        server.client("pg_restore", "--data-only", "-e", file, dbname=copy.name)
        assert copy.sql("SELECT * FROM awa_internal.duties") == []
        assert copy.value("SELECT system_id FROM awa_internal.world") is None
        ring = "SELECT event_no, slot, event::text, generation FROM awa_internal.ring ORDER BY 1"
        assert copy.sql(ring) == wdb.sql(ring)
        # The first verb takes over, and from there on all goes its way.
        assert copy.value("SELECT count(*) FROM awa.claim('q', 100)") == 20
        assert copy.value("SELECT count(DISTINCT r.incarnation) = 1 AND min(r.incarnation) = min(w.incarnation)"
                          " FROM awa_internal.ring r, awa_internal.world w")
        wait_until(lambda: duty(copy, "ring"), 20, "the duties to run")
    finally:
        close(copy)
        server.psql(f'DROP DATABASE "{copy.name}" WITH (FORCE)')


def test_rule_04_adopt_raises_the_sequences(db):
    """A logical subscriber has the rows but not the sequences."""
    use(db, 2000)
    last = db.value("SELECT max(entry_id) FROM awa_internal.ready")
    claims = [r for (r,) in db.sql("SELECT receipt FROM awa.claim('q', 5)")]
    before = db.value("SELECT incarnation FROM awa_internal.world")
    for way in ("adopt", "first verb"):
        db.sql("SELECT setval('awa_internal.entry_ids', 1024, false), setval('awa_internal.queue_ids', 1, false)")
        db.sql("SELECT setval('awa_internal.claim_blocks', 1, false)")
        db.sql("UPDATE awa_internal.world SET system_id = 1")
        s = db.session()
        if way == "adopt":
            assert s.value("SELECT awa_internal.adopt()") == "adopted"
            assert db.value("SELECT incarnation FROM awa_internal.world") != before
        new = s.value("SELECT awa.enqueue('other', '1')")
        assert new > last, way
        assert db.value("SELECT count(DISTINCT queue_id) = count(*) FROM awa_internal.queues")
        last = new
    assert db.value("SELECT count(*) FROM awa.claim('other', 5)") == 2
    assert db.sql("SELECT DISTINCT state FROM awa.complete(%s::int8[])", [claims]) == [("completed",)]
    with pytest.raises(E.ActiveSqlTransaction):
        db.sql("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT awa_internal.adopt()")
    db.sql("ROLLBACK")


def test_drop_and_create_extension(wdb):
    use(wdb)
    pid = started(wdb)
    wait_until(lambda: duty(wdb, "ring"), what="the duties to have run")
    since = wdb.cluster.log_position()
    wdb.sql("DROP EXTENSION awa_queue")
    ahead(wdb.cluster, 7200)  # something is due: the worker looks and finds nothing
    try:
        wait_until(lambda: worker(wdb) is None, 20, "the worker to end")
    finally:
        ahead(wdb.cluster, 0)
    wdb.sql("CREATE EXTENSION awa_queue")
    use(wdb)
    started(wdb, other_than=pid)
    wait_until(lambda: duty(wdb, "ring"), what="the duties to run again")
    # And while the worker is there, without its noticing.
    wdb.sql("DROP EXTENSION awa_queue; CREATE EXTENSION awa_queue")
    use(wdb)
    wait_until(lambda: duty(wdb, "ring"), 20, "the duties to run again")
    assert complaints(wdb.cluster, since) == []


def test_the_library_does_not_fit_the_tables(wdb):
    """One message, no duty; it goes on when they fit again."""
    use(wdb)
    pid = started(wdb)
    wait_until(lambda: duty(wdb, "ring"), what="the duties to have run")
    before = wdb.sql("SELECT * FROM awa_internal.duties ORDER BY 1")
    since = wdb.cluster.log_position()
    wdb.sql("UPDATE awa_internal.world SET protocol = 99")
    for hours in (3, 6, 9):
        ahead(wdb.cluster, hours * 3600)
        wait_until(lambda: "the worker does nothing" in wdb.cluster.log(since), 20, "the worker to say so")
    assert worker(wdb) == pid
    assert len([w for w in complaints(wdb.cluster, since) if "worker does nothing" in w]) == 1
    assert wdb.sql("SELECT * FROM awa_internal.duties ORDER BY 1") == before
    wdb.sql("UPDATE awa_internal.world SET protocol = 1")
    ahead(wdb.cluster, 0)
    use(wdb)
    wait_until(lambda: wdb.sql("SELECT * FROM awa_internal.duties ORDER BY 1") != before, 20, "the duties to run")


def test_rule_48_no_worker_in_binary_upgrade_mode(make_cluster):
    cluster = make_cluster(flavour="injection", preload=True, settings=ON).start()
    db = cluster.database()
    use(db)
    started(db)
    close(db)
    cluster.stop()
    cluster.start(options=["-b"])
    assert launcher(cluster) is None and worker(db) is None
    cluster.restart()
    started(db)


def test_a_standby_has_no_worker_until_its_promotion(make_cluster):
    primary = make_cluster(flavour="injection", preload=True, settings={**ON, "wal_level": "replica"}).start()
    db = primary.database()
    db.sql("SELECT awa.create_queue('q', '{\"retention\": \"0 s\"}')")
    use(db)
    started(db)
    with primary.standby() as standby:
        there = Database(standby, db.name)
        wait_until(lambda: there.value("SELECT count(*) FROM awa.jobs") == 1, what="the standby to follow")
        assert launcher(standby) is None and worker(there) is None
        standby.promote()
        started(there)
        events = there.value("SELECT count(*) FROM awa_internal.ring")
        use(there)
        wait_until(lambda: there.value("SELECT count(*) FROM awa_internal.ring") > events, 30, "the slot to be sealed")
        close(there)


def test_too_few_background_processes_are_said_once(make_cluster):
    cluster = make_cluster(flavour="injection", preload=True, settings={
        **ON, "max_worker_processes": "2", "max_logical_replication_workers": "0"}).start()
    first, second = cluster.database(), cluster.database()
    use(first)
    started(first)
    use(second)
    wait_until(lambda: "no background process is free" in cluster.log(), 20, "the launcher to say so")
    close(first)
    cluster.psql(f'DROP DATABASE "{first.name}"')
    ended = wait_until(lambda: worker(second), 30, "the second to have its turn")
    assert ended and cluster.log().count("no background process is free") == 1
