"""Bad input, other organizations, many processes and a full disk do no harm to goals."""

import asyncio
import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from postroom import Engine, Policy
from postroom.calls.submit import SubmitFields
from postroom.errors import InvalidMessage, InvalidSetting, PostroomError, Rejected, Unavailable, UnknownGoal
from postroom.message import org_of
from postroom.stores.sqlite.store import RESERVE_BYTES, SqliteStore
from postroom.testing import check_consistency
from tests import children
from tests.children import no_child_left
from tests.engines import EngineUnderTest
from tests.postgresserver import database, postgres, store_url
from tests.smalldisk import fill, small_disk
from tests.waiting import HANG_GUARD_S

__all__ = ["database", "no_child_left", "postgres", "small_disk"]  # fixtures

PROCESSES = 8
BAD: list[Any] = [
    None, 7, 1.5, "", "\ud800", "a\0b", "a\x1fb", "x" * 100_000, "g#", "g#01", "g#１", "g#-1",
    "g#99999999999999999999", [], {}, b"x", {1: 2}, {"a": "\ud800"},
]  # fmt: skip


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    one = EngineUnderTest(store_url(request, tmp_path), Policy())
    yield one
    check_consistency(one.engine.store)
    one.close()


def test_what_does_not_fit_is_refused_with_a_one_line_error(world: EngineUnderTest) -> None:
    """Every method that takes an id or a value: an error of postroom, or nothing happens."""
    engine, goals = world.engine, world.engine.goals
    world.wait(goals.start("acme", "g"))
    branch = engine.graph.branch("g")
    calls: list[Callable[[Any], Any]] = [
        goals.status, goals.complete, goals.fail, goals.checkpoints, goals.checkpoint, goals.context,
        goals.rollback, lambda bad: goals.start(bad, "h"), lambda bad: goals.set_context(bad, {}, 1),
        lambda bad: goals.set_context("g", {}, bad), engine.decisions.show, engine.decisions.replay,
        engine.decisions.forget, lambda bad: engine.decisions.answer(bad, "x"), branch.neighbours,
        lambda bad: branch.update(bad, {}), lambda bad: branch.save("n", {}, [], bad),
        lambda bad: engine.submit(type="tool_call", org_id="acme", payload={}, operation={"target": bad}),
    ]  # fmt: skip
    for call in calls:
        for bad in BAD:
            with suppress(PostroomError):
                world.wait(call(bad))
    assert world.wait(goals.status("g")).state == "ACTIVE"
    for keys in (None, "mail", 7, [7]):
        with pytest.raises(InvalidMessage, match="accept_irreversible"):
            world.wait(goals.rollback("g#1", True, keys))  # type: ignore[arg-type]
    for tools in (None, "shell", 7):
        with pytest.raises(InvalidMessage, match="tools of an agent"):
            world.wait(engine.sandboxes.prepare("acme", "a", tools))  # type: ignore[arg-type]
    for wrong in (None, 7, "", ["tool_call"]):
        with pytest.raises(InvalidSetting):
            engine.hook(wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidSetting):
            engine.hook("tool_call")(wrong)  # type: ignore[type-var]


def test_the_goal_of_another_organization_is_out_of_reach(world: EngineUnderTest) -> None:
    """A sender may put any goal_id into a message."""
    engine = world.engine
    seen: list[Any] = []

    @engine.handler("tool_call")
    async def run(message: Any, ctx: Any) -> None:
        with pytest.raises(UnknownGoal):
            await ctx.goal_context()
        seen.append((await ctx.build_context()).parts)
        await ctx.effect("mail", lambda: 1, reversal_class="IRREVERSIBLE")

    world.wait(engine.goals.start("acme", "g", context={"secret": 1}))
    world.wait(engine.graph.branch("g").save("fact", {"secret": 1}))
    before = world.wait(engine.goals.status("g"))
    payload = {"node_id": "fact"}
    world.submit(org_id="bolt", goal_id="g", payload=payload)
    read = world.submit(type="memory_retrieve", org_id="bolt", goal_id="g", payload=payload)
    world.submit(type="memory_save", org_id="bolt", goal_id="g", payload={"node_id": "own", "properties": {}})
    world.run_all()
    assert seen == [{}]
    assert world.wait(read.result(5)) == {"node": None}
    assert world.wait(engine.goals.status("g")) == before
    node = world.wait(engine.graph.branch("g").get("fact"))
    assert node is not None
    assert node.properties == {"secret": 1}


def test_rollback_does_not_affect_the_same_goal_id_elsewhere(world: EngineUnderTest) -> None:
    engine = world.engine

    @engine.handler("tool_call")
    async def run(message: Any, ctx: Any) -> None:
        undo = {"type": "model_call", "payload": {}}
        await ctx.effect("one", lambda: 1, reversal=undo, reversal_class="REVERSIBLE")

    world.wait(engine.goals.start("acme", "g"))
    world.submit(goal_id="g")
    world.run_all()
    assert world.wait(engine.goals.rollback("g#1")).state == "ROLLING_BACK"
    with pytest.raises(Rejected):
        world.submit(goal_id="g")
    world.submit(org_id="bolt", goal_id="g")


def test_keys_of_a_sender_keep_no_compensation_from_running(world: EngineUnderTest) -> None:
    """A sender guesses the keys of the compensations, and uses them first with delayed messages."""
    engine, undone = world.engine, list[int]()

    @engine.handler("tool_call")
    async def run(message: Any, ctx: Any) -> None:
        for number in range(2):
            undo = {"type": "model_call", "payload": {"number": number}}
            await ctx.effect(f"e{number}", lambda: 1, reversal=undo, reversal_class="REVERSIBLE")

    @engine.handler("model_call")
    async def reverse(message: Any, ctx: Any) -> None:
        undone.append(message.payload["number"])

    world.wait(engine.goals.start("acme", "g"))
    for number in range(4):
        world.submit(idempotency_key=f"undo 1 {number} g", delay_s=1_000.0)
    world.submit(ordering_key="undo 1 g", delay_s=1_000.0)
    world.submit(goal_id="g")
    world.run_all()
    world.wait(engine.goals.rollback("g#1"))
    world.run_all()
    assert undone == [1, 0]
    assert world.wait(engine.goals.status("g")).state == "ACTIVE"


def test_an_operation_waits_for_no_operation_of_another_organization(world: EngineUnderTest) -> None:
    """Same target, same exclusive resource: no wait, no event, and nothing of it in `explain`."""
    engine = world.engine
    operation = {"target": "db", "resources": ["gpu"], "constraints": {"not_with": ["db"], "at_most": 1}}
    handles = [world.submit(org_id=org_id, operation=operation) for org_id in ("acme", "bolt", "bolt")]
    claimed = world.claim(3)
    assert sorted(org_of(one.record.queue) for one in claimed) == ["acme", "bolt"]
    assert {one.org_id for one in world.wait(engine.conflicts.active("bolt"))} == {"bolt"}
    [waiting] = world.wait(engine.conflicts.waiting("bolt"))
    assert waiting.message_id in {handle.message_id for handle in handles[1:]}
    assert handles[0].message_id not in world.wait(engine.explain(waiting.message_id))
    assert world.wait(engine.conflicts.waiting("acme")) == []
    seen = [event for event in engine.store.events(limit=1_000) if event.kind == "conflict_detected"]
    assert [event.queue for event in seen] == ["org:bolt"]
    world.complete(claimed)


# ---- many processes ----------------------------------------------------------------------------------


@pytest.mark.statement("consistency-commit")
def test_ends_of_one_goal_in_many_processes_leave_one_end(tmp_path: Path, no_child_left: None) -> None:
    """Complete, fail and roll back at the same time: main has the facts of the branch if it was completed."""
    url = f"sqlite:///{tmp_path}/queue.db"
    names = [f"n{number}" for number in range(20)]

    async def prepare() -> None:
        for goal in range(4):
            await engine.goals.start("acme", f"g{goal}")
            for name in names:
                await engine.graph.branch(f"g{goal}").save(f"{goal}-{name}", {"x": 1})

    def attack(seed: int) -> None:
        async def story() -> None:
            with Engine.open(url) as own:
                rng = random.Random(seed)
                for goal in rng.sample(range(4), 4):
                    goal_id = f"g{goal}"
                    calls = [
                        own.goals.complete(goal_id),
                        own.goals.fail(goal_id),
                        own.goals.checkpoint(goal_id),
                    ]
                    rng.shuffle(calls)
                    for call in calls:
                        with suppress(Rejected):
                            await call

        asyncio.run(story())

    with Engine.open(url) as engine:
        engine.blocking.wait(prepare())
    children.wait(*[children.start(partial(attack, seed)) for seed in range(PROCESSES)])
    with Engine.open(url) as engine:
        for goal in range(4):
            state = engine.blocking.wait(engine.goals.status(f"g{goal}")).state
            main = engine.graph.main()
            found = [engine.blocking.wait(main.get(f"{goal}-{name}")) is not None for name in names]
            assert state in ("COMPLETED", "FAILED")
            assert found == [state == "COMPLETED"] * len(names)
        check_consistency(engine.store)


@pytest.mark.statement("conflict-registry")
def test_conflicting_operations_of_many_processes_never_overlap(tmp_path: Path, no_child_left: None) -> None:
    """The handler takes a file that only one process can take. Some of the processes are killed."""
    url, messages = f"sqlite:///{tmp_path}/queue.db", 40

    def work() -> None:
        async def story() -> None:
            with Engine.open(url, Policy(lease_s=1.0, poison_crashes=100)) as own:

                @own.handler("tool_call")
                def run(message: Any, ctx: Any) -> None:
                    lock = tmp_path / f"{message.payload['target']}.{message.message_id}"
                    others = [one for one in tmp_path.glob(f"{message.payload['target']}.*") if one != lock]
                    lock.touch()
                    alive = [one for one in others if _is_held(own, one.suffix[1:])]
                    if alive:
                        (tmp_path / "overlap").write_text(f"{lock} beside {alive}")
                    lock.unlink()

                await own.run(concurrency=2)

        asyncio.run(story())

    with Engine.open(url, Policy(lease_s=1.0, poison_crashes=100)) as engine:
        fields: SubmitFields = {"type": "tool_call", "org_id": "acme", "payload": {}}
        targets = [f"t{number % 3}" for number in range(messages)]
        handles = engine.blocking.wait(
            engine.submit_many(
                [{**fields, "payload": {"target": one}, "operation": {"target": one}} for one in targets]
            )
        )
        pids = [children.start(work) for _ in range(PROCESSES)]
        for handle in handles[:10]:
            engine.blocking.wait(engine.core.wakeups.wait_for_end(handle.message_id, HANG_GUARD_S))
        for pid in pids[:2]:
            os.kill(pid, signal.SIGKILL)
        for handle in handles:
            engine.blocking.wait(engine.core.wakeups.wait_for_end(handle.message_id, HANG_GUARD_S))
        states = {engine.blocking.get(handle.message_id).state for handle in handles}
    assert states == {"COMPLETED"}
    assert not (tmp_path / "overlap").exists(), (tmp_path / "overlap").read_text()


def _is_held(engine: Engine, message_id: str) -> bool:
    record = engine.store.load(message_id)
    return record is not None and record.record.state == "PROCESSING"


# ---- a full disk -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reserve_bytes", [0, RESERVE_BYTES])
@pytest.mark.parametrize("call", ["complete", "rollback"])
def test_a_full_disk_leaves_a_goal_that_the_same_call_ends(
    small_disk: Path, call: str, reserve_bytes: int
) -> None:
    """With the reserve of the store, which it has by default, the end of a goal finds room on a full disk."""
    ended = "COMPLETED" if call == "complete" else "ACTIVE"

    async def prepare() -> None:
        await engine.goals.start("acme", "g", context={"plan": "a"})
        for number in range(200):
            await engine.graph.branch("g").save(f"n{number}", {"x": "y" * 1_000})

    async def end() -> str:
        if call == "complete":
            return (await engine.goals.complete("g")).state
        return (await engine.goals.rollback("g#1")).state

    with Engine(SqliteStore(small_disk / "queue.db", reserve_bytes=reserve_bytes)) as engine:
        engine.blocking.wait(prepare())
        filler = fill(small_disk)
        if reserve_bytes:
            assert engine.blocking.wait(end()) == ended
        else:
            with pytest.raises(Unavailable):
                engine.blocking.wait(end())
            assert engine.blocking.wait(engine.graph.main().get("n0")) is None
            assert engine.blocking.wait(engine.graph.branch("g").get("n199")) is not None
        filler.unlink()
        assert engine.blocking.wait(end()) == ended
        merged = engine.blocking.wait(engine.graph.main().get("n199")) is not None
        assert merged == (call == "complete")
        check_consistency(engine.store)
