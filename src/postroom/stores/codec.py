"""Codecs: how the values of a ledger become the bytes of a store, as they are or encrypted.

Rule 1: payloads, results, the events of a record, batches of events and the values of cells are encoded.
        What a backend searches or counts by is not: ids, queues, types, senders, states, priorities, times
        and keys.
Rule 2: an encrypted value is bound to its place: the store, the record and the field, or the key of its cell.
Rule 3: a store without encryption pays one call for each statement, and none for each value.
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from postroom.errors import UnreadableValue
from postroom.message import Record
from postroom.stores.base import KEY, LIMITS, MANIFEST, OUTBOX, UNREADABLE_PAYLOAD, Head
from postroom.system.crypto.encryption import Encryption

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


def record_place(store_id: str, field: str, seq: int) -> str:
    """The associated data (AAD) of an encrypted field of a record."""
    return f"the {field} of record {seq} in {store_id}"


def cell_place(store_id: str, kind: str, key: str) -> str:
    """The associated data (AAD) of an encrypted cell."""
    return f"the cell {kind} {key!r} in {store_id}"


def batch_place(store_id: str, number: int) -> str:
    """The associated data (AAD) of an encrypted batch of events."""
    return f"the events of row {number} in {store_id}"


class Codec:
    """Stores values as they are."""

    is_plain = True

    def seal(self, field: str, seq: int, value: bytes) -> bytes:  # noqa: ARG002 - for encryption, as below
        """The stored form of the payload or the result of a record."""
        return value

    def open(self, field: str, seq: int, stored: bytes) -> bytes:  # noqa: ARG002
        """The inverse of `seal`."""
        return stored

    def seal_payloads(self, first: int, step: int, payloads: list[bytes]) -> list[bytes]:  # noqa: ARG002
        """The stored payloads of records with the numbers `first`, `first + step`, and so on."""
        return payloads

    def seal_results(self, numbers: Sequence[int], results: Sequence[bytes]) -> Sequence[bytes]:  # noqa: ARG002
        """The stored results of records."""
        return results

    def open_payloads(self, stored: Mapping[int, bytes]) -> Mapping[int, bytes]:
        """Payloads by the numbers of their records, `UNREADABLE_PAYLOAD` for those that cannot be read."""
        return stored

    def open_heads(self, heads: list[Head]) -> tuple[list[Head], Sequence[tuple[Record, UnreadableValue]]]:
        """Records with their payloads, and records whose payloads cannot be read, with the errors."""
        return heads, ()

    def seal_lines(self, seq: int, lines: str) -> str:  # noqa: ARG002
        """The stored form of more lines of a trail. Each ends with a newline."""
        return lines

    def open_lines(self, seq: int, lines: str) -> str:  # noqa: ARG002
        """A whole trail."""
        return lines

    def seal_cell(self, kind: str, key: str, value: bytes) -> bytes:  # noqa: ARG002
        """The stored value of a cell."""
        return value

    def open_cell(self, kind: str, key: str, stored: bytes) -> bytes:  # noqa: ARG002
        """The inverse of `seal_cell`."""
        return stored

    def open_cells(self, kind: str, rows: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:  # noqa: ARG002
        """Keys with their values."""
        return rows

    def seal_batch(self, number: int, batch: bytes) -> bytes:  # noqa: ARG002
        """The stored form of a row of events."""
        return batch

    def open_batch(self, number: int, stored: bytes) -> bytes:  # noqa: ARG002
        """The inverse of `seal_batch`."""
        return stored


class EncryptedCodec(Codec):
    """Stores values encrypted with the newest key of a key file."""

    is_plain = False

    def __init__(self, store_id: str, encryption: Encryption) -> None:
        self._store_id = store_id
        self._encryption = encryption

    def seal(self, field: str, seq: int, value: bytes) -> bytes:
        return self._encryption.seal(value, record_place(self._store_id, field, seq))

    def open(self, field: str, seq: int, stored: bytes) -> bytes:
        return self._encryption.open(stored, record_place(self._store_id, field, seq))

    def seal_payloads(self, first: int, step: int, payloads: list[bytes]) -> list[bytes]:
        return [self.seal("payload", first + step * index, one) for index, one in enumerate(payloads)]

    def seal_results(self, numbers: Sequence[int], results: Sequence[bytes]) -> Sequence[bytes]:
        return [self.seal("result", seq, one) for seq, one in zip(numbers, results, strict=True)]

    def open_payloads(self, stored: Mapping[int, bytes]) -> Mapping[int, bytes]:
        found = {}
        for seq, payload in stored.items():
            try:
                found[seq] = self.open("payload", seq, payload)
            except UnreadableValue:
                found[seq] = UNREADABLE_PAYLOAD
        return found

    def open_heads(self, heads: list[Head]) -> tuple[list[Head], Sequence[tuple[Record, UnreadableValue]]]:
        opened: list[Head] = []
        unreadable: list[tuple[Record, UnreadableValue]] = []
        for head in heads:
            try:
                opened.append(replace(head, payload=self.open("payload", head.record.seq, head.payload)))
            except UnreadableValue as error:
                unreadable.append((head.record, error))
        return opened, unreadable

    def seal_lines(self, seq: int, lines: str) -> str:
        return f"{self._encryption.seal_line(lines, record_place(self._store_id, 'trail', seq))}\n"

    def open_lines(self, seq: int, lines: str) -> str:
        return self._encryption.open_lines(lines, record_place(self._store_id, "trail", seq))

    def seal_cell(self, kind: str, key: str, value: bytes) -> bytes:
        if kind in PLAIN_CELLS:
            return value
        return self._encryption.seal(value, cell_place(self._store_id, kind, key))

    def open_cell(self, kind: str, key: str, stored: bytes) -> bytes:
        if kind in PLAIN_CELLS:
            return stored
        return self._encryption.open(stored, cell_place(self._store_id, kind, key))

    def open_cells(self, kind: str, rows: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        return [(key, self.open_cell(kind, key, stored)) for key, stored in rows]

    def seal_batch(self, number: int, batch: bytes) -> bytes:
        return self._encryption.seal(batch, batch_place(self._store_id, number))

    def open_batch(self, number: int, stored: bytes) -> bytes:
        return self._encryption.open(stored, batch_place(self._store_id, number))


PLAIN = Codec()


def codec_of(store_id: str, encryption: Encryption | None) -> Codec:
    """The codec of a store."""
    return PLAIN if encryption is None else EncryptedCodec(store_id, encryption)
