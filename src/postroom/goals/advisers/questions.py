"""Questions to the adviser whose answers a running handler or a worker waits for."""

from collections.abc import Sequence
from typing import Any, Final, TypeAlias, TypedDict, Unpack

from postroom.core.goals import advice
from postroom.core.goals.advice import Advice, Question, ReversalClass
from postroom.engine.commits import Commits
from postroom.engine.dlq import DeadLetter, DeadLetters, LetterFilters
from postroom.engine.messages import Message
from postroom.errors import Unavailable, UnknownGoal
from postroom.goals import decisions, rollback
from postroom.goals.advisers.adviser import asked
from postroom.goals.goal_cells import CONTEXTS, GOAL_OF, PROMPTS, DecidedBy
from postroom.stores.transaction import Transaction
from postroom.system.log import library_log

_log = library_log("postroom.engine")


async def reversal_class_of(
    commits: Commits, message: Message, key: str, reversal: Any
) -> ReversalClass | None:
    """The class of an effect of a goal by the adviser; None leaves it to the rules."""
    adviser = commits.policy.adviser
    if adviser is None or adviser.is_pure:
        return None
    line = await commits.read(lambda operations: GOAL_OF.get(operations.transaction, message.message_id))
    if line is None:
        return None
    facts = {"key": key, "type": message.type, "has_reversal": reversal is not None, "reversal": reversal}
    question = advice.question("reversal_class", facts, pattern=f"{message.type} {key}")
    return await _decided(commits, question, message)  # type: ignore[return-value]


async def keeps_priority(commits: Commits, message: Message, error: BaseException) -> bool:
    """Whether the retry of a message keeps its priority."""
    if not message.metadata.get("critical") and commits.policy.adviser is None:
        return False  # the rules demote every other message
    facts = {
        "type": message.type,
        "priority": message.priority,
        "retry_count": message.retry_count,
        "critical": message.metadata.get("critical"),
        "error_type": type(error).__name__,
        "error": str(error),
    }
    question = advice.question("demotion", facts, pattern=f"{message.type} {type(error).__name__}")
    return await _decided(commits, question, message) == "keep"


async def _decided(commits: Commits, question: Question, message: Message) -> str:
    """Decide a question about a message at once. The decision is recorded, unless the rules alone decide."""
    policy, org_id = commits.policy, message.org_id
    if policy.adviser is None or policy.adviser.is_pure:
        return advice.advise(question).choice
    said = await commits.read(lambda operations: decisions.learned(operations.transaction, org_id, question))
    by: DecidedBy = "learned"
    if said is None:
        said, by = await said_at_once(commits, question)
    subject, taken = {"message_id": message.message_id}, said
    try:
        await commits.write_raw(
            lambda transaction: decisions.record(transaction, policy, question, org_id, subject, taken, by),
            makes_room=True,
        )
    except Unavailable as error:  # the outcome of the message cannot be committed either
        _log.warning("a decision about message %s is not recorded: %s", message.message_id, error)
    return said.choice


async def said_at_once(commits: Commits, question: Question) -> tuple[Advice, DecidedBy]:
    """An advice and its source, when there is no time for a person to decide.

    The safe default replaces advice below `Policy.adviser_confidence_min`.
    """
    said, by = await asked(commits.policy.adviser, question)
    if said.confidence < commits.policy.adviser_confidence_min:
        unsure = "the adviser is not sure, and there is no time to ask a person"
        return Advice(question.default, 1.0, unsure), "rule"
    return said, "adviser" if by == "adviser" else "rule"


async def context_of(commits: Commits, goal_id: str, org_id: str | None = None) -> tuple[dict[str, Any], int]:
    """The context of a goal, and its version. A goal of another organization is unknown."""

    def work(transaction: Transaction) -> tuple[dict[str, Any], int]:
        goal = rollback.goal_of(transaction, goal_id)
        if org_id not in (None, goal.org_id):
            raise UnknownGoal(goal_id)
        found = CONTEXTS.get(transaction, goal_id, goal.context_version)
        return ({} if found is None else found.value), goal.context_version

    return await commits.read(lambda operations: work(operations.transaction))


async def prompt_additions(commits: Commits, message: Message) -> list[str]:
    """What recovery added to the prompt of the agent of a message."""
    return await commits.read(
        lambda operations: PROMPTS.get(operations.transaction, message.org_id, message.agent_id) or []
    )


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


class AdvisedDeadLetters(DeadLetters):
    """Dead letters, and what to do about them."""

    async def patterns(self, **filters: Unpack[LetterFilters]) -> Patterns:
        """What the adviser says about dead letters of the same type and error: keep, replay or purge."""
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
