"""RULES 48: pg_upgrade to 18 carries everything along: queues, jobs in every state, slots that were added, receipts."""

import subprocess

import pytest

from harness import Cluster, Database, wait_until
from harness.cluster import ROOT
from test_restore import Filled

# 18 makes clusters with data checksums unless told otherwise, 15 without; pg_upgrade wants both alike.
INITDB_18 = ("--no-data-checksums",)


def upgraded(old, preload):
    """A cluster of 18 that pg_upgrade made of `old`, running."""
    if old.major == 15:
        # 15.20 keeps a version with each column (attoptions, pg_attver), which an 18 older than it can't restore, whatever the
        # table. A server that is upgraded to a current 18 has no such trouble.
        for name in old.psql("SELECT datname FROM pg_database WHERE datallowconn").splitlines():
            old.psql("UPDATE pg_attribute SET attoptions = NULL WHERE attoptions IS NOT NULL", name)
    # For the servers that pg_upgrade starts: a worker that ran in them would change what is copied.
    worker = {"awa_queue.worker": "on"} if preload else {}
    old.configure(**worker)
    old.stop()
    new = Cluster(18, "release", preload, settings=worker, initdb_options=INITDB_18).init()
    said = new.program(
        "pg_upgrade", "-b", old.bin, "-B", new.bin, "-d", old.data, "-D", new.data, "-s", new.dir, "-U", "postgres",
        "-o", f"-c unix_socket_directories={new.dir}", "-O", f"-c unix_socket_directories={new.dir}", check=False,
    )
    logs = [file.read_text()[-3000:] for file in new.data.glob("pg_upgrade_output.d/*/log/pg_upgrade_dump_*.log")]
    assert "Upgrade Complete" in said, said + "\n".join(logs)
    return new.start()


@pytest.mark.timeout(400)
@pytest.mark.majors(18)
@pytest.mark.parametrize("major, preload", [(15, False), (15, True), (16, True)], ids=["15", "15-preload", "16-preload"])
def test_rule_48_pg_upgrade_to_18(major, preload):
    # The 18 process may run without anybody having built for the older one.
    subprocess.run([ROOT / "tools" / "private", str(major), "release"], check=True, stdout=subprocess.DEVNULL)
    with Cluster(major, "release", preload) as old:
        db = old.database(name="shop")
        filled = Filled(db, extra_slots=True)
        db.sql("SELECT awa.create_queue('life')")
        scheduled = db.value("SELECT awa.enqueue('life', '{\"cost\": 1.10}', run_in => '1 s', ordering_key => 'k', tags => ARRAY['t'])")
        (failing,) = db.row("SELECT awa.enqueue('life', '2')")
        ((receipt,),) = db.sql("SELECT receipt FROM awa.claim('life')")
        db.sql("SELECT awa.set_progress(%s, 10, checkpoint => '{\"page\": 7}')", [receipt])
        db.sql("SELECT * FROM awa.fail(ARRAY[%s::int8], 'first', retry_in => '1 s')", [receipt])
        (dead,) = db.row("SELECT awa.enqueue('life', '3')")
        ((receipt,),) = db.sql("SELECT receipt FROM awa.claim('life')")
        db.sql("SELECT * FROM awa.fail(ARRAY[%s::int8], 'for good', permanent => true)", [receipt])
        (held,) = db.row("SELECT awa.enqueue('life', '4')")
        ((open_receipt,),) = db.sql("SELECT receipt FROM awa.claim('life', worker => 'w', lease => '1 h')")
        db.sql("SELECT * FROM awa.heartbeat(ARRAY[%s::int8], '2 h')", [open_receipt])
        (cancelled,) = db.row("SELECT awa.enqueue('life', '5')")
        db.sql("SELECT * FROM awa.cancel(ARRAY[%s::int8], 'not needed')", [cancelled])
        before = db.sql("SELECT job_id, state, attempt, args::text, tags, ordering_key, errors, worker, lease_until, finished_at"
                        " FROM awa.jobs WHERE queue = 'life' AND state NOT IN ('ready', 'scheduled', 'retryable') ORDER BY job_id")
        totals = db.sql("SELECT queue, enqueued_total, completed_total, failed_total, failed, cancelled FROM awa.queue_stats ORDER BY queue")
        ring = filled.ring()
        filled.note_marks()
        new = upgraded(old, preload)
    try:
        db = Database(new, "shop")
        # Until the first verb the tables are another server's, and the worker leaves them alone.
        assert db.sql("SELECT slot, event FROM awa_internal.ring ORDER BY event_no") == ring
        assert db.value("SELECT sql FROM awa.version()") == db.value("SELECT library FROM awa.version()")
        assert db.sql("SELECT job_id, state, attempt, args::text, tags, ordering_key, errors, worker, lease_until, finished_at"
                      " FROM awa.jobs WHERE queue = 'life' AND state NOT IN ('ready', 'scheduled', 'retryable') ORDER BY job_id") == before
        assert db.sql("SELECT queue, enqueued_total, completed_total, failed_total, failed, cancelled FROM awa.queue_stats"
                      " ORDER BY queue") == totals

        assert db.sql("SELECT status FROM awa.heartbeat(ARRAY[%s::int8])", [open_receipt]) == [("held",)]

        def due():
            if not preload:
                db.sql("SELECT awa_internal.promote()")
            return db.value("SELECT ready FROM awa.queue_stats WHERE queue = 'life'") == 2

        wait_until(due, 30, "both deferred jobs to be promoted")
        jobs = {r[0]: r[1:] for r in db.sql(
            "SELECT job_id, args::text, attempt, checkpoint, last_error->>'message', tags, ordering_key, receipt FROM awa.claim('life', 9)")}
        assert jobs[scheduled][:-1] == ('{"cost": 1.10}', 1, None, None, ["t"], "k")
        assert jobs[failing][:-1] == ("2", 2, {"page": 7}, "first", None, None)
        assert set(jobs) == {scheduled, failing}
        assert db.sql("SELECT state FROM awa.complete(%s)", [[open_receipt, *(j[-1] for j in jobs.values())]]) == [("completed",)] * 3
        assert db.value("SELECT state FROM awa.job(%s)", [held]) == "completed"
        assert db.sql("SELECT state, changed FROM awa.retry(ARRAY[%s::int8])", [dead]) == [("ready", True)]
        ((receipt, attempt),) = db.sql("SELECT receipt, attempt FROM awa.claim('life')")
        assert attempt == 1
        db.sql("SELECT * FROM awa.complete(ARRAY[%s::int8])", [receipt])
        if preload:
            new.configure(**{"awa_queue.worker": "off"})  # what follows empties slots by hand
            new.reload()
            wait_until(lambda: db.value("SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'awa_queue worker'") == 0,
                       what="the worker to end")
        ring = db.sql("SELECT slot, event FROM awa_internal.ring ORDER BY event_no")
        filled.ring = lambda: ring
        filled.check(db)
    finally:
        new.remove()
