"""`GET /metrics`: the counters of the store and of the server, in the text format of Prometheus.

Rule 1: nothing is counted here. One scrape reads counters that the store and the server keep anyway, and what
        the events of the store add up to.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from postroom.contracts.tasks.tasks import AgentStatus, TasksStatus
from postroom.engine.inspection import EngineStatus
from postroom.server.harness.harness import HarnessStatus
from postroom.server.telemetry.event_counts import EventCounts, Labels, Time

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class ServerCounters(NamedTuple):
    """What one server process has done since its start."""

    harness: HarnessStatus
    long_polls: int
    commits: int
    requests: Mapping[tuple[str, int], int]
    """Answered requests by route and status."""
    events: EventCounts


def metrics_text(tasks: TasksStatus, engine: EngineStatus, server: ServerCounters) -> bytes:
    """Return one scrape."""
    return generate_latest(_TaskServer(tasks, engine, server))


class _TaskServer(Collector):
    """The metrics of one scrape. A registry would be global state, and one scrape needs none."""

    def __init__(self, tasks: TasksStatus, engine: EngineStatus, server: ServerCounters) -> None:
        self._tasks = tasks
        self._engine = engine
        self._server = server

    def collect(self) -> Iterator[Metric]:
        yield from _queues(self._tasks.agents)
        if self._tasks.events_waiting is not None:  # else no shipper is attached to the store
            yield GaugeMetricFamily(
                "postroom_events_waiting", "Events not shipped yet.", self._tasks.events_waiting
            )
            yield CounterMetricFamily(
                "postroom_held_up", "Enqueues delayed or refused by the backlog.", self._tasks.held_up
            )
        yield from _organizations(self._engine)
        yield from _events(self._server.events)
        yield from _harness(self._server.harness)
        yield GaugeMetricFamily("postroom_waiting_requests", "Long polls under way.", self._server.long_polls)
        yield CounterMetricFamily("postroom_commits", "Commits made for HTTP requests.", self._server.commits)
        requests = CounterMetricFamily("postroom_requests", "Requests answered.", labels=["route", "status"])
        for (route, status), count in sorted(self._server.requests.items()):
            requests.add_metric([route, str(status)], count)
        yield requests


def _queues(agents: Mapping[str, AgentStatus]) -> Iterator[Metric]:
    depth = GaugeMetricFamily("postroom_queue_depth", "Tasks that wait, delayed or not.", labels=["agent"])
    in_flight = GaugeMetricFamily("postroom_in_flight", "Tasks under a lease.", labels=["agent"])
    age = GaugeMetricFamily(
        "postroom_oldest_age_seconds", "How long the next task has been ready.", labels=["agent"]
    )
    lapses = CounterMetricFamily("postroom_lapses", "Leases that ran out.", labels=["agent"])
    tasks = GaugeMetricFamily("postroom_tasks", "Tasks in each state.", labels=["agent", "state"])
    for name, agent in agents.items():
        depth.add_metric([name], agent.depth)
        in_flight.add_metric([name], agent.in_flight)
        age.add_metric([name], agent.oldest_age_s or 0.0)
        lapses.add_metric([name], agent.lapses)
        for state, count in sorted(agent.states.items()):
            tasks.add_metric([name, state], count)
    yield from (depth, in_flight, age, lapses, tasks)


def _organizations(engine: EngineStatus) -> Iterator[Metric]:
    depth = GaugeMetricFamily(
        "postroom_engine_depth", "Messages that wait in a lane.", labels=["organization", "lane"]
    )
    messages = GaugeMetricFamily(
        "postroom_engine_messages", "Messages in each state.", labels=["organization", "state"]
    )
    stage = GaugeMetricFamily("postroom_engine_stage", "The stage of backpressure.", labels=["organization"])
    breakers = GaugeMetricFamily(
        "postroom_engine_breaker_open", "1 while a breaker is not closed.", labels=["service"]
    )
    for name, found in engine.organizations.items():
        for lane, count in enumerate(found.lanes):
            depth.add_metric([name, f"P{lane}"], count)
        for state, count in sorted(found.states.items()):
            messages.add_metric([name, state], count)
        stage.add_metric([name], found.stage)
    for service, breaker in engine.breakers.items():
        if breaker.is_declared:  # messages can name any number of other services
            breakers.add_metric([service], breaker.state != "closed")
    yield from (depth, messages, stage, breakers)
    yield GaugeMetricFamily("postroom_engine_workers", "Workers that reported lately.", len(engine.workers))
    yield GaugeMetricFamily(
        "postroom_engine_wanted_workers", "Workers that the backlog asks for.", engine.wanted_workers
    )


TIMES: Final[Mapping[Time, str]] = {
    "wait": "How long messages waited until a delivery.",
    "run": "How long workers held messages until an end or a failure.",
    "total": "From the acceptance of messages to their end.",
}


def _events(counts: EventCounts) -> list[Metric]:
    with counts.mutex:
        promoted = "Messages delivered in a higher class because they waited long."
        found = [
            _counter("postroom_events", "Events by kind.", ["kind"], counts.kinds),
            _counter("postroom_errors", "Failed attempts by class.", ["error_type"], counts.errors),
            _counter("postroom_engine_lapses", "Leases that ran out.", ["organization"], counts.lapses),
            _counter("postroom_promoted", promoted, ["organization", "priority"], counts.promoted),
            _counter("postroom_tokens", "Tokens of models by outcome.", ["model", "outcome"], counts.tokens),
        ]
        for time, said in TIMES.items():
            labels = ["organization", "type", "priority"]
            times = HistogramMetricFamily(f"postroom_{time}_seconds", said, labels=labels)
            for values, one in sorted(counts.times[time].items()):
                times.add_metric(values, one.buckets(), one.sum_s)
            found.append(times)
        return found


def _counter(
    name: str, said: str, labels: list[str], counts: Mapping[str, int] | Mapping[Labels, int]
) -> Metric:
    found = CounterMetricFamily(name, said, labels=labels)
    for values, count in sorted(counts.items()):
        found.add_metric([values] if isinstance(values, str) else values, count)
    return found


def _harness(status: HarnessStatus) -> Iterator[Metric]:
    runs = CounterMetricFamily("postroom_loop_runs", "Runs of a harness loop.", labels=["loop"])
    errors = CounterMetricFamily("postroom_loop_errors", "Runs of a loop that failed.", labels=["loop"])
    for name, loop in status.loops.items():
        runs.add_metric([name], loop.runs)
        errors.add_metric([name], loop.errors)
    nudges = CounterMetricFamily("postroom_nudges", "Nudges to agents.", labels=["outcome"])
    nudges.add_metric(["sent"], status.nudges_sent)
    nudges.add_metric(["failed"], status.nudges_failed)
    executed = CounterMetricFamily("postroom_decisions_executed", "Decisions executed.", status.executed)
    yield from (runs, errors, executed, nudges)
