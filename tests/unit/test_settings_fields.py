"""Settings that a program gives as structs are checked when they are made."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from postroom import AgentRules, Backpressure, Breaker, Guard, Organization, Policy, Retry
from postroom.errors import InvalidSetting

WRONG: list[tuple[Callable[..., Any], str, Any]] = [
    *((Organization, "tier", value) for value in ("custom", -1, math.nan, None, True)),
    *((Organization, "retention_s", value) for value in (-1, "7 days", math.nan)),
    *((Organization, "weight", value) for value in (0, -1, math.inf)),
    *((Organization, name, value) for name in ("rate_per_s", "user_rate_per_s") for value in (0, math.inf)),
    *((Organization, name, -1) for name in ("max_depth", "max_agents", "max_stored_bytes")),
    *((Retry, "strategy", value) for value in ("cubic", None)),
    *((Retry, "max_retries", value) for value in (-1, 1.5, True)),
    *((Retry, name, value) for name in ("delay_s", "delay_s_max", "jitter") for value in (-1, math.inf)),
    *((Breaker, "on_open", value) for value in ("panic", 1)),
    *((Breaker, "failures", value) for value in (0, -1, "5")),
    *((Breaker, name, value) for name in ("window_s", "cooldown_s") for value in (-1, math.inf, math.nan)),
    *((Backpressure, name, -1) for name in ("scale", "light", "heavy", "emergency", "max_workers")),
    *((Guard, name, -1) for name in ("hops", "messages", "tokens", "usd", "recoveries")),
    (Guard, "usd", math.inf),
    (AgentRules, "heartbeat_s", math.inf),
    (AgentRules, "on_dead", "forget"),
    (Policy, "promote_after_s", (1, 2, math.inf)),
    (Policy, "adviser_confidence_min", 1.1),
    (Policy, "capacities", {"gpu": -1}),
    (Policy, "organizations", {"acme": 3}),
    (Policy, "breakers", {"slack": {"on_open": "panic"}}),
    (Policy, "retries", {"tool_call": {"strategie": "linear"}}),
    (Policy, "retries", {"tool_call": {"max_retries": -1}}),
    (Policy, "retries", {"tool_call": 3}),
    (Policy, "retries", 3),
    (Policy, "breaker", None),
    (Policy, "lease_s", 0),
    (Policy, "keep_dead_s", -1),
    (Policy, "keep_priority", "always"),
    (Policy, "version", "two"),
]


@pytest.mark.statement("retention-checked")
@pytest.mark.parametrize(("kind", "name", "value"), WRONG)
def test_invalid_value_is_refused_with_its_field(kind: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(InvalidSetting, match=name) as refused:
        kind(**{name: value})
    inner = next(iter(value.values())) if isinstance(value, dict) else value
    assert repr(value) in str(refused.value) or repr(inner) in str(refused.value)


@pytest.mark.statement("retry-configs", "retry-defaults")
def test_retry_rules_of_the_design_are_accepted_as_objects() -> None:
    rules: dict[str, Any] = {
        "model_call": {"max_retries": 2, "strategy": "exponential"},
        "tool_call": {"max_retries": 7, "strategy": "linear", "delay": 3},
        "memory_save": Retry(max_retries=1),
    }
    policy = Policy(retries=rules)
    assert policy.retry_of("model_call") == Retry(max_retries=2)
    assert policy.retry_of("tool_call") == Retry(max_retries=7, strategy="linear", delay_s=3.0)
    assert policy.retry_of("memory_save") == Retry(max_retries=1)
    assert policy.retry_of("agent_spawn") == Policy().retry_of("agent_spawn")


def test_retention_may_be_without_end() -> None:
    assert Organization(tier="enterprise").keep_s == math.inf
    assert Organization(retention_s=math.inf).keep_s == math.inf
    assert Organization(tier=1.5).keep_s == 129_600
    assert Policy(keep_dead_s=math.inf).keep_dead_s == math.inf


def test_lists_and_objects_of_a_settings_file_are_accepted() -> None:
    assert AgentRules(program=["run", "it"]).program == ("run", "it")  # type: ignore[arg-type]
    policy = Policy(organizations={"acme": {"tier": "pro"}})  # type: ignore[dict-item]
    assert policy.organization_of("acme").tier == "pro"
