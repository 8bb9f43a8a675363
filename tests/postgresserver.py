"""One PostgreSQL server for all tests of a run, and an empty store for each test that asks for one."""

from collections.abc import Iterator

import pytest

from postroom.testing.postgres_server import PostgresServer, running_postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


@pytest.fixture
def database(postgres: PostgresServer) -> str:
    """The address of an empty store."""
    return postgres.new_store()
