"""From a store, a queue and a bus into the stream: every event, once, in order."""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from postroom import Bus, Queue, Tasks
from postroom.audit.chain import read_chain
from postroom.audit.reader import Segments
from postroom.audit.redaction_marks import mark_of
from postroom.audit.remote import Publisher
from postroom.audit.segment_writer import SegmentSink
from postroom.audit.shipper import SHIP_AFTER_S, SHIP_EVENTS, Feed, Shipper
from postroom.audit.verify import verify
from postroom.contracts.audit import Audit
from postroom.contracts.feeds import (
    MOVED_QUIET_S,
    REDACTED,
    FileFeeds,
    StoreFeed,
    outbox_of,
    redacted,
    set_outbox,
)
from postroom.core.formats.events import AuditEvent
from postroom.core.redaction import Level, Redactor
from postroom.errors import AuditBehind, ShippedElsewhere, SinkAhead, WriteFailed
from postroom.server.folder import shipping as shipping_module
from postroom.server.folder.shipping import Sources, opened
from postroom.settings import AuditSettings
from postroom.stores.base import Outbox
from tests import children
from tests.children import no_child_left
from tests.smalldisk import fill, small_disk

__all__ = ["no_child_left", "small_disk"]  # fixtures


@contextmanager
def shipper(folder: Path, *feeds: Feed) -> Iterator[Shipper]:
    """A shipper whose sink is closed at the end, as if its process had exited."""
    sink = SegmentSink(folder)
    try:
        yield Shipper(sink, lambda: feeds)
    finally:
        sink.close()


def shipped_events(folder: Path) -> list[AuditEvent]:
    return list(Segments(folder).events())


def feed_of(tasks: Tasks, outbox: Outbox | None = None) -> StoreFeed:
    return StoreFeed(tasks.store, "tasks", outbox=outbox or Outbox())


def work(tasks: Tasks, count: int = 3) -> None:
    """Some tasks that are enqueued, claimed, and end in several ways."""
    for number in range(count):
        tasks.enqueue(agent="ada", payload={"n": number}, type="issue")
    for number, task in enumerate(tasks.claim(agent="ada", limit=count)):
        if number % 2:
            tasks.fail(task.task_id, task.lease, "it broke")
        else:
            tasks.complete(task.task_id, task.lease, "done")


@pytest.fixture(params=["memory", "sqlite"])
def tasks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tasks]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/queue.db"
    with Tasks.open(url) as opened:
        yield opened


# ---- a store ------------------------------------------------------------------------------------------


@pytest.mark.statement("audit-complete")
def test_every_event_of_a_store_is_in_the_stream_once_and_in_order(tasks: Tasks, tmp_path: Path) -> None:
    for _ in range(3):
        work(tasks)
        with shipper(tmp_path / "audit", feed_of(tasks)) as one:
            one.ship()
    events = shipped_events(tmp_path / "audit")
    assert [event.seq for event in events] == list(range(1, tasks.store.newest_event() + 1))
    source = f"tasks:{tasks.store.identity()}"
    assert {event.source for event in events} == {source}
    assert [event.event_id for event in events] == [f"{source}#{event.seq}" for event in events]
    created = [event for event in events if event.kind == "created"]
    assert created[1].payload == '{"n":1}'
    assert {(event.type, event.contract, event.agent_id) for event in created} == {("issue", "tasks", "ada")}
    failed = [event for event in events if event.kind == "execution_failed"]
    assert {event.error for event in failed} == {"it broke"}


def test_a_store_keeps_unshipped_events(tasks: Tasks, tmp_path: Path) -> None:
    work(tasks)
    feed = feed_of(tasks)
    with shipper(tmp_path / "audit", feed) as one:
        one.ship()
        assert outbox_of(tasks.store) == Outbox(shipped=tasks.store.newest_event())
        work(tasks)
    before = tasks.store.events(limit=10_000)
    tasks.forget_events(10**9)
    left = tasks.store.events(limit=10_000)
    outbox = outbox_of(tasks.store)
    assert outbox is not None
    assert {event.seq for event in before if event.seq > outbox.shipped} <= {event.seq for event in left}


class Busy(StoreFeed):
    """A store that gets a new task whenever the shipper has settled it."""

    def __init__(self, tasks: Tasks) -> None:
        super().__init__(tasks.store, "tasks", outbox=Outbox())
        self._tasks = tasks
        self.settled = 0

    def settle(self) -> None:
        self.settled = self._tasks.store.newest_event()
        super().settle()
        if self.settled < 20:
            self._tasks.enqueue(agent="ada", payload="meanwhile")


class Careful(SegmentSink):
    """A sink that accepts only settled events."""

    feed: Busy

    def write(self, events: Sequence[AuditEvent]) -> None:
        assert events[-1].seq <= self.feed.settled
        super().write(events)


def test_only_settled_events_are_shipped_and_later_ones_wait(tasks: Tasks, tmp_path: Path) -> None:
    tasks.enqueue(agent="ada", payload="first")
    with Careful(tmp_path / "audit") as sink:
        sink.feed = Busy(tasks)
        one = Shipper(sink, lambda: [sink.feed])
        assert [one.ship(), one.ship()] == [2, 2]
        assert one.waiting() == 2


def test_a_sink_ahead_of_its_source_is_refused(tasks: Tasks, tmp_path: Path) -> None:
    work(tasks)
    feed = feed_of(tasks)
    sink = SegmentSink(tmp_path / "audit")
    newest = tasks.store.newest_event()
    last = feed.read(newest - 1, 1)[0]
    later = f"{feed.source}#{newest + 5}"
    sink.write([msgspec.structs.replace(last, seq=newest + 5, event_id=later)])
    with pytest.raises(SinkAhead, match="restored to an older state"):
        Shipper(sink, lambda: [feed]).ship()
    sink.close()


def ship_store(folder: Path, database: Path) -> int:
    """As `postroom audit ship --once` does."""
    with opened(
        folder, Sources(stores=(f"sqlite:///{database}",)), AuditSettings(environment="dev")
    ) as shipping:
        return shipping.once()


def enqueue(database: Path, *payloads: str) -> None:
    with Tasks.open(f"sqlite:///{database}") as tasks:
        for payload in payloads:
            tasks.enqueue(agent="ada", payload=payload)


STEPS = (
    (SegmentSink, "write"), (StoreFeed, "kept"), (SegmentSink, "seal"), (StoreFeed, "sealed"),
    (shipping_module, "note_head"), (Publisher, "_put"),
)  # fmt: skip
"""What a shipper does with its last events."""


def publish(data: Path, copy: Path) -> None:
    settings = AuditSettings(environment="dev", publish=f"file://{copy}")
    with opened(data / "audit", Sources(stores=(f"sqlite:///{data}/queue.db",)), settings) as shipping:
        shipping.once()


def test_shipper_killed_after_its_last_steps_loses_and_repeats_nothing(
    tmp_path: Path, no_child_left: None
) -> None:
    data, copy, steps = tmp_path / "run", tmp_path / "copy", 0

    def ship_and_die() -> None:
        children.die_at_calls(steps, STEPS, after=True)
        publish(data, copy)

    enqueue(data / "queue.db", "first")
    while children.killed(ship_and_die):
        publish(data, copy)
        steps += 1
        enqueue(data / "queue.db", f"payload {steps}")
    assert steps > len(STEPS)
    with Tasks.open(f"sqlite:///{data}/queue.db") as tasks:
        newest = tasks.store.newest_event()
    for folder in (data / "audit", copy):
        assert [event.seq for event in shipped_events(folder)] == list(range(1, newest + 1))
        assert verify(folder) == []


AT_ONCE_DAYS = 1e-9


def ship_and_retain(data: Path, **terms: Any) -> None:
    """As `postroom audit ship --once` with a retention."""
    settings = AuditSettings(environment="dev", **terms)
    with opened(data / "audit", Sources(stores=(f"sqlite:///{data}/queue.db",)), settings) as shipping:
        shipping.once()


def test_shipper_removes_old_segments_once_the_archive_has_them(tmp_path: Path) -> None:
    data, archive = tmp_path / "run", tmp_path / "archive"
    enqueue(data / "queue.db", "one")
    ship_and_retain(data, archive=f"file://{archive}")  # 90 days
    assert [event.seq for event in shipped_events(data / "audit")] == [1, 2]
    assert shipped_events(archive) == []
    ship_and_retain(data, archive=f"file://{archive}", keep_days=AT_ONCE_DAYS)
    assert shipped_events(data / "audit") == []
    enqueue(data / "queue.db", "two")
    ship_and_retain(data, archive=f"file://{archive}", keep_days=AT_ONCE_DAYS)
    assert [event.seq for event in shipped_events(archive)] == [1, 2, 3, 4]
    assert (verify(archive), verify(data / "audit")) == ([], [])


def test_segment_without_a_copy_in_the_archive_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, archive = tmp_path / "run", tmp_path / "archive"
    archive.write_text("a file in the place of the folder")
    enqueue(data / "queue.db", "one")
    ship_and_retain(data, archive=f"file://{archive}", keep_days=AT_ONCE_DAYS)
    assert [event.seq for event in shipped_events(data / "audit")] == [1, 2]
    assert "no old segment of the audit stream is removed" in caplog.text


def test_without_a_copy_segments_are_removed_only_when_the_settings_say_so(tmp_path: Path) -> None:
    data = tmp_path / "run"
    enqueue(data / "queue.db", "one")
    ship_and_retain(data)
    assert shipping_module.kept_days(AuditSettings()) is None
    assert shipping_module.kept_days(AuditSettings(publish="file:///copy")) == 90
    assert shipping_module.kept_days(AuditSettings(archive="file:///copy", keep_days=7)) == 7
    assert len(shipped_events(data / "audit")) == 2
    ship_and_retain(data, keep_days=AT_ONCE_DAYS)
    assert shipped_events(data / "audit") == []


def test_shipper_killed_while_it_archives_loses_no_event(tmp_path: Path, no_child_left: None) -> None:
    data, archive, steps = tmp_path / "run", tmp_path / "archive", 0
    terms: Any = {"archive": f"file://{archive}", "keep_days": AT_ONCE_DAYS}

    def ship_and_die() -> None:
        children.die_at_calls(steps, ((Publisher, "_put"), (shipping_module, "retain")), after=True)
        ship_and_retain(data, **terms)

    enqueue(data / "queue.db", "first")
    while children.killed(ship_and_die):
        ship_and_retain(data, **terms)
        steps += 1
        enqueue(data / "queue.db", f"payload {steps}")
    assert steps > 2
    ship_and_retain(data, **terms)
    with Tasks.open(f"sqlite:///{data}/queue.db") as tasks:
        newest = tasks.store.newest_event()
    assert [event.seq for event in shipped_events(archive)] == list(range(1, newest + 1))
    assert shipped_events(data / "audit") == []
    assert verify(archive) == []


def test_restored_store_is_refused_even_after_new_events(tmp_path: Path) -> None:
    enqueue(tmp_path / "queue.db", "first")
    shutil.copy(tmp_path / "queue.db", tmp_path / "old.db")
    enqueue(tmp_path / "queue.db", "old", "old")
    assert ship_store(tmp_path / "audit", tmp_path / "queue.db") == 6
    shutil.copy(tmp_path / "old.db", tmp_path / "queue.db")
    with pytest.raises(SinkAhead):
        ship_store(tmp_path / "audit", tmp_path / "queue.db")
    enqueue(tmp_path / "queue.db", "new", "new", "new")
    for _ in range(2):  # and again
        with pytest.raises(ShippedElsewhere, match="restored to an older state"):
            ship_store(tmp_path / "audit", tmp_path / "queue.db")
    assert ship_store(tmp_path / "new", tmp_path / "new.db") == 0


def test_a_store_has_one_stream(tmp_path: Path) -> None:
    database = tmp_path / "queue.db"
    enqueue(database, "one")
    ship_store(tmp_path / "audit", database)
    with pytest.raises(ShippedElsewhere, match="one store has one stream"):
        ship_store(tmp_path / "second", database)
    (tmp_path / "audit").rename(tmp_path / "moved")
    enqueue(database, "two")
    assert ship_store(tmp_path / "moved", database) == 2
    with Tasks.open(f"sqlite:///{database}") as tasks:
        set_outbox(tasks.store, None)
    assert ship_store(tmp_path / "second", database) == 4


def test_a_store_replaced_during_shipping_ends_the_shipper(tmp_path: Path) -> None:
    database = tmp_path / "queue.db"
    enqueue(database, "one")
    with opened(tmp_path / "audit", Sources(stores=(f"sqlite:///{database}",)), AuditSettings()) as shipping:
        assert shipping.shipper.ship() == 2
        for path in [database, *tmp_path.glob("queue.db-*")]:
            path.unlink()
        enqueue(database, "another store")
        with pytest.raises(ShippedElsewhere, match="was replaced"):
            shipping.shipper.ship()
    assert (
        ship_store(tmp_path / "audit", database) == 2
    )  # the next shipper treats the new store as another source


def test_events_removed_before_shipping_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Tasks.open("memory://") as tasks:
        work(tasks)
        feed = feed_of(tasks)
        sink = SegmentSink(tmp_path / "audit")
        one = Shipper(sink, lambda: [feed])
        one.ship()
        set_outbox(tasks.store, None)
        work(tasks)
        last = tasks.store.newest_event()
        tasks.forget_events(last)
        tasks.enqueue(agent="ada", payload="after the gap")
        one.ship()
        one.ship()
        sink.close()
        assert "were removed before they were shipped" in caplog.text
        assert [
            event.error_type for event in shipped_events(tmp_path / "audit") if event.kind == "alert"
        ] == ["EventsMissing"]


def test_reader_does_not_report_removed_events(caplog: pytest.LogCaptureFixture) -> None:
    with Tasks.open("memory://") as tasks:
        work(tasks)
        tasks.forget_events(tasks.store.newest_event())
        tasks.enqueue(agent="ada", payload="after the gap")
        before = tasks.store.events()
        reader = StoreFeed(tasks.store, "tasks", outbox=None)
        found = reader.read(1, 10)
        assert [event.seq for event in found] == [event.seq for event in before]
        assert found[0].seq > 2
        assert tasks.store.events() == before
        assert caplog.text == ""


@pytest.mark.parametrize(
    ("settings", "level"),
    [
        (AuditSettings(), "full"),
        (AuditSettings(redaction="medium"), "medium"),
        (AuditSettings(redaction="none"), "none"),
        (AuditSettings(patterns={"staff": "EMP[0-9]+"}), "none"),
        (AuditSettings(fields=["nickname"]), "none"),
    ],
)
def test_segments_are_marked_with_the_redaction_by_built_in_rules(
    tmp_path: Path, settings: AuditSettings, level: Level
) -> None:
    url = f"sqlite:///{tmp_path}/queue.db"
    with Tasks.open(url) as tasks:
        tasks.enqueue(agent="a", payload={}, type="t")
    with opened(tmp_path / "audit", Sources(stores=(url,)), settings) as shipping:
        shipping.once()
    assert [entry.redaction for entry in read_chain(tmp_path / "audit").entries] == [mark_of(level)]


def test_redaction_changes_only_the_documented_fields() -> None:
    secret = "ada@example.com"  # noqa: S105 - an address
    facts: dict[str, Any] = {
        field.name: secret for field in msgspec.structs.fields(AuditEvent) if field.type is str
    }
    facts |= {"seq": 1, "ts_us": 1, "kind": "alert", "contract": "tasks", "schema": 1}
    event = AuditEvent(**facts, detail={"fact": secret})
    after = redacted(Redactor("full"), event)
    changed = {name for name in event.__struct_fields__ if getattr(after, name) != getattr(event, name)}
    assert changed == REDACTED


@pytest.mark.statement("audit-batches")
def test_few_events_wait_a_second_and_many_do_not(tasks: Tasks, tmp_path: Path) -> None:
    now = 0.0
    sink = SegmentSink(tmp_path / "audit")
    feed = feed_of(tasks)
    one = Shipper(sink, lambda: [feed], monotonic=lambda: now)
    assert not one.ship_if_due()
    tasks.enqueue(agent="ada", payload=1)
    assert not one.ship_if_due()
    now += SHIP_AFTER_S
    assert one.ship_if_due()
    assert sink.position(feed.source) == tasks.store.newest_event()
    tasks.enqueue_many([{"agent": "ada", "payload": n} for n in range(SHIP_EVENTS)])
    assert one.ship_if_due()
    assert not one.ship_if_due()
    sink.close()


class FullOnce:
    """A sink whose disk is full for a while."""

    def __init__(self, sink: SegmentSink, failures: int) -> None:
        self._sink = sink
        self._failures = failures
        self.position = sink.position
        self.reopen = sink.reopen
        self.close = sink.close

    def write(self, events: Sequence[AuditEvent]) -> None:
        if self._failures:
            self._failures -= 1
            raise WriteFailed(self._sink.folder, OSError(28, "No space left on device"))
        self._sink.write(events)


def test_a_failing_sink_is_retried_and_counted(tasks: Tasks, tmp_path: Path) -> None:
    work(tasks)
    sink = SegmentSink(tmp_path / "audit")
    one = Shipper(FullOnce(sink, 2), lambda: [feed_of(tasks)], monotonic=iter(range(1000)).__next__)
    pauses: list[float] = []

    def stopped(pause_s: float) -> bool:
        pauses.append(pause_s)
        return len(pauses) > 5

    one.run(stopped)
    assert one.progress.failures == 2
    assert pauses[2:4] == [1.0, 2.0]  # longer each time
    assert one.progress.trouble == ""
    assert [event.seq for event in shipped_events(tmp_path / "audit")] == list(
        range(1, tasks.store.newest_event() + 1)
    )
    sink.close()


def test_new_tasks_are_refused_while_the_shipper_is_too_far_behind(tasks: Tasks) -> None:
    set_outbox(tasks.store, Outbox(shipped=0, backlog_max=10, when_behind="refuse"))
    done = [tasks.enqueue(agent="ada", payload=number) for number in range(6)]
    other = Tasks(tasks.store)  # its first call looks
    with pytest.raises(AuditBehind, match="the limit is 10"):
        other.enqueue(agent="ada", payload="too much")
    with pytest.raises(AuditBehind, match="the limit is 10"):
        other.check_backlog()
    [task] = other.claim(agent="ada")  # ending a task is not delayed
    other.complete(task.task_id, task.lease)
    status = other.status()
    assert status.events_waiting is not None
    assert status.events_waiting > 10
    assert status.held_up == 2
    alerts = [event for event in tasks.events() if event.kind == "alert"]
    assert [(alert.error_type, alert.message_id) for alert in alerts] == [("AuditBehind", "")]
    assert [line.task_id for line in tasks.find(agent="ada", limit=100)] == done
    set_outbox(tasks.store, Outbox(shipped=tasks.store.newest_event(), backlog_max=10, when_behind="refuse"))
    assert Tasks(tasks.store).enqueue(agent="ada", payload="welcome again")


def test_new_tasks_slow_down_while_the_shipper_is_too_far_behind(
    tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    # Only in this module: other threads of the process sleep, too.
    monkeypatch.setattr(
        "postroom.contracts.backlog.time", SimpleNamespace(sleep=slept.append, monotonic=time.monotonic)
    )
    set_outbox(tasks.store, Outbox(shipped=0, backlog_max=1))
    tasks.enqueue(agent="ada", payload=1)
    other = Tasks(tasks.store)
    other.enqueue(agent="ada", payload=2)
    assert slept == [0.05]
    assert len(tasks.find(agent="ada")) == 2


def test_on_a_full_disk_nothing_is_dropped_and_new_tasks_are_refused(
    tmp_path: Path, small_disk: Path
) -> None:
    """The stream's disk is full and the store's is not: events wait in the store until there is space."""
    with Tasks.open(f"sqlite:///{tmp_path}/queue.db") as tasks:
        feed = feed_of(tasks, Outbox(backlog_max=50, when_behind="refuse"))
        sink = SegmentSink(small_disk / "audit")
        one = Shipper(sink, lambda: [feed], monotonic=iter(range(1000)).__next__)
        tasks.enqueue(agent="ada", payload="x" * 1000)
        assert one.ship() == 2
        filler = fill(small_disk)
        for _ in range(40):
            tasks.enqueue(agent="ada", payload="x" * 1000)
        with pytest.raises(WriteFailed, match="No space left"):
            one.ship()
        other = Tasks(tasks.store)
        with pytest.raises(AuditBehind):
            other.enqueue(agent="ada", payload="too much")
        assert other.status().held_up == 1
        filler.unlink()
        one.ship()
        assert Tasks(tasks.store).enqueue(agent="ada", payload="welcome again")
        one.ship()
        sink.close()
        events = shipped_events(small_disk / "audit")
        assert [event.seq for event in events] == list(range(1, tasks.store.newest_event() + 1))
        assert sum(event.kind == "created" for event in events) == 42
        assert verify(small_disk / "audit") == []


# ---- files ----------------------------------------------------------------------------------------------


def ship_files(folder: Path, *, queue: Path | None = None, bus: Path | None = None) -> list[AuditEvent]:
    """Ship with a new shipper that has no state, as a new process would."""
    feeds = FileFeeds([queue] if queue else [], [bus] if bus else [])
    sink = SegmentSink(folder)
    Shipper(sink, feeds).ship()
    feeds.close()
    sink.close()
    return shipped_events(folder)


def test_queue_operations_are_shipped(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "queue")
    first = queue.send("ask", "is it green?", to="bob", sender="ada", ttl_s=60)
    queue.poll("bob")
    queue.expire()
    events = ship_files(tmp_path / "audit", queue=queue.root)
    assert [(event.kind, event.seq) for event in events] == [
        ("created", 1),
        ("delivered", 2),
        ("heartbeat", 3),
    ]
    sent, polled, _ = events
    assert (sent.message_id, sent.sender, sent.recipient, sent.type) == (first, "ada", "bob", "ask")
    assert (sent.contract, sent.queue, sent.body_bytes, sent.detail) == (
        "queue",
        "default",
        12,
        {"ttl_s": 60},
    )
    assert (polled.recipient, polled.detail["matched"]) == ("bob", 1)
    queue.send("ask", "and now?", sender="ada")
    again = ship_files(tmp_path / "audit", queue=queue.root)
    assert again[:3] == events
    assert [event.seq for event in again] == [1, 2, 3, 4]
    assert ship_files(tmp_path / "elsewhere", queue=queue.root) == again  # the same ids from the same log


def test_unreadable_line_becomes_an_alert_without_a_gap(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "queue")
    queue.send("ask", "one", sender="ada")
    audit = queue.root / "audit.jsonl"
    with audit.open("ab") as file:
        file.write(b'{"ts": "no time", "op": "send", "session": "s"}\nno json\n')
    queue.send("ask", "two", sender="ada")
    with audit.open("ab") as file:
        file.write(b'{"ts": "2026-11-15T00:')  # a writer is still active, or died
    events = ship_files(tmp_path / "audit", queue=queue.root)
    assert [(event.seq, event.kind) for event in events] == [
        (1, "created"), (2, "alert"), (3, "alert"), (4, "created")
    ]  # fmt: skip
    assert {event.error_type for event in events[1:3]} == {"UnreadableLine"}


def test_messages_of_a_bus_keep_their_ids_across_a_rotation(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml")
    parent = bus.append(type="note", project_id="p", body="one")
    bus.append(type="note", project_id="p", task_id="t", run_id="r", parents=[parent], body="two")
    first = ship_files(tmp_path / "audit", bus=bus.path)
    bus.rotate()
    bus.append(type="note", project_id="p", body="three")
    events = ship_files(tmp_path / "audit", bus=bus.path)
    assert events[:2] == first
    assert [event.payload for event in events] == ["one", "two", "three"]
    assert [event.seq for event in events] == [1, 2, 1]
    assert len({event.event_id for event in events}) == 3
    assert len({event.source for event in events}) == 2
    assert (events[1].parent_message_id, events[1].task_id, events[1].agent_id) == (parent, "t", "r")
    assert ship_files(tmp_path / "elsewhere", bus=bus.path) == events


def test_a_shipper_that_runs_follows_a_rotation(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml")
    feeds = FileFeeds([], [bus.path])
    sink = SegmentSink(tmp_path / "audit")
    one = Shipper(sink, feeds)
    for number in range(6):
        bus.append(type="note", project_id="p", body=str(number))
        one.ship()
        if number % 2:
            bus.append(type="note", project_id="p", body=f"{number} late")
            bus.rotate()
    one.ship()
    feeds.close()
    sink.close()
    bodies = [event.payload for event in shipped_events(tmp_path / "audit")]
    assert sorted(bodies) == sorted([*map(str, range(6)), "1 late", "3 late", "5 late"])
    assert verify(tmp_path / "audit") == []


@pytest.mark.parametrize("contract", ["bus", "queue"])
def test_restored_file_is_refused_even_after_new_lines(contract: str, tmp_path: Path) -> None:
    path, say = speaker(contract, tmp_path)
    say("first")
    shutil.copy(path, tmp_path / "old")
    say("old")
    say("old")
    sources = Sources(buses=(path,)) if contract == "bus" else Sources(queue_roots=(path.parent,))
    assert ship_sources(tmp_path / "audit", sources) == 3
    path.write_bytes((tmp_path / "old").read_bytes())
    with pytest.raises(SinkAhead):
        ship_sources(tmp_path / "audit", sources)
    for body in ("new", "new", "new"):
        say(body)
    for _ in range(2):  # and again
        with pytest.raises(ShippedElsewhere, match="restored to an older state"):
            ship_sources(tmp_path / "audit", sources)
    assert ship_sources(tmp_path / "new", sources) == 4


@pytest.mark.parametrize("contract", ["bus", "queue"])
def test_a_file_restored_during_shipping_ends_the_shipper(contract: str, tmp_path: Path) -> None:
    path, say = speaker(contract, tmp_path)
    say("first")
    old = path.read_bytes()
    say("second")
    sources = Sources(buses=(path,)) if contract == "bus" else Sources(queue_roots=(path.parent,))
    with opened(tmp_path / "audit", sources, AuditSettings()) as shipping:
        assert shipping.shipper.ship() == 2
        path.write_bytes(old)
        for body in ("other", "and more", "and more"):
            say(body)
        with pytest.raises(ShippedElsewhere, match="restored to an older state"):
            shipping.shipper.ship()


def test_a_file_is_continued_after_retention_removed_its_events(tmp_path: Path) -> None:
    path, say = speaker("bus", tmp_path)
    say("first")
    assert ship_sources(tmp_path / "audit", Sources(buses=(path,))) == 1
    assert len(Audit(tmp_path / "audit").retain(datetime.now(UTC) + timedelta(days=1))) == 1
    assert ship_sources(tmp_path / "audit", Sources(buses=(path,))) == 0
    say("second")
    assert ship_sources(tmp_path / "audit", Sources(buses=(path,))) == 1


def speaker(contract: str, folder: Path) -> tuple[Path, Callable[[str], object]]:
    """The file with a contract's events, and a function that adds more."""
    if contract == "bus":
        bus = Bus(folder / "bus.yaml")
        return bus.path, lambda body: bus.append(type="note", project_id="p", body=body)
    queue = Queue(folder / "queue")
    return queue.root / "audit.jsonl", lambda body: queue.send("ask", body, sender="ada")


def ship_sources(folder: Path, sources: Sources) -> int:
    """As `postroom audit ship --once` does."""
    with opened(folder, sources, AuditSettings(environment="dev")) as shipping:
        return shipping.once()


def test_unfinished_last_line_of_a_moved_file_becomes_an_alert(tmp_path: Path) -> None:
    queue = Queue(tmp_path / "queue")
    queue.send("ask", "one", sender="ada")
    audit = queue.root / "audit.jsonl"
    feeds = FileFeeds([queue.root])
    with SegmentSink(tmp_path / "audit") as sink:
        one = Shipper(sink, feeds)
        assert one.ship() == 1
        with audit.open("ab") as file:
            file.write(b'{"ts": "2026-11-15T00:')
        moved = audit.rename(tmp_path / "moved.jsonl")
        assert one.ship() == 0  # a writer may still be active
        long_ago = time.time() - MOVED_QUIET_S
        os.utime(moved, (long_ago, long_ago))
        assert [one.ship(), one.ship()] == [1, 0]
        Queue(tmp_path / "queue").send("ask", "two", sender="ada")
        assert one.ship() == 1
    feeds.close()
    assert [(event.seq, event.kind) for event in shipped_events(tmp_path / "audit")] == [
        (1, "created"), (2, "alert"), (1, "created")
    ]  # fmt: skip


def test_the_settings_have_the_safe_defaults() -> None:
    settings = AuditSettings()
    assert (settings.environment, settings.redaction, settings.payloads) == ("prod", None, True)
