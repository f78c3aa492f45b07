"""Jobs that wait for their time: scheduled, snoozed, between two attempts; promotion, and jobs that failed for good.

The clock is set (awa_queue.clock_offset, milliseconds), nobody sleeps.
"""

import json
import time

import pytest

from harness import error_of, stats, wait_until


def claim(s, n=100, queue="q"):
    return s.sql("SELECT receipt, job_id, args, attempt, last_error->>'message' FROM awa.claim(%s, %s)", [queue, n])


def maintain(s):
    s.sql("CALL awa.maintain()")


def state(s, job_id):
    return s.sql("SELECT state, attempt FROM awa.job(%s)", [job_id])


def test_a_scheduled_job_waits_for_its_time_and_keeps_its_id(s):
    job = s.value("SELECT awa.enqueue('q', '{\"n\": 1.50}', run_in => '10 s', tags => '{a}', ordering_key => 'k')")
    assert claim(s) == [] and state(s, job) == [("scheduled", 1)]
    maintain(s)
    assert claim(s) == []
    s.clock.forward(11)
    maintain(s)
    assert state(s, job) == [("ready", 1)]
    rows = s.sql("SELECT job_id, args::text, tags, ordering_key, attempt, run_at - enqueued_at FROM awa.claim('q')")
    ((job_id, args, tags, key, attempt, waited),) = rows
    assert (job_id, args, tags, key, attempt) == (job, '{"n": 1.50}', ["a"], "k", 1)
    assert 9 < waited.total_seconds() < 11


def test_run_at_in_the_past_is_ready_at_once(s):
    s.sql("SELECT awa.enqueue('q', run_at => '2020-01-01')")
    assert len(claim(s)) == 1


def test_a_batch_and_mixed_jobs_in_due_order(s):
    ids = s.value("SELECT awa.enqueue_batch('q', ARRAY['1', '2']::jsonb[], run_in => '20 s')")
    rows = s.sql("""SELECT idx, status, job_id FROM awa.enqueue_jobs('[{"queue": "q", "args": 3, "run_in": "10 s"},
        {"queue": "q", "args": 4}, {"queue": "q", "args": 5, "run_in": "5 s"}]')""")
    assert [r[1] for r in rows] == ["scheduled", "ready", "scheduled"]
    assert len({*ids, *(r[2] for r in rows)}) == 5
    s.clock.forward(30)
    maintain(s)
    assert [args for _, _, args, _, _ in claim(s)] == [4, 5, 3, 1, 2]


def test_a_scheduled_job_of_a_rolled_back_transaction_never_was(s):
    s.sql("BEGIN")
    job = s.value("SELECT awa.enqueue('q', run_in => '1 s')")
    s.sql("ROLLBACK")
    s.clock.forward(5)
    maintain(s)
    assert state(s, job) == [] and claim(s) == []


def test_a_failed_attempt_is_retried_after_its_backoff_with_its_error(s):
    job = s.value("SELECT awa.enqueue('q', '1', max_attempts => 3)")
    waits = []
    for attempt in (1, 2, 3):
        ((receipt, _, _, got, message),) = claim(s)
        assert got == attempt and message == (f"no {attempt - 1}" if attempt > 1 else None)
        row = s.row("SELECT state, changed, attempt, date_part('epoch', run_at - clock_timestamp()) FROM awa.fail(%s, %s)",
                    [[receipt], f"no {attempt}"])
        if attempt < 3:
            assert row[:3] == ("retryable", True, attempt)
            waits.append(row[3] - s.clock.offset / 1000)
            assert state(s, job) == [("retryable", attempt + 1)]
            s.clock.forward(60)
            maintain(s)
        else:
            assert row[:3] == ("failed", True, 3)
        again = s.row("SELECT state, changed FROM awa.fail(%s)", [[receipt]])
        assert again == ("retryable" if attempt < 3 else "failed", False)
    assert 1 < waits[0] < 2.6 and 3 < waits[1] < 5.1
    assert state(s, job) == [("failed", 3)]
    errors = s.value("SELECT errors FROM awa.job(%s)", [job])
    assert [(e["attempt"], e["message"], e["outcome"]) for e in errors] == [
        (1, "no 1", "retryable"), (2, "no 2", "retryable"), (3, "no 3", "failed")]
    s.clock.forward(3600)
    maintain(s)
    assert claim(s) == []


def test_permanent_retry_in_and_a_detail_whose_numbers_stay(s):
    s.sql("SELECT awa.enqueue_batch('q', ARRAY['1', '2']::jsonb[])")
    (a, _, _, _, _), (b, job, _, _, _) = claim(s)
    rows = s.sql("SELECT state, round(date_part('epoch', run_at - clock_timestamp())) FROM awa.fail(%s, 'e', '1 h')", [[a]])
    assert rows == [("retryable", 3600)]
    detail = '{"n": 1.50, "big": 12345678901234567890}'
    assert s.value("SELECT state FROM awa.fail(%s, permanent => true, details => ARRAY[%s]::jsonb[])", [[b], detail]) == "failed"
    assert s.value("SELECT errors->0->'detail' = %s::jsonb AND errors->0->'detail'->>'n' = '1.50' FROM awa.job(%s)", [detail, job])


def test_errors_are_capped_at_ten_of_eight_kilobytes(s):
    s.sql("SELECT awa.create_queue('q', '{\"backoff\": {\"base\": \"0\"}}')")
    job = s.value("SELECT awa.enqueue('q')")
    for i in range(12):
        ((receipt, *_),) = claim(s)
        s.sql("SELECT awa.fail(%s, %s, details => ARRAY[to_jsonb(repeat('y', 20000))])", [[receipt], f"{i}" + "ä" * 9000])
        s.clock.forward(1)
        maintain(s)
    errors = s.value("SELECT errors FROM awa.job(%s)", [job])
    assert [e["attempt"] for e in errors] == list(range(3, 13))
    assert all(len(e["message"].encode()) <= 8192 and len(json.dumps(e["detail"])) < 8300 for e in errors)


def test_a_snoozed_attempt_does_not_count(s):
    s.sql("SELECT awa.enqueue('q', '1', max_attempts => 1)")
    ((receipt, job, *_),) = claim(s)
    assert s.row("SELECT state, changed FROM awa.snooze(%s, '1 min')", [[receipt]]) == ("scheduled", True)
    assert s.row("SELECT state, changed FROM awa.snooze(%s, '1 min')", [[receipt]]) == ("scheduled", False)
    assert s.row("SELECT state FROM awa.complete(%s)", [[receipt]]) == ("stale",)
    s.clock.forward(61)
    maintain(s)
    ((again, same, _, attempt, _),) = claim(s)
    assert same == job and attempt == 1 and again != receipt


def test_a_queues_own_backoff(s):
    s.sql("""SELECT awa.create_queue('q', '{"backoff": {"base": "10 s", "factor": 1, "jitter": 0}}')""")
    s.sql("SELECT awa.enqueue('q')")
    ((receipt, *_),) = claim(s)
    assert s.value("SELECT round(date_part('epoch', run_at - clock_timestamp())) FROM awa.fail(%s)", [[receipt]]) == 10


@pytest.mark.parametrize("backoff", ['"fast"', '{"base": "-1 s"}', '{"speed": 1}', '{"factor": 0.5}', '{"jitter": 2}', '{"base": "x"}'])
def test_a_bad_backoff_is_refused(s, backoff):
    assert error_of(s, "SELECT awa.create_queue('q', %s::jsonb)", ['{"backoff": ' + backoff + "}"]) == "22023"


def test_one_failing_member_of_a_batch_leaves_the_others(s):
    s.sql("SELECT awa.enqueue_batch('q', ARRAY['1', '2', '3']::jsonb[], max_attempts => 1)")
    rows = claim(s)
    receipts = [r[0] for r in rows]
    assert s.sql("SELECT state FROM awa.fail(%s)", [[receipts[1]]]) == [("failed",)]
    assert s.sql("SELECT state, changed FROM awa.complete(%s)", [receipts]) == [("completed", True), ("stale", False), ("completed", True)]


def test_a_failed_batch_of_both_kinds_in_one_call(s):
    s.sql("SELECT awa.enqueue('q', '1', max_attempts => 1), awa.enqueue('q', '2')")
    receipts = [r[0] for r in claim(s)]
    assert s.sql("SELECT state FROM awa.fail(%s)", [receipts + receipts]) == [("failed",), ("retryable",)] * 2
    assert s.value("SELECT count(*) FROM awa_internal.deferred") == 1
    assert s.value("SELECT count(*) FROM awa_internal.dead_letters") == 1


def test_fail_within_a_transaction_that_rolls_back(s):
    s.sql("SELECT awa.enqueue('q', '1')")
    ((receipt, job, *_),) = claim(s)
    s.sql("BEGIN")
    s.sql("SELECT awa.fail(%s)", [[receipt]])
    s.sql("ROLLBACK")
    assert state(s, job) == [("running", 1)]
    assert s.row("SELECT state, changed FROM awa.complete(%s)", [[receipt]]) == ("completed", True)


def test_dead_letters_can_be_off(s):
    s.sql("SELECT awa.create_queue('q', '{\"dead_letters\": false}')")
    job = s.value("SELECT awa.enqueue('q', max_attempts => 1)")
    s.sql("SELECT awa.fail(%s)", [[claim(s)[0][0]]])
    assert state(s, job) == [("failed", 1)]
    assert s.value("SELECT count(*) FROM awa_internal.dead_letters") == 0


def test_dead_letters_go_after_failed_retention(s):
    s.sql("SELECT awa.create_queue('q', '{\"failed_retention\": \"1 h\", \"retention\": \"0\"}'), awa.create_queue('other')")
    for queue in ("q", "other"):
        s.sql("SELECT awa.enqueue(%s, max_attempts => 1)", [queue])
        s.sql("SELECT awa.fail(%s)", [[claim(s, queue=queue)[0][0]]])
    s.clock.forward(3601)
    maintain(s)
    assert s.value("SELECT count(*) FROM awa_internal.dead_letters") == 1
    s.clock.forward(15 * 86400)
    maintain(s)
    assert s.value("SELECT count(*) FROM awa_internal.dead_letters") == 0


def test_rule_42_one_bad_row_never_stops_promotion(s):
    s.sql("SELECT awa.enqueue_batch('q', ARRAY(SELECT to_jsonb(n) FROM generate_series(1, 50) n), run_in => '1 s')")
    bad = s.value("SELECT job_id FROM awa_internal.deferred ORDER BY job_id OFFSET 20 LIMIT 1")
    # Its composite is damaged beyond reading.
    s.sql("UPDATE awa_internal.deferred SET lane_id = -1 WHERE job_id = %s", [bad])
    s.clock.forward(2)
    maintain(s)
    assert len(claim(s)) == 49
    s.sql("SELECT awa.enqueue('q', '51', run_in => '1 s')")
    s.clock.forward(2)
    maintain(s)
    assert len(claim(s)) == 1


def test_rule_42_two_promotions_at_once_take_each_job_once(any_db):
    a, b = any_db.session(), any_db.session()
    a.sql("SELECT awa.enqueue_batch('q', ARRAY(SELECT to_jsonb(n) FROM generate_series(1, 3000) n), run_in => '1 s')")
    for x in (a, b):
        x.sql("SET awa_queue.clock_offset = 2000")
    pending = [x.start("CALL awa.maintain()") for x in (a, b)]
    for p in pending:
        p.result()
    maintain(a)
    assert sorted(r[2] for r in claim(a, 5000)) == list(range(1, 3001))


def test_a_million_deferred_jobs_cost_an_enqueue_and_a_claim_nothing(s):
    """Counted in buffers, not in time; with a tenth of a million, since nothing depends on the number."""
    def buffers():
        s.sql("SELECT awa.enqueue('q'); ")
        before = s.value("SELECT sum(heap_blks_hit + heap_blks_read) FROM pg_statio_user_tables WHERE relname = 'deferred'")
        return before or 0

    s.sql("SELECT awa.enqueue_batch('q', array_fill('{}'::jsonb, ARRAY[100000]), run_in => '1 d')")
    s.sql("SELECT pg_stat_force_next_flush()")
    before = buffers()
    for _ in range(20):
        s.sql("SELECT awa.enqueue('q')")
        s.sql("SELECT awa.complete(ARRAY(SELECT receipt FROM awa.claim('q', 5)))")
    s.sql("SELECT pg_stat_force_next_flush()")
    assert buffers() == before


def test_a_late_commit_with_an_early_run_at_is_not_missed(any_db):
    late, s = any_db.session(), any_db.session()
    s.sql("SELECT awa.create_queue('q')")
    late.sql("BEGIN")
    late.sql("SELECT awa.enqueue('q', '1', run_in => '1 s')")
    s.sql("SELECT awa.enqueue('q', '2', run_in => '2 s')")
    s.sql("SET awa_queue.clock_offset = 5000")
    maintain(s)
    assert [r[2] for r in claim(s)] == [2]
    late.sql("COMMIT")
    s.sql("SET awa_queue.clock_offset = 8000")
    maintain(s)
    assert [r[2] for r in claim(s)] == [1]


@pytest.mark.parametrize("table", ["deferred", "expiries"])
def test_rule_42_what_an_old_snapshot_keeps_is_not_walked_each_time(db, table):
    """Counted in buffers of the table: each step is as dear after 20,000 jobs as after 20."""
    s, reader = db.session(), db.session()
    reader.sql("BEGIN ISOLATION LEVEL REPEATABLE READ")
    reader.sql("SELECT count(*) FROM awa.jobs")

    def buffers():
        s.sql("SELECT pg_stat_force_next_flush()")
        return s.value("SELECT heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read FROM pg_statio_all_tables"
                       " WHERE relid = %s::regclass", [f"awa_internal.{table}"])

    def life(n):
        """Puts n jobs off, and lets them become due; or lets them wait too long."""
        how = "run_in" if table == "deferred" else "expires_in"
        s.sql(f"SELECT awa.enqueue_batch('q', array_fill('{{}}'::jsonb, ARRAY[%s]), {how} => '1 ms')", [n])

    def step():
        before = buffers()
        maintain(s)
        return buffers() - before

    life(20)
    time.sleep(0.01)
    step()
    life(20000)
    time.sleep(0.01)
    step()
    costs = []
    for _ in range(30):
        life(20)
        time.sleep(0.01)
        costs.append(step())
    assert s.value(f"SELECT count(*) FROM awa_internal.{table}") == 0
    # Now and then all is looked at.
    assert sorted(costs)[len(costs) // 2] < 150, costs
    reader.sql("ROLLBACK")


@pytest.mark.parametrize("verb", ["awa.fail(%s)", "awa.snooze(%s, '0')", "awa.release(%s)"])
def test_a_checkpoint_goes_along_to_the_next_attempt(s, verb):
    s.sql("SELECT awa.create_queue('q', '{\"backoff\": {\"base\": \"0\"}}')")
    s.sql("SELECT awa.enqueue('q')")
    for page in (1, 2):
        ((receipt, checkpoint),) = s.sql("SELECT receipt, checkpoint FROM awa.claim('q')")
        assert checkpoint == ({"page": page - 1, "n": 1.5} if page > 1 else None)
        assert s.value("SELECT awa.set_progress(%s, 50, 'half', jsonb_build_object('page', %s::int, 'n', 1.50))", [receipt, page]) == "held"
        s.sql(f"SELECT {verb}", [[receipt]])
        s.clock.forward(1)
        maintain(s)
    assert s.value("SELECT checkpoint->>'n' FROM awa.claim('q')") == "1.50"


def test_a_promotion_that_nobody_can_do_fails_as_a_duty_and_ends(any_db):
    """What keeps every row from being promoted (the ring's lock, here) is not taken for a fault of rows, one after the other."""
    s, holder, other = any_db.session(), any_db.session(), any_db.session()
    s.sql("SELECT awa.enqueue('q', run_in => '1 s')")
    holder.sql("BEGIN")
    holder.sql("SELECT awa_internal.seal()")  # holds the ring's lock to its end
    said = []
    other.connection.add_notice_handler(lambda d: said.append(d.message_primary))
    other.sql("SET statement_timeout = '20s'")
    other.sql("SET awa_queue.clock_offset = 5000")
    other.sql("CALL awa.maintain()")
    assert any('duty "promote" failed' in line for line in said) and not any("is due and can not" in line for line in said)
    holder.sql("COMMIT")
    other.sql("CALL awa.maintain()")
    assert [r[1] for r in claim(s)] != []


def test_the_step_of_promotion_by_itself(s):
    s.sql("SELECT awa.enqueue('q', '1', run_in => '10 s')")
    assert s.value("SELECT awa_internal.promote()") == "promoted: 0"
    s.clock.forward(11)
    s.sql("BEGIN ISOLATION LEVEL REPEATABLE READ")
    assert error_of(s, "SELECT awa_internal.promote()") == "25001"
    s.sql("ROLLBACK")
    s.sql("BEGIN READ ONLY")
    assert error_of(s, "SELECT awa_internal.promote()") == "25006"
    s.sql("ROLLBACK")
    # With preload the worker may be at it that moment; its clock is not ahead, so the job is left to this session.
    wait_until(lambda: s.value("SELECT awa_internal.promote()") == "promoted: 1")
    assert stats(s, "ready", "scheduled") == (1, 0)
