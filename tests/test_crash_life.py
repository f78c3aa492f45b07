"""Crashes in the middle of promotion and rescue, and an audit of whole lives of jobs.

Jobs are put off, fail, are snoozed, given back, cancelled, retried, or left behind by workers that disappear, so that their
leases end; promotion and rescue have a steady stream, by the background worker (preload) or by clients that CALL
awa.maintain(). Meanwhile the server or single backends are ended, at random moments and, held at pause points, in the middle
of a promotion or a rescue. Each client notes before a call what it may have done, and afterwards what it was told. Then:

- each job is in one place, and each of its attempts follows from the one before: none is lost, none is doubled, none ends
  twice, the number of an attempt is that of the claims that committed since the job began (snoozes and releases not counted);
- what was acknowledged is so in the tables; what is in the tables somebody asked for, and no lease ended before its time;
- counts are exact: awa.queue_stats, awa.jobs, the dead letters and the notes agree;
- a claim that was acknowledged may be gone after a crash, since it is not flushed (preload, as long as no crash is known to
  the postmaster); its job is then to be claimed again with the same attempt. Nothing else that was acknowledged may be gone.

fsync is off as in all tests: what ends are processes, and what they had written stays with the kernel.
"""

import os
import random
import signal
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import psycopg
import pytest

from harness import history, wait_until
from harness.crash import Clients, amcheck, can_connect

QUEUES = ["a", "b"]
HOUR = 3600 * 1000
# What a verb's answer says of an attempt, as the log's outcome.
SAID = {"completed": "c", "retryable": "t", "scheduled": "z", "ready": "r", "failed": "f"}
MADE_BY = {"complete": "c", "fail": "tf", "snooze": "z", "release": "r", "cancel_claimed": "x"}
# Warnings of maintenance that mean a job is in trouble, not just a lock that somebody holds.
TROUBLE = ("can not be made ready", "can not be rescued", "rows are lost", "could not be closed")


@dataclass
class Taken:
    """A claim call. rows is None while the answer has not come."""

    life: object
    rows: list = None


@dataclass
class Told:
    """What was asked for of one attempt, and what the answer was; None: it never came."""

    verb: str
    state: str = None
    changed: bool = None


@dataclass
class Notes:
    put: dict = field(default_factory=dict)  # number -> job_id
    perhaps_put: set = field(default_factory=set)
    rolled_back: set = field(default_factory=set)
    taken: dict = field(default_factory=dict)  # name of the call -> Taken
    told: dict = field(default_factory=lambda: defaultdict(list))  # receipt -> [Told]
    held_until: dict = field(default_factory=dict)  # receipt -> the latest end that a heartbeat answered
    asked: dict = field(default_factory=lambda: defaultdict(list))  # job_id -> [Told] of cancel and retry


class Life(Clients):
    def __init__(self, db, maintainers):
        super().__init__(db)
        self.maintainers = maintainers
        self.numbers = iter(range(1, 10**9))
        self.calls = iter(range(1, 10**9))
        self.notes = Notes()
        self.seen = Counter()  # what came by, so that a test knows that the stream is there
        self.seals = 0
        self.emptying = False
        self.most_open = 300
        self.leases = ["200 ms", "500 ms", "500 ms", "3 s", "3 s", "1 h"]
        self.number_of = {}  # receipt -> number
        self.done = {}  # number -> the next call at its acknowledged completion

    # -- clients -----------------------------------------------------------------------------------------------------

    def start(self):
        self.start_roles(
            [self.produce] * 2 + [self.work] * 4 + [self.operate] + [self.seal] + [self.maintain] * self.maintainers
        )

    def produce(self, session, rng):
        if len(self.notes.put) > self.seen["ended"] + self.seen["left behind"] + self.most_open * self.starts:
            self.stopping.wait(0.01)
            return
        notes = self.notes
        with self.lock:
            mine = [next(self.numbers) for _ in range(rng.choice([1, 3, 10, 20]))]
            notes.perhaps_put.update(mine)
        call = (
            "SELECT awa.enqueue_batch(%s, ARRAY(SELECT to_jsonb(n) FROM unnest(%s::int8[]) n), priority => %s,"
            " max_attempts => %s, run_in => %s::interval)",
            [rng.choice(QUEUES), mine, rng.choice([1, 2]), rng.choice([1, 2, 3, 20]),
             rng.choice([None, "50 ms", "200 ms", "1 s"])],
        )
        back = rng.random() < 0.1
        if back:
            session.sql("BEGIN")
            session.sql(*call)
            session.sql("ROLLBACK")
        else:
            ids = session.value(*call)
        with self.lock:
            notes.perhaps_put.difference_update(mine)
            if back:
                notes.rolled_back.update(mine)
            else:
                notes.put.update(zip(mine, ids, strict=True))

    def claim(self, session, rng, n, lease):
        with self.lock:
            call = next(self.calls)
            name = f"call {call}"
            taken = self.notes.taken[name] = Taken(session.life)
        rows = session.sql(
            "SELECT receipt, args, attempt, job_id, last_error FROM awa.claim_from(%s, %s, %s, %s)", [QUEUES, n, name, lease]
        )
        with self.lock:
            taken.rows = [(receipt, number, attempt) for receipt, number, attempt, _, _ in rows]
            for receipt, number, attempt, job_id, error in rows:
                if number in self.notes.rolled_back:
                    self.wrong.append(f"job {number} was rolled back and delivered")
                if self.notes.put.get(number, job_id) != job_id:
                    self.wrong.append(f"job {number} has two ids: {job_id} and {self.notes.put[number]}")
                if self.done.get(number, call) < call:
                    self.wrong.append(f"job {number} was delivered after its completion was acknowledged")
                self.number_of[receipt] = number
                if attempt > 1 and error["attempt"] != attempt - 1:
                    self.wrong.append(f"attempt {attempt} of job {number} comes after {error}")
                self.seen["later attempts"] += attempt > 1
                self.seen["rescued"] += error is not None and error["outcome"] == "lease ended"
        return [(receipt, number) for receipt, number, _, _, _ in rows]

    def finish(self, session, verb, receipts, more=""):
        """One call of a finishing verb, noted before and after it."""
        if not receipts:
            return
        with self.lock:
            told = [Told(verb) for _ in receipts]
            for receipt, t in zip(receipts, told):
                self.notes.told[receipt].append(t)
        try:
            rows = session.sql(f"SELECT state, changed FROM awa.{verb}(%s::int8[]{more})", [receipts])
        except psycopg.errors.DeadlockDetected:
            with self.lock:  # undone, and may be repeated
                for receipt, t in zip(receipts, told):
                    self.notes.told[receipt].remove(t)
            return
        with self.lock:
            for receipt, t, (state, changed) in zip(receipts, told, rows, strict=True):
                t.state, t.changed = state, changed
                if changed and state == "completed":
                    number = self.number_of[receipt]
                    if number in self.done:
                        self.wrong.append(f"job {number} was completed twice")
                    self.done[number] = next(self.calls)
                self.seen[state] += changed
                self.seen["ended"] += changed and state in ("completed", "failed", "cancelled")

    def work(self, session, rng):
        lease = rng.choice(self.leases)
        rows = self.claim(session, rng, rng.choice([1, 5, 20]), lease)
        if not rows:
            self.stopping.wait(0.005)
            return
        receipts = [receipt for receipt, _ in rows]
        rng.shuffle(receipts)
        if rng.random() < 0.15:
            session.sql("BEGIN")
            session.sql("SELECT * FROM awa.fail(%s::int8[])", [receipts[:3]])
            session.sql("SELECT * FROM awa.complete(%s::int8[])", [receipts[3:]])
            session.sql("ROLLBACK")
        share = max(1, len(receipts) // 4)
        if rng.random() < 0.2 and lease != "1 h":
            for receipt, status, until in session.sql(
                "SELECT receipt, status, lease_until FROM awa.heartbeat(%s::int8[], '700 ms')", [receipts[:share]]
            ):
                if status != "lost":
                    with self.lock:
                        self.notes.held_until[receipt] = until
        if lease == "1 h":
            receipts.pop()  # stays until the end
            self.seen["left behind"] += 1
        elif rng.random() < 0.1:
            return  # a worker that disappears
        else:
            receipts = receipts[rng.randint(0, len(receipts) // 2):]  # or that forgets some
        while receipts:
            n = rng.randint(1, 8)
            some, receipts = receipts[:n], receipts[n:]
            what = rng.random()
            if what < 0.2:
                self.finish(session, "fail", some, f", 'no', '{rng.choice([0, 50, 300])} ms'")
            elif what < 0.25:
                self.finish(session, "fail", some, ", 'never', permanent => true")
            elif what < 0.35:
                self.finish(session, "snooze", some, ", '100 ms'")
            elif what < 0.43:
                self.finish(session, "release", some)
            elif what < 0.46:
                self.finish(session, "cancel_claimed", some)
            else:
                self.finish(session, "complete", some)
            if rng.random() < 0.1:
                self.finish(session, "complete", some)  # repeated, or stale

    def operate(self, session, rng):
        with self.lock:
            known = list(self.notes.put.values())[-400:]
        if not known:
            self.stopping.wait(0.01)
            return
        verb = rng.choice(["cancel", "retry"])
        ids = sorted(set(rng.sample(known, min(len(known), rng.choice([1, 4])))))
        with self.lock:
            told = [Told(verb) for _ in ids]
            for job_id, t in zip(ids, told):
                self.notes.asked[job_id].append(t)
        try:
            rows = session.sql(f"SELECT job_id, state, changed FROM awa.{verb}(%s::int8[])", [ids])
        except psycopg.errors.DeadlockDetected:
            rows = [(job_id, "undone", False) for job_id in ids]
        with self.lock:
            for job_id, t, (answered, state, changed) in zip(ids, told, rows, strict=True):
                assert answered == job_id
                t.state, t.changed = state, changed
                self.seen[verb] += changed
        self.stopping.wait(0.02)

    def seal(self, session, rng):
        """Jobs lie in several slots. No more than there are empty ones: none shall have to be emptied early."""
        self.stopping.wait(0.7)
        if self.seals < 10 or self.emptying:
            self.seals += session.value("SELECT awa_internal.seal()").startswith("sealed")
            for slot in range(16):
                session.sql("SELECT awa_internal.close(%s)", [slot])

    def maintain(self, session, rng):
        if not hasattr(session, "watched"):
            session.watched = True
            session.connection.add_notice_handler(lambda d: self.notice(d.message_primary))
        session.sql("CALL awa.maintain()")
        self.stopping.wait(rng.choice([0, 0.02, 0.1]))

    def notice(self, text):
        if any(t in text for t in TROUBLE):
            self.wrong.append(text)

    def progress(self, n, maintenance=True):
        """Waits until n more jobs were completed and, unless that is held up, some were rescued and came again."""
        before = Counter(self.seen)

        def moved(what, by):
            return self.seen[what] >= before[what] + by

        wait_until(
            lambda: self.wrong
            or moved("completed", n) and (not maintenance or moved("rescued", n // 8) and moved("later attempts", n // 4)),
            60, f"the clients to work ({self.seen})",
        )
        assert self.wrong == []

    # -- the audit ---------------------------------------------------------------------------------------------------

    def check_notes(self, h, losable):
        """Compares the tables with the notes. losable: lives whose claims may be gone without having ended."""
        notes, wrong = self.notes, h.wrong
        at = {a.receipt: a for a in h.attempts() if a.receipt is not None}
        ids = defaultdict(set)
        for a in h.attempts():
            ids[a.number].add(a.job_id)
        for job_id, (number, *_) in [*h.deferred.items(), *h.letters.items()]:
            ids[number].add(job_id)
        for number, found in ids.items():
            if number not in notes.put and number not in notes.perhaps_put:
                wrong.append(f"job {number} is there and was never put in")
            if len(found) > 1:
                wrong.append(f"job {number} is there {len(found)} times")
        for number, job_id in notes.put.items():
            if ids.get(number) != {job_id}:
                wrong.append(f"job {number} was acknowledged as {job_id} and is {ids.get(number)}")

        by_call = defaultdict(set)
        for a in at.values():
            if a.worker is not None:
                by_call[a.worker].add((a.receipt, a.number, a.attempt))
        for name, taken in notes.taken.items():
            there = by_call.pop(name, set())
            if taken.rows is None:
                continue
            gone = set(taken.rows) - there
            if there - set(taken.rows):
                wrong.append(f"{name} took more than it was told: {there - set(taken.rows)}")
            for receipt, number, _ in gone:
                sure = [t for t in notes.told[receipt] if t.changed]
                if taken.life not in losable or sure:
                    wrong.append(f"the claim of job {number} by {name} is gone: {notes.told[receipt]}")
        if by_call:
            wrong.append(f"claims of nobody: {list(by_call)}")

        for receipt, told in notes.told.items():
            a = at.get(receipt)
            if a is None:
                continue  # its claim is gone, see above
            for t in told:
                if not t.changed:
                    continue
                said = "xk" if t.state == "cancelled" else SAID[t.state]
                if a.outcome is None or a.outcome not in said:
                    wrong.append(f"{t} of job {a.number}, and it is {a}")
        for a in at.values():
            asked = [t for t in notes.told.get(a.receipt, []) if t.changed is not False]
            by_lease = a.outcome in ("l", "d") or a.outcome == "k" and not asked
            if a.outcome == "k" and not a.cancel_requested:
                wrong.append(f"nobody asked to cancel job {a.number}: {a}")
            if by_lease:
                until = max(filter(None, [a.expires_at, notes.held_until.get(a.receipt)]))
                if a.closed_at < until:
                    wrong.append(f"the lease of job {a.number} ended before {until}: {a}")
            elif a.worker is None:
                if not any(t.changed is not False for t in notes.asked.get(a.job_id, [])):
                    wrong.append(f"nobody asked for job {a.number}: {a}")
            elif a.outcome not in (None, "k") and not any(a.outcome in MADE_BY[t.verb] for t in asked):
                wrong.append(f"nobody ended job {a.number} so: {a}, {asked}")

        for job_id, told in notes.asked.items():
            attempts = h.jobs.get(job_id, [])
            for verb, found in [
                ("cancel", sum(a.worker is None and a.outcome == "x" for a in attempts) + sum(a.cancel_requested for a in attempts)),
                ("retry", sum(a.brought_back for a in attempts)),
            ]:
                sure = sum(t.verb == verb and bool(t.changed) for t in told)
                perhaps = sum(t.verb == verb and t.changed is None for t in told)
                # A deferred job that is told to run now is no job that is brought back.
                if found > sure + perhaps or verb == "cancel" and found < sure:
                    wrong.append(f"job {job_id}: {verb} {sure} and perhaps {perhaps} times, {found} times in the tables")

    def check_counts(self, h):
        """awa.queue_stats and awa.jobs against the tables; nobody writes meanwhile."""
        db = self.db
        names = dict(db.sql("SELECT queue_id, name FROM awa_internal.queues"))
        columns = ["ready", "scheduled", "retryable", "running", "completed", "failed", "cancelled", "enqueued_total",
                   "completed_total", "failed_total", "retried_total", "rescued_total"]
        said = {row[0]: dict(zip(columns, row[1:])) for row in db.sql(
            f"SELECT queue, {', '.join(columns)} FROM awa.queue_stats")}
        queue_of = dict(db.sql("SELECT job_id, lane_id >> 8 FROM awa_internal.deferred"
                               " UNION ALL SELECT job_id, lane_id >> 8 FROM awa_internal.dead_letters"))
        true = {name: Counter() for name in said}
        states = Counter()
        for job_id, attempts in h.jobs.items():
            name = names[attempts[0].queue_id if attempts else queue_of[job_id]]
            c = true[name]
            c["enqueued_total"] += 1
            for a in attempts:
                c["ready"] += a.claim_no is None
                c["running"] += a.claim_no is not None and a.outcome is None
                if a.outcome:
                    for column, outcomes in [("completed", "c"), ("completed_total", "c"), ("cancelled", "xk"),
                                             ("failed_total", "fd"), ("retried_total", "tl"), ("rescued_total", "ld")]:
                        c[column] += a.outcome in outcomes
            c["failed"] += job_id in h.letters
            if job_id in h.deferred:
                c["retryable" if h.deferred[job_id][2] == "r" else "scheduled"] += 1
                states[name, "retryable" if h.deferred[job_id][2] == "r" else "scheduled"] += 1
            else:
                last = attempts[-1]
                states[name, "ready" if last.claim_no is None else "running" if last.outcome is None else
                       {"c": "completed", "x": "cancelled", "k": "cancelled"}.get(last.outcome, "failed")] += 1
        assert said == {name: {c: true[name][c] for c in columns} for name in said}
        assert Counter({(q, s): n for q, s, n in db.sql("SELECT queue, state, count(*) FROM awa.jobs GROUP BY 1, 2")}) == states
        stale = db.value("SELECT sum(stale_total)::int8 FROM awa.queue_stats")
        there = {a.receipt for a in h.attempts()}
        told = [t for receipt, of in self.notes.told.items() if receipt in there for t in of]
        sure = sum(t.state == "stale" for t in told)
        assert sure <= stale <= sure + sum(t.state is None for t in told)

    def check(self, losable=()):
        h = history.read(self.db)
        self.check_notes(h, losable)
        assert h.wrong == [], f"{len(h.wrong)} wrong, the first: " + "\n".join(map(str, h.wrong[:5]))
        self.check_counts(h)
        return h

    def drain(self, losable=()):
        """Finishes all there is and checks."""
        self.finish_all()
        h = self.check(losable)
        assert h.deferred == {}
        for job_id, attempts in h.jobs.items():
            assert attempts[-1].outcome in "cxkfd", f"job {job_id} has not ended: {attempts}"
        assert self.db.value("SELECT count(*) FROM awa_internal.rescue_list") == 0

    def finish_all(self):
        """Completes what is ready, an hour later and again, until nothing is left."""
        loud(self)
        cluster, s, hours = self.db.cluster, self.session(), 0
        rng = random.Random(1)

        def empty():
            nonlocal hours
            rows = self.claim(s, rng, 500, "100 h")
            self.finish(s, "complete", [receipt for receipt, _ in rows])
            if self.maintainers:
                self.maintain(s, rng)
            left = s.value("SELECT sum(ready + running + scheduled + retryable) FROM awa.queue_stats")
            if left and not rows:
                hours += 1
                assert hours < 300, f"{left} jobs can not be brought to an end"
                cluster.configure(**{"awa_queue.clock_offset": hours * HOUR})
                cluster.reload()
            return not left

        wait_until(empty, 60, "all jobs to be finished")
        quiet(self)
        assert self.wrong == []

    def end_emptied(self):
        """The end where the tables tell of little, since slots were emptied: by the notes and the counts that outlive slots."""
        self.finish_all()
        db, notes = self.db, self.notes
        letters = {n for (n,) in db.sql("SELECT args::int8 FROM awa.dead_letters")}
        delivered = set(self.number_of.values())
        cancelled = {job_id for job_id, told in notes.asked.items()
                     if any(t.verb == "cancel" and t.changed is not False for t in told)}
        ended = delivered | letters
        lost = [n for n, job_id in notes.put.items() if n not in ended and job_id not in cancelled]
        assert lost == [], f"{len(lost)} acknowledged jobs are lost"
        assert delivered - set(notes.put) - notes.perhaps_put == set()
        put, completed = db.row("SELECT sum(enqueued_total)::int8, sum(completed_total)::int8 FROM awa.queue_stats")
        unknown = {self.number_of[r] for r, told in notes.told.items() for t in told if t.verb == "complete" and t.state is None}
        assert len(self.done) <= completed <= len(self.done) + len(unknown - set(self.done))
        assert len(notes.put) <= put <= len(notes.put) + len(notes.perhaps_put)
        by_worker = {self.number_of[r] for r, told in notes.told.items() for t in told
                     if t.verb == "cancel_claimed" and t.changed is not False}
        assert len(letters) == db.value("SELECT sum(failed)::int8 FROM awa.queue_stats")
        assert 0 <= put - completed - len(letters) <= len(cancelled) + len(by_worker)
        assert db.value("SELECT count(*) FROM awa_internal.deferred") == 0
        db.sql("SELECT awa_internal.seal()")
        for slot in range(db.value("SELECT max(slot) + 1 FROM awa_internal.ring")):
            db.sql("SELECT awa_internal.close(%s)", [slot])
            said = db.value('SELECT awa_internal."empty"(%s, true)', [slot])
            assert said in ("emptied", "current", "not closed"), said
        for table in ("ready", "claims", "closures", "attempts", "slot_sums"):
            assert db.value(f"SELECT count(*) FROM awa_internal.{table}") == 0, table
        assert db.row("SELECT sum(enqueued_total)::int8, sum(completed_total)::int8 FROM awa.queue_stats") == (put, completed)


# ------------------------------------------------------------------------------------------------------ the server's side

SETTINGS = {
    # Long enough that asynchronous claims are really lost with the server.
    "wal_writer_delay": "5s",
    # Naps where a crash is worst: between the two halves of a promotion, before the commit of a rescue.
    "awa_queue.sleep_at": "promote.taken:20000:3,promote.folded:20000:3,rescue.closed:20000:3,close.locked:2000:20",
    "autovacuum": "off",
    "awa_queue.snapshot_grace": "0",  # some client always has a snapshot
    "awa_queue.slot_age": "1",
}
POINTS = ["promote.taken", "promote.folded", "rescue.closed"]


@pytest.fixture(params=["worker", "maintain"])
def life(request, make_cluster):
    """Clients of a server with a background worker, or of one whose maintenance is done by CALL awa.maintain()."""
    preload = request.param == "worker"
    server = make_cluster(flavour="injection", preload=preload, settings=SETTINGS).start()
    db = server.database()
    for queue in QUEUES:  # nothing is emptied meanwhile, so that the tables tell of all
        db.sql("SELECT awa.create_queue(%s, '{\"retention\": \"90 d\", \"failed_retention\": \"90 d\"}')", [queue])
    life = Life(db, maintainers=0 if preload else 3)
    life.losable = set()
    life.careful = False
    loud(life)
    return life


def worker(db):
    """The pid of the database's worker, or None."""
    rows = db.sql("SELECT pid FROM pg_stat_activity WHERE backend_type = 'awa_queue worker' AND datname = current_database()")
    return rows[0][0] if rows else None


def quiet(life):
    """No maintenance any more."""
    if not life.maintainers:
        set_all(life, "awa_queue.worker", "off")
        wait_until(lambda: worker(life.db) is None, 20, "the worker to leave")


def loud(life):
    if not life.maintainers:
        set_all(life, "awa_queue.worker", "on")


def set_all(life, name, value):
    """Changes a setting of all sessions, the worker's too."""
    life.db.cluster.configure(**{name: value})
    life.db.cluster.reload()


def maintaining(life):
    """The pids of all that do maintenance just now."""
    if not life.maintainers:
        pid = worker(life.db)
        return [pid] if pid else []
    return [pid for (pid,) in life.db.sql(
        "SELECT pid FROM pg_stat_activity WHERE query = 'CALL awa.maintain()' AND state = 'active' AND pid <> pg_backend_pid()")]


def end_server(life, how, victim=None):
    """Ends the server or a process of it and waits until it is back; the clients go on only where it came back by itself."""
    server, db = life.db.cluster, life.db
    # Only a postmaster that knows of a crash keeps claims from being lost in the next.
    if not life.maintainers and not life.careful:
        life.losable.add(life.session().life)
    start = server.log_position()
    db.connection.close()
    if how == "one killed":
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: "database system is ready to accept connections" in server.log(start), 60, "the restart")
        wait_until(lambda: can_connect(db), 30, "connections")
        life.careful = True
        return
    server.kill9() if how == "all killed" else server.stop("immediate")
    life.careful = False
    life.stop()
    server.start()


def check_log(life, pg):
    log = life.db.cluster.log()
    assert "PANIC" not in log
    assert [line for line in log.splitlines() if any(t in line for t in TROUBLE)] == []
    if pg == 15:
        amcheck(life.db)


# ---------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.crash
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["all killed", "immediate"])
def test_the_server_ends_at_random_moments(life, pg, how):
    for _ in range(3):
        life.start()
        life.progress(80)
        end_server(life, how)
        assert life.deaths > 0
        quiet(life)
        life.check(life.losable)
        loud(life)
    life.drain(life.losable)
    check_log(life, pg)


@pytest.mark.crash
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["all killed", "immediate"])
def test_the_server_ends_while_slots_are_emptied(life, pg, how):
    """Jobs' homes come and go: what was put off in a slot comes back in another, and its old one is emptied."""
    emptied = "SELECT coalesce(sum(n), 0) FROM awa_internal.queue_totals WHERE outcome = 'e'"  # entries of emptied slots
    for queue in QUEUES:
        life.db.sql("SELECT awa.alter_queue(%s, '{\"retention\": \"0 s\"}')", [queue])
    life.emptying = True
    life.leases = ["200 ms", "500 ms", "500 ms", "1 s"]  # nothing pins a slot for long
    for _ in range(3):
        life.start()
        life.progress(60)
        now = life.db.value(emptied)
        wait_until(lambda: life.wrong or life.db.value(emptied) > now, 60, "slots to be emptied")
        end_server(life, how)
        loud(life)
    life.end_emptied()
    check_log(life, pg)


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_one_process_is_killed_at_random_moments(life, pg):
    """SIGKILL of a maintainer, then of any: the postmaster ends the others and makes shared memory anew."""
    life.start()
    for i in range(3):
        life.progress(60)
        everyone = [pid for (pid,) in life.db.sql(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()")]
        end_server(life, "one killed", random.choice(i < 2 and maintaining(life) or everyone))
    life.progress(60)
    life.stop()
    quiet(life)
    life.check(life.losable)
    life.drain(life.losable)
    check_log(life, pg)


@pytest.mark.timeout(300)
def test_maintainers_and_clients_are_terminated_at_random_moments(life, pg):
    """No crash: nothing that was acknowledged may be gone."""
    life.start()
    ended = 0
    for i in range(18):
        life.progress(8)
        victims = maintaining(life) if i % 3 else [pid for (pid,) in life.db.sql(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND backend_type = 'client backend' ORDER BY random() LIMIT 2")]
        for pid in victims:
            ended += life.db.value("SELECT pg_terminate_backend(%s)", [pid])
    assert ended > 9
    life.stop()
    quiet(life)
    life.check()
    life.drain()
    check_log(life, pg)


@pytest.mark.crash
@pytest.mark.timeout(300)
@pytest.mark.parametrize("point", POINTS)
def test_ended_in_the_middle_of(life, pg, point):
    """A maintainer is held between the two halves of what it does, and it, or all, are ended there."""
    db = life.db
    life.start()
    for how in ("terminated", "one killed", "all killed", "immediate"):
        life.progress(30)
        with db.connect() as gate:
            gate.execute("SELECT pg_advisory_lock(4242)")
            set_all(life, "awa_queue.pause_at", point)
            held = wait_until(lambda: held_at_gate(db), 30, f"a maintainer to come to {point}")
            assert set(held) <= set(maintaining(life)) and uncommitted(db, held[0])
            # What is held counts as open, too, and may be all that was: new jobs go in all the same.
            life.most_open *= 10
            life.progress(20, maintenance=False)  # the others go on
            life.most_open /= 10
            db.cluster.configure(**{"awa_queue.pause_at": None})
            if how == "terminated":
                db.sql("SELECT pg_terminate_backend(%s)", [held[0]])
                wait_until(lambda: held[0] not in held_at_gate(db), 20, "it to be gone")
                db.cluster.reload()
            else:
                end_server(life, how, held[0])
        if how in ("terminated", "one killed"):
            life.stop()
        quiet(life)
        life.check(life.losable)
        loud(life)
        life.start()
    life.progress(30)
    life.stop()
    life.drain(life.losable)
    check_log(life, pg)


def held_at_gate(db):
    return [pid for (pid,) in db.sql(
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND objid = 4242 AND objsubid = 1 AND NOT granted"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())")]


def uncommitted(db, pid):
    """Whether the backend has written something."""
    return db.value("SELECT backend_xid IS NOT NULL FROM pg_stat_activity WHERE pid = %s", [pid])


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_an_acknowledged_claim_that_a_crash_lost_is_claimed_again(make_cluster, pg):
    """The one thing that may be gone; its job has the same attempt again, and a late report of the first is stale."""
    server = make_cluster(flavour="injection", preload=True, settings={**SETTINGS, "awa_queue.sleep_at": ""}).start()
    db = server.database()
    db.sql("SELECT awa.enqueue_batch('a', ARRAY(SELECT to_jsonb(n) FROM generate_series(0, 5) n))")
    worker = db.session()
    # The first call of a session may write more than its claim.
    assert worker.sql("SELECT awa.complete(ARRAY(SELECT receipt FROM awa.claim('a')))") != []
    lost = worker.sql("SELECT receipt, args, attempt FROM awa.claim('a', 5)")
    assert worker.value("SELECT pg_current_wal_flush_lsn() < pg_current_wal_insert_lsn()")
    server.kill9()
    server.start()
    h = history.read(db)
    assert h.wrong == [] and [a.number for a in h.attempts() if a.claim_no is None] == [1, 2, 3, 4, 5]
    again = db.sql("SELECT receipt, args, attempt FROM awa.claim('a', 5)")
    assert [row[1:] for row in again] == [row[1:] for row in lost] == [(n, 1) for n in range(1, 6)]
    assert {r for r, *_ in lost}.isdisjoint(r for r, *_ in again)
    assert db.sql("SELECT state, changed FROM awa.complete(%s::int8[])", [[r for r, *_ in lost]]) == [("stale", False)] * 5
    assert db.sql("SELECT state, changed FROM awa.complete(%s::int8[])", [[r for r, *_ in again]]) == [("completed", True)] * 5
    h = history.read(db)
    assert h.wrong == [] and [a.outcome for a in h.attempts()] == ["c"] * 6
