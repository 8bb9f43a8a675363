"""Subscriptions: everything stored first, then what is new, with no gap and no repetition in between.

Rule 1: a connection is handed a small window of bytes. What it has no room for stays in its mailbox, and is
        handed over by priority when the connection has taken some: a critical letter waits for nothing else.
Rule 2: a listener that waits is a position in its mailbox, and holds no letters.
Rule 3: one turn of the loop feeds a bounded number of letters to a connection.
Rule 4: what a lost member of a team held goes to the others at once, in the order of delivery.
"""

from collections.abc import Callable
from functools import partial
from typing import cast

from postroom.contracts.mail import LINK_FULL_BYTES, Link
from postroom.contracts.mail.mailboxes import Mailboxes
from postroom.core import mq9
from postroom.core import mq9replies as replies
from postroom.core.mailbox import RANK_COUNT, Audience, Backlog, Box, Letter, Listener, Team
from postroom.core.times import NANOS_PER_S

REPLAY_STEP = 1_000  # messages fed in one turn of the loop
RUN_MAX = 250  # messages between two looks at how much a connection has waiting
GROUP_PATIENCE_S = 1.0  # with all windows full and no delete ever, before the windows of a group grow
GROUP_GROWTH = 4

Failed = Callable[[Box, Letter], bool]
"""Told of a delivery that came to nothing; True when the letter has been put elsewhere."""


class Subscriptions:
    """Who listens to what."""

    def __init__(self, shelves: Mailboxes, run_soon: Callable[[Callable[[], None]], object]) -> None:
        self.failed: Failed = lambda _box, _letter: False
        self._shelves = shelves
        self._run_soon = run_soon
        self._audiences: dict[str, Audience] = {}
        self._listeners: dict[int, dict[str, Listener]] = {}
        self._public: dict[int, dict[str, Link]] = {}
        self._unlisted: dict[int, dict[str, int]] = {}
        """Connection to its subscriptions that still get the public list, and the last serial of each."""
        self._lists_scheduled: set[int] = set()
        """Connections that are told more of the public list in the next turn of the loop."""
        self._backlogs: dict[int, Backlog] = {}
        """Connection to its listeners that have letters waiting."""
        self._restless: dict[tuple[str, str], None] = {}
        """Teams, by mailbox and name, that are dealt to in the next turn of the loop."""
        self._held_up: dict[tuple[str, str], int] = {}
        """Teams in which nobody deletes, and since when all their windows are full."""
        self._is_dealing = False

    # ---- coming and going ----------------------------------------------------------------------

    def subscribe(self, link: Link, sid: str, subject: str, team: str) -> None:
        """Take a subscription, or raise `Mq9Error`."""
        self.unsubscribe(link, sid)
        if subject == mq9.PUBLIC_LIST:
            self._subscribe_public(link, sid)
            return
        mail_id, ranks = mq9.subscription(subject)
        self._shelves.find(mail_id)
        enveloped = replies.is_enveloped(self._shelves.options.envelope, link.name)
        listener = Listener(link, link.number, sid, mail_id, ranks, team, enveloped=enveloped)
        self._listeners.setdefault(link.number, {})[sid] = listener
        # What was sent before it, and is on its way to the disk, has its place in the order of the replay.
        if not self._shelves.after_earlier(mail_id, self._begin, listener):
            self._begin(listener)

    def _begin(self, listener: Listener) -> None:
        """Replay what is stored; from here on nothing passes the listener by."""
        if self._listeners.get(listener.number, {}).get(listener.sid) is not listener:
            return
        audience = self._audiences.setdefault(listener.mail_id, Audience())
        audience.add(listener, self._shelves.options.group_window)
        if listener.team:
            self._deal(listener.mail_id, listener.team)
        else:
            self._wait(listener, 0)

    def unsubscribe(self, link: Link, sid: str) -> None:
        """End a subscription; harmless when there is none."""
        self._public.get(link.number, {}).pop(sid, None)
        self._end_list(link, sid)
        listeners = self._listeners.get(link.number, {})
        listener = listeners.pop(sid, None)
        if not listeners:
            self._listeners.pop(link.number, None)
        if listener is not None:
            self._detach(listener)

    def close(self, link: Link) -> None:
        """End all subscriptions of a connection."""
        self._public.pop(link.number, None)
        self._unlisted.pop(link.number, None)
        listeners = self._listeners.pop(link.number, {})
        for listener in listeners.values():
            self._detach(listener)

    def _detach(self, listener: Listener) -> None:
        self._leave_backlog(listener)
        audience = self._audiences.get(listener.mail_id)
        if audience is None:
            return
        orphans = audience.remove(listener)
        if audience.empty:
            del self._audiences[listener.mail_id]
        box = self._shelves.boxes.get(listener.mail_id)
        if box is not None and orphans:
            self._hand_over(box, audience.teams.get(listener.team), orphans)
            self._deal(listener.mail_id, listener.team)

    def _hand_over(self, box: Box, team: Team | None, orphans: list[int]) -> None:
        """Offer letters of a lost member to the rest of its team, except those that go to the dead ones."""
        for number in orphans:
            letter = box.letters.get(number)
            if letter is not None and not self.failed(box, letter) and team is not None:
                team.give_back(letter)

    # ---- deliveries ----------------------------------------------------------------------------

    def push(self, box: Box, letters: list[Letter]) -> None:
        """New letters of one priority, to all who listen now."""
        audience = self._audiences.get(box.mail_id)
        if audience is None:
            return
        bit = 1 << letters[0].rank
        for listener in [each for each in audience.plain if each.ranks & bit]:
            self._offer(box, listener, letters)
        for name, team in list(audience.teams.items()):
            for letter in letters:
                team.came(letter)
            self._promote_members(team, letters[0].rank)
            self._deal(box.mail_id, name)

    def _offer(self, box: Box, listener: Listener, letters: list[Letter]) -> None:
        """New letters, to a listener: at once when its connection has room for them."""
        link, rank = cast("Link", listener.link), letters[0].rank
        if (
            letters[-1].number != box.lanes[rank].newest()
        ):  # later ones came first, so a position cannot be before them
            self._deliver(box, listener, letters)
        elif listener.waits:
            self._backlogs[listener.number].promote(listener, rank)
        elif link.pending_bytes <= LINK_FULL_BYTES and _fits(letters):
            self._deliver(box, listener, letters)
        else:
            listener.through = [lane.newest() for lane in box.lanes]
            listener.through[rank] = letters[0].number - 1
            self._wait(listener, rank)

    def _deliver(self, box: Box, listener: Listener, letters: list[Letter]) -> None:
        """Hand over letters of one word."""
        link = cast("Link", listener.link)
        form = replies.enveloped if listener.enveloped else replies.raw
        subject, messages = form(box.mail_id, letters)
        if link.headers:
            link.deliver(listener.sid, subject, "", messages)
        else:  # without headers the message id stands in the reply subject
            for letter, message in zip(letters, messages, strict=True):
                link.deliver(
                    listener.sid, subject, replies.delete_subject(box.mail_id, letter.number), [message]
                )
        if self._shelves.options.receipts:
            self._tell_delivered(box, link, letters)

    def _tell_delivered(self, box: Box, link: Link, letters: list[Letter]) -> None:
        for letter in letters:
            self._shelves.tell(
                "delivered",
                queue=box.label,
                message_id=f"{box.label}/{letter.number}",
                recipient=link.user or f"link-{link.number}",
                priority=letter.rank,
            )

    # ---- what waits for a connection -----------------------------------------------------------

    def _wait(self, listener: Listener, rank: int) -> None:
        """Let a listener take its turn among those of its connection that have letters waiting."""
        backlog = self._backlogs.setdefault(listener.number, Backlog())
        backlog.put(listener, rank)
        if not backlog.is_scheduled:
            self._feed(cast("Link", listener.link))

    def _leave_backlog(self, listener: Listener) -> None:
        backlog = self._backlogs.get(listener.number)
        if backlog is not None:
            backlog.remove(listener)
            if not backlog:
                del self._backlogs[listener.number]

    def _feed(self, link: Link) -> None:
        """Hand a connection what waits for it, the most urgent first, as far as there is room."""
        backlog = self._backlogs.get(link.number)
        left = REPLAY_STEP
        while backlog and left > 0:
            if link.pending_bytes > LINK_FULL_BYTES:
                link.want_room()
                return
            left -= max(1, self._feed_listener(backlog, backlog.first(), min(RUN_MAX, left)))
        if backlog:
            backlog.is_scheduled = True
            self._run_soon(partial(self._go_on, link))

    def _go_on(self, link: Link) -> None:
        backlog = self._backlogs.get(link.number)
        if backlog is not None:
            backlog.is_scheduled = False
            self._feed(link)

    def _feed_listener(self, backlog: Backlog, listener: Listener, limit: int) -> int:
        """Hand over some letters of one word; gives how many."""
        box = self._shelves.boxes.get(listener.mail_id)
        rank = RANK_COUNT if box is None else self._waiting_rank(box, listener)
        if box is None or rank == RANK_COUNT:
            self._leave_backlog(listener)
            if box is not None and listener.team:
                self._note_held_up(box, listener.team)
            return 0
        is_its_turn = rank <= listener.place
        backlog.put(listener, rank)  # behind the others of that rank, and before delivering, which can end it
        if not is_its_turn:
            return 0
        letters = self._next_run(box, listener, rank, limit)
        if letters:
            self._deliver(box, listener, letters)
        return len(letters)

    def _waiting_rank(self, box: Box, listener: Listener) -> int:
        if not listener.team:
            return box.waiting_rank(listener.through, listener.ranks)
        return self._audiences[listener.mail_id].teams[listener.team].rank_for(listener, box)

    def _next_run(self, box: Box, listener: Listener, rank: int, limit: int) -> list[Letter]:
        now_ns = self._shelves.now_ns()
        if not listener.team:
            return box.next_run(listener.through, rank, limit, LINK_FULL_BYTES, now_ns)
        team = self._audiences[listener.mail_id].teams[listener.team]
        letter = team.take(listener, rank, box, now_ns)
        return [letter] if letter is not None else []

    def drained(self, link: Link) -> None:
        """A connection can take more."""
        backlog = self._backlogs.get(link.number)
        if backlog and not backlog.is_scheduled:
            self._feed(link)
        self._tell_list(link)

    def tick(self) -> None:
        """A connection may have taken everything without a word, and a group may not delete at all."""
        for backlog in list(self._backlogs.values()):
            self.drained(cast("Link", backlog.first().link))
        for number, sids in list(self._unlisted.items()):
            self._tell_list(self._public[number][next(iter(sids))])
        now_ns = self._shelves.now_ns()
        for (mail_id, name), since_ns in list(self._held_up.items()):
            if now_ns - since_ns >= GROUP_PATIENCE_S * NANOS_PER_S:
                del self._held_up[mail_id, name]
                self._widen(mail_id, name)

    # ---- queue groups --------------------------------------------------------------------------

    def _team(self, mail_id: str, name: str) -> Team | None:
        audience = self._audiences.get(mail_id)
        return audience.teams.get(name) if audience is not None else None

    def _deal(self, mail_id: str, name: str) -> None:
        """Give the letters of a team to its members, as far as these have room."""
        if self._is_dealing:  # what was dealt ended a subscription
            self._deal_soon(mail_id, name)
            return
        team, box = self._team(mail_id, name), self._shelves.boxes.get(mail_id)
        if team is None or box is None:
            return
        self._is_dealing = True
        try:
            self._deal_some(box, team)
        finally:
            self._is_dealing = False
        if team.offer(box) is not None:
            self._deal_soon(mail_id, name)
        else:
            self._note_held_up(box, name)

    def _deal_some(self, box: Box, team: Team) -> None:
        now_ns = self._shelves.now_ns()
        for _ in range(REPLAY_STEP):
            offer = team.offer(box)
            if offer is None:
                return
            listener, rank = offer
            if cast("Link", listener.link).pending_bytes > LINK_FULL_BYTES:
                self._wait(listener, rank)
                continue
            letter = team.take(listener, rank, box, now_ns)
            if letter is not None:
                self._deliver(box, listener, [letter])

    def _deal_soon(self, mail_id: str, name: str) -> None:
        if not self._restless:
            self._run_soon(self._deal_restless)
        self._restless[mail_id, name] = None

    def _deal_restless(self) -> None:
        teams, self._restless = self._restless, {}
        for mail_id, name in teams:
            self._deal(mail_id, name)

    def _promote_members(self, team: Team, rank: int) -> None:
        """A letter has come, which members that wait for their connections may want."""
        for member in team.members.values():
            for listener in member.listeners:
                if listener.waits and listener.ranks & (1 << rank):
                    self._backlogs[listener.number].promote(listener, rank)

    def _note_held_up(self, box: Box, name: str) -> None:
        team = self._team(box.mail_id, name)
        if team is not None and not team.is_deleting and team.is_held_up(box):
            self._held_up.setdefault((box.mail_id, name), self._shelves.now_ns())

    def _widen(self, mail_id: str, name: str) -> None:
        """Let the windows of a group grow in which nobody deletes: it must not wait for that for ever."""
        team, box = self._team(mail_id, name), self._shelves.boxes.get(mail_id)
        if team is not None and box is not None and not team.is_deleting and team.is_held_up(box):
            team.window *= GROUP_GROWTH
            self._deal(mail_id, name)

    def deleting(self, box: Box, number: int) -> None:
        """Somebody deletes a letter. A group that does so keeps to its window from here on."""
        audience = self._audiences.get(box.mail_id)
        for team in audience.teams.values() if audience is not None else ():
            if number in team.held:
                team.is_deleting = True
                team.window = self._shelves.options.group_window

    # ---- what happens to mailboxes -------------------------------------------------------------

    def removed(self, box: Box, number: int) -> None:
        """A letter is gone: whoever held it has room for another."""
        audience = self._audiences.get(box.mail_id)
        for name, team in audience.teams.items() if audience is not None else ():
            if team.forget(number):
                self._deal_soon(box.mail_id, name)

    def gone(self, box: Box) -> None:
        """Who listens to a name goes on doing so: it can be created again. A private id cannot."""
        audience = self._audiences.get(box.mail_id)
        if audience is not None:
            for team in audience.teams.values():
                team.forget_all()
            if not box.named:
                del self._audiences[box.mail_id]
        if box.public and box.safe:
            self._announce(box, replies.announcement("expired", box.mail_id, "", 0))

    # ---- the public list -----------------------------------------------------------------------

    def _subscribe_public(self, link: Link, sid: str) -> None:
        self._public.setdefault(link.number, {})[sid] = link
        self._unlisted.setdefault(link.number, {})[sid] = 0
        self._tell_list(link)

    def _tell_list(self, link: Link) -> None:
        """Tell a connection of the public mailboxes that there are, as far as it has room in this turn."""
        if link.number in self._lists_scheduled:
            return
        for _ in range(REPLAY_STEP):
            sids = self._unlisted.get(link.number)
            if not sids:
                return
            if link.pending_bytes > LINK_FULL_BYTES:
                link.want_room()
                return
            sid, through = next(iter(sids.items()))
            serials = self._shelves.public.next(through, 1)
            if serials:
                sids[sid] = serials[0]  # before delivering, which can end it
                self._tell_listed(link, sid, serials[0])
            else:
                self._end_list(link, sid)
        self._lists_scheduled.add(link.number)
        self._run_soon(partial(self._go_on_list, link))

    def _go_on_list(self, link: Link) -> None:
        self._lists_scheduled.discard(link.number)
        self._tell_list(link)

    def _tell_listed(self, link: Link, sid: str, serial: int) -> None:
        box = self._shelves.by_serial.get(serial)
        if box is not None and box.safe and not 0 < box.expires_ns <= self._shelves.now_ns():
            said = replies.announcement("created", box.mail_id, box.desc, box.ttl_s)
            link.deliver(sid, mq9.PUBLIC_LIST, "", [(b"", said)])

    def _end_list(self, link: Link, sid: str) -> None:
        sids = self._unlisted.get(link.number, {})
        sids.pop(sid, None)
        if not sids:
            self._unlisted.pop(link.number, None)

    def announce_created(self, box: Box) -> None:
        if box.public:
            self._announce(box, replies.announcement("created", box.mail_id, box.desc, box.ttl_s))

    def _announce(self, box: Box, said: bytes) -> None:
        """Tell of a mailbox whoever has been told of all up to it; the others find it in their list."""
        for number, sids in list(self._public.items()):
            unlisted = self._unlisted.get(number, {})
            for sid, link in list(sids.items()):  # a delivery can end a subscription
                if box.serial <= unlisted.get(sid, box.serial):
                    link.deliver(sid, mq9.PUBLIC_LIST, "", [(b"", said)])


def _fits(letters: list[Letter]) -> bool:
    """Whether letters may be handed to a connection that has nothing waiting, all at once."""
    return len(letters) == 1 or sum([letter.cost for letter in letters]) <= LINK_FULL_BYTES
