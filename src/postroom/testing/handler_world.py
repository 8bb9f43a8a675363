"""Your handlers under crashes, repeated submits, late outcomes and delays, from a seed.

    report = HandlerWorld(engine, seed=7).run([{"type": "tool_call", "org_id": "acme", "payload": {}}])
    assert report.ok, report
    assert all(times == 1 for message in report.messages for times in message.effects.values())

The world runs each message in memory, on a clock that it moves. Between the steps of an attempt it lets the
worker crash, so that the message is delivered again. A seed gives the same faults every time.
"""

import asyncio
import inspect
import logging
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec
from msgspec.structs import replace

from postroom.calls.submit import SubmitFields
from postroom.core.lifecycle import lifecycle
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.engine.core import EngineCore
from postroom.engine.inline import InlineCore, InlineWorker
from postroom.engine.message_input import Registry
from postroom.engine.messages import Message
from postroom.engine.rules.bodies import Apart
from postroom.engine.work.handlers import Handler
from postroom.engine.work.worker import Worker
from postroom.goals.engine import Engine
from postroom.message import State
from postroom.stores.base import FOREVER_NS, Ending
from postroom.stores.transaction import Transaction
from postroom.testing.events import check_consistency
from postroom.testing.world_checker import Broken

Point: TypeAlias = Literal[
    "before the handler",
    "before the effect",
    "after the effect",
    "after the handler",
    "lease over",
]
"""Where a worker crashes. `lease over` is not a crash: the handler outlives its lease and reports late."""

FAULT_SHARE: Final = 0.25
OLD_SHARE: Final = 0.5  # of the messages that name a version; the others are migrated at their submit
FAULTS_A_MESSAGE_MAX: Final = 2  # so that every message ends
ROUNDS_MAX: Final = 100_000
EVENTS_MAX: Final = 100_000


class MessageReport(msgspec.Struct, kw_only=True):
    """The outcome of one message."""

    message_id: str
    type: str
    state: State = "QUEUED"
    result: Any = None
    runs: int = 0
    """How often its handler was started."""
    effects: dict[str, int] = msgspec.field(default_factory=dict)
    """How often each effect was called, by its key."""
    faults: list[Point] = msgspec.field(default_factory=list)


class HandlerReport(msgspec.Struct, kw_only=True):
    """The result of one seed."""

    seed: int
    messages: list[MessageReport]
    broken: list[Broken]

    @property
    def ok(self) -> bool:
        """Whether every message ended, and no effect was called again after its outcome was committed."""
        return not self.broken

    def __str__(self) -> str:
        lines = [f"{one.rule}: message {one.message_id}: {one.sentence}" for one in self.broken]
        states = ", ".join(sorted(f"{one.type} {one.state} after {one.runs} runs" for one in self.messages))
        return "\n".join([f"seed {self.seed}: {states}", *lines])


class _Crash(BaseException):
    """The worker crashed. Nothing catches this, and the lease lapses."""


class HandlerWorld:
    """Runs the handlers of an engine in memory, with faults. The engine itself is not changed."""

    def __init__(self, engine: Engine, seed: int, *, fault_share: float = FAULT_SHARE) -> None:
        self.seed = seed
        self._engine = engine
        self._share = fault_share
        self._random = random.Random(seed)  # noqa: S311 - faults must be repeatable
        self._reports: dict[str, MessageReport] = {}
        self._called: set[tuple[str, str]] = set()
        """Effects that were called and did not raise: message id and key."""
        self._broken: list[Broken] = []

    def run(self, messages: Iterable[SubmitFields]) -> HandlerReport:
        """Submit messages, given as the keywords of `submit`, and run their handlers to the end."""
        with _expected_warnings_dropped(), self._engine.testing() as testing:
            core: EngineCore = testing._core  # noqa: SLF001 - the world is a part of the engine's tests
            assert isinstance(core, InlineCore)
            core.handlers.registered = {
                name: {route: self._faulty(handler) for route, handler in of_type.items()}
                for name, of_type in core.handlers.registered.items()
            }
            return asyncio.run(self._run(core, list(messages)))

    async def _run(self, core: InlineCore, messages: list[SubmitFields]) -> HandlerReport:
        self._core = core
        worker = _WorldWorker(core)
        core.workers.append(worker)  # so that a submit runs no handlers: `_drain` does
        core.new_worker = partial(_WorldWorker, core)
        for fields in messages:
            await self._submit(core, fields)
        await self._drain(core, worker)
        return await self._report(core)

    async def _submit(self, core: InlineCore, fields: SubmitFields) -> None:
        times = 2 if fields.get("idempotency_key") and self._random.random() < self._share else 1
        if "version" in fields and self._random.random() < OLD_SHARE:
            await self._store_unmigrated(core, fields)
            times -= 1  # a repeated submit comes after the upgrade
        for _ in range(times):
            await core.submits.submit([fields])

    async def _store_unmigrated(self, core: InlineCore, fields: SubmitFields) -> None:
        """Store a message as it was given, as before an upgrade: the claim has to migrate it."""
        before = Registry(tuple(core.registry.types))
        prepared = before.prepare(fields, core.policy, core.store.wall_us())
        await core.commits.write(lambda operations: operations.submit([prepared]))

    async def _drain(self, core: InlineCore, worker: Worker) -> None:
        """Run handlers, and move the clock from deadline to deadline until nothing is left to do."""
        for _ in range(ROUNDS_MAX):
            if await worker.step() or not worker.is_idle:
                continue
            wait_ns = core.store.read(_next_ns)
            if wait_ns is None:
                return
            core.clock.advance((wait_ns + 1) / NANOS_PER_S)

    async def _report(self, core: InlineCore) -> HandlerReport:
        created = [event for event in core.store.events(0, EVENTS_MAX) if event.kind == "created"]
        for event in created:
            await self._look(core, event.message_id, event.type)
        try:
            check_consistency(core.store)
        except (AssertionError, ValueError) as error:
            self._broken.append(Broken("books", "", str(error).partition("\n")[0]))
        messages = [self._reports[event.message_id] for event in created]
        return HandlerReport(seed=self.seed, messages=messages, broken=self._broken)

    async def _look(self, core: InlineCore, message_id: str, type_name: str) -> None:
        stored = await core.commits.load(message_id)
        report = self._report_of(message_id, type_name)
        report.state = stored.record.state
        report.result = None if stored.result is None else msgspec.json.decode(stored.result)
        if report.state not in lifecycle.ENDED:
            self._broken.append(Broken("lost", message_id, f"it has not ended: it is {report.state}"))

    def _report_of(self, message_id: str, type_name: str) -> MessageReport:
        known = self._reports.get(message_id)
        if known is None:
            known = self._reports[message_id] = MessageReport(message_id=message_id, type=type_name)
        return known

    # ---- faults --------------------------------------------------------------------------------

    def _strikes(self, report: MessageReport, point: Point) -> bool:
        """Whether a fault happens here. A message gets only a few faults, so that it ends."""
        if len(report.faults) >= FAULTS_A_MESSAGE_MAX or self._random.random() >= self._share:
            return False
        report.faults.append(point)
        return True

    def _pass(self, report: MessageReport, point: Point) -> None:
        if self._strikes(report, point):
            raise _Crash(point)

    def _before(self, message: Message) -> MessageReport:
        report = self._report_of(message.message_id, message.type)
        self._pass(report, "before the handler")
        report.runs += 1
        return report

    def _after(self, report: MessageReport) -> None:
        is_waited_for = len(self._core.workers) > 1  # the lease of the waiting handler would end, too
        if not is_waited_for and self._strikes(report, "lease over"):
            self._core.clock.advance(self._core.policy.lease_s + 1)
        self._pass(report, "after the handler")

    def _faulty(self, handler: Handler) -> Handler:
        """A handler with faults around it. A handler of batches gets batches of one message."""
        original, takes_batches = handler.run, handler.batch > 1

        async def run_async(message: Message, context: Any) -> Any:
            report = self._before(message)
            result = await original(*_arguments(message, self._watched(context, report), takes_batches))
            self._after(report)
            return result[0] if takes_batches else result

        def run_plain(message: Message, context: Any) -> Any:
            report = self._before(message)
            result = original(*_arguments(message, self._watched(context, report), takes_batches))
            self._after(report)
            return result[0] if takes_batches else result

        run: Callable[..., Any] = run_async if handler.is_async else run_plain
        return replace(handler, run=run, batch=1, pool="thread")

    def _watched(self, context: Any, report: MessageReport) -> Any:
        """The context of a handler, with faults around its effects."""
        effect = context.effect

        def faulty_effect(key: str, run: Callable[[], Any], **options: Any) -> Any:
            return effect(key, self._faulty_effect(key, run, report, may_repeat=bool(options)), **options)

        context.effect = faulty_effect
        return context

    def _faulty_effect(
        self, key: str, run: Callable[[], Any], report: MessageReport, *, may_repeat: bool
    ) -> Callable[[], Any]:
        name = report.message_id, key

        async def call() -> Any:
            self._pass(report, "before the effect")
            if name in self._called and not may_repeat:
                self._broken.append(Broken("effect", report.message_id, f"effect {key} was called again"))
            report.effects[key] = report.effects.get(key, 0) + 1
            outcome = run()
            if inspect.isawaitable(outcome):
                outcome = await outcome
            self._called.add(name)
            self._pass(report, "after the effect")
            return outcome

        return call


class _WorldWorker(InlineWorker):
    """A worker whose crash loses the outcome of an attempt; its lease lapses later."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core, worker_id="world", slots=1)

    async def _attempt(self, running: Any, apart: Apart) -> None:
        try:
            await super()._attempt(running, apart)
        except _Crash as crash:
            _log.debug("the worker crashes %s", crash)


_log = logging.getLogger("postroom.testing")
POINTS: Final[tuple[Point, ...]] = get_args(Point)


@contextmanager
def _expected_warnings_dropped() -> Iterator[None]:
    """Drop the warnings of workers, which are about the faults of the world. Errors are still logged."""
    log = logging.getLogger("postroom.engine")

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING

    log.addFilter(is_error)
    try:
        yield
    finally:
        log.removeFilter(is_error)


def _arguments(message: Message, context: Any, takes_batches: bool) -> tuple[Any, Any]:
    return ([message], [context]) if takes_batches else (message, context)


def _next_ns(transaction: Transaction) -> int | None:
    """After how long a delay or a lease ends; None when none does."""
    ends = [record.due for record in transaction.records.find(Ending("delay", FOREVER_NS, 1))]
    ends += [record.lease_until for record in transaction.records.find(Ending("lease", FOREVER_NS, 1))]
    soonest = min(ends, default=FOREVER_NS)
    return None if soonest > FOREVER_NS // 4 else max(0, soonest - transaction.steady_ns)
