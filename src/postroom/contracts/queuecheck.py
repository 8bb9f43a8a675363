"""Looking after a queue session: what is damaged, and putting it right without throwing anything away."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from postroom.core import queuewire as wire
from postroom.errors import DamagedState, InvalidMessage
from postroom.logs.queuefile import BODY_SUFFIX, CURSOR_SUFFIX, TOPICS_SUFFIX, ReadProgress, SessionFiles
from postroom.message import Damage, QueueMessage


class BodyFault(msgspec.Struct, frozen=True):
    """A side file that is missing, damaged, or that no line names."""

    msg_id: str
    reason: str


class QueueReport(msgspec.Struct, frozen=True):
    """What `Queue.check` found in one session."""

    session: str
    messages: int
    unreadable: tuple[Damage, ...]
    cursors: dict[str, str]
    """Agents whose place cannot be trusted, and why."""
    bodies: tuple[BodyFault, ...]
    unused_bodies: tuple[str, ...]
    """Side files that no line names: a sender died before its line, or they are for a line being sent."""
    state: tuple[str, ...] = ()
    """What is wrong with the files that hold the session together."""

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged. Unused side files are no damage."""
        return not (self.unreadable or self.cursors or self.bodies or self.state)


def check(files: SessionFiles) -> QueueReport:
    """Read everything in a session and say what is damaged and where."""
    if not files.exists():
        return QueueReport(files.name, 0, (), {}, (), ())
    try:
        return files.look(_check, lambda report: report.ok)
    except DamagedState as error:  # without its journal or epoch nothing else can be judged
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
    """Set an agent's place, keeping the files that it had beside."""
    _refuse_unknown_session(files)
    with files.locked() as size:
        offset = _chosen_offset(files, to, size)
        # The old cursor keeps its name until the new one takes it: a crash in between, with no cursor at all,
        # would hand everything out again.
        _keep_beside(files.cursors / f"{agent_id}{CURSOR_SUFFIX}", now_ns)
        files.write_progress(agent_id, ReadProgress(-1), ReadProgress(offset))
        _set_aside(files.cursors / f"{agent_id}{TOPICS_SUFFIX}", now_ns)
    return offset


def _refuse_unknown_session(files: SessionFiles) -> None:
    """Repair must not create what it was asked to mend."""
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


def _set_aside(path: Path, now_ns: int) -> None:
    """Keep a damaged file under another name."""
    with suppress(FileNotFoundError):
        path.rename(_name_beside(path, now_ns))


def _keep_beside(path: Path, now_ns: int) -> None:
    """Give a damaged file a second name, which stays when the first goes to its successor."""
    try:
        os.link(path, _name_beside(path, now_ns), follow_symlinks=False)
    except FileNotFoundError:
        return
    except OSError:
        _set_aside(path, now_ns)  # not a file, or a file system without second names


def _name_beside(path: Path, now_ns: int) -> Path:
    return path.with_name(f"{path.name}.damaged-{now_ns}")


def repair_body(files: SessionFiles, msg_id: str, body: bytes, now_ns: int) -> None:
    """Put back a side file from a copy that fits the line's checksum, keeping the damaged one beside."""
    _refuse_unknown_session(files)
    with files.locked() as size:
        fault = wire.body_fault(_line_with_side_file(files, msg_id, size), body)
        if fault:
            raise InvalidMessage(f"this is not the body of {msg_id}: {fault}")
        _set_aside(files.body_path(msg_id), now_ns)
        files.write_body(msg_id, body)


def _line_with_side_file(files: SessionFiles, msg_id: str, size: int) -> QueueMessage:
    for _, line in files.lines(0, size):
        message = wire.readable(line)
        if message is not None and message["msg_id"] == msg_id and wire.in_side_file(message):
            return message
    raise InvalidMessage(f"no message {msg_id} with a side file is in session {files.name!r}")
