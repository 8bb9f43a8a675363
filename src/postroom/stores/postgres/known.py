"""What a handle on PostgreSQL remembers between two transactions."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from postroom.core.formats.ids import IdRule
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.stores.base import FOREVER_NS
from postroom.stores.codec import PLAIN, Codec
from postroom.stores.own_ids import OwnIds
from postroom.stores.transaction import LimitsCache

DEADLINES_KNOWN_NS = 50_000_000  # for how long a handle trusts the first deadline that it read
OWN_DEADLINE_KEPT_NS = NANOS_PER_S  # for how long a read may not show a deadline that this handle commits


class ConflictError(Exception):
    """Another transaction changed a value that this one has read: this one must be retried."""


class _Habits(threading.local):
    """What the last transaction of a thread did: threads that submit and threads that claim differ."""

    early = 0
    """How many numbers the last transaction used before it locked records: the next one begins with some."""


class PostgresKnown(OwnIds):
    """The memory of one handle. A handle that loses it, as after a fork, stays correct."""

    def __init__(self, store_id: str, rule: IdRule, codec: Codec = PLAIN) -> None:
        super().__init__(store_id, rule)
        self.codec = codec
        self.limits = LimitsCache()
        self._spare: deque[tuple[int, int]] = deque(maxlen=1)
        """Numbers that were taken and not used: the first and the last."""
        self.usual = 0
        """How many numbers the last transaction used."""
        self.habits = _Habits()
        self.deadlines: tuple[int, int] = (0, 0)
        """The first lease or delay that ends, and when it was read."""
        self._own_deadline: tuple[int, int] = (FOREVER_NS, 0)
        """The first deadline that transactions of this handle set lately, and when."""
        self._deadlines_due_s = 0.0
        """When a transaction should read the deadlines as it begins, by the clock of this process."""
        self.depths: dict[str, tuple[int, int]] = {}
        """How many records waited in a queue, and when that was read."""
        self.scans: dict[tuple[str, str, int], None] = {}
        """Cells that transactions read together: they are read when the next one begins."""
        self.keeps_up = True
        """Whether the last claim found less than it asked for."""

    def set_deadlines(self, ends: Sequence[int | None], now_ns: int) -> None:
        """Keep the first of the deadlines that were read at `now_ns`."""
        self.deadlines = min([end for end in ends if end is not None] + self._own_deadlines(now_ns)), now_ns
        self._deadlines_due_s = time.monotonic() + DEADLINES_KNOWN_NS / 2 / NANOS_PER_S

    def note_deadline(self, deadline_ns: int, now_ns: int) -> None:
        """A transaction of this handle sets a deadline. A read of another thread may not show it yet."""
        self._own_deadline = min([deadline_ns, *self._own_deadlines(now_ns)]), now_ns
        first_ns, read_ns = self.deadlines
        self.deadlines = min(first_ns, deadline_ns), read_ns

    def _own_deadlines(self, now_ns: int) -> list[int]:
        own_ns, noted_ns = self._own_deadline
        return [own_ns if now_ns < min(own_ns, noted_ns + OWN_DEADLINE_KEPT_NS) else FOREVER_NS]

    @property
    def wants_deadlines(self) -> bool:
        """Whether the deadlines are soon too old, so that a trip that is made anyway should read them."""
        return time.monotonic() >= self._deadlines_due_s

    @property
    def has_spare(self) -> bool:
        """Whether there are numbers that were taken and not used."""
        return bool(self._spare)

    def take_spare(self) -> tuple[int, int]:
        """Numbers that were taken and not used. One of several threads gets them; the others get none."""
        with suppress(IndexError):
            return self._spare.pop()
        return (1, 0)

    def keep_spare(self, first: int, last: int) -> None:
        """Keep unused numbers for the next transaction."""
        self._spare.append((first, last))
