"""The end of a message without a result: its ordering key and everything above the engine is updated."""

from postroom.engine.rules import ordering
from postroom.engine.rules.extensions import on_end
from postroom.engine.rules.policy import Policy
from postroom.message import Record
from postroom.stores.transaction import Transaction


def ended(transaction: Transaction, policy: Policy, record: Record) -> None:
    """A message has ended without a result."""
    ordering.ended(transaction, record)
    for note_end in on_end:
        note_end(transaction, policy, record)
