"""The parts of a PostgreSQL transaction besides its lanes: records, events and cells.

Rule 1: a cell that was read and then written is compared with the value that was read: when another
        transaction changed it meanwhile, the whole transaction is retried.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from postroom.core.lifecycle import lifecycle
from postroom.message import Event, Record
from postroom.stores.base import (
    NEWEST,
    ByIds,
    Cells,
    Change,
    Ending,
    Events,
    Head,
    Kept,
    Listing,
    Pick,
    count_changes,
    counted_as,
    in_order,
)
from postroom.stores.event_runs import INCOMPLETE, READ_ERRORS, StoredRow, alerts_for, unpack
from postroom.stores.numbered_records import NumberedRecords
from postroom.stores.postgres.known import ConflictError
from postroom.stores.postgres.lanes import PostgresLanes
from postroom.stores.postgres.ledger import PostgresLedger
from postroom.stores.postgres.rows import changed_row, from_sql, new_row, to_sql

EVENT_ROWS_A_READ = 256
PLACED_A_READ_MAX = 10_000  # commits whose events get their positions in one call

_STATES_WITH_INDEX = frozenset({"EXECUTING", "DEAD_LETTER", "CANCELLED", "EXPIRED", "QUARANTINED"})
_encode = msgspec.json.Encoder().encode


class PostgresRecords(NumberedRecords[PostgresLedger]):
    """The records of one transaction."""

    def __init__(self, ledger: PostgresLedger, lanes: PostgresLanes) -> None:
        self._ledger = ledger
        self._lanes = lanes

    def find(self, pick: Pick) -> list[Record]:
        match pick:
            case ByIds(message_ids):
                return in_order(self.get_many(message_ids), message_ids)
            case Ending(deadline, until_ns, limit):
                rows = self._ledger.ask_records(f"ending_{deadline}", (until_ns, limit))
            case Listing(queue, state, after, limit, before):
                name = "listing"
                if state in _STATES_WITH_INDEX:
                    name = "listing_of_state"
                elif state == "PROCESSING":
                    name = "listing_leased"
                queue = None if queue is None else to_sql(queue)
                values = {"queue": queue, "state": state, "after": after, "limit": limit}
                if before:
                    name, values = f"{name}_newest_first", {**values, "before": before}
                rows = self._ledger.ask_records(name, values)
            case _:
                raise TypeError(pick)
        return [self._ledger.record(row) for row in rows]

    def get_many(self, message_ids: Sequence[str]) -> dict[str, Record]:
        numbers = [self._ledger.known.own_number(message_id) for message_id in message_ids]
        own = [number for number in numbers if number]
        rows = self._ledger.ask_records("by_seqs", (own,)) if own else []
        names = [to_sql(each) for each, number in zip(message_ids, numbers, strict=True) if not number]
        if names:
            rows += self._ledger.ask_records("by_names", (names,))
        found = {record.message_id: record for record in map(self._ledger.record, rows)}
        if own and (missing := [to_sql(each) for each in message_ids if each not in found]):
            named = map(self._ledger.record, self._ledger.ask_records("by_names", (missing,)))
            found |= {record.message_id: record for record in named}
        return found

    def kept(self, record: Record) -> Kept:
        codec, seq = self._ledger.codec, record.seq
        [(kind, parent, key, delay_ns, ttl_ns, payload, result, trail)] = self._ledger.ask("stored", (seq,))
        return Kept(
            from_sql(kind), from_sql(parent), from_sql(key), delay_ns, ttl_ns,
            codec.open("payload", seq, payload),
            None if result is None else codec.open("result", seq, result),
            codec.open_lines(seq, (trail or b"").decode()).encode(),
        )  # fmt: skip

    def sealed_payloads(self, numbers: Sequence[int]) -> dict[int, bytes]:
        return dict(self._ledger.ask_records("payloads", (numbers,)))

    def sealed_results(self, numbers: Sequence[int]) -> dict[int, bytes]:
        return dict(self._ledger.ask_records("results", (numbers,)))

    def save(self, changes: Sequence[Change], events: Sequence[Event]) -> None:
        self._ledger.changes += 1
        for change in changes:
            step, r = change.step, change.step.record
            if (e := change.envelope) is not None:
                self._ledger.saved.add(r.seq)
                if r.due:
                    self._ledger.ends_at(r.due)
                self._ledger.inserts.append(
                    new_row(r, e, self._ledger.codec.seal("payload", r.seq, e.payload))
                )
                continue
            if r.seq in self._ledger.saved:  # an earlier change of the record must reach the table first
                self._ledger.write_records()
            self._ledger.saved.add(r.seq)
            trail = [] if change.before is None else lifecycle.trail(change.before, step)
            if deadline_ns := r.lease_until or r.due:
                self._ledger.ends_at(deadline_ns)
            result = None if step.result is None else self._ledger.codec.seal("result", r.seq, step.result)
            lines = "".join(f"{_encode(event).decode()}\n" for event in trail)
            stored = self._ledger.codec.seal_lines(r.seq, lines).encode() if lines else None
            self._ledger.updates.append(changed_row(r, result, stored))
        for (queue, what), n in count_changes(changes, events).items():
            self._lanes.count(queue, what, n)
        self._ledger.append(events, len(events))

    def numbered_heads(self, numbers: Sequence[int]) -> dict[int, Head]:
        rows = self._ledger.ask_records("heads_by_seq", (numbers,))
        return {row[0]: self._ledger.head(row) for row in rows}

    def forget(self, records: Sequence[Record]) -> None:
        self._ledger.changes += 1
        self._ledger.write_records()
        if records:
            seen = [(record.seq, record.place, record.state) for record in records]
            if self._ledger.tell("forget", tuple(map(list, zip(*seen, strict=True)))) != len(records):
                raise ConflictError
        for record in records:
            self._lanes.count(record.queue, counted_as(record), -1)


class PostgresEvents(Events):
    """The events of one transaction, and those of the database."""

    def __init__(self, ledger: PostgresLedger) -> None:
        self._ledger = ledger

    def take_numbers(self, count: int) -> int:
        return self._ledger.take_numbers(count)

    def forget(self, up_to: int) -> None:
        self._ledger.changes += 1
        self._ledger.write_records()
        self._ledger.ask("drop_partitions", (up_to,))
        self._ledger.tell("forget_events", (up_to,))

    def read(self, after: int, limit: int) -> list[Event]:
        if not self._ledger.is_reading:  # a purge; readings place events before they begin
            self._ledger.ask("place_events", (PLACED_A_READ_MAX,))
        if after == NEWEST:
            return [event for row in self._ledger.ask("newest_events") for event in self._unpacked(row)][-1:]
        found: list[Event] = []
        at = after
        while len(found) < limit:
            rows = self._ledger.ask("events_after", (at, min(limit, EVENT_ROWS_A_READ)))
            if not rows:
                break
            at = rows[-1][0]
            found += [event for row in rows for event in self._unpacked(row) if event.seq > after]
        return found[:limit]

    def _unpacked(self, row: tuple[int, int, int, bytes]) -> Iterator[Event]:
        """The events of a commit, with their positions as numbers."""
        position, count, number, batch = row
        first, fault = position - count + 1, ""
        seq = first - 1
        try:
            for seq, event in enumerate(
                unpack(self._ledger.codec.open_batch(number, bytes(batch)), self._ledger.known), first
            ):
                yield event if event.seq == seq else msgspec.structs.replace(event, seq=seq)
        except READ_ERRORS as error:
            fault = str(error)
        if seq != position:
            yield from alerts_for(self._damaged_row(*row), seq, fault or INCOMPLETE)

    def _damaged_row(self, position: int, count: int, number: int, batch: bytes) -> StoredRow:
        [(ts_us, _)] = self._ledger.ask("event_row", (number,))
        return StoredRow(number, position - count + 1, position, ts_us, bytes(batch))

    def row(self, number: int) -> bytes:
        [(_, batch)] = self._ledger.ask("event_row", (number,))
        return bytes(batch)


class PostgresCells(Cells):
    """The cells of one transaction, in their stored form until they are asked for."""

    def __init__(self, ledger: PostgresLedger, scans: Mapping[tuple[str, str, int], list[Any]]) -> None:
        """`scans` are pages that were read when the transaction began."""
        self._ledger = ledger
        self._written: dict[tuple[str, str], bytes | None] = {}
        self._read: dict[tuple[str, str], bytes | None] = {}
        self.scans: dict[tuple[str, str, int], list[Any]] = {**scans}
        """Cells that were read together: kind, after and limit -> rows."""

    def get(self, kind: str, key: str) -> bytes | None:
        name = kind, key
        if name in self._written:
            stored = self._written[name]
        elif name in self._read:
            stored = self._read[name]
        else:
            rows = self._ledger.ask("cell", (to_sql(kind), to_sql(key)))
            stored = self._read[name] = bytes(rows[0][0]) if rows else None
        return None if stored is None else self._ledger.codec.open_cell(kind, key, stored)

    def put(self, kind: str, key: str, value: bytes | None) -> None:
        self._ledger.changes += 1
        self._written[kind, key] = None if value is None else self._ledger.codec.seal_cell(kind, key, value)

    def page(self, kind: str, after: str = "", limit: int = 1_000) -> list[tuple[str, bytes]]:
        start = to_sql(after)
        written = {to_sql(key): value for (name, key), value in self._written.items() if name == kind}
        mine = {key: value for key, value in written.items() if key > start}
        more = sum(value is None for value in mine.values())  # removed here, perhaps still in the table
        scan = kind, after, limit + more
        rows = self.scans.get(scan)
        if rows is None:
            rows = self.scans[scan] = self._ledger.ask("cells", (to_sql(kind), start, limit + more))
        found: dict[str, bytes] = {}
        """By the stored form of the key, whose order is the order of the pages."""
        for key, value in rows:
            self._read.setdefault((kind, from_sql(key)), bytes(value))
            found[key] = bytes(value)
        last = rows[-1][0] if len(rows) == limit + more else None
        for key, own in mine.items():
            if own is None:
                found.pop(key, None)
            elif last is None or key <= last:
                found[key] = own
        page = [(from_sql(key), stored) for key, stored in sorted(found.items())[:limit]]
        return self._ledger.codec.open_cells(kind, page)

    def write(self) -> None:
        """Send the changed cells after the records, in the order of their keys. Raises `ConflictError`."""
        if self._written:
            self._ledger.write_records()
        groups: dict[str, list[tuple[Any, ...]]] = {}
        for name in sorted(self._written):
            value, key = self._written[name], tuple(map(to_sql, name))
            before = self._read.get(name)
            if name not in self._read:
                query, row = ("drop_cells", key) if value is None else ("put_cells", (*key, value))
            elif before is None:
                query, row = ("drop_cells", key) if value is None else ("add_cells", (*key, value))
            elif value is None:
                query, row = "drop_known_cells", (*key, before)
            else:
                query, row = "change_cells", (*key, value, before)
            groups.setdefault(query, []).append(row)
        for query, rows in groups.items():
            changed = self._ledger.tell(query, tuple(map(list, zip(*rows, strict=True))))
            if query not in ("put_cells", "drop_cells") and changed != len(rows):
                raise ConflictError
        self._written = {}

    def forget_read(self) -> None:
        """From now on, what is read is current."""
        self.scans.clear()
        self._read = {name: value for name, value in self._read.items() if name in self._written}

    def kinds(self) -> list[str]:
        return [from_sql(kind) for (kind,) in self._ledger.ask("kinds")]
