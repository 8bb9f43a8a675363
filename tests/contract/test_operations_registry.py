"""Conflicting operations never run at the same time."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom import Advice, Adviser
from postroom.engine.rules.cells import PAGE
from postroom.engine.rules.operations import Operations
from postroom.errors import InvalidMessage
from postroom.goals.goal_cells import ACTIVE, ACTIVE_ON, RULINGS, WAITERS, WAITING
from postroom.stores.memory import MemoryCells
from tests.engines import EngineUnderTest
from tests.goalworlds import Opened, opened_engines
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
    world.wait(world.engine.decisions.answer(decision.decision_id, "cancel"))
    assert world.state(second) == "PROCESSING"


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
