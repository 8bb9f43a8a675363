"""Copy a whole store into an empty PostgreSQL store: records, results, histories, events, cells and counters.

Rule 1: the copy is one transaction: the new store is complete or empty.
Rule 2: ids, numbers, tokens and positions stay as they are, and the steady clock continues. So leases,
        delays, keys, ordering keys and the audit stream go on as if nothing had happened.
"""

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import msgspec

from postroom.errors import InvalidMessage
from postroom.message import Event, Record
from postroom.stores.base import Counted, Kept, Listing
from postroom.stores.codec import Codec, codec_of
from postroom.stores.event_runs import pack
from postroom.stores.own_ids import IDS_FACT, OwnIds
from postroom.stores.postgres.connection import ON_DISK
from postroom.stores.postgres.rows import to_sql
from postroom.stores.postgres.store import NANOS_PER_US, OFFSET, PostgresStore
from postroom.stores.postgres.trips import Connection
from postroom.stores.store import Store
from postroom.stores.transaction import Transaction

PAGE = 1_000
_NOW_US = "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"


def import_store(target: PostgresStore, source: Store) -> dict[str, int]:
    """Copy `source`; nothing may write to it meanwhile. Returns how much of each kind was copied."""
    identity = source.identity()
    target.identity()  # creates the schema
    queries, codec = target.writing, codec_of(identity, target.encryption)
    with target.connected() as connection, connection.transaction():
        connection.execute("SET LOCAL statement_timeout = 0")
        connection.execute(f"SELECT {ON_DISK}")
        connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s), 3)", [target.address.schema])
        if connection.execute(queries["is_used"]).fetchone() == (True,):  # type: ignore[arg-type, unused-ignore]
            raise InvalidMessage(f"{target.url} is not empty: move into an empty store")
        copied = {
            "records": _copy(connection, queries["copy_records"], _record_rows(source, codec)),
            "cells": _copy(connection, queries["copy_cells"], _cell_rows(source, codec)),
            "events": _copy_events(connection, queries["copy_events"], source, codec),
        }
        _copy(connection, queries["copy_counts"], _count_rows(source))
        _continue(connection, queries, source, identity)
    target.reopen()
    return copied


def is_empty(target: PostgresStore) -> bool:
    """Whether a store holds nothing."""
    target.identity()  # creates the schema
    with target.connected() as connection:
        return connection.execute(target.writing["is_used"]).fetchone() == (False,)  # type: ignore[arg-type, unused-ignore]


def _copy(connection: Connection, query: str, rows: Iterator[tuple[Any, ...]]) -> int:
    count = 0
    with connection.cursor().copy(query) as copy:  # type: ignore[arg-type, unused-ignore]
        for row in rows:
            copy.write_row(row)
            count += 1
    return count


def _record_rows(source: Store, codec: Codec) -> Iterator[tuple[Any, ...]]:
    ids = source.read(lambda transaction: transaction.ids)
    after = 0
    while page := _page_of(source, after):
        for record, kept in page:
            yield _row(record, kept, ids, codec)
        after = page[-1][0].seq


def _page_of(store: Store, after: int) -> list[tuple[Record, Kept]]:
    def page(transaction: Transaction) -> list[tuple[Record, Kept]]:
        found = transaction.records.find(Listing(after=after, limit=PAGE))
        return [(record, transaction.records.kept(record)) for record in found]

    return store.read(page)


def _row(r: Record, kept: Kept, ids: OwnIds, codec: Codec) -> tuple[Any, ...]:
    is_own = r.message_id == ids.new(r.queue, r.seq, r.created_us)
    return (
        r.seq, None if is_own else to_sql(r.message_id), to_sql(r.queue), r.state, r.priority, r.lane,
        r.place, r.attempt, r.retries, r.crashes, r.max_retries, r.lease, to_sql(r.worker_id), r.lease_ns,
        r.lease_until, r.due, r.ready_at, r.expires, r.durability, r.created_us, r.claimed_us,
        r.heartbeat_us, r.ended_us,
        to_sql(r.sender), to_sql(kept.type), to_sql(kept.parent_message_id), to_sql(kept.key), kept.delay_ns,
        kept.ttl_ns,
        codec.seal("payload", r.seq, kept.payload),
        None if kept.result is None else codec.seal("result", r.seq, kept.result),
        codec.seal_lines(r.seq, kept.trail.decode()).encode() if kept.trail else None,
    )  # fmt: skip


def _cell_rows(source: Store, codec: Codec) -> Iterator[tuple[str, str, bytes]]:
    for kind, key, value in _cells(source):
        yield to_sql(kind), to_sql(key), codec.seal_cell(kind, key, value)


def _cells(source: Store) -> Iterator[tuple[str, str, bytes]]:
    for kind in source.read(lambda transaction: transaction.cells.kinds()):
        # A page begins after a key. So the empty key, as of the shipper's position, is read by itself.
        after = ""
        nameless = source.read(lambda transaction, k=kind: transaction.cells.get(k, ""))  # type: ignore[misc]
        if nameless is not None:
            yield kind, "", nameless
        while page := source.read(lambda transaction, k=kind, a=after: transaction.cells.page(k, a, PAGE)):  # type: ignore[misc]
            yield from ((kind, key, value) for key, value in page)
            after = page[-1][0]


def _copy_events(connection: Connection, query: str, source: Store, codec: Codec) -> int:
    count, after = 0, 0
    with connection.cursor().copy(query) as copy:  # type: ignore[arg-type, unused-ignore]
        while page := source.events(after, PAGE):
            events: list[Event] = list(page)
            after = events[-1].seq
            number = events[0].seq
            batch = codec.seal_batch(number, pack([*events]))
            copy.write_row((number, 0, len(events), after, batch))
            count += len(events)
    return count


def _count_rows(source: Store) -> Iterator[tuple[str, Counted, int]]:
    for queue, counts in source.depths().items():
        yield from ((to_sql(queue), what, n) for what, n in counts.items() if n)


def _continue(connection: Connection, queries: dict[str, str], source: Store, identity: str) -> None:
    """Continue the numbers, the positions, the clock and the identity of the source."""
    newest = source.newest_event()
    connection.execute(queries["set_number"], [max(newest, 0)])  # type: ignore[arg-type, unused-ignore]
    connection.execute(queries["set_feed"], [newest])  # type: ignore[arg-type, unused-ignore]
    [(now_us,)] = connection.execute(_NOW_US).fetchall()
    offset_ns = source.steady_ns() - now_us * NANOS_PER_US
    rule = source.read(lambda transaction: transaction.ids.rule)
    for name, value in (("store_id", identity), (IDS_FACT, rule.text), (OFFSET, str(offset_ns))):
        connection.execute(queries["set_fact"], [name, value])  # type: ignore[arg-type, unused-ignore]


def differences(source: Store, target: Store) -> list[str]:
    """The differences between two stores; empty after a complete move."""
    found: list[str] = []
    after = 0
    while not found:
        first, second = _page_of(source, after), _page_of(target, after)
        pairs = zip(first, second, strict=False)
        found += [f"record {one[0].message_id} differs" for one, other in pairs if one != other]
        if len(first) != len(second):
            found.append(f"after record {after} there are {len(second)} records instead of {len(first)}")
        if len(first) < PAGE:
            break
        after = first[-1][0].seq
    if _counts(source) != _counts(target):
        found.append("the counters differ")
    if _events_digest(source) != _events_digest(target):
        found.append("the events differ")
    if _cell_digests(source) != _cell_digests(target):  # their order is that of the stored keys
        found.append("the cells differ")
    return found


def _cell_digests(store: Store) -> dict[tuple[str, str], bytes]:
    return {(kind, key): sha256(value).digest() for kind, key, value in _cells(store)}


def _events_digest(store: Store) -> tuple[int, str]:
    """How many events a store holds, and a hash of all of them in their order."""
    count, after, digest = 0, 0, sha256()
    while page := store.events(after, PAGE):
        count, after = count + len(page), page[-1].seq
        digest.update(msgspec.msgpack.encode(page, order="deterministic"))
    return count, digest.hexdigest()


def _counts(store: Store) -> dict[str, dict[Counted, int]]:
    return {queue: dict(counts) for queue, counts in store.depths().items() if counts}
