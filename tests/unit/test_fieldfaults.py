"""An invalid field is described in plain words."""

from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from postroom.contracts.tasks.task_input import encoded
from postroom.core.fieldfaults import field_fault
from postroom.errors import InvalidMessage


class Inner(msgspec.Struct):
    name: Annotated[str, Meta(pattern="^[a-z]+$")]


class Thing(msgspec.Struct, forbid_unknown_fields=True):
    agent: Annotated[str, Meta(min_length=1, max_length=3)]
    priority: int | None = None
    delay_s: Annotated[float, Meta(ge=0, le=5)] = 0.0
    how: Literal["fast", "slow"] | None = None
    inner: list[Inner] = []


FIELDS = "the fields are agent, priority, delay_s, how, inner"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ([], "the body must be an object, not a list"),
        ({}, "the body lacks the field 'agent'"),
        ({"agent": "a", "colour": 1}, f"the body has a field 'colour', which is not known: {FIELDS}"),
        ({"agent": 1}, "agent must be a text, not a whole number"),
        ({"agent": None}, "agent must be a text, not null"),
        ({"agent": ""}, "agent must have at least 1 characters"),
        ({"agent": "long"}, "agent must have at most 3 characters"),
        ({"agent": "a", "priority": "high"}, "priority must be a whole number or null, not a text"),
        ({"agent": "a", "delay_s": -1}, "delay_s must be at least 0"),
        ({"agent": "a", "delay_s": 5.5}, "delay_s must be at most 5"),
        ({"agent": "a", "how": "never"}, "how cannot be 'never': it is one of fast, slow"),
        ({"agent": "a", "inner": [{}]}, "inner[0] lacks the field 'name'"),
        ({"agent": "a", "inner": [{"name": "A"}]}, "inner[0].name is not allowed: use 1 to 128 ASCII"),
    ],
)
def test_a_fault_is_one_plain_sentence(body: Any, sentence: str) -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.convert(body, Thing)
    assert field_fault(raised.value, "the body", Thing).startswith(sentence)


def test_unknown_fault_keeps_its_text() -> None:
    error = msgspec.ValidationError("Something new - at `$.agent`")
    assert field_fault(error, "the body", Thing) == "agent is invalid: Something new"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([object()], "it holds a value of type object"),
        ({(1, 2): 3}, "it holds a dict with a key that is not text"),
        ("\ud800", "it holds lone surrogates, which are not Unicode text"),
    ],
)
def test_unencodable_explains_values_that_json_cannot_hold(value: Any, why: str) -> None:
    with pytest.raises(InvalidMessage) as raised:
        encoded("the payload", value)
    assert str(raised.value) == f"the payload cannot be written as JSON: {why}"
