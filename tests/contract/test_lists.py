"""What `engine.list` promises: the newest first, by cursor, with a bounded number of reads a call."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from postroom import Policy
from postroom.calls.messages import MessageList
from postroom.engine.inspection import WalkLimits, checked_query, list_messages
from postroom.engine.rules.operations import Operations
from postroom.errors import InvalidMessage, ValidationError
from postroom.message import Envelope
from postroom.testing import FIRST_WALL_US
from tests.engines import EngineUnderTest


@pytest.fixture(params=["memory", "sqlite"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EngineUnderTest]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 'queue.db'}"
    world = EngineUnderTest(url, Policy())
    yield world
    world.close()


def listed(world: EngineUnderTest, **query: Any) -> MessageList:
    return world.wait(world.engine.list(**query))


def found(world: EngineUnderTest, **query: Any) -> list[str]:
    return [line.message_id for line in listed(world, **query).messages]


def submitted(world: EngineUnderTest, count: int, org_id: str = "a", **fields: Any) -> list[str]:
    return [handle.message_id for handle in world.submit_many(count, org_id=org_id, **fields)]


def test_list_is_read_by_cursor_from_the_newest_on(world: EngineUnderTest) -> None:
    ids = submitted(world, 7)
    submitted(world, 3, "b")
    first = listed(world, org_id="a", limit=3)
    second = listed(world, org_id="a", limit=3, cursor=first.cursor)
    third = listed(world, org_id="a", limit=3, cursor=second.cursor)
    seen = [line.message_id for page in (first, second, third) for line in page.messages]
    assert seen == ids[::-1]
    assert (third.cursor, third.reached) == ("", None)
    assert len(listed(world).messages) == 10


@pytest.mark.statement("list-search")
def test_every_filter_chooses_its_messages(world: EngineUnderTest) -> None:
    @world.engine.handler("model_call")
    async def fail(_message: Any, _ctx: Any) -> None:
        raise ValidationError("bad")

    [old] = submitted(world, 1, goal_id="trip", payload={"to": "Oslo"})
    [dead] = submitted(world, 1, "b", type="model_call", agent_id="ada")
    world.run_all()
    world.clock.advance(3600)
    [new] = submitted(world, 1, delay_s=60.0)
    noon = datetime.fromtimestamp(FIRST_WALL_US / 1e6, UTC) + timedelta(minutes=30)
    assert found(world, org_id="b") == [dead]
    assert found(world, state="SCHEDULED") == [new]
    assert found(world, type="model_call") == [dead]
    assert found(world, goal_id="trip") == [old]
    assert found(world, agent_id="ada") == [dead]
    assert found(world, since=noon) == found(world, since=noon.isoformat()) == [new]
    assert found(world, text="oslo") == [old]
    assert found(world, text="validationERROR") == [dead]
    assert found(world, text=f" {old} ") == [old]
    assert found(world, text=old, org_id="b") == found(world, text=old, state="SCHEDULED") == []
    [line] = listed(world, type="model_call").messages
    assert (line.org_id, line.agent_id, line.state, line.error_type) == (
        "b", "ada", "DEAD_LETTER", "ValidationError",
    )  # fmt: skip


def test_plain_code_lists_as_coroutines_do(world: EngineUnderTest) -> None:
    ids = submitted(world, 2)
    assert [line.message_id for line in world.engine.blocking.list(org_id="a").messages] == ids[::-1]


@pytest.mark.parametrize(
    "query",
    [{"state": "WAITING"}, {"limit": 0}, {"limit": 1_001}, {"cursor": "x"}, {"org_id": "a b"}, {"since": 5},
     {"since": "never"}, {"colour": "red"}],
)  # fmt: skip
def test_filter_that_does_not_fit_is_refused(query: dict[str, Any]) -> None:
    world = EngineUnderTest("memory://")
    with pytest.raises(InvalidMessage):
        listed(world, **query)
    world.close()


def walked(world: EngineUnderTest, limits: WalkLimits, **query: Any) -> MessageList:
    """As `listed`, with other limits."""
    asked = checked_query(query)
    org_id, before = query.get("org_id"), int(query.get("cursor") or 0)
    return world.engine.store.read(
        lambda transaction: list_messages(
            Operations(transaction, world.engine.policy), asked, org_id, before, "", limits
        )
    )


def test_search_stops_at_its_bound_and_goes_on_from_there(world: EngineUnderTest) -> None:
    few = WalkLimits(looked_max=4)
    [wanted] = submitted(world, 1, payload={"name": "Needle"})
    submitted(world, 9)
    page, calls = walked(world, few, text="needle"), 1
    while not page.messages and page.cursor:
        assert page.reached is not None
        page, calls = walked(world, few, text="needle", cursor=page.cursor), calls + 1
    assert [line.message_id for line in page.messages] == [wanted]
    assert calls == 3


def test_few_messages_of_an_organization_are_found_among_many(world: EngineUnderTest) -> None:
    """One call walks back a bounded number of records, also when none of them fits."""
    few = WalkLimits(numbers_a_read=10, reads_max=2)
    [rare] = submitted(world, 1, "b")
    submitted(world, 30)
    page = walked(world, few, org_id="b")
    assert page.messages == []
    assert page.cursor
    while page.cursor and not page.messages:
        page = walked(world, few, org_id="b", cursor=page.cursor)
    assert [line.message_id for line in page.messages] == [rare]


def test_no_record_is_looked_at_when_the_counters_say_that_none_fits(world: EngineUnderTest) -> None:
    few = WalkLimits(numbers_a_read=10, reads_max=2)
    submitted(world, 30)
    assert walked(world, few, state="QUEUED").messages
    assert walked(world, few, state="COMPLETED") == MessageList([])  # a walk would stop with a cursor
    assert walked(world, few, org_id="nobody") == MessageList([])


def test_tasks_of_agents_and_damaged_messages_do_not_stop_a_list(world: EngineUnderTest) -> None:
    task = Envelope(queue="ada", payload=b"{}")
    damaged = Envelope(queue="org:a", payload=b"\xff", type="tool_call")
    [stored_task, stored] = world.engine.store.write(lambda transaction: transaction.insert([task, damaged]))
    [line] = listed(world).messages
    assert (line.message_id, line.goal_id) == (stored.message_id, "")
    assert found(world, text=stored_task.message_id) == []
