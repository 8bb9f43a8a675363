"""What the parts of an engine share: its store, its rules, its handlers, commits and wake-ups.

Rule 1: this module imports none of those parts. `GlobalQueue` gives it their handlers, and the layers above
        give it their additions.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from postroom.calls.submit import SubmitFields
from postroom.contracts.tasks.tasks import LOOK_AGAIN_DEAF_S, LOOK_AGAIN_S, TASK_ENDED, notifier_of
from postroom.core.lifecycle import lifecycle
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.times import checked_seconds
from postroom.engine.message_input import Prepared, Registry
from postroom.engine.messages import checked_message_id, unknown_message
from postroom.engine.rules.cells import Part
from postroom.engine.rules.operations import Operations, Submitted
from postroom.engine.rules.policy import PAYLOAD_KEYS, REQUEST_TYPES, Policy
from postroom.engine.rules.retention import Purge
from postroom.engine.telemetry import EngineTelemetry
from postroom.engine.work.additions import Additions
from postroom.engine.work.commits import Commits
from postroom.engine.work.end_waiters import EndWaiters
from postroom.engine.work.handlers import Handler
from postroom.errors import GuardTripped, InvalidMessage, Overloaded, PostroomError
from postroom.message import Stored, org_of
from postroom.nudges.notifier import QUIET_S
from postroom.stores.store import Store
from postroom.stores.transaction import Transaction

T = TypeVar("T")

READY = ".engine"  # no agent has a name that begins with a dot
PARTS_ADDED = ".parts"
REFUSALS_NOTED_S = 1.0  # refused submits of one organization become at most one event in this time


class EngineCore:
    """The inside of an engine, for its worker, its handles and its dead letters."""

    def __init__(self, store: Store, policy: Policy) -> None:
        self.store = store
        self.policy = policy
        is_lost = not (store.capabilities.survives_kills or self.is_in_memory)  # in memory, all classes are
        self.registry = Registry(
            REQUEST_TYPES, urgent="group" if is_lost else "os", payload_keys=PAYLOAD_KEYS
        )
        self.handlers: dict[str, Handler] = {}
        self.services: dict[str, str] = {}
        """The service that the handler of each type calls."""
        self.built_in: dict[str, Handler] = {}
        """Handlers of postroom itself. A handler of the application takes precedence."""
        self.own_runs: list[Callable[..., Any]] = []
        """Functions of postroom among the handlers of the application."""
        self.additions = Additions()
        self.telemetry: EngineTelemetry | None = None
        """None while nothing is exported."""
        self._commits = Commits(store)
        self._cycles = Commits(store) if store.capabilities.is_concurrent else self._commits
        """Commits of workers: submits do not wait for them where the store allows it."""
        self._end_waiters = EndWaiters()
        self._notifier = notifier_of(store)
        self._refusals: dict[str, tuple[float, int]] = {}
        self._purge = Purge(self)
        store.add_commit_listener(self._committed)

    @property
    def is_in_memory(self) -> bool:
        """Whether the store belongs to this process: a forked process has a copy of it."""
        return self.store.url.startswith("memory:")

    def share(self, other: "EngineCore") -> None:
        """Use the types, handlers and services of another engine, also those registered later."""
        self.registry, self.handlers, self.services = other.registry, other.handlers, other.services
        self.own_runs = other.own_runs

    def handler_of(self, type_name: str) -> Handler | None:
        """The handler of a message type: the registered one, or the default one of the type."""
        return self.handlers.get(type_name) or self.built_in.get(type_name)

    def is_own(self, type_name: str, handler: Handler) -> bool:
        """Whether a handler is part of postroom: it runs in the worker, whose connections it uses."""
        return self.handlers.get(type_name) is not handler or handler.run in self.own_runs

    def close(self) -> None:
        """Close files and threads. They are opened again when they are needed."""
        self._commits.close()
        self._cycles.close()
        self._notifier.close()
        self.store.close()

    # ---- submitting ----------------------------------------------------------------------------

    async def submit(self, messages: Iterable[SubmitFields]) -> list[Submitted]:
        """Check and store messages in one commit: all or none."""
        if not isinstance(messages, Iterable):
            raise InvalidMessage(f"messages must be a list, not {type(messages).__name__}")
        if self.telemetry is None:
            return await self._submit(messages)
        return await self.telemetry.send(list(messages), self._submit)

    async def _submit(self, messages: Iterable[SubmitFields]) -> list[Submitted]:
        wall_us = self.store.wall_us()
        prepared = [self.registry.prepare(fields, self.policy, wall_us) for fields in messages]
        if not prepared:
            return []
        try:
            return await self.write(lambda operations: operations.submit(prepared))
        except (Overloaded, GuardTripped) as error:
            await self.note_refusal(prepared[0], error)
            raise

    async def after_submit(self) -> None:
        """Called after messages were stored without `submit`. The engine for tests runs their handlers."""

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
            await self._commits.write(
                lambda transaction: transaction.emit(
                    "rejected",
                    message.envelope.queue,
                    type=message.envelope.type,
                    error_type=type(error).__name__,
                    error=str(error),
                    detail=detail,
                )
            )

    # ---- commits -------------------------------------------------------------------------------

    async def write(self, work: Callable[[Operations], T], *, makes_room: bool = False) -> T:
        policy = self.policy
        return await self._commits.write(
            lambda transaction: work(Operations(transaction, policy)), makes_room=makes_room
        )

    async def control(self, work: Callable[[Operations], T]) -> T:
        """As `write`, for the order of an operator, which also succeeds on a full disk."""
        policy = self.policy
        return await self._commits.control(lambda transaction: work(Operations(transaction, policy)))

    async def write_at(self, work: Callable[[Operations, int], T]) -> T:
        """As `write`, with the wall-clock time of the commit."""
        policy = self.policy
        return await self._commits.write(
            lambda transaction: work(Operations(transaction, policy), transaction.wall_us), makes_room=True
        )

    async def add_parts(self, message_id: str, lease: int, parts: list[Part], first: int) -> None:
        """Store parts of a running handler, and wake their readers."""
        await self.write(
            lambda operations: operations.add_parts(message_id, lease, parts, first), makes_room=True
        )
        self._end_waiters.wake([message_id])
        self._notifier.notify_rarely_awaited(PARTS_ADDED)

    async def write_raw(self, work: Callable[[Transaction], T], *, makes_room: bool = False) -> T:
        return await self._commits.write(work, makes_room=makes_room)

    async def write_cycle(self, work: Callable[[Transaction], T], *, makes_room: bool = False) -> T:
        """Commit the outcomes and claims of a worker."""
        return await self._cycles.write(work, makes_room=makes_room)

    async def read(self, work: Callable[[Operations], T]) -> T:
        policy = self.policy
        return await self._commits.read(lambda transaction: work(Operations(transaction, policy)))

    async def load(self, message_id: str) -> Stored:
        return await self.read(lambda operations: operations.loaded(message_id))

    async def purge(self) -> None:
        """Forget what has passed its retention. Workers do this by themselves."""
        await self._purge.run()

    # ---- waking up -----------------------------------------------------------------------------

    def _committed(self, transaction: Transaction) -> None:
        if any(org_of(queue) for queue in transaction.ready):
            self._notifier.notify(READY)
        if transaction.ended:
            self._notifier.notify_rarely_awaited(TASK_ENDED)

    def wake_workers(self) -> None:
        """Wake the workers: there may be messages to claim."""
        self._notifier.notify(READY)

    @contextmanager
    def listening_for_work(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener`, from any thread, when there may be messages to claim."""
        with self._notifier.subscribed(READY, listener), self.store.receiving(listener):
            yield

    def wake_readers(self) -> None:
        """Wake the readers of answers and inboxes: something came for an agent."""
        self._notifier.notify_rarely_awaited(PARTS_ADDED)

    @contextmanager
    def listening_for_answers(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener`, from any thread, when messages may have ended or parts may have been stored."""
        with (
            self._notifier.subscribed(TASK_ENDED, listener),
            self._notifier.subscribed(PARTS_ADDED, listener),
        ):
            yield

    @property
    def look_again_s(self) -> float:
        """How long a reader waits for a wake-up before it looks anyway."""
        return LOOK_AGAIN_S if self._notifier.hears_other_processes else LOOK_AGAIN_DEAF_S

    async def pause_s(self) -> float:
        """How long a worker may wait for a wake-up without missing a deadline."""
        longest = self.look_again_s
        due_ns = self.store.known_deadline_ns()
        try:
            if due_ns is None:
                due_ns = await self._commits.read(lambda transaction: transaction.next_deadline_ns())
        except PostroomError:
            return longest
        return longest if due_ns is None else min(longest, due_ns / NANOS_PER_S + 0.001)

    def wake_waiting(self, message_ids: list[str]) -> None:
        """These messages may have ended: wake the coroutines of this process that wait for them."""
        self._end_waiters.wake(message_ids)

    async def wait_for_end(self, message_id: str, timeout_s: float | None) -> None:
        """Return when a message has ended. Raises `TimeoutError`."""
        checked_message_id(message_id)
        deadline = None if timeout_s is None else time.monotonic() + checked_seconds("timeout_s", timeout_s)
        with self._notifier.subscribed(TASK_ENDED, partial(self._end_waiters.wake, [message_id])):
            pause_s = 2 * QUIET_S  # another process may not know yet that somebody waits
            while True:
                future = self._end_waiters.add(message_id)
                try:
                    if await self.has_ended(message_id):
                        return
                    left_s = None if deadline is None else deadline - time.monotonic()
                    if left_s is not None and left_s <= 0:
                        raise TimeoutError(f"message {message_id} has not ended within {timeout_s:g} s")
                    await asyncio.wait([future], timeout=pause_s if left_s is None else min(pause_s, left_s))
                finally:
                    self._end_waiters.remove(message_id, future)
                pause_s = self.look_again_s

    async def has_ended(self, message_id: str) -> bool:
        record = await self._commits.read(lambda transaction: transaction.records.get(message_id))
        if record is None or not org_of(record.queue):
            raise unknown_message(message_id)
        return record.state in lifecycle.ENDED

    async def wait_for_news(self, message_id: str, pause_s: float) -> None:
        future = self._end_waiters.add(message_id)
        try:
            await asyncio.wait([future], timeout=pause_s)
        finally:
            self._end_waiters.remove(message_id, future)
