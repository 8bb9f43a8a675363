"""The mail log: append-only segments, with one fsync shared by all waiting callers.

Rule 1: the event loop writes, once for each batch; a separate thread calls fsync. A caller that waits for the
        disk is called back on the loop, in order, after an fsync that began after its bytes were written.
Rule 2: after a failed write or fsync the segment's handle is dead. Nothing is acknowledged until every record
        that was not synced is in a new segment, and an fsync of that segment has succeeded. After a failed
        write no record of the batch is in the file: callers with a `fail` callback are refused at once.
Rule 3: an old segment is never appended to. It is removed only when every live record is in newer segments
        that are on the disk. Its damaged stretches are kept in files next to it first.
Rule 4: compaction copies the live records and removes the old segments in two cases. Either the log is
        `compact_factor` times as large as the live records and as the last copy. Or something was removed
        `compact_after_s` ago; then copies write at most `compact_bytes_per_s` on average, or all live records
        once in `compact_after_s` if that is less.
"""

import errno
import math
import os
import queue
import re
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import msgspec

from postroom.errors import LockTimeout
from postroom.logs.appendfile import opened, truncated
from postroom.logs.mail_records import SECRET_BYTES, Framing, Record, Started
from postroom.message import Damage
from postroom.system import lock
from postroom.system.atomic import make_folder, open_safely, read_file, replace_file, sync_folder, write_all
from postroom.system.callbacks import attempt, report
from postroom.system.crypto.encryption import Encryption, key_of

COMPACT_STEP_BYTES = 4 << 20  # copied in one tick, or `compact_step_records`, whichever is reached first
TASKS_SHARE = 8  # of the callbacks after an fsync, run in one turn of the loop: they must keep up with sends
KEYS_LOOK_S = 1.0  # between two looks at the key file

COMPACTED = "mail.compacted"
"""The number of the last segment that a compaction replaced: a later one that is missing was lost."""
_NAME = re.compile(rf"mail-([0-9a-f]{{{2 * SECRET_BYTES}}})-(\d{{8}})\.log")

Fail = Callable[..., object]
"""Called with the facts of a callback and the reason when its batch could not be written."""
Callback = tuple[Callable[..., object], tuple[object, ...], Fail | None]


class SegmentLogLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and intervals that users do not set."""

    segment_bytes_max: int = 32 << 20  # a segment that has reached it is followed by a new one
    backlog_bytes_max: int = 64 << 20  # written and not synced; above it the server stops reading
    compact_from_bytes: int = 64 << 20  # a smaller log is not compacted for its size
    compact_factor: int = 3  # nor is a log of which more than a third is live
    compact_after_s: float = 30.0  # from a removal to the copy that leaves the removed records out
    compact_bytes_per_s: int = 2 << 20  # copied on average because of removals: 1 GiB takes eight minutes
    compact_step_records: int = 1_500  # copied in one tick
    tasks_a_turn_s: float = 0.005  # for callbacks after an fsync, or longer, until 1/8 of them has run
    lock_wait_s: float = 2.0  # for a server that is shutting down


class _SyncJob(NamedTuple):
    """A job of the thread."""

    fds: list[int]  # to sync; all but the last are closed afterwards
    new_name: bool  # whether a file was created, so that the folder has to be synced first
    nbytes: int
    tasks: list[Callback]  # callbacks to run on the loop afterwards
    remove: list[Path]  # segments to remove; the thread leaves those that it could not remove
    suspect: tuple[Path, int] | None = None  # a segment to check, and how many bytes of it were synced


def is_log_segment(name: str) -> bool:
    """Whether a file of this name is a segment."""
    return _NAME.fullmatch(name) is not None


def log_segments(folder: Path) -> list[Path]:
    """The segments of a folder, oldest first."""
    return sorted(
        (path for path in folder.iterdir() if is_log_segment(path.name)),
        key=lambda path: path.name.rpartition("-")[2],
    )


def segment_number(name: str) -> int:
    """The number of a segment, by its file name. Later segments have larger numbers."""
    return _named(name)[1]


def _named(name: str) -> tuple[str, int]:
    """The secret in the name of a segment, and its number."""
    found = _NAME.fullmatch(name)
    assert found is not None  # noqa: S101 - the caller has checked the name
    return found[1], int(found[2])


def _framing_of(path: Path, encryption: Encryption | None = None) -> Framing:
    return Framing(bytes.fromhex(_named(path.name)[0]), encryption)


def compacted_up_to(folder: Path) -> int:
    """The number of the last segment that a compaction replaced; 0 for none."""
    try:
        return int(read_file(folder / COMPACTED))
    except (OSError, ValueError):
        return 0


def damaged_stretches(folder: Path, encryption: Encryption | None = None) -> Iterator[tuple[str, Damage]]:
    """The segments of a folder and their stretches that cannot be read. A server may write meanwhile.

    A torn end is not damage: a server is writing it, or died before it acknowledged the record.
    """
    for path in log_segments(folder):
        with suppress(FileNotFoundError):  # compacted meanwhile
            data = read_file(path)
            for item in _framing_of(path, encryption).scan(data):
                if isinstance(item, Damage) and item.offset + item.length < len(data):
                    yield path.name, item


def count_keys(folder: Path) -> dict[str, int]:
    """How many records of a log need each key, by fingerprint; "" for records that are not encrypted."""
    counts: dict[str, int] = {}
    for path in log_segments(folder):
        with suppress(FileNotFoundError):  # compacted meanwhile
            for head in _framing_of(path).heads(read_file(path)):
                key = key_of(head)
                counts[key] = counts.get(key, 0) + 1
    return counts


class SegmentLog:
    """The log of one folder, open from its creation. `run_soon` runs a call on the loop, from any thread."""

    def __init__(
        self,
        folder: Path,
        run_soon: Callable[[Callable[[], None]], object],
        encryption: Encryption | None,
        limits: SegmentLogLimits,
    ) -> None:
        make_folder(folder, "group")
        self._encryption, self.limits = encryption, limits
        self._look_at_keys_s = 0.0
        self._folder = folder
        self._lock_fd = lock.open_lock_file(folder / "mail.lock")
        try:
            try:
                lock.acquire(self._lock_fd, limits.lock_wait_s, folder)
            except LockTimeout:
                raise LockTimeout(folder, limits.lock_wait_s, lock.holder(self._lock_fd)) from None
            lock.note_holder(self._lock_fd)
            self._old = log_segments(folder)
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._run_soon = run_soon
        self.damage: list[tuple[str, Damage]] = []
        self.trouble = ""
        """Why nothing is acknowledged at present; empty when the log works."""
        self._secret, self._sequence = (
            (secrets.token_hex(SECRET_BYTES), 0) if not self._old else _named(self._old[-1].name)
        )
        self._framing = Framing(bytes.fromhex(self._secret), encryption)
        self._path = folder
        self._fd = -1
        self._size = self._old_bytes = 0
        self._dirty: list[int] = []  # segments with bytes for which no fsync was requested
        self._buffer: list[bytes] = []
        self._droppable: list[int] = []  # indexes of records to drop when the batch cannot be written
        self._unsynced: deque[bytes] = deque()  # chunks that were written but not synced
        self._write_tasks: list[Callback] = []
        self._sync_tasks: list[Callback] = []
        self._due: deque[Callback] = deque()  # callbacks whose bytes are synced
        self._is_scheduled = False  # whether these continue in the next turn
        # Written but not synced, and those of them for which no fsync was requested.
        self._backlog_bytes = self._unrequested_bytes = 0
        self._started = Started(0)
        self._head: bytes = b""
        self._copying: Iterator[Record] | None = None
        self._copy_requested = False
        self._copied: list[Path] = []
        self._replaced_bytes = self._copy_bytes = 0  # of the segments that the copy replaces, and of the copy
        self._copied_at_s = -math.inf
        self._copy_stopped = False  # the last copy could not be written
        self._has_garbage = False  # whether a record was superseded since the last copy began,
        self._garbage_since_s = math.inf  # and when that was first seen
        self._new_name = False
        self._failed: list[Callback] = []  # callbacks of failed jobs, in order
        self._jobs_pending = 0  # jobs without a result yet
        self._is_dead = False  # set by the thread: a later fsync of this handle proves nothing
        self._jobs: queue.SimpleQueue[_SyncJob | None] = queue.SimpleQueue()
        self._results: deque[tuple[_SyncJob, OSError | None]] = deque()
        self._thread: threading.Thread | None = None

    # ---- start -------------------------------------------------------------------------------------

    def read(self) -> Iterator[Record]:
        """Every record of earlier starts. Adds unreadable stretches to `damage`."""
        for path in self._old:
            framing = _framing_of(path, self._encryption)
            data = read_file(path)
            self._old_bytes += len(data)
            for item in framing.scan(data):
                if isinstance(item, Damage):
                    self.damage.append((path.name, item))
                else:
                    yield item
            self._has_garbage = self._has_garbage or framing.is_outdated

    def begin(self, head: Started) -> None:
        """Open and sync the first segment of this start. Each segment begins with `head`.

        Without space for it the log begins in trouble, and a tick opens the segment.
        """
        self._started = head
        self._head = self._framing.frame(head)
        try:
            self._open_next()
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._mark_failed(error)
            return
        sync_folder(self._folder)
        os.fsync(self._fd)
        self._new_name = False
        self._dirty = [self._fd]

    def _open_next(self, rest: bytes = b"") -> None:
        """Open a new segment with its head and `rest`. Nothing changes when that fails."""
        self._sequence += 1
        path = self._folder / f"mail-{self._secret}-{self._sequence:08d}.log"
        fd = open_safely(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        try:
            write_all(fd, self._head + rest)
        except OSError:
            os.close(fd)
            with suppress(OSError):
                os.unlink(path)
            raise
        self._fd, self._path, self._new_name = fd, path, True
        self._size = len(self._head) + len(rest)

    def claim(self, head: Started) -> None:
        """Change the head of all following segments, and append it."""
        self._started = head
        self._head = self._framing.frame(head)
        self.append(head)
        self.after_sync(lambda: None)  # only for the fsync

    # ---- writing -----------------------------------------------------------------------------------

    def append(self, record: Record, *, droppable: bool = False) -> None:
        """Add a record to the batch. A droppable record is dropped when the batch cannot be written."""
        if droppable:
            self._droppable.append(len(self._buffer))
        self._buffer.append(self._framing.frame(record))

    def supersede(self, record: Record) -> None:
        """Append a record that makes an earlier one garbage."""
        self._has_garbage = True
        self.append(record)

    def note_garbage(self) -> None:
        """Note that earlier starts left garbage."""
        self._has_garbage = True

    def after_write(self, call: Callable[..., object], *facts: object, fail: Fail | None = None) -> None:
        """Call when the operating system has the batch.

        When the batch cannot be written, `fail` is called instead. Without `fail` the call waits for a retry.
        """
        self._write_tasks.append((call, facts, fail))

    def after_sync(self, call: Callable[..., object], *facts: object, fail: Fail | None = None) -> None:
        """As `after_write`, but when the batch is on the disk."""
        self._sync_tasks.append((call, facts, fail))

    @property
    def overloaded(self) -> bool:
        """Whether so much is unwritten that the server should stop reading."""
        return self._backlog_bytes > self.limits.backlog_bytes_max

    def flush(self) -> None:
        """Write the batch, run the callbacks of `after_write`, and request an fsync for the others."""
        if self.trouble or not (self._buffer or self._write_tasks or self._sync_tasks):
            return
        if self._buffer:
            chunk = b"".join(self._buffer)
            try:
                write_all(self._fd, chunk)
            except OSError as error:
                truncated(self._fd, self._size)  # a retry must not follow a torn record
                self._mark_failed(error)
                self._refuse_batch()
                return
            self._buffer.clear()
            self._droppable.clear()
            self._size += len(chunk)
            self._backlog_bytes += len(chunk)
            self._unrequested_bytes += len(chunk)
            self._unsynced.append(chunk)
        written, self._write_tasks = self._write_tasks, []
        for call, facts, _ in written:
            attempt(call, *facts)
        if self._sync_tasks:
            self._request_sync()
        if self._size >= self.limits.segment_bytes_max:
            self._rotate()

    def _refuse_batch(self) -> None:
        """Refuse callers with a `fail` callback. The records of the others wait for a new segment."""
        dropped = set(self._droppable)
        self._buffer = [frame for place, frame in enumerate(self._buffer) if place not in dropped]
        self._droppable.clear()
        if (
            self._copying is not None
        ):  # cancel the compaction, whose copy is incomplete; the old segments stay
            self._copying, self._copy_requested = None, False
            self._copy_stopped = self._has_garbage = True
            self._old, self._copied = self._copied + self._old, []
            self._old_bytes += self._replaced_bytes
        tasks = self._write_tasks + self._sync_tasks
        self._write_tasks = [task for task in self._write_tasks if task[2] is None]
        self._sync_tasks = [task for task in self._sync_tasks if task[2] is None]
        for _, facts, fail in tasks:
            if fail is not None:
                attempt(fail, *facts, self.trouble)

    def _request_sync(
        self, remove: list[Path] | None = None, suspect: tuple[Path, int] | None = None
    ) -> None:
        tasks, self._sync_tasks = self._sync_tasks, []
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_thread, name="mail-log", daemon=True)
            self._thread.start()
        job = _SyncJob(self._dirty, self._new_name, self._unrequested_bytes, tasks, remove or [], suspect)
        self._dirty = [self._fd]
        self._new_name = False
        self._unrequested_bytes = 0
        self._jobs_pending += 1
        self._jobs.put(job)

    def _rotate(self) -> None:
        full, nbytes = self._path, self._size
        try:
            self._open_next()
        except OSError as error:
            self._mark_failed(error)
            return
        self._old.append(full)
        self._old_bytes += nbytes
        self._dirty.append(self._fd)
        self._request_sync()

    # ---- the thread --------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        while (job := self._jobs.get()) is not None:
            jobs = [job]
            while not self._jobs.empty():
                if (more := self._jobs.get()) is None:
                    self._jobs.put(None)  # ends the thread after these jobs
                    break
                jobs.append(more)
            self._sync_all(jobs)

    def _sync_all(self, jobs: list[_SyncJob]) -> None:
        """One fsync for all jobs: the bytes of each job were written before it was queued."""
        error = OSError("an earlier fsync of the segment failed") if self._is_dead else None
        fds = list(dict.fromkeys(fd for job in jobs for fd in job.fds))
        if error is None:
            try:
                if any(job.new_name for job in jobs):
                    sync_folder(self._folder)
                for fd in fds:
                    os.fsync(fd)
            except OSError as failed:
                error = failed
                self._is_dead = True
        if error is None:
            for fd in fds[:-1]:
                os.close(fd)
            for job in jobs:
                self._finish_job(job)
        self._results.extend((job, error) for job in jobs)
        self._run_soon(self._drain)

    def _finish_job(self, job: _SyncJob) -> None:
        if job.suspect is not None:
            path, safe = job.suspect
            with suppress(OSError):
                self._check_segment(path, safe)
        with suppress(OSError):  # the next compaction tries the remaining ones again
            if job.remove:
                # Note the segments as replaced before they are removed, in place: that takes no space.
                fd = open_safely(self._folder / COMPACTED, os.O_WRONLY | os.O_CREAT)
                with os.fdopen(fd, "wb", 0):
                    os.pwrite(fd, b"%08d\n" % segment_number(job.remove[-1].name), 0)
                    os.fsync(fd)
                sync_folder(self._folder)
            while job.remove:
                self._retire(job.remove[0])
                del job.remove[0]

    def _check_segment(self, path: Path, safe: int) -> None:
        """Read a segment whose handle died, bypassing the page cache if possible, and record its damage."""
        with opened(path) as fd:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            data = os.read(fd, safe)
        for item in self._framing.scan(data):
            if isinstance(item, Damage):
                self.damage.append((path.name, item))

    def _retire(self, path: Path) -> None:
        """Remove a segment whose live records were copied. Its damaged stretches are kept in files.

        Older segments must be removed durably before: a later segment records what was removed from them.
        """
        with suppress(FileNotFoundError):  # an earlier attempt may have removed it
            damaged = [damage for name, damage in self.damage if name == path.name]
            data = read_file(path) if damaged else b""
            for damage in damaged:
                kept = path.with_name(f"{path.name}.damaged-{damage.offset}")
                replace_file(kept, data[damage.offset : damage.offset + damage.length], "group")
            os.unlink(path)
        sync_folder(self._folder)

    # ---- results, on the loop ----------------------------------------------------------------------

    def _drain(self) -> None:
        self._collect_results()
        if not self._is_scheduled:
            self._run_due()

    def _run_due(self) -> None:
        """Run callbacks for a limited time, but at least a share of them; the rest in the next turn."""
        self._is_scheduled = False
        ends = perf_counter() + self.limits.tasks_a_turn_s
        most_left = len(self._due) - len(self._due) // TASKS_SHARE
        while self._due:
            call, facts, _ = self._due.popleft()
            try:
                call(*facts)
            except Exception:  # noqa: BLE001 - the other callbacks run all the same
                report(call)
            if 0 < len(self._due) <= most_left and perf_counter() >= ends:
                self._is_scheduled = True
                self._run_soon(self._run_due)
                return

    def _collect_results(self) -> None:
        while self._results:
            job, error = self._results.popleft()
            self._jobs_pending -= 1
            self._old = job.remove + self._old
            if error is None:
                self._backlog_bytes -= job.nbytes
                nbytes = job.nbytes
                while nbytes > 0:
                    nbytes -= len(self._unsynced.popleft())
                self._due += job.tasks
            else:
                self._failed += job.tasks
                self._dirty = list(dict.fromkeys(job.fds + self._dirty))
                self._mark_failed(error)

    def _mark_failed(self, error: OSError) -> None:
        if not self.trouble:
            self.trouble = f"the mail log cannot be written: {error.strerror or error}"

    def tick(self) -> None:
        """Reopen after a failure, or continue a compaction. Use a new key within a second."""
        if self._encryption is not None and perf_counter() >= self._look_at_keys_s:
            self._look_at_keys_s = perf_counter() + KEYS_LOOK_S
            if self._encryption.reload_if_changed():
                self._head = self._framing.frame(self._started)
                self._has_garbage = True  # the next compaction encrypts older records with the new key
        if self.trouble:
            if self._jobs_pending == 0:
                self._reopen()
            return
        if self._copying is not None and not self.overloaded:
            self._copy_some(self._copying)
        self.flush()

    def _reopen(self) -> None:
        """Write everything that was not synced into a new segment. It is trusted after its fsync."""
        dead, nbytes = self._path, self._size
        unsynced = b"".join([*self._unsynced, *self._buffer])
        try:
            self._open_next(unsynced)
        except OSError:
            return  # the next tick tries again
        for fd in self._dirty:
            with suppress(OSError):
                os.close(fd)
        suspect = None
        if dead != self._folder:  # else there was no segment since the start
            suspect = (dead, max(0, nbytes - self._backlog_bytes))
            self._old.append(dead)
            self._old_bytes += nbytes
        self._buffer.clear()
        self._droppable.clear()
        self._unsynced = deque([unsynced])
        self._backlog_bytes = self._unrequested_bytes = len(unsynced)
        self._dirty = [self._fd]
        self._sync_tasks = [*self._failed, *self._write_tasks, *self._sync_tasks, (self._recovered, (), None)]
        self._failed, self._write_tasks = [], []
        self._is_dead = False
        self._request_sync(suspect=suspect)

    def _recovered(self) -> None:
        self.trouble = ""

    # ---- compaction --------------------------------------------------------------------------------

    def wants_copy(self, live_bytes: int, now_s: float) -> bool:
        """Whether a compaction is due. The live records have about `live_bytes`."""
        if self._has_garbage and self._garbage_since_s > now_s:
            self._garbage_since_s = now_s
        if self._copy_requested or self.trouble:
            return False
        limits = self.limits
        pause_s = max(limits.compact_after_s, live_bytes / limits.compact_bytes_per_s)
        if now_s >= max(self._garbage_since_s + limits.compact_after_s, self._copied_at_s + pause_s):
            return True
        # A copy without gain is not repeated: the log has to outgrow the last copy as well.
        alive = max(live_bytes, self._copy_bytes)
        kept_bytes = max(limits.compact_from_bytes, limits.compact_factor * alive)
        is_mostly_garbage = self._old_bytes + self._size > kept_bytes
        return is_mostly_garbage and bool(self._old) and not self._copy_stopped

    def copy(self, alive: Iterator[Record], now_s: float) -> None:
        """Start a compaction, which continues with each tick. At its end the current segments are removed."""
        self._copy_requested = True
        self._copied_at_s, self._copy_stopped, self._copy_bytes = now_s, False, 0
        self._has_garbage, self._garbage_since_s = False, math.inf
        # Records that wait for the disk are in these segments but not live yet: the copy starts after them.
        self.after_sync(self._begin_copy, alive, [*self._old, self._path], self._old_bytes + self._size)
        self._rotate()

    def _begin_copy(self, alive: Iterator[Record], copied: list[Path], nbytes: int) -> None:
        self._copying, self._copied, self._replaced_bytes = alive, copied, nbytes
        self._old = [path for path in self._old if path not in copied]
        self._old_bytes -= nbytes

    def _copy_some(self, alive: Iterator[Record]) -> None:
        ends = self._copy_bytes + COMPACT_STEP_BYTES
        records, records_max = 0, self.limits.compact_step_records
        for record in islice(alive, records_max):
            self.append(record, droppable=True)
            self._copy_bytes += len(self._buffer[-1])
            records += 1
            if self._copy_bytes >= ends:
                return
        if records < records_max:
            self.flush()
            if not self.trouble:
                self._copying = None
                self._copy_requested = False
                self._request_sync(remove=self._copied)
                self._copied = []

    def close(self) -> None:
        """Write and sync everything, run the remaining callbacks, and end."""
        self.flush()
        if self._fd >= 0 and not self.trouble:
            self._request_sync()
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()
        self._collect_results()
        for call, facts, _ in self._due:
            attempt(call, *facts)
        self._due.clear()
        for fd in {*self._dirty, self._fd, self._lock_fd}:
            if fd >= 0:
                with suppress(OSError):
                    os.close(fd)
        self._fd = self._lock_fd = -1
        self._dirty = []
