"""What breakers promise to organizations that share a service."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from postroom import Breaker, Policy
from postroom.core.lifecycle.breaker import Circuit
from postroom.core.lifecycle.retry import Retry
from postroom.engine.rules.cells import CIRCUITS
from postroom.errors import ValidationError
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


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[EngineUnderTest]:
    """A service that three messages of one organization close."""
    world = EngineUnderTest(f"sqlite:///{tmp_path}/queue.db", Policy(breaker=Breaker(failures=3)))
    yield world
    world.close()


def failing_with(world: EngineUnderTest, error: Exception, **options: Any) -> None:
    @world.engine.handler("tool_call", service="slack", **options)
    async def run(message: Any, _ctx: Any) -> None:
        if message.payload.get("fails"):
            raise error


class PydanticLike:
    """As the module of a library that has a class of this name, too."""

    class ValidationError(ValueError):
        """Not that of postroom."""


BUGS = [
    TypeError("x"), KeyError("x"), IndexError("x"), NameError("x"), AttributeError("x"), AssertionError("x"),
    ZeroDivisionError("x"), ImportError("x"), ValidationError("x"), PydanticLike.ValidationError("x"),
]  # fmt: skip


@pytest.mark.statement("breaker-bugs")
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: type(bug).__qualname__)
def test_bug_of_a_handler_does_not_count_for_its_service(alone: EngineUnderTest, bug: Exception) -> None:
    failing_with(alone, bug, retry=NO_RETRY)
    fail_calls(alone, 10)
    assert breakers(alone) == {}


@pytest.mark.parametrize(
    "error", [ConnectionError("x"), TimeoutError("x"), RuntimeError("x"), ValueError("x")]
)
def test_other_errors_count_for_the_service(alone: EngineUnderTest, error: Exception) -> None:
    failing_with(alone, error, retry=NO_RETRY)
    fail_calls(alone, 3)
    assert breakers(alone)["slack"].state == "open"


@pytest.mark.statement("breaker-threshold")
def test_one_message_counts_once_in_a_window(alone: EngineUnderTest) -> None:
    failing_with(alone, ConnectionError("down"), retry=Retry(max_retries=5, delay_s=0))
    fail_calls(alone, 2)
    assert breakers(alone)["slack"].state == "closed"
    fail_calls(alone, 1)
    assert breakers(alone)["slack"].state == "open"


def test_failures_that_were_stored_without_messages_count(alone: EngineUnderTest) -> None:
    failing_with(alone, ConnectionError("down"), retry=NO_RETRY)
    alone.engine.store.write(
        lambda transaction: CIRCUITS.put(
            transaction, Circuit(failed_at=(transaction.steady_ns,) * 2), "acme", "slack"
        )
    )
    fail_calls(alone, 1)
    assert breakers(alone)["slack"].state == "open"


@pytest.mark.statement("breaker-p0", "breaker-policy")
@pytest.mark.parametrize(
    ("rule", "p0", "others"),
    [
        (Breaker(failures=1), "DEAD_LETTER", "SCHEDULED"),
        (Breaker(failures=1, p0="defer"), "SCHEDULED", "SCHEDULED"),
        (Breaker(failures=1, p0="defer", on_open="fail"), "SCHEDULED", "DEAD_LETTER"),
    ],
)
def test_p0_message_to_an_open_service_fails_at_once(rule: Breaker, p0: str, others: str) -> None:
    world = EngineUnderTest("memory://", Policy(breaker=rule))
    failing_with(world, ConnectionError("down"), retry=NO_RETRY)
    fail_calls(world, 1)
    urgent, other = world.submit(priority=0), world.submit(priority=1)
    assert ("dead letter" in world.wait(urgent.explain())) == (p0 == "DEAD_LETTER")
    world.run_all()
    assert (world.state(urgent), world.state(other)) == (p0, others)
    if p0 == "DEAD_LETTER":
        assert world.wait(world.engine.get(urgent.message_id)).errors[-1]["error_type"] == "BreakerOpen"
    world.close()


@pytest.mark.statement("explain")
def test_explanation_says_first_what_comes_first(world: EngineUnderTest) -> None:
    fail_calls(world, 5)
    now = datetime.fromtimestamp(world.engine.store.wall_us() / 1e6, UTC)
    soon, late = (
        world.submit(expires_at=(now + timedelta(seconds=left_s)).isoformat()) for left_s in (2, 3_600)
    )
    for state in ("QUEUED", "SCHEDULED"):  # before and after a worker has looked at them
        assert (world.state(soon), world.state(late)) == (state, state)
        said = world.wait(soon.explain())
        assert "expires in 2 s, before anything else changes: " in said
        assert "slack" in said
        said = world.wait(late.explain())
        assert "slack" in said.partition("It expires in 3600 s.")[0]
        world.run_all()


def test_explanation_names_every_rule_that_holds_a_message(world: EngineUnderTest) -> None:
    fail_calls(world, 5)
    held = world.submit()
    world.wait(world.engine.pause(org_id="acme"))
    said = world.wait(held.explain())
    assert "the breaker of service slack is open. A probe is allowed in 300 s." in said
    assert "Also, every type of organization acme is paused. It runs after a resume." in said
