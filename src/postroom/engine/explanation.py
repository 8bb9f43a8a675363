"""Why a message does not move: which rule holds it, and what would release it."""

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
from postroom.stores.base import LANE_COUNTS
from postroom.stores.transaction import Transaction


def explain(operations: Operations, policy: Policy, message_id: str, routes: Routes) -> str:
    """Which rule holds a message, and what would release it, in one paragraph."""
    stored = operations.loaded(message_id)
    record = stored.record
    named = f"Message {message_id} ({stored.envelope.type}, organization {org_of(record.queue)})"
    return f"{named} is {record.state}{_why(operations, policy, stored, routes)}"


def _why(operations: Operations, policy: Policy, stored: Stored, routes: Routes) -> str:
    record, transaction = stored.record, operations.transaction
    match record.state:
        case "QUEUED":
            why = _why_queued(operations, policy, stored, routes)
        case "SCHEDULED" | "RETRYING":
            why = _why_delayed(transaction, stored)
        case "PROCESSING":
            left_s = (record.lease_until - transaction.steady_ns) / NANOS_PER_S
            why = (
                f": worker {record.worker_id} holds its lease (attempt {record.attempt}), which ends in "
                f"{left_s:.1f} s unless the worker renews it."
            )
        case _:
            why = _why_ended(stored)
    return why


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


def _why_delayed(transaction: Transaction, stored: Stored) -> str:
    record = stored.record
    reasons = [event.detail.get("reason", "") for event in stored.history if event.kind == "deferred"]
    if ordering.is_parked(record, transaction.steady_ns):
        head = ordering.head_of(transaction, record.message_id)
        if head is not None and head.message_id != record.message_id:
            state = "is a dead letter and stops the key" if head.is_dead else "comes first"
            return (
                f": its ordering key is held by message {head.message_id}, which {state}. "
                "It runs when that one ends."
            )
        reason = reasons[-1] if reasons else "it is parked"
        is_held = reason.startswith("rule ")
        return f": {reason}. It runs after {'the rule is removed' if is_held else 'a resume'}."
    wait_s = max(0, record.due - transaction.steady_ns) / NANOS_PER_S
    if record.state == "RETRYING":
        error = _last_error(stored)
        return f": attempt {record.attempt} failed ({error}), and the next one is due in {wait_s:.1f} s."
    reason = reasons[-1] if reasons else "it was submitted with a delay"
    return f": {reason}. It is due in {wait_s:.1f} s."


def _why_queued(operations: Operations, policy: Policy, stored: Stored, routes: Routes) -> str:
    transaction, record = operations.transaction, stored.record
    org_id, kind = org_of(record.queue), stored.envelope.type
    pauses = holds.paused(transaction)
    for scope in ((ALL, ALL), (org_id, ALL), (ALL, kind), (org_id, kind)):
        if scope in pauses:
            return f": {_scope(*scope)} is paused. It runs after a resume."
    if poison.is_poison(record, policy.poison_crashes):
        return ": its own process died too often (poison). The next claim quarantines it."
    body = body_of(stored.envelope.payload)
    service = None if body is None else service_of(transaction, routes, kind, org_id, body)
    circuit = Breakers(transaction, policy).held_by(service, record.message_id) if service else None
    if circuit is not None and service is not None:
        left_s = max(0, circuit.open_until - transaction.steady_ns) / NANOS_PER_S
        return (
            f": the breaker of service {service.name} is {circuit.state}. "
            f"A probe is allowed in {left_s:.0f} s."
        )
    short = _why_short(transaction, policy, record, kind, body)
    if short:
        return short
    if not operations.workers():
        return f": no worker is running. Start one with `postroom engine work`.{_expiry(record, transaction)}"
    ahead = _ahead(transaction, record)
    return (
        f" with priority P{record.lane}: {ahead} messages of its organization are before it. "
        f"It runs when a worker is free.{_expiry(record, transaction)}"
    )


def _why_short(
    transaction: Transaction, policy: Policy, record: Record, type_name: str, body: Body | None
) -> str:
    """Which token budget would hold a message now; empty when none does."""
    rules = policy.token_rules
    if rules is None or body is None:
        return ""
    books = TokenBooks(transaction, rules)
    asking = books.asking(type_name, record, body)
    found = None if asking is None else books.decide(record, asking, prunes=False)
    if asking is None or not isinstance(found, Short):
        return ""
    wait_s = max(0, found.due_ns - transaction.steady_ns) / NANOS_PER_S
    return f": {short_text(asking, rules, record.priority)}. The budget is refilled in {wait_s:.0f} s."


def _ahead(transaction: Transaction, record: Record) -> int:
    counts = transaction.lanes.depth(record.queue)
    before = sum(counts.get(LANE_COUNTS[lane], 0) for lane in range(record.lane))
    same = transaction.pull(record.queue, record.lane, 1_000)
    return before + sum(head.record.place < record.place for head in same)


def _expiry(record: Record, transaction: Transaction) -> str:
    if not record.expires:
        return ""
    return f" It expires in {max(0, record.expires - transaction.steady_ns) / NANOS_PER_S:.0f} s."


def _scope(org_id: str, kind: str) -> str:
    of_type = f"type {kind}" if kind else "every type"
    return f"{of_type} of {f'organization {org_id}' if org_id else 'all organizations'}"
