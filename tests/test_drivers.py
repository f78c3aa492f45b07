"""The contract through the drivers that people use: psycopg here, node-postgres and tokio-postgres by programs of their own in
clients/. Each goes through the whole life of jobs, the rules for arrays, nulls and numbers, and errors with their SQLSTATE."""

import contextlib
import fcntl
import os
import shutil
import subprocess
from datetime import timedelta

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from harness.cluster import ROOT

CLIENTS = ROOT / "tests" / "clients"
BUILT = ROOT / "target" / "clients"


def run(*command, cwd, env=None, timeout=900):
    """A tool's output; its whole output is in the failure's message."""
    program = shutil.which(command[0])
    assert program, f"{command[0]} is not installed: tools/setup installs what the tests need"
    done = subprocess.run(
        [program, *command[1:]], cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=timeout,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))} failed with {done.returncode}:\n{done.stdout}"
    return done.stdout


@contextlib.contextmanager
def alone(name):
    """The tests of two majors run side by side and install a client once."""
    BUILT.mkdir(parents=True, exist_ok=True)
    with open(BUILT / f"{name}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def connected(db):
    """The environment of a client program: nothing of the caller's PG* leads it elsewhere."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
    return {**env, "PGHOST": str(db.cluster.dir), "PGUSER": "postgres", "PGDATABASE": db.name}


@pytest.fixture(scope="module")
def node_client():
    """node-postgres as the lock file names it, installed below target/."""
    source, home = CLIENTS / "node", BUILT / "node"
    with alone("node"):
        home.mkdir(exist_ok=True)
        want = "".join((source / name).read_text() for name in (".npmrc", "package.json", "package-lock.json"))
        stamp = home / "installed"
        if not stamp.exists() or stamp.read_text() != want:
            stamp.unlink(missing_ok=True)
            for name in (".npmrc", "package.json", "package-lock.json"):
                shutil.copy(source / name, home / name)
            run("npm", "ci", cwd=home)
            stamp.write_text(want)
    # From the source, so that what runs is what is there; its modules are found by NODE_PATH.
    return source / "client.js", home / "node_modules"


@pytest.fixture(scope="module")
def tokio_client():
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CARGO_BUILD", "RUSTFLAGS"))}
    env["CARGO_TARGET_DIR"] = str(BUILT / "tokio")
    with alone("tokio"):
        run("cargo", "build", "--quiet", "--locked", cwd=CLIENTS / "tokio", env=env)
    return BUILT / "tokio" / "debug" / "awa-queue-tokio-test"


@pytest.mark.timeout(900)
def test_node_postgres(release_db, node_client):
    script, modules = node_client
    out = run("node", script, cwd=BUILT, env={**connected(release_db), "NODE_PATH": str(modules)}, timeout=120)
    assert out.split() == ["life", "numbers", "arrays", "jobs", "errors", "transactions", "prepared", "discard"]


@pytest.mark.timeout(900)
def test_tokio_postgres(release_db, tokio_client):
    out = run(str(tokio_client), cwd=BUILT, env=connected(release_db), timeout=120)
    assert out.split() == [
        "life", "numbers", "arrays", "jobs", "errors", "transactions", "prepared", "pipeline", "discard",
    ]


# -- psycopg -----------------------------------------------------------------------------------------------------------


class Caller:
    """Runs statements with parameters and returns rows as dicts; parameters and results both in text or both binary."""

    def __init__(self, connection, binary):
        self.connection = connection
        self.cursor = connection.cursor(binary=binary, row_factory=dict_row)
        self.mark = "%b" if binary else "%t"

    def __call__(self, statement, *parameters, prepare=None):
        self.cursor.execute(statement.replace("%s", self.mark), parameters or None, prepare=prepare)
        return self.cursor.fetchall() if self.cursor.description else []

    def fails(self, code, statement, *parameters):
        with pytest.raises(psycopg.Error) as caught:
            self(statement, *parameters)
        diag = caught.value.diag
        assert diag.sqlstate == code, f"{diag.sqlstate}: {diag.message_primary}"
        assert diag.message_detail or diag.message_hint, f"no detail or hint: {diag.message_primary}"


@pytest.fixture(params=["text", "binary"])
def call(request, release_db):
    return Caller(release_db.connect(), request.param == "binary")


def test_psycopg_life(call):
    (one,) = call("SELECT awa.enqueue(%s, %s) AS id", "p", Jsonb({"n": 1}))
    second = {"text": 'ä "quoted" \\ {brace}, NULL'}
    (many,) = call(
        "SELECT awa.enqueue_batch(%s, %s, priority => %s) AS ids", "p", [Jsonb(2), Jsonb(second), Jsonb(None)], 3
    )
    assert len(many["ids"]) == 3
    first = call("SELECT * FROM awa.claim(%s, %s, %s, %s)", "p", 2, "host-1", timedelta(seconds=90))
    assert [(r["args"], r["priority"], r["attempt"], r["kind"]) for r in first] == [({"n": 1}, 2, 1, "p"), (2, 3, 1, "p")]
    assert [r["job_id"] for r in first] == [one["id"], many["ids"][0]]
    assert [r["lease_until"] - r["claimed_at"] for r in first] == [timedelta(seconds=90)] * 2
    receipts = [r["receipt"] for r in first]
    done = call("SELECT * FROM awa.complete(%s)", receipts[:1])
    assert [(r["receipt"], r["state"], r["changed"]) for r in done] == [(receipts[0], "completed", True)]
    (following,) = call("SELECT * FROM awa.complete_and_claim(%s, %s, %s)", receipts[1:], ["p"], 1)
    assert following["args"] == second
    again = call("SELECT * FROM awa.complete(%s)", receipts)
    assert [(r["state"], r["changed"]) for r in again] == [("completed", False)] * 2
    assert [r["state"] for r in call("SELECT * FROM awa.release(%s)", [following["receipt"]])] == ["ready"]
    rest = call("SELECT * FROM awa.claim(%s, %s)", "p", 10)
    assert {r["job_id"] for r in rest} == set(many["ids"][1:])
    ended = call("SELECT * FROM awa.cancel_claimed(%s, %s)", [r["receipt"] for r in rest], "enough")
    assert [(r["state"], r["changed"]) for r in ended] == [("cancelled", True)] * 2


def test_psycopg_integers(call):
    # psycopg sends an int as the smallest type that holds it: int2, int4, int8.
    for max_jobs in (1, 40_000, 2**40):
        call("SELECT awa.enqueue(%s, %s, priority => %s, max_attempts => %s)", "i", Jsonb(max_jobs), 1, 1000)
        (row,) = call("SELECT * FROM awa.claim(%s, %s)", "i", max_jobs)
        assert (row["args"], row["priority"], row["max_attempts"]) == (max_jobs, 1, 1000)
    # An array of ints has one type; receipts of 1 make it an int2[].
    assert [r["state"] for r in call("SELECT * FROM awa.complete(%s)", [1, 2])] == ["unknown"] * 2
    assert [r["state"] for r in call("SELECT * FROM awa.complete(%s)", [1, row["receipt"]])] == ["unknown", "completed"]
    # Untyped literals.
    call("SELECT awa.enqueue('i', '1', 'kind', 1, '2020-01-01', 5, tags => '{t}')")
    (row,) = call("SELECT * FROM awa.claim('i', '1')")
    assert (row["kind"], row["max_attempts"], row["tags"]) == ("kind", 5, ["t"])


def test_psycopg_arrays(call):
    for verb in ("complete", "release", "cancel_claimed"):
        assert call(f"SELECT * FROM awa.{verb}(%s)", []) == []
        assert call(f"SELECT * FROM awa.{verb}(%s)", None) == []
        (row,) = call(f"SELECT * FROM awa.{verb}(%s)", [None])
        assert (row["receipt"], row["job_id"], row["state"], row["changed"]) == (None, None, "unknown", False)
    for empty in ([], None):
        assert call("SELECT awa.enqueue_batch(%s, %s) AS ids", "a", empty) == [{"ids": []}]
        assert call("SELECT * FROM awa.claim_from(%s, 5)", empty) == []
        assert call("SELECT * FROM awa.complete_and_claim(%s, %s)", empty, empty) == []
    call("SELECT awa.enqueue_batch(%s, %s, ordering_keys => %s)", "a", [Jsonb(1), Jsonb(2)], ["k", None])
    rows = call("SELECT * FROM awa.claim_from(%s, %s)", ["a", "a"], 5)
    assert [(r["args"], r["ordering_key"]) for r in rows] == [(1, "k"), (2, None)]
    one, two = (r["receipt"] for r in rows)
    mixed = call("SELECT * FROM awa.complete(%s)", [two, None, one, two])
    assert [(r["receipt"], r["state"]) for r in mixed] == [
        (two, "completed"), (None, "unknown"), (one, "completed"), (two, "completed"),
    ]
    call.fails("2202E", "SELECT awa.complete(%s)", [[1, 2], [3, 4]])
    call.fails("22004", "SELECT awa.enqueue_batch(%s, %s)", "a", [None])
    call.fails("22004", "SELECT awa.claim_from(%s)", [None])
    call.fails("22023", "SELECT awa.enqueue_batch(%s, %s, ordering_keys => %s)", "a", [Jsonb(1), Jsonb(2)], ["k"])


def test_psycopg_errors(call):
    call.fails("22004", "SELECT awa.enqueue(%s)", None)
    call.fails("22023", "SELECT awa.enqueue(%s, priority => %s)", "q", 9)
    call.fails("22023", "SELECT awa.claim(%s, %s)", "q", -1)
    call.fails("54000", "SELECT awa.enqueue(%s)", "q" * 201)
    call.fails("42704", "SELECT awa.pause_queue(%s)", "missing")
    call.fails("0A000", "SELECT awa.park(%s)", 1)
    call.fails("0A000", "SELECT awa.enqueue(%s, unique_key => %s)", "q", "k")
    call.fails("55000", "SELECT awa.complete(%s, strict => %s)", [1], True)
    with call.connection.transaction():
        with pytest.raises(psycopg.errors.ActiveSqlTransaction):
            with call.connection.transaction():
                call("CALL awa.maintain()")
    call("BEGIN READ ONLY")
    call.fails("25006", "SELECT awa.enqueue(%s)", "q")
    call("ROLLBACK")
    call("CALL awa.maintain()")


def test_psycopg_by_default_in_a_transaction(release_db):
    # psycopg begins a transaction with the first statement unless it is told not to.
    with release_db.connect(autocommit=False) as producer, release_db.connect(autocommit=False) as worker:
        producer.execute("SELECT awa.enqueue(%s, %s)", ["tx", Jsonb(1)])
        assert worker.execute("SELECT * FROM awa.claim(%s)", ["tx"]).fetchall() == []
        producer.rollback()
        producer.execute("SELECT awa.enqueue(%s, %s)", ["tx", Jsonb(2)])
        producer.commit()
        assert worker.execute("SELECT args FROM awa.claim(%s)", ["tx"]).fetchall() == [(2,)]
        worker.rollback()
        ((receipt, args),) = worker.execute("SELECT receipt, args FROM awa.claim(%s)", ["tx"]).fetchall()
        worker.execute("SELECT * FROM awa.complete(%s)", [[receipt]])
        worker.commit()
        assert args == 2
        assert worker.execute("SELECT state FROM awa.complete(%s)", [[receipt]]).fetchone() == ("completed",)


def test_psycopg_prepared(call):
    for n in range(20):
        call("SELECT awa.enqueue(%s, %s)", "prepared", Jsonb(n), prepare=True)
    seen, receipts = [], []
    while rows := call("SELECT * FROM awa.complete_and_claim(%s::bigint[], %s, %s)", receipts, ["prepared"], 3, prepare=True):
        seen += [r["args"] for r in rows]
        receipts = [r["receipt"] for r in rows]
    assert seen == list(range(20))
    assert call("SELECT count(*) AS n FROM pg_prepared_statements")[0]["n"] >= 2


def test_psycopg_pipeline(call):
    with call.connection.pipeline() as pipeline:
        for n in range(10):
            call.connection.execute("SELECT awa.enqueue(%s, %s)", ["pipeline", Jsonb(n)])
        claimed = call.connection.execute("SELECT receipt, args FROM awa.claim(%s, %s)", ["pipeline", 10])
        pipeline.sync()
        rows = claimed.fetchall()
        assert [args for _, args in rows] == list(range(10))
        done = call.connection.execute("SELECT state, changed FROM awa.complete(%s)", [[r for r, _ in rows]])
        none = call.connection.execute("SELECT * FROM awa.claim(%s)", ["pipeline"])
        pipeline.sync()
        assert done.fetchall() == [("completed", True)] * 10
        assert none.fetchall() == []
    # An error takes what stands before it in its implicit transaction along, and the connection goes on.
    with pytest.raises(psycopg.errors.InvalidParameterValue):
        with call.connection.pipeline():
            call.connection.execute("SELECT awa.enqueue(%s)", ["pipeline"])
            call.connection.execute("SELECT awa.enqueue(%s, priority => 0)", ["pipeline"])
    assert call("SELECT * FROM awa.claim(%s)", "pipeline") == []


def test_psycopg_discard_all_between_any_two_calls(call):
    call.connection.prepare_threshold = None
    discard = lambda: call("DISCARD ALL")  # noqa: E731
    steps = 0
    for n in range(3):
        discard()
        call("SELECT awa.enqueue_batch(%s, %s)", "discard", [Jsonb(n), Jsonb(n + 10)])
        discard()
        rows = call("SELECT * FROM awa.claim(%s)", "discard")
        discard()
        assert [r["state"] for r in call("SELECT * FROM awa.release(%s)", [r["receipt"] for r in rows])] == ["ready"]
        discard()
        rows = call("SELECT * FROM awa.claim(%s)", "discard")
        discard()
        more = call("SELECT * FROM awa.complete_and_claim(%s, %s)", [r["receipt"] for r in rows], ["discard"])
        discard()
        assert [r["changed"] for r in call("SELECT * FROM awa.complete(%s)", [r["receipt"] for r in more])] == [True]
        steps += len(rows) + len(more)
    discard()
    assert steps == 6
    assert call("SELECT * FROM awa.claim(%s)", "discard") == []
