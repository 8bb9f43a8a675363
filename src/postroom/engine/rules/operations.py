"""What can be done with the messages of organizations inside one transaction.

Rule 1: an operation raises before it writes, so several of them can share a commit.
Rule 2: every decision about one record is a function of `core.lifecycle`; policies are functions in `core`.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from postroom.core.goals.advice import ReversalClass
from postroom.core.lifecycle import lifecycle
from postroom.core.names import scoped, unscoped
from postroom.core.tokens.provider_headers import Observed
from postroom.engine.message_input import Prepared, stored
from postroom.engine.messages import body_of, checked_message_id, digest_of, unknown_message
from postroom.engine.rules import bodies, holds, ordering, outcomes, storage
from postroom.engine.rules.admission import ALL, Admission
from postroom.engine.rules.cells import (
    DEPENDANTS,
    EFFECTS,
    KEY_ENDS,
    KEYS,
    PARKED,
    PARTS,
    PAUSES,
    RECEIPTS,
    SEPARATOR,
    WORKERS,
    Effect,
    Part,
    PauseInfo,
    UsedKey,
    WorkerInfo,
    joined,
)
from postroom.engine.rules.extensions import (
    on_accept,
    on_effect,
    on_effect_dropped,
    on_forget,
    on_replay,
    on_submit,
    on_target,
    on_target_left,
)
from postroom.engine.rules.outcomes import Outcome, Outcomes
from postroom.engine.rules.policy import Policy
from postroom.engine.rules.token_budgets import TokenBooks, note_dependant
from postroom.errors import (
    EffectUnknown,
    KeyReused,
    Overloaded,
    QueueFull,
    ResultGone,
    StaleLease,
    TargetBusy,
    UnknownTask,
    WrongState,
)
from postroom.message import ENGINE_PREFIX, Moment, Record, State, Step, Stored, org_of, queue_of
from postroom.stores.base import PURGE_BATCH_MAX, ByIds, Ending, Limits, Listing
from postroom.stores.transaction import NO_STARTS, Accepted, Transaction, reserved_id

MICROS_PER_S = 1_000_000
WORKER_LOST_S = 30.0  # after which a worker that does not report is not counted
RESUME_A_COMMIT_MAX = 500
HELD_LOOKED_MAX = 10_000  # messages in flight that a search for those of one worker looks at
PARTS_MAX = 100_000  # of one attempt
OUTCOME_INLINE_BYTES_MAX = 48 * 1024  # of an effect; a longer outcome is stored apart, as a large payload
STREAM_BYTES_MAX = 16 * 1024 * 1024  # of the chunks of one attempt; those of earlier attempts are removed


class Submitted(msgspec.Struct, frozen=True):
    """A message that was accepted, now or by an earlier submit with the same key."""

    message_id: str
    duplicate: bool


class Operations:
    """Operations on the messages of one transaction."""

    def __init__(self, transaction: Transaction, policy: Policy) -> None:
        self.transaction = transaction
        self._policy = policy
        self._books = None if policy.token_rules is None else TokenBooks(transaction, policy.token_rules)

    # ---- submitting ----------------------------------------------------------------------------

    def submit(self, messages: Sequence[Prepared]) -> list[Submitted]:
        """Accept messages, all or none. A known idempotency key returns the message accepted with it."""
        answers: dict[int, Submitted] = {}
        new: list[tuple[int, Prepared]] = []
        keys: dict[tuple[str, str], int] = {}
        for index, message in enumerate(messages):
            key = message.org_id, message.body.idempotency_key
            known = self._known(message) if key[1] else None
            if known is not None:
                answers[index] = known
            elif key[1] and key in keys:
                first = messages[keys[key]]
                if not message.repeats(first.digest):
                    raise KeyReused(key[1], first.envelope.message_id or "of the same call")
            else:
                keys[key] = index
                new.append((index, message))
        if new:
            named, known_ids = with_stored_ids(self.transaction, [message for _, message in new])
            self._check_contents(named, known_ids)
            counts: dict[str, int] = {}
            for message in named:
                counts[message.org_id] = counts.get(message.org_id, 0) + 1
            for org_id, count in counts.items():
                storage.check(self.transaction, org_id, self._policy.organization_of(org_id), count)
            for check in on_submit:
                check(self.transaction, named)
            Admission(self.transaction, self._policy).check(named)
            for (index, _), accepted in zip(new, self._insert(named), strict=True):
                answers[index] = Submitted(accepted.message_id, accepted.duplicate)
        return [self._answer(index, message, answers, keys) for index, message in enumerate(messages)]

    def _answer(
        self, index: int, message: Prepared, answers: dict[int, Submitted], keys: dict[tuple[str, str], int]
    ) -> Submitted:
        if index in answers:
            return answers[index]
        first = answers[keys[message.org_id, message.body.idempotency_key]]
        return Submitted(first.message_id, duplicate=True)

    def _known(self, message: Prepared) -> Submitted | None:
        """The message that was accepted under the same key before."""
        key = message.body.idempotency_key
        used = KEYS.get(self.transaction, message.org_id, key)
        kept_us = self._policy.keep_keys_s * MICROS_PER_S
        if used is None or used.seen_us < self.transaction.wall_us - kept_us:
            return None
        if not message.repeats(used.digest):
            raise KeyReused(key, used.message_id)
        record = self.transaction.records.get(used.message_id)
        if record is None:
            raise ResultGone(key, used.message_id)
        self.transaction.note_duplicate(record, key)
        return Submitted(used.message_id, duplicate=True)

    def _check_contents(self, messages: Sequence[Prepared], known: set[str]) -> None:
        """Refuse messages with the id of another message of the organization."""
        digests: dict[str, str] = {}
        for message in messages:
            message_id = message.envelope.message_id
            if message_id in known and message_id not in digests:
                digests[message_id] = self._digest(message_id)
            if message_id and not message.repeats(digests.setdefault(message_id, message.digest)):
                raise KeyReused(message_id, message_id, f"message {message_id} has different content")

    def _digest(self, message_id: str) -> str:
        """The digest of a stored message, as `Prepared` has it."""
        stored_message = self.loaded(message_id)
        body = body_of(stored_message.envelope.payload)
        payload = b"" if body is None else bodies.payload_of(self.transaction, body)
        return digest_of(stored_message.envelope.type, payload)

    def _insert(self, messages: Sequence[Prepared]) -> list[Accepted]:
        transaction = self.transaction
        for org_id in {message.org_id for message in messages}:
            most, queue = self._policy.organization_of(org_id).max_depth, ENGINE_PREFIX + org_id
            if most is not None and transaction.limits(queue).max_depth != most:
                transaction.set_limits(queue, Limits(max_depth=most))
        try:
            accepted = insert_messages(transaction, self._policy, messages)
        except QueueFull as full:
            raise Overloaded(str(full).rpartition(":")[0], full.retry_after_s) from full
        for message, one in zip(messages, accepted, strict=True):
            if not one.duplicate:
                self._after_insert(message, one.message_id)
        return accepted

    def _after_insert(self, message: Prepared, message_id: str) -> None:
        transaction, body = self.transaction, message.body
        storage.add(transaction, message.org_id, message_id, len(message.payload))
        storage.add(transaction, message.org_id, message_id, len(message.context))
        if self._books is not None and message.envelope.parent_message_id:
            envelope = message.envelope
            note_dependant(transaction, envelope.queue, envelope.parent_message_id, message_id)
        if body.idempotency_key:
            used = UsedKey(message_id, message.digest, transaction.wall_us)
            KEYS.put(transaction, used, message.org_id, body.idempotency_key)
        for note_message in on_accept:
            note_message(transaction, message, message_id)

    # ---- outcomes ------------------------------------------------------------------------------

    def finish(self, outcomes: Sequence[Outcome], started: Mapping[str, int] = NO_STARTS) -> list[str]:
        """Apply the outcomes of attempts. Returns messages whose lease was over: their outcome is dropped.

        `started` says when their handlers began if no event tells it yet, by message id.
        """
        return Outcomes(self.transaction, self._policy, self._books, started).finish(outcomes)

    def observe(self, provider: str, model: str, said: Observed) -> None:
        """Follow what the headers of a provider say about a model."""
        if self._books is not None:
            self._books.observe(provider, model, said)
            self._books.flush()

    def heartbeat(self, leases: Mapping[str, int]) -> list[str]:
        """Renew leases; returns the messages whose lease was over."""
        lost = []
        for message_id, lease in leases.items():
            try:
                self.transaction.apply(ByIds((message_id,)), partial(lifecycle.renew, token=lease))
            except (StaleLease, UnknownTask, WrongState):
                lost.append(message_id)
        return lost

    def lost(self, leases: Mapping[str, int]) -> tuple[set[str], set[str]]:
        """The messages whose lease was lost, and those that the kill switch makes their holder release."""
        records = {message_id: self.transaction.records.get(message_id) for message_id in leases}
        gone = {
            message_id
            for message_id, record in records.items()
            if record is None or record.state != "PROCESSING" or record.lease != leases[message_id]
        }
        scopes = [key.split(SEPARATOR) for key, pause in PAUSES.all(self.transaction) if pause.kill]
        switches = {org_id for org_id, type_name in scopes if not type_name}
        killed = {
            message_id
            for message_id, record in records.items()
            if record is not None and switches & {ALL, org_of(record.queue)}
        }
        return gone, killed - gone

    # ---- effects and parts ---------------------------------------------------------------------

    def begin_effect(
        self,
        message_id: str,
        lease: int,
        key: str,
        *,
        runs_unknown: bool,
        reversal: Any = None,
        reversal_class: ReversalClass | None = None,
        target: str = "",
    ) -> Effect | TargetBusy | None:
        """Note the intent of an effect. Returns the effect when its outcome is known already.

        Raises `EffectUnknown` when an earlier attempt began it and its outcome is unknown. Returns
        `TargetBusy`, because an event is committed, when another message works on the target.
        """
        record = self._held(message_id, lease)
        known = EFFECTS.get(self.transaction, message_id, key)
        if known is not None and known.is_done:
            return replace(known, outcome=bodies.outcome_of(self.transaction, known), outcome_ref="")
        if known is not None and not runs_unknown:
            raise EffectUnknown(message_id, key)
        for claim_target in on_target if target else ():
            other = claim_target(self.transaction, self._policy, record, target)
            if other is not None:
                return TargetBusy(target, other)
        number = 0 if known is None else known.number
        intent = Effect(
            record.attempt, self.transaction.wall_us, reversal=reversal, number=number, target=target
        )
        if known is None:
            for note_intent in on_effect:
                intent = note_intent(self.transaction, self._policy, message_id, key, intent, reversal_class)
        EFFECTS.put(self.transaction, intent, message_id, key)
        self._sync(record)
        return None

    def end_effect(self, message_id: str, lease: int, key: str, outcome: Any) -> None:
        """Note the outcome of an effect."""
        record = self._held(message_id, lease)
        known = EFFECTS.get(self.transaction, message_id, key) or Effect(record.attempt, 0)
        done = replace(known, is_done=True, outcome=outcome)
        size = EFFECTS.put(self.transaction, done, message_id, key)
        if size > OUTCOME_INLINE_BYTES_MAX:
            data = msgspec.json.encode(outcome)
            digest = digest_of(f"effect {key}", data)
            bodies.keep(self.transaction, digest, data, message_id)
            EFFECTS.put(self.transaction, replace(done, outcome=None, outcome_ref=digest), message_id, key)
        storage.add(self.transaction, org_of(record.queue), message_id, size)
        self._leave_target(message_id, known)
        self._sync(record)

    def drop_effect(self, message_id: str, lease: int, key: str) -> None:
        """Forget an intent: the effect did not happen."""
        self._sync(self._held(message_id, lease))
        known = EFFECTS.get(self.transaction, message_id, key)
        if known is not None:
            for note_drop in on_effect_dropped:
                note_drop(self.transaction, message_id, known)
            self._leave_target(message_id, known)
        EFFECTS.put(self.transaction, None, message_id, key)

    def _leave_target(self, message_id: str, effect: Effect) -> None:
        for leave in on_target_left if effect.target else ():
            leave(self.transaction, self._policy, message_id, effect.target)

    def add_parts(self, message_id: str, lease: int, parts: Sequence[Part], first: int) -> None:
        """Store consecutive parts of a running handler, the first of them with this index.

        The first parts of an attempt replace those of earlier attempts.
        """
        record = self._held(message_id, lease)
        if not first and record.attempt > 1:
            PARTS.drop_under(self.transaction, message_id)
        size = PARTS.put(self.transaction, list(parts), message_id, record.attempt, first + len(parts) - 1)
        storage.add(self.transaction, org_of(record.queue), message_id, size)

    def _held(self, message_id: str, lease: int) -> Record:
        """A record under a live lease."""
        [record] = self.transaction.records.find(ByIds((message_id,)))
        is_over = record.lease_until <= self.transaction.steady_ns
        if record.state != "PROCESSING" or record.lease != lease or is_over:
            raise lifecycle.stale(record, lease)
        return record

    def _sync(self, record: Record) -> None:
        if record.durability != "os":
            self.transaction.synced = True

    # ---- operators -----------------------------------------------------------------------------

    def cancel(self, message_id: str) -> None:
        """Cancel a message. A running handler learns of it within a second."""
        self.loaded(message_id)
        for step in self.transaction.apply(ByIds((message_id,)), lifecycle.cancel):
            outcomes.ended(self.transaction, self._policy, step.record)
            if self._books is not None:
                self._books.settle_all(event.lease for event in step.events if event.lease)

    def replay(self, message_id: str, priority: int | None) -> None:
        """Queue a dead letter again, as a new attempt with all its retries."""
        loaded = self.loaded(message_id)
        body = body_of(loaded.envelope.payload)
        [step] = self.transaction.apply(
            ByIds((message_id,)), lambda record, moment: lifecycle.replay(record, moment, priority)
        )
        org_id = org_of(step.record.queue)
        for note_replay in on_replay:
            note_replay(self.transaction, message_id)
        PARKED.put(self.transaction, None, loaded.envelope.type, org_id, step.record.seq)
        if body is not None and body.ordering_key:
            ordering.rejoin(
                self.transaction, step.record, org_id, body.ordering_key, stops=body.on_dead == "stop"
            )

    def pause(self, org_id: str, type_name: str, *, kill: bool = False) -> None:
        """Stop deliveries of an organization, of a type, of both together, or all of them."""
        PAUSES.put(self.transaction, PauseInfo(self.transaction.wall_us, kill), org_id, type_name)
        self.transaction.alert("Paused", _scope(org_id, type_name), queue_of(org_id))

    def resume(self, org_id: str, type_name: str) -> None:
        """End a pause."""
        PAUSES.put(self.transaction, None, org_id, type_name)
        said, queue = _scope(org_id, type_name), queue_of(org_id)
        if any(paused == org_id for paused, _ in holds.paused(self.transaction)):
            self.transaction.emit(
                "alert", queue, error_type="Resumed", error=said
            )  # but not all of it is over
        else:
            self.transaction.alert("Resumed", said, queue)

    def unpark(self, type_name: str, org_id: str, after: str = "") -> str | None:
        """Put messages of a type that was paused into their lanes, after a key of `PARKED`.

        Returns the key to continue from; None at the end.
        """
        self.transaction.exclusive(PAUSES.name)  # a claim that parks messages has committed, or sees no pause
        parts = (type_name, org_id) if org_id else (type_name,)
        prefix = joined(*parts) + SEPARATOR
        paused = {tuple(key.split(SEPARATOR)) for key, _ in PAUSES.all(self.transaction)}
        found = PARKED.scan(self.transaction, after or prefix, RESUME_A_COMMIT_MAX)
        for key, message_id in found:
            owner = key.split(SEPARATOR)[1] if key.startswith(prefix) else None
            if owner is not None and paused.isdisjoint({(ALL, type_name), (owner, type_name)}):
                self.transaction.cells.put(PARKED.name, key, None)
                ordering.wake(self.transaction, message_id)
        is_more = len(found) == RESUME_A_COMMIT_MAX and found[-1][0].startswith(prefix)
        return found[-1][0] if is_more else None

    def report_worker(self, worker_id: str, info: WorkerInfo | None) -> None:
        """Note that a worker is alive; None removes it."""
        WORKERS.put(self.transaction, info, worker_id)

    def in_flight(self, worker_ids: Collection[str]) -> int:
        """How many messages these workers hold."""
        held = self.transaction.records.find(Listing(state="PROCESSING", limit=HELD_LOOKED_MAX))
        return sum(record.worker_id in worker_ids and bool(org_of(record.queue)) for record in held)

    def crash_worker(self, worker_id: str) -> int:
        """A worker's process has died: its leases end now. Returns how many."""
        WORKERS.put(self.transaction, None, worker_id)
        held = [
            record
            for record in self.transaction.records.find(Listing(state="PROCESSING", limit=HELD_LOOKED_MAX))
            if record.worker_id == worker_id and org_of(record.queue)
        ]
        for record in held:
            self.transaction.apply(ByIds((record.message_id,)), _worker_died)
        if self._books is not None:
            self._books.settle_all(record.lease for record in held)
        return len(held)

    # ---- sweeping ------------------------------------------------------------------------------

    def sweep(self, limit: int = PURGE_BATCH_MAX) -> int:
        """Lapse, wake and expire overdue messages; returns how many."""
        steps = self.transaction.apply(Ending("expiry", self.transaction.steady_ns, limit), _expire)
        for step in steps:
            with suppress(msgspec.DecodeError):  # a damaged value of one goal must not keep other messages
                outcomes.ended(self.transaction, self._policy, step.record)
        count = self.transaction.put_back(limit) + len(steps)
        if self._books is not None:
            self._books.sweep()
        return count

    def forget(self, records: Sequence[Record]) -> None:
        """Forget messages and everything that is kept with them."""
        transaction = self.transaction
        for record in records:
            stored_message = transaction.records.load(record.message_id)
            body = None if stored_message is None else body_of(stored_message.envelope.payload)
            if body is not None:
                bodies.release(transaction, body, record.message_id)
            if body is not None and body.idempotency_key:
                self._forget_key(org_of(record.queue), body.idempotency_key, record.message_id)
            effects = EFFECTS.under(transaction, record.message_id, limit=PARTS_MAX)
            for key, effect in effects:
                bodies.drop(transaction, effect.outcome_ref, record.message_id)
                transaction.cells.put(EFFECTS.name, key, None)
            PARTS.drop_under(transaction, record.message_id)
            if self._books is not None:
                DEPENDANTS.drop_under(transaction, record.message_id)
            if self._books is not None and stored_message is not None:
                DEPENDANTS.put(
                    transaction, None, stored_message.envelope.parent_message_id, record.message_id
                )
            RECEIPTS.put(transaction, None, record.message_id)
            storage.forget(transaction, org_of(record.queue), record.message_id)
            ordering.leave(transaction, record)
            for forget_more in on_forget:
                forget_more(transaction, record)
        if records:
            transaction.records.forget(records)
            transaction.emit("deleted", detail={"records": len(records)})

    def _forget_key(self, org_id: str, key: str, message_id: str) -> None:
        """Note when the idempotency key of a forgotten message was used, so that a purge finds it by age."""
        used = KEYS.get(self.transaction, org_id, key)
        if used is not None and used.message_id == message_id:
            KEY_ENDS.put(self.transaction, True, used.seen_us, org_id, key)  # noqa: FBT003

    # ---- reading -------------------------------------------------------------------------------

    def loaded(self, message_id: str) -> Stored:
        """Everything about a message of an organization. Raises `UnknownTask`."""
        found = self.transaction.records.load(checked_message_id(message_id))
        if found is None or not org_of(found.record.queue):
            raise unknown_message(message_id)
        return found

    def dead_letters(self, org_id: str | None, after: int, limit: int) -> list[Record]:
        """Dead letters and quarantined messages by acceptance."""
        queue = None if org_id is None else ENGINE_PREFIX + org_id
        dead: tuple[State, ...] = ("DEAD_LETTER", "QUARANTINED")
        found = [
            record
            for state in dead
            for record in self.transaction.records.find(Listing(queue, state, after, limit))
            if org_of(record.queue)
        ]
        return sorted(found, key=lambda record: record.seq)[:limit]

    def workers(self) -> dict[str, WorkerInfo]:
        """Workers that reported lately."""
        lost_ns = self.transaction.steady_ns - round(WORKER_LOST_S * lifecycle.NANOS_PER_S)
        return {name: info for name, info in WORKERS.all(self.transaction) if info.seen_ns >= lost_ns}


def _worker_died(record: Record, moment: Moment) -> Step:
    return lifecycle.lapse(record, moment, "its worker died", "WorkerDied")


def _expire(record: Record, moment: Moment) -> Step | None:
    return lifecycle.expire(record, moment) if org_of(record.queue) else None


def _scope(org_id: str, type_name: str) -> str:
    of_type = f"type {type_name}" if type_name else "all types"
    return f"{of_type} of {f'organization {org_id}' if org_id else 'all organizations'}"


def insert_messages(transaction: Transaction, policy: Policy, messages: Sequence[Prepared]) -> list[Accepted]:
    """Store messages with what they refer to, and append them to the order of their keys."""
    inline_max = policy.body_inline_bytes_max
    accepted = transaction.insert([stored(message, inline_max) for message in messages])
    for message, one in zip(messages, accepted, strict=True):
        if one.duplicate:
            continue
        bodies.store(transaction, message, one.message_id, inline_max)
        if message.body.ordering_key:
            [record] = transaction.records.find(ByIds((one.message_id,)))
            stops = message.body.on_dead == "stop"
            ordering.join(transaction, record, message.org_id, message.body.ordering_key, stops=stops)
    return accepted


def with_stored_ids(
    transaction: Transaction, messages: Sequence[Prepared]
) -> tuple[list[Prepared], set[str]]:
    """Messages with the ids that the store has, or will have, and the ids of these that it has already."""
    if not any(one.envelope.message_id or one.envelope.parent_message_id for one in messages):
        return [*messages], set()
    asked = _asked(transaction, messages)
    queues = {message_id: record.queue for message_id, record in transaction.records.get_many(asked).items()}
    known = set(queues)
    own_ids = [_own_id(transaction, message, queues) for message in messages]
    found = []
    for message, message_id in zip(messages, own_ids, strict=True):
        ids = message_id, _parent_id(message, queues)
        if ids != (message.envelope.message_id, message.envelope.parent_message_id):
            envelope = replace(message.envelope, message_id=ids[0], parent_message_id=ids[1])
            message = replace(message, envelope=envelope)  # noqa: PLW2901
        found.append(message)
    return found, known


def _asked(transaction: Transaction, messages: Sequence[Prepared]) -> list[str]:
    """The ids that the given ones may stand for. Those of parents that the store made stay as they are."""
    asked: dict[str, None] = {}
    for message in messages:
        envelope = message.envelope
        if envelope.message_id:
            asked |= dict.fromkeys(_forms(message.org_id, envelope.message_id))
        parent = envelope.parent_message_id
        if parent and parent.isascii() and not transaction.is_reserved(parent):
            asked |= dict.fromkeys(_forms(message.org_id, parent))
    return [*asked]


def _forms(org_id: str, given: str) -> tuple[str, str]:
    plain = unscoped(org_id, given)
    return plain, scoped(org_id, plain)


def _own_id(transaction: Transaction, message: Prepared, queues: dict[str, str]) -> str:
    """The id of a message. It is noted in `queues`, because another message of the batch may name it."""
    given, queue = message.envelope.message_id, message.envelope.queue
    if not given:
        return ""
    plain, within = _forms(message.org_id, given)
    if queues.get(plain) == queue:
        return plain
    if transaction.is_reserved(plain):
        raise reserved_id(plain)
    message_id = plain if given == plain and plain not in queues and within not in queues else within
    queues[message_id] = queue
    return message_id


def _parent_id(message: Prepared, queues: dict[str, str]) -> str:
    parent, queue = message.envelope.parent_message_id, message.envelope.queue
    if parent:
        for each in _forms(message.org_id, parent):
            if queues.get(each) == queue:
                return each
    return parent
