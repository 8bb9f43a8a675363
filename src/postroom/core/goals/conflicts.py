"""Conflicts between operations, found mechanically.

Rule 1: operations conflict when they have the same target, need the same exclusive resource, exceed the
        capacity of a resource together, or violate a constraint of one of them.
Rule 2: two operations that only read (mode `shared`) have no conflict about a target or a resource.
Rule 3: nothing here decides what happens then; `core.goals.advice` does.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, TypeAlias, TypeGuard

import msgspec

from postroom.errors import clipped

Mode: TypeAlias = Literal["exclusive", "shared"]
ConflictKind: TypeAlias = Literal["target", "resource", "capacity", "constraint"]
OnConflict: TypeAlias = Literal["wait", "merge", "cancel"]

RESOURCES_MAX: Final = 32
NAME_CHARS_MAX: Final = 256
TARGET_RULE: Final = f"printable text of 1 to {NAME_CHARS_MAX} characters"
MEMORY_MODES: Final[Mapping[str, Mode]] = {
    "memory_save": "exclusive",
    "memory_update": "exclusive",
    "memory_retrieve": "shared",
}
"""How the messages that name a node of the graph work on it."""


class Constraints(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What an operation demands of concurrent ones."""

    not_with: tuple[str, ...] = ()
    """Targets that no other operation may work on at the same time."""
    at_most: int | None = None
    """How many operations may share the target, this one included."""


class Operation(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a message works on while its handler runs."""

    target: str
    resources: dict[str, float] = {}
    """Name -> amount. An amount of 0 needs the whole resource when the mode is exclusive."""
    mode: Mode = "exclusive"
    constraints: Constraints = Constraints()
    on_conflict: OnConflict = "wait"


class Conflict(msgspec.Struct, frozen=True):
    """Why an operation cannot run at the same time as another one."""

    kind: ConflictKind
    other: str
    """The message whose operation is in the way."""
    what: str
    """The target or the resource."""


def checked(value: Any) -> Operation:
    """The operation of a caller. Raises `ValueError`."""
    fields = dict(value) if isinstance(value, Mapping) else value
    if isinstance(fields, dict) and isinstance(fields.get("resources"), list | tuple | set):
        fields["resources"] = dict.fromkeys(fields["resources"], 0.0)
    try:
        operation = msgspec.convert(fields, Operation)
    except (msgspec.ValidationError, TypeError) as error:
        raise ValueError(f"operation does not fit: {clipped(str(error))}") from None
    names = (operation.target, *operation.resources, *operation.constraints.not_with)
    if not all(map(is_target, names)):
        raise ValueError(f"names in operation must be {TARGET_RULE}")
    if max(len(operation.resources), len(operation.constraints.not_with)) > RESOURCES_MAX:
        raise ValueError(f"an operation names at most {RESOURCES_MAX} resources and targets")
    if any(not amount >= 0 for amount in operation.resources.values()):
        raise ValueError("the amount of a resource must not be negative")
    if operation.constraints.at_most is not None and operation.constraints.at_most < 1:
        raise ValueError("at_most must be a whole number of 1 or more")
    return operation


def is_target(name: object) -> TypeGuard[str]:
    """Whether a value can be the target of an operation."""
    return isinstance(name, str) and 0 < len(name) <= NAME_CHARS_MAX and name.isprintable()


def of_memory(type_name: str, payload: Any) -> Operation | None:
    """The operation of a message on the node that it names; None for other messages."""
    mode = MEMORY_MODES.get(type_name)
    if mode is None:
        return None
    node_id = payload.get("node_id") if isinstance(payload, dict) else getattr(payload, "node_id", None)
    return Operation(node_id, mode=mode) if is_target(node_id) else None


def found(
    new: Operation, active: Iterable[tuple[str, Operation]], capacities: Mapping[str, float]
) -> Conflict | None:
    """The first conflict of an operation with active ones, by message id."""
    used: dict[str, float] = {}
    sharing = 0
    for other_id, other in active:
        conflict = _between(new, other, other_id, capacities)
        if conflict is not None:
            return conflict
        for name in new.resources.keys() & other.resources.keys():
            used[name] = used.get(name, 0.0) + other.resources[name]
            if name in capacities and used[name] + new.resources[name] > capacities[name]:
                return Conflict("capacity", other_id, name)
        if other.target == new.target:
            sharing += 1
            limits = [one.constraints.at_most for one in (new, other) if one.constraints.at_most is not None]
            if limits and sharing + 1 > min(limits):
                return Conflict("constraint", other_id, new.target)
    return None


def _between(
    new: Operation, other: Operation, other_id: str, capacities: Mapping[str, float]
) -> Conflict | None:
    both_read = new.mode == other.mode == "shared"
    if new.target == other.target and not both_read:
        return Conflict("target", other_id, new.target)
    if other.target in new.constraints.not_with or new.target in other.constraints.not_with:
        return Conflict("constraint", other_id, other.target)
    for name in sorted(new.resources.keys() & other.resources.keys()):
        if name not in capacities and not both_read:
            return Conflict("resource", other_id, name)
    return None
