"""Generates a history of the Global Message Queue from a seed, and writes it as segments.

Rule 1: the same seed gives the same bytes, in every run and version of Python. Nothing here reads a clock.
Rule 2: a source is written in the order of its numbers. It may fall behind for a while, and lines may be
        repeated, as after an interruption of the shipper.
Rule 3: a clean history violates no rule of `core.history`. Injected faults are listed in a file
        beside it.
"""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from postroom.audit.segment_writer import SegmentSink
from postroom.core.history.message_checker import Rule
from postroom.errors import InvalidMessage
from postroom.pipeline.generator.faults import Fault, Faults
from postroom.pipeline.generator.messages import GeneratedSource, LineBatch
from postroom.pipeline.generator.traffic import HOUR, S, Traffic
from postroom.pipeline.generator.world import HistoryWorld

MESSAGES_MAX: Final = 1_000_000_000
FAULTS: Final = "_faults.jsonl"
FIRST_START_US: Final = 1_735_776_000 * S  # 2025-01-02T00:00:00Z
DAY_US: Final = 24 * HOUR
START_DAYS: Final = 365
SPAN_US: Final = 4 * DAY_US
MESSAGES_A_S_MAX: Final = 100  # with more messages the history gets longer than four days
MESSAGES_A_GOAL: Final = 7.5  # on average
STEPS_A_BATCH_MAX: Final = 400
BATCHES_MIN: Final = 40
SEAL_AFTER_S: Final = 6 * 3600.0
LATE: Final = 1 / 60  # of the batches start a period in which a source is behind
LATE_US: Final = 2 * HOUR
REPEATED: Final = 1 / 8  # of the batches are followed by repeated lines
REPEATED_LINES_MAX: Final = 100


class HistorySummary(msgspec.Struct, frozen=True):
    """The size and content of a generated history."""

    messages: int
    events: int
    lines: int
    bytes: int
    repeats: int
    late: int
    segments: int
    sources: dict[str, int]
    first_us: int
    last_us: int
    faults: dict[Rule, int]


Progress = Callable[[int, int], None]
"""Called from time to time with the number of messages and of lines."""


class HistoryClock:
    """The time of the history, by which the sink seals segments."""

    def __init__(self, now_us: int) -> None:
        self.now_us = now_us

    def boot_id(self) -> str:
        return "history"

    def boot_ns(self) -> int:
        return self.now_us * 1_000

    def wall_us(self) -> int:
        return self.now_us


class HistoryWriter:
    """Writes batches as a shipper does: sometimes late, and some lines twice."""

    def __init__(self, sink: SegmentSink, clock: HistoryClock, random: Random) -> None:
        self._sink = sink
        self._clock = clock
        self._random = random
        self._behind: dict[str, list[LineBatch]] = {}
        self._behind_until_us: dict[str, int] = {}
        self.lines = self.bytes = self.repeats = self.late = 0

    def write(self, feed: GeneratedSource, batch: LineBatch, now_us: int) -> None:
        self._clock.now_us = max(self._clock.now_us, now_us)
        if batch.lines and feed.name not in self._behind and self._random.random() < LATE:
            self._behind[feed.name] = []
            self._behind_until_us[feed.name] = now_us + int(self._random.random() * LATE_US)
        if feed.name not in self._behind:
            self._put(batch)
            return
        self._behind[feed.name].append(batch)
        if now_us >= self._behind_until_us[feed.name]:
            self.catch_up(feed)

    def catch_up(self, feed: GeneratedSource) -> None:
        """Write the delayed batches."""
        for batch in self._behind.pop(feed.name, []):
            self.late += len(batch.lines)
            self._put(batch)

    def _put(self, batch: LineBatch) -> None:
        if not batch.lines:
            return
        self._keep(batch)
        if self._random.random() < REPEATED:
            n = 1 + int(self._random.random() * min(REPEATED_LINES_MAX, len(batch.lines)))
            self._keep(LineBatch(batch.lines[-n:], batch.marks[-n:]))
            self.repeats += n

    def _keep(self, batch: LineBatch) -> None:
        self._sink.write_lines(batch.lines, batch.marks)
        self.lines += len(batch.lines)
        self.bytes += sum(map(len, batch.lines))


def generate(
    folder: Path, messages: int, seed: int, *, faults: bool = False, progress: Progress | None = None
) -> HistorySummary:
    """Write a history with this number of messages into a new or empty folder."""
    if folder.exists() and any(folder.iterdir()):
        raise InvalidMessage(f"{folder} is not empty: a history needs a folder of its own")
    folder.mkdir(parents=True, exist_ok=True)
    start_us = FIRST_START_US + seed % START_DAYS * DAY_US
    random = Random(seed)  # noqa: S311 - a seed has to give the same history
    span_us = max(SPAN_US, messages * S // MESSAGES_A_S_MAX)
    gap_us = max(1, int(span_us * MESSAGES_A_GOAL / messages))
    traffic = Traffic(HistoryWorld(random), start_us, gap_us, messages)
    planted = Faults(traffic, Random(seed + 1), messages if faults else 0)  # noqa: S311 - the same
    clock = HistoryClock(start_us)
    with SegmentSink(folder, seal_after_s=SEAL_AFTER_S, durability="os", clock=clock) as sink:
        writer = HistoryWriter(sink, clock, Random(seed + 2))  # noqa: S311 - the same
        _run(traffic, planted, writer, progress)
        sink.seal()
    listed = planted.listed()
    if faults:
        lines = msgspec.json.Encoder().encode_lines(listed)
        (folder / FAULTS).write_bytes(lines)
    return _summary(traffic, writer, listed, start_us, folder)


def _run(traffic: Traffic, planted: Faults, writer: HistoryWriter, progress: Progress | None) -> None:
    steps = max(1, min(STEPS_A_BATCH_MAX, traffic.limit // BATCHES_MIN))
    while traffic.made < traffic.limit:
        for _ in range(steps):
            if traffic.made >= traffic.limit:
                break
            if traffic.made >= planted.next_at:
                planted.plant()
            else:
                traffic.step()
        _flush(traffic, planted, writer, traffic.now_us)
        if progress is not None:
            progress(traffic.made, writer.lines)
    planted.advance_past_horizon()
    _flush(traffic, planted, writer, 1 << 62)
    for feed in traffic.feeds:
        writer.catch_up(feed)


def _flush(traffic: Traffic, planted: Faults, writer: HistoryWriter, until_us: int) -> None:
    for feed in traffic.feeds:
        batch = planted.altered(feed.until(until_us))
        if planted.wants_hole(feed):
            feed.hole_wanted = True
        writer.write(feed, batch, min(until_us, max(feed.newest_us, traffic.now_us)))


def _summary(
    traffic: Traffic, writer: HistoryWriter, listed: list[Fault], start_us: int, folder: Path
) -> HistorySummary:
    counts: dict[Rule, int] = {}
    for fault in listed:
        counts[fault.rule] = counts.get(fault.rule, 0) + 1
    return HistorySummary(
        traffic.made,
        sum(feed.seq - len(feed.holes) for feed in traffic.feeds),
        writer.lines,
        writer.bytes,
        writer.repeats,
        writer.late,
        sum(1 for _ in folder.glob("date=*/hour=*/*.jsonl")),
        {feed.name: feed.seq for feed in traffic.feeds},
        start_us,
        max(feed.newest_us for feed in traffic.feeds),
        counts,
    )
