"""The ids that a store makes. Such an id contains the number of its record, so it needs no index."""

import hashlib
import os

from msgspec.structs import replace

from postroom.core.formats.ids import SECRET_BYTES, IdRule, MessageIds
from postroom.message import ENGINE_PREFIX, Event

IDS_FACT = "ids"
NUMBER_DIGITS_MAX = 18
UUID_CHARS = 36
FENCE_BITS = 20
HALF_BITS = 26
HALF = (1 << HALF_BITS) - 1
COVERED = 1 << 2 * HALF_BITS
"""Above every number of a store. Twice as much is still a whole number in JavaScript."""
ROUNDS = range(4)
UPGRADE_US = 24 * 3600 * 1_000_000  # in which all processes of a store are upgraded
EARLIER_RULE = IdRule(bytes(SECRET_BYTES).hex(), 1 << 62)
"""The rule of a store that only an earlier version has written."""


class OwnIds:
    """Makes ids, and finds the number of a record by its id. The `Known` of each backend derives from it."""

    def __init__(self, store_id: str, rule: IdRule = EARLIER_RULE) -> None:
        self.store_id = store_id
        self.rule = rule
        self.prefix = f"{store_id}-"
        """The prefix of ids that the store makes for tasks."""
        self.messages = MessageIds(store_id, rule)

    def new(self, queue: str, number: int, created_us: int) -> str:
        """The id of a record: a UUID for a message of an organization, else a short one."""
        if queue.startswith(ENGINE_PREFIX):
            return self.messages.new(number, created_us)
        return f"{self.prefix}{number!s}"

    def fence(self, attempt: int, lease: int) -> int:
        """A lease as clients see it: larger with each delivery, and not the number of an event.

        Its last bits tell the leases of two messages apart that had the same id.
        """
        return attempt << FENCE_BITS | self.messages.mark(lease) & (1 << FENCE_BITS) - 1

    def cover(self, number: int) -> int:
        """The number of a record or event as clients see it, which does not tell how many there are."""
        high, low = number >> HALF_BITS, number & HALF
        for turn in ROUNDS:
            high, low = low, high ^ self._half(turn, low)
        return COVERED | high << HALF_BITS | low

    def uncover(self, shown: int) -> int:
        """The number that a client has seen covered. Any other one stays the same."""
        if not COVERED <= shown < 2 * COVERED:
            return shown
        high, low = shown - COVERED >> HALF_BITS, shown & HALF
        for turn in reversed(ROUNDS):
            high, low = low ^ self._half(turn, high), high
        return high << HALF_BITS | low

    def place(self, shown: int, plain_max: int = 0) -> int | None:
        """The number that a masked one stands for, or a plain number up to `plain_max`.

        None for a guess: what it finds would count the store.
        """
        number = self.uncover(shown)
        return number if number != shown or shown <= plain_max else None

    def _half(self, turn: int, half: int) -> int:
        return self.messages.mark(-1 - (turn << HALF_BITS | half)) & HALF

    def cover_id(self, task_id: str) -> str:
        """The id of a task as clients see it: the number in one that the store made is covered."""
        number = self._task_number(task_id)
        return f"{self.prefix}{self.cover(number)}" if 0 < number < COVERED else task_id

    def uncover_id(self, shown: str) -> str:
        """The id of a task in the store, by the one that a client has seen."""
        number = self._task_number(shown)
        return f"{self.prefix}{self.uncover(number)}" if number >= COVERED else shown

    def is_guess(self, shown: str) -> bool:
        """Whether an id has the form of the store's own ones, and no client was given it."""
        return self.place(self._task_number(shown), self.rule.plain_max) is None

    def _task_number(self, task_id: str) -> int:
        return 0 if len(task_id) >= UUID_CHARS else self.own_number(task_id)

    def shown(self, event: Event) -> Event:
        """An event with its lease as clients see it."""
        return replace(event, lease=self.fence(event.attempt, event.lease)) if event.lease else event

    def name(self, which: int | str) -> str:
        """The id of a record that is known by its id, or by its number if it is a task."""
        return f"{self.prefix}{which!s}" if isinstance(which, int) else which

    def own_number(self, message_id: str) -> int:
        """The number in an id that the store made; 0 for any other id."""
        number = message_id.removeprefix(self.prefix)
        if len(number) == UUID_CHARS:
            return self.messages.number(number)
        is_own = (
            len(number) != len(message_id)
            and number.isdigit()
            and number.isascii()
            and number[0] != "0"
            and len(number) <= NUMBER_DIGITS_MAX
        )
        return int(number) if is_own else 0


def first_rule(store_id: str | None, newest: int, wall_us: int) -> IdRule:
    """The rule of a store that has none yet. A store of a given identity makes the same ids each time.

    If the store has been used, processes of an earlier version may go on for a while, and clients know
    numbers up to the newest one.
    """
    chosen = None if store_id is None else hashlib.sha256(store_id.encode()).digest()[:SECRET_BYTES]
    secret = chosen or os.urandom(SECRET_BYTES)
    return IdRule(secret.hex(), wall_us + UPGRADE_US if newest else 0, newest)
