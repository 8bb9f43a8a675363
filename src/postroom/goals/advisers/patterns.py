"""Dead letters that are alike: what the adviser says about them, and rules against the next ones.

Rule 1: workers look at new dead letters by themselves, one of them once in `LOOK_S`. They only count; a
        pattern of `SYSTEMATIC_MIN` dead letters becomes one question.
Rule 2: rules only propose. A person decides, or a model that is sure; a purge always needs a person.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias, TypedDict, Unpack

from msgspec.structs import replace

from postroom.core.goals import advice
from postroom.core.times import EPOCH, MICROSECOND
from postroom.engine.dlq import (
    DeadLetter,
    DeadLetters,
    Filters,
    FoundLetters,
    LetterFilters,
    letter_by_id,
    search,
)
from postroom.engine.rules import holds
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.policy import Policy
from postroom.errors import Unavailable, UnknownTask, WrongState
from postroom.goals import decisions
from postroom.goals.advisers.facts import quoted
from postroom.goals.advisers.questions import said_at_once
from postroom.goals.goal_cells import LOOKS, PATTERNS, Decision, Look, SeenPattern
from postroom.goals.internal import WORK

LOOK_S: Final = 60.0
SETTLED_S: Final = 1.0  # younger dead letters wait for the next look: their commits may not be visible yet
LOOKED_A_LOOK_MAX: Final = 1_000
SYSTEMATIC_MIN: Final = 5
ASK_AGAIN_S: Final = 86_400.0
PATTERNS_KEPT_MAX: Final = 100
MICROS_PER_S: Final = 1_000_000


class DeadLetterPattern(TypedDict):
    """Dead letters of one type and error."""

    type: str
    error_type: str
    error: str
    count: int
    is_poison: bool


class AdvisedPattern(DeadLetterPattern):
    """What the adviser says about dead letters of one type and error."""

    advice: str
    reasoning: str
    message_ids: list[str]


Patterns: TypeAlias = list[AdvisedPattern]

PATTERNS_MAX: Final = 100
EXAMPLES_MAX: Final = 5
EXAMPLE_CHARS_MAX: Final = 300


class AdvisedDeadLetters(DeadLetters):
    """Dead letters, and what to do about them."""

    async def patterns(self, **filters: Unpack[LetterFilters]) -> Patterns:
        """What the adviser says about dead letters of the same type and error: an option of `dead_letter`."""
        found = []
        for (kind, error_type), alike in _groups(await self.list(**filters))[:PATTERNS_MAX]:
            last = alike[-1].error_history[-1:]
            pattern = DeadLetterPattern(
                type=kind,
                error_type=error_type,
                error=last[0]["error"] if last else "",
                count=len(alike),
                is_poison=any(letter.state == "QUARANTINED" for letter in alike),
            )
            examples = alike[:EXAMPLES_MAX]
            facts = {**pattern, "examples": [_example(letter) for letter in examples]}
            question = advice.question("dead_letter", facts, pattern=f"{kind} {error_type}")
            said, _ = await said_at_once(self._commits, question)
            ids = [letter.message_id for letter in examples]
            found.append(
                AdvisedPattern(**pattern, advice=said.choice, reasoning=said.reasoning, message_ids=ids)
            )
        return found

    async def look(self, *, only_when_due: bool = False) -> int:
        """Count new dead letters, and ask about those that are alike. Returns how many questions that makes.

        Workers do this by themselves, when it is due.
        """
        look, found = await self._commits.read(partial(_new_letters, only_when_due=only_when_due))
        if found is None:
            return 0
        return await self._commits.write(
            partial(_note, policy=self._commits.policy, look=look, found=found), makes_room=True
        )

    async def keep_looking(self) -> None:
        """Look again and again; a loop of every worker."""
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(Unavailable):
                await self.look(only_when_due=True)

    async def follow(self, decision: Decision) -> None:
        """Replay or purge the dead letters that a decision is about, not later ones."""
        until = EPOCH + decision.decided_us * MICROSECOND
        names = ("type", "error_type")
        filters = {name: decision.subject[name] for name in names}
        if decision.choice == "replay":
            await self.replay(org_id=decision.org_id, until=until, **filters)
        else:
            await self.purge(org_id=decision.org_id, until=until, **filters)


def _example(letter: DeadLetter) -> dict[str, Any]:
    original = letter.original_message
    return {
        "payload": quoted(original.get("payload"), EXAMPLE_CHARS_MAX),
        "agent_id": original.get("agent_id", ""),
        "service": original.get("service", ""),
        "attempts": len(letter.error_history),
        "error": letter.failure_reason[:EXAMPLE_CHARS_MAX],
    }


def _groups(letters: Sequence[DeadLetter]) -> list[tuple[tuple[str, str], list[DeadLetter]]]:
    """Dead letters by type and error type."""
    groups: dict[tuple[str, str], list[DeadLetter]] = {}
    for letter in letters:
        kind = str(letter.original_message.get("type", ""))
        groups.setdefault((kind, _error_type(letter)), []).append(letter)
    return list(groups.items())


def _error_type(letter: DeadLetter) -> str:
    return letter.error_history[-1]["error_type"] if letter.error_history else letter.state


# ---- the look at new dead letters ------------------------------------------------------------------


def _new_letters(operations: Operations, *, only_when_due: bool) -> tuple[Look, FoundLetters | None]:
    """Dead letters that no look has counted yet, without their payloads."""
    transaction = operations.transaction
    look = LOOKS.get(transaction) or Look()
    if only_when_due and look.due_us > transaction.wall_us:
        return look, None
    if not look.until_us:
        settled_us = transaction.wall_us - round(SETTLED_S * MICROS_PER_S)
        look = replace(look, until_us=max(settled_us, look.since_us - 1))
    since, until = (EPOCH + us * MICROSECOND for us in (look.since_us, look.until_us))
    wanted = Filters(since=since, until=until, limit=None)
    return look, search(operations, wanted, LOOKED_A_LOOK_MAX, read_value=None, place=look.place)


def _note(operations: Operations, policy: Policy, look: Look, found: FoundLetters) -> int:
    """Count dead letters, unless another look has done so; returns how many questions follow."""
    transaction = operations.transaction
    stored = LOOKS.get(transaction) or Look()
    if (stored.since_us, stored.place) != (look.since_us, look.place):
        return 0
    due_us = transaction.wall_us + round(LOOK_S * MICROS_PER_S)
    is_over = not found.place
    after = Look(due_us, look.until_us + 1) if is_over else replace(look, due_us=due_us, place=found.place)
    LOOKS.put(transaction, after)
    by_org: dict[str, list[DeadLetter]] = {}
    for letter in found.letters:
        org_id = letter.original_message.get("org_id", "")
        if org_id and letter.original_message["type"] != WORK:
            by_org.setdefault(org_id, []).append(letter)
    return sum(
        _count(operations, policy, org_id, *names, alike)
        for org_id, letters in by_org.items()
        for names, alike in _groups(letters)
    )


def _count(
    operations: Operations,
    policy: Policy,
    org_id: str,
    kind: str,
    error_type: str,
    alike: Sequence[DeadLetter],
) -> bool:
    """Count dead letters of one pattern; True when that makes it a question."""
    transaction, now_us = operations.transaction, operations.transaction.wall_us
    known = PATTERNS.get(transaction, org_id, kind, error_type)
    if known is None and len(PATTERNS.under(transaction, org_id)) >= PATTERNS_KEPT_MAX:
        return False
    before = known or SeenPattern()
    ids = [*before.message_ids, *(letter.message_id for letter in alike)][-EXAMPLES_MAX:]
    seen = replace(before, count=before.count + len(alike), last_us=now_us, message_ids=ids)
    is_asked = seen.count >= SYSTEMATIC_MIN and now_us - seen.asked_us >= round(ASK_AGAIN_S * MICROS_PER_S)
    if is_asked:
        _ask(operations, policy, org_id, kind, error_type, seen)
        seen = replace(seen, count=0, asked_us=now_us)
    PATTERNS.put(transaction, seen, org_id, kind, error_type)
    return is_asked


def _ask(
    operations: Operations, policy: Policy, org_id: str, kind: str, error_type: str, seen: SeenPattern
) -> None:
    """Ask what happens to dead letters of a pattern, and to messages like them."""
    examples: list[DeadLetter] = []
    for message_id in seen.message_ids:
        with suppress(UnknownTask, WrongState):
            examples.append(letter_by_id(operations, message_id))
    services = {letter.original_message.get("service", "") for letter in examples}
    likeness = {
        "service": services.pop() if len(services) == 1 else "",
        "payload": holds.common([letter.original_message.get("payload") for letter in examples]),
    }
    facts = {
        "type": kind,
        "error_type": error_type,
        "error": examples[-1].failure_reason if examples else "",
        "count": seen.count,
        "is_poison": any(letter.state == "QUARANTINED" for letter in examples),
        "alike": likeness,
        "examples": [_example(letter) for letter in examples],
    }
    question = advice.question("dead_letter", facts, pattern=f"{kind} {error_type or 'poison'}")
    subject = {"type": kind, "error_type": error_type, **likeness}
    decisions.settle(operations.transaction, policy, question, org_id, subject)
