"""The tables of an engine's events: organizations, goals, tokens, cost and waits of P0 to P3."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom import Breaker, Bus, Organization, Overloaded, Policy, Queue, Retry, Tasks, ValidationError
from postroom.contracts.engine.outcomes import Outcome
from postroom.core.events import AuditEvent
from postroom.core.history_checker import History
from postroom.core.lifecycle import ENDED
from postroom.pipeline.check import check_tables
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.small_check import check_small
from postroom.pipeline.tables import Tables
from postroom.runtime.shipping import Sources, opened
from postroom.settings import AuditSettings
from postroom.sinks.reader import Segments
from tests.engines import EngineUnderTest
from tests.spark.oracle import expected, oracle, stored
from tests.spark.rows.test_gold import ORACLE, expected_gold
from tests.spark.rows.test_silver import TABLES as SILVER_TABLES

COST = Decimal("0.3")
TOKENS_IN, TOKENS_OUT = 100, 20
GOALS = {"g0", "g1", "g3", "g4", "g5", "g6", "g7", "g8", "g9"}
POLICY = Policy(
    retries={"tool_call": Retry(max_retries=1)},
    breakers={"slack": Breaker(failures=3, cooldown_s=60)},
    organizations={"slow": Organization(rate_per_s=1)},
    tokens={
        "providers": {
            "p": {"models": {"small": {"tokens_per_minute": 10**6}, "tiny": {"tokens_per_minute": 100}}}
        },
        "tiers": [0.1, 0.1, 0.4, 0.4],
    },
)


class World:
    """An engine in a SQLite file, and messages that meet every rule of it."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder}/queue.db"
        self.engine = EngineUnderTest(self.url, POLICY)
        self.slack_is_down = True
        self.spent: Counter[tuple[str, str]] = Counter()
        self._register()

    def _register(self) -> None:
        engine = self.engine.engine

        @engine.handler("model_call")
        async def think(message: Any, ctx: Any) -> None:
            ctx.usage(model="small", tokens_in=TOKENS_IN, cost_usd=0.1)
            ctx.usage(tokens_out=TOKENS_OUT, cost_usd=0.2)  # 0.1 + 0.2 is a little more than 0.3
            self.spent[message.org_id, message.goal_id] += 1

        @engine.handler("tool_call", service="slack")
        async def call(_message: Any, _ctx: Any) -> None:
            if self.slack_is_down:
                raise ConnectionError("slack does not answer")

        @engine.handler("memory_save")
        async def save(_message: Any, ctx: Any) -> None:
            if ctx.attempt == 1:
                raise ValidationError("not a node")

    def live(self) -> None:
        """Messages with every end, and everything that can hold them up on the way."""
        for org_id in ("acme", "zen"):
            for priority in range(4):
                self.engine.submit(
                    type="model_call", org_id=org_id, priority=priority, goal_id=f"g{priority % 2}",
                    agent_id="a1", user_id="u1", tokens=1_000, models=["small"],
                )  # fmt: skip
        self.engine.clock.advance(0.2)
        self.engine.run_all()
        self._promotion()
        self._outage()
        self._order_and_pause()
        self._ends()
        self._crashes()
        self._deferral_by_the_holder()
        self._shortage()

    def _promotion(self) -> None:
        self.engine.submit(type="model_call", priority=3, goal_id="g3")
        self.engine.clock.advance(31)
        self.engine.run_all()

    def _outage(self) -> None:
        """Three failures open the breaker. The rest is deferred, and one message dies of its last retry."""
        self.engine.submit_many(3, type="tool_call", org_id="zen", goal_id="g4")
        self.engine.run_all()
        self.engine.submit_many(2, type="tool_call", org_id="zen", goal_id="g4", max_retries=0)
        self.engine.clock.advance(5)
        self.engine.run_all()
        self.engine.clock.advance(60)
        self.engine.run(slots=1)  # the probe fails, and is a dead letter
        self.slack_is_down = False
        for _ in range(3):
            self.engine.clock.advance(61)
            self.engine.run_all()
        dlq = self.engine.engine.dlq
        assert len(self.engine.wait(dlq.replay(type="tool_call"))) == 1
        self.engine.run_all()

    def _order_and_pause(self) -> None:
        wait, engine = self.engine.wait, self.engine.engine
        self.engine.submit_many(3, type="model_call", ordering_key="k", goal_id="g5")
        self.engine.run_all()
        wait(engine.pause(type="model_call"))
        self.engine.submit(type="model_call", goal_id="g5")
        self.engine.run_all()
        wait(engine.resume(type="model_call"))
        self.engine.run_all()

    def _ends(self) -> None:
        now = datetime.fromtimestamp(self.engine.clock.wall_us() / 1e6, UTC)
        self.engine.submit(type="memory_save", goal_id="g6")  # a dead letter at once
        self.engine.submit(type="agent_spawn", goal_id="g6")  # the same: there is no handler
        gone = self.engine.submit(type="model_call", goal_id="g6", delay_s=100)
        self.engine.wait(gone.cancel())
        self.engine.submit(type="model_call", goal_id="g6", delay_s=5, expires_at=now + timedelta(seconds=9))
        self.engine.run_all()
        self.engine.clock.advance(10)
        self.engine.run_all()
        for _ in range(2):
            self.engine.submit(type="model_call", idempotency_key="once", goal_id="g6")
        self.engine.submit(org_id="slow", type="model_call", goal_id="g7")
        with pytest.raises(Overloaded):
            self.engine.submit(org_id="slow", type="model_call", goal_id="g7")
        self.engine.run_all()

    def _crashes(self) -> None:
        """Each claim is a worker that dies: its lease lapses."""
        self.engine.submit(type="agent_message", org_id="zen", goal_id="g8")
        for _ in range(1 + POLICY.poison_crashes):
            assert self.engine.claim()
            self.engine.clock.advance(POLICY.lease_s + 1)
        assert not self.engine.claim()  # it is quarantined

    def _deferral_by_the_holder(self) -> None:
        self.engine.submit(type="model_call", goal_id="g9")
        [held] = self.engine.claim()
        record = held.record
        self.engine.finish(
            Outcome(kind="deferred", message_id=record.message_id, lease=record.lease, delay_s=5)
        )
        self.engine.clock.advance(6)
        self.engine.run_all()

    def _shortage(self) -> None:
        """One message borrows from P3, because another one waits for it; the next one has to wait."""
        facts = {"type": "model_call", "org_id": "zen", "agent_id": "a2", "goal_id": "g9"}
        first = self.engine.submit(**facts, priority=2, tokens=60, models=["tiny"])
        self.engine.submit_many(4, **facts, parent_message_id=first.message_id)
        self.engine.submit(**facts, priority=2, tokens=20, models=["tiny"])
        self.engine.run_all()
        self.engine.clock.advance(61)
        self.engine.run_all()

    def count(self) -> dict[str, dict[str, int]]:
        """How many messages of each organization have which end. None is left open."""
        organizations = self.engine.wait(self.engine.engine.status()).organizations
        return {
            org_id: {state.lower(): n for state, n in one.states.items() if state in ENDED}
            for org_id, one in organizations.items()
        }


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("engine"))
    made.live()
    yield made
    made.engine.close()


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """A bus, a queue and a store of tasks."""
    folder = tmp_path_factory.mktemp("others")
    for number in range(3):
        Bus(folder / "bus.yaml").append(type="FACT", project_id="p", body=f"fact {number}")
    with closing(Queue(folder / "queue")) as queue:
        for number in range(3):
            queue.send("ask", f"body {number}", to="ada", session="s", sender="bob")
        queue.poll("ada", session="s")
    with Tasks.open(f"sqlite:///{folder}/queue.db") as tasks:
        for number in range(4):
            tasks.enqueue(agent="ada", payload={"n": number}, type="issue")
        for number, task in enumerate(tasks.claim(agent="ada", limit=3, worker="w1")):
            if number % 2:
                tasks.fail(task.task_id, task.lease, "no route", error_type="IOError")
            else:
                tasks.complete(task.task_id, task.lease, "done")
    return Sources((f"sqlite:///{folder}/queue.db",), (folder / "queue",), (folder / "bus.yaml",))


@pytest.fixture(scope="module")
def stream(world: World, others: Sources, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The audit stream of the engine and the others, as `postroom audit ship --once` writes it."""
    folder = tmp_path_factory.mktemp("stream") / "audit"
    sources = Sources((world.url, *others.stores), others.queue_roots, others.buses)
    with opened(folder, sources, AuditSettings()) as shipping:
        shipping.once()
    return folder


def events_of(stream: Path) -> list[AuditEvent]:
    return list(Segments(stream).events())


def test_stream_of_an_engine_breaks_no_rule_of_a_history(stream: Path, world: World) -> None:
    events = events_of(stream)
    history = History()
    for event in events:
        history.add(event)
    assert not history.verdict().violations
    [source] = {event.source for event in events if event.contract == "engine"}
    own = [event for event in events if event.source == source]
    assert len(own) == world.engine.engine.store.newest_event()
    assert {event.contract for event in events if event.org_id} == {"engine"}
    assert {event.contract for event in events} == {"engine", "tasks", "queue", "bus"}
    assert {event.kind for event in events} >= {
        "promoted", "deferred", "retry_scheduled", "dead_letter", "replayed", "quarantined", "cancelled",
        "expired", "duplicate", "rejected", "breaker_opened", "breaker_closed", "lease_lapsed", "alert",
        "tokens_reserved", "tokens_borrowed", "tokens_returned", "tokens_refused",
    }  # fmt: skip
    assert {bool(event.lease) for event in events if event.kind == "deferred"} == {True, False}


def test_tables_of_all_contracts_are_what_the_oracle_and_the_engine_say(
    spark: SparkSession, stream: Path, world: World, tmp_path: Path
) -> None:
    tables = Tables(tmp_path / "tables")
    Pipeline(spark, tables).run(stream)

    def rows(name: str, keys: str, *sums: str) -> list[tuple[Any, ...]]:
        grouped = tables.read(spark, name).groupBy(*keys.split())
        return [tuple(row) for row in grouped.agg(*map(F.expr, sums or ("1",))).collect()]

    outcomes: dict[str | None, dict[str, int]] = {}
    for org_id, outcome, n in rows("silver_messages", "org_id outcome", "count(*)"):
        outcomes.setdefault(org_id, {})[outcome] = n
    del outcomes[None]  # of the other contracts
    assert outcomes == world.count()
    assert {goal for goal, _ in rows("silver_messages", "goal_id")} == {*GOALS, None}

    spent = {(org_id, goal): n for org_id, goal, n in rows("gold_tokens", "org_id goal_id", "sum(calls)")}
    assert spent == dict(world.spent)
    calls = world.spent.total()
    used = rows("gold_tokens", "model", "sum(calls)", "sum(tokens_in)", "sum(tokens_out)")
    assert set(used) == {("small", calls, calls * TOKENS_IN, calls * TOKENS_OUT), ("tiny", 0, 0, 0)}
    kinds = [f"sum(tokens_{kind})" for kind in ("reserved", "borrowed", "returned", "refused")]
    budgets = rows("gold_tokens", "model org_id goal_id agent_id", *kinds)
    assert {row for row in budgets if any(row[4:])} == {
        *(("small", org, goal, "a1", 2_000, 0, 1_760, 0) for org in ("acme", "zen") for goal in ("g0", "g1")),
        ("tiny", "zen", "g9", "a2", 80, 20, 0, 20),
    }
    assert rows("gold_cost", "model", "sum(calls)", "sum(cost_usd)") == [("small", calls, calls * COST)]
    assert {priority for priority, n in rows("gold_latency", "priority", "sum(n)") if n} == {0, 1, 2, 3}
    depths = dict(rows("gold_depth", "org_id", "max_by(depth, minute_us)"))
    assert {org_id: depths[org_id] for org_id in outcomes} == dict.fromkeys(outcomes, 0)
    results = dict(rows("silver_attempts", "result", "count(*)"))
    assert results["released"] == 1  # deferred by its holder
    assert "open" not in results
    assert [row[:2] for row in rows("gold_poison_suspects", "org_id goal_id")] == [("zen", "g8")]

    for name in SILVER_TABLES:
        columns, said = expected(oracle(stream), name)
        assert stored(tables, f"silver_{name}", columns) == said, name
    for name in ORACLE:
        assert stored(tables, name) == expected_gold(stream, name), name

    found = check_tables(spark, tables)
    assert found.samples == []
    assert check_small(tables) == found
