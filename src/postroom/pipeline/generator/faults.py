"""Faults in a generated history: violations of every rule of `core.history`, at seeded places.

Rule 1: a fault violates one rule, once. It causes no other violation.
Rule 2: gaps come last, because a gap hides other violations after it.
"""

from random import Random
from typing import Final

import msgspec

from postroom.core.formats.events import event_id
from postroom.core.history.message_checker import Rule
from postroom.pipeline.generator.messages import GeneratedMessage, GeneratedSource, LineBatch
from postroom.pipeline.generator.traffic import HOUR, MS, S, Traffic, add_event

FAULTS_A_RULE: Final = 3  # at most, in a small history
MESSAGES_A_FAULT: Final = 2_000  # of each rule, in a large one
SILENCE_US: Final = 26 * HOUR  # until a lost message is reported
LOST_UNTIL: Final = 0.5
PLANTED_FROM: Final = 0.05
PLANTED_UNTIL: Final = 0.85
HOLES_FROM: Final = 0.93
NEVER: Final = 1 << 62

_LIVES: Final[tuple[Rule, ...]] = ("lost", "unknown", "overlap", "order", "terminal")


class Fault(msgspec.Struct, frozen=True):
    """An injected violation."""

    rule: Rule
    message_id: str
    """Empty for a gap."""
    event_ids: tuple[str, ...] = ()
    """The proof of a gap; empty for other rules."""


class Faults:
    """Injects violations into a history of so many messages. With 0 messages it injects none."""

    def __init__(self, traffic: Traffic, random: Random, messages: int) -> None:
        self._traffic = traffic
        self._random = random
        self._listed: list[Fault] = []
        self._silent_us: dict[str, int] = {}
        self._last_us = 0
        self._plan: list[tuple[int, Rule]] = []
        self._holes_from = int(messages * HOLES_FROM) if messages else NEVER
        self._holes = self._how_many(messages)
        places = [PLANTED_FROM + random.random() * PLANTED_UNTIL for _ in range(self._how_many(messages))]
        self._alter = sorted((int(messages * place) for place in places), reverse=True)
        self._changed: set[int] = set()
        for rule in _LIVES:
            until = LOST_UNTIL if rule == "lost" else PLANTED_UNTIL
            for _ in range(self._how_many(messages)):
                share = PLANTED_FROM + random.random() * (until - PLANTED_FROM)
                self._plan.append((int(messages * share), rule))
        self._plan.sort(reverse=True)

    def _how_many(self, messages: int) -> int:
        if not messages:
            return 0
        return max(1 + int(self._random.random() * FAULTS_A_RULE), messages // MESSAGES_A_FAULT)

    @property
    def next_at(self) -> int:
        """The number of messages at which the next fault is due."""
        return self._plan[-1][0] if self._plan else NEVER

    def listed(self) -> list[Fault]:
        """All injected faults."""
        holes = [
            Fault("gap", "", (event_id(feed.name, seq - 1), event_id(feed.name, seq + 1)))
            for feed in self._traffic.feeds
            for seq in feed.holes
        ]
        return [*self._listed, *holes]

    # ---- lives ---------------------------------------------------------------------------------------

    def plant(self) -> None:
        """Inject the next fault."""
        _, rule = self._plan.pop()
        traffic = self._traffic
        traffic.advance(traffic.now_us + MS)
        self._last_us = traffic.now_us
        message = self._message()
        variant = int(self._random.random() * 3)
        match rule:
            case "lost":
                self._lose(message, variant)
            case "unknown":
                traffic.complete(message, traffic.now_us, 0, "")
            case "overlap":
                self._overlap(message, variant)
            case "order":
                message = self._overtake(message)
            case _:
                self._end_twice(message, variant)
        self._listed.append(Fault(rule, message.names.message_id))

    def _message(self) -> GeneratedMessage:
        traffic = self._traffic
        goal = traffic.new_goal()
        agent = goal.org.agents[int(self._random.random() * len(goal.org.agents))]
        return traffic.message(goal, "", agent, "memory_save", 2)

    def _delivered(self, message: GeneratedMessage) -> tuple[int, str]:
        """Accept, deliver and start a message; returns the time and the worker."""
        traffic = self._traffic
        ready_us = traffic.accept(message)
        t = traffic.depart(message, ready_us)
        return t, traffic.start(message, t, t - ready_us)

    def _lose(self, message: GeneratedMessage, variant: int) -> None:
        """Lose a message in its queue, under a lease, or before a retry."""
        if variant == 0:
            self._traffic.accept(message)
        else:
            t, worker = self._delivered(message)
            if variant == 1:
                message.held(t + S, "execution_failed", "FAILED", worker, ',"error":"it will be back"')
                message.say(t + S, "retry_scheduled", "RETRYING", "", ',"detail":{"delay_s":2}}')
        self._silent_us[message.feed.name] = self._traffic.now_us

    def _overlap(self, message: GeneratedMessage, variant: int) -> None:
        """Lease a message twice at once, or accept an event of the first holder under the second lease."""
        t, first = self._delivered(message)
        lease = message.lease
        if variant == 0:
            message.leased(t + 2 * S, "w-x", S)
            message.held(t + 3 * S, "execution_completed", "COMPLETED", "w-x")
            return
        message.lapsed(t + S, first, S)
        message.leased(t + 2 * S, "w-x", S)
        second, message.lease = message.lease, lease
        if variant == 1:
            message.held(t + 3 * S, "heartbeat", "PROCESSING", first)
            message.lease = second
        message.held(t + 4 * S, "execution_completed", "COMPLETED", first)

    def _overtake(self, message: GeneratedMessage) -> GeneratedMessage:
        """Deliver a later message of its lane first."""
        traffic = self._traffic
        other = traffic.message(message.goal, "", message.agent, message.type, message.priority)
        other.key = message.key = f"key-{message.names.message_id}"
        message.created(traffic.now_us, "")
        other.created(traffic.now_us + 1, "")
        for t, one in ((2 * S, other), (3 * S, message)):
            worker = traffic.start(one, traffic.now_us + t, t)
            one.held(traffic.now_us + t + 2 * MS, "execution_completed", "COMPLETED", worker)
        return other

    def _end_twice(self, message: GeneratedMessage, variant: int) -> None:
        """Complete and cancel a message, complete it twice, or deliver it after its cancellation."""
        traffic = self._traffic
        if variant == 0:
            ready_us = traffic.accept(message)
            t = traffic.depart(message, ready_us)
            message.say(t, "cancelled", "CANCELLED")
            worker = traffic.start(message, t + S, S)
            message.held(t + 2 * S, "execution_completed", "COMPLETED", worker)
            return
        t, worker = self._delivered(message)
        message.held(t + S, "execution_completed", "COMPLETED", worker)
        if variant == 1:
            message.say(t + 2 * S, "cancelled", "CANCELLED")
        else:
            message.held(t + 2 * S, "execution_completed", "COMPLETED", worker)

    def advance_past_horizon(self) -> None:
        """Let the time of a source pass, so that its lost messages are reported."""
        now_us = self._traffic.now_us
        for feed in self._traffic.feeds:
            lost_us = self._silent_us.get(feed.name)
            if lost_us is not None:
                depth = ',"detail":{"name":"queue_depth","depth":0}}'
                add_event(feed, max(now_us, lost_us + SILENCE_US), "alert", depth)

    # ---- numbers -------------------------------------------------------------------------------------

    def wants_hole(self, feed: GeneratedSource) -> bool:
        """Whether the next lines of a source begin after a missing number."""
        traffic = self._traffic
        if traffic.made < self._holes_from or not self._holes or feed.hole_wanted:
            return False
        if self._plan or traffic.now_us < self._last_us + HOUR or not feed.seq:
            return False
        self._holes -= 1
        return True

    def altered(self, batch: LineBatch) -> LineBatch:
        """Repeat some lines with another time."""
        lines, marks = batch
        while self._alter and self._alter[-1] <= self._traffic.made:
            at = int(self._random.random() * len(marks)) if marks else 0
            if not marks or not marks[at].message_id or marks[at].seq in self._changed:
                return LineBatch(lines, marks)
            self._alter.pop()
            mark = marks[at]
            self._changed.add(mark.seq)
            time = b'"ts_us":%d,' % mark.ts_us
            lines = [*lines, lines[at].replace(time, b'"ts_us":%d,' % (mark.ts_us + 1))]
            marks = [*marks, mark]
            self._listed.append(Fault("gap", mark.message_id, (event_id(mark.source, mark.seq),)))
        return LineBatch(lines, marks)
