"""`Audit`: reads, verifies and prunes the event stream that shippers have written.

Rule 1: it never writes events.
Rule 2: unreadable data is reported and kept. A payload that cannot be decrypted is shown encrypted.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import partial
from typing import Any

import msgspec

from postroom.audit import segment_retention, verify
from postroom.audit.cipher import PREFIX, Cipher, UnreadablePayload
from postroom.audit.heads import StreamHead, head_path, noted_head
from postroom.audit.layout import holds_stream
from postroom.audit.reader import Segments, StreamPosition
from postroom.core.formats.events import AuditEvent
from postroom.core.history import tracing
from postroom.core.history.tracing import Latest, Timeline
from postroom.core.times import epoch_ns_of
from postroom.errors import InvalidMessage, Unavailable, UnknownMessage
from postroom.system.crypto.key_file import KEY_ID_CHARS_MAX
from postroom.system.log import library_log

TRACE_IDS_MAX = 100_000  # message and trace ids of one request
REPORTED_KEYS_MAX = 20  # missing keys that are reported; a payload may name any key
_log = library_log("postroom.audit")
_FIELDS = frozenset(field.name for field in msgspec.structs.fields(AuditEvent))


class Audit:
    """A folder of segments. `cipher` decrypts payloads.

    `on_trouble` is called with one line of text about data that cannot be read. By default it is logged.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        cipher: Cipher | None = None,
        on_trouble: Callable[[str], None] | None = None,
    ) -> None:
        self._segments = Segments(folder, on_trouble=on_trouble)
        self.folder = self._segments.folder
        self._cipher = cipher
        self._report = on_trouble or _log.warning
        self._reported_keys: set[str] = set()

    def query(
        self, *, since: datetime | None = None, until: datetime | None = None, **equal: Any
    ) -> Iterator[AuditEvent]:
        """Return the events of a time range whose fields have these values, in the order of the stream.

        With `message_id` or `trace_id`, the index is used instead of a scan of the stream.
        """
        unknown = sorted(set(equal) - _FIELDS)
        if unknown:
            raise InvalidMessage(f"an event has no field {unknown[0]!r}; it has {', '.join(sorted(_FIELDS))}")
        since_us = None if since is None else epoch_ns_of(since) // 1000
        until_us = None if until is None else epoch_ns_of(until) // 1000
        indexed = equal.get("message_id") or equal.get("trace_id")
        events: Iterable[AuditEvent] = (
            self._segments.find([indexed])
            if indexed
            else self._segments.events(since_us=since_us, until_us=until_us)
        )
        return self._revealed(event for event in events if _fits(event, equal, since_us, until_us))

    def tail(self, n: int = 20) -> list[AuditEvent]:
        """Return the last n events in the order of time. Reads only the last segments."""
        return next(self.follow(n))

    def follow(self, n: int = 0) -> Iterator[list[AuditEvent]]:
        """Yield the last n events, then at each step the events since, possibly none.

        Each list is in the order of time across sources.
        """
        timeline = Timeline()
        latest = Latest(n, timeline)
        position = self._read_on(self._segments.before_last(max(1, n)), latest.add)
        yield list(self._revealed(latest.events()))
        while True:
            new: list[AuditEvent] = []
            position = self._read_on(position, new.extend)
            yield list(self._revealed(event for _, _, event in sorted(timeline.timed(new))))

    def _read_on(self, position: StreamPosition, take: Callable[[list[AuditEvent]], None]) -> StreamPosition:
        """Call `take` with the events after a position. Returns the position after them."""
        reached = position
        for events, reached in self._segments.after(position):  # noqa: B007 - returned below
            take(events)
        return reached

    def summary(self) -> dict[str, Any]:
        """Return the size of the sealed segments and the head of the chain."""
        entries = self._segments.entries()
        return {
            "segments": len(entries),
            "events": sum(entry.events for entry in entries),
            "bytes": sum(entry.bytes for entry in entries),
            "head": entries[-1].hash if entries else "",
        }

    def trace(self, message_id: str) -> list[tracing.Span]:
        """Return the request that a message belongs to: all its messages with their times."""
        known: set[str] = set()
        events: list[AuditEvent] = []
        with self._segments.searching() as find:
            new = {message_id}
            while new:
                known |= new
                if len(known) > TRACE_IDS_MAX:
                    raise InvalidMessage(
                        f"the request of {message_id} has more than {TRACE_IDS_MAX} messages"
                    )
                found = find(new)
                events += found
                new = tracing.related(found, known)
        if not events:
            raise UnknownMessage(message_id, self.folder)
        return tracing.spans(self._revealed(events))

    def goal(self, goal_id: str) -> list[tracing.Span]:
        """Return the messages of a goal with their times. Reads the whole stream once, to find them."""
        named = {event.message_id for event in self._segments.events() if event.goal_id == goal_id} - {""}
        if len(named) > TRACE_IDS_MAX:
            raise InvalidMessage(f"the goal {goal_id} has more than {TRACE_IDS_MAX} messages")
        if not named:
            raise InvalidMessage(f"no message of the goal {goal_id!r} is in {self.folder}")
        with self._segments.searching() as find:
            return tracing.spans(self._revealed(find(named)))

    def verify(
        self, head: str | None = None, *, noted: Iterable[StreamHead] = ()
    ) -> list[verify.IntegrityFinding]:
        """Return the faults of the chain of segments; empty when all segments are intact.

        `head` is a hash that was recorded elsewhere, `noted` are heads that stores recorded. The head in the
        file next to the folder is always compared. A folder without a stream raises `Unavailable`.
        """
        self.need_stream()
        return verify.verify(self.folder, head, noted=noted)

    def need_stream(self) -> None:
        """Raise `Unavailable` for a folder without a stream: the wrong folder, or one that was wiped."""
        if holds_stream(self.folder):
            return
        noted_here = noted_head(self.folder)
        if noted_here is not None:
            raise Unavailable(
                f"{self.folder} holds no audit stream, but {head_path(self.folder)} says that segment "
                f"{noted_here.segment} was sealed there: it was wiped"
            )
        raise Unavailable(f"{self.folder} holds no audit stream")

    def head_is_noted(self) -> bool:
        """Whether the file next to the folder records the last sealed segment."""
        return noted_head(self.folder) is not None

    def retain(self, before: datetime) -> list[str]:
        """Remove the segments that were sealed before a time. Returns their names."""
        return segment_retention.retain(self.folder, epoch_ns_of(before) // 1000)

    def why_kept(self) -> str:
        """Return why the last retention kept segments, as a clause of a sentence."""
        return segment_retention.why_kept(self.folder)

    def _revealed(self, events: Iterable[AuditEvent]) -> Iterator[AuditEvent]:
        return iter(events) if self._cipher is None else map(partial(self._reveal, self._cipher), events)

    def _reveal(self, cipher: Cipher, event: AuditEvent) -> AuditEvent:
        try:
            return cipher.decrypt(event)
        except UnreadablePayload as error:
            key, text = event.payload.removeprefix(PREFIX).partition(":")[0], str(error)
        if len(key) > KEY_ID_CHARS_MAX:  # a payload that only looks encrypted
            key, text = "", f"the payload of {event.event_id} names no key"
        if key not in self._reported_keys and len(self._reported_keys) < REPORTED_KEYS_MAX:
            self._reported_keys.add(key)
            self._report(f"{text}; such payloads are shown encrypted")
        return event


def _fits(event: AuditEvent, equal: dict[str, Any], since_us: int | None, until_us: int | None) -> bool:
    if since_us is not None and event.ts_us < since_us:
        return False
    if until_us is not None and event.ts_us >= until_us:
        return False
    return all(getattr(event, name) == value for name, value in equal.items())
