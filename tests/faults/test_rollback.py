"""What a rollback of a goal promises, also when it is interrupted."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from postroom import Coordinator, Policy
from postroom.core.lifecycle import poison
from postroom.engine.rules.cells import Kind
from postroom.engine.work.worker import Worker
from postroom.errors import (
    GoalEnded,
    InvalidMessage,
    RollbackRefused,
    ValidationError,
)
from postroom.goals.goal_cells import EFFECTS, NOTIFIED, ROLLBACKS, UNDOES
from postroom.goals.graph.branches import Node
from postroom.testing import check_consistency
from tests.engines import EngineUnderTest
from tests.goalworlds import (
    ONCE,
    alerts,
    database,
    opened,
    postgres,
    url,
    world,
)
from tests.privatepostgres import PostgresServer
from tests.waiting import eventually

__all__ = ["database", "opened", "postgres", "url", "world"]  # fixtures


def effects_engine(world: EngineUnderTest, fails: Any = ()) -> Any:
    """Steps with effects; what was done and undone, in order."""
    log: list[Any] = []

    @world.engine.handler("tool_call")
    async def step(message: Any, ctx: Any) -> None:
        for name, kind in message.payload.get("effects", []):
            reversal = {"type": "model_call", "payload": {"undo": name}}
            await ctx.effect(name, lambda name=name: log.append(name), reversal=reversal, reversal_class=kind)
        if message.payload.get("fails"):
            raise ValidationError("it cannot work")

    @world.engine.handler("model_call")
    async def undo(message: Any, ctx: Any) -> None:
        name = message.payload["undo"]
        if name in fails:
            fails.remove(name)
            raise ValidationError("the undo failed")
        await ctx.effect("undo", lambda: log.append(f"undo {name}"))

    return log


@pytest.mark.statement("rollback-reverse-order")
def test_rollback_cancels_restores_and_undoes_in_reverse_order(world: EngineUnderTest) -> None:
    engine, log = world.engine, effects_engine(world)
    goals, branch = engine.goals, engine.graph.branch("g")
    world.wait(goals.start("acme", "g", context={"plan": "a"}))
    world.submit(goal_id="g", task_id="t1", payload={"effects": [("early", "REVERSIBLE")]})
    world.run_all()
    world.wait(branch.save("fact", {"x": 1}))
    saved = world.wait(goals.checkpoint("g"))
    world.wait(branch.save("fact", {"x": 2}))
    world.wait(branch.save("other", {}))
    world.wait(goals.set_context("g", {"plan": "b"}, 1))
    payload = {"effects": [("one", "REVERSIBLE"), ("two", "COMPENSATABLE")]}
    world.submit(goal_id="g", task_id="t2", payload=payload)
    world.run_all()
    waiting = world.submit(goal_id="g", task_id="t3", delay_s=100)
    status = world.wait(goals.rollback(saved.checkpoint_id))
    assert status.state == "ROLLING_BACK"
    assert len(status.undoing) == 2
    with pytest.raises(GoalEnded, match="ROLLING_BACK"):
        world.submit(goal_id="g")
    world.run_all()
    assert log == ["early", "one", "two", "undo two", "undo one"]
    assert world.wait(goals.status("g")).state == "ACTIVE"
    assert world.state(waiting) == "CANCELLED"
    assert world.wait(branch.get("fact")) == Node("fact", {"x": 1}, version=1, org_id="acme")
    assert world.wait(branch.get("other")) is None
    context, version = world.wait(goals.context("g"))
    assert context["plan"] == "a"
    assert "previous_failure" in context
    assert context["avoid_approaches"] == []
    assert version == 3
    parts = world.wait(all_parts(engine, waiting))
    assert [part.type for part in parts] == ["progress", "error"]
    assert "rolled back to checkpoint g#" in parts[0].message
    assert alerts(world, "RolledBack")


async def all_parts(engine: Any, handle: Any) -> Any:
    return [part async for part in engine.handle(handle.message_id)]


@pytest.mark.statement("checkpoint-learning")
def test_rollback_can_forget_what_was_learned(world: EngineUnderTest) -> None:
    goals = world.engine.goals
    world.wait(goals.start("acme", "g", context={"plan": "a"}))
    world.wait(goals.set_context("g", {"plan": "b"}, 1))
    assert world.wait(goals.rollback("g#1", preserve_learning=False)).state == "ACTIVE"
    assert world.wait(goals.context("g")) == ({"plan": "a"}, 3)


@pytest.mark.statement("rollback-irreversible")
def test_an_irreversible_effect_refuses_the_rollback_until_it_is_accepted(world: EngineUnderTest) -> None:
    log = effects_engine(world)
    goals = world.engine.goals
    world.wait(goals.start("acme", "g"))
    payload = {"effects": [("one", "REVERSIBLE"), ("mail", "IRREVERSIBLE")]}
    world.submit(goal_id="g", payload=payload)
    world.run_all()
    with pytest.raises(RollbackRefused, match="mail") as refused:
        world.wait(goals.rollback("g#1"))
    assert refused.value.irreversible == ["mail"]
    assert world.wait(goals.status("g")).state == "ACTIVE"
    world.wait(goals.rollback("g#1", accept_irreversible=["mail"]))
    world.run_all()
    assert log == ["one", "mail", "undo one"]
    with pytest.raises(RollbackRefused):
        world.wait(goals.rollback("g#1"))


@pytest.mark.statement("rollback-classes")
def test_an_effect_without_a_class_is_classified_by_the_rules(world: EngineUnderTest) -> None:
    engine = world.engine
    world.wait(engine.goals.start("acme", "g"))

    @engine.handler("tool_call")
    async def run(message: Any, ctx: Any) -> None:
        await ctx.effect("send-mail", lambda: 1)
        await ctx.effect("create-file", lambda: 1, reversal={"type": "tool_call", "payload": {}})
        with pytest.raises(InvalidMessage):
            await ctx.effect("x", lambda: 1, reversal_class="MAYBE")
        with pytest.raises(InvalidMessage):
            await ctx.effect("x", lambda: 1, reversal="undo")

        def broken() -> None:
            raise ValueError("it did not happen")

        with pytest.raises(ValueError, match="did not happen"):
            await ctx.effect("create-other", broken, reversal={"type": "tool_call"})

    handle = world.submit(goal_id="g")
    world.run_all()
    assert world.state(handle) == "COMPLETED"
    found = engine.store.read(lambda one: [(each.key, each.reversal_class) for _, each in EFFECTS.all(one)])
    assert found == [("send-mail", "IRREVERSIBLE"), ("create-file", "REVERSIBLE")]


@pytest.mark.statement("rollback-compensation-fails")
def test_failed_compensation_alerts_and_a_resume_finishes_the_rollback(
    world: EngineUnderTest,
) -> None:
    log = effects_engine(world, fails=["two"])
    goals = world.engine.goals
    world.wait(goals.start("acme", "g"))
    payload = {"effects": [("one", "REVERSIBLE"), ("two", "REVERSIBLE")]}
    world.submit(goal_id="g", payload=payload)
    world.run_all()
    world.wait(goals.rollback("g#1"))
    world.run_all()
    assert world.wait(goals.status("g")).state == "ROLLING_BACK"
    assert len(world.wait(world.engine.dlq.list())) == 1
    assert alerts(world, "CompensationFailed")
    assert log == ["one", "two"]
    world.wait(goals.rollback("g#1"))
    world.run_all()
    assert log == ["one", "two", "undo two", "undo one"]
    assert world.wait(goals.status("g")).state == "ACTIVE"


@pytest.mark.parametrize("is_purged", [False, True])
def test_a_compensation_that_never_works_can_be_given_up(world: EngineUnderTest, is_purged: Any) -> None:
    log = effects_engine(world, fails=["two", "two", "two"])
    goals = world.engine.goals
    world.wait(goals.start("acme", "g"))
    payload = {"effects": [("one", "REVERSIBLE"), ("two", "REVERSIBLE")]}
    world.submit(goal_id="g", payload=payload)
    world.run_all()
    for _ in range(2):
        world.wait(goals.rollback("g#1"))
        world.run_all()
    assert world.wait(goals.status("g")).state == "ROLLING_BACK"
    if is_purged:
        [dead] = world.wait(world.engine.dlq.list())
        world.wait(world.engine.dlq.purge(dead.message_id))
        world.wait(goals.rollback("g#1"))
    else:
        world.wait(goals.rollback("g#1", accept_irreversible=["two"]))
    world.run_all()
    assert log == ["one", "two", "undo one"]
    assert world.wait(goals.status("g")).state == "ACTIVE"


@pytest.mark.statement("rollback-told")
def test_a_rollback_tells_every_agent_with_a_message_in_the_goal(world: EngineUnderTest) -> None:
    """Those that wait for a cancelled message by their stream, and all registered ones in their inbox."""
    engine, log = world.engine, effects_engine(world)

    async def story() -> None:
        async with Coordinator(engine) as coordinator:
            agents = {name: await coordinator.register(name, "acme") for name in ("done", "open", "other")}
            stranger = await coordinator.register("done", "bolt")
            await engine.goals.start("acme", "g")
            payload = {"effects": [("one", "REVERSIBLE")]}
            await agents["done"].submit(
                {
                    "type": "tool_call",
                    "payload": payload,
                    "goal_id": "g",
                    "org_id": "acme",
                    "agent_id": "done",
                }
            )
            await engine.submit(type="tool_call", org_id="acme", goal_id="g", agent_id="nobody", payload={})
            worker = Worker(engine.core, worker_id="w")
            await worker.step()
            await worker.step()
            waiting = agents["open"].stream(type="tool_call", payload={}, goal_id="g", delay_s=100)
            parts = asyncio.create_task(collected(waiting))
            await eventually(lambda: waiting.message_id)
            await engine.goals.rollback("g#1")
            await engine.goals.rollback("g#1")  # a resume does not tell anybody again
            told = [part.message for part in await parts if part.type == "progress"]
            assert told == ["goal g is rolled back to checkpoint g#1"]
            for name in ("done", "open"):
                [notice] = await agents[name].inbox()
                assert (notice.payload["type"], notice.payload["message"]) == ("progress", told[0])
                await notice.done()
                assert await agents[name].inbox() == []
            assert await agents["other"].inbox() == []
            assert await stranger.inbox() == []

    world.wait(story())
    world.run_all()
    assert log == ["one", "undo one"]
    assert world.engine.store.read(NOTIFIED.all) == []


async def collected(stream: Any) -> Any:
    return [part async for part in stream]


KINDS: tuple[Kind[Any], ...] = (EFFECTS, ROLLBACKS, UNDOES, NOTIFIED)


class Killed(BaseException):
    """The process dies here."""


def rollback_story(
    url: str, dies_at: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], bool]:
    """A rollback that dies at one of its points and is resumed; everything that is left of it."""
    world = EngineUnderTest(url, Policy(retries=ONCE))
    log = effects_engine(world)
    goals, branch = world.engine.goals, world.engine.graph.branch("g")
    world.wait(goals.start("acme", "g", context={"plan": "a"}))
    world.wait(branch.save("fact", {"x": 1}))
    for number in range(size):
        effects = [(f"e{number}", "REVERSIBLE")]
        world.submit(goal_id="g", task_id=f"t{number}", payload={"effects": effects})
    world.run_all()
    world.wait(branch.save("fact", {"x": 2}))
    world.wait(goals.set_context("g", {"plan": "b"}, 1))
    open_ones = [world.submit(goal_id="g", task_id="open", delay_s=100) for _ in range(size)]
    points = count()

    def dying(write: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Each commit has two points: before it, and after it but before its caller knows."""

        async def write_or_die(work: Any, **options: Any) -> Any:
            if next(points) == dies_at:
                raise Killed
            result = await write(work, **options)
            if next(points) == dies_at:
                raise Killed
            return result

        return write_or_die

    commits = world.engine.core.commits
    for name in ("write_raw", "write_cycle"):
        monkeypatch.setattr(commits, name, dying(getattr(commits, name)))
    died = False
    try:
        world.wait(goals.rollback("g#1"))
        world.run_all()
    except Killed:
        died = True
    monkeypatch.undo()
    monkeypatch.setattr(poison, "runs_alone", lambda _: False)  # a process of its own has a log of its own
    if died:
        world.clock.advance(60)  # the leases of the process that died are over
        world.wait(goals.rollback("g#1"))
    world.run_all()
    left = {
        "log": log,
        "state": world.wait(goals.status("g")).state,
        "context": world.wait(goals.context("g"))[0],
        "fact": world.wait(branch.get("fact")),
        "open": [world.state(one) for one in open_ones],
        "cells": [len(world.engine.store.read(kind.all)) for kind in KINDS],
    }
    check_consistency(world.engine.store)
    world.close()
    return left, died


@pytest.mark.statement("rollback-crash")
def test_a_rollback_that_dies_anywhere_and_is_resumed_has_the_same_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after every commit of the rollback and of the workers that undo, on both stores."""
    tried = 0
    for size in range(1, 8):
        expected, died = rollback_story("memory://", -1, size, monkeypatch)
        assert not died
        assert expected["state"] == "ACTIVE"
        assert expected["log"][size:] == [f"undo e{number}" for number in reversed(range(size))]
        for store in ("memory", "sqlite") if size == 2 else ("memory",):
            for point in count():
                url = "memory://" if store == "memory" else f"sqlite:///{tmp_path}/{size}-{point}.db"
                left, died = rollback_story(url, point, size, monkeypatch)
                if not died:
                    break
                tried += 1
                assert left == expected, f"died at point {point} of size {size} on {store}"
    assert tried >= 200


def test_a_rollback_on_postgres_that_dies_and_is_resumed_has_the_same_end(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every fifth of the same points: a story with a new database takes long."""
    expected, _ = rollback_story("memory://", -1, 2, monkeypatch)
    tried = 0
    for point in count(0, 5):
        left, died = rollback_story(postgres.new_store(), point, 2, monkeypatch)
        if not died:
            break
        tried += 1
        assert left == expected, f"died at point {point}"
    assert tried > 2
