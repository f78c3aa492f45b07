"""What is built and how it installs; and the harness itself, on which every other test relies."""

import re
import subprocess

import psycopg
import pytest

from harness import Cluster, ServerError, installation, wait_until
from harness.cluster import ROOT


def test_both_flavours_install_the_same_sql(pg):
    scripts = []
    for flavour in ("release", "injection"):
        program = installation(pg, flavour) / "bin" / "pg_config"
        share = subprocess.run([program, "--sharedir"], capture_output=True, text=True, check=True).stdout.strip()
        folder = installation(pg, flavour) / share / "extension"
        scripts.append({f.name: f.read_text() for f in folder.glob("awa_queue*")})
    assert "awa_queue.control" in scripts[0]
    assert scripts[0] == scripts[1]


def test_only_the_injection_flavour_has_the_pause_points(pg):
    for flavour, there in (("release", False), ("injection", True)):
        program = installation(pg, flavour) / "bin" / "pg_config"
        folder = subprocess.run([program, "--pkglibdir"], capture_output=True, text=True, check=True).stdout.strip()
        library = (installation(pg, flavour) / folder / "awa_queue.so").read_bytes()
        assert (b"awa_queue.pause_at" in library) == there


def test_installed_version_is_the_crates(release_db):
    version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
    assert release_db.value("SELECT extversion FROM pg_extension WHERE extname = 'awa_queue'") == version


def test_server_is_of_the_major_asked_for(db, pg):
    assert int(db.value("SHOW server_version_num")) // 10000 == pg


def test_preload_is_what_the_fixture_says(any_db, request):
    preloaded = any_db.value("SHOW shared_preload_libraries")
    assert preloaded == {"plain": "", "preload": "awa_queue"}[request.node.callspec.params["any_db"]]


def test_fresh_database_is_dropped(release_cluster):
    database = release_cluster.database()
    database.sql("CREATE TABLE t (a int)")
    database.session().sql("BEGIN")
    database.drop()
    with release_cluster.connect() as admin:
        assert admin.execute("SELECT 1 FROM pg_database WHERE datname = %s", [database.name]).fetchone() is None


def test_dropping_the_extension_leaves_nothing(release_db):
    # Everything that depends on a member would stop a plain DROP.
    release_db.sql("DROP EXTENSION awa_queue")
    assert release_db.sql("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'awa%'") == []
    release_db.sql("CREATE EXTENSION awa_queue")


@pytest.mark.crash
def test_a_killed_server_starts_again(make_cluster):
    server = make_cluster().start()
    with server.connect() as client:
        client.execute("CREATE TABLE kept AS SELECT generate_series(1, 1000) AS n")
    client = server.connect()
    client.execute("SELECT 1")
    server.kill9()
    with pytest.raises(psycopg.OperationalError):
        client.execute("SELECT 1")
    start = server.log_position()
    server.start()
    assert "not properly shut down" in server.log(start)
    with server.connect() as client:
        assert client.execute("SELECT count(*) FROM kept").fetchone() == (1000,)


def test_a_standby_follows_and_is_promoted(make_cluster):
    primary = make_cluster().start()
    with primary.standby() as standby:
        with primary.connect() as client:
            client.execute("CREATE TABLE followed (n int)")
        seen = lambda: standby.psql("SELECT pg_is_in_recovery() AND to_regclass('followed') IS NOT NULL") == "t"  # noqa: E731
        wait_until(seen, what="the standby to have the table")
        standby.promote()
        standby.psql("INSERT INTO followed VALUES (1)")


def test_a_server_that_cannot_start_shows_its_log(make_cluster):
    server = make_cluster(settings={"shared_buffers": "nonsense"})
    with pytest.raises(ServerError, match='invalid value for parameter "shared_buffers"'):
        server.start()


def test_a_session_is_seen_waiting_and_gets_its_error(db):
    with db.gate() as gate:
        held = db.session()
        pending = held.start_waiting("SELECT pg_advisory_lock_shared(4242)", event="advisory")
        assert not pending.done
        assert gate.connection.info.backend_pid in db.blockers(held.pid)
        gate.open()
        pending.result()
    failing = held.start("SELECT 1 / 0")
    assert isinstance(failing.error(), psycopg.errors.DivisionByZero)
    with pytest.raises(AssertionError, match="ended instead of waiting"):
        held.start_waiting("SELECT 1")


def test_a_condition_that_never_holds_fails_by_its_name():
    with pytest.raises(AssertionError, match="the impossible; last seen: 0"):
        wait_until(lambda: 0, timeout=0.05, what="the impossible")


def test_a_cluster_leaves_no_process_and_no_folder():
    server = Cluster().start()
    pid, folder = server.pid, server.dir
    server.remove()
    assert not folder.exists()
    assert not (ROOT.__class__("/proc") / str(pid)).exists()
