"""Cancelling and retrying jobs by id, and jobs that wait longer than they may.

The clock is set (awa_queue.clock_offset, milliseconds), nobody sleeps.
"""

import pytest

from harness import error_of, stats
from harness.clock import Clock


def put(s, n=1, queue="q", more=""):
    return s.value(
        f"SELECT awa.enqueue_batch(%s, ARRAY(SELECT to_jsonb(i) FROM generate_series(1, %s) i){more})", [queue, n]
    )


def claim(s, n=100, queue="q"):
    return s.sql("SELECT receipt, job_id FROM awa.claim(%s, %s)", [queue, n])


def cancel(s, *ids, reason=None):
    return s.sql("SELECT job_id, state, changed FROM awa.cancel(%s, %s)", [list(ids), reason])


def retry(s, *ids, run_at=None):
    return s.sql("SELECT job_id, state, changed FROM awa.retry(%s, %s)", [list(ids), run_at])


def state(s, job_id):
    return s.value("SELECT state FROM awa.job(%s)", [job_id])


def fail_for_good(s, receipts, error="boom"):
    s.sql("SELECT awa.fail(%s, %s, permanent => true)", [receipts, error])


# ---------------------------------------------------------------- cancel


def test_a_waiting_job_is_cancelled_and_never_delivered(s):
    ids = put(s, 5)
    assert cancel(s, ids[3], ids[1], reason="no need") == [(ids[3], "cancelled", True), (ids[1], "cancelled", True)]
    assert [r[1] for r in claim(s)] == [ids[0], ids[2], ids[4]]
    assert state(s, ids[1]) == "cancelled"
    assert s.value("SELECT errors->0->>'message' FROM awa.job(%s)", [ids[1]]) == "no need"
    assert stats(s, "ready", "running", "cancelled", "enqueued_total") == (0, 3, 2, 5)


def test_a_range_that_is_cancelled_takes_one_claim_a_segment(s):
    ids = put(s, 3000)
    rows = cancel(s, *ids)
    assert len(rows) == 3000 and all(r[1:] == ("cancelled", True) for r in rows)
    assert claim(s) == []
    assert s.value("SELECT count(*) FROM awa_internal.claims") < 20
    assert stats(s, "ready", "running", "cancelled", "enqueued_total") == (0, 0, 3000, 3000)


def test_results_are_in_input_order_with_duplicates_nulls_and_unknown_ids(s):
    a, b = put(s, 2)
    rows = s.sql("SELECT job_id, queue, kind, state, changed FROM awa.cancel(ARRAY[%s, NULL, 7, %s, -1, %s]::bigint[])", [b, a, b])
    assert rows == [
        (b, "q", "q", "cancelled", True),
        (None, None, None, "unknown", False),
        (7, None, None, "unknown", False),
        (a, "q", "q", "cancelled", True),
        (-1, None, None, "unknown", False),
        (b, "q", "q", "cancelled", True),
    ]
    assert s.sql("SELECT * FROM awa.cancel(NULL)") == [] and s.sql("SELECT * FROM awa.retry('{}')") == []


def test_a_second_cancel_finds_what_the_first_left(s):
    (a,) = put(s)
    assert cancel(s, a) == [(a, "cancelled", True)]
    assert cancel(s, a) == [(a, "cancelled", False)]


def test_a_deferred_job_is_cancelled_and_stays_visible(s):
    a = s.value("SELECT awa.enqueue('q', '{\"x\": 1}', kind => 'k', run_in => '1 h')")
    b = s.value("SELECT awa.enqueue('q', run_in => '2 h')")
    assert cancel(s, a, reason="late") == [(a, "cancelled", True)]
    row = s.row("SELECT state, kind, args::text, errors->0->>'message' FROM awa.job(%s)", [a])
    assert row == ("cancelled", "k", '{"x": 1}', "late")
    assert s.sql("SELECT job_id, state FROM awa.jobs ORDER BY 1") == [(a, "cancelled"), (b, "scheduled")]
    assert stats(s, "ready", "scheduled", "cancelled", "enqueued_total") == (0, 1, 1, 2)
    s.clock.forward(3 * 3600)
    s.sql("CALL awa.maintain()")
    assert [r[1] for r in claim(s)] == [b]


def test_a_running_job_is_told_by_heartbeat_and_ends_as_cancelled(s):
    ids = put(s, 3)
    held = claim(s)
    receipt = held[1][0]
    assert cancel(s, ids[1]) == [(ids[1], "running", True)]
    assert cancel(s, ids[1]) == [(ids[1], "running", False)]
    assert s.sql("SELECT status FROM awa.heartbeat(%s)", [[r for r, _ in held]]) == [("held",), ("cancelled",), ("held",)]
    assert state(s, ids[1]) == "running" and stats(s, "running") == (3,)
    # Its place is kept until the worker reports; its complete comes back as cancelled, not as done.
    assert s.sql("SELECT state, changed FROM awa.complete(%s)", [[r for r, _ in held]]) == [
        ("completed", True),
        ("cancelled", True),
        ("completed", True),
    ]
    assert s.sql("SELECT state, changed FROM awa.complete(%s)", [[receipt]]) == [("cancelled", False)]
    assert state(s, ids[1]) == "cancelled"
    assert stats(s, "running", "completed", "cancelled", "enqueued_total") == (0, 2, 1, 3)


@pytest.mark.parametrize("verb", ["awa.fail(%s, 'boom')", "awa.snooze(%s, '1 h')", "awa.release(%s)"])
def test_whatever_the_worker_reports_of_a_job_that_is_to_be_cancelled(s, verb):
    (a,) = put(s)
    ((receipt, _),) = claim(s)
    cancel(s, a)
    assert s.sql(f"SELECT state, changed FROM {verb}", [[receipt]]) == [("cancelled", True)]
    assert claim(s) == [] and stats(s, "retryable", "scheduled", "cancelled") == (0, 0, 1)


def test_a_running_job_that_is_cancelled_ends_with_its_lease(s):
    (a,) = put(s)
    claim(s)
    cancel(s, a)
    s.clock.forward(400)
    s.sql("CALL awa.maintain()")
    assert state(s, a) == "cancelled" and stats(s, "retryable", "running", "cancelled") == (0, 0, 1)


def test_finished_jobs_keep_their_state(s):
    a, b = put(s, 2)
    ra, rb = [r for r, _ in claim(s)]
    s.sql("SELECT awa.complete(%s)", [[ra]])
    fail_for_good(s, [rb])
    assert cancel(s, a, b) == [(a, "completed", False), (b, "failed", False)]


def test_a_cancel_that_is_rolled_back_leaves_everything_as_it_was(any_db):
    one, two = any_db.session(autocommit=False), any_db.session()
    a, b = put(two, 2)
    c = two.value("SELECT awa.enqueue('q', run_in => '1 h')")
    ((receipt, _),) = claim(two, 1)
    assert [r[1] for r in cancel(one, a, b, c)] == ["running", "cancelled", "cancelled"]
    one.connection.rollback()
    assert two.sql("SELECT state FROM awa.complete(%s)", [[receipt]]) == [("completed",)]
    assert [r[1] for r in claim(two)] == [b] and state(two, c) == "scheduled"
    assert stats(two, "scheduled", "cancelled", "enqueued_total") == (1, 0, 3)


def test_jobs_of_the_own_transaction_can_be_cancelled_and_retried(any_db):
    s = any_db.session(autocommit=False)
    ids = put(s, 3)
    assert cancel(s, ids[0]) == [(ids[0], "cancelled", True)]
    assert retry(s, ids[0]) == [(ids[0], "ready", True)]
    s.sql("SAVEPOINT a")
    assert cancel(s, ids[1]) == [(ids[1], "cancelled", True)]
    s.sql("ROLLBACK TO a")
    assert cancel(s, ids[2]) == [(ids[2], "cancelled", True)]
    s.connection.commit()
    assert sorted(r[1] for r in claim(s)) == sorted([ids[1], ids[0]])


def test_cancel_works_under_repeatable_read(any_db):
    old, s = any_db.session(autocommit=False), any_db.session()
    old.sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    old.sql("SELECT count(*) FROM awa_internal.deferred")
    a = s.value("SELECT awa.enqueue('q', run_in => '1 h')")
    b = s.value("SELECT awa.enqueue('q')")
    assert cancel(old, a, b) == [(a, "cancelled", True), (b, "cancelled", True)]
    old.connection.commit()
    assert state(s, a) == "cancelled" and claim(s) == []


def test_limits_of_a_call(s):
    assert error_of(s, "SELECT awa.cancel(array_fill(1::bigint, ARRAY[100001]))") == "54000"
    assert error_of(s, "SELECT awa.retry(array_fill(1::bigint, ARRAY[100001]))") == "54000"
    assert error_of(s, "SELECT awa.retry('{1}', 'infinity')") == "22023"
    assert error_of(s, "SELECT awa.cancel('{1}', options => '{\"x\": 1}')") == "22023"


# ---------------------------------------------------------------- retry


def test_a_job_in_back_off_runs_now_with_its_attempt_kept(s):
    (a,) = put(s)
    ((receipt, _),) = claim(s)
    s.sql("SELECT awa.fail(%s, 'boom', retry_in => '1 h')", [[receipt]])
    assert claim(s) == []
    assert retry(s, a) == [(a, "ready", True)]
    assert retry(s, a) == [(a, "ready", False)]
    assert s.sql("SELECT job_id, attempt, last_error->>'message' FROM awa.claim('q')") == [(a, 2, "boom")]
    assert retry(s, a) == [(a, "running", False)]
    assert stats(s, "retryable", "enqueued_total") == (0, 1)


def test_a_waiting_job_is_put_off(s):
    a, b = put(s, 2)
    later = s.value("SELECT now() + interval '1 h'")
    assert retry(s, a, run_at=later) == [(a, "scheduled", True)]
    assert s.row("SELECT state, run_at, attempt FROM awa.job(%s)", [a]) == ("scheduled", later, 1)
    assert [r[1] for r in claim(s)] == [b]
    assert stats(s, "ready", "scheduled", "enqueued_total") == (0, 1, 2)
    even_later = s.value("SELECT now() + interval '2 h'")
    assert retry(s, a, run_at=even_later) == [(a, "scheduled", True)]
    assert s.value("SELECT run_at FROM awa.job(%s)", [a]) == even_later
    assert retry(s, a) == [(a, "ready", True)]
    assert [r[1] for r in claim(s)] == [a]


@pytest.mark.parametrize("letters", [True, False])
def test_a_failed_job_starts_over_with_its_errors(s, letters):
    s.sql("SELECT awa.create_queue('q', %s::jsonb)", ["{}" if letters else '{"dead_letters": false}'])
    a = s.value("SELECT awa.enqueue('q', '{\"n\": 1.50}', kind => 'k', max_attempts => 3, tags => '{t}')")
    ((receipt, _),) = claim(s)
    s.sql("SELECT awa.fail(%s, 'first', retry_in => '0 s')", [[receipt]])
    s.sql("CALL awa.maintain()")
    ((receipt, _),) = claim(s)
    fail_for_good(s, [receipt], "second")
    assert state(s, a) == "failed"
    assert retry(s, a) == [(a, "ready", True)]
    # The job's newest entry tells, not the old closure: a second retry finds it waiting.
    assert state(s, a) == "ready" and retry(s, a) == [(a, "ready", False)]
    assert s.sql("SELECT job_id, state FROM awa.jobs") == [(a, "ready")]
    assert s.value("SELECT count(*) FROM awa.dead_letters") == 0
    rows = s.sql(
        "SELECT c.job_id, c.kind, c.args::text, c.tags, c.attempt, c.max_attempts, (SELECT array_agg(e->>'message')"
        " FROM awa.job(c.job_id) j, jsonb_array_elements(j.errors) e) FROM awa.claim('q', 10) c"
    )
    assert rows == [(a, "k", '{"n": 1.50}', ["t"], 1, 3, ["first", "second"])]
    assert state(s, a) == "running"
    assert stats(s, "ready", "running", "enqueued_total", "failed_total") == (0, 1, 1, 1)
    ((receipt,),) = s.sql("SELECT (claim_no << 16) | (slot::bigint << 10) FROM awa_internal.claims ORDER BY claimed_at DESC LIMIT 1")
    fail_for_good(s, [receipt], "third")
    assert state(s, a) == "failed" and retry(s, a) == [(a, "ready", True)]


def test_a_cancelled_job_starts_over(s):
    (a,) = put(s)
    cancel(s, a)
    assert retry(s, a) == [(a, "ready", True)]
    assert cancel(s, a) == [(a, "cancelled", True)]
    later = s.value("SELECT now() + interval '1 h'")
    assert retry(s, a, run_at=later) == [(a, "scheduled", True)]
    assert state(s, a) == "scheduled"
    assert stats(s, "ready", "scheduled", "enqueued_total") == (0, 1, 1)


def test_completed_jobs_do_not_run_again(s):
    (a,) = put(s)
    s.sql("SELECT awa.complete(%s)", [[r for r, _ in claim(s)]])
    assert retry(s, a, 99) == [(a, "completed", False), (99, "unknown", False)]


def test_a_dead_letter_outlives_its_slot(s):
    (a,) = put(s)
    fail_for_good(s, [r for r, _ in claim(s)])
    s.sql("SELECT awa_internal.seal()")
    s.sql("SELECT awa_internal.close(0::smallint)")
    s.sql("SELECT awa_internal.empty(0::smallint, true)")
    assert s.value("SELECT count(*) FROM awa_internal.claims") == 0
    assert cancel(s, a) == [(a, "failed", False)]
    assert retry(s, a) == [(a, "ready", True)]
    assert [r[1] for r in claim(s)] == [a]
    assert s.value("SELECT count(*) FROM awa.dead_letters") == 0


def test_rule_8_retry_twice_at_once_makes_one_entry(any_db):
    """RULES 8, CASES 64: two retry() calls of one failed job at once."""
    s = any_db.session()
    ids = put(s, 2)
    fail_for_good(s, [r for r, _ in claim(s)])
    one, two = any_db.session(autocommit=False), any_db.session()
    assert retry(one, ids[0]) == [(ids[0], "ready", True)]
    pending = two.start_waiting("SELECT state, changed FROM awa.retry(%s)", [[ids[0]]])
    assert retry(s, ids[1]) == [(ids[1], "ready", True)]  # another job waits for nobody
    one.connection.commit()
    assert pending.result() == [("ready", False)]
    assert sorted(r[1] for r in claim(s)) == sorted(ids)


def test_rule_8_retry_after_a_retry_that_was_rolled_back(any_db):
    s = any_db.session()
    (a,) = put(s)
    fail_for_good(s, [r for r, _ in claim(s)])
    one, two = any_db.session(autocommit=False), any_db.session()
    retry(one, a)
    pending = two.start_waiting("SELECT state, changed FROM awa.retry(%s)", [[a]])
    one.connection.rollback()
    assert pending.result() == [("ready", True)]
    assert [r[1] for r in claim(s)] == [a]


def test_rule_8_cancel_twice_at_once_closes_once(any_db):
    s = any_db.session()
    (a,) = put(s)
    one, two = any_db.session(autocommit=False), any_db.session()
    assert cancel(one, a) == [(a, "cancelled", True)]
    pending = two.start_waiting("SELECT state, changed FROM awa.cancel(%s)", [[a]])
    one.connection.commit()
    assert pending.result() == [("cancelled", False)]
    assert stats(s, "ready", "running", "cancelled") == (0, 0, 1)
    assert s.value("SELECT sum(n) FROM awa_internal.closures") == 1


@pytest.mark.timeout(400)
def test_fifty_thousand_in_back_off_run_now(preload_db):
    s = preload_db.session()
    n = 50_000
    put(s, n)
    taken = 0
    while taken < n:
        receipts = [r for r, _ in claim(s, 10_000)]
        s.sql("SELECT count(*) FROM awa.fail(%s, 'down', retry_in => '1 h')", [receipts])
        taken += len(receipts)
    ids = [i for (i,) in s.sql("SELECT job_id FROM awa_internal.deferred")]
    assert len(ids) == n
    rows = s.sql("SELECT state, changed, count(*) FROM awa.retry(%s) GROUP BY 1, 2", [ids])
    assert rows == [("ready", True, n)]
    assert stats(s, "ready", "retryable", "enqueued_total") == (n, 0, n)
    # Locks of a call are bounded.
    with s.connection.transaction():
        s.sql("SELECT count(*) FROM awa.cancel(%s)", [ids[:5000]])
        assert s.value("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 84") == 64
    assert stats(s, "ready", "cancelled") == (n - 5000, 5000)


# ---------------------------------------------------------------- expires_in


def test_a_job_that_nobody_claims_expires(s):
    (a,) = put(s, more=", expires_in => '10 s'")
    b = s.value("SELECT awa.enqueue('q', run_in => '1 h', expires_in => '10 s')")
    rows = s.sql("""SELECT job_id FROM awa.enqueue_jobs('[{"queue": "q", "expires_in": "10 s"}, {"queue": "q"}]')""")
    c, d = (r[0] for r in rows)
    s.sql("CALL awa.maintain()")
    assert state(s, a) == "ready"
    s.clock.forward(11)
    s.sql("CALL awa.maintain()")
    assert [state(s, x) for x in (a, b, c, d)] == ["cancelled", "scheduled", "cancelled", "ready"]
    assert s.value("SELECT errors->0->>'message' FROM awa.job(%s)", [a]) == "expired"
    assert stats(s, "ready", "scheduled", "cancelled", "enqueued_total") == (1, 1, 2, 4)
    s.clock.forward(3590)  # b's time counts from when it may run
    s.sql("CALL awa.maintain()")
    assert state(s, b) == "ready"
    s.clock.forward(11)
    s.sql("CALL awa.maintain()")
    assert state(s, b) == "cancelled" and s.value("SELECT count(*) FROM awa_internal.expiries") == 0


def test_a_claim_does_not_deliver_what_has_expired(s):
    ids = [s.value("SELECT awa.enqueue('q', expires_in => '10 s')") for _ in range(3)]
    last = s.value("SELECT awa.enqueue('q', expires_in => '1 h')")
    s.clock.forward(11)
    assert [r[1] for r in claim(s, 2)] == [last]
    assert [state(s, x) for x in ids] == ["cancelled"] * 3
    assert stats(s, "ready", "running", "cancelled") == (0, 1, 3)
    s.sql("CALL awa.maintain()")
    assert s.value("SELECT count(*) FROM awa_internal.expiries") == 1


def test_a_job_that_runs_does_not_expire_and_a_retry_starts_without_a_limit(s):
    a, b = put(s, 2, more=", expires_in => '10 s'")
    ((receipt, _),) = claim(s, 1)
    s.clock.forward(11)
    s.sql("CALL awa.maintain()")
    assert state(s, a) == "running" and state(s, b) == "cancelled"
    assert s.sql("SELECT state FROM awa.complete(%s)", [[receipt]]) == [("completed",)]
    assert retry(s, b) == [(b, "ready", True)]
    s.clock.forward(60)
    s.sql("CALL awa.maintain()")
    assert [r[1] for r in claim(s)] == [b]


def test_a_retry_before_its_time_is_over_lifts_the_limit(s):
    (a,) = put(s, more=", expires_in => '10 s'")
    fail_for_good(s, [r for r, _ in claim(s)])
    assert retry(s, a) == [(a, "ready", True)]
    s.clock.forward(11)
    s.sql("CALL awa.maintain()")
    assert state(s, a) == "ready"


def test_expiry_waits_for_nobody(any_db):
    one, s = any_db.session(autocommit=False), any_db.session()
    s.clock = Clock(s)
    a, b = put(s, 2, more=", expires_in => '10 s'")
    assert claim(one, 1)[0][1] == a
    s.clock.forward(11)
    s.sql("CALL awa.maintain()")
    assert state(s, b) == "cancelled"
    one.connection.rollback()
    s.clock.forward(2)
    s.sql("CALL awa.maintain()")
    assert state(s, a) == "cancelled"


def test_expires_in_must_be_positive(s):
    assert error_of(s, "SELECT awa.enqueue('q', expires_in => '0 s')") == "22023"
    assert error_of(s, "SELECT awa.enqueue_batch('q', '{1}', expires_in => '-1 s')") == "22023"
    assert error_of(s, """SELECT awa.enqueue_jobs('[{"queue": "q", "expires_in": "0 s"}]')""") == "22023"


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_a_job_that_was_brought_back_is_not_what_it_was_when_its_second_life_is_emptied_first(s, end):
    """Its first life lies in a slot that another job keeps. What is left must not be retried once more."""
    s.sql("SELECT awa.create_queue('q', '{\"dead_letters\": false, \"retention\": \"0\"}')")
    job, other = put(s, 2)
    (first, _), (held, _) = claim(s)
    s.sql("SELECT awa.cancel_claimed(%s)" if end == "cancelled" else "SELECT awa.fail(%s, permanent => true)", [[first]])
    assert state(s, job) == end
    assert s.value("SELECT awa_internal.seal()").startswith("sealed")
    assert retry(s, job) == [(job, "ready", True)]
    ((again, _),) = claim(s)
    s.sql("SELECT awa.complete(%s)", [[again]])
    second = s.value("SELECT slot FROM awa.ring_status WHERE state = 'current'")
    assert s.value("SELECT awa_internal.seal()").startswith("sealed")
    assert s.value("SELECT awa_internal.close(%s)", [second]) == "closed"
    assert s.value('SELECT awa_internal."empty"(%s, true)', [second]) == "emptied"
    assert s.sql("SELECT state FROM awa.job(%s)", [job]) == []
    assert s.sql("SELECT state FROM awa.jobs WHERE job_id = %s", [job]) == []
    assert retry(s, job) == [(None, "unknown", False)] or retry(s, job) == [(job, "unknown", False)]
    assert claim(s) == []
    assert s.sql("SELECT state FROM awa.complete(%s)", [[held]]) == [("completed",)]
