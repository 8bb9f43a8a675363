"""The decisions that a harness executes: several at the same time, on request in order for each agent.

In order means that a decision of an agent waits until the one before it is settled or dead. A decision that
waits stays leased; its lease is renewed like that of one that is being executed.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from postroom.contracts.tasks import Task

WAITING_MAX = 100  # decisions that wait for an earlier one of their agent
CONCURRENCY_MAX = 256

Run = Callable[[Task], bool]
"""Executes a decision; whether it has ended, and is not tried again."""


class Executions:
    """Runs decisions in `concurrency` threads; before `start` and after `stop`, in the caller's."""

    def __init__(
        self,
        run: Run,
        *,
        agent_of: Callable[[Task], str],
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
        """The decision of each agent that goes before its others."""
        self._waiting: dict[str, deque[Task]] = {}
        self._executing: dict[int, Task] = {}  # by lease
        self._handed: queue.SimpleQueue[tuple[str, Task] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def executing(self) -> list[Task]:
        """What is being executed, or will be by the next thread that is free."""
        with self._mutex:
            return [*self._executing.values()]

    @property
    def held(self) -> list[Task]:
        """Every decision whose lease is to be kept."""
        with self._mutex:
            waiting = [decision for line in self._waiting.values() for decision in line]
            return [*self._executing.values(), *waiting]

    def room(self) -> int:
        """How many more decisions may be claimed."""
        most = self._concurrency + (WAITING_MAX if self._in_order else 0)
        left = most - len(self.held)
        return max(0, left if self._threads else min(1, left))

    def start(self) -> None:
        """Run in threads from now on. With a concurrency of 1 that is the caller's."""
        for number in range(self._concurrency if self._concurrency > 1 else 0):
            thread = threading.Thread(target=self._work, name=f"postroom-execute-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self, timeout_s: float) -> list[Task]:
        """End after what is being executed; gives what has not begun."""
        with self._mutex:
            left = [decision for line in self._waiting.values() for decision in line]
            self._waiting.clear()
        threads, self._threads = self._threads, []
        for _ in threads:
            self._handed.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return left

    def begin(self, decision: Task) -> None:
        """Execute a decision, now or when its turn comes."""
        agent = self._agent_of(decision) if self._in_order else decision.task_id
        with self._mutex:
            if self._first.setdefault(agent, decision.task_id) != decision.task_id:
                self._waiting.setdefault(agent, deque()).append(decision)
                return
            self._executing[decision.lease] = decision
        self._hand_over(agent, decision)

    def advance(self, ended: Callable[[list[str]], set[str]]) -> None:
        """Let those go on that wait for a decision which ended elsewhere."""
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
                self._hand_over(stuck[first], following)

    def _hand_over(self, agent: str, decision: Task) -> None:
        if self._threads:
            self._handed.put((agent, decision))
        else:
            self._execute(agent, decision)

    def _work(self) -> None:
        while (handed := self._handed.get()) is not None:
            self._execute(*handed)
            self._has_room()

    def _execute(self, agent: str, decision: Task | None) -> None:
        while decision is not None:
            ended = False
            try:
                ended = self._run(decision)
            finally:
                with self._mutex:
                    self._executing.pop(decision.lease, None)
            decision = self._next(agent) if ended or not self._in_order else None

    def _next(self, agent: str) -> Task | None:
        """The next decision of an agent, whose first one is over."""
        with self._mutex:
            line = self._waiting.get(agent)
            if not line:
                self._waiting.pop(agent, None)
                self._first.pop(agent, None)
                return None
            following = line.popleft()
            self._first[agent] = following.task_id
            self._executing[following.lease] = following
            return following
