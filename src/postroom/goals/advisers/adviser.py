"""`Adviser` answers the questions of an engine. `RuleAdviser` needs no model and is the default."""

from abc import ABC, abstractmethod

from postroom.core.goals import advice
from postroom.core.goals.advice import Advice, Question
from postroom.engine.work.slots import lent_slot


class Adviser(ABC):
    """Answers questions. The rules answer instead when it raises, or chooses none of the options."""

    is_pure = False
    """Whether `advise` only uses the rules, so that a transaction can ask without waiting."""

    @abstractmethod
    async def advise(self, question: Question) -> Advice:
        """One of `question.options`, with a confidence from 0 to 1."""


class RuleAdviser(Adviser):
    """The deterministic rules of `core.goals.advice`."""

    is_pure = True

    async def advise(self, question: Question) -> Advice:
        return advice.advise(question)


async def asked(adviser: Adviser | None, question: Question) -> tuple[Advice, str]:
    """A valid advice, and its source: the adviser, or the rules in its place."""
    if adviser is None or adviser.is_pure:
        return advice.advise(question), "rule"
    try:
        with lent_slot() as may_wait:
            if not may_wait:
                return _by_rule(question, "too many questions wait for the adviser"), "rule"
            answer = await adviser.advise(question)
    except Exception as error:  # noqa: BLE001 - whatever an adviser raises, the rules decide
        return _by_rule(question, f"the adviser failed with {type(error).__name__}"), "rule"
    if not advice.is_valid(answer, question):
        return _by_rule(question, "the adviser chose none of the options"), "rule"
    return answer, "adviser"


def _by_rule(question: Question, why: str) -> Advice:
    ruled = advice.advise(question)
    return Advice(ruled.choice, ruled.confidence, f"{why}; the rules say: {ruled.reasoning}")
