"""Conflicts between operations."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.core.goals.conflicts import Conflict, Constraints, Operation, checked, found


def op(target: Any = "t", **fields: Any) -> Any:
    return checked({"target": target, **fields})


@pytest.mark.parametrize(
    ("new", "active", "expected"),
    [
        (op(), op(), Conflict("target", "m1", "t")),
        (op(mode="shared"), op(mode="shared"), None),
        (op(mode="shared"), op(), Conflict("target", "m1", "t")),
        (op("a", resources=["gpu"]), op("b", resources=["gpu"]), Conflict("resource", "m1", "gpu")),
        (op("a", resources=["gpu"]), op("b", resources=["cpu"]), None),
        (op("a", resources={"seats": 2}), op("b", resources={"seats": 1}), None),
        (
            op("a", resources={"seats": 2}),
            op("b", resources={"seats": 2}),
            Conflict("capacity", "m1", "seats"),
        ),
        (op("a", constraints={"not_with": ["b"]}), op("b"), Conflict("constraint", "m1", "b")),
        (op("b"), op("a", constraints={"not_with": ["b"]}), Conflict("constraint", "m1", "a")),
        (
            op("a", mode="shared", constraints={"at_most": 1}),
            op("a", mode="shared"),
            Conflict("constraint", "m1", "a"),
        ),
    ],
)
def test_conflict_of_two_operations(new: Any, active: Any, expected: Any) -> None:
    assert found(new, [("m1", active)], {"seats": 3}) == expected


def test_capacity_counts_all_active_operations() -> None:
    active = [("m1", op("a", resources={"seats": 1})), ("m2", op("b", resources={"seats": 1}))]
    assert found(op("c", resources={"seats": 1}), active, {"seats": 3}) is None
    assert found(op("c", resources={"seats": 2}), active, {"seats": 3}) == Conflict("capacity", "m2", "seats")


@pytest.mark.parametrize(
    "value",
    [
        "t", None, {}, {"target": ""}, {"target": 1}, {"target": "t", "mode": "write"},
        {"target": "t", "resources": {"gpu": -1}}, {"target": "t", "resources": [f"r{n}" for n in range(40)]},
        {"target": "t", "constraints": {"at_most": 0}}, {"target": "t", "extra": 1}, {"target": "a\x1fb"},
    ],
)  # fmt: skip
def test_operation_that_does_not_fit_is_refused_with_a_one_line_error(value: Any) -> None:
    with pytest.raises(ValueError, match=r"operation|resource|at_most"):
        checked(value)


operations = st.builds(
    Operation,
    target=st.sampled_from("ab"),
    resources=st.dictionaries(st.sampled_from(["r", "s"]), st.sampled_from([0.0, 1.0, 2.0])),
    mode=st.sampled_from(["exclusive", "shared"]),
    constraints=st.builds(Constraints, at_most=st.sampled_from([None, 1, 2])),
)


@given(operations, operations)
def test_a_conflict_of_two_operations_has_no_direction(one: Any, other: Any) -> None:
    capacities = {"s": 2.0}
    assert (found(one, [("m", other)], capacities) is None) == (
        found(other, [("m", one)], capacities) is None
    )
