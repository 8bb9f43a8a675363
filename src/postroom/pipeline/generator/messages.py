"""A generated message: the JSON fragments of its lines, and the events of its life."""

from typing import NamedTuple

from postroom.core.lifecycle.lifecycle import LAPSED
from postroom.pipeline.generator.feed import GeneratedSource, Lease, Names
from postroom.pipeline.generator.world import Org


class GeneratedGoal(NamedTuple):
    """A goal of a user, with a tree of messages."""

    goal_id: str
    trace_id: str
    org: Org
    user: str
    budget: list[int]
    """The number of requests that it may still make, in a list of one."""


class GeneratedMessage:
    """One message, and the JSON fragments of its lines."""

    __slots__ = (
        "agent",
        "answered_us",
        "attempt",
        "feed",
        "fields",
        "goal",
        "key",
        "lease",
        "names",
        "priority",
        "put",
        "queue",
        "trace",
        "type",
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
        self.fields = (
            f'"contract":"engine","source":"{feed.name}","schema":1,"queue":"{queue}",'
            f'"org_id":"{goal.org.org_id}","user_id":"{goal.user}","agent_id":"{agent}",'
            f'"message_id":"{names.message_id}","goal_id":"{goal.goal_id}",'
            f'"task_id":"t-{digits[:8]}",{parent}"type":"{kind}"'
        )
        self.trace = f'"trace_id":"{goal.trace_id}","span_id":"{digits[8:]}"'

    def say(self, ts_us: int, kind: str, state: str, more: str = "", rest: str = "}") -> None:
        """Add an event without a lease."""
        attempt = f'"attempt":{self.attempt},' if self.attempt else ""
        fields = (
            f'"kind":"{kind}",{self.fields},"priority":{self.priority},"state":"{state}",{attempt}'
            f"{self.trace}{more}"
        )
        self.put((ts_us, fields, rest, self.names, None, False))

    def held(
        self, ts_us: int, kind: str, state: str, worker: str, more: str = "", rest: str = "}"
    ) -> None:  # fmt: skip
        """Add an event under the lease."""
        fields = (
            f'"kind":"{kind}",{self.fields},"priority":{self.priority},"state":"{state}",'
            f'"attempt":{self.attempt},"worker_id":"{worker}",{self.trace}{more}'
        )
        self.put((ts_us, fields, rest, self.names, self.lease, False))

    def leased(self, ts_us: int, worker: str, waited_us: int) -> None:
        """Add a delivery, which begins a lease."""
        self.attempt += 1
        self.lease = [0]
        fields = (
            f'"kind":"dequeued",{self.fields},"priority":{self.priority},"state":"PROCESSING",'
            f'"attempt":{self.attempt},"worker_id":"{worker}",{self.trace},"duration_us":{waited_us}'
        )
        self.put((ts_us, fields, "}", self.names, self.lease, True))

    def created(self, ts_us: int, more: str, delay_s: int = 0) -> None:
        """Add its acceptance, and its enqueueing unless it is delayed."""
        if delay_s:
            self.say(ts_us, "created", "SCHEDULED", more, f',"detail":{{"delay_s":{delay_s}}}}}')
            return
        fields = f'{self.fields},"priority":{self.priority},"state":"QUEUED",{self.trace}'
        self.put((ts_us, f'"kind":"created",{fields}{more}', "}", self.names, None, False))
        key = f',"detail":{{"key":"{self.key}"}}}}'
        self.put((ts_us, f'"kind":"enqueued",{fields}', key, self.names, None, False))

    def lapsed(self, ts_us: int, worker: str, held_us: int) -> None:
        """Add the lapse of its lease; it can be claimed again."""
        more = f',"duration_us":{held_us},"error_type":"LeaseLapsed","error":"{LAPSED}"'
        self.held(ts_us, "lease_lapsed", "FAILED", worker, more)
        self.say(ts_us, "enqueued", "QUEUED")
