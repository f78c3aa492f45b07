"""Dumps and restores, and rewrites of the tables: every job that has not ended is still there and right, none comes back that
had ended, and ids, seqs and claim numbers go on above the old ones.

Verbs are not called between CREATE EXTENSION and the end of the restore, as the documentation asks.
"""

import subprocess

import pytest

from harness import Cluster, wait_until
from harness.cluster import ROOT

FILL = """
SELECT awa.create_queue('shards', '{"shards": 4, "priority": 1}');
SELECT awa.enqueue_batch('q', ARRAY(SELECT jsonb_build_object('n', n, 'x', repeat(md5(n::text), n % 40))
    FROM generate_series(1, 30) n), metadata => '{"price": 1.10}', tags => ARRAY['a', 'b']);
SELECT awa.enqueue_batch('shards', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(101, 120) n));
"""


class Filled:
    """Jobs in several slots: unclaimed, released, held, ended; and what is known of each."""

    def __init__(self, db, extra_slots=False):
        self.db = db
        s = self.s = db.session()
        if extra_slots:
            # As a later slot is added: no member of the extension, made like the others, then attached.
            for slot in (16, 17):
                for log in ("ready", "segments", "claims", "closures"):
                    s.sql(f"CREATE TABLE awa_internal.{log}_{slot} (LIKE awa_internal.{log}_0 INCLUDING ALL)"
                          " WITH (autovacuum_enabled = off, vacuum_truncate = off)")
                    s.sql(f"ALTER TABLE awa_internal.{log} ATTACH PARTITION awa_internal.{log}_{slot} FOR VALUES IN ({slot})")
        s.sql(FILL)
        self.ended, self.held, self.given = {}, {}, set()
        taken = self.take("q", 20) + self.take("shards", 8)
        self.finish("complete", taken[:6] + taken[20:22])
        self.finish("cancel_claimed", taken[6:8])
        back = taken[8:12]
        self.seal()
        self.finish("release", back)
        s.sql("SELECT awa.enqueue_batch('q', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(31, 50) n))")
        assert s.value("SELECT awa_internal.close(0)") == "closed"
        more = self.take("q", 12)
        self.finish("complete", more[:3])
        self.seal()
        s.sql("SELECT awa.enqueue_batch('q', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(51, 60) n),"
              " priority => 4, ordering_keys => ARRAY(SELECT 'key' || n FROM generate_series(51, 60) n))")
        # A slot that was emptied, and others that are skipped, so that the ring's events matter.
        self.seal()
        s.sql("SELECT awa.enqueue('gone', '{\"n\": 900}')")
        self.finish("complete", self.take("gone", 1))
        self.seal()
        assert s.value("SELECT awa_internal.close(3)") == "closed"
        wait_until(lambda: s.value('SELECT awa_internal."empty"(3, true)') == "emptied")
        if extra_slots:
            while self.seal() != 17:
                pass
        s.sql("SELECT awa.enqueue_batch('q', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(61, 70) n))")
        s.sql("BEGIN; SELECT awa.enqueue('q', '{\"n\": -1}'); ROLLBACK")
        self.bodies = {n: (job_id, args) for job_id, n, args in s.sql(
            "SELECT coalesce(job_id, entry_id), (args->'n')::int, args::text FROM awa_internal.ready")}
        self.note_marks()

    def note_marks(self):
        self.last_id = self.s.value("SELECT max(entry_id) FROM awa_internal.ready")
        self.last_claim = self.s.value("SELECT max(claim_no) FROM awa_internal.claims")

    def seal(self):
        answer = self.s.value("SELECT awa_internal.seal()")
        assert answer.startswith("sealed"), answer
        return int(answer.split()[2])

    def take(self, queue, n):
        rows = self.s.sql("SELECT receipt, (args->'n')::int FROM awa.claim(%s, %s)", [queue, n])
        self.held.update({n: r for r, n in rows})
        self.given.update(r for r, _ in rows)
        return rows

    def finish(self, verb, rows):
        states = self.s.sql(f"SELECT state FROM awa.{verb}(%s::int8[])", [[r for r, _ in rows]])
        assert len(states) == len(rows) and ("stale",) not in states
        for r, n in rows:
            del self.held[n]
            if verb != "release":
                self.ended[n] = r

    def check(self, db, sessions=()):
        """db is what was made of it, by restore or by a rewrite of the tables."""
        s = db.session()
        sessions = [*sessions, s]
        assert db.sql("SELECT slot, event FROM awa_internal.ring ORDER BY event_no") == self.ring()
        # New jobs get numbers above all old ones; they are claimed with the rest.
        new_ids = []
        for i, session in enumerate(sessions):
            new_ids += [x for (x,) in session.sql(
                "SELECT unnest(awa.enqueue_batch('q', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(%s::int, %s::int) n)))",
                [1000 + i * 10, 1004 + i * 10])]
        assert min(new_ids) > self.last_id and len(set(new_ids)) == len(new_ids)
        # All that lane ever held was emptied with its slot; its seqs go on all the same.
        s.sql("SELECT awa.enqueue('gone', '{\"n\": 2000}')")
        assert db.sql("SELECT first_seq FROM awa_internal.segments WHERE lane_id >> 8 ="
                      " (SELECT queue_id FROM awa_internal.queues WHERE name = 'gone')") == [(2,)]
        waiting = (set(self.bodies) | set(range(1, 71)) | set(range(101, 121))) - set(self.held) - set(self.ended) - {900}
        got, receipts = {}, []
        for turn in range(1000):
            rows = sessions[turn % len(sessions)].sql(
                "SELECT receipt, job_id, (args->'n')::int, args::text, metadata::text, tags, ordering_key"
                " FROM awa.claim_from(ARRAY['q', 'shards', 'gone'], 7)")
            if not rows:
                break
            for receipt, job_id, n, args, metadata, tags, key in rows:
                assert n not in got, f"job {n} came twice"
                got[n] = job_id
                receipts.append(receipt)
                if n < 1000:
                    assert (job_id, args) == self.bodies[n]
                if n <= 30:
                    assert (metadata, tags) == ('{"price": 1.10}', ["a", "b"])
                if 51 <= n <= 60:
                    assert key == f"key{n}"
        assert set(got) == waiting | {2000} | {1000 + i * 10 + k for i in range(len(sessions)) for k in range(5)}
        assert not set(receipts) & self.given
        if db is not self.db:
            assert min(r >> 16 for r in receipts) > self.last_claim
        # Receipts given out before count still: held ones end, ended ones do not end again.
        held = list(self.held.values())
        assert s.sql("SELECT state, changed FROM awa.complete(%s::int8[])", [held]) == [("completed", True)] * len(held)
        again = s.sql("SELECT changed FROM awa.complete(%s::int8[])", [list(self.ended.values())])
        assert again == [(False,)] * len(self.ended)
        assert set(s.sql("SELECT state FROM awa.complete(%s::int8[])", [receipts])) == {("completed",)}
        assert overlaps(db) == []
        # Nothing is stuck: every slot can be emptied, its counts add up.
        s.sql("SELECT awa_internal.seal()")
        for slot in range(18):
            if s.value("SELECT awa_internal.close(%s)", [slot]) not in ("closed", "not open", "current"):
                raise AssertionError(f"slot {slot} is not closed")
            # For a moment an autovacuum worker, or a session that is just ending, may hold a snapshot.
            said = wait_until(lambda: without(("snapshot", "blocked"), s.value('SELECT awa_internal."empty"(%s, true)', [slot])))
            assert said in ("emptied", "current", "not closed"), said
        assert db.value("SELECT count(*) FROM awa_internal.ready") == 0
        s.sql("SELECT awa.enqueue('q', '{\"n\": 1}')")
        assert s.value("SELECT count(*) FROM awa.claim('q', 9)") == 1

    def ring(self):
        return self.db.sql("SELECT slot, event FROM awa_internal.ring ORDER BY event_no")


def without(words, said):
    return None if said in words else said


def overlaps(db):
    return db.sql(
        "SELECT a.lane_id, a.first_seq FROM awa_internal.segments a JOIN awa_internal.segments b ON a.lane_id = b.lane_id"
        " AND (a.first_seq, a.first_entry_id) < (b.first_seq, b.first_entry_id) AND b.first_seq < a.first_seq + a.n"
    )


def restored(cluster, name="copy"):
    return cluster.database(extension=False, name=name)


WAYS = {
    "custom": ("-Fc", []),
    "one transaction": ("-Fc", ["-1", "-e"]),
    "four jobs": ("-Fd", ["--jobs", "4", "-e"]),
    "tar": ("-Ft", ["-e"]),
}


@pytest.mark.parametrize("way", ["custom", "one transaction"])
def test_dump_and_restore(any_db, way):
    dump_and_restore(any_db, way)


@pytest.mark.parametrize("way", ["four jobs", "tar"])
def test_dump_and_restore_by_other_formats(db, way):
    dump_and_restore(db, way)


def dump_and_restore(db, way):
    filled = Filled(db)
    form, options = WAYS[way]
    cluster = db.cluster
    file = cluster.dir / f"{db.name}.dump"
    cluster.client("pg_dump", form, "-f", file, dbname=db.name)
    copy = restored(cluster, f"{db.name}_copy")
    try:
        said = cluster.client("pg_restore", *options, file, dbname=copy.name)
        assert "error" not in said.lower() and "warning" not in said.lower(), said
        assert [c for (c,) in copy.sql("SELECT count(*) FROM awa_internal.world")] == [1]
        assert copy.value("SELECT incarnation FROM awa_internal.world") != db.value(
            "SELECT incarnation FROM awa_internal.world")
        filled.check(copy)
    finally:
        copy.drop()


def test_plain_dump_in_one_transaction(db):
    filled = Filled(db)
    script = db.cluster.client("pg_dump", dbname=db.name)
    copy = restored(db.cluster, f"{db.name}_copy")
    try:
        db.cluster.psql(script, copy.name, "-1")
        filled.check(copy)
    finally:
        copy.drop()


def test_data_only_into_a_fresh_extension(any_db):
    data_only(any_db, "-Fc", "-e")


@pytest.mark.parametrize("form, options", [("-Fc", ["-1", "-e"]), ("-Fd", ["-j", "2", "-e"])],
                         ids=["one transaction", "two jobs"])
def test_data_only_by_other_ways(db, form, options):
    data_only(db, form, *options)


def test_a_session_that_looked_before_the_data_came(any_db):
    """It knows the fresh ring; COPY into the ring's table must make it read again."""
    data_only(any_db, "-Fc", "-e", look=True)


def data_only(db, form, *options, look=False):
    """The extension is installed first (by another version, say), then the data come: into tables that nobody has used."""
    filled = Filled(db)
    cluster = db.cluster
    file = cluster.dir / f"{db.name}.data"
    cluster.client("pg_dump", form, "-f", file, dbname=db.name)
    copy = restored(cluster, f"{db.name}_copy")
    try:
        copy.sql("CREATE EXTENSION awa_queue")
        early = []
        if look:
            early.append(copy.session())
            assert early[0].sql("SELECT * FROM awa.jobs") == []
        cluster.client("pg_restore", "--data-only", *options, file, dbname=copy.name)
        filled.check(copy, early)
    finally:
        copy.drop()


def test_data_only_into_tables_in_use_is_an_error_and_changes_nothing(db):
    Filled(db)
    cluster = db.cluster
    file = cluster.dir / f"{db.name}.data"
    cluster.client("pg_dump", "-Fc", "--data-only", "-f", file, dbname=db.name)
    copy = cluster.database(name=f"{db.name}_copy")
    try:
        copy.sql("SELECT awa.enqueue('mine', '1')")
        said = cluster.client("pg_restore", "-1", "-e", file, dbname=copy.name, check=False)
        assert "duplicate key" in said
        s = copy.session()
        assert s.sql("SELECT args FROM awa.claim('mine', 5)") == [(1,)]
        assert s.sql("SELECT name FROM awa_internal.queues") == [("mine",)]
    finally:
        copy.drop()


@pytest.mark.parametrize("options", [["-e"], ["-1", "-e"], ["-j", "4", "-e"]], ids=["steps", "one transaction", "four jobs"])
def test_rule_11_slots_that_were_added_later(db, options):
    filled = Filled(db, extra_slots=True)
    assert db.value("SELECT count(*) FROM awa_internal.ready_17") == 10
    assert db.sql("SELECT 1 FROM pg_index WHERE indrelid IN ('awa_internal.ready'::regclass, 'awa_internal.segments'::regclass,"
                  " 'awa_internal.claims'::regclass, 'awa_internal.closures'::regclass)") == []
    cluster = db.cluster
    file = cluster.dir / f"{db.name}.dump"
    cluster.client("pg_dump", "-Fc", "-f", file, dbname=db.name)
    copy = restored(cluster, f"{db.name}_copy")
    try:
        cluster.client("pg_restore", *options, file, dbname=copy.name)
        filled.check(copy)
        copy.sql("DROP EXTENSION awa_queue CASCADE")
        assert copy.sql("SELECT 1 FROM pg_namespace WHERE nspname LIKE 'awa%'") == []
    finally:
        copy.drop()


@pytest.mark.timeout(400)
@pytest.mark.majors(18)
def test_a_dump_of_15_into_18(db):
    # The 18 process may run without anybody having built for 15.
    subprocess.run([ROOT / "tools" / "private", "15", "release"], check=True, stdout=subprocess.DEVNULL)
    with Cluster(15, "release") as old:
        filled = Filled(old.database(name="old"))
        # By the newer pg_dump, as its documentation asks.
        file = db.cluster.dir / "from15.dump"
        db.cluster.program("pg_dump", "-h", old.dir, "-U", "postgres", "-d", "old", "-Fc", "-f", file)
        copy = restored(db.cluster, "from15")
        try:
            db.cluster.client("pg_restore", "-1", "-e", file, dbname="from15")
            filled.check(copy)
        finally:
            copy.drop()


def test_create_database_from_a_template(any_db):
    filled = Filled(any_db)
    cluster = any_db.cluster
    cluster.close_connections()
    with cluster.connect() as admin:
        admin.execute(f"CREATE DATABASE {any_db.name}_copy TEMPLATE {any_db.name}")
    copy = type(any_db)(cluster, f"{any_db.name}_copy")
    try:
        # The original goes on at the same time; shared memory keeps the two apart.
        other = any_db.session()
        other.sql("SELECT awa.enqueue('q', '{\"n\": 5000}')")
        filled.check(copy)
        assert other.sql("SELECT 1 FROM awa.claim('q', 1000) WHERE args = '{\"n\": 5000}'") == [(1,)]
    finally:
        copy.drop()


# ---------------------------------------------------------------------------------------------- rewrites of the tables

REWRITES = {
    "VACUUM FULL": ["VACUUM FULL awa_internal.{log}_{slot}"],
    "CLUSTER": ["CLUSTER awa_internal.{log}_{slot} USING {index}"],
    "another order": ["CREATE TABLE moved AS SELECT * FROM awa_internal.{log}_{slot} ORDER BY random()",
                      "TRUNCATE awa_internal.{log}_{slot}",
                      "INSERT INTO awa_internal.{log}_{slot} SELECT * FROM moved", "DROP TABLE moved"],
    "another tablespace": ["ALTER TABLE awa_internal.{log}_{slot} SET TABLESPACE elsewhere"],
    "REINDEX": ["REINDEX TABLE awa_internal.{log}_{slot}"],
}


@pytest.mark.parametrize("way", ["VACUUM FULL", "CLUSTER"])
def test_tables_are_rewritten_under_sessions_that_remember(any_db, way):
    rewrite(any_db, way)


@pytest.mark.parametrize("way", ["another order", "another tablespace", "REINDEX"])
def test_tables_are_rewritten_in_other_ways(db, way):
    rewrite(db, way)


def rewrite(db, way):
    filled = Filled(db)
    sessions = [db.session() for _ in range(2)]
    for s in sessions:
        # They have read and written, so they remember places, indexes, ranges.
        rows = s.sql("SELECT receipt FROM awa.claim('q', 1)")
        s.sql("SELECT * FROM awa.jobs")
        s.sql("BEGIN")
        s.sql("SELECT * FROM awa.release(%s::int8[])", [[r for (r,) in rows]])
        s.sql("ROLLBACK")
        filled.held.update({n: r for r, n in s.sql(
            "SELECT (c.claim_no << 16) | (c.slot::int8 << 10), (j.args->'n')::int FROM awa_internal.claims c"
            " JOIN awa_internal.segments g ON g.lane_id = c.lane_id AND c.first_seq BETWEEN g.first_seq AND g.first_seq + g.n - 1"
            " JOIN awa_internal.ready j ON j.entry_id = g.first_entry_id + c.first_seq - g.first_seq"
            " WHERE c.claim_no = %s", [rows[0][0] >> 16])})
    filled.note_marks()
    if way == "another tablespace":
        folder = db.cluster.dir / f"space_{db.name}"
        db.sql(f"COPY (SELECT 1) TO PROGRAM 'mkdir {folder}'")  # it must be the server's own user's
        db.sql(f"CREATE TABLESPACE elsewhere LOCATION '{folder}'")
    for slot in range(5):
        for log in ("ready", "segments", "claims", "closures"):
            index = db.sql("SELECT i.indexrelid::regclass::text FROM pg_index i WHERE indrelid = %s::regclass"
                               " AND indpred IS NULL LIMIT 1", [f"awa_internal.{log}_{slot}"])
            if "CLUSTER" in way and not index:
                continue
            for statement in REWRITES[way]:
                name = index[0][0].split(".")[1] if index else ""
                db.sql(statement.format(log=log, slot=slot, index=name))
    filled.check(db, sessions)
    if way == "another tablespace":
        for slot in range(5):
            for log in ("ready", "segments", "claims", "closures"):
                db.sql(f"ALTER TABLE awa_internal.{log}_{slot} SET TABLESPACE pg_default")
        db.sql("DROP TABLESPACE elsewhere")


def test_the_restored_sequences_are_above_what_open_sessions_hold(db):
    """A session draws ids in blocks; what it had not used yet when the dump was made is not given out again."""
    early, late = db.session(), db.session()
    early.sql("SELECT awa.enqueue('q', '1')")
    late.sql("SELECT awa.enqueue('q', '2')")
    file = db.cluster.dir / f"{db.name}.dump"
    db.cluster.client("pg_dump", "-Fc", "-f", file, dbname=db.name)
    ids = [early.value("SELECT awa.enqueue('q', '3')"), late.value("SELECT awa.enqueue('q', '4')")]
    copy = restored(db.cluster, f"{db.name}_copy")
    try:
        db.cluster.client("pg_restore", "-e", file, dbname=copy.name)
        assert copy.session().value("SELECT awa.enqueue('q', '5')") > max(ids)
    finally:
        copy.drop()
