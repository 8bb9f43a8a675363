"""Three-way merges of the nodes of a knowledge graph.

Rule 1: a side that did not change a property since the base takes the other side's value.
Rule 2: both sides changed it: equal values agree, different ones are a conflict that the caller decides.
Rule 3: edges are sets. What one side added or removed is added or removed; that never conflicts.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import msgspec

Properties: TypeAlias = Mapping[str, Any]
Edge: TypeAlias = tuple[str, str]
Side: TypeAlias = Literal["branch", "main", "base"]
ABSENT: Final = None
"""A property that a node does not have. JSON null means the same."""


class PropertyConflict(msgspec.Struct, frozen=True):
    """A property that both sides changed, each in its own way."""

    name: str
    base: Any
    branch: Any
    main: Any

    def taken(self, side: str) -> Any:
        """The value of one side."""
        return {"branch": self.branch, "main": self.main, "base": self.base}[side]


def merged(
    base: Properties, branch: Properties, main: Properties, choices: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], list[PropertyConflict]]:
    """The merged properties, and the conflicts that `choices` (property -> side) does not decide."""
    result: dict[str, Any] = {}
    conflicts: list[PropertyConflict] = []
    for name in dict.fromkeys((*main, *branch)):
        was, ours, theirs = base.get(name), branch.get(name), main.get(name)
        if ours in (theirs, was):
            value = theirs
        elif theirs == was:
            value = ours
        else:
            conflict = PropertyConflict(name, was, ours, theirs)
            side = (choices or {}).get(name)
            if side is None:
                conflicts.append(conflict)
            value = theirs if side is None else conflict.taken(side)
        if value is not ABSENT:
            result[name] = value
    return result, conflicts


def merged_edges(base: set[Edge], branch: set[Edge], main: set[Edge]) -> set[Edge]:
    """Edges of main, with those that the branch added and without those that it removed."""
    return (main | (branch - base)) - (base - branch)


def changed(properties: Properties, changes: Properties) -> dict[str, Any]:
    """Properties after changes. None removes a property."""
    both = {**properties, **changes}
    return {name: value for name, value in both.items() if value is not ABSENT}
