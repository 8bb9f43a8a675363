"""Where the audit stream comes from: stores, lines of queues and mail servers, messages of a bus.

Rule 1: a source is one thing that only grows: a store, or one physical file. Its name comes from its content,
        so that it stays the same when a file is rotated or moved, and reading it again repeats every event.
Rule 2: `seq` is the event's number in a store, and the line's or message's ordinal in a file.
"""

import hashlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from postroom.core import auditlines, events
from postroom.core.events import AuditEvent
from postroom.core.redaction import Redactor
from postroom.errors import ShippedElsewhere, SinkAhead
from postroom.logs import busfile, eventfiles
from postroom.message import Event
from postroom.sinks.heads import StreamHead
from postroom.stores.base import Outbox
from postroom.stores.store import Store
from postroom.system.atomic import open_safely

_log = logging.getLogger("postroom.audit")

SOURCE_HASH_CHARS = 16
WINDOW_BYTES = 1024 * 1024
USUAL_LINE_BYTES = 250  # only for a guess of how much waits
TAIL_BYTES = 256  # in front of the next read, which have to be as they were at the last
MOVED_QUIET_S = 5.0  # a line without its end, in a file that was moved away, is taken as it is after so long

Holds: TypeAlias = Callable[[AuditEvent], bool]
"""Whether a stream holds this very event, as far as it still knows."""


def _everything(_event: AuditEvent) -> bool:
    return True


class StoreFeed:
    """The events of a store, and with `payloads` what the messages said.

    While it has an outbox, the store keeps every event until it is shipped. Without one the feed only reads:
    it does not care who ships, and writes nothing into the store.
    """

    def __init__(
        self, store: Store, contract: events.Contract, *, outbox: Outbox | None, payloads: bool = True
    ) -> None:
        self._store = store
        self._contract: events.Contract = contract
        self._payloads = payloads
        self._outbox = outbox
        self.source = f"{contract}:{store.identity()}"
        self._place = _place_of(store)
        self._refuse_second_stream()

    def _refuse_second_stream(self) -> None:
        if self._outbox is None:
            return
        there = outbox_of(self._store)
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
            if shown is not None and facts_of(shown) != facts_of(event):
                raise _put_back(self.source)

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
        # For a reader an event that was forgotten is no loss: it may have been shipped long ago.
        if self._outbox is not None and after and found[0].seq != after + 1:
            self._tell_gap(after + 1, found[0].seq - 1)
        payloads = self._payloads_of(found) if self._payloads else {}
        source, contract = self.source, self._contract
        return [
            events.of_store(event, source, contract, payloads.get(event.seq, b"").decode("utf-8", "replace"))
            for event in found
        ]

    def _payloads_of(self, found: list[Event]) -> dict[int, bytes]:
        """The payloads of `created` events by number. A message that was purged meanwhile has none."""
        created = {event.message_id: event.seq for event in found if event.kind == "created"}
        payloads = self._store.read(lambda transaction: transaction.payloads([*created]))
        return {created[message_id]: payload for message_id, payload in payloads.items()}

    def _tell_gap(self, first: int, last: int) -> None:
        said = f"events {first} to {last} were forgotten before they were shipped"
        _log.warning("%s: %s", self.source, said)
        self._store.write(lambda transaction: transaction.alert("EventsMissing", said), makes_room=True)

    def kept(self, up_to: int) -> None:
        if self._outbox is not None:
            self._outbox = msgspec.structs.replace(self._outbox, shipped=up_to)
            set_outbox(self._store, self._outbox)

    def noted_head(self) -> StreamHead | None:
        """The last sealed segment of the stream, as the store knows it; None for a store without a stream."""
        return _head_of(self._outbox)

    def sealed(self, segment: int, head: str) -> None:
        """Tell the store which segment of the stream was sealed last."""
        if self._outbox is not None and (segment, head) != (self._outbox.segment, self._outbox.head):
            self._outbox = msgspec.structs.replace(self._outbox, segment=segment, head=head)
            set_outbox(self._store, self._outbox)

    def close(self) -> None:
        self._store.close()


def head_in(store: Store) -> StreamHead | None:
    """The last sealed segment of the stream that a store's events go to; None before there is one."""
    return _head_of(outbox_of(store))


def outbox_of(store: Store) -> Outbox | None:
    """How far the shipper of a store has come; None when its events are not shipped."""
    return store.read(lambda transaction: transaction.outbox())


def set_outbox(store: Store, outbox: Outbox | None) -> None:
    """Note in a store how far its shipper has come; None ends the shipping."""
    store.write(lambda transaction: transaction.set_outbox(outbox), makes_room=True)


def _head_of(outbox: Outbox | None) -> StreamHead | None:
    return (
        StreamHead(outbox.stream, outbox.segment, outbox.head) if outbox is not None and outbox.head else None
    )


def _put_back(source: str) -> ShippedElsewhere:
    return ShippedElsewhere(
        f"{source} has other events than the stream holds of it: it was put back to an older state and has "
        "gone on from there, so ship it to a new folder"
    )


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


def facts_of(event: AuditEvent | Event) -> tuple[object, ...]:
    """What no redaction changes."""
    return event.ts_us, event.kind, event.message_id, event.lease, event.attempt


# ---- files -----------------------------------------------------------------------------------------


class _FileFeed(ABC):
    """A file that only grows, read on from where the last read stopped."""

    source: str

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._seq = 0
        self._offset = 0
        self._pending: list[AuditEvent] = []
        """Decoded, and not yet handed out."""
        self._tail = b""
        """The last bytes that were read."""
        self.holds: Holds = _everything
        """Asked about the last that the stream is said to hold of this file."""
        self.is_moved = False
        """Whether the name that it was found under is no longer its own."""

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
        self._note_tail()
        found, self._pending = self._pending[:limit], self._pending[limit:]
        if found:
            self._seq = found[-1].seq
        return found

    def _go_to(self, after: int) -> None:
        """Pass over what a sink holds already. After a write that failed there, read again."""
        self._check_tail()
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
            raise _put_back(self.source)

    def _note_tail(self) -> None:
        start = max(0, self._offset - TAIL_BYTES)
        self._tail = os.pread(self._fd, self._offset - start, start)

    def _check_tail(self) -> None:
        """What was read stands where it stood."""
        if os.pread(self._fd, len(self._tail), self._offset - len(self._tail)) != self._tail:
            raise _put_back(self.source)

    def found_at(self, path: Path) -> None:  # noqa: ARG002 - for those that care
        """It has this name now."""
        self.is_moved = False

    def kept(self, up_to: int) -> None:  # noqa: B027 - there is nothing to be done, and that is all
        """A file keeps its lines."""

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _numbered(self) -> int:
        """The number of the next event."""
        return self._seq + len(self._pending) + 1

    def _rewind(self) -> None:  # noqa: B027 - most have nothing more to forget
        """Forget what was read besides the offset."""

    @abstractmethod
    def _decode_more(self) -> bool:
        """Add what comes next to `_pending`; False when there is nothing more."""


class _LineFeed(_FileFeed):
    """A file of lines, each of which is an event."""

    def _decode_more(self) -> bool:
        data = os.pread(self._fd, WINDOW_BYTES, self._offset)
        end = data.rfind(b"\n") + 1
        if not end and (len(data) == WINDOW_BYTES or self._is_left_behind()):
            end = len(data)  # no line is so long, or nobody will end it: it is damage, told in pieces
        for line in data[:end].splitlines():
            self._pending.append(self._event(line, self._numbered()))
        self._offset += end
        return end > 0

    def _is_left_behind(self) -> bool:
        """Whether it was moved away, and whoever may have been writing is done."""
        return self.is_moved and time.time() - os.fstat(self._fd).st_mtime >= MOVED_QUIET_S

    @abstractmethod
    def _event(self, line: bytes, seq: int) -> AuditEvent:
        """What a line tells."""


class QueueFeed(_LineFeed):
    """The audit of a `Queue`: one event a line."""

    def __init__(self, fd: int, first: bytes) -> None:
        super().__init__(fd)
        self.source = f"queue:{_hash(first)}"

    def _event(self, line: bytes, seq: int) -> AuditEvent:
        return auditlines.of_audit_line(line, self.source, seq)


class MailFeed(_LineFeed):
    """The events of a mail server: one a line, told by the server itself."""

    def __init__(self, fd: int, first: bytes) -> None:
        super().__init__(fd)
        self.source = f"mail:{_hash(first)}"
        self._path: Path | None = None
        self.is_taken = False
        """Whether a stream holds all that is in it so far."""

    def found_at(self, path: Path) -> None:
        super().found_at(path)
        self._path = path

    def waiting(self, after: int) -> int:
        found = super().waiting(after)
        self._take(after)
        return found

    def kept(self, up_to: int) -> None:
        self._take(up_to)

    def _take(self, up_to: int) -> None:
        """Mark a full file of which a stream holds everything: the server may remove it then."""
        at_end = not self._pending and self._offset == os.fstat(self._fd).st_size
        self.is_taken = at_end and self._seq == up_to
        if self.is_taken and self._path is not None and eventfiles.is_full(self._path):
            try:
                self._path = eventfiles.mark_shipped(self._path)
            except OSError as error:
                _log.warning("%s cannot be marked as shipped: %s", self._path, error.strerror)

    def _is_left_behind(self) -> bool:
        return super()._is_left_behind() or (self._path is not None and self._path.name != eventfiles.GROWING)

    def _event(self, line: bytes, seq: int) -> AuditEvent:
        return auditlines.of_mail_line(line, self.source, seq)


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
            event = auditlines.of_bus_message(message, self._bus, self.source, self._numbered())
            self._pending.append(event)
        return part.consumed > 0


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:SOURCE_HASH_CHARS]


# ---- what is taken out -------------------------------------------------------------------------------

REDACTED = frozenset({"payload", "error", "detail"})
"""The fields that `redacted` may change."""


def redacted(redactor: Redactor, event: AuditEvent, *, whole_payloads: bool = False) -> AuditEvent:
    """The event without what must not be told. Most events say nothing of that kind; ids and names stay."""
    if not (event.payload or event.error or event.detail):
        return event
    return msgspec.structs.replace(
        event,
        payload=event.payload if whole_payloads or not event.payload else redactor.payload(event.payload),
        error=redactor.text(event.error) if event.error else "",
        detail=_redacted_facts(redactor, event.detail) if event.detail else {},
    )


def _redacted_facts(redactor: Redactor, value: Any) -> Any:
    """Our own facts stay, whatever the level; texts in them may come from users."""
    if isinstance(value, str):
        return redactor.text(value)
    if isinstance(value, dict):
        return {name: _redacted_facts(redactor, inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_redacted_facts(redactor, inner) for inner in value]
    return value


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
        *,
        holds: Holds = _everything,
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
            self._look(root / "audit.jsonl", _queue_feed)
        for bus in self._buses:
            for path in [*busfile.archives(bus), bus]:
                self._look(path, partial(_bus_feed, bus.stem))
        for folder in self._mail_folders:
            for path in [*(file.path for file in eventfiles.full_files(folder)), folder / eventfiles.GROWING]:
                self._look(path, _mail_feed)
        self._close_done()
        return list(self._open.values())

    def _close_done(self) -> None:
        """Let go of files that the mail server removed and that were read to their end."""
        for identity, feed in list(self._open.items()):
            if isinstance(feed, MailFeed) and feed.is_moved and feed.is_taken:
                feed.close()
                del self._open[identity]

    def _look(self, path: Path, feed_of: Callable[[int], _FileFeed | None]) -> None:
        try:
            info = path.lstat()
            identity = info.st_dev, info.st_ino
            if identity in self._open:
                self._open[identity].found_at(path)
                return
            fd = open_safely(path, os.O_RDONLY)
        except FileNotFoundError:
            return  # nobody has written yet, or it was moved a moment ago
        feed = feed_of(fd)
        if feed is None:
            os.close(fd)
        else:
            feed.holds = self._holds
            feed.found_at(path)
            self._open[identity] = feed

    def close(self) -> None:
        for feed in self._open.values():
            feed.close()
        self._open.clear()


def _first_line(fd: int) -> bytes | None:
    """What a file of lines is named after; None before it is whole. A line that is too long is cut."""
    line, newline, _ = os.pread(fd, WINDOW_BYTES, 0).partition(b"\n")
    return line if newline or len(line) == WINDOW_BYTES else None


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
