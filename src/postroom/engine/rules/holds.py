"""Rules that hold messages at the door, because messages like them failed for good.

Rule 1: a rule is a pause of a type with a likeness. A claim reads it with the pauses, so an engine without
        such rules pays nothing.
Rule 2: a held message is parked. It waits until its rule is removed, it expires, or it is cancelled.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from postroom.engine.messages import Body
from postroom.engine.rules import bodies, ordering
from postroom.engine.rules.cells import HELD, PAUSES, SEPARATOR, Likeness, PauseInfo
from postroom.message import Record
from postroom.stores.transaction import Transaction

ALIKE_ENTRIES_MAX: Final = 8
ALIKE_CHARS_MAX: Final = 200
HELD_LISTED_MAX: Final = 1_000
RELEASED_A_COMMIT_MAX: Final = 500


class HoldRule(msgspec.Struct, frozen=True):
    """A rule that is in force."""

    org_id: str
    type: str
    likeness: Likeness
    since_us: int


# ---- what messages have in common ------------------------------------------------------------------


def common(payloads: Sequence[Any]) -> dict[str, Any]:
    """The short entries that all of these payloads share, with names such as `tool` and `arguments.city`."""
    first, *others = [_entries(payload) for payload in payloads] or [{}]
    shared = [
        (name, value)
        for name, value in first.items()
        if isinstance(value, str | int | float | bool)
        and len(name) + len(str(value)) <= ALIKE_CHARS_MAX
        and all(name in other and other[name] == value for other in others)
    ]
    return dict(shared[:ALIKE_ENTRIES_MAX])


def _entries(payload: Any) -> dict[str, Any]:
    """The entries of a payload and of the objects in it."""
    found: dict[str, Any] = {}
    for name, value in payload.items() if isinstance(payload, dict) else ():
        inner = value.items() if isinstance(value, dict) else ()
        found |= {f"{name}.{key}": each for key, each in inner} if inner else {name: value}
    return found


def is_alike(transaction: Transaction, likeness: Likeness, body: Body) -> bool:
    """Whether a message has what the messages of a rule have in common."""
    if likeness.service not in ("", body.service):
        return False
    if not likeness.payload:
        return True
    entries = _entries(msgspec.json.decode(bodies.payload_of(transaction, body)))
    return all(name in entries and entries[name] == value for name, value in likeness.payload.items())


# ---- in a transaction ------------------------------------------------------------------------------


def begin(transaction: Transaction, org_id: str, type_name: str, likeness: Likeness) -> None:
    """Put a rule in force."""
    PAUSES.put(
        transaction, PauseInfo(transaction.wall_us, likeness=likeness), org_id, type_name, likeness.rule_id
    )


def rule_of(key: str, pause: PauseInfo) -> HoldRule | None:
    """The rule that is stored as this pause; None for an ordinary pause."""
    if pause.likeness is None:
        return None
    org_id, type_name, _ = key.split(SEPARATOR)
    return HoldRule(org_id, type_name, pause.likeness, pause.since_us)


def in_force(transaction: Transaction) -> list[HoldRule]:
    """The rules that are in force."""
    return [rule for one in PAUSES.all(transaction) if (rule := rule_of(*one)) is not None]


def paused(transaction: Transaction) -> list[tuple[str, str]]:
    """The scopes of pauses, as organization and type. Rules that hold some messages of a type are none."""
    keys = [key.split(SEPARATOR) for key, pause in PAUSES.all(transaction) if pause.likeness is None]
    return [(org_id, type_name) for org_id, type_name in keys]


def hold(transaction: Transaction, record: Record, rule: HoldRule) -> bool:
    """Park a message that a rule holds; False when the rule was removed meanwhile."""
    transaction.exclusive(PAUSES.name)  # a claim that parks messages has committed before a rule is removed
    rule_id = rule.likeness.rule_id
    if PAUSES.get(transaction, rule.org_id, rule.type, rule_id) is None:
        return False
    HELD.put(transaction, record.message_id, rule_id, record.seq)
    ordering.park(transaction, record.message_id, f"rule {rule_id} holds messages like it")
    return True


def held(transaction: Transaction, rule_id: str) -> list[str]:
    """The messages that a rule holds, the oldest first."""
    ids = [message_id for _, message_id in HELD.under(transaction, rule_id, limit=HELD_LISTED_MAX)]
    records = transaction.records.get_many(ids)
    now_ns = transaction.steady_ns
    return [one for one in ids if one in records and ordering.is_parked(records[one], now_ns)]


def end(transaction: Transaction, rule: HoldRule) -> None:
    """Remove a rule. What it held waits for `release`."""
    transaction.exclusive(PAUSES.name)
    PAUSES.put(transaction, None, rule.org_id, rule.type, rule.likeness.rule_id)


def release(transaction: Transaction, rule_id: str) -> bool:
    """Queue some messages that a removed rule held; False when none is left."""
    found = HELD.under(transaction, rule_id, limit=RELEASED_A_COMMIT_MAX)
    for key, message_id in found:
        transaction.cells.put(HELD.name, key, None)
        ordering.wake(transaction, message_id)
    return bool(found)
