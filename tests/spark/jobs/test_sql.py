"""`sql` answers queries over the tables, and refuses whatever else Spark or DuckDB could do."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from postroom.errors import InvalidMessage
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.query import queries
from postroom.pipeline.replay import ReplayRequest, selection
from tests.crash.attack_pipeline import (
    BY_DUCKDB,
    BY_SPARK,
    QUESTIONS,
    Trap,
    attack,
    attacks,
    duckdb_attacks,
)
from tests.crash.ledger import Tally
from tests.spark.commands import Commands
from tests.spark.conftest import TablesOf

NO_TABLES: tuple[str, ...] = ()


@pytest.fixture
def substituting(spark: SparkSession) -> Iterator[None]:
    """The session of jobs replaces variables, as with `--conf spark.sql.variable.substitute=true`."""
    spark.conf.set("spark.sql.variable.substitute", "true")
    yield
    spark.conf.set("spark.sql.variable.substitute", "false")


@pytest.mark.parametrize("engine", [BY_SPARK, BY_DUCKDB], ids=["spark", "duckdb"])
def test_every_attack_is_refused_and_does_no_harm(
    spark: SparkSession, tables_of: TablesOf, commands: Commands, tmp_path: Path, engine: tuple[str, ...]
) -> None:
    """`make crash` also gives them in other words."""
    _, tables = tables_of()
    trap, tally = Trap(tmp_path, tables.folder, spark), Tally()
    known = attacks(trap.bait, trap.place)
    if engine == BY_DUCKDB:
        known += duckdb_attacks(trap.bait, trap.place)
    attack(commands, tables.folder, trap, iter(known), tally, engine)
    assert tally.broken == []
    assert tally.facts == {"refused": len(known)}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_query_over_the_tables_is_answered(tables_of: TablesOf, commands: Commands, question: str) -> None:
    done = commands("sql", "--tables", tables_of()[1].folder, *BY_SPARK, "--", question)
    assert done.code == 0, done.stderr
    assert all(map(json.loads, done.stdout.splitlines()))


PORTABLE = (
    (
        "SELECT outcome, count(*) AS n, sum(queue_us) AS us, avg(queue_us) AS mean FROM silver_messages"
        " GROUP BY outcome ORDER BY outcome"
    ),
    (
        "SELECT day, org_id, sum(cost_usd) AS usd, max(calls) / 2 AS half FROM gold_cost GROUP BY day, org_id"
        " ORDER BY day, org_id"
    ),
    "SELECT * FROM gold_latency ORDER BY day, hour_us, org_id, type, priority LIMIT 20",
    (
        "SELECT message_id, finished_us, rejected_us FROM silver_messages ORDER BY rejected_us, finished_us,"
        " message_id LIMIT 30"
    ),
    (
        "WITH dead AS (SELECT message_id FROM silver_messages WHERE outcome = 'dead_letter')"
        " SELECT type, count(*) AS n FROM dead JOIN silver_spans USING (message_id)"
        " GROUP BY type HAVING count(*) > 1 ORDER BY n DESC, type"
    ),
    "SELECT pattern_id, orgs, hours, samples, systematic FROM gold_dlq_patterns ORDER BY pattern_id",
    (
        "SELECT queue, row_number() OVER (PARTITION BY queue ORDER BY minute_us) AS n FROM gold_depth"
        " ORDER BY queue, n LIMIT 50"
    ),
    (
        "SELECT min(date) AS first, DATE '2025-01-05' AS d, CAST('nan' AS double) AS nan, NULL AS nothing"
        " FROM bronze_events"
    ),
    "SELECT count(*) AS n FROM Silver_Events WHERE day = DATE '2025-01-05'",
)
"""Queries in words that both engines know."""


@pytest.mark.parametrize("query", PORTABLE)
def test_duckdb_and_spark_give_equal_answers(tables_of: TablesOf, commands: Commands, query: str) -> None:
    folder = tables_of(faults=True)[1].folder
    own, by_spark = (
        commands("sql", "--tables", folder, *engine, "--", query) for engine in (BY_DUCKDB, BY_SPARK)
    )
    assert (own.code, by_spark.code) == (0, 0), (own.stderr, by_spark.stderr)
    assert "starting Spark" not in own.stderr
    rows = [[json.loads(line) for line in done.stdout.splitlines()] for done in (own, by_spark)]
    assert rows[0] == rows[1] != []


def test_a_setting_of_spark_asks_spark(tables_of: TablesOf, commands: Commands) -> None:
    words = ("sql", "--tables", tables_of()[1].folder)
    done = commands(*words, "--conf", "spark.sql.ansi.enabled=true", "SELECT typeof(1) AS t")
    assert (done.stdout, "starting Spark" in done.stderr) == ('{"t":"int"}\n', True)
    done = commands(*words, "SELECT typeof(1) AS t")
    assert (done.stdout, done.stderr) == ('{"t":"INTEGER"}\n', "")


def test_duckdb_lists_and_describes_the_tables(tables_of: TablesOf, commands: Commands) -> None:
    _, tables = tables_of()
    done = commands("sql", "--tables", tables.folder, "SHOW TABLES")
    assert [json.loads(line)["name"] for line in done.stdout.splitlines()] == tables.names()
    done = commands("sql", "--tables", tables.folder, "DESCRIBE gold_cost")
    columns = {row["column_name"]: row["column_type"] for row in map(json.loads, done.stdout.splitlines())}
    assert list(columns) == tables.schema("gold_cost").names
    assert (columns["cost_usd"], columns["day"]) == ("DECIMAL(28,9)", "DATE")


def test_the_session_of_queries_writes_nothing_and_reads_no_file_by_its_path(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Also when a statement gets past the check."""
    session = queries.read_only(spark)
    with pytest.raises(Exception, match="FileCommitProtocol"):
        session.sql(f"INSERT OVERWRITE DIRECTORY '{tmp_path / 'place'}' USING csv SELECT 1")
    assert not (tmp_path / "place").exists()
    with pytest.raises(AnalysisException, match="TABLE_OR_VIEW_NOT_FOUND"):
        session.sql("SELECT * FROM text.`/etc/hostname`")
    assert session.sql("SELECT '${env:HOME}' AS a").collect()[0][0] == "${env:HOME}"
    assert spark.conf.get("spark.sql.runSQLOnFiles") == "true"  # of the session of jobs nothing changed


NAME = "spark.app.name"
VARIABLES = ("env:HOME", "system:user.dir", f"spark:{NAME}", f"hiveconf:{NAME}", NAME)


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_in_a_query_stays_the_text_that_it_is(
    substituting: None, tables_of: TablesOf, commands: Commands, variable: str
) -> None:
    query = f"SELECT '${{{variable}}}' AS a, 1 AS `${{{variable}}}`"
    done = commands("sql", "--tables", tables_of()[1].folder, *BY_SPARK, "--", query)
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout) == {"a": f"${{{variable}}}", f"${{{variable}}}": 1}


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_in_a_condition_of_replay_stays_the_text_that_it_is(
    substituting: None, spark: SparkSession, tables_of: TablesOf, variable: str
) -> None:
    where = f"'${{{variable}}}' = concat('$', '{{{variable}}}')"
    chosen = selection(spark, tables_of()[1], ReplayRequest(where=where, to="memory://"))
    assert chosen.count() == tables_of()[1].read(spark, "silver_messages").count()


def test_the_active_session_is_the_one_of_before_after_a_query(
    spark: SparkSession, tables_of: TablesOf
) -> None:
    sessions: Any = spark.sparkContext._jvm
    active = sessions.org.apache.spark.sql.classic.SparkSession.getActiveSession
    before = active().toString()
    assert list(Pipeline(spark, tables_of()[1]).answers("SELECT 1 AS a")) == ['{"a":1}']
    assert active().toString() == before


def test_the_session_of_a_command_substitutes_no_variables(spark: SparkSession) -> None:
    assert spark.sql("SELECT '${env:HOME}' AS a").collect()[0][0] == "${env:HOME}"


def test_every_function_of_the_list_is_one_of_spark(spark: SparkSession) -> None:
    state = spark._jsparkSession.sessionState()
    names = ",".join(
        str(registry.listFunction().mkString(","))
        for registry in (state.functionRegistry(), state.tableFunctionRegistry())
    )
    assert queries.functions() <= {name.removeprefix("system.builtin.") for name in names.split(",")}


def test_a_query_with_too_many_parts_is_refused(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "PLAN_NODES_MAX", 100)
    with pytest.raises(InvalidMessage, match="the query has more than 100 parts"):
        queries.checked(spark, "SELECT " + ", ".join(map(str, range(200))), NO_TABLES)


def test_a_query_opens_only_the_tables_that_it_names(spark: SparkSession) -> None:
    names = ("gold_sla", "silver_spans")
    for query, opened in {
        "SELECT count(*) FROM Gold_SLA": {"gold_sla"},
        "SELECT 'silver_spans'": set(),
        "SHOW TABLES": set(names),
    }.items():
        assert queries.checked(spark, query, names).tables == opened


def test_sql_has_no_remote(tables_of: TablesOf, commands: Commands) -> None:
    done = commands("sql", "--tables", tables_of()[1].folder, "--remote", "sc://127.0.0.1:1", "SELECT 1")
    assert done.code == 2
    assert "sql has no --remote" in done.stderr
