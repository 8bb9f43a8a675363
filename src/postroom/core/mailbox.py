"""Mailboxes as decisions: what is stored, in which order it is replayed, who of a group gets it.

Rule 1: inside a rank the order is the order of the numbers, which is the order of acceptance.
Rule 2: a letter is held by at most one living member of a team. It goes to another when that one is lost.
Rule 3: a team whose last member has gone is forgotten: the next one to join gets everything.
Rule 4: what a pull group has acknowledged never comes again to it, and nothing else is left out.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

Word = Literal["critical", "urgent", "high", "normal", "low"]
RANKS: dict[str, int] = {"critical": 0, "urgent": 1, "high": 1, "normal": 2, "low": 3}
"""The words of every dialect. A smaller rank goes first."""

RANK_COUNT = 4
EVERY_RANK = (1 << RANK_COUNT) - 1  # ranks as bits
DEAD_NUMBERS_MAX = 64  # of a lane before it looks whether half of it is dead

MESSAGE_COST_BYTES = 320  # of memory, besides its own bytes: 210 to 290 measured, and its deadline
KEY_COST_BYTES = 150
TAG_COST_BYTES = 64
MAILBOX_COST_BYTES = 1_200  # 1,060 measured
GROUP_COST_BYTES = 800  # of a pull group: 600 measured

Deliver = Literal["latest", "earliest", "from_time", "from_id"]


class Account:
    """What one client has stored."""

    __slots__ = ("agents", "bytes", "card_bytes", "client", "mailboxes")

    def __init__(self, client: str) -> None:
        self.client = client
        self.bytes = 0  # what its messages and mailboxes cost
        self.mailboxes = self.agents = self.card_bytes = 0

    @property
    def empty(self) -> bool:
        return not (self.bytes or self.mailboxes or self.agents)


NOBODY = Account("")


def cost_of(size: int, key: str = "", tags: tuple[str, ...] = ()) -> int:
    """The memory that a message of so many bytes takes up."""
    cost = MESSAGE_COST_BYTES + size + TAG_COST_BYTES * len(tags)
    return cost + KEY_COST_BYTES + len(key) if key else cost


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
    """The numbers of one rank, ascending. What was removed stays in it until half of it is dead."""

    __slots__ = ("_dead", "_numbers")

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._dead = 0

    def add(self, number: int) -> None:
        self._numbers.append(number)

    def extend(self, numbers: Iterable[int]) -> None:
        self._numbers.extend(numbers)

    def lost(self, alive: dict[int, Letter]) -> None:
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

    def last_below(self, number: int) -> int:
        """The largest number below one; 0 when there is none."""
        index = bisect_left(self._numbers, number)
        return self._numbers[index - 1] if index else 0

    def newest(self) -> int:
        return self._numbers[-1] if self._numbers else 0


class PullGroup:
    """How far a group has acknowledged, and what its members hold meanwhile."""

    __slots__ = ("_alive", "done", "handed", "through", "turn")

    def __init__(self, alive: dict[int, Letter], turn: int = 0) -> None:
        self.turn = turn  # counts how often the group was told to begin anew
        self.through = [0] * RANK_COUNT
        self.done: set[int] = set()
        self.handed: dict[int, int] = {}
        """Letter to the connection that fetched it, in the order of the fetches."""
        self._alive = alive

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

    def advance(self, lanes: "list[Lane]") -> None:
        """Pass what is acknowledged or gone without a gap, so that it need not be remembered singly."""
        for rank, lane in enumerate(lanes):
            for number in lane.behind(self.through[rank]):
                if number in self._alive and number not in self.done:
                    break
                self.through[rank] = number
                self.done.discard(number)

    def forget(self, number: int) -> None:
        """The letter is gone."""
        self.handed.pop(number, None)
        self.done.discard(number)

    def lose(self, link: int) -> list[int]:
        """A connection is gone: what it held can be fetched by others."""
        lost = [number for number, holder in self.handed.items() if holder == link]
        for number in lost:
            del self.handed[number]
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
        self.cost = 0  # of the mailbox and its pull groups, without its letters
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

    def add(self, letter: Letter) -> Letter | None:
        """Store a letter. Gives the one that its key replaces."""
        if not self.lanes:
            self.lanes = [Lane() for _ in range(RANK_COUNT)]
        replaced = None
        if letter.key:
            replaced = self.remove(self.keys.get(letter.key, 0))
            self.keys[letter.key] = letter.number
        self.letters[letter.number] = letter
        self.bytes += letter.cost
        self.lanes[letter.rank].add(letter.number)
        return replaced

    def add_plain(self, letters: list[Letter], nbytes: int) -> None:
        """Store letters of one rank that have no keys."""
        if not self.lanes:
            self.lanes = [Lane() for _ in range(RANK_COUNT)]
        by_number = {letter.number: letter for letter in letters}
        self.letters.update(by_number)
        self.bytes += nbytes
        self.lanes[letters[0].rank].extend(by_number)

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

    def group(self, name: str, deliver: Deliver, bound: int, *, anew: bool) -> tuple[PullGroup, bool]:
        """A pull group, and whether it begins here. `bound` is an instant (us) or a letter's number."""
        known = self.groups.get(name)
        if known is not None and not anew:
            return known, False
        group = PullGroup(self.letters, 0 if known is None else known.turn + 1)
        group.through = self.position(deliver, bound)
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

    __slots__ = ("behind", "enveloped", "link", "mail_id", "number", "ranks", "sid", "team")

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
        self.behind: deque[Letter] | None = None
        """What it has still to get before what is new; None when it is up to date."""


class Member:
    """One connection in a team."""

    __slots__ = ("held", "listeners")

    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.held: set[int] = set()


class Team:
    """A queue group: each letter to one member."""

    __slots__ = ("held", "members")

    def __init__(self) -> None:
        self.members: dict[int, Member] = {}
        self.held: dict[int, Member] = {}

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

    def assign(self, letter: Letter) -> Listener | None:
        """Who gets a letter: of those who want its rank, the one who holds the fewest."""
        bit = 1 << letter.rank
        best: Member | None = None
        chosen: Listener | None = None
        for member in self.members.values():
            if best is not None and len(member.held) >= len(best.held):
                continue
            for listener in member.listeners:
                if listener.ranks & bit:
                    best, chosen = member, listener
                    break
        if best is not None:
            best.held.add(letter.number)
            self.held[letter.number] = best
        return chosen

    def forget(self, number: int) -> None:
        """The letter is gone."""
        member = self.held.pop(number, None)
        if member is not None:
            member.held.discard(number)

    def forget_all(self) -> None:
        """The mailbox is gone."""
        self.held.clear()
        for member in self.members.values():
            member.held.clear()


class Audience:
    """Who listens to one address: each plain listener gets everything, each team once."""

    __slots__ = ("plain", "teams")

    def __init__(self) -> None:
        self.plain: dict[Listener, None] = {}
        self.teams: dict[str, Team] = {}

    def add(self, listener: Listener) -> None:
        if listener.team:
            self.teams.setdefault(listener.team, Team()).join(listener)
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

    def receivers(self, letter: Letter) -> list[Listener]:
        """To whom a new letter goes."""
        bit = 1 << letter.rank
        found = [listener for listener in self.plain if listener.ranks & bit]
        if not self.teams:
            return found
        for team in self.teams.values():
            chosen = team.assign(letter)
            if chosen is not None:
                found.append(chosen)
        return found

    def replay(self, listener: Listener, box: Box, now_ns: int) -> list[Letter]:
        """What a listener that has just been added gets of what is stored."""
        if not listener.team:
            return list(box.replay(listener.ranks, now_ns))
        team = self.teams[listener.team]
        member = team.members[listener.number]
        given = []
        for letter in box.replay(listener.ranks, now_ns):
            # Whoever was there before has been asked already, so nobody else wants it.
            if letter.number not in team.held:
                team.held[letter.number] = member
                member.held.add(letter.number)
                given.append(letter)
        return given

    def forget(self, number: int) -> None:
        for team in self.teams.values():
            team.forget(number)

    @property
    def empty(self) -> bool:
        return not self.plain and not self.teams
