"""What the rules of the engine cost: a full cycle of 10 messages beside the bare cycle of `Tasks`.

Both check their input, and both commit three times with durability `os`: submit, claim, complete.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from figures import Figure, Goal, compare, readable, seconds

from enginebench.direct import Direct
from enginebench.engines import TYPE, fresh, url_in
from enginebench.sizes import Sizes
from postroom import Guard, Organization, Policy, Tasks
from postroom.engine.rules.outcomes import Usage

BATCH = 10
AGENT = "coder"
PAYLOAD = {"repo": "example/project", "issue": 42, "title": "The parser stops at the first empty line"}
PRIORITIES = (0, 1, 1, 1, 1, 2, 2, 2, 2, 3)
PLENTY = 10**9
SERVICES = {TYPE: "search"}
ALL_RULES = Policy(
    guard=Guard(hops=PLENTY, messages=PLENTY, tokens=PLENTY, usd=PLENTY),
    organization=Organization(weight=2, rate_per_s=PLENTY, user_rate_per_s=PLENTY),
)
"""Limits of rates and goals, and a breaker of the service. Backpressure and promotion are always on."""
USAGE = Usage("small", tokens_in=1, tokens_out=1, cost_usd=0.001)
US_PER_S = 1e6


def figures(folder: Path, sizes: Sizes) -> Iterator[Figure]:
    tasks = Tasks.open(url_in(fresh(folder)))
    tasks.store.steady_ns()  # opens the file, which is not measured
    for name, policy, goals in (
        ("all rules", ALL_RULES, [Goal("ratio", "<=", 2.0)]),
        ("default rules", Policy(), []),
    ):
        engine = Direct(url_in(fresh(folder)), policy, SERVICES)
        cycle(engine)
        cost = compare(
            lambda engine=engine: _cycle_us(lambda: cycle(engine), sizes.cycles),  # type: ignore[misc]
            lambda: _cycle_us(lambda: bare_cycle(tasks), sizes.cycles),
            turns=sizes.cycle_turns,
        )
        engine.close()
        against = f"Tasks: {readable(cost.theirs)} us"
        yield Figure(f"full cycle of {BATCH}, {name}", cost.ours, "us", against, cost.ratio, goals)
    tasks.close()


def _cycle_us(one_cycle: Callable[[], None], cycles: int) -> float:
    def repeat() -> None:
        for _ in range(cycles):
            one_cycle()

    return seconds(repeat) / cycles * US_PER_S


def cycle(engine: Direct) -> None:
    engine.submit(
        {
            "type": TYPE,
            "org_id": "acme",
            "user_id": "ann",
            "goal_id": "triage",
            "priority": priority,
            "payload": PAYLOAD,
            "durability": "os",
        }
        for priority in PRIORITIES
    )
    claimed = engine.claim(BATCH)
    assert len(claimed) == BATCH
    engine.finish(claimed, "completed", USAGE)


def bare_cycle(tasks: Tasks) -> None:
    tasks.enqueue_many([{"agent": AGENT, "payload": PAYLOAD}] * BATCH)
    claimed = tasks.claim(agent=AGENT, limit=BATCH)
    assert len(claimed) == BATCH
    tasks.complete_many((task.task_id, task.lease, None) for task in claimed)
