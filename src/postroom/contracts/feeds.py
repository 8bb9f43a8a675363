"""The sources of the audit stream: stores, audit lines of queues and mail servers, messages of a bus.

Rule 1: a source only grows: it is a store, or one physical file. Its name is derived from its content. So the
        name survives a rotation or a move, and reading the source again yields the same events.
Rule 2: `seq` is the event's number in a store, and the ordinal of the line or message in a file.
"""

import hashlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

from postroom.audit.heads import StreamHead
from postroom.core.formats import auditlines, events
from postroom.core.formats.events import AuditEvent
from postroom.core.redaction import Redactor
from postroom.errors import ShippedElsewhere, SinkAhead
from postroom.logs import busfile, eventfiles
from postroom.message import Event
from postroom.stores.base import Outbox
from postroom.stores.event_quarantine import is_unreadable, quarantine_events
from postroom.stores.event_runs import UNREADABLE
from postroom.stores.store import Store
from postroom.system.atomic import open_safely
from postroom.system.log import library_log

_log = library_log("postroom.audit")

SOURCE_HASH_CHARS = 16
WINDOW_BYTES = 1024 * 1024
USUAL_LINE_BYTES = 250  # only to estimate the backlog
TAIL_BYTES = 256  # before the read offset, compared to detect a replaced file
MOVED_QUIET_S = 5.0  # after this, the unterminated last line of a moved file is read as it is

Holds: TypeAlias = Callable[[AuditEvent], bool]
"""Whether a stream holds this event, or has removed it by retention."""


RESULT_DIGEST: Final = "result_sha256"
"""A fact of completed messages that redaction keeps. At level `full` its long numbers would be replaced."""


class ShownResult(NamedTuple):
    """What the stream says about the result of a completed message."""

    facts: dict[str, Any]
    """Added to the detail of the event."""
    text: str
    """The payload of the event; empty when only size and digest are shown."""


ShowResults: TypeAlias = Callable[[Store, Sequence[Event]], Mapping[int, ShownResult]]
"""Reads the results of messages, by the `seq` of their `execution_completed` events."""


def _holds_all(_event: AuditEvent) -> bool:
    return True


class StoreFeed:
    """The events of a store, with `payloads` including the message payloads.

    `results` reads what the events of completed messages say about their results.

    With an outbox, the store keeps every event until it is shipped. Without one, the feed only reads and
    writes nothing into the store.
    """

    def __init__(
        self,
        store: Store,
        contract: events.Contract,
        *,
        outbox: Outbox | None,
        payloads: bool = True,
        results: ShowResults | None = None,
    ) -> None:
        self._store = store
        self._contract: events.Contract = contract
        self._payloads = payloads
        self._results = results
        self._outbox = outbox
        self.source = f"{contract}:{store.identity()}"
        self._file_id = _file_id(store)
        stored = None if outbox is None else outbox_of(store)
        if outbox is not None and stored is not None and stored.stream not in ("", outbox.stream):
            raise ShippedElsewhere(
                f"the events of {self._store.url} go to another stream already ({stored.stream}): "
                "one store has one stream; run `postroom audit detach` first if that stream is no longer used"
            )

    def check(self, held: Iterable[AuditEvent]) -> None:
        """Raise unless the last events of a stream (`held`) equal those that the store still has.

        A store that was restored from an older copy and has grown again has other events under the same
        numbers. An event that cannot be read, now or when it was shipped, is not compared.
        """
        known = {event.seq: event for event in held if event.error_type != UNREADABLE}
        if not known:
            return
        first = min(known)
        for event in self._store.events(first - 1, max(known) - first + 1):
            shipped = known.get(event.seq)
            if shipped is not None and not is_unreadable(event) and facts_of(shipped) != facts_of(event):
                raise _restored(self.source)

    def waiting(self, after: int) -> int:
        if _file_id(self._store) != self._file_id:
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
        # For a feed that only reads, a purged event is not a loss: it may have been shipped long ago.
        if self._outbox is not None and after and found[0].seq != after + 1:
            text = f"events {after + 1} to {found[0].seq - 1} were removed before they were shipped"
            _log.warning("%s: %s", self.source, text)
            self._store.write(lambda transaction: transaction.alert("EventsMissing", text), makes_room=True)
        if self._outbox is not None and any(map(is_unreadable, found)):
            self._store.write(lambda transaction: quarantine_events(transaction, found), makes_room=True)
        payloads: dict[int, str] = {}
        if self._payloads:  # of `created` events; a purged message has none
            created = {event.message_id: event.seq for event in found if event.kind == "created"}
            stored = self._store.read(lambda transaction: transaction.records.payloads([*created]))
            payloads = {created[each]: payload.decode("utf-8", "replace") for each, payload in stored.items()}
        if self._results is not None:
            completed = [event for event in found if event.kind == "execution_completed"]
            shown = self._results(self._store, completed)
            payloads |= {seq: result.text for seq, result in shown.items()}
            found = [
                msgspec.structs.replace(event, detail={**event.detail, **shown[event.seq].facts})
                if event.seq in shown
                else event
                for event in found
            ]
        return [
            events.of_store(event, self.source, self._contract, payloads.get(event.seq, ""))
            for event in found
        ]

    def kept(self, up_to: int) -> None:
        if self._outbox is not None:
            self._outbox = msgspec.structs.replace(self._outbox, shipped=up_to)
            set_outbox(self._store, self._outbox)

    def noted_head(self) -> StreamHead | None:
        """The last sealed segment of the stream, as the store knows it; None for a store without a stream."""
        return _head_of(self._outbox)

    def sealed(self, segment: int, head: str) -> None:
        """Record the last sealed segment in the store."""
        if self._outbox is not None and (segment, head) != (self._outbox.segment, self._outbox.head):
            self._outbox = msgspec.structs.replace(self._outbox, segment=segment, head=head)
            set_outbox(self._store, self._outbox)

    def close(self) -> None:
        self._store.close()


def head_in(store: Store) -> StreamHead | None:
    """The last sealed segment of the stream that a store's events go to; None before there is one."""
    return _head_of(outbox_of(store))


def outbox_of(store: Store) -> Outbox | None:
    """The progress of the shipper of a store; None when its events are not shipped."""
    return store.read(lambda transaction: transaction.outbox())


def set_outbox(store: Store, outbox: Outbox | None) -> None:
    """Record the progress of the shipper in a store; None ends the shipping."""
    store.write(lambda transaction: transaction.set_outbox(outbox), makes_room=True)


def _head_of(outbox: Outbox | None) -> StreamHead | None:
    return (
        StreamHead(outbox.stream, outbox.segment, outbox.head) if outbox is not None and outbox.head else None
    )


def _restored(source: str) -> ShippedElsewhere:
    return ShippedElsewhere(
        f"{source} has other events than the stream holds of it: it was restored to an older state and has "
        "grown from there, so ship it to a new folder"
    )


def _file_id(store: Store) -> tuple[int, int]:
    """Device and inode of the file that has the store's name now; zeros for a store in memory."""
    path = getattr(store, "path", None)
    if path is None:
        return (0, 0)
    try:
        info = path.stat()
    except FileNotFoundError:
        return (0, 0)
    return info.st_dev, info.st_ino


def facts_of(event: AuditEvent | Event) -> tuple[object, ...]:
    """The fields that no redaction changes."""
    return event.ts_us, event.kind, event.message_id, event.lease, event.attempt


# ---- files -----------------------------------------------------------------------------------------


class _FileFeed(ABC):
    """A file that only grows. Each read continues where the last one stopped."""

    source: str

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._seq = 0
        self._offset = 0
        self._pending: list[AuditEvent] = []
        """Decoded events that were not returned yet."""
        self._tail = b""
        """The last bytes before the read offset."""
        self.holds: Holds = _holds_all
        """Called with the last event that the stream should hold of this file."""
        self.is_moved = False
        """Whether the file has lost the name under which it was found."""

    def waiting(self, after: int) -> int:
        self._go_to(after)
        bytes_left = os.fstat(self._fd).st_size - self._offset
        return len(self._pending) + -(-bytes_left // USUAL_LINE_BYTES)

    def settle(self) -> None:
        os.fsync(self._fd)

    def read(self, after: int, limit: int) -> list[AuditEvent]:
        self._go_to(after)
        while len(self._pending) < limit and self._decode_more():
            pass
        self._note_tail()
        found, self._pending = self._pending[:limit], self._pending[limit:]
        if found:
            self._seq = found[-1].seq
        return found

    def _go_to(self, after: int) -> None:
        """Skip the events that the sink holds. After a failed write of the sink, read from the beginning."""
        if os.pread(self._fd, len(self._tail), self._offset - len(self._tail)) != self._tail:
            raise _restored(self.source)  # the bytes that were read last have changed
        if after < self._seq:
            self._seq, self._offset, self._pending, self._tail = 0, 0, [], b""
            self._rewind()
        if self._seq == after:
            return
        named: AuditEvent | None = None
        while self._seq < after:
            if not self._pending and not self._decode_more():
                raise SinkAhead(self.source, after, self._seq)
            step = min(after - self._seq, len(self._pending))
            named = next((event for event in reversed(self._pending[:step]) if event.message_id), named)
            self._seq += step
            del self._pending[:step]
        self._note_tail()
        if named is not None and not self.holds(named):
            raise _restored(self.source)

    def _note_tail(self) -> None:
        start = max(0, self._offset - TAIL_BYTES)
        self._tail = os.pread(self._fd, self._offset - start, start)

    def found_at(self, path: Path) -> None:  # noqa: ARG002 - for subclasses
        """Record that the file has this name now."""
        self.is_moved = False

    def kept(self, up_to: int) -> None:  # noqa: B027 - most files need nothing
        """The sink holds the events up to this number."""

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _next_seq(self) -> int:
        """The number of the next event."""
        return self._seq + len(self._pending) + 1

    def _rewind(self) -> None:  # noqa: B027 - most have no other state
        """Reset the decoder state besides the offset."""

    @abstractmethod
    def _decode_more(self) -> bool:
        """Append the next events to `_pending`. Returns False at the end of the file."""


class _LineFeed(_FileFeed):
    """A file with one event per line."""

    def _decode_more(self) -> bool:
        data = os.pread(self._fd, WINDOW_BYTES, self._offset)
        end = data.rfind(b"\n") + 1
        if not end and (len(data) == WINDOW_BYTES or self._is_abandoned()):
            end = len(data)  # damage: the line is too long, or will never be terminated
        for line in data[:end].splitlines():
            self._pending.append(self._event(line, self._next_seq()))
        self._offset += end
        return end > 0

    def _is_abandoned(self) -> bool:
        """Whether the file was moved away, and no writer can still be adding to it."""
        return self.is_moved and time.time() - os.fstat(self._fd).st_mtime >= MOVED_QUIET_S

    @abstractmethod
    def _event(self, line: bytes, seq: int) -> AuditEvent:
        """Decode the event of a line."""


class QueueFeed(_LineFeed):
    """The audit file of a `Queue`."""

    def __init__(self, fd: int, first: bytes) -> None:
        super().__init__(fd)
        self.source = f"queue:{_hash(first)}"

    def _event(self, line: bytes, seq: int) -> AuditEvent:
        return auditlines.of_audit_line(line, self.source, seq)


class MailFeed(_LineFeed):
    """The event file of a mail server."""

    def __init__(self, fd: int, first: bytes) -> None:
        super().__init__(fd)
        self.source = f"mail:{_hash(first)}"
        self._path: Path | None = None
        self.is_shipped = False
        """Whether the stream holds all events of the file so far."""

    def found_at(self, path: Path) -> None:
        super().found_at(path)
        self._path = path

    def waiting(self, after: int) -> int:
        found = super().waiting(after)
        self._mark_if_shipped(after)
        return found

    def kept(self, up_to: int) -> None:
        self._mark_if_shipped(up_to)

    def _mark_if_shipped(self, up_to: int) -> None:
        """Mark a full file as shipped when the stream holds all its events. The server may then remove it."""
        at_end = not self._pending and self._offset == os.fstat(self._fd).st_size
        self.is_shipped = at_end and self._seq == up_to
        if self.is_shipped and self._path is not None and eventfiles.is_full(self._path):
            try:
                self._path = eventfiles.mark_shipped(self._path)
            except OSError as error:
                _log.warning("%s cannot be marked as shipped: %s", self._path, error.strerror)

    def _is_abandoned(self) -> bool:
        return super()._is_abandoned() or (self._path is not None and self._path.name != eventfiles.GROWING)

    def _event(self, line: bytes, seq: int) -> AuditEvent:
        return auditlines.of_mail_line(line, self.source, seq)


class BusFeed(_FileFeed):
    """One file of a `Bus`, current or archived: one event per message."""

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
            event = auditlines.of_bus_message(message, self._bus, self.source, self._next_seq())
            self._pending.append(event)
        return part.consumed > 0


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:SOURCE_HASH_CHARS]


# ---- redaction ---------------------------------------------------------------------------------------

REDACTED = frozenset({"payload", "error", "detail"})
"""The fields that `redacted` may change."""


def redacted(redactor: Redactor, event: AuditEvent, *, whole_payloads: bool = False) -> AuditEvent:
    """Return the event with redacted texts. Ids and names stay; most events have no such text."""
    if not (event.payload or event.error or event.detail):
        return event
    detail = _redacted_facts(redactor, event.detail) if event.detail else {}
    if event.kind == "execution_completed" and RESULT_DIGEST in detail:
        detail[RESULT_DIGEST] = event.detail[RESULT_DIGEST]
    return msgspec.structs.replace(
        event,
        payload=event.payload if whole_payloads or not event.payload else redactor.payload(event.payload),
        error=redactor.text(event.error) if event.error else "",
        detail=detail,
    )


def _redacted_facts(redactor: Redactor, value: Any) -> Any:
    """Redact the texts in `detail`, which may come from users. Other values stay at every level."""
    if isinstance(value, str):
        return redactor.text(value)
    if isinstance(value, dict):
        return {name: _redacted_facts(redactor, inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_redacted_facts(redactor, inner) for inner in value]
    return value


# ---- discovery of files --------------------------------------------------------------------------------


class FileFeeds:
    """The feeds of queue roots, bus files and mail servers, opened as they appear.

    A file is identified by its inode, so a rotated file is still read to its end.
    """

    def __init__(
        self,
        queue_roots: Iterable[Path] = (),
        buses: Iterable[Path] = (),
        mail_folders: Iterable[Path] = (),
        *,
        holds: Holds = _holds_all,
    ) -> None:
        self._holds = holds
        self._queue_roots = list(queue_roots)
        self._buses = list(buses)
        self._mail_folders = list(mail_folders)
        self._open: dict[tuple[int, int], _FileFeed] = {}

    def __call__(self) -> list[_FileFeed]:
        """Every feed, the oldest archive of a bus first."""
        for feed in self._open.values():
            feed.is_moved = True
        for root in self._queue_roots:
            self._open_feed(root / "audit.jsonl", partial(_line_feed, QueueFeed))
        for bus in self._buses:
            for path in [*busfile.archives(bus), bus]:
                self._open_feed(path, partial(_bus_feed, bus.stem))
        for folder in self._mail_folders:
            for path in [*(file.path for file in eventfiles.full_files(folder)), folder / eventfiles.GROWING]:
                self._open_feed(path, partial(_line_feed, MailFeed))
        for file_id, feed in list(self._open.items()):
            # The mail server removed the file after it was shipped.
            if isinstance(feed, MailFeed) and feed.is_moved and feed.is_shipped:
                feed.close()
                del self._open[file_id]
        return list(self._open.values())

    def _open_feed(self, path: Path, feed_of: Callable[[int], _FileFeed | None]) -> None:
        try:
            info = path.lstat()
            file_id = info.st_dev, info.st_ino
            if file_id in self._open:
                self._open[file_id].found_at(path)
                return
            fd = open_safely(path, os.O_RDONLY)
        except FileNotFoundError:
            return  # not written yet, or moved a moment ago
        feed = feed_of(fd)
        if feed is None:
            os.close(fd)
        else:
            feed.holds = self._holds
            feed.found_at(path)
            self._open[file_id] = feed

    def close(self) -> None:
        for feed in self._open.values():
            feed.close()
        self._open.clear()


def _line_feed(kind: Callable[[int, bytes], _LineFeed], fd: int) -> _LineFeed | None:
    """A feed named after the first line; None before the line is complete. A longer line is truncated."""
    line, newline, _ = os.pread(fd, WINDOW_BYTES, 0).partition(b"\n")
    return kind(fd, line) if newline or len(line) == WINDOW_BYTES else None


def _bus_feed(bus: str, fd: int) -> BusFeed | None:
    """A feed named after the first message; None before there is one."""
    for part in busfile.decode_from(fd, 0, 0):
        if part.messages:
            return BusFeed(fd, bus, part.messages[0].msg_id)
    return None
