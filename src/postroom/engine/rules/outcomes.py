"""The outcomes of attempts, applied to records, breakers, token budgets and ordering keys.

Rule 1: an outcome whose lease is over changes nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from postroom.core.lifecycle import lifecycle
from postroom.core.lifecycle.retry import demoted
from postroom.core.tokens.provider_headers import Observed
from postroom.core.tokens.token_rules import TokenRules
from postroom.core.tokens.tokens import Grant
from postroom.engine.messages import Body
from postroom.engine.rules import ordering, storage
from postroom.engine.rules.breakers import Breakers, Service
from postroom.engine.rules.cells import GOALS, GoalUse
from postroom.engine.rules.extensions import on_complete, on_end, on_release
from postroom.engine.rules.policy import Policy
from postroom.engine.rules.token_budgets import NOTHING, Spent, TokenBooks
from postroom.errors import StaleLease, UnknownTask, WrongState
from postroom.message import Moment, Record, Step
from postroom.stores.base import ByIds
from postroom.stores.transaction import NO_STARTS, Decide, Transaction

OutcomeKind: TypeAlias = Literal["completed", "failed", "released", "deferred", "crashed"]


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a handler reports that its work cost."""

    model: str = ""
    tokens_in: int = 0
    tokens_out: int = 0
    cost_usd: float = 0.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one attempt ended."""

    kind: OutcomeKind
    message_id: str
    lease: int
    org_id: str = ""
    result: bytes = b"null"
    error: str = ""
    error_type: str = ""
    is_final: bool = False
    """A failure that is not retried."""
    retry_in_s: float | None = None
    """When a failure is retried; None leaves it to the rule of the type."""
    max_retries: int | None = None
    """How many retries the rule of the handler or of the error allows; None leaves it to the message."""
    keeps_priority: bool = False
    spread: float = 0.0
    """A random number from 0 to 1, for the jitter."""
    delay_s: float = 0.0
    has_run: bool = False
    """Whether a deferred attempt had begun its work: then what it used counts."""
    type: str = ""
    service: Service | None = None
    """The service that the attempt called."""
    counts_for_breaker: bool = False
    body: Body | None = None
    usage: Usage | None = None
    grant: Grant | None = None
    """The tokens that were reserved for the attempt."""


class Outcomes:
    """Applies outcomes in one transaction."""

    def __init__(
        self,
        transaction: Transaction,
        policy: Policy,
        books: TokenBooks | None,
        started: Mapping[str, int] = NO_STARTS,
    ) -> None:
        """`started` says when handlers began of which no event tells yet, by message id."""
        self.transaction = transaction
        self._started = started
        self._policy = policy
        self._books = books
        self._breakers = Breakers(transaction, policy)
        self._ran: list[Outcome] = []
        """Attempts that ran to an end and were not counted before: what they cost counts."""

    def finish(self, outcomes: Sequence[Outcome]) -> list[str]:
        """Apply the outcomes of attempts. Returns messages whose lease was over: their outcome is dropped."""
        stale = self._complete([one for one in outcomes if one.kind == "completed"])
        for outcome in outcomes:
            if outcome.kind != "completed":
                try:
                    self._finish(outcome)
                except (StaleLease, UnknownTask, WrongState):
                    stale.append(outcome.message_id)
        if self._policy.guard.is_set:
            self._count_usage()
        if self._books is not None:
            self._books.flush()
        return stale

    def _complete(self, outcomes: Sequence[Outcome]) -> list[str]:
        together = {one.message_id: one for one in outcomes}
        repeated = [one for one in outcomes if together[one.message_id] is not one]
        rules = self._policy.token_rules
        details = {one.message_id: _spent(one, rules) for one in outcomes if one.usage is not None}
        try:
            new = self.transaction.complete(
                {message_id: (one.lease, one.result) for message_id, one in together.items()},
                details,
                self._starts_of(together),
            )
        except (StaleLease, UnknownTask):
            return [one.message_id for one in outcomes if not self._complete_alone(one)]
        self._after_success([*together.values()], new)
        return [one.message_id for one in repeated if not self._complete_alone(one)]

    def _complete_alone(self, outcome: Outcome) -> bool:
        """Complete one message; False when the lease was over."""
        result = {outcome.message_id: (outcome.lease, outcome.result)}
        try:
            details = {outcome.message_id: _spent(outcome, self._policy.token_rules)}
            new = self.transaction.complete(result, details, self._starts_of(result))
        except (StaleLease, UnknownTask):
            return False
        self._after_success([outcome], new)
        return True

    def _starts_of(self, message_ids: Iterable[str]) -> dict[str, int]:
        return {each: self._started[each] for each in message_ids if each in self._started}

    def _after_success(self, outcomes: Sequence[Outcome], new: Sequence[str]) -> None:
        """Update what depends on completed messages. `new` are those that were not completed before."""
        for outcome in outcomes:
            if outcome.service is not None:
                self._breakers.succeeded(outcome.service, outcome.message_id)
            if outcome.body is not None and outcome.body.ordering_key:
                self._ended(outcome.message_id)
            if outcome.message_id in new:
                storage.add(self.transaction, outcome.org_id, outcome.message_id, len(outcome.result))
                self._note_result(outcome)
                self._ran.append(outcome)
        if self._books is not None:
            for outcome in outcomes:
                if outcome.message_id in new and (outcome.body is None or outcome.body.tokens):
                    self._settle(outcome, Spent(_tokens_of(outcome), ran=True))

    def _note_result(self, outcome: Outcome) -> None:
        if outcome.body is not None:
            for note in on_complete:
                note(self.transaction, self._policy, outcome.message_id, outcome.body, outcome.result)

    def _count_usage(self) -> None:
        """Add what attempts cost to the use of their goals."""
        costs: dict[tuple[str, str], GoalUse] = {}
        rules = self._policy.token_rules
        for outcome in self._ran:
            if outcome.usage is not None and outcome.body is not None:
                goal, usage = (outcome.org_id, outcome.body.goal_id), outcome.usage
                cost = costs.get(goal) or GoalUse()
                tokens, usd = cost.tokens + _tokens_of(outcome), cost.usd + _cost_usd(usage, rules)
                costs[goal] = GoalUse(tokens=tokens, usd=usd)
        for goal, cost in costs.items():
            used = GOALS.get(self.transaction, *goal) or GoalUse()
            more = replace(used, tokens=used.tokens + cost.tokens, usd=used.usd + cost.usd)
            GOALS.put(self.transaction, replace(more, seen_us=self.transaction.wall_us), *goal)

    def _finish(self, outcome: Outcome) -> None:
        match outcome.kind:
            case "failed":
                self._fail(outcome)
            case "released":
                self._apply(outcome, lambda record, moment: lifecycle.release(record, moment, outcome.lease))
                self._settle(outcome, NOTHING)
            case "crashed":
                self._apply(
                    outcome,
                    lambda record, moment: lifecycle.crash(record, moment, outcome.lease, outcome.error),
                )
                self._settle(outcome, NOTHING)
            case "deferred":
                delay_ns = round(outcome.delay_s * lifecycle.NANOS_PER_S)
                is_first = self._apply(
                    outcome,
                    lambda record, moment: lifecycle.defer(
                        record, moment, delay_ns, outcome.error, outcome.lease
                    ),
                )
                if is_first and outcome.has_run:
                    self._ran.append(outcome)
                self._settle(outcome, Spent(_tokens_of(outcome), ran=True) if outcome.has_run else NOTHING)

    def _settle(self, outcome: Outcome, spent: Spent) -> None:
        """Book what an attempt used of its reservation, and return the rest."""
        if self._books is not None:
            self._books.settle(outcome.lease, spent)

    def _fail(self, outcome: Outcome) -> None:
        rule = self._policy.retry_of(outcome.type)

        def decide(record: Record, moment: Moment) -> Step | None:
            delay_ns: int | None = None
            if not outcome.is_final and outcome.retry_in_s is not None:
                delay_ns = round(outcome.retry_in_s * lifecycle.NANOS_PER_S)
            elif not outcome.is_final:
                delay_ns = rule.delay_ns(record.retries, outcome.spread)
            lane = record.lane if outcome.keeps_priority else demoted(record.priority, record.retries + 1)
            step = lifecycle.fail(
                record, moment, outcome.lease, outcome.error,
                error_type=outcome.error_type, delay_ns=delay_ns, lane=lane, max_retries=outcome.max_retries,
            )  # fmt: skip
            if step is None or outcome.service is None:
                return step
            failed, *others = step.events  # the message may not name the service that its handler calls
            return Step(step.record, (replace(failed, detail={"service": outcome.service.name}), *others))

        is_first = self._apply(outcome, decide)
        self._settle_failure(outcome)
        if is_first:
            self._ran.append(outcome)
        if is_first and outcome.counts_for_breaker and outcome.service is not None:
            self._breakers.failed(outcome.service, outcome.message_id)

    def _settle_failure(self, outcome: Outcome) -> None:
        """Book what a failed attempt used. A provider that limits the rate is left alone for a while."""
        if self._books is None:
            return
        if outcome.grant is not None and outcome.error_type == "RateLimited":
            said = Observed(retry_after_s=outcome.retry_in_s)
            self._books.observe(outcome.grant.provider, outcome.grant.model, said)
        self._settle(
            outcome,
            Spent(_tokens_of(outcome), ran=True, facts=_spent(outcome, self._policy.token_rules)),
        )

    def _apply(self, outcome: Outcome, decide: Decide) -> bool:
        """Apply an outcome; False when it was applied before."""
        message_id = outcome.message_id
        if message_id in self._started:
            self.transaction.tell_started({message_id: (outcome.lease, self._started[message_id])})
        steps = self.transaction.apply(ByIds((message_id,)), decide)
        for step in steps:
            if step.record.state in lifecycle.ENDED:
                ended(self.transaction, self._policy, step.record)
            else:
                for note_release in on_release:
                    note_release(self.transaction, self._policy, step.record)
        return bool(steps)

    def _ended(self, message_id: str) -> None:
        for record in self.transaction.records.find(ByIds((message_id,))):
            ordering.ended(self.transaction, record)


def _tokens_of(outcome: Outcome) -> int:
    return 0 if outcome.usage is None else outcome.usage.tokens_in + outcome.usage.tokens_out


def _cost_usd(usage: Usage, rules: TokenRules | None) -> float:
    """What an attempt cost: what its handler says, else the price of its tokens."""
    if usage.cost_usd or rules is None:
        return usage.cost_usd
    return rules.cost_usd(usage.model, usage.tokens_in + usage.tokens_out)


def _spent(outcome: Outcome, rules: TokenRules | None) -> dict[str, Any]:
    """The detail of the event that ends an attempt, for the audit stream."""
    if outcome.usage is None:
        return {}
    facts: dict[str, Any] = msgspec.to_builtins(outcome.usage)
    facts["cost_usd"] = _cost_usd(outcome.usage, rules)
    if outcome.body is not None:
        facts |= {"goal_id": outcome.body.goal_id, "agent_id": outcome.body.agent_id}
    if outcome.service:
        facts["service"] = outcome.service.name
    return {name: value for name, value in facts.items() if value}


def ended(transaction: Transaction, policy: Policy, record: Record) -> None:
    """A message has ended without a result."""
    ordering.ended(transaction, record)
    for note_end in on_end:
        note_end(transaction, policy, record)
