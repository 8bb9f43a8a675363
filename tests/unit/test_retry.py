"""When a failed task is retried."""

import pytest

from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.lifecycle.retry import RetryPolicy


@pytest.mark.statement("retry-pauses")
def test_the_pauses_grow_up_to_their_limit() -> None:
    policy = RetryPolicy(first_delay_s=1, factor=2, delay_s_max=10)
    pauses_ns = [policy.delay_ns(retries, None) for retries in range(6)]
    assert pauses_ns == [seconds * NANOS_PER_S for seconds in (1, 2, 4, 8, 10, 10)]


def test_by_default_there_are_three_retries_after_1_2_and_4_seconds() -> None:
    policy = RetryPolicy()
    assert policy.max_retries == 3
    assert [policy.delay_ns(retries, None) for retries in range(3)] == [
        NANOS_PER_S,
        2 * NANOS_PER_S,
        4 * NANOS_PER_S,
    ]


@pytest.mark.parametrize("wish_s", [0, 0.5, 3_600])
def test_retry_in_s_overrides_the_policy(wish_s: float) -> None:
    assert RetryPolicy().delay_ns(2, wish_s) == wish_s * NANOS_PER_S


def test_delay_of_many_retries_does_not_overflow() -> None:
    assert RetryPolicy().delay_ns(1_000, None) == 300 * NANOS_PER_S
