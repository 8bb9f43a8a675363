"""The tables of real events of all contracts; of an engine: organizations, goals, tokens, cost and waits."""

from decimal import Decimal
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.audit.reader import Segments
from postroom.core.formats.events import AuditEvent
from postroom.core.history.history_checker import History
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.gold.tables import GOLD
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.query.check import check_tables
from postroom.pipeline.report.queries import write_report
from tests.spark.comparison import differing
from tests.spark.realhistory import TOKENS_IN, TOKENS_OUT, RealHistory

COST = Decimal("0.3")
GOALS = {f"g{number}" for number in range(10)}


def events_of(stream: Path) -> list[AuditEvent]:
    return list(Segments(stream).events())


def test_stream_of_all_contracts_breaks_no_rule_of_a_history(real_history: RealHistory) -> None:
    events = events_of(real_history.stream)
    history = History()
    for event in events:
        history.add(event)
    assert not history.verdict().violations
    [source] = {event.source for event in events if event.contract == "engine"}
    own = [event for event in events if event.source == source]
    assert len(own) == real_history.world.engine.engine.store.newest_event()
    assert {event.contract for event in events if event.org_id} == {"engine"}
    assert {event.contract for event in events} == {"engine", "tasks", "queue", "bus", "mail"}
    assert {event.kind for event in events} >= {
        "promoted", "deferred", "retry_scheduled", "dead_letter", "replayed", "quarantined", "cancelled",
        "expired", "duplicate", "rejected", "breaker_opened", "breaker_closed", "lease_lapsed", "alert",
        "tokens_reserved", "tokens_borrowed", "tokens_returned", "tokens_refused", "conflict_detected",
        "conflict_resolved", "agent_health", "receipt", "bounced", "delivered", "deleted",
    }  # fmt: skip
    assert {bool(event.lease) for event in events if event.kind == "deferred"} == {True, False}


def test_tables_of_all_contracts_are_what_the_oracle_and_the_engine_say(
    spark: SparkSession, real_history: RealHistory, tmp_path: Path
) -> None:
    """The segments are read where the shipper has published them."""
    world, stream, published = real_history
    tables = Tables(tmp_path / "tables")
    Pipeline(spark, tables).run(published)

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
        # A message that states no tokens holds one, and returns it if it has used none.
        *(("small", "acme", goal, None, n, 0, 0, 0) for goal, n in (("g3", 1), ("g5", 4), ("g6", 1))),
        *(("small", "slow", "g7", None, 1, 0, 0, 0), ("small", "acme", "g9", None, 2, 0, 1, 0)),
        ("small", "zen", "g9", "a2", 4, 0, 0, 0),
    }
    assert rows("gold_cost", "model", "sum(calls)", "sum(cost_usd)") == [("small", calls, calls * COST)]
    assert {priority for priority, n in rows("gold_latency", "priority", "sum(n)") if n} == {0, 1, 2, 3}
    depths = dict(rows("gold_depth", "org_id", "max_by(depth, minute_us)"))
    assert {org_id: depths[org_id] for org_id in outcomes} == dict.fromkeys(outcomes, 0)
    results = dict(rows("silver_attempts", "result", "count(*)"))
    assert results["released"] == 1  # deferred by its holder
    assert "open" not in results
    begun = tables.read(spark, "silver_attempts").where("started_us IS NOT NULL")
    starts = {(row.message_id, row.attempt, row.worker_id, row.started_us) for row in begun.collect()}
    told = [event for event in events_of(stream) if event.kind == "execution_started"]
    assert {row[0] for row in begun.groupBy("result").count().collect()} >= {"completed", "failed"}
    assert {(one.message_id, one.attempt, one.worker_id, one.ts_us) for one in told} == starts
    assert begun.where("started_us < dequeued_us OR started_us > ended_us").count() == 0

    assert [row[:2] for row in rows("gold_poison_suspects", "org_id goal_id")] == [("zen", "g8")]

    assert set(GOLD) < set(tables.names())
    assert differing(tables, stream) == []

    found = check_tables(tables)
    assert found.samples == []
    report = write_report(tables, tmp_path / "report.html")
    assert report.messages
    history = History()
    for event in events_of(stream):
        history.add(event)
    assert found.messages == history.verdict().accepted  # mailboxes are created too, and are no messages
