"""Stored messages of an earlier major version, as the handlers of the current one get them.

Rule 1: the store keeps a message as it was accepted. Each attempt migrates it again.
Rule 2: a migration changes what a handler reads. Ids, organization, priority, expiry, tokens and ordering key
        of the stored message stay.
"""

from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from postroom.core.formats.jsoninput import decoded_value
from postroom.core.lifecycle import versions
from postroom.engine.messages import Body, fields_of, message_of
from postroom.engine.rules.bodies import Apart
from postroom.engine.rules.claims import Claimed

if TYPE_CHECKING:
    from postroom.engine.core import EngineCore


class Current(NamedTuple):
    """A claimed message in the current version."""

    type: str
    body: Body
    payload: bytes
    context: bytes | None
    """As JSON, when it is stored apart."""


def current(core: "EngineCore", claimed: Claimed, body: Body, apart: Apart) -> Current:
    """A claimed message in the current version. Raises `InvalidMessage` when it cannot be migrated."""
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
