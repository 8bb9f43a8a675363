"""SQLite has its own insert, claim, lease and complete. Each does what the verb of `Transaction` does.

Every case runs twice on stores with the same history: once with the native verb, and once with the general
one. Answers, records, messages, events and counters must be equal.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from postroom.core.lifecycle import lifecycle
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.errors import PostroomError
from postroom.message import Durability, Envelope, Event, Record, State, Step
from postroom.stores.base import LANES, ByIds, Lanes, Limits, Listing, Records
from postroom.stores.sqlite import store as sqlite
from postroom.stores.sqlite.ledger import SqliteLedger
from postroom.stores.sqlite.parts import SqliteLanes, SqliteRecords
from postroom.stores.sqlite.store import SqliteStore
from postroom.stores.sqlite.transaction import SqliteTransaction
from postroom.stores.transaction import Claim, Decide, Transaction
from postroom.testing import ManualClock, check_consistency

LEASE_NS = 100 * NANOS_PER_S
PROMOTE = (5 * NANOS_PER_S, 15 * NANOS_PER_S, 30 * NANOS_PER_S)
Work = Callable[[Transaction], Any]
Seen = tuple[Any, list[Record], list[Any], list[Event], Any, Any]


class GeneralRecords(SqliteRecords):
    payloads = Records.payloads
    heads = Records.heads


class GeneralLanes(SqliteLanes):
    active = Lanes.active
    oldest = Lanes.oldest
    total = Lanes.total
    depths = Lanes.depths
    count_active = Lanes.count_active
    active_depths = Lanes.active_depths
    has_overdue = Lanes.has_overdue


class General(SqliteTransaction):
    """SQLite without its native verbs."""

    insert = Transaction.insert
    claim = Transaction.claim
    complete = Transaction.complete
    lease = Transaction.lease
    note = Transaction.note

    def __init__(self, ledger: SqliteLedger) -> None:
        super().__init__(ledger)
        self.records, self.lanes = GeneralRecords(ledger), GeneralLanes(ledger)


def run(
    path: Path, kind: type[SqliteTransaction], steps: list[Work | float], patch: pytest.MonkeyPatch
) -> Seen:
    """Answers of the work, and everything that the store holds afterwards. A number lets seconds pass."""
    patch.setattr(sqlite, "SqliteTransaction", kind)
    clock = ManualClock()
    store = SqliteStore(path, clock=clock, store_id="s", reserve_bytes=0)
    answers: list[Any] = []
    for step in steps:
        if isinstance(step, float):
            clock.advance(step)
            continue
        try:
            answers.append(store.write(step))
        except PostroomError as error:
            answers.append((type(error), str(error)))
    records = store.find(Listing(limit=1_000))
    stored = [store.load(record.message_id) for record in records]
    seen = answers, records, stored, store.events(limit=10_000), store.count(), store.depths()
    check_consistency(store)
    store.close()
    return seen


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Seen]:
    def compare(*steps: Work | float) -> Seen:
        native = run(tmp_path / "native.db", SqliteTransaction, list(steps), monkeypatch)
        general = run(tmp_path / "general.db", General, list(steps), monkeypatch)
        assert native == general
        return native

    return compare


def new(payload: bytes = b"{}", **facts: Any) -> Envelope:
    return Envelope(**{"queue": "q", "payload": payload, **facts})


def inserting(*envelopes: Envelope) -> Work:
    return lambda transaction: transaction.insert(envelopes)


def claiming(limit: int = 10, **facts: Any) -> Work:
    terms = Claim(**{"queue": "q", "worker_id": "w", "limit": limit, "lease_ns": LEASE_NS, **facts})
    return lambda transaction: transaction.claim(terms)


def completing(*ids: str, result: bytes = b"1", shift: int = 0) -> Work:
    """Complete leased records under their tokens, or under others."""

    def work(transaction: Transaction) -> None:
        leases = {
            record.message_id: record.lease for record in transaction.records.find(Listing(limit=1_000))
        }
        transaction.complete({each: (leases.get(each, 1) + shift, result) for each in ids})

    return work


def deciding(message_id: str, decide: Decide) -> Work:
    return lambda transaction: transaction.apply(ByIds((message_id,)), decide)


def token_of(record: Record) -> int:
    return abs(record.lease)


# ---- insert ------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "typed": {"type": "t", "parent_message_id": "p"},
    "delayed": {"delay_ns": NANOS_PER_S},
    "expiring": {"ttl_ns": NANOS_PER_S},
    "few retries": {"max_retries": 0},
    "named": {"message_id": "x"},
    "keyed": {"key": "k"},
    "sent": {"sender": "ada"},
    "synced": {"durability": "fsync"},
    **{f"priority {priority}": {"priority": priority} for priority in range(LANES)},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_insert_of_one(both: Callable[..., Seen], option: str) -> None:
    both(inserting(new(**OPTIONS[option])))


@pytest.mark.parametrize("pair", list(itertools.permutations(OPTIONS, 2)), ids=" then ".join)
def test_insert_of_two_kinds(both: Callable[..., Seen], pair: tuple[str, str]) -> None:
    first, second = (new(**OPTIONS[option]) for option in pair)
    one_commit = inserting(first, replace(first, payload=b"2"), second)
    both(one_commit, inserting(second), inserting(first))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_insert_into_a_queue_with_little_room(both: Callable[..., Seen], depth: int) -> None:
    limits = Limits(max_depth=depth, max_payload_bytes=5)
    both(
        lambda transaction: transaction.set_limits("q", limits),
        inserting(new(), new(b"123456")),
        inserting(new(), new(key="k")),
        inserting(new(key="k"), new(delay_ns=1)),
        inserting(new(queue="r"), new()),
        inserting(new()),
    )


# ---- claim -------------------------------------------------------------------------------------------

STATES: dict[State, list[Work | float]] = {
    "QUEUED": [],
    "SCHEDULED": [deciding("s-1", lambda record, now: lifecycle.defer(record, now, NANOS_PER_S, "busy"))],
    "PROCESSING": [claiming(1)],
    "RETRYING": [
        claiming(1),
        deciding(
            "s-1",
            lambda record, now: lifecycle.fail(record, now, token_of(record), "no", delay_ns=NANOS_PER_S),
        ),
    ],
    "COMPLETED": [claiming(1), completing("s-1")],
    "EXECUTING": [
        claiming(1),
        completing("s-1"),
        deciding("s-1", lambda record, now: lifecycle.hand_over(record, now, "d")),
    ],
    "DONE": [
        claiming(1),
        completing("s-1"),
        deciding("s-1", lambda record, now: lifecycle.hand_over(record, now, "d")),
        deciding("s-1", lifecycle.settle),
    ],
    "DEAD_LETTER": [
        claiming(1),
        deciding(
            "s-1", lambda record, now: lifecycle.fail(record, now, token_of(record), "no", delay_ns=None)
        ),
    ],
    "CANCELLED": [deciding("s-1", lifecycle.cancel)],
    "EXPIRED": [deciding("s-1", lifecycle.expire)],
    "QUARANTINED": [deciding("s-1", lambda record, now: lifecycle.quarantine(record, now, "bad"))],
}
"""How record s-1 gets into each state."""


@pytest.mark.parametrize("limit", [1, 10])
@pytest.mark.parametrize("state", STATES)
def test_claim_next_to_a_record_in_each_state(both: Callable[..., Seen], state: State, limit: int) -> None:
    seen = both(inserting(new(), new(b"2"), new(b"3")), *STATES[state], claiming(limit), 2.0, claiming(limit))
    assert state in {event.state for event in seen[3]}


@pytest.mark.parametrize("age_s", [0.0, 6.0, 20.0, 40.0, 100.0])
@pytest.mark.parametrize("limit", [1, 3, 10])
@pytest.mark.parametrize(
    "promote_after_ns", [(), PROMOTE, PROMOTE[:1]], ids=["strict", "all lanes", "lane 1"]
)
@pytest.mark.parametrize("lanes", [(2,), (0, 1, 2, 3), (3, 2)], ids=str)
def test_claim_by_lanes(
    both: Callable[..., Seen],
    age_s: float,
    limit: int,
    promote_after_ns: tuple[int, ...],
    lanes: tuple[int, ...],
) -> None:
    some = [new(priority=priority, queue=queue) for priority in (3, 1, 2, 0, 2, 3) for queue in ("q", "r")]
    take = claiming(limit, lanes=lanes, promote_after_ns=promote_after_ns)
    both(inserting(*some), age_s, inserting(*some), take, take, take)


def test_claim_of_an_unknown_queue_and_of_an_empty_one(both: Callable[..., Seen]) -> None:
    both(claiming(queue="unknown"), inserting(new()), claiming(), claiming())


def test_claim_handles_ended_leases_delays_and_expired_records(both: Callable[..., Seen]) -> None:
    some = [
        new(),
        new(queue="r"),
        new(delay_ns=50 * NANOS_PER_S),
        new(ttl_ns=10 * NANOS_PER_S),
        new(max_retries=0),
    ]
    both(
        inserting(*some),
        claiming(1),
        claiming(1, queue="r"),
        20.0,
        claiming(1),
        40.0,
        claiming(1),
        60.0,
        claiming(),
        claiming(queue="r"),
    )


def test_claim_of_released_and_failed_records(both: Callable[..., Seen]) -> None:
    both(
        inserting(*(new() for _ in range(4))),
        claiming(2),
        deciding("s-1", lambda record, now: lifecycle.release(record, now, token_of(record))),
        deciding("s-3", lambda record, now: lifecycle.fail(record, now, token_of(record), "no", lane=3)),
        claiming(lanes=(0, 1, 2, 3)),
    )


# ---- complete ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("state", STATES)
def test_complete_in_each_state(both: Callable[..., Seen], state: State, shift: int) -> None:
    both(inserting(new(), new(b"2")), *STATES[state], completing("s-1", shift=shift))


@pytest.mark.parametrize("durability", ["os", "group", "fsync"])
def test_complete_of_several(both: Callable[..., Seen], durability: Durability) -> None:
    some = [new(durability=durability), new(), new(queue="r"), new(message_id="named"), new(priority=1)]
    both(
        inserting(*some),
        claiming(lanes=(0, 1, 2, 3)),
        claiming(queue="r", worker_id="v"),
        completing("s-1", "s-5", "s-3"),
        completing("named", "s-9"),
        completing("s-1", "s-5"),
    )


def test_complete_all_or_none(both: Callable[..., Seen]) -> None:
    both(
        inserting(new(), new(), new()),
        claiming(2),
        completing("s-1", "nobody"),
        completing("s-1", "s-5"),
        completing(),
        completing("s-3", "s-1"),
    )


def test_complete_after_a_heartbeat_and_after_the_lease(both: Callable[..., Seen]) -> None:
    renew: Decide = lambda record, now: lifecycle.renew(record, now, token_of(record))  # noqa: E731
    both(
        inserting(new(), new()),
        claiming(),
        90.0,
        deciding("s-1", renew),
        50.0,
        completing("s-1"),
        completing("s-3"),
        completing("s-1", result=b"other"),
    )


def test_different_results_are_each_kept(both: Callable[..., Seen]) -> None:
    def complete(transaction: Transaction) -> list[Step] | None:
        claimed = transaction.claim(Claim("q", "w", 5, LEASE_NS))
        transaction.complete({each.message_id: (each.lease, each.payload) for each in claimed})
        return None

    seen = both(inserting(*(new(b"%d" % number) for number in range(5))), complete)
    assert [stored.result for stored in seen[2]] == [b"0", b"1", b"2", b"3", b"4"]


def test_starts_are_told_before_the_completions_of_their_commit(both: Callable[..., Seen]) -> None:
    def complete(transaction: Transaction) -> None:
        claimed = transaction.claim(Claim("q", "w", 3, LEASE_NS))
        starts = {each.message_id: 7 + index for index, each in enumerate(claimed[1:])}
        transaction.complete({each.message_id: (each.lease, b"1") for each in claimed}, started=starts)

    seen = both(inserting(new(), new(), new()), complete)
    told = [(event.kind, event.worker_id, event.ts_us) for event in seen[3] if event.worker_id]
    assert [kind for kind, *_ in told] == [
        *["dequeued"] * 3,
        *["execution_started"] * 2,
        *["execution_completed"] * 3,
    ]
    assert told[3:5] == [("execution_started", "w", 7), ("execution_started", "w", 8)]


def test_several_verbs_in_one_commit(both: Callable[..., Seen]) -> None:
    def work(transaction: Transaction) -> list[Any]:
        answers: list[Any] = [transaction.insert([new(b"%d" % number)]) for number in range(3)]
        transaction.alert("Test", "a number between two messages")
        answers.append(transaction.insert([new(), new(queue="fresh")]))
        [first, *rest] = transaction.claim(Claim("q", "w", 4, LEASE_NS))
        transaction.complete({each.message_id: (each.lease, b"1") for each in rest})
        answers.append(transaction.insert([new(message_id="mine")]))
        transaction.complete({first.message_id: (first.lease, b"2")})
        return [*answers, first, rest]

    both(inserting(new()), work, work)


# ---- messages of organizations -----------------------------------------------------------------------

ORGANIZATIONS = ("org:b", "org:a", "org:c")


def message(queue: str, **facts: Any) -> Envelope:
    return new(queue=queue, facts={"goal_id": "g", "task_id": "t"}, durability="group", **facts)


def leasing(*lanes: int, limit: int = 10, promoted_to: int | None = None) -> Work:
    """Lease the heads of lanes of all organizations."""

    def work(transaction: Transaction) -> list[Record]:
        heads = [
            (head, lane if promoted_to is None else min(promoted_to, lane))
            for lane in lanes
            for queue in ORGANIZATIONS
            for head in transaction.pull(queue, lane, limit)
        ]
        return transaction.lease(heads, "w", LEASE_NS)

    return work


def looking(transaction: Transaction) -> Any:
    """What a claim of an engine asks for."""
    active = [sorted(transaction.lanes.active(lane, "", 10)) for lane in range(LANES)]
    oldest = [transaction.lanes.oldest(lane) for lane in range(LANES)]  # of several, any one
    ids = [record.message_id for record in transaction.records.find(Listing(limit=100))]
    heads = [*transaction.records.heads([*ids[::-1], "nobody"]), *transaction.records.heads(ids)]
    ages = [None if record is None else record.ready_at for record in oldest]
    return active, ages, heads, transaction.lanes.total()


def everything(transaction: Transaction) -> None:
    """Complete every leased record."""
    leased = transaction.records.find(Listing(state="PROCESSING", limit=1_000))
    transaction.complete({record.message_id: (record.lease, b"1") for record in leased})


@pytest.mark.parametrize("promoted_to", [None, 0, 1])
@pytest.mark.parametrize("limit", [1, 10])
def test_messages_of_organizations(both: Callable[..., Seen], limit: int, promoted_to: int | None) -> None:
    batch = [message(queue, priority=lane) for queue in ORGANIZATIONS for lane in (1, 1, 3)]
    answers = both(
        inserting(*batch), looking, 1.0, inserting(message("org:a", delay_ns=NANOS_PER_S)),
        inserting(new(queue="q")), 2.0, lambda transaction: transaction.put_back(10), looking,
        leasing(1, 2, limit=limit), looking, 1.0, everything,
        leasing(3, limit=limit, promoted_to=promoted_to), looking, 200.0,
        lambda transaction: transaction.put_back(10), looking, leasing(1, 2, 3), everything, looking,
    )[0]  # fmt: skip
    assert answers[0][0].message_id[14] == "7"


def test_insert_and_lease_of_messages_in_one_commit(both: Callable[..., Seen]) -> None:
    def work(transaction: Transaction) -> Any:
        transaction.insert([message("org:a"), message("org:b")])
        leasing(2)(transaction)
        transaction.insert([message("org:a")])
        everything(transaction)
        return looking(transaction)

    both(work, work)


def test_id_of_another_store_or_time_is_unknown(both: Callable[..., Seen]) -> None:
    [[accepted]] = both(inserting(message("org:a")))[0]
    other_time = accepted.message_id.replace(accepted.message_id[:8], "00000000", 1)
    other_store = accepted.message_id[:-1] + ("0" if accepted.message_id[-1] != "0" else "1")
    ids = (accepted.message_id, accepted.message_id.upper(), other_time, other_store)

    def known(transaction: Transaction) -> list[bool]:
        return [transaction.records.get(each) is not None for each in ids]

    found = both(inserting(message("org:a")), known)[0][-1]
    assert found == [True, False, False, False]
