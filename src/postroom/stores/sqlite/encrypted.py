"""A transaction in SQL whose payloads, results, events and cells are encrypted in the file.

Rule 1: a file without encryption never runs this code, so it costs nothing there.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import apsw
from msgspec.structs import replace

from postroom.errors import UnreadableValue
from postroom.message import Record
from postroom.stores.base import Change
from postroom.stores.encrypted import EncryptedTransaction, batch_place
from postroom.stores.event_runs import Implied, OnesRun, implied_runs
from postroom.stores.sqlite.known import Known
from postroom.stores.sqlite.sql import queries as sql
from postroom.stores.sqlite.sql.queries import ask
from postroom.stores.sqlite.transaction import SqliteReading, SqliteTransaction
from postroom.stores.transaction import Claim, Delivery
from postroom.system.crypto.encryption import MARK, OVERHEAD_BYTES, Encryption

PAYLOAD = 8  # the column of a row of HEADS
IMPLIED = sql.IMPLIED.replace(
    "length(payload)",
    f"length(payload) - iif(substr(payload, 1, {len(MARK)}) = x'{MARK.hex()}', {OVERHEAD_BYTES}, 0)",
)


class EncryptedSqliteTransaction(EncryptedTransaction, SqliteTransaction):
    """One transaction of the writing connection."""

    def __init__(
        self, known: Known, cursor: apsw.Cursor, steady_ns: int, wall_us: int, encryption: Encryption
    ) -> None:
        SqliteTransaction.__init__(self, known, cursor, steady_ns, wall_us)
        self.encryption = encryption

    # ---- records -------------------------------------------------------------------------------

    def stored_facts(self, seq: int) -> tuple[Any, ...]:
        *facts, payload, result, trail = super().stored_facts(seq)
        opened = self.encryption.open
        if result is not None:
            result = opened(result, self.place("result", seq))
        if trail is not None:
            trail = self.encryption.open_lines(trail, self.place("trail", seq))
        return (*facts, opened(payload, self.place("payload", seq)), result, trail)

    def own_payloads(self, numbers: Sequence[int]) -> dict[int, bytes]:
        found = super().own_payloads(numbers)
        return {
            seq: self.encryption.open(payload, self.place("payload", seq)) for seq, payload in found.items()
        }

    def _row(self, change: Change) -> tuple[str, tuple[Any, ...]]:
        query, values = super()._row(change)
        seq, seal = change.step.record.seq, self.encryption.seal
        if query is sql.INSERT:
            values = (*values[:-1], seal(values[-1], self.place("payload", seq)))
        elif query is sql.UPDATE_TRAIL:
            line = self.encryption.seal_line(values[-2], self.place("trail", seq))
            values = (*values[:-2], f"{line}\n", seq)
        elif query is sql.UPDATE_RESULT:
            values = (*values[:-2], seal(values[-2], self.place("result", seq)), seq)
        return query, values

    def _write_rows(self) -> int:
        step = self.step_of_new()
        first, seal = self._number - step * len(self._new), self.encryption.seal
        self._new = [
            replace(envelope, payload=seal(envelope.payload, self.place("payload", first + step * index)))
            for index, envelope in enumerate(self._new)
        ]
        return super()._write_rows()

    def _write_results(self, numbers: list[int], results: Sequence[bytes]) -> None:
        seal = self.encryption.seal
        sealed = [
            seal(result, self.place("result", number))
            for number, result in zip(numbers, results, strict=True)
        ]
        super()._write_results(numbers, sealed)

    def _lease_rows(self, queue: int, rows: list[Any], terms: Claim) -> list[Delivery]:
        readable: list[Any] = []
        unreadable: list[tuple[Record, UnreadableValue]] = []
        for row in rows:
            try:
                payload = self.encryption.open(row[PAYLOAD], self.place("payload", row[0]))
            except UnreadableValue as error:
                unreadable.append((self._by_seq(row[0]), error))
            else:
                readable.append((*row[:PAYLOAD], payload, *row[PAYLOAD + 1 :]))
        if unreadable:
            self.quarantine(unreadable)
            return self.claim(terms)
        return super()._lease_rows(queue, readable, terms)

    def _by_seq(self, seq: int) -> Record:
        [row] = ask(self._cursor, f"{sql.RECORD} WHERE seq = ?", (seq,))
        return self._record(row)

    # ---- events --------------------------------------------------------------------------------

    def packed(self, last: int) -> str | bytes:
        return self.encryption.seal(str(super().packed(last)).encode(), batch_place(self.store_id, last))

    def unpacked(self, last: int, batch: bytes) -> bytes:
        return self.encryption.open(batch, batch_place(self.store_id, last))

    def _implied_runs(self, after: int, last: int) -> Iterator[OnesRun]:
        return implied_runs(Implied(*row) for row in ask(self._cursor, IMPLIED, (after, last)))


class EncryptedSqliteReading(EncryptedSqliteTransaction, SqliteReading):
    """One state of the file, through a reading connection."""

    is_reading = True
