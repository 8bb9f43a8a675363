"""Goals that a save starts: the branch of a goal that its sender named and nobody started."""

from typing import Any

import pytest

from postroom import ValidationError
from postroom.errors import GoalEnded
from postroom.goals.goal_cells import IMPLICIT
from postroom.goals.goals import IMPLICIT_GOALS_MAX
from postroom.stores.transaction import Transaction
from tests.engines import EngineUnderTest
from tests.goalworlds import Opened, opened, url, world

__all__ = ["opened", "url", "world"]


def saved(world: EngineUnderTest, value: int, kind: str = "memory_save", **fields: Any) -> Any:
    """The reply to a save of node `n`."""
    name = "changes" if kind == "memory_update" else "properties"
    scope = fields.pop("scope", "STAGED")
    handle = world.submit(type=kind, payload={"node_id": "n", name: {"x": value}, "scope": scope}, **fields)
    world.run_all()
    return world.wait(handle.result())


def in_main(world: EngineUnderTest) -> Any:
    node = world.wait(world.engine.graph.main("acme").get("n"))
    return None if node is None else node.properties["x"]


@pytest.mark.statement("branch-implicit", "branch-isolated", "branch-scopes")
@pytest.mark.parametrize("kind", ["memory_save", "memory_update"])
def test_staged_save_starts_the_goal_that_its_sender_named(world: EngineUnderTest, kind: str) -> None:
    world.wait(world.engine.graph.main("acme").save("n", {"x": 0}))
    reply = saved(world, 1, kind, goal_id="g")
    assert reply["implicit_goal"] == "g"
    assert reply["properties"] == {"x": 1}
    assert in_main(world) == 0
    assert saved(world, 2, kind, goal_id="g")["implicit_goal"] == "g"
    read = world.submit(type="memory_retrieve", payload={"node_id": "n"}, goal_id="g")
    world.run_all()
    assert world.wait(read.result())["node"]["properties"] == {"x": 2}
    assert world.wait(world.engine.goals.complete("g")).state == "COMPLETED"
    assert in_main(world) == 2


@pytest.mark.statement("branch-implicit")
def test_generated_goal_goes_to_main(world: EngineUnderTest) -> None:
    assert "implicit_goal" not in saved(world, 1)
    assert in_main(world) == 1
    assert world.wait(world.engine.goals.list()) == []


def test_only_staged_saves_start_a_goal(world: EngineUnderTest) -> None:
    assert "implicit_goal" not in saved(world, 1, goal_id="g", scope="IMMEDIATE")
    assert in_main(world) == 1
    handle = world.submit(type="memory_update", payload={"node_id": "other", "changes": {}}, goal_id="g")
    world.run_all()
    assert world.state(handle) == "DEAD_LETTER"
    assert world.wait(world.engine.goals.list()) == []


def test_policy_without_implicit_goals_saves_to_main(opened: Opened) -> None:
    world = opened(implicit_goals=False)
    assert "implicit_goal" not in saved(world, 1, goal_id="g")
    assert in_main(world) == 1


def test_goal_of_another_organization_and_a_goal_that_has_ended_are_not_started(
    world: EngineUnderTest,
) -> None:
    world.wait(world.engine.goals.start("bolt", "g"))
    saved(world, 1, goal_id="g")
    assert in_main(world) == 1
    world.wait(world.engine.goals.start("acme", "h"))
    world.wait(world.engine.goals.complete("h"))
    saved(world, 2, goal_id="h")
    assert in_main(world) == 2
    with pytest.raises(GoalEnded):
        world.wait(world.engine.goals.checkpoint("h"))


def test_starting_an_implicit_goal_gives_it_its_context(world: EngineUnderTest) -> None:
    saved(world, 1, goal_id="g")
    world.wait(world.engine.goals.start("acme", "g", context={"plan": "b"}))
    assert world.wait(world.engine.goals.context("g")) == ({"plan": "b"}, 2)
    assert "implicit_goal" not in saved(world, 2, goal_id="g")
    assert in_main(world) is None


def test_organization_has_a_limited_number_of_implicit_goals(world: EngineUnderTest) -> None:
    def fill(transaction: Transaction) -> None:
        for number in range(IMPLICIT_GOALS_MAX - 1):
            IMPLICIT.put(transaction, True, "acme", f"old{number}")

    world.engine.store.write(fill)
    saved(world, 1, goal_id="a")
    handle = world.submit(
        type="memory_save", payload={"node_id": "n", "properties": {}}, goal_id="c", max_retries=0
    )
    world.run_all()
    assert world.state(handle) == "DEAD_LETTER"
    said = world.wait(world.engine.get(handle.message_id)).errors[-1]
    assert said["error_type"] == ValidationError.__name__
    assert "organization acme has 1000 goals that saves have started" in said["error"]
    assert saved(world, 1, goal_id="d", org_id="bolt")["implicit_goal"] == "d"
    world.wait(world.engine.goals.complete("a"))
    assert saved(world, 1, goal_id="c")["implicit_goal"] == "c"
