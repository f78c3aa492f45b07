"""Servers for the attacks. Slots are emptied whatever snapshots are open: a test that holds a transaction open would stop it."""

import os

from harness import Cluster


def server(**arguments):
    """For a module's own `cluster` fixtures: yields a started server and removes it."""
    settings = {"awa_queue.snapshot_grace": "0", **arguments.pop("settings", {})}
    cluster = Cluster(int(os.environ.get("PG_MAJOR", "15")), settings=settings, **arguments)
    try:
        yield cluster.start()
    finally:
        cluster.remove()
