"""The mail log: segments that are only ever appended to, with one fsync for all who wait.

Rule 1: the loop writes, once for each batch; a thread of its own waits for the disk. Who waits for the disk
        is called back on the loop, in order, after an fsync that began behind its bytes.
Rule 2: after a failed write or fsync the segment's handle is dead. Nothing is acknowledged until everything
        that was not yet safe stands in a new segment, and an fsync of that one has succeeded. When the write
        failed, nothing of the batch is in the file: callers that can be told are refused at once.
Rule 3: an old segment is never appended to, and is removed only when everything alive stands in newer ones
        that are on the disk. What could not be read of it is kept beside it first.
Rule 4: what is alive is copied, and the old segments with what was removed go, when one of two holds.
        The log is `COMPACT_FACTOR` times as large as what is alive and as the last copy was. Or something
        was removed `COMPACT_AFTER_S` ago, and copying for that reason writes no more than
        `COMPACT_BYTES_PER_S` on average, or everything alive once in `COMPACT_AFTER_S` if that is less.
"""

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

from postroom.logs.mail_records import SECRET_BYTES, Framing, Record, Started
from postroom.message import Damage
from postroom.system import lock
from postroom.system.atomic import make_folder, open_safely, read_file, replace_file, sync_folder, write_all
from postroom.system.callbacks import attempt, report

SEGMENT_BYTES_MAX = 32 << 20  # a segment that has reached it is the last but one
BACKLOG_BYTES_MAX = 64 << 20  # written and not yet on the disk; then the server is asked to read no further
COMPACT_FROM_BYTES = 64 << 20  # a smaller log is not copied for its size
COMPACT_FACTOR = 3  # and neither is one of which more than a third is alive
COMPACT_AFTER_S = 30.0  # from a removal to the copy that takes what was removed off the disk
COMPACT_BYTES_PER_S = 2 << 20  # copied for that reason on average: 1 GiB alive takes eight minutes
COMPACT_STEP_RECORDS = 1_500  # copied in one tick,
COMPACT_STEP_BYTES = 4 << 20  # or so many bytes
TASKS_TURN_S = 0.005  # of a turn of the loop, for those who waited for the disk,
TASKS_SHARE = 8  # or longer, for one of so many of them: nobody can send faster than they are told
LOCK_WAIT_S = 2.0  # for a server that is just ending

_NAME = re.compile(rf"mail-([0-9a-f]{{{2 * SECRET_BYTES}}})-(\d{{8}})\.log")

Fail = Callable[..., object]
"""Called with the facts of a task when its batch could not be written, and with the reason."""
Task = tuple[Callable[..., object], tuple[object, ...], Fail | None]


class _Append(NamedTuple):
    """Work for the thread."""

    fds: list[int]  # to sync; all but the last are closed then
    new_name: bool  # whether the folder has to be synced first
    nbytes: int
    tasks: list[Task]  # to be done on the loop afterwards
    remove: list[Path]  # the thread leaves those in it that it could not remove
    suspect: tuple[Path, int] | None = None  # a segment to look through, and how much of it was safe


def _nothing() -> None:
    """What is to be done when only the fsync matters."""


class SegmentLog:
    """Opened by its constructor. `run_soon` hands a call to the loop, from any thread."""

    def __init__(self, folder: Path, run_soon: Callable[[Callable[[], None]], object]) -> None:
        make_folder(folder, "group")
        self._folder = folder
        self._lock_fd = open_safely(folder / "mail.lock", os.O_RDWR | os.O_CREAT)
        try:
            lock.acquire(self._lock_fd, LOCK_WAIT_S, folder / "mail.lock")
            self._old = self._find_segments()
        except BaseException:
            os.close(self._lock_fd)
            raise
        self._run_soon = run_soon
        self.damage: list[tuple[str, Damage]] = []
        self.trouble = ""
        """Why nothing is acknowledged at present; empty when all is well."""
        secret, self._sequence = self._last_name()
        self._secret = secret
        self._framing = Framing(bytes.fromhex(secret))
        self._path = folder
        self._fd = -1
        self._size = self._old_bytes = 0
        self._dirty: list[int] = []  # segments with bytes that no fsync has been asked for
        self._buffer: list[bytes] = []
        self._droppable: list[int] = []  # the places of records that are given up when it cannot be written
        self._unsafe: deque[bytes] = deque()  # chunks that were written and are not known to be on the disk
        self._written: list[Task] = []
        self._waiting: list[Task] = []
        self._due: deque[Task] = deque()  # those whose bytes are on the disk, and who have not been told
        self._telling = False  # whether the next turn goes on with that
        self._backlog = self._unasked = 0
        self._head: bytes = b""
        self._copying: Iterator[Record] | None = None
        self._copy_asked = False
        self._copied: list[Path] = []
        self._replaced_bytes = self._copy_bytes = 0  # of the segments that a copy replaces, and of the copy
        self._copied_at_s = -math.inf
        self._copy_stopped = False  # the last copy did not fit on the disk
        self._garbage = False  # whether something was removed since the last copy began,
        self._garbage_since_s = math.inf  # and when that was first seen
        self._new_name = False
        self._failed: list[Task] = []  # those of jobs that failed, in order
        self._asked = 0  # jobs that the thread has not answered
        self._dead = False  # the thread's own word: no later fsync of this handle proves anything
        self._jobs: queue.SimpleQueue[_Append | None] = queue.SimpleQueue()
        self._results: deque[tuple[_Append, OSError | None]] = deque()
        self._thread: threading.Thread | None = None

    # ---- start -------------------------------------------------------------------------------------

    def _find_segments(self) -> list[Path]:
        return sorted(
            (path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)),
            key=lambda path: path.name.rpartition("-")[2],
        )

    def _last_name(self) -> tuple[str, int]:
        if not self._old:
            return secrets.token_hex(SECRET_BYTES), 0
        found = _NAME.fullmatch(self._old[-1].name)
        assert found is not None  # noqa: S101 - they were found by it
        return found[1], int(found[2])

    def read(self) -> Iterator[Record]:
        """Every record of earlier starts. Fills `damage`."""
        for path in self._old:
            found = _NAME.fullmatch(path.name)
            framing = Framing(bytes.fromhex(found[1])) if found else self._framing
            data = read_file(path)
            self._old_bytes += len(data)
            for item in framing.scan(data):
                if isinstance(item, Damage):
                    self.damage.append((path.name, item))
                else:
                    yield item

    def begin(self, head: Started) -> None:
        """Open the first segment of this start, durably. Each segment begins with `head`."""
        self._head = self._framing.frame(head)
        self._open_next()
        sync_folder(self._folder)
        os.fsync(self._fd)
        self._new_name = False
        self._dirty = [self._fd]

    def _open_next(self, rest: bytes = b"") -> None:
        """A new segment that holds its head and `rest`; all stays as it was when that fails."""
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
        """From now on each segment begins with another head."""
        self._head = self._framing.frame(head)
        self.append(head)
        self.after_sync(_nothing)

    # ---- writing -----------------------------------------------------------------------------------

    def append(self, record: Record, *, droppable: bool = False) -> None:
        """Into the next batch. A droppable record is given up when that cannot be written."""
        if droppable:
            self._droppable.append(len(self._buffer))
        self._buffer.append(self._framing.frame(record))

    def supersede(self, record: Record) -> None:
        """As `append`, for a record that makes an earlier one garbage."""
        self._garbage = True
        self.append(record)

    def note_garbage(self) -> None:
        """There is garbage from an earlier start."""
        self._garbage = True

    def after_write(self, call: Callable[..., object], *facts: object, fail: Fail | None = None) -> None:
        """Do something when the batch is with the operating system.

        `fail` is called instead when the batch cannot be written; without it the call waits until it is.
        """
        self._written.append((call, facts, fail))

    def after_sync(self, call: Callable[..., object], *facts: object, fail: Fail | None = None) -> None:
        """As `after_write`, when the batch is on the disk."""
        self._waiting.append((call, facts, fail))

    @property
    def overloaded(self) -> bool:
        """Whether the disk is so far behind that no more should be read."""
        return self._backlog > BACKLOG_BYTES_MAX

    def flush(self) -> None:
        """Write the batch, tell those who wait for no more than that, and ask for the fsync of the others."""
        if self.trouble or not (self._buffer or self._written or self._waiting):
            return
        if self._buffer and not self._write_batch():
            return
        written, self._written = self._written, []
        for call, facts, _ in written:
            attempt(call, *facts)
        if self._waiting:
            self._ask_sync()
        if self._size >= SEGMENT_BYTES_MAX:
            self._rotate()

    def _write_batch(self) -> bool:
        chunk = self._buffer[0] if len(self._buffer) == 1 else b"".join(self._buffer)
        try:
            write_all(self._fd, chunk)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._fd, self._size)  # no torn record in front of what a retry writes
            self._die(error)
            self._refuse_batch()
            return False
        self._buffer.clear()
        self._droppable.clear()
        self._size += len(chunk)
        self._backlog += len(chunk)
        self._unasked += len(chunk)
        self._unsafe.append(chunk)
        return True

    def _refuse_batch(self) -> None:
        """Refuse callers whose records were not written. The other records wait for a new segment."""
        dropped = set(self._droppable)
        self._buffer = [frame for place, frame in enumerate(self._buffer) if place not in dropped]
        self._droppable.clear()
        self._stop_copy()
        tasks = self._written + self._waiting
        self._written = [task for task in self._written if task[2] is None]
        self._waiting = [task for task in self._waiting if task[2] is None]
        for _, facts, fail in tasks:
            if fail is not None:
                attempt(fail, *facts, self.trouble)

    def _ask_sync(self, remove: list[Path] | None = None, suspect: tuple[Path, int] | None = None) -> None:
        tasks, self._waiting = self._waiting, []
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="mail-log", daemon=True)
            self._thread.start()
        job = _Append(self._dirty, self._new_name, self._unasked, tasks, remove or [], suspect)
        self._dirty = [self._fd]
        self._new_name = False
        self._unasked = 0
        self._asked += 1
        self._jobs.put(job)

    def _rotate(self) -> None:
        full, nbytes = self._path, self._size
        try:
            self._open_next()
        except OSError as error:
            self._die(error)
            return
        self._old.append(full)
        self._old_bytes += nbytes
        self._dirty.append(self._fd)
        self._ask_sync()

    # ---- the thread --------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            jobs = [job]
            stop = False
            while not self._jobs.empty():
                more = self._jobs.get()
                if more is None:
                    stop = True
                    break
                jobs.append(more)
            self._sync_all(jobs)
            if stop:
                return

    def _sync_all(self, jobs: list[_Append]) -> None:
        """One fsync for all of them: each job's bytes were written before it was handed over."""
        error = OSError("an earlier fsync of the segment failed") if self._dead else None
        fds = list(dict.fromkeys(fd for job in jobs for fd in job.fds))
        if error is None:
            try:
                if any(job.new_name for job in jobs):
                    sync_folder(self._folder)
                for fd in fds:
                    os.fsync(fd)
            except OSError as failed:
                error = failed
                self._dead = True
        if error is None:
            for fd in fds[:-1]:
                os.close(fd)
            for job in jobs:
                self._tidy(job)
        self._results.extend((job, error) for job in jobs)
        self._run_soon(self._drain)

    def _tidy(self, job: _Append) -> None:
        if job.suspect is not None:
            path, safe = job.suspect
            with suppress(OSError):
                self._look_through(path, safe)
        with suppress(OSError):  # the next compaction begins with what is left
            while job.remove:
                self._retire(job.remove[0])
                del job.remove[0]

    def _look_through(self, path: Path, safe: int) -> None:
        """Read a segment whose handle died, from the disk if it can be, and report what is not there."""
        fd = open_safely(path, os.O_RDONLY)
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            data = os.read(fd, safe)
        finally:
            os.close(fd)
        for item in self._framing.scan(data):
            if isinstance(item, Damage):
                self.damage.append((path.name, item))

    def _retire(self, path: Path) -> None:
        """Remove a segment of which everything alive stands elsewhere; keep what nobody could read.

        One that is older must be gone for good by then: a later one says what was removed from it.
        """
        with suppress(FileNotFoundError):  # a first try can have got as far as this
            stretches = [damage for name, damage in self.damage if name == path.name]
            data = read_file(path) if stretches else b""
            for damage in stretches:
                kept = path.with_name(f"{path.name}.damaged-{damage.offset}")
                replace_file(kept, data[damage.offset : damage.offset + damage.length], "group")
            os.unlink(path)
        sync_folder(self._folder)

    # ---- back on the loop --------------------------------------------------------------------------

    def _drain(self) -> None:
        self._take_results()
        if not self._telling:
            self._tell()

    def _tell(self) -> None:
        """Tell those who waited: for a while, then the others have their turn. Of many, a share at least."""
        self._telling = False
        ends, most_left = perf_counter() + TASKS_TURN_S, len(self._due) - len(self._due) // TASKS_SHARE
        while self._due:
            call, facts, _ = self._due.popleft()
            try:
                call(*facts)
            except Exception:  # noqa: BLE001 - the others are told all the same
                report(call)
            if 0 < len(self._due) <= most_left and perf_counter() >= ends:
                self._telling = True
                self._run_soon(self._tell)
                return

    def _take_results(self) -> None:
        while self._results:
            job, error = self._results.popleft()
            self._asked -= 1
            self._old = job.remove + self._old
            if error is None:
                self._forget_safe(job.nbytes)
                self._due += job.tasks
            else:
                self._failed += job.tasks
                self._dirty = list(dict.fromkeys(job.fds + self._dirty))
                self._die(error)

    def _forget_safe(self, nbytes: int) -> None:
        self._backlog -= nbytes
        while nbytes > 0:
            nbytes -= len(self._unsafe.popleft())

    def _die(self, error: OSError) -> None:
        if not self.trouble:
            self.trouble = f"the mail log cannot be written: {error.strerror or error}"

    def tick(self) -> None:
        """Reopen after a failure; copy some more of what is alive."""
        if self.trouble:
            if self._asked == 0:
                self._reopen()
            return
        if self._copying is not None and not self.overloaded:
            self._copy_some()
        self.flush()

    def _reopen(self) -> None:
        """Write everything that was not safe into a new segment. It is believed after its fsync."""
        dead, nbytes = self._path, self._size
        unsafe = b"".join([*self._unsafe, *self._buffer])
        try:
            self._open_next(unsafe)
        except OSError:
            return  # the next tick tries again
        for fd in self._dirty:
            with suppress(OSError):
                os.close(fd)
        suspect = (dead, max(0, nbytes - self._backlog))
        self._old.append(dead)
        self._old_bytes += nbytes
        self._buffer.clear()
        self._droppable.clear()
        self._unsafe = deque([unsafe])
        self._backlog = self._unasked = len(unsafe)
        self._dirty = [self._fd]
        self._waiting = [*self._failed, *self._written, *self._waiting, (self._recovered, (), None)]
        self._failed, self._written = [], []
        self._dead = False
        self._ask_sync(suspect=suspect)

    def _recovered(self) -> None:
        self.trouble = ""

    # ---- compaction --------------------------------------------------------------------------------

    def wants_copy(self, live_bytes: int, now_s: float) -> bool:
        """Whether it is time to copy what is alive, which takes up about `live_bytes`."""
        if self._garbage and self._garbage_since_s > now_s:
            self._garbage_since_s = now_s
        if self._copy_asked or self.trouble:
            return False
        return self._is_mostly_garbage(live_bytes) or self._is_garbage_due(live_bytes, now_s)

    def _is_mostly_garbage(self, live_bytes: int) -> bool:
        """A copy that gained nothing is not repeated: the log has to outgrow the last one as well."""
        if self._copy_stopped or not self._old:
            return False
        alive = max(live_bytes, self._copy_bytes)
        return self._old_bytes + self._size > max(COMPACT_FROM_BYTES, COMPACT_FACTOR * alive)

    def _is_garbage_due(self, live_bytes: int, now_s: float) -> bool:
        pause_s = max(COMPACT_AFTER_S, live_bytes / COMPACT_BYTES_PER_S)
        return now_s >= max(self._garbage_since_s + COMPACT_AFTER_S, self._copied_at_s + pause_s)

    def copy(self, alive: Iterator[Record], now_s: float) -> None:
        """Copy what is alive, some with each tick; at the end the segments up to here are removed."""
        self._copy_asked = True
        self._copied_at_s, self._copy_stopped, self._copy_bytes = now_s, False, 0
        self._garbage, self._garbage_since_s = False, math.inf
        # What waits for the disk is in these segments and not alive yet: nothing is copied before it is.
        self.after_sync(self._begin_copy, alive, [*self._old, self._path], self._old_bytes + self._size)
        self._rotate()

    def _begin_copy(self, alive: Iterator[Record], copied: list[Path], nbytes: int) -> None:
        self._copying, self._copied, self._replaced_bytes = alive, copied, nbytes
        self._old = [path for path in self._old if path not in copied]
        self._old_bytes -= nbytes

    def _copy_some(self) -> None:
        assert self._copying is not None  # noqa: S101 - the caller looked
        ends = self._copy_bytes + COMPACT_STEP_BYTES
        records = 0
        for record in islice(self._copying, COMPACT_STEP_RECORDS):
            self.append(record, droppable=True)
            self._copy_bytes += len(self._buffer[-1])
            records += 1
            if self._copy_bytes >= ends:
                return
        if records < COMPACT_STEP_RECORDS:
            self.flush()
            if not self.trouble:
                self._copying = None
                self._copy_asked = False
                self._ask_sync(remove=self._copied)
                self._copied = []

    def _stop_copy(self) -> None:
        """Keep the old segments: what was to replace them could not be written."""
        if self._copying is None:
            return
        self._copying, self._copy_asked, self._copy_stopped, self._garbage = None, False, True, True
        self._old, self._copied = self._copied + self._old, []
        self._old_bytes += self._replaced_bytes

    def close(self) -> None:
        """Write and sync everything, tell those who wait, and end."""
        self.flush()
        if self._fd >= 0 and not self.trouble:
            self._ask_sync()
        self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()
        self._take_results()
        for call, facts, _ in self._due:
            attempt(call, *facts)
        self._due.clear()
        for fd in {*self._dirty, self._fd, self._lock_fd}:
            if fd >= 0:
                with suppress(OSError):
                    os.close(fd)
        self._fd = self._lock_fd = -1
        self._dirty = []
