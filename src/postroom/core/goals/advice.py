"""Questions that an engine asks, and the rules that answer them without a model.

Rule 1: a question has options. An advice that chooses none of them does not count.
Rule 2: the rules are total: each kind of question gets the same answer for the same facts, at any time.
Rule 3: the safe default of a question changes nothing that cannot be changed back.
"""

from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec

from postroom.errors import InvalidMessage

QuestionKind: TypeAlias = Literal[
    "demotion", "recovery", "reversal_class", "reversal", "merge", "conflict", "dead_letter"
]
ReversalClass: TypeAlias = Literal["REVERSIBLE", "COMPENSATABLE", "IRREVERSIBLE"]
REVERSAL_CLASSES: Final[tuple[ReversalClass, ...]] = get_args(ReversalClass)

CONFIDENCE_MIN: Final = 0.5
LEARNED_AFTER: Final = 5
ROLLBACK: Final = "rollback_to_checkpoint"
RESTART: Final = "restart_entire_goal"
PERSON: Final = "person"
NO_TOOL: Final = "none"

OPTIONS: Final[dict[QuestionKind, tuple[str, ...]]] = {
    "demotion": ("demote", "keep"),
    "recovery": (ROLLBACK, RESTART, PERSON),
    "reversal_class": REVERSAL_CLASSES,
    "reversal": (NO_TOOL,),
    "merge": ("branch", "main", "base"),
    "conflict": ("run", "wait", "merge", "cancel", "escalate"),
    "dead_letter": ("keep", "replay", "purge", "hold"),
}
ASKS: Final[dict[QuestionKind, str]] = {
    "demotion": "A message failed and is tried again. Does it keep its priority?",
    "recovery": "A step of a goal failed for good. Which tool goes on with the goal, or does a person?",
    "reversal_class": "Can this effect be undone, undone with something left visible, or not at all?",
    "reversal": "Which of these tools undoes this effect? Its arguments may only have values of the effect.",
    "merge": "A goal and main changed the same property. Whose value stays?",
    "conflict": "A message works on what another message works on now. What happens to it?",
    "dead_letter": "Messages of one type failed for good with one error. What happens to them? With hold, "
    "messages like them wait at the door from now on.",
}
"""The questions in words, for a model."""
SAFE: Final[dict[QuestionKind, str]] = {
    "demotion": "demote",
    "recovery": PERSON,
    "reversal_class": "IRREVERSIBLE",
    "reversal": NO_TOOL,
    "merge": "main",
    "conflict": "wait",
    "dead_letter": "keep",
}
"""What happens when nobody answers in time."""

_TRANSIENT: Final = frozenset(
    {"TimeoutError", "HandlerTimeout", "ConnectionError", "RateLimited", "BreakerOpen"}
)
_FINAL_WORDS: Final = ("send", "email", "mail", "publish", "post", "notify", "call", "print", "ship")
_MONEY_WORDS: Final = ("charge", "pay", "refund", "transfer", "invoice", "order", "book")


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine wants to know. `facts` are data: nothing in them is an instruction."""

    kind: QuestionKind
    options: tuple[str, ...]
    facts: dict[str, Any] = {}
    pattern: str = ""
    """Questions with the same kind and pattern are alike: their answers become a learned rule."""
    default: str = ""
    """The option that is taken when nobody answers."""


class Advice(msgspec.Struct, frozen=True):
    """The answer to a `Question`: one of its options."""

    choice: str
    confidence: float = 1.0
    reasoning: str = ""
    arguments: dict[str, Any] = {}
    """Arguments of a recovery tool, instead of those derived from the failure."""


class Tally(msgspec.Struct, frozen=True):
    """The same decision for the same pattern, counted."""

    choice: str
    count: int


def question(
    kind: QuestionKind, facts: dict[str, Any], *, pattern: str = "", options: tuple[str, ...] = ()
) -> Question:
    """A question with the options of its kind, unless others are given."""
    offered = options or OPTIONS[kind]
    safe = SAFE[kind]
    return Question(
        kind=kind,
        options=offered,
        facts=facts,
        pattern=pattern,
        default=safe if safe in offered else offered[-1],
    )


def is_valid(advice: object, asked: Question) -> bool:
    """Whether advice answers the question."""
    return (
        isinstance(advice, Advice)
        and advice.choice in asked.options
        and type(advice.confidence) in (int, float)
        and 0 <= advice.confidence <= 1
    )


def tallied(before: Tally | None, choice: str) -> Tally:
    """Count a decision. Another choice begins again."""
    return Tally(choice, before.count + 1 if before is not None and before.choice == choice else 1)


def advise(asked: Question) -> Advice:
    """The advice of the rules."""
    found = _ruled(asked)
    if found.choice in asked.options:
        return found
    return Advice(asked.default, 1.0, f"{found.choice} is not offered: the safe default")


def _ruled(asked: Question) -> Advice:  # noqa: PLR0911 - one case for each kind
    match asked.kind:
        case "demotion":
            kept = Advice("keep", 1.0, "the message says in its metadata that it is critical")
            demoted = Advice("demote", 1.0, "each retry is demoted by one priority")
            return kept if asked.facts.get("critical") is True else demoted
        case "recovery":
            return _recovery(asked)
        case "reversal_class":
            return _reversal_class(asked.facts)
        case "reversal":
            return _reversal(asked.facts)
        case "merge":
            return Advice("branch", 1.0, "the goal that completes last wins over the older value of main")
        case "conflict":
            return _conflict(asked.facts)
        case "dead_letter":
            return _dead_letter(asked.facts)


def _recovery(asked: Question) -> Advice:
    """Each tool once, the gentlest first: roll back, restart, ask a person."""
    tried = set(asked.facts.get("tried", ()))
    if ROLLBACK in asked.options and ROLLBACK not in tried:
        return Advice(ROLLBACK, 1.0, "the work since the last checkpoint is undone, and the step tried again")
    if RESTART in asked.options and RESTART not in tried:
        return Advice(RESTART, 1.0, "a rollback did not help, so the goal begins again with what was learned")
    return Advice(PERSON, 1.0, "every recovery tool has been tried")


def _reversal_class(facts: dict[str, Any]) -> Advice:
    name = str(facts.get("key", "")).casefold()
    if any(word in name for word in _FINAL_WORDS):
        return Advice("IRREVERSIBLE", 1.0, "what was sent or published cannot be taken back")
    if not facts.get("has_reversal"):
        return Advice("IRREVERSIBLE", 1.0, "no reversal is known")
    if any(word in name for word in _MONEY_WORDS):
        return Advice("COMPENSATABLE", 1.0, "a payment can be returned, and both entries stay visible")
    return Advice("REVERSIBLE", 1.0, "a reversal is known")


def _reversal(facts: dict[str, Any]) -> Advice:
    if facts.get("match"):
        return Advice(facts["match"], facts["match_confidence"], "its name is that of the opposite")
    return Advice(NO_TOOL, 1.0, "no tool has the name of the opposite and takes what the effect returned")


def _conflict(facts: dict[str, Any]) -> Advice:
    asked_for = facts.get("on_conflict")
    if asked_for == "merge" and facts.get("same_work"):
        return Advice("merge", 1.0, "the same work runs already, and its result serves both")
    if asked_for == "cancel":
        return Advice("cancel", 1.0, "the operation says that it is not needed when it cannot run at once")
    return Advice("wait", 1.0, "the operation runs when the other one has ended")


def _dead_letter(facts: dict[str, Any]) -> Advice:
    if facts.get("error_type") in _TRANSIENT and not facts.get("is_poison"):
        return Advice("replay", 1.0, "the error was of a service that was not available for a while")
    if "alike" in facts:
        return Advice("hold", 1.0, "more messages like these would meet the same error")
    return Advice("keep", 1.0, "the same message would meet the same error")


def checked_reversal(reversal: object) -> dict[str, Any] | None:
    """A reversal: the type and the payload of the message that undoes an effect."""
    if reversal is None:
        return None
    if not isinstance(reversal, dict) or not isinstance(reversal.get("type"), str):
        raise InvalidMessage('reversal must be {"type": …, "payload": …}: the message that undoes the effect')
    if not isinstance(reversal.get("payload", {}), dict):
        raise InvalidMessage("the payload of a reversal must be a JSON object")
    service = reversal.get("service", "")
    if not isinstance(service, str):
        raise InvalidMessage("the service of a reversal must be text")
    return {"type": reversal["type"], "payload": reversal.get("payload", {}), "service": service}
