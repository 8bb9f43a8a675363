"""Stored messages of an earlier major version, as the handlers of the current one get them.

Rule 1: the store keeps a message as it was accepted. Each attempt migrates it again.
Rule 2: a migration changes what a handler reads. Ids, organization, priority, expiry, tokens and ordering key
        of the stored message stay.
"""

from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec.structs import replace

from postroom.core.formats.jsoninput import decoded_value
from postroom.core.lifecycle import versions
from postroom.engine.messages import Body, Message, body_of, fields_of, message_of
from postroom.engine.rules import bodies
from postroom.engine.rules.bodies import Apart
from postroom.engine.rules.operations import Operations
from postroom.engine.work.handlers import Shape
from postroom.errors import InvalidMessage
from postroom.message import Record, Stored

if TYPE_CHECKING:
    from postroom.engine.core import EngineCore


class AcceptedMessage(Protocol):
    """A message as it was accepted, and its record."""

    @property
    def record(self) -> Record: ...
    @property
    def type(self) -> str: ...
    @property
    def parent_message_id(self) -> str: ...


class _Unclaimed(NamedTuple):
    """A stored message that was not claimed."""

    record: Record
    type: str
    parent_message_id: str


class Current(NamedTuple):
    """A stored message in the current version."""

    type: str
    body: Body
    payload: bytes
    context: bytes | None
    """As JSON, when it is stored apart."""


def current(core: "EngineCore", claimed: "AcceptedMessage", body: Body, apart: Apart) -> Current:
    """A stored message in the current version. Raises `InvalidMessage` when it cannot be migrated."""
    payload, ours = apart.payload or bytes(body.payload), core.policy.version
    if versions.is_same_major(body.version, ours):
        return Current(claimed.type, body, payload, apart.context)
    versions.checked(body.version, ours)
    context = None if apart.context is None else decoded_value(apart.context)
    stored = message_of(
        claimed.record, claimed.type, claimed.parent_message_id, body, decoded_value(payload), context
    )
    fields = {**fields_of(stored), "expires_at": None}  # of a replayed message, it may have passed
    made = core.registry.prepare(fields, core.policy, core.store.wall_us())
    kept = {"expires_us": body.expires_us, "tokens": body.tokens, "models": body.models}
    return Current(made.envelope.type, replace(made.body, **kept), made.payload, made.context or None)


def handed(core: "EngineCore", accepted: AcceptedMessage, given: Current, shape: Shape) -> Message:
    """A message as a handler with this shape gets it. Raises `ValidationError` when it does not fit."""
    payload = core.registry.shaped(given.type, given.payload, shape)
    context = None if given.context is None else decoded_value(given.context)
    return message_of(accepted.record, given.type, accepted.parent_message_id, given.body, payload, context)


def as_handled(core: "EngineCore", operations: Operations, stored: Stored) -> Message | None:
    """A message as its handler gets it, or as it was accepted when no handler can; None if it is damaged."""
    body = body_of(stored.envelope.payload)
    if body is None:
        return None
    found = _Unclaimed(stored.record, stored.envelope.type, stored.envelope.parent_message_id)
    apart = bodies.apart(operations.transaction, body)
    try:
        given = current(core, found, body, apart)
        return handed(
            core, found, given, core.handlers.shape_of(given.type, given.body.service, given.payload)
        )
    except InvalidMessage:  # of a version without a migration, or with a payload that does not fit
        payload = decoded_value(bodies.payload_of(operations.transaction, body))
        context = None if apart.context is None else decoded_value(apart.context)
        return message_of(found.record, found.type, found.parent_message_id, body, payload, context)
