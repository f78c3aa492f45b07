"""Sessions that play one part of a race each."""


class Part:
    """One session. Its transactions are opened and ended by SQL, so that nothing happens that the test does not write."""

    def __init__(self, play, settings):
        self.play = play
        self.session = play.db.session(settings=settings)
        self.pid = self.session.pid

    def sql(self, statement, parameters=None):
        return self.session.sql(statement, parameters)

    def value(self, statement, parameters=None):
        return self.session.value(statement, parameters)

    def begin(self):
        self.sql("BEGIN")

    def commit(self):
        self.sql("COMMIT")

    def rollback(self):
        self.sql("ROLLBACK")

    def savepoint(self, name="s"):
        self.sql(f"SAVEPOINT {name}")

    def rollback_to(self, name="s"):
        self.sql(f"ROLLBACK TO {name}")

    def enqueue(self, n=1):
        """Adds n jobs as one segment and returns their ids."""
        return self.value(*self.play.enqueue_call(n))

    def claim(self, n=1000):
        """Takes up to n jobs; returns {job id: receipt}, and notes what nobody may get twice."""
        return self.play.note(self, self.sql(*self.play.claim_call(n)))

    def complete(self, claimed):
        """Finishes what claim() returned; all of it must be accepted."""
        receipts = list(claimed.values())
        rows = self.sql("SELECT state, changed FROM awa.complete(%s)", [receipts])
        assert rows == [("completed", True)] * len(receipts), rows

    def at_gate(self, *points):
        self.session.pause_at(*points)


class Play:
    """A database, a queue, and the sessions that play with it.

    Every part is started with the same settings; `mutant` is the fault that the run is played with, None for none.
    """

    def __init__(self, db, mutant=None, queue="q", settings=None):
        self.db = db
        self.queue = queue
        self.settings = {"statement_timeout": "30s", **(settings or {})}
        if mutant:
            self.settings["awa_queue.mutant"] = mutant
        # Without ageing no look ahead without the claim lock gets in between a test's steps.
        db.sql("SELECT awa.create_queue(%s, '{\"priority\": 1, \"aging_interval\": \"0\"}')", [queue])

    def part(self, **settings):
        return Part(self, {**self.settings, **settings})

    def parts(self, n):
        return [self.part() for _ in range(n)]

    def enqueue_call(self, n):
        return "SELECT awa.enqueue_batch(%s, array_fill('{}'::jsonb, ARRAY[%s::int]))", [self.queue, n]

    def claim_call(self, n):
        return "SELECT receipt, job_id FROM awa.claim(%s, %s)", [self.queue, n]

    def note(self, part, rows):
        return {job: receipt for receipt, job in rows}

    def lane(self):
        return self.db.value("SELECT queue_id * 256 FROM awa_internal.queues WHERE name = %s", [self.queue])

    def ranges(self, part):
        """What a session thinks of the lane, for messages of failed tests."""
        return part.value("SELECT awa_internal.lane_state(%s)", [self.lane()])

    def segments(self):
        return self.db.sql("SELECT first_seq, n, slot FROM awa_internal.segments ORDER BY first_seq, slot")


class Gates:
    """Holds sessions at their next pause point until opened. Several at once, by different keys."""

    def __init__(self, db, key=4242):
        self.key = key
        self.holder = db.connect()
        self.holder.execute("SELECT pg_advisory_lock(%s)", [key])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.holder.close()

    def hold(self, part, statement, parameters=None):
        """Starts a statement and returns once its session stands at the gate."""
        return part.session.start_waiting(statement, parameters, "advisory")

    def open(self):
        self.holder.execute("SELECT pg_advisory_unlock(%s)", [self.key])
