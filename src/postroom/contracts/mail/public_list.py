"""The public list: a subscription gets every existing public mailbox, then each change of the list.

Rule 1: one turn of the loop sends a bounded number of entries to a connection, and none above its window.
Rule 2: a subscription gets the mailboxes that its client sees: those of its organization, and of none.
Rule 3: a subscription that is still getting the list gets a new mailbox once: in the list.
"""

from collections.abc import Callable
from functools import partial

from postroom.contracts.mail import LINK_FULL_BYTES, Link
from postroom.contracts.mail.mailboxes import Mailboxes
from postroom.core.mail import mq9
from postroom.core.mail import mq9replies as replies
from postroom.core.mail.mailbox import Mailbox


class PublicList:
    """The subscriptions to the public list."""

    def __init__(self, mailboxes: Mailboxes, run_soon: Callable[[Callable[[], None]], object]) -> None:
        self._mailboxes = mailboxes
        self._limits = mailboxes.options.limits
        self._run_soon = run_soon
        self._links: dict[int, dict[str, Link]] = {}
        """The links of subscriptions, by connection and sid."""
        self._positions: dict[int, dict[str, int]] = {}
        """The last serial sent to each subscription that has not got the whole list yet."""
        self._scheduled: set[int] = set()
        """Connections that get more of the list in the next turn of the loop."""

    def subscribe(self, link: Link, sid: str) -> None:
        self._links.setdefault(link.number, {})[sid] = link
        self._positions.setdefault(link.number, {})[sid] = 0
        self._send(link)

    def unsubscribe(self, link: Link, sid: str) -> None:
        """End a subscription. Unknown subscriptions are ignored."""
        self._links.get(link.number, {}).pop(sid, None)
        self._complete(link, sid)

    def close(self, link: Link) -> None:
        self._links.pop(link.number, None)
        self._positions.pop(link.number, None)

    def drained(self, link: Link) -> None:
        self._send(link)

    def tick(self) -> None:
        for number, sids in list(self._positions.items()):
            self._send(self._links[number][next(iter(sids))])

    def _send(self, link: Link) -> None:
        """Send a connection more of the list, as far as its window and this turn allow."""
        if link.number in self._scheduled:
            return
        for _ in range(self._limits.entries_a_turn_max):
            sids = self._positions.get(link.number)
            if not sids:
                return
            if link.pending_bytes >= LINK_FULL_BYTES:
                link.notify_when_drained()
                return
            sid, through = next(iter(sids.items()))
            serials = self._mailboxes.public.next(through, 1)
            if serials:
                sids[sid] = serials[0]  # before the delivery, which can end the subscription
                self._send_entry(link, sid, serials[0])
            else:
                self._complete(link, sid)
        self._scheduled.add(link.number)
        self._run_soon(partial(self._continue, link))

    def _continue(self, link: Link) -> None:
        self._scheduled.discard(link.number)
        self._send(link)

    def _send_entry(self, link: Link, sid: str, serial: int) -> None:
        box = self._mailboxes.by_serial.get(serial)
        if box is None or not _sees(link, box):
            return
        if box.is_stored and not 0 < box.expires_ns <= self._mailboxes.now_ns():
            _deliver(link, sid, replies.announcement("created", box.mail_id, box.desc, box.ttl_s))

    def _complete(self, link: Link, sid: str) -> None:
        sids = self._positions.get(link.number, {})
        sids.pop(sid, None)
        if not sids:
            self._positions.pop(link.number, None)

    def announce_created(self, box: Mailbox) -> None:
        if box.public:
            self._announce(box, replies.announcement("created", box.mail_id, box.desc, box.ttl_s))

    def announce_expired(self, box: Mailbox) -> None:
        if box.public and box.is_stored:
            self._announce(box, replies.announcement("expired", box.mail_id, "", 0))

    def _announce(self, box: Mailbox, entry: bytes) -> None:
        """Deliver to subscriptions that have got the list up to this mailbox; the others get it there."""
        for number, links in list(self._links.items()):
            positions = self._positions.get(number, {})
            for sid, link in list(links.items()):  # a delivery can end a subscription
                if box.serial <= positions.get(sid, box.serial) and _sees(link, box):
                    _deliver(link, sid, entry)


def _sees(link: Link, box: Mailbox) -> bool:
    return box.org in ("", link.org) or link.sees_all


def _deliver(link: Link, sid: str, entry: bytes) -> None:
    link.deliver(sid, mq9.PUBLIC_LIST, "", [(b"", entry)])
