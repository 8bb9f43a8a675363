"""Which messages a worker gets: classes of priority, organizations in turns, and what holds messages back.

Rule 1: P0 to P3 in order. A message that its age has promoted to another class stays in its own one, and gets
        a share of the deliveries of that class and of those between (`core.lifecycle.fairness`).
Rule 2: inside a class and inside that share, organizations take turns. Inside an organization, the oldest
        first.
Rule 3: a message that must not run now is deferred, quarantined or expired by the claim that meets it.
"""

from collections.abc import Callable
from math import ceil

import msgspec

from postroom.core.health.alerts import POISON
from postroom.core.lifecycle import breaker, lifecycle, poison
from postroom.core.lifecycle.fairness import PROMOTED, Rotation
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.tokens.token_rules import TokenRules
from postroom.core.tokens.tokens import QUEUE_LOOK_NS, Grant, Short
from postroom.engine.messages import Body, body_of
from postroom.engine.rules import holds, ordering, outcomes
from postroom.engine.rules.admission import over_budget
from postroom.engine.rules.breakers import Breakers, service_of
from postroom.engine.rules.cells import CIRCUITS, GOALS, PARKED, PAUSES, REASSIGNED, SCAN_MAX, SEPARATOR
from postroom.engine.rules.extensions import on_claim
from postroom.engine.rules.holds import HoldRule
from postroom.engine.rules.policy import Policy
from postroom.engine.rules.routes import Routes
from postroom.engine.rules.token_budgets import MODEL_CALL, TokenBooks, short_text
from postroom.errors import GuardTripped
from postroom.message import Moment, Record, Step, org_of
from postroom.stores.base import LANES, OVERDUE_A_CLAIM_MAX, ByIds, Head
from postroom.stores.transaction import Transaction

HELD_BACK_A_CLAIM_MAX = 200  # messages that one claim defers or ends; the next claim handles the rest
ORGANIZATIONS_A_CLAIM_MAX = 1_000  # paused ones included
PAUSED = "its type is paused"
ORDERED = b'"ordering_key":'
"""Every body with an ordering key contains this; a payload may contain it, too."""
SPENDS = b'"tokens":'
"""Every body with tokens contains this; a payload may contain it, too."""
NAMES_MODELS = b'"models":'
"""Every body that names models contains this; a payload may contain it, too."""


class Claimed(msgspec.Struct, frozen=True):
    """A message that a worker got."""

    record: Record
    type: str
    parent_message_id: str
    body: Body | None
    """None when it cannot be decoded."""
    raw: bytes
    is_promoted: bool
    grant: Grant | None = None
    """The tokens that are reserved for it."""


class Claims:
    """The claims of one transaction."""

    def __init__(
        self, transaction: Transaction, policy: Policy, worker_id: str, rotation: Rotation, routes: Routes
    ) -> None:
        self._transaction = transaction
        self._policy = policy
        self._worker_id = worker_id
        self._rotation = rotation
        self._routes = routes
        self._lease_ns = round(policy.lease_s * NANOS_PER_S)
        self._ages = policy.promote_after_ns
        self._books = None if policy.token_rules is None else TokenBooks(transaction, policy.token_rules)
        self._grants: dict[str, tuple[Grant, Body]] = {}
        """Tokens of messages that are about to be leased, and their bodies."""
        self._held_back = 0
        self._gates = [new_gate(transaction, policy) for new_gate in on_claim]
        self._has_budgets = policy.guard.limits_costs
        self._over: dict[tuple[str, str], GuardTripped | None] = {}
        """The goals that this claim has met, with the limit that each has used up."""
        self._paused_orgs: set[str] = set()
        self._paused_types: set[tuple[str, str]] = set()
        self._hold_rules: list[HoldRule] = []
        self._breakers = Breakers(transaction, policy)
        self._filled: list[int] = []
        """Lanes that have messages."""
        self._promoted: dict[int, Record] = {}
        """The message that has waited longest in each lane where its age has promoted it."""

    def claim(self, limit: int) -> list[Claimed]:
        """Lease up to `limit` messages."""
        transaction = self._transaction
        transaction.look_ahead(((PAUSES.name, SCAN_MAX), (CIRCUITS.name, 1)), lanes=True)
        transaction.put_back(OVERDUE_A_CLAIM_MAX)
        if self._books is None:
            return self._reassigned(self._claim(limit))
        if transaction.lapsed:
            self._books.settle_all(transaction.lapsed)
        claimed = self._reassigned(self._claim(limit))
        self._books.flush()
        return claimed

    def _reassigned(self, claimed: list[Claimed]) -> list[Claimed]:
        """Messages as the agents that recovery gave them to have them. It gives away only repeated ones."""
        for index, one in enumerate(claimed):
            if one.record.attempt > 1 and one.body is not None and one.body.in_goal:
                agent_id = REASSIGNED.get(self._transaction, one.record.message_id)
                if agent_id is not None:
                    body = msgspec.structs.replace(one.body, agent_id=agent_id)
                    claimed[index] = msgspec.structs.replace(one, body=body)
        return claimed

    def _claim(self, limit: int) -> list[Claimed]:
        if not limit or not self._look_at_rules():
            return []
        chosen: list[Head] = []
        claimed: list[Claimed] = []
        self._look_at_lanes()
        for lane in range(LANES):
            while len(claimed) + len(chosen) < limit and self._held_back < HELD_BACK_A_CLAIM_MAX:
                held_back = self._held_back
                heads, is_all = self._choose(lane, limit - len(claimed) - len(chosen))
                admitted = self._admitted(lane, heads)
                chosen += admitted
                if self._held_back == held_back and (is_all or not admitted):
                    break
                claimed += self._lease(chosen)  # the lanes show the next messages once these are leased
                chosen = []
                self._look_at_lanes()
        return claimed + self._lease(chosen)

    def _admitted(self, lane: int, heads: list[Head]) -> list[Head]:
        """The heads that may run now. Only messages that run count towards the share of promoted ones."""
        rotation, has_rivals = self._rotation, bool(self._rivals(lane))
        if not has_rivals and not any(other > lane for other in self._promoted):
            rotation.note_none_waits()
        admitted: list[Head] = []
        for head in heads:
            is_promoted = head.record.lane > lane
            if is_promoted and not rotation.promoted_in(1):
                continue  # too early, because one before it was held back
            if self._may_run(head):
                admitted.append(head)
                if has_rivals:
                    rotation.note(promoted=is_promoted)
            elif is_promoted:
                break  # the next promoted one has its turn
        return admitted

    def _rivals(self, lane: int) -> list[int]:
        """The lower lanes of which a message is promoted to a class, or above."""
        return [other for other, oldest in self._promoted.items() if other > lane >= self._class_of(oldest)]

    def _look_at_lanes(self) -> None:
        """Read which lanes have messages, and of which the oldest ones are promoted."""
        self._filled = self._transaction.lanes.filled()
        oldest = {lane: self._transaction.lanes.oldest(lane) for lane in self._filled if lane}
        self._promoted = {
            lane: record for lane, record in oldest.items() if record and self._class_of(record) < lane
        }

    def _look_at_rules(self) -> bool:
        """Read pauses; False when everything is paused."""
        for key, pause in PAUSES.all(self._transaction):
            if rule := holds.rule_of(key, pause):
                self._hold_rules.append(rule)
                continue
            org_id, _, type_name = key.partition(SEPARATOR)
            if not org_id and not type_name:
                return False
            if type_name:
                self._paused_types.add((org_id, type_name))
            else:
                self._paused_orgs.add(org_id)
        return True

    # ---- choosing ------------------------------------------------------------------------------

    def _choose(self, lane: int, limit: int) -> tuple[list[Head], bool]:
        """The next deliveries while a class is the highest, in order, and whether the class has no more."""
        if lane not in self._filled:
            return [], True
        transaction, rotation = self._transaction, self._rotation
        rivals = self._rivals(lane)
        due = rotation.promoted_in(limit) if rivals else 0
        shares = self._shares(self._active(lane, lane, limit), limit)
        pulls = [(queue, lane, count) for queue, count in shares]
        pulls += [(queue, other, due) for other in rivals if due for queue in self._promoting(other, due)]
        if len(pulls) > 1:
            transaction.look_ahead_pulls(pulls)
        found = [transaction.pull(*pull) for pull in pulls]
        accepted = {queue: heads for (queue, *_), heads in zip(shares, found, strict=False)}
        promoted: dict[str, list[Head]] = {}
        for (queue, *_), heads in zip(pulls[len(shares) :], found[len(shares) :], strict=True):
            older = [head for head in heads if self._class_of(head.record) <= lane]
            promoted[queue] = sorted([*promoted.get(queue, ()), *older], key=lambda head: head.record.place)
        is_all = len(shares) < limit and all(len(accepted[queue]) < count for queue, count in shares)
        heads = rotation.mix(lane, accepted, promoted, limit, self._weight)
        return heads, is_all and len(heads) < limit and all(head.record.lane == lane for head in heads)

    def _class_of(self, record: Record) -> int:
        return lifecycle.effective_lane(
            record.lane, self._transaction.steady_ns - record.ready_at, self._ages
        )

    def _promoting(self, lane: int, limit: int) -> list[str]:
        """Queues that may have messages promoted by their age in a lane, next turn first."""
        found = self._active(lane, PROMOTED, limit)
        oldest = self._promoted[lane].queue
        if oldest not in found and org_of(oldest) not in self._paused_orgs:
            found.append(oldest)  # out of turn, so that no message waits indefinitely
        return found

    def _active(self, lane: int, turns: int, limit: int) -> list[str]:
        """Up to `limit` queues with messages in a lane that are not paused, next turn first.

        `turns` is the rotation that they are in: that of a class, or that of promoted messages.
        """
        after = self._rotation.last.get(turns, "")
        if after and not self._paused_orgs and self._transaction.lanes.is_alone(after, lane):
            return [after]
        found: list[str] = []
        seen: set[str] = set()
        at = after
        for start in (after, ""):
            at = start
            while len(found) < limit and len(seen) < ORGANIZATIONS_A_CLAIM_MAX:
                queues = [
                    queue for queue in self._transaction.lanes.active(lane, at, limit) if queue not in seen
                ]
                if not queues:
                    break
                seen.update(queues)
                found += [queue for queue in queues if org_of(queue) not in self._paused_orgs]
                at = queues[-1]
            if not start or len(seen) >= ORGANIZATIONS_A_CLAIM_MAX:
                break
        if not found and len(seen) >= ORGANIZATIONS_A_CLAIM_MAX:
            self._rotation.last[turns] = at  # the next claim starts after these paused ones
        return found[:limit]

    def _shares(self, queues: list[str], limit: int) -> list[tuple[str, int]]:
        """How many messages of each queue one round of turns can take. The next round takes the rest."""
        if len(queues) <= 1:
            return [(queue, limit) for queue in queues]
        weights = {queue: self._weight(queue) for queue in queues}
        rounds = limit / sum(weights.values())
        return [(queue, min(limit, ceil(rounds * weight) + 1)) for queue, weight in weights.items()]

    def _weight(self, queue: str) -> float:
        return self._policy.organization_of(org_of(queue)).weight

    # ---- what holds a message back -------------------------------------------------------------

    def _may_run(self, head: Head) -> bool:
        """Whether a message may run now. Otherwise it is deferred, quarantined or expired."""
        record, now = head.record, self._transaction.steady_ns
        org_id = org_of(record.queue)
        if 0 < record.expires <= now:
            self._end(record, lifecycle.expire)
        elif poison.is_poison(record, self._policy.poison_crashes):
            said = f"its own process died {poison.own_deaths(record)} times"
            self._end(record, lambda one, moment: lifecycle.quarantine(one, moment, said))
            told = f"message {record.message_id} is quarantined: {said}"
            self._transaction.alert(POISON, told, record.queue)
        elif self._paused_types and self._is_paused(org_id, head.type):
            PARKED.put(self._transaction, record.message_id, head.type, org_id, record.seq)
            ordering.park(self._transaction, record.message_id, PAUSED)
        elif (self._hold_rules and self._is_held(org_id, head)) or not self._is_next(head):
            pass
        elif self._has_budgets and (over := self._over_budget(org_id, head)) is not None:
            self._fail(head, str(over), type(over).__name__)
        elif self._passes_gates(head):
            return True
        self._held_back += 1
        return False

    def _over_budget(self, org_id: str, head: Head) -> GuardTripped | None:
        """The limit that the goal of a message has used up; None when the message may run."""
        body = body_of(head.payload)
        if body is None or body.ignores_guard:
            return None
        goal = org_id, body.goal_id
        if goal not in self._over:
            used = GOALS.get(self._transaction, *goal)
            self._over[goal] = None if used is None else over_budget(self._policy.guard, body.goal_id, used)
        return self._over[goal]

    def _passes_gates(self, head: Head) -> bool:
        """Whether no gate holds a message back, and it has its tokens and may call its service."""
        gates = [gate for gate in self._gates if gate.marker in head.payload]
        body = body_of(head.payload) if gates else None
        if body is None:
            return self._admits(head)
        if not all(gate.admits(head, body) for gate in gates) or not self._admits(head):
            return False
        for gate in gates:
            gate.enter(head, body)
        return True

    def _is_paused(self, org_id: str, type_name: str) -> bool:
        """Whether a type is paused. Pauses are read again, after transactions that change them have ended."""
        scopes = self._paused_types.intersection({(org_id, type_name), ("", type_name)})
        if not scopes:
            return False
        self._transaction.exclusive(PAUSES.name)
        return any(PAUSES.get(self._transaction, *scope) is not None for scope in scopes)

    def _is_held(self, org_id: str, head: Head) -> bool:
        """Whether a rule holds a message."""
        body = body_of(head.payload)
        return body is not None and any(
            (rule.org_id, rule.type) == (org_id, head.type)
            and holds.is_alike(self._transaction, rule.likeness, body)
            and holds.hold(self._transaction, head.record, rule)
            for rule in self._hold_rules
        )

    def _end(self, record: Record, decide: Callable[[Record, Moment], Step]) -> None:
        [step] = self._transaction.apply(ByIds((record.message_id,)), decide)
        outcomes.ended(self._transaction, self._policy, step.record)

    def _is_next(self, head: Head) -> bool:
        """Whether no older message of the same ordering key is left."""
        return ORDERED not in head.payload or ordering.is_next(self._transaction, head.record)

    def _admits(self, head: Head) -> bool:
        """Whether a message has its tokens, and its service may be called."""
        raw, books = head.payload, self._books
        if books is None or not (SPENDS in raw or head.type == MODEL_CALL or NAMES_MODELS in raw):
            return self._service_admits(head)
        stored = body_of(raw)
        body = None if stored is None else books.asking(head.type, head.record, stored)
        if body is None:
            return self._service_admits(head)
        found = books.take(head.record, body)
        if not isinstance(found, Grant):
            self._hold_back(head, body, found)
            return False
        if body is not stored:
            found = msgspec.structs.replace(found, is_estimate=True)
        if not self._service_admits(head):
            books.give_back(found)
            return False
        self._grants[head.record.message_id] = found, body
        return True

    def _hold_back(self, head: Head, body: Body, short: Short | None) -> None:
        """No model has the tokens of a message. P0 fails at once; others wait."""
        books, rules, record = self._books, self._policy.token_rules, head.record
        assert books is not None  # noqa: S101 - for the type checker: there are budgets
        assert rules is not None  # noqa: S101 - the same
        if short is None:
            self._fail(head, _never(body, rules), "TokensExhausted")
            return
        books.refuse(record, body)
        reason = short_text(body, rules, record.priority)
        if record.priority == 0:
            self._fail(head, reason, "TokensExhausted")
            return
        delay_ns = short.due_ns - self._transaction.steady_ns
        if rules.shortage == "queue":
            delay_ns = min(delay_ns, QUEUE_LOOK_NS)
        self._defer(record, delay_ns, reason)

    def _fail(self, head: Head, reason: str, error_type: str) -> None:
        """Make a message a dead letter without running it."""
        [leased] = self._transaction.lease([(head, head.record.lane)], self._worker_id, self._lease_ns)
        self._end(
            leased,
            lambda one, moment: _required(
                lifecycle.fail(one, moment, leased.lease, reason, error_type=error_type, delay_ns=None)
            ),
        )

    def _defer(self, record: Record, delay_ns: int, reason: str) -> None:
        self._transaction.apply(
            ByIds((record.message_id,)), lambda one, moment: lifecycle.defer(one, moment, delay_ns, reason)
        )

    def _service_admits(self, head: Head) -> bool:
        if not self._breakers.any:  # then no message has to be decoded here
            return True
        record, body = head.record, body_of(head.payload)
        if body is None:
            return True
        service = service_of(self._transaction, self._routes, head.type, org_of(record.queue), body)
        if service is None:
            return True
        circuit = self._breakers.held_by(service, record.message_id)
        if circuit is None:
            self._breakers.let_through(service, record.message_id, self._lease_ns)
            return True
        reason = f"the breaker of service {service.name} is open"
        if self._policy.breaker_of(service.name).fails(record.priority):
            self._fail(head, reason, "BreakerOpen")
            return False
        self._defer(record, breaker.wait_ns(circuit, self._transaction.steady_ns), reason)
        return False

    # ---- leasing -------------------------------------------------------------------------------

    def _lease(self, heads: list[Head]) -> list[Claimed]:
        """Lease messages, each with the class that its age has promoted it to."""
        if not heads:
            return []
        chosen = [(head, self._class_of(head.record)) for head in heads]
        leased = self._transaction.lease(chosen, self._worker_id, self._lease_ns)
        for gate in self._gates:
            gate.leased(leased)
        if self._grants:
            return self._with_tokens(chosen, leased)
        return [
            Claimed(
                record, head.type, head.parent_message_id, body_of(head.payload), head.payload,
                head.record.lane > lane,
            )
            for (head, lane), record in zip(chosen, leased, strict=True)
        ]  # fmt: skip

    def _with_tokens(self, chosen: list[tuple[Head, int]], leased: list[Record]) -> list[Claimed]:
        """As `_lease`, for messages of which some have tokens: the tokens are tied to the leases."""
        claimed: list[Claimed] = []
        held: list[tuple[Record, Grant]] = []
        for (head, lane), record in zip(chosen, leased, strict=True):
            grant, body = self._grants.get(record.message_id, (None, None))
            if grant is not None:
                held.append((record, grant))
            else:
                body = body_of(head.payload)
            promoted = head.record.lane > lane
            claimed.append(
                Claimed(record, head.type, head.parent_message_id, body, head.payload, promoted, grant)
            )
        if self._books is not None:
            self._books.hold(held)
        return claimed


def _never(body: Body, rules: TokenRules) -> str:
    if not rules.candidates(body.models):
        return f"none of its models has a budget: {', '.join(body.models)}"
    return f"its {body.tokens} tokens are more than any of its models can give"


def _required(step: Step | None) -> Step:
    assert step is not None  # noqa: S101 - for the type checker: the lease was just taken
    return step
