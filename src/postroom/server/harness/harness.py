"""The harness: turns results into decisions, executes them, requeues lapsed tasks and nudges agents.

Rule 1: a task is done after its decision was executed, never before.
Rule 2: a decision that cannot be executed is retried like any task, and ends as a dead letter.
Rule 3: organizations take turns. One of them uses at most half of the threads.
Rule 4: a decision is executed by one thread at a time. Its lease is renewed while it waits for that thread.
Rule 5: a nudge only makes a loop run earlier. When all nudges are lost, the intervals find everything.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from typing import Any

import msgspec

from postroom.contracts.tasks.task_operations import DECISIONS, LeasedTask
from postroom.contracts.tasks.tasks import Tasks
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.names import split_scoped
from postroom.errors import HandleDead, InvalidMessage, PostroomError, StaleLease, UnknownTask
from postroom.message import ENGINE_PREFIX, Event
from postroom.server.access.registry import Agents
from postroom.server.harness.executions import CONCURRENCY_MAX, Executions
from postroom.server.harness.followers import AgentNudges, ResultFollower
from postroom.server.harness.nudger import NUDGE_TIMEOUT_S, Nudger
from postroom.server.telemetry.server_log import ServerLog, error_location
from postroom.stores.base import FOREVER_NS, PURGE_BATCH_MAX, ByIds, Ending
from postroom.system.clock import Clock, SystemClock

DRAIN_EVERY_S = 10.0
ALERTS_EVERY_S = 1.0
SWEEP_EVERY_S = 60.0  # and earlier when a lease ends
SWEEP_PAUSE_S = 0.25  # the least time between two sweeps
DECISION_LEASE_S = 30.0  # after a kill, another harness executes the decision when this has passed
SWEEPS_MAX = 100  # batches of one sweep; the next run takes the rest
STOP_TIMEOUT_S = 5.0
WORKER = "harness"

Execute = Callable[[LeasedTask], None]


class LoopStatus(msgspec.Struct, frozen=True):
    """The counters of one loop."""

    running: bool
    every_s: float
    runs: int
    errors: int
    last_error: str
    last_error_at: datetime | None


class Loop:
    """Calls `work` in a thread every `every_s` seconds, and earlier when it is woken.

    A loop survives every exception. It counts the error, and keeps the last one for the status.
    """

    def __init__(self, name: str, every_s: float, work: Callable[[], None], clock: Clock) -> None:
        self.name = name
        self.every_s = every_s
        self._work = work
        self._clock = clock
        self._due_ns = 0
        self._woken = threading.Event()
        self._rescheduled = threading.Event()
        """Set when the next run may be due earlier than the thread sleeps."""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._runs = 0
        self._errors = 0
        self._last_error = ""
        self._last_error_at: datetime | None = None
        self.on_error: Callable[[str, BaseException], None] | None = None
        """Called with the loop's name and the error."""

    @property
    def stopping(self) -> bool:
        """Whether a long run should end early."""
        return self._stopping.is_set()

    def wake(self) -> None:
        """Make the loop run now. Safe from any thread, any number of times."""
        self._woken.set()
        self._rescheduled.set()

    def due_in_s(self) -> float:
        """Seconds until the next run."""
        if self._woken.is_set():
            return 0.0
        return max(0.0, (self._due_ns - self._clock.boot_ns()) / NANOS_PER_S)

    def run_within(self, pause_s: float) -> None:
        """Run again after `pause_s` at the latest. Safe from any thread."""
        due_ns = self._clock.boot_ns() + round(pause_s * NANOS_PER_S)
        if due_ns < self._due_ns:
            self._due_ns = due_ns
            self._rescheduled.set()

    def run_once(self) -> None:
        """Do the work once. An exception is counted and reported."""
        self._woken.clear()
        self._due_ns = self._clock.boot_ns() + round(self.every_s * NANOS_PER_S)
        self._runs += 1
        try:
            self._work()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a loop survives it
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        """Count an error, and keep it for the status."""
        self._errors += 1
        self._last_error = f"{type(error).__name__}: {error}"
        self._last_error_at = datetime.now(UTC)
        if self.on_error is not None:
            with suppress(Exception):
                self.on_error(self.name, error)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"postroom-{self.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.run_once()
            while not self._stopping.is_set() and (left_s := self.due_in_s()) > 0:
                self._rescheduled.wait(left_s)
                self._rescheduled.clear()

    def stop(self) -> None:
        """End the loop after the current run."""
        self._stopping.set()
        self._rescheduled.set()

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def status(self) -> LoopStatus:
        return LoopStatus(
            running=self._thread is not None and self._thread.is_alive(),
            every_s=self.every_s,
            runs=self._runs,
            errors=self._errors,
            last_error=self._last_error,
            last_error_at=self._last_error_at,
        )


class HarnessStatus(msgspec.Struct, frozen=True):
    """The counters of a harness since its start."""

    loops: dict[str, LoopStatus]
    executed: int
    """Decisions executed."""
    executing: list[str]
    """Ids of the decisions that are being executed."""
    nudges_sent: int
    nudges_failed: int


class Harness:
    """The loops of a task queue: drain (results to decisions to effects), sweep, nudges to agents, alerts.

    `execute` acts on one decision: its payload is the result, its parent the task. Without `execute`, results
    stay completed until a harness that has it runs. `start` runs the loops in threads. `step` runs the loops
    that are due in the caller's thread. `concurrency` is the number of decisions executed at the same time
    after `start`; `in_order` keeps the decisions of one agent in the order of its results.
    """

    def __init__(
        self,
        tasks: Tasks,
        *,
        agents: Agents,
        execute: Execute | None = None,
        drain_every_s: float = DRAIN_EVERY_S,
        sweep_every_s: float = SWEEP_EVERY_S,
        nudge_timeout_s: float = NUDGE_TIMEOUT_S,
        allowed_nudge_hosts: Iterable[str] = (),
        lease_s: float = DECISION_LEASE_S,
        concurrency: int = 1,
        in_order: bool = False,
        alerts: Callable[[], None] | None = None,
        clock: Clock | None = None,
        server_log: ServerLog | None = None,
    ) -> None:
        if type(concurrency) is not int or not 1 <= concurrency <= CONCURRENCY_MAX:
            raise InvalidMessage(f"concurrency must be from 1 to {CONCURRENCY_MAX}, not {concurrency!r}")
        self._tasks = tasks
        self._execute = execute
        self._lease_s = lease_s
        self._server_log = server_log
        self._clock = clock = SystemClock() if clock is None else clock
        self._drain = Loop("drain", drain_every_s, self.drain, clock)
        self._sweep = Loop("sweep", sweep_every_s, self.sweep, clock)
        self._nudge = Loop("nudge", drain_every_s, self.nudge_agents, clock)
        self._beat = Loop("beat", lease_s / 3, self.beat, clock)
        drains = () if execute is None else (self._drain,)
        told = () if alerts is None else (Loop("alerts", ALERTS_EVERY_S, alerts, clock),)
        self._loops = (*drains, self._sweep, self._nudge, *told)
        for loop in (*self._loops, self._beat):
            loop.on_error = self._loop_failed
        self._nudger = Nudger(
            allowed_hosts=allowed_nudge_hosts, timeout_s=nudge_timeout_s, report=self._nudge_failed
        )
        self._agent_nudges = AgentNudges(tasks, agents, self._nudger, self._nudge.wake)
        self._results = ResultFollower(tasks, agents.data, self._log)
        self._executions = Executions(
            self._run_decision,
            agent_of=self._agent_of,
            has_room=self.wake,
            concurrency=concurrency,
            in_order=in_order,
        )
        self._executed = 0
        self._counting = threading.Lock()
        self._purge_ns = 0
        self._subscriptions = ExitStack()

    # ---- start and stop ------------------------------------------------------------------------

    def start(self) -> None:
        """Run every loop in a thread of its own."""
        self._agent_nudges.start()
        if self._server_log is not None:
            self._tasks.on_notable = self._log_events
        if self._execute is not None:
            self._executions.start()
            self._subscriptions.enter_context(self._tasks.notifier.subscribed(DECISIONS, self._drain.wake))
            self._beat.start()
        for loop in self._loops:
            loop.start()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the loops. A decision that does not finish in time is executed again by the next harness."""
        for loop in (*self._loops, self._beat):
            loop.stop()
        for loop in self._loops:
            loop.join(timeout_s)
        for decision in self._executions.stop(timeout_s):
            with suppress(PostroomError):
                self._tasks.release(decision.task_id, decision.lease)
        self._beat.join(timeout_s)
        self._tasks.on_notable = None
        self._nudger.close()
        self._subscriptions.close()
        self._agent_nudges.close()

    def wake(self) -> None:
        """Look for results now."""
        self._drain.wake()

    def step(self) -> None:
        """Run every loop that is due once."""
        for loop in self._loops:
            if loop.due_in_s() <= 0:
                loop.run_once()

    def status(self) -> HarnessStatus:
        return HarnessStatus(
            loops={loop.name: loop.status() for loop in self._loops},
            executed=self._executed,
            executing=[decision.task_id for decision in self._executions.executing],
            nudges_sent=self._nudger.sent,
            nudges_failed=self._nudger.failed,
        )

    @property
    def alive(self) -> bool:
        """Whether every loop runs."""
        return all(loop.status().running for loop in self._loops)

    # ---- decisions -----------------------------------------------------------------------------

    def drain(self) -> None:
        """Open decisions for new results, and execute decisions until none is left."""
        if self._execute is None:
            return
        self._executions.advance(self._tasks.ended)
        if self._next_deadline_ns() == 0:
            self._tasks.sweep()
        has_begun = True
        while has_begun and not self._drain.stopping:
            self._results.open_decisions()
            has_begun = False
            for queue in [*self._results.ready]:
                if self._drain.stopping or not self._executions.room():
                    return  # the end of an execution wakes this loop
                has_begun |= self._begin_some(queue)
        next_deadline_ns = self._next_deadline_ns()
        if next_deadline_ns is not None:
            self._drain.run_within(next_deadline_ns / NANOS_PER_S)

    def _next_deadline_ns(self) -> int | None:
        return self._tasks.store.read(lambda transaction: transaction.next_deadline_ns())

    def _begin_some(self, queue: str) -> bool:
        """Begin to execute decisions of one queue, in its turn. Returns whether there were any."""
        ready = self._results.ready
        equal_part = max(1, self._executions.room() // len(ready))
        limit = min(equal_part, self._executions.room(split_scoped(queue)[0]))
        if not limit:
            return False
        ready[queue] = ready.pop(queue)  # its next turn is after those of the others
        claimed = self._tasks.claim(agent=queue, limit=limit, lease_s=self._lease_s, worker=WORKER)
        if not claimed:
            del ready[queue]
        for decision in claimed:
            self._executions.begin(decision)
        return bool(claimed)

    def _run_decision(self, decision: LeasedTask) -> bool:
        """Execute a decision and record the outcome. Returns whether the decision has ended."""
        try:
            return self._execute_and_settle(decision)
        except PostroomError as error:  # of the store: the lease runs out, and the decision is executed again
            self._drain.failed(error)
            return False

    def _execute_and_settle(self, decision: LeasedTask) -> bool:
        execute = self._execute
        try:
            if execute is not None:
                execute(decision)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an executor may raise anything
            if self._drain.stopping:  # stopping the harness also ends its programs: that is not a failure
                self._tasks.release(decision.task_id, decision.lease)
                return False
            return self._record_failure(decision, error)
        self._tasks.settle(decision)
        with self._counting:
            self._executed += 1
        self._log("decision_executed", task_id=decision.parent, decision=decision.task_id)
        return True

    def _record_failure(self, decision: LeasedTask, error: BaseException) -> bool:
        """Fail a decision. Returns whether that was its last attempt."""
        self._drain.failed(error)
        self._log(
            "decision_failed", task_id=decision.parent, decision=decision.task_id, error=error_location(error)
        )
        text = (str(error) or type(error).__name__).encode("utf-8", "replace").decode()  # valid UTF-8
        self._tasks.fail(decision.task_id, decision.lease, text, error_type=type(error).__name__)
        return bool(self._tasks.ended([decision.task_id]))

    def _agent_of(self, decision: LeasedTask) -> str:
        """The agent whose result became this decision. A decision without its task waits for no other."""
        try:
            [record] = self._tasks.store.find(ByIds((decision.parent,)))
        except UnknownTask:
            return decision.task_id
        return record.queue

    def beat(self) -> None:
        """Renew the leases of the decisions that are being executed or wait for their execution."""
        for decision in self._executions.held:
            try:
                self._tasks.heartbeat(decision.task_id, decision.lease)
            except StaleLease:
                if decision in self._executions.held:  # else it was settled meanwhile
                    raise

    # ---- sweeps and nudges ---------------------------------------------------------------------

    def sweep(self) -> None:
        """Requeue lapsed tasks, and purge. The next run is due when the next lease ends."""
        for _ in range(SWEEPS_MAX):
            if self._tasks.sweep() < PURGE_BATCH_MAX or self._sweep.stopping:
                break
        for record in self._tasks.store.find(Ending("lease", FOREVER_NS, 1)):
            left_s = (record.lease_until - self._tasks.store.steady_ns()) / NANOS_PER_S
            self._sweep.run_within(max(SWEEP_PAUSE_S, left_s))
        if self._clock.boot_ns() >= self._purge_ns:
            self._purge_ns = self._clock.boot_ns() + round(self._sweep.every_s * NANOS_PER_S)
            self._tasks.purge()

    def lease_given(self, lease_s: float) -> None:
        """Sweep when a lease of this length ends without a heartbeat."""
        if lease_s < self._sweep.every_s:
            self._sweep.run_within(max(SWEEP_PAUSE_S, lease_s))

    def nudge_agents(self) -> None:
        """Nudge the agents that have an address and new tasks."""
        self._agent_nudges.run()

    # ---- the log -------------------------------------------------------------------------------

    def _nudge_failed(self, agent: str, task_id: str, reason: str) -> None:
        self._log("nudge_failed", task_id=task_id, agent=agent, reason=reason)

    def _log_events(self, events: Sequence[Event]) -> None:
        """Log lapses, retries, dead letters and duplicates of tasks."""
        for event in events:
            if event.queue.startswith(ENGINE_PREFIX):
                continue
            facts = {"worker": event.worker_id} if event.worker_id else {}
            name = "requeued" if event.kind == "enqueued" else event.kind
            self._log(name, task_id=event.message_id, agent=event.queue, attempt=event.attempt, **facts)

    def _loop_failed(self, loop: str, error: BaseException) -> None:
        self._log("loop_error", loop=loop, error=error_location(error))
        if isinstance(error, HandleDead):
            self._tasks.reopen()

    def _log(self, event: str, **facts: Any) -> None:
        if self._server_log is not None:
            self._server_log.write(event, **facts)
