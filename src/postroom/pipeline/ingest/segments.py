"""The sealed segments of the audit stream, in the order in which they are taken.

Rule 1: segments are numbered without a gap. One that is missing may be on its way, so those behind it wait.
        So may one that is shorter than the chain says, or that the chain does not know and whose bytes are
        not those that its name promises: it is as good as missing until it is whole.
Rule 2: whoever goes on without it is told the numbers, and has given them up: what is taken is remembered as
        the highest number, and the hash of that segment.
Rule 3: numbers alone identify nothing. Where the segment of the highest number is not the one that was taken,
        and nothing else in the folder was, the folder holds another stream, and is taken from its start.
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
HASH: Final = ", hash"  # behind the name of an application
BATCH_BYTES_MAX: Final = 2 << 30  # of segments that are taken at once; about four million events


class Segment(NamedTuple):
    """A sealed file of the audit stream."""

    number: int
    path: Path
    size: int


class Gap(NamedTuple):
    """Numbers that are missing in front of one that is there."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first} to {self.last}"


class Turn(NamedTuple):
    """What is new in a folder."""

    ready: list[Segment]
    waiting: list[Segment]
    """Behind a number that is missing."""
    gaps: list[Gap]
    short: tuple[int, ...] = ()
    """Numbers in these gaps of which a part is there."""
    is_given_up: bool = False
    """Nobody waits for what is missing; of those that are cut short, what there is is taken."""

    def sentence(self) -> str:
        """What is missing, and what comes of it; nothing where nothing is."""
        if not self.gaps:
            return ""
        are_many = len(self.gaps) > 1 or self.gaps[0].first < self.gaps[0].last
        missing = f"segment{'s' * are_many} {', '.join(map(str, self.gaps))} {'are' if are_many else 'is'}"
        if self.short:
            missing += " cut short or"
        if not self.waiting:
            return f"{missing} missing and {'passed over' if self.is_given_up else 'waited for'}"
        wait = f"{len(self.waiting)} behind {self.gaps[0].first} wait{'s' * (len(self.waiting) == 1)} for it"
        return f"{missing} missing, and {wait}"


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
    """The application whose transactions tell which segments of a stream were taken.

    A stream keeps its name wherever its folder is moved, and another one at its place has another.
    """
    path = events / STREAM
    try:
        name = path.read_text("utf-8").strip()
    except FileNotFoundError:
        return _place_id(events)
    except UnicodeDecodeError:
        name = ""
    if not name:
        raise InvalidMessage(f"{path} names no stream: put back what it said")
    return f"stream {name}"


def _place_id(events: Path) -> str:
    return f"segments of {events.absolute()}"


def last_taken(tables: Tables, events: Path) -> int:
    """The last segment of a stream that was taken; -1 when none was."""
    for app_id in (ingest_id(events), _place_id(events)):  # earlier versions knew every stream by its place
        number = tables.last_txn(TABLE, app_id)
        if number >= 0:
            return number if _is_same_stream(tables, events, app_id, number) else -1
    return -1


def _is_same_stream(tables: Tables, events: Path, app_id: str, number: int) -> bool:
    """Whether a folder holds what was taken under an application, up to a number.

    Where it has nothing up to that number there is nothing to compare, and nothing that could be skipped.
    """
    old = [segment for segment in sealed_segments(events) if segment.number <= number]
    if not old or is_noted(tables, TABLE, app_id, old[-1]):
        return True
    known = tables.values(TABLE, "segment")
    return any(segment.path.name in known for segment in old)


def notes(app_id: str, segment: Segment) -> list[Txn]:
    """What a commit remembers of the last segment that was taken: its number and its hash."""
    return [Txn(app_id, segment.number), Txn(f"{app_id}{HASH}", _hash_of(segment))]


def is_noted(tables: Tables, table: str, app_id: str, segment: Segment) -> bool:
    """Whether a segment is the one that a table remembers as the last."""
    noted = tables.last_txn(table, app_id), tables.last_txn(table, f"{app_id}{HASH}")
    return noted == (segment.number, _hash_of(segment))


def _hash_of(segment: Segment) -> int:
    """The hash in its name, as a number."""
    return int(segment.path.stem.rpartition("-")[2], 16)


def is_as_sealed(segment: Segment) -> bool:
    """Whether its bytes are those that its name promises."""
    with segment.path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return segment.path.stem.endswith(f"-{digest[:DIGITS_OF_HASH]}")


def turn_of(events: Path, taken: int, *, skip_missing: bool = False) -> Turn:
    """What a folder has behind the last segment that was taken, which is -1 when none was."""
    new = [segment for segment in sealed_segments(events) if segment.number > taken]
    chain = read_chain(events).entries
    sealed = {entry.n: entry.bytes for entry in chain}
    short = [segment.number for segment in new if _is_short(segment, sealed.get(segment.number))]
    whole = [segment for segment in new if segment.number not in short]
    # Nothing needs to be behind one that is cut short to show that it lacks something.
    there = {segment.number for segment in whole} | {number + 1 for number in short[-1:]}
    # A folder without a chain begins where it begins.
    wanted = taken + 1 if taken >= 0 else chain[0].n if chain else None
    gaps = list(_gaps(sorted(there), wanted))
    if skip_missing:
        return Turn(new, [], gaps, tuple(short), is_given_up=True)
    ready = [segment for segment in whole if not gaps or segment.number < gaps[0].first]
    return Turn(ready, whole[len(ready) :], gaps, tuple(short))


def _is_short(segment: Segment, sealed: int | None) -> bool:
    return not is_as_sealed(segment) if sealed is None else segment.size < sealed


def _gaps(numbers: Iterable[int], wanted: int | None) -> Iterator[Gap]:
    for number in numbers:
        if wanted is not None and number > wanted:
            yield Gap(wanted, number - 1)
        wanted = number + 1


def batches(segments: Iterable[Segment]) -> Iterator[list[Segment]]:
    """As many as are taken at once."""
    batch: list[Segment] = []
    for segment in segments:
        if batch and sum(taken.size for taken in batch) + segment.size > BATCH_BYTES_MAX:
            yield batch
            batch = []
        batch.append(segment)
    if batch:
        yield batch
