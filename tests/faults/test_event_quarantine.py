"""Rows of events that cannot be read: the shipper goes on, and their bytes are kept."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from postroom import Tasks
from postroom.audit.reader import Segments
from postroom.core.formats.events import AuditEvent
from postroom.core.health.diagnosis import diagnose
from postroom.server.folder.diagnosis import facts_of_folder
from postroom.server.folder.shipping import Sources, opened
from postroom.settings import AuditSettings, UpSettings
from postroom.stores.event_quarantine import QUARANTINE
from postroom.stores.event_runs import UNREADABLE
from postroom.stores.purge import purge_events
from postroom.stores.sqlite.snapshot import SqliteSnapshot
from postroom.system.crypto.encryption import KEY_FILE_VARIABLE
from postroom.system.crypto.key_file import add_key

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "no UTF-8": lambda batch: batch.replace(b"triage", b"tri\xffge"),
    "cut short": lambda batch: batch[: len(batch) // 2],
    "no event": lambda batch: b'[{"seq":"one"}]' + batch[:0],
    "events are missing": lambda batch: b"[]" + batch[:0],
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "run"


def use(data: Path) -> list[tuple[int, bytes]]:
    """Use a store; returns its rows of events."""
    with Tasks.open(f"sqlite:///{data / 'queue.db'}") as tasks:
        for number in range(3):
            tasks.enqueue(agent="triage", payload=number)
            [task] = tasks.claim(agent="triage")
            tasks.complete(task.task_id, task.lease, "done")
    return rows(data, "SELECT seq, CAST(batch AS BLOB) FROM events ORDER BY seq")


def rows(data: Path, query: str, values: tuple[object, ...] = ()) -> list[tuple[int, bytes]]:
    with closing(apsw.Connection(str(data / "queue.db"))) as connection:
        return [*connection.execute(query, values)]


def damage(data: Path, seq: int, batch: bytes) -> None:
    rows(data, "UPDATE events SET batch = CAST(? AS TEXT) WHERE seq = ?", (batch, seq))


def ship(data: Path) -> list[AuditEvent]:
    """Ship what waits, as a shipper that starts and ends; returns everything in the stream."""
    sources = Sources(stores=(f"sqlite:///{data / 'queue.db'}",))
    with opened(data / "audit", sources, AuditSettings(environment="dev")) as shipping:
        shipping.once()
    return list(Segments(data / "audit").events())


def kept(data: Path) -> dict[str, bytes]:
    with Tasks.open(f"sqlite:///{data / 'queue.db'}") as tasks:
        return dict(tasks.store.read(lambda transaction: transaction.cells.page(QUARANTINE)))


def check_quarantined(data: Path, events: list[AuditEvent], row: int, first: int, batch: bytes) -> None:
    """All numbers are there, alerts stand for the damaged row, and its bytes are kept."""
    assert [event.seq for event in events] == list(range(1, events[-1].seq + 1))
    alerts = [event for event in events if event.error_type == UNREADABLE]
    assert [event.seq for event in alerts] == list(range(first, row + 1))
    assert {event.kind for event in alerts} == {"alert"}
    assert kept(data) == {f"{row:020}": batch}
    with Tasks.open(f"sqlite:///{data / 'queue.db'}") as tasks:
        noted = [event.error for event in tasks.store.events() if event.error_type == "EventsQuarantined"]
    assert len(noted) == 1
    assert noted[0].startswith(f"events {first} to {row} cannot be read: {len(batch)} stored bytes are kept")


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_row_is_kept_and_the_shipper_goes_on(data: Path, how: str) -> None:
    before, (row, batch), *_ = use(data)
    damage(data, row, DAMAGES[how](batch))
    events = ship(data)
    check_quarantined(data, events, row, before[0] + 1, DAMAGES[how](batch))
    use(data)
    assert len(ship(data)) > len(events) + 1  # later events, and that a row was kept


def test_a_damaged_ciphertext_is_kept_and_the_shipper_goes_on(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_key(tmp_path / "keys", "first")
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(tmp_path / "keys"))
    before, (row, batch), *_ = use(data)
    changed = batch[:-1] + bytes([batch[-1] ^ 1])
    rows(data, "UPDATE events SET batch = ? WHERE seq = ?", (changed, row))
    check_quarantined(data, ship(data), row, before[0] + 1, changed)


def test_row_damaged_after_shipping_does_not_stop_the_shipper(data: Path) -> None:
    _, (row, batch), *_ = use(data)
    shipped = ship(data)
    damage(data, row, DAMAGES["cut short"](batch))
    use(data)
    assert ship(data)[: len(shipped)] == shipped


def test_a_purge_keeps_the_bytes_of_a_damaged_row(data: Path) -> None:
    _, (row, _), *_ = use(data)
    damage(data, row, b"{")
    with Tasks.open(f"sqlite:///{data / 'queue.db'}") as tasks:
        newest = tasks.store.newest_event()
        tasks.store.write(lambda transaction: purge_events(transaction, newest, 1 << 62, 1_000))
        tasks.store.write(lambda transaction: purge_events(transaction, newest, 1 << 62, 1_000))
    assert kept(data) == {f"{row:020}": b"{"}


def test_verify_and_the_doctor_name_a_damaged_row(data: Path) -> None:
    _, (row, batch), *_ = use(data)
    damage(data, row, DAMAGES["no UTF-8"](batch))
    with SqliteSnapshot(data / "queue.db") as snapshot:
        assert any(fault.startswith(f"event {row}: this event cannot be read") for fault in snapshot.faults())
    ship(data)
    found = {one.check: one for one in diagnose(facts_of_folder(data, UpSettings(), deep=False))}
    assert found["shipper"].level == "problem"
    assert found["shipper"].what == "1 row of events cannot be read, and is kept apart"
