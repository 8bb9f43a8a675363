"""Filters that Spark pushes down to a source, as conditions on one value.

Rule 1: a condition means exactly what the filter means in SQL, NULL included: unknown counts as false.
Rule 2: a filter that is not supported here is left to Spark.
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from postroom.pipeline.schema import EVENTS

_OPERATORS: Final[dict[type[Filter], Callable[[Any, Any], bool]]] = {
    EqualTo: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
    In: lambda value, choice: value in choice,
    StringStartsWith: str.startswith,
    StringEndsWith: str.endswith,
    StringContains: operator.contains,
}


class Condition(NamedTuple):
    """A filter on one column."""

    filter: Filter
    column: str

    def holds(self, value: Any) -> bool:
        return _evaluate(self.filter, value) is True


def condition_of(found: Filter) -> Condition | None:
    """A filter as a condition; None when Spark has to evaluate it."""
    plain: Any = found.child if isinstance(found, Not) else found
    is_known = type(plain) in {*_OPERATORS, EqualNullSafe, IsNull, IsNotNull}
    if not is_known or len(plain.attribute) != 1 or plain.attribute[0] not in EVENTS.names:
        return None
    return Condition(found, plain.attribute[0])


def _evaluate(found: Any, value: Any) -> bool | None:
    """The result in SQL; None is NULL."""
    if isinstance(found, Not):
        answer = _evaluate(found.child, value)
        return None if answer is None else not answer
    if isinstance(found, IsNull | IsNotNull):
        return (value is None) == isinstance(found, IsNull)
    if isinstance(found, EqualNullSafe):
        return bool(value == found.value)
    if value is None or found.value is None:
        return None
    holds = _OPERATORS[type(found)](value, found.value)
    return None if not holds and isinstance(found, In) and None in found.value else holds


def bounds_of(conditions: Iterable[Condition], column: str, widest: tuple[int, int]) -> tuple[int, int]:
    """The lowest and the highest whole number that can meet all conditions."""
    first, last = widest
    for found in (condition.filter for condition in conditions if condition.column == column):
        low, high = _bounds(found)
        first, last = (
            max(first, low if low is not None else first),
            min(last, high if high is not None else last),
        )
    return first, last


def _bounds(found: Any) -> tuple[int | None, int | None]:
    if isinstance(found, EqualTo | EqualNullSafe):
        return found.value, found.value
    if isinstance(found, GreaterThan):
        return found.value + 1, None
    if isinstance(found, GreaterThanOrEqual):
        return found.value, None
    if isinstance(found, LessThan):
        return None, found.value - 1
    if isinstance(found, LessThanOrEqual):
        return None, found.value
    return None, None


def sources_of(conditions: Iterable[Condition]) -> frozenset[str] | None:
    """The sources that can meet the conditions; None when any can."""
    wanted: frozenset[str] | None = None
    for found in (condition.filter for condition in conditions if condition.column == "source"):
        if isinstance(found, EqualTo):
            named = frozenset([found.value])
        elif isinstance(found, In):
            named = frozenset(found.value)
        else:
            continue
        wanted = named if wanted is None else wanted & named
    return wanted
