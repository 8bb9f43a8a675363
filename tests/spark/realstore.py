"""A history that a real store of tasks wrote, with a clock that is moved."""

import random
from contextlib import suppress

from postroom.contracts.tasks.tasks import DECISIONS, Tasks
from postroom.core.formats.events import AuditEvent, of_store
from postroom.errors import WrongState
from postroom.testing import ManualClock

HOUR_S, STEP_S, STEPS = 3_600, 4 * 3_600, 18


class Store:
    """Tasks in a real store, across three midnights, and how many of each queue wait after each step."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.tasks = Tasks.open("memory://", clock=self.clock)
        self.rng = random.Random(5)
        self.ids: list[str] = []
        self.counted: list[tuple[int, str, int]] = []
        for _ in range(STEPS):
            for _ in range(6):
                self.act()
            self.tasks.sweep()
            for queue, states in self.tasks.store.count().items():
                self.counted.append((self.clock.wall_us(), queue, states.get("QUEUED", 0)))
            self.clock.advance(STEP_S)

    def act(self) -> None:
        delay_s = self.rng.choice([0, 0, 5 * HOUR_S, 30 * HOUR_S])
        self.ids.append(self.tasks.enqueue(agent="a", payload={}, type="t", delay_s=delay_s, max_retries=1))
        for verb in (self.tasks.cancel, self.tasks.retry):
            with suppress(WrongState):
                verb(self.rng.choice(self.ids))
        for task in self.tasks.claim(agent="a", limit=2, lease_s=HOUR_S):
            word = self.rng.choice([self.finish, self.fail, self.tasks.release, lambda *_: None])
            word(task.task_id, task.lease)
        for decision in self.tasks.claim(agent=DECISIONS, lease_s=HOUR_S):
            if self.rng.random() < 0.5:
                self.tasks.settle(decision)

    def finish(self, task_id: str, lease: int) -> None:
        self.tasks.complete(task_id, lease, {"x": 1})
        self.tasks.open_decision(task_id)

    def fail(self, task_id: str, lease: int) -> None:
        self.tasks.fail(task_id, lease, "no", retry_in_s=5 * HOUR_S)

    def events(self) -> list[AuditEvent]:
        """What a shipper would write of it."""
        return [of_store(event, "tasks:s", "tasks") for event in self.tasks.store.events(0, 100_000)]
