"""The audit stream in a PostgreSQL table, instead of segments or in addition to them.

Rule 1: events and the position of their source are one transaction, so the two cannot disagree.
Rule 2: a writer says which position it continues. Of two shippers, one is refused.
Rule 3: a line is stored as it stands in a segment, so the table can be exported to segments at any time.
"""

import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psycopg

from postroom.audit.cipher import Cipher
from postroom.audit.segment_writer import SegmentSink
from postroom.audit.shipper import Shipper
from postroom.contracts.feeds import FileFeeds, StoreFeed
from postroom.core.formats.events import AuditEvent, from_line, to_line
from postroom.errors import ShippedElsewhere, StoreDamaged, StoreRefused
from postroom.server.folder.shipping import Sources, redaction_of, store_feed, stream_name
from postroom.settings import AuditSettings
from postroom.stores.postgres.connection import ON_DISK, SCHEMA_DEFAULT, Address, unreachable
from postroom.stores.postgres.trips import Connection
from postroom.system.log import library_log

T = TypeVar("T")

TABLES_SCHEMA = "postroom_audit"
READ_MAX = 5_000  # events in one answer of the database
MICROS_PER_S = 1_000_000
_log = library_log("postroom.audit")

_TABLES = """
CREATE SCHEMA IF NOT EXISTS {schema};
CREATE TABLE IF NOT EXISTS {schema}.stream (name text PRIMARY KEY);
CREATE TABLE IF NOT EXISTS {schema}.positions (source text COLLATE "C" PRIMARY KEY, seq bigint NOT NULL);
CREATE TABLE IF NOT EXISTS {schema}.events (
    source text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    at timestamptz NOT NULL,
    kind text COLLATE "C" NOT NULL,
    message_id text COLLATE "C" NOT NULL,
    line json NOT NULL,
    PRIMARY KEY (source, seq, at)
) PARTITION BY RANGE (at);
CREATE INDEX IF NOT EXISTS events_by_message ON {schema}.events (message_id);
CREATE INDEX IF NOT EXISTS events_by_time ON {schema}.events USING brin (at);
"""

_MONTHS = """
SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
WHERE i.inhparent = %s::regclass AND c.relname ~ '^events_[0-9]{6}$' ORDER BY 1
"""


class AuditTable:
    """The tables of one stream. `schema=` in the address names their schema."""

    def __init__(self, url: str) -> None:
        self.address = Address(url)
        named = self.address.schema
        self.schema = TABLES_SCHEMA if named == SCHEMA_DEFAULT else named
        self.url = self.address.url
        self._connection: Connection | None = None
        self._months: set[str] = set()

    def run(self, work: Callable[[Connection], T]) -> T:
        """Run work in one transaction. A connection that failed is not used again."""
        try:
            if self._connection is None:
                self._connection = self.address.connect()
                with self._connection.watched(), self._connection.transaction():
                    self._connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s), 4)", [self.schema])
                    self._connection.run(self.sql(_TABLES))
            with self._connection.watched(), self._connection.transaction():
                self._connection.run(f"SELECT {ON_DISK}")  # the shipper forgets what the stream has
                return work(self._connection)
        except psycopg.errors.InsufficientPrivilege as error:
            self.close()
            raise StoreRefused(self.url, self.address.hidden(error)) from error
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            self.close()
            raise unreachable(self.address, error, rolled_back=False) from error
        except psycopg.Error as error:
            self.close()
            raise StoreDamaged(
                f"{self.url} does not take the audit stream: {self.address.hidden(error)}"
            ) from error

    def ask(self, query: str, *values: Any) -> list[Any]:
        """The rows of a query, whose tables are in `{schema}`."""
        return self.run(lambda connection: connection.execute(self.sql(query), values).fetchall())

    def sql(self, text: str) -> Any:
        """A statement with the name of the schema."""
        return text.replace("{schema}", self.schema)

    def stream(self) -> str:
        """The name of the stream. The first shipper makes it."""

        def named(connection: Connection) -> str:
            connection.execute(self.sql("LOCK TABLE {schema}.stream"))
            found = connection.execute(self.sql("SELECT name FROM {schema}.stream")).fetchone()
            if found is not None:
                return str(found[0])
            name = f"{self.schema}-{secrets.token_hex(4)}"
            connection.execute(self.sql("INSERT INTO {schema}.stream VALUES (%s)"), [name])
            return name

        return self.run(named)

    def make_months(self, connection: Connection, times_us: Sequence[int]) -> None:
        """Make the partitions of these times: one for each month. Retention drops whole months."""
        months = {datetime.fromtimestamp(ts / MICROS_PER_S, UTC).strftime("%Y-%m-01") for ts in times_us}
        for month in sorted(months - self._months):
            name = f"events_{re.sub('-', '', month[:7])}"
            connection.execute(
                self.sql(
                    f"CREATE TABLE IF NOT EXISTS {{schema}}.{name} PARTITION OF {{schema}}.events FOR VALUES "
                    f"FROM ('{month} 00:00+00') TO (timestamptz '{month} 00:00+00' + interval '1 month')"
                )
            )
        self._months |= months

    def drop_months(self, before: datetime) -> list[str]:
        """Drop the partitions of months that ended before a time. Returns the months, as `2026-01`."""

        def drop(connection: Connection) -> list[str]:
            rows = connection.execute(self.sql(_MONTHS), [f"{self.schema}.events"]).fetchall()
            past = [name for (name,) in rows if _end_of_month(name) <= before]
            for name in past:
                connection.execute(self.sql(f"DROP TABLE {{schema}}.{name}"))
            return [f"{name[-6:-2]}-{name[-2:]}" for name in past]

        dropped = self.run(drop)
        self._months.clear()
        return dropped

    def close(self) -> None:
        connection, self._connection = self._connection, None
        self._months.clear()
        if connection is not None:
            self.address.watchdog.drop(connection)


class TableSink:
    """Writes events into an `AuditTable`. `prepare` redacts them first."""

    def __init__(
        self,
        table: AuditTable,
        prepare: Callable[[AuditEvent], AuditEvent] | None = None,
        cipher: Cipher | None = None,
    ) -> None:
        self._table = table
        self._prepare = prepare
        self._cipher = cipher

    def position(self, source: str) -> int:
        found = self._table.ask("SELECT seq FROM {schema}.positions WHERE source = %s", source)
        return int(found[0][0]) if found else 0

    def write(self, events: Sequence[AuditEvent]) -> None:
        if self._prepare is not None:
            events = [self._prepare(event) for event in events]
        if self._cipher is not None:
            events = [self._cipher.encrypt(event) for event in events]
        self._table.run(lambda connection: self._write(connection, events))

    def _write(self, connection: Connection, events: Sequence[AuditEvent]) -> None:
        table = self._table
        for source in dict.fromkeys(event.source for event in events):
            seqs = [event.seq for event in events if event.source == source]
            moved = connection.execute(
                table.sql(
                    "INSERT INTO {schema}.positions AS p VALUES (%s, %s) "
                    "ON CONFLICT (source) DO UPDATE SET seq = excluded.seq WHERE p.seq < %s"
                ),
                [source, seqs[-1], seqs[0]],
            )
            if not moved.rowcount:
                raise ShippedElsewhere(
                    f"another shipper has written events of {source} to {table.url}: run one at a time"
                )
        table.make_months(connection, [event.ts_us for event in events])
        copying = table.sql("COPY {schema}.events (source, seq, at, kind, message_id, line) FROM STDIN")
        with connection.cursor().copy(copying) as copy:
            for event in events:
                at = datetime.fromtimestamp(event.ts_us / MICROS_PER_S, UTC)
                name = event.message_id.replace("\0", "\ufffd")
                copy.write_row(
                    (event.source, event.seq, at, event.kind, name, to_line(event).decode().rstrip())
                )

    def reopen(self) -> None:
        self._table.close()

    def close(self) -> None:
        self._table.close()


class TableFeed:
    """The events of one source in an `AuditTable`, as a feed of an export to segments."""

    def __init__(self, table: AuditTable, source: str) -> None:
        self._table = table
        self.source = source

    def waiting(self, after: int) -> int:
        query = "SELECT coalesce(max(seq), 0) - %s FROM {schema}.positions WHERE source = %s"
        return int(self._table.ask(query, after, self.source)[0][0])

    def settle(self) -> None:
        """Nothing to do: the database answers with committed events."""

    def read(self, after: int, limit: int) -> list[AuditEvent]:
        rows = self._table.ask(
            "SELECT line::text FROM {schema}.events WHERE source = %s AND seq > %s ORDER BY seq LIMIT %s",
            self.source,
            after,
            min(limit, READ_MAX),
        )
        return [from_line(line.encode()) for (line,) in rows]

    def kept(self, up_to: int) -> None:
        """The table keeps its events: retention is dropping whole months."""

    def close(self) -> None:
        self._table.close()


class TableShipping(msgspec.Struct):
    """A shipper to a table."""

    shipper: Shipper

    def once(self) -> int:
        """Ship all waiting events. Returns how many."""
        return self.shipper.ship()

    def run(self, stopped: Callable[[float], bool]) -> None:
        """Ship until `stopped`."""
        self.shipper.run(stopped)


@contextmanager
def opened_table(url: str, sources: Sources, settings: AuditSettings) -> Iterator[TableShipping]:
    """Open a shipper of these sources to a table, and close it at the end."""
    with ExitStack() as stack:
        cipher = None if settings.key_file is None else Cipher.from_file(settings.key_file)
        table = stack.enter_context(closing(AuditTable(url)))
        sink = TableSink(table, redaction_of(settings, whole_payloads=cipher is not None), cipher)
        stream = table.stream()
        stores: list[StoreFeed] = [store_feed(each, settings, stream, stack) for each in sources.stores]
        files = stack.enter_context(closing(FileFeeds(sources.queue_roots, sources.buses, sources.mail)))
        for feed in stores:
            feed.kept(sink.position(feed.source))  # from now on the store keeps unshipped events
        yield TableShipping(Shipper(sink, lambda: [*stores, *files()]))


def export_table(url: str, folder: Path, settings: AuditSettings) -> int:
    """Write the events that a folder of segments does not hold yet, and seal them. Returns how many."""
    opened = SegmentSink(folder, seal_bytes=settings.seal_bytes, seal_after_s=settings.seal_after_s)
    with closing(AuditTable(url)) as table, closing(opened) as sink:
        stream_name(folder, table.stream())
        sources = [source for (source,) in table.ask("SELECT source FROM {schema}.positions ORDER BY source")]
        exported = Shipper(sink, lambda: [TableFeed(table, source) for source in sources]).ship()
        sink.seal()
        return exported


def retain_table(url: str, before: datetime) -> list[str]:
    """Drop the months of a table that ended before a time. Returns them, as `2026-01`."""
    with closing(AuditTable(url)) as table:
        return table.drop_months(before)


def _end_of_month(name: str) -> datetime:
    """When the month of a partition ended."""
    year, month = int(name[-6:-2]), int(name[-2:])
    return datetime(year + month // 12, month % 12 + 1, 1, tzinfo=UTC)
