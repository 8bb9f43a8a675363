"""Submits of one engine: messages are checked, admitted and stored in one commit, and refusals are noted."""

import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, Final, TypeVar

from postroom.calls.submit import SubmitFields
from postroom.engine.additions import Additions
from postroom.engine.commits import Commits
from postroom.engine.message_input import Prepared, Registry
from postroom.engine.rules.operations import Operations, Submitted
from postroom.errors import GuardTripped, InvalidMessage, Overloaded, PostroomError
from postroom.stores.store import Store

T = TypeVar("T")

REFUSALS_NOTED_S: Final = 1.0  # refused submits of one organization become at most one event in this time


class Submits:
    """Stores the messages of callers in this process."""

    def __init__(self, store: Store, registry: Registry, commits: Commits, additions: Additions) -> None:
        self._store = store
        self._registry = registry
        self._commits = commits
        self._additions = additions
        self._refusals: dict[str, tuple[float, int]] = {}
        self.after: Callable[[], Awaitable[None]] | None = None
        """Called after messages were stored. The engine for tests runs their handlers."""

    async def submit(self, messages: Iterable[SubmitFields]) -> list[Submitted]:
        """Check and store messages in one commit: all or none."""
        if not isinstance(messages, Iterable):
            raise InvalidMessage(f"messages must be a list, not {type(messages).__name__}")
        if self._additions.telemetry is None:
            return await self._submit(messages)
        return await self._additions.telemetry.send(list(messages), self._submit)

    async def _submit(self, messages: Iterable[SubmitFields]) -> list[Submitted]:
        given = list(messages)
        if not given:
            return []
        return await self.accept(given, lambda operations, prepared: operations.submit(prepared))

    async def accept(
        self, messages: Iterable[SubmitFields], store: Callable[[Operations, list[Prepared]], T]
    ) -> T:
        """Check messages, and commit what `store` does with them."""
        wall_us, policy = self._store.wall_us(), self._commits.policy
        prepared = [self._registry.prepare(fields, policy, wall_us) for fields in messages]
        try:
            stored = await self._commits.write(lambda operations: store(operations, prepared))
        except (Overloaded, GuardTripped) as error:
            await self.note_refusal(prepared[0], error)
            raise
        if self.after is not None:
            await self.after()
        return stored

    async def note_refusal(self, message: Prepared, error: PostroomError) -> None:
        """Emit an event about refused submits, at most one a second for each organization."""
        now = time.monotonic()
        noted_at, count = self._refusals.get(message.org_id, (0.0, 0))
        if now < noted_at + REFUSALS_NOTED_S:
            self._refusals[message.org_id] = noted_at, count + 1
            return
        self._refusals[message.org_id] = now, 0
        detail: dict[str, Any] = {"priority": message.envelope.priority, "goal_id": message.body.goal_id}
        if count:
            detail["not_noted"] = count
        with suppress(PostroomError):
            await self._commits.write_raw(
                lambda transaction: transaction.emit(
                    "rejected",
                    message.envelope.queue,
                    type=message.envelope.type,
                    error_type=type(error).__name__,
                    error=str(error),
                    detail=detail,
                )
            )
