"""Through pgbouncer in transaction mode (CASES 55, 56): no verb relies on anything that a session keeps from one transaction to the next."""

import threading
from collections import Counter

import psycopg
import pytest

from harness import wait_until
from harness.pooler import Pooler

LIFE = [
    "SELECT awa.enqueue('q', '{\"n\": 1}')",
    "SELECT awa.enqueue_batch('q', ARRAY['{\"n\": 2}', '{\"n\": 3}']::jsonb[])",
    "SELECT * FROM awa.enqueue_jobs('[{\"queue\": \"q\", \"args\": {\"n\": 4}}, {\"queue\": \"other\", \"args\": {\"n\": 5}}]')",
]


@pytest.fixture
def pooler(any_db):
    """Three server sessions for all; each forgets all it can after each transaction."""
    with Pooler(any_db.cluster, size=3, server_reset_query="DISCARD ALL", server_reset_query_always=1) as made:
        yield made


def backends(db):
    return db.value("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
                    " AND backend_type = 'client backend'")


def test_what_one_server_session_claimed_another_finishes(any_db, pooler):
    """Two transactions at once hold two server sessions, so that what they did before lies in different ones."""
    a, b = pooler.connect(any_db.name, autocommit=False), pooler.connect(any_db.name, autocommit=False)
    pids = set()
    for x in (a, b):
        pids.add(x.execute("SELECT pg_backend_pid()").fetchone()[0])
    assert len(pids) == 2
    for statement in LIFE:
        a.execute(statement)
    a.commit()
    held = b.execute("SELECT receipt, args->>'n' FROM awa.claim_from(ARRAY['q', 'other'], 10)").fetchall()
    b.commit()
    assert sorted(n for _, n in held) == ["1", "2", "3", "4", "5"]
    # b keeps a server session busy, so a gets another one than before or the one that claimed: both have to do.
    b.execute("SELECT 1")
    receipts = [receipt for receipt, _ in held]
    assert {s for (s,) in a.execute("SELECT status FROM awa.heartbeat(%s)", [receipts]).fetchall()} == {"held"}
    a.commit()
    assert [s for (s,) in a.execute("SELECT state FROM awa.complete(%s)", [receipts[:3]]).fetchall()] == ["completed"] * 3
    a.commit()
    b.commit()
    assert [s for (s,) in b.execute("SELECT state FROM awa.fail(%s, 'no')", [receipts[3:]]).fetchall()] == ["retryable"] * 2
    b.commit()
    again = a.execute("SELECT state, changed FROM awa.complete(%s)", [receipts[:3]]).fetchall()
    assert again == [("completed", False)] * 3
    a.commit()
    a.close(), b.close()


def test_many_clients_over_three_server_sessions_end_each_job_once(any_db, pooler):
    producers, workers, each = 6, 8, 60
    any_db.sql("CREATE TABLE done (job_id bigint, n int)")
    failures, committed = [], Counter()
    stop = threading.Event()

    def guarded(body, *arguments):
        try:
            body(*arguments)
        except Exception as error:  # noqa: BLE001: shown by the assertion below
            failures.append(error)
            stop.set()

    def produce(number):
        with pooler.connect(any_db.name, autocommit=False) as connection:
            for i in range(each):
                n = number * each + i
                connection.execute("SELECT awa.enqueue('q', jsonb_build_object('n', %s::int))", [n])
                if i % 5 == 0:
                    connection.rollback()
                else:
                    connection.commit()
                    committed[n] += 1

    def work():
        with pooler.connect(any_db.name, autocommit=False) as connection:
            receipts = []
            while True:
                jobs = connection.execute(
                    "SELECT receipt, job_id, (args->>'n')::int FROM awa.complete_and_claim(%s, ARRAY['q'], 5, strict => true)",
                    [receipts]).fetchall()
                for _, job_id, n in jobs:
                    connection.execute("INSERT INTO done VALUES (%s, %s)", [job_id, n])
                connection.commit()
                receipts = [r for r, _, _ in jobs]
                if not jobs and stop.is_set():
                    return

    threads = [threading.Thread(target=guarded, args=(produce, i)) for i in range(producers)]
    others = [threading.Thread(target=guarded, args=(work,)) for _ in range(workers)]
    for t in threads + others:
        t.start()
    most = 0
    for t in threads:
        while t.is_alive():
            t.join(0.05)
            most = max(most, backends(any_db))
    stop.set()
    for t in others:
        t.join()
    assert not failures, failures[0]
    assert 1 <= most <= 3, "the clients shared the server sessions"
    found = Counter(n for (n,) in any_db.sql("SELECT n FROM done"))
    assert found == committed and set(found.values()) == {1}
    assert any_db.row("SELECT ready, running, completed FROM awa.queue_stats") == (0, 0, len(committed))


def test_waiting_through_the_pooler(any_db, pooler):
    """A wait has its server session to itself until it ends, and is woken as elsewhere."""
    any_db.sql("SELECT awa.create_queue('q')")
    waiter, producer = pooler.connect(any_db.name), pooler.connect(any_db.name)
    found = []
    thread = threading.Thread(target=lambda: found.append(waiter.execute("CALL awa.wait(ARRAY['q'], '20 s')").fetchone()))
    thread.start()
    wait_until(lambda: any_db.value("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Extension'"
                                    " AND datname = current_database()") == 1, what="the waiter to sleep")
    producer.execute("SELECT awa.enqueue('q')")
    thread.join(10)
    assert found == [(True,)]
    waiter.close(), producer.close()


def test_simple_protocol_and_two_statements_in_one_message(any_db, pooler):
    """psycopg sends parameters as literals here; without any, several statements go as one message and one transaction."""
    with pooler.connect(any_db.name, cursor_factory=psycopg.ClientCursor) as connection:
        job = connection.execute("SELECT awa.enqueue('q', %s::jsonb, tags => %s)", ['{"a": "it\'s"}', ["x", "y"]]).fetchone()[0]
        cursor = connection.execute("SELECT awa.enqueue('q', '2'); SELECT receipt, job_id, args, tags FROM awa.claim('q', 10)")
        assert cursor.nextset()
        rows = cursor.fetchall()
        assert [r[2] for r in rows] == [{"a": "it's"}, 2] and rows[0][1] == job and rows[0][3] == ["x", "y"]
        states = connection.execute("SELECT state FROM awa.complete(%s::int8[])", [[r[0] for r in rows]]).fetchall()
        assert states == [("completed",)] * 2


def test_errors_leave_the_server_session_as_good_as_before(any_db, pooler):
    with pooler.connect(any_db.name) as connection:
        for _ in range(20):
            with pytest.raises(psycopg.errors.InvalidParameterValue):
                connection.execute("SELECT awa.enqueue('q', priority => 9)")
            connection.execute("SELECT awa.enqueue('q')")
        assert len(connection.execute("SELECT * FROM awa.claim('q', 100)").fetchall()) == 20


@pytest.mark.parametrize("between", ["DISCARD ALL", "DISCARD PLANS", "DISCARD SEQUENCES", "DISCARD TEMP", "RESET ALL"])
def test_a_session_that_is_made_to_forget_between_any_two_calls(any_db, between):
    """Two sessions take turns, so that what one remembers is old when its turn comes."""
    sessions = [any_db.session(), any_db.session()]
    for session in sessions:
        session.connection.prepare_threshold = None  # the driver does not hear of DISCARD ALL
    turn = 0

    def call(statement, *parameters):
        nonlocal turn
        turn += 1
        session = sessions[turn % 2]
        rows = session.sql(statement, *parameters)
        session.sql(between)
        return rows

    for round_no in range(4):
        for statement in LIFE:
            call(statement)
        held = call("SELECT receipt, args FROM awa.claim_from(ARRAY['q', 'other'], 4)")
        receipts = [r for r, _ in held]
        assert len(held) == 4
        call("SELECT * FROM awa.heartbeat(%s)", [receipts])
        call("SELECT awa.set_progress(%s, 50)", [receipts[0]])
        assert call("SELECT state FROM awa.release(%s)", [receipts[:1]]) == [("ready",)]
        assert call("SELECT state FROM awa.fail(%s, 'x', retry_in => '1 h')", [receipts[1:2]]) == [("retryable",)]
        assert call("SELECT state FROM awa.cancel_claimed(%s)", [receipts[2:3]]) == [("cancelled",)]
        rest = call("SELECT receipt FROM awa.complete_and_claim(%s, ARRAY['q', 'other'], 10)", [receipts[3:]])
        assert len(rest) == 2
        assert call("SELECT state FROM awa.complete(%s)", [[r for (r,) in rest]]) == [("completed",)] * 2
        if round_no == 1:
            call("SELECT awa_internal.seal()")
        call("CALL awa.maintain()")
    totals = call("SELECT sum(ready), sum(running), sum(completed_total), sum(retryable), sum(cancelled) FROM awa.queue_stats")
    assert totals == [(0, 0, 12, 4, 4)]


def test_prepared_statements_of_the_protocol_survive_other_sessions_work(any_db):
    """Directly connected: plans of the verbs are kept by the session while slots are sealed, emptied and added by another."""
    session, other = any_db.session(), any_db.session()
    session.connection.prepare_threshold = 0
    any_db.sql("SELECT awa.create_queue('q', '{\"retention\": \"0\"}')")
    for i in range(40):
        session.sql("SELECT awa.enqueue('q', to_jsonb(%s::int))", [i])
        ((receipt, args),) = session.sql("SELECT receipt, args FROM awa.claim('q', %s)", [10])
        assert args == i
        assert session.sql("SELECT state FROM awa.complete(%s)", [[receipt]]) == [("completed",)]
        if i % 3 == 0:
            other.sql("SELECT awa_internal.seal()")
            other.sql("CALL awa.maintain()")
    assert session.sql("SELECT name FROM pg_prepared_statements WHERE statement LIKE '%%awa.claim%%'") != []
    assert any_db.row("SELECT ready, running, completed_total FROM awa.queue_stats") == (0, 0, 40)


def test_a_call_in_the_poolers_transaction_block_says_what_to_do(any_db, pooler):
    with pooler.connect(any_db.name, autocommit=False) as connection:
        with pytest.raises(psycopg.errors.ActiveSqlTransaction) as raised:
            connection.execute("CALL awa.wait(ARRAY['q'])")
        assert "autocommit" in raised.value.diag.message_hint
        connection.rollback()
