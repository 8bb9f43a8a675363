"""What `Engine` promises when outcomes are repeated or late, and when an older message of a key returns."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from postroom import Breaker, Guard, Organization, Policy
from postroom.engine.rules.breakers import Service
from postroom.engine.rules.cells import CIRCUITS, GOALS
from postroom.engine.rules.claims import Claimed
from postroom.engine.rules.outcomes import Outcome, Usage
from postroom.errors import InvalidSetting
from tests.engines import EngineUnderTest


@pytest.fixture(params=["memory", "sqlite"], name="world")
def open_world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EngineUnderTest]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/queue.db"
    rules = Policy(guard=Guard(tokens=1_000), breaker=Breaker(failures=2))
    world = EngineUnderTest(url, rules)
    yield world
    world.close()


def completion(claimed: Claimed, usage: Usage | None = None) -> Outcome:
    record = claimed.record
    return Outcome(
        kind="completed",
        message_id=record.message_id,
        lease=record.lease,
        body=claimed.body,
        usage=usage,
        org_id="acme",
    )


def claimed_ids(world: EngineUnderTest) -> list[str]:
    return [one.record.message_id for one in world.claim(10)]


def test_usage_of_a_repeated_completion_counts_once(world: EngineUnderTest) -> None:
    world.submit(goal_id="g")
    [claimed] = world.claim()
    outcome = completion(claimed, Usage(tokens_in=7))
    assert world.finish(outcome) == []
    assert world.finish(outcome) == []
    use = world.engine.store.read(lambda transaction: GOALS.get(transaction, "acme", "g"))
    assert use is not None
    assert use.tokens == 7


def test_repeated_failure_counts_once_for_the_breaker(world: EngineUnderTest) -> None:
    world.submit(service="search")
    [claimed] = world.claim()
    outcome = Outcome(
        kind="failed", message_id=claimed.record.message_id, lease=claimed.record.lease, error="x",
        service=Service("acme", "search"), counts_for_breaker=True,
    )  # fmt: skip
    for _ in range(3):
        world.finish(outcome)
    circuit = world.engine.store.read(lambda transaction: CIRCUITS.get(transaction, "acme", "search"))
    assert circuit is not None
    assert circuit.state == "closed"


def test_late_and_present_outcome_of_one_message_in_one_commit(world: EngineUnderTest) -> None:
    first, second = (world.submit(ordering_key="k") for _ in range(2))
    [zombie] = world.claim()
    world.clock.advance(16)
    [present] = world.claim()
    assert world.finish(completion(present), completion(zombie)) == [first.message_id]
    assert world.state(first) == "COMPLETED"
    assert claimed_ids(world) == [second.message_id]


def test_late_deferral_does_not_delay_a_message_that_waits(world: EngineUnderTest) -> None:
    handle = world.submit()
    [zombie] = world.claim()
    world.clock.advance(16)
    world.wait(world.engine.sweep())
    late = Outcome(
        kind="deferred", message_id=handle.message_id, lease=zombie.record.lease, delay_s=60.0, error="later"
    )
    assert world.finish(late) == [handle.message_id]
    assert world.state(handle) == "QUEUED"


def test_delay_of_a_message_that_waits_for_its_key_may_end_early(world: EngineUnderTest) -> None:
    first = world.submit(ordering_key="k")
    delayed = world.submit(ordering_key="k", delay_s=1)
    [one] = world.claim(10)
    world.clock.advance(2)
    assert not world.claim(10)
    world.complete([one])
    assert world.state(first) == "COMPLETED"
    assert claimed_ids(world) == [delayed.message_id]


def test_replayed_message_waits_for_the_running_one_of_its_key(world: EngineUnderTest) -> None:
    older, younger = (world.submit(ordering_key="k") for _ in range(2))
    world.wait(older.cancel())
    [running] = world.claim(10)
    replay(world, older.message_id)
    assert not world.claim(10)
    world.fail(running)
    world.clock.advance(5)
    assert not world.claim(10)  # this claim parks the younger one and wakes the older one
    assert claimed_ids(world) == [older.message_id]
    assert world.state(younger) == "SCHEDULED"


def test_replayed_message_runs_after_a_younger_one_became_a_dead_letter(world: EngineUnderTest) -> None:
    older = world.submit(ordering_key="k")
    younger = world.submit(ordering_key="k", on_dead="stop", max_retries=0)
    world.wait(older.cancel())
    [running] = world.claim(10)
    replay(world, older.message_id)
    world.fail(running)
    assert world.state(younger) == "DEAD_LETTER"
    assert claimed_ids(world) == [older.message_id]


def test_resume_of_a_type_leaves_a_replayed_message_waiting_for_its_key(
    world: EngineUnderTest,
) -> None:
    older = world.submit(ordering_key="k")
    world.submit(ordering_key="k", type="model_call")
    world.wait(world.engine.pause(type="tool_call"))
    assert not world.claim(10)  # the older one is parked
    world.wait(older.cancel())
    [running] = world.claim(10)
    replay(world, older.message_id)
    world.wait(world.engine.resume(type="tool_call"))
    assert not world.claim(10)
    world.complete([running])
    assert claimed_ids(world) == [older.message_id]


@pytest.mark.parametrize("weight", [0.0, -1.0, 0.001, float("nan")])
def test_weight_that_would_never_earn_a_turn_is_refused(weight: float) -> None:
    with pytest.raises(InvalidSetting, match="weight"):
        Organization(weight=weight)


def replay(world: EngineUnderTest, message_id: str) -> None:
    """Replay a message in any state that allows it; `dlq.replay` takes dead letters only."""
    world.wait(world.engine.core.commits.write(lambda operations: operations.replay(message_id, None)))
