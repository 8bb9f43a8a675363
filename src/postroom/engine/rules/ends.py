"""The end of a message: its ordering key, its operation and its goal are updated."""

from postroom.engine.rules import ordering
from postroom.engine.rules.policy import Policy
from postroom.goals import progress, registry
from postroom.message import Record
from postroom.stores.transaction import Transaction


def ended(transaction: Transaction, policy: Policy, record: Record) -> None:
    """A message has ended without a result."""
    ordering.ended(transaction, record)
    registry.released(transaction, policy, record.message_id)
    progress.ended(transaction, policy, record)


def completed(transaction: Transaction, policy: Policy, message_id: str) -> None:
    """A message was completed outside an outcome of a worker."""
    record = transaction.record(message_id)
    if record is not None:
        ordering.ended(transaction, record)
    progress.completed(transaction, policy, message_id)
