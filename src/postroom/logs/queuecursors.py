"""The cursors of a session: how far each agent has read.

Rule 1: a cursor is on disk before the messages it passes are handed out.
Rule 2: no crash moves a cursor back, because that would deliver messages again.
"""

import os
from bisect import bisect_left
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import msgspec

from postroom.core.names import checked_name
from postroom.errors import DamagedState, InvalidName, UnsafePath, reason
from postroom.message import Durability
from postroom.system.atomic import make_folder, read_file, replace_file

CURSOR_DIGITS_MAX = 18
CURSOR_SUFFIX = ".cursor"
TOPICS_SUFFIX = ".topics"
_INVALID = -1  # written for an offset inside a dropped line: it was damaged before and must stay invalid


class ReadProgress(msgspec.Struct, frozen=True):
    """How far one agent has read."""

    cursor: int = 0
    """Every message before this offset is read, in all topics."""
    topics: dict[str, int] = {}
    """Offsets of topics that are read further than the cursor."""
    taken: list[int] = []
    """Offsets of single messages that were delivered ahead of their topic."""

    def has_read(self, topic: str, offset: int) -> bool:
        """Whether the message of this topic at this offset was delivered or skipped."""
        return offset < self.cursor or offset < self.topics.get(topic, 0) or offset in self.taken

    def first_unread(self, topics: frozenset[str] | None) -> int:
        """The lowest offset at which a message of these topics can be unread."""
        if topics is None or not self.topics:
            return self.cursor
        return max(self.cursor, min((self.topics.get(topic, 0) for topic in topics), default=0))


class _Ahead(msgspec.Struct):
    """The content of a `.topics` file: what is read ahead of the cursor."""

    topics: dict[str, int]
    taken: list[int]


def _ahead_of(cursor: int, progress: ReadProgress) -> _Ahead:
    topics = {topic: offset for topic, offset in progress.topics.items() if offset > cursor}
    return _Ahead(topics, sorted(offset for offset in progress.taken if offset >= cursor))


class Cursors:
    """The folder with the cursor files of one session. The caller holds the session's lock to write."""

    def __init__(self, folder: Path, durability: Durability) -> None:
        self.folder = folder
        self._durability: Durability = durability

    def paths(self, agent_id: str) -> tuple[Path, Path]:
        """An agent's cursor file, and the file of what it has read ahead of the cursor."""
        return self.folder / f"{agent_id}{CURSOR_SUFFIX}", self.folder / f"{agent_id}{TOPICS_SUFFIX}"

    def agents(self) -> list[str]:
        """The agents with a cursor in this session."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DamagedState(f"{self.folder} cannot be read: {error.strerror}") from error
        agents = set()
        for name in names:
            stem, dot, suffix = name.rpartition(".")
            if dot + suffix in (CURSOR_SUFFIX, TOPICS_SUFFIX):
                with suppress(InvalidName):
                    agents.add(checked_name("agent", stem))
        return sorted(agents)

    def read(self, agent_id: str) -> ReadProgress:
        """An agent's progress; `DamagedState` when its cursor files are invalid."""
        path, ahead_path = self.paths(agent_id)
        cursor = 0
        with suppress(FileNotFoundError):
            try:
                text = read_file(path).strip()
            except UnsafePath as error:
                raise DamagedState(f"{error}: repair it with `postroom queue repair`") from error
            if not (text.isdigit() and len(text) <= CURSOR_DIGITS_MAX):
                raise DamagedState(f"{path} does not hold an offset: repair it with `postroom queue repair`")
            cursor = int(text)
        try:
            ahead = msgspec.json.decode(read_file(ahead_path), type=_Ahead)
        except FileNotFoundError:
            return ReadProgress(cursor)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UnsafePath) as error:
            raise DamagedState(
                f"{ahead_path} cannot be read ({reason(error)}): repair it with `postroom queue repair`"
            ) from error
        return ReadProgress(cursor, ahead.topics, ahead.taken)

    def write(self, agent_id: str, before: ReadProgress, after: ReadProgress) -> None:
        """Store an agent's new progress, in an order in which no crash can cause a redelivery.

        First the topics file with everything ahead of the old cursor, then the cursor, then the topics file
        without the entries that the new cursor covers.
        """
        make_folder(self.folder, self._durability)
        path, ahead_path = self.paths(agent_id)
        first = _ahead_of(min(before.cursor, after.cursor), after)
        self._write_ahead(ahead_path, _Ahead(before.topics, before.taken), first)
        if after.cursor != before.cursor:
            replace_file(path, b"%d\n" % after.cursor, self._durability)
            self._write_ahead(ahead_path, first, _ahead_of(after.cursor, after))

    def _write_ahead(self, path: Path, before: _Ahead, after: _Ahead) -> None:
        if after == before:
            return
        if after.topics or after.taken:
            replace_file(path, msgspec.json.encode(after), self._durability)
        else:
            path.unlink(missing_ok=True)

    def without(self, gaps: list[tuple[int, int]]) -> dict[str, ReadProgress]:
        """Every agent's progress in the file without the gaps. Damaged cursors are left out and stay."""
        starts = [start for start, _ in gaps]
        dropped = set(starts)
        removed = [0, *accumulate(length for _, length in gaps)]

        def moved(offset: int) -> int:
            passed = bisect_left(starts, offset)
            inside = passed > 0 and offset < sum(gaps[passed - 1])
            return _INVALID if inside else offset - removed[passed]

        readings = {}
        for agent_id in self.agents():
            with suppress(DamagedState):
                old = self.read(agent_id)
                topics = {topic: moved(offset) for topic, offset in old.topics.items()}
                cursor = _INVALID if _INVALID in topics.values() else moved(old.cursor)
                taken = [moved(offset) for offset in old.taken if offset not in dropped]
                readings[agent_id] = ReadProgress(cursor, topics, taken)
        return readings
