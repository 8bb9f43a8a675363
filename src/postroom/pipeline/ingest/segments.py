"""The sealed segments of the audit stream, in the order in which they are ingested.

Rule 1: segments are numbered without a gap. A missing segment may still arrive, so later segments wait for
        it. A truncated segment counts as missing: one that is shorter than the chain says, or, if the chain
        does not list it, one whose bytes do not match the hash in its name.
Rule 2: a table remembers the highest ingested number and the hash of that segment. A run that skips missing
        segments reports their numbers, and never ingests them later.
Rule 3: a number does not identify a stream. If the segment of the highest number has another hash, and no
        other segment of the folder was ingested, the folder holds another stream, which is ingested from its
        start.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from postroom.errors import InvalidMessage
from postroom.pipeline.tables import Tables, Txn
from postroom.sinks.chain import read_chain
from postroom.sinks.layout import DIGITS_OF_HASH, SEGMENT, STREAM

TABLE: Final = "bronze_events"
HASH: Final = ", hash"  # suffix of the application id
BATCH_BYTES_MAX: Final = 2 << 30  # of the segments in one commit; about four million events


class Segment(NamedTuple):
    """A sealed file of the audit stream."""

    number: int
    path: Path
    size: int


class Gap(NamedTuple):
    """A range of missing segment numbers before an existing segment."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first} to {self.last}"


class PendingSegments(NamedTuple):
    """The segments of a folder that are not ingested yet."""

    ready: list[Segment]
    waiting: list[Segment]
    """After a missing segment."""
    gaps: list[Gap]
    short: tuple[int, ...] = ()
    """The numbers in these gaps whose segment is truncated."""
    skips_missing: bool = False
    """Missing segments are skipped. A truncated segment is read up to its last complete line."""

    def sentence(self) -> str:
        """The missing segments and the consequence; empty when none is missing."""
        if not self.gaps:
            return ""
        are_many = len(self.gaps) > 1 or self.gaps[0].first < self.gaps[0].last
        missing = f"segment{'s' * are_many} {', '.join(map(str, self.gaps))} {'are' if are_many else 'is'}"
        if self.short:
            missing += " truncated or"
        if not self.waiting:
            return f"{missing} missing and {'skipped' if self.skips_missing else 'waited for'}"
        n = len(self.waiting)
        return f"{missing} missing, and {n} later segment{'s wait' if n > 1 else ' waits'} for it"


def sealed_segments(events: Path) -> list[Segment]:
    """The sealed segments of a folder, the oldest first."""
    if not events.is_dir():
        raise InvalidMessage(f"{events} is not a folder of segments")
    return sorted(
        Segment(int(match[1]), path, path.stat().st_size)
        for path in events.absolute().glob("date=*/hour=*/*.jsonl")
        if (match := SEGMENT.fullmatch("/".join(path.parts[-3:])))
    )


def ingest_id(events: Path) -> str:
    """The application id under which a table remembers the ingested segments of a stream.

    It is the name of the stream, so the folder may be moved, and another stream may take its place.
    """
    path = events / STREAM
    try:
        name = path.read_text("utf-8").strip()
    except FileNotFoundError:
        return _place_id(events)
    except UnicodeDecodeError:
        name = ""
    if not name:
        raise InvalidMessage(f"{path} names no stream: restore its content")
    return f"stream {name}"


def _place_id(events: Path) -> str:
    return f"segments of {events.absolute()}"


def last_ingested(tables: Tables, events: Path) -> int:
    """The number of the last ingested segment; -1 when there is none."""
    for app_id in (ingest_id(events), _place_id(events)):  # earlier versions used the path
        number = tables.last_txn(TABLE, app_id)
        if number >= 0:
            return number if _is_same_stream(tables, events, app_id, number) else -1
    return -1


def _is_same_stream(tables: Tables, events: Path, app_id: str, number: int) -> bool:
    """Whether a folder holds the segments that were ingested under an application id, up to a number.

    Without a segment up to that number there is nothing to compare, and nothing that could be skipped.
    """
    old = [segment for segment in sealed_segments(events) if segment.number <= number]
    if not old or is_last_ingested(tables, TABLE, app_id, old[-1]):
        return True
    known = tables.values(TABLE, "segment")
    return any(segment.path.name in known for segment in old)


def ingest_txns(app_id: str, segment: Segment) -> list[Txn]:
    """The transactions that remember the last ingested segment: its number and its hash."""
    return [Txn(app_id, segment.number), Txn(f"{app_id}{HASH}", _hash_of(segment))]


def is_last_ingested(tables: Tables, table: str, app_id: str, segment: Segment) -> bool:
    """Whether a segment is the last one that a table remembers."""
    noted = tables.last_txn(table, app_id), tables.last_txn(table, f"{app_id}{HASH}")
    return noted == (segment.number, _hash_of(segment))


def _hash_of(segment: Segment) -> int:
    """The hash in the file name, as a number."""
    return int(segment.path.stem.rpartition("-")[2], 16)


def is_as_sealed(segment: Segment) -> bool:
    """Whether the bytes match the hash in the file name."""
    with segment.path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return segment.path.stem.endswith(f"-{digest[:DIGITS_OF_HASH]}")


def pending_segments(events: Path, ingested: int, *, skip_missing: bool = False) -> PendingSegments:
    """The segments after number `ingested`, which is -1 when none was ingested."""
    new = [segment for segment in sealed_segments(events) if segment.number > ingested]
    chain = read_chain(events).entries
    sealed = {entry.n: entry.bytes for entry in chain}
    short = [segment.number for segment in new if _is_short(segment, sealed.get(segment.number))]
    whole = [segment for segment in new if segment.number not in short]
    # A truncated segment is a gap even without a later segment.
    there = {segment.number for segment in whole} | {number + 1 for number in short[-1:]}
    # Without a chain, the first segment that exists is the first one.
    expected = ingested + 1 if ingested >= 0 else chain[0].n if chain else None
    gaps = list(_gaps(sorted(there), expected))
    if skip_missing:
        return PendingSegments(new, [], gaps, tuple(short), skips_missing=True)
    ready = [segment for segment in whole if not gaps or segment.number < gaps[0].first]
    return PendingSegments(ready, whole[len(ready) :], gaps, tuple(short))


def _is_short(segment: Segment, sealed: int | None) -> bool:
    return not is_as_sealed(segment) if sealed is None else segment.size < sealed


def _gaps(numbers: Iterable[int], expected: int | None) -> Iterator[Gap]:
    for number in numbers:
        if expected is not None and number > expected:
            yield Gap(expected, number - 1)
        expected = number + 1


def batches(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    """Lists of segments of at most `BATCH_BYTES_MAX`."""
    batch: list[Segment] = []
    for segment in segments:
        if batch and sum(one.size for one in batch) + segment.size > BATCH_BYTES_MAX:
            yield batch
            batch = []
        batch.append(segment)
    if batch:
        yield batch
