"""The loops of the harness on real stores, with a manual clock. Few tests need threads."""

import io
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from postroom import Tasks
from postroom.contracts.tasks.tasks import DECISIONS, LeasedTask
from postroom.core.lifecycle.retry import RetryPolicy
from postroom.core.names import scoped
from postroom.errors import InvalidMessage, StaleLease, Unavailable
from postroom.message import Envelope
from postroom.server.access.registry import Agents
from postroom.server.harness.followers import POSITION_FILE
from postroom.server.harness.harness import DECISION_LEASE_S, Execute, Harness, Loop
from postroom.server.telemetry.server_log import ServerLog
from postroom.system.clock import SystemClock
from postroom.testing import FaultyStore, ManualClock
from tests.faultydisk import in_background
from tests.postgresserver import database, postgres, store_url
from tests.waiting import HANG_GUARD_S, until

__all__ = ["database", "postgres"]  # fixtures

AGENT_POLLS_EVERY_S = 10.0


class Env(NamedTuple):
    """A data folder, its tasks, and a manual clock."""

    folder: Path
    clock: ManualClock
    tasks: Tasks
    agents: Agents

    def harness(self, execute: Execute | None) -> Harness:
        return Harness(self.tasks, agents=self.agents, execute=execute, clock=self.clock)

    def completed(self, result: object = "label", agent: str = "triage") -> str:
        """A task that an agent has completed."""
        task_id = self.tasks.enqueue(agent=agent, payload={})
        [task] = self.tasks.claim(agent=agent)
        self.tasks.complete(task.task_id, task.lease, result)
        return task_id

    def status(self, task_id: str) -> str:
        return self.tasks.get(task_id).status


@pytest.fixture(params=["sqlite", "memory"])
def env(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Env]:
    clock = ManualClock()
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'queue.db'}"
    with Tasks.open(url, clock=clock) as tasks:
        yield Env(tmp_path, clock, tasks, Agents(tmp_path))


def drain_for(env: Env, harness: Harness, seconds: int) -> None:
    """Let time pass second by second, and run the loops that are due."""
    for _ in range(seconds):
        env.clock.advance(1)
        harness.step()


# ---- results become effects ------------------------------------------------------------------------


def test_a_result_is_executed_and_then_done(env: Env) -> None:
    seen: list[LeasedTask] = []
    task_id = env.completed({"decision": "close"})
    env.harness(seen.append).step()
    [decision] = seen
    assert decision.payload == {"decision": "close"}
    assert (decision.parent, decision.agent) == (task_id, DECISIONS)
    assert env.status(task_id) == "done"
    assert env.status(decision.task_id) == "completed"


def test_a_result_is_not_done_before_it_was_executed(env: Env) -> None:
    """Foreman marked a result done, and then executed it: a crash in between lost it."""
    states: list[str] = []
    task_id = env.completed()
    env.harness(lambda decision: states.append(env.status(decision.parent))).step()
    assert states == ["completed"]
    assert env.status(task_id) == "done"


def test_a_crash_while_executing_executes_again(env: Env) -> None:
    class Died(BaseException):
        pass

    def die(_: LeasedTask) -> None:
        raise Died

    task_id = env.completed()
    with pytest.raises(Died):
        env.harness(die).step()
    assert env.status(task_id) == "completed"
    seen: list[LeasedTask] = []
    second = env.harness(seen.append)
    second.step()
    assert seen == []  # the dead harness's lease has not run out
    env.clock.advance(301)
    second.step()
    assert [decision.attempt for decision in seen] == [2]
    assert env.status(task_id) == "done"


def test_every_result_is_executed_once(env: Env) -> None:
    executed: list[str] = []
    harness = env.harness(lambda decision: executed.append(decision.parent))
    expected = [env.completed(number) for number in range(120)]
    harness.step()
    expected += [env.completed(number) for number in range(5)]
    harness.wake()
    harness.step()
    drain_for(env, harness, 30)
    assert executed == expected


def test_results_wait_for_a_harness_with_an_executor(env: Env) -> None:
    task_id = env.completed()
    drain_for(env, env.harness(None), 30)
    assert env.status(task_id) == "completed"
    assert DECISIONS not in env.tasks.status().agents
    env.harness(lambda _: None).step()
    assert env.status(task_id) == "done"


def test_a_decision_without_a_task_is_executed_and_ends(env: Env) -> None:
    """The task was purged, or an earlier version let a client enqueue the decision."""
    seen: list[LeasedTask] = []
    alone = Envelope(queue=DECISIONS, payload=b'"by hand"')
    [accepted] = env.tasks.store.write(lambda transaction: transaction.insert([alone]))
    decision_id = accepted.message_id
    env.harness(seen.append).step()
    assert len(seen) == 1
    assert env.status(decision_id) == "completed"


# ---- loops survive ---------------------------------------------------------------------------------


def test_the_drain_loop_survives_any_exception(env: Env) -> None:
    """Foreman's drain loop died for good on the first exception."""
    seen: list[str] = []
    errors: list[BaseException] = [ValueError("no label"), SystemExit(3), RecursionError()]

    def execute(decision: LeasedTask) -> None:
        if errors:
            raise errors.pop(0)
        seen.append(decision.parent)

    harness = env.harness(execute)
    task_ids = [env.completed() for _ in range(4)]
    harness.step()
    assert len(seen) == 1
    drain_for(env, harness, 20)
    assert sorted(seen) == sorted(task_ids)
    drain = harness.status().loops["drain"]
    assert drain.errors == 3
    assert "RecursionError" in drain.last_error
    assert drain.last_error_at is not None


def test_every_loop_survives_a_store_that_fails(tmp_path: Path) -> None:
    clock = ManualClock()
    with Tasks.open(f"sqlite:///{tmp_path / 'queue.db'}", clock=clock) as real:
        store = FaultyStore(real.store)
        tasks = Tasks(store)
        env = Env(tmp_path, clock, tasks, Agents(tmp_path))
        task_id = env.completed()
        harness = env.harness(lambda _: None)
        store.inject("crash", "crash", "crash", "crash", "crash", "crash")
        for _ in range(6):
            clock.advance(60)
            harness.step()
        loops = harness.status().loops
        assert loops["drain"].errors + loops["sweep"].errors >= 6
        assert "crash" in loops["sweep"].last_error.lower()
        drain_for(env, harness, 20)
        assert env.status(task_id) == "done"


def test_a_decision_that_keeps_failing_ends_in_the_dead_letters(env: Env) -> None:
    """Foreman retried a decision whose execution always raises."""
    attempts: list[int] = []

    def execute(decision: LeasedTask) -> None:
        attempts.append(decision.attempt)
        raise OSError("GitHub is down")

    harness = env.harness(execute)
    task_id = env.completed()
    drain_for(env, harness, 600)
    assert attempts == [1, 2, 3, 4]
    [line] = env.tasks.find(agent=DECISIONS)
    decision = env.tasks.get(line.task_id)
    assert (decision.status, decision.parent) == ("failed", task_id)
    assert decision.errors == ["GitHub is down"] * 4
    assert env.status(task_id) == "completed"


def test_a_dead_decision_can_be_tried_again_by_hand(env: Env) -> None:
    works = False

    def execute(_: LeasedTask) -> None:
        if not works:
            raise OSError("GitHub is down")

    harness = env.harness(execute)
    task_id = env.completed()
    drain_for(env, harness, 60)
    [line] = env.tasks.find(agent=DECISIONS, state="DEAD_LETTER")
    works = True
    env.tasks.retry(line.task_id)
    drain_for(env, harness, 11)
    assert env.status(task_id) == "done"


def test_a_failing_decision_does_not_delay_the_others(env: Env) -> None:
    bad = env.completed("bad")
    good = [env.completed("good") for _ in range(3)]

    def execute(decision: LeasedTask) -> None:
        if decision.payload == "bad":
            raise ValueError("bad")

    env.harness(execute).step()
    assert [env.status(task_id) for task_id in good] == ["done"] * 3
    assert env.status(bad) == "completed"


def test_an_executor_that_outlives_its_lease_is_counted(env: Env) -> None:
    def execute(_: LeasedTask) -> None:
        env.clock.advance(301)
        env.tasks.sweep()

    task_id = env.completed()
    harness = env.harness(execute)
    harness.step()
    assert "StaleLease" in harness.status().loops["drain"].last_error
    assert env.status(task_id) == "completed"


class Killed(BaseException):
    """The process ends in the middle of its work."""


def test_a_decision_begun_by_a_killed_harness_is_executed_by_the_next_one(env: Env) -> None:
    """After its own short lease, not that of a task: the harness renews it, so it needs no long one."""

    def die(_: LeasedTask) -> None:
        raise Killed

    task_id = env.completed()
    with pytest.raises(Killed):
        env.harness(die).step()
    executed: list[str] = []
    harness = env.harness(lambda decision: executed.append(decision.parent))
    harness.step()
    assert executed == []
    env.clock.advance(DECISION_LEASE_S)
    harness.step()
    assert executed == [task_id]
    assert env.status(task_id) == "done"


def test_a_beat_renews_the_lease_of_a_running_decision(env: Env) -> None:
    harness: Harness

    def execute(_: LeasedTask) -> None:
        for _beat in range(4):
            env.clock.advance(DECISION_LEASE_S * 2 / 3)
            harness.beat()

    task_id = env.completed()
    harness = env.harness(execute)
    harness.step()
    assert env.status(task_id) == "done"
    assert harness.status().loops["drain"].errors == 0


# ---- several at the same time, and in order --------------------------------------------------------


@contextmanager
def threaded(env: Env, execute: Execute, **terms: Any) -> Iterator[Harness]:
    """A harness whose loops and executions run in threads."""
    harness = Harness(env.tasks, agents=env.agents, execute=execute, **terms)
    harness.start()
    try:
        yield harness
    finally:
        harness.stop()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Env]:
    """A data folder with a running clock, and retries without a pause."""
    retry = RetryPolicy(max_retries=2, first_delay_s=0.01)
    with Tasks.open(f"sqlite:///{tmp_path / 'queue.db'}", retry=retry) as tasks:
        yield Env(tmp_path, ManualClock(), tasks, Agents(tmp_path))


def test_decisions_are_executed_at_the_same_time(live: Env) -> None:
    together = threading.Barrier(3)

    def execute(_: LeasedTask) -> None:
        together.wait(HANG_GUARD_S)

    done = [live.completed(n) for n in range(6)]
    with threaded(live, execute, concurrency=3) as harness:
        for task_id in done:
            until(lambda task_id=task_id: live.status(task_id) == "done")  # type: ignore[misc]
        until(lambda: harness.status().executing == [])
        assert harness.status().executed == 6
        assert harness.status().loops["drain"].errors == 0


def test_in_order_decisions_wait_only_for_those_of_the_same_agent(live: Env) -> None:
    """The first decision of the slow agent fails twice. Its others wait; those of another agent do not."""
    slow = [live.completed(n, "slow") for n in range(4)]
    quick = [live.completed(n, "quick") for n in range(4)]
    executed: list[tuple[str, int]] = []
    failures = iter([True, True])
    others_done = threading.Event()

    def execute(decision: LeasedTask) -> None:
        agent = live.tasks.get(decision.parent).agent
        if agent == "slow":
            assert others_done.wait(HANG_GUARD_S)
            if next(failures, False):
                raise ValueError("not yet")
        executed.append((agent, decision.payload))
        if len(executed) == len(quick):
            others_done.set()

    with threaded(live, execute, concurrency=3, in_order=True):
        until(lambda: all(live.status(task_id) == "done" for task_id in slow + quick))
    assert executed == [("quick", n) for n in range(4)] + [("slow", n) for n in range(4)]


def test_in_order_a_dead_decision_does_not_block_the_next(live: Env) -> None:
    bad, good = live.completed("bad"), live.completed("good")

    def execute(decision: LeasedTask) -> None:
        if decision.payload == "bad":
            raise ValueError("never")

    with threaded(live, execute, concurrency=2, in_order=True):
        until(lambda: live.status(good) == "done")
    assert live.status(bad) == "completed"
    [dead] = live.tasks.find(agent=DECISIONS, state="DEAD_LETTER")
    assert live.tasks.get(dead.task_id).parent == bad


def test_decision_settled_elsewhere_does_not_block_the_next_in_order(env: Env) -> None:
    first, second = env.completed("first"), env.completed("second")
    executed: list[object] = []

    def execute(decision: LeasedTask) -> None:
        if decision.payload == "first":
            raise ValueError("not here")
        executed.append(decision.payload)

    harness = Harness(env.tasks, agents=env.agents, execute=execute, clock=env.clock, in_order=True)
    harness.step()
    assert executed == []  # the second decision waits, and keeps its lease
    env.clock.advance(1)
    [decision] = env.tasks.claim(agent=DECISIONS)
    env.tasks.settle(decision)
    harness.wake()
    harness.step()
    assert executed == ["second"]
    assert [env.status(task_id) for task_id in (first, second)] == ["done", "done"]


def test_waiting_decisions_are_released_by_stop(live: Env) -> None:
    live.completed(1)
    live.completed(2)
    began, end = threading.Event(), threading.Event()

    def execute(_: LeasedTask) -> None:
        began.set()
        assert end.wait(HANG_GUARD_S)

    harness = Harness(live.tasks, agents=live.agents, execute=execute, concurrency=2, in_order=True)
    harness.start()
    assert began.wait(HANG_GUARD_S)
    until(lambda: live.tasks.status().agents[DECISIONS].in_flight == 2)
    end.set()
    harness.stop()
    states = live.tasks.status().agents[DECISIONS].states
    assert states.get("PROCESSING", 0) == 0


def test_an_execution_interrupted_by_stop_is_not_a_failure(live: Env) -> None:
    live.completed(1)
    began, stopping = threading.Event(), threading.Event()

    def execute(_: LeasedTask) -> None:
        began.set()
        assert stopping.wait(HANG_GUARD_S)
        raise ValueError("the program was ended")

    harness = Harness(live.tasks, agents=live.agents, execute=execute, concurrency=2)
    harness.start()
    assert began.wait(HANG_GUARD_S)
    ending = in_background(harness.stop)
    until(lambda: harness._drain.stopping)
    stopping.set()
    ending.join(HANG_GUARD_S)
    [decision] = live.tasks.find(agent=DECISIONS)
    assert (decision.state, live.tasks.get(decision.task_id).retry_count) == ("QUEUED", 0)


def test_a_beat_renews_the_lease_of_a_waiting_decision(env: Env) -> None:
    env.completed("first")
    env.completed("second")

    def execute(_: LeasedTask) -> None:
        raise ValueError("not yet")

    harness = Harness(env.tasks, agents=env.agents, execute=execute, clock=env.clock, in_order=True)
    harness.step()
    for _ in range(4):
        env.clock.advance(DECISION_LEASE_S * 2 / 3)
        harness.beat()
    env.tasks.sweep()
    assert env.tasks.status().agents[DECISIONS].lapses == 0


@pytest.mark.parametrize("wrong", [0, -1, 257, 1.0, True])
def test_concurrency_has_limits(env: Env, wrong: Any) -> None:
    with pytest.raises(InvalidMessage, match="concurrency must be from 1 to 256"):
        Harness(env.tasks, agents=env.agents, concurrency=wrong)


# ---- leases that end ---------------------------------------------------------------------------------


def test_the_sweep_runs_when_a_new_short_lease_ends(env: Env) -> None:
    """A sweep every 60 s would show the task as claimed for up to a minute."""
    harness = env.harness(None)
    harness.step()
    task_id = env.tasks.enqueue(agent="triage", payload=1)
    env.tasks.claim(agent="triage", lease_s=2.0)
    harness.lease_given(2.0)
    env.clock.advance(1)
    harness.step()
    assert env.status(task_id) == "claimed"
    env.clock.advance(1)
    harness.step()
    assert env.status(task_id) == "pending"


def test_the_sweep_runs_when_the_next_stored_lease_ends(env: Env) -> None:
    ids = [env.tasks.enqueue(agent=f"agent-{n}", payload=n) for n in range(3)]
    for n, lease_s in enumerate((9.0, 5.0, 700.0)):
        env.tasks.claim(agent=f"agent-{n}", lease_s=lease_s)
    harness = env.harness(None)
    shown = []
    for _ in range(10):
        harness.step()
        shown.append([env.status(task_id) for task_id in ids].count("claimed"))
        env.clock.advance(1)
    assert shown == [3, 3, 3, 3, 3, 2, 2, 2, 2, 1]


def test_short_leases_do_not_make_the_sweep_spin(env: Env) -> None:
    harness = env.harness(None)
    harness.step()
    runs = harness.status().loops["sweep"].runs
    for _ in range(100):
        harness.lease_given(0.001)
        harness.step()
    assert harness.status().loops["sweep"].runs == runs


def test_a_sleeping_loop_can_be_rescheduled_earlier(tmp_path: Path) -> None:
    turns = threading.Semaphore(0)
    loop = Loop("test", 3_600.0, turns.release, SystemClock())
    loop.start()
    try:
        assert turns.acquire(timeout=HANG_GUARD_S)
        loop.run_within(0.01)
        assert turns.acquire(timeout=HANG_GUARD_S)
        loop.wake()
        assert turns.acquire(timeout=HANG_GUARD_S)
    finally:
        loop.stop()
        loop.join(HANG_GUARD_S)


def test_failures_are_logged(live: Env, tmp_path: Path) -> None:
    stream = io.StringIO()
    server_log = ServerLog(stream)
    harness = Harness(live.tasks, agents=live.agents, server_log=server_log)
    harness.start()
    new: dict[str, Any] = {"agent": "triage", "payload": "a secret", "task_id": "t-1", "max_retries": 1}
    live.tasks.enqueue(**new)
    live.tasks.enqueue(**new)
    live.tasks.claim(agent="triage", lease_s=0.001, worker="sleepy")
    until(lambda: live.tasks.sweep() or live.status("t-1") == "pending")
    [task] = live.tasks.claim(agent="triage", worker="w")
    live.tasks.fail(task.task_id, task.lease, "a secret error")
    harness.stop()
    server_log.close()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    logged = [(line["event"], line["attempt"]) for line in lines if line["task_id"] == "t-1"]
    assert logged == [("duplicate", 0), ("lease_lapsed", 1), ("requeued", 1), ("dead_letter", 2)]
    assert {line["agent"] for line in lines if line["task_id"] == "t-1"} == {"triage"}
    assert next(line for line in lines if line["event"] == "lease_lapsed")["worker"] == "sleepy"
    assert "secret" not in stream.getvalue()


# ---- zombies ---------------------------------------------------------------------------------------


def test_a_zombies_late_complete_does_not_run_its_actions_again(env: Env) -> None:
    """In foreman a late complete moved a done task back to completed, and its actions ran twice."""
    executed: list[object] = []
    harness = env.harness(lambda decision: executed.append(decision.payload))
    task_id = env.tasks.enqueue(agent="triage", payload={})
    [zombie] = env.tasks.claim(agent="triage")
    env.clock.advance(301)
    [second] = env.tasks.claim(agent="triage")
    env.tasks.complete(task_id, second.lease, "second")
    drain_for(env, harness, 10)
    before = env.tasks.get(task_id)
    with pytest.raises(StaleLease):
        env.tasks.complete(task_id, zombie.lease, "zombie")
    drain_for(env, harness, 30)
    assert env.tasks.get(task_id) == before
    assert before.status == "done"
    assert executed == ["second"]


def test_a_failed_task_is_not_resurrected_by_a_late_complete(env: Env) -> None:
    executed: list[LeasedTask] = []
    harness = env.harness(executed.append)
    task_id = env.tasks.enqueue(agent="triage", payload={}, max_retries=0)
    [task] = env.tasks.claim(agent="triage")
    env.clock.advance(301)
    drain_for(env, harness, 61)
    assert env.status(task_id) == "failed"
    with pytest.raises(StaleLease):
        env.tasks.complete(task_id, task.lease, "late")
    drain_for(env, harness, 30)
    assert env.status(task_id) == "failed"
    assert executed == []


def test_the_sweep_requeues_a_lapsed_task(env: Env) -> None:
    task_id = env.tasks.enqueue(agent="triage", payload={})
    env.tasks.claim(agent="triage")
    harness = env.harness(lambda _: None)
    drain_for(env, harness, 299)
    assert env.status(task_id) == "claimed"
    drain_for(env, harness, 61)
    assert env.status(task_id) == "pending"
    assert env.tasks.status().agents["triage"].lapses == 1


# ---- latency without nudges ------------------------------------------------------------------------


@pytest.mark.parametrize("offset_s", range(0, 30, 4))
def test_with_every_nudge_lost_a_decision_is_executed_within_30_s(env: Env, offset_s: int) -> None:
    executed_at: list[int] = []
    harness = env.harness(lambda _: executed_at.append(env.clock.boot_ns()))
    harness.step()
    env.clock.advance(offset_s + 1)
    started = env.clock.boot_ns()
    env.tasks.enqueue(agent="triage", payload={})
    for second in range(60):
        if second % AGENT_POLLS_EVERY_S == AGENT_POLLS_EVERY_S - 1:
            for task in env.tasks.claim(agent="triage"):
                env.tasks.complete(task.task_id, task.lease, "label")
        env.clock.advance(1)
        harness.step()
    [at] = executed_at
    assert (at - started) / 1e9 < 30


# ---- where it stands -------------------------------------------------------------------------------


def test_the_position_survives_a_restart(env: Env) -> None:
    first: list[LeasedTask] = []
    env.completed(1)
    env.harness(first.append).step()
    position = json.loads((env.folder / POSITION_FILE).read_bytes())
    assert position["seq"] > 0
    second: list[LeasedTask] = []
    harness = env.harness(second.append)
    harness.step()
    assert second == []
    env.completed(2)
    drain_for(env, harness, 10)
    assert [decision.payload for decision in second] == [2]


@pytest.mark.parametrize(
    "text", [None, "", "{", '{"seq": -5}', '{"seq": 99999999}', '{"seq": 3, "ts_us": 1}']
)
def test_a_lost_or_foreign_position_loses_no_result(env: Env, text: str | None) -> None:
    env.harness(lambda _: None).step()
    executed: list[object] = []
    task_ids = [env.completed(number) for number in range(3)]
    path = env.folder / POSITION_FILE
    if text is not None:
        path.write_text(text)
    env.harness(lambda decision: executed.append(decision.payload)).step()
    assert executed == [0, 1, 2]
    path.unlink()
    env.harness(lambda decision: executed.append(decision.payload)).step()
    assert executed == [0, 1, 2]
    assert {env.status(task_id) for task_id in task_ids} == {"done"}


def test_a_crash_between_decision_and_position_opens_nothing_twice(env: Env) -> None:
    task_id = env.completed()
    assert env.tasks.open_decision(task_id) is not None
    executed: list[LeasedTask] = []
    harness = env.harness(executed.append)
    drain_for(env, harness, 30)
    assert [decision.parent for decision in executed] == [task_id]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 50])
def test_the_newest_event_is_found(env: Env, count: int) -> None:
    for _ in range(count):
        env.tasks.enqueue(agent="triage", payload={})
    events = env.tasks.events()
    assert env.tasks.store.newest_event() == (events[-1].seq if events else 0)


# ---- nudges ----------------------------------------------------------------------------------------


class Agent:
    """A listening socket that accepts every nudge."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.server.getsockname()[1]}"
        self.bodies: list[object] = []
        self.came = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self.server.accept()
            except OSError:
                return
            with connection:
                self.bodies.append(json.loads(connection.recv(65_536).partition(b"\r\n\r\n")[2]))
                connection.sendall(b"HTTP/1.1 202 Accepted\r\n\r\n")
            self.came.release()

    def close(self) -> None:
        self.server.shutdown(socket.SHUT_RDWR)
        self.thread.join()
        self.server.close()


@pytest.fixture
def agent() -> Iterator[Agent]:
    listening = Agent()
    yield listening
    listening.close()


def test_an_agent_is_nudged_with_an_id_when_there_is_work(env: Env, agent: Agent) -> None:
    env.agents.add("triage", agent.url)
    early_id = env.tasks.enqueue(agent="triage", payload="before the harness came")
    harness = Harness(
        env.tasks, agents=env.agents, clock=env.clock, allowed_nudge_hosts=["127.0.0.1"]
    )  # fmt: skip
    harness.step()
    assert agent.came.acquire(timeout=HANG_GUARD_S)
    task_id = env.tasks.enqueue(agent="triage", payload={"secret": 1})
    env.tasks.enqueue(agent="other", payload={})
    env.clock.advance(10)
    harness.step()
    assert agent.came.acquire(timeout=HANG_GUARD_S)
    harness.stop()
    assert agent.bodies == [{"task_id": early_id}, {"task_id": task_id}]


def test_many_new_tasks_are_one_nudge(env: Env, agent: Agent) -> None:
    env.agents.add("triage", agent.url)
    harness = Harness(
        env.tasks, agents=env.agents, clock=env.clock, allowed_nudge_hosts=["127.0.0.1"]
    )  # fmt: skip
    harness.step()
    for _ in range(100):
        env.tasks.enqueue(agent="triage", payload={})
    env.clock.advance(10)
    harness.step()
    assert agent.came.acquire(timeout=HANG_GUARD_S)
    harness.stop()
    assert len(agent.bodies) == 1


def test_a_nudge_that_fails_changes_nothing(env: Env, tmp_path: Path) -> None:
    env.agents.add("triage", "http://127.0.0.1:1")
    log = (tmp_path / "log").open("w+")
    server_log = ServerLog(log)
    harness = Harness(env.tasks, agents=env.agents, clock=env.clock, server_log=server_log)
    harness.step()
    task_id = env.tasks.enqueue(agent="triage", payload="secret payload")
    env.clock.advance(10)
    harness.step()
    until(lambda: harness.status().nudges_failed == 1)
    harness.stop()
    server_log.close()
    assert [task.task_id for task in env.tasks.claim(agent="triage")] == [task_id]
    log.seek(0)
    lines = [json.loads(line) for line in log]
    log.close()
    [failed] = [line for line in lines if line["event"] == "nudge_failed"]
    assert (failed["agent"], failed["task_id"]) == ("triage", task_id)
    assert "secret" not in str(lines)


# ---- as threads ------------------------------------------------------------------------------------


def test_the_loops_run_as_threads(tmp_path: Path) -> None:
    executed: list[object] = []
    with Tasks.open(f"sqlite:///{tmp_path / 'queue.db'}") as tasks:
        agents = Agents(tmp_path)
        errors = [Unavailable("first fails")]

        def execute(decision: LeasedTask) -> None:
            if errors:
                raise errors.pop()
            executed.append(decision.payload)

        harness = Harness(tasks, agents=agents, execute=execute)
        harness.start()
        try:
            assert harness.alive
            for number in range(20):
                tasks.enqueue(agent="triage", payload=number)
            for task in tasks.claim(agent="triage", limit=20):
                tasks.complete(task.task_id, task.lease, task.payload)
            harness.wake()
            until(lambda: len(executed) == 20)
            until(lambda: harness.status().executed == 20)
            assert harness.alive
            assert harness.status().loops["drain"].errors == 1
        finally:
            harness.stop()
        assert not harness.alive
    assert sorted(executed, key=str) == sorted(range(20), key=str)


def test_two_harnesses_execute_nothing_twice(tmp_path: Path) -> None:
    executed: list[object] = []
    with Tasks.open(f"sqlite:///{tmp_path / 'queue.db'}") as tasks:
        agents = Agents(tmp_path)
        pair = [
            Harness(tasks, agents=agents, execute=lambda decision: executed.append(decision.payload))
            for _ in range(2)
        ]
        for harness in pair:
            harness.start()
        try:
            tasks.enqueue_many([{"agent": "triage", "payload": number} for number in range(50)])
            for task in tasks.claim(agent="triage", limit=50):
                tasks.complete(task.task_id, task.lease, task.payload)
                for harness in pair:
                    harness.wake()
            until(lambda: sum(harness.status().executed for harness in pair) == 50)
        finally:
            for harness in pair:
                harness.stop()
    assert sorted(executed, key=str) == sorted(range(50), key=str)


# ---- organizations ---------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def every(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Env]:
    """As `env`, on every kind of store."""
    clock = ManualClock()
    with Tasks.open(store_url(request, tmp_path), clock=clock) as tasks:
        yield Env(tmp_path, clock, tasks, Agents(tmp_path))


def test_organizations_take_turns_in_executions(every: Env) -> None:
    executed: list[object] = []
    harness = every.harness(lambda decision: executed.append(decision.payload))
    for number in range(10):
        every.completed(number, scoped("acme", "triage"))
    every.completed("by an operator")
    every.completed("other", scoped("other", "triage"))
    harness.step()
    assert set(executed[:3]) == {0, "by an operator", "other"}
    assert executed[3:] == [*range(1, 10)]


@pytest.mark.parametrize("is_failing", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
def test_one_organization_does_not_use_all_executions(live: Env, in_order: bool, is_failing: bool) -> None:
    ending = threading.Event()

    def execute(decision: LeasedTask) -> None:
        if decision.payload == "slow":
            if is_failing:
                raise ValueError("never")
            assert ending.wait(HANG_GUARD_S)

    slow = [live.completed("slow", scoped("acme", f"agent{number % 60}")) for number in range(150)]
    quick = live.completed("quick", scoped("other", "triage"))
    with threaded(live, execute, concurrency=4, in_order=in_order) as harness:
        until(lambda: live.status(quick) == "done")
        if not is_failing:
            quick = live.completed("quick", scoped("other", "triage"))
            harness.wake()
            until(lambda: live.status(quick) == "done")
            ending.set()
            until(lambda: all(live.status(task_id) == "done" for task_id in slow))


def test_a_retry_of_an_organizations_decision_comes_after_its_pause(every: Env) -> None:
    attempts: list[int] = []

    def execute(decision: LeasedTask) -> None:
        attempts.append(decision.attempt)
        if decision.attempt == 1:
            raise ValueError("not yet")

    task_id = every.completed("retried", scoped("acme", "triage"))
    drain_for(every, every.harness(execute), 60)
    assert attempts == [1, 2]
    assert every.status(task_id) == "done"


def test_harness_finds_decision_queues_opened_by_another_harness(every: Env) -> None:
    task_id = every.completed("left", scoped("acme", "triage"))

    def end(_: LeasedTask) -> None:
        raise SystemExit

    first = every.harness(end)
    first.step()
    executed: list[object] = []
    second = every.harness(lambda decision: executed.append(decision.payload))
    drain_for(every, second, 60)
    assert executed == ["left"]
    assert every.status(task_id) == "done"


def test_decisions_beyond_the_depth_of_a_queue_are_executed(every: Env) -> None:
    """A result is stored already. Its decision was refused, and so no decision of anybody was executed."""
    for queue in (DECISIONS, scoped("acme", DECISIONS)):
        every.tasks.limit_queue(queue, max_depth=1)
    done = [
        every.completed(number, agent) for number in range(3) for agent in ("plain", scoped("acme", "ada"))
    ]
    harness = every.harness(lambda _: None)
    harness.step()
    assert harness.status().loops["drain"].errors == 0
    assert {every.status(task_id) for task_id in done} == {"done"}
