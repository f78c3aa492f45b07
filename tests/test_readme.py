"""Every SQL block of README.md works, in the order in which a reader meets them."""

import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def blocks():
    return re.findall(r"^```sql\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def statements(block):
    """The statements of a block: comments taken out, split at semicolons (README has none inside a string)."""
    return [s.strip() for s in re.sub(r"--[^\n]*", "", block).split(";") if s.strip()]


def drop_roles(database):
    for role in ("mail_producer", "mail_worker", "queue_watcher", "queue_keeper"):
        if database.sql("SELECT 1 FROM pg_roles WHERE rolname = %s", [role]):
            database.sql(f"DROP OWNED BY {role}")
            database.sql(f"DROP ROLE {role}")


def test_every_block_runs(release_cluster):
    database = release_cluster.database(extension=False)
    try:
        session = database.connect()
        results = {}
        for block in blocks():
            for statement in statements(block):
                cursor = session.execute(statement)
                results[statement] = cursor.fetchall() if cursor.description else []

        def result(beginning):
            return next(rows for statement, rows in results.items() if statement.startswith(beginning))

        # What the text around the blocks claims of them.
        assert result("SELECT awa.has_feature('complete_and_claim')") == [(True,)]
        assert result("SELECT awa.has_feature('unique_key')") == [(False,)]
        assert [row[2] for row in result("SELECT receipt, job_id, args")] == [{"to": "ann@example.org"}]
        assert result("SELECT receipt, state FROM awa.complete") == []
        assert result("SELECT queue, ready, running") == [("mail", 0, 1, 0)]
        assert [row[1:] for row in result("SELECT job_id, state, changed FROM awa.complete")] == [("completed", True)]
        assert len(result("SELECT awa.enqueue_batch")[0][0]) == 3
        assert [row[2] for row in result("SELECT idx, job_id, status")] == ["ready", "ready"]
        assert result("SELECT count(*) AS nothing") == [(0,)]
        assert result("SELECT awa.resume_queue") == [(True,)]
        # One of the two jobs of "sync" was scheduled; the other one failed, was retried and then cancelled.
        assert [row[1] for row in result("SELECT receipt, status, lease_until FROM awa.heartbeat")] == ["held"]
        assert result("SELECT awa.set_progress") == [("held",)]
        assert [row[1] for row in result("SELECT job_id, state, run_at FROM awa.fail")] == ["retryable"]
        assert [row[1:] for row in result("SELECT job_id, state, changed FROM awa.retry")] == [("ready", True)]
        assert [row[1:] for row in result("SELECT job_id, state, changed FROM awa.cancel(")] == [("cancelled", True)]
        # The job of the first blocks is still held by "w1".
        assert result("SELECT awa.expire_leases") == [(1,)]
    finally:
        drop_roles(database)
        database.drop()


def test_jobs_of_a_dead_worker_come_back(release_db):
    """What the README says of them: the maintenance that it names brings them back, one job of the claim was completed before."""
    release_db.sql("SELECT awa.create_queue('q', '{\"backoff\": {\"base\": \"0\"}}')")
    release_db.sql("SELECT awa.enqueue_batch('q', ARRAY['1', '2', '3']::jsonb[])")
    taken = release_db.sql("SELECT receipt, job_id FROM awa.claim('q', 3, lease => '1 microsecond')")
    release_db.sql("SELECT * FROM awa.complete(ARRAY[%s]::bigint[])", [taken[0][0]])
    again = set()
    for _ in range(2):  # rescued, then promoted
        release_db.sql("CALL awa.maintain()")
        again |= {job_id for (job_id,) in release_db.sql("SELECT job_id FROM awa.claim('q', 10)")}
    assert again == {job_id for _, job_id in taken[1:]}
    late = release_db.sql("SELECT state, changed FROM awa.complete(%s)", [[r for r, _ in taken[1:]]])
    assert late == [("stale", False)] * 2


def test_roles_of_the_readme_are_enough(release_db):
    grants = next(block for block in blocks() if "CREATE ROLE" in block)
    drop_roles(release_db)
    try:
        release_db.connection.execute(grants)
        producer, worker, watcher, keeper = (release_db.session() for _ in range(4))
        for session, role in ((producer, "mail_producer"), (worker, "mail_worker"), (watcher, "queue_watcher"),
                              (keeper, "queue_keeper")):
            session.sql(f"SET ROLE {role}")
        producer.sql("SELECT awa.enqueue('mail', '1')")
        producer.sql("SELECT awa.enqueue_batch('mail', ARRAY['2']::jsonb[])")
        receipts = [row[0] for row in worker.sql("SELECT receipt FROM awa.claim('mail', 2)")]
        assert len(worker.sql("SELECT * FROM awa.complete(%s::bigint[])", [receipts])) == 2
        assert watcher.sql("SELECT completed FROM awa.queue_stats") == [(2,)]
        assert watcher.value("SELECT count(*) FROM awa.jobs") == 2
        producer.sql("SELECT awa.enqueue('mail', '3')")
        assert worker.sql("CALL awa.wait(ARRAY['mail'], '5 s')") == [(True,)]
        held = [row[0] for row in worker.sql("SELECT receipt FROM awa.claim('mail', 2)")]
        assert worker.sql("SELECT status FROM awa.heartbeat(%s)", [held]) == [("held",)]
        assert worker.sql("SELECT state FROM awa.fail(%s, 'e', permanent => true)", [held]) == [("failed",)]
        assert watcher.value("SELECT count(*) FROM awa.dead_letters") == 1
        keeper.sql("CALL awa.maintain()")
        for session in (producer, worker, watcher, keeper):
            session.close()
    finally:
        drop_roles(release_db)
