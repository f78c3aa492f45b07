"""The ring as maintenance runs it: rotation, slots that are added, emptying, the words that say why a slot stays; and
counts that are exact without reading what is finished."""

import random

import pytest

from harness import wait_until

DAY = 86_400_000
HOUR = 3_600_000


# ---------------------------------------------------------------------------------------------------------- helpers


def enqueue(session, numbers, queue="q"):
    return session.sql(
        "SELECT unnest(awa.enqueue_batch(%s, ARRAY(SELECT to_jsonb(n) FROM unnest(%s::int8[]) n)))", [queue, list(numbers)]
    )


def claim(session, n=1000, queue="q", worker=None):
    return session.sql("SELECT receipt, args FROM awa.claim(%s, %s, %s)", [queue, n, worker])


def finish(session, rows, verb="complete"):
    return [s for (s,) in session.sql(f"SELECT state FROM awa.{verb}(%s::int8[])", [[r for r, _ in rows]])]


def set_clock(session, milliseconds):
    session.sql("SELECT set_config('awa_queue.clock_offset', %s, false)", [str(milliseconds)])


def ring(session):
    """slot -> (state, blocked_reason), empty ones left out."""
    rows = session.sql("SELECT slot, state, blocked_reason FROM awa.ring_status WHERE state <> 'empty' ORDER BY 1")
    return {slot: (state, reason) for slot, state, reason in rows}


def current(session):
    return session.value("SELECT slot FROM awa.ring_status WHERE state = 'current'")


def seal(session):
    said = session.value("SELECT awa_internal.seal()")
    assert said.startswith("sealed: slot "), said
    return int(said.split()[2])


def maintain_until(session, condition, what=None):
    """Usually once; an autovacuum worker or a session that is just ending may be in the way for a moment."""
    def done():
        session.sql("CALL awa.maintain()")
        return condition()

    return wait_until(done, what=what)


def reason(session, slot=0):
    return session.value("SELECT blocked_reason FROM awa.ring_status WHERE slot = %s", [slot])


def finished_slot(session, retention="0 s"):
    """Puts ten jobs into the current slot, ends them, seals and closes it; its number."""
    session.sql("SELECT awa.create_queue('q', %s)", [f'{{"retention": "{retention}"}}'])
    slot = current(session)
    enqueue(session, range(10))
    finish(session, claim(session))
    seal(session)
    assert session.value("SELECT awa_internal.close(%s)", [slot]) == "closed"
    return slot


# ---------------------------------------------------------------------------------------------------------- rotation


def test_an_idle_queue_never_rotates(db):
    s = db.session()
    s.sql("SELECT awa.create_queue('q')")
    for day in range(3):
        set_clock(s, day * 7 * DAY)
        s.sql("CALL awa.maintain()")
    assert db.sql("SELECT * FROM awa_internal.ring") == []


def test_an_old_slot_rotates_and_goes_when_retention_is_over(db):
    """16 slots and a retention of a day: a slot gets three hours old. Every step at its time, none before."""
    s = db.session()
    enqueue(s, range(3))
    finish(s, claim(s))
    s.sql("CALL awa.maintain()")
    set_clock(s, 3 * HOUR - 60_000)
    s.sql("CALL awa.maintain()")
    assert db.sql("SELECT * FROM awa_internal.ring") == []
    set_clock(s, 3 * HOUR + 1_000)
    maintain_until(s, lambda: ring(s)[0][0] == "closed")
    assert current(s) == 1
    assert ring(s)[0][1].startswith("retained until 20")
    set_clock(s, DAY - 60_000)
    s.sql("CALL awa.maintain()")
    assert ring(s)[0][0] == "closed"
    set_clock(s, DAY + 1_000)
    maintain_until(s, lambda: 0 not in ring(s))
    # What is left is empty, so nothing happens any more.
    events = db.sql("SELECT * FROM awa_internal.ring ORDER BY 1")
    set_clock(s, 20 * DAY)
    s.sql("CALL awa.maintain()")
    assert db.sql("SELECT * FROM awa_internal.ring ORDER BY 1") == events
    assert s.sql("SELECT completed, completed_total FROM awa.queue_stats") == [(0, 3)]


def test_a_large_slot_rotates_at_once(make_cluster):
    db = make_cluster(flavour="injection", settings={"awa_queue.slot_size": "1MB"}).start().database()
    s = db.session()
    s.sql("SELECT awa.enqueue_batch('q', ARRAY(SELECT to_jsonb(md5(n::text)) FROM generate_series(1, 20000) n))")
    assert s.value("SELECT bytes > 1024 * 1024 FROM awa.ring_status WHERE slot = 0")
    maintain_until(s, lambda: ring(s)[0][0] == "closed")
    assert current(s) == 1


def test_a_job_that_runs_for_a_day_pins_its_own_slot_and_nothing_else(db):
    s = db.session()
    s.sql("SELECT awa.create_queue('q', '{\"retention\": \"1 h\"}'), awa.create_queue('long', '{\"lease\": \"2 d\", \"retention\": \"1 h\"}')")
    enqueue(s, [-1], queue="long")
    held = claim(s, queue="long", worker="host-7")
    since = s.value("SELECT to_char(min(claimed_at), 'YYYY-MM-DD HH24:MI') FROM awa_internal.claims")
    used = set()
    for half_hour in range(1, 48):
        enqueue(s, range(half_hour * 10, half_hour * 10 + 10))
        finish(s, claim(s))
        set_clock(s, half_hour * HOUR // 2)
        maintain_until(s, lambda: current(s) not in used or len(used) > 4)
        used.add(current(s))
        live = ring(s)
        assert live[0] == ("closed", f"1 job of queue long has not ended, oldest running since {since} (worker host-7)")
        # Slots of the last hour, no more.
        assert len(live) <= 6, live
    assert s.value("SELECT count(*) FROM awa.ring_status") == 16
    assert finish(s, held) == ["completed"]
    set_clock(s, 26 * HOUR)
    maintain_until(s, lambda: 0 not in ring(s))


def test_rule_11_slots_are_added_when_all_are_pinned_up_to_the_limit(make_cluster):
    server = make_cluster(flavour="injection", settings={"awa_queue.max_slots": "18", "awa_queue.slot_age": "1"}).start()
    db = server.database()
    s = db.session()
    s.sql("SELECT awa.create_queue('q', '{\"retention\": \"0 s\"}')")
    for n in range(16):
        enqueue(s, [n])
        if n < 15:
            seal(s)
    assert s.value("SELECT awa_internal.seal()") == "no empty slot"
    # Nobody waits for the new slot, whatever they hold, and it for nobody.
    reader, producer = db.session(autocommit=False), db.session(autocommit=False)
    reader.sql("SELECT count(*) FROM awa_internal.ready, awa_internal.segments, awa_internal.claims, awa_internal.closures")
    enqueue(producer, [100])
    for n in (16, 17):
        set_clock(s, n * 60_000)
        maintain_until(s, lambda: current(s) == n)
        enqueue(s, [n])
    producer.connection.commit()
    reader.connection.rollback()
    # At the limit the current one grows.
    set_clock(s, DAY)
    s.sql("CALL awa.maintain()")
    enqueue(s, [18])
    assert current(s) == 17
    assert s.value("SELECT count(*) FROM awa.ring_status") == 18
    # An added slot is as slot 0 is: options, indexes, storage, rights.
    like = (
        "SELECT replace(a.relname, '_{0}', ''), a.reloptions, t.reloptions, a.relacl,"
        " ARRAY(SELECT replace(pg_get_indexdef(indexrelid), '_{0}', '') FROM pg_index WHERE indrelid = a.oid ORDER BY 1),"
        " ARRAY(SELECT (attname, atttypid, attnotnull, attstorage)::text FROM pg_attribute WHERE attrelid = a.oid AND attnum > 0 ORDER BY attnum)"
        " FROM pg_class a LEFT JOIN pg_class t ON t.oid = a.reltoastrelid"
        " WHERE a.relname IN ('ready_{0}', 'segments_{0}', 'claims_{0}', 'closures_{0}') ORDER BY 1"
    )
    for slot in (16, 17):
        assert db.sql(like.format(slot)) == db.sql(like.format(0))
    assert db.sql("SELECT 1 FROM pg_depend WHERE deptype = 'e' AND objid = 'awa_internal.ready_16'::regclass") == []
    # Dumped and restored with the jobs in it, dropped with the extension.
    file = server.dir / "added.dump"
    server.client("pg_dump", "-Fc", "-f", file, dbname=db.name)
    for options in (["-e"], ["-e", "-1"]):
        copy = server.database(extension=False)
        try:
            server.client("pg_restore", *options, file, dbname=copy.name)
            assert copy.value("SELECT count(*) FROM awa_internal.ready_17") == 2
            assert sorted(a for _, a in claim(copy.session())) == [*range(19), 100]
            copy.sql("DROP EXTENSION awa_queue")
            assert copy.sql("SELECT relname FROM pg_class WHERE relname ~ '^(ready|segments|claims|closures)'") == []
        finally:
            copy.drop()
    assert sorted(a for _, a in claim(s)) == [*range(19), 100]
    db.sql("DROP EXTENSION awa_queue")
    assert db.sql("SELECT relname FROM pg_class WHERE relname ~ '^(ready|segments|claims|closures)'") == []


def test_a_slot_is_not_added_while_somebody_locks_a_parent(db):
    s, dba = db.session(), db.session(autocommit=False)
    for n in range(16):
        enqueue(s, [n])
        if n < 15:
            seal(s)
    set_clock(s, DAY)
    dba.sql("LOCK TABLE awa_internal.claims IN SHARE UPDATE EXCLUSIVE MODE")
    s.sql("SET lock_timeout = '5s'")
    s.sql("CALL awa.maintain()")
    assert s.value("SELECT count(*) FROM awa.ring_status") == 16
    dba.connection.rollback()
    maintain_until(s, lambda: current(s) == 16)


# ------------------------------------------------------------------------------------------ why a slot is not closed


def test_reason_open_transaction_and_how_many_more(db):
    s = db.session()
    one = db.session(autocommit=False, settings={"application_name": "billing"})
    two = db.session(autocommit=False)
    s.sql("SELECT awa.create_queue('q')")
    enqueue(one, [1])
    enqueue(two, [2])
    seal(s)
    s.sql("CALL awa.maintain()")
    state, why = ring(s)[0]
    assert state == "sealed"
    assert why.startswith(f"open transaction of pid {one.pid}, ") and why.endswith(
        " s old, has written into it (application billing, user postgres), and 1 more")
    one.connection.rollback()
    assert reason(s).startswith(f"open transaction of pid {two.pid}, ") and "more" not in reason(s)
    two.connection.commit()
    maintain_until(s, lambda: ring(s)[0] == ("closed", "1 job of queue q has not ended, none is running"), what=ring(s))


def test_reason_prepared_transaction(db):
    s, one = db.session(), db.session()
    one.sql("BEGIN")
    enqueue(one, [1])
    one.sql("PREPARE TRANSACTION 'month''s end'")
    seal(s)
    try:
        assert reason(s).startswith("prepared transaction 'month's end', ")
        assert reason(s).endswith(" s old, has written into it (user postgres)")
    finally:
        s.sql("COMMIT PREPARED 'month''s end'")
    assert reason(s) == "nothing: closed by the next run of maintenance"


def test_reason_somebody_locks_the_segments(db):
    s, vacuum = db.session(), db.session(autocommit=False)
    enqueue(s, [1])
    seal(s)
    vacuum.sql("LOCK TABLE awa_internal.segments_0 IN SHARE UPDATE EXCLUSIVE MODE")
    assert reason(s).startswith(f"lock of pid {vacuum.pid}, ") and " on segments_0 (user postgres)" in reason(s)
    assert s.value("SELECT awa_internal.close(0)") == "writers left"


# ----------------------------------------------------------------------------------------- why a slot is not emptied


def test_reason_jobs_of_several_queues(db):
    s = db.session()
    enqueue(s, range(17))
    enqueue(s, range(3), queue="other")
    enqueue(s, range(2), queue="third")
    claim(s, 1)
    seal(s)
    s.sql("CALL awa.maintain()")
    since = s.value("SELECT to_char(min(claimed_at), 'YYYY-MM-DD HH24:MI') FROM awa_internal.claims")
    assert ring(s)[0] == (
        "closed", f"17 jobs of queue q have not ended, nor 5 of 2 other queues, oldest running since {since}")


def test_reason_snapshot_names_who_and_until_when(db):
    s, old = db.session(), db.session(settings={"application_name": "pg_dump"})
    enqueue(s, [0])
    old.sql("BEGIN ISOLATION LEVEL REPEATABLE READ")
    old.sql("SELECT 1")
    slot = finished_slot(s)
    s.sql("SELECT awa.alter_queue('q', '{\"retention\": \"0 s\"}')")
    s.sql("CALL awa.maintain()")
    until = s.value("SELECT to_char(ended_at + interval '6 h', 'YYYY-MM-DD HH24:MI') FROM awa_internal.finished_slots")
    why = reason(s, slot)
    assert why.startswith(f"snapshot of pid {old.pid}, ") and why.endswith(
        f" s old (application pg_dump, user postgres): emptied at {until} at the latest"), why
    # Who may not see other sessions is told less, and gets no error.
    db.sql("DO $$ BEGIN CREATE ROLE watcher LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$")
    db.sql("GRANT USAGE ON SCHEMA awa TO watcher; GRANT SELECT ON awa.ring_status TO watcher;"
           " GRANT EXECUTE ON FUNCTION awa_internal.slot_counts() TO watcher")
    try:
        watcher = db.session(user="watcher")
        assert reason(watcher, slot) == (
            f"an older snapshot (a member of pg_read_all_stats sees whose): emptied at {until} at the latest")
        watcher.close()
        old.sql("COMMIT")
        maintain_until(s, lambda: slot not in ring(s))
    finally:
        db.sql("DROP OWNED BY watcher; DROP ROLE watcher")


def test_reason_snapshots_of_prepared_transactions_and_replication_slots(make_cluster):
    server = make_cluster(flavour="injection", settings={"wal_level": "logical"}).start()
    db = server.database()
    s, one = db.session(), db.session()
    s.sql("CREATE TABLE t (a int)")
    one.sql("BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'p'")
    slot = finished_slot(s)
    s.sql("CALL awa.maintain()")
    assert reason(s, slot).startswith("prepared transaction 'p', "), reason(s, slot)
    one.sql("COMMIT PREPARED 'p'")
    # A physical slot has an xmin once a standby with hot_standby_feedback has told it.
    s.sql("SELECT pg_create_physical_replication_slot('far')")
    with server.standby({"hot_standby_feedback": "on", "primary_slot_name": "far", "wal_receiver_status_interval": "1"}) as standby:
        reader = standby.connect(db.name)
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        reader.execute("SELECT count(*) FROM awa_internal.ready")
        wait_until(lambda: s.value("SELECT xmin IS NOT NULL FROM pg_replication_slots"), timeout=30)
        seal(s)
        enqueue(s, range(3))
        finish(s, claim(s))
        mine = current(s)
        seal(s)
        assert s.value("SELECT awa_internal.close(%s)", [mine]) == "closed"
        s.sql("CALL awa.maintain()")
        assert "xmin of replication slot 'far'" in reason(s, mine), reason(s, mine)
        reader.close()
    s.sql("SELECT pg_drop_replication_slot('far')")
    maintain_until(s, lambda: mine not in ring(s))


@pytest.mark.parametrize("mode", ["ACCESS SHARE", "SHARE UPDATE EXCLUSIVE"])
def test_rule_18_reason_a_lock_and_emptied_after_its_release(db, mode):
    s, reader = db.session(), db.session(autocommit=False, settings={"application_name": "report"})
    slot = finished_slot(s)
    reader.sql(f"LOCK TABLE awa_internal.claims_{slot} IN {mode} MODE")
    s.sql("CALL awa.maintain()")
    why = reason(s, slot)
    assert why.startswith(f"lock of pid {reader.pid}, ") and why.endswith(
        f" s old on claims_{slot} (application report, user postgres)"), why
    # Nobody queues behind an attempt.
    enqueue(s, [7])
    assert [a for _, a in claim(s)] == [7]
    reader.connection.rollback()
    maintain_until(s, lambda: slot not in ring(s))


# ------------------------------------------------------------------------------------------------------------ rule 9


def test_rule_09_a_dump_that_runs_while_slots_are_emptied_has_all_jobs_of_its_snapshot(db):
    s, keeper = db.session(), db.session()
    s.sql("SELECT awa.create_queue('q', '{\"retention\": \"0 s\"}')")
    for n in range(5):
        enqueue(s, range(n * 10, n * 10 + 10))
        seal(s)
    keeper.sql("BEGIN ISOLATION LEVEL REPEATABLE READ")
    snapshot = keeper.value("SELECT pg_export_snapshot()")
    while rows := claim(s, 7):
        finish(s, rows)
    for _ in range(3):
        s.sql("CALL awa.maintain()")
    cluster, file = db.cluster, db.cluster.dir / f"{db.name}.dump"
    cluster.client("pg_dump", f"--snapshot={snapshot}", "-Fc", "-f", file, dbname=db.name)
    keeper.sql("COMMIT")
    maintain_until(s, lambda: len(ring(s)) == 1)
    copy = cluster.database(extension=False)
    try:
        cluster.client("pg_restore", "-e", file, dbname=copy.name)
        assert sorted(a for _, a in claim(copy.session())) == list(range(50))
    finally:
        copy.drop()
    assert s.sql("SELECT enqueued_total, completed_total FROM awa.queue_stats") == [(50, 50)]


def test_rule_09_emptying_at_the_end_of_the_grace_is_logged(db):
    s, old = db.session(), db.session()
    enqueue(s, [0])
    old.sql("BEGIN ISOLATION LEVEL REPEATABLE READ")
    old.sql("SELECT 1")
    slot = finished_slot(s)
    s.sql("SELECT awa.alter_queue('q', '{\"retention\": \"0 s\"}')")
    s.sql("CALL awa.maintain()")
    assert slot in ring(s)
    since = db.cluster.log_position()
    set_clock(s, 6 * HOUR + 1000)
    maintain_until(s, lambda: slot not in ring(s))
    assert f"slot {slot} is emptied although a snapshot" in db.cluster.log(since)
    old.sql("COMMIT")




# ----------------------------------------------------------------------------------------------------------- rule 43


def test_rule_43_what_points_into_a_slot_goes_with_it(db):
    s, holder = db.session(), db.session(autocommit=False)
    slot = finished_slot(s)
    s.sql("INSERT INTO awa_internal.attempts (claim_no, index, slot) SELECT claim_no, 0, slot FROM awa_internal.claims")
    s.sql("INSERT INTO awa_internal.attempts (claim_no, index, slot) VALUES (1, 0, %s)", [slot + 1])
    holder.sql("SELECT * FROM awa_internal.attempts WHERE slot = %s FOR UPDATE", [slot])
    assert s.value('SELECT awa_internal."empty"(%s, true)', [slot]) == "blocked"
    holder.connection.rollback()
    wait_until(lambda: s.value('SELECT awa_internal."empty"(%s, true)', [slot]) == "emptied")
    assert db.sql("SELECT claim_no, slot FROM awa_internal.attempts") == [(1, slot + 1)]


# ------------------------------------------------------------------------------------------------- rule 26, exact counts

# Every column from the tables, slowly. Totals of what was emptied are the model's business.
SLOW = """
WITH ended AS (
    SELECT c.lane_id >> 8 AS queue_id, x.outcome, x.n
    FROM awa_internal.closures x JOIN awa_internal.claims c USING (claim_no)
), letters AS (
    SELECT queue_id, outcome, n FROM ended WHERE outcome <> 'q'
    UNION ALL SELECT lane_id >> 8, 'e', n FROM awa_internal.segments
    UNION ALL SELECT queue_id, outcome, n FROM awa_internal.queue_totals
    UNION ALL SELECT queue_id, what, n FROM awa_internal.count_changes
)
SELECT q.name,
    (SELECT coalesce(sum(n), 0) FROM awa_internal.segments WHERE lane_id >> 8 = queue_id)
    - (SELECT coalesce(sum(n), 0) FROM awa_internal.claims WHERE lane_id >> 8 = queue_id) AS ready,
    (SELECT count(*) FROM awa_internal.deferred d WHERE d.lane_id >> 8 = queue_id AND state = 's') AS scheduled,
    (SELECT count(*) FROM awa_internal.deferred d WHERE d.lane_id >> 8 = queue_id AND state = 'r') AS retryable,
    (SELECT coalesce(sum(n), 0) FROM awa_internal.claims WHERE lane_id >> 8 = queue_id)
    - (SELECT coalesce(sum(n), 0) FROM ended e WHERE e.queue_id = q.queue_id AND outcome <> 'q') AS running,
    (SELECT coalesce(sum(n), 0) FROM ended e WHERE e.queue_id = q.queue_id AND outcome = 'c') AS completed,
    (SELECT count(*) FROM awa_internal.dead_letters d WHERE d.lane_id >> 8 = q.queue_id) AS failed,
    (SELECT coalesce(sum(n), 0) FROM ended e WHERE e.queue_id = q.queue_id AND outcome IN ('x', 'k')) AS cancelled,
    (SELECT coalesce(sum(n), 0) FROM letters l WHERE l.queue_id = q.queue_id AND outcome = 'c') AS completed_total,
    (SELECT coalesce(sum(n), 0) FROM letters l WHERE l.queue_id = q.queue_id AND outcome IN ('f', 'd')) AS failed_total,
    (SELECT coalesce(sum(n), 0) FROM letters l WHERE l.queue_id = q.queue_id AND outcome IN ('t', 'l')) AS retried_total,
    (SELECT coalesce(sum(n), 0) FROM letters l WHERE l.queue_id = q.queue_id AND outcome IN ('l', 'd')) AS rescued_total,
    (SELECT coalesce(sum(n), 0) FROM letters l WHERE l.queue_id = q.queue_id AND outcome = 's') AS stale_total
FROM awa_internal.queues q ORDER BY 1
"""
COLUMNS = ("ready, scheduled, retryable, running, completed, failed, cancelled, completed_total, failed_total, retried_total,"
           " rescued_total, stale_total")


class Counted:
    """Random verbs, and what they add up to."""

    def __init__(self, db, seed):
        self.random = random.Random(seed)
        self.db = db
        self.connect()
        self.totals = {q: dict.fromkeys(("enqueued", "completed", "failed", "retried", "stale"), 0) for q in ("a", "b")}
        self.held = []
        self.done = []
        for q in self.totals:
            self.s.sql("SELECT awa.create_queue(%s, '{\"retention\": \"0 s\", \"max_attempts\": 2, \"shards\": 2}')", [q])

    def connect(self):
        self.s = self.db.session()

    def verb(self):
        """One verb; returns what it adds to the totals, which counts if its transaction commits."""
        r, q = self.random, self.random.choice("ab")
        add = {key: 0 for key in self.totals[q]}
        what = r.choice(("enqueue", "enqueue", "defer", "claim", "claim", "complete", "complete", "fail", "fail", "snooze",
                         "give up", "release", "cancel_claimed", "late"))
        if what in ("enqueue", "defer"):
            n = r.randint(1, 30)
            add["enqueued"] = n
            self.s.sql("SELECT awa.enqueue_batch(%s, ARRAY(SELECT to_jsonb(n) FROM generate_series(1, %s) n), run_in => %s)",
                       [q, n, r.choice(("1 h", "1 ms")) if what == "defer" else None])
        elif what == "claim":
            rows = self.s.sql("SELECT receipt, queue FROM awa.claim(%s, %s)", [q, r.randint(1, 20)])
            return q, add, lambda: self.held.extend(rows)
        else:
            pool = self.done if what == "late" else self.held
            some = r.sample(pool, min(len(pool), r.randint(1, 12)))
            some = [row for row in some if row[1] == q]
            call = {"late": "release(%s::int8[])", "fail": "fail(%s::int8[], 'no')", "give up": "fail(%s::int8[], 'no', permanent => true)", "snooze": "snooze(%s::int8[], '1 h')"}
            states = self.s.sql(f"SELECT receipt, state, changed FROM awa.{call.get(what, what + '(%s::int8[])')}",
                                [[x for x, _ in some]])
            # Of a receipt whose slot was emptied nobody can tell the queue.
            kept = {no for (no,) in self.s.sql("SELECT claim_no FROM awa_internal.claims")}
            count = {"completed": "completed", "failed": "failed", "retryable": "retried", "stale": "stale"}
            for receipt, state, changed in states:
                if state in count and (changed or state == "stale" and receipt >> 16 in kept):
                    add[count[state]] += 1
            ended = [row for row in some] if what != "late" else []

            def commit():
                self.held = [row for row in self.held if row not in ended]
                # A release that is repeated is none that came late.
                self.done += ended if what in ("complete", "cancel_claimed") else []

            return q, add, commit
        return q, add, lambda: None

    def keep(self, done):
        for q, add, commit in done:
            commit()
            for key, n in add.items():
                self.totals[q][key] += n

    def turn(self):
        how = self.random.random()
        if how < 0.6:
            self.keep([self.verb()])
        elif how < 0.75:
            self.s.sql("BEGIN")
            self.verb()
            self.verb()
            self.s.sql("ROLLBACK")
        else:
            # A savepoint that goes, and what is left of the transaction.
            self.s.sql("BEGIN")
            first = self.verb()
            self.s.sql("SAVEPOINT a")
            self.verb()
            self.s.sql("ROLLBACK TO a")
            self.s.sql("COMMIT")
            self.keep([first])

    def check(self):
        seen = self.s.sql(f"SELECT queue, {COLUMNS} FROM awa.queue_stats ORDER BY 1")
        assert [tuple(map(int, row[1:])) for row in seen] == [tuple(map(int, row[1:])) for row in self.s.sql(SLOW)]
        totals = self.s.sql(
            "SELECT queue, enqueued_total, completed_total, failed_total, retried_total, stale_total FROM awa.queue_stats")
        for q, enqueued, completed, failed, retried, stale in totals:
            assert self.totals[q] == {"enqueued": enqueued, "completed": completed, "failed": failed, "retried": retried,
                                      "stale": stale}, q


@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, 2])
def test_rule_26_counts_are_exact_through_seals_closes_emptyings_and_crashes(make_cluster, seed):
    server = make_cluster(flavour="injection", settings={"awa_queue.max_slots": "20"}).start()
    db = server.database()
    c = Counted(db, seed)
    steps = set()
    for turn in range(400):
        c.turn()
        if turn % 5 == 0:
            c.check()
        if turn % 8 == 0:
            c.s.sql("SELECT awa_internal.seal()")
        if turn % 8 == 4:
            for slot, state in c.s.sql("SELECT slot, state FROM awa.ring_status WHERE state IN ('sealed', 'closed')"):
                said = c.s.value("SELECT awa_internal.close(%s)" if state == "sealed" else 'SELECT awa_internal."empty"(%s, true)',
                                 [slot])
                steps.add(said.split(":")[0])
            c.check()
        if turn % 40 == 20:
            c.s.sql("CALL awa.maintain()")
            c.check()
        if turn in (150, 300):
            server.kill9()
            server.start()
            c.connect()
            c.check()
        if turn % 20 == 10:
            # Let the old ones end, so that slots are emptied.
            while c.held:
                some, c.held = c.held[:50], c.held[50:]
                for _, state, changed in c.s.sql("SELECT receipt, state, changed FROM awa.complete(%s::int8[])", [[x for x, _ in some]]):
                    assert state == "completed" and changed
                for _, q in some:
                    c.totals[q]["completed"] += 1
                c.done += some
            for q in "ab":
                while rows := c.s.sql("SELECT receipt, queue FROM awa.claim(%s, 500)", [q]):
                    assert {s for (s,) in c.s.sql("SELECT state FROM awa.complete(%s::int8[])", [[x for x, _ in rows]])} == {"completed"}
                    c.totals[q]["completed"] += len(rows)
            c.done = c.done[-100:]
    assert {"closed", "emptied"} <= steps, steps
    assert c.s.value("SELECT sum(failed_total) FROM awa.queue_stats") > 0


def test_rule_26_late_finishes_are_counted_of_a_finished_slot_too(db):
    s = db.session()
    enqueue(s, range(5))
    rows = claim(s)
    finish(s, rows)
    finish(s, rows[:2], "release")
    seal(s)
    s.sql("CALL awa.maintain()")
    assert s.value("SELECT count(*) FROM awa_internal.finished_slots") == 1
    assert finish(s, rows[:3], "release") == ["stale"] * 3
    assert s.value("SELECT stale_total FROM awa.queue_stats") == 5
    s.sql('SELECT awa_internal."empty"(0, true)')
    s.sql("CALL awa.maintain()")
    assert s.sql("SELECT completed_total, stale_total FROM awa.queue_stats") == [(5, 5)]


def test_rule_26_what_the_own_transaction_did_is_counted_and_a_running_snapshot_is_not_used(db):
    s, other = db.session(), db.session()
    enqueue(s, range(5))
    s.sql("BEGIN ISOLATION LEVEL REPEATABLE READ")
    assert s.value("SELECT ready FROM awa.queue_stats") == 5
    enqueue(other, range(3))
    claim(s, 2)
    assert s.sql("SELECT ready, running FROM awa.queue_stats") == [(6, 2)]
    assert other.sql("SELECT ready, running FROM awa.queue_stats") == [(8, 0)]
    s.sql("ROLLBACK")
    assert s.sql("SELECT ready, running FROM awa.queue_stats") == [(8, 0)]


def test_rule_26_counting_reads_nothing_of_finished_jobs(db):
    """Buffers touched by queue_stats with one finished slot, and with ten times as many retained jobs in ten of them."""
    s = db.session()
    s.sql("SELECT awa.create_queue('q')")

    def fill(slots):
        for _ in range(slots):
            for part in range(20):
                enqueue(s, range(50))
            while rows := claim(s, 50):
                finish(s, rows)
            seal(s)
        s.sql("CALL awa.maintain()")
        assert s.value("SELECT count(*) FROM awa_internal.finished_slots") == s.value(
            "SELECT count(*) FROM awa.ring_status WHERE state = 'closed'")

    def touched():
        s.sql("SELECT * FROM awa.queue_stats")  # warm
        plan = s.value("EXPLAIN (ANALYZE, BUFFERS, FORMAT json) SELECT * FROM awa.queue_stats")
        top = plan[0]["Plan"]
        return top["Shared Hit Blocks"] + top["Shared Read Blocks"]

    fill(1)
    one = touched()
    assert s.sql("SELECT completed, ready FROM awa.queue_stats") == [(1000, 0)]
    fill(9)
    ten = touched()
    assert s.sql("SELECT completed, ready FROM awa.queue_stats") == [(10000, 0)]
    # A few rows of sums more; the closures of one slot alone are several pages.
    assert ten <= one + 6, (one, ten)
    # The same question to the logs reads what there is.
    s.sql("DELETE FROM awa_internal.finished_slots")
    assert touched() > ten + 15
