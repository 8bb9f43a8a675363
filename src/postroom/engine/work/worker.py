"""A worker: claims messages, runs their handlers, and commits outcomes together with the next claims.

Rule 1: one commit at a time. It applies every outcome that is there and claims for every free slot.
Rule 2: leases are renewed in the background. A message whose lease is lost is cancelled at once, and its
        outcome is dropped.
Rule 3: while the store is not available, the worker retries and keeps every outcome.
"""

import asyncio
import logging
import os
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from postroom.core.lifecycle.fairness import Rotation
from postroom.core.lifecycle.retry import demoted
from postroom.engine.additions import noted
from postroom.engine.messages import Message
from postroom.engine.rules import bodies
from postroom.engine.rules.bodies import Apart
from postroom.engine.rules.cells import WorkerInfo
from postroom.engine.rules.claims import Claimed, Claims
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.outcomes import Outcome
from postroom.engine.wakeups import set_soon, wait_for_event
from postroom.engine.work.batches import Batches, only_result
from postroom.engine.work.context import Context
from postroom.engine.work.handlers import (
    CUT,
    Handler,
    awaited,
    called,
    completed,
    deferred,
    ended,
    failed,
    limited,
    timeout_of,
)
from postroom.engine.work.isolation import ProcessDied, limit_memory, needs_process, run_alone
from postroom.engine.work.migrations import current, handed
from postroom.engine.work.relay import Line, RelayedCalls, serve
from postroom.engine.work.slots import LentSlots
from postroom.engine.work.starts import Starts
from postroom.errors import (
    InvalidMessage,
    PostroomError,
    SandboxUnavailable,
    TargetBusy,
    TokensExhausted,
    Unavailable,
    ValidationError,
)
from postroom.message import Record
from postroom.stores.transaction import Transaction
from postroom.system.log import library_log

if TYPE_CHECKING:
    from postroom.engine.core import EngineCore

_log = library_log("postroom.engine")

SLOTS_DEFAULT: Final = 10
WATCH_S: Final = 0.4  # how often a worker looks whether its messages were cancelled
REPORT_S: Final = 5.0
SWEEP_S: Final = 1.0
PURGE_S: Final = 60.0
CLAIMS_SEEN_S: Final = 30.0
LOOP_PAUSE_S: Final = 0.1
OUTAGE_PAUSE_S: Final = 0.25
OUTAGE_PAUSE_S_MAX: Final = 5.0
DRAIN_S: Final = 30.0
ABANDONED_THREADS_MAX: Final = 100
LOGGED_CHARS_MAX: Final = 200  # of an error in the log

_encode = msgspec.msgpack.Encoder().encode
_decode_outcome = msgspec.msgpack.Decoder(tuple[Outcome, bytes]).decode


Cycle: TypeAlias = tuple[list[str], list[Claimed], list[Apart]]
"""Messages whose outcome came too late, claimed messages, and what is stored apart from these."""


def slots_from_environment() -> int:
    """The smaller one of WORKER_PREFETCH and WORKER_CONCURRENCY."""
    names = ("WORKER_PREFETCH", "WORKER_CONCURRENCY")
    values = [os.environ.get(name, "") for name in names]
    return min(int(value) if value.isdigit() and int(value) > 0 else SLOTS_DEFAULT for value in values)


def new_worker_id() -> str:
    """A name that tells host and process."""
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{os.urandom(3).hex()}"


class _Running:
    """One attempt that is under way."""

    def __init__(self, claimed: Claimed, started: float) -> None:
        self.claimed = claimed
        self.started = started
        self.task: asyncio.Task[Any] | None = None
        self.context: Context | None = None
        self.is_dropped = False
        """Whether the lease is lost: the outcome is not committed."""


class Worker:
    """One worker in this process."""

    failure_level = logging.WARNING
    """The log level of failed attempts."""

    def __init__(
        self,
        core: "EngineCore",
        *,
        worker_id: str | None = None,
        slots: int | None = None,
        drain_s: float = DRAIN_S,
    ) -> None:
        self._core = core
        self._commits = core.commits
        self._handlers = core.handlers
        self._drain_s = drain_s
        self.worker_id = new_worker_id() if worker_id is None else worker_id
        self.slots = slots_from_environment() if slots is None else slots
        self._rotation = Rotation()
        self._running: dict[str, _Running] = {}
        self._outcomes: list[Outcome] = []
        self._starts = Starts()
        self._batches = Batches(self._call)
        self._claims: deque[tuple[float, int, int]] = deque()
        """The time of each claim, how many messages it got, and how many of them were promoted."""
        self._wake = asyncio.Event()
        self._lent = LentSlots(self._wake.set)
        self._look = asyncio.Event()
        self._stopping = False
        self._threads: ThreadPoolExecutor | None = None
        self._abandoned: set[Future[Any]] = set()
        """Plain handlers that still run after their timeout or cancellation: a thread cannot be killed."""
        self._random = random.Random()  # noqa: S311 - jitter needs no secrets

    # ---- life ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until `stop`."""
        loop = asyncio.get_running_loop()
        loops = (
            self._keep_leases, self._watch, self._report, self._purge, *self._core.additions.loops
        )  # fmt: skip
        helpers = [asyncio.create_task(self._kept_running(each)) for each in loops]
        try:
            with self._core.wakeups.listening_for_work(partial(set_soon, loop, self._wake)):
                await self._work()
        except asyncio.CancelledError:
            await self._give_back()
            raise
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            await self._leave()
            self._pool().shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Claim no more, finish what runs, and return from `run`."""
        self._stopping = True
        self._wake.set()

    async def _work(self) -> None:
        deadline: float | None = None
        while True:
            if self._stopping:
                if deadline is None:
                    deadline = time.monotonic() + self._drain_s
                    _log.info("draining %d messages, at most %g s", len(self._running), self._drain_s)
                if not self._running and not self._outcomes:
                    return
                if time.monotonic() >= deadline:
                    await self._give_back()
                    return
            self._wake.clear()
            claimed = await self._cycle()
            if not claimed and not self._outcomes:
                await self._rest(deadline)
            elif self._running:
                await asyncio.sleep(0)  # let handlers that need no time finish, so that they share a commit

    async def _rest(self, deadline: float | None) -> None:
        """Wait for an outcome, a new message, or a deadline."""
        pause_s = await self._core.wakeups.pause_s()
        if deadline is not None:
            pause_s = min(pause_s, max(0.0, deadline - time.monotonic()))
        await wait_for_event(self._wake, pause_s)

    async def _give_back(self) -> None:
        """Cancel what still runs and release its messages."""
        self._stopping = True
        for running in list(self._running.values()):
            self._drop(running)
            self._outcomes.append(ended(running.claimed, "released"))
        tasks = [running.task for running in self._running.values() if running.task is not None]
        await asyncio.wait(tasks, timeout=1.0) if tasks else None
        await self._cycle()

    async def _leave(self) -> None:
        with suppress(PostroomError):
            await self._commits.write(
                lambda operations: operations.report_worker(self.worker_id, None), makes_room=True
            )

    def look(self) -> None:
        """Look soon whether messages were cancelled."""
        self._look.set()

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and no outcome waits."""
        return not self._running and not self._outcomes

    def has(self, message_id: str) -> bool:
        """Whether a message runs here, or its outcome is not committed yet."""
        return message_id in self._running or any(one.message_id == message_id for one in self._outcomes)

    def held(self) -> dict[str, int]:
        """The leases of the messages that run here, by message id."""
        return {
            message_id: running.claimed.record.lease
            for message_id, running in self._running.items()
            if not running.is_dropped
        }

    async def renew_leases(self) -> None:
        """Renew the lease of everything that runs here; for tests."""
        if leases := self.held():
            await self._renew(leases)

    async def step(self) -> int:
        """One cycle, with everything that it starts run to its end; for tests."""
        claimed = await self._cycle()
        while self._running:
            tasks = [running.task for running in self._running.values() if running.task is not None]
            await asyncio.wait(tasks)
        return claimed

    @property
    def _may_claim(self) -> bool:
        return not self._stopping and len(self._abandoned) < ABANDONED_THREADS_MAX

    # ---- the cycle -----------------------------------------------------------------------------

    async def _cycle(self) -> int:
        """Commit the outcomes, claim for the free slots, and start what was claimed; returns how many."""
        outcomes, self._outcomes = self._outcomes, []
        late, started = self._starts.take(outcomes)
        used = len(self._running) - self._batches.waiting - self._lent.count
        free = self.slots - used if self._may_claim else 0
        if not outcomes and not late and free <= 0:
            return 0
        routes, on_finish = self._handlers.registered, self._core.additions.on_finish
        policy, rotation, worker_id = self._core.policy, self._rotation, self.worker_id

        def work(transaction: Transaction) -> Cycle:
            operations = Operations(transaction, policy)
            if late:
                transaction.tell_started(late)
            stale = operations.finish(outcomes, started) if outcomes else []
            for note_outcomes in on_finish:
                note_outcomes(transaction, policy, outcomes, stale)
            found = Claims(transaction, policy, worker_id, rotation, routes).claim(free) if free > 0 else []
            return stale, found, [bodies.apart(transaction, one.body) for one in found]

        telemetry = self._core.additions.telemetry
        started_ns = 0 if telemetry is None else time.time_ns()
        try:
            stale, claimed, apart = await self._committed(work, makes_room=bool(outcomes))
        except Unavailable as error:
            self._starts.put_back(late, outcomes, started)
            await self._outage(outcomes, error)
            return 0
        self._failures = 0
        for message_id in stale:
            _log.warning("message %s: its lease was over, so its outcome is dropped", message_id)
        self._core.wakeups.wake_waiting([one.message_id for one in outcomes])
        self._note(claimed)
        if telemetry is not None:
            telemetry.settled(outcomes, stale, started_ns)
            if claimed:
                telemetry.received(claimed, self.worker_id, started_ns)
        for one, stored in zip(claimed, apart, strict=True):
            self._start(one, stored)
        return len(claimed)

    async def _committed(self, work: Callable[[Transaction], Cycle], *, makes_room: bool) -> Cycle:
        """Commit a cycle. When the worker is cancelled meanwhile, what the cycle claimed is released."""
        commit = self._commits.write_cycle(work, makes_room=makes_room)
        try:
            return await asyncio.shield(commit)
        except asyncio.CancelledError:
            with suppress(Unavailable):
                _, claimed, _ = await commit
                self._outcomes += [ended(one, "released") for one in claimed]
            raise

    _failures = 0

    async def _outage(self, outcomes: list[Outcome], error: Unavailable) -> None:
        """The store is not available: keep the outcomes and try again after a pause."""
        self._outcomes = outcomes + self._outcomes
        self._failures += 1
        if self._failures == 1:
            _log.warning("the store is not available, retrying: %s", error)
        pause_s = min(OUTAGE_PAUSE_S * 2 ** min(self._failures - 1, 10), OUTAGE_PAUSE_S_MAX)
        if await wait_for_event(self._wake, pause_s):
            await asyncio.sleep(OUTAGE_PAUSE_S)

    def _note(self, claimed: list[Claimed]) -> None:
        now = time.monotonic()
        if claimed:
            self._claims.append((now, len(claimed), sum(one.is_promoted for one in claimed)))
        while self._claims and self._claims[0][0] < now - CLAIMS_SEEN_S:
            self._claims.popleft()

    # ---- running handlers ----------------------------------------------------------------------

    def _start(self, claimed: Claimed, apart: Apart) -> None:
        running = _Running(claimed, time.monotonic())
        self._running[claimed.record.message_id] = running
        attempt = self._attempt(running, apart)
        if self._core.additions.telemetry is not None:
            attempt = noted(self._core.additions.telemetry, claimed, self.worker_id, attempt)
        running.task = asyncio.create_task(attempt)

    async def _attempt(self, running: _Running, apart: Apart) -> Outcome | None:
        """Run a handler. Returns the outcome that will be committed; None when the lease is lost."""
        claimed = running.claimed
        outcome: Outcome | None
        self._lent.enter()
        try:
            outcome = await self._outcome(running, apart)
        except asyncio.CancelledError:
            outcome = None if running.is_dropped else ended(claimed, "released")
        finally:
            if self._running.get(claimed.record.message_id) is running:  # else a later attempt runs here
                del self._running[claimed.record.message_id]
        if outcome is not None and not running.is_dropped:
            self._outcomes.append(outcome)
            if outcome.kind == "failed":
                _log_failure(self.failure_level, claimed, outcome)
        self._wake.set()
        return None if running.is_dropped else outcome

    async def _outcome(self, running: _Running, apart: Apart) -> Outcome:
        """Run the handler of a message, and turn what happens into an outcome."""
        claimed = running.claimed
        if claimed.body is None:
            text = "the stored message cannot be decoded"
            return failed(claimed, None, ValueError(text), error_type="Undecodable")
        try:
            given = current(self._core, claimed, claimed.body, apart)
        except InvalidMessage as error:
            return failed(claimed, None, error)
        handler = self._handlers.find(given.type, given.body.service, given.payload)
        if handler is None:
            text = self._handlers.missing(given.type, given.body.service, given.payload)
            return failed(claimed, None, LookupError(text), error_type="NoHandler")
        additions = self._core.additions
        message: Message | None = None
        try:
            record = claimed.record
            message = handed(self._core, claimed, given, handler.payload)
            new_context = additions.new_context or Context
            context = running.context = new_context(
                self._core, message, record.lease, record.attempt, claimed.grant
            )
            if given.type in additions.before:
                await additions.before[given.type](message)
            if not handler.is_own and needs_process(record, message, handler.pool):
                return await self._alone(claimed, handler, message, context)
            if handler.batch > 1:
                result = await self._batches.call(handler, message, context)
            else:
                result = await limited(self._call(handler, message, context), timeout_of(handler, message))
            await context.flush()
            return completed(claimed, handler, result, context.used)
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is the outcome of its message
            failure = await _after_parts(running.context, error)
            made = self._failure(claimed, handler, message, failure, running.context)
            return await self._advised(made, claimed.record, message, failure)

    async def _advised(
        self, outcome: Outcome, record: Record, message: Message | None, error: Exception
    ) -> Outcome:
        """A failure whose retry keeps its priority when the adviser says so."""
        keeps_priority = self._core.additions.keeps_priority
        most = record.max_retries if outcome.max_retries is None else outcome.max_retries
        is_retried = outcome.kind == "failed" and not outcome.is_final and record.retries < most
        sinks = demoted(record.priority, record.retries + 1) != record.lane
        if keeps_priority is None or message is None or outcome.keeps_priority or not (is_retried and sinks):
            return outcome
        return msgspec.structs.replace(outcome, keeps_priority=await keeps_priority(message, error))

    def _failure(
        self,
        claimed: Claimed,
        handler: Handler,
        message: Message | None,
        error: Exception,
        context: Context | None = None,
    ) -> Outcome:
        if isinstance(error, SandboxUnavailable | TargetBusy):
            return deferred(claimed, error, None if context is None else context.used)
        if isinstance(error, TokensExhausted) and context is not None and context.chunks:
            return completed(claimed, handler, CUT, context.used)  # a stream is cut at its reservation
        keep = self._core.policy.keep_priority
        keeps = keep is not None and message is not None and not isinstance(error, ValidationError)
        outcome = failed(
            claimed, handler, error, spread=self._random.random(),
            keeps_priority=bool(keeps and keep is not None and keep(message, error)),
            usage=None if context is None else context.used, policy=self._core.policy,
        )  # fmt: skip
        _log.info("message %s: the traceback of its error", outcome.message_id, exc_info=error)
        return outcome

    async def _call(self, handler: Handler, message: Any, context: Any) -> Any:
        for each in context if isinstance(context, list) else (context,):
            self._note_start(each)
        if handler.is_async:
            return await awaited(handler.run(message, context))
        loop = asyncio.get_running_loop()

        def wait(coroutine: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

        if isinstance(context, list):
            plain: Any = [each.in_thread(wait) for each in context]
        else:
            plain = context.in_thread(wait)
        run: Callable[[], Any] = partial(called, handler.run, message, plain)
        if self._core.additions.telemetry is not None:  # a thread does not see the current span otherwise
            run = partial(copy_context().run, run)
        running = self._pool().submit(run)
        try:
            return await asyncio.wrap_future(running)
        except asyncio.CancelledError:
            if running.running():
                self._abandon(running)
            raise

    def _note_start(self, context: Context) -> None:
        running = self._running.get(context.message.message_id)
        if running is not None:  # else its lease was lost while it waited for its batch
            self._starts.add(running.claimed.record, self._core.store.wall_us())

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self.slots, thread_name_prefix="postroom-handler")
        return self._threads

    def _abandon(self, running: "Future[Any]") -> None:
        """Give later handlers another pool, so that they do not queue behind a thread that runs on."""
        self._abandoned.add(running)
        running.add_done_callback(self._abandoned.discard)
        self._pool().shutdown(wait=False)
        self._threads = None
        if len(self._abandoned) == ABANDONED_THREADS_MAX:
            _log.error("%d handlers still run after their timeout: no more is claimed", ABANDONED_THREADS_MAX)

    async def _alone(self, claimed: Claimed, handler: Handler, message: Message, context: Context) -> Outcome:
        """Run the handler in a process of its own, which may crash."""
        ours, theirs = socket.socketpair() if self._core.is_in_memory else (None, None)
        serving = None if ours is None else asyncio.create_task(serve(ours, context.calls))

        telemetry = self._core.additions.telemetry
        self._note_start(context)

        def call() -> bytes:
            limit_memory(message)
            if theirs is not None:
                context.calls = RelayedCalls(context.calls, Line(theirs))
            if telemetry is not None:
                telemetry.in_child()
            made = self._in_child(claimed, handler, message, context)
            return _encode((made, b"" if telemetry is None else telemetry.from_child()))

        try:
            outcome, spans = _decode_outcome(await limited(run_alone(call), timeout_of(handler, message)))
        except ProcessDied as died:
            _log.warning("message %s: %s", claimed.record.message_id, died)
            return ended(claimed, "crashed", str(died))
        finally:
            if serving is not None and theirs is not None:
                serving.cancel()
                theirs.close()
        if telemetry is not None:
            telemetry.add(spans)
        return msgspec.structs.replace(outcome, body=claimed.body)

    def _in_child(self, claimed: Claimed, handler: Handler, message: Message, context: Context) -> Outcome:
        takes_batch = handler.batch > 1
        context.store_at_once()  # the event loop of a call ends with it
        messages = [message] if takes_batch else message
        try:
            if handler.is_async:
                result = asyncio.run(awaited(handler.run(messages, [context] if takes_batch else context)))
            else:
                plain = context.in_thread(asyncio.run)
                result = called(handler.run, messages, [plain] if takes_batch else plain)
            if takes_batch:
                result = only_result(result)
            outcome = completed(claimed, handler, result, context.used)
        except Exception as error:  # noqa: BLE001 - as in `_outcome`
            outcome = self._failure(claimed, handler, message, error, context)
        return msgspec.structs.replace(outcome, body=None)

    def _drop(self, running: _Running) -> None:
        """Stop an attempt whose outcome is not committed."""
        running.is_dropped = True
        if running.context is not None:
            running.context.cancelled = True
        if running.task is not None:
            running.task.cancel()

    # ---- outside of the cycle ----------------------------------------------------------------------

    async def _kept_running(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a background loop, and start it again after an error: without them, every lease would end."""
        while True:
            try:
                await loop()
            except Exception:  # noqa: BLE001 - whatever it is, the loop must go on
                _log.exception("a background loop of worker %s failed and is started again", self.worker_id)
                await asyncio.sleep(LOOP_PAUSE_S)

    async def _keep_leases(self) -> None:
        period_s = self._core.policy.lease_s / 3
        while True:
            await asyncio.sleep(period_s)
            before = time.monotonic() - period_s / 2
            leases = {
                message_id: running.claimed.record.lease
                for message_id, running in self._running.items()
                if running.started <= before and not running.is_dropped
            }
            if leases:
                await self._renew(leases)

    async def _renew(self, leases: dict[str, int]) -> None:
        """Renew leases, and drop the attempts whose lease was over."""
        try:
            lost = await self._commits.write(lambda operations: operations.heartbeat(leases), makes_room=True)
        except Unavailable:
            return  # the next beat tries again; the leases last three of them
        for message_id in lost:
            running = self._running.get(message_id)
            if running is not None:
                self._drop(running)

    async def _watch(self) -> None:
        """Cancel handlers whose message was cancelled or lost its lease, or that the kill switch stops."""
        while True:
            await wait_for_event(self._look, WATCH_S)
            self._look.clear()
            if self._starts.look():
                self._wake.set()
            held = self.held()
            if not held:
                continue
            with suppress(Unavailable):
                await self._check(held)

    async def _check(self, leases: dict[str, int]) -> None:
        lost, killed = await self._commits.read(lambda operations: operations.lost(leases))
        for message_id in lost | killed:
            running = self._running.get(message_id)
            if running is None:
                continue
            self._drop(running)
            if message_id in killed:
                self._outcomes.append(ended(running.claimed, "released"))
                self._wake.set()

    async def _report(self) -> None:
        """Report that this worker is alive, and sweep."""
        while True:
            claims = sum(count for _, count, _ in self._claims)
            promoted = sum(count for _, _, count in self._claims)
            slots, in_flight = self.slots, len(self._running)

            def work(
                transaction: Transaction, facts: tuple[int, ...] = (slots, in_flight, claims, promoted)
            ) -> None:
                operations = Operations(transaction, self._core.policy)
                info = WorkerInfo(transaction.wall_us, transaction.steady_ns, *facts)
                operations.report_worker(self.worker_id, info)
                operations.sweep()

            with suppress(Unavailable):
                await self._commits.write_raw(work, makes_room=True)
            await asyncio.sleep(REPORT_S if self._core.policy.lease_s >= REPORT_S else SWEEP_S)

    async def _purge(self) -> None:
        """Forget what has passed its retention. It rests between its commits, so it may take long."""
        while True:
            with suppress(Unavailable):
                await self._core.purge.run()
            await asyncio.sleep(PURGE_S)


def _log_failure(level: int, claimed: Claimed, outcome: Outcome) -> None:
    lines = outcome.error.splitlines() or [""]
    text = lines[0] if len(lines[0]) <= LOGGED_CHARS_MAX else f"{lines[0][:LOGGED_CHARS_MAX]}..."
    _log.log(
        level, "message %s (%s) failed in attempt %d: %s: %s",
        outcome.message_id, claimed.type, claimed.record.attempt, outcome.error_type, text,
    )  # fmt: skip


async def _after_parts(context: Context | None, error: Exception) -> Exception:
    """The error of a handler, once its parts are stored; for a cut stream, the error of storing them."""
    try:
        if context is not None:
            await context.flush()
    except Exception as lost:  # noqa: BLE001 - of the store, or of the lease
        return lost if isinstance(error, TokensExhausted) else error
    return error
