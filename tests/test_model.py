"""Random programs of all verbs over several sessions, compared with a model of the state machine (tests/model, in Rust).

A failure prints its seed and the shortest program that still fails, one step a line. Such a program becomes a file below
tests/model/programs and so a test of its own. By hand, with a server's folder as the host:
target/model/debug/model --dsn "host=... user=postgres" [--steps N] SEED... | --program FILE...
"""

import fcntl
import os
import subprocess

import pytest

from harness.cluster import ROOT

SOURCE = ROOT / "tests" / "model"
BUILT = ROOT / "target" / "model"
PROGRAMS = sorted((SOURCE / "programs").glob("*.jsonl"))


def cargo(*arguments):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CARGO_BUILD", "RUSTFLAGS"))}
    env["CARGO_TARGET_DIR"] = str(BUILT)
    BUILT.mkdir(parents=True, exist_ok=True)
    # The tests of two majors run side by side.
    with open(BUILT / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = subprocess.run(
            ["cargo", *arguments, "--quiet", "--locked"], cwd=SOURCE, env=env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=800,
        )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def model():
    cargo("build")
    return BUILT / "debug" / "model"


def run(program, cluster, *arguments):
    done = subprocess.run(
        [program, "--dsn", f"host={cluster.dir} user=postgres", *map(str, arguments)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(params=["plain", "preload"])
def any_cluster(request):
    return request.getfixturevalue("cluster" if request.param == "plain" else "preload_cluster")


@pytest.mark.timeout(900)
def test_the_model_itself():
    cargo("test")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seeds", [(1, 2, 3), (4, 5, 6)])
def test_random_programs_do_what_the_model_says(any_cluster, model, seeds):
    out = run(model, any_cluster, "--steps", 250, *seeds)
    assert len(out.splitlines()) == len(seeds)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("program", PROGRAMS, ids=[p.stem for p in PROGRAMS])
def test_program(any_cluster, model, program):
    run(model, any_cluster, "--program", program)


def test_the_list_of_jobs_has_the_error_of_a_failure_without_a_message(db):
    """Found by seed 1, mended with the list's look into dead letters."""
    db.sql("SELECT awa.enqueue('q', max_attempts => 1)")
    db.sql("SELECT awa.fail(ARRAY(SELECT receipt FROM awa.claim('q')))")
    ((listed, by_id),) = db.sql("SELECT l.errors, j.errors FROM awa.jobs l, awa.job(l.job_id) j")
    assert len(by_id) == 1 and listed == by_id
