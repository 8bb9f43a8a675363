"""The registry of active operations: what a message works on while its handler runs.

Rule 1: an operation is active while its message is leased under the lease that it was registered with. The
        end of the lease is the end of the operation, so a crash leaves nothing behind that blocks others. An
        effect on a target is an operation that ends earlier, with the effect.
Rule 2: a claim checks and registers in its own transaction, so two conflicting operations are never leased at
        the same time.
Rule 3: a message that waits is deferred to the end of the other's lease at the latest, and woken when the
        other operation ends.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace

from postroom.core.goals import advice, conflicts
from postroom.core.goals.advice import Advice
from postroom.core.goals.conflicts import Conflict, Operation
from postroom.core.lifecycle import lifecycle
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.engine.commits import Commits
from postroom.engine.messages import Body, body_of, digest_of
from postroom.engine.rules import ordering, outcomes
from postroom.engine.rules.cells import SEPARATOR
from postroom.engine.rules.policy import Policy
from postroom.goals import decisions, progress
from postroom.goals.advisers import facts as facts_of
from postroom.goals.goal_cells import ACTIVE, ACTIVE_ON, RULINGS, WAITERS, WAITING, Active, Decision, Waiting
from postroom.message import Record, org_of
from postroom.stores.base import ByIds, Head
from postroom.stores.transaction import Transaction

CONFLICTS_A_CLAIM_MAX: Final = 20  # conflicts of one message that one claim resolves
WAIT_S_MIN: Final = 0.05
NANOS_PER_MS: Final = 1_000_000
ENDED: Final = "one of the operations has ended"
PERSON_OPTIONS: Final = ("run", "wait", "merge", "cancel")


class OperationRegistry:
    """The registry inside the transaction of one claim, as a `Gate`."""

    marker: Final = b'"operation":'

    def __init__(self, transaction: Transaction, policy: Policy) -> None:
        self._transaction = transaction
        self._policy = policy
        self._entered: dict[str, Active] = {}
        """Operations that this claim lets run, and whose messages it has not leased yet."""

    def admits(self, head: Head, body: Body) -> bool:
        """Whether the operation of a message may run now. Otherwise the message is deferred or cancelled."""
        return body.operation is None or self._resolved(head, body, body.operation)

    def enter(self, head: Head, body: Body) -> None:
        """The message of an admitted operation is about to be leased."""
        if body.operation is None:
            return
        record, transaction = head.record, self._transaction
        if record.place != record.seq:  # else the message has never waited for anything
            _stop_waiting(transaction, record.message_id, "run")
        entry = Active(record.message_id, org_of(record.queue), 0, body.operation, transaction.wall_us)
        self._entered[record.message_id] = entry
        _list(transaction, entry)

    def leased(self, records: Sequence[Record]) -> None:
        """Messages were leased: their operations live as long as the leases."""
        for record in records:
            entry = self._entered.pop(record.message_id, None)
            if entry is not None:
                active = Active(entry.message_id, entry.org_id, record.lease, entry.operation, entry.since_us)
                ACTIVE.put(self._transaction, active, record.message_id)

    # ---- conflicts -----------------------------------------------------------------------------

    def _resolved(self, head: Head, body: Body, operation: Operation) -> bool:
        record, transaction = head.record, self._transaction
        others = self._near(org_of(record.queue), operation, record.message_id)
        ignored: set[str] = set()
        for _ in range(CONFLICTS_A_CLAIM_MAX):
            left = [(one.message_id, one.operation) for one in others if one.message_id not in ignored]
            conflict = conflicts.found(operation, left, self._policy.capacities)
            if conflict is None:
                return True
            choice, decision_id = RULINGS.get(transaction, record.message_id, conflict.other) or "", ""
            if not choice:
                choice, decision_id = self._asked(head, body, operation, conflict)
            if choice != "run":
                self._hold(record, conflict, choice, decision_id)
                return False
            ignored.add(conflict.other)
        self._hold(record, Conflict("constraint", next(iter(ignored)), operation.target), "wait")
        return False

    def _near(self, org_id: str, operation: Operation, message_id: str) -> list[Active]:
        """Active operations that may conflict."""
        return near(self._transaction, org_id, operation, message_id, self._entered)

    def _asked(self, head: Head, body: Body, operation: Operation, conflict: Conflict) -> tuple[str, str]:
        """The choice about a conflict that no ruling covers; while nobody has decided, the open question."""
        transaction, record = self._transaction, head.record
        known = WAITING.get(transaction, record.message_id)
        if known is not None and known.other == conflict.other:
            return "" if known.asked else "merge" if known.merges else "wait", known.decision_id
        facts = self._facts(head, body, operation, conflict)
        _emit(transaction, "conflict_detected", record, conflict, facts)
        if self._policy.has_model:  # the rules do not read what a person would
            facts |= self._stories(record, conflict)
        question = advice.question("conflict", facts, pattern=f"{conflict.kind} {operation.target}")
        subject = {"message_id": record.message_id, "other": conflict.other}
        decision = decisions.settle(transaction, self._policy, question, org_of(record.queue), subject)
        if decision.state == "decided" and decision.choice == "escalate":
            return "", escalate(transaction, self._policy, decision)
        if decision.state != "decided":
            return "", decision.decision_id
        said = {"choice": decision.choice, "by": decision.by, "reasoning": decision.reasoning}
        _emit(transaction, "conflict_resolved", record, conflict, said)
        return decision.choice, ""

    def _stories(self, record: Record, conflict: Conflict) -> dict[str, Any]:
        """The payload, the goal and its context of both messages, quoted."""
        stories: dict[str, Any] = {}
        for name, message_id in (("own", record.message_id), ("theirs", conflict.other)):
            stored = self._transaction.records.load(message_id)
            if stored is not None:
                stories[name] = facts_of.of_message(self._transaction, stored)
        return stories

    def _facts(self, head: Head, body: Body, operation: Operation, conflict: Conflict) -> dict[str, Any]:
        other = self._transaction.records.load(conflict.other)
        same = False
        if other is not None and other.envelope.type == head.type:
            theirs = body_of(other.envelope.payload)
            same = theirs is not None and digest_of(head.type, bytes(theirs.payload)) == digest_of(
                head.type, bytes(body.payload)
            )
        return {
            "message_id": head.record.message_id,
            "type": head.type,
            "target": operation.target,
            "mode": operation.mode,
            "on_conflict": operation.on_conflict,
            "conflict": conflict.kind,
            "what": conflict.what,
            "other": conflict.other,
            "same_work": same,
        }

    def _hold(self, record: Record, conflict: Conflict, choice: str, decision_id: str = "") -> None:
        """Defer, merge or cancel a message that cannot run now."""
        transaction = self._transaction
        if choice == "cancel":
            for step in transaction.apply(ByIds((record.message_id,)), lifecycle.cancel):
                outcomes.ended(transaction, self._policy, step.record)
            return
        before = WAITING.get(transaction, record.message_id)
        if before is not None:
            WAITERS.put(transaction, None, before.other, record.message_id)
            if before.decision_id != decision_id:
                decisions.drop(transaction, before.decision_id, "run", ENDED)
        waiting = Waiting(
            record.message_id, conflict.other, conflict.kind, conflict.what, choice == "merge", not choice,
            decision_id,
        )  # fmt: skip
        WAITING.put(transaction, waiting, record.message_id)
        WAITERS.put(transaction, record.message_id, conflict.other, record.message_id)
        for_whom = "" if choice else "a decision about "
        reason = (
            f"its operation waits for {for_whom}the operation of message {conflict.other} "
            f"({conflict.kind} {conflict.what})"
        )
        other = transaction.records.get(conflict.other)
        left_ns = (other.lease_until if other is not None else 0) - transaction.steady_ns
        # Messages that wait for the same lease become due one after the other, in the order of acceptance.
        delay_ns = max(left_ns, round(WAIT_S_MIN * NANOS_PER_S)) + record.seq % NANOS_PER_MS
        transaction.apply(
            ByIds((record.message_id,)), lambda one, moment: lifecycle.defer(one, moment, delay_ns, reason)
        )


def _emit(
    transaction: Transaction, kind: Any, record: Record, conflict: Conflict, facts: dict[str, Any]
) -> None:
    named = {"message_id": record.message_id, "other": conflict.other, "what": conflict.what}
    transaction.emit(kind, record.queue, detail=named | {"conflict": conflict.kind} | facts)


# ---- places ----------------------------------------------------------------------------------------


def _places(operation: Operation) -> list[str]:
    """The index keys of an operation: its target, the targets it excludes, and its resources.

    Only operations with a common key can conflict.
    """
    if not operation.resources and not operation.constraints.not_with:
        return [f"t:{operation.target}"]
    targets = dict.fromkeys((operation.target, *operation.constraints.not_with))
    return [*(f"t:{name}" for name in targets), *(f"r:{name}" for name in operation.resources)]


def _list(transaction: Transaction, entry: Active) -> None:
    for place in _places(entry.operation):
        ACTIVE_ON.put(transaction, True, entry.org_id, place, *_key(entry))  # noqa: FBT003


def _key(entry: Active) -> tuple[str, ...]:
    """The key of an operation: a message has one of its own, and one for each target of its effects."""
    return (entry.message_id, entry.operation.target) if entry.is_effect else (entry.message_id,)


def _forget(transaction: Transaction, entry: Active) -> None:
    ACTIVE.put(transaction, None, *_key(entry))
    for place in _places(entry.operation):
        ACTIVE_ON.put(transaction, None, entry.org_id, place, *_key(entry))


def near(
    transaction: Transaction,
    org_id: str,
    operation: Operation,
    message_id: str,
    entered: Mapping[str, Active],
) -> list[Active]:
    """Operations of other messages that may conflict; `entered` are those that are about to be leased."""
    found: dict[str, None] = {}
    for place in _places(operation):
        listed = ACTIVE_ON.under(transaction, org_id, place)
        found.update(dict.fromkeys(SEPARATOR.join(key.split(SEPARATOR)[2:]) for key, _ in listed))
    others = [entered.get(key) or live(transaction, key) for key in sorted(found)]
    return [one for one in others if one is not None and one.message_id != message_id]


def live(transaction: Transaction, key: str) -> Active | None:
    """An operation that is under way. An operation whose lease is over is forgotten: None."""
    entry = ACTIVE.get(transaction, key)
    if entry is None:
        return None
    if _holds(transaction, entry):
        return entry
    _forget(transaction, entry)
    return None


def _stop_waiting(transaction: Transaction, message_id: str, choice: str) -> None:
    """A message waits for nothing any more. A question about that is answered by the course of things."""
    waiting = WAITING.get(transaction, message_id)
    if waiting is not None:
        WAITING.put(transaction, None, message_id)
        WAITERS.put(transaction, None, waiting.other, message_id)
        decisions.drop(transaction, waiting.decision_id, choice, ENDED)


# ---- effects on a target -------------------------------------------------------------------------


def effect_begins(transaction: Transaction, policy: Policy, record: Record, target: str) -> str | None:
    """An effect on a target begins, unless another operation is in its way: then the id of its message."""
    operation, org_id = Operation(target), org_of(record.queue)
    others = near(transaction, org_id, operation, record.message_id, {})
    active = [(one.message_id, one.operation) for one in others]
    conflict = conflicts.found(operation, active, policy.capacities)
    if conflict is not None:
        _emit(transaction, "conflict_detected", record, conflict, {"target": target})
        return conflict.other
    entry = Active(
        record.message_id, org_id, record.lease, operation, transaction.wall_us, is_effect=True
    )  # fmt: skip
    ACTIVE.put(transaction, entry, *_key(entry))
    _list(transaction, entry)
    return None


def effect_ended(transaction: Transaction, policy: Policy, message_id: str, target: str) -> None:
    """An effect on a target has ended."""
    entry = ACTIVE.get(transaction, message_id, target)
    if entry is not None:
        _forget(transaction, entry)
        _wake_waiters(transaction, policy, message_id, None)


# ---- the end of an operation -----------------------------------------------------------------------


def completed(transaction: Transaction, policy: Policy, message_id: str, body: Body, result: bytes) -> None:
    """A message was completed."""
    if body.operation is not None:
        _release(transaction, policy, message_id, result)


def released(transaction: Transaction, policy: Policy, record: Record) -> None:
    """An attempt of a message has ended without a result."""
    _release(transaction, policy, record.message_id, None)


def _release(transaction: Transaction, policy: Policy, message_id: str, result: bytes | None) -> None:
    """The lease of a message has ended: wake messages that wait for its operation.

    `result` is the result of a completed message; None when it was not completed.
    """
    own = ACTIVE.get(transaction, message_id)
    _stop_waiting(transaction, message_id, "cancel")
    effects = [entry for _, entry in ACTIVE.under(transaction, message_id)]
    entries = effects if own is None else [own, *effects]
    for entry in entries:
        _forget(transaction, entry)
    if entries:
        _wake_waiters(transaction, policy, message_id, result)


def _wake_waiters(transaction: Transaction, policy: Policy, message_id: str, result: bytes | None) -> None:
    """Queue the messages that wait for an operation of a message; the next claim checks them again."""
    for key, waiter in WAITERS.under(transaction, message_id):
        transaction.cells.put(WAITERS.name, key, None)
        waiting = WAITING.get(transaction, waiter)
        WAITING.put(transaction, None, waiter)
        if waiting is not None:
            decisions.drop(transaction, waiting.decision_id, "run", ENDED)
        RULINGS.drop_under(transaction, waiter)
        record = transaction.records.get(waiter)
        if record is None or record.state != "SCHEDULED":
            continue
        transaction.apply(ByIds((waiter,)), lifecycle.wake)
        if waiting is not None and waiting.merges and result is not None:
            _complete_with(transaction, policy, waiter, message_id, result)


def _complete_with(
    transaction: Transaction, policy: Policy, message_id: str, other: str, result: bytes
) -> None:
    """Complete a message with the result of the operation that it was merged into."""
    record = transaction.records.get(message_id)
    if record is None or record.state != "QUEUED":
        return
    head = Head(record, b"", "", "")
    [leased] = transaction.lease([(head, record.lane)], f"merged with {other}", NANOS_PER_S)
    transaction.complete({message_id: (leased.lease, result)})
    ordering.ended(transaction, transaction.records.get(message_id) or leased)
    progress.step_completed(transaction, policy, message_id)


# ---- decisions -------------------------------------------------------------------------------------


def escalate(transaction: Transaction, policy: Policy, decision: Decision) -> str:
    """Leave a conflict to a person; its message waits. Returns the id of the new question."""
    subject = decision.subject
    detail = {**subject, "by": decision.by, "reasoning": decision.reasoning}
    transaction.emit("conflict_resolution_failed", f"org:{decision.org_id}", detail=detail)
    question = advice.question(
        "conflict",
        decision.question.facts,
        pattern=f"escalated {decision.question.pattern}",
        options=PERSON_OPTIONS,
    )
    fresh = Decision(
        f"{decision.decision_id}-person", "conflict", question, decision.org_id, transaction.wall_us,
        subject=subject,
    )  # fmt: skip
    unsure = Advice(question.default, 0.0, decision.reasoning or "the conflict was escalated")
    decisions.leave_to_person(transaction, policy, fresh, unsure)
    return fresh.decision_id


def ruled(transaction: Transaction, policy: Policy, decision: Decision) -> None:
    """Store the decision about a conflict, and queue its message: the next claim follows the decision."""
    message_id, other = decision.subject["message_id"], decision.subject["other"]
    record = transaction.records.get(message_id)
    if record is None or record.state != "SCHEDULED":
        return  # decided by the claim itself, or the other operation has ended meanwhile
    if decision.choice == "escalate":
        asked = escalate(transaction, policy, decision)
        waiting = WAITING.get(transaction, message_id)
        if waiting is not None:
            WAITING.put(transaction, replace(waiting, decision_id=asked), message_id)
        return
    RULINGS.put(transaction, decision.choice, message_id, other)
    detail = {**decision.subject, "choice": decision.choice, "by": decision.by}
    if decision.by == "timeout":
        transaction.emit("conflict_resolution_failed", record.queue, detail=detail)
    transaction.emit("conflict_resolved", record.queue, detail=detail | {"reasoning": decision.reasoning})
    transaction.apply(ByIds((message_id,)), lifecycle.wake)


class Conflicts:
    """`engine.conflicts`."""

    def __init__(self, commits: Commits) -> None:
        self._commits = commits

    async def active(self, org_id: str | None = None) -> list[Active]:
        """The operations that are under way, of one organization or of all."""

        def work(transaction: Transaction) -> list[Active]:
            return [
                entry
                for _, entry in ACTIVE.all(transaction)
                if (org_id is None or entry.org_id == org_id) and _holds(transaction, entry)
            ]

        return await self._commits.read(lambda operations: work(operations.transaction))

    async def waiting(self, org_id: str | None = None) -> list[Waiting]:
        """The messages whose operation waits for another one, of one organization or of all."""

        def work(transaction: Transaction) -> list[Waiting]:
            found = [one for _, one in WAITING.all(transaction)]
            return [one for one in found if org_id is None or _org_of(transaction, one.message_id) == org_id]

        return await self._commits.read(lambda operations: work(operations.transaction))


def _org_of(transaction: Transaction, message_id: str) -> str:
    record = transaction.records.get(message_id)
    return "" if record is None else org_of(record.queue)


def _holds(transaction: Transaction, entry: Active) -> bool:
    record = transaction.records.get(entry.message_id)
    return record is not None and record.state == "PROCESSING" and record.lease == entry.lease
