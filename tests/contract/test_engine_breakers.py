"""What breakers promise to organizations that share a service."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom import Breaker, Policy
from postroom.core.lifecycle.retry import Retry
from tests.engines import EngineUnderTest

COOLDOWN_S = 300.0
NO_RETRY = Retry(max_retries=0)


@pytest.fixture(params=["memory", "sqlite"], name="world")
def open_world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EngineUnderTest]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/queue.db"
    world = EngineUnderTest(url, Policy(breaker=Breaker(failures=3, cooldown_s=COOLDOWN_S)))

    @world.engine.handler("tool_call", service="slack", retry=NO_RETRY)
    async def run(message: Any, _ctx: Any) -> str:
        if message.payload.get("fails"):
            raise ConnectionError("down")
        return "sent"

    @world.engine.handler("model_call", retry=NO_RETRY)
    async def fail(_message: Any, _ctx: Any) -> None:
        raise ConnectionError("down")

    yield world
    world.close()


def fail_calls(world: EngineUnderTest, count: int, **fields: Any) -> None:
    world.submit_many(count, payload={"fails": True}, **fields)
    world.run_all()


def breakers(world: EngineUnderTest) -> dict[str, Any]:
    return world.wait(world.engine.status()).breakers


@pytest.mark.statement("breaker-organization")
def test_failures_of_one_organization_do_not_hold_the_messages_of_another(world: EngineUnderTest) -> None:
    fail_calls(world, 20, org_id="hostile")
    own, other = world.submit(org_id="hostile"), world.submit(org_id="acme")
    world.run_all()
    assert (world.state(own), world.state(other)) == ("SCHEDULED", "COMPLETED")
    assert breakers(world)["slack"].state == "open"
    assert breakers(world)["slack"].organizations == ["hostile"]


def test_status_shows_the_breakers_of_all_organizations(world: EngineUnderTest) -> None:
    names = ["acme", "beta", "zen"]
    for name in names:
        fail_calls(world, 3, org_id=name, type="model_call", service="calendar")
    world.submit(org_id="beta")
    assert breakers(world)["calendar"].organizations == names


def test_message_naming_a_handler_service_counts_for_its_organization(
    world: EngineUnderTest,
) -> None:
    for name in ("one", "two", "three", "four"):
        fail_calls(world, 1, org_id=name, type="model_call", service="slack")
    other = world.submit(org_id="acme")
    world.run_all()
    assert world.state(other) == "COMPLETED"


def test_failures_of_several_organizations_open_the_breaker_for_all(world: EngineUnderTest) -> None:
    for name in ("one", "two", "three"):
        fail_calls(world, 1, org_id=name)
    other = world.submit(org_id="acme")
    world.run_all()
    assert world.state(other) == "SCHEDULED"
    assert "breaker of service slack" in world.wait(other.explain())
    assert breakers(world)["slack"].organizations == []
    world.clock.advance(COOLDOWN_S + 1)
    world.run_all()
    assert world.state(other) == "COMPLETED"
    assert breakers(world)["slack"].state == "closed"


def test_failed_probe_of_one_organization_lets_another_one_probe(world: EngineUnderTest) -> None:
    for name in ("one", "two", "three"):
        fail_calls(world, 1, org_id=name)
    world.clock.advance(COOLDOWN_S + 1)
    fail_calls(world, 5, org_id="hostile")
    other = world.submit(org_id="acme")
    world.run_all()
    assert world.state(other) == "COMPLETED"
    assert breakers(world)["slack"].organizations == ["hostile"]


def test_one_failure_never_opens_the_breaker_of_all(tmp_path: Path) -> None:
    world = EngineUnderTest(f"sqlite:///{tmp_path}/queue.db", Policy(breaker=Breaker(failures=1)))

    @world.engine.handler("tool_call", service="slack", retry=NO_RETRY)
    async def run(message: Any, _ctx: Any) -> None:
        if message.payload.get("fails"):
            raise ConnectionError("down")

    fail_calls(world, 1, org_id="hostile")
    other = world.submit(org_id="acme")
    world.run_all()
    assert world.state(other) == "COMPLETED"
    world.close()
