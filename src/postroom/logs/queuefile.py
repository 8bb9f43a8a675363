"""The files of one queue session: lines, side files, cursors, and the journal that makes compaction safe.

Rule 1: every write is made under the session's lock.
Rule 2: one rename commits a compaction. A journal without that rename is discarded; after the rename, the
        next process that takes the lock completes the steps in the journal.
"""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import TypeVar

import msgspec

from postroom.core.formats import queuewire as wire
from postroom.core.names import checked_name
from postroom.errors import DamagedState, Unavailable, UnsafePath, WriteFailed, reason
from postroom.logs.appendfile import AppendFile
from postroom.logs.queuecursors import CURSOR_DIGITS_MAX, Cursors, ReadProgress
from postroom.message import Durability, QueueMessage
from postroom.system import lock
from postroom.system.atomic import (
    PRIVATE_FILE_MODE,
    PRIVATE_FOLDER_MODE,
    TEMPORARY_SUFFIX,
    make_folder,
    open_safely,
    read_file,
    replace_file,
    size_of_whole_lines,
    sync_folder,
    write_all,
)
from postroom.system.lock import EXCLUSIVE_NOW, UNLOCK, flock

WINDOW_BYTES = 1024 * 1024
REOPENS_MAX = 1000
CHECK_EVERY_S = 0.1  # for this long, a send may still go to a file that was replaced by hand
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # this process lacks resources; the file may be fine
_UNKNOWN_PROGRESS = ReadProgress(-1, {"": -1}, [-1])
T = TypeVar("T")

BODY_SUFFIX = ".txt"


class RewriteJournal(msgspec.Struct):
    """The steps that remain after the compacted file has replaced the old one."""

    inode: int
    epoch: int
    readings: dict[str, ReadProgress]
    bodies: list[str]

    def __post_init__(self) -> None:
        """Validate all values first: the journal names files that will be written and removed."""
        if not 0 < self.epoch < 10**CURSOR_DIGITS_MAX:
            raise ValueError(f"the epoch cannot be {self.epoch}")
        for agent_id in self.readings:
            checked_name("agent", agent_id)
        for msg_id in self.bodies:
            checked_name("message id", msg_id)


class SideFiles:
    """The folder with the long bodies of one session."""

    def __init__(self, folder: Path, durability: Durability) -> None:
        self.folder = folder
        self._durability: Durability = durability

    def path(self, msg_id: str) -> Path:
        """The side file of a message."""
        return self.folder / f"{msg_id}{BODY_SUFFIX}"

    def ids(self) -> set[str]:
        """The messages with a side file."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return set()
        except OSError as error:
            raise DamagedState(f"{self.folder} cannot be read: {error.strerror}") from error
        return {name.removesuffix(BODY_SUFFIX) for name in names if name.endswith(BODY_SUFFIX)}

    def write(self, msg_id: str, body: bytes) -> None:
        """Write a side file, durable in its class, before any line refers to it."""
        make_folder(self.folder, self._durability)
        replace_file(self.path(msg_id), body, self._durability)

    def remove(self, msg_id: str) -> None:
        """Remove a side file whose line was not written."""
        with suppress(OSError):
            self.path(msg_id).unlink()

    def size(self, msg_id: str) -> int:
        """The size of a side file; 0 when it is missing."""
        try:
            return os.lstat(self.path(msg_id)).st_size
        except OSError:
            return 0

    def body(self, message: QueueMessage) -> tuple[str, str]:
        """The fault of a message's side file ("" for none), and its text."""
        path = self.path(message["msg_id"])
        try:
            raw = read_file(path)
            return wire.body_fault(message, raw), raw.decode()
        except UnicodeDecodeError:
            return "the side file is not UTF-8 text", ""
        except UnsafePath as error:
            return f"the side file cannot be read: {error}", ""
        except OSError as error:
            if error.errno in _SHORTAGES:
                raise Unavailable(f"{path}: {error.strerror}") from error
            return f"the side file cannot be read: {error.strerror or error}", ""


class SessionFiles:
    """One session's folder. Files stay open; nothing is created before the first lock."""

    _lock_fd = -1

    def __init__(self, folder: Path, durability: Durability, lock_timeout_s: float) -> None:
        self.folder = folder
        self.name = folder.name
        self.messages = folder / "messages.jsonl"
        self.bodies = SideFiles(folder / "bodies", durability)
        self.cursors = Cursors(folder / "cursors", durability)
        self.agents = folder / "agents"
        self.agents_name = str(self.agents)
        self._durability: Durability = durability
        self._lock_timeout_s = lock_timeout_s
        self._lock_path = folder / ".lock"
        self._epoch_path = folder / "epoch"
        self._journal_path = folder / "expire.journal"
        self._lock_fd = -1
        self._file = AppendFile(
            self.messages, durability, file_mode=PRIVATE_FILE_MODE, folder_mode=PRIVATE_FOLDER_MODE
        )
        self._mutex = threading.Lock()
        self._known_end = -1
        self._check_at = 0.0
        self._turn_ends = 0.0
        self._compactions = -1

    def __del__(self) -> None:
        self._close_lock()  # as a file object does when it was not closed; the queue file closes itself

    # ---- the lock ------------------------------------------------------------------------------

    def _lock_current(self) -> int:
        """Take the file lock, with the thread lock held; returns the queue file's size."""
        if self._lock_fd >= 0:
            self._take_turn(monotonic())
            size = self._file.current_size()
            if size >= 0:
                return size
        return self._lock_changed()

    def _lock_to_append(self) -> int:
        """As `_lock_current`, mostly without a stat, which would also slow down the write that follows it.

        A compaction changes the lock file's length, and a removed file has no name. Only a file that was
        replaced by hand goes unnoticed, for up to `CHECK_EVERY_S`.
        """
        now = monotonic()
        if now >= self._check_at or self._file.fd < 0:
            size = self._lock_current()
            self._compactions = os.lseek(self._lock_fd, 0, os.SEEK_END)
            self._check_at = now + CHECK_EVERY_S
            return size
        self._take_turn(now)
        if os.lseek(self._lock_fd, 0, os.SEEK_END) == self._compactions and self._file.has_name():
            return os.lseek(self._file.fd, 0, os.SEEK_END)
        self._check_at = 0.0
        return self._lock_changed()

    def _take_turn(self, now: float) -> None:
        """Take the file lock: at once during this process's turn, else after the processes that wait."""
        if now < self._turn_ends:
            try:
                flock(self._lock_fd, EXCLUSIVE_NOW)
            except BlockingIOError:
                pass  # a waiting process was faster
            else:
                return
        self._turn_ends = lock.take_turn(self._lock_fd, self._lock_timeout_s, self.folder)

    def _lock_changed(self) -> int:
        """Open and lock the current files, because none is open yet or the queue file was replaced."""
        for _ in range(REOPENS_MAX):
            self._drop()
            make_folder(self.folder, self._durability)
            self._lock_fd = open_safely(self._lock_path, os.O_RDWR | os.O_CREAT)
            self._turn_ends = lock.take_turn(self._lock_fd, self._lock_timeout_s, self.folder)
            self._file.open()
            size = self._file.current_size()
            with suppress(FileNotFoundError):
                if size >= 0 and os.path.samestat(os.lstat(self._lock_path), os.fstat(self._lock_fd)):
                    return size
        raise Unavailable(f"{self.folder} is replaced faster than it can be locked")

    def _drop(self) -> None:
        self._file.close()
        self._close_lock()

    def _close_lock(self) -> None:
        self._known_end = -1
        self._check_at = 0.0
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the session's lock, after completing any interrupted compaction; yields the file's size."""
        with self._mutex:
            try:
                size = self._lock_current()
                if self._journal_path.exists():
                    self._finish_compaction()
                    size = self._file.current_size()
                yield size
            finally:
                if self._lock_fd >= 0:
                    flock(self._lock_fd, UNLOCK)

    def inspect(self, work: Callable[["SessionFiles", int], T], is_sound: Callable[[T], bool]) -> T:
        """The result of `work(files, size)`, computed without delaying writers where possible.

        `work` first runs without the lock. Its result counts when no compaction ran meanwhile and
        `is_sound(result)` is true. Otherwise `work` runs again under the lock, because a rolled-back append
        or a moving cursor can look like damage to a reader without the lock.
        """
        fd = self.open_reader()
        if fd >= 0:
            view = SessionFiles(self.folder, self._durability, self._lock_timeout_s)
            view._file.fd = fd
            try:
                before = view._version()
                result = work(view, os.fstat(fd).st_size)
                if before is not None and view._version() == before and is_sound(result):
                    return result
            except (DamagedState, FileNotFoundError):
                pass  # a compaction ran meanwhile, or the files seem damaged
            finally:
                view._forget()
        with self.locked() as size:
            return work(self, size)

    def _version(self) -> tuple[int, int] | None:
        """Equal as long as offsets stay valid; None while a compaction is running."""
        if self._journal_path.exists() or not os.path.samestat(
            os.lstat(self.messages), os.fstat(self._file.fd)
        ):
            return None
        return self.epoch(), os.fstat(self._file.fd).st_ino

    def exists(self) -> bool:
        """Whether the session's folder exists."""
        return self.folder.is_dir()

    def close(self) -> None:
        """Close every descriptor."""
        with self._mutex:
            self._drop()

    def after_fork(self) -> None:
        """Reset in a forked child, which needs its own descriptors and thread lock."""
        self._mutex = threading.Lock()
        self._forget()

    def reopen(self) -> None:
        """Forget the descriptors and a failed fsync, once no thread of this process uses them."""
        with self._mutex:
            self._forget()

    def _forget(self) -> None:
        self._file.forget()
        self._close_lock()

    # ---- lines ---------------------------------------------------------------------------------

    def append(self, line: bytes, note: Callable[[], None]) -> int:
        """Append one line and call `note` under the same lock; returns a ticket for `settle`."""
        file = self._file
        with self._mutex:
            try:
                size = self._lock_to_append()
                if size != self._known_end and size and os.pread(file.fd, 1, size - 1) != b"\n":
                    line = b"\n" + line  # a writer died in the middle of its line: start a new one
                ticket = file.append(line, size)
                self._known_end = size + len(line)
                note()
            finally:
                # Inlined: a signal handler may raise at the start of any Python function.
                if self._lock_fd >= 0:
                    flock(self._lock_fd, UNLOCK)
        return ticket

    def settle(self, ticket: int) -> None:
        """Wait, without the lock, until the append is durable in its class."""
        try:
            self._file.settle(ticket)
        except OSError as error:
            with self._mutex:
                rolled_back = self._file.roll_back_group(self._lock_fd, self._lock_timeout_s, self._was_read)
            raise WriteFailed(self.messages, error, rolled_back=rolled_back) from error

    def _was_read(self, offset: int) -> bool:
        """Whether some agent has read beyond this offset, or its progress is unknown."""
        try:
            agents = [self.cursors.read(agent_id) for agent_id in self.cursors.agents()]
        except (DamagedState, OSError):
            return True
        return any(
            max(agent.cursor, *agent.topics.values(), *(at + 1 for at in agent.taken), 0) > offset
            for agent in agents
        )

    def open_reader(self) -> int:
        """A new descriptor for reading without the lock; -1 when there is no queue file."""
        try:
            return open_safely(self.messages, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            return -1

    def read(self, start: int, end: int) -> bytes:
        """Bytes of the queue file, with the lock held."""
        return os.pread(self._file.fd, end - start, start)

    def high_water(self, size: int) -> int:
        """The end of the last complete line, with the lock held."""
        return size_of_whole_lines(self._file.fd, size)

    # ---- progress ------------------------------------------------------------------------------

    def trusted_progress(self, agent_id: str, size: int) -> ReadProgress:
        """An agent's progress; `DamagedState` when an offset is not the start of a line.

        Guessing the right offset could repeat or lose messages.
        """
        progress = self.cursors.read(agent_id)
        for offset in (progress.cursor, *progress.topics.values()):
            is_start = offset == 0 or (0 < offset <= size and self.read(offset - 1, offset) == b"\n")
            if not is_start:
                raise DamagedState(
                    f"the cursor of {agent_id!r} in session {self.name!r} is damaged: offset {offset} is "
                    "not the start of a line; repair it with `postroom queue repair`"
                )
        return progress

    def write_progress(self, agent_id: str, before: ReadProgress, after: ReadProgress) -> None:
        """Store an agent's new progress, after the lines that it passes.

        A power cut must not keep the cursor and lose the lines.
        """
        if self._durability != "os":
            try:
                self._file.sync()
            except OSError as error:
                raise WriteFailed(self.messages, error, rolled_back=False) from error
        self.cursors.write(agent_id, before, after)

    # ---- compaction ----------------------------------------------------------------------------

    def epoch(self) -> int:
        """The number of compactions so far. Offsets are comparable only within one epoch."""
        try:
            text = read_file(self._epoch_path).strip()
        except FileNotFoundError:
            return 0
        if not (text.isdigit() and len(text) <= CURSOR_DIGITS_MAX):
            raise DamagedState(f"{self._epoch_path} does not hold a number: remove it")
        return int(text)

    def compact(self, size: int, is_dropped: Callable[[bytes], str | None]) -> int:
        """Rewrite the queue file without the dropped lines, with the lock held; returns their number.

        `is_dropped` returns None for a line that stays, else the id of its side file ("" for none).
        """
        gaps: list[tuple[int, int]] = []
        bodies: list[str] = []
        for offset, line in self.lines(0, size):
            body = is_dropped(line)
            if body is not None:
                gaps.append((offset, len(line) + 1))
                bodies += [body] if body else []
        if gaps:
            self._replace_without(gaps, bodies, size)
            self._finish_compaction()
        return len(gaps)

    def _replace_without(self, gaps: list[tuple[int, int]], bodies: list[str], size: int) -> None:
        # A fixed name, safe under the lock: the next compaction overwrites the file of a killed one.
        temporary = self.messages.with_name(f"{self.messages.name}{TEMPORARY_SUFFIX}")
        epoch, readings = self.epoch() + 1, self.cursors.without(gaps)
        try:
            fd = open_safely(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                self._copy_without(fd, gaps, size)
                info = os.fstat(fd)
                os.fsync(fd)  # in every class: these lines may have been durable already and must stay so
            finally:
                os.close(fd)
            journal = RewriteJournal(info.st_ino, epoch, readings, bodies)
            replace_file(self._journal_path, msgspec.json.encode(journal), self._durability)
            # The lock file's length counts compactions: writers see that the queue file was replaced.
            os.pwrite(self._lock_fd, b"\n", os.lseek(self._lock_fd, 0, os.SEEK_END))
            os.replace(temporary, self.messages)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise WriteFailed(self.messages, error) from error

    def lines(self, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Offsets and complete lines from `start` on, read a window at a time, with the lock held."""
        begin = start
        pieces: list[bytes] = []
        while block := os.pread(self._file.fd, max(0, min(WINDOW_BYTES, end - begin)), begin):
            begin += len(block)
            first, *later = block.split(b"\n")
            pieces.append(first)
            if not later:
                continue  # the pieces of a line longer than a window are joined once, at its end
            *complete, rest = [b"".join(pieces), *later]
            for line in complete:
                yield start, line
                start += len(line) + 1
            pieces = [rest]

    def _copy_without(self, fd: int, gaps: list[tuple[int, int]], size: int) -> None:
        position = 0
        for gap, length in [*gaps, (size, 0)]:
            while position < gap:
                block = os.pread(self._file.fd, min(WINDOW_BYTES, gap - position), position)
                if not block:
                    raise Unavailable(f"{self.messages} became shorter while its lock was held")
                write_all(fd, block)
                position += len(block)
            position = gap + length

    def _finish_compaction(self) -> None:
        """Complete the steps of the journal, or discard it when the rename never happened. Idempotent."""
        try:
            journal = msgspec.json.decode(read_file(self._journal_path), type=RewriteJournal)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DamagedState(
                f"{self._journal_path} cannot be read ({reason(error)}): move it away, then set every cursor "
                "of this session with `postroom queue repair`"
            ) from error
        if os.lstat(self.messages).st_ino == journal.inode:  # the device number can change at a reboot
            if self._durability != "os":
                sync_folder(self.folder)
            for agent_id, progress in journal.readings.items():
                self.write_progress(agent_id, _UNKNOWN_PROGRESS, progress)
            replace_file(self._epoch_path, b"%d\n" % journal.epoch, self._durability)
            for msg_id in journal.bodies:
                self.bodies.path(msg_id).unlink(missing_ok=True)
        self._journal_path.unlink()
        if self._durability != "os":
            sync_folder(self.folder)  # before any cursor moves: a surviving journal would reset it
        self._file.close()
        self._file.open()
        self._known_end = -1
