"""Arguments of the wrong kind: `Bus` and `Queue` refuse each with an error that names it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from postroom import Bus, Queue
from postroom.errors import Rejected

PATHS: list[Any] = [1, 1.5, True, ["a"], {}, (), object(), b"bytes", "", "a\0b", "\ud800"]
NUMBERS: list[Any] = ["x", None, True, [], -1, float("nan"), b"1"]
CLOCKS: list[Any] = [1, "x", [], object(), lambda: 5, lambda: None]


def refusals(make: Callable[[Any], object], values: list[Any]) -> list[str]:
    found = []
    for value in values:
        with pytest.raises(Rejected) as caught:
            make(value)
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("path", [*PATHS, None]),
        ("root", PATHS),
        ("lock_timeout_s", [*NUMBERS, 0]),
        ("poll_interval_s", [*NUMBERS, 0]),
        ("rotate_bytes", [value for value in NUMBERS if value is not None]),
        ("durability", [1, None, [], "sometimes"]),
        ("clock", CLOCKS),
    ],
)
def test_a_bus_refuses_arguments_of_the_wrong_kind(tmp_path: Path, argument: str, values: list[Any]) -> None:
    def make(value: Any) -> None:
        Bus(**{"path": tmp_path / "bus.yaml", argument: value}).append(type="t", project_id="p")

    for sentence in refusals(make, values):
        assert argument in sentence
        assert "\n" not in sentence


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("root", PATHS),
        ("body_threshold", [value for value in NUMBERS if value is not None]),
        ("lock_timeout_s", [*NUMBERS, 0]),
        ("durability", [1, None, [], "sometimes"]),
        ("disabled", [1, "no", None, []]),
        ("clock", CLOCKS),
    ],
)
def test_a_queue_refuses_arguments_of_the_wrong_kind(
    tmp_path: Path, argument: str, values: list[Any]
) -> None:
    def make(value: Any) -> None:
        Queue(**{"root": tmp_path, argument: value}).send("ask", "x")

    for sentence in refusals(make, values):
        assert argument in sentence
        assert "\n" not in sentence


@pytest.mark.parametrize("topics", [1, 1.5, True, object()])
def test_invalid_topics_are_refused_with_a_one_line_error(tmp_path: Path, topics: Any) -> None:
    sentence = f"topics must be a topic or a list of topics, not {type(topics).__name__}"
    assert refusals(lambda value: Queue(tmp_path).poll("ada", value), [topics]) == [sentence]


def test_messages_and_attachments_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml")
    assert refusals(bus.append_many, [1, None]) == [
        "messages must be a list, not int",
        "messages must be a list, not NoneType",
    ]
    refusals(lambda value: bus.append(type="t", project_id="p", attachment=value), PATHS)
    assert not bus.path.exists()
