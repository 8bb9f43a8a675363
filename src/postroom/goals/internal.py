"""Messages that an engine sends to itself inside a transaction: work that has to follow the commit.

Rule 1: such a message commits with its cause, so the work is neither lost nor done for a cause that was
        rolled back. Backpressure does not refuse it, because its cause was accepted.
Rule 2: it uses no idempotency key and no ordering key that a sender can guess. A sender that used the key
        first would keep the message from being sent or delivered.
"""

from typing import Any, Final

from msgspec.structs import replace

from postroom.engine.message_input import Registry
from postroom.engine.rules.operations import insert_messages
from postroom.engine.rules.policy import Policy
from postroom.stores.transaction import Transaction

WORK: Final = "goal_work"
"""The type of messages that continue the work of goals. Callers cannot submit it."""


def insert(
    transaction: Transaction, policy: Policy, fields: dict[str, Any], *, ignores_guard: bool = False
) -> str:
    """Store one message. Returns its id."""
    message = Registry((fields["type"],)).prepare(fields, policy, transaction.wall_us)
    if ignores_guard:
        message = replace(message, body=replace(message.body, ignores_guard=True))
    [accepted] = insert_messages(transaction, policy, [message])
    return accepted.message_id


def go_on(
    transaction: Transaction, policy: Policy, org_id: str, do: str, *, delay_s: float = 0.0, **facts: Any
) -> str:
    """Have a worker do something after the commit."""
    fields = {
        "type": WORK,
        "org_id": org_id,
        "payload": {"do": do, **facts},
        "delay_s": delay_s,
        "priority": 1,
    }
    return insert(transaction, policy, fields)
