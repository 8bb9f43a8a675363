"""Hooks: functions that run after the completion of messages, through the queue and never inline.

Rule 1: the message that runs a hook commits with the completion, so a hook runs at least once.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from postroom.core.names import is_name
from postroom.engine.rules.outcomes import Outcome
from postroom.engine.rules.policy import Policy
from postroom.errors import InvalidSetting, ValidationError, shown
from postroom.goals import internal
from postroom.stores.transaction import Transaction


class Hooks:
    """The hooks of one engine."""

    def __init__(self) -> None:
        self.functions: dict[str, dict[str, Callable[..., Any]]] = {}
        """Message type -> name -> function."""

    def check(self, type_name: str) -> None:
        """Raise unless this is a message type."""
        if not isinstance(type_name, str) or not is_name(type_name):
            raise InvalidSetting(f"a message type is a name, not {shown(type_name)}")

    def add(self, type_name: str, run: Callable[..., Any]) -> None:
        """Run a function after each completed message of a type."""
        name = getattr(run, "__name__", "")
        if not callable(run) or not name:
            raise InvalidSetting(f"a hook is a function with a name, not {shown(run)}")
        self.functions.setdefault(type_name, {})[name] = run

    def named(self, type_name: str, name: str) -> Callable[..., Any]:
        """The function of a hook. Raises `ValidationError`."""
        run = self.functions.get(type_name, {}).get(name)
        if run is None:
            raise ValidationError(f"there is no hook {name!r} for {type_name} in this process")
        return run

    def note_completed(
        self, transaction: Transaction, policy: Policy, outcomes: Sequence[Outcome], stale: Collection[str]
    ) -> None:
        """Have the hooks of completed messages run after the commit."""
        for outcome in outcomes if self.functions else ():
            if outcome.kind != "completed" or outcome.message_id in stale:
                continue
            for name in self.functions.get(outcome.type, ()):
                internal.go_on(
                    transaction, policy, outcome.org_id, "hook",
                    type=outcome.type, name=name, message_id=outcome.message_id,
                )  # fmt: skip
