"""Crashes in the middle of work, and an audit of what clients were told.

Producers, workers and a maintainer run; the server is ended under them (SIGKILL to all its processes, an immediate stop, or
single backends by pg_terminate_backend), started again, and so on. Clients note what was acknowledged to them:

- an acknowledged enqueue is there: its job was delivered, or is found;
- an acknowledged completion holds: the job is never delivered again;
- what was rolled back was never there;
- within one life of the server a job is delivered once, unless it was given back. (A claim whose commit was not acknowledged,
  or not flushed when the server died, is a redelivery afterwards; that is what the contract says.)
- nothing is stuck: at the end everything can be finished, and all slots emptied, so their counts add up.

fsync is off as in all tests: what ends are processes, and what they had written stays with the kernel.
"""

import os
import random
import signal
from collections import Counter, defaultdict

import pytest

from harness import wait_until
from harness.crash import Clients, amcheck, can_connect

QUEUES = ["a", "b"]


class Audit(Clients):
    def __init__(self, db):
        super().__init__(db)
        self.numbers = iter(range(1, 10**9))
        self.put = set()  # acknowledged
        self.perhaps_put = set()  # the answer never came
        self.rolled_back = set()
        self.done = {}  # number -> receipt of an acknowledged completion
        self.deliveries = defaultdict(list)  # number -> [(life, receipt)]
        self.given_back = defaultdict(int)  # number -> releases that may have happened
        self.receipts = set()
        self.emptied = 0

    # -- clients -----------------------------------------------------------------------------------------------------

    def start(self, producers=3, workers=3):
        self.start_roles([self.produce] * producers + [self.work] * workers + [self.keep])

    def produce(self, session, rng):
        if len(self.put) > len(self.done) + 400:
            self.stopping.wait(0.005)  # so that the workers come to the end of a slot
            return
        with self.lock:
            mine = [next(self.numbers) for _ in range(rng.choice([1, 1, 5, 30]))]
            self.perhaps_put.update(mine)
        call = ("SELECT awa.enqueue_batch(%s, ARRAY(SELECT to_jsonb(n) FROM unnest(%s::int8[]) n), priority => %s)",
                [rng.choice(QUEUES), mine, rng.choice([1, 2])])
        back = rng.random() < 0.2
        if back or rng.random() < 0.3:
            session.sql("BEGIN")
            session.sql(*call)
            session.sql("ROLLBACK" if back else "COMMIT")
        else:
            session.sql(*call)
        with self.lock:
            self.perhaps_put.difference_update(mine)
            (self.rolled_back if back else self.put).update(mine)

    def delivered(self, session, rows):
        with self.lock:
            for receipt, number in rows:
                self.deliveries[number].append((session.life, receipt))
                if receipt in self.receipts:
                    self.wrong.append(f"receipt {receipt} was given out twice")
                self.receipts.add(receipt)
                if number in self.done:
                    self.wrong.append(f"job {number} was delivered after its completion was acknowledged")
                if number in self.rolled_back:
                    self.wrong.append(f"job {number} was rolled back and delivered")

    def completed(self, rows):
        with self.lock:
            self.done.update({number: receipt for receipt, number in rows})

    def work(self, session, rng):
        rows = session.sql("SELECT receipt, args FROM awa.claim_from(%s, %s)", [QUEUES, rng.choice([1, 7, 40])])
        self.delivered(session, rows)
        while rows:
            back, rows = rows[: len(rows) // 5], rows[len(rows) // 5 :]
            if back:
                with self.lock:
                    for _, number in back:
                        self.given_back[number] += 1
                session.sql("SELECT * FROM awa.release(%s::int8[])", [[r for r, _ in back]])
            receipts = [r for r, _ in rows]
            if rng.random() < 0.5:
                states = session.sql("SELECT state FROM awa.complete(%s::int8[])", [receipts])
                assert set(states) == {("completed",)}, states
                self.completed(rows)
                return
            more = session.sql("SELECT receipt, args FROM awa.complete_and_claim(%s::int8[], %s, 10, strict => true)",
                               [receipts, QUEUES])
            self.completed(rows)
            self.delivered(session, more)
            rows = more

    def keep(self, session, rng):
        if rng.random() < 0.3 and session.value("SELECT awa_internal.seal()").startswith("sealed"):
            for slot in range(16):
                session.sql("SELECT awa_internal.close(%s)", [slot])
        for slot in range(16):
            said = session.value('SELECT awa_internal."empty"(%s, true)', [slot])
            self.emptied += said == "emptied"
        session.sql("CALL awa.maintain()")
        self.stopping.wait(0.05)

    def progress(self, n):
        """Waits until n more enqueues and completions were acknowledged."""
        put, done = len(self.put), len(self.done)
        wait_until(
            lambda: self.wrong or (len(self.put) >= put + n and len(self.done) >= done + n), 60, "the clients to work"
        )
        assert self.wrong == []

    # -- the audit ---------------------------------------------------------------------------------------------------

    def end(self):
        """Finishes all there is and compares with what clients were told."""
        s = self.session()
        while rows := s.sql("SELECT receipt, args FROM awa.claim_from(%s, 500)", [QUEUES]):
            self.delivered(s, rows)
            assert set(s.sql("SELECT state FROM awa.complete(%s::int8[])", [[r for r, _ in rows]])) == {("completed",)}
            self.completed(rows)
        # Held by clients that died: claimed, and neither finished nor given back. Their receipts follow from the tables.
        held = s.sql(
            "SELECT (c.claim_no << 16) | (c.slot::int8 << 10) | k, r.args"
            " FROM awa_internal.claims c CROSS JOIN generate_series(0, c.n - 1) k"
            " JOIN awa_internal.segments g ON g.lane_id = c.lane_id AND g.slot = c.slot"
            " AND c.first_seq + k BETWEEN g.first_seq AND g.first_seq + g.n - 1"
            " JOIN awa_internal.ready r ON r.slot = g.slot AND r.entry_id = g.first_entry_id + (c.first_seq + k - g.first_seq)"
            " WHERE NOT EXISTS (SELECT 1 FROM awa_internal.closures x WHERE x.claim_no = c.claim_no AND x.outcome <> 's'"
            " AND (x.which IS NULL OR get_bit(x.which, k) = 1))"
        )
        states = s.sql("SELECT state, changed FROM awa.complete(%s::int8[])", [[r for r, _ in held]])
        assert states == [("completed", True)] * len(held)
        for receipt, number in held:
            if receipt not in self.receipts:
                self.delivered(s, [(receipt, number)])  # the answer of that claim never arrived
        assert self.wrong == []
        seen = set(self.deliveries)
        assert self.put - seen == set(), f"{len(self.put - seen)} acknowledged jobs are lost"
        assert seen - self.put - self.perhaps_put == set()
        for number, times in self.deliveries.items():
            by_life = Counter(life for life, _ in times)
            worst = max(by_life.values())
            assert worst <= 1 + self.given_back[number], f"job {number} was delivered {times}, given back {self.given_back[number]}"
        assert overlaps(self.db) == []
        s.sql("SELECT awa_internal.seal()")
        for slot in range(16):
            s.sql("SELECT awa_internal.close(%s)", [slot])
            said = s.value('SELECT awa_internal."empty"(%s, true)', [slot])
            assert said in ("emptied", "current", "not closed"), said
        assert self.db.value("SELECT count(*) FROM awa_internal.ready") == 0


def overlaps(db):
    return db.sql(
        "SELECT a.lane_id, a.first_seq FROM awa_internal.segments a JOIN awa_internal.segments b ON a.lane_id = b.lane_id"
        " AND (a.first_seq, a.first_entry_id) < (b.first_seq, b.first_entry_id) AND b.first_seq < a.first_seq + a.n"
    )


SETTINGS = {
    # Some client always has a snapshot here; that shall not keep slots from being emptied.
    "awa_queue.snapshot_grace": "0",
    # Long enough that asynchronous claims are really lost with the server.
    "wal_writer_delay": "5s",
}


@pytest.fixture(params=["plain", "preload"])
def server(request, make_cluster):
    settings = dict(SETTINGS)
    if request.param == "plain":
        # Without preload the setting is unknown to the postmaster but kept as a placeholder for the sessions.
        return make_cluster(flavour="injection", settings=settings)
    return make_cluster(flavour="injection", preload=True, settings=settings)


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_killed_in_the_middle_of_work(server, pg):
    server.start()
    db = server.database()
    audit = Audit(db)
    for _ in range(4):
        audit.start()
        emptied = audit.emptied
        audit.progress(150)
        # Jobs that dead clients hold pin their slots, the others come and go.
        wait_until(lambda: audit.wrong or audit.emptied > emptied, 60, "a slot to be emptied")
        server.kill9()
        audit.stop()
        assert audit.deaths > 0
        start = server.log_position()
        server.start()
        log = server.log(start)
        assert "PANIC" not in log and "not properly shut down" in log
        if pg == 15:
            amcheck(db)
    audit.end()
    if pg == 15:
        amcheck(db)


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_stopped_immediately_in_the_middle_of_work(server, pg):
    server.start()
    db = server.database()
    audit = Audit(db)
    for _ in range(2):
        audit.start()
        audit.progress(150)
        server.stop("immediate")
        audit.stop()
        server.start()
    audit.end()
    if pg == 15:
        amcheck(db)


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_one_killed_backend_restarts_all_and_nothing_is_lost(server, pg):
    """SIGKILL of a single backend: the postmaster ends the others and makes shared memory anew, without a start of its own."""
    server.start()
    db = server.database()
    audit = Audit(db)
    audit.start()
    for _ in range(2):
        audit.progress(100)
        with db.connect() as own:
            victims = [pid for (pid,) in own.execute(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
                " AND backend_type = 'client backend'").fetchall()]
        start = server.log_position()
        os.kill(random.choice(victims), signal.SIGKILL)
        wait_until(lambda: "database system is ready to accept connections" in server.log(start), 60, "the restart")
        wait_until(lambda: can_connect(db), 30, "connections")
        db.connection.close()
    audit.progress(100)
    audit.stop()
    audit.end()
    assert "PANIC" not in server.log()
    if pg == 15:
        amcheck(db)


@pytest.mark.timeout(300)
def test_backends_terminated_at_random(server, pg):
    server.start()
    db = server.database()
    audit = Audit(db)
    audit.start()
    for i in range(25):
        audit.progress(15)
        ending = "terminate" if i % 3 else "cancel"
        db.sql(
            f"SELECT pg_{ending}_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid() AND backend_type = 'client backend' ORDER BY random() LIMIT 2"
        )
    audit.stop()
    audit.end()
    assert "PANIC" not in server.log()
    if pg == 15:
        amcheck(db)
