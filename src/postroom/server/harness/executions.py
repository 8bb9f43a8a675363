"""Executes the decisions of a harness: several at the same time, optionally in order for each agent.

Organizations take turns, and one of them gets at most half of the threads and of the places to wait.

In order means that a decision waits until the previous decision of the same agent is settled or dead. A
waiting decision stays leased, and its lease is renewed like that of a running one.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from postroom.contracts.tasks.tasks import LeasedTask
from postroom.core.names import split_scoped
from postroom.server.access.shares import ORGANIZATION_PARTS, lower
from postroom.server.access.turns import Turns

WAITING_MAX = 100  # decisions that wait for an earlier decision of their agent
CONCURRENCY_MAX = 256

Run = Callable[[LeasedTask], bool]
"""Executes a decision. Returns whether it has ended, so that no retry follows."""


class _Execution(NamedTuple):
    org: str
    agent: str
    decision: LeasedTask

    @property
    def holder(self) -> tuple[str, str]:
        return self.org, self.agent


def org_of(decision: LeasedTask) -> str:
    """The organization in whose share a decision is executed; empty for none."""
    return split_scoped(decision.agent)[0]


class Executions:
    """Runs decisions in `concurrency` threads; before `start` and after `stop`, in the caller's thread."""

    def __init__(
        self,
        run: Run,
        *,
        agent_of: Callable[[LeasedTask], str],
        has_room: Callable[[], None],
        concurrency: int = 1,
        in_order: bool = False,
    ) -> None:
        self._run = run
        self._agent_of = agent_of
        self._has_room = has_room
        self._concurrency = concurrency
        self._in_order = in_order
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        """Notified when a thread may have something to do."""
        self._first: dict[str, str] = {}
        """By agent: the decision that its other decisions wait for."""
        self._waiting: dict[str, deque[LeasedTask]] = {}
        self._executing: dict[int, LeasedTask] = {}  # by lease
        self._jobs: Turns[_Execution] = Turns()
        self._running: Counter[str] = Counter()
        """By organization: how many threads execute its decisions."""
        self._threads: list[threading.Thread] = []

    @property
    def executing(self) -> list[LeasedTask]:
        """The decisions that are executed or handed to a thread."""
        with self._mutex:
            return [*self._executing.values()]

    @property
    def held(self) -> list[LeasedTask]:
        """All decisions whose lease has to be renewed."""
        with self._mutex:
            queued = [decision for waiting in self._waiting.values() for decision in waiting]
            return [*self._executing.values(), *queued]

    def room(self, org: str = "") -> int:
        """How many more decisions may be claimed, of an organization if one is given."""
        most = self._concurrency + (WAITING_MAX if self._in_order else 0)
        held = self.held
        left = most - len(held)
        if org:
            left = min(left, _part_of(most) - sum(org_of(decision) == org for decision in held))
        return max(0, left if self._threads else min(1, left))

    def start(self) -> None:
        """Start the threads. With a concurrency of 1, decisions still run in the caller's thread."""
        for number in range(self._concurrency if self._concurrency > 1 else 0):
            thread = threading.Thread(target=self._work, name=f"postroom-execute-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self, timeout_s: float) -> list[LeasedTask]:
        """Wait for running decisions, then end the threads. Returns the decisions that have not begun."""
        threads = self._threads
        with self._mutex:
            left = [decision for waiting in self._waiting.values() for decision in waiting]
            self._waiting.clear()
            while (job := self._jobs.take(lambda _: True)) is not None:
                left.append(self._executing.pop(job.decision.lease))
            self._threads = []
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return left

    def begin(self, decision: LeasedTask) -> None:
        """Execute a decision, now or when its turn comes."""
        agent = self._agent_of(decision) if self._in_order else decision.task_id
        with self._mutex:
            if self._first.setdefault(agent, decision.task_id) != decision.task_id:
                self._waiting.setdefault(agent, deque()).append(decision)
                return
            self._executing[decision.lease] = decision
        self._submit(agent, decision)

    def advance(self, ended: Callable[[list[str]], set[str]]) -> None:
        """Run the next decision of each agent whose current decision was ended by another harness."""
        with self._mutex:
            running = {decision.task_id for decision in self._executing.values()}
            stuck = {
                first: agent
                for agent, first in self._first.items()
                if agent in self._waiting and first not in running
            }
        for first in ended([*stuck]) if stuck else ():
            following = self._next(stuck[first])
            if following is not None:
                self._submit(stuck[first], following)

    def _submit(self, agent: str, decision: LeasedTask) -> None:
        job = _Execution(org_of(decision), agent, decision)
        with self._mutex:
            if self._threads:
                self._jobs.add(job, job)
                self._changed.notify_all()
                return
        self._execute(job)

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            try:
                self._execute(job)
            finally:
                with self._mutex:
                    lower(self._running, job.org, 1)
                    self._changed.notify_all()
            self._has_room()

    def _next_job(self) -> _Execution | None:
        """The decision whose turn is next; None after `stop`."""
        with self._mutex:
            while self._threads:
                job = self._jobs.take(self._may_run)
                if job is not None:
                    self._running[job.org] += 1
                    return job
                self._changed.wait()
            return None

    def _may_run(self, job: _Execution) -> bool:
        return not job.org or self._running[job.org] < _part_of(self._concurrency)

    def _execute(self, job: _Execution) -> None:
        ended = False
        try:
            ended = self._run(job.decision)
        finally:
            with self._mutex:
                self._executing.pop(job.decision.lease, None)
        following = self._next(job.agent) if ended or not self._in_order else None
        if following is not None:
            self._submit(job.agent, following)

    def _next(self, agent: str) -> LeasedTask | None:
        """Make the next waiting decision of an agent its first one, and return it."""
        with self._mutex:
            waiting = self._waiting.get(agent)
            if not waiting:
                self._waiting.pop(agent, None)
                self._first.pop(agent, None)
                return None
            following = waiting.popleft()
            self._first[agent] = following.task_id
            self._executing[following.lease] = following
            return following


def _part_of(most: int) -> int:
    """How much of what all organizations share one of them may use."""
    return max(1, most // ORGANIZATION_PARTS)
