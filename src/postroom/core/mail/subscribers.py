"""The subscriptions to a mailbox as pure data: backlogs, and which member of a queue group gets a letter.

Rule 1: at most one connected member of a queue group holds a letter. When the member is lost, another member
        gets it. A full window of equally or more urgent letters stops deliveries to a member; before the
        first delete from its window, one full of any letters does.
Rule 2: a queue group without members is forgotten: the next subscription to join gets everything.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush

from postroom.core.mail.mailbox import RANK_COUNT, Letter, Mailbox

NOT_QUEUED = -1


@dataclass(slots=True, eq=False)
class MailSubscription:
    """One subscription to a mailbox. `link` is the connection, which is opaque here."""

    link: object
    number: int
    sid: str
    key: str
    """Of the mailbox."""
    ranks: int
    queue_group: str
    enveloped: bool
    through: list[int] = field(default_factory=lambda: [0] * RANK_COUNT)
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
        """Undeleted letters that a member may hold; 0 means no limit."""
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
