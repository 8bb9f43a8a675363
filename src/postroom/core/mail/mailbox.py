"""Mailboxes as pure data: what is stored and what it costs, the order of replay, and pull groups.

Rule 1: inside a rank, letters are ordered by number, which is the order of acceptance.
Rule 2: a pull group never gets an acknowledged letter again, and gets every other letter.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

Priority = Literal["critical", "urgent", "high", "normal", "low"]
RANKS: dict[str, int] = {"critical": 0, "urgent": 1, "high": 1, "normal": 2, "low": 3}
"""The priorities of all dialects. A smaller rank is delivered first."""

RANK_COUNT = 4
EVERY_RANK = (1 << RANK_COUNT) - 1  # ranks as bits
DEAD_NUMBERS_MAX = 64  # removed numbers kept in a sequence before it checks whether half of it is dead

MESSAGE_COST_BYTES = 320  # of memory, besides its own bytes: 210 to 290 measured, and its deadline
KEY_COST_BYTES = 150
TAG_COST_BYTES = 64
MAILBOX_COST_BYTES = 1_200  # 1,060 measured
ORG_COST_BYTES = 250  # of the organization of a mailbox, besides its name: its key and its place in an index
GROUP_COST_BYTES = 800  # of a pull group: 600 measured

AgentKey: TypeAlias = tuple[str, str]
"""The organization and the name of an agent."""

Deliver = Literal["latest", "earliest", "from_time", "from_id"]


class MailUsage:
    """What is stored for one client, or for one organization."""

    __slots__ = ("agents", "bytes", "card_bytes", "mailboxes", "messages", "name", "remembered")

    def __init__(self, name: str) -> None:
        self.name = name
        self.bytes = 0  # cost of its messages, mailboxes and pull groups
        self.messages = self.mailboxes = self.agents = self.card_bytes = 0
        self.remembered = 0  # letters that its pull groups hold, or know to be acknowledged

    def add(self, cost: int, *, messages: int = 0, mailboxes: int = 0) -> None:
        self.bytes += cost
        self.messages += messages
        self.mailboxes += mailboxes

    def add_agent(self, card_bytes: int, count: int) -> None:
        self.agents += count
        self.card_bytes += card_bytes


class MailAccount(MailUsage):
    """What one client has stored, counted against its quota and against that of its organization."""

    __slots__ = ("groups", "organization")

    def __init__(self, client: str, organization: MailUsage | None = None) -> None:
        super().__init__(client)
        self.organization = organization
        self.groups = 0  # pull groups that it created

    def add(self, cost: int, *, messages: int = 0, mailboxes: int = 0) -> None:
        super().add(cost, messages=messages, mailboxes=mailboxes)
        if self.organization is not None:
            self.organization.add(cost, messages=messages, mailboxes=mailboxes)

    def add_agent(self, card_bytes: int, count: int) -> None:
        super().add_agent(card_bytes, count)
        if self.organization is not None:
            self.organization.add_agent(card_bytes, count)

    def remember(self, more: int) -> None:
        """Count letters that its pull groups hold; a negative number removes."""
        self.remembered += more
        if self.organization is not None:
            self.organization.remembered += more

    @property
    def empty(self) -> bool:
        return not (self.bytes or self.mailboxes or self.agents)


NOBODY = MailAccount("")


def organization_of(client: str) -> str:
    """The organization of a client: its users are called ORGANIZATION/NAME. Empty for a client of none."""
    kind, _, user = client.partition(":")
    organization, slash, _ = user.partition("/")
    return organization if kind == "user" and slash else ""


def cost_of(size: int, key: str = "", tags: tuple[str, ...] = ()) -> int:
    """The memory that a message of `size` bytes takes up."""
    cost = MESSAGE_COST_BYTES + size + sum(TAG_COST_BYTES + size_of(tag) for tag in tags)
    return cost + KEY_COST_BYTES + size_of(key) if key else cost


def mailbox_cost(mail_id: str, desc: str, org: str = "") -> int:
    """The memory of a mailbox without its messages. The constants include an ASCII name."""
    cost = MAILBOX_COST_BYTES + size_of(desc) + (0 if mail_id.isascii() else size_of(mail_id))
    return cost + ORG_COST_BYTES + size_of(org) if org else cost


def key_of(org: str, mail_id: str) -> str:
    """The name of a mailbox among those of all organizations. No subject has a blank, so it is unique."""
    return f"{org} {mail_id}" if org else mail_id


def group_cost(name: str) -> int:
    """The memory of a pull group. The constant includes an ASCII name."""
    return GROUP_COST_BYTES + (0 if name.isascii() else size_of(name))


def size_of(text: str) -> int:
    """The memory of a text: each character as wide as the widest one, plus the cached UTF-8 form."""
    if text.isascii():
        return len(text)
    widest = max(text)
    width = 1 if widest <= "\xff" else 2 if widest <= "\uffff" else 4
    return width * len(text) + len(text.encode("utf-8", "surrogatepass"))


class Letter(msgspec.Struct, frozen=True, gc=False):
    """One stored message. `rank` and `cost` are derived from the rest, and kept because they are hot."""

    number: int
    priority: Priority
    rank: int
    cost: int
    payload: bytes
    headers: bytes
    created_us: int
    durable: bool = False
    account: MailAccount = NOBODY
    """The account of its sender."""
    expires_ns: int = 0
    due_ns: int = 0
    """When it is delivered; 0 is at once."""
    key: str = ""
    tags: tuple[str, ...] = ()


class SortedNumbers:
    """Ascending numbers, such as those of one rank. Removed numbers stay until half of them are dead."""

    __slots__ = ("_dead", "_numbers")

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._dead = 0

    def __len__(self) -> int:
        """How many numbers are alive."""
        return len(self._numbers) - self._dead

    def add(self, first: int, count: int = 1) -> None:
        """Add `count` consecutive numbers."""
        numbers = self._numbers
        if numbers and first < numbers[-1]:  # they waited for an fsync, and later numbers did not
            for number in range(first, first + count):
                insort(numbers, number)
        elif count == 1:
            numbers.append(first)
        else:
            numbers += range(first, first + count)

    def lost(self, alive: Container[int]) -> None:
        """Count one number as dead. `alive` holds the live numbers."""
        self._dead += 1
        if self._dead > DEAD_NUMBERS_MAX and self._dead * 2 > len(self._numbers):
            self._numbers = [number for number in self._numbers if number in alive]
            self._dead = 0

    def above(self, number: int) -> Iterator[int]:
        """The numbers above `number`, dead ones included. The sequence may change meanwhile."""
        numbers = self._numbers
        for index in range(bisect_right(numbers, number), len(numbers)):
            yield numbers[index]

    def next(self, number: int, limit: int) -> list[int]:
        """At most `limit` numbers above `number`, dead ones included."""
        first = bisect_right(self._numbers, number)
        return self._numbers[first : first + limit]

    def last_below(self, number: int) -> int:
        """The largest number below `number`; 0 when there is none."""
        index = bisect_left(self._numbers, number)
        return self._numbers[index - 1] if index else 0

    def newest(self) -> int:
        return self._numbers[-1] if self._numbers else 0


class PullGroup:
    """What a group has acknowledged, and what its connections hold unacknowledged."""

    __slots__ = ("_alive", "_counted", "account", "done", "handed", "through", "turn")

    def __init__(self, alive: dict[int, Letter], turn: int = 0) -> None:
        self.turn = turn  # counts the restarts of the group
        self.through = [0] * RANK_COUNT
        self.done: set[int] = set()
        self.handed: dict[int, int] = {}
        """The connection that fetched each letter, in the order of the fetches."""
        self.account = NOBODY
        """The account of its creator."""
        self._counted = 0
        self._alive = alive

    def count(self) -> None:
        """Count the letters that it remembers against its creator."""
        remembered = len(self.done) + len(self.handed)
        self.account.remember(remembered - self._counted)
        self._counted = remembered

    def forget_all(self) -> None:
        self.done.clear()
        self.handed.clear()
        self.count()

    def next(self, lanes: "list[SortedNumbers]", link: int, limit: int, now_ns: int) -> list[Letter]:
        """The letters that a connection can fetch: neither acknowledged nor held by another connection."""
        found: list[Letter] = []
        for rank, lane in enumerate(lanes):
            for number in lane.above(self.through[rank]):
                if len(found) == limit:
                    break
                letter = self._alive.get(number)
                if letter is None or number in self.done or self.handed.get(number, link) != link:
                    continue
                if letter.expires_ns == 0 or letter.expires_ns > now_ns:
                    found.append(letter)
        return found

    def hand(self, letters: Iterable[Letter], link: int) -> None:
        """Mark letters as held by a connection, in this order."""
        for letter in letters:
            self.handed.pop(letter.number, None)
            self.handed[letter.number] = link
        self.count()

    def acknowledge(self, number: int) -> list[int]:
        """Acknowledge a letter, and those that the same connection fetched before it. Returns the new ones.

        Letters after it in the order of delivery stay unacknowledged, even when they were fetched earlier:
        a letter that is fetched a second time counts as fetched after them.
        """
        letter = self._alive.get(number)
        if letter is None or number <= self.through[letter.rank]:
            return []  # removed letters, and those before the position, need not be remembered
        link = self.handed.get(number)
        fresh = [number] if number not in self.done else []
        if link is not None:
            for earlier, holder in self.handed.items():
                if earlier == number:
                    break
                if holder == link and (self._alive[earlier].rank, earlier) < (letter.rank, letter.number):
                    fresh.append(earlier)
        self.settle(fresh)
        return fresh

    def settle(self, numbers: Iterable[int]) -> None:
        """Mark letters as acknowledged."""
        for number in numbers:
            self.done.add(number)
            self.handed.pop(number, None)
        self.count()

    def advance(self, lanes: "list[SortedNumbers]") -> None:
        """Move the position past leading letters that are acknowledged or removed, and forget those."""
        for rank, lane in enumerate(lanes):
            for number in lane.above(self.through[rank]):
                if number in self._alive and number not in self.done:
                    break
                self.through[rank] = number
                self.done.discard(number)
        self.count()

    def unsettle(self, numbers: Iterable[int]) -> None:
        """Revoke acknowledgements."""
        self.done.difference_update(numbers)
        self.count()

    def forget(self, number: int) -> None:
        """Forget a removed letter."""
        if self.handed.pop(number, None) is not None or number in self.done:
            self.done.discard(number)
            self.count()

    def lose(self, link: int) -> list[int]:
        """Release what a lost connection held, so that others can fetch it. Returns the numbers."""
        lost = [number for number, holder in self.handed.items() if holder == link]
        for number in lost:
            del self.handed[number]
        self.count()
        return lost


@dataclass(slots=True, eq=False)
class Mailbox:
    """One mailbox from its creation to its expiry."""

    serial: int
    mail_id: str
    public: bool
    named: bool
    label: str
    """Its name in events."""
    org: str = ""
    """Empty for a mailbox of all organizations."""
    key: str = field(init=False)
    desc: str = ""
    creator: str = ""
    creator_link: int = 0
    account: MailAccount = NOBODY
    cost: int = 0
    """Without its letters."""
    ttl_s: float = 0.0
    created_us: int = 0
    expires_us: int = 0
    expires_ns: int = 0
    bytes: int = 0
    reserved: int = 0
    """Accepted letters that are not stored yet."""
    reserved_bytes: int = 0
    syncing: int = 0
    """Batches of them that wait for the disk."""
    has_expired: bool = False
    is_stored: bool = False
    """Whether its creation is durable."""
    letters: dict[int, Letter] = field(default_factory=dict)
    lanes: "list[SortedNumbers]" = field(default_factory=list)
    keys: dict[str, int] = field(default_factory=dict)
    groups: "dict[str, PullGroup]" = field(default_factory=dict)
    delayed: dict[int, Letter] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.key = key_of(self.org, self.mail_id)

    def add(self, letters: list[Letter], nbytes: int) -> Letter | None:
        """Store letters of one rank with consecutive numbers, which cost `nbytes` together.

        Only a batch of one may have a key. Returns the letter that the key replaces.
        """
        if not self.lanes:
            self.lanes = [SortedNumbers() for _ in range(RANK_COUNT)]
        first = letters[0]
        replaced = None
        if first.key:
            replaced = self.remove(self.keys.get(first.key, 0))
            self.keys[first.key] = first.number
        stored = self.letters
        for letter in letters:
            stored[letter.number] = letter
        self.bytes += nbytes
        self.lanes[first.rank].add(first.number, len(letters))
        return replaced

    def remove(self, number: int) -> Letter | None:
        """Remove a letter; None when there is none with this number."""
        letter = self.letters.pop(number, None)
        if letter is None:
            return None
        self.bytes -= letter.cost
        self.lanes[letter.rank].lost(self.letters)
        if letter.key and self.keys.get(letter.key) == number:
            del self.keys[letter.key]
        for group in self.groups.values():
            group.forget(number)
        self.failures.pop(number, None)
        return letter

    def replay(self, ranks: int, now_ns: int) -> Iterator[Letter]:
        """The letters that are not expired, in the order of delivery."""
        for rank, lane in enumerate(self.lanes):
            if ranks & (1 << rank):
                for number in lane.above(0):
                    letter = self.letters.get(number)
                    if letter is not None and (letter.expires_ns == 0 or letter.expires_ns > now_ns):
                        yield letter

    def waiting_rank(self, through: list[int], ranks: int) -> int:
        """The first of `ranks` that may have a letter after a position; `RANK_COUNT` when none has."""
        for rank, lane in enumerate(self.lanes):
            if ranks & (1 << rank) and lane.newest() > through[rank]:
                return rank
        return RANK_COUNT

    def next_run(self, through: list[int], rank: int, limit: int, nbytes: int, now_ns: int) -> list[Letter]:
        """The next letters of one priority after a position, which moves past them.

        At most `limit` letters and `nbytes` of cost, but always one letter if there is any.
        """
        found: list[Letter] = []
        size, priority, last = 0, "", through[rank]
        get, lane = self.letters.get, self.lanes[rank]
        while not found and (numbers := lane.next(last, limit)):
            for number in numbers:
                letter = get(number)
                if letter is not None and not 0 < letter.expires_ns <= now_ns:
                    size += letter.cost
                    if letter.priority != priority or size > nbytes:
                        if found:
                            break
                        priority = letter.priority
                    found.append(letter)
                last = number
        through[rank] = last
        return found

    def group(self, name: str, deliver: Deliver, bound: int, *, restart: bool) -> tuple[PullGroup, bool]:
        """Get or create a pull group. Returns whether it is new or restarted.

        `bound` is an instant in microseconds or a letter's number.
        """
        known = self.groups.get(name)
        if known is not None and not restart:
            return known, False
        group = PullGroup(self.letters, 0 if known is None else known.turn + 1)
        group.through = self.position(deliver, bound)
        if known is not None:
            known.forget_all()
            group.account = known.account
        self.groups[name] = group
        return group, True

    def position(self, deliver: Deliver, bound: int) -> list[int]:
        """For each rank, the number after which a reader starts."""
        if not self.lanes or deliver == "earliest":
            return [0] * RANK_COUNT
        if deliver == "latest":
            return [lane.newest() for lane in self.lanes]
        if deliver == "from_id":
            return [lane.last_below(bound) for lane in self.lanes]
        return [self._last_before(lane, bound) for lane in self.lanes]

    def _last_before(self, lane: SortedNumbers, instant_us: int) -> int:
        """The last number before an instant. Wall clocks step: the first letter after it decides."""
        last = 0
        for number in lane.above(0):
            letter = self.letters.get(number)
            if letter is not None and letter.created_us >= instant_us:
                break
            last = number
        return last
