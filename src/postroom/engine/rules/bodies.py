"""Payloads and contexts that are stored apart from their messages: once, however many messages carry them.

Rule 1: the message has the digest of what is stored apart. It is kept as long as a message refers to it.
"""

from typing import Any, NamedTuple

import msgspec

from postroom.engine.message_input import Prepared
from postroom.engine.messages import Body
from postroom.engine.rules.cells import BODIES, BODY_USES, Effect
from postroom.stores.transaction import Transaction


class Apart(NamedTuple):
    """Long values that are stored apart from a message, as JSON; None for those in the message."""

    payload: bytes | None = None
    context: bytes | None = None


INLINE = Apart()


def store(transaction: Transaction, message: Prepared, message_id: str, inline_bytes_max: int) -> None:
    """Store what a new message refers to."""
    if len(message.payload) > inline_bytes_max:
        keep(transaction, message.digest, message.payload, message_id)
    if message.context:
        keep(transaction, message.body.context_ref, message.context, message_id)


def keep(transaction: Transaction, digest: str, data: bytes, message_id: str) -> None:
    """Store what a message refers to by this digest."""
    transaction.exclusive(BODIES + digest)
    if transaction.cells.get(BODIES, digest) is None:
        transaction.cells.put(BODIES, digest, data)
    BODY_USES.put(transaction, True, digest, message_id)  # noqa: FBT003


def release(transaction: Transaction, body: Body, message_id: str) -> None:
    """A message is forgotten: forget what no other message refers to."""
    for digest in (body.payload_ref, body.context_ref):
        drop(transaction, digest, message_id)


def drop(transaction: Transaction, digest: str, message_id: str) -> None:
    """A message no longer refers to this digest, if to any."""
    if digest:
        transaction.exclusive(BODIES + digest)
        BODY_USES.put(transaction, None, digest, message_id)
        if not BODY_USES.under(transaction, digest, limit=1):
            transaction.cells.put(BODIES, digest, None)


def outcome_of(transaction: Transaction, effect: Effect) -> Any:
    """The outcome of an effect."""
    if not effect.outcome_ref:
        return effect.outcome
    return msgspec.json.decode(transaction.cells.get(BODIES, effect.outcome_ref) or b"null")


def apart(transaction: Transaction, body: Body | None) -> Apart:
    """The payload and context that are too large for the record of their message."""
    if body is None or not (body.payload_ref or body.context_ref):
        return INLINE
    return Apart(
        payload_of(transaction, body) if body.payload_ref else None,
        context_of(transaction, body),
    )


def payload_of(transaction: Transaction, body: Body) -> bytes:
    """The payload of a message."""
    if not body.payload_ref:
        return bytes(body.payload)
    return transaction.cells.get(BODIES, body.payload_ref) or b"{}"


def context_of(transaction: Transaction, body: Body) -> bytes | None:
    """The context of a message if it is stored apart."""
    return transaction.cells.get(BODIES, body.context_ref) or b"{}" if body.context_ref else None
