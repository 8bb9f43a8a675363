"""Conflicting operations never run at the same time."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom import Advice, Adviser, Guard, ValidationError
from postroom.engine.rules.cells import GOALS, PAGE
from postroom.engine.rules.operations import Operations
from postroom.errors import InvalidMessage, WrongState
from postroom.goals.advisers.facts import QUOTED_CHARS_MAX
from postroom.goals.goal_cells import ACTIVE, ACTIVE_ON, RULINGS, WAITERS, WAITING
from postroom.stores.memory import MemoryCells
from tests.engines import EngineUnderTest
from tests.goalworlds import Choosing, Opened, opened_engines
from tests.postgresserver import database, postgres, store_url

__all__ = ["database", "postgres"]  # fixtures


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    yield from opened_engines(store_url(request, tmp_path))


@pytest.fixture
def world(opened: Any) -> Any:
    return opened()


def submit(world: EngineUnderTest, target: Any = "t", **fields: Any) -> Any:
    operation = {"target": target, **fields.pop("operation", {})}
    return world.submit(operation=operation, **fields)


def ids(claimed: Any) -> Any:
    return [one.record.message_id for one in claimed]


def kinds(world: EngineUnderTest) -> Any:
    return [event.kind for event in world.engine.store.events(0, 10_000) if event.kind.startswith("conflict")]


@pytest.mark.statement("conflict-registry")
def test_the_second_operation_on_a_target_waits_for_the_end_of_the_first(world: EngineUnderTest) -> None:
    first, second = submit(world), submit(world)
    other = submit(world, "elsewhere")
    claimed = world.claim(10)
    assert ids(claimed) == [first.message_id, other.message_id]
    active = world.wait(world.engine.conflicts.active())
    assert sorted(one.message_id for one in active) == sorted(ids(claimed))
    [waiting] = world.wait(world.engine.conflicts.waiting())
    assert (waiting.message_id, waiting.other) == (second.message_id, first.message_id)
    said = world.wait(second.explain())
    assert first.message_id in said
    assert "target t" in said
    assert world.claim(10) == []
    world.complete(claimed[:1])
    assert ids(world.claim(10)) == [second.message_id]
    assert kinds(world) == ["conflict_detected", "conflict_resolved"]


@pytest.mark.parametrize("end", ["fail", "release", "cancel", "lapse", "crash"])
def test_every_end_of_a_lease_releases_the_operation(world: EngineUnderTest, end: Any) -> None:
    first, second = submit(world), submit(world)
    [held] = world.claim(1)
    assert world.claim(10) == []
    match end:
        case "fail":
            world.fail(held)
        case "release":
            from postroom.engine.work.handlers import ended

            world.finish(ended(held, "released"))
        case "cancel":
            world.wait(first.cancel())
        case "lapse":
            world.clock.advance(16)
        case "crash":
            world.wait(world.engine.put_back("w"))
            world.clock.advance(16)
    found = ids(world.claim(1))
    assert found in ([second.message_id], [first.message_id])
    assert len(world.wait(world.engine.conflicts.active())) == 1


def test_a_renewed_lease_keeps_the_waiting_message_waiting(world: EngineUnderTest) -> None:
    submit(world)
    second = submit(world)
    [held] = world.claim(1)
    world.claim(1)

    def beat(operations: Operations) -> list[str]:
        return operations.heartbeat({held.record.message_id: held.record.lease})

    for _ in range(4):
        world.clock.advance(10)
        world.wait(world.engine.core.commits.write(beat))
        assert world.claim(10) == []
    world.complete([held])
    assert ids(world.claim(1)) == [second.message_id]
    assert kinds(world) == ["conflict_detected", "conflict_resolved"]


@pytest.mark.statement("conflict-structural")
def test_readers_share_a_target_and_resources_have_a_capacity(opened: Any) -> None:
    world = opened(capacities={"seats": 3})
    shared = {"mode": "shared"}
    for _ in range(2):
        submit(world, operation=shared)
    writer = submit(world)
    assert len(world.claim(10)) == 2
    assert world.state(writer) == "SCHEDULED"
    for number in range(3):
        submit(world, f"s{number}", operation={"resources": {"seats": 1.5}})
    assert len(world.claim(10)) == 2
    submit(world, "a", operation={"resources": ["gpu"]})
    submit(world, "b", operation={"resources": ["gpu"]})
    submit(world, "c", operation={"resources": ["gpu"]}, org_id="bolt")
    assert len(world.claim(10)) == 2
    submit(world, "deploy", operation={"constraints": {"not_with": ["b", "migrate"]}})
    assert len(world.claim(10)) == 1
    submit(world, "migrate")
    assert world.claim(10) == []


def test_an_operation_that_is_not_needed_then_is_cancelled(world: EngineUnderTest) -> None:
    submit(world)
    second = submit(world, operation={"on_conflict": "cancel"})
    world.claim(10)
    assert world.state(second) == "CANCELLED"


def test_the_same_work_is_merged_into_the_running_operation(world: EngineUnderTest) -> None:
    merge = {"on_conflict": "merge"}
    submit(world, payload={"x": 1})
    same, other = (
        submit(world, payload={"x": 1}, operation=merge),
        submit(world, payload={"x": 2}, operation=merge),
    )
    [held] = world.claim(1)
    assert world.claim(10) == []
    world.complete([held])
    assert world.state(same) == "COMPLETED"
    assert world.state(other) == "QUEUED"
    assert world.wait(same.result(1)) is None


def test_merged_work_runs_itself_when_the_other_one_fails(world: EngineUnderTest) -> None:
    submit(world, payload={"x": 1})
    same = submit(world, payload={"x": 1}, operation={"on_conflict": "merge"})
    [held] = world.claim(1)
    world.claim(1)
    world.fail(held)
    assert ids(world.claim(1)) == [same.message_id]


class Saying(Adviser):
    """Always says the same about conflicts."""

    def __init__(self, choice: Any, confidence: Any = 1.0) -> None:
        self.choice, self.confidence, self.asked = choice, confidence, 0

    async def advise(self, question: Any) -> Any:
        assert question.kind == "conflict"
        self.asked += 1
        return Advice(self.choice, self.confidence, "said in a test")


@pytest.mark.statement("events-conflict", "conflict-adviser")
@pytest.mark.parametrize(
    ("choice", "state"), [("run", "PROCESSING"), ("wait", "SCHEDULED"), ("cancel", "CANCELLED")]
)
def test_the_adviser_decides_a_conflict_outside_the_claim(opened: Any, choice: Any, state: Any) -> None:
    adviser = Saying(choice)
    world = opened(adviser=adviser)
    submit(world)
    second = submit(world)
    world.claim(2)
    assert world.state(second) == "SCHEDULED"
    assert "a decision about" in world.wait(second.explain())
    world.run(1)  # the message that asks the adviser
    assert adviser.asked == 1
    world.claim(10)
    assert world.state(second) == state
    world.claim(10)
    assert adviser.asked == 1


@pytest.mark.statement("conflict-person")
def test_an_escalated_conflict_waits_for_a_person(opened: Any) -> None:
    world = opened(adviser=Saying("escalate"))
    submit(world)
    second = submit(world)
    world.claim(2)
    world.run(1)
    [decision] = world.wait(world.engine.decisions.list())
    assert "escalate" not in decision.question.options
    assert "conflict_resolution_failed" in kinds(world)
    world.wait(world.engine.decisions.answer(decision.decision_id, "cancel"))
    world.claim(10)
    assert world.state(second) == "CANCELLED"


def test_an_unanswered_conflict_waits_for_the_other_operation(opened: Any) -> None:
    world = opened(adviser=Saying("run", confidence=0.1), decision_timeout_s=10, lease_s=100)
    submit(world)
    second = submit(world)
    [held] = world.claim(1)
    world.claim(1)
    world.run(1)
    world.clock.advance(11)
    world.run(1)  # the message that ends the wait for an answer
    [taken] = world.wait(world.engine.decisions.list(decided=True))
    assert (taken.by, taken.choice) == ("timeout", "wait")
    assert world.claim(10) == []
    world.complete([held])
    assert ids(world.claim(1)) == [second.message_id]


def test_the_end_of_the_other_operation_makes_a_decision_unnecessary(opened: Any) -> None:
    world = opened(adviser=Saying("cancel", confidence=0.1))
    submit(world)
    second = submit(world)
    [held] = world.claim(1)
    world.claim(1)
    world.run(1)
    [decision] = world.wait(world.engine.decisions.list())
    world.complete([held])
    assert ids(world.claim(1)) == [second.message_id]
    assert world.wait(world.engine.decisions.list()) == []
    with pytest.raises(WrongState, match="was taken already: run"):
        world.wait(world.engine.decisions.answer(decision.decision_id, "cancel"))
    assert world.state(second) == "PROCESSING"


@pytest.mark.parametrize("choice", ["cancel", "escalate"])
def test_the_end_of_the_waiting_operation_ends_the_question(opened: Any, choice: Any) -> None:
    world = opened(adviser=Saying(choice, confidence=0.1 if choice == "cancel" else 1.0))
    submit(world)
    second = submit(world)
    [held] = world.claim(1)
    world.claim(1)
    world.run(1)
    assert len(world.wait(world.engine.decisions.list())) == 1
    world.wait(second.cancel())
    assert world.wait(world.engine.decisions.list()) == []
    [taken, *_] = world.wait(world.engine.decisions.list(decided=True))[::-1]
    assert (taken.choice, taken.reasoning) == ("cancel", "one of the operations has ended")
    world.complete([held])


@pytest.mark.statement("conflict-question", "conflict-adviser")
def test_question_about_a_conflict_has_both_payloads_and_goals(opened: Any) -> None:
    adviser = Choosing(conflict="wait")
    world = opened(adviser=adviser)
    for goal_id, org_id in (("plan", "acme"), ("audit", "acme")):
        world.wait(world.engine.goals.start(org_id, goal_id, context={"about": goal_id}))
    submit(world, payload={"to": "first" * 1_000}, goal_id="plan")
    submit(world, payload={"to": "second"}, goal_id="audit")
    world.claim(1)
    world.claim(1)
    world.run(1)
    [question] = adviser.questions
    own, theirs = question.facts["own"], question.facts["theirs"]
    assert (own["payload"], own["goal_id"]) == ('{"to":"second"}', "audit")
    assert (own["context"], theirs["context"]) == ('{"about":"audit"}', '{"about":"plan"}')
    assert theirs["payload"].startswith('{"to":"firstfirst')
    assert len(theirs["payload"]) == QUOTED_CHARS_MAX + len("...")
    [detected] = [
        event for event in world.engine.store.events(0, 10_000) if event.kind == "conflict_detected"
    ]
    assert "own" not in detected.detail


# ---- operations that nobody declared ---------------------------------------------------------------


@pytest.mark.statement("conflict-undeclared", "conflict-structural", "conflict-before")
def test_memory_messages_work_on_the_node_that_they_name(world: EngineUnderTest) -> None:
    def memory(kind: str, node_id: Any, **payload: Any) -> Any:
        return world.submit(type=f"memory_{kind}", payload={"node_id": node_id, **payload})

    first, second = memory("save", "rome"), memory("update", "rome")
    reads = [memory("retrieve", "paris"), memory("retrieve", "paris")]
    declared = submit(world, "rome")
    query = world.submit(type="memory_retrieve", payload={"query": "rome"})
    unfit = memory("save", 7)
    claimed = world.claim(10)
    assert ids(claimed) == [
        first.message_id, *(one.message_id for one in reads), query.message_id, unfit.message_id,
    ]  # fmt: skip
    waiting = world.wait(world.engine.conflicts.waiting())
    assert sorted(one.message_id for one in waiting) == sorted([second.message_id, declared.message_id])
    world.complete(claimed)
    assert len(world.claim(10)) == 1


def test_declared_operation_of_a_memory_message_is_kept(world: EngineUnderTest) -> None:
    operation = {"target": "own", "mode": "shared"}
    world.submit(type="memory_save", payload={"node_id": "rome"}, operation=operation)
    world.claim(1)
    [active] = world.wait(world.engine.conflicts.active())
    assert (active.operation.target, active.operation.mode) == ("own", "shared")


class Building:
    """A handler whose effect works on a target while the test does something else."""

    def __init__(self, world: EngineUnderTest, target: str = "site") -> None:
        self.world = world
        self.target = target
        self.runs = 0
        self.meanwhile: Any = lambda: asyncio.sleep(0)
        world.engine.handler("tool_call")(self.handle)

    async def handle(self, _message: Any, ctx: Any) -> Any:
        self.runs += 1
        ctx.usage(tokens_in=5)
        done = await ctx.effect("build", self.build, target=self.target)
        return [done, [one.operation.target for one in await self.world.engine.conflicts.active()]]

    async def build(self) -> str:
        await self.meanwhile()
        return "built"


@pytest.mark.statement("conflict-undeclared")
def test_effect_on_a_target_waits_for_the_operation_of_another_message(opened: Any) -> None:
    world = opened(guard=Guard(tokens=1_000))
    building = Building(world)
    holder = world.submit(type="model_call", operation={"target": "site"})
    [held] = world.claim(1)
    handle = world.submit(max_retries=0, goal_id="g")
    world.run_all()
    assert world.state(handle) == "SCHEDULED"
    assert f"message {holder.message_id} works on 'site'" in world.wait(handle.explain())
    assert kinds(world) == ["conflict_detected"]
    world.complete([held])
    world.clock.advance(1.001)
    world.run_all()
    assert world.wait(handle.result()) == ["built", []]
    assert building.runs == 2
    used = world.engine.store.read(lambda transaction: GOALS.get(transaction, "acme", "g"))
    assert used is not None
    assert used.tokens == 10, "a deferred attempt counts what it used"


@pytest.mark.parametrize("ends", ["done", "raises"])
def test_operation_waits_for_the_effect_of_another_message(opened: Any, ends: str) -> None:
    world = opened()
    building = Building(world)
    waiting: list[Any] = []

    async def meanwhile() -> None:
        fields = {"type": "model_call", "org_id": "acme", "payload": {}, "operation": {"target": "site"}}
        waiting.append(await world.engine.submit(**fields))
        assert await asyncio.to_thread(world.claim, 5) == []
        [active] = await world.engine.conflicts.active()
        assert (active.operation.target, active.is_effect) == ("site", True)
        if ends == "raises":
            raise ValidationError("no")

    building.meanwhile = meanwhile
    handle = world.submit()
    world.run(slots=1)
    assert world.state(handle) == ("COMPLETED" if ends == "done" else "DEAD_LETTER")
    assert world.state(waiting[0]) == "QUEUED", "the end of the effect wakes it"
    assert ids(world.claim(1)) == [waiting[0].message_id]


def test_effect_whose_outcome_is_open_holds_its_target_until_the_attempt_ends(opened: Any) -> None:
    world = opened()
    building = Building(world)

    async def hang_up() -> None:
        raise ConnectionError("is it done?")

    building.meanwhile = hang_up
    world.submit(max_retries=0)
    world.run_all()
    assert world.engine.store.read(ACTIVE.all) == []
    assert world.engine.store.read(ACTIVE_ON.all) == []


@pytest.mark.parametrize("target", ["x" * 257, "a\nb", 7])
def test_target_that_does_not_fit_is_refused(target: Any) -> None:
    world = EngineUnderTest("memory://")
    Building(world, target)
    handle = world.submit()
    world.run(slots=1)
    errors = world.wait(world.engine.get(handle.message_id)).errors
    assert "the target of an effect must be printable text" in errors[-1]["error"]
    world.close()


def test_operations_leave_no_cells_behind(world: EngineUnderTest) -> None:
    for _ in range(5):
        submit(world, operation={"resources": ["r1", "r2"], "constraints": {"not_with": ["x"]}})
    for _ in range(5):
        [held] = world.claim(1)
        world.claim(10)
        world.complete([held])
    for kind in (ACTIVE, ACTIVE_ON, WAITING, WAITERS, RULINGS):
        assert world.engine.store.read(kind.all) == [], kind.name


@pytest.mark.parametrize("operation", ["t", {}, {"target": 3}, {"target": "t", "mode": "odd"}])
def test_an_operation_that_does_not_fit_is_refused(world: EngineUnderTest, operation: Any) -> None:
    with pytest.raises(InvalidMessage, match="operation"):
        world.submit(operation=operation)


@pytest.mark.statement("conflict-before")
def test_a_check_reads_only_operations_near_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets that sort before or behind those of all active operations cost the same."""
    world = EngineUnderTest("memory://")
    world.submit_many(100, operation={"target": "m", "mode": "shared"})
    assert len(world.claim(100)) == 100
    for target in ("a", "z"):
        submit(world, target)
    rows: list[int] = []
    page = MemoryCells.page

    def counted(self: Any, kind: str, after: str = "", limit: int = 1_000) -> Any:
        found = page(self, kind, after, limit)
        rows.append(len(found) if kind == ACTIVE_ON.name else 0)
        return found

    monkeypatch.setattr(MemoryCells, "page", counted)
    assert len(world.claim(2)) == 2
    assert sum(rows) <= 2 * PAGE
    world.close()
