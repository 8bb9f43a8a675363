"""Mailboxes as decisions: what is stored, in which order it is replayed, who of a group gets it.

Rule 1: inside a rank the order is the order of the numbers, which is the order of acceptance.
Rule 2: a letter is held by at most one living member of a team. It goes to another when that one is lost.
        A member holds at most a window of letters that are as urgent as the next one or more urgent.
Rule 3: a team whose last member has gone is forgotten: the next one to join gets everything.
Rule 4: what a pull group has acknowledged never comes again to it, and nothing else is left out.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Iterable, Iterator
from heapq import heappop, heappush
from typing import Literal

import msgspec

Word = Literal["critical", "urgent", "high", "normal", "low"]
RANKS: dict[str, int] = {"critical": 0, "urgent": 1, "high": 1, "normal": 2, "low": 3}
"""The words of every dialect. A smaller rank goes first."""

RANK_COUNT = 4
EVERY_RANK = (1 << RANK_COUNT) - 1  # ranks as bits
NO_PLACE = -1
DEAD_NUMBERS_MAX = 64  # of a lane before it looks whether half of it is dead

MESSAGE_COST_BYTES = 320  # of memory, besides its own bytes: 210 to 290 measured, and its deadline
KEY_COST_BYTES = 150
TAG_COST_BYTES = 64
MAILBOX_COST_BYTES = 1_200  # 1,060 measured
GROUP_COST_BYTES = 800  # of a pull group: 600 measured

Deliver = Literal["latest", "earliest", "from_time", "from_id"]


class Account:
    """What one client has stored."""

    __slots__ = ("agents", "bytes", "card_bytes", "client", "groups", "mailboxes", "remembered")

    def __init__(self, client: str) -> None:
        self.client = client
        self.bytes = 0  # what its messages, mailboxes and pull groups cost
        self.mailboxes = self.agents = self.card_bytes = 0
        self.groups = 0  # pull groups that it made
        self.remembered = 0  # letters of which these know that they are held or acknowledged

    @property
    def empty(self) -> bool:
        return not (self.bytes or self.mailboxes or self.agents)


NOBODY = Account("")


def cost_of(size: int, key: str = "", tags: tuple[str, ...] = ()) -> int:
    """The memory that a message of so many bytes takes up."""
    cost = MESSAGE_COST_BYTES + size + sum(TAG_COST_BYTES + size_of(tag) for tag in tags)
    return cost + KEY_COST_BYTES + size_of(key) if key else cost


def mailbox_cost(mail_id: str, desc: str) -> int:
    """The memory that a mailbox takes up without its messages. The constant has room for an ASCII name."""
    return MAILBOX_COST_BYTES + size_of(desc) + (0 if mail_id.isascii() else size_of(mail_id))


def group_cost(name: str) -> int:
    """The memory that a pull group takes up. The constant has room for an ASCII name."""
    return GROUP_COST_BYTES + (0 if name.isascii() else size_of(name))


def size_of(text: str) -> int:
    """Bytes of a text in memory: as wide as its widest character, and its UTF-8 form kept beside."""
    if text.isascii():
        return len(text)
    widest = max(text)
    width = 1 if widest <= "\xff" else 2 if widest <= "\uffff" else 4
    return width * len(text) + len(text.encode("utf-8", "surrogatepass"))


class Letter(msgspec.Struct, frozen=True, gc=False):
    """One stored message. `rank` and `cost` follow from the rest, and stand here because all look at them."""

    number: int
    word: Word
    rank: int
    cost: int
    payload: bytes
    headers: bytes
    created_us: int
    durable: bool = False
    account: Account = NOBODY
    """Who sent it."""
    expires_ns: int = 0
    due_ns: int = 0
    """When it may be seen; 0 is at once."""
    key: str = ""
    tags: tuple[str, ...] = ()


class Lane:
    """Ascending numbers, such as those of one rank. What was removed stays until half of it is dead."""

    __slots__ = ("_dead", "_numbers")

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._dead = 0

    def add(self, first: int, count: int = 1) -> None:
        """Add `count` numbers in a row."""
        numbers = self._numbers
        if numbers and first < numbers[-1]:  # these waited for the disk while later ones did not
            for number in range(first, first + count):
                insort(numbers, number)
        elif count == 1:
            numbers.append(first)
        else:
            numbers += range(first, first + count)

    def lost(self, alive: Container[int]) -> None:
        """One of the numbers is dead."""
        self._dead += 1
        if self._dead > DEAD_NUMBERS_MAX and self._dead * 2 > len(self._numbers):
            self._numbers = [number for number in self._numbers if number in alive]
            self._dead = 0

    def behind(self, number: int) -> Iterator[int]:
        """The numbers above one, the dead included. The lane may change meanwhile."""
        numbers = self._numbers
        for index in range(bisect_right(numbers, number), len(numbers)):
            yield numbers[index]

    def next(self, number: int, limit: int) -> list[int]:
        """At most `limit` numbers above one, the dead included."""
        first = bisect_right(self._numbers, number)
        return self._numbers[first : first + limit]

    def last_below(self, number: int) -> int:
        """The largest number below one; 0 when there is none."""
        index = bisect_left(self._numbers, number)
        return self._numbers[index - 1] if index else 0

    def newest(self) -> int:
        return self._numbers[-1] if self._numbers else 0


class PullGroup:
    """How far a group has acknowledged, and what its members hold meanwhile."""

    __slots__ = ("_alive", "_counted", "account", "done", "handed", "through", "turn")

    def __init__(self, alive: dict[int, Letter], turn: int = 0) -> None:
        self.turn = turn  # counts how often the group was told to begin anew
        self.through = [0] * RANK_COUNT
        self.done: set[int] = set()
        self.handed: dict[int, int] = {}
        """Letter to the connection that fetched it, in the order of the fetches."""
        self.account = NOBODY
        """Who made it."""
        self._counted = 0
        self._alive = alive

    def count(self) -> None:
        """Count what it remembers against who made it."""
        remembered = len(self.done) + len(self.handed)
        self.account.remembered += remembered - self._counted
        self._counted = remembered

    def forget_all(self) -> None:
        """It ends."""
        self.done.clear()
        self.handed.clear()
        self.count()

    def next(self, lanes: "list[Lane]", link: int, limit: int, now_ns: int) -> list[Letter]:
        """What a connection can get: unacknowledged, and not with another connection."""
        found: list[Letter] = []
        for rank, lane in enumerate(lanes):
            for number in lane.behind(self.through[rank]):
                if len(found) == limit:
                    break
                letter = self._alive.get(number)
                if letter is None or number in self.done or self.handed.get(number, link) != link:
                    continue
                if letter.expires_ns == 0 or letter.expires_ns > now_ns:
                    found.append(letter)
        return found

    def hand(self, letters: Iterable[Letter], link: int) -> None:
        """A connection gets them, in this order."""
        for letter in letters:
            self.handed.pop(letter.number, None)
            self.handed[letter.number] = link
        self.count()

    def acknowledge(self, number: int) -> list[int]:
        """Acknowledge a letter, and what the same connection was handed before it. Gives the new ones.

        Not what comes behind it: a letter that is fetched again alone was handed after those behind it.
        """
        letter = self._alive.get(number)
        if letter is None or number <= self.through[letter.rank]:
            return []  # what is not there, or has been passed, need not be remembered
        link = self.handed.get(number)
        fresh = [number] if number not in self.done else []
        if link is not None:
            for earlier, holder in self.handed.items():
                if earlier == number:
                    break
                if holder == link and self._comes_before(earlier, letter):
                    fresh.append(earlier)
        self.settle(fresh)
        return fresh

    def _comes_before(self, number: int, letter: Letter) -> bool:
        return (self._alive[number].rank, number) < (letter.rank, letter.number)

    def settle(self, numbers: Iterable[int]) -> None:
        """Count letters as acknowledged."""
        for number in numbers:
            self.done.add(number)
            self.handed.pop(number, None)
        self.count()

    def advance(self, lanes: "list[Lane]") -> None:
        """Pass what is acknowledged or gone without a gap, so that it need not be remembered singly."""
        for rank, lane in enumerate(lanes):
            for number in lane.behind(self.through[rank]):
                if number in self._alive and number not in self.done:
                    break
                self.through[rank] = number
                self.done.discard(number)
        self.count()

    def unsettle(self, numbers: Iterable[int]) -> None:
        """Letters are not acknowledged after all."""
        self.done.difference_update(numbers)
        self.count()

    def forget(self, number: int) -> None:
        """The letter is gone."""
        if self.handed.pop(number, None) is not None or number in self.done:
            self.done.discard(number)
            self.count()

    def lose(self, link: int) -> list[int]:
        """A connection is gone: what it held can be fetched by others."""
        lost = [number for number, holder in self.handed.items() if holder == link]
        for number in lost:
            del self.handed[number]
        self.count()
        return lost


class Box:
    """One mailbox between its creation and its end."""

    __slots__ = (
        "account",
        "bytes",
        "cost",
        "created_us",
        "creator",
        "creator_link",
        "delayed",
        "desc",
        "expires_ns",
        "expires_us",
        "failures",
        "gone",
        "groups",
        "keys",
        "label",
        "lanes",
        "letters",
        "mail_id",
        "named",
        "public",
        "reserved",
        "reserved_bytes",
        "safe",
        "serial",
        "syncing",
        "ttl_s",
    )

    def __init__(self, serial: int, mail_id: str, *, public: bool, named: bool, label: str) -> None:
        self.serial = serial
        self.mail_id = mail_id
        self.public = public
        self.named = named
        self.label = label  # how events call it
        self.desc = ""
        self.creator = ""
        self.creator_link = 0
        self.account = NOBODY
        self.cost = 0  # of the mailbox, without its letters
        self.ttl_s = 0.0
        self.created_us = self.expires_us = self.expires_ns = 0
        self.bytes = 0
        self.reserved = self.reserved_bytes = 0  # letters that are accepted and not yet stored
        self.syncing = 0  # those of them that wait for the disk
        self.gone = False
        self.safe = False  # whether its creation is stored
        self.letters: dict[int, Letter] = {}
        self.lanes: list[Lane] = []
        self.keys: dict[str, int] = {}
        self.groups: dict[str, PullGroup] = {}
        self.delayed: dict[int, Letter] = {}
        self.failures: dict[int, int] = {}

    def add(self, letters: list[Letter], nbytes: int) -> Letter | None:
        """Store letters of one rank with numbers in a row, which cost `nbytes` together.

        Only a letter that comes alone may have a key. Returns the letter that it replaces.
        """
        if not self.lanes:
            self.lanes = [Lane() for _ in range(RANK_COUNT)]
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
        """Take a letter away; None when there is none."""
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
        """What is stored and not expired, in the order of delivery."""
        for rank, lane in enumerate(self.lanes):
            if ranks & (1 << rank):
                for number in lane.behind(0):
                    letter = self.letters.get(number)
                    if letter is not None and (letter.expires_ns == 0 or letter.expires_ns > now_ns):
                        yield letter

    def waiting_rank(self, through: list[int], ranks: int) -> int:
        """The first rank that may have a letter behind a position; `RANK_COUNT` when none has."""
        for rank, lane in enumerate(self.lanes):
            if ranks & (1 << rank) and lane.newest() > through[rank]:
                return rank
        return RANK_COUNT

    def next_run(self, through: list[int], rank: int, limit: int, nbytes: int, now_ns: int) -> list[Letter]:
        """The next letters of one word behind a position, which is moved behind them.

        There are at most `limit` of them. They have at most `nbytes`, unless the first alone has more.
        """
        found: list[Letter] = []
        size, word, last = 0, "", through[rank]
        get, lane = self.letters.get, self.lanes[rank]
        while not found and (numbers := lane.next(last, limit)):
            for number in numbers:
                letter = get(number)
                if letter is not None and not 0 < letter.expires_ns <= now_ns:
                    size += letter.cost
                    if letter.word != word or size > nbytes:
                        if found:
                            break
                        word = letter.word
                    found.append(letter)
                last = number
        through[rank] = last
        return found

    def group(self, name: str, deliver: Deliver, bound: int, *, anew: bool) -> tuple[PullGroup, bool]:
        """A pull group, and whether it begins here. `bound` is an instant (us) or a letter's number."""
        known = self.groups.get(name)
        if known is not None and not anew:
            return known, False
        group = PullGroup(self.letters, 0 if known is None else known.turn + 1)
        group.through = self.position(deliver, bound)
        if known is not None:
            known.forget_all()
            group.account = known.account
        self.groups[name] = group
        return group, True

    def position(self, deliver: Deliver, bound: int) -> list[int]:
        """For each rank, the number behind which a reader begins."""
        if not self.lanes or deliver == "earliest":
            return [0] * RANK_COUNT
        if deliver == "latest":
            return [lane.newest() for lane in self.lanes]
        if deliver == "from_id":
            return [lane.last_below(bound) for lane in self.lanes]
        return [self._last_before(lane, bound) for lane in self.lanes]

    def _last_before(self, lane: Lane, instant_us: int) -> int:
        """Wall clocks step, so the first that is late enough decides."""
        last = 0
        for number in lane.behind(0):
            letter = self.letters.get(number)
            if letter is not None and letter.created_us >= instant_us:
                break
            last = number
        return last


class Listener:
    """One subscription. `link` is whatever the caller delivers through."""

    __slots__ = ("enveloped", "link", "mail_id", "number", "place", "ranks", "sid", "team", "through")

    def __init__(
        self, link: object, number: int, sid: str, mail_id: str, ranks: int, team: str, *, enveloped: bool
    ) -> None:
        self.link = link
        self.number = number
        self.sid = sid
        self.mail_id = mail_id
        self.ranks = ranks
        self.team = team
        self.enveloped = enveloped
        self.through = [0] * RANK_COUNT
        """For each rank, the last number it got. Only kept while it stands in a backlog."""
        self.place = NO_PLACE
        """The queue of the backlog that it stands in."""

    @property
    def waits(self) -> bool:
        """Whether it stands in a backlog: what is new for it has to wait there, too."""
        return self.place != NO_PLACE


class Backlog:
    """The listeners of one connection that have letters waiting, by the rank of the first of these."""

    __slots__ = ("_queues", "is_scheduled")

    def __init__(self) -> None:
        self._queues: list[dict[Listener, None]] = [{} for _ in range(RANK_COUNT)]
        self.is_scheduled = False
        """Whether somebody goes on with it in the next turn of the loop."""

    def __bool__(self) -> bool:
        return any(self._queues)

    def put(self, listener: Listener, rank: int) -> None:
        """Place a listener behind the others of this rank."""
        self.remove(listener)
        self._queues[rank][listener] = None
        listener.place = rank

    def promote(self, listener: Listener, rank: int) -> None:
        """A letter of this rank has come for a listener."""
        if rank < listener.place:
            self.put(listener, rank)

    def remove(self, listener: Listener) -> None:
        if listener.waits:
            del self._queues[listener.place][listener]
            listener.place = NO_PLACE

    def first(self) -> Listener:
        """The listener whose turn it is."""
        return next(iter(next(queue for queue in self._queues if queue)))


class Member:
    """One connection in a team, and the undeleted letters that it was given."""

    __slots__ = ("_counts", "held", "listeners")

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.held: dict[int, int] = {}
        """Number to rank."""
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
        """Whether it may get a letter of a rank. Less urgent letters that it holds do not count."""
        return not window or sum(self._counts[: rank + 1]) < window


class Team:
    """A queue group: each letter to one member that has room for it."""

    __slots__ = ("_through", "held", "is_deleting", "members", "returned", "window")

    def __init__(self, window: int) -> None:
        self.window = window
        """Undeleted letters of a member; 0 is no limit."""
        self.is_deleting = False
        """Whether a member has ever deleted a letter that the team held."""
        self.members: dict[int, Member] = {}
        """By connection. Who got a letter last stands at the end."""
        self.held: dict[int, Member] = {}
        self.returned: list[list[int]] = [[] for _ in range(RANK_COUNT)]
        """Numbers that were held and have to go to another member, a heap for each rank."""
        self._through = [0] * RANK_COUNT
        """For each rank, the number up to which everything was given to somebody, or was returned."""

    def join(self, listener: Listener) -> None:
        self.members.setdefault(listener.number, Member()).listeners.append(listener)

    def leave(self, listener: Listener) -> list[int]:
        """End a subscription. Gives what its connection held, when that has none left; ascending."""
        member = self.members.get(listener.number)
        if member is None or listener not in member.listeners:
            return []
        member.listeners.remove(listener)
        if member.listeners:
            return []
        del self.members[listener.number]
        for number in member.held:
            del self.held[number]
        return sorted(member.held)

    def give_back(self, letter: Letter) -> None:
        """Offer a letter again: nobody holds it any more."""
        heappush(self.returned[letter.rank], letter.number)

    def came(self, letter: Letter) -> None:
        """A new letter. It is found behind the position, unless later ones of its rank have been given."""
        if letter.number <= self._through[letter.rank]:
            self.give_back(letter)

    def offer(self, box: Box) -> tuple[Listener, int] | None:
        """Who gets the next letter, and of which rank it is; None when nobody can get one.

        Of those who want the rank, have room and wait for nothing, it is the one that holds the fewest.
        """
        for rank in range(RANK_COUNT):
            if self._has_letter(box, rank):
                chosen = self._choose(rank)
                if chosen is not None:
                    return chosen, rank
        return None

    def rank_for(self, listener: Listener, box: Box) -> int:
        """The rank of the next letter that one listener can get; `RANK_COUNT` when there is none."""
        member = self.members[listener.number]
        for rank in range(RANK_COUNT):
            if (
                listener.ranks & (1 << rank)
                and self._has_letter(box, rank)
                and member.has_room(rank, self.window)
            ):
                return rank
        return RANK_COUNT

    def take(self, listener: Listener, rank: int, box: Box, now_ns: int) -> Letter | None:
        """Give the next letter of a rank to a listener; None when those left of it are gone."""
        letter = self._next(rank, box, now_ns)
        if letter is not None:
            member = self.members.pop(listener.number)
            self.members[listener.number] = member
            member.hold(letter)
            self.held[letter.number] = member
        return letter

    def is_held_up(self, box: Box) -> bool:
        """Whether letters wait for no other reason than that all windows are full."""
        if not self.window or self.offer(box) is not None:
            return False
        wanted = 0
        for member in self.members.values():
            for listener in member.listeners:
                wanted |= 0 if listener.waits else listener.ranks
        return any(wanted & (1 << rank) and self._has_letter(box, rank) for rank in range(RANK_COUNT))

    def _has_letter(self, box: Box, rank: int) -> bool:
        return bool(self.returned[rank]) or box.waiting_rank(self._through, 1 << rank) == rank

    def _next(self, rank: int, box: Box, now_ns: int) -> Letter | None:
        returned = self.returned[rank]
        while returned:
            letter = box.letters.get(heappop(returned))
            if letter is not None and (letter.expires_ns == 0 or letter.expires_ns > now_ns):
                return letter
        return next(iter(box.next_run(self._through, rank, 1, 0, now_ns)), None) if box.lanes else None

    def _choose(self, rank: int) -> Listener | None:
        bit = 1 << rank
        best: Member | None = None
        chosen: Listener | None = None
        for member in self.members.values():
            if best is not None and len(member.held) >= len(best.held):
                continue
            if not member.has_room(rank, self.window):
                continue
            for listener in member.listeners:
                if listener.ranks & bit and not listener.waits:
                    best, chosen = member, listener
                    break
        return chosen

    def forget(self, number: int) -> bool:
        """The letter is gone. Whether a member held it."""
        member = self.held.pop(number, None)
        if member is not None:
            member.forget(number)
        return member is not None

    def forget_all(self) -> None:
        """The mailbox is gone."""
        self.held.clear()
        for heap in self.returned:
            heap.clear()
        for member in self.members.values():
            member.forget_all()


class Audience:
    """Who listens to one address: each plain listener gets everything, each team once."""

    __slots__ = ("plain", "teams")

    def __init__(self) -> None:
        self.plain: dict[Listener, None] = {}
        self.teams: dict[str, Team] = {}

    def add(self, listener: Listener, window: int) -> None:
        if listener.team:
            self.teams.setdefault(listener.team, Team(window)).join(listener)
        else:
            self.plain[listener] = None

    def remove(self, listener: Listener) -> list[int]:
        """Gives the letters that have to go to another member of the team."""
        if not listener.team:
            self.plain.pop(listener, None)
            return []
        team = self.teams.get(listener.team)
        if team is None:
            return []
        orphans = team.leave(listener)
        if not team.members:
            del self.teams[listener.team]
        return orphans

    @property
    def empty(self) -> bool:
        return not self.plain and not self.teams
