"""What goals and the registry of operations add to the transactions of every engine.

Rule 1: an operation is released before its goal goes on, because that may complete other messages.
"""

from collections.abc import Mapping
from typing import Any, Final

from postroom.engine.rules import extensions
from postroom.engine.rules.cells import Kind
from postroom.goals import decisions, operation_registry, progress
from postroom.goals.goal_cells import CONTEXTS, DECISIONS, MESSAGES, OPEN, PATTERNS, STATES, USED
from postroom.stores.transaction import Transaction

KEPT_S: Final = 30 * 86_400.0
PURGED_MAX: Final = 500
MICROS_PER_S: Final = 1_000_000


def purge(transaction: Transaction, after: Mapping[str, str]) -> dict[str, str]:
    """Forget goals and decisions that ended long ago, some at a time. Returns the keys to continue from."""
    before_us = transaction.wall_us - round(KEPT_S * MICROS_PER_S)
    kinds: tuple[Kind[Any], ...] = (CONTEXTS, MESSAGES, OPEN, USED)
    goals, next_goal = STATES.sweep(transaction, after.get(STATES.name, ""), PURGED_MAX)
    for goal_id, goal in goals:
        if 0 < goal.ended_us < before_us:
            for kind in kinds:
                kind.drop_under(transaction, goal_id)
            STATES.put(transaction, None, goal_id)
    taken, next_decision = DECISIONS.sweep(transaction, after.get(DECISIONS.name, ""), PURGED_MAX)
    for key, decision in taken:
        if 0 < decision.decided_us < before_us:
            transaction.cells.put(DECISIONS.name, key, None)
    patterns, next_pattern = PATTERNS.sweep(transaction, after.get(PATTERNS.name, ""), PURGED_MAX)
    for key, pattern in patterns:
        if pattern.last_us < before_us:
            transaction.cells.put(PATTERNS.name, key, None)
    return {STATES.name: next_goal, DECISIONS.name: next_decision, PATTERNS.name: next_pattern}


extensions.on_submit.append(progress.check)
extensions.on_accept.append(progress.accepted)
extensions.on_claim.append(operation_registry.OperationRegistry)
extensions.on_target.append(operation_registry.effect_begins)
extensions.on_target_left.append(operation_registry.effect_ended)
extensions.on_effect.append(progress.effect_begun)
extensions.on_effect_dropped.append(progress.effect_dropped)
extensions.on_release.append(operation_registry.released)
extensions.on_complete.extend([operation_registry.completed, progress.completed])
extensions.on_end.extend([operation_registry.released, progress.ended])
extensions.on_replay.append(progress.reopened)
extensions.on_forget.append(progress.forgotten)
extensions.on_purge.append(purge)
decisions.on_ruling.append(operation_registry.ruled)
