"""Small histories with a known result. They share a few runs, because a run takes seconds.

Each has a source of its own. Most events are at `NOW_US`; the newest event of a run decides on file groups.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.audit.layout import DIGITS_OF_HASH
from postroom.pipeline import schema
from postroom.pipeline.delta.delta_log import DataFile
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.follow.merge import Sums
from postroom.pipeline.follow.refresh import Table
from postroom.pipeline.jobs import Pipeline, RunSummary
from tests.spark.plainrows import Row, records
from tests.spark.segmentfiles import sealed_segments

HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US
NOW_US = 5 * DAY_US + 12 * HOUR_US

EVENT = {
    "event_id": "s#1",
    "seq": 1,
    "ts_us": NOW_US,
    "kind": "created",
    "contract": "bus",
    "source": "s",
    "schema": 1,
}


def line(**fields: object) -> bytes:
    return json.dumps({**EVENT, **fields}).encode()


def happened(source: str, seq: int, message_id: str, kind: str = "created", **fields: object) -> bytes:
    """An event of a store, under its number."""
    named = {"event_id": f"{source}#{seq}", "seq": seq, "source": source, "contract": "engine"}
    return line(**named, message_id=message_id, kind=kind, **{"ts_us": NOW_US + seq, **fields})


def write_segment(folder: Path, number: int, lines: list[bytes], date: str = "2025-01-05") -> str:
    said = b"".join(line + b"\n" for line in lines)
    digest = hashlib.sha256(said).hexdigest()
    place = folder / f"date={date}" / "hour=01" / f"{number:08}-{digest[:DIGITS_OF_HASH]}.jsonl"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(said)
    return place.name


def events_in(spark: SparkSession, folder: Path) -> DataFrame:
    """The events of sealed segments, by Spark's own reader."""
    return spark.read.schema(schema.EVENTS).json([str(segment.path) for segment in sealed_segments(folder)])


# ---- what is told --------------------------------------------------------------------------------------

CUT_OFF = b'{"event_id":"s#2","seq":2,'
TOO_SHORT = b'{"event_id":"s#4","seq":4}'
WORDS_FOR_NUMBERS = line(event_id="s#3", seq="three")
NO_UTF8 = line(event_id="s#8", seq=8, queue="q").replace(b'"q"', b'"\xff"')
NANOSECONDS = line(event_id="s#9", seq=9, ts_us=1_736_036_114_835_940_000)
BEFORE_1970 = line(event_id="s#10", seq=10, ts_us=-1)
NEWER_SCHEMA = line(event_id="s#11", seq=11, schema=99)
TOO_EXACT = line(event_id="s#12", seq=12, cost_usd=0).replace(b'"cost_usd": 0', b'"cost_usd": 0.1234567891')
BAD_LINES = [CUT_OFF, b"", b"{}", b"[1]", WORDS_FOR_NUMBERS, TOO_SHORT, b"\xff\xfe", NO_UTF8]
BAD_LINES += [NANOSECONDS, BEFORE_1970, NEWER_SCHEMA, TOO_EXACT]
EVENTS = [
    line(cost_usd=0.123456789, detail={"a": [1, 2.50]}),
    # An earlier version, which had fewer fields, and a later one, which has more.
    b'{"event_id":"s#5","seq":5,"ts_us":6,"kind":"created","contract":"bus","source":"s"}',
    line(event_id="s#6", seq=6, mood="calm", moods=[1, {"a": None}], detail={"deep": {"er": None}}),
]
TALKATIVE = [
    happened("talk", 1, "t1", payload='{"to":"ada@example.com"}', error="password=hunter2!"),
    happened("talk", 2, "t2", payload="enc:ada@example.com"),
]
OLD = [happened("old", n, f"o{n}", ts_us=n) for n in (1, 2)]
SETTLED = [
    happened("life", 1, "quiet", ts_us=NOW_US - 3 * HOUR_US),
    happened("life", 2, "quiet", "cancelled", ts_us=NOW_US - 3 * HOUR_US + 1),
    happened("life", 3, "late", ts_us=NOW_US - 3 * HOUR_US),
    happened("life", 4, "busy"),
]
REPLAYED = [
    happened("again", n, "again", kind)
    for n, kind in enumerate(["created", "enqueued", "dequeued", "dead_letter"], 1)
]


def _born(seq: int, message_id: str, parent: str | None) -> bytes:
    named = {} if parent is None else {"parent_message_id": parent}
    return happened("tree", seq, message_id, type=f"t{seq}", **named)


FIRST = [*EVENTS[1:], *OLD, *SETTLED, *TALKATIVE, *REPLAYED]
FIRST += [_born(1, "leaf", "twig"), _born(2, "other", None)]
SECOND = [
    happened("life", 5, "busy", "cancelled"),
    happened("again", 5, "again", "replayed"),
    _born(3, "twig", "trunk"),
    happened("day", 1, "next-day", ts_us=NOW_US + DAY_US),
    b"no",
]
THIRD = [
    happened("again", 6, "again", "execution_completed"),
    _born(4, "trunk", None),
    _born(5, "bud", "leaf"),
]
AHEAD = [_born(6, "a", "b"), _born(7, "b", "a")]
"""Comes with the second delivery, and has to wait for the third."""
LAST = [happened("life", 6, "last")]
"""Behind a segment that never comes."""


# ---- and what the tables say -----------------------------------------------------------------------------


def per_day(messages: DataFrame) -> DataFrame:
    return messages.groupBy("day").agg(F.count("*").alias("messages"))


def total(messages: DataFrame) -> DataFrame:
    return messages.agg(F.sum("messages").alias("messages"))


GOLD = {
    "gold_per_day": Table(per_day, ("silver_messages",), ("day",), Sums(("day",), ("messages",))),
    "gold_total": Table(total, ("gold_per_day",)),
}


class Chapter(NamedTuple):
    """The tables after a delivery."""

    rows: dict[str, list[Row]]
    files: dict[str, list[DataFile]]
    versions: dict[str, int]

    def row(self, table: str, **wanted: object) -> Row:
        """The one row that has these values."""
        [found] = [row for row in self.rows[table] if all(row[name] == wanted[name] for name in wanted)]
        return found


class Story(NamedTuple):
    """All of it. The first and the third delivery are taken by a stream, the second by a run."""

    events: Path
    tables: Tables
    chapters: list[Chapter]
    second: RunSummary
    nothing_new: RunSummary
    """Of a run behind the third, with files in the folder that are no sealed segments, and one that waits."""
    skipped: RunSummary
    """Of a run that waits for nothing."""


def _chapter(tables: Tables) -> Chapter:
    names = tables.names()
    return Chapter(
        {name: records(tables, name) for name in names},
        {name: tables.files(name) for name in names},
        {name: tables.version(name) for name in names},
    )


def told(spark: SparkSession, folder: Path) -> Story:
    events, tables = folder / "events", Tables(folder / "tables")
    job = Pipeline(spark, tables, gold=GOLD)
    chapters = []
    write_segment(events, 1, [EVENTS[0], *BAD_LINES])
    write_segment(events, 2, FIRST)
    job.stream(events)
    chapters.append(_chapter(tables))
    write_segment(events, 3, SECOND)
    write_segment(events, 5, AHEAD)
    second = job.run(events)
    chapters.append(_chapter(tables))
    write_segment(events, 4, THIRD)
    job.stream(events)
    chapters.append(_chapter(tables))
    (events / "_open").mkdir()
    write_segment(events, 7, LAST)
    (events / "_open" / "00000008.jsonl").write_bytes(line(seq=9))
    (events / "date=2025-01-05" / "hour=01" / "notes.jsonl").write_bytes(line(seq=9))
    nothing_new = job.run(events)
    chapters.append(_chapter(tables))
    skipped = job.run(events, skip_missing=True)
    chapters.append(_chapter(tables))
    return Story(events, tables, chapters, second, nothing_new, skipped)
