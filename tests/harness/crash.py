"""What tests need that end a server under its clients."""

import random
import threading

import psycopg

from .cluster import ServerError


class Clients:
    """Clients in threads that go on, with new sessions, until they are stopped or the server is gone.

    A subclass has roles: methods that take (session, rng) and do one piece of work. What is not the end of a session or of
    the server is put into `wrong`.
    """

    def __init__(self, db):
        self.db = db
        self.lock = threading.Lock()
        self.wrong = []
        self.starts = 0

    def start_roles(self, roles):
        self.stopping = threading.Event()
        self.deaths = 0
        self.starts += 1
        self.threads = [threading.Thread(target=self.client, args=[r, i], daemon=True) for i, r in enumerate(roles)]
        for t in self.threads:
            t.start()

    def session(self):
        """A session that knows in which life of the server it is: each has its own checkpointer."""
        session = self.db.session()
        session.life = session.value("SELECT backend_start FROM pg_stat_activity WHERE backend_type = 'checkpointer'")
        return session

    def client(self, role, i):
        rng = random.Random(f"{self.starts}/{i}")
        while not self.stopping.is_set():
            try:
                session = self.session()
                while not self.stopping.is_set():
                    role(session, rng)
            except psycopg.Error as error:
                if error.sqlstate is not None and not error.sqlstate.startswith("57"):
                    self.wrong.append(repr(error))
                    return
                # The server, or this backend or its statement, was ended. What was under way stays unknown.
                self.deaths += 1
            except ServerError:
                self.deaths += 1
            except BaseException as error:
                self.wrong.append(repr(error))
                return
            if not self.db.cluster.running:
                return

    def stop(self):
        self.stopping.set()
        for t in self.threads:
            t.join(60)
            assert not t.is_alive(), "a client hangs"
        assert self.wrong == []


def amcheck(db):
    """Checks all tables and indexes of the extension. contrib is there on PostgreSQL 15 only."""
    db.sql("CREATE EXTENSION IF NOT EXISTS amcheck")
    checked = db.sql(
        "SELECT c.relname, bt_index_check(c.oid, true) FROM pg_class c JOIN pg_am a ON a.oid = c.relam"
        " WHERE c.relnamespace IN ('awa_internal'::regnamespace, 'pg_toast'::regnamespace) AND a.amname = 'btree'"
        " AND c.relkind = 'i'"
    )
    assert len(checked) > 100
    assert db.sql(
        "SELECT c.oid::regclass, v.* FROM pg_class c, LATERAL verify_heapam(c.oid) v"
        " WHERE c.relnamespace = 'awa_internal'::regnamespace AND c.relkind = 'r'"
    ) == []


def can_connect(db):
    try:
        db.connect().close()
        return True
    except psycopg.OperationalError:
        return False
