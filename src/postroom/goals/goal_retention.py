"""How long goals and decisions are kept after their end."""

from collections.abc import Mapping
from typing import Any, Final

from postroom.engine.rules.cells import Kind
from postroom.goals.goal_cells import CONTEXTS, DECISIONS, MESSAGES, OPEN, STATES, USED
from postroom.stores.transaction import Transaction

KEPT_S: Final = 30 * 86_400.0
PURGED_MAX: Final = 500
MICROS_PER_S: Final = 1_000_000


def purge(transaction: Transaction, after: Mapping[str, str]) -> dict[str, str]:
    """Forget goals and decisions that ended long ago, some at a time. Returns the keys to continue from."""
    before_us = transaction.wall_us - round(KEPT_S * MICROS_PER_S)
    goals = STATES.scan(transaction, after.get(STATES.name, ""), PURGED_MAX)
    for goal_id, goal in goals:
        if 0 < goal.ended_us < before_us:
            _forget_goal(transaction, goal_id)
    decisions = DECISIONS.scan(transaction, after.get(DECISIONS.name, ""), PURGED_MAX)
    for key, decision in decisions:
        if 0 < decision.decided_us < before_us:
            transaction.cells.put(DECISIONS.name, key, None)
    seen: dict[str, list[tuple[str, Any]]] = {STATES.name: [*goals], DECISIONS.name: [*decisions]}
    return {name: found[-1][0] if len(found) == PURGED_MAX else "" for name, found in seen.items()}


def _forget_goal(transaction: Transaction, goal_id: str) -> None:
    kinds: tuple[Kind[Any], ...] = (CONTEXTS, MESSAGES, OPEN, USED)
    for kind in kinds:
        kind.drop_under(transaction, goal_id)
    STATES.put(transaction, None, goal_id)
