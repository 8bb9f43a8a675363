"""Reading a bus file and its archives: forward in bounded memory, backward from the end.

Rule 1: readers do not take the writers' lock. The one exception is a foreign record at the end of the file:
        it has no length, so the reader tests whether the lock is free, that is, whether it may still grow.
Rule 2: a saved position is valid only while its record is still at the same offset.
Rule 3: after a rotation a reader finishes the old file before it opens the next.
"""

import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from postroom.core.formats.buswire import (
    CHECKSUM_LINE_BYTES,
    MARKER,
    OPENING_BYTES,
    RECORD_BYTES_MAX,
    START,
    Decoded,
    closes_header,
    decode,
)
from postroom.core.formats.foreign_bus import LEGACY_PREFIX
from postroom.errors import InvalidMessage, SinceIdNotFound, UnsafePath
from postroom.logs.appendfile import opened
from postroom.message import BusMessage, Damage
from postroom.system import lock
from postroom.system.atomic import open_safely

Report = Callable[[list[Damage]], None]

WINDOW_BYTES = 256 * 1024
BACKWARD_FIRST_BYTES = 8 * 1024
BACKWARD_LAST_BYTES = 1024 * 1024
ID_BYTES_MAX = 512
USUAL_RECORD_BYTES = 2 * 1024
SETTLE_PATIENCE_S = 0.05
SETTLE_PAUSE_S = 0.001

_NEWLINE = 0x0A
_SEPARATOR = b"---"
_ID_LINE = b"\nmsg_id: "
ARCHIVE_SUFFIX = ".archived"
_ARCHIVE_TAIL = re.compile(r"\.(\d{8}-\d{6})(?:-(\d{4,}))?\.archived", re.ASCII)


# ---- one open file ---------------------------------------------------------------------------------


def decode_from(
    fd: int, position: int, legacy_line: int | None, window_bytes: int = WINDOW_BYTES
) -> Iterator[Decoded]:
    """Decode from `position` to the end of the file, a window at a time."""
    window = window_bytes
    carried = 0
    while True:
        wanted = carried + window
        data, decoded = _decode_window(fd, position, wanted, legacy_line)
        yield decoded
        if len(data) < wanted:
            return
        carried = len(data) - decoded.consumed
        # A record longer than the window: double the window, so that the total work stays linear.
        window = min(window * 2, RECORD_BYTES_MAX) if decoded.consumed == 0 else window_bytes
        position += decoded.consumed
        legacy_line = decoded.legacy_line


def _decode_window(fd: int, position: int, wanted: int, legacy_line: int | None) -> tuple[bytes, Decoded]:
    """Read `wanted` bytes and decode them; fewer bytes are the end of the file."""
    data = os.pread(fd, wanted, position)
    decoded = _decode(data, position, wanted, legacy_line, settled=False)
    if decoded.damaged:
        # An append that was rolled back and overwritten during this read looks like damage: read again.
        data = os.pread(fd, wanted, position)
        decoded = _decode(data, position, wanted, legacy_line, settled=False)
    if decoded.held_back and (size := settled_size(fd)) is not None:
        data = os.pread(fd, max(0, min(wanted, size - position)), position)
        decoded = _decode(data, position, wanted, legacy_line, settled=True)
    return data, decoded


def _decode(data: bytes, position: int, wanted: int, legacy_line: int | None, *, settled: bool) -> Decoded:
    at_end = len(data) < wanted
    return decode(data, offset=position, legacy_line=legacy_line, at_file_end=at_end, settled_tail=settled)


def settled_size(fd: int) -> int | None:
    """The size of the file at a moment without an active writer; None when writers never paused."""
    deadline = time.monotonic() + SETTLE_PATIENCE_S
    while True:
        size = lock.size_at_rest(fd)
        if size is not None:
            return size
        if time.monotonic() >= deadline:
            return None
        time.sleep(SETTLE_PAUSE_S)


def find_record(fd: int, msg_id: str) -> int:
    """Offset of the record with this id, searched backward; -1 when there is none."""
    start = start_line(msg_id)
    marker = b"\n" + start
    for begin, data in _backward(fd, len(marker) - 1):
        found = len(data)
        while (found := data.rfind(marker, 0, found + len(marker) - 1)) >= 0:
            if _starts_record(fd, begin, data, found):
                return begin + found + 1
        if begin == 0 and data.startswith(start):
            return 0
    return -1


def find_unusual_record(fd: int, msg_id: str) -> int:
    """Offset of a record whose lines end in CRLF or whose id is not its first key; -1 when there is none.

    Only decoding from the start distinguishes such a record from a body that quotes one. The file is decoded
    only when the id is found on a line of its own.
    """
    line = b"\nmsg_id: " + msg_id.encode("utf-8", "surrogatepass")
    for _, data in _backward(fd, len(line) + 1):
        if line + b"\n" in data or line + b"\r\n" in data:
            break
    else:
        return -1
    found = -1
    for part in decode_from(fd, 0, 0):
        for message, start in zip(part.messages, part.starts, strict=True):
            found = start if message.msg_id == msg_id else found
    return found


def start_line(msg_id: str) -> bytes:
    """The first bytes of the record with this id. An id that is not Unicode text matches no record."""
    return START + msg_id.encode("utf-8", "surrogatepass") + b"\n"


def _starts_record(fd: int, begin: int, data: bytes, found: int) -> bool:
    """Whether the marker at `found` in a window of the file starts a record rather than closing a header."""
    if found >= CHECKSUM_LINE_BYTES:
        return not closes_header(data, found)
    before = min(CHECKSUM_LINE_BYTES, begin + found)
    return before == 0 or not closes_header(os.pread(fd, before, begin + found - before), before)


def start_of_last(fd: int, n: int) -> int:
    """Offset of the n-th last record that starts with its id; 0 when the file has fewer."""
    left = n
    for begin, data in _backward(fd, len(MARKER) - 1):
        position = len(data)
        while (position := data.rfind(MARKER, 0, position + len(MARKER) - 1)) >= 0:
            left -= _starts_record(fd, begin, data, position)
            if left == 0:
                return begin + position + 1
    return 0


def last_id(fd: int) -> str:
    """The id of the last record that has one; empty when there is none."""
    return next((msg_id for _, msg_id in _ids_backward(fd)), "")


def last_id_and_byte(fd: int, size: int) -> tuple[str, bytes]:
    """The last record's id and the file's last byte: what a writer needs after another process has written.

    Competing writers call this before every append, so one read suffices after a record of usual size.
    """
    begin = max(0, size - USUAL_RECORD_BYTES)
    data = os.pread(fd, size - begin, begin)
    marker = data.rfind(MARKER)
    end = data.find(b"\n", marker + len(MARKER))
    if marker > 0 and data[marker - 1] == _NEWLINE and end >= 0:  # a blank line precedes the record
        return data[marker + len(MARKER) : end].decode("utf-8", "replace"), data[-1:]
    return last_id(fd), data[-1:]


def _ids_backward(fd: int) -> Iterator[tuple[int, str]]:
    """Offsets and ids of records that start with their id, last record first. A record may be repeated."""
    for begin, data in _backward(fd, ID_BYTES_MAX):
        position = len(data)
        while (position := data.rfind(_ID_LINE, 0, position)) >= 0:
            id_start = position + len(_ID_LINE)
            id_end = data.find(b"\n", id_start)
            start = position - len(_SEPARATOR) - data.endswith(b"\r", 0, position)
            if id_end < 0 or start < 0 or not data.startswith(_SEPARATOR, start):
                continue
            after_newline = start > 0 and data[start - 1] == _NEWLINE
            if begin + start == 0 or (after_newline and _starts_record(fd, begin, data, start - 1)):
                yield begin + start, data[id_start:id_end].removesuffix(b"\r").decode("utf-8", "replace")


def _backward(fd: int, overlap: int) -> Iterator[tuple[int, bytes]]:
    """Windows from the end of the file to its start, each with `overlap` bytes of the window after it."""
    end = os.fstat(fd).st_size
    size = BACKWARD_FIRST_BYTES
    while end > 0:
        begin = max(0, end - size)
        yield begin, os.pread(fd, end - begin + overlap, begin)
        end = begin
        size = min(size * 2, BACKWARD_LAST_BYTES)


def tail(fd: int, n: int, report: Report) -> list[BusMessage]:
    """The last n messages. When some records are damaged, the search goes further back."""
    wanted = n
    while wanted:
        start = start_of_last(fd, wanted)
        parts = list(decode_from(fd, start, 0 if start == 0 else None))
        messages = [message for part in parts for message in part.messages]
        if len(messages) >= n or start == 0:
            report([damage for part in parts for damage in part.damaged])
            return messages[-n:]
        wanted *= 2
    return []


# ---- archives --------------------------------------------------------------------------------------


def archives(path: Path) -> list[Path]:
    """The rotated files of a bus, oldest first."""
    return [archive for _, archive in _stamped_archives(path)]


def _stamped_archives(path: Path) -> list[tuple[tuple[str, int], Path]]:
    found = []
    with suppress(FileNotFoundError):
        for name in os.listdir(path.parent):
            match = _ARCHIVE_TAIL.fullmatch(name[len(path.name) :]) if name.startswith(path.name) else None
            if match is not None:
                found.append(((match[1], int(match[2] or 0)), path.with_name(name)))
    return sorted(found)


def next_archive(path: Path, stamp: str) -> Path:
    """A free archive name that sorts after every other, even when the clock stepped back."""
    newest, number = max((key for key, _ in _stamped_archives(path)), default=("", 0))
    name = stamp if stamp > newest else f"{newest}-{number + 1:04d}"
    return path.with_name(f"{path.name}.{name}{ARCHIVE_SUFFIX}")


def newest_archived_id(path: Path) -> str:
    """The last id in the archives; empty when there is none."""
    return next(filter(None, map(_last_id_of, reversed(archives(path)))), "")


def _last_id_of(path: Path) -> str:
    try:
        with opened(path) as fd:
            return last_id(fd)
    except (OSError, UnsafePath):
        return ""  # moved or replaced by a link: users may do that with archives


# ---- a reader that keeps its position -----------------------------------------------------------------


class FilePosition(msgspec.Struct):
    """A reader's position in one open file."""

    fd: int
    identity: tuple[int, int]
    position: int = 0
    legacy_line: int | None = 0
    last_start: int = -1
    last_opening: bytes = b""
    """The first bytes of the record at `last_start`, unless they are `START` and its id."""


class BusReader:
    """Reads a bus incrementally, across rotations, without repeating or skipping a message."""

    _current: FilePosition | None = None

    def __init__(
        self,
        path: Path,
        since_id: str,
        report: Report,
        *,
        search_archives: bool,
        on_gap: Callable[[str], None] | None = None,
    ) -> None:
        if not isinstance(since_id, str):
            raise InvalidMessage(f"a since id must be text, not {type(since_id).__name__}")
        since_id = since_id if since_id.strip() else ""  # a blank id counts as none
        self._path = path
        self._report = report
        self._on_gap = on_gap
        self._last_id = since_id
        self._passed: frozenset[Path] = frozenset()
        if since_id:
            self._current = self._locate(since_id, search_archives=search_archives)
        elif not search_archives:
            self._current = open_position(path)
        if self._current is None and not search_archives:
            # No file yet: every later archive holds messages written after this reader started.
            self._passed = frozenset(archives(path))

    def __del__(self) -> None:
        self.close()  # a generator that was never started does not run its `finally`

    def close(self) -> None:
        """Close the current file."""
        place, self._current = self._current, None
        if place is not None:
            os.close(place.fd)

    def batches(self) -> Iterator[list[BusMessage]]:
        """All new messages, one list per window, until the end is reached."""
        while True:
            place = self._current
            if place is not None:
                yield from self._read_on(place)
                current = identity(self._path)
                if current == place.identity or (current is None and not self._archives_after(place)):
                    return
                # Read again: messages may have been written between the last read and the rename.
                yield from self._read_on(place)
            following = self._open_following(place)
            if following is None:
                return
            self.close()
            self._current = following

    def _read_on(self, place: FilePosition) -> Iterator[list[BusMessage]]:
        self._check_position(place)
        start = place.position
        for part in decode_from(place.fd, start, place.legacy_line):
            place.position += part.consumed
            place.legacy_line = part.legacy_line
            if part.damaged:
                self._report(part.damaged)
            messages = part.messages
            if messages:
                # After locating `since_id`, the first record is that record itself.
                if place.last_start == start and messages[0].msg_id == self._last_id:
                    messages = messages[1:]
                place.last_start, place.last_opening = part.starts[-1], part.last_opening
                self._last_id = part.messages[-1].msg_id
            if messages:
                yield messages

    def _check_position(self, place: FilePosition) -> None:
        """Move back when a failed append that was already read has been rolled back since.

        The new position is the last record whose id is not above the last id read. If that record is gone
        too, its replacement has a larger id, as every new record has.
        """
        if place.last_start < 0 or self._last_id.startswith(LEGACY_PREFIX):
            return
        expected = place.last_opening or start_line(self._last_id)
        whole = os.fstat(place.fd).st_size >= place.position
        if whole and os.pread(place.fd, len(expected), place.last_start) == expected:
            return
        for start, msg_id in _ids_backward(place.fd):
            if msg_id <= self._last_id:
                _move_to(place, start)
                self._last_id = msg_id
                return
        place.position, place.last_start = 0, -1

    def _open_following(self, place: FilePosition | None) -> FilePosition | None:
        """The file after `place`; None while there is none.

        A rotation between listing the archives and opening the bus file can insert another file. So the
        archives are listed again, and an inserted file is read first.
        """
        while True:
            later = self._archives_after(place)
            following = open_position(later[0] if later else self._path)
            if later and following is not None:
                self._note_gap(place)
                return following
            if not self._archives_after(place):
                # When an editor has rewritten the file, continue after the last message.
                if place and following and not self._was_archived(place):
                    found = _move_to_id(following, self._last_id)
                    if not found:
                        self._note_gap(place)
                return following
            if following is not None:
                os.close(following.fd)

    def _note_gap(self, place: FilePosition | None) -> None:
        """Call `on_gap` when the current file was removed: files after it may have been removed as well."""
        if place is not None and self._on_gap is not None and not self._was_archived(place):
            self._on_gap(self._last_id)

    def _was_archived(self, place: FilePosition) -> bool:
        return any(identity(archive) == place.identity for archive in archives(self._path))

    def _archives_after(self, place: FilePosition | None) -> list[Path]:
        chain = archives(self._path)
        if place is None:
            return [archive for archive in chain if archive not in self._passed]
        for index, archive in enumerate(chain, 1):
            if identity(archive) == place.identity:
                return chain[index:]
        # The archive that was being read has been removed.
        return [archive for archive in chain if _last_id_of(archive) > self._last_id]

    def _locate(self, since_id: str, *, search_archives: bool) -> FilePosition | None:
        current = open_position(self._path)
        if current is not None and _move_to_id(current, since_id):
            return current
        if current is not None:
            os.close(current.fd)
        chain = archives(self._path)
        for archive in reversed(chain):
            try:
                place = open_position(archive)
            except (OSError, UnsafePath):
                if search_archives:
                    raise
                continue
            if place is not None and _move_to_id(place, since_id):
                if search_archives:
                    return place
                os.close(place.fd)
                raise SinceIdNotFound(since_id, self._path, archive)
            if place is not None:
                os.close(place.fd)
        if current is None and not chain:
            return None  # nothing was ever written here, so every message will be new
        raise SinceIdNotFound(since_id, self._path)


def open_position(path: Path) -> FilePosition | None:
    """The start of a file; None when it does not exist."""
    try:
        fd = open_safely(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    info = os.fstat(fd)
    return FilePosition(fd, (info.st_dev, info.st_ino))


def _move_to_id(place: FilePosition, msg_id: str) -> bool:
    """Move to the record with this id, which reading then skips. Returns whether it was found."""
    number = msg_id.removeprefix(LEGACY_PREFIX)
    if number != msg_id and number.isdecimal():
        # The id of a legacy line is its number, so the position after it is found by counting.
        if not any(
            message.msg_id == msg_id for part in decode_from(place.fd, 0, 0) for message in part.messages
        ):
            return False
        with open(os.dup(place.fd), "rb") as file:
            file.seek(0)
            place.position += sum(len(line) for line in itertools.islice(file, int(number)))
        place.legacy_line = int(number)
        return True
    found = find_record(place.fd, msg_id)
    if found >= 0:
        place.position = place.last_start = found
        place.last_opening = b""
    else:
        found = find_unusual_record(place.fd, msg_id)
        if found < 0:
            return False
        _move_to(place, found)
    place.legacy_line = None
    return True


def _move_to(place: FilePosition, start: int) -> None:
    """Move to a record and remember its first bytes."""
    place.position = place.last_start = start
    place.last_opening = os.pread(place.fd, OPENING_BYTES, start)


def identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of the file that a path names; None when there is none."""
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return None
    return info.st_dev, info.st_ino
