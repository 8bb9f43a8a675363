"""`engine.dlq` with an adviser."""

from collections.abc import Sequence
from typing import Final, TypeAlias, TypedDict, Unpack

from postroom.core.goals import advice
from postroom.engine.dlq import DeadLetter, DeadLetters, LetterFilters
from postroom.goals.advisers.questions import said_at_once


class Pattern(TypedDict):
    """Dead letters of one type and error."""

    type: str
    error_type: str
    error: str
    count: int
    is_poison: bool


class AdvisedPattern(Pattern):
    """What the adviser says about dead letters of one type and error."""

    advice: str
    reasoning: str
    message_ids: list[str]


Patterns: TypeAlias = list[AdvisedPattern]

PATTERNS_MAX: Final = 100
EXAMPLES_MAX: Final = 5


class AdvisedDeadLetters(DeadLetters):
    """Dead letters, and what to do about them."""

    async def patterns(self, **filters: Unpack[LetterFilters]) -> Patterns:
        """What the adviser says about dead letters of the same type and error: keep, replay or purge."""
        found = []
        for (kind, error_type), alike in _groups(await self.list(**filters))[:PATTERNS_MAX]:
            last = alike[-1].error_history[-1:]
            pattern = Pattern(
                type=kind,
                error_type=error_type,
                error=last[0]["error"] if last else "",
                count=len(alike),
                is_poison=any(letter.state == "QUARANTINED" for letter in alike),
            )
            question = advice.question("dead_letter", {**pattern}, pattern=f"{kind} {error_type}")
            said, _ = await said_at_once(self._commits, question)
            examples = [letter.message_id for letter in alike[:EXAMPLES_MAX]]
            found.append(
                AdvisedPattern(**pattern, advice=said.choice, reasoning=said.reasoning, message_ids=examples)
            )
        return found


def _groups(letters: Sequence[DeadLetter]) -> list[tuple[tuple[str, str], list[DeadLetter]]]:
    """Dead letters by type and error type."""
    groups: dict[tuple[str, str], list[DeadLetter]] = {}
    for letter in letters:
        error_type = letter.error_history[-1]["error_type"] if letter.error_history else letter.state
        kind = str(letter.original_message.get("type", ""))
        groups.setdefault((kind, error_type), []).append(letter)
    return list(groups.items())
