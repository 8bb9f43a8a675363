"""The two clocks: a steady one for deadlines, and the wall clock for timestamps.

The steady clock counts since the machine booted, including sleep. The boot id names that boot: times of
different boots cannot be compared.
"""

import os
import time
import uuid
from collections.abc import Callable
from datetime import datetime
from typing import Protocol

from postroom.core.times import epoch_ns_of
from postroom.errors import InvalidMessage

_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Clock(Protocol):
    """The clock of a store."""

    def boot_id(self) -> str: ...

    def boot_ns(self) -> int: ...

    def wall_us(self) -> int: ...


class SystemClock:
    """The machine's clocks."""

    def __init__(self) -> None:
        self._boot_id = _read_boot_id()
        self._kind = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

    def boot_id(self) -> str:
        """The boot of the machine that `boot_ns` counts from."""
        return self._boot_id

    def boot_ns(self) -> int:
        """Nanoseconds since the machine booted; cannot be set."""
        return time.clock_gettime_ns(self._kind)

    def wall_us(self) -> int:
        """Microseconds of UTC; may be set, and step, at any time."""
        return time.time_ns() // 1000


def _read_boot_id() -> str:
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        # Without /proc: the approximate time of boot, rounded so that it stays the same.
        started_s = time.time() - time.monotonic()
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{os.uname().nodename}-{round(started_s, -1):.0f}"))


def nanoseconds_of(clock: Callable[[], datetime]) -> Callable[[], int]:
    """A clock in nanoseconds since 1970, from one that returns aware datetimes."""
    if not callable(clock):
        raise InvalidMessage(f"clock must be a callable that returns a datetime, not {clock!r}")

    def now_ns() -> int:
        moment = clock()
        if not isinstance(moment, datetime):
            raise InvalidMessage(f"clock must return an aware datetime, not {moment!r}")
        return epoch_ns_of(moment)

    return now_ns
