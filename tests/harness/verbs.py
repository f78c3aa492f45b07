"""What several test files ask of a session."""

import psycopg
import pytest


def error_of(session, *call):
    """The SQLSTATE that a statement fails with."""
    with pytest.raises(psycopg.Error) as raised:
        session.sql(*call)
    return raised.value.sqlstate


def stats(session, *columns, queue="q"):
    """Columns of the queue's row in awa.queue_stats."""
    return session.row(f"SELECT {', '.join(columns)} FROM awa.queue_stats WHERE queue = %s", [queue])
