"""Encryption at the boundary of a ledger: what contracts see is plain, what a backend stores is encrypted.

Rule 1: payloads, results, the events of a record, batches of events and the values of cells are encrypted.
        What a backend searches or counts by is not: ids, queues, types, senders, states, priorities, times
        and keys.
Rule 2: an encrypted value is bound to its place: the store, the record and the field, or the key of its cell.
Rule 3: a record whose payload cannot be decrypted is quarantined by the claim that meets it, so that it does
        not block its lane. Its bytes stay.
"""

from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from postroom.core.lifecycle import lifecycle
from postroom.errors import UnreadableValue
from postroom.message import Record
from postroom.stores.base import Head
from postroom.stores.transaction import KEY, LIMITS, MANIFEST, OUTBOX, Transaction
from postroom.system.crypto.encryption import Encryption
from postroom.system.log import library_log

PLAIN_CELLS = frozenset(
    {
        KEY, LIMITS, MANIFEST, OUTBOX, "bus.owner",
        "engine.agent", "engine.agents", "engine.body_use", "engine.breaker", "engine.coordinator",
        "engine.dependant", "engine.epoch", "engine.goal", "engine.inbox", "engine.key_end", "engine.line",
        "engine.line_of", "engine.parked", "engine.pause", "engine.pressure", "engine.purge",
        "engine.rate", "engine.receipt", "engine.request", "engine.token_holds",
        "engine.token_use", "engine.tokens", "engine.worker", "tasks.size", "tasks.stored",
    }
)  # fmt: skip
"""Kinds of cells that hold counters, times and ids only. Claims read and write them all the time."""

UNREADABLE = b'"[cannot be decrypted]"'
"""What the audit stream shows instead of a payload that cannot be decrypted."""

_log = library_log("postroom.store")


def record_place(store_id: str, field: str, seq: int) -> str:
    """What the encrypted value of a field of a record is bound to."""
    return f"the {field} of record {seq} in {store_id}"


def cell_place(store_id: str, kind: str, key: str) -> str:
    """What the encrypted value of a cell is bound to."""
    return f"the cell {kind} {key!r} in {store_id}"


def batch_place(store_id: str, number: int) -> str:
    """What an encrypted batch of events is bound to: the number of its row."""
    return f"the events of row {number} in {store_id}"


class EncryptedTransaction(Transaction):
    """Overrides of a ledger and its lanes. A backend's transaction class comes after it in the MRO.

    So `super()` is the backend, and never the abstract method that the type checker sees.
    """

    encryption: Encryption
    is_reading = False

    def place(self, field: str, seq: int) -> str:
        """As `record_place`."""
        return record_place(self.store_id, field, seq)

    # ---- cells ---------------------------------------------------------------------------------

    def cell(self, kind: str, key: str) -> bytes | None:
        value = super().cell(kind, key)  # type: ignore[safe-super]
        if value is None or kind in PLAIN_CELLS:
            return value
        return self.encryption.open(value, cell_place(self.store_id, kind, key))

    def put_cell(self, kind: str, key: str, value: bytes | None) -> None:
        if value is not None and kind not in PLAIN_CELLS:
            value = self.encryption.seal(value, cell_place(self.store_id, kind, key))
        super().put_cell(kind, key, value)  # type: ignore[safe-super]

    def cells(self, kind: str, after: str = "", limit: int = 1_000) -> list[tuple[str, bytes]]:
        rows = super().cells(kind, after, limit)  # type: ignore[safe-super]
        if kind in PLAIN_CELLS:
            return rows
        return [
            (key, self.encryption.open(value, cell_place(self.store_id, kind, key))) for key, value in rows
        ]

    # ---- lanes ---------------------------------------------------------------------------------

    def pull(self, queue: str, lane: int, limit: int) -> list[Head]:
        heads = super().pull(queue, lane, limit)  # type: ignore[safe-super]
        if self.is_reading:  # for ages and depths, which need no payload
            return heads
        opened, unreadable = self._opened(heads)
        if not unreadable:
            return opened
        self.quarantine(unreadable)
        return self.pull(queue, lane, limit)

    def heads(self, message_ids: Sequence[str]) -> list[Head]:
        opened, unreadable = self._opened(super().heads(message_ids))
        if not self.is_reading:
            self.quarantine([one for one in unreadable if one[0].state == "QUEUED"])
        return opened

    def payloads(self, message_ids: Sequence[str]) -> dict[str, bytes]:
        try:
            return super().payloads(message_ids)
        except UnreadableValue:  # the audit stream and lists go on without this one
            return {one: payload for one in message_ids if (payload := self._payload(one)) is not None}

    def _payload(self, message_id: str) -> bytes | None:
        try:
            stored = self.load(message_id)
        except UnreadableValue:
            return UNREADABLE
        return None if stored is None else stored.envelope.payload

    def _opened(self, heads: Sequence[Head]) -> tuple[list[Head], list[tuple[Record, UnreadableValue]]]:
        opened: list[Head] = []
        unreadable: list[tuple[Record, UnreadableValue]] = []
        for head in heads:
            try:
                opened.append(self._open_head(head))
            except UnreadableValue as error:
                unreadable.append((head.record, error))
        return opened, unreadable

    def _open_head(self, head: Head) -> Head:
        payload = self.encryption.open(head.payload, self.place("payload", head.record.seq))
        return head if payload is head.payload else replace(head, payload=payload)

    def quarantine(self, unreadable: Sequence[tuple[Record, UnreadableValue]]) -> None:
        """Take records whose payloads cannot be decrypted out of their lanes."""
        for record, error in unreadable:
            _log.error("%s is quarantined: %s", record.message_id, error)
            self._end_all([record], partial(lifecycle.quarantine, error=str(error)))
