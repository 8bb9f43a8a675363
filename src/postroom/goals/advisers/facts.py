"""What a question says about a message: what a person would read before deciding.

Rule 1: what others wrote is quoted as text and cut, so that it stays data of bounded length.
"""

from typing import Any, Final

import msgspec

from postroom.engine.messages import body_of, error_history
from postroom.engine.rules import bodies
from postroom.goals.goal_cells import CONTEXTS, STATES
from postroom.message import Stored, org_of
from postroom.stores.transaction import Transaction

QUOTED_CHARS_MAX: Final = 2_000
ERROR_QUOTED_CHARS_MAX: Final = 300
HISTORY_NAMED_MAX: Final = 5


def quoted(value: Any, chars_max: int = QUOTED_CHARS_MAX) -> str:
    """A JSON value, or its encoded bytes, as text of bounded length."""
    data = value if isinstance(value, bytes) else msgspec.json.encode(value)
    text = data.decode(errors="replace")
    return text if len(text) <= chars_max else f"{text[:chars_max]}..."


def of_message(transaction: Transaction, stored: Stored) -> dict[str, Any]:
    """The payload of a message, the context of its goal, and how its attempts failed."""
    body = body_of(stored.envelope.payload)
    facts: dict[str, Any] = {"service": body.service} if body is not None and body.service else {}
    if body is not None:
        facts["goal_id"] = body.goal_id
        facts["payload"] = quoted(bodies.payload_of(transaction, body))
        if context := context_of_goal(transaction, body.goal_id, org_of(stored.record.queue)):
            facts["context"] = context
    facts["attempts"] = stored.record.attempt
    facts["retries_left"] = max(0, stored.record.max_retries - stored.record.retries)
    facts["history"] = [
        {**one, "error": one["error"][:ERROR_QUOTED_CHARS_MAX]}
        for one in error_history(stored)[-HISTORY_NAMED_MAX:]
    ]
    return facts


def context_of_goal(transaction: Transaction, goal_id: str, org_id: str) -> str:
    """The context of a goal of an organization, quoted; empty for a goal that was not started."""
    goal = STATES.get(transaction, goal_id)
    if goal is None or goal.org_id != org_id:
        return ""
    context = CONTEXTS.get(transaction, goal_id, goal.context_version)
    return "" if context is None else quoted(context.value)
