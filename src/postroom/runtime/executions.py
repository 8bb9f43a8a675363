"""Executes the decisions of a harness: several at the same time, optionally in order for each agent.

In order means that a decision waits until the previous decision of the same agent is settled or dead. A
waiting decision stays leased, and its lease is renewed like that of a running one.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from postroom.contracts.tasks import LeasedTask

WAITING_MAX = 100  # decisions that wait for an earlier decision of their agent
CONCURRENCY_MAX = 256

Run = Callable[[LeasedTask], bool]
"""Executes a decision. Returns whether it has ended, so that no retry follows."""


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
        self._first: dict[str, str] = {}
        """By agent: the decision that its other decisions wait for."""
        self._waiting: dict[str, deque[LeasedTask]] = {}
        self._executing: dict[int, LeasedTask] = {}  # by lease
        self._jobs: queue.SimpleQueue[tuple[str, LeasedTask] | None] = queue.SimpleQueue()
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

    def room(self) -> int:
        """How many more decisions may be claimed."""
        most = self._concurrency + (WAITING_MAX if self._in_order else 0)
        left = most - len(self.held)
        return max(0, left if self._threads else min(1, left))

    def start(self) -> None:
        """Start the threads. With a concurrency of 1, decisions still run in the caller's thread."""
        for number in range(self._concurrency if self._concurrency > 1 else 0):
            thread = threading.Thread(target=self._work, name=f"postroom-execute-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self, timeout_s: float) -> list[LeasedTask]:
        """Wait for running decisions, then end the threads. Returns the decisions that have not begun."""
        with self._mutex:
            left = [decision for waiting in self._waiting.values() for decision in waiting]
            self._waiting.clear()
        threads, self._threads = self._threads, []
        for _ in threads:
            self._jobs.put(None)
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
        if self._threads:
            self._jobs.put((agent, decision))
        else:
            self._execute(agent, decision)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._execute(*job)
            self._has_room()

    def _execute(self, agent: str, decision: LeasedTask | None) -> None:
        while decision is not None:
            ended = False
            try:
                ended = self._run(decision)
            finally:
                with self._mutex:
                    self._executing.pop(decision.lease, None)
            decision = self._next(agent) if ended or not self._in_order else None

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
