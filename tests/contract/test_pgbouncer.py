"""A store behind PgBouncer in transaction mode: no LISTEN, no prepared statements, sessions that change."""

import shutil
import subprocess
import threading
from collections.abc import Iterator

import psycopg
import pytest

from postroom import Tasks
from postroom.testing import World
from postroom.testing.postgres_server import PostgresServer, free_port
from tests.postgresserver import database, postgres
from tests.waiting import until

__all__ = ["database", "postgres"]  # fixtures

CONFIG = """[databases]
postroom = host=127.0.0.1 port={server} user=postroom

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 2
"""


@pytest.fixture(scope="module")
def bouncer(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a PgBouncer with two connections to the server."""
    program = shutil.which("pgbouncer") or shutil.which("/usr/sbin/pgbouncer")
    if program is None:
        pytest.skip("PgBouncer was NOT tested: install the Debian package pgbouncer")
    port = free_port()
    config = postgres.folder / f"pgbouncer{port}.ini"
    config.write_text(CONFIG.format(server=postgres.port, port=port))
    config.chmod(0o644)
    log = tmp_path_factory.mktemp("pgbouncer") / "log"
    with log.open("wb") as file:
        process = subprocess.Popen([program, config], stdout=file, stderr=file, **postgres.as_user())
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


@pytest.fixture
def url(bouncer: int, postgres: PostgresServer, database: str) -> str:
    return database.replace(f":{postgres.port}/", f":{bouncer}/") + "&listen=off&prepare=off"


def test_handles_share_two_sessions_and_poll(url: str) -> None:
    handles = [Tasks.open(url) for _ in range(4)]
    found: list[str] = []

    def work(tasks: Tasks, turns: int) -> None:
        for number in range(turns):
            tasks.enqueue(agent="a", payload=number)
            held = tasks.claim(agent="a", limit=2, wait_s=5)
            tasks.complete_many([(task.task_id, task.lease, None) for task in held])
            found.extend(task.task_id for task in held)

    threads = [threading.Thread(target=work, args=(tasks, 10)) for tasks in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == len(set(found)) == 40
    assert not any(tasks.notifier.hears_other_processes for tasks in handles)
    for tasks in handles:
        tasks.close()


def test_seeded_world_keeps_every_rule(url: str) -> None:
    report = World(7, store=url).run()
    assert report.ok, str(report)
