"""`Audit`: the stream of everything that happened, read and looked after by people.

Rule 1: it reads what shippers wrote and never writes events itself.
Rule 2: what it cannot read is reported and kept. A payload that cannot be decrypted is shown as it is.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import partial
from typing import Any

import msgspec

from postroom.core import tracing
from postroom.core.events import AuditEvent
from postroom.core.timeline import Latest, Timeline
from postroom.core.times import epoch_ns_of
from postroom.errors import InvalidMessage, Unavailable, UnknownMessage
from postroom.sinks import retention, verify
from postroom.sinks.cipher import KEY_ID_CHARS_MAX, PREFIX, Cipher, UnreadablePayload
from postroom.sinks.heads import StreamHead, head_path, noted_head
from postroom.sinks.layout import holds_stream
from postroom.sinks.reader import Segments, StreamPosition

TRACE_IDS_MAX = 100_000  # of messages and traces in one request
TOLD_KEYS_MAX = 20  # a payload may claim a key of any name; of so many it is told
_log = logging.getLogger("postroom.audit")
_FIELDS = frozenset(field.name for field in msgspec.structs.fields(AuditEvent))


class Audit:
    """A folder of segments. `cipher` makes encrypted payloads readable.

    `on_trouble` is told, in one sentence, of what cannot be read; without it that is logged.
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
        self._tell = on_trouble or _log.warning
        self._told_keys: set[str] = set()

    def query(
        self, *, since: datetime | None = None, until: datetime | None = None, **equal: Any
    ) -> Iterator[AuditEvent]:
        """Events in a stretch of time whose fields have these values, as they were shipped.

        With `message_id` or `trace_id` among them the index is asked, and not the whole stream.
        """
        _check_fields(equal)
        since_us = None if since is None else epoch_ns_of(since) // 1000
        until_us = None if until is None else epoch_ns_of(until) // 1000
        events = self._candidates(equal, since_us, until_us)
        return self._revealed(event for event in events if _fits(event, equal, since_us, until_us))

    def _candidates(
        self, equal: dict[str, Any], since_us: int | None, until_us: int | None
    ) -> Iterable[AuditEvent]:
        indexed = equal.get("message_id") or equal.get("trace_id")
        if indexed:
            return self._segments.find([indexed])
        return self._segments.events(since_us=since_us, until_us=until_us)

    def tail(self, n: int = 20) -> list[AuditEvent]:
        """The last n events in the order of time, at the cost of the last segments."""
        return next(self.follow(n))

    def follow(self, n: int = 0) -> Iterator[list[AuditEvent]]:
        """First the last n events, and then at each turn what has come since, which may be nothing.

        Each list is in the order of time, across sources.
        """
        timeline = Timeline()
        latest = Latest(n, timeline)
        place = self._go_on(self._segments.before_last(max(1, n)), latest.add)
        yield list(self._revealed(latest.events()))
        while True:
            new: list[AuditEvent] = []
            place = self._go_on(place, new.extend)
            yield list(self._revealed(event for _, _, event in sorted(timeline.timed(new))))

    def _go_on(self, place: StreamPosition, take: Callable[[list[AuditEvent]], None]) -> StreamPosition:
        """Hand over what was written behind a place; gives where that ends."""
        behind = place
        for events, behind in self._segments.after(place):  # noqa: B007 - where it ends is the result
            take(events)
        return behind

    def summary(self) -> dict[str, Any]:
        """How much is sealed, and the head of the chain, which can be noted elsewhere."""
        entries = self._segments.entries()
        return {
            "segments": len(entries),
            "events": sum(entry.events for entry in entries),
            "bytes": sum(entry.bytes for entry in entries),
            "head": entries[-1].hash if entries else "",
        }

    def trace(self, message_id: str) -> list[tracing.Span]:
        """The request that a message belongs to: all its messages, with times."""
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

    def verify(
        self, head: str | None = None, *, noted: Iterable[StreamHead] = ()
    ) -> list[verify.IntegrityFinding]:
        """What is wrong with the chain of segments; nothing, when they are as they were sealed.

        `head` is a hash that somebody noted elsewhere, `noted` are heads that stores know. The head in the
        file beside the folder is always compared. A folder without a stream raises `Unavailable`.
        """
        self.need_stream()
        return verify.verify(self.folder, head, noted=noted)

    def need_stream(self) -> None:
        """Raise `Unavailable` for a folder that no writer has opened: a wrong one, or one that was wiped."""
        if holds_stream(self.folder):
            return
        noted_here = noted_head(self.folder)
        if noted_here is not None:
            raise Unavailable(
                f"{self.folder} holds no audit stream, and {head_path(self.folder)} notes that segment "
                f"{noted_here.segment} was sealed there: it was wiped"
            )
        raise Unavailable(f"{self.folder} holds no audit stream")

    def head_is_noted(self) -> bool:
        """Whether a file beside the folder says which segment was sealed last."""
        return noted_head(self.folder) is not None

    def retain(self, before: datetime) -> list[str]:
        """Remove segments that were sealed before a time; gives their names."""
        return retention.retain(self.folder, epoch_ns_of(before) // 1000)

    def why_kept(self) -> str:
        """What the last retention stopped at, in half a sentence."""
        return retention.why_kept(self.folder)

    def _revealed(self, events: Iterable[AuditEvent]) -> Iterator[AuditEvent]:
        return iter(events) if self._cipher is None else map(partial(self._reveal, self._cipher), events)

    def _reveal(self, cipher: Cipher, event: AuditEvent) -> AuditEvent:
        try:
            return cipher.decrypt(event)
        except UnreadablePayload as error:
            self._tell_of_key(event, str(error))
            return event

    def _tell_of_key(self, event: AuditEvent, text: str) -> None:
        key = event.payload.removeprefix(PREFIX).partition(":")[0]
        if len(key) > KEY_ID_CHARS_MAX:  # a body that only looks encrypted
            key, text = "", f"the payload of {event.event_id} names no key"
        if key not in self._told_keys and len(self._told_keys) < TOLD_KEYS_MAX:
            self._told_keys.add(key)
            self._tell(f"{text}; such payloads are shown as they are")


def _check_fields(equal: dict[str, Any]) -> None:
    unknown = sorted(set(equal) - _FIELDS)
    if unknown:
        raise InvalidMessage(f"an event has no field {unknown[0]!r}; it has {', '.join(sorted(_FIELDS))}")


def _fits(event: AuditEvent, equal: dict[str, Any], since_us: int | None, until_us: int | None) -> bool:
    if since_us is not None and event.ts_us < since_us:
        return False
    if until_us is not None and event.ts_us >= until_us:
        return False
    return all(getattr(event, name) == value for name, value in equal.items())
