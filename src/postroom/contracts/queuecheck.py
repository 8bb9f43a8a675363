"""Checking and repairing a queue session. A repair keeps every damaged file under a new name."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from postroom.core.formats import queuewire as wire
from postroom.errors import DamagedState, InvalidMessage
from postroom.logs.queuecursors import ReadProgress
from postroom.logs.queuefile import SessionFiles
from postroom.message import Damage, QueueMessage


class BodyFault(msgspec.Struct, frozen=True):
    """A side file that is missing or damaged."""

    msg_id: str
    reason: str


class QueueReport(msgspec.Struct, frozen=True):
    """The result of `Queue.check` for one session."""

    session: str
    messages: int
    unreadable: tuple[Damage, ...]
    cursors: dict[str, str]
    """Agents with a damaged cursor, and the reason."""
    bodies: tuple[BodyFault, ...]
    unused_bodies: tuple[str, ...]
    """Side files that no line refers to: the sender died before writing the line, or is writing it now."""
    state: tuple[str, ...] = ()
    """Damage of the session's own files, such as its journal or epoch."""

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged. Unused side files do not count as damage."""
        return not (self.unreadable or self.cursors or self.bodies or self.state)


def check(files: SessionFiles) -> QueueReport:
    """Read a whole session and report any damage with its location."""
    if not files.exists():
        return QueueReport(files.name, 0, (), {}, (), ())
    try:
        return files.inspect(_check, lambda report: report.ok)
    except DamagedState as error:  # with a damaged journal or epoch nothing else can be checked
        return QueueReport(files.name, 0, (), {}, (), (), (str(error),))


def _check(files: SessionFiles, size: int) -> QueueReport:
    files.epoch()
    messages = 0
    unreadable = []
    bodies: dict[str, QueueMessage] = {}
    for offset, line in files.lines(0, size):
        messages += 1
        try:
            message = wire.decode_line(line)
        except wire.UnreadableLine as error:
            unreadable.append(Damage(offset, len(line) + 1, str(error)))
            continue
        if wire.in_side_file(message):
            bodies[message["msg_id"]] = message
    cursors = {}
    for agent_id in files.cursors.agents():
        try:
            files.trusted_progress(agent_id, size)
        except DamagedState as error:
            cursors[agent_id] = str(error)
    faults = [BodyFault(msg_id, files.bodies.body(message)[0]) for msg_id, message in bodies.items()]
    return QueueReport(
        session=files.name,
        messages=messages,
        unreadable=tuple(unreadable),
        cursors=cursors,
        bodies=tuple(fault for fault in faults if fault.reason),
        unused_bodies=tuple(sorted(files.bodies.ids() - set(bodies))),
    )


def repair_cursor(files: SessionFiles, agent_id: str, to: Literal["start", "end"] | int, now_ns: int) -> int:
    """Set an agent's cursor, and keep its old cursor files under a new name."""
    _refuse_unknown_session(files)
    with files.locked() as size:
        offset = 0 if to == "start" else files.high_water(size) if to == "end" else to
        if isinstance(offset, bool) or not isinstance(offset, int) or not 0 <= offset <= size:
            raise InvalidMessage(f'a cursor can go to "start", "end" or an offset up to {size}, not {to!r}')
        if offset and files.read(offset - 1, offset) != b"\n":
            raise InvalidMessage(f"offset {to} is not the start of a line")
        # The old cursor keeps its name until the new one replaces it: after a crash in between, a missing
        # cursor would cause every message to be redelivered.
        cursor, topics = files.cursors.paths(agent_id)
        try:
            os.link(cursor, _damaged_name(cursor, now_ns), follow_symlinks=False)
        except FileNotFoundError:
            pass
        except OSError:
            _move_aside(cursor, now_ns)  # not a regular file, or a file system without hard links
        files.write_progress(agent_id, ReadProgress(-1), ReadProgress(offset))
        _move_aside(topics, now_ns)
    return offset


def _refuse_unknown_session(files: SessionFiles) -> None:
    """Raise when the session does not exist: a repair must not create it."""
    if not files.exists():
        raise InvalidMessage(f"there is no session {files.name!r} here")


def _move_aside(path: Path, now_ns: int) -> None:
    """Rename a damaged file, so that it is kept."""
    with suppress(FileNotFoundError):
        path.rename(_damaged_name(path, now_ns))


def _damaged_name(path: Path, now_ns: int) -> Path:
    return path.with_name(f"{path.name}.damaged-{now_ns}")


def repair_body(files: SessionFiles, msg_id: str, body: bytes, now_ns: int) -> None:
    """Restore a side file from a copy that matches the line's checksum; the damaged file is kept."""
    _refuse_unknown_session(files)
    with files.locked() as size:
        messages = filter(None, (wire.readable(line) for _, line in files.lines(0, size)))
        named = (each for each in messages if each["msg_id"] == msg_id and wire.in_side_file(each))
        message = next(named, None)
        if message is None:
            raise InvalidMessage(f"no message {msg_id} with a side file is in session {files.name!r}")
        fault = wire.body_fault(message, body)
        if fault:
            raise InvalidMessage(f"this is not the body of {msg_id}: {fault}")
        _move_aside(files.bodies.path(msg_id), now_ns)
        files.bodies.write(msg_id, body)
