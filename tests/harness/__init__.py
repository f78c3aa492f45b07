"""What the tests drive servers with. A test imports from here and from nowhere below.

Cluster    a throw-away server on a unix socket, of one PostgreSQL major and one flavour of the extension
Database   a database in it, with short ways to run SQL
Session    one connection of a test that may run a statement in the background and be seen waiting
Gate       holds sessions at the pause points of the injection build
OutOfPatience what a wait raises that took too long
wait_until polls a condition until it holds or a deadline passes
error_of   the SQLSTATE that a statement fails with
stats      columns of a queue's row in awa.queue_stats
"""

from .cluster import Cluster, ServerError, installation, live_clusters
from .database import Database
from .session import Gate, Pending, Session
from .verbs import error_of, stats
from .waiting import OutOfPatience, wait_until

__all__ = [
    "Cluster",
    "Database",
    "Gate",
    "OutOfPatience",
    "Pending",
    "ServerError",
    "Session",
    "error_of",
    "installation",
    "live_clusters",
    "stats",
    "wait_until",
]
