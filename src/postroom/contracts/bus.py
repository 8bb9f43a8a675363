"""`Bus`: an append-only YAML log that many processes write and read without a server.

Each reader keeps its own position: the id of the last message it has seen. The append is the commit point:
once it has returned an id, the message is in the file, and messages are in the order of their ids.
"""

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from postroom.core.formats import buswire, ids
from postroom.core.times import NANOS_PER_S, checked_seconds, normal_utc, parse_utc, second_texts
from postroom.errors import InvalidMessage, Unavailable, UnsafePath, WriteFailed
from postroom.logs import busfile
from postroom.logs.appendfile import AppendFile, opened
from postroom.message import BusMessage, Damage, Durability
from postroom.nudges.watch import Watch
from postroom.system import lock
from postroom.system.atomic import absolute_path, is_path, open_safely, sync_folder
from postroom.system.clock import nanoseconds_of
from postroom.system.handles import Closing, reset_after_fork
from postroom.system.log import library_log

FILE_MODE = 0o644  # as in conductor-loop: other users may read a bus
FOLDER_MODE = 0o755
DISCOVERY_BYTES = 4096  # examined to decide whether a file is a bus
REOPENS_MAX = 1000  # times that one append follows a path whose file keeps being replaced
DURABILITIES = ("os", "group", "fsync")

_log = library_log("postroom.bus")
_APPEND_KEYWORDS = frozenset(
    {"type", "project_id", "task_id", "run_id", "parents", "attachment", "body", "ts"}
)
_UNKNOWN = -2  # differs from every size and from -1, which means that the file was replaced
_sequence = itertools.count(1)


class Duplicate(msgspec.Struct, frozen=True):
    """A record with the id of an earlier one. A reader that resumes after this id skips those in between."""

    msg_id: str
    offset: int
    first_offset: int


class BusReport(msgspec.Struct, frozen=True):
    """The result of `Bus.verify`."""

    path: str
    bytes: int
    messages: int
    checked: int
    """Messages with a valid checksum."""
    unchecked: int
    """Messages without a checksum: written by conductor-loop, or legacy lines."""
    damaged: tuple[Damage, ...]
    torn_tail_bytes: int
    """Bytes at the end that are not (yet) a complete record."""
    duplicates: tuple[Duplicate, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged and every id is unique. A torn tail, never acknowledged, is fine."""
        return not (self.damaged or self.duplicates)


class Bus(Closing):
    """An append-only message log in one YAML file.

    `root` is the folder that must contain all attachments (default: the bus file's folder). The file is
    archived before a write would make it larger than `rotate_bytes`. `durability` says when an append counts
    as stored: "os" (page cache), "group" (an fsync shared by the waiting threads), "fsync" (one per append).
    `clock` returns an aware datetime, used for ids and timestamps.

    A handle may be shared between threads and used after a fork.
    """

    _file_mode, _folder_mode = FILE_MODE, FOLDER_MODE

    def __init__(
        self,
        path: str | os.PathLike[str],
        root: str | os.PathLike[str] | None = None,
        lock_timeout_s: float = 10.0,
        poll_interval_s: float = 0.2,
        rotate_bytes: int | None = None,
        durability: Durability = "os",
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        for name, value in (("lock_timeout_s", lock_timeout_s), ("poll_interval_s", poll_interval_s)):
            if not checked_seconds(name, value):
                raise InvalidMessage(f"{name} must be positive, not {value!r}")
        if rotate_bytes is not None and not _checked_limit("rotate_bytes", rotate_bytes):
            raise InvalidMessage(f"rotate_bytes must be positive, not {rotate_bytes!r}")
        if durability not in DURABILITIES:
            raise InvalidMessage(f"durability must be one of {', '.join(DURABILITIES)}, not {durability!r}")
        # `path` is as given, for messages; `_at` stays valid when the process changes its working folder.
        self._at = absolute_path("the bus path", path)
        self.path = Path(path)
        self.root = absolute_path("the root", root) if root is not None else self._at.parent
        self._lock_timeout_s = lock_timeout_s
        self._poll_interval_s = poll_interval_s
        self._rotate_bytes = rotate_bytes
        self._durability: Durability = durability
        self._now_ns = time.time_ns if clock is None else nanoseconds_of(clock)
        self._file = AppendFile(
            self._at, durability, file_mode=self._file_mode, folder_mode=self._folder_mode
        )
        self._mutex = threading.Lock()
        self._known_end = _UNKNOWN
        self._last_id = ""
        self._separator = b""
        self._origin = ids.origin(os.getpid())
        self._reported: set[Damage] = set()
        reset_after_fork(self)

    # ---- writing -------------------------------------------------------------------------------

    def append(
        self,
        *,
        type: str,  # noqa: A002 - the field's public name
        project_id: str,
        task_id: str = "",
        run_id: str = "",
        parents: Iterable[str] = (),
        attachment: str | os.PathLike[str] | None = None,
        body: str = "",
        ts: datetime | str | None = None,
    ) -> str:
        """Append one message and return its id."""
        draft = buswire.draft(
            type,
            project_id,
            task_id,
            run_id,
            parents,
            self._attachment(attachment) if attachment is not None else "",
            body,
            normal_utc(ts) if ts is not None else "",
        )
        if self._rotate_bytes is not None:
            return self._write(buswire.batch([draft]))[0]
        # The steps of `_write`, inlined for one message: every function call on this path costs speed.
        file = self._file
        with self._mutex:
            try:
                size = file.lock_end(self._lock_timeout_s)
                if size != self._known_end:
                    size = self._catch_up(size)
                msg_id, data = buswire.encode_next(
                    draft, self._now_ns(), self._origin, next(_sequence), self._last_id, self._separator
                )
                self._last_id = msg_id
                ticket = file.append(data, size)
                self._known_end = size + len(data)
                self._separator = b"\n"
            finally:
                if file.fd >= 0:
                    lock.flock(file.fd, lock.UNLOCK)
        if ticket:
            self._settle(ticket)
        return msg_id

    def append_many(self, messages: Iterable[Mapping[str, Any]]) -> list[str]:
        """Append messages, each given as a mapping of `append`'s keywords, with one lock and one write."""
        try:
            messages = list(messages)
        except TypeError:
            raise InvalidMessage(f"messages must be a list, not {type(messages).__name__}") from None
        batch = buswire.everyday_batch(messages)
        if batch is None:
            batch = buswire.batch(map(self._draft_of, messages))
        return self._write(batch) if batch.bodies else []

    def _draft_of(self, message: Mapping[str, Any]) -> buswire.Draft:
        """Validate one message of `append_many`."""
        if not isinstance(message, Mapping):
            raise InvalidMessage(
                f"a message must be given by append's keywords, not {type(message).__name__}"
            )
        unknown = set(message) - _APPEND_KEYWORDS
        if unknown:
            raise InvalidMessage(f"unknown message fields: {', '.join(sorted(map(str, unknown)))}")
        attachment, ts = message.get("attachment"), message.get("ts")
        return buswire.draft(
            message.get("type", ""),
            message.get("project_id", ""),
            message.get("task_id", ""),
            message.get("run_id", ""),
            message.get("parents", ()),
            self._attachment(attachment) if attachment is not None else "",
            message.get("body", ""),
            normal_utc(ts) if ts is not None else "",
        )

    def _write(self, batch: buswire.DraftBatch) -> list[str]:
        file = self._file
        with self._mutex:
            try:
                size = self._lock_current()
                msg_ids, data = self._encode(batch)
                while self._rotate_bytes is not None and 0 < size > self._rotate_bytes - len(data):
                    self._rotate_locked()
                    size = self._lock_current()
                    msg_ids, data = self._encode(batch)
                # Set before the write: a reader may see the id even if the write fails, so it is not reused.
                self._last_id = msg_ids[-1]
                ticket = file.append(data, size)
                self._known_end = size + len(data)
                self._separator = b"\n"
            finally:
                if file.fd >= 0:
                    lock.release(file.fd)
        if ticket:
            self._settle(ticket)
        return msg_ids

    def _encode(self, batch: buswire.DraftBatch) -> tuple[list[str], bytes]:
        """The ids and bytes of a batch, made under the lock."""
        sequences = list(itertools.islice(_sequence, len(batch.bodies)))
        msg_ids, ts = ids.bus_ids(self._now_ns(), self._origin, sequences, self._last_id)
        return msg_ids, buswire.encode_batch(batch, msg_ids, ts, self._separator)

    def _lock_current(self) -> int:
        """Lock the file that the path currently names; returns its size."""
        size = self._file.lock_end(self._lock_timeout_s)
        return size if size == self._known_end else self._catch_up(size)

    def _catch_up(self, size: int) -> int:
        """Update the known end after another process wrote; reopen the file when `size` is -1."""
        file = self._file
        for _ in range(REOPENS_MAX):
            if size >= 0:
                break
            self._known_end = _UNKNOWN
            file.close()
            file.open()
            size = file.lock_end(self._lock_timeout_s)
        if size < 0:
            raise Unavailable(f"{self.path} is replaced faster than it can be locked")
        found, self._separator = "", b""
        if size:
            found, last_byte = busfile.last_id_and_byte(file.fd, size)
            if not found and self._known_end == _UNKNOWN:  # a wrong path must not damage another file
                try:
                    _need_bus(self.path, file.fd)
                except UnsafePath:
                    file.close()  # so that the next append checks again
                    raise
            # An unfinished last line gets a newline of its own.
            self._separator = b"\n" if last_byte == b"\n" else b"\n\n"
        found = found or busfile.newest_archived_id(self._at)
        if found > self._last_id and ids.is_ordered(found):
            self._last_id = found
        self._known_end = size
        return size

    def _settle(self, ticket: int) -> None:
        file = self._file
        try:
            file.settle(ticket)
        except OSError as error:
            with self._mutex:
                rolled_back = file.roll_back_group(file.fd, self._lock_timeout_s)
            raise WriteFailed(self.path, error, rolled_back=rolled_back) from error

    def _attachment(self, attachment: str | os.PathLike[str]) -> str:
        """The attachment's path relative to `root`. It must be inside `root` after resolving symlinks."""
        try:
            text = os.fspath(attachment)
        except TypeError:
            raise InvalidMessage(f"attachment must be a path, not {type(attachment).__name__}") from None
        if not isinstance(text, str) or not text or not is_path(text):
            raise UnsafePath(f"attachment {text!r} is not a path")
        try:
            root = self.root.resolve()
            target = (root / text).resolve()
        except (OSError, RuntimeError) as error:  # a loop of symlinks is a RuntimeError up to Python 3.12
            raise UnsafePath(f"attachment {text!r} cannot be resolved: {error}") from error
        if target == root or not target.is_relative_to(root):
            raise UnsafePath(f"attachment {text!r} is not inside {root}")
        return target.relative_to(root).as_posix()

    # ---- reading -------------------------------------------------------------------------------

    def read(
        self, since_id: str = "", limit: int | None = None, *, archives: bool = False
    ) -> list[BusMessage]:
        """Messages after `since_id` (all, when it is empty), at most the first `limit`."""
        return list(itertools.islice(self.scan(since_id, archives=archives), _most(limit)))

    def scan(self, since_id: str = "", *, archives: bool = False) -> Iterator[BusMessage]:
        """As `read`, but an iterator with bounded memory."""
        # Opened here, so that an unknown `since_id` raises now and not at the first message.
        return self._scan(busfile.BusReader(self._at, since_id, self._report, search_archives=archives))

    def _scan(self, reader: busfile.BusReader) -> Iterator[BusMessage]:
        try:
            for batch in reader.batches():
                yield from batch
        finally:
            reader.close()

    def tail(self, n: int = 100) -> list[BusMessage]:
        """The last n messages. The cost depends on n, not on the size of the file."""
        n = _checked_limit("n", n)
        try:
            fd = open_safely(self._at, os.O_RDONLY)
        except FileNotFoundError:
            return []
        try:
            return busfile.tail(fd, n, self._report)
        finally:
            os.close(fd)

    def count(self) -> int:
        """The number of messages in the current file."""
        return sum(1 for _ in self.scan())

    def poll(
        self, last_id: str = "", timeout_s: float | None = None, *, archives: bool = False
    ) -> list[BusMessage]:
        """Wait for messages after `last_id`; an empty list when none came within `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + checked_seconds("timeout_s", timeout_s)
        for batches in self._passes(last_id, deadline, None, archives=archives):
            messages = list(itertools.chain.from_iterable(batches))
            if messages:
                return messages
        return []

    def follow(
        self,
        since_id: str = "",
        *,
        archives: bool = False,
        stop: Callable[[], bool] | None = None,
        on_gap: Callable[[str], None] | None = None,
    ) -> Iterator[BusMessage]:
        """Messages after `since_id`, then new ones as they come, across rotations, until `stop()` is true.

        `stop` is called after each window of the file, and once per poll interval while nothing comes.
        `on_gap` is called with the last id when the file of that message was removed: messages archived
        after it may be missing from the following ones.
        """
        for batches in self._passes(since_id, None, stop, archives=archives, on_gap=on_gap):
            for batch in batches:
                yield from batch
                if stop is not None and stop():
                    return

    def _passes(
        self,
        since_id: str,
        deadline: float | None,
        stop: Callable[[], bool] | None,
        *,
        archives: bool,
        on_gap: Callable[[str], None] | None = None,
    ) -> Iterator[Iterator[list[BusMessage]]]:
        """One iterator of batches per wake-up. Exhaust it before the next pass."""
        reader = busfile.BusReader(self._at, since_id, self._report, search_archives=archives, on_gap=on_gap)
        with closing(reader), closing(Watch(self._at, self._poll_interval_s)) as watch:
            while True:
                watch.arm()
                yield reader.batches()
                left_s = self._poll_interval_s if deadline is None else deadline - time.monotonic()
                if left_s <= 0 or (stop is not None and stop()):
                    return
                watch.wait(left_s)

    def query(
        self,
        *,
        type: str | None = None,  # noqa: A002 - the field's public name
        project_id: str | None = None,
        task_id: str | None = None,
        run_id: str | None = None,
        since: datetime | str | None = None,
        until: datetime | str | None = None,
        parent: str | None = None,
        limit: int | None = None,
        archives: bool = False,
    ) -> list[BusMessage]:
        """Messages that match every given field, with `since` <= ts < `until`. Reads the whole file."""
        fields = {"type": type, "project_id": project_id, "task_id": task_id, "run_id": run_id}
        wanted = [(name, value) for name, value in fields.items() if value is not None]
        begin, end = _instant(since), _instant(until)
        hits = (
            message
            for message in self.scan(archives=archives)
            if all(getattr(message, name) == value for name, value in wanted)
            and (parent is None or parent in message.parents)
            and (begin is None or message.ts >= begin)
            and (end is None or message.ts < end)
        )
        return list(itertools.islice(hits, _most(limit)))

    def need_bus(self) -> None:
        """Raise `UnsafePath` when the file holds something other than a bus. A missing file is fine."""
        with suppress(FileNotFoundError), opened(self._at) as fd:
            if not busfile.last_id(fd):
                _need_bus(self.path, fd)

    # ---- maintenance ---------------------------------------------------------------------------

    def archives(self) -> list[Path]:
        """The rotated files, oldest first."""
        return [self.path.with_name(archive.name) for archive in busfile.archives(self._at)]

    def rotate(self, min_bytes: int = 1) -> Path | None:
        """Archive the file if it has at least `min_bytes`; returns the archive, or None."""
        least = max(_checked_limit("min_bytes", min_bytes), 1)
        with self._mutex:
            if not self._at.exists() and not self._at.is_symlink():
                return None
            try:
                size = self._lock_current()
                return self._rotate_locked() if size >= least else None
            finally:
                if self._file.fd >= 0:
                    lock.release(self._file.fd)

    def _rotate_locked(self) -> Path:
        """Rename under the lock. A writer that waits for the lock notices the new file before it writes."""
        stamp = second_texts(self._now_ns() // NANOS_PER_S)[0]
        archive = busfile.next_archive(self._at, stamp)
        os.rename(self._at, archive)
        if self._durability != "os":
            sync_folder(self._at.parent)
        self._file.close()
        self._known_end = _UNKNOWN
        return self.path.with_name(archive.name)

    def verify(self) -> BusReport:
        """Read the whole file and report counts, and any damage with its location."""
        try:
            with opened(self._at) as fd:
                return self._verify(fd)
        except FileNotFoundError:
            return BusReport(str(self.path), 0, 0, 0, 0, (), 0)

    def _verify(self, fd: int) -> BusReport:
        messages = unchecked = end = 0
        legacy_line: int | None = 0
        damaged: list[Damage] = []
        largest, unordered = "", set()
        for part in busfile.decode_from(fd, 0, 0):
            for message in part.messages:
                if message.msg_id > largest:  # not a duplicate: all earlier ids are smaller
                    largest = message.msg_id
                else:
                    unordered.add(message.msg_id)
            messages += len(part.messages)
            unchecked += part.unchecked
            damaged += part.damaged
            end += part.consumed
            legacy_line = part.legacy_line
        rest = os.pread(fd, buswire.RECORD_BYTES_MAX, end)
        if legacy_line is None and not buswire.may_grow_into_record(rest):
            damaged.append(Damage(end, len(rest), "not a record"))
            rest, end = b"", end + len(rest)
        return BusReport(
            path=str(self.path),
            bytes=end + len(rest),
            messages=messages,
            checked=messages - unchecked,
            unchecked=unchecked,
            damaged=tuple(damaged),
            torn_tail_bytes=len(rest) if rest.strip() else 0,
            duplicates=tuple(_duplicates(fd, unordered)) if unordered else (),
        )

    def _report(self, damaged: list[Damage]) -> None:
        """Log each skipped part once per handle."""
        for damage in damaged:
            if damage not in self._reported:
                self._reported.add(damage)
                _log.warning(
                    "%s: skipped %d bytes at offset %d: %s",
                    self.path, damage.length, damage.offset, damage.reason,
                )  # fmt: skip

    # ---- opening and closing -------------------------------------------------------------------

    def reopen(self) -> BusReport:
        """Continue after a failed fsync: drop the dead descriptor and verify the file."""
        with self._mutex:  # several threads may see the failure and call this
            self._file.close()
            self._file.forget()
            self._known_end = _UNKNOWN
        return self.verify()

    def close(self) -> None:
        """Close the file. The next call opens it again."""
        with self._mutex:
            self._file.close()
            self._known_end = _UNKNOWN

    def after_fork(self) -> None:
        """Reset in a forked child, which needs its own descriptor and lock."""
        self._mutex = threading.Lock()
        self._file.forget()
        self._known_end = _UNKNOWN
        self._origin = ids.origin(os.getpid())


def discover(root: str | os.PathLike[str]) -> list[Path]:
    """The bus files below a folder, without archives."""
    found = []
    for folder, _, names in os.walk(root):
        for path in (Path(folder, name) for name in names if not name.endswith(busfile.ARCHIVE_SUFFIX)):
            # On some special file systems a file can be opened but not read.
            with suppress(OSError, UnsafePath), opened(path) as fd:
                if buswire.opens_like_bus(os.pread(fd, DISCOVERY_BYTES, 0)):
                    found.append(path)
    return sorted(found)


def _duplicates(fd: int, suspects: set[str]) -> Iterator[Duplicate]:
    """Records that repeat the id of an earlier record. Only ids in `suspects` are kept in memory."""
    first_offsets: dict[str, int] = {}
    for part in busfile.decode_from(fd, 0, 0):
        for message, offset in zip(part.messages, part.starts, strict=True):
            if message.msg_id in suspects:
                first = first_offsets.setdefault(message.msg_id, offset)
                if first != offset:
                    yield Duplicate(message.msg_id, offset, first)


def _need_bus(path: Path, fd: int) -> None:
    """Raise `UnsafePath` unless a file in which no id was found can still be a bus."""
    if not buswire.may_be_bus(os.pread(fd, DISCOVERY_BYTES, 0)):
        raise UnsafePath(f"{path} is not a bus file: it is not empty and holds no bus record")


def _instant(value: datetime | str | None) -> datetime | None:
    return None if value is None else parse_utc(normal_utc(value))


def _most(limit: int | None) -> int | None:
    return None if limit is None else _checked_limit("limit", limit)


def _checked_limit(name: str, limit: object) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise InvalidMessage(f"{name} must be a whole number of 0 or more, not {limit!r}")
    return min(limit, sys.maxsize)
