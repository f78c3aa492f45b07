"""What users get: make install and uninstall, the Debian package, the sources for PGXN, the Dockerfile. Nothing is compiled: the
files of the private installation are the built package."""

import gzip
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

import psycopg
import pytest

from harness import Cluster, ServerError, installation
from harness.cluster import ROOT

VERSION = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
DEBIAN_15 = "/usr/lib/postgresql/15/bin/pg_config"
INSTALL = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def run(*command, check=True, cwd=ROOT, **environment):
    """The output of a command. Nothing that a package's bytes may depend on comes from our own environment."""
    own = {k: v for k, v in os.environ.items() if k not in ("SOURCE_DATE_EPOCH", "DEB_MAINTAINER", "DEB_REVISION", "MAKEFLAGS")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**own, **environment}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )
    assert not check or done.returncode == 0, done.stdout
    return done.stdout.strip() if check else done


def refusal(*command, **options):
    done = run(*command, check=False, **options)
    assert done.returncode != 0, done.stdout
    return done.stdout


def git(*arguments, cwd=ROOT, **environment):
    identity = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", f"safe.directory={cwd}")
    return run("git", *identity, "-C", cwd, *arguments, **environment)


def tracked(*paths):
    return git("ls-files", *paths).splitlines()


def files(folder):
    """Path below the folder and content of each file in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file()}


def folders(home):
    """Where an installation keeps libraries and where extensions."""
    library, share = (run(home / "bin" / "pg_config", option) for option in ("--pkglibdir", "--sharedir"))
    return Path(library), Path(share) / "extension"


def ours(home):
    return {path.name: path.read_bytes() for folder in folders(home) for path in folder.glob("awa_queue*")}


@pytest.fixture(scope="module")
def package(pg, tmp_path_factory):
    """The files of the private installation in one folder, as tools/build leaves them."""
    folder = tmp_path_factory.mktemp("package")
    for name, content in ours(installation(pg, "release")).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A git checkout of its own with one commit: what git knows of here, as it lies here."""
    copy = tmp_path_factory.mktemp("sources") / "checkout"
    for name in tracked():
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    run("git", "init", "-q", copy)
    git("add", "-A", "-f", cwd=copy)
    git("commit", "-q", "-m", "all", cwd=copy, GIT_COMMITTER_DATE="2026-01-02T03:04:05Z")
    return copy


@pytest.fixture(scope="module")
def dist(sources):
    """The files that make dist made of it: .tar.gz and .zip."""
    made = run("make", "-s", "dist", cwd=sources).splitlines()
    assert [Path(name).name for name in made] == [f"awa_queue-{VERSION}.tar.gz", f"awa_queue-{VERSION}.zip"]
    return [Path(name) for name in made]


@pytest.fixture(scope="module")
def unpacked(dist, tmp_path_factory):
    """What a user of the tarball has: the sources without git."""
    folder = tmp_path_factory.mktemp("tarball")
    run("tar", "-xzf", dist[0], "-C", folder)
    return folder / f"awa_queue-{VERSION}"


@pytest.fixture(scope="module")
def deb(pg, sources, package):
    if pg == 15:
        return Path(run("make", "-s", "deb", f"PG_CONFIG={DEBIAN_15}", f"PACKAGE={package}", cwd=sources))
    return Path(run("tools/deb", package, pg, cwd=sources))  # Debian 12 has no other PostgreSQL than 15


@pytest.fixture(scope="module")
def deb_root(deb, tmp_path_factory):
    root = tmp_path_factory.mktemp("deb")
    run("dpkg-deb", "-x", deb, root)
    return root


@pytest.fixture
def bare(pg, monkeypatch):
    """A copy of the installation without the extension; Cluster uses it. Not in tmp_path, which servers cannot enter."""
    base = Path(tempfile.mkdtemp(prefix="awa_packaging_"))
    base.chmod(0o755)
    home = base / f"{pg}-release"
    try:
        shutil.copytree(installation(pg, "release"), home, symlinks=True)
        for folder in folders(home):
            assert folder.is_relative_to(home)
            for path in folder.glob("awa_queue*"):
                path.unlink()
        monkeypatch.setenv("AWA_PGROOT", str(base))
        yield home
    finally:
        shutil.rmtree(base)


def make(home, package, target):
    return run("make", "-s", target, f"PG_CONFIG={home}/bin/pg_config", f"PACKAGE={package}")


# -- make install, make uninstall --------------------------------------------------------------------------------------


def test_uninstall_takes_out_what_install_put_and_nothing_else(pg, package, tmp_path):
    home = installation(pg, "release")
    arguments = (f"PG_CONFIG={home}/bin/pg_config", f"PACKAGE={package}", f"DESTDIR={tmp_path}")
    library, extension = (tmp_path / str(folder).lstrip("/") for folder in folders(home))
    for neighbour in (library / "awa_queue_other.so", extension / "awa_queue_other--1.0.sql", extension / "plpgsql.control"):
        neighbour.parent.mkdir(parents=True, exist_ok=True)
        neighbour.write_text("of somebody else")
    before, installed = files(tmp_path), files(home)
    run("make", "-s", "install", *arguments)
    after = files(tmp_path)
    assert {Path(name).name: content for name, content in after.items() if name not in before} == files(package)
    assert (library / "awa_queue.so").is_file() and (extension / "awa_queue.control").is_file()
    run("make", "-s", "uninstall", *arguments)
    assert files(tmp_path) == before
    assert files(home) == installed  # DESTDIR was respected by both


def test_uninstalling_step_by_step(bare, package):
    """The way of docs/install.md, and what happens to who leaves a step out."""
    make(bare, package, "install")
    with Cluster(preload=True, settings={"awa_queue.worker": "on"}) as server:
        db = server.database()
        db.sql("SELECT awa.enqueue_batch('q', ARRAY['1', '2']::jsonb[])")
        db.sql("CREATE ROLE producer; GRANT USAGE ON SCHEMA awa TO producer; GRANT EXECUTE ON FUNCTION awa.enqueue TO producer")
        db.sql("CREATE VIEW mine AS SELECT job_id FROM awa.jobs")
        with pytest.raises(psycopg.errors.DependentObjectsStillExist, match="(?s)extension awa_queue.*view mine"):
            db.sql("DROP EXTENSION awa_queue")
        assert db.value("SELECT count(*) FROM mine") == 2
        # PostgreSQL lets nobody drop a part.
        for part in ("SCHEMA awa_internal CASCADE", "VIEW awa.jobs CASCADE", "TABLE awa_internal.queues CASCADE"):
            with pytest.raises(psycopg.errors.DependentObjectsStillExist, match="extension awa_queue requires it"):
                db.sql(f"DROP {part}")
        db.sql("DROP VIEW mine")
        db.sql("DROP EXTENSION awa_queue")
        assert db.sql("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'awa%'") == []
        db.sql("DROP ROLE producer")  # its grants went along, or this would fail
        # Nothing of the jobs comes back with the extension.
        db.sql("CREATE EXTENSION awa_queue")
        assert db.sql("SELECT * FROM awa.jobs") == [] == db.sql("SELECT * FROM awa.queues")
        db.sql("DROP EXTENSION awa_queue")

        server.stop()
        make(bare, package, "uninstall")
        with pytest.raises(ServerError, match='could not access file "awa_queue"'):
            server.start()
        server.configure(shared_preload_libraries=None)
        server.start()
        with pytest.raises(psycopg.errors.FeatureNotSupported, match='extension "awa_queue" is not available'):
            server.database()


def test_without_its_files_an_extension_keeps_its_jobs_and_can_be_dropped(bare, package):
    make(bare, package, "install")
    with Cluster() as server:
        db, other = server.database(), server.database()
        for each in (db, other):
            each.sql("SELECT awa.enqueue('q', '1')")
        make(bare, package, "uninstall")
        server.restart()
        with pytest.raises(psycopg.errors.UndefinedFile, match="could not access file"):
            db.sql("SELECT awa.enqueue('q', '2')")
        other.sql("DROP EXTENSION awa_queue")
        assert other.sql("SELECT nspname FROM pg_namespace WHERE nspname LIKE 'awa%'") == []
        make(bare, package, "install")
        assert db.sql("SELECT args FROM awa.claim('q', 10)") == [(1,)]


# -- the Debian package ------------------------------------------------------------------------------------------------


def test_deb_holds_the_built_files_where_debians_server_looks(pg, deb, deb_root, package):
    found = files(deb_root)
    library = f"usr/lib/postgresql/{pg}/lib/awa_queue.so"
    extension, doc = f"usr/share/postgresql/{pg}/extension/", f"usr/share/doc/postgresql-{pg}-awa-queue/"
    assert found[library] == (package / "awa_queue.so").read_bytes()
    scripts = {name.removeprefix(extension): content for name, content in found.items() if name.startswith(extension)}
    assert scripts == {name: content for name, content in files(package).items() if name != "awa_queue.so"}
    rest = {name.removeprefix(doc) for name in found if name != library and not name.startswith(extension)}
    pages = {Path(name).name for name in tracked("docs/*.md") if Path(name).parent.name == "docs"}
    assert rest == {"copyright", "changelog.gz", "changelog.Debian.gz", "install.md"} | pages
    for line in run("dpkg-deb", "--contents", deb).splitlines():
        assert re.match(r"(drwxr-xr-x|-rw-r--r--) root/root ", line), line


def test_deb_says_what_it_is_and_needs(pg, deb, deb_root):
    control = Parser().parsestr(run("dpkg-deb", "--field", deb))
    architecture = run("dpkg", "--print-architecture")
    assert (control["Package"], control["Version"]) == (f"postgresql-{pg}-awa-queue", f"{VERSION}-1")
    assert control["Architecture"] == architecture
    assert deb.name == f"postgresql-{pg}-awa-queue_{VERSION}-1_{architecture}.deb"
    depends = control["Depends"].split(", ")
    assert depends[0] == f"postgresql-{pg}" and "libgcc-s1" in depends
    assert any(re.fullmatch(r"libc6 \(>= 2\.\d+\)", each) for each in depends)
    # In kB, each file rounded up, plus one for each folder.
    paths = list(deb_root.rglob("*"))
    assert int(control["Installed-Size"]) == sum(1 if p.is_dir() else -(-p.stat().st_size // 1024) for p in paths)

    doc = deb_root / "usr/share/doc" / control["Package"]
    entry = gzip.decompress((doc / "changelog.Debian.gz").read_bytes()).decode()
    assert entry.startswith(f"awa-queue ({VERSION}-1) ")
    # The time of the commit in `sources`.
    assert re.search(r"^ -- .+ <.+@.+>  Fri, 02 Jan 2026 03:04:05 \+0000$", entry, re.M)
    assert gzip.decompress((doc / "changelog.gz").read_bytes()) == (ROOT / "CHANGELOG.md").read_bytes()
    assert "Apache-2.0" in (doc / "copyright").read_text()


def test_deb_runs_no_script_and_its_checksums_are_right(deb, deb_root, tmp_path):
    run("dpkg-deb", "--control", deb, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["control", "md5sums"]
    run("md5sum", "--check", "--quiet", "--strict", tmp_path / "md5sums", cwd=deb_root)
    listed = {line.split("  ", 1)[1] for line in (tmp_path / "md5sums").read_text().splitlines()}
    assert listed == set(files(deb_root))


def test_deb_has_the_same_bytes_from_the_tarball_under_another_umask_and_clock(pg, deb, package, unpacked, tmp_path):
    copy = tmp_path / "copy of it"
    shutil.copytree(package, copy)  # new time stamps
    for path in copy.iterdir():
        os.utime(path, (1_000_000_000, 1_000_000_000))
        path.chmod(0o600)
    masked = ("bash", "-c", 'umask 077; exec tools/deb "$@"', "-")
    again = run(*masked, copy, pg, tmp_path, cwd=unpacked, TZ="Asia/Tokyo", TMPDIR=str(tmp_path))
    assert Path(again) != deb and Path(again).read_bytes() == deb.read_bytes()


@pytest.mark.majors(15)  # the private copy of 15 has the shape of Debian's folders
def test_server_runs_what_the_deb_unpacks(bare, deb_root):
    shutil.copytree(deb_root / "usr", bare, dirs_exist_ok=True)
    with Cluster(preload=True, settings={"awa_queue.worker": "on"}) as server:
        db = server.database()
        assert db.row("SELECT library, sql FROM awa.version()") == (VERSION, VERSION)
        db.sql("SELECT awa.enqueue('q', '1')")
        receipt = db.value("SELECT receipt FROM awa.claim('q')")
        assert db.value("SELECT state FROM awa.complete(ARRAY[%s]::bigint[])", [receipt]) == "completed"


def test_deb_refuses_what_must_not_be_packed(pg, package, tmp_path):
    other = installation(pg, "injection")
    assert "not Debian's" in refusal("tools/deb", package, other / "bin" / "pg_config", tmp_path)
    assert "15 to 18 are supported" in refusal("tools/deb", package, "14", tmp_path)
    assert "holds no built extension" in refusal("tools/deb", tmp_path, pg, tmp_path)
    wrong = tmp_path / "wrong"
    shutil.copytree(package, wrong)
    (wrong / "awa_queue.so").write_bytes(ours(other)["awa_queue.so"])
    assert "is a test build" in refusal("tools/deb", wrong, pg, tmp_path)
    (wrong / f"awa_queue--{VERSION}.sql").unlink()
    assert "is of another version" in refusal("tools/deb", wrong, pg, tmp_path)
    assert list(tmp_path.glob("*.deb")) == []


# -- the sources -------------------------------------------------------------------------------------------------------


def test_dist_holds_everything_that_git_has(dist, sources):
    prefix = f"awa_queue-{VERSION}/"
    known = {prefix + name: (sources / name).read_bytes() for name in git("ls-files", cwd=sources).splitlines()}
    with tarfile.open(dist[0]) as tar:
        assert {member.name: tar.extractfile(member).read() for member in tar if member.isfile()} == known
        assert all(member.name.startswith(prefix.rstrip("/")) for member in tar if member.name != "pax_global_header")
    with zipfile.ZipFile(dist[1]) as archive:
        assert {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")} == known


def test_dist_names_one_version_everywhere(unpacked):
    meta = json.loads((unpacked / "META.json").read_text())
    control = re.search(r"^default_version = '(.*)'", (unpacked / "awa_queue.control").read_text(), re.M)[1]
    assert {meta["version"], meta["provides"]["awa_queue"]["version"], control, run("tools/version", cwd=unpacked)} == {VERSION}
    assert meta["license"] == "apache_2_0" and meta["prereqs"]["runtime"]["requires"] == {"PostgreSQL": "15.0.0"}
    # All that make install needs beside the library is in it.
    assert run("tools/script", cwd=unpacked) == run("tools/script")


def test_dist_refuses_what_is_not_committed(sources, tmp_path):
    copy = tmp_path / "checkout"
    shutil.copytree(sources, copy)
    shutil.rmtree(copy / "target", ignore_errors=True)
    with open(copy / "README.md", "a", encoding="utf-8") as readme:
        readme.write("more\n")
    assert "README.md" in refusal("make", "-s", "dist", cwd=copy)
    assert not (copy / "target" / "dist").exists() or list((copy / "target" / "dist").iterdir()) == []
    shutil.rmtree(copy / ".git")
    assert "no git checkout" in refusal("make", "-s", "dist", cwd=copy)


@pytest.mark.parametrize(
    "change, complaint",
    [
        (lambda meta: meta.update(version="9.9.9"), "version is 9.9.9"),
        (lambda meta: meta["provides"]["awa_queue"].update(version="9.9.9"), "provides.awa_queue.version is 9.9.9"),
        (lambda meta: meta["provides"]["awa_queue"].update(file="sql/none.sql"), "names sql/none.sql"),
        (lambda meta: meta.pop("maintainer"), "maintainer is missing"),
        (lambda meta: meta.update(license="mit"), "license is mit"),
        (lambda meta: meta.update({"meta-spec": {"version": "2.0.0"}}), "meta-spec.version"),
        (lambda meta: meta["prereqs"]["runtime"].update(requires={"PostgreSQL": "14.0.0"}), "PostgreSQL is not 15.0.0"),
        (lambda meta: meta.update(licence="apache_2_0"), "licence is no key"),
    ],
)
def test_a_wrong_meta_json_is_named(change, complaint, tmp_path):
    for name in ("META.json", "awa_queue.control", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    run("tools/meta", tmp_path, VERSION)
    meta = json.loads((tmp_path / "META.json").read_text())
    change(meta)
    (tmp_path / "META.json").write_text(json.dumps(meta))
    assert complaint in refusal("tools/meta", tmp_path, VERSION)


# -- Docker: not built here, so what can be read is checked -------------------------------------------------------------

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
# One instruction a line.
INSTRUCTIONS = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.M).replace("\\\n", " ").splitlines()


def test_dockerfile_builds_by_make_install_from_files_that_are_there(pg, package, tmp_path):
    copied = []
    for line in INSTRUCTIONS:
        if line.startswith("COPY ") and "--from" not in line:
            *names, target = line.split()[1:]
            for name in names:
                there = tracked(name)
                assert there, f"{name} is not in git"
                copied += there
                place = tmp_path / target / (name if target == "./" else "")
                for file in there:
                    goal = place if file == name else place / Path(file).relative_to(name)
                    goal.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / file, goal)
    # What tools/build looks at when it asks whether something has changed.
    assert set(tracked("rust-toolchain.toml", "Cargo.*", "build.rs", ".cargo", "src", "sql", "tools")) <= set(copied)
    install = next(line for line in INSTRUCTIONS if "make install" in line)
    assert "PG_CONFIG=/usr/lib/postgresql/$PG_MAJOR/bin/pg_config" in install and "DESTDIR=/out" in install
    home = installation(pg, "release")
    run("make", "install", f"PG_CONFIG={home}/bin/pg_config", f"PACKAGE={package}", "DESTDIR=out", cwd=tmp_path)
    assert {Path(name).name: content for name, content in files(tmp_path / "out").items()} == files(package)
    script = run("tools/script", cwd=tmp_path)
    assert script == (package / f"awa_queue--{VERSION}.sql").read_text().strip()


def test_dockerfile_names_the_rust_and_the_majors_that_we_support():
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", DOCKERFILE, re.M))
    assert set(arguments) == {"PG_MAJOR", "RUST_VERSION", "DEBIAN"}
    assert arguments["RUST_VERSION"] == re.search(r'channel = "(.*)"', (ROOT / "rust-toolchain.toml").read_text())[1]
    built = re.search(r"^    ([\d |]+)\) ;;$", (ROOT / "tools" / "build").read_text(), re.M)[1].split(" | ")
    assert arguments["PG_MAJOR"] in built
    for text in (DOCKERFILE, (ROOT / "docker" / "README.md").read_text()):
        assert re.search(r"(\d\d), (\d\d), (\d\d) or (\d\d)\b", text).groups() == tuple(built)
    stages = [line.split()[1] for line in INSTRUCTIONS if line.startswith("FROM")]
    assert stages == ["rust:${RUST_VERSION}-${DEBIAN}", *["postgres:${PG_MAJOR}-${DEBIAN}"] * 2]
    # An ARG from before the first FROM is unknown in a stage that does not name it.
    stage = DOCKERFILE.split("AS builder")[1].split("FROM")[0]
    assert re.search(r"^ARG PG_MAJOR$", stage, re.M)


# -- docs/install.md ---------------------------------------------------------------------------------------------------


def test_sql_of_the_install_page_runs_in_its_order(release_cluster):
    blocks = re.findall(r"^ *```sql\n(.*?)^ *```", INSTALL, re.M | re.S)
    database = release_cluster.database(extension=False)
    try:
        statements = [s.strip() for block in blocks for s in re.sub(r"--[^\n]*", "", block).split(";") if s.strip()]
        assert statements[0] == "CREATE EXTENSION awa_queue" and statements[-1] == "DROP EXTENSION awa_queue"
        for statement in statements:
            rows = database.sql(statement)
            if "queue_stats" in statement:
                assert rows == [("mail", 1, 0, 0, 0)]
            if statement == "CREATE EXTENSION awa_queue":
                database.sql("SELECT awa.enqueue('mail', '1')")  # the page's users have jobs by then
        assert database.value("SELECT count(*) FROM kept_jobs") == 1
    finally:
        database.drop()


def test_install_page_names_targets_and_files_that_exist():
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"\bmake (install\w*|uninstall|deb|dist|clean)\b", INSTALL))
    assert {"install", "uninstall", "deb", "dist", "installcheck"} <= named <= known
    for link in re.findall(r"\]\((\.\./[\w./-]+)", INSTALL):
        assert (ROOT / "docs" / link).exists(), link
