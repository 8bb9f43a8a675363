"""Background work in a thread: on an interval, and earlier when it is woken.

Rule 1: a loop survives every exception. It counts the error, keeps the last one for the status, and runs on.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

import msgspec

from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.system.clock import Clock


class LoopStatus(msgspec.Struct, frozen=True):
    """The counters of one loop."""

    running: bool
    every_s: float
    runs: int
    errors: int
    last_error: str
    last_error_at: datetime | None


class Loop:
    """Calls `work` every `every_s` seconds, and earlier when it is woken."""

    def __init__(self, name: str, every_s: float, work: Callable[[], None], clock: Clock) -> None:
        self.name = name
        self.every_s = every_s
        self._work = work
        self._clock = clock
        self._due_ns = 0
        self._woken = threading.Event()
        self._rescheduled = threading.Event()
        """Set when the next run may be due earlier than the thread sleeps."""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._runs = 0
        self._errors = 0
        self._last_error = ""
        self._last_error_at: datetime | None = None
        self.on_error: Callable[[str, BaseException], None] | None = None
        """Called with the loop's name and the error."""

    @property
    def stopping(self) -> bool:
        """Whether a long run should end early."""
        return self._stopping.is_set()

    def wake(self) -> None:
        """Make the loop run now. Safe from any thread, any number of times."""
        self._woken.set()
        self._rescheduled.set()

    def due_in_s(self) -> float:
        """Seconds until the next run."""
        if self._woken.is_set():
            return 0.0
        return max(0.0, (self._due_ns - self._clock.boot_ns()) / NANOS_PER_S)

    def run_within(self, pause_s: float) -> None:
        """Run again after `pause_s` at the latest. Safe from any thread."""
        due_ns = self._clock.boot_ns() + round(pause_s * NANOS_PER_S)
        if due_ns < self._due_ns:
            self._due_ns = due_ns
            self._rescheduled.set()

    def run_once(self) -> None:
        """Do the work once. An exception is counted and reported, and does not leave this method."""
        self._woken.clear()
        self._due_ns = self._clock.boot_ns() + round(self.every_s * NANOS_PER_S)
        self._runs += 1
        try:
            self._work()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - see rule 1
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        """Count an error, and keep it for the status."""
        self._errors += 1
        self._last_error = f"{type(error).__name__}: {error}"
        self._last_error_at = datetime.now(UTC)
        if self.on_error is not None:
            with suppress(Exception):
                self.on_error(self.name, error)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"postroom-{self.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.run_once()
            while not self._stopping.is_set() and (left_s := self.due_in_s()) > 0:
                self._rescheduled.wait(left_s)
                self._rescheduled.clear()

    def stop(self) -> None:
        """End the loop after the current run."""
        self._stopping.set()
        self._rescheduled.set()

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def status(self) -> LoopStatus:
        return LoopStatus(
            running=self._thread is not None and self._thread.is_alive(),
            every_s=self.every_s,
            runs=self._runs,
            errors=self._errors,
            last_error=self._last_error,
            last_error_at=self._last_error_at,
        )
