"""Random steps of several sessions whose calls are held half-way, at random pause points, while the others go on.

What the fuzz cannot reach are calls that overlap. Here a driver starts each call with a pause point of its own, leaves it there
for a while, lets it run on to the next one or to its end, and meanwhile does the same with other sessions. Which jobs a claim gets
then depends on what has overlapped, so the account is made in the end: every committed job claimed exactly once, nothing else,
and each old session, with its old caches, sees exactly the jobs that are left.

    python -m audit.interleave [--preload] [--steps N] SEED...
"""

import argparse
import random
import sys
import threading
import time

import psycopg

from .fuzz import Fault, seeds

POINTS = {
    "enqueue": ("enqueue.slot_chosen", "enqueue.rows_written", "enqueue.reserved"),
    "claim": ("claim.before_lock", "claim.between_slots", "claim.between_slots", "claim.between_entries",
              "claim.segments_read"),
    "complete": ("close.before_lock", "close.locked"),
    "keep": ("maintain.emptied",),
}


class Held:
    """One session, its pause key, and who holds the key."""

    def __init__(self, driver, number):
        self.driver = driver
        self.number = number
        settings = {"statement_timeout": "60s", "synchronous_commit": "off", "awa_queue.pause_key": str(number)}
        self.connection = driver.db.connect(settings=settings)
        self.pid = self.connection.info.backend_pid
        self.holders = [driver.db.connect(), driver.db.connect()]
        self.locked = False
        self.thread = None
        self.answer = None
        self.finish = None
        self.changes = None  # what the open transaction did; None outside of one

    # -- calls -----------------------------------------------------------------------------------------------------

    def call(self, kind, statement, parameters, finish, pause):
        """Starts a call, held at a point of its kind or not, and waits until it has ended or waits for something."""
        points = self.driver.random.choice(POINTS[kind]) if pause else ""
        self.connection.execute("SELECT set_config('awa_queue.pause_at', %s, false)", [points])
        if pause and not self.locked:
            self.holders[0].execute("SELECT pg_advisory_lock(%s)", [self.number])
            self.locked = True
        self.finish = finish
        self.answer = None

        def run():
            try:
                self.answer = self.connection.execute(statement, parameters).fetchall()
            except psycopg.Error as error:
                self.answer = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        self.driver.settle(self)

    def collect(self):
        """Takes the answer of a call that has ended."""
        self.thread.join()
        self.thread = None
        if isinstance(self.answer, psycopg.Error):
            raise Fault(f"session {self.number}: {type(self.answer).__name__}: {self.answer}")
        self.finish(self.answer)

    def step(self):
        """Lets the call run to its next pause point: the next holder of the key stands right behind it in the queue."""
        first, second = self.holders
        taking = threading.Thread(target=lambda: second.execute("SELECT pg_advisory_lock(%s)", [self.number]))
        taking.start()
        while not self.driver.waits(second.info.backend_pid) and taking.is_alive():
            time.sleep(0.001)
        first.execute("SELECT pg_advisory_unlock(%s)", [self.number])
        taking.join()
        self.holders = [second, first]

    def open(self):
        if self.locked:
            self.holders[0].execute("SELECT pg_advisory_unlock(%s)", [self.number])
            self.locked = False

    # -- transactions ----------------------------------------------------------------------------------------------

    def did(self, change):
        if self.changes is None:
            change()
        else:
            self.changes.append(change)

    def end(self, verb):
        self.connection.execute(verb)
        changes, self.changes = self.changes, None
        for change in changes if verb == "COMMIT" else []:
            change()
        if verb == "ROLLBACK":
            for entry in self.driver.ending.values():
                entry.discard(self)

    def close(self):
        for connection in (self.connection, *self.holders):
            connection.close()


class Interleave:
    def __init__(self, db, seed, steps, queues):
        self.db, self.steps, self.queues = db, steps, queues
        self.random = random.Random(seed)
        self.put = set()
        self.got = {}  # job -> receipts of committed claims
        self.ended = set()
        self.ending = {}  # receipt -> sessions that have it in hand
        self.held = 0
        self.watcher = db.connect()
        base = seed % 100_000 * 100 + 1
        self.actors = [Held(self, base + i) for i in range(7)]
        self.keeper = Held(self, base + 7)

    def waits(self, pid):
        return self.watcher.execute(
            "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = %s", [pid]
        ).fetchone()[0]

    def settle(self, actor):
        """Returns once the session's call has ended or waits for a lock."""
        while actor.thread.is_alive():
            if self.waits(actor.pid):
                self.held += 1
                return
            time.sleep(0.0005)
        actor.collect()

    # -- steps -----------------------------------------------------------------------------------------------------

    def enqueue(self, actor):
        n = self.random.choice((1, 1, 2, 5))

        def finish(rows):
            actor.did(lambda: self.put.update(rows[0][0]))

        statement = "SELECT awa.enqueue_batch(%s, array_fill('{}'::jsonb, ARRAY[%s::int]))"
        actor.call("enqueue", statement, [self.random.choice(self.queues), n], finish, self.random.random() < 0.6)

    def claim(self, actor):
        def finish(rows):
            def change():
                for receipt, job in rows:
                    self.got.setdefault(job, []).append(receipt)

            actor.did(change)

        statement = "SELECT receipt, job_id FROM awa.claim(%s, %s)"
        parameters = [self.random.choice(self.queues), self.random.choice((1, 3, 10, 40))]
        actor.call("claim", statement, parameters, finish, self.random.random() < 0.6)

    def complete(self, actor):
        # Not what another call or open transaction has in hand: that would be waited for.
        free = [r for rs in self.got.values() for r in rs if r not in self.ended and not self.ending.get(r)]
        receipts = self.random.sample(free, min(len(free), self.random.choice((1, 5, 30))))
        for r in receipts:
            self.ending.setdefault(r, set()).add(actor)

        def finish(rows):
            if any(row != ("completed", True) for row in rows):
                raise Fault(f"completed: {rows}")
            actor.did(lambda: self.ended.update(receipts))

        statement = "SELECT state, changed FROM awa.complete(%s)"
        actor.call("complete", statement, [receipts], finish, self.random.random() < 0.4)

    def keep(self):
        r = self.random
        choice = r.random()
        if choice < 0.2:
            call = ("SELECT awa_internal.seal()", None)
        elif choice < 0.6:
            call = ("SELECT awa_internal.close(%s)", [r.randrange(16)])
        else:
            call = ('SELECT awa_internal."empty"(%s, true)', [r.randrange(16)])
        self.keeper.call("keep", *call, lambda rows: None, r.random() < 0.3)

    def step(self):
        r = self.random
        if r.random() < 0.25 and self.keeper.thread is None:
            self.keep()
        actor = r.choice([*self.actors, self.keeper])
        if actor.thread is not None:
            if actor.thread.is_alive():
                x = r.random()
                if x < 0.35:
                    return
                if actor.locked:
                    actor.step() if x < 0.7 else actor.open()
            self.settle(actor)
            return
        if actor is self.keeper:
            return
        x = r.random()
        if actor.changes is None and x < 0.35:
            actor.connection.execute("BEGIN")
            actor.changes = []
        elif actor.changes is not None and x < 0.4:
            actor.end(r.choice(("COMMIT", "COMMIT", "ROLLBACK")))
        elif x < 0.65:
            self.enqueue(actor)
        elif x < 0.9:
            self.claim(actor)
        else:
            self.complete(actor)

    def let_go(self):
        """All calls run to their ends."""
        everybody = [*self.actors, self.keeper]
        for actor in everybody:
            actor.open()
        for actor in everybody:
            if actor.thread is not None:
                actor.collect()
        for actor in self.actors:
            if actor.changes is not None:
                actor.end(self.random.choice(("COMMIT", "ROLLBACK")))

    def account(self):
        twice = {job: rs for job, rs in self.got.items() if len(rs) > 1}
        if twice:
            raise Fault(f"claimed twice: {twice}")
        ghosts = set(self.got) - self.put
        if ghosts:
            raise Fault(f"claimed, but never committed: {sorted(ghosts)}")
        left = self.put - set(self.got)
        for actor in self.actors:
            actor.connection.execute("SET awa_queue.pause_at = ''")
            seen = set()
            actor.connection.execute("BEGIN")
            for queue in self.queues:
                for _ in range(2):
                    rows = actor.connection.execute("SELECT job_id FROM awa.claim(%s, 100000)", [queue]).fetchall()
                    seen |= {job for (job,) in rows}
            actor.connection.execute("ROLLBACK")
            if seen != left:
                raise Fault(
                    f"session {actor.number} sees {len(seen & left)} of {len(left)} jobs that are left"
                    f" (not {sorted(left - seen)[:10]}), and {sorted(seen - left)[:10]}"
                )
        doubled = self.db.value(
            "SELECT count(*) FROM (SELECT lane_id, first_seq + i FROM awa_internal.segments, generate_series(0, n - 1) i"
            " GROUP BY 1, 2 HAVING count(*) > 1) x"
        )
        if doubled:
            raise Fault(f"{doubled} seqs given out twice")

    def run(self):
        at = "the start"
        try:
            for i in range(self.steps):
                at = f"step {i}"
                self.step()
            at = "the end"
            self.let_go()
            self.account()
        except Fault as fault:
            raise Fault(f"at {at}: {fault}") from fault.__cause__
        finally:
            for actor in [*self.actors, self.keeper]:
                actor.close()
            self.watcher.close()
        return {"put": len(self.put), "got": len(self.got), "held": self.held}


def play(db, seed, steps=200):
    queues = [f"held_relaxed_{seed}", f"held_strict_{seed}"]
    db.sql("SELECT awa.create_queue(%s, '{\"priority\": 1}')", [queues[0]])
    db.sql("SELECT awa.create_queue(%s, '{\"ordering\": \"strict\"}')", [queues[1]])
    try:
        return Interleave(db, seed, steps, queues).run()
    except Fault as fault:
        raise Fault(f"seed {seed}, {fault}") from fault.__cause__


def main(arguments):
    from .servers import server

    parser = argparse.ArgumentParser(prog="python -m audit.interleave")
    parser.add_argument("--preload", action="store_true")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--mutant")
    parser.add_argument("seeds", nargs="+")
    options = parser.parse_args(arguments)
    servers = server(flavour="injection", preload=options.preload)
    cluster = next(servers)
    start, bad, total, n = time.monotonic(), [], {}, 0
    for seed in seeds(options.seeds):
        db = cluster.database()
        if options.mutant:
            db.sql(f'ALTER DATABASE "{db.name}" SET awa_queue.mutant = \'{options.mutant}\'')
        n += 1
        try:
            for key, value in play(db, seed, options.steps).items():
                total[key] = total.get(key, 0) + value
        except Fault as fault:
            bad.append(seed)
            print(fault, flush=True)
        db.drop()
    print(f"{n} seeds of {options.steps} steps, {time.monotonic() - start:.0f} s, {total}, bad: {bad}", flush=True)
    servers.close()
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
