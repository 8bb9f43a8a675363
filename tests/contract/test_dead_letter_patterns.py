"""The look at dead letters: what is systematic becomes a decision, and a rule holds messages at the door."""

from typing import Any

import pytest

from postroom import HttpAdviser, ValidationError
from postroom.engine.rules.outcomes import Outcome
from postroom.errors import UnknownDecision
from tests.engines import EngineUnderTest
from tests.goalworlds import Choosing, Opened, alerts, database, opened, postgres, url, world
from tests.scriptedmodel import said, scripted

__all__ = ["database", "opened", "postgres", "url", "world"]  # fixtures

BROKEN: dict[str, Any] = {"tool": "search", "arguments": {"lang": "fr"}}


def search(world: EngineUnderTest) -> list[Any]:
    """A handler of tool_call that fails for French. Returns the payloads for which it did not fail."""
    done: list[Any] = []

    @world.engine.handler("tool_call")
    async def step(message: Any, ctx: Any) -> None:
        arguments = message.payload.get("arguments", {})
        if arguments.get("lang") == "fr" and not done.count("repaired"):
            raise (TimeoutError if arguments.get("slow") else ValidationError)("no French")
        done.append(message.payload)

    return done


def fail(world: EngineUnderTest, count: int, org_id: str = "acme", **arguments: Any) -> None:
    """Make dead letters that differ in their number only."""
    for number in range(count):
        world.submit(org_id=org_id, payload={**BROKEN, "arguments": {"lang": "fr", "n": number, **arguments}})
    world.run_all()


def look(world: EngineUnderTest) -> Any:
    """Look at new dead letters. Returns the open decisions."""
    world.clock.advance(2)
    world.wait(world.engine.dlq.look())
    world.run_all()
    return world.wait(world.engine.decisions.list())


@pytest.mark.statement("dead-letter-patterns")
def test_a_systematic_failure_becomes_a_decision_with_a_proposed_rule(world: EngineUnderTest) -> None:
    search(world)
    fail(world, 4)
    fail(world, 1, org_id="bolt")
    assert look(world) == []
    fail(world, 1)
    [asked] = look(world)
    assert (asked.kind, asked.org_id, asked.state, asked.proposed) == (
        "dead_letter",
        "acme",
        "waiting",
        "hold",
    )
    facts = asked.question.facts
    assert (facts["type"], facts["error_type"], facts["count"]) == ("tool_call", "ValidationError", 5)
    assert facts["alike"] == {"service": "", "payload": {"tool": "search", "arguments.lang": "fr"}}
    assert alerts(world, "DecisionNeeded")
    fail(world, 10)
    assert look(world) == [asked], "one question for a pattern in a day"


def test_a_rule_holds_messages_like_those_that_failed_until_it_is_removed(world: EngineUnderTest) -> None:
    done = search(world)
    fail(world, 5)
    [asked] = look(world)
    world.wait(world.engine.decisions.answer(asked.decision_id, "hold"))
    large = {**BROKEN, "text": "x" * 100_000}  # its payload is stored apart
    held = [world.submit(payload=BROKEN), world.submit(payload=large, ordering_key="k")]
    others = [world.submit(payload={"tool": "search"}), world.submit(payload=BROKEN, org_id="bolt")]
    world.run_all()
    assert [world.state(one) for one in held] == ["SCHEDULED", "SCHEDULED"]
    assert [world.state(one) for one in others] == ["COMPLETED", "DEAD_LETTER"]
    [rule] = world.wait(world.engine.decisions.rules())
    assert (rule.kind, rule.choice, rule.org_id, rule.held) == ("dead_letter", "hold", "acme", 2)
    assert rule.payload == {"tool": "search", "arguments.lang": "fr"}
    assert world.wait(world.engine.decisions.held(rule.rule_id)) == [one.message_id for one in held]
    assert f"rule {rule.rule_id} holds messages like it" in world.wait(held[0].explain())
    assert world.wait(world.engine.status()).pauses == []

    done.append("repaired")
    world.wait(world.engine.decisions.forget(rule.rule_id))
    world.run_all()
    assert [world.state(one) for one in held] == ["COMPLETED", "COMPLETED"]
    assert world.wait(world.engine.decisions.rules()) == []
    with pytest.raises(UnknownDecision):
        world.wait(world.engine.decisions.held(rule.rule_id))
    with pytest.raises(UnknownDecision):
        world.wait(world.engine.decisions.forget(rule.rule_id))


def test_a_held_message_survives_a_pause_and_can_be_cancelled(world: EngineUnderTest) -> None:
    search(world)
    fail(world, 5)
    [asked] = look(world)
    world.wait(world.engine.decisions.answer(asked.decision_id, "hold"))
    held = world.submit(payload=BROKEN)
    world.run_all()
    world.wait(world.engine.pause(org_id="acme", type="tool_call"))
    world.wait(world.engine.resume(org_id="acme", type="tool_call"))
    world.run_all()
    [rule] = world.wait(world.engine.decisions.rules())
    assert (world.state(held), rule.held) == ("SCHEDULED", 1)
    world.wait(held.cancel())
    [rule] = world.wait(world.engine.decisions.rules())
    assert (world.state(held), rule.held) == ("CANCELLED", 0)


def test_failures_that_pass_are_proposed_for_a_replay(world: EngineUnderTest) -> None:
    done = search(world)
    fail(world, 6, slow=True)
    fail(world, 1)
    [asked] = look(world)
    assert asked.proposed == "replay"
    done.append("repaired")
    world.wait(world.engine.decisions.answer(asked.decision_id, "replay"))
    world.run_all()
    assert len(done) == 7
    assert [one.error_history[-1]["error_type"] for one in world.wait(world.engine.dlq.list())] == [
        "ValidationError"
    ]


def test_a_model_that_is_sure_holds_and_replays_and_a_person_purges(opened: Opened) -> None:
    choices = {"ValidationError": "hold", "TimeoutError": "purge"}
    with scripted(lambda asked: said(choices[asked["facts"]["error_type"]])) as (address, questions):
        world = opened(HttpAdviser(address, "small"))
        search(world)
        fail(world, 5)
        fail(world, 5, slow=True)
        [asked] = look(world)
    assert len(questions) == 2
    assert questions[0]["options"] == ["keep", "replay", "purge", "hold"]
    [rule] = world.wait(world.engine.decisions.rules())
    assert rule.choice == "hold"
    assert (asked.proposed, asked.question.facts["error_type"]) == ("purge", "TimeoutError")
    assert len(world.wait(world.engine.dlq.list())) == 10
    world.wait(world.engine.decisions.answer(asked.decision_id, "purge"))
    world.run_all()
    left = world.wait(world.engine.dlq.list())
    assert {one.error_history[-1]["error_type"] for one in left} == {"ValidationError"}


@pytest.mark.statement("poison-pattern")
def test_poison_is_kept_from_the_workers_by_a_rule(opened: Opened) -> None:
    """The process of each message has died."""
    world = opened(poison_crashes=1)
    poison = {"payload": {"file": "bomb.zip"}}
    world.submit_many(5, **poison)
    for _ in range(5):
        for one in world.claim():
            record = one.record
            world.finish(Outcome(kind="crashed", message_id=record.message_id, lease=record.lease))
    assert world.claim() == []
    [asked] = look(world)
    assert (asked.proposed, asked.question.facts["is_poison"]) == ("hold", True)
    world.wait(world.engine.decisions.answer(asked.decision_id, "hold"))
    held = world.submit(**poison)
    other = world.submit(payload={"file": "letter.pdf"})
    assert [one.record.message_id for one in world.claim(10)] == [other.message_id]
    assert world.state(held) == "SCHEDULED"


def test_an_unsure_model_leaves_the_pattern_to_a_person(opened: Opened) -> None:
    world = opened(Choosing(0.2, dead_letter="hold"))
    search(world)
    fail(world, 5)
    [asked] = look(world)
    assert (asked.state, asked.proposed) == ("waiting", "hold")
    assert asked.reasoning.startswith("the adviser is not sure")
    assert world.wait(world.engine.decisions.rules()) == []


def test_workers_look_when_it_is_due(world: EngineUnderTest) -> None:
    search(world)
    dlq = world.engine.dlq
    fail(world, 5)
    world.clock.advance(61)
    assert world.wait(dlq.look(only_when_due=True)) == 1
    fail(world, 5, slow=True)
    world.clock.advance(2)
    assert world.wait(dlq.look(only_when_due=True)) == 0
    world.clock.advance(59)
    assert world.wait(dlq.look(only_when_due=True)) == 1
