"""Fixtures. One pytest process tests one PostgreSQL major: the environment variable PG_MAJOR (15 when unset)."""

import os

import pytest

from harness import Cluster, OutOfPatience, live_clusters
from harness.clock import Clock
from harness.place import prefer_memory

prefer_memory()

MAJOR = int(os.environ.get("PG_MAJOR", "15"))


def pytest_report_header(config):
    return f"PostgreSQL {MAJOR}"


def pytest_collection_modifyitems(config, items):
    # A test that is not meant for this major is taken out, not skipped: what is reported as run did run.
    def meant(item):
        mark = item.get_closest_marker("majors")
        return mark is None or MAJOR in mark.args

    out = [item for item in items if not meant(item)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if meant(item)]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_setup(item):
    item.log_positions = {id(c): c.log_position() for c in live_clusters()}
    yield


def note_failure(nodeid, excinfo):
    """Tells tools/test of each failure, and whether it may be for want of time only: such a test is run again alone."""
    file = os.environ.get("AWA_FAILURES")
    if file:
        timed_out = isinstance(excinfo.value, OutOfPatience) or str(excinfo.value).startswith("Timeout (>")
        with open(file, "a", encoding="utf-8") as out:
            out.write(f"{'late' if timed_out else 'wrong'} {nodeid}\n")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.failed:
        note_failure(item.nodeid, call.excinfo)
        for cluster in live_clusters():
            since = getattr(item, "log_positions", {}).get(id(cluster), 0)
            if cluster.log(since).strip():
                title = f"log of PostgreSQL {cluster.major} {cluster.flavour}{' preload' if cluster.preload else ''}"
                report.sections.append((title, cluster.log_tail(60, since)))


@pytest.fixture(scope="session")
def pg():
    """The PostgreSQL major under test."""
    return MAJOR


def _shared(**arguments):
    cluster = Cluster(MAJOR, **arguments)
    try:
        yield cluster.start()
    finally:
        cluster.remove()


@pytest.fixture(scope="module")
def cluster():
    """The injection build, not preloaded. One server per test file."""
    yield from _shared(flavour="injection")


@pytest.fixture(scope="module")
def preload_cluster():
    """The injection build, preloaded."""
    yield from _shared(flavour="injection", preload=True)


@pytest.fixture(scope="module")
def release_cluster():
    """The release build, not preloaded: what a package holds."""
    yield from _shared(flavour="release")


@pytest.fixture
def make_cluster():
    """A function that makes a cluster of one's own (Cluster's arguments, not started); removed after the test."""
    made = []

    def make(**arguments):
        made.append(Cluster(MAJOR, **arguments))
        return made[-1]

    yield make
    for cluster in made:
        cluster.remove()


def _fresh(cluster):
    if not cluster.running:
        # An earlier test ended the server and did not start it again; that shall not fail this one too.
        if cluster._server is not None:
            cluster._server = None
        cluster.start()
    database = cluster.clone()
    yield database
    database.drop()


@pytest.fixture
def db(cluster):
    """A fresh database with the extension, not preloaded."""
    yield from _fresh(cluster)


@pytest.fixture
def preload_db(preload_cluster):
    yield from _fresh(preload_cluster)


@pytest.fixture
def release_db(release_cluster):
    yield from _fresh(release_cluster)


@pytest.fixture(params=["plain", "preload"])
def any_db(request):
    """The test runs twice: without preload and with it."""
    yield from _fresh(request.getfixturevalue("cluster" if request.param == "plain" else "preload_cluster"))


@pytest.fixture
def s(any_db):
    """A session with a clock that the test sets: s.clock.forward(seconds)."""
    session = any_db.session()
    session.clock = Clock(session)
    return session
