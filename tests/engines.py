"""An engine under test: a store, a clock that stands still, and workers that run one cycle when told."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from postroom import Engine, Handle, Policy
from postroom.core.lifecycle.fairness import Rotation
from postroom.engine.messages import Message
from postroom.engine.rules.claims import Claimed, Claims
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.outcomes import Outcome
from postroom.engine.work.worker import Worker
from postroom.stores.transaction import Transaction
from postroom.testing import ManualClock

T = TypeVar("T")


class EngineUnderTest:
    """Submits, claims and runs without background work."""

    def __init__(self, url: str, policy: Policy | None = None) -> None:
        self.clock = ManualClock()
        self.engine = Engine.open(url, policy=policy, clock=self.clock)
        self.rotation = Rotation()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end."""
        result: T = self.engine.blocking.wait(coroutine)
        return result

    def submit(self, **fields: Any) -> Handle:
        """Submit a tool call of organization acme, unless the fields say otherwise."""
        return self.wait(
            self.engine.submit(**{"type": "tool_call", "org_id": "acme", "payload": {}, **fields})
        )

    def submit_many(self, count: int, **fields: Any) -> list[Handle]:
        """As `submit`, many of them in one commit."""
        message: Any = {"type": "tool_call", "org_id": "acme", "payload": {}, **fields}
        return self.wait(self.engine.submit_many([message] * count))

    def claim(self, limit: int = 1, worker: str = "w") -> list[Claimed]:
        """Claim as a worker does, without running anything."""
        policy = self.engine.policy

        def work(transaction: Transaction) -> list[Claimed]:
            return Claims(transaction, policy, worker, self.rotation, {}).claim(limit)

        return self.engine.store.write(work)

    def finish(self, *outcomes: Outcome) -> list[str]:
        """Commit outcomes."""
        policy = self.engine.policy
        return self.engine.store.write(lambda transaction: Operations(transaction, policy).finish(outcomes))

    def complete(self, claimed: list[Claimed]) -> None:
        """Complete what was claimed."""
        self.finish(
            *(
                Outcome(
                    kind="completed", message_id=one.record.message_id, lease=one.record.lease, body=one.body
                )
                for one in claimed
            )
        )

    def fail(self, claimed: Claimed) -> None:
        """Fail what was claimed."""
        record = claimed.record
        self.finish(
            Outcome(
                kind="failed", message_id=record.message_id, lease=record.lease, error="x", type=claimed.type
            )
        )

    def run(self, slots: int = 10) -> int:
        """One cycle of a worker, and what it starts; how many messages."""

        async def step() -> int:
            worker = Worker(self.engine._core, worker_id="w", slots=slots)
            count = await worker.step()
            worker.stop()  # claim no more, and commit the outcomes
            await worker.step()
            return count

        return self.wait(step())

    def run_all(self) -> None:
        """Cycles until nothing can run without moving the clock."""
        while self.run():
            pass

    def message(self, message_id: str) -> Message:
        """A message as its handler gets it."""
        found = self.wait(self.engine.get(message_id)).message
        assert found is not None
        return found

    def state(self, handle: Handle) -> str:
        """The state of a message."""
        return self.wait(self.engine.get(handle.message_id)).state

    def close(self) -> None:
        """Close the store."""
        self.engine.close()


def soon(coroutine: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
    """Run a coroutine in a loop of its own. The limit is for a hang, not a measurement."""
    return asyncio.run(asyncio.wait_for(coroutine, timeout_s))
