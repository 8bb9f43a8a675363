"""The verdict on the flow of messages."""

from typing import Any

import pytest

from postroom.core.health.health import BACKLOG_AGE_S, UNATTENDED_S, HealthFacts, Verdict, judge


@pytest.mark.parametrize(
    ("facts", "level", "what"),
    [
        ({"waiting": 1_960, "stage": 3}, "problem", "no worker runs, and 1,960 messages wait (stage 3)"),
        ({"waiting": 600, "stage": 2}, "problem", "no worker runs, and 600 messages wait (stage 2)"),
        ({"waiting": 1, "oldest_s": 61.0}, "warning", "no worker runs, and 1 message waits"),
        ({"waiting": 1_960, "stage": 3, "workers": 2}, "warning", "1,960 messages wait (stage 3)"),
        ({"waiting": 6_000, "stage": 4, "workers": 2}, "problem", "6,000 messages wait (stage 4)"),
        (
            {"waiting": 2, "oldest_s": 601.0, "workers": 2}, "warning",
            "the oldest of 2 messages has waited 10 min",
        ),
        (
            {"waiting": 9, "oldest_s": 601.0, "workers": 2, "has_figures": False}, "warning",
            "the oldest message has waited 10 min",
        ),
        (
            {"waiting": 9, "stage": 3, "has_figures": False}, "problem",
            "no worker runs, and messages wait (stage 3)",
        ),
        ({"waiting": 2, "is_paused": True}, "warning", "all deliveries are paused, and 2 messages wait"),
        ({"breakers": ["search"]}, "warning", "1 breaker is open for all organizations: search"),
        ({"breakers": ["", ""]}, "warning", "2 breakers are open for all organizations"),
        ({"broken": {"mail": "hung"}}, "problem", "the part mail does not work: hung"),
        ({"slowed": {"broker": "it is away"}}, "warning", "the part broker does not work: it is away"),
    ],
)  # fmt: skip
def test_each_fault_is_a_reason_of_its_level(facts: dict[str, Any], level: str, what: str) -> None:
    verdict = judge(HealthFacts(**facts))
    assert (verdict.level, [reason.what for reason in verdict.reasons]) == (level, [what])


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"stage": 4},
        {"is_paused": True},
        {"waiting": 150, "stage": 1, "oldest_s": UNATTENDED_S},
        {"waiting": 150, "stage": 1, "oldest_s": BACKLOG_AGE_S, "workers": 1},
    ],
)
def test_messages_that_flow_are_well(facts: dict[str, Any]) -> None:
    assert judge(HealthFacts(**facts)) == Verdict()


def test_the_worst_reason_decides() -> None:
    verdict = judge(HealthFacts(breakers=["search"], broken={"mail": "hung"}))
    assert (verdict.level, [reason.level for reason in verdict.reasons]) == (
        "problem",
        ["warning", "problem"],
    )
