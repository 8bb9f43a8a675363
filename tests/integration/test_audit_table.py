"""The audit stream in a PostgreSQL table, and its export to segments."""

from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from postroom import Audit, Tasks
from postroom.audit.reader import Segments
from postroom.audit.shipper import BATCH_MAX
from postroom.contracts.feeds import StoreFeed
from postroom.core.formats.events import to_line
from postroom.engine.agents.shown_results import shown_results
from postroom.errors import ShippedElsewhere, StoreUnreachable
from postroom.server.folder.audit_table import (
    READ_MAX,
    AuditTable,
    TableSink,
    export_table,
    opened_table,
    retain_table,
)
from postroom.server.folder.shipping import Sources
from postroom.settings import AuditSettings
from tests.integration.commandline import isolate, postroom
from tests.postgresserver import database, postgres
from tests.privatepostgres import PostgresServer
from tests.tcpproxy import TcpProxy

__all__ = ["database", "postgres"]  # fixtures

SETTINGS = AuditSettings(redaction="none")
EVENTS_A_TASK = 4


def lines_of(folder: Path) -> list[bytes]:
    return [to_line(event) for event in Segments(folder).events()]


def ask(url: str, query: str) -> list[Any]:
    table = AuditTable(url)
    with closing(table):
        return table.ask(query)


def some_tasks(url: str, count: int) -> None:
    with Tasks.open(url) as tasks:
        tasks.enqueue_many({"agent": "a", "payload": {"n": number, "nul": "\0"}} for number in range(count))
        while claimed := tasks.claim(agent="a", limit=1_000):
            tasks.complete_many((task.task_id, task.lease, {"ok": True}) for task in claimed)


@pytest.mark.statement("audit-jsonb", "events-postgresql")
def test_commands_ship_to_a_table_and_export_segments(
    database: str, postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolate(monkeypatch, tmp_path)
    table, first = postgres.new_store(), max(READ_MAX, BATCH_MAX) // EVENTS_A_TASK + 10
    for count in (first, 5):  # the first time takes several reads, and the second one continues
        some_tasks(database, count)
        shipped = postroom("audit", "ship", "--store", database, "--to", table, "--once")
        assert shipped.line == {"shipped": EVENTS_A_TASK * count}, shipped.errors
        exported_line = postroom("audit", "export", table, "--to", "exported").line
        assert exported_line == {"exported": EVENTS_A_TASK * count}
    again = postroom("audit", "export", table, "--to", "exported")
    assert again.line == {"exported": 0}
    exported = list(Segments(tmp_path / "exported").events())
    every = range(1, EVENTS_A_TASK * (first + 5) + 1)
    assert [event.seq for event in exported] == [*every], "positions of the feed have no gap"
    assert not Audit(tmp_path / "exported").verify()
    assert postroom("verify", "exported", "--store", database).code == 0
    created = "SELECT count(*) FROM {schema}.events WHERE line->>'kind' = 'created'"
    assert ask(table, created) == [(first + 5,)]
    other = postroom("audit", "ship", "--store", database, "--to", "elsewhere", "--once")
    assert "go to another stream already" in other.errors


@pytest.mark.statement("events-adapters")
def test_exported_lines_are_those_that_a_segment_sink_writes(
    database: str, postgres: PostgresServer, tmp_path: Path
) -> None:
    some_tasks(database, 5)
    table = postgres.new_store()
    with opened_table(table, Sources((database,)), SETTINGS) as shipping:
        shipping.once()
    export_table(table, tmp_path / "exported", SETTINGS)
    with Tasks.open(database) as tasks:
        results = partial(shown_results, whole=False)
        direct = StoreFeed(tasks.store, "tasks", outbox=None, results=results).read(0, 1_000)
        assert lines_of(tmp_path / "exported") == [to_line(event) for event in direct]


def test_second_shipper_is_refused_and_writes_nothing(database: str, postgres: PostgresServer) -> None:
    some_tasks(database, 2)
    table = postgres.new_store()
    with opened_table(table, Sources((database,)), SETTINGS) as shipping:
        [feed] = shipping.shipper._feeds()
        events = feed.read(0, 100)
        shipping.once()
        late = TableSink(AuditTable(table))
        with pytest.raises(ShippedElsewhere, match="one at a time"):
            late.write(events)
        late.close()
        assert ask(table, "SELECT count(*) FROM {schema}.events") == [(len(events),)]


def test_retention_drops_months_that_ended_long_enough_ago(
    database: str, postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolate(monkeypatch, tmp_path)
    some_tasks(database, 1)
    table = postgres.new_store()
    with opened_table(table, Sources((database,)), SETTINGS) as shipping:
        [feed] = shipping.shipper._feeds()
        events = [
            msgspec.structs.replace(
                event, ts_us=int(datetime(*month, 28, tzinfo=UTC).timestamp()) * 1_000_000
            )
            for event, month in zip(feed.read(0, 3), ((2024, 12), (2025, 1), (2025, 2)), strict=True)
        ]
    with closing(TableSink(AuditTable(table))) as sink:
        sink.write(events)
    assert retain_table(table, datetime(2025, 1, 31, 23, tzinfo=UTC)) == ["2024-12"]
    assert ask(table, "SELECT count(*) FROM {schema}.events") == [(2,)]
    removed = postroom("audit", "retain", table, "--keep-days", "90")
    assert removed.line == {"removed": ["2025-01", "2025-02"]}, removed.errors
    assert postroom("audit", "retain", table, "--keep-days", "90").line == {"removed": []}
    with closing(TableSink(AuditTable(table))) as sink:
        sink.write([msgspec.structs.replace(events[2], seq=4)])  # the month is made again
    assert ask(table, "SELECT seq FROM {schema}.events") == [(4,)]


@pytest.mark.parametrize("wish", ["reset", "reset-after"])
def test_lost_connection_during_a_write_doubles_and_loses_no_event(
    database: str, postgres: PostgresServer, wish: str
) -> None:
    some_tasks(database, 3)
    table = postgres.new_store()
    with TcpProxy(postgres.port) as proxy:
        url = table.replace(f":{postgres.port}/", f":{proxy.port}/")
        with opened_table(url, Sources((database,)), SETTINGS) as shipping:
            left = [wish]
            proxy.watch = lambda chunk: left.pop() if left and b"COMMIT" in chunk else "pass"
            with pytest.raises(StoreUnreachable):
                shipping.once()
            proxy.watch = lambda _chunk: "pass"
            shipping.once()
    seqs = [seq for (seq,) in ask(table, "SELECT seq FROM {schema}.events ORDER BY seq")]
    assert seqs == [*range(1, 13)]
