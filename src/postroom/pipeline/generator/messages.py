"""A generated message: the pieces of its lines, and the steps that its lives are made of."""

from typing import NamedTuple

from postroom.core.lifecycle import LAPSED
from postroom.pipeline.generator.feed import GeneratedSource, Lease, Names
from postroom.pipeline.generator.world import Org


class GeneratedGoal(NamedTuple):
    """What a user asked for; a tree of messages serves it."""

    goal_id: str
    trace_id: str
    org: Org
    user: str
    budget: list[int]
    """How many requests it may still make."""


class GeneratedMessage:
    """One message, and the pieces of its lines."""

    __slots__ = (
        "agent", "answered_us", "attempt", "feed", "goal", "key", "lease", "names", "priority", "put",
        "queue", "told", "trace", "type",
    )  # fmt: skip

    def __init__(
        self, feed: GeneratedSource, goal: GeneratedGoal, agent: str, names: Names, kind: str, queue: str,
        key: str, priority: int, digits: str,
    ) -> None:  # fmt: skip
        self.feed = feed
        self.put = feed.put
        self.goal = goal
        self.agent = agent
        self.names = names
        self.type = kind
        self.queue = queue
        self.key = key
        self.priority = priority
        self.attempt = 0
        self.answered_us = 0
        """When its last response arrived."""
        self.lease: Lease = [0]
        parent = f'"parent_message_id":"{names.parent_message_id}",' if names.parent_message_id else ""
        self.told = (
            f'"contract":"engine","source":"{feed.name}","schema":1,"queue":"{queue}",'
            f'"org_id":"{goal.org.org_id}","user_id":"{goal.user}","agent_id":"{agent}",'
            f'"message_id":"{names.message_id}","goal_id":"{goal.goal_id}",'
            f'"task_id":"t-{digits[:8]}",{parent}"type":"{kind}"'
        )
        self.trace = f'"trace_id":"{goal.trace_id}","span_id":"{digits[8:]}"'

    def say(self, ts_us: int, kind: str, state: str, more: str = "", rest: str = "}") -> None:
        """An event that no lease is about."""
        attempt = f'"attempt":{self.attempt},' if self.attempt else ""
        told = (
            f'"kind":"{kind}",{self.told},"priority":{self.priority},"state":"{state}",{attempt}'
            f"{self.trace}{more}"
        )
        self.put((ts_us, told, rest, self.names, None, False))

    def held(
        self, ts_us: int, kind: str, state: str, worker: str, more: str = "", rest: str = "}"
    ) -> None:  # fmt: skip
        """An event under the lease."""
        told = (
            f'"kind":"{kind}",{self.told},"priority":{self.priority},"state":"{state}",'
            f'"attempt":{self.attempt},"worker_id":"{worker}",{self.trace}{more}'
        )
        self.put((ts_us, told, rest, self.names, self.lease, False))

    def leased(self, ts_us: int, worker: str, waited_us: int) -> None:
        """Somebody has it from now on."""
        self.attempt += 1
        self.lease = [0]
        told = (
            f'"kind":"dequeued",{self.told},"priority":{self.priority},"state":"PROCESSING",'
            f'"attempt":{self.attempt},"worker_id":"{worker}",{self.trace},"duration_us":{waited_us}'
        )
        self.put((ts_us, told, "}", self.names, self.lease, True))

    def created(self, ts_us: int, more: str, delay_s: int = 0) -> None:
        """Accepted, and enqueued unless it is held back."""
        if delay_s:
            self.say(ts_us, "created", "SCHEDULED", more, f',"detail":{{"delay_s":{delay_s}}}}}')
            return
        told = f'{self.told},"priority":{self.priority},"state":"QUEUED",{self.trace}'
        self.put((ts_us, f'"kind":"created",{told}{more}', "}", self.names, None, False))
        key = f',"detail":{{"key":"{self.key}"}}}}'
        self.put((ts_us, f'"kind":"enqueued",{told}', key, self.names, None, False))

    def lapsed(self, ts_us: int, worker: str, held_us: int) -> None:
        """Its holder was not heard of in time; it can be claimed again."""
        more = f',"duration_us":{held_us},"error_type":"LeaseLapsed","error":"{LAPSED}"'
        self.held(ts_us, "lease_lapsed", "FAILED", worker, more)
        self.say(ts_us, "enqueued", "QUEUED")
