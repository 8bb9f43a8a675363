"""Events of a store as events of the audit stream."""

from decimal import Decimal
from typing import Any

import pytest

from postroom.core.formats.events import from_line, of_store, to_line
from postroom.message import Event


@pytest.mark.parametrize(
    ("reported", "cost"),
    [
        (0.1 + 0.2, Decimal("0.3")),
        (5, Decimal(5)),
        (0.000_000_001, Decimal("0.000000001")),
        (float("nan"), None),
        (float("inf"), None),
        (1e30, None),
        (None, None),
    ],
)
def test_cost_of_an_engine_event_has_nine_decimal_places(reported: Any, cost: Decimal | None) -> None:
    event = Event(1, 1, "execution_completed", "org:acme", "m", "COMPLETED", detail={"cost_usd": reported})
    line = to_line(of_store(event, "tasks:s", "tasks"))
    assert from_line(line).cost_usd == cost
