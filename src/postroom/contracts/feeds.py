"""Where the audit stream comes from: stores, lines of queues and mail servers, messages of a bus.

Rule 1: a source is one thing that only grows: a store, or one physical file. Its name comes from its content,
        so that it stays the same when a file is rotated or moved, and reading it again repeats every event.
Rule 2: `seq` is the event's number in a store, and the line's or message's ordinal in a file.
Rule 3: what cannot be read as a line becomes an `alert` that says so: a hole in the numbers would look like
        a loss.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from postroom.core import events
from postroom.core.events import SCHEMA, AuditEvent, event_id
from postroom.core.times import epoch_ns_of, parse_utc
from postroom.errors import InvalidMessage, ShippedElsewhere, SinkAhead
from postroom.logs import busfile
from postroom.message import BusMessage, Event, EventKind
from postroom.stores.base import Outbox, Store
from postroom.system.atomic import open_safely

_log = logging.getLogger("postroom.audit")

SOURCE_HASH_CHARS = 16
MAIL_EVENTS = "events.jsonl"  # in the data folder of a mail server
WINDOW_BYTES = 1024 * 1024
USUAL_LINE_BYTES = 250  # only for a guess of how much waits


class StoreFeed:
    """The events of a store, and with `payloads` what the messages said.

    While it has an outbox, the store keeps every event until it is shipped.
    """

    def __init__(
        self, store: Store, contract: events.Contract, *, outbox: Outbox, payloads: bool = True
    ) -> None:
        self._store = store
        self._contract: events.Contract = contract
        self._payloads = payloads
        self._outbox = outbox
        self.source = f"{contract}:{store.identity()}"
        self._place = _place_of(store)
        self._refuse_second_stream()

    def _refuse_second_stream(self) -> None:
        there = self._store.outbox()
        if there is not None and there.stream not in ("", self._outbox.stream):
            raise ShippedElsewhere(
                f"the events of {self._store.url} go to another stream already ({there.stream}): "
                "one store has one stream; say `postroom audit detach` first if that one is given up"
            )

    def check(self, held: Iterable[AuditEvent]) -> None:
        """What a stream holds of this store is what the store says, as far as it still knows.

        `held` are the last events of the stream. A store that was put back from an older copy, and has grown
        again, has other events under the same numbers.
        """
        known = {event.seq: event for event in held}
        if not known:
            return
        first = min(known)
        for event in self._store.events(first - 1, max(known) - first + 1):
            shown = known.get(event.seq)
            if shown is not None and _facts_of(shown) != _facts_of(event):
                raise ShippedElsewhere(
                    f"{self.source} has another event {event.seq} than the stream holds: it was put back to "
                    "an older state and has gone on from there, so ship it to a new folder"
                )

    def waiting(self, after: int) -> int:
        if _place_of(self._store) != self._place:
            raise ShippedElsewhere(
                f"{self._store.url} was replaced while its events were shipped: start again"
            )
        newest = self._store.newest_event()
        if newest < after:
            raise SinkAhead(self.source, after, newest)
        return newest - after

    def settle(self) -> None:
        self._store.sync()

    def read(self, after: int, limit: int) -> list[AuditEvent]:
        found = self._store.events(after, limit)
        if not found:
            return []
        if after and found[0].seq != after + 1:
            self._tell_gap(after + 1, found[0].seq - 1)
        # A message that was forgotten meanwhile is told without what it said.
        said = self._store.payloads(found[0].seq - 1, found[-1].seq) if self._payloads else {}
        source, contract = self.source, self._contract
        return [
            events.of_store(event, source, contract, said.get(event.seq, b"").decode("utf-8", "replace"))
            for event in found
        ]

    def _tell_gap(self, first: int, last: int) -> None:
        said = f"events {first} to {last} were forgotten before they were shipped"
        _log.warning("%s: %s", self.source, said)
        self._store.write(lambda transaction: transaction.alert("EventsMissing", said), makes_room=True)

    def kept(self, up_to: int) -> None:
        self._store.set_outbox(msgspec.structs.replace(self._outbox, shipped=up_to))

    def close(self) -> None:
        self._store.close()


def _place_of(store: Store) -> tuple[int, int]:
    """Which file a store's name means now; a memory has none."""
    path = getattr(store, "path", None)
    if path is None:
        return (0, 0)
    try:
        info = path.stat()
    except FileNotFoundError:
        return (0, 0)
    return info.st_dev, info.st_ino


def _facts_of(event: AuditEvent | Event) -> tuple[object, ...]:
    """What no redaction changes."""
    return event.ts_us, event.kind, event.message_id, event.lease, event.attempt


# ---- files -----------------------------------------------------------------------------------------


class AuditLine(msgspec.Struct, rename={"sender": "from"}):
    """A line of a queue's audit, of any operation."""

    ts: str
    op: str
    session: str
    msg_id: str = ""
    topic: str = ""
    to: str | None = None
    sender: str = ""
    body_bytes: int = 0
    externalized: bool = False
    ttl_s: float | None = None
    unknown_recipient: bool = False
    agent_id: str = ""
    topics: list[str] | None = None
    matched: int = 0
    cursor_from: int = 0
    cursor_to: int = 0
    dropped: int = 0
    epoch: int = 0


class MailLine(msgspec.Struct):
    """A line of a mail server's events. A private mailbox stands in it as a hash."""

    kind: EventKind
    ts_us: int
    queue: str = ""
    message_id: str = ""
    type: str = ""
    priority: int | None = None
    attempt: int = 0
    worker_id: str = ""
    error_type: str = ""
    error: str = ""
    body_bytes: int = 0
    sender: str = ""
    recipient: str = ""
    detail: dict[str, Any] = {}


_FACTS = {
    "send": ("externalized", "ttl_s", "unknown_recipient"),
    "poll": ("topics", "matched", "cursor_from", "cursor_to"),
    "expire": ("dropped", "epoch"),
}
_KINDS: dict[str, EventKind] = {"send": "created", "poll": "delivered", "expire": "expired"}
_decode_line = msgspec.json.Decoder(AuditLine).decode
_decode_mail_line = msgspec.json.Decoder(MailLine).decode


class _FileFeed:
    """A file that only grows, read on from where the last read stopped."""

    source: str

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._seq = 0
        self._offset = 0
        self._pending: list[AuditEvent] = []
        """Decoded, and not yet handed out."""

    def waiting(self, after: int) -> int:
        self._go_to(after)
        bytes_behind = os.fstat(self._fd).st_size - self._offset
        return len(self._pending) + -(-bytes_behind // USUAL_LINE_BYTES)

    def settle(self) -> None:
        os.fsync(self._fd)

    def read(self, after: int, limit: int) -> list[AuditEvent]:
        self._go_to(after)
        while len(self._pending) < limit and self._decode_more():
            pass
        found, self._pending = self._pending[:limit], self._pending[limit:]
        if found:
            self._seq = found[-1].seq
        return found

    def _go_to(self, after: int) -> None:
        """Pass over what a sink holds already. After a write that failed there, read again."""
        if after < self._seq:
            self._seq, self._offset, self._pending = 0, 0, []
            self._rewind()
        while self._seq < after:
            if not self._pending and not self._decode_more():
                raise SinkAhead(self.source, after, self._seq)
            step = min(after - self._seq, len(self._pending))
            self._seq += step
            del self._pending[:step]

    def kept(self, up_to: int) -> None:
        """A file keeps its lines."""

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _numbered(self) -> int:
        """The number of the next event."""
        return self._seq + len(self._pending) + 1

    def _rewind(self) -> None: ...

    def _decode_more(self) -> bool:
        """Add what comes next to `_pending`; False when there is nothing more."""
        raise NotImplementedError


class _LineFeed(_FileFeed):
    """A file of lines, each of which is an event."""

    def _decode_more(self) -> bool:
        data = os.pread(self._fd, WINDOW_BYTES, self._offset)
        end = data.rfind(b"\n") + 1
        if not end and len(data) == WINDOW_BYTES:  # no line is so long: it is damage, told in pieces
            end = WINDOW_BYTES
        for line in data[:end].splitlines():
            self._pending.append(self._event(line, self._numbered()))
        self._offset += end
        return end > 0

    def _event(self, line: bytes, seq: int) -> AuditEvent:
        raise NotImplementedError


class QueueFeed(_LineFeed):
    """The audit of a `Queue`: one event a line."""

    def __init__(self, fd: int, first: bytes) -> None:
        super().__init__(fd)
        self.source = f"queue:{_hash(first)}"

    def _event(self, line: bytes, seq: int) -> AuditEvent:
        return of_audit_line(line, self.source, seq)


class MailFeed(_LineFeed):
    """The events of a mail server: one a line, told by the server itself."""

    def __init__(self, fd: int, first: bytes) -> None:
        super().__init__(fd)
        self.source = f"mail:{_hash(first)}"

    def _event(self, line: bytes, seq: int) -> AuditEvent:
        return of_mail_line(line, self.source, seq)


class BusFeed(_FileFeed):
    """One file of a `Bus`, archived or not: one event a message."""

    def __init__(self, fd: int, bus: str, first_id: str) -> None:
        super().__init__(fd)
        self._bus = bus
        self._legacy_line: int | None = 0
        self.source = f"bus:{bus}:{_hash(first_id.encode())}"

    def _rewind(self) -> None:
        self._legacy_line = 0

    def _decode_more(self) -> bool:
        part = next(busfile.decode_from(self._fd, self._offset, self._legacy_line))
        self._offset += part.consumed
        self._legacy_line = part.legacy_line
        for message in part.messages:
            self._pending.append(of_bus_message(message, self._bus, self.source, self._numbered()))
        return part.consumed > 0


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:SOURCE_HASH_CHARS]


def of_audit_line(line: bytes, source: str, seq: int) -> AuditEvent:
    """A line of a queue's audit, in the stream."""
    try:
        entry = _decode_line(line)
        ts_us, kind = epoch_ns_of(parse_utc(entry.ts)) // 1000, _KINDS[entry.op]
        if kind != "created" and not (entry.matched or entry.dropped):
            kind = "heartbeat"  # it looked, and there was nothing
    except (msgspec.MsgspecError, InvalidMessage, KeyError, UnicodeDecodeError) as error:
        return _unreadable(line, source, seq, str(error))
    facts = {name: getattr(entry, name) for name in _FACTS[entry.op]}
    return AuditEvent(
        event_id=event_id(source, seq),
        seq=seq,
        ts_us=ts_us,
        kind=kind,
        contract="queue",
        source=source,
        schema=SCHEMA,
        queue=entry.session,
        agent_id=entry.sender or entry.agent_id,
        message_id=entry.msg_id,
        type=entry.topic,
        body_bytes=entry.body_bytes,
        sender=entry.sender,
        recipient=entry.to or entry.agent_id,
        detail={name: value for name, value in facts.items() if value not in (None, False)},
    )


def of_mail_line(line: bytes, source: str, seq: int) -> AuditEvent:
    """A line of a mail server's events, in the stream."""
    try:
        entry = _decode_mail_line(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return _unreadable(line, source, seq, str(error), "mail")
    told = msgspec.structs.asdict(entry)
    return AuditEvent(
        event_id=event_id(source, seq), seq=seq, contract="mail", source=source, schema=SCHEMA,
        agent_id=entry.sender, **told,
    )  # fmt: skip


def _unreadable(
    line: bytes, source: str, seq: int, reason: str, contract: events.Contract = "queue"
) -> AuditEvent:
    """The line itself stays where it is. When it happened is not known."""
    return AuditEvent(
        event_id=event_id(source, seq), seq=seq, ts_us=0, kind="alert", contract=contract, source=source,
        schema=SCHEMA, error_type="UnreadableLine", error=reason, body_bytes=len(line),
    )  # fmt: skip


def of_bus_message(message: BusMessage, bus: str, source: str, seq: int) -> AuditEvent:
    """A message of a bus, in the stream. Further parents stand in the detail."""
    facts = {
        "project_id": message.project_id,
        "run_id": message.run_id,
        "parents": message.parents[1:],
        "attachment_path": message.attachment_path,
    }
    return AuditEvent(
        event_id=event_id(source, seq),
        seq=seq,
        ts_us=epoch_ns_of(message.ts) // 1000,
        kind="created",
        contract="bus",
        source=source,
        schema=SCHEMA,
        queue=bus,
        agent_id=message.run_id,
        message_id=message.msg_id,
        task_id=message.task_id,
        parent_message_id=message.parents[0] if message.parents else "",
        type=message.type,
        body_bytes=len(message.body.encode()),
        payload=message.body,
        detail={name: value for name, value in facts.items() if value},
    )


# ---- which files there are -----------------------------------------------------------------------------


class FileFeeds:
    """The feeds of queue roots, bus files and mail servers, opened as they appear.

    A file is known by what it is and not by its name: one that was rotated is read to its end all the same.
    """

    def __init__(
        self,
        queue_roots: Iterable[Path] = (),
        buses: Iterable[Path] = (),
        mail_folders: Iterable[Path] = (),
    ) -> None:
        self._queue_roots = list(queue_roots)
        self._buses = list(buses)
        self._mail_folders = list(mail_folders)
        self._open: dict[tuple[int, int], _FileFeed] = {}

    def __call__(self) -> list[_FileFeed]:
        """Every feed, the oldest archive of a bus first."""
        for root in self._queue_roots:
            self._look(root / "audit.jsonl", _queue_feed)
        for bus in self._buses:
            for path in [*busfile.archives(bus), bus]:
                self._look(path, partial(_bus_feed, bus.stem))
        for folder in self._mail_folders:
            self._look(folder / MAIL_EVENTS, _mail_feed)
        return list(self._open.values())

    def _look(self, path: Path, feed_of: Callable[[int], _FileFeed | None]) -> None:
        try:
            info = path.lstat()
            identity = info.st_dev, info.st_ino
            if identity in self._open:
                return
            fd = open_safely(path, os.O_RDONLY)
        except FileNotFoundError:
            return  # nobody has written yet, or it was moved a moment ago
        feed = feed_of(fd)
        if feed is None:
            os.close(fd)
        else:
            self._open[identity] = feed

    def close(self) -> None:
        for feed in self._open.values():
            feed.close()
        self._open.clear()


def _first_line(fd: int) -> bytes | None:
    """What a file of lines is named after; None before it is whole."""
    line, newline, _ = os.pread(fd, WINDOW_BYTES, 0).partition(b"\n")
    return line if newline else None


def _queue_feed(fd: int) -> QueueFeed | None:
    first = _first_line(fd)
    return None if first is None else QueueFeed(fd, first)


def _mail_feed(fd: int) -> MailFeed | None:
    first = _first_line(fd)
    return None if first is None else MailFeed(fd, first)


def _bus_feed(bus: str, fd: int) -> BusFeed | None:
    """Named after the first message; None before there is one."""
    for part in busfile.decode_from(fd, 0, 0):
        if part.messages:
            return BusFeed(fd, bus, part.messages[0].msg_id)
    return None
