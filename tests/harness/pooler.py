"""pgbouncer in front of a Cluster: few server sessions, each lent out for one transaction at a time."""

import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import psycopg

from .cluster import _environment, _user
from .waiting import wait_until


class Pooler:
    def __init__(self, cluster, size=3, roles=("postgres",), **settings):
        """size: server sessions per database and role; settings: of pgbouncer, on top of those below."""
        self.program = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
        self.cluster = cluster
        self.dir = Path(tempfile.mkdtemp(prefix="awa_pool_"))
        self.dir.chmod(0o777)
        users = self.dir / "users"
        users.write_text("".join(f'"{role}" ""\n' for role in roles))
        self.logfile = self.dir / "log"
        wanted = {
            "pool_mode": "transaction",
            "default_pool_size": size,
            "max_client_conn": 500,
            "listen_port": 6432,
            "unix_socket_dir": self.dir,
            "auth_type": "trust",
            "auth_file": users,
            "logfile": self.logfile,
            "ignore_startup_parameters": "extra_float_digits,options",
            **settings,
        }
        config = self.dir / "pgbouncer.ini"
        config.write_text(
            f"[databases]\n* = host={cluster.dir}\n[pgbouncer]\n" + "".join(f"{k} = {v}\n" for k, v in wanted.items())
        )
        self._process = subprocess.Popen(
            [self.program, "-q", str(config)], env=_environment(), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **_user(),
        )
        wait_until((self.dir / ".s.PGSQL.6432").exists, 20, "pgbouncer to listen")

    def connect(self, dbname, autocommit=True, user="postgres", **options):
        """A psycopg connection through the pooler. It prepares nothing: the next statement may go to another server session."""
        return psycopg.connect(
            host=str(self.dir), port=6432, dbname=dbname, user=user, autocommit=autocommit, connect_timeout=20,
            prepare_threshold=None, **options,
        )

    def close(self):
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(20)
        shutil.rmtree(self.dir)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
