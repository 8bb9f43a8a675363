"""One scrape of a task server, read by the parser of the Prometheus client."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from postroom.contracts.tasks.tasks import AgentStatus, TasksStatus
from postroom.engine.inspection import BreakerStatus, EngineStatus, OrganizationStatus
from postroom.server.harness.harness import HarnessStatus, LoopStatus
from postroom.server.http.metrics import ServerCounters, metrics_text

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
    }


def test_backlog_metrics_are_left_out_without_a_shipper() -> None:
    found = scrape(TasksStatus({}, {}))
    assert "postroom_events_waiting" not in found
    assert "postroom_held_up_total" not in found


def test_the_page_lists_every_metric() -> None:
    found = scrape(TasksStatus({"triage": TRIAGE}, {}, events_waiting=0))
    assert set(re.findall(r"^\| `(postroom_\w+)`", PAGE.read_text(), re.MULTILINE)) == set(found)
