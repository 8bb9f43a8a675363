"""The rules that answer questions without a model."""

from typing import Any

import pytest

from postroom.core.goals import advice
from postroom.core.goals.advice import OPTIONS, PERSON, RESTART, ROLLBACK, Advice, Tally, question


@pytest.mark.parametrize("kind", OPTIONS)
def test_every_kind_of_question_has_an_answer_among_its_options(kind: Any) -> None:
    asked = question(kind, {})
    assert advice.is_valid(advice.advise(asked), asked)
    assert asked.default in asked.options


def test_recovery_tries_each_tool_once_and_then_asks_a_person() -> Any:
    def choice(*tried: Any) -> Any:
        return advice.advise(question("recovery", {"tried": tried})).choice

    assert [choice(), choice(ROLLBACK), choice(ROLLBACK, RESTART)] == [ROLLBACK, RESTART, PERSON]


def test_a_choice_that_is_not_offered_becomes_the_default() -> None:
    asked = question("recovery", {}, options=("swap_model", PERSON))
    assert advice.advise(asked).choice == PERSON


@pytest.mark.parametrize(
    ("key", "has_reversal", "expected"),
    [
        ("send-email", True, "IRREVERSIBLE"),
        ("charge-card", True, "COMPENSATABLE"),
        ("create-invite", True, "REVERSIBLE"),
        ("create-invite", False, "IRREVERSIBLE"),
    ],
)
def test_reversal_class_of_an_effect(key: Any, has_reversal: Any, expected: Any) -> None:
    found = advice.advise(question("reversal_class", {"key": key, "has_reversal": has_reversal}))
    assert found.choice == expected


def test_a_critical_message_keeps_its_priority() -> None:
    assert advice.advise(question("demotion", {"critical": True})).choice == "keep"
    assert advice.advise(question("demotion", {"critical": "yes"})).choice == "demote"


def test_only_the_same_work_is_merged() -> None:
    facts = {"on_conflict": "merge", "same_work": False}
    assert advice.advise(question("conflict", facts)).choice == "wait"
    assert advice.advise(question("conflict", facts | {"same_work": True})).choice == "merge"


def test_dead_letters_of_a_service_that_was_away_are_replayed() -> None:
    assert advice.advise(question("dead_letter", {"error_type": "ConnectionError"})).choice == "replay"
    assert advice.advise(question("dead_letter", {"error_type": "ValueError"})).choice == "keep"


@pytest.mark.parametrize("wrong", [None, "wait", Advice("jump"), Advice("wait", 2.0), Advice("wait", True)])
def test_an_answer_that_does_not_fit_is_not_advice(wrong: Any) -> None:
    assert not advice.is_valid(wrong, question("conflict", {}))


def test_another_choice_begins_the_tally_again() -> None:
    tally = advice.tallied(advice.tallied(None, "wait"), "wait")
    assert tally == Tally("wait", 2)
    assert advice.tallied(tally, "run") == Tally("run", 1)
