"""Subscriptions to mailboxes: first everything stored, then new letters, without gaps and repetitions.

Rule 1: a connection has a small window of letters and bytes. Letters that do not fit stay in their mailbox,
        and are delivered by priority when the connection has drained: a critical letter overtakes all others.
Rule 2: a subscription in the backlog is a position in its mailbox. It holds no letters.
Rule 3: one turn of the loop delivers a bounded number of letters to a connection.
Rule 4: the letters of a lost member of a queue group are redelivered to the others at once, in order.
"""

from collections.abc import Callable
from functools import partial
from typing import cast

from postroom.contracts.mail import LINK_FULL_BYTES, MESSAGE_LEAST_BYTES, Link
from postroom.contracts.mail.mailboxes import Mailboxes
from postroom.contracts.mail.public_list import PublicList
from postroom.core.mail import mq9
from postroom.core.mail import mq9replies as replies
from postroom.core.mail.mailbox import RANK_COUNT, Letter, Mailbox
from postroom.core.mail.subscribers import ConnectionBacklog, MailSubscription, QueueGroup, Subscribers

RUN_MAX = 250  # messages handed at once to a connection that has sent everything


class Subscriptions:
    """All subscriptions of one server."""

    def __init__(
        self,
        mailboxes: Mailboxes,
        run_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self._mailboxes = mailboxes
        self._limits = mailboxes.options.limits
        self._run_soon = run_soon
        self._public_list = PublicList(mailboxes, run_soon)
        self._subscribers: dict[str, Subscribers] = {}
        """Subscribers by the key of the mailbox, as the other keys here."""
        self._by_link: dict[int, dict[str, MailSubscription]] = {}
        """Subscriptions by connection and sid."""
        self._backlogs: dict[int, ConnectionBacklog] = {}
        """Backlogs by connection."""
        self._groups_scheduled: dict[tuple[str, str], None] = {}
        """Queue groups, by mailbox and name, that get letters in the next turn of the loop."""
        self._is_dispatching = False

    # ---- subscribe and unsubscribe -------------------------------------------------------------

    def subscribe(self, link: Link, sid: str, subject: str, queue_group: str) -> None:
        """Accept a subscription, or raise `Mq9Error`."""
        self.unsubscribe(link, sid)
        if subject == mq9.PUBLIC_LIST:
            self._public_list.subscribe(link, sid)
            return
        mail_id, ranks = mq9.subscription(subject)
        box = self._mailboxes.find(mail_id, link)
        enveloped = replies.is_enveloped(self._mailboxes.options.envelope, link.name)
        subscription = MailSubscription(
            link, link.number, sid, box.key, ranks, queue_group, enveloped=enveloped
        )
        self._by_link.setdefault(link.number, {})[sid] = subscription
        # The replay starts after letters that wait for the disk are stored, so that they are in its order.
        if not self._mailboxes.journal.after_earlier(box, self._begin, subscription):
            self._begin(subscription)

    def _begin(self, subscription: MailSubscription) -> None:
        """Start the replay. From here on the subscription misses nothing."""
        if self._by_link.get(subscription.number, {}).get(subscription.sid) is not subscription:
            return
        subscribers = self._subscribers.setdefault(subscription.key, Subscribers())
        subscribers.add(subscription, self._mailboxes.options.group_window)
        if subscription.queue_group:
            self._dispatch(subscription.key, subscription.queue_group)
        else:
            self._enqueue(subscription, 0)

    def unsubscribe(self, link: Link, sid: str) -> None:
        """End a subscription. Unknown subscriptions are ignored."""
        self._public_list.unsubscribe(link, sid)
        subscriptions = self._by_link.get(link.number, {})
        subscription = subscriptions.pop(sid, None)
        if not subscriptions:
            self._by_link.pop(link.number, None)
        if subscription is not None:
            self._detach(subscription)

    def close(self, link: Link) -> None:
        """End all subscriptions of a connection."""
        self._public_list.close(link)
        for subscription in self._by_link.pop(link.number, {}).values():
            self._detach(subscription)

    def _detach(self, subscription: MailSubscription) -> None:
        self._leave_backlog(subscription)
        key = subscription.key
        subscribers = self._subscribers.get(key)
        if subscribers is None:
            return
        orphans = subscribers.remove(subscription)
        if subscribers.empty:
            del self._subscribers[key]
        box = self._mailboxes.by_key.get(key)
        if box is not None and orphans:
            group = subscribers.queue_groups.get(subscription.queue_group)
            for number in orphans:
                letter = box.letters.get(number)
                is_dead = letter is None or self._mailboxes.delivery_failed(box, letter)
                if letter is not None and not is_dead and group is not None:
                    group.return_letter(letter)
            self._dispatch(key, subscription.queue_group)

    # ---- deliveries ----------------------------------------------------------------------------

    def push(self, box: Mailbox, letters: list[Letter]) -> None:
        """Deliver new letters of one priority to all current subscriptions."""
        subscribers = self._subscribers.get(box.key)
        if subscribers is None:
            return
        bit = 1 << letters[0].rank
        for subscription in [each for each in subscribers.plain if each.ranks & bit]:
            self._push_to(box, subscription, letters)
        for name, group in list(subscribers.queue_groups.items()):
            for letter in letters:
                group.arrived(letter)
            for member in group.members.values():  # those in a backlog move forward for a letter they want
                for subscription in member.subscriptions:
                    if subscription.is_waiting and subscription.ranks & bit:
                        self._backlogs[subscription.number].promote(subscription, letters[0].rank)
            self._dispatch(box.key, name)

    def _push_to(self, box: Mailbox, subscription: MailSubscription, letters: list[Letter]) -> None:
        """Deliver new letters at once if they fit the connection's window; otherwise they wait."""
        link, rank = cast("Link", subscription.link), letters[0].rank
        if letters[-1].number != box.lanes[rank].newest():
            # Later letters arrived first, so no position in the backlog can lie before these.
            self._deliver(box, subscription, letters)
        elif subscription.is_waiting:
            self._backlogs[subscription.number].promote(subscription, rank)
        elif _fits(LINK_FULL_BYTES - link.pending_bytes, letters):
            self._deliver(box, subscription, letters)
        else:
            subscription.through = [lane.newest() for lane in box.lanes]
            subscription.through[rank] = letters[0].number - 1
            self._enqueue(subscription, rank)

    def _deliver(self, box: Mailbox, subscription: MailSubscription, letters: list[Letter]) -> None:
        """Deliver letters of one priority."""
        link, sid = cast("Link", subscription.link), subscription.sid
        form = replies.enveloped if subscription.enveloped else replies.raw
        subject, messages = form(box.mail_id, letters)
        if link.headers:
            link.deliver(sid, subject, "", messages)
        else:  # a client without headers finds the message id in the reply subject
            for letter, message in zip(letters, messages, strict=True):
                link.deliver(sid, subject, replies.delete_subject(box.mail_id, letter.number), [message])
        if self._mailboxes.options.receipts:
            self._mailboxes.emit_delivered(box, letters, link.user or f"link-{link.number}")

    # ---- the backlog of a connection -----------------------------------------------------------

    def _enqueue(self, subscription: MailSubscription, rank: int) -> None:
        """Add a subscription to the backlog of its connection."""
        backlog = self._backlogs.setdefault(subscription.number, ConnectionBacklog())
        backlog.put(subscription, rank)
        if not backlog.is_scheduled:
            self._feed(cast("Link", subscription.link))

    def _leave_backlog(self, subscription: MailSubscription) -> None:
        backlog = self._backlogs.get(subscription.number)
        if backlog is not None:
            backlog.remove(subscription)
            if not backlog:
                del self._backlogs[subscription.number]

    def _feed(self, link: Link) -> None:
        """Deliver from the backlog, the most urgent letters first, as far as window and turn allow."""
        backlog = self._backlogs.get(link.number)
        left = self._limits.replay_step
        while backlog and left > 0:
            room_bytes = LINK_FULL_BYTES - link.pending_bytes
            if room_bytes <= 0:
                link.notify_when_drained()
                return
            left -= max(1, self._feed_subscription(backlog, backlog.first(), room_bytes, left))
        if backlog:
            backlog.is_scheduled = True
            self._run_soon(partial(self._continue, link))

    def _continue(self, link: Link) -> None:
        backlog = self._backlogs.get(link.number)
        if backlog is not None:
            backlog.is_scheduled = False
            self._feed(link)

    def _feed_subscription(
        self, backlog: ConnectionBacklog, subscription: MailSubscription, room_bytes: int, limit: int
    ) -> int:
        """Deliver at most `limit` letters of one priority, as many as fit. Returns how many."""
        box = self._mailboxes.by_key.get(subscription.key)
        if box is None:
            self._leave_backlog(subscription)
            return 0
        group = self._subscribers[subscription.key].queue_groups.get(subscription.queue_group)
        if group is None:
            rank = box.waiting_rank(subscription.through, subscription.ranks)
        else:
            rank = group.rank_for(subscription, box)
        if rank == RANK_COUNT:
            self._leave_backlog(subscription)
            return 0
        is_next = rank <= subscription.queue_rank
        # After the others of that rank, and before the delivery, which can end the subscription.
        backlog.put(subscription, rank)
        if not is_next:
            return 0
        now_ns = self._mailboxes.now_ns()
        if group is None:
            limit = min(limit, max(1, _run_max(room_bytes)))
            letters = box.next_run(subscription.through, rank, limit, room_bytes, now_ns)
        else:
            letter = group.take(subscription, rank, box, now_ns)
            letters = [] if letter is None else [letter]
        if letters:
            self._deliver(box, subscription, letters)
        return len(letters)

    def drained(self, link: Link) -> None:
        """A connection can take more."""
        backlog = self._backlogs.get(link.number)
        if backlog and not backlog.is_scheduled:
            self._feed(link)
        self._public_list.drained(link)

    def tick(self) -> None:
        """Continue backlogs of connections that drained without a call."""
        for backlog in list(self._backlogs.values()):
            self.drained(cast("Link", backlog.first().link))
        self._public_list.tick()

    # ---- queue groups --------------------------------------------------------------------------

    def _dispatch(self, key: str, name: str) -> None:
        """Deliver the letters of a queue group to its members, as far as their windows allow."""
        if self._is_dispatching:  # a delivery has ended a subscription
            self._schedule_group(key, name)
            return
        subscribers, box = self._subscribers.get(key), self._mailboxes.by_key.get(key)
        group = subscribers.queue_groups.get(name) if subscribers is not None else None
        if group is None or box is None:
            return
        self._is_dispatching = True
        try:
            self._dispatch_some(box, group)
        finally:
            self._is_dispatching = False
        if group.offer(box) is not None:
            self._schedule_group(key, name)

    def _dispatch_some(self, box: Mailbox, group: QueueGroup) -> None:
        now_ns = self._mailboxes.now_ns()
        for _ in range(self._limits.replay_step):
            offer = group.offer(box)
            if offer is None:
                return
            subscription, rank = offer
            if cast("Link", subscription.link).pending_bytes >= LINK_FULL_BYTES:
                self._enqueue(subscription, rank)
                continue
            letter = group.take(subscription, rank, box, now_ns)
            if letter is not None:
                self._deliver(box, subscription, [letter])

    def _schedule_group(self, key: str, name: str) -> None:
        if not self._groups_scheduled:
            self._run_soon(self._dispatch_scheduled)
        self._groups_scheduled[key, name] = None

    def _dispatch_scheduled(self) -> None:
        groups, self._groups_scheduled = self._groups_scheduled, {}
        for key, name in groups:
            self._dispatch(key, name)

    # ---- changes of mailboxes ------------------------------------------------------------------

    def announce_created(self, box: Mailbox) -> None:
        self._public_list.announce_created(box)

    def deleted(self, box: Mailbox, number: int) -> None:
        """A client deletes a letter, which is about to be removed."""
        subscribers = self._subscribers.get(box.key)
        for group in subscribers.queue_groups.values() if subscribers is not None else ():
            group.deleted(number)

    def removed(self, box: Mailbox, number: int) -> None:
        """A letter was removed: the member that held it has room for another."""
        subscribers = self._subscribers.get(box.key)
        for name, group in subscribers.queue_groups.items() if subscribers is not None else ():
            if group.forget(number):
                self._schedule_group(box.key, name)

    def expired(self, box: Mailbox) -> None:
        """Keep the subscriptions of a named mailbox, which can be created again. A private id cannot."""
        subscribers = self._subscribers.get(box.key)
        if subscribers is not None:
            for group in subscribers.queue_groups.values():
                group.forget_all()
            if not box.named:
                del self._subscribers[box.key]
        self._public_list.announce_expired(box)


def _fits(room_bytes: int, letters: list[Letter]) -> bool:
    """Whether letters fit what is left of the window of a connection. A single letter fits any rest."""
    count = len(letters)
    if count == 1:
        return room_bytes > 0
    return count <= _run_max(room_bytes) and sum([letter.cost for letter in letters]) <= room_bytes


def _run_max(room_bytes: int) -> int:
    """How many letters may be handed at once to a connection with this room: more if nothing waits for it."""
    return RUN_MAX if room_bytes == LINK_FULL_BYTES else room_bytes // MESSAGE_LEAST_BYTES
