"""Memory, SQLite and PostgreSQL, driven together.

The same calls at the same instants give the same answers, records, events and counts, and the events explain
the records.
"""

import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

import psycopg
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from postroom.core.lifecycle import lifecycle
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.errors import PostroomError
from postroom.message import Envelope, Event, Record, State
from postroom.stores.base import FOREVER_NS, LANES, ByIds, Deadline, Ending, Limits, Listing
from postroom.stores.postgres.store import PostgresStore
from postroom.stores.purge import purge_keys, purge_tasks
from postroom.stores.sqlite.store import SqliteStore
from postroom.stores.store import Store
from postroom.stores.transaction import Claim, Decide, Transaction
from postroom.testing import ManualClock, MemoryStore, check_consistency
from tests.postgresserver import postgres
from tests.privatepostgres import PostgresServer
from tests.quick import QUICK

__all__ = ["postgres"]  # a fixture

EXAMPLES = settings().max_examples
STORE_ID = "both"
QUEUES = ["a", "b"]
STEPS = 50
LOOK_MAX = 10_000
DEADLINES: list[Deadline] = ["lease", "delay", "expiry"]

queues = st.sampled_from(QUEUES)
seconds = st.sampled_from([0.5, 1.0, 5.0, 60.0, 400.0])
delays_ns = st.sampled_from([0, 0, 0, 1, 2 * NANOS_PER_S])
choices = st.integers(0, 1_000_000)
envelopes = st.builds(
    Envelope,
    queue=queues,
    payload=st.sampled_from([b"1", b"{}", b'"' + b"x" * 40 + b'"']),
    message_id=st.sampled_from(["", "", "", "x", "y", f"{STORE_ID}-1", f"{STORE_ID}-900"]),
    type=st.sampled_from(["", "t"]),
    key=st.sampled_from(["", "", "", "k", "l"]),
    priority=st.integers(0, 3),
    max_retries=st.integers(0, 2),
    delay_ns=delays_ns,
    ttl_ns=st.sampled_from([0, 0, 0, 3 * NANOS_PER_S]),
)
claims = st.builds(
    Claim,
    queue=queues,
    worker_id=st.sampled_from(["w", "v"]),
    limit=st.integers(1, 4),
    lease_ns=st.sampled_from([NANOS_PER_S, 5 * NANOS_PER_S, 300 * NANOS_PER_S]),
    lanes=st.sampled_from([(0, 1, 2, 3), (2,), (0, 1, 2, 3)]),
    promote_after_ns=st.sampled_from([(), (), (2 * NANOS_PER_S, 2 * NANOS_PER_S, NANOS_PER_S)]),
)


class _Clock(ManualClock):
    """The clock of the store in memory. After a reboot it continues from the last known time."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._real = clock
        self.offset_ns = 0

    def boot_ns(self) -> int:
        return self.offset_ns + self._real.boot_ns()

    def wall_us(self) -> int:
        return self._real.wall_us()


class _Memory(MemoryStore):
    """A store in memory that survives a reboot, as the model of what another store holds afterwards."""

    def __init__(self, clock: ManualClock) -> None:
        self.own_clock = _Clock(clock)
        super().__init__(clock=self.own_clock, store_id=STORE_ID)

    def rebooted(self, boot_ns: int) -> None:
        """The clock continues from the last known time, and every lease runs its whole length again."""
        records = [row.record for row in self._data.rows.values()]
        leased = [record for record in records if record.state == "PROCESSING"]
        last = max(records, key=lambda record: record.seq, default=None)
        known = [record.lease_until - record.lease_ns for record in leased]
        known += [record.ready_at for record in records if record.due or record is last]
        newest = max([0, *known])
        self.own_clock.offset_ns = newest - boot_ns
        for record in leased:
            row = self._data.rows[record.message_id]
            again = replace(record, lease_until=newest + record.lease_ns)
            self._begin().ledger.put_row(record.message_id, replace(row, record=again))


class Planned(Exception):
    """Raised by work that wants to be rolled back."""


class BothStores(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="postroom-model-", dir=QUICK))
        self.clock = ManualClock()
        self.memory = _Memory(self.clock)
        self.memory.rebooted(self.clock.boot_ns())  # the clock of a new file begins at 0
        self.sqlite = self._open()
        self.others: list[Store] = []
        self.leases: list[tuple[str, int]] = []
        self.seen = 0

    def _open(self) -> SqliteStore:
        path = self.folder / "queue.db"
        return SqliteStore(path, clock=self.clock, store_id=STORE_ID, reserve_bytes=0)

    def teardown(self) -> None:
        self.sqlite.close()
        shutil.rmtree(self.folder)

    # ---- the same to both ----------------------------------------------------------------------

    def _both(self, call: Callable[[Store], Any]) -> Any:
        first, *answers = [_answer(call, store) for store in (self.memory, self.sqlite, *self.others)]
        assert answers == [first] * len(answers), (first, answers[-1])
        return first

    def _write(self, work: Callable[[Transaction], Any]) -> Any:
        return self._both(lambda store: store.write(work))

    def _read(self, work: Callable[[Transaction], Any]) -> Any:
        return self._both(lambda store: store.read(work))

    def _decide(self, message_ids: tuple[str, ...], decide: Decide) -> None:
        self._write(lambda transaction: transaction.apply(ByIds(message_ids), decide))

    def _pick(self, choice: int) -> str:
        """The id of a message, sometimes an unknown one."""
        records = self.memory.find(Listing(limit=LOOK_MAX))
        names = [record.message_id for record in records] or ["nobody"]
        return "nobody" if choice % 31 == 30 else names[choice % len(names)]

    def _lease(self, choice: int) -> tuple[str, int]:
        """A lease of an earlier claim, more often a recent one."""
        if not self.leases:
            return "nobody", 1
        newest = self.leases[-4:]
        return newest[choice % len(newest)] if choice % 4 else self.leases[choice % len(self.leases)]

    # ---- verbs ---------------------------------------------------------------------------------

    @initialize(max_depth=st.sampled_from([4, 1_000]))
    def limit(self, max_depth: int) -> None:
        limits = Limits(max_depth=max_depth, max_payload_bytes=20)
        self._write(lambda transaction: transaction.set_limits("a", limits))

    @rule(new=st.lists(envelopes, min_size=1, max_size=3))
    def insert(self, new: list[Envelope]) -> None:
        self._write(lambda transaction: transaction.insert(new))

    @rule(new=st.lists(envelopes.map(lambda e: replace(e, key="", message_id="")), min_size=1, max_size=4))
    def insert_unnamed(self, new: list[Envelope]) -> None:
        self._write(lambda transaction: transaction.insert(new))

    @rule(terms=claims)
    def claim(self, terms: Claim) -> None:
        deliveries = self._write(lambda transaction: transaction.claim(terms))
        self.leases += [(delivery.message_id, delivery.lease) for delivery in deliveries]

    @rule(choice=choices, result=st.sampled_from([b"1", b'"y"']))
    def complete(self, choice: int, result: bytes) -> None:
        message_id, token = self._lease(choice)
        self._write(lambda transaction: transaction.complete({message_id: (token, result)}))

    @rule(choices=st.lists(choices, min_size=2, max_size=4))
    def complete_several(self, choices: list[int]) -> None:
        words = {message_id: (token, b"2") for message_id, token in map(self._lease, choices)}
        self._write(lambda transaction: transaction.complete(words))

    @rule(choice=choices, delay_ns=st.one_of(delays_ns, st.none()))
    def fail(self, choice: int, delay_ns: int | None) -> None:
        message_id, token = self._lease(choice)
        self._decide(
            (message_id,),
            lambda record, now: lifecycle.fail(record, now, token, "no", error_type="E", delay_ns=delay_ns),
        )

    @rule(choice=choices)
    def release(self, choice: int) -> None:
        message_id, token = self._lease(choice)
        self._decide((message_id,), lambda record, now: lifecycle.release(record, now, token))

    @rule(choice=choices, delay_ns=delays_ns)
    def defer(self, choice: int, delay_ns: int) -> None:
        message_id, token = self._lease(choice)
        self._decide((message_id,), lambda record, now: lifecycle.defer(record, now, delay_ns, "busy", token))

    @rule(choice=choices, lane=st.integers(0, 3))
    def demote(self, choice: int, lane: int) -> None:
        message_id, token = self._lease(choice)
        self._decide((message_id,), lambda record, now: lifecycle.fail(record, now, token, "no", lane=lane))

    @rule(key=st.sampled_from(["a", "b"]), value=st.sampled_from([b"1", None]))
    def put_cell(self, key: str, value: bytes | None) -> None:
        self._write(lambda transaction: transaction.cells.put("some", key, value))
        self._read(lambda transaction: transaction.cells.page("some"))

    @rule(choice=choices)
    def renew(self, choice: int) -> None:
        message_id, token = self._lease(choice)
        self._decide((message_id,), lambda record, now: lifecycle.renew(record, now, token))

    @rule(choice=choices)
    def cancel(self, choice: int) -> None:
        self._decide((self._pick(choice),), lifecycle.cancel)

    @rule(choice=choices, priority=st.sampled_from([None, 0]))
    def replay(self, choice: int, priority: int | None) -> None:
        self._decide((self._pick(choice),), lambda record, now: lifecycle.replay(record, now, priority))

    @rule(choice=choices)
    def quarantine(self, choice: int) -> None:
        self._decide((self._pick(choice),), lambda record, now: lifecycle.quarantine(record, now, "bad"))

    @rule(choice=choices)
    def hand_over(self, choice: int) -> None:
        self._decide((self._pick(choice),), lambda record, now: lifecycle.hand_over(record, now, "d"))

    @rule(choice=choices)
    def settle(self, choice: int) -> None:
        self._decide((self._pick(choice),), lifecycle.settle)

    @rule(limit=st.integers(1, 3))
    def sweep(self, limit: int) -> None:
        self._write(lambda transaction: transaction.sweep(limit))

    @rule(keep_s=st.sampled_from([0, 5]), after=st.sampled_from([0, 5]), limit=st.integers(1, 5))
    def purge(self, keep_s: int, after: int, limit: int) -> None:
        keep_us: dict[State, int] = dict.fromkeys(lifecycle.ENDED, keep_s * 1_000_000)
        self._write(lambda transaction: purge_tasks(transaction, after, keep_us, limit))

    @rule(limit=st.integers(1, 2))
    def purge_keys(self, limit: int) -> None:
        before_us = self.clock.wall_us()
        self._write(lambda transaction: purge_keys(transaction, "", before_us, limit))

    @rule(new=envelopes, terms=claims, choice=choices)
    def raise_half_way(self, new: Envelope, terms: Claim, choice: int) -> None:
        message_id = self._pick(choice)

        def work(transaction: Transaction) -> None:
            transaction.claim(terms)
            transaction.insert([new])
            transaction.apply(ByIds((message_id,)), lifecycle.cancel)
            raise Planned

        self._write(work)

    @rule(new=envelopes, terms=claims, kept=st.booleans())
    def several_verbs(self, new: Envelope, terms: Claim, kept: bool) -> None:
        def work(transaction: Transaction) -> list[Any]:
            first = transaction.insert([new])
            taken = transaction.claim(terms)
            if taken:
                transaction.apply(ByIds((taken[0].message_id,)), lifecycle.cancel)
            if not kept:
                transaction.complete({each.message_id: (each.lease, b"3") for each in taken[1:]})
            return [first, taken, transaction.insert([new]), transaction.sweep(2)]

        self._write(work)

    # ---- time ----------------------------------------------------------------------------------

    @rule(passing_s=seconds)
    def advance(self, passing_s: float) -> None:
        self.clock.advance(passing_s)

    @rule(step_s=st.sampled_from([-86_400, -3_600, 3_600, 86_400]))
    def step_wall(self, step_s: int) -> None:
        self.clock.step_wall(step_s)

    @rule()
    def reboot(self) -> None:
        for store in (self.sqlite, *self.others):
            store.close()
        self.clock.reboot()
        self.memory.rebooted(self.clock.boot_ns())
        self.sqlite = self._open()

    @rule()
    def reopen(self) -> None:
        for store in (self.sqlite, *self.others):
            store.reopen()

    # ---- what has to hold ----------------------------------------------------------------------

    @invariant()
    def records_and_events_are_equal(self) -> None:
        records: list[Record] = self._both(lambda store: store.find(Listing(limit=LOOK_MAX)))
        events: list[Event] = self._both(lambda store: store.events(self.seen, LOOK_MAX))
        self.seen += len(events)
        explained = {event.message_id for event in events}
        for record in records:
            if record.message_id in explained:
                self._both(methodcaller("load", record.message_id))

    @invariant()
    def counts_and_looks_are_equal(self) -> None:
        self._both(lambda store: {queue: counts for queue, counts in store.count().items() if counts})
        self._read(partial(_looks, now_ns=self.memory.own_clock.boot_ns()))

    @invariant()
    def the_events_explain_the_state(self) -> None:
        check_consistency(self.memory)


def _looks(transaction: Transaction, now_ns: int) -> list[Any]:
    """Every look at the messages, in one transaction, which takes less time than one for each."""
    found: list[Any] = []
    for queue in QUEUES:
        found += [
            transaction.next_work_ns(queue),
            transaction.oldest_ns(queue),
            transaction.lanes.depth(queue),
        ]
        found += [transaction.pull(queue, lane, 2) for lane in range(LANES)]
        found += [transaction.records.find(Listing(queue, "QUEUED", 3, 2, before)) for before in (0, 20)]
    found.append(transaction.records.find(Listing(None, "DEAD_LETTER", 0, 2)))
    for deadline in DEADLINES:
        found += [
            transaction.records.find(Ending(deadline, before_ns, 2)) for before_ns in (now_ns, FOREVER_NS)
        ]
    return found


def _answer(call: Callable[[Store], Any], store: Store) -> Any:
    try:
        return call(store)
    except (PostroomError, Planned) as error:
        return type(error), str(error)


class AllStores(BothStores):
    """PostgreSQL too. Its answers take longer, so there are fewer examples."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        store = PostgresStore(self.url, clock=self.clock, store_id=STORE_ID)
        with psycopg.connect(self.url.partition("?")[0], autocommit=True) as connection:
            connection.execute("DROP SCHEMA IF EXISTS model CASCADE")
        self.others = [store]

    def teardown(self) -> None:
        for store in self.others:
            store.close()
        super().teardown()


@pytest.fixture(scope="module", autouse=True)
def _server(postgres: PostgresServer) -> None:
    AllStores.url = f"{postgres.url()}?schema=model"


TestAllStores = AllStores.TestCase
TestAllStores.settings = settings(
    max_examples=max(1, EXAMPLES // 25),
    stateful_step_count=STEPS,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # to shrink a failure would take too long
)
TestBothStores = BothStores.TestCase
TestBothStores.settings = settings(max_examples=EXAMPLES, stateful_step_count=STEPS)
