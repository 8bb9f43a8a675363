"""Mailboxes as pure data: what is stored, the order of replay, and which member of a group gets a letter.

Rule 1: inside a rank, letters are ordered by number, which is the order of acceptance.
Rule 2: at most one connected member of a queue group holds a letter. When the member is lost, another member
        gets it. A full window of equally or more urgent letters stops deliveries to a member; before the
        first delete from its window, one full of any letters does.
Rule 3: a queue group without members is forgotten: the next subscription to join gets everything.
Rule 4: a pull group never gets an acknowledged letter again, and gets every other letter.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Iterable, Iterator
from heapq import heappop, heappush
from typing import Literal, TypeAlias

import msgspec

Priority = Literal["critical", "urgent", "high", "normal", "low"]
RANKS: dict[str, int] = {"critical": 0, "urgent": 1, "high": 1, "normal": 2, "low": 3}
"""The priorities of all dialects. A smaller rank is delivered first."""

RANK_COUNT = 4
EVERY_RANK = (1 << RANK_COUNT) - 1  # ranks as bits
NOT_QUEUED = -1
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


class Mailbox(msgspec.Struct, eq=False):
    """One mailbox from its creation to its expiry."""

    serial: int
    mail_id: str
    public: bool
    named: bool
    label: str
    """Its name in events."""
    org: str = ""
    """Empty for a mailbox of all organizations."""
    key: str = ""
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
    letters: dict[int, Letter] = {}
    lanes: "list[SortedNumbers]" = []
    keys: dict[str, int] = {}
    groups: "dict[str, PullGroup]" = {}
    delayed: dict[int, Letter] = {}
    failures: dict[int, int] = {}

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


class MailSubscription(msgspec.Struct, eq=False):
    """One subscription to a mailbox. `link` is the connection, which is opaque here."""

    link: object
    number: int
    sid: str
    key: str
    """Of the mailbox."""
    ranks: int
    queue_group: str
    enveloped: bool
    through: list[int] = msgspec.field(default_factory=lambda: [0] * RANK_COUNT)
    """For each rank, the last number delivered. Valid only while the subscription is in a backlog."""
    queue_rank: int = NOT_QUEUED
    """The rank of the queue in the backlog that holds it."""

    @property
    def is_waiting(self) -> bool:
        """Whether it is in a backlog: new letters wait there as well."""
        return self.queue_rank != NOT_QUEUED


class ConnectionBacklog:
    """Subscriptions of one connection with undelivered letters, by the most urgent rank of these."""

    __slots__ = ("_queues", "is_scheduled")

    def __init__(self) -> None:
        self._queues: list[dict[MailSubscription, None]] = [{} for _ in range(RANK_COUNT)]
        self.is_scheduled = False
        """Whether its delivery continues in the next turn of the loop."""

    def __bool__(self) -> bool:
        return any(self._queues)

    def put(self, subscription: MailSubscription, rank: int) -> None:
        """Queue a subscription after the others of this rank."""
        self.remove(subscription)
        self._queues[rank][subscription] = None
        subscription.queue_rank = rank

    def promote(self, subscription: MailSubscription, rank: int) -> None:
        """Move a subscription forward for a new letter of this rank."""
        if rank < subscription.queue_rank:
            self.put(subscription, rank)

    def remove(self, subscription: MailSubscription) -> None:
        if subscription.is_waiting:
            del self._queues[subscription.queue_rank][subscription]
            subscription.queue_rank = NOT_QUEUED

    def first(self) -> MailSubscription:
        """The subscription that is next."""
        return next(iter(next(queue for queue in self._queues if queue)))


class GroupMember:
    """One connection in a queue group, and the undeleted letters delivered to it."""

    __slots__ = ("_counts", "has_deletes", "held", "subscriptions")

    def __init__(self) -> None:
        self.subscriptions: list[MailSubscription] = []
        self.held: dict[int, int] = {}
        """Ranks by number."""
        self.has_deletes = False
        """Whether a letter was deleted while this member held it."""
        self._counts = [0] * RANK_COUNT

    def hold(self, letter: Letter) -> None:
        self.held[letter.number] = letter.rank
        self._counts[letter.rank] += 1

    def forget(self, number: int) -> None:
        self._counts[self.held.pop(number)] -= 1

    def forget_all(self) -> None:
        self.held.clear()
        self._counts = [0] * RANK_COUNT

    def has_room(self, rank: int, window: int) -> bool:
        """Whether its window has room for a letter of a rank.

        Less urgent letters do not count for a member whose letters are deleted.
        """
        return not window or sum(self._counts[: rank + 1] if self.has_deletes else self._counts) < window


class QueueGroup:
    """A queue group: each letter goes to one member with room in its window."""

    __slots__ = ("_through", "held", "members", "returned", "window")

    def __init__(self, window: int) -> None:
        self.window = window
        """Undeleted letters that a member may hold; 0 is no limit."""
        self.members: dict[int, GroupMember] = {}
        """Members by connection, the least recently served first."""
        self.held: dict[int, GroupMember] = {}
        self.returned: list[list[int]] = [[] for _ in range(RANK_COUNT)]
        """Numbers to redeliver to another member: a heap for each rank."""
        self._through = [0] * RANK_COUNT
        """For each rank, the number up to which every letter was delivered or returned."""

    def join(self, subscription: MailSubscription) -> None:
        self.members.setdefault(subscription.number, GroupMember()).subscriptions.append(subscription)

    def leave(self, subscription: MailSubscription) -> list[int]:
        """End a subscription. Returns what its connection held if it was the last one there, ascending."""
        member = self.members.get(subscription.number)
        if member is None or subscription not in member.subscriptions:
            return []
        member.subscriptions.remove(subscription)
        if member.subscriptions:
            return []
        del self.members[subscription.number]
        for number in member.held:
            del self.held[number]
        return sorted(member.held)

    def return_letter(self, letter: Letter) -> None:
        """Return a letter that no member holds any more, for redelivery."""
        heappush(self.returned[letter.rank], letter.number)

    def arrived(self, letter: Letter) -> None:
        """Queue a new letter for redelivery if the group has already passed its position."""
        if letter.number <= self._through[letter.rank]:
            self.return_letter(letter)

    def offer(self, box: Mailbox) -> tuple[MailSubscription, int] | None:
        """The next subscription to deliver to, and the rank of the letter; None when no member can take one.

        Of the members that want the rank, have room and no backlog, the one that holds the fewest letters.
        """
        for rank in range(RANK_COUNT):
            if self._has_letter(box, rank):
                chosen = self._choose(rank)
                if chosen is not None:
                    return chosen, rank
        return None

    def rank_for(self, subscription: MailSubscription, box: Mailbox) -> int:
        """The rank of the next letter for one subscription; `RANK_COUNT` when there is none."""
        member = self.members[subscription.number]
        for rank in range(RANK_COUNT):
            if (
                subscription.ranks & (1 << rank)
                and self._has_letter(box, rank)
                and member.has_room(rank, self.window)
            ):
                return rank
        return RANK_COUNT

    def take(self, subscription: MailSubscription, rank: int, box: Mailbox, now_ns: int) -> Letter | None:
        """Assign the next letter of a rank to a subscription; None when no live letter is left."""
        letter = self._next(rank, box, now_ns)
        if letter is not None:
            member = self.members.pop(subscription.number)
            self.members[subscription.number] = member
            member.hold(letter)
            self.held[letter.number] = member
        return letter

    def _has_letter(self, box: Mailbox, rank: int) -> bool:
        return bool(self.returned[rank]) or box.waiting_rank(self._through, 1 << rank) == rank

    def _next(self, rank: int, box: Mailbox, now_ns: int) -> Letter | None:
        returned = self.returned[rank]
        while returned:
            letter = box.letters.get(heappop(returned))
            if letter is not None and (letter.expires_ns == 0 or letter.expires_ns > now_ns):
                return letter
        return next(iter(box.next_run(self._through, rank, 1, 0, now_ns)), None) if box.lanes else None

    def _choose(self, rank: int) -> MailSubscription | None:
        bit = 1 << rank
        best: GroupMember | None = None
        chosen: MailSubscription | None = None
        for member in self.members.values():
            if best is not None and len(member.held) >= len(best.held):
                continue
            if not member.has_room(rank, self.window):
                continue
            for subscription in member.subscriptions:
                if subscription.ranks & bit and not subscription.is_waiting:
                    best, chosen = member, subscription
                    break
        return chosen

    def deleted(self, number: int) -> None:
        """A client deletes a letter."""
        member = self.held.get(number)
        if member is not None:
            member.has_deletes = True

    def forget(self, number: int) -> bool:
        """Forget a removed letter. Returns whether a member held it."""
        member = self.held.pop(number, None)
        if member is not None:
            member.forget(number)
        return member is not None

    def forget_all(self) -> None:
        """Forget all letters, because the mailbox has expired."""
        self.held.clear()
        for heap in self.returned:
            heap.clear()
        for member in self.members.values():
            member.forget_all()


class Subscribers:
    """The subscriptions to one mailbox. Each plain one gets every letter, each queue group gets it once."""

    __slots__ = ("plain", "queue_groups")

    def __init__(self) -> None:
        self.plain: dict[MailSubscription, None] = {}
        self.queue_groups: dict[str, QueueGroup] = {}

    def add(self, subscription: MailSubscription, window: int) -> None:
        if subscription.queue_group:
            self.queue_groups.setdefault(subscription.queue_group, QueueGroup(window)).join(subscription)
        else:
            self.plain[subscription] = None

    def remove(self, subscription: MailSubscription) -> list[int]:
        """Returns the letters that have to be redelivered to another member of the queue group."""
        if not subscription.queue_group:
            self.plain.pop(subscription, None)
            return []
        queue_group = self.queue_groups.get(subscription.queue_group)
        if queue_group is None:
            return []
        orphans = queue_group.leave(subscription)
        if not queue_group.members:
            del self.queue_groups[subscription.queue_group]
        return orphans

    @property
    def empty(self) -> bool:
        return not self.plain and not self.queue_groups
