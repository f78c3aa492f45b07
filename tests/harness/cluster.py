"""A throw-away PostgreSQL server.

Servers write with fsync off: what a test ends with SIGKILL are processes, and what they had written stays with the kernel.
Only a machine that loses its power needs fsync. Ask for it by settings={"fsync": "on"} where its cost is part of the test.
"""

import atexit
import ctypes
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import psycopg

from .database import Database
from .waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]

DEFAULTS = {
    "fsync": "off",
    "listen_addresses": "",
    "unix_socket_permissions": "0777",
    "max_connections": "120",
    "max_prepared_transactions": "20",
    "log_line_prefix": "%m [%p] %q%a ",
    "log_statement": "none",
    "log_checkpoints": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "lc_messages": "C",
    "jit": "off",
}

_live = []
_owner = os.getpid()
_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


class ServerError(AssertionError):
    """The server did something that no test asked for. The message ends with the tail of its log."""


def installation(major, flavour):
    """The folder of a private installation, as tools/private made it."""
    note = ROOT / "target" / "pgroot"
    root = os.environ.get("AWA_PGROOT") or (note.read_text().strip() if note.exists() else None)
    home = Path(root) / f"{major}-{flavour}" if root else None
    if home is None or not (home / ".source").exists():
        raise ServerError(f"PostgreSQL {major}, {flavour} is not built: run tools/private {major} {flavour}")
    return home


def live_clusters():
    return list(_live)


def _user():
    """Keyword arguments for subprocess that make a program run as the user of servers."""
    if os.geteuid() != 0:
        return {}
    return {"user": "postgres", "group": pwd.getpwnam("postgres").pw_gid, "extra_groups": []}


def _environment():
    # Nothing of the caller may lead a program to another server or change what it prints.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PG", "RUST_", "LC_", "LANG"))}
    env["LC_ALL"] = "C"
    return env


def _process(pid):
    """(state, parent) of a process, or None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent = text.rpartition(")")[2].split()[:2]
    return state, int(parent)


def _children(pid):
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            seen = _process(int(name))
            if seen and seen[1] == pid:
                found.append(int(name))
    return found


def _segments(pid):
    """Files of dynamic shared memory that a process has mapped."""
    try:
        text = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return set(re.findall(r"/dev/shm/PostgreSQL\.\d+", text))


def _gone(pid):
    seen = _process(pid)
    return seen is None or seen[0] == "Z"


class Cluster:
    def __init__(self, major=None, flavour="release", preload=False, settings=None, initdb_options=()):
        self.major = int(major or os.environ.get("PG_MAJOR", "15"))
        self.flavour = flavour
        self.preload = preload
        self.home = installation(self.major, flavour)
        self.bin = self.home / "bin"
        self.settings = dict(DEFAULTS)
        if preload:
            self.settings["shared_preload_libraries"] = "awa_queue"
            # A test that does maintenance step by step wants nobody else to do it; ask for it by settings.
            self.settings["awa_queue.worker"] = "off"
        self.settings.update(settings or {})
        self.initdb_options = tuple(initdb_options)
        self.dir = None
        self._server = None
        self._connections = []
        self._lock = threading.RLock()
        self._databases = 0
        # Of a killed server: its next start takes them away, and if there is none, remove() does.
        self._left = set()

    # -- life ------------------------------------------------------------------------------------------------------

    def _make_dir(self):
        # A unix socket's path may have some 100 characters, so a deep temporary folder is no place for it.
        base = tempfile.gettempdir()
        self.dir = Path(tempfile.mkdtemp(prefix="awa_pg_", dir=base if len(base) < 40 else "/tmp"))
        if os.geteuid() == 0:
            entry = pwd.getpwnam("postgres")
            os.chown(self.dir, entry.pw_uid, entry.pw_gid)
        # Clients of other users reach the socket through it.
        self.dir.chmod(0o755)
        self.data = self.dir / "data"
        self.logfile = self.dir / "server.log"
        _live.append(self)

    def init(self):
        """initdb and the settings; the server is not started."""
        self._make_dir()
        self.program(
            "initdb", "-D", self.data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync",
            "--no-instructions", *self.initdb_options,
        )
        self._include_settings()
        return self

    def _include_settings(self):
        self._write(self.data / "postgresql.conf", "\ninclude 'awa.conf'\n", "a")
        self.configure()

    def _write(self, path, text, mode="w"):
        with open(path, mode) as file:
            file.write(text)
        if os.geteuid() == 0:
            entry = pwd.getpwnam("postgres")
            os.chown(path, entry.pw_uid, entry.pw_gid)

    def configure(self, **settings):
        """Changes settings (a name with a dot goes through **{...}; None takes one out). They count from the next start,
        or from reload()."""
        self.settings.update(settings)
        lines = [f"unix_socket_directories = '{self.dir}'"]
        for name, value in self.settings.items():
            if value is not None:
                lines.append("{} = '{}'".format(name, str(value).replace("'", "''")))
        # Replaced as a whole: a reload that comes in between must not read half of it.
        self._write(self.data / "awa.conf.new", "\n".join(lines) + "\n")
        os.replace(self.data / "awa.conf.new", self.data / "awa.conf")

    def reload(self):
        os.kill(self.pid, signal.SIGHUP)

    def start(self, timeout=60, options=()):
        assert self._server is None, "the server runs already"
        self._left = set()
        if self.dir is None:
            self.init()

        def die_with_parent():
            # When the test run itself is killed its servers go too. The signal comes when the *thread* that started the
            # server ends, hence only from the main one.
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT, 0, 0, 0)

        main = threading.current_thread() is threading.main_thread()
        with open(self.logfile, "ab") as log:
            self._server = subprocess.Popen(
                [str(self.bin / "postgres"), "-D", str(self.data), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=str(self.dir),
                env=_environment(),
                start_new_session=True,
                preexec_fn=die_with_parent if main else None,
                **_user(),
            )

        def ready():
            if self._server.poll() is not None:
                code, self._server = self._server.returncode, None
                raise ServerError(f"the server ended at its start with {code}\n{self.log_tail()}")
            try:
                lines = (self.data / "postmaster.pid").read_text().splitlines()
            except FileNotFoundError:
                return False
            return len(lines) > 7 and int(lines[0]) == self._server.pid and lines[7].strip() == "ready"

        self._deadline(ready, timeout, "the server to be ready")
        return self

    def _deadline(self, condition, timeout, what):
        try:
            return wait_until(condition, timeout, what)
        except ServerError:
            raise
        except AssertionError as error:
            raise ServerError(f"{error}\n{self.log_tail()}") from None

    @property
    def pid(self):
        assert self._server is not None, "the server does not run"
        return self._server.pid

    @property
    def running(self):
        return self._server is not None and self._server.poll() is None

    def stop(self, mode="fast", timeout=60):
        """mode: smart, fast or immediate."""
        if mode == "smart":
            self.close_connections()  # it waits for them
        number = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}[mode]
        server, pids = self._server, [self.pid, *_children(self.pid)]
        server.send_signal(number)
        try:
            server.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill9()
            raise ServerError(f"the server did not stop ({mode}) in {timeout} s\n{self.log_tail()}") from None
        self._server = None
        self._deadline(lambda: all(map(_gone, pids)), timeout, "the server's processes to end")
        # Not before: a thread may be sending a statement, and libpq is not made for two threads at one connection. A close
        # in the middle of it flushed the same buffer again, and the server got the statement twice.
        self.close_connections()

    def restart(self, mode="fast", timeout=60):
        self.stop(mode, timeout)
        return self.start(timeout)

    def kill9(self):
        """Ends the postmaster and all its children with SIGKILL, as when the machine stops: nobody writes a last word."""
        pid = self.pid
        # Stopped first: it forks no more child while its children are counted.
        os.kill(pid, signal.SIGSTOP)
        children = _children(pid)
        for process in [pid, *children]:
            self._left |= _segments(process)
        for victim in [pid, *children]:
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self._server.wait()
        self._server = None
        self._deadline(lambda: all(map(_gone, children)), 30, "killed children to be gone")
        self.close_connections()

    def remove(self):
        """Stops the server whatever it does and deletes its folder."""
        if self._server is not None:
            if self.running:
                self.kill9()
            else:
                self._server = None
        self.close_connections()
        if self.dir is not None:
            shutil.rmtree(self.dir, ignore_errors=True)
            self.dir = None
        for file in self._left:
            Path(file).unlink(missing_ok=True)
        if self in _live:
            _live.remove(self)

    def __enter__(self):
        return self if self._server is not None else self.start()

    def __exit__(self, *_):
        self.remove()

    def standby(self, settings=None):
        """A streaming standby of this server, made by pg_basebackup and not yet started. promote() makes it a primary."""
        other = Cluster(self.major, self.flavour, self.preload, {**self.settings, **(settings or {})})
        other._make_dir()
        self.program("pg_basebackup", "-h", self.dir, "-U", "postgres", "-D", other.data, "-X", "stream", "-R", "-c", "fast")
        other.configure()
        return other

    def promote(self, timeout=60):
        self.program("pg_ctl", "promote", "-D", self.data, "-t", str(timeout))

    # -- programs and connections ----------------------------------------------------------------------------------

    def program(self, name, *arguments, check=True, stdin=None, timeout=600):
        """Runs one of the server's programs as the server's user; returns its output."""
        done = subprocess.run(
            [str(self.bin / name), *map(str, arguments)],
            input=stdin if stdin is not None else "",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=str(self.dir),
            env=_environment(),
            text=True,
            timeout=timeout,
            **_user(),
        )
        if check and done.returncode != 0:
            raise ServerError(f"{name} failed with {done.returncode}:\n{done.stdout}\n{self.log_tail()}")
        return done.stdout

    def client(self, name, *arguments, dbname="postgres", **options):
        """A program that takes -h, -U and -d: psql, pgbench, pg_dump, reindexdb ..."""
        return self.program(name, "-h", self.dir, "-U", "postgres", "-d", dbname, *arguments, **options)

    def psql(self, sql, dbname="postgres", *arguments):
        """Runs a script by psql: unaligned, without headings, stopping at the first error."""
        return self.client(
            "psql", "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", *arguments, dbname=dbname, stdin=sql
        ).strip()

    def conninfo(self, dbname="postgres", user="postgres"):
        return f"host={self.dir} dbname={dbname} user={user}"

    def connect(self, dbname="postgres", autocommit=True, user="postgres", settings=None, **options):
        """A psycopg connection. settings: a dict of server settings for the session; options go to psycopg.connect."""
        if settings:
            escaped = (str(v).replace("\\", "\\\\").replace(" ", "\\ ") for v in settings.values())
            options["options"] = " ".join(f"-c {k}={v}" for k, v in zip(settings, escaped))
        try:
            connection = psycopg.connect(
                host=str(self.dir), dbname=dbname, user=user, autocommit=autocommit, connect_timeout=20, **options
            )
        except psycopg.OperationalError as error:
            if not self.running:
                raise ServerError(f"the server is not there: {error}\n{self.log_tail()}") from error
            raise
        with self._lock:
            if len(self._connections) > 500:
                self._connections = [c for c in self._connections if not c.closed]
            self._connections.append(connection)
        return connection

    def close_connections(self):
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            try:
                connection.close()
            except psycopg.Error:
                pass

    def database(self, extension=True, name=None):
        """A new database, with the extension unless told otherwise. Drop it with its drop()."""
        with self._lock:
            self._databases += 1
            name = name or f"t{self._databases}"
        with self.connect() as admin:
            admin.execute(f'CREATE DATABASE "{name}"')
        database = Database(self, name)
        if extension:
            database.sql("CREATE EXTENSION awa_queue")
        return database

    def clone(self):
        """As database(), ten times as fast: a copy of one in which the extension was created and nothing done with it."""
        with self._lock:
            self._databases += 1
            name = f"t{self._databases}"
            with self.connect() as admin:
                if not admin.execute("SELECT 1 FROM pg_database WHERE datname = 'awa_template'").fetchone():
                    admin.execute("CREATE DATABASE awa_template")
                    with self.connect(dbname="awa_template") as made:
                        made.execute("CREATE EXTENSION awa_queue")
                    admin.execute("ALTER DATABASE awa_template ALLOW_CONNECTIONS false")
                admin.execute(f'CREATE DATABASE "{name}" TEMPLATE awa_template STRATEGY file_copy')
        return Database(self, name)

    # -- log -------------------------------------------------------------------------------------------------------

    def log(self, since=0):
        """The server's log as text, from a byte position on (see log_position)."""
        if self.dir is None or not self.logfile.exists():
            return ""
        with open(self.logfile, "rb") as file:
            file.seek(since)
            return file.read().decode(errors="replace")

    def log_position(self):
        return self.logfile.stat().st_size if self.dir and self.logfile.exists() else 0

    def log_tail(self, lines=40, since=0):
        tail = self.log(since).splitlines()[-lines:]
        return "\n".join([f"-- end of the log of PostgreSQL {self.major} {self.flavour} --", *tail])


@atexit.register
def _remove_all():
    # A forked child has the same list, but the servers are its parent's.
    if os.getpid() != _owner:
        return
    for cluster in live_clusters():
        cluster.remove()
