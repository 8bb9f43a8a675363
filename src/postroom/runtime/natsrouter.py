"""Routing of plain NATS messages to subscriptions and queue groups."""

from postroom.core import natswire as wire
from postroom.core.subjects import SubjectIndex
from postroom.runtime.natsconn import ServerConnection, ServerSubscription


class Router:
    """The plain subscriptions of one server."""

    def __init__(self) -> None:
        self._index: SubjectIndex[ServerSubscription] = SubjectIndex()
        self._turns = 0  # rotates the members of queue groups
        self.is_divided = False
        """Whether a connection that does not see all organizations has logged in, so that receivers depend on
        the sender."""
        self.match = self._index.match
        self.literal = self._index.literal

    def add(self, subscription: ServerSubscription) -> None:
        self._index.add(subscription.subject, subscription)

    def remove(self, subscription: ServerSubscription) -> None:
        self._index.remove(subscription.subject, subscription)

    def publish(self, link: ServerConnection, head: wire.ControlLine, bodies: list[bytes]) -> None:
        matched = self.match(head.subject)
        each, groups = matched
        if self.is_divided:
            is_reached = link.reach_of(head.subject, matched)
            each = tuple(filter(is_reached, each))
            reached = (tuple(filter(is_reached, members)) for members in groups)
            groups = tuple(members for members in reached if members)
        receivers = self._deliver_to_each(link, each, head, bodies) if each else 0
        for members in groups:
            receivers += self._deliver_to_group(link, members, head, bodies)
        if not receivers and head.reply and link.no_responders:
            _answer_no_responders(link, head, len(bodies))

    def _deliver_to_each(
        self,
        link: ServerConnection,
        each: tuple[ServerSubscription, ...],
        head: wire.ControlLine,
        bodies: list[bytes],
    ) -> int:
        """Deliver all bodies to all subscriptions. Returns the number of subscriptions."""
        receivers = 0
        frames, made_for, made_with = b"", b"", False
        for subscription in each:
            receiver = subscription.link
            if receiver.is_closing or (receiver is link and not link.echo):
                continue
            receivers += 1
            if subscription.last:
                self._deliver(subscription, head, subscription.take(bodies))
                continue
            subscription.delivered += len(bodies)
            # Subscribers to one subject often have the same sid: then they share the same bytes.
            if subscription.sid != made_for or receiver.headers != made_with:
                made_for, made_with = subscription.sid, receiver.headers
                frames = wire.forwarded(head, bodies, made_for, with_headers=made_with)
            receiver.send(frames)
        return receivers

    def _deliver(self, subscription: ServerSubscription, head: wire.ControlLine, bodies: list[bytes]) -> None:
        link = subscription.link
        if bodies and not link.is_closing:
            link.send(wire.forwarded(head, bodies, subscription.sid, with_headers=link.headers))
        if subscription.last and subscription.delivered >= subscription.last:
            link.drop(subscription)

    def _deliver_to_group(
        self,
        link: ServerConnection,
        members: tuple[ServerSubscription, ...],
        head: wire.ControlLine,
        bodies: list[bytes],
    ) -> int:
        """Deliver each body to one member of a queue group, in turns. Returns 1 if there is a member."""
        able = [each for each in members if (link.echo or each.link is not link) and not each.link.is_closing]
        if not able:
            return 0
        while bodies:
            able = [each for each in able if not each.last or each.delivered < each.last]
            if not able:
                break
            count = len(able)
            self._turns += 1
            first = self._turns % count
            left: list[bytes] = []
            for place, member in enumerate(able):
                share = bodies[(place - first) % count :: count]
                taken = member.take(share)
                left += share[len(taken) :]
                self._deliver(member, head, taken)
            self._turns += len(bodies)
            bodies = left
        return 1


def _answer_no_responders(link: ServerConnection, head: wire.ControlLine, times: int) -> None:
    headers = wire.NO_RESPONDERS % head.subject
    reply = head.reply.decode("utf-8", "surrogateescape")
    for _ in range(times):
        link.answer(reply, b"", headers)
