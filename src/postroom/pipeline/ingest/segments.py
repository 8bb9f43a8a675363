"""The sealed segments of an audit stream, in the order in which they are ingested.

Rule 1: segments are numbered without a gap. A missing segment may still arrive, so later segments wait for
        it. A truncated segment counts as missing: one that is shorter than the chain says, or, if the chain
        does not list it, one whose bytes do not match the hash in its name.
Rule 2: a table remembers the number, the hash and the date of the last ingested segment. A run that skips
        missing segments reports their numbers, and never ingests them later.
Rule 3: a number does not identify a stream. If the segment of the highest number has another hash, and no
        other segment of the folder was ingested, the folder holds another stream, which is ingested from its
        start.
Rule 4: a run reads the end of the chain, and lists the folders from the date of the last ingested segment on
        and those of new entries. All folders are listed only without a chain, if that segment is not there,
        or if a number is missing.
Rule 5: the hash and the redaction that the chain records for a segment count only if every line that was read
        is intact and follows from the line before it.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import date
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from postroom.audit.chain import Chain, ChainEntry, parse_chain
from postroom.audit.layout import CHAIN, SEGMENT, STREAM
from postroom.errors import InvalidMessage
from postroom.pipeline.delta.delta_log import Txn
from postroom.pipeline.delta.storage import Storage, as_storage
from postroom.pipeline.delta.tables import Tables

TABLE: Final = "bronze_events"
HASH: Final = ", hash"  # suffix of an application id: the hash of the last ingested segment
DATE: Final = ", date"  # the same: the date of its folder, as a number of days
BATCH_BYTES_PER_CORE: Final = 1 << 30  # of the segments in one commit; about two million events
CHAIN_BLOCK_BYTES: Final = 1 << 16  # of the end of the chain that are read at first
_DATE_FOLDER: Final = "date="


class Segment(NamedTuple):
    """A sealed file of the audit stream."""

    number: int
    name: str
    """The path relative to the folder of the stream."""
    size: int
    sha256: str = ""
    """The hash of its bytes in the chain; empty if the chain does not list it."""
    redaction: str = ""
    """The mark of its redaction in the chain; empty if it has none."""

    @property
    def file_name(self) -> str:
        return self.name.rpartition("/")[2]

    @property
    def date(self) -> str:
        return self.name.partition("/")[0].removeprefix(_DATE_FOLDER)

    @property
    def hash(self) -> str:
        """The digits of the hash in the file name."""
        return self.file_name.rpartition("-")[2].partition(".")[0]

    @property
    def seal(self) -> str:
        """The digits with which the hash of its bytes has to begin."""
        return self.sha256 or self.hash


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

    @property
    def bytes(self) -> int:
        return sum(segment.size for segment in self.ready)

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


Hashes = Callable[[Sequence[Segment]], Mapping[str, str]]
"""Computes the SHA-256 of the bytes of segments, by their names."""


def named_hashes(segments: Sequence[Segment]) -> dict[str, str]:
    """The hashes in the names of segments, as if none were truncated: for a caller without earlier ones."""
    return {segment.name: segment.hash for segment in segments}


class SegmentStream:
    """The folder of an audit stream, and what a table has ingested of it."""

    def __init__(self, place: Path | str | Storage) -> None:
        self.storage = as_storage(place)
        if self.storage.local is not None and not self.storage.local.is_dir():
            raise InvalidMessage(f"{self.storage} is not a folder of segments")

    def __str__(self) -> str:
        return str(self.storage)

    def path_of(self, segment: Segment) -> str:
        """What Spark opens."""
        return self.storage.spark_path(segment.name)

    def segments(self, since: str = "", dates: Collection[str] = ()) -> list[Segment]:
        """The sealed segments in the folders from a date on, and of some dates, the oldest first."""
        folders = {
            name: name.removeprefix(_DATE_FOLDER)
            for name in self.storage.folders()
            if name.startswith(_DATE_FOLDER)
        }
        wanted = [name for name, day in folders.items() if day >= since or day in dates]
        found = (file for folder in wanted for file in self.storage.files(folder))
        return sorted(
            Segment(int(match[1]), file.path, file.size)
            for file in found
            if (match := SEGMENT.fullmatch(file.path))
        )

    # ---- what was ingested -----------------------------------------------------------------------------

    @cached_property
    def ingest_id(self) -> str:
        """The application id under which a table remembers the ingested segments of a stream.

        It is the name of the stream, so the folder may be moved, and another stream may take its place.
        """
        try:
            name = self.storage.read(STREAM).decode("utf-8").strip()
        except FileNotFoundError:
            return self._place_id
        except UnicodeDecodeError:
            name = ""
        if not name:
            raise InvalidMessage(f"{self.storage.spark_path(STREAM)} names no stream: restore its content")
        return f"stream {name}"

    @property
    def _place_id(self) -> str:
        return f"segments of {self.storage}"

    def last_ingested(self, tables: Tables) -> int:
        """The number of the last ingested segment; -1 when there is none."""
        return self._last_ingested(tables)[0]

    def _last_ingested(self, tables: Tables) -> tuple[int, list[Segment], bool]:
        """The same, the segments that were listed to find it, and whether they are all segments."""
        for app_id in (self.ingest_id, self._place_id):  # earlier versions used the path
            number = tables.last_txn(TABLE, app_id)
            if number < 0:
                continue
            since = tables.last_txn(TABLE, f"{app_id}{DATE}")
            chain = self._chain(number)
            if since >= 0 and chain.entries:
                dates = {Segment(entry.n, entry.name, 0).date for entry in chain.entries if entry.n > number}
                listed = self.segments(date.fromordinal(since).isoformat(), dates)
                if any(is_last_ingested(tables, TABLE, app_id, segment) for segment in listed):
                    return number, listed, False
            listed = self.segments()
            return (number if _is_same_stream(tables, listed, app_id, number) else -1), listed, True
        return -1, self.segments(), True

    # ---- what is new -----------------------------------------------------------------------------------

    def pending(
        self, tables: Tables, *, skip_missing: bool = False, hashes: Hashes | None = None
    ) -> "PendingSegments":
        """The segments that a table has not ingested; for `hashes` see `pending_after`."""
        ingested, listed, is_all = self._last_ingested(tables)
        found = self.pending_after(ingested, listed, skip_missing=skip_missing, hashes=hashes)
        if found.gaps and not is_all:  # a clock that was set back puts a segment into an earlier folder
            found = self.pending_after(ingested, self.segments(), skip_missing=skip_missing, hashes=hashes)
        return found

    def pending_after(
        self,
        ingested: int,
        listed: Sequence[Segment] | None = None,
        *,
        skip_missing: bool = False,
        hashes: Hashes | None = None,
    ) -> "PendingSegments":
        """The segments after number `ingested`, which is -1 when none was ingested.

        `hashes` hashes the segments that the chain does not list. By default this process reads them.
        """
        listed = self.segments() if listed is None else listed
        found = self._chain(ingested)
        chain = found.entries
        covered = {entry.name: entry for entry in chain} if _is_sound(found) else {}
        new = [
            segment
            if (entry := covered.get(segment.name)) is None
            else segment._replace(sha256=entry.sha256, redaction=entry.redaction)
            for segment in listed
            if segment.number > ingested
        ]
        short = _truncated(new, chain, hashes or self.hashes)
        whole = [segment for segment in new if segment.number not in short]
        # A truncated segment is a gap even without a later segment.
        there = {segment.number for segment in whole} | {number + 1 for number in short[-1:]}
        # The first segment is the first one of the chain, or the first one that exists, truncated or not.
        first = min([*(entry.n for entry in chain[:1]), *(segment.number for segment in new[:1])], default=0)
        gaps = list(_gaps(sorted(there), ingested + 1 if ingested >= 0 else first))
        if skip_missing:
            return PendingSegments(new, [], gaps, tuple(short), skips_missing=True)
        ready = [segment for segment in whole if not gaps or segment.number < gaps[0].first]
        return PendingSegments(ready, whole[len(ready) :], gaps, tuple(short))

    def hashes(self, segments: Sequence[Segment]) -> dict[str, str]:
        """The hashes of the bytes of segments, which this process reads one at a time."""
        return {each.name: hashlib.sha256(self.storage.read(each.name)).hexdigest() for each in segments}

    def sound_chain(self) -> list[ChainEntry]:
        """The whole chain; nothing if one of its lines is damaged or does not follow from the line before."""
        chain = self._chain(-1)
        return list(chain.entries) if _is_sound(chain) else []

    def _chain(self, after: int) -> Chain:
        """The entries of the chain after a number, and some before. The chain is read from its end."""
        size = self.storage.size(CHAIN)
        if size is None:
            return Chain()
        block = size if after < 0 else CHAIN_BLOCK_BYTES
        while True:
            start = max(size - block, 0)
            data = self.storage.read(CHAIN, start)
            # The first line is a part of one, unless it is the first of the file.
            chain = parse_chain(data.partition(b"\n")[2] if start else data)
            if not start or (chain.entries and chain.entries[0].n <= after + 1):
                return chain
            block *= 2


def _is_sound(chain: Chain) -> bool:
    """Whether every line that was read is intact and follows from the line before it."""
    return not chain.faults and all(later.prev == earlier.hash for earlier, later in pairwise(chain.entries))


def _truncated(new: Sequence[Segment], chain: Sequence[ChainEntry], hashes: Hashes) -> list[int]:
    """The numbers of truncated segments."""
    sealed = {entry.n: entry.bytes for entry in chain}
    found = hashes([segment for segment in new if segment.number not in sealed])

    def is_truncated(segment: Segment) -> bool:
        if segment.number in sealed:
            return segment.size < sealed[segment.number]
        return not found.get(segment.name, "").startswith(segment.hash)

    return [segment.number for segment in new if is_truncated(segment)]


def _is_same_stream(tables: Tables, listed: Sequence[Segment], app_id: str, number: int) -> bool:
    """Whether a folder holds the segments that were ingested under an application id, up to a number.

    Without a segment up to that number there is nothing to compare, and nothing that could be skipped.
    """
    old = [segment for segment in listed if segment.number <= number]
    if not old or is_last_ingested(tables, TABLE, app_id, old[-1]):
        return True
    known = tables.values(TABLE, "segment")
    return any(segment.file_name in known for segment in old)


def ingest_txns(app_id: str, segment: Segment) -> list[Txn]:
    """The transactions that remember the last ingested segment: its number, its hash and its date."""
    days = date.fromisoformat(segment.date).toordinal()
    return [
        Txn(app_id, segment.number),
        Txn(f"{app_id}{HASH}", int(segment.hash, 16)),
        Txn(f"{app_id}{DATE}", days),
    ]


def is_last_ingested(tables: Tables, table: str, app_id: str, segment: Segment) -> bool:
    """Whether a segment is the last one that a table remembers."""
    noted = tables.last_txn(table, app_id), tables.last_txn(table, f"{app_id}{HASH}")
    return noted == (segment.number, int(segment.hash, 16))


def _gaps(numbers: Iterable[int], expected: int) -> Iterator[Gap]:
    for number in numbers:
        if number > expected:
            yield Gap(expected, number - 1)
        expected = number + 1


def batches(segments: Iterable[Segment], bytes_max: int) -> Iterator[list[Segment]]:
    """Lists of segments of at most `bytes_max` bytes, or of one segment."""
    batch: list[Segment] = []
    size = 0
    for segment in segments:
        if batch and size + segment.size > bytes_max:
            yield batch
            batch, size = [], 0
        batch.append(segment)
        size += segment.size
    if batch:
        yield batch
