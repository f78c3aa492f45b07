"""Random steps of several sessions, checked against a model after each of them.

One driver makes one step at a time, so the model knows exactly what each call has to give: a claim returns as many jobs as are
free for its session, none that is not, and from a strict lane the lowest ones. What can wait for another session (finishing an
attempt that an open transaction has finished) is not done. In the end the old sessions drain the queues with their old caches,
and every slot must let itself be emptied.

    python -m audit.fuzz [--preload] [--steps N] SEED...      SEED may be a range: 1-1000
"""

import argparse
import os
import random
import sys
import time
import traceback

SESSIONS = 8
SIZES = (1, 1, 2, 5, 20)
WANTS = (1, 1, 3, 10, 40)


class Fault(AssertionError):
    """The queue did something that the model does not allow."""


class Entry:
    """One appearance of a job in a lane. creator and the owners of claim and end are None once they are committed."""

    __slots__ = ("job", "queue", "order", "creator", "claim", "end")

    def __init__(self, job, queue, order, creator):
        self.job = job
        self.queue = queue
        self.order = order
        self.creator = creator
        self.claim = None  # [session or None, receipt]
        self.end = None  # [session or None, verb]


class Actor:
    """A session and its open transaction: a stack of savepoints, each with what a rollback to it takes back."""

    def __init__(self, connection):
        self.connection = connection
        self.frames = []
        self.settle = []

    def sql(self, statement, parameters=None):
        cursor = self.connection.execute(statement, parameters)
        return cursor.fetchall() if cursor.description else []

    @property
    def in_transaction(self):
        return bool(self.frames)

    def did(self, undo, settle):
        """Notes a change of the model: how it is taken back, and how it becomes everybody's."""
        if self.frames:
            self.frames[-1].append((undo, settle))
        else:
            settle()

    def begin(self):
        self.sql("BEGIN")
        self.frames = [[]]

    def savepoint(self):
        self.sql(f"SAVEPOINT s{len(self.frames)}")
        self.frames.append([])

    def release(self, i):
        self.sql(f"RELEASE s{i}")
        self.frames[i - 1 :] = [[change for frame in self.frames[i - 1 :] for change in frame]]

    def rollback_to(self, i):
        self.sql(f"ROLLBACK TO s{i}")
        self._undo(i)
        self.frames[i:] = [[]]

    def _undo(self, i):
        for frame in reversed(self.frames[i:]):
            for undo, _ in reversed(frame):
                undo()

    def rollback(self):
        self.sql("ROLLBACK")
        self._undo(0)
        self.frames = []

    def commit(self, prepare=None, by=None):
        """COMMIT, or PREPARE and COMMIT PREPARED by somebody else."""
        if prepare:
            self.sql(f"PREPARE TRANSACTION '{prepare}'")
            by.sql(f"COMMIT PREPARED '{prepare}'")
        else:
            self.sql("COMMIT")
        for frame in self.frames:
            for _, settle in frame:
                settle()
        self.frames = []


class Fuzz:
    def __init__(self, connect, seed, queues, steps):
        self.random = random.Random(seed)
        self.connect = connect
        self.queues = queues  # {name: strict}
        self.steps = steps
        self.keeper = Actor(connect())
        self.actors = [Actor(connect()) for _ in range(SESSIONS)]
        self.entries = {}  # job id -> entries, the last one the live one
        self.receipts = {}  # receipt -> entry
        self.order = 0
        self.counts = {"enqueued": 0, "claimed": 0, "ended": 0, "emptied": 0, "closed": 0}
        self.prepared = 0

    # -- the model -------------------------------------------------------------------------------------------------

    def add(self, actor, queue, jobs):
        for job in jobs:
            entry = Entry(job, queue, self.order, actor)
            self.order += 1
            entries = self.entries.setdefault(job, [])
            entries.append(entry)

            def undo(entries=entries, entry=entry):
                entries.remove(entry)

            def settle(entry=entry):
                entry.creator = None

            actor.did(undo, settle)

    def lane(self, queue):
        found = [e for entries in self.entries.values() for e in entries if e.queue == queue]
        return sorted(found, key=lambda e: e.order)

    def free(self, actor, queue):
        """What a claim of this session can get, in lane order."""
        free = []
        for e in self.lane(queue):
            if e.creator not in (None, actor):
                if self.queues[queue]:
                    break  # a strict lane stops at a segment in progress
                continue
            if e.claim is None:
                free.append(e)
        return free

    # -- steps -----------------------------------------------------------------------------------------------------

    def enqueue(self, actor, queue):
        n = self.random.choice(SIZES)
        if n == 1 and self.random.random() < 0.5:
            jobs = [r[0] for r in actor.sql("SELECT awa.enqueue(%s)", [queue])]
        else:
            statement = "SELECT unnest(awa.enqueue_batch(%s, array_fill('{}'::jsonb, ARRAY[%s::int])))"
            jobs = [r[0] for r in actor.sql(statement, [queue, n])]
        if len(set(jobs)) != n or any(self.entries.get(j) for j in jobs):
            raise Fault(f"ids given out twice: {jobs}")
        self.counts["enqueued"] += n
        self.add(actor, queue, jobs)

    def claim(self, actor, queue, want):
        free = self.free(actor, queue)
        rows = actor.sql("SELECT receipt, job_id FROM awa.claim(%s, %s)", [queue, want])
        self.taken(actor, queue, rows, free, want)
        return len(rows)

    def taken(self, actor, queue, rows, free, want):
        possible = {e.job: e for e in free}
        for _, job in rows:
            if job not in possible:
                raise Fault(f"{queue}: got job {job}: {self.tell(job)}")
        if len({job for _, job in rows}) != len(rows):
            raise Fault(f"{queue}: one job twice in a claim: {rows}")
        if len(rows) != min(want, len(free)):
            missing = [e.job for e in free if e.job not in {job for _, job in rows}]
            raise Fault(f"{queue}: claim of {want} got {len(rows)} of {len(free)} free jobs, without {missing[:20]}")
        if self.queues[queue]:
            lowest = [e.job for e in free[:want]]
            if [job for _, job in rows] != lowest:
                raise Fault(f"{queue}: not in order: {[job for _, job in rows]}, the lowest are {lowest}")
        for receipt, job in rows:
            entry = possible[job]
            entry.claim = [actor, receipt]
            if receipt in self.receipts:
                raise Fault(f"receipt {receipt} given out twice")
            self.receipts[receipt] = entry

            def undo(entry=entry):
                entry.claim = None

            def settle(entry=entry):
                entry.claim[0] = None

            actor.did(undo, settle)
        self.counts["claimed"] += len(rows)

    def tell(self, job):
        told = []
        for e in self.entries.get(job, []):
            parts = [f"order {e.order}", "committed" if e.creator is None else "its producer is open"]
            if e.claim:
                parts.append(f"claimed by {'a committed' if e.claim[0] is None else 'an open'} transaction")
            told.append(", ".join(parts))
        return "; ".join(told) or "never enqueued, or rolled back"

    def expected(self, actor, receipt, verb):
        """(state, changed) of a finish, or None where it might wait."""
        entry = self.receipts[receipt]
        done = {"complete": "completed", "release": "ready", "cancel_claimed": "cancelled"}
        if entry.claim is None or entry.claim[1] != receipt:
            return "stale", False  # that claim was rolled back
        if entry.claim[0] not in (None, actor):
            return "unknown", False
        if entry.end is None:
            return done[verb], True
        if entry.end[0] not in (None, actor):
            return None
        return (done[verb] if entry.end[1] == verb else "stale"), False

    def finish(self, actor, receipts, verb):
        pairs = [(r, self.expected(actor, r, verb)) for r in dict.fromkeys(receipts)]
        pairs = [(r, e) for r, e in pairs if e]
        rows = actor.sql(f"SELECT receipt, state, changed, job_id FROM awa.{verb}(%s)", [[r for r, _ in pairs]])
        if [r[0] for r in rows] != [r for r, _ in pairs]:
            raise Fault(f"{verb}: receipts {[r for r, _ in pairs]}, rows {rows}")
        moved = []
        for (receipt, (state, changed)), row in zip(pairs, rows):
            entry = self.receipts[receipt]
            # What has left with its slot is only known to be over.
            gone = not changed and row[1:3] == ("stale", False)
            if row[1:3] != (state, changed) and not gone:
                raise Fault(f"{verb} of {receipt}: {row[1:3]}, expected {(state, changed)}; {self.tell(entry.job)}")
            if not changed:
                continue
            if row[3] != entry.job:
                raise Fault(f"{verb} of {receipt} ended job {row[3]}, it is {entry.job}'s")
            entry.end = [actor, verb]

            def undo(entry=entry):
                entry.end = None

            def settle(entry=entry):
                entry.end[0] = None

            actor.did(undo, settle)
            self.counts["ended"] += 1
            if verb == "release":
                moved.append(entry)
        for queue in self.queues:
            self.add(actor, queue, [e.job for e in moved if e.queue == queue])

    def some_receipts(self, actor):
        held = [r for r, e in self.receipts.items() if e.claim and e.claim[1] == r and not e.end]
        other = [r for r in self.receipts if r not in set(held)]
        chosen = self.random.sample(held, min(len(held), self.random.choice((1, 5, 50))))
        chosen += self.random.sample(other, min(len(other), self.random.choice((0, 0, 1, 3))))
        self.random.shuffle(chosen)
        return chosen

    def end_some(self, actor):
        receipts = self.some_receipts(actor)
        if receipts:
            x = self.random.random()
            self.finish(actor, receipts, "complete" if x < 0.8 else "release" if x < 0.92 else "cancel_claimed")

    def complete_and_claim(self, actor, queue):
        receipts = [r for r in self.some_receipts(actor) if self.expected(actor, r, "complete") == ("completed", True)]
        want = self.random.choice(WANTS)
        for r in receipts:
            entry = self.receipts[r]
            entry.end = [actor, "complete"]

            def undo(entry=entry):
                entry.end = None

            def settle(entry=entry):
                entry.end[0] = None

            actor.did(undo, settle)
        free = self.free(actor, queue)
        rows = actor.sql(
            "SELECT receipt, job_id FROM awa.complete_and_claim(%s, %s, %s, strict => true)", [receipts, [queue], want]
        )
        self.taken(actor, queue, rows, free, want)
        self.counts["ended"] += len(receipts)

    def rotate(self):
        if self.random.random() < 0.03:
            self.keeper.sql("SELECT awa_internal.seal()")
        if self.random.random() < 0.06:
            slots = list(range(16))
            if self.random.random() < 0.7:
                for slot in slots:
                    said = self.keeper.sql("SELECT awa_internal.close(%s)", [slot])[0][0]
                    self.counts["closed"] += said == "closed"
            for slot in slots:
                said = self.keeper.sql('SELECT awa_internal."empty"(%s, true)', [slot])[0][0]
                self.counts["emptied"] += said == "emptied"

    def step(self):
        r = self.random
        actor, queue, x = r.choice(self.actors), r.choice(list(self.queues)), r.random()
        if not actor.in_transaction:
            if x < 0.45:
                actor.begin()
            elif x < 0.55:
                self.enqueue(actor, queue)
            elif x < 0.77:
                self.claim(actor, queue, r.choice(WANTS))
            elif x < 0.82:
                self.complete_and_claim(actor, queue)
            elif x < 0.98:
                self.end_some(actor)
            else:
                actor.sql("DISCARD ALL")
                actor.sql("SET statement_timeout = '60s'")
        elif x < 0.34:
            self.enqueue(actor, queue)
        elif x < 0.54:
            self.claim(actor, queue, r.choice(WANTS))
        elif x < 0.57:
            self.complete_and_claim(actor, queue)
        elif x < 0.64:
            self.end_some(actor)
        elif x < 0.73:
            actor.savepoint()
        elif x < 0.81 and len(actor.frames) > 1:
            actor.rollback_to(r.randrange(1, len(actor.frames)))
        elif x < 0.84 and len(actor.frames) > 1:
            actor.release(r.randrange(1, len(actor.frames)))
        elif x < 0.91:
            actor.rollback()
        elif x < 0.93:
            self.prepared += 1
            actor.commit(prepare=f"p{os.getpid()}_{self.prepared}", by=self.keeper)
        else:
            actor.commit()
        self.rotate()

    def drain(self):
        for actor in self.actors:
            if actor.in_transaction:
                actor.commit()
        for _ in range(2):
            for actor in self.random.sample(self.actors, len(self.actors)):
                for queue in self.queues:
                    while self.claim(actor, queue, 30):
                        pass
        open_jobs = [e for entries in self.entries.values() for e in entries if e.claim is None]
        if open_jobs:
            raise Fault(f"never claimed: {[e.job for e in open_jobs]}")
        self.finish(self.keeper, [r for r, e in self.receipts.items() if e.claim and e.claim[1] == r], "complete")
        left = [e.job for entries in self.entries.values() for e in entries if e.end is None]
        if left:
            raise Fault(f"never finished: {left}")
        self.keeper.sql("SELECT awa_internal.seal()")
        for slot in range(16):
            self.keeper.sql("SELECT awa_internal.close(%s)", [slot])
            said = self.keeper.sql('SELECT awa_internal."empty"(%s, true)', [slot])[0][0]
            if said not in ("emptied", "current", "not closed"):
                raise Fault(f"slot {slot} can not be emptied although every job has ended: {said}")
        states = self.keeper.sql("SELECT slot FROM awa_internal.segments UNION ALL SELECT slot FROM awa_internal.closures")
        current = self.keeper.sql(
            "SELECT coalesce((SELECT slot FROM awa_internal.ring WHERE event = 'o' ORDER BY generation DESC LIMIT 1), 0)"
        )[0][0]
        if any(slot != current for (slot,) in states):
            raise Fault(f"rows are left in slots {sorted(set(states))}, current is {current}")

    def run(self):
        at = "the start"
        try:
            for i in range(self.steps):
                at = f"step {i}"
                self.step()
            at = "the drain"
            self.drain()
        except Fault as fault:
            raise Fault(f"at {at}: {fault}") from None
        except Exception as error:
            raise Fault(f"at {at}: {type(error).__name__}: {error}") from error
        finally:
            for actor in [self.keeper, *self.actors]:
                actor.connection.close()
        return self.counts


def play(db, seed, steps=400):
    """One seed in a database. Queues of its own, so that many seeds can follow one another, with the slots of the one before."""
    queues = {f"relaxed_{seed}": False, f"strict_{seed}": True}
    for name, strict in queues.items():
        settings = '{"ordering": "strict"}' if strict else "{}"
        db.sql("SELECT awa.create_queue(%s, %s)", [name, settings])

    def connect():
        # DISCARD ALL takes prepared statements away, which psycopg would not notice.
        settings = {"statement_timeout": "60s", "synchronous_commit": "off"}
        return db.connect(settings=settings, prepare_threshold=None)

    try:
        return Fuzz(connect, seed, queues, steps).run()
    except Fault as fault:
        raise Fault(f"seed {seed}, {fault}") from fault.__cause__


def seeds(words):
    for word in words:
        first, _, last = word.partition("-")
        yield from range(int(first), int(last or first) + 1)


def main(arguments):
    from .servers import server

    parser = argparse.ArgumentParser(prog="python -m audit.fuzz")
    parser.add_argument("--preload", action="store_true")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lanes", type=int, help="lanes in shared memory")
    parser.add_argument("seeds", nargs="+")
    options = parser.parse_args(arguments)
    settings = {} if options.lanes is None else {"awa_queue.shared_lanes": str(options.lanes)}
    start, bad, total = time.monotonic(), [], {}
    servers = server(flavour="injection", preload=options.preload, settings=settings)
    cluster = next(servers)
    for i, seed in enumerate(seeds(options.seeds)):
        if i % 50 == 0:
            db = cluster.database()
        try:
            for key, value in play(db, seed, options.steps).items():
                total[key] = total.get(key, 0) + value
        except Fault as fault:
            bad.append(seed)
            print(fault, flush=True)
            if fault.__cause__ is not None:
                traceback.print_exception(fault.__cause__)
            db.drop()  # what it left open must not spoil the next one
            db = cluster.database()
    print(f"{i + 1} seeds of {options.steps} steps, {time.monotonic() - start:.0f} s, {total}, bad: {bad}", flush=True)
    servers.close()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
