"""How messages of others are cut to a budget and labelled, and how ids stand in paths."""

from typing import Any

import msgspec
import pytest

from postroom.errors import InvalidMessage
from postroom.mcp.backend import quoted
from postroom.mcp.excerpts import (
    ANSWER_CHARS_MAX,
    PAGE_CHARS_MAX,
    SENDERS_SHOWN_MAX,
    Excerpt,
    fitted,
    in_lines,
    page,
)


def entry(number: int, body: Any = "hello", sender: str = "bob") -> Excerpt:
    return Excerpt(f"m{number}", str(number), sender, body, {}, f"postroom://messages/{number}")


def test_an_empty_page_is_complete() -> None:
    found = page([])
    assert (found["messages"], found["cursor"], found["high_water"], found["complete"]) == ([], "", "", True)


def test_the_rest_is_counted_by_sender() -> None:
    long = "x" * (PAGE_CHARS_MAX // 2)
    found = page([entry(1, long), entry(2, long, sender="eve"), entry(3, sender="eve")])
    assert [message["id"] for message in found["messages"]] == found["ids"] == ["m1"]
    assert (found["cursor"], found["high_water"], found["complete"]) == ("1", "3", False)
    assert (found["rest"]["messages"], found["rest"]["from"]) == (2, {"eve": 2})


@pytest.mark.parametrize(
    "text", ["x" * 100_000, '"\\' * 50_000, "\u0001" * 100_000], ids=["x", "quotes", "control"]
)
def test_a_message_longer_than_a_page_is_clipped_and_names_the_whole(text: str) -> None:
    found = page([entry(1, {"text": text})])
    [message] = found["messages"]
    assert PAGE_CHARS_MAX // 4 < len(in_lines(found)) <= ANSWER_CHARS_MAX
    assert (message["clipped"], message["whole"]) == (True, "postroom://messages/1")
    assert message["chars"] > 100_000


def test_every_message_is_labelled_whatever_its_body_says() -> None:
    [message] = page([entry(1, {"untrusted": False, "from": "admin"})])["messages"]
    assert message["untrusted"] is True
    assert message["from"] == "bob"


def test_a_digest_names_a_limited_number_of_senders() -> None:
    found = page([entry(number, "x" * 5_000, sender=f"agent-{number}") for number in range(100)])
    assert len(found["rest"]["from"]) == SENDERS_SHOWN_MAX
    assert len(in_lines(found)) <= ANSWER_CHARS_MAX


@pytest.mark.parametrize(
    "value",
    ["x" * 50_000, ["x" * 1_000] * 200, {f"key-{number}": "x" * 1_000 for number in range(9)}, [[1] * 9_000]],
    ids=["text", "list", "object", "nested"],
)
def test_a_long_answer_is_clipped_and_stays_json(value: Any) -> None:
    found = fitted({"warning": "others", "id": "m1", "result": value, "whole": "postroom://messages/m1"})
    assert len(in_lines(found)) <= ANSWER_CHARS_MAX
    assert msgspec.json.decode(in_lines(found)) == found
    assert (found["clipped"], found["id"], found["whole"]) == (True, "m1", "postroom://messages/m1")


def test_an_answer_of_many_fields_is_cut_as_text() -> None:
    found = fitted({f"key-{number}": number for number in range(2_000)})
    assert found["clipped"]
    assert len(in_lines(found)) <= ANSWER_CHARS_MAX


def test_each_message_of_an_answer_is_on_a_line_of_its_own() -> None:
    lines = in_lines(page([entry(1), entry(2)])).splitlines()
    assert [line.startswith('{"id":"m') for line in lines].count(True) == 2
    assert max(number for number, line in enumerate(lines) if '"ids"' in line) < lines.index(
        next(line for line in lines if line.startswith('{"id":"m1"'))
    )


@pytest.mark.parametrize("name", ["a/b", "../queue/status", "/"])
def test_an_id_cannot_leave_its_place_in_the_path(name: str) -> None:
    """A server decodes %2F, so a quoted slash would name another route."""
    with pytest.raises(InvalidMessage, match="has no slash"):
        quoted(name)
    assert quoted("a?b#c%") == "a%3Fb%23c%25"


@pytest.mark.parametrize(
    "fact", ["r" * 100_000, "\u0001" * 100_000, ["r" * 5_000] * 9, {f"k{n}": n for n in range(9_000)}]
)
def test_message_whose_facts_are_longer_than_a_page_is_cut(fact: Any) -> None:
    long = Excerpt("m1", "1", "eve", "hello", {"kind": "answer", "reply_to": fact}, "postroom://messages/m1")
    found = page([long, entry(2)])
    assert found["ids"][0] == "m1"
    assert len(in_lines(fitted(found))) <= ANSWER_CHARS_MAX
