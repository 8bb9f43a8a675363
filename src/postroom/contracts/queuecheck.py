"""Checking and repairing a queue session. A repair keeps every damaged file under a new name."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from postroom.core.formats import queuewire as wire
from postroom.errors import DamagedState, InvalidMessage
from postroom.logs.queuefile import BODY_SUFFIX, CURSOR_SUFFIX, TOPICS_SUFFIX, ReadProgress, SessionFiles
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
    return QueueReport(
        session=files.name,
        messages=messages,
        unreadable=tuple(unreadable),
        cursors=dict(_damaged_cursors(files, size)),
        bodies=tuple(_damaged_bodies(files, bodies)),
        unused_bodies=tuple(sorted(_body_ids(files) - set(bodies))),
    )


def _damaged_cursors(files: SessionFiles, size: int) -> Iterator[tuple[str, str]]:
    for agent_id in files.agents_with_cursors():
        try:
            files.trusted_progress(agent_id, size)
        except DamagedState as error:
            yield agent_id, str(error)


def _damaged_bodies(files: SessionFiles, bodies: dict[str, QueueMessage]) -> Iterator[BodyFault]:
    for msg_id, message in bodies.items():
        fault, _ = files.side_body(message)
        if fault:
            yield BodyFault(msg_id, fault)


def _body_ids(files: SessionFiles) -> set[str]:
    try:
        names = os.listdir(files.bodies)
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise DamagedState(f"{files.bodies} cannot be read: {error.strerror}") from error
    return {name.removesuffix(BODY_SUFFIX) for name in names if name.endswith(BODY_SUFFIX)}


def repair_cursor(files: SessionFiles, agent_id: str, to: Literal["start", "end"] | int, now_ns: int) -> int:
    """Set an agent's cursor, and keep its old cursor files under a new name."""
    _refuse_unknown_session(files)
    with files.locked() as size:
        offset = _chosen_offset(files, to, size)
        # The old cursor keeps its name until the new one replaces it: after a crash in between, a missing
        # cursor would cause every message to be redelivered.
        _keep_copy(files.cursors / f"{agent_id}{CURSOR_SUFFIX}", now_ns)
        files.write_progress(agent_id, ReadProgress(-1), ReadProgress(offset))
        _move_aside(files.cursors / f"{agent_id}{TOPICS_SUFFIX}", now_ns)
    return offset


def _refuse_unknown_session(files: SessionFiles) -> None:
    """Raise when the session does not exist: a repair must not create it."""
    if not files.exists():
        raise InvalidMessage(f"there is no session {files.name!r} here")


def _chosen_offset(files: SessionFiles, to: Literal["start", "end"] | int, size: int) -> int:
    if to == "start":
        return 0
    if to == "end":
        return files.high_water(size)
    if isinstance(to, bool) or not isinstance(to, int) or not 0 <= to <= size:
        raise InvalidMessage(f'a cursor can go to "start", "end" or an offset up to {size}, not {to!r}')
    if to and files.read(to - 1, to) != b"\n":
        raise InvalidMessage(f"offset {to} is not the start of a line")
    return to


def _move_aside(path: Path, now_ns: int) -> None:
    """Rename a damaged file, so that it is kept."""
    with suppress(FileNotFoundError):
        path.rename(_damaged_name(path, now_ns))


def _keep_copy(path: Path, now_ns: int) -> None:
    """Hard-link a damaged file to a second name, which remains when the first is replaced."""
    try:
        os.link(path, _damaged_name(path, now_ns), follow_symlinks=False)
    except FileNotFoundError:
        return
    except OSError:
        _move_aside(path, now_ns)  # not a regular file, or a file system without hard links


def _damaged_name(path: Path, now_ns: int) -> Path:
    return path.with_name(f"{path.name}.damaged-{now_ns}")


def repair_body(files: SessionFiles, msg_id: str, body: bytes, now_ns: int) -> None:
    """Restore a side file from a copy that matches the line's checksum; the damaged file is kept."""
    _refuse_unknown_session(files)
    with files.locked() as size:
        fault = wire.body_fault(_line_with_side_file(files, msg_id, size), body)
        if fault:
            raise InvalidMessage(f"this is not the body of {msg_id}: {fault}")
        _move_aside(files.body_path(msg_id), now_ns)
        files.write_body(msg_id, body)


def _line_with_side_file(files: SessionFiles, msg_id: str, size: int) -> QueueMessage:
    for _, line in files.lines(0, size):
        message = wire.readable(line)
        if message is not None and message["msg_id"] == msg_id and wire.in_side_file(message):
            return message
    raise InvalidMessage(f"no message {msg_id} with a side file is in session {files.name!r}")
