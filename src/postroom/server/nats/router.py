"""Subscriptions, and the routing of plain NATS messages to them and to queue groups."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from random import random
from typing import Protocol, TypeVar

from postroom.core.nats import natswire as wire
from postroom.core.nats.subjects import CacheUse, Match, SubjectIndex, merged

T = TypeVar("T")

INBOX = b"_INBOX."
SUBSCRIPTION_COST = 4_096  # of a delivery, for each subscription, besides the bytes of the messages
MESSAGE_COST = 64  # for each message to it


class Subscriber(Protocol):
    """One connection, as the router sees it."""

    send: Callable[[bytes], None]
    subscriptions: "dict[bytes, ServerSubscription]"
    org: str
    sees_all: bool
    echo: bool
    headers: bool
    no_responders: bool

    @property
    def is_closing(self) -> bool: ...

    def push(
        self,
        subscription: "ServerSubscription",
        subject: bytes,
        reply: bytes,
        messages: list[tuple[bytes, bytes]],
    ) -> None:
        """Send the headers and the payload of messages."""

    def drop(self, subscription: "ServerSubscription") -> None:
        """End a subscription."""


@dataclass(slots=True, eq=False)
class ServerSubscription:
    """One subscription of a connection."""

    link: Subscriber
    subject: bytes
    group: bytes
    sid: bytes
    owned: bool = False
    """Whether the handler has it, and not the router."""
    index: "SubjectIndex[ServerSubscription] | None" = None
    """Where the router has it."""
    cost: int = 0
    """As counted against the client."""
    delivered: int = 0
    last: int = 0
    """The number of messages after which it ends; 0 is never."""

    def take(self, bodies: list[T]) -> list[T]:
        """Count deliveries. Returns those that are still wanted."""
        if self.last:
            bodies = bodies[: self.last - self.delivered]
        self.delivered += len(bodies)
        return bodies


def all_of(matched: Match[ServerSubscription]) -> Iterator[ServerSubscription]:
    yield from matched.each
    for members in matched.groups:
        yield from members


class Router:
    """The plain subscriptions of one server."""

    def __init__(self, step_cost_max: int) -> None:
        self._step_cost_max = step_cost_max
        self._cache_use = CacheUse()
        self._of_all: SubjectIndex[ServerSubscription] = SubjectIndex(self._cache_use)
        """Subscriptions of clients that see all organizations."""
        self._of_orgs: dict[str, SubjectIndex[ServerSubscription]] = {}
        """The others by organization, so that those of one cost no message of another."""

    def add(self, subscription: ServerSubscription) -> None:
        link = subscription.link
        index = self._of_all
        if not link.sees_all:
            index = self._of_orgs.get(link.org) or SubjectIndex(self._cache_use)
            self._of_orgs[link.org] = index
        subscription.index = index
        index.add(subscription.subject, subscription)

    def remove(self, subscriptions: Iterable[ServerSubscription]) -> None:
        """Remove subscriptions of one connection."""
        by_subject: dict[bytes, list[ServerSubscription]] = {}
        for each in subscriptions:
            by_subject.setdefault(each.subject, []).append(each)
        for subject, gone in by_subject.items():
            index, org = gone[0].index, gone[0].link.org
            assert index is not None  # noqa: S101 - for the types: it was added
            index.remove(subject, *gone)
            if not index and self._of_orgs.get(org) is index:
                del self._of_orgs[org]

    def match(self, link: Subscriber, subject: bytes) -> Match[ServerSubscription]:
        """The subscriptions that a plain message of a connection reaches."""
        if not self._of_orgs:
            return self._of_all.match(subject)
        return merged(index.match(subject) for index in self._reached_by(link, subject))

    def answer(self, link: Subscriber, subject: bytes, headers: bytes, payload: bytes) -> None:
        """Answer a request. Wildcards of other clients must not see it: it may hold a private id."""
        receivers = [each for each in all_of(self.match(link, subject)) if each.link is link]
        if not receivers:
            literal = (index.literal(subject) for index in self._reached_by(link, subject))
            receivers = [*chain.from_iterable(literal)]
        for subscription in receivers:
            subscription.link.push(subscription, subject, b"", [(headers, payload)])

    def _reached_by(self, link: Subscriber, subject: bytes) -> Sequence[SubjectIndex[ServerSubscription]]:
        """The indexes that are searched for a message of a connection.

        Organizations do not hear each other, inboxes included: a request of one reaches no other, and its
        answer comes from where the request went. A client that sees all reaches every organization, but not
        in the inbox of another such client: an organization that was asked by that client knows the name of
        its inbox.
        """
        if not self._of_orgs:
            return (self._of_all,)
        if not link.sees_all:
            own = self._of_orgs.get(link.org)
            return (self._of_all,) if own is None else (self._of_all, own)
        if subject.startswith(INBOX) and any(map(_is_one_inbox, all_of(self._of_all.match(subject)))):
            return (self._of_all,)
        return (self._of_all, *self._of_orgs.values())

    def publish(self, link: Subscriber, head: wire.ControlLine, bodies: list[bytes]) -> Iterator[None] | None:
        """Deliver messages. Returns the steps of the deliveries if there are many, else None."""
        each, groups = self.match(link, head.subject)
        receivers = len(each) + len(groups)
        if receivers > 1:
            count = len(bodies)
            size = head.size * count if head.size != wire.ANY_SIZE else sum(map(len, bodies))
            cost = SUBSCRIPTION_COST + MESSAGE_COST * count + size
            if receivers * cost > self._step_cost_max:
                return self._steps(link, each, groups, head, bodies, 1 + self._step_cost_max // cost)
        receivers = self._deliver_to_each(link, each, head, bodies) if each else 0
        for members in groups:
            receivers += self._deliver_to_group(link, members, head, bodies)
        if not receivers and head.reply and link.no_responders:
            return self._answer_no_responders(link, head, len(bodies))
        return None

    def _steps(
        self,
        link: Subscriber,
        each: tuple[ServerSubscription, ...],
        groups: tuple[tuple[ServerSubscription, ...], ...],
        head: wire.ControlLine,
        bodies: list[bytes],
        a_step: int,
    ) -> Iterator[None]:
        """Deliver to `a_step` subscriptions or groups at a time."""
        receivers = 0
        for start in range(0, len(each), a_step):
            some = tuple(filter(_is_live, each[start : start + a_step]))
            receivers += self._deliver_to_each(link, some, head, bodies)
            yield
        for start in range(0, len(groups), a_step):
            for members in groups[start : start + a_step]:
                live = tuple(filter(_is_live, members))
                receivers += self._deliver_to_group(link, live, head, bodies)
            yield
        if not receivers and head.reply and link.no_responders:
            yield from self._answer_no_responders(link, head, len(bodies))

    def _deliver_to_each(
        self,
        link: Subscriber,
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

    def _next_members(
        self, link: Subscriber, members: tuple[ServerSubscription, ...], messages: int
    ) -> list[ServerSubscription]:
        """The members that can take messages; of many members, as many as there are messages."""
        if len(members) > messages:
            first = _any_of(len(members))
            some = members[first : first + messages] + members[: max(0, first + messages - len(members))]
            if able := [each for each in some if _can_take(link, each)]:
                return able
        return [each for each in members if _can_take(link, each)]

    def _deliver_to_group(
        self,
        link: Subscriber,
        members: tuple[ServerSubscription, ...],
        head: wire.ControlLine,
        bodies: list[bytes],
    ) -> int:
        """Deliver each body to one member of a queue group, in turns. Returns 1 if there is a member."""
        able = self._next_members(link, members, len(bodies))
        if not able:
            return 0
        while bodies and able:
            count = len(able)
            first = _any_of(count)
            left: list[bytes] = []
            for place, member in enumerate(able):
                share = bodies[(place - first) % count :: count]
                taken = member.take(share)
                left += share[len(taken) :]
                self._deliver(member, head, taken)
            bodies = left
            able = self._next_members(link, members, len(bodies))
        return 1

    def _answer_no_responders(self, link: Subscriber, head: wire.ControlLine, times: int) -> Iterator[None]:
        headers = wire.NO_RESPONDERS % head.subject
        for _ in range(times):
            self.answer(link, head.reply, headers, b"")
            yield


def _is_one_inbox(subscription: ServerSubscription) -> bool:
    """Whether it is to one inbox, and not to all inboxes."""
    first = subscription.subject[len(INBOX) : len(INBOX) + 1]
    return subscription.subject.startswith(INBOX) and first not in (b"*", b">")


def _any_of(count: int) -> int:
    """The number of any member, as nats-server chooses: an order would have to be kept for each group."""
    return int(random() * count)  # noqa: S311 - no secret


def _can_take(link: Subscriber, subscription: ServerSubscription) -> bool:
    other = subscription.link
    return (
        (link.echo or other is not link)
        and not other.is_closing
        and (not subscription.last or subscription.delivered < subscription.last)
    )


def _is_live(subscription: ServerSubscription) -> bool:
    """Whether a subscription has not ended since it was matched."""
    return subscription.link.subscriptions.get(subscription.sid) is subscription
