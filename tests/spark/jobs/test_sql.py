"""`sql` answers queries over the tables, and refuses whatever else Spark could do."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from postroom.errors import InvalidMessage
from postroom.pipeline import queries
from postroom.pipeline.jobs import Pipeline
from postroom.pipeline.replay import ReplayRequest, selection
from tests.crash.attack_pipeline import QUESTIONS, Trap, attack, attacks
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


def test_every_attack_is_refused_and_does_no_harm(
    spark: SparkSession, tables_of: TablesOf, commands: Commands, tmp_path: Path
) -> None:
    """`make crash` also gives them in other words."""
    _, tables = tables_of()
    trap, tally = Trap(tmp_path, tables.folder, spark), Tally()
    attack(commands, tables.folder, trap, iter(attacks(trap.bait, trap.place)), tally)
    assert tally.broken == []
    assert tally.facts == {"refused": len(attacks(trap.bait, trap.place))}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_query_over_the_tables_is_answered(tables_of: TablesOf, commands: Commands, question: str) -> None:
    done = commands("sql", "--tables", tables_of()[1].folder, "--", question)
    assert done.code == 0, done.stderr
    assert all(map(json.loads, done.stdout.splitlines()))


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
    done = commands("sql", "--tables", tables_of()[1].folder, "--", query)
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
