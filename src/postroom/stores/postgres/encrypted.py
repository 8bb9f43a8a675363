"""A transaction of PostgreSQL whose payloads, results, events and cells are encrypted in the database.

Rule 1: a store without encryption never runs this code.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from postroom.message import Event
from postroom.stores.base import Change
from postroom.stores.conversion import Table, Value, Values, event_values, record_values
from postroom.stores.encrypted import PLAIN_CELLS, EncryptedTransaction, batch_place, cell_place
from postroom.stores.event_runs import EVENTS_PER_NEW
from postroom.stores.postgres.rows import from_sql
from postroom.stores.postgres.transaction import PostgresReading, PostgresTransaction
from postroom.system.crypto.encryption import Encryption


class EncryptedPostgresTransaction(EncryptedTransaction, PostgresTransaction):
    """One transaction of a connection."""

    def __init__(self, encryption: Encryption, *facts: Any) -> None:
        PostgresTransaction.__init__(self, *facts)
        self.encryption = encryption

    # ---- records -------------------------------------------------------------------------------

    def stored_facts(self, seq: int) -> tuple[Any, ...]:
        *facts, payload, result, trail = super().stored_facts(seq)
        opened = self.encryption.open
        if result is not None:
            result = opened(bytes(result), self.place("result", seq))
        if trail is not None:
            lines = self.encryption.open_lines(bytes(trail).decode(), self.place("trail", seq))
            trail = lines.encode()
        return (*facts, opened(bytes(payload), self.place("payload", seq)), result, trail)

    def own_payloads(self, numbers: Sequence[int]) -> dict[int, bytes]:
        found = super().own_payloads(numbers)
        return {
            seq: self.encryption.open(bytes(payload), self.place("payload", seq))
            for seq, payload in found.items()
        }

    def save(self, changes: Sequence[Change], events: Sequence[Event]) -> None:
        super().save([self._sealed(change) for change in changes], events)

    def _sealed(self, change: Change) -> Change:
        seq, seal = change.step.record.seq, self.encryption.seal
        if change.envelope is not None:
            payload = seal(change.envelope.payload, self.place("payload", seq))
            return replace(change, envelope=replace(change.envelope, payload=payload))
        if change.step.result is None:
            return change
        return replace(
            change, step=replace(change.step, result=seal(change.step.result, self.place("result", seq)))
        )

    def trail_lines(self, seq: int, events: Sequence[Event]) -> bytes | None:
        lines = super().trail_lines(seq, events)
        if lines is None:
            return None
        return self.encryption.seal_line(lines.decode(), self.place("trail", seq)).encode() + b"\n"

    def new_payloads(self, first: int) -> list[bytes]:
        step, seal = 1 if self._new[0].delay_ns else EVENTS_PER_NEW, self.encryption.seal
        return [
            seal(payload, self.place("payload", first + step * index))
            for index, payload in enumerate(super().new_payloads(first))
        ]

    def _send_results(
        self, numbers: Mapping[int, str], results: Mapping[str, tuple[int, bytes]], first: int
    ) -> None:
        sealed = {
            message_id: (
                results[message_id][0],
                self.encryption.seal(results[message_id][1], self.place("result", number)),
            )
            for number, message_id in numbers.items()
        }
        super()._send_results(numbers, sealed, first)

    # ---- events --------------------------------------------------------------------------------

    def packed(self) -> bytes:
        if not self.parts:  # a commit of cells alone, which has no number
            return super().packed()
        return self.encryption.seal(super().packed(), batch_place(self.store_id, self.last_number))

    def unpacked(self, number: int, batch: bytes) -> bytes:
        return self.encryption.open(bytes(batch), batch_place(self.store_id, number))


class EncryptedPostgresReading(EncryptedPostgresTransaction, PostgresReading):
    """One state of the database."""

    is_reading = True


def _cell_values(row: Sequence[Any], store_id: str) -> Iterator[Value]:
    kind, key = from_sql(row[0]), from_sql(row[1])
    if kind not in PLAIN_CELLS:
        yield Value("set_cell", (row[0], row[1]), cell_place(store_id, kind, key), bytes(row[2]))


def postgres_values(queries: Mapping[str, str], store_id: str, encryption: Encryption) -> Values:
    """The values of a store."""
    tables = (
        Table(queries["values_of_records"], (0,), 1, record_values),
        Table(queries["values_of_events"], (0,), 1, event_values),
        Table(queries["values_of_cells"], ("", ""), 2, _cell_values),
    )
    updates = {name: queries[f"set_{name}"] for name in ("payload", "result", "trail", "batch")}
    return Values(tables, {**updates, "set_cell": queries["set_cell"]}, store_id, encryption)
