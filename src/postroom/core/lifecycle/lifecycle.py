"""The life of a record: every transition, in one file.

Rule 1: nothing else changes a record. A store only commits the `Step` that a function here returns.
Rule 2: nothing here reads a clock or counts events: both come in as a `Moment`.
Rule 3: a call about a leased record carries the token of the lease. A stale token is refused, and nothing
        changes. The call that ended a lease may be repeated: it then changes nothing and is not an error.
Rule 4: a function raises before it decides, or not at all.
"""

from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from postroom.core.lifecycle import poison
from postroom.errors import StaleLease, WrongState
from postroom.message import Envelope, Event, EventKind, Moment, Record, State, Step, org_of

NANOS_PER_S: Final = 1_000_000_000
ERROR_CHARS_MAX: Final = 4_000
LAPSED: Final = "the lease ran out"


class Transition(NamedTuple):
    """One transition of the state diagram."""

    verb: str
    source: State | None
    target: State
    kind: EventKind


def _from(sources: tuple[State, ...], verb: str, target: State, kind: EventKind) -> tuple[Transition, ...]:
    return tuple(Transition(verb, source, target, kind) for source in sources)


WAITING: Final[tuple[State, ...]] = ("QUEUED", "SCHEDULED", "RETRYING")
"""States of accepted records that no worker holds."""
ENDED: Final[tuple[State, ...]] = (
    "COMPLETED",
    "EXECUTING",
    "DONE",
    "DEAD_LETTER",
    "CANCELLED",
    "EXPIRED",
    "QUARANTINED",
)
"""States of records that are not delivered again, unless a person replays them."""

TRANSITIONS: Final = (
    Transition("accept", None, "QUEUED", "enqueued"),
    Transition("accept", None, "SCHEDULED", "created"),
    *_from(("SCHEDULED", "RETRYING"), "wake", "QUEUED", "enqueued"),
    Transition("promote", "QUEUED", "QUEUED", "promoted"),
    Transition("lease", "QUEUED", "PROCESSING", "dequeued"),
    Transition("start", "PROCESSING", "PROCESSING", "execution_started"),
    Transition("renew", "PROCESSING", "PROCESSING", "heartbeat"),
    Transition("complete", "PROCESSING", "COMPLETED", "execution_completed"),
    Transition("release", "PROCESSING", "QUEUED", "released"),
    *_from(("QUEUED", "PROCESSING"), "defer", "SCHEDULED", "deferred"),
    Transition("fail", "PROCESSING", "FAILED", "execution_failed"),
    Transition("lapse", "PROCESSING", "FAILED", "lease_lapsed"),
    Transition("retry", "FAILED", "RETRYING", "retry_scheduled"),
    Transition("retry", "FAILED", "QUEUED", "enqueued"),
    Transition("bury", "FAILED", "DEAD_LETTER", "dead_letter"),
    Transition("hand_over", "COMPLETED", "EXECUTING", "execution_started"),
    Transition("settle", "EXECUTING", "DONE", "delivered"),
    *_from((*WAITING, "PROCESSING"), "cancel", "CANCELLED", "cancelled"),
    *_from(WAITING, "expire", "EXPIRED", "expired"),
    *_from((*WAITING, "PROCESSING", "DEAD_LETTER"), "quarantine", "QUARANTINED", "quarantined"),
    *_from(("DEAD_LETTER", "QUARANTINED", "CANCELLED", "EXPIRED"), "replay", "QUEUED", "replayed"),
)

_KINDS: Final = {(t.verb, t.source, t.target): t.kind for t in TRANSITIONS}


def _kind_of(verb: str, record: Record, target: State) -> EventKind:
    """The kind of event of a transition. Raises `WrongState` when the table has no such transition."""
    kind = _KINDS.get((verb, record.state, target))
    if kind is None:
        raise _wrong_state(record, "retry" if verb == "replay" else verb)
    return kind


def _wrong_state(record: Record, verb: str) -> WrongState:
    if not org_of(record.queue):
        return WrongState(record.message_id, verb, record.state)
    text = f"cannot {verb} message {record.message_id!r}: it is {record.state}"
    return WrongState(record.message_id, verb, record.state, text)


def stale(record: Record, token: int) -> StaleLease:
    """The error for a call under a lease that is over."""
    if not org_of(record.queue):
        return StaleLease(record.message_id, token)
    text = f"lease {token} of message {record.message_id!r} is no longer valid: stop working on it"
    return StaleLease(record.message_id, token, text)


def _event(kind: EventKind, record: Record, moment: Moment, offset: int = 0, **facts: Any) -> Event:
    return Event(
        moment.number + offset,
        moment.wall_us,
        kind,
        record.queue,
        record.message_id,
        record.state,
        record.attempt,
        record.lane,
        **facts,
    )


def _holds(record: Record, moment: Moment, token: int, ended_in: tuple[State, ...] = ()) -> bool:
    """Whether the lease is alive; False when the same call ended it before, in one of the states `ended_in`.

    An expired lease counts as ended even before a claim or sweep puts the record back. Otherwise the answer
    to a late call would depend on when the next claim or sweep runs.
    """
    if record.lease != token or not token:
        raise stale(record, token)
    if record.state == "PROCESSING":
        if record.lease_until <= moment.steady_ns:
            raise stale(record, token)
        return True
    if record.state not in ended_in:
        raise stale(record, token)
    return False


# ---- acceptance ------------------------------------------------------------------------------------


def accept(envelope: Envelope, moment: Moment, message_id: str) -> Step:
    """A new record, ready at once or after its delay."""
    delayed = envelope.delay_ns > 0
    now = moment.steady_ns
    number, wall_us = moment.number, moment.wall_us
    # By position, here and below: keywords or `replace` would take three times as long for every message.
    record = Record(
        number, message_id, envelope.queue, "SCHEDULED" if delayed else "QUEUED", envelope.priority,
        envelope.priority, number, 0, 0, 0, envelope.max_retries, 0, "", 0, 0,
        now + envelope.delay_ns if delayed else 0, now,
        now + envelope.ttl_ns if envelope.ttl_ns else 0, envelope.durability, wall_us, 0, 0, 0,
        envelope.sender,
    )  # fmt: skip
    first = created(envelope, message_id, number, wall_us)
    if delayed:
        return Step(record, (first,))
    enqueued = Event(
        number + 1, wall_us, "enqueued", envelope.queue, message_id, "QUEUED", 0, envelope.priority
    )  # fmt: skip
    return Step(record, (first, enqueued))


def created(envelope: Envelope, message_id: str, number: int, wall_us: int) -> Event:
    """The first event of every history."""
    return Event(
        number, wall_us, "created", envelope.queue, message_id,
        "SCHEDULED" if envelope.delay_ns else "QUEUED", 0, envelope.priority, 0, "", 0, "", "",
        envelope.type, envelope.parent_message_id, len(envelope.payload),
        {**envelope.facts, "delay_s": envelope.delay_ns / NANOS_PER_S}
        if envelope.delay_ns
        else envelope.facts,
    )  # fmt: skip


def duplicate(record: Record, moment: Moment, key: str) -> Event:
    """A second enqueue of a known message, which is dropped."""
    return _event("duplicate", record, moment, detail={"key": key} if key else {})


def occurrence(moment: Moment, kind: EventKind, queue: str = "", **facts: Any) -> Event:
    """An event that concerns no message."""
    return Event(moment.number, moment.wall_us, kind, queue, "", "DONE", **facts)


def purged(moment: Moment, records: int) -> Event:
    """Ended records were purged. The event concerns many records, so it names none."""
    return Event(moment.number, moment.wall_us, "deleted", "", "", "DONE", detail={"records": records})


def wake(record: Record, moment: Moment) -> Step:
    """The delay is over: the record goes to the end of its lane."""
    kind = _kind_of("wake", record, "QUEUED")
    after = replace(record, state="QUEUED", place=moment.number, due=0, ready_at=moment.steady_ns)
    return Step(after, (_event(kind, after, moment),))


# ---- delivery --------------------------------------------------------------------------------------


def effective_lane(lane: int, age_ns: int, promote_after_ns: tuple[int, ...]) -> int:
    """The lane that waiting has promoted a record to. Lane p + 1 takes `promote_after_ns[p]` to become p."""
    while 0 < lane <= len(promote_after_ns) and age_ns >= promote_after_ns[lane - 1]:
        lane -= 1
        age_ns -= promote_after_ns[lane]
    return lane


def claim_order(record: Record, now_ns: int, promote_after_ns: tuple[int, ...]) -> tuple[int, bool, int]:
    """The key by which claims sort: the effective lane, then the position.

    Records of lane 0 go before records promoted to it, so that urgent work does not wait for a backlog.
    """
    lane = effective_lane(record.lane, now_ns - record.ready_at, promote_after_ns)
    return lane, lane == 0 and record.lane > 0, record.place


def lease(record: Record, moment: Moment, worker_id: str, lease_ns: int, lane: int | None = None) -> Step:
    """Lease the record to a worker. The number of the event is the token, so tokens only grow.

    `lane` is the effective lane. A promotion is an event of its own and does not change the record.
    """
    if record.state != "QUEUED":
        raise _wrong_state(record, "lease")
    promoted = () if lane is None or lane == record.lane else (_promoted(record, moment, lane),)
    number, now, wall_us = moment.number + len(promoted), moment.steady_ns, moment.wall_us
    attempt = record.attempt + 1
    after = Record(
        record.seq, record.message_id, record.queue, "PROCESSING", record.priority, record.lane, record.place,
        attempt, record.retries, record.crashes, record.max_retries, number, worker_id, lease_ns,
        now + lease_ns, 0, record.ready_at, record.expires, record.durability, record.created_us, wall_us,
        wall_us, 0, record.sender,
    )  # fmt: skip
    event = Event(
        number, wall_us, "dequeued", record.queue, record.message_id, "PROCESSING",
        attempt, record.lane, number, worker_id, (now - record.ready_at) // 1000,
    )  # fmt: skip
    return Step(after, (*promoted, event))


def _promoted(record: Record, moment: Moment, lane: int) -> Event:
    kind = _kind_of("promote", record, "QUEUED")
    event = _event(kind, record, moment, detail={"from": record.lane})
    return replace(event, priority=lane)


def renew(record: Record, moment: Moment, token: int) -> Step:
    """A heartbeat: the lease runs its whole length from now."""
    _holds(record, moment, token)
    after = replace(
        record, lease_until=moment.steady_ns + record.lease_ns, heartbeat_us=moment.wall_us
    )  # fmt: skip
    kind = _kind_of("renew", record, "PROCESSING")
    return Step(after, (_event(kind, after, moment, lease=token, worker_id=record.worker_id),))


def complete(
    record: Record, moment: Moment, token: int, result: bytes, detail: dict[str, Any] | None = None
) -> Step | None:
    """Complete the record with its result. `detail` becomes that of the event."""
    if not _holds(record, moment, token, ("COMPLETED", "EXECUTING", "DONE")):
        return None
    wall_us = moment.wall_us
    after = Record(
        record.seq, record.message_id, record.queue, "COMPLETED", record.priority, record.lane, moment.number,
        record.attempt, record.retries, record.crashes, record.max_retries, token, record.worker_id,
        record.lease_ns, 0, 0, record.ready_at, record.expires, record.durability, record.created_us,
        record.claimed_us, record.heartbeat_us, wall_us, record.sender,
    )  # fmt: skip
    event = Event(
        moment.number, wall_us, "execution_completed", record.queue, record.message_id, "COMPLETED",
        record.attempt, record.lane, token, record.worker_id, _worked_us(record, moment),
    )  # fmt: skip
    if detail:
        event = replace(event, detail=detail)
    return Step(after, (event,), result)


def start(record: Record, moment: Moment, token: int, ts_us: int) -> Step:
    """The handler began at a time, under a lease that is alive. The record does not change."""
    _holds(record, moment, token)
    kind = _kind_of("start", record, "PROCESSING")
    event = _event(kind, record, moment, lease=token, worker_id=record.worker_id)
    return Step(record, (replace(event, ts_us=ts_us),))


def release(record: Record, moment: Moment, token: int) -> Step | None:
    """Return the record unworked. It keeps its position and age, and no retry is counted."""
    if record.lease == -token and record.state == "QUEUED" and token > 0:
        return None
    _holds(record, moment, token)
    kind = _kind_of("release", record, "QUEUED")
    # The sign marks a release, as opposed to a failure. `ready_at` stays, because lanes are in its order.
    after = replace(record, state="QUEUED", lease=-token, lease_until=0)
    return Step(after, (_event(kind, after, moment, lease=token, worker_id=record.worker_id),))


def defer(record: Record, moment: Moment, delay_ns: int, reason: str, token: int = 0) -> Step:
    """Delay a waiting record, or a leased one that its holder cannot work on now. No retry is counted."""
    kind = _kind_of("defer", record, "SCHEDULED")
    facts: dict[str, Any] = {}
    if token or record.state == "PROCESSING":
        _holds(record, moment, token)
        facts = {"lease": token, "worker_id": record.worker_id}
    now = moment.steady_ns
    after = replace(
        record, state="SCHEDULED", lease=0, lease_until=0, due=now + max(1, delay_ns), ready_at=now
    )
    detail = {"reason": reason[:ERROR_CHARS_MAX], "delay_s": delay_ns / NANOS_PER_S}
    return Step(after, (_event(kind, after, moment, detail=detail, prior=record.state, **facts),))


def fail(
    record: Record,
    moment: Moment,
    token: int,
    error: str,
    *,
    error_type: str = "",
    delay_ns: int | None = 0,
    lane: int | None = None,
    max_retries: int | None = None,
) -> Step | None:
    """The work failed. The record is retried after `delay_ns` (None: never), in `lane` when given.

    `max_retries` takes the place of the number that the record has.
    """
    if not _holds(record, moment, token, ("QUEUED", "RETRYING", "DEAD_LETTER")):
        return None
    counted = replace(record, retries=record.retries + 1, crashes=poison.after_attempt(record.crashes))
    return _failed(counted, moment, "fail", error, error_type, delay_ns, lane=lane, max_retries=max_retries)


def lapse(record: Record, moment: Moment, error: str = LAPSED, error_type: str = "LeaseLapsed") -> Step:
    """The lease ran out, or its worker died. The record is ready again at once.

    In an agent's queue this is also a failure.
    """
    retries = record.retries if org_of(record.queue) else record.retries + 1
    lapsed = replace(record, crashes=poison.after_worker_death(record.crashes), retries=retries)
    return _failed(lapsed, moment, "lapse", error, error_type, 0, token_after=0)


def crash(record: Record, moment: Moment, token: int, error: str) -> Step:
    """The record's own process died, as its worker says: as `lapse`, but it counts against the record."""
    _holds(record, moment, token)
    died = replace(record, crashes=poison.after_own_death(record.crashes))
    return lapse(died, moment, error, "ProcessDied")


def _failed(
    record: Record,
    moment: Moment,
    verb: str,
    error: str,
    error_type: str,
    delay_ns: int | None,
    token_after: int | None = None,
    lane: int | None = None,
    max_retries: int | None = None,
) -> Step:
    kind = _kind_of(verb, record, "FAILED")
    token = record.lease if token_after is None else token_after
    failed = replace(record, state="FAILED", lease=token, lease_until=0)
    happened = _event(
        kind,
        failed,
        moment,
        lease=record.lease,
        worker_id=record.worker_id,
        duration_us=_worked_us(record, moment),
        error_type=error_type,
        error=error[:ERROR_CHARS_MAX],
    )
    if delay_ns is None or failed.retries > (failed.max_retries if max_retries is None else max_retries):
        kind = _kind_of("bury", failed, "DEAD_LETTER")
        after = replace(failed, state="DEAD_LETTER", ended_us=moment.wall_us)
        dead = _event(kind, after, moment, 1, error_type=happened.error_type, error=happened.error)
        return Step(after, (happened, dead))
    if lane is not None:
        failed = replace(failed, lane=lane)
    if delay_ns <= 0:
        kind = _kind_of("retry", failed, "QUEUED")
        after = replace(failed, state="QUEUED", place=moment.number + 1, ready_at=moment.steady_ns)
        return Step(after, (happened, _event(kind, after, moment, 1)))
    kind = _kind_of("retry", failed, "RETRYING")
    now = moment.steady_ns  # a store opened after a reboot continues its clock from `ready_at`
    after = replace(failed, state="RETRYING", due=now + delay_ns, ready_at=now)
    scheduled = _event(kind, after, moment, 1, detail={"delay_s": delay_ns / NANOS_PER_S})
    return Step(after, (happened, scheduled))


# ---- results of the harness ------------------------------------------------------------------------


def hand_over(record: Record, moment: Moment, decision_id: str) -> Step:
    """The result was stored as a decision: a message that the harness executes."""
    kind = _kind_of("hand_over", record, "EXECUTING")
    after = replace(record, state="EXECUTING")
    return Step(after, (_event(kind, after, moment, detail={"decision": decision_id}),))


def settle(record: Record, moment: Moment) -> Step:
    """The decision was executed."""
    kind = _kind_of("settle", record, "DONE")
    after = replace(record, state="DONE")
    return Step(after, (_event(kind, after, moment, prior=record.state),))


# ---- other ends, and replay ------------------------------------------------------------------------


def cancel(record: Record, moment: Moment) -> Step:
    """Cancel the record. A lease holder learns of it from its next call."""
    return _ended(record, moment, "cancel", "CANCELLED")


def expire(record: Record, moment: Moment) -> Step:
    """The record waited beyond its time to live."""
    return _ended(record, moment, "expire", "EXPIRED")


def quarantine(record: Record, moment: Moment, error: str) -> Step:
    """The record crashes workers: keep it, and do not deliver it."""
    return _ended(record, moment, "quarantine", "QUARANTINED", error=error[:ERROR_CHARS_MAX])


def _ended(record: Record, moment: Moment, verb: str, target: State, **facts: Any) -> Step:
    kind = _kind_of(verb, record, target)
    after = replace(record, state=target, lease=0, lease_until=0, due=0, ended_us=moment.wall_us)
    if record.state == "PROCESSING":
        facts |= {"lease": record.lease, "worker_id": record.worker_id}
    return Step(after, (_event(kind, after, moment, prior=record.state, **facts),))


def replay(record: Record, moment: Moment, priority: int | None = None) -> Step:
    """Queue an ended message again, with its full number of retries."""
    kind = _kind_of("replay", record, "QUEUED")
    after = replace(
        record,
        state="QUEUED",
        lane=record.priority if priority is None else priority,
        place=moment.number,
        retries=0,
        crashes=0,
        lease=0,
        ready_at=moment.steady_ns,
        expires=0,
        ended_us=0,
    )
    replayed = _event(kind, after, moment, prior=record.state)
    return Step(after, (replayed, _event("enqueued", after, moment, 1)))


# ---- histories -------------------------------------------------------------------------------------

_NOTABLE: Final = frozenset({"lease_lapsed", "retry_scheduled", "dead_letter", "duplicate"})


def is_notable(event: Event) -> bool:
    """Whether servers log the event: a lapse, a retry, a dead letter, a duplicate, a second enqueue."""
    return event.kind in _NOTABLE or (event.attempt > 0 and event.kind == "enqueued")


_IMPLIED: Final = frozenset({"created", "execution_completed"})


def trail(before: Record, step: Step) -> list[Event]:
    """The events of a step that must be stored with the record, because its columns do not imply them.

    The columns imply the normal course: created, claimed by a worker, completed. Any other step stores the
    event of the current delivery first, because the next delivery overwrites its columns. Starts of handlers
    and heartbeats are left out: they are in the events of the store.
    """
    events = [one for one in step.events if one.kind not in _IMPLIED and one.state != "PROCESSING"]
    if events and before.state == "PROCESSING":
        events.insert(0, _delivery(before))
    return events


def history(stored_record: Record, first: Event, trail_events: list[Event]) -> list[Event]:
    """The events of a record without starts and heartbeats: the trail, and those that its columns imply."""
    record = stored_record
    events = [first, *trail_events]
    if first.state == "QUEUED":
        enqueued = Event(
            first.seq + 1, first.ts_us, "enqueued", first.queue, first.message_id, "QUEUED", 0, first.priority
        )  # fmt: skip
        events.append(enqueued)
    if record.claimed_us and record.lease > 0 and record.lease not in {event.seq for event in trail_events}:
        events.append(_delivery(record))
    if record.state in ("COMPLETED", "EXECUTING", "DONE"):
        completed = Event(
            record.place, record.ended_us, "execution_completed", record.queue, record.message_id,
            "COMPLETED", record.attempt, record.lane, record.lease, record.worker_id,
            record.ended_us - record.claimed_us,
        )  # fmt: skip
        events.append(completed)
    return sorted(events, key=lambda event: event.seq)


def _delivery(record: Record) -> Event:
    return Event(
        record.lease, record.claimed_us, "dequeued", record.queue, record.message_id, "PROCESSING",
        record.attempt, record.lane, record.lease, record.worker_id,
    )  # fmt: skip


def _worked_us(record: Record, moment: Moment) -> int:
    """How long the holder had the record: by wall clock up to the last heartbeat, by steady clock since."""
    renewed_us = max(0, record.heartbeat_us - record.claimed_us)
    return renewed_us + (moment.steady_ns - record.lease_until + record.lease_ns) // 1000
