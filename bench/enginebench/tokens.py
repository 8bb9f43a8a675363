"""What token budgets cost: decisions a second of the pure function, and a claim with and without budgets.

The messages of a claim are stored as they come by default, which syncs the claim. With durability `os` no
claim is synced, and the budgets are a larger part of a shorter time: that figure is information.
"""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import Figure, Goal, compare, readable, seconds
from msgspec.structs import replace

from enginebench.direct import Direct
from enginebench.engines import ADMIT_ALL, TYPE, fresh, url_in
from enginebench.sizes import Sizes
from postroom.core.tokens import tokens
from postroom.core.tokens.token_rules import token_rules
from postroom.core.tokens.tokens import Account, Candidate, Grant, Need, Short

BATCH = 10
PLENTY = 10**9
LIMITS = {"tokens_per_minute": PLENTY, "requests_per_minute": PLENTY, "tokens_per_day": PLENTY}
BUDGETS: dict[str, Any] = {
    "providers": {"openai": {"models": {"small": LIMITS, "large": LIMITS}}},
    "tiers": [0.4, 0.3, 0.2, 0.1],
}
DECISIONS_GOAL = 50_000
CLAIM_GOAL = 1.15
NOW = 10**12
MS_PER_S = 1e3

NEEDS = {
    "own tier": (Need(100, 2, has_preferences=True), Grant),
    "any model": (Need(100, 2), Grant),
    "a loan": (Need(PLENTY // 2, 1, 1.0, has_preferences=True), Grant),
    "a shortage": (Need(PLENTY, 3, 1.0, has_preferences=True), Short),
}


def figures(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    candidates = fresh_accounts()
    for name, (need, expected) in NEEDS.items():
        assert isinstance(tokens.allocate(need, candidates, NOW), expected)
        rate = statistics.median(_rate(need, candidates, sizes.decisions) for _ in range(5))
        goals = [Goal("value", ">=", DECISIONS_GOAL)]
        yield Figure(f"token allocation, {name}", rate, "decisions/s", goals=goals)
    for durability, claim_goals in ((None, [Goal("ratio", "<=", CLAIM_GOAL)]), ("os", [])):
        yield _claim(folder, sizes, durability, claim_goals)


def fresh_accounts() -> list[Candidate]:
    rules = token_rules(BUDGETS)
    assert rules is not None
    return [(rule, tokens.current(Account(), rule, NOW)[0]) for rule in rules.models]


def _rate(need: Need, candidates: list[Candidate], decisions: int) -> float:
    def decide() -> None:
        for _ in range(decisions):
            tokens.allocate(need, candidates, NOW)

    return decisions / seconds(decide)


def _claim(folder: Path, sizes: Sizes, durability: str | None, goals: list[Goal]) -> Figure:
    engines = [
        Direct(url_in(fresh(folder)), policy, {})
        for policy in (replace(ADMIT_ALL, tokens=BUDGETS), ADMIT_ALL)
    ]
    budgets, bare = (lambda engine=engine: _claim_ms(engine, sizes.claims, durability) for engine in engines)
    cost = compare(budgets, bare, turns=sizes.claim_turns)
    for engine in engines:
        engine.close()
    how = "default durability" if durability is None else f"durability {durability}"
    name = f"claim of {BATCH} with tokens, {how}"
    return Figure(name, cost.ours, "ms", f"without budgets: {readable(cost.theirs)} ms", cost.ratio, goals)


def _claim_ms(engine: Direct, claims: int, durability: str | None) -> float:
    """The median of some claims of messages that ask for tokens."""
    message = {
        "type": TYPE,
        "org_id": "acme",
        "payload": {},
        "tokens": 100,
        "models": ["small"],
        "durability": durability,
    }
    engine.submit([message] * BATCH * claims)
    took_s: list[float] = []
    for _ in range(claims):
        begun = time.perf_counter()
        claimed = engine.claim(BATCH)
        took_s.append(time.perf_counter() - begun)
        assert len(claimed) == BATCH
        engine.finish(claimed, "completed")
    return statistics.median(took_s) * MS_PER_S
