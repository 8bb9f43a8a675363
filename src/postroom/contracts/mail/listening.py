"""Subscriptions: everything stored first, then what is new, with no gap and no repetition in between.

Rule 1: a listener that is still behind gets what is new at the end of what it has yet to get.
Rule 2: a replay feeds a bounded number at a time, and pauses while its connection has much waiting.
Rule 3: what a lost member of a team held goes to the others at once, in the order of delivery.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import cast

from postroom.contracts.mail import Link
from postroom.contracts.mail.shelves import Shelves
from postroom.core import mq9
from postroom.core import mq9replies as replies
from postroom.core.mailbox import Audience, Box, Letter, Listener

REPLAY_STEP = 1_000  # messages fed in one turn of the loop
RUN_MAX = 100  # messages between two looks at how much a connection has waiting
LINK_FULL_BYTES = 4 << 20

Failed = Callable[[Box, Letter], bool]
"""Told of a delivery that came to nothing; True when the letter has been put elsewhere."""


class Listening:
    """Who listens to what."""

    def __init__(self, shelves: Shelves, run_soon: Callable[[Callable[[], None]], object]) -> None:
        self.failed: Failed = lambda _box, _letter: False
        self._shelves = shelves
        self._run_soon = run_soon
        self._audiences: dict[str, Audience] = {}
        self._listeners: dict[int, dict[str, Listener]] = {}
        self._public: dict[int, dict[str, Link]] = {}
        self._paused: dict[int, list[Listener]] = {}

    # ---- coming and going ----------------------------------------------------------------------

    def subscribe(self, link: Link, sid: str, subject: str, team: str) -> None:
        """Take a subscription, or raise `Refused`."""
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
        audience.add(listener)
        box = self._shelves.boxes.get(listener.mail_id)
        stored = audience.replay(listener, box, self._shelves.now_ns()) if box is not None else ()
        listener.behind = deque(stored)
        self._feed(listener)

    def unsubscribe(self, link: Link, sid: str) -> None:
        """End a subscription; harmless when there is none."""
        self._public.get(link.number, {}).pop(sid, None)
        listener = self._listeners.get(link.number, {}).pop(sid, None)
        if listener is not None:
            self._detach(listener)

    def close(self, link: Link) -> None:
        """End all subscriptions of a connection."""
        self._public.pop(link.number, None)
        self._paused.pop(link.number, None)
        listeners = self._listeners.pop(link.number, {})
        for listener in listeners.values():
            self._detach(listener)

    def _detach(self, listener: Listener) -> None:
        listener.behind = deque()
        audience = self._audiences.get(listener.mail_id)
        if audience is None:
            return
        orphans = audience.remove(listener)
        if audience.empty:
            del self._audiences[listener.mail_id]
        box = self._shelves.boxes.get(listener.mail_id)
        if box is not None and orphans:
            self._hand_over(box, audience, listener.team, orphans)

    def _hand_over(self, box: Box, audience: Audience, team_name: str, orphans: list[int]) -> None:
        letters = [box.letters[number] for number in orphans if number in box.letters]
        for letter in sorted(letters, key=lambda letter: (letter.rank, letter.number)):
            team = audience.teams.get(team_name)
            if self.failed(box, letter) or team is None:
                continue
            chosen = team.assign(letter)
            if chosen is not None:
                self._give(box, chosen, letter)

    # ---- deliveries ----------------------------------------------------------------------------

    def push(self, box: Box, letter: Letter) -> None:
        """A new letter, to all who listen now."""
        audience = self._audiences.get(box.mail_id)
        if audience is None:
            return
        for listener in audience.receivers(letter):
            if listener.behind is None:
                self._deliver(box, listener, letter)
            else:
                listener.behind.append(letter)

    def push_all(self, box: Box, letters: list[Letter]) -> None:
        """New letters of one priority, to all who listen now."""
        audience = self._audiences.get(box.mail_id)
        if audience is None:
            return
        if audience.teams:
            for letter in letters:
                self.push(box, letter)
            return
        bit = 1 << letters[0].rank
        for listener in [each for each in audience.plain if each.ranks & bit]:
            if listener.behind is None:
                self._deliver_all(box, listener, letters)
            else:
                listener.behind.extend(letters)

    def _deliver_all(self, box: Box, listener: Listener, letters: list[Letter]) -> None:
        """Letters of one priority."""
        if listener.enveloped or self._shelves.options.receipts:
            for letter in letters:
                self._deliver(box, listener, letter)
            return
        numbered = replies.numbered
        messages = [(numbered(letter), letter.payload) for letter in letters]
        subject = replies.raw_subject(box.mail_id, letters[0].word)
        cast("Link", listener.link).deliver_many(listener.sid, subject, messages)

    def _give(self, box: Box, listener: Listener, letter: Letter) -> None:
        if listener.behind is None:
            self._deliver(box, listener, letter)
        else:
            listener.behind.append(letter)

    def _deliver(self, box: Box, listener: Listener, letter: Letter) -> None:
        make = replies.enveloped_frame if listener.enveloped else replies.raw_frame
        subject, headers, payload = make(box.mail_id, letter)
        link = cast("Link", listener.link)
        link.deliver(listener.sid, subject, "", headers, payload)
        if self._shelves.options.receipts:
            self._shelves.tell(
                "delivered",
                queue=box.label,
                message_id=f"{box.label}/{letter.number}",
                recipient=link.user or f"link-{link.number}",
                priority=letter.rank,
            )

    def _feed(self, listener: Listener) -> None:
        """Bring a listener some of what it has yet to get."""
        behind = listener.behind
        box = self._shelves.boxes.get(listener.mail_id)
        if behind is None:
            return
        for first in range(0, REPLAY_STEP, RUN_MAX):
            if not behind:
                listener.behind = None
                return
            if cast("Link", listener.link).pending_bytes > LINK_FULL_BYTES:
                self._paused.setdefault(listener.number, []).append(listener)
                return
            run = self._next_run(behind, box, min(RUN_MAX, REPLAY_STEP - first))
            if box is not None and run:
                self._deliver_all(box, listener, run)
        self._run_soon(partial(self._feed, listener))

    def _next_run(self, behind: deque[Letter], box: Box | None, most: int) -> list[Letter]:
        """The next letters of one priority, without those that have gone meanwhile."""
        now_ns = self._shelves.now_ns()
        alive = box.letters if box is not None else {}
        run: list[Letter] = []
        word, size = behind[0].word, 0
        for _ in range(min(most, len(behind))):
            if behind[0].word != word or size > LINK_FULL_BYTES:
                break
            letter = behind.popleft()
            if letter.number in alive and (letter.expires_ns == 0 or letter.expires_ns > now_ns):
                run.append(letter)
                size += letter.cost
        return run

    def drained(self, link: Link) -> None:
        """A connection can take more."""
        for listener in self._paused.pop(link.number, ()):
            self._feed(listener)

    def tick(self) -> None:
        """A connection may have taken everything without a word."""
        for listeners in list(self._paused.values()):
            self.drained(cast("Link", listeners[0].link))

    # ---- what happens to mailboxes -------------------------------------------------------------

    def removed(self, box: Box, number: int) -> None:
        audience = self._audiences.get(box.mail_id)
        if audience is not None:
            audience.forget(number)

    def gone(self, box: Box) -> None:
        """Who listens to a name goes on doing so: it can be created again. A private id cannot."""
        audience = self._audiences.get(box.mail_id)
        if audience is not None:
            for team in audience.teams.values():
                team.forget_all()
            if not box.named:
                del self._audiences[box.mail_id]
        if box.public and box.safe:
            self._announce(replies.announcement("expired", box.mail_id, "", 0))

    # ---- the public list -----------------------------------------------------------------------

    def _subscribe_public(self, link: Link, sid: str) -> None:
        self._public.setdefault(link.number, {})[sid] = link
        now_ns = self._shelves.now_ns()
        for box in self._shelves.public.values():
            if box.safe and (box.expires_ns == 0 or box.expires_ns > now_ns):
                said = replies.announcement("created", box.mail_id, box.desc, box.ttl_s)
                link.deliver(sid, mq9.PUBLIC_LIST, "", b"", said)

    def announce_created(self, box: Box) -> None:
        if box.public:
            self._announce(replies.announcement("created", box.mail_id, box.desc, box.ttl_s))

    def _announce(self, said: bytes) -> None:
        for sids in self._public.values():
            for sid, link in sids.items():
                link.deliver(sid, mq9.PUBLIC_LIST, "", b"", said)
