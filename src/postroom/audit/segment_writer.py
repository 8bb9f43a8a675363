"""Writing segments: files of JSON lines that grow in `_open/` and, once sealed, are linked in a hash chain.

Rule 1: a folder has one writer at a time, and any number of readers.
Rule 2: `write` returns when the events are durable in the sink's class, or raises and keeps none of them.
Rule 3: the position of a source is derived from the stored lines, so it cannot disagree with them.
Rule 4: sealing is: fsync the data, write the index, append the chain line (the commit point), rename.
Rule 5: recovery after a crash removes no acknowledged data, and each of its steps may be repeated. Bytes that
        are cut off a file are kept in `_torn/`.
Rule 6: a segment has the mark of a redaction only if this sink has redacted every line of it. A segment that
        an earlier writer began, or that has lines of `write_lines`, has none.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import msgspec

from postroom.audit.chain import ChainEntry, append_line, chain_line, parse_chain, read_chain
from postroom.audit.cipher import Cipher
from postroom.audit.index import SEGMENT_BYTES_MAX, IndexBuilder, Keyed, LineKeys
from postroom.audit.layout import (
    CHAIN,
    CHAIN_LOCK,
    DIGITS_OF_HASH,
    INDEX,
    OPEN,
    TORN,
    WRITER_LOCK,
    chain_locked,
    index_path,
    numbered,
    open_path,
    segment_name,
)
from postroom.audit.segment_retention import finish_removal
from postroom.core.formats.events import AuditEvent, encode_lines
from postroom.core.formats.jsoninput import guarded
from postroom.errors import HandleDead, InvalidMessage, InvalidSetting, Unavailable, WriteFailed
from postroom.logs.appendfile import truncated
from postroom.message import Durability
from postroom.system import lock
from postroom.system.atomic import (
    absolute_path,
    make_folder,
    open_safely,
    read_file,
    replace_file,
    sync_folder,
    write_all,
)
from postroom.system.clock import Clock, SystemClock
from postroom.system.handles import Closing, reset_after_fork

SEAL_BYTES = 128 << 20  # the size of a partition that Spark reads at once
SEAL_AFTER_S = 60.0
NANOS_PER_S = 1_000_000_000


_keys = guarded(msgspec.json.Decoder(LineKeys).decode)


class _OpenSegment:
    """The segment that is being written, and the statistics for its entry in the chain."""

    def __init__(self, path: Path, n: int, fd: int, started_ns: int, redaction: str = "") -> None:
        self.path = path
        self.n = n
        self.fd = fd
        self.started_ns = started_ns
        self.redaction = redaction
        self.size = 0
        self.events = 0
        self.index = IndexBuilder()
        self.sources: dict[str, list[int]] = {}
        self.min_ts_us = self.max_ts_us = 0
        self._sha256 = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def count(self, data: bytes, lines: int, starts: Sequence[int], marks: Sequence[Keyed]) -> None:
        """Count lines that are in the file, and add the readable ones to the index and the statistics."""
        self._sha256.update(data)
        self.size += len(data)
        self.events += lines
        if not marks:
            return
        self.index.add(marks, starts)
        times = [mark.ts_us for mark in marks]
        if self.sources:
            times += (self.min_ts_us, self.max_ts_us)
        self.min_ts_us, self.max_ts_us = min(times), max(times)
        sources = self.sources
        for mark in marks:
            seq = mark.seq
            span = sources.get(mark.source)
            if span is None:
                sources[mark.source] = [seq, seq]
            elif seq > span[1]:
                span[1] = seq
            elif seq < span[0]:
                span[0] = seq

    def resume(self, data: bytes) -> None:
        """Count the lines that an earlier writer left. An unreadable line stays; readers report it."""
        starts, marks = [], []
        at = 0
        for line in data.split(b"\n")[:-1]:
            with suppress(msgspec.DecodeError):
                marks.append(_keys(line))
                starts.append(at)
            at += len(line) + 1
        self.count(data, data.count(b"\n"), starts, marks)

    def entry(self, prev: str, sealed_us: int, index: bytes) -> ChainEntry:
        return ChainEntry(
            n=self.n,
            name=segment_name(self.n, self.sha256, sealed_us),
            events=self.events,
            bytes=self.size,
            sha256=self.sha256,
            prev=prev,
            min_ts_us=self.min_ts_us,
            max_ts_us=self.max_ts_us,
            sealed_us=sealed_us,
            sources={source: (first, last) for source, (first, last) in self.sources.items()},
            index=hashlib.sha256(index).hexdigest(),
            redaction=self.redaction,
        )


class SegmentSink(Closing):
    """Writes a folder of segments. `prepare`, such as redaction, is applied to each event first.

    `redaction` is the mark of the redaction that `prepare` does; see `audit.redaction_marks`.

    A segment is sealed by a write that finds it full or older than `seal_after_s`, by `seal_if_due` and by
    `seal`. `close` leaves it unsealed: the next writer of the folder continues it.
    """

    segment_bytes_max = SEGMENT_BYTES_MAX
    _lock_fd = -1

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        seal_bytes: int = SEAL_BYTES,
        seal_after_s: float = SEAL_AFTER_S,
        durability: Durability = "group",
        clock: Clock | None = None,
        prepare: Callable[[AuditEvent], AuditEvent] | None = None,
        redaction: str = "",
        cipher: Cipher | None = None,
    ) -> None:
        if not 0 < seal_bytes <= SEGMENT_BYTES_MAX:
            raise InvalidSetting(f"seal_bytes is {seal_bytes}, and must be 1 to {SEGMENT_BYTES_MAX}")
        if redaction and prepare is None:
            raise InvalidSetting("a mark of redaction needs a redacting function (prepare)")
        self.folder = absolute_path("the folder of segments", folder)
        self._seal_bytes = seal_bytes
        self._seal_after_ns = round(seal_after_s * NANOS_PER_S)
        self._durability: Durability = durability
        self._clock = clock or SystemClock()
        self._prepare = prepare
        self._redaction = redaction
        self._cipher = cipher
        self._mutex = threading.RLock()
        self._lock_fd = -1
        self._growing: _OpenSegment | None = None
        self._dead = False
        self._last = 0
        self._sealed = 0
        self._head = ""
        self._positions: dict[str, int] = {}
        reset_after_fork(self)
        self._open()

    def __del__(self) -> None:
        self._drop()

    # ---- the interface of a sink ---------------------------------------------------------------------

    @property
    def head(self) -> str:
        """The hash of the last sealed segment. Recorded elsewhere, it can later reveal missing segments."""
        with self._mutex:
            self._open()
            return self._head

    @property
    def sealed(self) -> tuple[int, str]:
        """The number and the hash of the last sealed segment; 0 before there is one."""
        with self._mutex:
            self._open()
            return self._sealed, self._head

    def position(self, source: str) -> int:
        """The last stored `seq` of a source; 0 for none."""
        with self._mutex:
            self._open()
            return self._positions.get(source, 0)

    def write(self, events: Sequence[AuditEvent]) -> None:
        """Store all events, in order, or raise and store none."""
        if self._prepare:
            events = [self._prepare(event) for event in events]
        if self._cipher:
            events = [self._cipher.encrypt(event) for event in events]
        data = encode_lines(events)
        lengths = [len(line) + 1 for line in data.split(b"\n")[:-1]]
        self._write(data, events, lengths, self._redaction)

    def write_lines(self, lines: Sequence[bytes], marks: Sequence[Keyed]) -> None:
        """Store encoded lines, each with its newline and its keys.

        `prepare` and `cipher` are not applied.
        """
        data = b"".join(lines)
        newlines = len(data) - len(data.replace(b"\n", b""))  # `count` takes five times as long
        if not len(lines) == len(marks) == newlines:
            raise InvalidMessage("every line must end with its only newline and have one mark")
        self._write(data, marks, map(len, lines))

    def seal(self) -> None:
        """Seal the open segment unless it is empty."""
        with self._mutex:
            self._open()
            self._seal()

    def seal_if_due(self) -> bool:
        """Seal the open segment when it is full or old enough; returns whether it did. Call it regularly."""
        with self._mutex:
            self._open()
            due = self._is_due(0)
            if due:
                self._seal()
            return due

    def reopen(self) -> None:
        """Continue after a failed fsync, with the data that is on disk."""
        with self._mutex:
            was_dead, self._dead = self._dead, False
            self._drop()
            try:
                self._open(again=was_dead)
            except BaseException:
                self._dead = was_dead
                raise

    def close(self) -> None:
        """Release the folder to other writers; the next call takes it again."""
        with self._mutex:
            if self._lock_fd >= 0:
                lock.forget_holder(self._lock_fd)
            self._drop()

    def after_fork(self) -> None:
        """Reset in a forked child: the parent keeps the folder, and the child must lock it itself."""
        self._mutex = threading.RLock()
        self._drop()

    # ---- lines ---------------------------------------------------------------------------------------

    def _write(
        self, data: bytes, marks: Sequence[Keyed], lengths: Iterable[int], redaction: str = ""
    ) -> None:
        if not marks:
            return
        if len(data) > (most := self.segment_bytes_max):
            raise InvalidMessage(f"{len(data)} bytes at once are more than a segment's {most}")
        with self._mutex:
            self._open()
            if self._is_due(len(data)):
                # Before writing, so that none of the new events is stored when sealing fails.
                try:
                    self._seal()
                except WriteFailed as error:
                    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
                    raise WriteFailed(error.path, cause) from error
            growing = self._growing or self._start()
            if redaction != growing.redaction:
                growing.redaction = ""
            self._append(growing, data)
            growing.count(data, len(marks), list(accumulate(lengths, initial=growing.size)), marks)
            self._note_positions(growing)

    def _is_due(self, more_bytes: int) -> bool:
        growing = self._growing
        if growing is None or not growing.size:
            return False
        full = growing.size + more_bytes > self._seal_bytes or growing.size >= self._seal_bytes
        return full or self._clock.boot_ns() - growing.started_ns >= self._seal_after_ns

    def _start(self) -> _OpenSegment:
        n = self._last + 1
        path = open_path(self.folder, n)
        try:
            # Only an empty file of a failed start can have this name.
            fd = open_safely(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC)
        except OSError as error:
            raise WriteFailed(path, error) from error
        self._last = n
        self._growing = _OpenSegment(path, n, fd, self._clock.boot_ns(), self._redaction)
        self._sync(path, lambda: sync_folder(path.parent))
        return self._growing

    def _append(self, growing: _OpenSegment, data: bytes) -> None:
        if not growing.size:
            growing.started_ns = self._clock.boot_ns()
        try:
            write_all(growing.fd, data)
        except OSError as error:
            rolled_back = self._roll_back(growing)
            raise WriteFailed(growing.path, error, rolled_back=rolled_back) from error
        self._sync(growing.path, lambda: os.fsync(growing.fd), roll_back=growing)

    def _sync(self, path: Path, sync: Callable[[], None], roll_back: _OpenSegment | None = None) -> None:
        """Sync, except in the class "os", where a segment is synced only when it is sealed."""
        if self._durability == "os":
            return
        try:
            sync()
        except OSError as error:
            self._dead = True
            rolled_back = roll_back is None or self._roll_back(roll_back)
            raise WriteFailed(path, error, rolled_back=rolled_back) from error

    def _roll_back(self, growing: _OpenSegment) -> bool:
        done = truncated(growing.fd, growing.size)
        self._dead = self._dead or not done
        return done

    def _note_positions(self, growing: _OpenSegment) -> None:
        positions = self._positions
        for source, (_, last) in growing.sources.items():
            if last > positions.get(source, 0):
                positions[source] = last

    # ---- sealing -------------------------------------------------------------------------------------

    def _seal(self) -> None:
        growing = self._growing
        if growing is None or not growing.size:
            return
        try:
            os.fsync(growing.fd)
        except OSError as error:
            self._dead = True
            raise WriteFailed(growing.path, error, rolled_back=False) from error
        index = growing.index.encode(growing.sha256)
        entry = growing.entry(self._head, self._clock.wall_us(), index)
        line, digest = chain_line(entry)
        try:
            make_folder((self.folder / entry.name).parent, "group")
            replace_file(index_path(self.folder, growing.n), index, "group")
            with chain_locked(self.folder):
                append_line(self.folder, line)
                self._head, self._sealed, self._growing = digest, growing.n, None
                os.close(growing.fd)
                self._move_sealed(entry)
        except WriteFailed as error:
            self._dead = self._dead or not error.rolled_back
            raise
        except OSError as error:
            self._dead = self._dead or self._growing is None  # sealed, but recovery must move it
            raise WriteFailed(growing.path, error, rolled_back=False) from error

    # ---- opening -------------------------------------------------------------------------------------

    def _open(self, *, again: bool = False) -> None:
        if self._dead:
            raise HandleDead(self.folder)
        if self._lock_fd >= 0:
            return
        try:
            for folder in (self.folder, self.folder / OPEN, self.folder / INDEX):
                make_folder(folder, "group")
            self._lock_fd = lock.open_lock_file(self.folder / WRITER_LOCK)
            lock.hold(self._lock_fd, f"{self.folder} already has a writer; only one at a time is allowed")
            os.close(open_safely(self.folder / CHAIN_LOCK, os.O_RDWR | os.O_CREAT))
            with chain_locked(self.folder):
                if again:  # rewrite the files: after a failed fsync the kernel may treat lost pages as clean
                    growing = numbered(self.folder / OPEN, ".jsonl").values()
                    for path in (*growing, self.folder / CHAIN):
                        with suppress(FileNotFoundError):
                            replace_file(path, read_file(path), "group")
                self._recover()
        except BaseException as error:
            self._drop()
            if isinstance(error, OSError) and not isinstance(error, (WriteFailed, Unavailable)):
                raise WriteFailed(self.folder, error) from error
            raise

    def _recover(self) -> None:
        """Complete what a crash interrupted, with both locks held. It leaves at most one open segment."""
        with suppress(FileNotFoundError):
            data = read_file(self.folder / CHAIN)
            whole = parse_chain(data).whole_bytes
            if whole < len(data):
                self._cut(self.folder / CHAIN, data, whole)
        chain = read_chain(self.folder)
        finish_removal(self.folder, chain)
        self._last = self._sealed = chain.last
        self._head, self._positions = chain.head, chain.positions()
        sealed = {entry.n: entry for entry in chain.entries}
        for n, path in numbered(self.folder / OPEN, ".jsonl").items():
            entry = sealed.get(n)
            if entry is None:
                self._last = max(self._last, n)
                self._resume(n, path)
            elif not (self.folder / entry.name).exists():
                self._move_sealed(entry)

    def _move_sealed(self, entry: ChainEntry) -> None:
        """The last step of sealing: move the segment to its final path, where every reader finds it."""
        target = self.folder / entry.name
        make_folder(target.parent, "group")
        open_path(self.folder, entry.n).rename(target)
        sync_folder(target.parent)
        sync_folder(self.folder / OPEN)

    def _cut(self, path: Path, data: bytes, size: int) -> None:
        """Truncate a file to `size`. The removed bytes are kept, once, under a name with their hash."""
        torn = data[size:]
        digest = hashlib.sha256(torn).hexdigest()[:DIGITS_OF_HASH]
        make_folder(self.folder / TORN, "group")
        replace_file(self.folder / TORN / f"{path.name}.{size}-{digest}", torn, "group")
        fd = open_safely(path, os.O_WRONLY)
        try:
            os.ftruncate(fd, size)
            os.fsync(fd)
        finally:
            os.close(fd)

    def _resume(self, n: int, path: Path) -> None:
        """Continue a segment that an earlier writer left open."""
        if self._growing is not None:
            os.close(self._growing.fd)  # a crash never leaves two open segments; both stay readable
        data = read_file(path)
        # A line without a newline was never finished. No line holds a NUL byte: a file system leaves them
        # where a power cut lost data, and nothing after them was acknowledged.
        hole = data.find(b"\0")
        whole = data.rfind(b"\n", 0, hole if hole >= 0 else len(data)) + 1
        if whole < len(data):
            self._cut(path, data, whole)
        fd = open_safely(path, os.O_RDWR | os.O_APPEND)
        self._growing = _OpenSegment(path, n, fd, self._clock.boot_ns())
        if self._durability != "os":
            os.fsync(fd)  # from now on these lines count as stored
        self._growing.resume(data[:whole])
        self._note_positions(self._growing)

    def _drop(self) -> None:
        growing, self._growing = getattr(self, "_growing", None), None
        lock_fd, self._lock_fd = self._lock_fd, -1
        for fd in (growing.fd if growing else -1, lock_fd):
            if fd >= 0:
                os.close(fd)
