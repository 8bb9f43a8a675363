"""A private PgBouncer in transaction mode, in front of a PostgreSQL server of a test."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from tests.privatepostgres import PostgresServer, free_port
from tests.waiting import until

OPTIONS = "&listen=off&prepare=off"
"""What the URL of a store needs behind PgBouncer."""
CONFIG = """[databases]
postroom = host=127.0.0.1 port={server} user=postroom

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {size}
{settings}
"""


def program() -> str | None:
    """Where PgBouncer is installed."""
    return shutil.which("pgbouncer") or shutil.which("/usr/sbin/pgbouncer")


@contextmanager
def running_bouncer(
    postgres: PostgresServer, *, size: int = 2, settings: str = "", server_port: int = 0
) -> Iterator[int]:
    """The port of a PgBouncer. `server_port` is that of a proxy between it and the server."""
    port = free_port()
    config = postgres.folder / f"pgbouncer{port}.ini"
    config.write_text(
        CONFIG.format(server=server_port or postgres.port, port=port, size=size, settings=settings)
    )
    config.chmod(0o644)
    log = config.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen([str(program()), config], stdout=file, stderr=file, **postgres.as_user())
    try:
        until(lambda: _accepts(port) or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield port
    finally:
        process.terminate()
        process.wait()


def _accepts(port: int) -> bool:
    try:
        psycopg.connect(f"postgres://postroom@127.0.0.1:{port}/postroom").close()
    except psycopg.OperationalError:
        return False
    return True


def behind(port: int, url: str) -> str:
    """The address of a store behind the PgBouncer, or a proxy in front of it, at a port."""
    head, _, path = url.rpartition("/")
    return f"{head.rpartition(':')[0]}:{port}/{path}{OPTIONS}"
