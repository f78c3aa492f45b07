"""make demo in small: jobs that fail, wait for their time, lose their worker to SIGKILL; its own proof, and what its table says."""

import os
import re
import subprocess
import sys

import pytest

from harness.cluster import ROOT

# The demo's server is Debian's 15; it reads pg_stat_statements, which the other installations do not have.
pytestmark = pytest.mark.majors(15)

JOBS = 4000


@pytest.fixture(scope="module")
def output(pg):
    environment = {**os.environ, "AWA_MAJOR": str(pg), "AWA_PYTHON": sys.executable}
    done = subprocess.run(
        [str(ROOT / "demo" / "run"), "--jobs", str(JOBS), "--rate", "1000", "--workers", "3", "--producers", "2"],
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def number(output, name):
    found = re.search(rf"^ +{name} +([\d,]+)", output, re.MULTILINE)
    assert found, f"no line {name!r} in\n{output}"
    return int(found.group(1).replace(",", ""))


@pytest.mark.timeout(300)
def test_demo_proves_that_each_job_ended_once(output):
    assert "FAIL" not in output and "Every committed job ended exactly once" in output
    assert number(output, "enqueued") == JOBS == number(output, "completed") + number(output, "failed for good")
    assert number(output, "lost") == 0


@pytest.mark.timeout(300)
def test_demo_goes_through_a_whole_life(output):
    # One in 1,000 fails always, one in 2,000 is refused; the killed worker held at least one job.
    assert number(output, "failed for good") == JOBS // 1000 + JOBS // 2000
    assert number(output, "retried") >= JOBS // 50
    assert number(output, "scheduled") > 0 and number(output, "rolled back") > 0
    assert "kill -9 of worker" in output and number(output, "rescued") > 0
