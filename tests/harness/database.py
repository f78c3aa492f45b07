"""A database of a Cluster."""

from .session import Gate, Session
from .waiting import wait_until


class Database:
    def __init__(self, cluster, name):
        self.cluster = cluster
        self.name = name
        self._own = None

    def connect(self, autocommit=True, **options):
        """A psycopg connection to this database; see Cluster.connect."""
        return self.cluster.connect(self.name, autocommit, **options)

    def session(self, autocommit=True, **options):
        """A Session: a connection that can run a statement in the background."""
        return Session(self, self.connect(autocommit, **options))

    @property
    def connection(self):
        """The connection that sql, row and value use. In autocommit, made at first use."""
        if self._own is None or self._own.closed:
            self._own = self.connect()
        return self._own

    def sql(self, statement, parameters=None):
        """Runs a statement and returns its rows as tuples (none for a statement without a result)."""
        cursor = self.connection.execute(statement, parameters)
        return cursor.fetchall() if cursor.description else []

    def row(self, statement, parameters=None):
        rows = self.sql(statement, parameters)
        assert len(rows) == 1, f"one row expected from {statement!r}, got {len(rows)}"
        return rows[0]

    def value(self, statement, parameters=None):
        return self.row(statement, parameters)[0]

    def gate(self, key=4242):
        return Gate(self, key)

    def drop(self):
        if not self.cluster.running:
            return
        # A prepared transaction outlives its session and would hold the database.
        for (name,) in self.sql("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"):
            self.sql("ROLLBACK PREPARED '{}'".format(name.replace("'", "''")))
        self._own.close()
        with self.cluster.connect() as admin:
            admin.execute(f'DROP DATABASE "{self.name}" WITH (FORCE)')
        self._own = None

    # -- what other sessions do ------------------------------------------------------------------------------------

    def activity(self, pid):
        """(state, wait_event_type, wait_event, query) of a backend, or None."""
        rows = self.sql(
            "SELECT state, wait_event_type, wait_event, query FROM pg_stat_activity WHERE pid = %s", [pid]
        )
        return rows[0] if rows else None

    def wait_waiting(self, pid, event=None, timeout=15.0):
        """Waits until a backend waits for a heavyweight lock; event narrows it: relation, transactionid, advisory ..."""

        def waiting():
            seen = self.activity(pid)
            return seen and seen[1] == "Lock" and event in (None, seen[2]) and seen

        return wait_until(waiting, timeout, f"backend {pid} to wait for a lock ({event or 'any'})")

    def blockers(self, pid):
        """The pids that a backend waits for."""
        return self.value("SELECT pg_blocking_pids(%s)", [pid])
