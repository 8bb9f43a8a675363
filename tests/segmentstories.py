"""Events and folders of segments for tests."""

from collections.abc import Sequence
from pathlib import Path

from postroom.audit.layout import MICROS_PER_S
from postroom.audit.segment_writer import SegmentSink
from postroom.core.formats.events import SCHEMA, AuditEvent, event_id
from postroom.testing import FIRST_WALL_US, ManualClock

SOURCE = "tasks:t1"


def events(first: int, count: int, source: str = SOURCE, payload: str = "") -> list[AuditEvent]:
    """Events `first` and following. Five in a row belong to one message, twenty to one trace."""
    return [
        AuditEvent(
            event_id=event_id(source, seq),
            seq=seq,
            ts_us=FIRST_WALL_US + seq,
            kind="dequeued",
            contract="tasks",
            source=source,
            schema=SCHEMA,
            message_id=f"{source}-m{seq // 5}",
            parent_message_id=f"{source}-m{seq // 20 * 4}",
            trace_id=f"{source}-trace{seq // 20}",
            payload=payload,
        )
        for seq in range(first, first + count)
    ]


def sealed_folder(folder: Path, segments: int = 4, each: int = 20) -> list[Path]:
    """A closed folder with this many segments, each sealed at its last event; returns the files."""
    for number in range(segments):
        seal_events(folder, 1 + number * each, each)
    return files_of(folder)


def seal_events(folder: Path, first: int, count: int) -> None:
    """Write events and seal them at the time of the last."""
    clock = ManualClock()
    clock.step_wall((first + count - 1) / MICROS_PER_S)
    with SegmentSink(folder, durability="os", clock=clock) as sink:
        sink.write(events(first, count))
        sink.seal()


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("date=*/hour=*/*.jsonl"), key=lambda path: path.name)


def seqs(found: Sequence[AuditEvent]) -> list[int]:
    return [event.seq for event in found]
