"""`Queue`: a brokerless mailbox in JSON lines, with fixed topics, cursors, sessions and a kill switch.

The library stores each agent's read position in a cursor file. The cursor is the acknowledgement: it is on
disk before the messages are returned, so a crash can lose a delivery but never repeat it.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from postroom.contracts import queuecheck
from postroom.contracts.queuecheck import QueueReport
from postroom.core.formats import queuewire as wire
from postroom.core.names import checked_name, is_name, plain
from postroom.core.times import checked_seconds, utc_text
from postroom.errors import (
    DamagedState,
    InvalidMessage,
    PostroomError,
    QueueDisabledError,
    QueueError,
)
from postroom.logs.appendfile import opened
from postroom.logs.auditfile import AuditFile
from postroom.logs.queuecursors import ReadProgress
from postroom.logs.queuefile import SessionFiles
from postroom.message import Durability, QueueMessage
from postroom.nudges.watch import Watch
from postroom.settings import (
    DEFAULT_AGENT_ID,
    DEFAULT_SESSION,
    queue_agent_id,
    queue_body_threshold,
    queue_disabled,
    queue_root,
    queue_session,
)
from postroom.system.atomic import absolute_path, make_folder, replace_file
from postroom.system.clock import nanoseconds_of
from postroom.system.handles import Closing, reset_after_fork
from postroom.system.log import library_log

POLL_MESSAGES_MAX = 10_000_000
POLL_INTERVAL_S = 0.2  # the longest delay after a lost wake-up
TAIL_FIRST_BYTES = 64 * 1024
SESSIONS_OPEN_MAX = 64
DURABILITIES = ("os", "group", "fsync")

T = TypeVar("T")

_log = library_log("postroom.queue")
_counter = itertools.count(1)


class QueueLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that users do not set."""

    poll_bytes_max: int = 64 * 1024 * 1024  # of lines in one poll; the next poll continues from there
    taken_max: int = 1000  # answers taken by `ask` ahead of unread answers


class SendEntry(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, rename={"sender": "from"}):
    """The audit line of a send."""

    ts: str
    op: str
    session: str
    msg_id: str
    topic: str
    to: str | None
    sender: str
    body_bytes: int
    externalized: bool
    ttl_s: float | int | None
    unknown_recipient: bool = False


class PollEntry(msgspec.Struct, frozen=True):
    """The audit line of a poll."""

    ts: str
    op: str
    session: str
    agent_id: str
    topics: list[str] | None
    matched: int
    cursor_from: int
    cursor_to: int


class ExpireEntry(msgspec.Struct, frozen=True):
    """The audit line of an expire."""

    ts: str
    op: str
    session: str
    dropped: int
    epoch: int


class Queue(Closing):
    """A file-backed mailbox for the agents of one machine.

    `root` is the folder (default: from the environment, else a per-user folder). A body of more UTF-8 bytes
    than `body_threshold` goes to a side file. `durability` says when a send counts as stored and a cursor as
    written: "os" (page cache), "group" (an fsync shared by the waiting threads), "fsync". `disabled` is a
    kill switch for this handle, in addition to the one in the environment.

    A handle may be shared between threads and used after a fork.
    """

    limits = QueueLimits()

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        body_threshold: int | None = None,
        *,
        durability: Durability = "os",
        lock_timeout_s: float = 10.0,
        disabled: bool = False,
        clock: Callable[[], datetime] | None = None,
    ) -> None:
        if body_threshold is None:
            body_threshold = queue_body_threshold(os.environ)
        if isinstance(body_threshold, bool) or not isinstance(body_threshold, int) or body_threshold < 0:
            raise InvalidMessage(f"body_threshold must be a number of bytes >= 0, not {body_threshold!r}")
        if durability not in DURABILITIES:
            raise InvalidMessage(f"durability must be one of {', '.join(DURABILITIES)}, not {durability!r}")
        if not checked_seconds("lock_timeout_s", lock_timeout_s):
            raise InvalidMessage(f"lock_timeout_s must be positive, not {lock_timeout_s!r}")
        if not isinstance(disabled, bool):
            raise InvalidMessage(f"disabled must be true or false, not {disabled!r}")
        self.root = absolute_path("the queue's root", queue_root(os.environ) if root is None else root)
        self.body_threshold = body_threshold
        self._durability: Durability = durability
        self._lock_timeout_s = lock_timeout_s
        self._switched_off = disabled
        self._now_ns = time.time_ns if clock is None else nanoseconds_of(clock)
        self._audit = AuditFile(self.audit_path, durability)
        self._sessions: dict[str, SessionFiles] = {}
        self._opening = threading.Lock()
        self._token = os.urandom(4).hex()
        reset_after_fork(self)

    @property
    def audit_path(self) -> Path:
        """The log with the metadata of every send, poll and expire; it never holds a body."""
        return self.root / "audit.jsonl"

    # ---- sending -------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        body: str,
        to: str | None = None,
        ttl_s: float | None = None,
        session: str | None = None,
        sender: str | None = None,
        reply_to: str | None = None,
    ) -> str:
        """Store one message and return its id."""
        if self._disabled():
            raise QueueDisabledError("the queue is disabled by its kill switch: nothing was sent")
        files = self._session(session)
        raw = _encoded_body(body)
        body = plain(body)
        topic = wire.checked_topic(topic)
        sender = checked_name("sender", _default_agent_id() if sender is None else sender)
        to = None if to is None else checked_name("recipient", to)
        reply_to = None if reply_to is None else wire.checked_reply_to(reply_to)
        ttl_s = None if ttl_s is None else wire.checked_ttl(ttl_s)
        now_ns = self._now_ns()
        msg_id, ts = f"m-{now_ns}-{self._token}-{next(_counter)}", utc_text(now_ns)
        line = wire.QueueLine(msg_id, ts, sender, to, topic, body, reply_to, ttl_s)
        data = wire.encode_line(line) if len(raw) <= self.body_threshold else b""
        externalized = not data or len(data) > wire.LINE_BYTES_MAX or body[:6] == wire.SIDE_FILE_MARK
        if externalized:
            mark, checksum = wire.side_file_mark(msg_id), wire.body_checksum(raw)
            named = msgspec.structs.replace(line, body=mark, body_bytes=len(raw), body_crc=checksum)
            data = wire.encode_line(named)
            files.bodies.write(msg_id, raw)  # before any line refers to it
        entry = SendEntry(
            ts, "send", files.name, msg_id, topic, to, sender, len(raw), externalized, ttl_s
        )  # fmt: skip
        has_registry = to is not None and to not in wire.EVERYONE and os.path.isdir(files.agents_name)
        if has_registry and not os.path.exists(f"{files.agents_name}/{to}"):
            entry = msgspec.structs.replace(entry, unknown_recipient=True)
            _log.warning("%s is sent to %r, which is not registered in session %r", msg_id, to, files.name)
        try:
            ticket = files.append(data, partial(self._audit.write, entry))
            if ticket:
                files.settle(ticket)
        except PostroomError as error:
            if externalized and getattr(error, "rolled_back", True):
                files.bodies.remove(msg_id)  # no line refers to it
            raise
        return msg_id

    # ---- receiving -----------------------------------------------------------------------------

    def poll(
        self,
        agent_id: str,
        topics: str | Iterable[str] | None = None,
        session: str | None = None,
        *,
        wait_s: float = 0.0,
        keep_filtered: bool = False,
        limit: int | None = None,
    ) -> list[QueueMessage]:
        """New messages for `agent_id`; its cursor is on disk before they are returned.

        Messages that a topic filter excludes are skipped for good, unless `keep_filtered` keeps them for a
        later poll. `wait_s` is how long to wait for a first message. At most `limit` messages are returned;
        the next poll returns the rest.
        """
        agent = checked_name("agent", agent_id)
        chosen = wire.checked_topics(topics)
        most = POLL_MESSAGES_MAX if limit is None else _checked_limit(limit)
        files = self._session(session)
        if self._disabled() or not most:
            return []
        if checked_seconds("wait_s", wait_s) == 0:
            return self._take(files, agent, chosen, keep=keep_filtered, limit=most)
        found = self._await(
            files, wait_s, lambda: self._take(files, agent, chosen, keep=keep_filtered, limit=most)
        )
        return found or []

    def _take(
        self, files: SessionFiles, agent_id: str, topics: frozenset[str] | None, *, keep: bool, limit: int
    ) -> list[QueueMessage]:
        with files.locked() as size:
            before = files.trusted_progress(agent_id, size)
            start = before.first_unread(topics) if keep else before.cursor
            # Side files are read here too, so that any error is raised before the cursor moves.
            found, end = self._scan(files, agent_id, topics, before, start, size, limit)
            if keep and topics is not None:
                # A long backlog is read in parts: a topic that is already further along must not move back.
                ahead = {topic: max(end, before.topics.get(topic, 0)) for topic in topics}
                after = ReadProgress(before.cursor, before.topics | ahead, before.taken)
            else:
                after = ReadProgress(end, before.topics, before.taken)
            if after != before:
                files.write_progress(agent_id, before, after)
            matched = None if topics is None else sorted(topics)
            now = utc_text(self._now_ns())
            self._audit.write(PollEntry(now, "poll", files.name, agent_id, matched, len(found), start, end))
            return found

    def _scan(
        self,
        files: SessionFiles,
        agent_id: str,
        topics: frozenset[str] | None,
        progress: ReadProgress,
        start: int,
        size: int,
        limit: int,
    ) -> tuple[list[QueueMessage], int]:
        """Unread messages for this agent from `start` on, with their bodies, and the offset after them.

        The scan stops early at `limit` messages, or when the side files together exceed `poll_bytes_max`.
        """
        bytes_max = self.limits.poll_bytes_max
        data = files.read(start, min(size, start + bytes_max))
        *lines, torn = data.split(b"\n")
        if len(torn) >= bytes_max:
            raise DamagedState(
                f"{files.messages} has a line of more than {bytes_max} bytes at offset {start}: "
                "move the cursor past it with `postroom queue repair`"
            )
        found: list[QueueMessage] = []
        body_bytes = 0
        now_ns = self._now_ns()
        offsets = _offsets(lines, start) if progress.topics or progress.taken else None
        for index, line in enumerate(lines):
            try:
                message = wire.decode_line(line)
            except wire.UnreadableLine as error:
                offsets = offsets or _offsets(lines, start)
                if line.strip():
                    _log.warning(
                        "%s: skipped an unreadable line of %d bytes at offset %d: %s",
                        files.messages, len(line), offsets[index], error,
                    )  # fmt: skip
                continue
            to = message["to"]
            if (
                (to is None or to == agent_id or to in wire.EVERYONE)
                and (topics is None or message["topic"] in topics)
                and (message["ttl_s"] is None or not wire.is_expired(message, now_ns))
                and (offsets is None or not progress.has_read(message["topic"], offsets[index]))
            ):
                if message["body"][:6] == wire.SIDE_FILE_MARK and wire.in_side_file(message):
                    body_bytes += files.bodies.size(message["msg_id"])
                    if body_bytes > bytes_max and found:
                        return found, _offsets(lines, start)[index]
                    message = self._with_body(files, message)
                found.append(message)
                if len(found) >= limit:
                    return found, _offsets(lines, start)[index + 1]
        return found, start + len(data) - len(torn)

    def _with_body(self, files: SessionFiles, message: QueueMessage) -> QueueMessage:
        """The message as its receiver gets it: with the body from its side file, if it has one."""
        if not wire.in_side_file(message):
            return message
        fault, body = files.bodies.body(message)
        if fault:
            message["_body_error"] = fault
        else:
            message["body"] = body
            message["_body_source"] = "side-file"
        message.pop("body_bytes", None)
        message.pop("body_crc", None)
        return message

    def _await(self, files: SessionFiles, wait_s: float, attempt: Callable[[], T]) -> T | None:
        """Repeat `attempt` whenever the queue file changes, until it has a result or `wait_s` is over."""
        deadline = time.monotonic() + wait_s
        make_folder(files.folder, self._durability)
        with closing(Watch(files.messages, POLL_INTERVAL_S)) as watch:
            while True:
                watch.arm()
                seen = _fingerprint(files.messages)
                if self._disabled():
                    return None
                result = attempt()
                if result or time.monotonic() >= deadline:
                    return result
                while _fingerprint(files.messages) == seen and (left_s := deadline - time.monotonic()) > 0:
                    watch.wait(left_s)
                    watch.arm()

    # ---- asking --------------------------------------------------------------------------------

    def ask(
        self,
        body: str,
        to: str,
        *,
        sender: str | None = None,
        timeout_s: float = 30.0,
        ttl_s: float | None = None,
        session: str | None = None,
    ) -> QueueMessage | None:
        """Send an `ask` and wait for the `answer` that replies to it; None when none came in time.

        The answer counts as delivered to the sender. All other messages stay for its polls.
        """
        agent_id = checked_name("sender", _default_agent_id() if sender is None else sender)
        checked_seconds("timeout_s", timeout_s)
        if self._disabled():
            raise QueueDisabledError("the queue is disabled by its kill switch: nothing was asked")
        files = self._session(session)
        with files.locked() as size:
            start, epoch = size, files.epoch()
        msg_id = self.send("ask", body, to, ttl_s, session, agent_id)
        return self._await(files, timeout_s, lambda: self._take_answer(files, agent_id, msg_id, start, epoch))

    def _take_answer(
        self, files: SessionFiles, agent_id: str, msg_id: str, start: int, epoch: int
    ) -> QueueMessage | None:
        with files.locked() as size:
            before = files.trusted_progress(agent_id, size)
            if files.epoch() != epoch:
                start = 0  # compaction moved every offset
            found = self._find_answer(files, agent_id, msg_id, before, start, size)
            if found is None:
                return None
            offset, message = found
            after = ReadProgress(before.cursor, before.topics, [*before.taken, offset])
            if len(after.taken) > self.limits.taken_max:
                after = self._caught_up(files, agent_id, after, size)
            files.write_progress(agent_id, before, after)
            return self._with_body(files, message)

    def _caught_up(
        self, files: SessionFiles, agent_id: str, progress: ReadProgress, size: int
    ) -> ReadProgress:
        """Move the position of the topic `answer` up to the first unread answer."""
        only = frozenset({"answer"})
        start = progress.first_unread(only)
        unread, end = self._scan(files, agent_id, only, progress, start, size, 1)
        if unread:
            first = unread[0]["msg_id"].encode()
            end = next(offset for offset, line in files.lines(start, size) if first in line)
        taken = [offset for offset in progress.taken if offset >= end]
        if len(taken) > (most := self.limits.taken_max):
            raise QueueError(f"{agent_id!r} took {most} answers ahead of unread ones: poll first")
        return ReadProgress(progress.cursor, progress.topics | {"answer": end}, taken)

    def _find_answer(
        self, files: SessionFiles, agent_id: str, msg_id: str, progress: ReadProgress, start: int, size: int
    ) -> tuple[int, QueueMessage] | None:
        wanted = msg_id.encode()
        for offset, line in files.lines(start, size):
            if wanted not in line:
                continue
            with suppress(wire.UnreadableLine):
                message = wire.decode_line(line)
                if (
                    message["in_reply_to"] == msg_id
                    and message["topic"] == "answer"
                    and wire.is_for(message, agent_id)
                    and not wire.is_expired(message, self._now_ns())
                    and not progress.has_read("answer", offset)
                ):
                    return offset, message
        return None

    # ---- inspection ----------------------------------------------------------------------------

    def tail(
        self, n: int = 10, session: str | None = None, *, include_expired: bool = False
    ) -> list[QueueMessage]:
        """The last n messages that are not expired. It moves no cursor and writes no audit line."""
        n = _checked_limit(n)
        files = self._session(session)
        if n:
            with suppress(FileNotFoundError, NotADirectoryError), opened(files.messages) as fd:
                return [self._with_body(files, message) for message in self._last(fd, n, include_expired)]
        return []

    def _last(self, fd: int, n: int, include_expired: bool) -> list[QueueMessage]:
        """Read backward, a window at a time; each line is decoded once."""
        begin = os.fstat(fd).st_size
        window = TAIL_FIRST_BYTES
        now_ns = self._now_ns()
        line_end = b""  # the end of a line whose start is in the next window
        live: list[QueueMessage] = []
        torn = True  # the bytes after the last newline are not yet a line
        while begin > 0 and len(live) < n:
            end, begin = begin, max(0, begin - window)
            data = os.pread(fd, end - begin, begin) + line_end
            head, *lines = data.split(b"\n")
            if begin == 0:
                lines.insert(0, head)
            if torn and lines:
                lines.pop()
                torn = False
            line_end = head
            found = [message for message in map(wire.readable, lines) if message is not None]
            live[:0] = [m for m in found if include_expired or not wire.is_expired(m, now_ns)]
            window *= 2
        return live[-n:]

    def status(self, session: str | None = None) -> dict[str, Any]:
        """Counts of one session, or of every session by name."""
        if session is not None:
            return self._status(self._session(session))
        return {name: self._status(self._session(name)) for name in self.sessions()}

    def sessions(self) -> list[str]:
        """Every session below the root."""
        try:
            names = os.listdir(self.root / "sessions")
        except FileNotFoundError:
            return []
        return sorted(name for name in names if is_name(name))

    def holds_messages(self, session: str | None = None) -> bool:
        """Whether a session holds any line, read or unread. Only the file's size is checked."""
        try:
            return self._session(session).messages.stat().st_size > 0
        except FileNotFoundError:
            return False

    def _status(self, files: SessionFiles) -> dict[str, Any]:
        if not files.exists():
            return _counts()
        now_ns = self._now_ns()

        def count(view: SessionFiles, size: int) -> dict[str, Any]:
            counts = _counts()
            counts["queue_bytes"] = size
            for _, line in view.lines(0, size):
                counts["messages"] += 1
                message = wire.readable(line)
                if message is None:
                    counts["unreadable"] += 1
                    continue
                counts["expired"] += wire.is_expired(message, now_ns)
                topic = message["topic"]
                counts["by_topic"][topic] = counts["by_topic"].get(topic, 0) + 1
            for agent_id in view.cursors.agents():
                with suppress(DamagedState):
                    counts["cursors"][agent_id] = view.cursors.read(agent_id).cursor
            return counts

        return files.inspect(count, lambda counts: not counts["unreadable"])

    def inbox(self, agent_id: str, session: str | None = None) -> dict[str, Any]:
        """How far an agent has read. `empty` is true only when the queue holds no unread message for it.

        Offsets are comparable only within one `epoch`; every compaction increments it.
        """
        checked_name("agent", agent_id)
        files = self._session(session)
        if not files.exists():
            return {"cursor": 0, "high_water": 0, "epoch": 0, "topics": {}, "empty": True}
        return files.inspect(partial(self._inbox, agent_id), lambda _: True)

    def _inbox(self, agent_id: str, files: SessionFiles, size: int) -> dict[str, Any]:
        progress = files.trusted_progress(agent_id, size)
        high_water = files.high_water(size)
        start = progress.cursor
        waiting = False
        while not waiting and start < high_water:
            found, start = self._scan(files, agent_id, None, progress, start, size, 1)
            waiting = bool(found)
        if files.cursors.read(agent_id) != progress:
            raise DamagedState(f"the cursor of {agent_id!r} moved while it was inspected")
        return {
            "cursor": progress.cursor,
            "high_water": high_water,
            "epoch": files.epoch(),
            "topics": dict(progress.topics),
            "empty": not waiting,
        }

    # ---- agents --------------------------------------------------------------------------------

    def register(self, agent_id: str, session: str | None = None) -> None:
        """Register an agent. Once any agent is registered, a send to an unknown recipient logs a warning."""
        checked_name("agent", agent_id)
        if self._disabled():
            raise QueueDisabledError("the queue is disabled by its kill switch: no agent was registered")
        files = self._session(session)
        entry = msgspec.json.encode({"agent_id": agent_id, "since": utc_text(self._now_ns())})
        with files.locked():
            make_folder(files.agents, self._durability)
            replace_file(files.agents / agent_id, entry + b"\n", self._durability)

    def agents(self, session: str | None = None) -> list[str]:
        """The registered agents."""
        try:
            names = os.listdir(self._session(session).agents)
        except FileNotFoundError:
            return []
        return sorted(filter(is_name, names))

    # ---- maintenance ---------------------------------------------------------------------------

    def expire(self, session: str | None = None) -> int:
        """Remove a session's expired messages and their side files; returns their number."""
        files = self._session(session)
        if self._disabled() or not files.exists():
            return 0
        now_ns = self._now_ns()

        def dropped(line: bytes) -> str | None:
            message = wire.readable(line)
            if message is None or not wire.is_expired(message, now_ns):
                return None  # unreadable lines are kept as well
            return message["msg_id"] if wire.in_side_file(message) else ""

        with files.locked() as size:
            count = files.compact(size, dropped)
            self._audit.write(ExpireEntry(utc_text(now_ns), "expire", files.name, count, files.epoch()))
        return count

    def check(self, session: str | None = None) -> QueueReport:
        """Read a whole session and report any damage with its location."""
        return queuecheck.check(self._session(session))

    def repair_cursor(
        self, agent_id: str, to: Literal["start", "end"] | int, session: str | None = None
    ) -> int:
        """Set an agent's cursor: "start" redelivers all messages, "end" skips all current ones.

        The old cursor files are kept in the same folder under a new name. Returns the new offset.
        """
        checked_name("agent", agent_id)
        return queuecheck.repair_cursor(self._session(session), agent_id, to, self._now_ns())

    def repair_body(self, msg_id: str, body: str, session: str | None = None) -> None:
        """Restore a missing or damaged side file from a copy that matches the line's checksum."""
        checked_name("message id", msg_id)
        queuecheck.repair_body(self._session(session), msg_id, _encoded_body(body), self._now_ns())

    # ---- opening and closing -------------------------------------------------------------------

    def reopen(self) -> None:
        """Continue after a failed fsync: drop the dead descriptors."""
        with self._opening:
            for files in self._sessions.values():
                files.reopen()
            self._audit.close()

    def close(self) -> None:
        """Close every file. The next call opens them again."""
        with self._opening:
            for files in self._sessions.values():
                files.close()
            self._audit.close()

    def after_fork(self) -> None:
        """Reset in a forked child, which needs its own descriptors, locks and ids."""
        self._opening = threading.Lock()
        self._token = os.urandom(4).hex()
        self._audit.after_fork()
        for files in self._sessions.values():
            files.after_fork()

    def _disabled(self) -> bool:
        """Whether a kill switch is on: this handle's, or the one in the environment."""
        return self._switched_off or (_is_set(_DISABLED) and queue_disabled(os.environ))

    def _session(self, session: str | None) -> SessionFiles:
        name = session
        if name is None:
            name = queue_session(os.environ) if _is_set(_SESSION) else DEFAULT_SESSION
        files = self._sessions.get(name) if isinstance(name, str) else None
        if files is not None:
            return files
        name = checked_name("session", name)
        with self._opening:
            if len(self._sessions) >= SESSIONS_OPEN_MAX:
                self._sessions.pop(next(iter(self._sessions))).close()
            folder = self.root / "sessions" / name
            return self._sessions.setdefault(
                name, SessionFiles(folder, self._durability, self._lock_timeout_s)
            )


# Looking up a missing variable in os.environ costs as much as writing a line. So every send and poll first
# checks in its underlying dict whether the variable exists.
_environment: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)


def _keys(suffix: str) -> tuple[Any, Any]:
    """The two names of a variable, encoded as in the environment's dict."""
    names = (f"POSTROOM_QUEUE_{suffix}", f"ZOS_MQ_{suffix}")
    encode = os.environ.encodekey if _environment is not os.environ else str
    return encode(names[0]), encode(names[1])


_DISABLED, _AGENT_ID, _SESSION = _keys("DISABLED"), _keys("AGENT_ID"), _keys("SESSION")


def _is_set(keys: tuple[Any, Any]) -> bool:
    return keys[0] in _environment or keys[1] in _environment


def _default_agent_id() -> str:
    """The sender for a call that names none."""
    return queue_agent_id(os.environ) if _is_set(_AGENT_ID) else DEFAULT_AGENT_ID


def _offsets(lines: list[bytes], start: int) -> list[int]:
    """The offset of each line. Computed only when needed, because most polls do not need it."""
    return list(itertools.accumulate((len(line) + 1 for line in lines), initial=start))


def _checked_limit(limit: object) -> int:
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
        raise InvalidMessage(f"the number of messages must be a whole number of 0 or more, not {limit!r}")
    return min(limit, POLL_MESSAGES_MAX)


def _encoded_body(body: str) -> bytes:
    if not isinstance(body, str):
        raise InvalidMessage(f"the body must be text, not {type(body).__name__}")
    try:
        raw = body.encode()
    except UnicodeEncodeError:
        raise InvalidMessage("the body holds lone surrogates, which are not Unicode text") from None
    if len(raw) > wire.BODY_BYTES_MAX:
        raise InvalidMessage(f"the body is longer than {wire.BODY_BYTES_MAX} bytes: send a path instead")
    return raw


def _counts() -> dict[str, Any]:
    """The result of `status` for an empty session."""
    return {
        "messages": 0, "expired": 0, "by_topic": {}, "queue_bytes": 0, "cursors": {}, "unreadable": 0,
    }  # fmt: skip


def _fingerprint(path: Path) -> tuple[int, int] | None:
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return None
    return info.st_ino, info.st_size
