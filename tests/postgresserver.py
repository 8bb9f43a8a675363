"""One PostgreSQL server for all tests of a run, and an empty store for each test that asks for one."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tests.privatepostgres import PostgresServer
from tests.quick import QUICK

SMALL = {"max_wal_size": "96MB", "min_wal_size": "32MB", "wal_level": "minimal", "max_wal_senders": "0"}

_EMPTIED = ("cells", "count_changes", "counts", "events", "facts", "records")
_TABLES = sorted((*_EMPTIED, "feed", "migrations"))
_FIND_TABLES = """SELECT c.relname FROM pg_class c WHERE c.relnamespace = to_regnamespace(%s)
    AND c.relkind IN ('r', 'p') AND NOT c.relispartition ORDER BY c.relname COLLATE "C\""""
_IN_USE = "SELECT 1 FROM pg_stat_activity WHERE application_name = 'postroom'"


class EmptyStores:
    """Empty stores of one server.

    A store that its test has left is emptied for a later test, which takes a millisecond. A new one takes 35.
    """

    def __init__(self, server: PostgresServer) -> None:
        self.server = server
        self._left: list[str] = []
        self._empty: list[str] = []
        self._connection = psycopg.connect(server.url(), autocommit=True)

    def take(self) -> str:
        """The address of an empty store."""
        if self._left and self._connection.execute(_IN_USE).fetchone() is None:
            for url in self._left:
                self._delete_rows(url.partition("?schema=")[2])
            self._empty += self._left
            self._left.clear()
        return self._empty.pop() if self._empty else self.server.new_store()

    def give_back(self, url: str) -> None:
        """Empty a store later, when no connection of its test is left."""
        self._left.append(url)

    def _delete_rows(self, schema: str) -> None:
        tables = [name for (name,) in self._connection.execute(_FIND_TABLES, [schema])]
        if not tables:
            return  # its test has not opened it
        assert tables == _TABLES, "a store has other tables now: say here how they are emptied"
        statements = [f"DELETE FROM {schema}.{table}" for table in _EMPTIED]  # noqa: S608 - a schema of a test
        statements += [
            f"UPDATE {schema}.feed SET position = 0",  # noqa: S608 - as above
            f"ALTER SEQUENCE {schema}.numbers RESTART",
        ]
        self._connection.execute("; ".join(statements))  # type: ignore[arg-type, unused-ignore]

    def close(self) -> None:
        """Close the connection of this object."""
        self._connection.close()


@contextmanager
def running_stores() -> Iterator[EmptyStores]:
    """The empty stores of a server that runs during the block."""
    with tempfile.TemporaryDirectory(prefix="postroom-pg-", dir=QUICK, ignore_cleanup_errors=True) as folder:
        server = PostgresServer(Path(folder), SMALL)
        try:
            stores = EmptyStores(server.start())
            yield stores
            stores.close()
        finally:
            server.remove()


@pytest.fixture(scope="session")
def postgres(postgres_stores: EmptyStores) -> PostgresServer:
    """The server of all tests. `postgres_stores` is in conftest.py, so that all modules share it."""
    return postgres_stores.server


@pytest.fixture
def database(postgres: PostgresServer) -> str:
    """The address of a new store."""
    return postgres.new_store()


def store_url(request: pytest.FixtureRequest, folder: Path) -> str:
    """The address of an empty store of the kind that a parametrized fixture asks for."""
    if request.param == "memory":
        return "memory://"
    if request.param == "postgres":
        return str(request.getfixturevalue("emptied_database"))
    return f"sqlite:///{folder}/queue.db"
