"""Which tool undoes what another one did, by names and arguments."""

from typing import Any

import pytest

from postroom.core.goals.reversals import KnownTool, chosen, class_of, filled, undoes


@pytest.mark.parametrize(
    ("done", "candidate"),
    [
        ("create_event", "delete_event"),
        ("createEvent", "deleteEvent"),
        ("calendar.events.insert", "calendar.events.delete"),
        ("add", "remove"),
        ("book_room", "cancel_room"),
        ("charge-card", "refund-card"),
        ("lock_door", "unlock_door"),
        ("unlock_door", "lock_door"),
        ("room_book", "room_cancel"),
    ],
)
def test_the_opposite_name_differs_by_one_pair_of_words(done: str, candidate: str) -> None:
    assert undoes(candidate, done)


@pytest.mark.parametrize(
    ("done", "candidate"),
    [
        ("create_event", "create_event"),
        ("create_event", "delete_calendar"),
        ("create_event", "delete_event_series"),
        ("delete_event", "create_event"),
        ("update_event", "delete_event"),
        ("send_mail", "delete_mail"),
        ("create_add", "delete_remove"),
    ],
)
def test_other_names_are_no_opposites(done: str, candidate: str) -> None:
    assert not undoes(candidate, done)


def tool(arguments: dict[str, str] | None, *required: str) -> KnownTool:
    return KnownTool("t", "tool_call", arguments=arguments, required=[*required])


@pytest.mark.parametrize(
    ("arguments", "required", "called", "outcome", "expected"),
    [
        ({"event_id": "string"}, ["event_id"], {}, {"id": "e1"}, {"event_id": "e1"}),
        ({"event_id": "string"}, ["event_id"], {}, {"event": {"id": "e1"}}, {"event_id": "e1"}),
        ({"event_id": "string"}, ["event_id"], {}, "e1", {"event_id": "e1"}),
        ({"event_id": "string"}, ["event_id"], {}, {"result": "e1"}, {"event_id": "e1"}),
        ({"event_id": "string"}, ["event_id"], {}, "created an event", None),
        ({"event_id": "integer"}, ["event_id"], {}, {"id": "e1"}, None),
        ({"name": "string"}, ["name"], {"name": "a"}, {"name": "b"}, {"name": "b"}),
        ({"name": "string", "why": "string"}, ["name"], {"name": "a", "size": 3}, None, {"name": "a"}),
        ({"force": "integer"}, ["force"], {"force": True}, None, None),
        ({}, [], {"name": "a"}, None, {}),
        (None, [], {"name": "a"}, None, {"name": "a"}),
    ],
)
def test_arguments_come_from_the_effect(
    arguments: Any, required: Any, called: Any, outcome: Any, expected: Any
) -> None:
    assert filled(tool(arguments, *required), called, outcome) == expected


def test_an_adviser_may_name_values_of_the_effect_but_invent_none() -> None:
    known = tool({"target": "string"}, "target")
    assert chosen(known, {"target": "e1"}, {"city": "Rome"}, {"made": ["e1"]}) == {"target": "e1"}
    assert chosen(known, {"target": "Rome"}, {"city": "Rome"}, None) == {"target": "Rome"}
    assert chosen(known, {"target": "everything"}, {"city": "Rome"}, None) is None
    assert chosen(known, {"target": "Rome", "force": "Rome"}, {"city": "Rome"}, None) is None
    assert chosen(known, {}, {"city": "Rome"}, None) is None


def test_what_others_see_is_compensated_and_not_reversed() -> None:
    assert class_of("charge_card") == "COMPENSATABLE"
    assert class_of("create_event") == "REVERSIBLE"
