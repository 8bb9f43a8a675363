"""A message as a store returns it, from its record and from what is kept beside the record."""

import msgspec

from postroom.core.lifecycle import lifecycle
from postroom.message import Envelope, Event, Record, Stored
from postroom.stores.base import Kept

_decode_event = msgspec.json.Decoder(Event).decode


def stored_message(record: Record, kept: Kept) -> Stored:
    """The message, its result, and the history that its record and its trail imply."""
    envelope = Envelope(
        message_id=record.message_id,
        queue=record.queue,
        payload=kept.payload,
        type=kept.type,
        parent_message_id=kept.parent_message_id,
        key=kept.key,
        priority=record.priority,
        max_retries=record.max_retries,
        delay_ns=kept.delay_ns,
        ttl_ns=kept.ttl_ns,
        durability=record.durability,
        sender=record.sender,
    )
    first = lifecycle.created(envelope, record.message_id, record.seq, record.created_us)
    later = [_decode_event(line) for line in kept.trail.split(b"\n") if line]
    return Stored(record, envelope, kept.result, lifecycle.history(record, first, later))
