"""The speed of segments: events written and sealed a second, next to a bare file; finding a message by index.

"Bare" encodes the same events, writes them to one file and fsyncs it: no hash, no statistics, no index.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from figures import Figure, Goal, compare, median_of, seconds

from postroom.audit.reader import Segments
from postroom.audit.segment_writer import SegmentSink
from postroom.audit.verify import verify
from postroom.core.formats.events import SCHEMA, AuditEvent, event_id
from postroom.message import EventKind

WRITTEN = 300_000
BATCH = 1_000
HISTORY = 5_000_000
GOAL_PER_S = 200_000
GOAL_FIND_S = 2.0
SOURCE = "tasks:t0a1b2c3d"
STARTED_US = 1_770_000_000_000_000
LIFE: tuple[EventKind, ...] = ("created", "enqueued", "dequeued", "execution_started", "execution_completed")

_encoder = msgspec.json.Encoder(decimal_format="number")


def events(first: int, count: int) -> list[AuditEvent]:
    """Lives of five events each; four messages are one goal."""
    return [_event(seq) for seq in range(first, first + count)]


def _event(seq: int) -> AuditEvent:
    message = f"t0a1b2c3d-{seq // 5}"
    return AuditEvent(
        event_id=event_id(SOURCE, seq),
        seq=seq,
        ts_us=STARTED_US + seq * 100,
        kind=LIFE[seq % 5],
        contract="tasks",
        source=SOURCE,
        schema=SCHEMA,
        queue="triage",
        agent_id="triage",
        message_id=message,
        task_id=message,
        parent_message_id=f"t0a1b2c3d-{seq // 20 * 4}",
        trace_id=f"{seq // 20:032x}",
        type="issue.opened",
        priority=2,
        attempt=1,
        worker_id="worker-7",
        duration_us=1234,
        body_bytes=300,
        payload='{"issue":7,"title":"the parser stops at the first empty line"}',
    )


@contextmanager
def scratch() -> Iterator[Path]:
    folder = tempfile.mkdtemp(prefix="postroom-bench-")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder)


def sink_per_s(story: Sequence[AuditEvent]) -> float:
    with scratch() as folder, SegmentSink(folder / "audit", durability="os") as sink:
        begun = time.perf_counter()
        for at in range(0, len(story), BATCH):
            sink.write(story[at : at + BATCH])
        sink.seal()
        return len(story) / (time.perf_counter() - begun)


def bare_per_s(story: Sequence[AuditEvent]) -> float:
    with scratch() as folder:
        begun = time.perf_counter()
        fd = os.open(folder / "bare.jsonl", os.O_WRONLY | os.O_CREAT)
        for at in range(0, len(story), BATCH):
            os.write(fd, _encoder.encode_lines(story[at : at + BATCH]))
        os.fsync(fd)
        os.close(fd)
        return len(story) / (time.perf_counter() - begun)


def writing() -> Iterator[Figure]:
    story = events(1, WRITTEN)
    mean_bytes = len(_encoder.encode_lines(story[:BATCH])) / BATCH
    found = compare(lambda: sink_per_s(story), lambda: bare_per_s(story))
    against = f"encode, write, fsync: {found.theirs:,.0f} events/s"
    goals = (Goal("value", ">=", GOAL_PER_S),)
    yield Figure(f"write and seal ({mean_bytes:.0f} B)", found.ours, "events/s", against, found.ratio, goals)


def finding() -> Iterator[Figure]:
    with scratch() as folder:
        with SegmentSink(folder, durability="os") as sink:
            for first in range(1, HISTORY, BATCH):
                sink.write(events(first, BATCH))
            sink.seal()
        segments = Segments(folder)
        wanted = f"t0a1b2c3d-{HISTORY // 10 - 3}"
        indexed_s = median_of(lambda: seconds(_found(segments, wanted)))
        shutil.rmtree(folder / "_index")
        quiet = Segments(folder, on_trouble=lambda _sentence: None)
        scan_s = seconds(_found(quiet, wanted))
        checked_s = seconds(lambda: verify(folder))
    against = f"scan of every byte: {scan_s:.3g} s"
    goals = (Goal("value", "<", GOAL_FIND_S),)
    name = f"find a message in {HISTORY / 1e6:g} million events"
    yield Figure(name, indexed_s, "s", against, indexed_s / scan_s, goals)
    yield Figure(f"verify {HISTORY / 1e6:g} million events", HISTORY / checked_s, "events/s")


def _found(segments: Segments, wanted: str) -> Callable[[], None]:
    def find() -> None:
        assert len(segments.find({wanted})) == 5

    return find


def run() -> Iterator[Figure]:
    yield from writing()
    yield from finding()


if __name__ == "__main__":
    for figure in run():
        print(figure.as_json(), flush=True)
