"""The overview of the live page: rates and waiting times from events, and what one organization sees."""

import asyncio
from pathlib import Path

from postroom import Engine
from postroom.core.health.health import HealthFacts, Verdict
from postroom.engine.inspection import BreakerStatus
from postroom.engine.rules.operations import Operations
from postroom.message import Event
from postroom.page.activity import WAITS_KEPT_MAX, Activity
from postroom.page.overview import OverviewFacts, breakers_of, read_facts, seen_by, snapshot

NOW_US = 1_000_000_000


def event(kind: str, ago_s: float, org: str = "a", **fields: object) -> Event:
    return Event(1, round(NOW_US - ago_s * 1_000_000), kind, f"org:{org}", "m", "QUEUED", **fields)  # type: ignore[arg-type]


def test_rates_are_means_of_whole_seconds_by_organization() -> None:
    activity = Activity()
    activity.add([event("created", 1.5), event("created", 2.5), event("execution_completed", 3)])
    activity.add([event("created", 1.5, "b"), event("created", -0.5)])  # the latter: in the current second
    assert activity.rates(NOW_US).submitted == 0.3
    assert activity.rates(NOW_US, "a").submitted == 0.2
    assert (activity.rates(NOW_US, "a").completed, activity.rates(NOW_US, "b").completed) == (0.1, 0.0)


def test_a_share_of_the_events_stands_for_all_of_them() -> None:
    activity = Activity()
    activity.add([event("created", 2)], share=0.1)
    assert activity.rates(NOW_US).submitted == 1.0
    assert sum(one.submitted for one in activity.history(NOW_US)) == 10


def test_waits_are_percentiles_against_the_target_of_each_priority() -> None:
    activity = Activity()
    activity.add([event("dequeued", 1, priority=1, duration_us=1_000 * ms) for ms in range(1, 101)])
    found = activity.waits()[1]
    assert (found.count, found.p50_ms, found.p99_ms) == (100, 51.0, 100.0)
    assert (found.target_ms, found.is_within_target) == (50.0, False)
    assert activity.waits("b")[1].count == 0
    assert activity.waits()[0].is_within_target


def test_old_events_are_forgotten_and_waits_are_bounded() -> None:
    activity = Activity()
    activity.add([event("created", 90), event("dequeued", 90, duration_us=5)])
    activity.forget(NOW_US)
    assert sum(one.submitted for one in activity.history(NOW_US)) == 0
    assert activity.waits()[2].count == 0
    activity.add([event("dequeued", 1, duration_us=5)] * (WAITS_KEPT_MAX + 1))
    assert activity.waits()[2].count == WAITS_KEPT_MAX


def test_tasks_of_agents_are_not_counted_as_messages() -> None:
    activity = Activity()
    activity.add([Event(1, NOW_US - 2_000_000, "created", "ada", "m", "QUEUED")])
    assert activity.rates(NOW_US).submitted == 0


async def _facts(path: Path) -> OverviewFacts:
    with Engine.open(f"sqlite:///{path / 'queue.db'}") as engine:
        for org in ("a", "a", "b"):
            await engine.submit(type="tool_call", payload={}, org_id=org, priority=1)
        await engine.submit(type="tool_call", payload={}, org_id="a", delay_s=60)
        policy = engine.policy
        return engine.store.read(lambda transaction: read_facts(Operations(transaction, policy), policy))


def test_a_caller_of_one_organization_sees_only_that_one(tmp_path: Path) -> None:
    facts, activity = asyncio.run(_facts(tmp_path)), Activity()
    whole = snapshot(facts, activity, HealthFacts(broken={"mail": "down"}))
    assert [(one.org_id, one.lanes) for one in whole.organizations] == [
        ("a", [0, 2, 0, 0]),
        ("b", [0, 1, 0, 0]),
    ]
    assert whole.depth == 3
    assert [one.what for one in whole.verdict.reasons] == ["the part mail does not work: down"]
    assert (whole.delayed, [one.delayed for one in whole.organizations]) == (1, [1, 0])
    own = seen_by(whole, facts, activity, "b")
    assert [one.org_id for one in own.organizations] == ["b"]
    assert (own.depth, own.delayed) == (1, 0)
    assert (own.depth, own.workers, own.verdict, own.org_id) == (1, [], Verdict(), "b")


def test_breakers_of_other_organizations_are_closed_or_unnamed() -> None:
    found = {
        "mail": BreakerStatus("open", 5.0, ["a"]),
        "search": BreakerStatus("open", 5.0, []),
        "secret": BreakerStatus("open", 5.0, ["a"], is_declared=False),
    }
    seen = breakers_of(found, "b")
    assert {name: one.state for name, one in seen.items()} == {"mail": "closed", "search": "open"}
    assert breakers_of(found, "a")["secret"].organizations == ["a"]
