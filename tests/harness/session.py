"""Sessions that run a statement in the background, and the gate that holds them at a pause point."""

import threading

from .waiting import OutOfPatience, wait_until


class Pending:
    """A statement that runs in a thread of its own."""

    def __init__(self, session, work):
        self.session = session
        self._rows = None
        self._error = None

        def run():
            try:
                self._rows = work()
            except BaseException as error:  # handed to the test by result()
                self._error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def done(self):
        return not self._thread.is_alive()

    def result(self, timeout=30.0):
        """The rows; raises what the statement raised, or OutOfPatience when it has not ended in time."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            seen = self.session.database.activity(self.session.pid)
            raise OutOfPatience(f"the statement still runs after {timeout} s: {seen}")
        if self._error is not None:
            raise self._error
        return self._rows

    def error(self, timeout=30.0):
        """The exception that the statement ended with; AssertionError when it ended well."""
        try:
            rows = self.result(timeout)
        except AssertionError:
            raise
        except Exception as error:
            return error
        raise AssertionError(f"the statement did not fail; it returned {rows!r}")


class Session:
    def __init__(self, database, connection):
        self.database = database
        self.connection = connection
        self.pid = connection.info.backend_pid
        self._pending = None

    def sql(self, statement, parameters=None):
        assert self._pending is None or self._pending.done, "the session still runs a statement"
        return self._run(statement, parameters)

    def _run(self, statement, parameters):
        cursor = self.connection.execute(statement, parameters)
        return cursor.fetchall() if cursor.description else []

    def row(self, statement, parameters=None):
        rows = self.sql(statement, parameters)
        assert len(rows) == 1, f"one row expected from {statement!r}, got {len(rows)}"
        return rows[0]

    def value(self, statement, parameters=None):
        rows = self.sql(statement, parameters)
        assert len(rows) == 1, f"one row expected from {statement!r}, got {len(rows)}"
        return rows[0][0]

    def start(self, statement, parameters=None):
        """Runs a statement in the background and returns a Pending."""
        assert self._pending is None or self._pending.done, "the session still runs a statement"
        self._pending = Pending(self, lambda: self._run(statement, parameters))
        return self._pending

    def start_waiting(self, statement, parameters=None, event=None, timeout=15.0):
        """start(), and returns once the statement waits for a lock; fails when it ends without waiting."""
        pending = self.start(statement, parameters)

        def waiting():
            if pending.done:
                raise AssertionError(f"{statement!r} ended instead of waiting: {pending.result()!r}")
            seen = self.database.activity(self.pid)
            return seen and seen[1] == "Lock" and event in (None, seen[2]) and seen

        wait_until(waiting, timeout, f"{statement!r} to wait for a lock ({event or 'any'})")
        return pending

    def pause_at(self, *points):
        """Sets the pause points of the injection build for this session; none: no pause."""
        self.sql("SELECT set_config('awa_queue.pause_at', %s, false)", [",".join(points)])

    def cancel(self):
        self.database.sql("SELECT pg_cancel_backend(%s)", [self.pid])

    def close(self):
        self.connection.close()


class Gate:
    """Holds every session that reaches one of its pause points, until opened.

        with db.gate() as gate:
            producer.pause_at("enqueue.reserved")
            pending = gate.hold(producer, "SELECT awa.enqueue('q')")
            ...                       # the producer stands between its two steps
            gate.open()
            pending.result()
    """

    def __init__(self, database, key):
        self.database = database
        self.key = key
        self.closed = False

    def __enter__(self):
        self.connection = self.database.connect()
        self.close()
        return self

    def __exit__(self, *_):
        # The session's end gives the lock back, whatever the test did.
        self.connection.close()

    def close(self):
        assert not self.closed
        self.connection.execute("SELECT pg_advisory_lock(%s)", [self.key])
        self.closed = True

    def open(self):
        assert self.closed
        self.connection.execute("SELECT pg_advisory_unlock(%s)", [self.key])
        self.closed = False

    def hold(self, session, statement, parameters=None, timeout=15.0):
        """Starts the statement and returns once the session stands at the gate."""
        pending = session.start_waiting(statement, parameters, "advisory", timeout)
        assert self.connection.info.backend_pid in self.database.blockers(session.pid)
        return pending
