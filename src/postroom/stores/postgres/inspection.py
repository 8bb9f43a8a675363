"""Facts of a PostgreSQL server about a store, besides its messages: indexes, counters, old rows, wake-ups.

Rule 1: nothing is changed.
Rule 2: what the role may not see is left out: the transactions of other roles.
"""

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import psycopg

from postroom.stores.postgres.connection import Address, migrations, queries
from postroom.stores.postgres.trips import Connection

HEAR_S = 2.0  # until a NOTIFY has to come back
_INDEX = re.compile(r"CREATE (?:UNIQUE )?INDEX (\w+) ON [^;]+;")


class OpenTransaction(NamedTuple):
    """A transaction that has not ended."""

    pid: int
    program: str
    age_s: float


class DeadRows(NamedTuple):
    """Old versions of rows in a table, as the server estimates them."""

    table: str
    dead: int
    live: int


class Inspection:
    """Questions to the server of a store, over a connection that nobody else uses."""

    def __init__(self, connection: Connection, address: Address) -> None:
        self._connection = connection
        self._address = address
        self._queries = queries(address.schema)
        connection.execute("SET statement_timeout = 0")

    def _ask(self, name: str, *values: Any) -> list[Any]:
        return self._connection.execute(self._queries[name], values).fetchall()  # type: ignore[arg-type, unused-ignore]

    def broken_indexes(self) -> list[str]:
        """Indexes that no query can use, such as those whose CREATE INDEX CONCURRENTLY has failed."""
        return [name for name, is_valid in self._ask("indexes", self._address.schema) if not is_valid]

    def missing_indexes(self) -> Mapping[str, str]:
        """Indexes of the store that do not exist, with the statement that makes each."""
        found = {name for name, _ in self._ask("indexes", self._address.schema)}
        made = _INDEX.finditer("\n".join(migrations(self._address.schema).values()))
        return {one[1]: " ".join(one[0].split()) for one in made if one[1] not in found}

    def wrong_counters(self, limit: int) -> list[str]:
        """Counters that differ from the records, at most `limit`. Reads all records, in one statement."""
        return [
            f"{f'the queue {queue}' if queue else 'all organizations'} counts {counted} records as {what}, "
            f"and holds {held}"
            for queue, what, counted, held in self._ask("wrong_counters", limit)
        ]

    def oldest_transaction(self) -> OpenTransaction | None:
        """The transaction in this database that began first; None without one."""
        found = self._ask("oldest_transaction")
        return OpenTransaction(*found[0]) if found else None

    def dead_rows(self) -> list[DeadRows]:
        """The old rows of each table."""
        return [DeadRows(*row) for row in self._ask("dead_rows", self._address.schema)]

    def hears(self) -> bool:
        """Whether LISTEN works, which a pooler between transactions breaks: a NOTIFY has to come back."""
        channel, word = f"{self._address.schema}_doctor", os.urandom(8).hex()
        try:
            self._connection.execute(f'LISTEN "{channel}"')  # type: ignore[arg-type, unused-ignore]
            with self._address.connect() as other:
                other.execute("SELECT pg_notify(%s, %s)", [channel, word])
            return any(one.payload == word for one in self._connection.notifies(timeout=HEAR_S, stop_after=1))
        except psycopg.Error:
            return False
