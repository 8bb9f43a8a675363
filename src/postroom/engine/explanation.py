"""Why a message does not move: which rule holds it, and what would release it."""

from typing import NamedTuple

from postroom.core.lifecycle import poison
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.times import EPOCH, MICROSECOND
from postroom.core.tokens.tokens import Short
from postroom.engine.messages import Body, body_of, error_history
from postroom.engine.rules import holds, ordering
from postroom.engine.rules.admission import ALL
from postroom.engine.rules.breakers import Breakers, service_of
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.policy import Policy
from postroom.engine.rules.routes import Routes
from postroom.engine.rules.token_budgets import TokenBooks, short_text
from postroom.message import Record, Stored, org_of
from postroom.stores.base import FOREVER_NS, LANE_COUNTS
from postroom.stores.transaction import Transaction


def explain(operations: Operations, policy: Policy, message_id: str, routes: Routes) -> str:
    """Which rule holds a message, and what would release it, in one paragraph."""
    stored = operations.loaded(message_id)
    record = stored.record
    named = f"Message {message_id} ({stored.envelope.type}, organization {org_of(record.queue)})"
    return f"{named} is {record.state}{_why(operations, policy, stored, routes)}"


class _Hold(NamedTuple):
    """A rule that holds a message."""

    why: str
    """With what would release it."""
    until_ns: int = FOREVER_NS
    """When it ends by itself."""


def _why(operations: Operations, policy: Policy, stored: Stored, routes: Routes) -> str:
    record, transaction = stored.record, operations.transaction
    match record.state:
        case "QUEUED":
            return _why_waiting(transaction, record, _why_queued(operations, policy, stored, routes))
        case "SCHEDULED" | "RETRYING":
            return _why_waiting(transaction, record, [_why_delayed(transaction, stored)])
        case "PROCESSING":
            left_s = (record.lease_until - transaction.steady_ns) / NANOS_PER_S
            return (
                f": worker {record.worker_id} holds its lease (attempt {record.attempt}), which ends in "
                f"{left_s:.1f} s unless the worker renews it."
            )
        case _:
            return _why_ended(stored)


def _why_waiting(transaction: Transaction, record: Record, found: list[_Hold]) -> str:
    """All rules that hold a message, the one that ends first before the others, and when it expires."""
    first, *others = sorted(found, key=lambda hold: hold.until_ns)
    why = " ".join([first.why, *(f"Also, {hold.why}" for hold in others)])
    expires = f"it expires in {_left_s(transaction, record.expires):.0f} s"
    if not record.expires:
        return f": {why}"
    if record.expires < first.until_ns < FOREVER_NS:
        return f": {expires}, before anything else changes: {why}"
    return f": {why} {expires.capitalize()}."


def _left_s(transaction: Transaction, until_ns: int) -> float:
    return max(0, until_ns - transaction.steady_ns) / NANOS_PER_S


def _why_ended(stored: Stored) -> str:
    record = stored.record
    match record.state:
        case "QUARANTINED":
            return f": {_last_error(stored)}. Only a replay by its id runs it again."
        case "DEAD_LETTER":
            attempts = f"{record.attempt} attempt{'s' if record.attempt != 1 else ''}"
            return f" after {attempts}: {_last_error(stored)}. Replay it from the dead letters."
        case "EXPIRED":
            return ": it waited longer than its expires_at allowed."
        case "CANCELLED":
            return ": it was cancelled."
        case _:
            return f" since {EPOCH + record.ended_us * MICROSECOND:%Y-%m-%d %H:%M:%S} UTC: it is done."


def _last_error(stored: Stored) -> str:
    errors = error_history(stored)
    if not errors:
        return "no error was recorded"
    return ": ".join(filter(None, (errors[-1]["error_type"], errors[-1]["error"])))


def _why_delayed(transaction: Transaction, stored: Stored) -> _Hold:
    record = stored.record
    reasons = [event.detail.get("reason", "") for event in stored.history if event.kind == "deferred"]
    if ordering.is_parked(record, transaction.steady_ns):
        head = ordering.head_of(transaction, record.message_id)
        if head is not None and head.message_id != record.message_id:
            state = "is a dead letter and stops the key" if head.is_dead else "comes first"
            return _Hold(
                f"its ordering key is held by message {head.message_id}, which {state}. "
                "It runs when that one ends."
            )
        reason = reasons[-1] if reasons else "it is parked"
        is_held = reason.startswith("rule ")
        return _Hold(f"{reason}. It runs after {'the rule is removed' if is_held else 'a resume'}.")
    wait_s = _left_s(transaction, record.due)
    if record.state == "RETRYING":
        error = _last_error(stored)
        why = f"attempt {record.attempt} failed ({error}), and the next one is due in {wait_s:.1f} s."
    else:
        reason = reasons[-1] if reasons else "it was submitted with a delay"
        why = f"{reason}. It is due in {wait_s:.1f} s."
    return _Hold(why, record.due)


def _why_queued(operations: Operations, policy: Policy, stored: Stored, routes: Routes) -> list[_Hold]:
    transaction, record = operations.transaction, stored.record
    org_id, kind = org_of(record.queue), stored.envelope.type
    pauses = holds.paused(transaction)
    found = [
        _Hold(f"{_scope(*scope)} is paused. It runs after a resume.")
        for scope in ((ALL, ALL), (org_id, ALL), (ALL, kind), (org_id, kind))
        if scope in pauses
    ]
    if poison.is_poison(record, policy.poison_crashes):
        found.append(_Hold("its own process died too often (poison). The next claim quarantines it."))
    body = body_of(stored.envelope.payload)
    service = None if body is None else service_of(transaction, routes, kind, org_id, body)
    circuit = Breakers(transaction, policy).held_by(service, record.message_id) if service else None
    if circuit is not None and service is not None:
        why = f"the breaker of service {service.name} is {circuit.state}. A probe is allowed in "
        why = f"{why}{_left_s(transaction, circuit.open_until):.0f} s."
        if policy.breaker_of(service.name).fails(record.priority):
            why = f"{why} The next claim makes the message a dead letter."
        found.append(_Hold(why, circuit.open_until))
    short = _why_short(transaction, policy, record, kind, body)
    if short is not None:
        found.append(short)
    if not found and not operations.workers():
        found.append(_Hold("no worker is running. Start one with `postroom engine work`."))
    if not found:
        ahead = _ahead(transaction, record)
        why = f"it has priority P{record.lane}, and {ahead} messages of its organization are before it. "
        found.append(_Hold(f"{why}It runs when a worker is free."))
    return found


def _why_short(
    transaction: Transaction, policy: Policy, record: Record, type_name: str, body: Body | None
) -> _Hold | None:
    """Which token budget would hold a message now."""
    rules = policy.token_rules
    if rules is None or body is None:
        return None
    books = TokenBooks(transaction, rules)
    asking = books.asking(type_name, record, body)
    found = None if asking is None else books.decide(record, asking, prunes=False)
    if asking is None or not isinstance(found, Short):
        return None
    text = short_text(asking, rules, record.priority)
    refilled = f"The budget is refilled in {_left_s(transaction, found.due_ns):.0f} s."
    return _Hold(f"{text}. {refilled}", found.due_ns)


def _ahead(transaction: Transaction, record: Record) -> int:
    counts = transaction.lanes.depth(record.queue)
    before = sum(counts.get(LANE_COUNTS[lane], 0) for lane in range(record.lane))
    same = transaction.pull(record.queue, record.lane, 1_000)
    return before + sum(head.record.place < record.place for head in same)


def _scope(org_id: str, kind: str) -> str:
    of_type = f"type {kind}" if kind else "every type"
    return f"{of_type} of {f'organization {org_id}' if org_id else 'all organizations'}"
