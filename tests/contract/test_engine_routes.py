"""Several handlers of one message type: which one runs, and for which service its messages count."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from postroom import Breaker, MessageFailed, Policy, Retry
from postroom.engine.rules.routes import HandlerRoute, chosen
from postroom.errors import InvalidSetting, ValidationError
from tests.engines import EngineUnderTest

NO_RETRY = Retry(max_retries=0)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[EngineUnderTest]:
    made = EngineUnderTest(f"sqlite:///{tmp_path}/queue.db", Policy(breaker=Breaker(failures=2)))
    yield made
    made.close()


def add(world: EngineUnderTest, name: str, **options: Any) -> None:
    @world.engine.handler("tool_call", retry=NO_RETRY, **options)
    async def run(message: Any, _ctx: Any) -> str:
        if isinstance(message.payload, dict) and message.payload.get("fails"):
            raise ConnectionError("down")
        return name


def ran(world: EngineUnderTest, tool: str = "", **fields: Any) -> Any:
    """The name of the handler that ran a message."""
    handle = world.submit(payload={"tool": tool} if tool else {}, **fields)
    world.run_all()
    return world.wait(handle.result())


SLACK, CALENDAR, POST, REST = (
    HandlerRoute("slack"),
    HandlerRoute("calendar"),
    HandlerRoute("slack", "post"),
    HandlerRoute(),
)
BOOK = HandlerRoute("", "book")


@pytest.mark.parametrize(
    ("routes", "service", "tool", "found"),
    [
        ([SLACK], "", "", SLACK),
        ([SLACK], "calendar", "", SLACK),  # the only handler of a type runs everything
        ([SLACK, CALENDAR], "slack", "", SLACK),
        ([SLACK, CALENDAR], "", "", None),
        ([SLACK, CALENDAR], "jira", "", None),
        ([SLACK, CALENDAR, REST], "jira", "", REST),
        ([SLACK, CALENDAR, REST], "", "", REST),
        ([SLACK, POST], "slack", "post", POST),
        ([SLACK, POST], "", "post", POST),
        ([SLACK, POST], "", "read", SLACK),
        ([SLACK, BOOK], "slack", "book", BOOK),  # a tool is narrower than a service
        ([POST, BOOK], "", "read", None),
        ([BOOK], "", "read", None),
        ([BOOK], "any", "book", BOOK),
        ([HandlerRoute("a", "post"), POST], "", "post", None),
    ],
)
def test_the_most_specific_route_is_chosen(
    routes: list[HandlerRoute], service: str, tool: str, found: HandlerRoute | None
) -> None:
    payload = msgspec.json.encode({"tool": tool})
    assert chosen(routes, service, lambda: payload) == found
    assert chosen([*reversed(routes)], service, lambda: payload) == found


def test_handlers_of_one_type_run_the_messages_of_their_service_and_tool(world: EngineUnderTest) -> None:
    add(world, "slack", service="slack")
    add(world, "calendar", service="calendar")
    add(world, "post", service="slack", tool="post")
    assert ran(world, service="slack") == "slack"
    assert ran(world, service="calendar") == "calendar"
    assert ran(world, "post", service="slack") == "post"
    assert ran(world, "post") == "post"
    with pytest.raises(InvalidSetting, match="tool_call of service slack of tool post has a handler already"):
        add(world, "another", service="slack", tool="post")
    with pytest.raises(MessageFailed, match=r"must be that of a handler \(calendar, slack\), not 'jira'"):
        ran(world, service="jira")


def test_a_large_payload_is_routed_by_its_tool(world: EngineUnderTest) -> None:
    add(world, "rest")
    add(world, "post", tool="post")
    handle = world.submit(payload={"text": "x" * 100_000, "tool": "post"})
    world.run_all()
    assert world.wait(handle.result()) == "post"


def test_each_handler_of_a_type_has_its_own_shape(world: EngineUnderTest) -> None:
    class Post(msgspec.Struct):
        text: str

    add(world, "post", service="slack", payload=Post)
    add(world, "rest")
    with pytest.raises(ValidationError, match="text"):
        world.submit(service="slack", payload={"tool": "post"})
    assert ran(world, "anything", service="jira") == "rest"
    handle = world.submit(service="slack", payload={"text": "hello"})
    world.run_all()
    assert world.wait(handle.result()) == "post"


def test_a_message_that_names_no_service_counts_for_that_of_its_handler(world: EngineUnderTest) -> None:
    add(world, "post", service="slack", tool="post")
    add(world, "book", service="calendar", tool="book")
    for _ in range(2):
        world.submit(payload={"tool": "post", "fails": True})
    world.run_all()
    assert world.wait(world.engine.status()).breakers["slack"].state == "open"
    held, free = world.submit(payload={"tool": "post"}), world.submit(payload={"tool": "book"})
    long_one = world.submit(payload={"tool": "post", "text": "x" * 100_000})
    world.run_all()
    assert [world.state(each) for each in (held, free, long_one)] == ["SCHEDULED", "COMPLETED", "SCHEDULED"]
    assert "breaker of service slack" in world.wait(held.explain())


def test_each_handler_of_a_type_has_its_own_batches(world: EngineUnderTest) -> None:
    def gather(name: str) -> Any:
        return lambda messages, _contexts: [[name, message.service] for message in messages]

    for name in ("slack", "calendar"):
        world.engine.handler("tool_call", service=name, batch=2, within_ms=5)(gather(name))
    handles = [world.submit(service=name) for name in ("slack", "calendar", "slack", "calendar")]
    world.run_all()
    results = [world.wait(handle.result()) for handle in handles]
    assert results == [[name, name] for name in ("slack", "calendar", "slack", "calendar")]
