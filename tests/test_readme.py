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
        assert result("SELECT awa.has_feature('snooze')") == [(False,)]
        assert [row[2] for row in result("SELECT receipt, job_id, args")] == [{"to": "ann@example.org"}]
        assert result("SELECT receipt, state FROM awa.complete") == []
        assert result("SELECT queue, ready, running") == [("mail", 0, 1, 0)]
        assert [row[1:] for row in result("SELECT job_id, state, changed FROM awa.complete")] == [("completed", True)]
        assert len(result("SELECT awa.enqueue_batch")[0][0]) == 3
        assert [row[2] for row in result("SELECT idx, job_id, status")] == ["ready", "ready"]
        assert result("SELECT count(*) AS nothing") == [(0,)]
        assert result("SELECT awa.resume_queue") == [(True,)]
        # Nothing has been held for longer than its lease, so nothing was given back.
        assert result("SELECT job_id, state, changed\nFROM awa.release") == []
    finally:
        drop_roles(database)
        database.drop()


def test_jobs_of_a_dead_worker_come_back(release_db):
    """The statement of the README, with leases that are over, and one job of the claim completed before."""
    release_db.sql("SELECT awa.enqueue_batch('q', ARRAY['1', '2', '3']::jsonb[])")
    taken = release_db.sql("SELECT receipt, job_id FROM awa.claim('q', 3, lease => '1 microsecond')")
    release_db.sql("SELECT * FROM awa.complete(ARRAY[%s]::bigint[])", [taken[0][0]])
    give_back = next(s for block in blocks() for s in statements(block) if "FROM awa.release" in s)
    given = {job_id for job_id, _, changed in release_db.sql(give_back) if changed}
    assert given == {job_id for _, job_id in taken[1:]}
    again = release_db.sql("SELECT job_id FROM awa.claim('q', 10)")
    assert {job_id for (job_id,) in again} == given


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
        keeper.sql("CALL awa.maintain()")
        for session in (producer, worker, watcher, keeper):
            session.close()
    finally:
        drop_roles(release_db)
