"""One PostgreSQL server for all tests of a run, and an empty store for each test that asks for one."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from postroom.testing.postgres_server import PostgresServer
from tests.quick import QUICK

SMALL = {"max_wal_size": "96MB", "min_wal_size": "32MB", "wal_level": "minimal", "max_wal_senders": "0"}


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with tempfile.TemporaryDirectory(prefix="postroom-pg-", dir=QUICK, ignore_cleanup_errors=True) as folder:
        server = PostgresServer(Path(folder), SMALL)
        try:
            yield server.start()
        finally:
            server.remove()


@pytest.fixture
def database(postgres: PostgresServer) -> str:
    """The address of an empty store."""
    return postgres.new_store()


def store_url(request: pytest.FixtureRequest, folder: Path) -> str:
    """The address of an empty store of the kind that a parametrized fixture asks for."""
    if request.param == "memory":
        return "memory://"
    if request.param == "postgres":
        return str(request.getfixturevalue("database"))
    return f"sqlite:///{folder}/queue.db"
