"""Reading segments, including the open one, while a writer is active.

Rule 1: an unreadable line stays in place, is counted, and is reported to the caller.
Rule 2: an index is only an optimization. A segment without a valid index is read completely, and reported.
Rule 3: a sealed segment whose length has changed is reported once per reader.
"""

import os
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from postroom.audit.chain import ChainEntry, read_chain
from postroom.audit.index import Index, IndexDamaged, key_of
from postroom.audit.layout import OPEN, chain_locked, index_path, numbered, open_path
from postroom.core.formats.events import AuditEvent, decode_lines, from_line
from postroom.errors import InvalidMessage, UnsafePath, reason
from postroom.system.atomic import absolute_path, open_safely
from postroom.system.log import library_log

NEEDLES_MAX = 16  # ids searched for in the raw bytes; with more, every line is decoded
INDEXES_MAX = 4_096  # indexes that a search keeps open; a process may not map more than 65,530 files

_log = library_log("postroom.audit")


class _OpenFile(NamedTuple):
    """A segment file that is being read, with its path relative to the folder."""

    name: str
    file: BinaryIO
    end: int
    """The size of the file when it was opened."""
    start: int = 0


class StreamPosition(NamedTuple):
    """A follower's position: a segment number and a byte offset. Sealing the segment changes neither."""

    n: int
    offset: int


class _SearchState:
    """A snapshot of a folder for several searches, and the lines they have returned so far."""

    def __init__(self, entries: list[ChainEntry], growing: list[_OpenFile]) -> None:
        self.entries = entries
        self.growing = growing
        self.indexes: dict[int, Index] = {}
        self.unindexed: set[int] = set()
        self.seen: dict[str, set[int]] = {}
        """For each file, the offsets of lines that were returned already or are unreadable."""
        self.tables: dict[str, dict[str, list[int]]] = {}
        """For each file without a valid index that was scanned before: the line offsets of each id."""
        self.is_first = True

    def close(self) -> None:
        for index in self.indexes.values():
            index.close()


class Segments:
    """The events of a folder of segments.

    `on_trouble` is called with one line of text for each unreadable line, missing segment and invalid index.
    The default logs a warning.
    """

    block_bytes = 1 << 20
    indexes_max = INDEXES_MAX

    def __init__(
        self, folder: str | os.PathLike[str], *, on_trouble: Callable[[str], None] | None = None
    ) -> None:
        self.folder = absolute_path("the folder of segments", folder)
        if not self.folder.is_dir():
            raise InvalidMessage(f"{self.folder} is not a folder")
        self.bad_lines = 0
        """The number of unreadable lines so far."""
        self._report = on_trouble or _log.warning
        self._reported: set[str] = set()

    def entries(self) -> list[ChainEntry]:
        """The chain's entries, one per sealed segment."""
        return read_chain(self.folder).entries

    def events(
        self,
        since_us: int | None = None,
        until_us: int | None = None,
        sources: Collection[str] | None = None,
    ) -> Iterator[AuditEvent]:
        """Events in the order of writing, with `since_us` <= ts_us < `until_us`.

        Segments whose statistics exclude such events are not opened.
        """
        since = since_us if since_us is not None else -(1 << 63)
        until = until_us if until_us is not None else 1 << 63
        with ExitStack() as stack:
            entries, growing = self._snapshot(stack)
            for entry in entries:
                if entry.max_ts_us < since or entry.min_ts_us >= until:
                    continue
                if sources is not None and entry.sources.keys().isdisjoint(sources):
                    continue
                yield from _chosen(self._sealed(entry), since, until, sources)
            for opened in growing:
                yield from _chosen(self._decoded(opened), since, until, sources)

    def find(self, ids: Collection[str]) -> list[AuditEvent]:
        """The events whose message, parent message or trace is one of `ids`, in the order of writing."""
        with self.searching() as find:
            return find(ids)

    @contextmanager
    def searching(self) -> Iterator[Callable[[Collection[str]], list[AuditEvent]]]:
        """A `find` for repeated calls: it takes one snapshot of the folder and returns each event once."""
        with ExitStack() as stack:
            search = _SearchState(*self._snapshot(stack))
            stack.callback(search.close)
            yield partial(self._find, search)

    def before_last(self, count: int) -> StreamPosition:
        """A position with at least the last `count` events after it, or the start when there are fewer."""
        place, found = StreamPosition(0, 0), 0
        for entry in reversed(self.entries()):
            if found >= count:
                break
            place, found = StreamPosition(entry.n, 0), found + entry.events
        return place

    def last_of(self, source: str, count: int) -> list[AuditEvent]:
        """The last events of a source. Only the segments that hold them are read."""
        found: deque[AuditEvent] = deque(maxlen=count)
        holding = [entry for entry in self.entries() if source in entry.sources]
        start = holding[-1].n if holding else 0
        if len(holding) > 1 and holding[-1].events < count:
            start = holding[-2].n
        for events, _ in self.after(StreamPosition(start, 0)):
            found.extend(event for event in events if event.source == source)
        return list(found)

    def after(self, place: StreamPosition) -> Iterator[tuple[list[AuditEvent], StreamPosition]]:
        """Events after a position, one block at a time, each with the position after it."""
        with ExitStack() as stack:
            entries, growing = self._snapshot(stack)
            for entry in entries:
                if entry.n >= place.n:
                    with self._opened(entry) as opened:
                        yield from self._blocks_after(opened, entry.n, place) if opened else ()
            for opened in growing:
                yield from self._blocks_after(opened, int(Path(opened.name).stem), place)

    def _blocks_after(
        self, opened: _OpenFile, n: int, place: StreamPosition
    ) -> Iterator[tuple[list[AuditEvent], StreamPosition]]:
        start = place.offset if n == place.n else 0
        for at, block, events in self._decoded_blocks(opened._replace(start=start)):
            yield events, StreamPosition(n, at + len(block))

    # ---- files ---------------------------------------------------------------------------------------

    def _snapshot(self, stack: ExitStack) -> tuple[list[ChainEntry], list[_OpenFile]]:
        """The entries of the sealed segments, and the open segments, opened before they can be sealed."""
        with chain_locked(self.folder):
            chain = read_chain(self.folder)
            sealed = {entry.n for entry in chain.entries}
            growing = []
            for n, path in numbered(self.folder / OPEN, ".jsonl").items():
                if n not in sealed:
                    file = stack.enter_context(_binary(path))
                    growing.append(_OpenFile(f"{OPEN}/{path.name}", file, os.fstat(file.fileno()).st_size))
        for fault in chain.faults:
            self._report_once(f"line {fault.line} of the chain of {self.folder} is skipped: {fault.reason}")
        return chain.entries, growing

    @contextmanager
    def _opened(self, entry: ChainEntry) -> Iterator[_OpenFile | None]:
        file = self._file_of(entry)
        if file is None:
            yield None
        else:
            with file:
                size, fault = os.fstat(file.fileno()).st_size, ""
                if size != entry.bytes:
                    fault = f"it has {size} bytes instead of {entry.bytes}"
                elif size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                    fault = "its last line has no end"
                if fault:
                    self._report_once(f"segment {entry.name} is not as it was sealed: {fault}")
                yield _OpenFile(entry.name, file, entry.bytes)

    def _report_once(self, text: str) -> None:
        """Report a problem that every later pass of a follower or search would find again."""
        if text not in self._reported:
            self._reported.add(text)
            self._report(text)

    def _file_of(self, entry: ChainEntry) -> BinaryIO | None:
        for path in (self.folder / entry.name, open_path(self.folder, entry.n)):
            try:
                return _binary(path)
            except FileNotFoundError:
                continue
            except (OSError, UnsafePath) as error:
                self._report_once(f"segment {entry.name} cannot be read: {error}")
                return None
        self._report_unless_removed(entry, f"segment {entry.name} is missing")
        return None

    def _report_unless_removed(self, entry: ChainEntry, text: str) -> None:
        """Report a problem with a segment, unless retention has removed the segment meanwhile."""
        checkpoint = read_chain(self.folder).checkpoint
        if checkpoint is None or checkpoint.checkpoint < entry.n:
            self._report_once(text)

    # ---- lines ---------------------------------------------------------------------------------------

    def _sealed(self, entry: ChainEntry) -> Iterator[AuditEvent]:
        with self._opened(entry) as opened:
            if opened:
                yield from self._decoded(opened)

    def _decoded(self, opened: _OpenFile) -> Iterator[AuditEvent]:
        for _, _, events in self._decoded_blocks(opened):
            yield from events

    def _decoded_blocks(self, opened: _OpenFile) -> Iterator[tuple[int, bytes, list[AuditEvent]]]:
        for at, block in _blocks(opened, self.block_bytes):
            try:
                yield at, block, decode_lines(block)
            except msgspec.DecodeError:
                readable = (event for _, event in self._lines_of(opened, at, block))
                yield at, block, [event for event in readable if event is not None]

    def _lines_of(self, opened: _OpenFile, at: int, block: bytes) -> Iterator[tuple[int, AuditEvent | None]]:
        """The offset of each line, and its event; None when the line is unreadable."""
        for line in block.split(b"\n")[:-1]:
            yield at, self._event(opened, at, line)
            at += len(line) + 1

    def _event(self, opened: _OpenFile, at: int, line: bytes) -> AuditEvent | None:
        try:
            return from_line(line)
        except msgspec.DecodeError as error:
            self.bad_lines += 1
            self._report(f"the line at byte {at} of {opened.name} is skipped: {reason(error)}")
            return None

    # ---- finding -------------------------------------------------------------------------------------

    def _find(self, search: _SearchState, ids: Collection[str]) -> list[AuditEvent]:
        wanted = set(ids) - {""}
        keys = {key_of(one) for one in wanted}
        found: list[AuditEvent] = []
        for entry in search.entries:
            offsets = self._indexed(search, entry, keys)
            if offsets != []:
                with self._opened(entry) as opened:
                    found += self._found_in(search, opened, wanted, offsets) if opened else []
        for opened in search.growing:
            found += self._found_in(search, opened, wanted, None)
        search.is_first = False
        return found

    def _indexed(self, search: _SearchState, entry: ChainEntry, keys: set[int]) -> list[int] | None:
        """The offsets from the index; None without a valid index."""
        if entry.n in search.unindexed:
            return None
        try:
            index = search.indexes.get(entry.n) or Index(index_path(self.folder, entry.n), entry.sha256)
            kept = len(search.indexes) < self.indexes_max or entry.n in search.indexes
            if kept:
                search.indexes[entry.n] = index
            try:
                return index.offsets_of(keys)
            finally:
                if not kept:
                    index.close()
        except (IndexDamaged, OSError, UnsafePath) as error:
            search.unindexed.add(entry.n)
            self._report_unless_removed(entry, f"segment {entry.name} is read completely: {error}")
            return None

    def _found_in(
        self, search: _SearchState, opened: _OpenFile, wanted: set[str], offsets: list[int] | None
    ) -> list[AuditEvent]:
        seen = search.seen.setdefault(opened.name, set())
        if offsets is None and search.is_first:
            lines = self._scanned(opened, wanted)
        else:
            if offsets is None:
                table = search.tables.get(opened.name)
                if table is None:
                    table = search.tables[opened.name] = _table(opened)
                offsets = sorted({offset for one in wanted for offset in table.get(one, ())})
            lines = self._lines_at(opened, [offset for offset in offsets if offset not in seen])
        found = []
        for offset, event in lines:
            if event is None or not wanted.isdisjoint(_ids_of(event)):
                seen.add(offset)
                found += [event] if event is not None else []
        return found

    def _lines_at(self, opened: _OpenFile, offsets: list[int]) -> Iterator[tuple[int, AuditEvent | None]]:
        for offset in offsets:
            opened.file.seek(offset)
            yield offset, self._event(opened, offset, opened.file.readline())

    def _scanned(self, opened: _OpenFile, wanted: set[str]) -> Iterator[tuple[int, AuditEvent | None]]:
        """The lines of a file. A block whose bytes contain none of the ids is not decoded."""
        needles = [msgspec.json.encode(one)[1:-1] for one in wanted]
        for at, block in _blocks(opened, self.block_bytes):
            if len(needles) > NEEDLES_MAX or any(needle in block for needle in needles):
                yield from self._lines_of(opened, at, block)


def _binary(path: Path) -> BinaryIO:
    return os.fdopen(open_safely(path, os.O_RDONLY), "rb")


def _blocks(opened: _OpenFile, block_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Blocks of complete lines and their offsets. Bytes after the last newline are left out."""
    at = opened.start
    opened.file.seek(at)
    while at < opened.end and (block := opened.file.read(block_bytes) + opened.file.readline()):
        block = block[: opened.end - at]
        yield at, block[: block.rfind(b"\n") + 1]
        at += len(block)


def _chosen(
    events: Iterator[AuditEvent], since: int, until: int, sources: Collection[str] | None
) -> Iterator[AuditEvent]:
    for event in events:
        if since <= event.ts_us < until and (sources is None or event.source in sources):
            yield event


def _ids_of(event: AuditEvent) -> set[str]:
    return {event.message_id, event.parent_message_id, event.trace_id}


def _table(opened: _OpenFile) -> dict[str, list[int]]:
    """The line offsets of each id. Unreadable lines, which the first scan has reported, are left out."""
    table: dict[str, list[int]] = {}
    for at, block in _blocks(opened, Segments.block_bytes):
        offset = at
        for line in block.split(b"\n")[:-1]:
            with suppress(msgspec.DecodeError):
                for one in _ids_of(from_line(line)):
                    table.setdefault(one, []).append(offset)
            offset += len(line) + 1
    return table
