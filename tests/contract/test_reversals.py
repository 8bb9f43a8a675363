"""Reversals that handlers do not declare: found in the catalogue of tools, and used by a rollback."""

import json
from typing import Any

import msgspec
import pytest

from postroom import HttpAdviser
from postroom.errors import RollbackRefused
from postroom.goals.goal_cells import EFFECTS
from tests.engines import EngineUnderTest
from tests.goalworlds import Opened, alerts, database, opened, postgres, url, world
from tests.scriptedmodel import Asked, said, scripted

__all__ = ["database", "opened", "postgres", "url", "world"]  # fixtures


class Deleted(msgspec.Struct):
    """The payload of a message that deletes an event."""

    event_id: str


def calendar(world: EngineUnderTest, deletes: str = "delete_event", shape: Any = Deleted) -> list[Any]:
    """Handlers that create and delete events without a word about reversals. Returns the events."""
    events: list[Any] = []

    @world.engine.handler("create_event")
    async def create(message: Any, ctx: Any) -> None:
        def run() -> Any:
            events.append(f"e{message.payload['number']}")
            return {"id": events[-1]}

        await ctx.effect("create_event", run)

    @world.engine.handler(deletes, payload=shape)
    async def delete(message: Any, ctx: Any) -> None:
        """Delete an event of the calendar."""
        events.remove(message.payload.event_id if shape else message.metadata["outcome"]["id"])

    return events


def create_events(world: EngineUnderTest, count: int, goal_id: str = "g") -> None:
    world.wait(world.engine.goals.start("acme", goal_id))
    for number in range(count):
        world.submit(type="create_event", goal_id=goal_id, payload={"number": number})
    world.run_all()


@pytest.mark.statement("reversals-found")
def test_a_rollback_uses_the_handler_whose_name_is_the_opposite(world: EngineUnderTest) -> None:
    events = calendar(world)
    create_events(world, 3)
    assert len(events) == 3
    before = world.wait(world.engine.goals.effects("g"))
    assert [(one.reversal_class, one.reversal) for one in before] == [("IRREVERSIBLE", None)] * 3
    world.wait(world.engine.goals.rollback("g#1"))
    assert world.wait(world.engine.goals.effects("g")) == []
    world.run_all()
    assert events == []
    assert world.wait(world.engine.goals.status("g")).state == "ACTIVE"
    [taken] = world.wait(world.engine.decisions.list(decided=True))
    assert (taken.kind, taken.by, taken.choice) == ("reversal", "rule", "delete_event")
    assert taken.question.options == ("delete_event", "none")


@pytest.mark.statement("reversals-found")
def test_a_reversal_whose_arguments_are_not_known_is_confirmed_by_a_person(world: EngineUnderTest) -> None:
    events = calendar(world, shape=None)
    create_events(world, 1)
    with pytest.raises(RollbackRefused):
        world.wait(world.engine.goals.rollback("g#1"))
    [asked] = world.wait(world.engine.decisions.list())
    assert (asked.kind, asked.proposed, asked.state) == ("reversal", "delete_event", "waiting")
    assert world.wait(world.engine.goals.status("g")).decisions == [asked.decision_id]
    assert alerts(world, "DecisionNeeded")
    with pytest.raises(RollbackRefused):
        world.wait(world.engine.goals.rollback("g#1"))
    assert world.wait(world.engine.decisions.list()) == [asked], "it is asked once"
    world.wait(world.engine.decisions.answer(asked.decision_id, "delete_event"))
    [found] = world.wait(world.engine.goals.effects("g"))
    assert found.reversal_class == "REVERSIBLE"
    assert found.reversal is not None
    assert found.reversal["type"] == "delete_event"
    world.wait(world.engine.goals.rollback("g#1"))
    world.run_all()
    assert events == []


def test_no_tool_that_a_person_chooses_leaves_the_effect(world: EngineUnderTest) -> None:
    events = calendar(world, shape=None)
    create_events(world, 1)
    with pytest.raises(RollbackRefused):
        world.wait(world.engine.goals.rollback("g#1"))
    [asked] = world.wait(world.engine.decisions.list())
    world.wait(world.engine.decisions.answer(asked.decision_id, "none"))
    with pytest.raises(RollbackRefused):
        world.wait(world.engine.goals.rollback("g#1"))
    assert events == ["e0"]


def test_an_effect_that_is_declared_irreversible_is_left_alone(world: EngineUnderTest) -> None:
    @world.engine.handler("create_event")
    async def create(message: Any, ctx: Any) -> None:
        await ctx.effect("create_event", lambda: {"id": "e"}, reversal_class="IRREVERSIBLE")

    @world.engine.handler("delete_event", payload=Deleted)
    async def delete(message: Any, ctx: Any) -> None: ...

    create_events(world, 1)
    with pytest.raises(RollbackRefused):
        world.wait(world.engine.goals.rollback("g#1"))
    assert world.wait(world.engine.decisions.list(decided=True)) == []


def test_a_model_finds_a_reversal_in_the_catalogue(opened: Opened) -> None:
    """Its name is no opposite. The model names the value, and may not invent one."""

    def answer(asked: Asked) -> bytes:
        outcome = json.loads(asked["facts"]["outcome"])
        return said("drop_from_calendar", arguments={"event_id": outcome["id"]})

    with scripted(answer) as (address, questions):
        world = opened(HttpAdviser(address, "small"))
        events = calendar(world, "drop_from_calendar")
        create_events(world, 2)
        world.wait(world.engine.goals.rollback("g#1"))
        world.run_all()
    assert events == []
    [asked] = questions
    assert asked["kind"] == "reversal"
    assert set(asked["options"]) == {"create_event", "drop_from_calendar", "none"}
    offered = {one["name"]: one for one in asked["facts"]["tools"]}
    assert offered["drop_from_calendar"]["description"] == "Delete an event of the calendar."
    assert offered["drop_from_calendar"]["arguments"] == {"event_id": "string"}
    assert json.loads(asked["facts"]["payload"]) == {"number": 1}


def test_a_model_that_invents_an_argument_undoes_nothing(opened: Opened) -> None:
    invented = said("wipe", arguments={"calendar": "everything"})
    with scripted(lambda _: invented) as (address, _):
        world = opened(HttpAdviser(address, "small"))

        class Wiped(msgspec.Struct):
            calendar: str

        @world.engine.handler("wipe", payload=Wiped)
        async def wipe(message: Any, ctx: Any) -> None:
            raise AssertionError

        events = calendar(world)
        create_events(world, 1)
        with pytest.raises(RollbackRefused):
            world.wait(world.engine.goals.rollback("g#1"))
    assert events == ["e0"]


@pytest.mark.statement("reversals-found")
def test_a_reversal_found_five_times_is_learned(opened: Opened) -> None:
    with scripted(lambda _: said("delete_event")) as (address, questions):
        world = opened(HttpAdviser(address, "small"))
        events = calendar(world)
        for number in range(6):
            create_events(world, 1, f"g{number}")
            world.wait(world.engine.goals.rollback(f"g{number}#1"))
            world.run_all()
    assert (events, len(questions)) == ([], 5)
    [rule] = world.wait(world.engine.decisions.rules())
    assert (rule.kind, rule.choice, rule.pattern) == ("reversal", "delete_event", "create_event create_event")


def test_a_process_without_handlers_leaves_the_search_to_a_worker(world: EngineUnderTest) -> None:
    """As `postroom engine goals rollback` does."""
    events = calendar(world)
    create_events(world, 1)
    handlers, world.engine.core.handlers.registered = world.engine.core.handlers.registered, {}
    with pytest.raises(RollbackRefused):
        world.wait(world.engine.goals.rollback("g#1"))
    world.engine.core.handlers.registered = handlers
    world.run_all()
    [(_, effect)] = world.engine.store.read(EFFECTS.all)
    assert effect.reversal == {"type": "delete_event", "payload": {"event_id": "e0"}, "service": ""}
    world.wait(world.engine.goals.rollback("g#1"))
    world.run_all()
    assert events == []
