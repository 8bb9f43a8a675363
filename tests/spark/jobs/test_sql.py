"""`sql` answers queries over the tables, and refuses whatever else DuckDB could do."""

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from postroom.errors import InvalidMessage
from postroom.pipeline.query import sql
from tests.crash.attack_pipeline import QUESTIONS, Trap, attack, attacks, duckdb_attacks
from tests.crash.ledger import Tally
from tests.spark.commands import Commands
from tests.spark.conftest import TablesOf


def test_every_attack_is_refused_and_does_no_harm(
    tables_of: TablesOf, commands: Commands, tmp_path: Path
) -> None:
    """`make crash` also gives them in other words."""
    _, tables = tables_of()
    trap, tally = Trap(tmp_path, tables.folder), Tally()
    known = attacks(trap.bait, trap.place) + duckdb_attacks(trap.bait, trap.place)
    attack(commands, tables.folder, trap, iter(known), tally)
    assert tally.broken == []
    assert tally.facts == {"refused": len(known)}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_query_over_the_tables_is_answered(tables_of: TablesOf, commands: Commands, question: str) -> None:
    done = commands("sql", "--tables", tables_of()[1].folder, "--", question)
    assert done.code == 0, done.stderr
    assert done.stdout
    assert all(map(json.loads, done.stdout.splitlines()))


PORTABLE = (
    "SELECT * FROM gold_latency ORDER BY day, hour_us, org_id, type, priority LIMIT 20",
    (
        "SELECT message_id, finished_us, rejected_us FROM silver_messages ORDER BY rejected_us, finished_us,"
        " message_id LIMIT 30"
    ),
    "SELECT pattern_id, orgs, hours, samples, systematic FROM gold_dlq_patterns ORDER BY pattern_id",
    (
        "SELECT min(date) AS first, DATE '2025-01-05' AS d, CAST('nan' AS double) AS nan, NULL AS nothing"
        " FROM bronze_events"
    ),
    "SELECT count(*) AS n FROM Silver_Events WHERE day = DATE '2025-01-05'",
)


@pytest.mark.parametrize("query", PORTABLE)
def test_rows_are_printed_as_spark_writes_json(
    spark: SparkSession, tables_of: TablesOf, commands: Commands, query: str
) -> None:
    _, tables = tables_of(faults=True)
    for name in tables.names():
        if name in query.lower():
            tables.read(spark, name).createOrReplaceTempView(name)
    rows = (
        spark.sql(query).selectExpr("to_json(struct(*), map('ignoreNullFields', 'false')) AS row").collect()
    )
    done = commands("sql", "--tables", tables.folder, "--", query)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [json.loads(row["row"]) for row in rows]
    assert rows


def test_duckdb_lists_and_describes_the_tables(tables_of: TablesOf, commands: Commands) -> None:
    _, tables = tables_of()
    done = commands("sql", "--tables", tables.folder, "SHOW TABLES")
    assert [json.loads(line)["name"] for line in done.stdout.splitlines()] == tables.names()
    done = commands("sql", "--tables", tables.folder, "DESCRIBE gold_cost")
    columns = {row["column_name"]: row["column_type"] for row in map(json.loads, done.stdout.splitlines())}
    assert list(columns) == tables.schema("gold_cost").names
    assert (columns["cost_usd"], columns["day"]) == ("DECIMAL(28,9)", "DATE")


def test_the_session_of_a_command_substitutes_no_variables(spark: SparkSession) -> None:
    assert spark.sql("SELECT '${env:HOME}' AS a").collect()[0][0] == "${env:HOME}"


def test_a_query_with_too_many_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "AST_NODES_MAX", 100)
    with pytest.raises(InvalidMessage, match="the query has more than 100 parts"):
        sql.parse("SELECT " + ", ".join(map(str, range(200))))
