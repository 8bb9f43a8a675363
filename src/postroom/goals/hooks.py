"""Hooks: functions that run after the completion of messages, through the queue and never inline.

Rule 1: the message that runs a hook commits with the completion, so a hook runs at least once.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from postroom.engine.rules.policy import Policy
from postroom.goals import internal
from postroom.stores.transaction import Transaction

if TYPE_CHECKING:
    from postroom.engine.rules.outcomes import Outcome

Hooks = Mapping[str, Mapping[str, Callable[..., Any]]]


def note_completed(
    transaction: Transaction,
    policy: Policy,
    outcomes: "Sequence[Outcome]",
    stale: Collection[str],
    hooks: Hooks,
) -> None:
    """Have the hooks of completed messages run after the commit."""
    for outcome in outcomes:
        if outcome.kind != "completed" or outcome.message_id in stale:
            continue
        for name in hooks.get(outcome.type, ()):
            internal.go_on(
                transaction, policy, outcome.org_id, "hook",
                type=outcome.type, name=name, message_id=outcome.message_id,
            )  # fmt: skip
