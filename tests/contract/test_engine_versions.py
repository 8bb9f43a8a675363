"""What becomes of stored messages when the major version of their format changes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from postroom import Policy, Retry
from postroom.engine.messages import decode_body, fields_of
from tests.engines import EngineUnderTest

OLD = {"type": "tool_call", "org_id": "acme", "payload": {"name": "search"}}
Upgraded = Callable[..., EngineUnderTest]


class Call(msgspec.Struct):
    """The payload of version 2."""

    tool: str


def one_to_two(fields: dict[str, Any]) -> dict[str, Any]:
    """`name` of the payload is called `tool` from version 2 on."""
    payload = {**fields["payload"], "tool": fields["payload"]["name"]}
    del payload["name"]
    return {**fields, "type": "tool_call", "payload": payload}


@pytest.fixture
def before(tmp_path: Path) -> Iterator[EngineUnderTest]:
    """An engine of version 1."""
    world = EngineUnderTest(f"sqlite:///{tmp_path}/queue.db", Policy(retries={"old_call": Retry()}))
    world.engine.register_type("old_call")
    yield world
    world.close()


@pytest.fixture
def upgraded(before: EngineUnderTest, tmp_path: Path) -> Iterator[Upgraded]:
    """Opens the same store with an engine of version 2."""
    made: list[EngineUnderTest] = []

    def open_engine(**rules: Any) -> EngineUnderTest:
        world = EngineUnderTest(f"sqlite:///{tmp_path}/queue.db", Policy(version="2.0.0", **rules))
        made.append(world)

        @world.engine.handler("tool_call", payload=Call)
        async def run(message: Any, _ctx: Any) -> list[str]:
            return [message.payload.tool, message.version, message.type, message.context.get("user", "")]

        world.engine.migration(1)(one_to_two)
        return world

    yield open_engine
    for each in made:
        each.close()


def result(world: EngineUnderTest, message_id: str) -> Any:
    return world.wait(world.engine.handle(message_id).result())


@pytest.mark.statement("version-backlog", "version-migration")
def test_backlog_of_the_previous_version_is_migrated_at_the_claim(
    before: EngineUnderTest, upgraded: Upgraded
) -> None:
    waiting = before.submit(**OLD, context={"user": "kim"})
    long_one = before.submit(**{**OLD, "payload": {"name": "x" * 100_000}}, context={"user": "y" * 100_000})
    world = upgraded()
    world.run_all()
    assert result(world, waiting.message_id) == ["search", "2.0.0", "tool_call", "kim"]
    assert result(world, long_one.message_id) == ["x" * 100_000, "2.0.0", "tool_call", "y" * 100_000]
    shown = world.message(waiting.message_id)  # as the handler got it
    assert (shown.version, shown.payload) == ("2.0.0", Call("search"))
    kept = world.engine.store.load(waiting.message_id)
    assert kept is not None
    stored = decode_body(kept.envelope.payload)
    assert (stored.version, bytes(stored.payload)) == ("1.0.0", b'{"name":"search"}')


def test_migration_may_rename_a_type(before: EngineUnderTest, upgraded: Upgraded) -> None:
    waiting = before.submit(**{**OLD, "type": "old_call"})
    world = upgraded()
    world.run_all()
    assert result(world, waiting.message_id)[2] == "tool_call"


@pytest.mark.statement("version-backlog")
def test_dead_letter_of_the_previous_version_is_migrated_by_its_replay(
    before: EngineUnderTest, upgraded: Upgraded
) -> None:
    letter = before.submit(**OLD, expires_at="2099-01-01T00:00:00Z")
    before.run_all()  # there is no handler
    assert before.state(letter) == "DEAD_LETTER"
    world = upgraded()
    world.wait(world.engine.dlq.replay([letter.message_id]))
    world.run_all()
    assert result(world, letter.message_id)[:2] == ["search", "2.0.0"]


def test_failed_migration_makes_a_dead_letter_that_a_replay_can_run(
    before: EngineUnderTest, upgraded: Upgraded
) -> None:
    waiting = before.submit(**{**OLD, "payload": {}})
    world = upgraded()
    world.run_all()
    [letter] = world.wait(world.engine.dlq.list())
    assert letter.failure_reason == "ValidationError: the migration of version 1.0.0 failed: KeyError: 'name'"
    world.engine.migration(1)(lambda fields: {**fields, "payload": {"tool": "none"}})
    world.wait(world.engine.dlq.replay([waiting.message_id]))
    world.run_all()
    assert result(world, waiting.message_id)[0] == "none"


@pytest.mark.statement("version-two-majors")
def test_message_of_an_unsupported_version_becomes_a_dead_letter(
    before: EngineUnderTest, upgraded: Upgraded
) -> None:
    before.submit(**OLD)
    world = upgraded()
    newer = EngineUnderTest(world.engine.store.url, Policy(version="3.0.0"))
    newer.engine.handler("tool_call")(lambda _message, _ctx: None)
    newer.run_all()
    [letter] = newer.wait(newer.engine.dlq.list())
    assert letter.failure_reason.startswith("UnsupportedVersion: version '1.0.0' is not supported")
    newer.close()


DEAD: list[dict[str, Any]] = [
    OLD,
    {**OLD, "idempotency_key": "k", "ordering_key": "o", "on_dead": "stop"},
    {**OLD, "operation": {"target": "t", "resources": ["r"]}, "resource_limits": {"memory": "1GB"}},
    {**OLD, "created_by": {"type": "user", "id": "u"}, "user_id": "u", "context": {"a": "b" * 70_000}},
    {**OLD, "version": "1.4.0", "colour": "red", "max_retries": 0, "tokens": 3, "model_preferences": ["m"]},
]


@pytest.mark.statement("dlq-resubmit")
@pytest.mark.parametrize("version", ["1.0.0", "2.0.0"])
@pytest.mark.parametrize("fields", DEAD)
def test_original_message_of_every_dead_letter_can_be_submitted(
    before: EngineUnderTest, upgraded: Upgraded, fields: dict[str, Any], version: str
) -> None:
    parent = before.submit(**OLD)
    for each in ({}, {"parent_message_id": parent.message_id}):
        before.submit(**{**fields, **each, "idempotency_key": fields.get("idempotency_key") and str(each)})
    before.run_all()
    world = before if version == "1.0.0" else upgraded()
    letters = world.wait(world.engine.dlq.list())
    assert len(letters) >= 2
    for letter in letters:
        again = world.wait(world.engine.submit(**letter.original_message))
        assert (again.message_id, again.duplicate) == (letter.message_id, True)


def test_purged_dead_letter_is_stored_again_by_its_original_message(before: EngineUnderTest) -> None:
    given = "0190f0f0-0000-4000-8000-000000000001"
    first = before.submit(**OLD, message_id=given, ordering_key="o", on_dead="stop", parent_message_id=None)
    before.run_all()
    letter = before.wait(before.engine.dlq.show(first.message_id))
    before.wait(before.engine.dlq.purge([first.message_id]))
    again = before.wait(before.engine.submit(**{**letter.original_message, "parent_message_id": None}))
    assert (again.message_id, again.duplicate) == (first.message_id, False)
    stored = fields_of(before.message(given))
    changed = {name for name, value in letter.original_message.items() if stored[name] != value}
    assert changed <= {"created_at", "retry_count"}
