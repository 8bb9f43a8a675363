"""Questions to the adviser whose answers a running handler or a worker waits for."""

from typing import Any

from postroom.core.goals import advice
from postroom.core.goals.advice import Advice, Question
from postroom.engine.commits import Commits
from postroom.engine.messages import Message
from postroom.errors import Unavailable, UnknownGoal
from postroom.goals import decisions, rollback
from postroom.goals.advisers.adviser import asked
from postroom.goals.advisers.facts import of_message
from postroom.goals.goal_cells import CONTEXTS, PROMPTS, DecidedBy
from postroom.stores.transaction import Transaction
from postroom.system.log import library_log

_log = library_log("postroom.engine")


async def keeps_priority(commits: Commits, message: Message, error: BaseException) -> bool:
    """Whether the retry of a message keeps its priority."""
    facts = {
        "type": message.type,
        "priority": message.priority,
        "retry_count": message.retry_count,
        "critical": message.metadata.get("critical"),
        "error_type": type(error).__name__,
        "error": str(error),
    }
    pattern = f"{message.type} {facts['error_type']}"
    if not commits.policy.has_model:
        return advice.advise(advice.question("demotion", facts)).choice == "keep"
    stored = await commits.load(message.message_id)
    facts |= await commits.read(lambda operations: of_message(operations.transaction, stored))
    question = advice.question("demotion", facts, pattern=pattern)
    subject = {"message_id": message.message_id}
    return (await decided_at_once(commits, question, message.org_id, subject)).choice == "keep"


async def decided_at_once(
    commits: Commits, question: Question, org_id: str, subject: dict[str, Any]
) -> Advice:
    """Decide a question whose answer somebody waits for, and record the decision."""
    said = await commits.read(lambda operations: decisions.learned(operations.transaction, org_id, question))
    by: DecidedBy = "learned"
    if said is None:
        said, by = await said_at_once(commits, question)
    taken = said
    try:
        await commits.write_raw(
            lambda transaction: decisions.record(
                transaction, commits.policy, question, org_id, subject, taken, by
            ),
            makes_room=True,
        )
    except Unavailable as error:  # what follows from the decision cannot be committed either
        _log.warning("a decision about %s is not recorded: %s", subject, error)
    return said


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
