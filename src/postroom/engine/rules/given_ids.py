"""The ids that senders give to messages and their parents, and the ids in the store that they stand for.

Rule 1: a given id stays as it is, unless somebody else has it, or it was given within the organization.
        Then the store has the message under the id within the organization.
Rule 2: an id that the store made or may make is refused, also when somebody else has it.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from postroom.core.names import scoped, unscoped
from postroom.engine.message_input import Prepared
from postroom.stores.transaction import Transaction, reserved_id


def with_stored_ids(
    transaction: Transaction, messages: Sequence[Prepared]
) -> tuple[list[Prepared], set[str]]:
    """Messages with the ids that the store has, or will have, and the ids of these that it has already."""
    if not any(map(_names_ids, messages)):
        return [*messages], set()
    asked = _asked(transaction, messages)
    queues = {message_id: record.queue for message_id, record in transaction.records.get_many(asked).items()}
    known = set(queues)
    own_ids = [_own_id(transaction, message, queues) for message in messages]
    found = []
    for message, message_id in zip(messages, own_ids, strict=True):
        ids = message_id, _parent_id(message, queues)
        if ids != (message.envelope.message_id, message.envelope.parent_message_id):
            envelope = replace(message.envelope, message_id=ids[0], parent_message_id=ids[1])
            message = replace(message, envelope=envelope)  # noqa: PLW2901
        found.append(message)
    return found, known


def _names_ids(message: Prepared) -> bool:
    return bool(message.envelope.message_id or message.envelope.parent_message_id)


def _asked(transaction: Transaction, messages: Sequence[Prepared]) -> list[str]:
    """The ids that the given ones may stand for. Those of parents that the store made stay as they are."""
    asked: dict[str, None] = {}
    for message in messages:
        envelope = message.envelope
        if envelope.message_id:
            asked |= dict.fromkeys(_forms(message.org_id, envelope.message_id))
        parent = envelope.parent_message_id
        if parent and parent.isascii() and not transaction.is_reserved(parent):
            asked |= dict.fromkeys(_forms(message.org_id, parent))
    return [*asked]


def _forms(org_id: str, given: str) -> tuple[str, str]:
    plain = unscoped(org_id, given)
    return plain, scoped(org_id, plain)


def _own_id(transaction: Transaction, message: Prepared, queues: dict[str, str]) -> str:
    """The id of a message. It is noted in `queues`, because another message of the batch may name it."""
    given, queue = message.envelope.message_id, message.envelope.queue
    if not given:
        return ""
    plain, within = _forms(message.org_id, given)
    if queues.get(plain) == queue:
        return plain
    if transaction.is_reserved(plain):
        raise reserved_id(plain)
    message_id = plain if given == plain and plain not in queues and within not in queues else within
    queues[message_id] = queue
    return message_id


def _parent_id(message: Prepared, queues: dict[str, str]) -> str:
    parent, queue = message.envelope.parent_message_id, message.envelope.queue
    if parent:
        for each in _forms(message.org_id, parent):
            if queues.get(each) == queue:
                return each
    return parent
