"""The harness: what happens without being asked. Results become decisions, decisions are executed.

Rule 1: a loop survives every exception. It counts it, keeps the last one for the status, and goes on.
Rule 2: a task is done after its decision was executed, never before.
Rule 3: a decision that cannot be executed is retried like any task, and ends in the dead letters.
Rule 4: a decision is executed in one thread at a time, and keeps its lease while it waits for that.
Rule 5: a nudge only makes a loop look earlier. With all of them lost, the intervals find everything.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from datetime import UTC, datetime
from typing import Any

import msgspec

from postroom.contracts.task_operations import DECISIONS, Task, TaskCall
from postroom.contracts.tasks import Tasks
from postroom.core.lifecycle import NANOS_PER_S
from postroom.errors import HandleDead, InvalidMessage, PostroomError, Rejected, StaleLease, UnknownTask
from postroom.message import Event
from postroom.runtime.agents import Agents
from postroom.runtime.executions import CONCURRENCY_MAX, Executions
from postroom.runtime.nudger import NUDGE_TIMEOUT_S, Nudger
from postroom.runtime.server_log import ServerLog, error_location
from postroom.stores.base import FOREVER_NS, PURGE_BATCH_MAX, ByIds, Ending
from postroom.system.atomic import read_file, replace_file
from postroom.system.clock import Clock, SystemClock

DRAIN_EVERY_S = 10.0
SWEEP_EVERY_S = 60.0  # and sooner when a lease ends
SWEEP_PAUSE_S = 0.25  # between two sweeps for leases that end one after the other
DECISION_LEASE_S = 30.0  # after which another harness executes what a killed one had begun
EVENTS_A_READ = 1_000
DECISIONS_A_COMMIT = 50
SWEEPS_MAX = 100  # batches in a row; the next interval takes the rest
STOP_TIMEOUT_S = 5.0
POSITION_FILE = "harness.position"
WORKER = "harness"

Execute = Callable[[Task], None]


class LoopStatus(msgspec.Struct, frozen=True):
    """How one loop stands."""

    running: bool
    every_s: float
    runs: int
    errors: int
    last_error: str
    last_error_at: datetime | None


class HarnessStatus(msgspec.Struct, frozen=True):
    """How the harness stands."""

    loops: dict[str, LoopStatus]
    executed: int
    """Decisions since the start."""
    executing: list[str]
    """The decisions that are being executed."""
    nudges_sent: int
    nudges_failed: int


class Position(msgspec.Struct, frozen=True):
    """The last event that was seen. Its facts tell whether the store still is the one it was seen in."""

    seq: int = 0
    ts_us: int = 0
    message_id: str = ""


class Loop:
    """Work that is due now and then, and sooner when it is woken."""

    def __init__(self, name: str, every_s: float, work: Callable[[], None], clock: Clock) -> None:
        self.name = name
        self.every_s = every_s
        self._work = work
        self._clock = clock
        self._due_ns = 0
        self._woken = threading.Event()
        self._sooner = threading.Event()
        """Set when the next turn may be earlier than the thread waits for."""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._runs = 0
        self._errors = 0
        self._last_error = ""
        self._last_error_at: datetime | None = None
        self.report: Callable[[str, BaseException], None] | None = None

    @property
    def stopping(self) -> bool:
        """Whether a long turn shall come to its end."""
        return self._stopping.is_set()

    def wake(self) -> None:
        """Look now. May be called from anywhere, any number of times."""
        self._woken.set()
        self._sooner.set()

    def due_in_s(self) -> float:
        """How long until the next turn."""
        if self._woken.is_set():
            return 0.0
        return max(0.0, (self._due_ns - self._clock.boot_ns()) / NANOS_PER_S)

    def look_again_in(self, pause_s: float) -> None:
        """Have the next turn earlier than the interval says. May be called from anywhere."""
        due_ns = self._clock.boot_ns() + round(pause_s * NANOS_PER_S)
        if due_ns < self._due_ns:
            self._due_ns = due_ns
            self._sooner.set()

    def turn(self) -> None:
        """Do the work once. It may raise what it likes."""
        self._woken.clear()
        self._due_ns = self._clock.boot_ns() + round(self.every_s * NANOS_PER_S)
        self._runs += 1
        try:
            self._work()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - see rule 1
            self.failed(error)

    def failed(self, error: BaseException) -> None:
        """Count an error, and keep it for the status."""
        self._errors += 1
        self._last_error = f"{type(error).__name__}: {error}"
        self._last_error_at = datetime.now(UTC)
        if self.report is not None:
            with suppress(Exception):
                self.report(self.name, error)

    def start(self) -> None:
        """Run in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name=f"postroom-{self.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.turn()
            while not self._stopping.is_set() and (left_s := self.due_in_s()) > 0:
                self._sooner.wait(left_s)
                self._sooner.clear()

    def stop(self) -> None:
        """End after the turn that is under way."""
        self._stopping.set()
        self._sooner.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the end."""
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


class Harness:
    """The loops of a task queue: drain (results to decisions to effects), sweep, and nudges to agents.

    `execute` acts on one decision: its payload is the result, its parent the task. Without it, results stay
    completed until a harness with one comes along. `start` runs the loops in threads; `step` runs what is due
    on the clock, in the caller's. `concurrency` is how many decisions are executed at the same time once it
    is started; `in_order` keeps those of one agent in the order of its results.
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
        clock: Clock | None = None,
        server_log: ServerLog | None = None,
    ) -> None:
        if type(concurrency) is not int or not 1 <= concurrency <= CONCURRENCY_MAX:
            raise InvalidMessage(f"concurrency must be from 1 to {CONCURRENCY_MAX}, not {concurrency!r}")
        self._tasks = tasks
        self._agents = agents
        self._execute = execute
        self._lease_s = lease_s
        self._server_log = server_log
        self._nudger = Nudger(
            allowed_hosts=allowed_nudge_hosts, timeout_s=nudge_timeout_s, report=self._nudge_failed
        )
        self._position_path = agents.data / POSITION_FILE
        self._position: Position | None = None
        self._nudged_to: int | None = None
        self._subscriptions: dict[str, AbstractContextManager[None]] = {}
        self._stack = ExitStack()
        self._executions = Executions(
            self._act_on,
            agent_of=self._agent_of,
            has_room=self.wake,
            concurrency=concurrency,
            in_order=in_order,
        )
        self._executed = 0
        self._counting = threading.Lock()
        self._clock = clock = SystemClock() if clock is None else clock
        self._purge_ns = 0
        self._drain = Loop("drain", drain_every_s, self.drain, clock)
        self._sweep = Loop("sweep", sweep_every_s, self.sweep, clock)
        self._nudge = Loop("nudge", drain_every_s, self.nudge_agents, clock)
        self._beat = Loop("beat", lease_s / 3, self.beat, clock)
        self._loops = (
            (self._drain, self._sweep, self._nudge)
            if execute is not None
            else (self._sweep, self._nudge)
        )  # fmt: skip
        for loop in (*self._loops, self._beat):
            loop.report = self._loop_failed

    # ---- running -------------------------------------------------------------------------------

    def start(self) -> None:
        """Run every loop in a thread of its own."""
        if self._nudged_to is None:
            self._nudged_to = self._tasks.store.newest_event()  # what comes from now on is new
        if self._server_log is not None:
            self._tasks.on_notable = self._log_events
        if self._execute is not None:
            self._executions.start()
            self._stack.enter_context(self._tasks.notifier.subscribed(DECISIONS, self._drain.wake))
            self._beat.start()
        for loop in self._loops:
            loop.start()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the loops. A decision that is being executed then is executed again by the next harness."""
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
        self._stack.close()
        for subscription in self._subscriptions.values():
            subscription.__exit__(None, None, None)
        self._subscriptions.clear()

    def wake(self) -> None:
        """There may be a result."""
        self._drain.wake()

    def step(self) -> None:
        """One turn of every loop that is due."""
        for loop in self._loops:
            if loop.due_in_s() <= 0:
                loop.turn()

    def status(self) -> HarnessStatus:
        """What the loops have done, and what went wrong."""
        return HarnessStatus(
            loops={loop.name: loop.status() for loop in self._loops},
            executed=self._executed,
            executing=[decision.task_id for decision in self._executions.executing],
            nudges_sent=self._nudger.sent,
            nudges_failed=self._nudger.failed,
        )

    @property
    def alive(self) -> bool:
        """Whether every loop that was started still runs."""
        return all(loop.status().running for loop in self._loops)

    # ---- results -------------------------------------------------------------------------------

    def drain(self) -> None:
        """Make decisions of new results, and execute them until there is none."""
        if self._execute is None:
            return
        self._executions.advance(self._tasks.ended)
        while not self._drain.stopping:
            self.open_decisions()
            room = self._executions.room()
            if not room:
                return  # the end of an execution wakes this loop
            claimed = self._tasks.claim(
                agent=DECISIONS, limit=room, lease_s=self._lease_s, worker=WORKER
            )  # fmt: skip
            if not claimed:
                break
            for decision in claimed:
                self._executions.begin(decision)
        waits_ns = self._tasks.store.next_work_ns(DECISIONS)
        if waits_ns is not None:
            self._drain.look_again_in(waits_ns / NANOS_PER_S)

    def open_decisions(self) -> None:
        """Follow the events, and make every result a decision. Reading an event twice is harmless."""
        position = self._position or self._load_position()
        while events := self._tasks.events(after=position.seq, limit=EVENTS_A_READ):
            completed = [
                event.message_id
                for event in events
                if event.kind == "execution_completed" and event.queue != DECISIONS
            ]
            for start in range(0, len(completed), DECISIONS_A_COMMIT):
                self._open(completed[start : start + DECISIONS_A_COMMIT])
            # After the decisions are stored: a crash in between reads the events again.
            position = self._keep_position(events[-1])
        self._position = position

    def _open(self, task_ids: list[str]) -> None:
        outcomes = self._tasks.run_many([_opening(task_id) for task_id in task_ids])
        for task_id, outcome in zip(task_ids, outcomes, strict=True):
            if isinstance(outcome, Rejected):  # forgotten meanwhile: nothing is left to act on
                self._log("decision_not_opened", task_id=task_id, error=type(outcome).__name__)
            elif isinstance(outcome, PostroomError):
                raise outcome
            elif outcome is not None:
                self._log("decision_opened", task_id=task_id, decision=outcome)

    def _act_on(self, decision: Task) -> bool:
        """Execute a decision and say how it went; whether that was its end."""
        try:
            return self._executed_and_settled(decision)
        except PostroomError as error:  # of the store: its lease runs out, and it is executed again
            self._drain.failed(error)
            return False

    def _executed_and_settled(self, decision: Task) -> bool:
        execute = self._execute
        try:
            if execute is not None:
                execute(decision)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever an executor raises, see rule 1
            if self._drain.stopping:  # whoever ends the harness ends its programs, too: that is no failure
                self._tasks.release(decision.task_id, decision.lease)
                return False
            self._drain.failed(error)
            self._log(
                "decision_failed",
                task_id=decision.parent,
                decision=decision.task_id,
                error=error_location(error),
            )
            return self._give_back(decision, error)
        self._tasks.settle(decision)
        with self._counting:
            self._executed += 1
        self._log("decision_executed", task_id=decision.parent, decision=decision.task_id)
        return True

    def _give_back(self, decision: Task, error: BaseException) -> bool:
        """The execution failed: whether it was the last attempt."""
        self._tasks.fail(
            decision.task_id, decision.lease, _sentence(error), error_type=type(error).__name__
        )  # fmt: skip
        return bool(self._tasks.ended([decision.task_id]))

    def _agent_of(self, decision: Task) -> str:
        """The agent whose result a decision is; what has no task any more is in nobody's way."""
        try:
            [record] = self._tasks.store.find(ByIds((decision.parent,)))
        except UnknownTask:
            return decision.task_id
        return record.queue

    def beat(self) -> None:
        """Keep the leases of what is being executed, and of what waits for that."""
        for decision in self._executions.held:
            try:
                self._tasks.heartbeat(decision.task_id, decision.lease)
            except StaleLease:
                if decision in self._executions.held:  # else it was settled meanwhile
                    raise

    def _load_position(self) -> Position:
        """Where the last harness stood, if it stood in this very store; else the beginning."""
        try:
            position = msgspec.json.decode(read_file(self._position_path), type=Position)
        except (OSError, msgspec.MsgspecError, ValueError):
            return Position()
        at = self._tasks.events(after=position.seq - 1, limit=1) if position.seq > 0 else []
        if not at or (at[0].seq == position.seq and _place(at[0]) != position):
            return Position()
        return position

    def _keep_position(self, event: Event) -> Position:
        position = self._position = _place(event)
        replace_file(self._position_path, msgspec.json.encode(position), "os")
        return position

    # ---- nudges --------------------------------------------------------------------------------

    def nudge_agents(self) -> None:
        """Tell the agents that have an address about what is new for them."""
        urls = self._agents.with_url()
        new = [agent for agent in urls if agent not in self._subscriptions]
        self._subscribe_to(urls)
        if not urls:
            self._nudged_to = None
            return
        if self._nudged_to is None:  # the first agent with an address has just come
            self._nudged_to = self._tasks.store.newest_event()
        newest: dict[str, str] = {}
        while events := self._tasks.events(after=self._nudged_to, limit=EVENTS_A_READ):
            newest.update(
                (event.queue, event.message_id)
                for event in events
                if event.kind == "enqueued" and event.queue in urls
            )
            self._nudged_to = events[-1].seq
        for agent in new:  # something may have waited before it had an address
            for waiting in self._tasks.find(agent=agent, state="QUEUED", limit=1):
                newest.setdefault(agent, waiting.task_id)
        for agent, task_id in newest.items():
            self._nudger.nudge(agent, urls[agent], task_id)

    def _subscribe_to(self, urls: dict[str, str]) -> None:
        """Hear the bells of exactly these agents."""
        for agent in [agent for agent in self._subscriptions if agent not in urls]:
            self._subscriptions.pop(agent).__exit__(None, None, None)
        for agent in urls:
            if agent not in self._subscriptions:
                subscription = self._tasks.notifier.subscribed(agent, self._nudge.wake)
                subscription.__enter__()
                self._subscriptions[agent] = subscription

    def _nudge_failed(self, agent: str, task_id: str, reason: str) -> None:
        self._log("nudge_failed", task_id=task_id, agent=agent, reason=reason)

    # ---- the rest ------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Put back what has run out, and forget what is over. The next turn is when the next lease ends."""
        for _ in range(SWEEPS_MAX):
            if self._tasks.sweep() < PURGE_BATCH_MAX or self._sweep.stopping:
                break
        for record in self._tasks.store.find(Ending("lease", FOREVER_NS, 1)):
            left_s = (record.lease_until - self._tasks.store.steady_ns()) / NANOS_PER_S
            self._sweep.look_again_in(max(SWEEP_PAUSE_S, left_s))
        if self._clock.boot_ns() >= self._purge_ns:
            self._purge_ns = self._clock.boot_ns() + round(self._sweep.every_s * NANOS_PER_S)
            self._tasks.purge()

    def lease_given(self, lease_s: float) -> None:
        """A task was claimed: look again when its lease ends without a heartbeat."""
        if lease_s < self._sweep.every_s:
            self._sweep.look_again_in(max(SWEEP_PAUSE_S, lease_s))

    def _log_events(self, events: Sequence[Event]) -> None:
        """Lapses, retries, dead letters and duplicates, as lines of the log."""
        for event in events:
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


def _opening(task_id: str) -> TaskCall:
    return lambda operations: operations.open_decision(task_id)


def _place(event: Event) -> Position:
    return Position(event.seq, event.ts_us, event.message_id)


def _sentence(error: BaseException) -> str:
    """What an error says, as text that can be stored."""
    text = str(error) or type(error).__name__
    return text.encode("utf-8", "replace").decode()
