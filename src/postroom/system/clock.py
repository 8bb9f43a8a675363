"""The two clocks: one that never steps, for deadlines, and one for people.

The steady clock counts since the machine's start, sleep included. Its boot id says which start: a number of
one boot means nothing in the next.
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
    """What a store asks for the time."""

    def boot_id(self) -> str: ...

    def boot_ns(self) -> int: ...

    def wall_us(self) -> int: ...


class SystemClock:
    """The machine's clocks."""

    def __init__(self) -> None:
        self._boot_id = _read_boot_id()
        self._kind = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

    def boot_id(self) -> str:
        """Which start of the machine `boot_ns` counts from."""
        return self._boot_id

    def boot_ns(self) -> int:
        """Nanoseconds since the machine started; nobody can set it."""
        return time.clock_gettime_ns(self._kind)

    def wall_us(self) -> int:
        """Microseconds of UTC; anybody can set it."""
        return time.time_ns() // 1000


def _read_boot_id() -> str:
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        # Elsewhere: the moment of the start, as well as it can be told, coarse enough to stay the same.
        started_s = time.time() - time.monotonic()
        return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{os.uname().nodename}-{round(started_s, -1):.0f}"))


def nanoseconds_of(clock: Callable[[], datetime]) -> Callable[[], int]:
    """A clock that gives nanoseconds since 1970, made of one that gives aware datetimes."""
    if not callable(clock):
        raise InvalidMessage(f"clock must be a callable that returns a datetime, not {clock!r}")

    def now_ns() -> int:
        moment = clock()
        if not isinstance(moment, datetime):
            raise InvalidMessage(f"clock must return an aware datetime, not {moment!r}")
        return epoch_ns_of(moment)

    return now_ns
