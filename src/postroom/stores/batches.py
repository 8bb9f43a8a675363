"""New messages in batches: what one statement can store together."""

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from postroom.message import Envelope

ALIKE_ROWS = 1_000  # new records in one statement
ALIKE_PAYLOAD_BYTES = 16 * 1024  # of one that is stored together with others: SQLite keeps them for a while


_traits = attrgetter(
    "queue", "message_id", "key", "type", "parent_message_id", "priority", "max_retries", "delay_ns",
    "ttl_ns", "durability", "sender",
)  # fmt: skip
"""What new records have in common that one statement can store: everything but number and payload."""


def are_alike(some: Sequence[Envelope], more: Sequence[Envelope]) -> bool:
    """Whether two runs can be one."""
    return (
        len(some) + len(more) <= ALIKE_ROWS
        and len(some[-1].payload) <= ALIKE_PAYLOAD_BYTES >= len(more[-1].payload)
        and _traits(some[0]) == _traits(more[0])
    )


def runs(envelopes: Sequence[Envelope]) -> list[list[Envelope]]:
    """Neighbours that are alike, in order. A long one is a run of its own."""
    found: list[list[Envelope]] = []
    for _, neighbours in groupby(envelopes, _traits):
        alike = list(neighbours)
        if max([len(e.payload) for e in alike]) <= ALIKE_PAYLOAD_BYTES:
            found += [alike[first : first + ALIKE_ROWS] for first in range(0, len(alike), ALIKE_ROWS)]
        else:
            found += [[e] for e in alike]
    return found
