"""Decisions: a question is answered by a learned rule, the adviser, or a person, and is recorded.

Rule 1: a decision and what follows from it commit together.
Rule 2: advice below `Policy.adviser_confidence_min` goes to a person. Without an answer within
        `Policy.decision_timeout_s`, the safe default is taken.
Rule 3: the same choice for the same pattern, `LEARNED_AFTER` times in a row, becomes a learned rule of the
        organization. It never applies to another organization.
"""

from collections.abc import Callable
from itertools import islice
from typing import Any, Final, TypeAlias

from msgspec.structs import replace

from postroom.core.goals import advice
from postroom.core.goals.advice import LEARNED_AFTER, Advice, Question
from postroom.engine.commits import Commits
from postroom.engine.messages import new_id
from postroom.engine.rules import holds
from postroom.engine.rules.cells import Likeness
from postroom.engine.rules.policy import Policy
from postroom.errors import InvalidMessage, UnknownDecision, WrongState
from postroom.goals import internal
from postroom.goals.advisers.adviser import asked
from postroom.goals.goal_cells import (
    CHOICES,
    DECISIONS,
    EFFECTS,
    PENDING,
    RULES,
    TALLIES,
    DecidedBy,
    Decision,
    LearnedRule,
)
from postroom.message import queue_of
from postroom.stores.transaction import Transaction

MICROS_PER_S: Final = 1_000_000
DECISIONS_LISTED_MAX: Final = 1_000
PATTERN_CHARS_MAX: Final = 256


# ---- in a transaction ------------------------------------------------------------------------------


def settle(
    transaction: Transaction,
    policy: Policy,
    question: Question,
    org_id: str,
    subject: dict[str, Any],
    *,
    asks_later: bool = True,
) -> Decision:
    """Decide a question, or record it for the adviser. `asks_later` has a worker ask the adviser."""
    decision = _new(transaction, question, org_id, subject)
    said = learned(transaction, org_id, question)
    if said is not None:
        return conclude(transaction, policy, decision, said, "learned")
    if not policy.has_model or len(question.options) == 1:
        return conclude(transaction, policy, decision, advice.advise(question), "rule")
    _record(transaction, decision)
    if asks_later:
        internal.go_on(transaction, policy, org_id, "advise", decision_id=decision.decision_id)
    return decision


def _new(transaction: Transaction, question: Question, org_id: str, subject: dict[str, Any]) -> Decision:
    return Decision(new_id(), question.kind, question, org_id, transaction.wall_us, subject=subject)


def learned(transaction: Transaction, org_id: str, question: Question) -> Advice | None:
    """Advice from a learned rule of the organization; None without one."""
    rule = RULES.get(transaction, org_id, question.kind, _pattern(question))
    if rule is None or rule.choice not in question.options:
        return None
    return Advice(rule.choice, 1.0, f"learned rule {rule.rule_id}")


def record(
    transaction: Transaction,
    policy: Policy,
    question: Question,
    org_id: str,
    subject: dict[str, Any],
    said: Advice,
    by: DecidedBy,
) -> Decision:
    """Record a decision that was taken outside a transaction."""
    return conclude(transaction, policy, _new(transaction, question, org_id, subject), said, by)


def conclude(
    transaction: Transaction, policy: Policy, decision: Decision, said: Advice, by: DecidedBy
) -> Decision:
    """Take a decision, or leave it to a person when the advice is not sure enough."""
    if by in ("rule", "adviser") and _needs_person(policy, decision, said, by):
        return leave_to_person(transaction, policy, decision, said)
    decided = replace(
        decision,
        state="decided",
        choice=said.choice,
        confidence=float(said.confidence),
        reasoning=said.reasoning,
        arguments=said.arguments,
        by=by,
        decided_us=transaction.wall_us,
    )
    _record(transaction, decided)
    if by in ("adviser", "person"):
        _learn(transaction, decided)
    _apply(transaction, policy, decided)
    return decided


def _needs_person(policy: Policy, decision: Decision, said: Advice, by: DecidedBy) -> bool:
    if decision.kind == "dead_letter" and (by == "rule" or said.choice == "purge"):
        return True
    return said.confidence < policy.adviser_confidence_min


def leave_to_person(transaction: Transaction, policy: Policy, decision: Decision, said: Advice) -> Decision:
    """Record a question that a person has to answer within the time limit."""
    is_sure = said.confidence >= policy.adviser_confidence_min
    why = "proposed" if is_sure else "the adviser is not sure"
    waiting = replace(
        decision,
        state="waiting",
        confidence=float(said.confidence),
        proposed=said.choice,
        reasoning=f"{why}: {said.choice} ({said.reasoning})",
        deadline_us=transaction.wall_us + round(policy.decision_timeout_s * MICROS_PER_S),
    )
    _record(transaction, waiting)
    internal.go_on(
        transaction, policy, decision.org_id, "time_out", delay_s=policy.decision_timeout_s,
        decision_id=decision.decision_id,
    )  # fmt: skip
    asked = f"decision {decision.decision_id} ({decision.kind}) waits for a person"
    transaction.alert("DecisionNeeded", asked, queue_of(decision.org_id))
    return waiting


def _record(transaction: Transaction, decision: Decision) -> None:
    DECISIONS.put(transaction, decision, decision.decision_id)
    PENDING.put(transaction, None if decision.state == "decided" else True, decision.decision_id)


def _pattern(question: Question) -> str:
    text = "".join(letter if letter.isprintable() else " " for letter in question.pattern)
    return text[:PATTERN_CHARS_MAX]


def _learn(transaction: Transaction, decision: Decision) -> None:
    pattern = _pattern(decision.question)
    if not pattern:
        return
    key = decision.org_id, decision.kind, pattern
    tally = advice.tallied(TALLIES.get(transaction, *key), decision.choice)
    TALLIES.put(transaction, tally, *key)
    if tally.count == LEARNED_AFTER:
        rule = LearnedRule(new_id(), *key, decision.choice, transaction.wall_us)
        RULES.put(transaction, rule, *key)


def _apply(transaction: Transaction, policy: Policy, decision: Decision) -> None:
    """Do what follows from a decision."""
    subject, org_id = decision.subject, decision.org_id
    match decision.kind:
        case "recovery":
            internal.go_on(transaction, policy, org_id, "recover", decision_id=decision.decision_id)
        case "merge":
            CHOICES.put(
                transaction, decision.choice, subject["goal_id"], subject["node_id"], subject["property"]
            )
            if decision.by in ("person", "timeout"):
                internal.go_on(transaction, policy, org_id, "complete", goal_id=subject["goal_id"])
        case "reversal_class":
            _classify(transaction, subject["goal_id"], subject["effects"], decision.choice)
        case "reversal":
            for note_reversal in on_reversal:
                note_reversal(transaction, policy, decision)
        case "dead_letter":
            _treat_dead_letters(transaction, policy, decision)
        case "conflict":
            for note_ruling in on_ruling:
                note_ruling(transaction, policy, decision)
        case _:
            pass


def _treat_dead_letters(transaction: Transaction, policy: Policy, decision: Decision) -> None:
    """Replay or purge dead letters after the commit, or hold messages like them from now on."""
    subject, org_id = decision.subject, decision.org_id
    if decision.choice in ("replay", "purge"):
        internal.go_on(transaction, policy, org_id, "dead_letters", decision_id=decision.decision_id)
    elif decision.choice == "hold":
        likeness = Likeness(new_id(), subject["error_type"], subject["service"], subject["payload"])
        holds.begin(transaction, org_id, subject["type"], likeness)
        said = f"rule {likeness.rule_id} holds messages of type {subject['type']} like those that failed"
        transaction.alert("Held", said, queue_of(org_id))


def _classify(transaction: Transaction, goal_id: str, numbers: list[int], choice: str) -> None:
    for number in numbers:
        effect = EFFECTS.get(transaction, goal_id, number)
        if effect is not None and not effect.reversal_class:
            EFFECTS.put(transaction, replace(effect, reversal_class=choice), goal_id, number)


on_reversal: Final[list[Callable[[Transaction, Policy, Decision], None]]] = []
"""It was decided which tool undoes an effect."""
on_ruling: Final[list[Callable[[Transaction, Policy, Decision], None]]] = []
"""A conflict was decided."""


def found(transaction: Transaction, decision_id: object) -> Decision:
    """A decision by its id. Raises `UnknownDecision`."""
    decision = None
    if isinstance(decision_id, str) and decision_id.isprintable():
        decision = DECISIONS.get(transaction, decision_id)
    if decision is None:
        raise UnknownDecision(decision_id)
    return decision


def answer(transaction: Transaction, policy: Policy, decision_id: str, choice: str) -> Decision:
    """A person decides."""
    decision = found(transaction, decision_id)
    if decision.state == "decided":
        raise WrongState(
            decision_id, "answer", "decided", f"decision {decision_id!r} was taken already: {decision.choice}"
        )
    if choice not in decision.question.options:
        options = ", ".join(decision.question.options)
        raise InvalidMessage(f"decision {decision_id!r} has the options {options}, not {choice!r}")
    return conclude(transaction, policy, decision, Advice(choice, 1.0, "a person decided"), "person")


def time_out(transaction: Transaction, policy: Policy, decision_id: str) -> None:
    """Nobody has answered in time: take the safe default."""
    decision = DECISIONS.get(transaction, decision_id)
    if decision is not None and decision.state == "waiting":
        said = Advice(decision.question.default, 1.0, "nobody decided in time, so the safe default was taken")
        conclude(transaction, policy, decision, said, "timeout")


def drop(transaction: Transaction, decision_id: str, choice: str, reasoning: str) -> None:
    """Nobody has to decide any more: the course of things has made the choice. Nothing follows from it."""
    decision = DECISIONS.get(transaction, decision_id) if decision_id else None
    if decision is not None and decision.state != "decided":
        taken = replace(
            decision, state="decided", choice=choice, by="rule", reasoning=reasoning,
            decided_us=transaction.wall_us,
        )  # fmt: skip
        _record(transaction, taken)


def waiting(transaction: Transaction, org_id: str | None = None) -> list[Decision]:
    """Decisions of an organization or of all that nobody has taken yet, the oldest first."""
    pending = (DECISIONS.get(transaction, key) for key, _ in PENDING.all(transaction))
    listed = (one for one in pending if one is not None and org_id in (None, one.org_id))
    some = islice(listed, DECISIONS_LISTED_MAX)  # those of others do not count
    return sorted(some, key=lambda decision: (decision.created_us, decision.decision_id))


# ---- outside ---------------------------------------------------------------------------------------


async def ask(commits: Commits, decision: Decision) -> Decision:
    """Ask the adviser about a recorded question, and commit the decision."""
    said, by = await asked(commits.policy.adviser, decision.question)

    def work(transaction: Transaction) -> Decision:
        current = found(transaction, decision.decision_id)
        if current.state != "asked":
            return current
        return conclude(transaction, commits.policy, current, said, "adviser" if by == "adviser" else "rule")

    return await commits.write_raw(work, makes_room=True)


Taken: TypeAlias = list[Decision]
Rules: TypeAlias = list[LearnedRule]
Ids: TypeAlias = list[str]


class Decisions:
    """`engine.decisions`: questions that wait for a person, decisions that were taken, and learned rules."""

    def __init__(self, commits: Commits) -> None:
        self._commits = commits

    async def list(self, *, decided: bool = False, org_id: str | None = None) -> Taken:
        """Decisions that nobody has taken yet; with `decided`, those that were taken.

        `org_id` leaves out those of other organizations.
        """

        def work(transaction: Transaction) -> Taken:
            if not decided:
                return waiting(transaction, org_id)
            found = DECISIONS.all(transaction)
            taken = [one for _, one in found if one.state == "decided" and org_id in (None, one.org_id)]
            return sorted(taken, key=lambda one: one.decided_us)[-DECISIONS_LISTED_MAX:]

        return await self._commits.read(lambda operations: work(operations.transaction))

    async def show(self, decision_id: str) -> Decision:
        """One decision. Raises `UnknownDecision`."""
        return await self._commits.read(lambda operations: found(operations.transaction, decision_id))

    async def answer(self, decision_id: str, choice: str) -> Decision:
        """Decide as a person. Raises `UnknownDecision`, `WrongState`, `InvalidMessage`."""
        policy = self._commits.policy
        return await self._commits.write_raw(
            lambda transaction: answer(transaction, policy, decision_id, choice), makes_room=True
        )

    async def replay(self, decision_id: str) -> Advice:
        """Ask the present adviser the recorded question again. Nothing is changed."""
        decision = await self.show(decision_id)
        said, _ = await asked(self._commits.policy.adviser, decision.question)
        return said

    async def rules(self) -> Rules:
        """The rules that are in force: learned ones, and those that hold messages at the door."""

        def work(transaction: Transaction) -> Rules:
            learned_rules = [rule for _, rule in RULES.all(transaction)]
            return learned_rules + [_shown_hold(transaction, rule) for rule in holds.in_force(transaction)]

        return await self._commits.read(lambda operations: work(operations.transaction))

    async def held(self, rule_id: str) -> Ids:
        """The ids of the messages that a rule holds, the oldest first. Raises `UnknownDecision`."""

        def work(transaction: Transaction) -> Ids:
            if not any(rule.likeness.rule_id == rule_id for rule in holds.in_force(transaction)):
                raise UnknownDecision(rule_id, "rule that holds messages")
            return holds.held(transaction, rule_id)

        return await self._commits.read(lambda operations: work(operations.transaction))

    async def forget(self, rule_id: str) -> None:
        """Remove a rule. The adviser is asked again, and a worker queues the messages that the rule held."""
        policy = self._commits.policy

        def work(transaction: Transaction) -> None:
            for held in holds.in_force(transaction):
                if held.likeness.rule_id == rule_id:
                    holds.end(transaction, held)
                    internal.go_on(transaction, policy, held.org_id, "release", rule_id=rule_id)
                    return
            for key, rule in RULES.all(transaction):
                if rule.rule_id == rule_id:
                    transaction.cells.put(RULES.name, key, None)
                    transaction.cells.put(TALLIES.name, key, None)
                    return
            raise UnknownDecision(rule_id, "learned rule")

        await self._commits.write_raw(work, makes_room=True)


def _shown_hold(transaction: Transaction, rule: holds.HoldRule) -> LearnedRule:
    likeness = rule.likeness
    return LearnedRule(
        rule_id=likeness.rule_id,
        org_id=rule.org_id,
        kind="dead_letter",
        pattern=f"{rule.type} {likeness.error_type}",
        choice="hold",
        learned_us=rule.since_us,
        service=likeness.service,
        payload=likeness.payload,
        held=len(holds.held(transaction, likeness.rule_id)),
    )
