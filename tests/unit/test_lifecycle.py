"""Every transition is reachable, every other call is refused, and the events of a step are complete."""

from collections.abc import Callable
from typing import get_args

import pytest
from msgspec.structs import asdict, replace

from postroom.core.lifecycle import lifecycle
from postroom.core.lifecycle.lifecycle import ENDED, NANOS_PER_S, TRANSITIONS, WAITING, Transition
from postroom.errors import Rejected, StaleLease, WrongState
from postroom.message import Envelope, Event, Moment, Record, State, Step

TOKEN = 30
LATER = Moment(number=100, steady_ns=50 * NANOS_PER_S, wall_us=9_000_000)
STATES: tuple[State, ...] = get_args(State)
UNCHANGING = ("seq", "message_id", "queue", "priority", "max_retries", "durability", "created_us", "sender")


def record_in(state: State, **facts: object) -> Record:
    record = Record(
        seq=1,
        message_id="m",
        queue="q",
        state=state,
        priority=2,
        lane=2,
        place=1,
        attempt=1,
        retries=0,
        crashes=0,
        max_retries=3,
        lease=TOKEN,
        worker_id="w",
        lease_ns=10 * NANOS_PER_S,
        lease_until=55 * NANOS_PER_S if state == "PROCESSING" else 0,
        due=45 * NANOS_PER_S if state in ("SCHEDULED", "RETRYING") else 0,
        ready_at=NANOS_PER_S,
        expires=0,
        durability="os",
        created_us=1_000_000,
        claimed_us=4_000_000,
        heartbeat_us=4_000_000,
        ended_us=8_000_000 if state in ENDED else 0,
    )
    return replace(record, **facts)


Verb = Callable[[Record], Step | None]

VERBS: dict[str, Verb] = {
    "wake": lambda record: lifecycle.wake(record, LATER),
    "defer": lambda record: lifecycle.defer(
        record, LATER, NANOS_PER_S, "busy", TOKEN if record.state == "PROCESSING" else 0
    ),
    "lease": lambda record: lifecycle.lease(record, LATER, "w", NANOS_PER_S),
    "start": lambda record: lifecycle.start(record, LATER, TOKEN, LATER.wall_us),
    "renew": lambda record: lifecycle.renew(record, LATER, TOKEN),
    "complete": lambda record: lifecycle.complete(record, LATER, TOKEN, b"1"),
    "release": lambda record: lifecycle.release(record, LATER, TOKEN),
    "fail": lambda record: lifecycle.fail(record, LATER, TOKEN, "broken"),
    "lapse": lambda record: lifecycle.lapse(record, LATER),
    "hand_over": lambda record: lifecycle.hand_over(record, LATER, "d"),
    "settle": lambda record: lifecycle.settle(record, LATER),
    "cancel": lambda record: lifecycle.cancel(record, LATER),
    "expire": lambda record: lifecycle.expire(record, LATER),
    "quarantine": lambda record: lifecycle.quarantine(record, LATER, "bad"),
    "replay": lambda record: lifecycle.replay(record, LATER),
}
BY_THE_WAY = {"retry", "bury"}  # FAILED exists only inside `fail` and `lapse`
REPEATED: dict[str, tuple[State, ...]] = {
    "complete": ("COMPLETED", "EXECUTING", "DONE"),
    "fail": ("QUEUED", "RETRYING", "DEAD_LETTER"),
}
ALLOWED = {(t.verb, t.source) for t in TRANSITIONS}
FROM_A_STATE = [t for t in TRANSITIONS if t.verb in VERBS]
PAIRS = [(verb, state) for verb in VERBS for state in STATES]


def accepted(delay_ns: int = 0) -> Step:
    envelope = Envelope(queue="q", payload=b"12", type="t", parent_message_id="p", delay_ns=delay_ns)
    return lifecycle.accept(envelope, LATER, "m")


def check_whole(step: Step, before: Record | None = None) -> None:
    """The events have consecutive numbers, the last one has the record's state, and nothing else changed."""
    assert [event.seq for event in step.events] == list(range(100, 100 + len(step.events)))
    assert step.events[-1].state == step.record.state
    for event in step.events:
        assert (event.ts_us, event.queue, event.message_id) == (LATER.wall_us, "q", "m")
    assert bool(step.record.ended_us) == (step.record.state in ENDED)
    assert bool(step.record.lease_until) == (step.record.state == "PROCESSING")
    assert bool(step.record.due) == (step.record.state in ("SCHEDULED", "RETRYING"))
    if before is not None:
        for name in UNCHANGING:
            assert asdict(step.record)[name] == asdict(before)[name]


# ---- the table -------------------------------------------------------------------------------------


@pytest.mark.statement("states-table")
def test_the_table_names_every_verb_and_every_state() -> None:
    assert {t.verb for t in TRANSITIONS} == VERBS.keys() | BY_THE_WAY | {"accept", "promote"}
    assert {t.target for t in TRANSITIONS} == set(STATES)
    assert {t.source for t in TRANSITIONS if t.source} == set(STATES) - {"DONE"}
    assert set(WAITING) | set(ENDED) | {"PROCESSING", "FAILED"} == set(STATES)
    assert len(set(TRANSITIONS)) == len(TRANSITIONS)


@pytest.mark.parametrize("arrow", FROM_A_STATE, ids=lambda arrow: f"{arrow.verb}-{arrow.source}")
def test_every_transition_is_reachable(arrow: Transition) -> None:
    assert arrow.source is not None
    before = record_in(arrow.source)
    step = VERBS[arrow.verb](before)
    assert step is not None
    check_whole(step, before)
    assert (step.events[0].kind, step.events[0].state) == (arrow.kind, arrow.target)


@pytest.mark.statement("states-table")
@pytest.mark.parametrize(("verb", "state"), PAIRS, ids=str)
def test_every_other_call_is_refused_or_a_repeat(verb: str, state: State) -> None:
    if (verb, state) in ALLOWED:
        return
    before = record_in(state)
    if state in REPEATED.get(verb, ()):
        assert VERBS[verb](before) is None
    else:
        with pytest.raises(Rejected) as refused:
            VERBS[verb](before)
        assert isinstance(refused.value, WrongState | StaleLease)
        assert "m" in str(refused.value)
    assert before == record_in(state)


def test_a_release_can_be_repeated_but_not_as_a_failure() -> None:
    released = lifecycle.release(record_in("PROCESSING"), LATER, TOKEN)
    assert released is not None
    assert lifecycle.release(released.record, LATER, TOKEN) is None
    with pytest.raises(StaleLease):
        lifecycle.fail(released.record, LATER, TOKEN, "no")


def test_a_failure_cannot_be_repeated_as_a_release() -> None:
    failed = lifecycle.fail(record_in("PROCESSING"), LATER, TOKEN, "no")
    assert failed is not None
    assert failed.record.state == "QUEUED"
    with pytest.raises(StaleLease):
        lifecycle.release(failed.record, LATER, TOKEN)


def test_an_accepted_record_is_queued_or_scheduled() -> None:
    ready, waiting = accepted(), accepted(delay_ns=7)
    check_whole(ready)
    check_whole(waiting)
    assert [(event.kind, event.state) for event in ready.events] == [
        ("created", "QUEUED"),
        ("enqueued", "QUEUED"),
    ]
    assert [(event.kind, event.state) for event in waiting.events] == [("created", "SCHEDULED")]
    assert waiting.record.due == LATER.steady_ns + 7
    assert (ready.events[0].type, ready.events[0].parent_message_id, ready.events[0].body_bytes) == (
        "t",
        "p",
        2,
    )


@pytest.mark.parametrize("arrow", [t for t in TRANSITIONS if t.verb in BY_THE_WAY])
def test_a_failure_follows_the_transition_table(arrow: Transition) -> None:
    delay_ns = {"RETRYING": 1, "QUEUED": 0, "DEAD_LETTER": None}[arrow.target]
    before = record_in("PROCESSING")
    step = lifecycle.fail(before, LATER, TOKEN, "broken", error_type="E", delay_ns=delay_ns)
    assert step is not None
    check_whole(step, before)
    failed, then = step.events
    assert (failed.kind, failed.state, failed.error, failed.error_type) == (
        "execution_failed",
        "FAILED",
        "broken",
        "E",
    )
    assert (then.kind, then.state) == (arrow.kind, arrow.target)


def test_promotion_is_an_event_and_leaves_the_record_unchanged() -> None:
    before = record_in("QUEUED", lease=0, lease_until=0, priority=3, lane=3)
    step = lifecycle.lease(before, LATER, "w", NANOS_PER_S, lane=1)
    promoted, dequeued = step.events
    assert (promoted.kind, promoted.priority, promoted.detail) == ("promoted", 1, {"from": 3})
    assert (dequeued.kind, dequeued.priority, dequeued.seq) == ("dequeued", 3, LATER.number + 1)
    assert (step.record.priority, step.record.lane, step.record.lease) == (3, 3, LATER.number + 1)


# ---- leases ----------------------------------------------------------------------------------------

OF_A_HOLDER = ("renew", "complete", "release", "fail")


@pytest.mark.parametrize("verb", OF_A_HOLDER)
@pytest.mark.parametrize("token", [0, TOKEN - 1, TOKEN + 1])
def test_another_lease_is_refused(verb: str, token: int) -> None:
    for state in STATES:
        with pytest.raises(StaleLease):
            VERBS[verb](record_in(state, lease=token))


@pytest.mark.parametrize("verb", OF_A_HOLDER)
def test_an_expired_lease_is_refused_to_the_nanosecond(verb: str) -> None:
    assert VERBS[verb](record_in("PROCESSING", lease_until=LATER.steady_ns + 1)) is not None
    with pytest.raises(StaleLease):
        VERBS[verb](record_in("PROCESSING", lease_until=LATER.steady_ns))


@pytest.mark.parametrize("verb", ["lapse", "cancel", "quarantine"])
def test_a_revoked_lease_is_refused(verb: str) -> None:
    step = VERBS[verb](record_in("PROCESSING"))
    assert step is not None
    assert (step.record.lease, step.events[0].lease) == (0, TOKEN)
    for word in OF_A_HOLDER:
        with pytest.raises(StaleLease):
            VERBS[word](step.record)


def test_every_token_is_larger_than_the_one_before() -> None:
    first = lifecycle.lease(accepted().record, LATER, "w", NANOS_PER_S)
    released = lifecycle.release(first.record, replace(LATER, number=101), 100)
    assert released is not None
    second = lifecycle.lease(released.record, replace(LATER, number=102), "v", NANOS_PER_S)
    assert (first.record.lease, second.record.lease, second.record.attempt) == (100, 102, 2)
    assert second.record.place == first.record.place


def test_a_heartbeat_changes_only_the_end_of_the_lease() -> None:
    before = record_in("PROCESSING")
    after = lifecycle.renew(before, LATER, TOKEN).record
    assert after == replace(before, lease_until=60 * NANOS_PER_S, heartbeat_us=LATER.wall_us)


def test_the_duration_includes_heartbeats_and_ignores_clock_steps() -> None:
    plain = lifecycle.complete(record_in("PROCESSING"), LATER, TOKEN, b"1")
    beaten = lifecycle.complete(record_in("PROCESSING", heartbeat_us=6_500_000), LATER, TOKEN, b"1")
    stepped = lifecycle.complete(record_in("PROCESSING", heartbeat_us=5), LATER, TOKEN, b"1")
    took_us = [step.events[0].duration_us for step in (plain, beaten, stepped) if step]
    assert took_us == [5_000_000, 7_500_000, 5_000_000]


# ---- failures --------------------------------------------------------------------------------------


@pytest.mark.statement("dlq-after-retries")
@pytest.mark.parametrize("verb", ["fail", "lapse"])
def test_a_record_without_retries_left_is_a_dead_letter(verb: str) -> None:
    for retries in range(3):
        step = VERBS[verb](record_in("PROCESSING", retries=retries))
        assert step is not None
        assert (step.record.state, step.record.retries) == ("QUEUED", retries + 1)
    step = VERBS[verb](record_in("PROCESSING", retries=3))
    assert step is not None
    assert (step.record.state, step.record.retries) == ("DEAD_LETTER", 4)
    assert step.events[1].kind == "dead_letter"
    assert step.events[1].error == step.events[0].error


def test_a_retry_goes_to_the_end_of_the_lane_after_its_pause() -> None:
    at_once = lifecycle.fail(record_in("PROCESSING"), LATER, TOKEN, "x")
    paused = lifecycle.fail(record_in("PROCESSING"), LATER, TOKEN, "x", delay_ns=3 * NANOS_PER_S)
    assert at_once is not None
    assert paused is not None
    assert at_once.record.place == at_once.events[1].seq
    assert paused.record.due == 53 * NANOS_PER_S
    assert paused.events[1].detail == {"delay_s": 3.0}


def test_an_error_has_a_limit() -> None:
    step = lifecycle.fail(record_in("PROCESSING"), LATER, TOKEN, "x" * 10_000)
    quarantined = lifecycle.quarantine(record_in("QUEUED"), LATER, "x" * 10_000)
    assert step is not None
    for event in (step.events[0], quarantined.events[0]):
        assert len(event.error) == lifecycle.ERROR_CHARS_MAX


def test_a_replay_resets_retries_and_position() -> None:
    before = record_in("DEAD_LETTER", retries=4, attempt=4, expires=1)
    after = lifecycle.replay(before, LATER, priority=0).record
    assert (after.retries, after.attempt, after.lease, after.expires, after.lane) == (0, 4, 0, 0, 0)
    assert (after.priority, lifecycle.replay(before, LATER).record.lane) == (2, 2)
    assert after.place == LATER.number


# ---- promotion -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("priority", "age", "risen"),
    [
        (3, 0, 3), (3, 9, 3), (3, 10, 2), (3, 29, 2), (3, 30, 1), (3, 60, 0), (3, 10**6, 0),
        (1, 29, 1), (1, 30, 0), (0, 10**6, 0), (2, 20, 1), (9, 10**6, 9),
    ],
)  # fmt: skip
def test_waiting_promotes_lane_by_lane(priority: int, age: int, risen: int) -> None:
    assert lifecycle.effective_lane(priority, age, (30, 20, 10)) == risen
    assert lifecycle.effective_lane(priority, age, ()) == priority


# ---- the history -----------------------------------------------------------------------------------


class Life:
    """One message as a store keeps it: the record and its trail."""

    def __init__(self, delay_ns: int = 0) -> None:
        step = accepted(delay_ns)
        self.record, self.events = step.record, list(step.events)
        self.trail: list[Event] = []

    @property
    def now(self) -> Moment:
        return replace(LATER, number=self.events[-1].seq + 1, wall_us=LATER.wall_us + len(self.events))

    def take(self, step: Step | None) -> None:
        assert step is not None
        self.trail += lifecycle.trail(self.record, step)
        self.record = step.record
        self.events += step.events

    def lease(self) -> None:
        self.take(lifecycle.lease(self.record, self.now, "w", NANOS_PER_S))

    def history(self) -> list[tuple[object, ...]]:
        return [_gist(event) for event in lifecycle.history(self.record, self.events[0], self.trail)]

    def happened(self) -> list[tuple[object, ...]]:
        return [_gist(event) for event in self.events if event.kind != "heartbeat"]


def _gist(event: Event) -> tuple[object, ...]:
    return (event.seq, event.ts_us, event.kind, event.state, event.attempt, event.lease, event.error)


def test_a_record_without_failures_has_no_trail() -> None:
    life = Life()
    assert life.history() == life.happened()
    life.lease()
    assert life.history() == life.happened()
    life.take(lifecycle.renew(life.record, life.now, life.record.lease))
    life.take(lifecycle.complete(life.record, life.now, life.record.lease, b"1"))
    assert life.trail == []
    assert life.history() == life.happened()


def test_the_history_includes_failures_and_releases() -> None:
    life = Life(delay_ns=1)
    life.take(lifecycle.wake(life.record, life.now))
    life.take(lifecycle.lease(life.record, life.now, "w", NANOS_PER_S, lane=1))
    life.take(lifecycle.release(life.record, life.now, life.record.lease))
    assert life.history() == life.happened()
    for _ in range(2):
        life.lease()
        life.take(lifecycle.fail(life.record, life.now, life.record.lease, "no"))
        assert life.history() == life.happened()
    for _ in range(2):
        life.lease()
        life.take(lifecycle.lapse(life.record, life.now))
        assert life.history() == life.happened()
    assert life.record.state == "DEAD_LETTER"
    life.take(lifecycle.replay(life.record, life.now))
    life.lease()
    life.take(lifecycle.complete(life.record, life.now, life.record.lease, b"1"))
    life.take(lifecycle.hand_over(life.record, life.now, "d"))
    life.take(lifecycle.settle(life.record, life.now))
    assert life.history() == life.happened()


def test_the_history_includes_an_interrupted_delivery() -> None:
    life = Life()
    life.lease()
    life.take(lifecycle.cancel(life.record, life.now))
    life.take(lifecycle.replay(life.record, life.now))
    life.lease()
    life.take(lifecycle.quarantine(life.record, life.now, "it kills"))
    assert life.history() == life.happened()


def test_a_duplicate_and_a_purge_are_events_that_change_nothing() -> None:
    record = record_in("QUEUED")
    assert lifecycle.duplicate(record, LATER, "k").detail == {"key": "k"}
    assert lifecycle.duplicate(record, LATER, "").detail == {}
    assert lifecycle.purged(LATER, 3).detail == {"records": 3}
