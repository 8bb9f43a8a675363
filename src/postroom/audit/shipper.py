"""The shipper copies committed events from sources to a sink, and stores no state of its own.

Rule 1: the sink is never ahead of a source: events are durable in the source before they are written.
Rule 2: the position is part of the stored events, so the two cannot disagree.
Rule 3: no event is dropped. A failed write is retried, and the sources keep their unshipped events.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import msgspec

from postroom.core.formats.events import AuditEvent
from postroom.errors import HandleDead, PostroomError, Rejected
from postroom.system.log import library_log

SHIP_EVENTS = 100  # this many waiting events are shipped at once ...
SHIP_AFTER_S = 1.0  # ... and fewer after this time
CHECK_EVERY_S = 0.5  # each pass costs the source an fsync and a commit, which delay its writers
BATCH_MAX = 5_000  # events in one write of the sink
PAUSE_AFTER_ERROR_S = 1.0
PAUSE_AFTER_ERROR_S_MAX = 30.0

_log = library_log("postroom.audit")


class Sink(Protocol):
    """Stores events durably. Only the sink knows how far each source has been shipped."""

    def position(self, source: str) -> int:
        """The last `seq` of a source that is stored durably; 0 for none."""

    def write(self, events: Sequence[AuditEvent]) -> None:
        """Store all events, in order, or raise `WriteFailed` and store none."""

    def reopen(self) -> None:
        """Continue after a disk error, with the data that is on disk."""

    def close(self) -> None: ...


class Feed(Protocol):
    """One source of events, in the order of their `seq`."""

    source: str

    def waiting(self, after: int) -> int:
        """Roughly how many events follow `after`; exactly 0 for none. `SinkAhead` when `after` is unknown."""

    def settle(self) -> None:
        """Return when every committed event would survive a power cut."""

    def read(self, after: int, limit: int) -> list[AuditEvent]:
        """Events with a `seq` above `after`."""

    def kept(self, up_to: int) -> None:
        """Called when the sink has stored all events up to `up_to` durably."""

    def close(self) -> None: ...


class ShippingProgress(msgspec.Struct):
    """What a shipper has done since it started."""

    shipped: int = 0
    waiting: int = 0
    """Committed events that were not yet shipped at the last pass."""
    failures: int = 0
    trouble: str = ""
    """Why the last attempt failed; empty after a success."""

    def gauges(self) -> dict[str, Callable[[], float]]:
        """What telemetry exports, by the names of the metrics."""
        return {
            f"postroom.audit.{name}": partial(getattr, self, name)
            for name in ("shipped", "waiting", "failures")
        }


class Shipper:
    """Ships the events of many sources to one sink. Each pass calls `feeds`, because sources come and go."""

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
        """Called after each pass, even when there was nothing to ship."""
        self.progress = ShippingProgress()

    def ship(self) -> int:
        """Ship all waiting events; returns their number."""
        return sum(self._drain(feed) for feed in self._feeds())

    def _drain(self, feed: Feed) -> int:
        """Ship what waits now. Later events wait for the next pass, since each batch delays the writers."""
        shipped = 0
        after = self._sink.position(feed.source)
        more = feed.waiting(after) > 0
        while more:
            events = feed.read(after, BATCH_MAX)
            if not events:
                break
            feed.settle()
            self._sink.write(events)
            self.progress.shipped += len(events)
            after = events[-1].seq
            feed.kept(after)
            shipped += len(events)
            more = len(events) == BATCH_MAX
        return shipped

    def waiting(self) -> int:
        """Roughly how many events wait."""
        return sum(feed.waiting(self._sink.position(feed.source)) for feed in self._feeds())

    def ship_if_due(self) -> bool:
        """Ship when enough events wait, or when some have waited long enough. Returns whether it shipped."""
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
        """Run passes until `stopped(seconds)`, which waits that long, returns true; then ship the rest.

        After an error, the pass is retried with a growing pause. `Rejected` ends the shipper, because a retry
        would fail again.
        """
        pause_s = 0.0
        while not stopped(pause_s or CHECK_EVERY_S):
            pause_s = self._run_pass(pause_s)
        self.ship()

    def _run_pass(self, pause_s: float) -> float:
        """One pass; returns how long to pause because of an error, 0 for none."""
        try:
            self.ship_if_due()
            self.tend()
        except Rejected:
            raise
        except (PostroomError, OSError) as error:
            self.progress.failures += 1
            self.progress.trouble = str(error)
            _log.warning("%d events wait, and could not be shipped: %s", self.progress.waiting, error)
            if isinstance(error, HandleDead):  # after a failed fsync, continue with the data that is on disk
                with suppress(PostroomError, OSError):  # retried after the pause
                    self._sink.reopen()
            return min(max(PAUSE_AFTER_ERROR_S, 2 * pause_s), PAUSE_AFTER_ERROR_S_MAX)
        self.progress.trouble = ""
        return 0.0
