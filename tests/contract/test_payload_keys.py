"""The keys of a payload that the default handler of its type knows."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from postroom import Policy
from postroom.engine.rules.policy import PAYLOAD_KEYS
from postroom.errors import ValidationError
from tests.engines import EngineUnderTest
from tests.postgresserver import database, postgres, store_url
from tests.waiting import HANG_GUARD_S

__all__ = ["database", "postgres"]  # fixtures


class Note(msgspec.Struct):
    node_id: str
    value: int


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    one = EngineUnderTest(store_url(request, tmp_path), Policy())
    yield one
    one.close()


@pytest.mark.parametrize("type_name", PAYLOAD_KEYS)
def test_a_submit_with_an_unknown_key_is_refused(world: EngineUnderTest, type_name: str) -> None:
    known = PAYLOAD_KEYS[type_name]
    with pytest.raises(ValidationError, match=f"^unknown key 'extra' of {type_name}; its keys are "):
        world.submit(type=type_name, payload={**dict.fromkeys(known, "x"), "extra": 1})
    for key in known:
        said = f"^unknown key '{key}s' of {type_name}; did you mean '{key}'\\?$"
        with pytest.raises(ValidationError, match=said):
            world.submit(type=type_name, payload={f"{key}s": 1})
    world.submit(type=type_name, payload=dict.fromkeys(known, "x"))


def test_the_nearest_known_key_is_named(world: EngineUnderTest) -> None:
    node = {"node_id": "n", "properties": {"x": 1}}
    with pytest.raises(ValidationError, match=r"^unknown key 'scop' of memory_save; did you mean 'scope'\?$"):
        world.submit(type="memory_save", payload={**node, "scop": "IMMEDIATE"})
    said = "^unknown key 'value' of memory_save; its keys are node_id, properties, edges, scope$"
    with pytest.raises(ValidationError, match=said):
        world.submit(type="memory_save", payload={**node, "value": 1})
    with pytest.raises(ValidationError, match=said):
        world.submit(type="memory_save", payload=Note("n", 1))
    with pytest.raises(ValidationError) as long:
        world.submit(type="memory_save", payload={"x" * 1_000_000: 1})
    assert len(str(long.value)) < 1_000


def test_a_stored_message_with_an_unknown_key_becomes_a_dead_letter(world: EngineUnderTest) -> None:
    """It may have been accepted by an earlier release, or by a process that expected another handler."""
    keys = world.engine.core.registry.payload_keys
    known = keys.pop("memory_save")
    handle = world.submit(type="memory_save", payload={"node_id": "n", "value": 1})
    keys["memory_save"] = known
    world.run_all()
    info = world.wait(world.engine.get(handle.message_id))
    assert (info.state, info.attempt) == ("DEAD_LETTER", 1)
    assert "unknown key 'value' of memory_save" in info.errors[-1]["error"]
    assert world.wait(world.engine.graph.main("acme").get("n")) is None


@pytest.mark.parametrize("has_handler", [True, False])
def test_an_own_handler_or_registration_accepts_any_keys(world: EngineUnderTest, has_handler: bool) -> None:
    if has_handler:
        world.engine.handler("memory_save")(lambda message, _: message.payload["value"])
        handle = world.submit(type="memory_save", payload={"value": 1})
        world.run_all()
        assert world.wait(handle.result(HANG_GUARD_S)) == 1
    else:
        world.engine.register_type("memory_save")
        world.submit(type="memory_save", payload={"value": 1})
