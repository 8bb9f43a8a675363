"""Health, takeover, the order of parts, and joined answers: pure decisions about agents."""

from typing import Any

import pytest

from postroom.core.agents import (
    AgentRules,
    Cursor,
    health_of,
    is_over,
    joined_chunks,
    judge,
    may_take_over,
    moved,
)
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.errors import InvalidSetting

RULES = AgentRules()


def ns(seconds: float) -> int:
    return round(seconds * NANOS_PER_S)


@pytest.mark.parametrize(
    ("seen_s", "now_s", "health"),
    [
        (0, 100, "registered"),
        (0, 114.9, "registered"),
        (101, 102, "alive"),
        (101, 115.9, "alive"),
        (101, 116, "suspect"),
        (101, 135.9, "suspect"),
        (101, 136, "dead"),
        (0, 135, "dead"),
    ],
)
def test_health_follows_from_missed_heartbeats(seen_s: float, now_s: float, health: str) -> None:
    assert health_of(ns(100), ns(seen_s), ns(now_s), RULES) == health


def test_a_lease_is_taken_over_when_it_is_over() -> None:
    assert not may_take_over(ns(3), ns(2.9))
    assert may_take_over(ns(3), ns(3))


def test_an_answer_waits_for_its_agent_for_a_day() -> None:
    assert not is_over(0, 10**18, 86_400)
    assert not is_over(1, 86_400 * 10**6, 86_400)
    assert is_over(1, 86_400 * 10**6 + 1, 86_400)


@pytest.mark.parametrize(
    ("cursor", "part", "verdict"),
    [
        (Cursor(), (1, 0), "next"),
        (Cursor(), (1, 1), "gap"),
        (Cursor(1, 2, 1), (1, 2), "next"),
        (Cursor(1, 2, 1), (1, 1), "repeated"),
        (Cursor(1, 2, 1), (1, 3), "gap"),
        (Cursor(1, 2, 1), (2, 0), "restarted"),
        (Cursor(1, 2, 0), (2, 0), "next"),
        (Cursor(1, 2, 1), (2, 1), "gap"),
        (Cursor(2, 0, 0), (1, 5), "repeated"),
    ],
)
def test_a_part_continues_restarts_repeats_or_leaves_a_gap(
    cursor: Cursor, part: tuple[int, int], verdict: str
) -> None:
    assert judge(cursor, *part) == verdict


def test_another_attempt_counts_its_chunks_from_the_beginning() -> None:
    cursor = moved(Cursor(1, 4, 3), 2, 0, is_chunk=True)
    assert cursor == Cursor(2, 1, 1)


@pytest.mark.parametrize(
    ("chunks", "answer"),
    [(["a", "b"], "ab"), ([[1], [2, 3]], [1, 2, 3]), ([{"a": 1}, "b"], [{"a": 1}, "b"])],
)
def test_chunks_are_joined_by_their_kind(chunks: list[Any], answer: Any) -> None:
    assert joined_chunks(chunks) == answer


@pytest.mark.parametrize("rule", [{"heartbeat_s": 0}, {"missed_dead": 0}, {"on_dead": "forget"}])
def test_a_rule_that_makes_no_sense_is_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        AgentRules(**rule)
