"""One scrape of a task server, read by the parser of the Prometheus client."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families

from postroom.contracts.tasks.tasks import AgentStatus, TasksStatus
from postroom.engine.inspection import BreakerStatus, EngineStatus, OrganizationStatus
from postroom.message import Event, EventKind
from postroom.server.harness.harness import HarnessStatus, LoopStatus
from postroom.server.http.metrics import ServerCounters, metrics_text
from postroom.server.telemetry.event_counts import (
    ERRORS_MAX,
    ORGANIZATIONS_MAX,
    OTHER,
    TYPES_AN_ORGANIZATION_MAX,
    EventCounts,
)
from postroom.stores.memory import MemoryStore
from tests.deployfiles import dashboard_queries

PAGE = Path(__file__).parents[2] / "docs" / "contracts" / "tasks.md"
TRIAGE = AgentStatus(
    depth=3, oldest_age_s=1.5, in_flight=2, holders={}, lapses=4, states={"QUEUED": 3}, max_depth=10
)
LOOP = LoopStatus(running=True, every_s=1.0, runs=7, errors=1, last_error="", last_error_at=None)
SERVER = ServerCounters(
    HarnessStatus(loops={"drain": LOOP}, executed=5, executing=[], nudges_sent=6, nudges_failed=0),
    long_polls=8,
    commits=9,
    requests={("/queue/next", 200): 11, ("/queue/next", 204): 12},
    events=EventCounts(MemoryStore()),
)


ENGINE = EngineStatus(
    organizations={
        "acme": OrganizationStatus(
            lanes=[1, 0, 2, 0], depth=3, stage=1, states={"QUEUED": 3, "COMPLETED": 4}, paused=False
        )
    },
    depth=3,
    stage=1,
    workers={},
    wanted_workers=7,
    breakers={"slack": BreakerStatus("open", 10.0), "mail": BreakerStatus("closed")},
    pauses=[],
)


def scrape(tasks: TasksStatus) -> dict[str, dict[tuple[str, ...], float]]:
    """Metric name to values by label values."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(metrics_text(tasks, ENGINE, SERVER).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[*sample.labels.values()] = sample.value
    return found


def test_counters_of_the_store_and_the_server() -> None:
    found = scrape(TasksStatus({"triage": TRIAGE}, {}, events_waiting=13, held_up=14))
    assert found == {
        "postroom_queue_depth": {("triage",): 3},
        "postroom_in_flight": {("triage",): 2},
        "postroom_oldest_age_seconds": {("triage",): 1.5},
        "postroom_lapses_total": {("triage",): 4},
        "postroom_tasks": {("triage", "QUEUED"): 3},
        "postroom_events_waiting": {(): 13},
        "postroom_held_up_total": {(): 14},
        "postroom_engine_depth": {("P0", "acme"): 1, ("P1", "acme"): 0, ("P2", "acme"): 2, ("P3", "acme"): 0},
        "postroom_engine_messages": {("acme", "QUEUED"): 3, ("acme", "COMPLETED"): 4},
        "postroom_engine_stage": {("acme",): 1},
        "postroom_engine_breaker_open": {("slack",): 1, ("mail",): 0},
        "postroom_engine_workers": {(): 0},
        "postroom_engine_wanted_workers": {(): 7},
        "postroom_loop_runs_total": {("drain",): 7},
        "postroom_loop_errors_total": {("drain",): 1},
        "postroom_decisions_executed_total": {(): 5},
        "postroom_nudges_total": {("sent",): 6, ("failed",): 0},
        "postroom_waiting_requests": {(): 8},
        "postroom_commits_total": {(): 9},
        "postroom_requests_total": {("/queue/next", "200"): 11, ("/queue/next", "204"): 12},
        "postroom_events_total": {(kind,): 0 for kind in get_args(EventKind)},
    }


def test_backlog_metrics_are_left_out_without_a_shipper() -> None:
    found = scrape(TasksStatus({}, {}))
    assert "postroom_events_waiting" not in found
    assert "postroom_held_up_total" not in found


def life(message_id: str, org_id: str, type_name: str, *, is_good: bool = True) -> list[Event]:
    """The events of a message that waited for 0.2 s and was worked on for 2 s."""

    def event(ts_us: int, kind: EventKind, **facts: Any) -> Event:
        return Event(1, ts_us, kind, f"org:{org_id}", message_id, "QUEUED", priority=1, **facts)

    tokens = {"model": "small", "tokens": 7}
    return [
        event(1, "created", type=type_name),
        event(200_001, "promoted"),
        event(200_001, "tokens_reserved", detail=tokens),
        event(200_001, "dequeued", duration_us=200_000),
        *([] if is_good else [event(2_000_000, "lease_lapsed", error_type="LeaseLapsed")]),
        event(2_200_001, "execution_completed" if is_good else "execution_failed", duration_us=2_000_000,
              error_type="" if is_good else "ConnectionError"),
        *([] if is_good else [event(2_200_001, "dead_letter")]),
    ]  # fmt: skip


def counted(events: Iterable[Event]) -> EventCounts:
    counts = EventCounts(MemoryStore())
    counts.add(events)
    return counts


@pytest.mark.statement("metrics-latency")
def test_events_add_up_to_histograms_and_counters() -> None:
    counts = counted([*life("m1", "acme", "tool_call"), *life("m2", "acme", "tool_call", is_good=False)])
    labels = ("acme", "tool_call", "P1")
    found = {time: dict(counts.times[time][labels].buckets()) for time in ("wait", "run", "total")}
    assert (found["wait"]["0.1"], found["wait"]["0.25"], found["wait"]["+Inf"]) == (0, 2, 2)
    assert (found["run"]["1.0"], found["run"]["2.5"]) == (0, 2)
    assert (found["total"]["1.0"], found["total"]["2.5"]) == (0, 2)
    assert counts.times["wait"][labels].sum_s == pytest.approx(0.4)
    assert counts.kinds["execution_failed"] == 1
    assert counts.errors == {"LeaseLapsed": 1, "ConnectionError": 1}
    assert counts.lapses == {"acme": 1}
    assert counts.promoted == {("acme", "P1"): 2}
    assert counts.tokens == {("small", "reserved"): 14}


def test_labels_beyond_their_limits_are_counted_together() -> None:
    counts = counted(event for n in range(ORGANIZATIONS_MAX + 5) for event in life(f"m{n}", f"org{n}", "t"))
    organizations = {labels[0] for labels in counts.times["wait"]}
    assert len(organizations) == ORGANIZATIONS_MAX + 1
    assert counts.times["wait"][OTHER, "t", "P1"].buckets()[-1] == ("+Inf", 5)
    counts = counted(event for n in range(100) for event in life(f"m{n}", "acme", f"type{n}"))
    assert len(counts.times["run"]) == TYPES_AN_ORGANIZATION_MAX + 1
    failed = [
        Event(1, 1, "execution_failed", "org:a", "m", "FAILED", error_type=f"E{n}")
        for n in range(ERRORS_MAX * 2)
    ]
    assert counted(failed).errors[OTHER] == ERRORS_MAX


def test_the_page_lists_every_metric() -> None:
    SERVER.events.add([*life("m1", "acme", "tool_call"), *life("m2", "acme", "tool_call", is_good=False)])
    found = scrape(TasksStatus({"triage": TRIAGE}, {}, events_waiting=0))
    assert set(re.findall(r"^\| `(postroom_\w+)`", PAGE.read_text(), re.MULTILINE)) == {
        re.sub(r"(_seconds)_(bucket|count|sum)$", r"\1", name) for name in found
    }


@pytest.mark.statement("metrics-dashboard")
def test_every_query_of_the_dashboard_names_labels_of_its_metric() -> None:
    SERVER.events.add(life("m3", "acme", "tool_call", is_good=False))
    labels: dict[str, set[str]] = {}
    status = TasksStatus({"triage": TRIAGE}, {}, events_waiting=1)
    for family in text_string_to_metric_families(metrics_text(status, ENGINE, SERVER).decode()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for query in dashboard_queries():
        [name] = set(re.findall(r"postroom_\w+", query))
        matched = re.findall(r"(\w+)=~?\"", query)
        grouped = [one.strip() for each in re.findall(r"by \(([^)]*)\)", query) for one in each.split(",")]
        assert {*matched, *grouped} <= labels[name], query
