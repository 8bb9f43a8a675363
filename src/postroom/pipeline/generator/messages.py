"""The sources of a generated history, and its messages: pending events, and the lines that they become.

Rule 1: events are numbered in the order of time, without a gap. A lease's token is the number of its event.
Rule 2: a line is concatenated from JSON fragments. It equals the output of `to_line`.
"""

from bisect import bisect_left
from operator import itemgetter
from typing import Final, NamedTuple, TypeAlias

import msgspec

from postroom.audit.index import LineKeys
from postroom.core.lifecycle.lifecycle import LAPSED
from postroom.pipeline.generator.world import Org


class Names(NamedTuple):
    """The ids by which a line is found."""

    message_id: str
    parent_message_id: str = ""
    trace_id: str = ""


NOBODY: Final = Names("")
Lease: TypeAlias = list[int]
"""The token, in a list of one that is filled when the lease begins."""
Waiting: TypeAlias = tuple[int, str, str, Names, Lease | None, bool]
"""The time; fields from `kind` up to the lease; fields after it; the ids; the lease; whether it begins."""

_when: Final = itemgetter(0)


class LineBatch(NamedTuple):
    """Lines and their index entries, which are written together."""

    lines: list[bytes]
    marks: list[LineKeys]


class GeneratedSource:
    """A source. `put` adds an event at its time, `until` returns the lines up to a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seq = 0
        self.newest_us = 0
        self.hole_wanted = False
        """Whether the next lines begin after a missing number."""
        self.holes: list[int] = []
        self._waiting: list[Waiting] = []
        self.put = self._waiting.append

    def until(self, now_us: int) -> LineBatch:
        """The lines of all events before a time."""
        waiting = self._waiting
        waiting.sort(key=_when)  # the sort is stable
        n = bisect_left(waiting, now_us, key=_when)
        due = waiting[:n]
        del waiting[:n]
        if due and self.hole_wanted and self.seq:
            self.hole_wanted = False
            self.seq += 1
            self.holes.append(self.seq)
        return self._written(due)

    def _written(self, due: list[Waiting]) -> LineBatch:
        lines: list[str] = []
        marks: list[LineKeys] = []
        name, seq = self.name, self.seq
        head = f'{{"event_id":"{name}#'
        for ts_us, fields, rest, (message_id, parent, trace), lease, opens in due:
            seq += 1
            if lease is None:
                line = f'{head}{seq}","seq":{seq},"ts_us":{ts_us},{fields}{rest}\n'
            else:
                if opens:
                    lease[0] = seq
                line = f'{head}{seq}","seq":{seq},"ts_us":{ts_us},{fields},"lease":{lease[0]}{rest}\n'
            lines.append(line)
            marks.append(LineKeys(name, seq, ts_us, message_id, parent, trace))
        self.seq = seq
        if due:
            self.newest_us = due[-1][0]
        return LineBatch([*map(str.encode, lines)], marks)


class GeneratedGoal(NamedTuple):
    """A goal of a user, with a tree of messages."""

    goal_id: str
    trace_id: str
    org: Org
    user: str
    budget: list[int]
    """The number of requests that it may still make, in a list of one."""


class GeneratedMessage(msgspec.Struct, gc=False):
    """One message, and the JSON fragments of its lines."""

    feed: GeneratedSource
    goal: GeneratedGoal
    agent: str
    names: Names
    type: str
    queue: str
    key: str
    priority: int
    digits: str
    attempt: int = 0
    answered_us: int = 0
    """When its last response arrived."""
    lease: Lease = msgspec.field(default_factory=lambda: [0])
    fields: str = ""
    trace: str = ""

    def __post_init__(self) -> None:
        names, goal = self.names, self.goal
        parent = f'"parent_message_id":"{names.parent_message_id}",' if names.parent_message_id else ""
        self.fields = (
            f'"contract":"engine","source":"{self.feed.name}","schema":1,"queue":"{self.queue}",'
            f'"org_id":"{goal.org.org_id}","user_id":"{goal.user}","agent_id":"{self.agent}",'
            f'"message_id":"{names.message_id}","goal_id":"{goal.goal_id}",'
            f'"task_id":"t-{self.digits[:8]}",{parent}"type":"{self.type}"'
        )
        self.trace = f'"trace_id":"{goal.trace_id}","span_id":"{self.digits[8:]}"'

    def say(self, ts_us: int, kind: str, state: str, more: str = "", rest: str = "}") -> None:
        """Add an event without a lease."""
        attempt = f'"attempt":{self.attempt},' if self.attempt else ""
        fields = (
            f'"kind":"{kind}",{self.fields},"priority":{self.priority},"state":"{state}",{attempt}'
            f"{self.trace}{more}"
        )
        self.feed.put((ts_us, fields, rest, self.names, None, False))

    def held(
        self, ts_us: int, kind: str, state: str, worker: str, more: str = "", rest: str = "}"
    ) -> None:  # fmt: skip
        """Add an event under the lease."""
        fields = (
            f'"kind":"{kind}",{self.fields},"priority":{self.priority},"state":"{state}",'
            f'"attempt":{self.attempt},"worker_id":"{worker}",{self.trace}{more}'
        )
        self.feed.put((ts_us, fields, rest, self.names, self.lease, False))

    def leased(self, ts_us: int, worker: str, waited_us: int) -> None:
        """Add a delivery, which begins a lease."""
        self.attempt += 1
        self.lease = [0]
        fields = (
            f'"kind":"dequeued",{self.fields},"priority":{self.priority},"state":"PROCESSING",'
            f'"attempt":{self.attempt},"worker_id":"{worker}",{self.trace},"duration_us":{waited_us}'
        )
        self.feed.put((ts_us, fields, "}", self.names, self.lease, True))

    def created(self, ts_us: int, more: str, delay_s: int = 0) -> None:
        """Add its acceptance, and its enqueueing unless it is delayed."""
        if delay_s:
            self.say(ts_us, "created", "SCHEDULED", more, f',"detail":{{"delay_s":{delay_s}}}}}')
            return
        fields = f'{self.fields},"priority":{self.priority},"state":"QUEUED",{self.trace}'
        self.feed.put((ts_us, f'"kind":"created",{fields}{more}', "}", self.names, None, False))
        key = f',"detail":{{"key":"{self.key}"}}}}'
        self.feed.put((ts_us, f'"kind":"enqueued",{fields}', key, self.names, None, False))

    def lapsed(self, ts_us: int, worker: str, held_us: int) -> None:
        """Add the lapse of its lease; it can be claimed again."""
        more = f',"duration_us":{held_us},"error_type":"LeaseLapsed","error":"{LAPSED}"'
        self.held(ts_us, "lease_lapsed", "FAILED", worker, more)
        self.say(ts_us, "enqueued", "QUEUED")
