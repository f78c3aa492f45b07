"""Leases: heartbeat, rescue at a lease's end, expire_leases. The clock is set, nobody sleeps."""

import os
import re

import pytest

from harness import wait_until

MINUTE = 60_000
RETAINED = int(os.environ.get("AWA_RETAINED", "50000"))


def ahead(session, minutes):
    """Sets the queue's clock of a session ahead."""
    session.sql("SELECT set_config('awa_queue.clock_offset', %s, false)", [str(int(minutes * MINUTE))])


def rescue(session, minutes=None):
    """Steps of the rescue until there is no more; returns how many attempts it ended."""
    if minutes is not None:
        ahead(session, minutes)
    done = 0
    while True:
        said = session.sql("SELECT awa_internal.rescue()")[0][0]
        done += int(re.match(r"rescued: (\d+)", said).group(1))
        if not said.endswith(", more"):
            return done


def claim(session, n=1, queue="q", **arguments):
    named = "".join(f", {name} => %s" for name in arguments)
    rows = session.sql(
        f"SELECT receipt, job_id FROM awa.claim(%s, %s{named})", [queue, n, *arguments.values()]
    )
    return [r[0] for r in rows]


def enqueue(db, n, **settings):
    return db.value("SELECT awa.enqueue_batch('q', array_agg(to_jsonb(i))) FROM generate_series(1, %s) i", [n])


def states(db):
    return dict(db.sql("SELECT state, count(*) FROM awa.jobs GROUP BY 1"))


def beat(session, receipts, lease=None):
    return session.sql(
        "SELECT receipt, status, lease_until - clock_timestamp() FROM awa.heartbeat(%s::bigint[], %s::interval)",
        [receipts, lease],
    )


def statuses(session, receipts, lease=None):
    return [r[1] for r in beat(session, receipts, lease)]


def finish(session, verb, receipts):
    return session.sql(f"SELECT state, changed FROM awa.{verb}(%s::bigint[])", [receipts])


# ------------------------------------------------------------------------------------------------ at the lease's end


def test_an_attempt_is_rescued_at_the_end_of_its_lease_and_not_before(any_db):
    enqueue(any_db, 3)
    claim(any_db, 3)
    rescuer = any_db.session()
    assert rescue(rescuer, 4.9) == 0
    assert states(any_db) == {"running": 3}
    assert rescue(rescuer, 5.1) == 3
    assert states(any_db) == {"retryable": 3}
    assert rescue(rescuer, 5.2) == 0


def test_the_lease_of_the_claim_goes_before_that_of_the_queue(db):
    db.sql("SELECT awa.create_queue('q', '{\"lease\": \"1 h\"}')")
    enqueue(db, 2)
    claim(db, 1)
    claim(db, 1, lease="1 min")
    rescuer = db.session()
    assert rescue(rescuer, 2) == 1
    assert rescue(rescuer, 61) == 1


def test_a_rescued_job_comes_back_as_its_next_attempt_after_backoff(db):
    [job] = enqueue(db, 1)
    claim(db, 1, worker="w-1")
    session = db.session()
    assert rescue(session, 6) == 1
    attempt, run_at, errors = db.row("SELECT attempt, run_at > clock_timestamp(), errors FROM awa.job(%s)", [job])
    assert (attempt, run_at) == (2, True)
    assert errors[-1]["attempt"] == 1 and errors[-1]["outcome"] == "lease ended" and errors[-1]["worker"] == "w-1"
    ahead(session, 7)
    session.sql("CALL awa.maintain()")
    assert session.sql("SELECT job_id, attempt FROM awa.claim('q')") == [(job, 2)]


def test_a_job_that_kills_its_worker_ends_in_dead_letters_and_does_not_loop(any_db):
    any_db.sql("SELECT awa.create_queue('q', '{\"max_attempts\": 3}')")
    [job] = enqueue(any_db, 1)
    session = any_db.session()
    minutes = 0
    for attempt in (1, 2, 3):
        ahead(session, minutes)
        assert session.sql("SELECT job_id, attempt FROM awa.claim('q')") == [(job, attempt)]
        minutes += 6
        ahead(session, minutes)
        session.sql("CALL awa.maintain()")
        minutes += 1
        ahead(session, minutes)
        session.sql("CALL awa.maintain()")
    assert session.sql("SELECT * FROM awa.claim('q')") == []
    assert any_db.sql("SELECT job_id, attempt FROM awa_internal.dead_letters") == [(job, 3)]
    assert states(any_db) == {"failed": 1}
    assert rescue(session, minutes + 60) == 0


def test_rule_21_a_late_complete_is_stale_and_changes_nothing(any_db):
    enqueue(any_db, 1)
    [receipt] = claim(any_db)
    session = any_db.session()
    assert rescue(session, 6) == 1
    assert finish(any_db, "complete", [receipt]) == [("stale", False)]
    assert states(any_db) == {"retryable": 1}
    assert statuses(any_db, [receipt]) == ["lost"]


def test_rescue_of_a_batch_never_undoes_what_its_other_members_did(any_db):
    enqueue(any_db, 6)
    receipts = claim(any_db, 6)
    finish(any_db, "complete", receipts[:2])
    any_db.sql("SELECT awa.fail(%s, 'no', permanent => true)", [receipts[2:3]])
    beat(any_db, receipts[3:4], "1 h")
    session = any_db.session()
    assert rescue(session, 6) == 2
    assert states(any_db) == {"completed": 2, "failed": 1, "running": 1, "retryable": 2}
    assert finish(any_db, "complete", receipts) == [
        ("completed", False), ("completed", False), ("stale", False), ("completed", True),
        ("stale", False), ("stale", False),
    ]
    assert rescue(session, 120) == 0


def test_case_79_the_lease_is_of_the_attempt_not_of_the_worker(db):
    """A restarted worker of the same name keeps no dead job alive."""
    enqueue(db, 2)
    claim(db, 1, worker="pod")
    session = db.session()
    ahead(session, 4)
    [again] = claim(session, 1, worker="pod")
    assert statuses(session, [again]) == ["held"]
    assert rescue(session, 6) == 1
    assert statuses(session, [again]) == ["held"]


# -------------------------------------------------------------------------------------------------------- heartbeat


def test_heartbeat_extends_and_answers_in_input_order(any_db):
    enqueue(any_db, 4)
    receipts = claim(any_db, 4)
    finish(any_db, "complete", [receipts[1]])
    asked = [receipts[3], None, receipts[0], receipts[1], 12345678901234, receipts[0], -1]
    rows = beat(any_db, asked, "1 h")
    assert [r[0] for r in rows] == asked
    assert [r[1] for r in rows] == ["held", "lost", "held", "lost", "lost", "held", "lost"]
    assert [None if r[2] is None else round(r[2].total_seconds() / 60) for r in rows] == [60, None, 60, None, None, 60, None]
    session = any_db.session()
    assert rescue(session, 59) == 1
    assert rescue(session, 61) == 2


def test_heartbeat_without_a_lease_takes_the_length_that_the_claim_was_given(db):
    enqueue(db, 1)
    [receipt] = claim(db, lease="10 min")
    session = db.session()
    ahead(session, 8)
    assert statuses(session, [receipt]) == ["held"]
    assert rescue(session, 11) == 0
    assert rescue(session, 17.9) == 0
    assert rescue(session, 18.1) == 1


def test_a_heartbeat_never_shortens_a_lease(db):
    enqueue(db, 1)
    [receipt] = claim(db)
    assert beat(db, [receipt], "1 s")[0][2].total_seconds() > 290
    assert db.value("SELECT count(*) FROM awa_internal.attempts") == 0
    beat(db, [receipt], "1 h")
    assert beat(db, [receipt], "10 min")[0][2].total_seconds() > 3500
    session = db.session()
    assert rescue(session, 59) == 0
    assert rescue(session, 61) == 1


def test_a_heartbeat_after_the_end_of_the_lease_but_before_the_rescue_holds(db):
    enqueue(db, 1)
    [receipt] = claim(db)
    session = db.session()
    ahead(session, 6)
    assert statuses(session, [receipt]) == ["held"]
    assert rescue(session) == 0
    assert rescue(session, 12) == 1


def test_case_35_a_long_job_with_heartbeats_runs_once_and_is_rescued_when_they_stop(any_db):
    enqueue(any_db, 1)
    [receipt] = claim(any_db)
    session = any_db.session()
    for minutes in range(4, 400, 4):
        ahead(session, minutes)
        assert statuses(session, [receipt]) == ["held"]
        assert rescue(session) == 0
    assert any_db.value("SELECT count(*) FROM awa_internal.attempts") == 1
    assert rescue(session, 402) == 1


def test_heartbeat_says_cancelled_while_the_job_is_still_held(db):
    enqueue(db, 2)
    receipts = claim(db, 2)
    slot, claim_no = receipts[0] >> 10 & 63, receipts[0] >> 16
    db.sql(
        f"INSERT INTO awa_internal.closures_{slot} (claim_no, closed_at, slot, n, outcome, which)"
        " VALUES (%s, now(), %s, 1, 'q', '\\x01')", [claim_no, slot],
    )
    assert statuses(db, receipts, "1 h") == ["cancelled", "held"]
    session = db.session()
    assert rescue(session, 59) == 0
    assert rescue(session, 61) == 2
    assert statuses(db, receipts) == ["lost", "lost"]


def test_heartbeat_of_a_claim_that_is_not_committed_or_rolled_back_is_lost(db):
    enqueue(db, 1)
    worker = db.session(autocommit=False)
    [receipt] = claim(worker)
    assert statuses(worker, [receipt]) == ["held"]
    assert statuses(db, [receipt]) == ["lost"]
    worker.connection.rollback()
    assert statuses(db, [receipt]) == ["lost"]
    assert db.value("SELECT count(*) FROM awa_internal.attempts") == 0


def test_an_open_finish_is_held_until_it_commits(db):
    enqueue(db, 1)
    [receipt] = claim(db)
    worker = db.session(autocommit=False)
    finish(worker, "complete", [receipt])
    assert statuses(worker, [receipt]) == ["lost"]
    assert statuses(db, [receipt]) == ["held"]
    worker.connection.commit()
    assert statuses(db, [receipt]) == ["lost"]


def test_heartbeats_are_hot_updates_and_one_row_for_each_attempt(db):
    enqueue(db, 50)
    receipts = claim(db, 50)
    for i in range(1, 41):
        assert set(statuses(db, receipts, f"{10 + i} min")) == {"held"}
    assert db.value("SELECT count(*) FROM awa_internal.attempts") == 50
    db.sql("SELECT pg_stat_force_next_flush()")
    updated, hot = db.row(
        "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relid = 'awa_internal.attempts'::regclass"
    )
    assert updated == 50 * 39
    assert hot > 0.95 * updated
    assert db.value("SELECT pg_relation_size('awa_internal.attempts_pkey')") <= 2 * 8192


def test_rule_19_two_sessions_that_send_heartbeats_in_opposite_order_never_deadlock(db):
    enqueue(db, 40)
    receipts = claim(db, 40)
    one, two = db.session(), db.session()
    for i in range(1, 60):
        pending = [one.start(
            "SELECT status FROM awa.heartbeat(%s::bigint[], %s)", [receipts, f"{10 + i} min"]), two.start(
            "SELECT status FROM awa.heartbeat(%s::bigint[], %s)", [receipts[::-1], f"{10 + i} min"])]
        for p in pending:
            assert set(p.result()) == {("held",)}


def test_heartbeat_refuses_what_is_no_lease(db):
    with pytest.raises(Exception) as refused:
        db.sql("SELECT awa.heartbeat('{1}', '0 s')")
    assert refused.value.sqlstate == "22023"
    assert db.sql("SELECT * FROM awa.heartbeat(NULL)") == []


# --------------------------------------------------------------------------------------------- two at the same moment


def test_rule_19_rescue_never_waits_for_an_open_finish_and_comes_back(any_db):
    enqueue(any_db, 2)
    receipts = claim(any_db, 2)
    worker, session = any_db.session(autocommit=False), any_db.session()
    finish(worker, "complete", receipts[:1])
    session.sql("SET lock_timeout = '1ms'")
    assert rescue(session, 6) == 1
    assert states(any_db) == {"running": 1, "retryable": 1}
    assert rescue(session, 6.05) == 0
    worker.connection.rollback()
    assert rescue(session, 6.2) == 1
    assert states(any_db) == {"retryable": 2}


def test_rule_19_an_open_finish_that_commits_after_the_lease_counts(any_db):
    enqueue(any_db, 1)
    receipts = claim(any_db)
    worker, session = any_db.session(autocommit=False), any_db.session()
    assert finish(worker, "complete", receipts) == [("completed", True)]
    assert rescue(session, 6) == 0
    worker.connection.commit()
    assert rescue(session, 7) == 0
    assert states(any_db) == {"completed": 1}
    assert any_db.value("SELECT count(*) FROM awa_internal.rescue_list") == 0


def test_rule_19_a_prepared_finish_is_skipped(make_cluster):
    cluster = make_cluster(flavour="injection", settings={"max_prepared_transactions": "5"}).start()
    db = cluster.database()
    enqueue(db, 2)
    receipts = claim(db, 2)
    db.sql("BEGIN")
    finish(db, "complete", receipts[:1])
    db.sql("PREPARE TRANSACTION 'x'")
    session = db.session()
    assert rescue(session, 6) == 1
    for minutes in range(7, 12):
        assert rescue(session, minutes) == 0
    db.sql("ROLLBACK PREPARED 'x'")
    assert rescue(session, 13) == 1


@pytest.mark.parametrize("point", ["close.before_lock", "close.locked"])
def test_rescue_against_complete_at_the_same_moment_complete_first(any_db, point):
    enqueue(any_db, 1)
    receipts = claim(any_db)
    worker, session = any_db.session(), any_db.session()
    worker.pause_at(point)
    ahead(session, 6)
    with any_db.gate() as gate:
        pending = gate.hold(worker, "SELECT state, changed FROM awa.complete(%s::bigint[])", [receipts])
        rescuing = session.start("SELECT awa_internal.rescue()")
        if point == "close.before_lock":
            assert rescuing.result() == [("rescued: 1",)]
        gate.open()
        done = pending.result()
        rescuing.result()
    rescue(session, 7)
    if point == "close.before_lock":
        assert done == [("stale", False)]
        assert states(any_db) == {"retryable": 1}
    else:
        assert done == [("completed", True)]
        assert states(any_db) == {"completed": 1}


@pytest.mark.parametrize("point", ["close.before_lock", "close.locked", "rescue.closed"])
def test_rescue_against_complete_at_the_same_moment_rescue_first(any_db, point):
    enqueue(any_db, 1)
    receipts = claim(any_db)
    worker, session = any_db.session(), any_db.session()
    session.pause_at(point)
    ahead(session, 6)
    with any_db.gate() as gate:
        pending = gate.hold(session, "SELECT awa_internal.rescue()")
        completing = worker.start("SELECT state, changed FROM awa.complete(%s::bigint[])", [receipts])
        if point == "close.before_lock":
            assert completing.result() == [("completed", True)]
        gate.open()
        said, done = pending.result(), completing.result()
    if point == "close.before_lock":
        assert said == [("rescued: 0",)] and states(any_db) == {"completed": 1}
    else:
        assert said == [("rescued: 1",)] and done == [("stale", False)] and states(any_db) == {"retryable": 1}


def test_a_heartbeat_that_looked_before_the_rescue_closed_wins(any_db):
    """It was told that it holds; the rescue looks at heartbeats after its closure, and takes it back."""
    enqueue(any_db, 2)
    receipts = claim(any_db, 2)
    worker, session = any_db.session(autocommit=False), any_db.session()
    session.pause_at("close.before_lock")
    ahead(session, 6)
    ahead(worker, 6)
    with any_db.gate() as gate:
        pending = gate.hold(session, "SELECT awa_internal.rescue()")
        assert statuses(worker, receipts[:1], "1 h") == ["held"]  # not committed
        session_pause_off = gate.open
        session_pause_off()
        assert pending.result() == [("rescued: 1",)]
    session.pause_at()
    assert states(any_db) == {"running": 1, "retryable": 1}
    worker.connection.commit()
    assert rescue(session, 60) == 0
    assert finish(any_db, "complete", receipts) == [("completed", True), ("stale", False)]


def test_a_heartbeat_that_came_after_the_rescue_closed_is_lost(any_db):
    enqueue(any_db, 1)
    receipts = claim(any_db)
    worker, session = any_db.session(), any_db.session()
    rescuer = any_db.session(autocommit=False)
    ahead(rescuer, 6)
    assert rescuer.sql("SELECT awa_internal.rescue()") == [("rescued: 1",)]
    assert statuses(worker, receipts, "1 h") == ["lost"]
    assert any_db.value("SELECT count(*) FROM awa_internal.attempts") == 0
    rescuer.connection.rollback()
    assert statuses(worker, receipts) == ["held"]
    assert rescue(session, 6) == 1


def test_a_heartbeat_caught_between_its_row_and_its_second_look_is_lost(any_db):
    enqueue(any_db, 1)
    receipts = claim(any_db)
    worker, session = any_db.session(), any_db.session()
    worker.pause_at("heartbeat.written")
    with any_db.gate() as gate:
        # What it extends ends before the rescue's now: the rescue takes the attempt, and the heartbeat sees it.
        pending = gate.hold(worker, "SELECT status FROM awa.heartbeat(%s::bigint[], '6 min')", [receipts])
        assert rescue(session, 10) == 1
        gate.open()
        assert pending.result() == [("lost",)]


def test_two_rescuers_at_once_end_each_attempt_once(any_db):
    enqueue(any_db, 3)
    claim(any_db, 3)
    one, two = any_db.session(), any_db.session()
    one.pause_at("rescue.closed")
    ahead(one, 6)
    with any_db.gate() as gate:
        pending = gate.hold(one, "SELECT awa_internal.rescue()")
        assert rescue(two, 6) == 0  # does not wait
        gate.open()
        assert pending.result() == [("rescued: 3",)]
    assert rescue(two, 6.2) == 0
    assert states(any_db) == {"retryable": 3}
    assert any_db.value("SELECT count(*) FROM awa_internal.deferred") == 3


def test_a_rescue_that_rolls_back_is_done_again(any_db):
    enqueue(any_db, 2)
    receipts = claim(any_db, 2)
    beat(any_db, receipts[:1], "10 min")
    session = any_db.session(autocommit=False)
    ahead(session, 6)
    session.connection.commit()
    for _ in range(2):
        assert session.sql("SELECT awa_internal.rescue()") == [("rescued: 1",)]
        session.connection.rollback()
    assert session.sql("SELECT awa_internal.rescue()") == [("rescued: 1",)]
    session.connection.commit()
    assert rescue(session, 11) == 1


def test_claims_of_a_transaction_that_stays_open_beyond_their_lease(any_db):
    enqueue(any_db, 3)
    worker, session = any_db.session(autocommit=False), any_db.session()
    claim(worker, 2)
    assert rescue(session, 6) == 0
    assert rescue(session, 8) == 0
    worker.connection.commit()
    assert rescue(session, 9) == 2
    claim(worker, 1)
    assert rescue(session, 20) == 0
    worker.connection.rollback()
    assert rescue(session, 21) == 0
    assert any_db.value("SELECT count(*) FROM awa_internal.rescue_list") == 0
    assert states(any_db) == {"retryable": 2, "ready": 1}


def test_rule_2_the_step_refuses_an_older_snapshot(db):
    session = db.session(autocommit=False)
    session.sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    with pytest.raises(Exception) as refused:
        session.sql("SELECT awa_internal.rescue()")
    assert refused.value.sqlstate == "25001"


# ------------------------------------------------------------------------------------------------------ damaged rows


def test_rule_42_a_job_whose_row_is_lost_does_not_stop_the_others(db):
    """Without its row it has no next attempt: it ends as failed, and is not tried for ever."""
    ids = enqueue(db, 5)
    claim(db, 5)
    db.sql("DELETE FROM awa_internal.ready_0 WHERE entry_id = %s", [ids[2]])
    db.sql("VACUUM awa_internal.ready_0")
    session = db.session()
    assert rescue(session, 6) == 5
    assert db.value("SELECT count(*) FROM awa_internal.deferred") == 4
    assert rescue(session, 60) == 0


def test_rule_42_a_row_that_can_not_be_rescued_is_reported_once_and_blocks_nobody(db):
    ids = enqueue(db, 9)
    receipts = claim(db, 9)
    # The job of the third is in `deferred` already: its primary key refuses it.
    db.sql(
        "INSERT INTO awa_internal.deferred (job_id, run_at, lane_id, attempt, max_attempts, state, args)"
        " VALUES (%s, '2999-01-01', 1, 1, 1, 's', '1')", [ids[2]],
    )
    session = db.session()
    notices = []
    session.connection.add_notice_handler(lambda n: notices.append(n.message_primary))
    assert rescue(session, 6) == 8
    assert len(notices) == 1 and str(receipts[2]) in notices[0]
    assert db.row("SELECT failures, due_at - (clock_timestamp() + interval '6 min') < '2 s' FROM awa_internal.rescue_list") == (1, True)
    assert rescue(session, 6.1) == 0
    assert rescue(session, 6.2) == 0
    assert len(notices) == 1
    assert db.value("SELECT failures FROM awa_internal.rescue_list") == 3
    db.sql("DELETE FROM awa_internal.deferred WHERE job_id = %s", [ids[2]])
    assert rescue(session, 20) == 1
    assert db.value("SELECT count(*) FROM awa_internal.rescue_list") == 0


# ----------------------------------------------------------------------------------------------------- expire_leases


def test_expire_leases_ends_those_of_one_worker_now(any_db):
    enqueue(any_db, 6)
    dead = claim(any_db, 2, worker="dead")
    claim(any_db, 1, worker="alive")
    claim(any_db, 1)
    extended = claim(any_db, 1, worker="dead")
    finish(any_db, "complete", dead[:1])
    beat(any_db, extended, "1 d")
    assert any_db.value("SELECT awa.expire_leases('dead')") == 2
    assert any_db.value("SELECT awa.expire_leases('dead')") == 0
    assert states(any_db) == {"completed": 1, "running": 2, "retryable": 2, "ready": 1}
    assert statuses(any_db, [dead[1], *extended]) == ["lost", "lost"]


def test_expire_leases_finds_what_the_rescue_has_put_on_its_list(db):
    enqueue(db, 1)
    [receipt] = claim(db, worker="dead")
    beat(db, [receipt], "1 d")
    rescuer = db.session()
    assert rescue(rescuer, 60) == 0
    assert db.value("SELECT count(*) FROM awa_internal.rescue_list") == 1
    db.sql("UPDATE awa_internal.rescue_marks SET through = 'infinity'")
    assert db.value("SELECT awa.expire_leases('dead')") == 1
    assert rescue(rescuer, 60 * 30) == 0
    assert db.value("SELECT count(*) FROM awa_internal.rescue_list") == 0


def test_expire_leases_twice_at_once_does_it_once(any_db):
    enqueue(any_db, 4)
    claim(any_db, 4, worker="dead")
    one, two = any_db.session(autocommit=False), any_db.session()
    assert one.value("SELECT awa.expire_leases('dead')") == 4
    assert two.value("SELECT awa.expire_leases('dead')") == 0  # does not wait
    one.connection.commit()
    assert two.value("SELECT awa.expire_leases('dead')") == 0
    assert any_db.value("SELECT count(*) FROM awa_internal.deferred") == 4


def test_expire_leases_in_repeatable_read_and_its_errors(db):
    enqueue(db, 2)
    session = db.session(autocommit=False)
    session.sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    session.sql("SELECT 1 FROM awa_internal.queues")
    claim(db, 2, worker="dead")
    assert session.value("SELECT awa.expire_leases('dead')") == 2
    session.connection.commit()
    with pytest.raises(Exception) as refused:
        db.sql("SELECT awa.expire_leases(NULL)")
    assert refused.value.sqlstate == "22004"


# ---------------------------------------------------------------------------------------------------------- progress


def test_progress_is_stored_and_tells_whether_the_attempt_is_held(db):
    enqueue(db, 1)
    [receipt] = claim(db)
    assert db.value("SELECT awa.set_progress(%s, 10, 'begun', '{\"at\": 1}')", [receipt]) == "held"
    assert db.value("SELECT awa.set_progress(%s, 50)", [receipt]) == "held"
    assert db.row("SELECT percent, message, checkpoint, lease_until FROM awa_internal.attempts") == (
        50, "begun", {"at": 1}, None)
    finish(db, "complete", [receipt])
    assert db.value("SELECT awa.set_progress(%s, 60)", [receipt]) == "lost"
    assert db.value("SELECT awa.set_progress(77, 60)") == "lost"
    assert db.value("SELECT percent FROM awa_internal.attempts") == 50
    for call, state in [("NULL", "22004"), ("1, 101", "22023"), ("1, -1", "22023"), ("1, 1, repeat('x', 9000)", "54000")]:
        with pytest.raises(Exception) as refused:
            db.sql(f"SELECT awa.set_progress({call})")
        assert refused.value.sqlstate == state


# ---------------------------------------------------------------------------------- a million finished claims retained


def fill(db, n, ended_before="10 min"):
    """n finished claims of one job each, as they lie after n calls, whose lease is over."""
    db.sql(
        "INSERT INTO awa_internal.segments_0 (lane_id, first_seq, first_entry_id, enqueued_at, slot, n, runs)"
        " SELECT 999999, i, (1::int8 << 40) + i, now() - interval '2 h', 0, least(1000, %s - i + 1), ''"
        " FROM generate_series(1, %s, 1000) i", [n, n],
    )
    db.sql(
        "INSERT INTO awa_internal.claims_0 (claim_no, lane_id, first_seq, claimed_at, expires_at, slot, n)"
        " SELECT i, 999999, i, now() - interval '1 h', now() - %s::interval + i * interval '1 microsecond', 0, 1"
        " FROM generate_series(1, %s) i", [ended_before, n],
    )
    db.sql(
        "INSERT INTO awa_internal.closures_0 (claim_no, closed_at, slot, n, outcome)"
        " SELECT i, now() - interval '30 min', 0, 1, 'c' FROM generate_series(1, %s) i", [n],
    )
    db.sql("VACUUM ANALYZE awa_internal.claims_0, awa_internal.closures_0")


def buffers(session, statement):
    plan = session.sql(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}")[0][0][0]["Plan"]
    return sum(plan[f"Shared {what} Blocks"] for what in ("Hit", "Read"))


def test_rule_25_retained_claims_are_looked_at_once_and_not_again(db):
    fill(db, 30_000)
    enqueue(db, 1)
    claim(db)
    session = db.session()
    first = session.sql("SELECT awa_internal.rescue()")[0][0]
    assert first == "rescued: 0, more"  # bounded
    assert rescue(session) == 0
    assert buffers(session, "SELECT awa_internal.rescue()") < 300
    # A session that knows nothing, as CALL awa.maintain() has it.
    assert buffers(db.session(), "SELECT awa_internal.rescue()") < 3000
    assert rescue(db.session(), 6) == 1


def test_rule_25_a_claim_that_came_in_behind_the_mark_is_found_by_the_look_at_everything(db):
    fill(db, 5_000)
    session = db.session()
    assert rescue(session) == 0
    fresh = db.session()
    enqueue(db, 1)
    claim(db)
    db.sql("UPDATE awa_internal.claims_0 SET expires_at = now() - interval '1 d' WHERE claim_no = (SELECT max(claim_no) FROM awa_internal.claims_0)")
    assert rescue(fresh, 8) == 0
    total = sum(rescue(fresh, minutes) for minutes in range(25, 31))
    assert total == 1


def test_a_mark_ahead_of_the_clock_goes_back_with_it(db):
    fill(db, 1_000)
    assert rescue(db.session()) == 0
    assert db.sql("UPDATE awa_internal.rescue_marks SET through = now() + interval '1 h' RETURNING slot") == [(0,)]
    session = db.session()
    assert rescue(session) == 0
    enqueue(db, 1)
    claim(db)
    assert rescue(session, 6) == 1


def test_leases_that_ended_seconds_ago_are_looked_at_again(db):
    """A claimer that stalls between the clock and the index comes in behind the mark."""
    session = db.session()
    assert rescue(session) == 0
    enqueue(db, 1)
    claim(db)
    db.sql("UPDATE awa_internal.claims_0 SET expires_at = now() - interval '1 s'")
    assert rescue(session) == 1


def test_claims_that_end_at_one_moment_are_rescued_in_bounded_steps(db):
    for _ in range(5):
        enqueue(db, 1000)
    claim(db, 5000)
    session = db.session()
    ahead(session, 6)
    said = session.value("SELECT awa_internal.rescue()")
    assert re.match(r"rescued: (\d+), more", said) and int(re.match(r"rescued: (\d+)", said).group(1)) <= 2100
    assert rescue(session) + int(re.match(r"rescued: (\d+)", said).group(1)) == 5000
    assert states(db) == {"retryable": 5000}
    assert db.value("SELECT count(*) FROM awa_internal.rescue_list") == 0


def test_a_slot_that_is_emptied_and_used_again_is_looked_at_anew(db):
    enqueue(db, 1)
    receipts = claim(db)
    beat(db, receipts, "1 d")
    session = db.session()
    assert rescue(session, 6) == 0
    finish(db, "complete", receipts)
    assert db.value("SELECT awa_internal.seal()").startswith("sealed")
    assert db.value("SELECT awa_internal.close(0)") == "closed"
    assert db.value("SELECT awa_internal.empty(0, true)") == "emptied"
    enqueue(db, 1)
    claim(db)
    assert rescue(session, 60 * 25) == 1
    assert db.value("SELECT count(*) FROM awa_internal.rescue_list") == 0


# -------------------------------------------------------------------------------------------------- by the worker


@pytest.mark.timeout(300)
def test_rule_25_the_worker_rescues_at_the_end_of_the_lease_with_claims_retained(make_cluster, record_property):
    """Nobody calls anything: the claim's commit tells the worker, the lease's end wakes it."""
    cluster = make_cluster(flavour="injection", preload=True).start()
    db = cluster.database()
    fill(db, RETAINED)
    db.sql("ALTER SYSTEM SET awa_queue.worker = on")
    db.sql("SELECT pg_reload_conf()")
    db.sql("SELECT awa.create_queue('q')")
    wait_until(lambda: db.value(
        "SELECT count(*) FROM awa_internal.rescue_marks WHERE through > now() - interval '9 min'") == 1, 120,
        "the worker to look through what is retained")
    late = []
    for _ in range(5):
        enqueue(db, 1)
        [receipt] = claim(db, lease="1 s")
        slot, claim_no = receipt >> 10 & 63, receipt >> 16
        seen = []  # what the worker is at meanwhile, for the report

        def rescued():
            seen.append(db.sql("SELECT query FROM pg_stat_activity WHERE application_name = 'awa_queue worker'"))
            return db.value(
                f"SELECT count(*) FROM awa_internal.closures_{slot} WHERE claim_no = %s", [claim_no]) == 1

        wait_until(rescued, 60, "the rescue", step=0.05)
        if len(seen) > 40:
            print("late; the worker was at", {str(rows): seen.count(rows) for rows in seen})
        late.append(db.value(
            f"SELECT extract(epoch FROM d.closed_at - c.expires_at) FROM awa_internal.closures_{slot} d"
            f" JOIN awa_internal.claims_{slot} c USING (claim_no) WHERE claim_no = %s", [claim_no]))
        assert late[-1] >= 0
    record_property("seconds_from_lease_end_to_rescue", [float(s) for s in late])
    print(f"{RETAINED} claims retained, seconds from lease end to rescue: {[round(float(s), 4) for s in late]}")
