"""The shipper: takes committed events to a sink, and remembers nothing itself.

Rule 1: it is never ahead of its source: what it has read is settled there before it is written here.
Rule 2: the sink holds the position: no event can be written and not remembered, nor the reverse.
Rule 3: nothing is dropped. A sink that cannot be written to is tried again, and its sources keep what waits.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

import msgspec

from postroom.core.events import AuditEvent
from postroom.errors import HandleDead, PostroomError, Rejected
from postroom.sinks.base import Sink

SHIP_EVENTS = 100  # as many waiting events are shipped at once ...
SHIP_AFTER_S = 1.0  # ... and fewer after this long
LOOK_EVERY_S = 0.5  # each time costs the source an fsync and a commit, for which its writers wait
BATCH_MAX = 5_000  # events in one write of the sink
PAUSE_AFTER_ERROR_S = 1.0
PAUSE_AFTER_ERROR_S_MAX = 30.0

_log = logging.getLogger("postroom.audit")


class Feed(Protocol):
    """One source of events, in the order of their numbers."""

    source: str

    def waiting(self, after: int) -> int:
        """About how many events lie behind a number; 0 only for none, `SinkAhead` when it is not there."""

    def settle(self) -> None:
        """Return when everything committed so far survives a power cut."""

    def read(self, after: int, limit: int) -> list[AuditEvent]:
        """Events with a number above `after`."""

    def kept(self, up_to: int) -> None:
        """A sink holds everything up to here for good."""

    def close(self) -> None: ...


class Progress(msgspec.Struct):
    """What a shipper has done since it began."""

    shipped: int = 0
    waiting: int = 0
    """Events that were committed and not yet shipped, at the last look."""
    failures: int = 0
    trouble: str = ""
    """Why the last attempt failed; empty when all is well."""


class Shipper:
    """Carries the events of many sources to one sink. `feeds` is asked at every look: files come and go."""

    def __init__(
        self,
        sink: Sink,
        feeds: Callable[[], Iterable[Feed]],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink = sink
        self._feeds = feeds
        self._monotonic = monotonic
        self._waits_since: float | None = None
        self.tend: Callable[[], None] = lambda: None
        """Called after each look, also when there was nothing to ship."""
        self.progress = Progress()

    def ship(self) -> int:
        """Take everything that waits to the sink; gives how many events that was."""
        return sum(self._drain(feed) for feed in self._feeds())

    def _drain(self, feed: Feed) -> int:
        """What came meanwhile waits for the next look: each batch costs those who work a moment."""
        shipped = 0
        after = self._sink.position(feed.source)
        more = feed.waiting(after) > 0
        while more:
            events = feed.read(after, BATCH_MAX)
            if not events:
                break
            feed.settle()
            self._write(events)
            after = events[-1].seq
            feed.kept(after)
            shipped += len(events)
            more = len(events) == BATCH_MAX
        return shipped

    def _write(self, events: Sequence[AuditEvent]) -> None:
        self._sink.write(events)
        self.progress.shipped += len(events)

    def waiting(self) -> int:
        """How many events wait, about."""
        return sum(feed.waiting(self._sink.position(feed.source)) for feed in self._feeds())

    def look(self) -> bool:
        """Ship when enough events wait, or when some have waited long enough. Whether it shipped."""
        self.progress.waiting = self.waiting()
        now = self._monotonic()
        if not self.progress.waiting:
            self._waits_since = None
            return False
        if self._waits_since is None:
            self._waits_since = now
        if self.progress.waiting < SHIP_EVENTS and now < self._waits_since + SHIP_AFTER_S:
            return False
        self.ship()
        self.progress.waiting, self._waits_since = 0, None
        return True

    def run(self, stopped: Callable[[float], bool]) -> None:
        """Look again and again until `stopped`, which waits that many seconds, says so; then ship the rest.

        An error is counted, logged and tried again, later each time. What is wrong with the input itself ends
        the shipper: it would be wrong the next time as well.
        """
        pause_s = 0.0
        while not stopped(pause_s or LOOK_EVERY_S):
            pause_s = self._try_look(pause_s)
        self.ship()

    def _try_look(self, pause_s: float) -> float:
        """One look; gives how long to pause because of an error, 0 for none."""
        try:
            self.look()
            self.tend()
        except Rejected:
            raise
        except (PostroomError, OSError) as error:
            self.progress.failures += 1
            self.progress.trouble = str(error)
            _log.warning("%d events wait, and could not be shipped: %s", self.progress.waiting, error)
            if isinstance(error, HandleDead):
                self._revive()
            return min(max(PAUSE_AFTER_ERROR_S, 2 * pause_s), PAUSE_AFTER_ERROR_S_MAX)
        self.progress.trouble = ""
        return 0.0

    def _revive(self) -> None:
        """After a failed fsync the sink starts afresh with what the disk holds."""
        with suppress(PostroomError, OSError):  # it is tried again after the pause
            self._sink.reopen()
