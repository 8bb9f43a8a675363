"""The files of one queue session: lines, side files, cursors, and the journal that makes compaction safe.

Rule 1: whoever writes anything here holds the session's lock.
Rule 2: a cursor is on disk before what it passes is handed out.
Rule 3: compaction is decided by one rename. Before it, the journal is void; after it, the journal is law,
        and whoever takes the lock next finishes what it says.
"""

import bisect
import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from time import monotonic
from typing import TypeVar

import msgspec

from postroom.core import queuewire as wire
from postroom.core.names import checked_name
from postroom.errors import DamagedState, InvalidName, Unavailable, UnsafePath, WriteFailed, reason
from postroom.logs.appendfile import AppendFile
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
    sync_folder,
    write_all,
)
from postroom.system.lock import EXCLUSIVE_NOW, UNLOCK, flock

WINDOW_BYTES = 1024 * 1024
CURSOR_DIGITS_MAX = 18
REOPENS_MAX = 1000
LOOK_EVERY_S = 0.1  # how long a send may still go to a file that was replaced by hand
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # our own want, which says nothing about a file
T = TypeVar("T")

CURSOR_SUFFIX = ".cursor"
TOPICS_SUFFIX = ".topics"
BODY_SUFFIX = ".txt"


class ReadProgress(msgspec.Struct, frozen=True):
    """How far one agent has read."""

    cursor: int = 0
    """Everything before this offset is read, whatever its topic."""
    topics: dict[str, int] = {}
    """Topics that are read further than that."""
    taken: list[int] = []
    """Offsets of single messages that were handed out ahead of their topic."""

    def has_read(self, topic: str, offset: int) -> bool:
        """Whether the message of this topic at this offset was handed out or passed over."""
        return offset < self.cursor or offset < self.topics.get(topic, 0) or offset in self.taken

    def first_unread(self, topics: frozenset[str] | None) -> int:
        """The lowest offset at which something of these topics can be unread."""
        if topics is None or not self.topics:
            return self.cursor
        return max(self.cursor, min((self.topics.get(topic, 0) for topic in topics), default=0))


class _Topics(msgspec.Struct):
    """The content of a `.topics` file."""

    topics: dict[str, int]
    taken: list[int]


class RewriteJournal(msgspec.Struct):
    """What remains to be done once the compacted file has taken its place."""

    inode: int
    epoch: int
    readings: dict[str, ReadProgress]
    bodies: list[str]

    def __post_init__(self) -> None:
        """It names files that are written and removed: nothing is done before all of it is believed."""
        if not 0 < self.epoch < 10**CURSOR_DIGITS_MAX:
            raise ValueError(f"the epoch cannot be {self.epoch}")
        for agent_id in self.readings:
            checked_name("agent", agent_id)
        for msg_id in self.bodies:
            checked_name("message id", msg_id)


class SessionFiles:
    """One session's folder. Opened files are kept; nothing is created before the first lock."""

    _lock_fd = -1

    def __init__(self, folder: Path, durability: Durability, lock_timeout_s: float) -> None:
        self.folder = folder
        self.name = folder.name
        self.messages = folder / "messages.jsonl"
        self.bodies = folder / "bodies"
        self.cursors = folder / "cursors"
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
        self._look_again = 0.0
        self._turn_ends = 0.0
        self._compactions = -1

    def __del__(self) -> None:
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)  # as a file object would; the queue file closes itself

    # ---- the lock ------------------------------------------------------------------------------

    def _lock_current(self) -> int:
        """Take the file lock, with the thread lock held; gives the queue file's size."""
        if self._lock_fd >= 0:
            self._take_turn(monotonic())
            size = self._file.current_size()
            if size >= 0:
                return size
        return self._lock_changed()

    def _lock_to_append(self) -> int:
        """As `_lock_current`, mostly without a stat: one also makes the write that follows it dearer.

        A compaction shows in the lock file's length, and a removal in the missing name. Only a file that was
        replaced by hand is noticed up to `LOOK_EVERY_S` later.
        """
        now = monotonic()
        if now >= self._look_again or self._file.fd < 0:
            size = self._lock_current()
            self._compactions = os.lseek(self._lock_fd, 0, os.SEEK_END)
            self._look_again = now + LOOK_EVERY_S
            return size
        self._take_turn(now)
        if os.lseek(self._lock_fd, 0, os.SEEK_END) == self._compactions and self._file.has_name():
            return os.lseek(self._file.fd, 0, os.SEEK_END)
        self._look_again = 0.0
        return self._lock_changed()

    def _take_turn(self, now: float) -> None:
        """Take the file lock: at once during our own turn, else after the processes that wait for it."""
        if now < self._turn_ends:
            try:
                flock(self._lock_fd, EXCLUSIVE_NOW)
            except BlockingIOError:
                pass  # the process that waits for its turn was faster
            else:
                return
        self._turn_ends = lock.take_turn(self._lock_fd, self._lock_timeout_s, self._lock_path)

    def _lock_changed(self) -> int:
        """Nothing is open yet, or the queue file was compacted or removed: open what has the names now."""
        for _ in range(REOPENS_MAX):
            self._drop()
            make_folder(self.folder, self._durability)
            self._lock_fd = open_safely(self._lock_path, os.O_RDWR | os.O_CREAT)
            self._turn_ends = lock.take_turn(self._lock_fd, self._lock_timeout_s, self._lock_path)
            self._file.open()
            size = self._file.current_size()
            if size >= 0 and self._lock_is_current():
                return size
        raise Unavailable(f"{self.folder} is replaced faster than it can be locked")

    def _lock_is_current(self) -> bool:
        try:
            return os.path.samestat(os.lstat(self._lock_path), os.fstat(self._lock_fd))
        except FileNotFoundError:
            return False

    def _drop(self) -> None:
        self._file.close()
        self._known_end = -1
        self._look_again = 0.0
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the session; gives the queue file's size. Finishes a compaction that was cut off before."""
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

    def look(self, work: Callable[["SessionFiles", int], T], is_sound: Callable[[T], bool]) -> T:
        """What `work` finds in these files, up to the size that it is given. Writers are not kept waiting.

        It is done without the lock, and counts when no compaction came in between and the result is sound.
        Else it is done again with the lock: an append that is taken back, or a cursor that moves, can look
        like damage to a reader that takes none.
        """
        fd = self.open_reader()
        if fd >= 0:
            view = SessionFiles(self.folder, self._durability, self._lock_timeout_s)
            view._file.fd = fd
            try:
                result = view._look_unlocked(work)
            finally:
                view._forget()
            if result is not None and is_sound(result):
                return result
        with self.locked() as size:
            return work(self, size)

    def _look_unlocked(self, work: Callable[["SessionFiles", int], T]) -> T | None:
        """The result of `work`; None when the files changed their meaning under it, or seem damaged."""
        try:
            before = self._meaning()
            result = work(self, os.fstat(self._file.fd).st_size)
            return result if before is not None and self._meaning() == before else None
        except (DamagedState, FileNotFoundError):
            return None

    def _meaning(self) -> tuple[int, int] | None:
        """What tells whether offsets mean the same as before; None while a compaction is going on."""
        if self._journal_path.exists() or not os.path.samestat(
            os.lstat(self.messages), os.fstat(self._file.fd)
        ):
            return None
        return self.epoch(), os.fstat(self._file.fd).st_ino

    def exists(self) -> bool:
        """Whether anything was ever written here."""
        return self.folder.is_dir()

    def close(self) -> None:
        """Close every descriptor."""
        with self._mutex:
            self._drop()

    def after_fork(self) -> None:
        """A child starts with its own descriptors and thread lock."""
        self._mutex = threading.Lock()
        self._forget()

    def reopen(self) -> None:
        """Forget the descriptors and a failed fsync, once no thread of ours is at work here."""
        with self._mutex:
            self._forget()

    def _forget(self) -> None:
        self._file.forget()
        self._known_end = -1
        self._look_again = 0.0
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)

    # ---- lines ---------------------------------------------------------------------------------

    def append(self, line: bytes, note: Callable[[], None]) -> int:
        """Append one line and, still under the lock, `note` that; gives a ticket for `settle`."""
        file = self._file
        with self._mutex:
            try:
                size = self._lock_to_append()
                if size != self._known_end and size and os.pread(file.fd, 1, size - 1) != b"\n":
                    line = b"\n" + line  # a writer died in the middle of its line: ours must not grow onto it
                ticket = file.append(line, size)
                self._known_end = size + len(line)
                note()
            finally:
                # Spelled out, not called: a signal handler may raise wherever a function begins.
                if self._lock_fd >= 0:
                    flock(self._lock_fd, UNLOCK)
        return ticket

    def settle(self, ticket: int) -> None:
        """Wait, without the lock, until an append is durable in its class."""
        try:
            self._file.settle(ticket)
        except OSError as error:
            with self._mutex:
                rolled_back = self._file.roll_back_group(self._lock_fd, self._lock_timeout_s, self._was_read)
            raise WriteFailed(self.messages, error, rolled_back=rolled_back) from error

    def _was_read(self, offset: int) -> bool:
        """Whether some agent's place is behind this offset, or cannot be known."""
        try:
            readings = [self.progress_of(agent_id) for agent_id in self.agents_with_cursors()]
        except (DamagedState, OSError):
            return True
        return any(
            max(r.cursor, *r.topics.values(), *(at + 1 for at in r.taken), 0) > offset for r in readings
        )

    def open_reader(self) -> int:
        """A descriptor of its own for reading without the lock; -1 when there is no queue file."""
        try:
            return open_safely(self.messages, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            return -1

    def read(self, start: int, end: int) -> bytes:
        """Bytes of the queue file, with the lock held."""
        return os.pread(self._file.fd, end - start, start)

    def high_water(self, size: int) -> int:
        """The end of the last complete line, with the lock held."""
        end = size
        while end > 0:
            begin = max(0, end - WINDOW_BYTES)
            found = self.read(begin, end).rfind(b"\n")
            if found >= 0:
                return begin + found + 1
            end = begin
        return 0

    # ---- side files ----------------------------------------------------------------------------

    def body_path(self, msg_id: str) -> Path:
        """Where the long body of a message lies."""
        return self.bodies / f"{msg_id}{BODY_SUFFIX}"

    def write_body(self, msg_id: str, body: bytes) -> None:
        """Store a long body, whole and in its durability class, before any line names it."""
        make_folder(self.bodies, self._durability)
        replace_file(self.body_path(msg_id), body, self._durability)

    def remove_body(self, msg_id: str) -> None:
        """Take back a long body whose line was not written."""
        with suppress(OSError):
            self.body_path(msg_id).unlink()

    def body_size(self, msg_id: str) -> int:
        """The size of a side file; 0 for one that is not there."""
        try:
            return os.lstat(self.body_path(msg_id)).st_size
        except OSError:
            return 0

    def side_body(self, message: QueueMessage) -> tuple[str, str]:
        """What is wrong with a message's side file ("" for nothing), and its text."""
        try:
            raw = read_file(self.body_path(message["msg_id"]))
            return wire.body_fault(message, raw), raw.decode()
        except UnicodeDecodeError:
            return "the side file is not UTF-8 text", ""
        except (OSError, UnsafePath) as error:
            if isinstance(error, OSError) and error.errno in _PASSING:
                raise Unavailable(f"{self.body_path(message['msg_id'])}: {error.strerror}") from error
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            return f"the side file cannot be read: {reason}", ""

    # ---- cursors -------------------------------------------------------------------------------

    def agents_with_cursors(self) -> list[str]:
        """Agents that have a cursor here."""
        try:
            names = os.listdir(self.cursors)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DamagedState(f"{self.cursors} cannot be read: {error.strerror}") from error
        agents = set()
        for name in names:
            stem, dot, suffix = name.rpartition(".")
            if dot + suffix in (CURSOR_SUFFIX, TOPICS_SUFFIX):
                with suppress(InvalidName):
                    agents.add(checked_name("agent", stem))
        return sorted(agents)

    def progress_of(self, agent_id: str) -> ReadProgress:
        """An agent's place; `DamagedState` when its files do not hold one."""
        cursor = self._read_cursor(self.cursors / f"{agent_id}{CURSOR_SUFFIX}")
        path = self.cursors / f"{agent_id}{TOPICS_SUFFIX}"
        try:
            ahead = msgspec.json.decode(read_file(path), type=_Topics)
        except FileNotFoundError:
            return ReadProgress(cursor)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UnsafePath) as error:
            raise DamagedState(
                f"{path} cannot be read ({reason(error)}): mend it with `postroom queue repair`"
            ) from error
        return ReadProgress(cursor, ahead.topics, ahead.taken)

    def trusted_progress(self, agent_id: str, size: int) -> ReadProgress:
        """An agent's place, refused when it is not at the start of a line: guessing would repeat or lose."""
        reading = self.progress_of(agent_id)
        for offset in (reading.cursor, *reading.topics.values()):
            if not self._starts_line(offset, size):
                raise DamagedState(
                    f"the cursor of {agent_id!r} in session {self.name!r} is damaged: offset {offset} is "
                    "not the start of a line; mend it with `postroom queue repair`"
                )
        return reading

    def _starts_line(self, offset: int, size: int) -> bool:
        return offset == 0 or (0 < offset <= size and self.read(offset - 1, offset) == b"\n")

    def _read_cursor(self, path: Path) -> int:
        try:
            text = read_file(path).strip()
        except FileNotFoundError:
            return 0
        except UnsafePath as error:
            raise DamagedState(f"{error}: mend it with `postroom queue repair`") from error
        if not (text.isdigit() and len(text) <= CURSOR_DIGITS_MAX):
            raise DamagedState(f"{path} does not hold an offset: mend it with `postroom queue repair`")
        return int(text)

    def _sync_lines(self) -> None:
        """A cursor must not survive a power cut that the lines it has passed do not."""
        if self._durability != "os":
            try:
                self._file.sync()
            except OSError as error:
                raise WriteFailed(self.messages, error, rolled_back=False) from error

    def write_progress(self, agent_id: str, before: ReadProgress, after: ReadProgress) -> None:
        """Put an agent's new place on disk, in an order that a crash cannot turn into a repetition.

        First everything that is ahead of the cursor as it was, then the cursor, and only then without what
        the new cursor says.
        """
        self._sync_lines()
        make_folder(self.cursors, self._durability)
        first = _ahead_of(min(before.cursor, after.cursor), after)
        self._write_ahead(agent_id, _Topics(before.topics, before.taken), first)
        if after.cursor != before.cursor:
            cursor_path = self.cursors / f"{agent_id}{CURSOR_SUFFIX}"
            replace_file(cursor_path, b"%d\n" % after.cursor, self._durability)
            self._write_ahead(agent_id, first, _ahead_of(after.cursor, after))

    def _write_ahead(self, agent_id: str, before: _Topics, after: _Topics) -> None:
        path = self.cursors / f"{agent_id}{TOPICS_SUFFIX}"
        if after == before:
            return
        if after.topics or after.taken:
            replace_file(path, msgspec.json.encode(after), self._durability)
        else:
            with suppress(FileNotFoundError):
                path.unlink()

    # ---- compaction ----------------------------------------------------------------------------

    def epoch(self) -> int:
        """How often offsets have changed their meaning."""
        try:
            text = read_file(self._epoch_path).strip()
        except FileNotFoundError:
            return 0
        if not (text.isdigit() and len(text) <= CURSOR_DIGITS_MAX):
            raise DamagedState(f"{self._epoch_path} does not hold a number: remove it")
        return int(text)

    def compact(self, size: int, is_dropped: Callable[[bytes], str | None]) -> int:
        """Rewrite the queue file without the lines that `is_dropped` names, with the lock held.

        `is_dropped` gives None for a line that stays, else the id of its side file ("" for none).
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
        # One name, since the lock is held: what a killed compaction left behind is overwritten by the next.
        temporary = self.messages.with_name(f"{self.messages.name}{TEMPORARY_SUFFIX}")
        epoch, readings = self.epoch() + 1, self._remapped(gaps)
        try:
            fd = open_safely(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                self._copy_without(fd, gaps, size)
                info = os.fstat(fd)
                os.fsync(fd)  # in every class: these lines were safe long ago, and must not become less so
            finally:
                os.close(fd)
            journal = RewriteJournal(info.st_ino, epoch, readings, bodies)
            replace_file(self._journal_path, msgspec.json.encode(journal), self._durability)
            # Longer by one: this tells those who append that the file is another one now.
            os.pwrite(self._lock_fd, b"\n", os.lseek(self._lock_fd, 0, os.SEEK_END))
            os.replace(temporary, self.messages)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise WriteFailed(self.messages, error) from error

    def lines(self, start: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Complete lines from `start` and their offsets, with the lock held, a window at a time."""
        begin = start
        pieces: list[bytes] = []
        while block := os.pread(self._file.fd, max(0, min(WINDOW_BYTES, end - begin)), begin):
            begin += len(block)
            first, *later = block.split(b"\n")
            pieces.append(first)
            if not later:
                continue  # a line longer than a window is joined once, when its end is found
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

    def _remapped(self, gaps: list[tuple[int, int]]) -> dict[str, ReadProgress]:
        """Every agent's place in the file without the gaps. A damaged cursor stays as it is."""
        starts = [start for start, _ in gaps]
        dropped = set(starts)
        removed = [0, *accumulate(length for _, length in gaps)]

        def moved(offset: int) -> int:
            passed = bisect.bisect_left(starts, offset)
            inside = passed > 0 and offset < sum(gaps[passed - 1])
            return _NO_PLACE if inside else offset - removed[passed]

        readings = {}
        for agent_id in self.agents_with_cursors():
            with suppress(DamagedState):
                old = self.progress_of(agent_id)
                topics = {topic: moved(offset) for topic, offset in old.topics.items()}
                cursor = _NO_PLACE if _NO_PLACE in topics.values() else moved(old.cursor)
                taken = [moved(offset) for offset in old.taken if offset not in dropped]
                readings[agent_id] = ReadProgress(cursor, topics, taken)
        return readings

    def _finish_compaction(self) -> None:
        """Do what the journal says, or discard it when the rename never happened. Safe to repeat."""
        try:
            journal = msgspec.json.decode(read_file(self._journal_path), type=RewriteJournal)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DamagedState(
                f"{self._journal_path} cannot be read ({reason(error)}): move it away, then set every cursor "
                "of this session with `postroom queue repair`"
            ) from error
        if os.lstat(self.messages).st_ino == journal.inode:  # a device's number can change at a reboot
            self._apply(journal)
        self._journal_path.unlink()
        if self._durability != "os":
            sync_folder(self.folder)  # before a cursor goes on from here: the journal would turn it back
        self._file.close()
        self._file.open()
        self._known_end = -1

    def _apply(self, journal: RewriteJournal) -> None:
        if self._durability != "os":
            sync_folder(self.folder)
        for agent_id, reading in journal.readings.items():
            self.write_progress(agent_id, _NOWHERE, reading)
        replace_file(self._epoch_path, b"%d\n" % journal.epoch, self._durability)
        for msg_id in journal.bodies:
            with suppress(FileNotFoundError):
                self.body_path(msg_id).unlink()


_NO_PLACE = -1  # what is written for an offset inside a line that is gone: it was damaged, and still says so
_NOWHERE = ReadProgress(-1, {"": -1}, [-1])


def _ahead_of(cursor: int, reading: ReadProgress) -> _Topics:
    """What of a reading a cursor alone does not say."""
    topics = {topic: offset for topic, offset in reading.topics.items() if offset > cursor}
    return _Topics(topics, sorted(offset for offset in reading.taken if offset >= cursor))
