"""Patterns of dead letters: masks and trends by example, and all rows against DuckDB."""

import random
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

from duckdb import DuckDBPyConnection, connect
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.gold.tables import dead_letters as patterns
from tests.spark.conftest import TablesOf
from tests.spark.oracle import Rows, in_order, oracle, stored
from tests.spark.plainrows import plain
from tests.spark.stories import HOUR_US

MASKED = {
    "no answer from maps.internal:8443 within 12 s (call 93fa0c11d2e4)": (
        "no answer from maps.internal:<n> within <n> s (call <id>)"
    ),
    "403: user u-bf8eab57a2ab may not\n  write to 12278": "<n>: user <id> may not write to <n>",
    "GET https://api.example/v1/x?y=1 said 502": "GET <url> said <n>",
    "mail to ada@example.com bounced": "mail to <mail> bounced",
    "10.0.0.7 refused 3f2504e0-4f89-11d3-9a0c-0305e82c3301": "<ip> refused <id>",
    "cannot open /var/lib/x.db: 28": "cannot open <path>: <n>",
    "took 1,234.5 ms": "took <n> ms",
    "it's over": "it's over",
    "": "",
}


def test_masks_replace_the_variable_parts_of_a_text(spark: SparkSession) -> None:
    texts = spark.createDataFrame([(text,) for text in MASKED], "text STRING")
    assert dict(map(tuple, texts.select("text", patterns.masked(F.col("text"))).collect())) == MASKED


def letters(spark: SparkSession, rows: list[tuple[int, str, str]]) -> DataFrame:
    """Dead letters: when, the class, what it says."""
    columns = (
        "day DATE, ts_us BIGINT, kind STRING, message_id STRING, org_id STRING, type STRING, "
        "error_type STRING, error STRING"
    )
    made = [
        (date(2025, 1, 1), ts_us, "dead_letter", f"m{n:04}", f"o{n % 3}", "tool_call", error_type, error)
        for n, (ts_us, error_type, error) in enumerate(rows)
    ]
    return spark.createDataFrame(made, columns)


def patterns_of(spark: SparkSession, rows: list[tuple[int, str, str]]) -> list[Any]:
    return (
        patterns.dlq_patterns(patterns.dlq_templates(letters(spark, rows)))
        .orderBy("error_type", "pattern")
        .collect()
    )


def test_pattern_uses_a_wildcard_where_members_differ(
    spark: SparkSession,
) -> None:
    rows = [(1, "A", "it is over"), (2, "B", "it is over"), (3, "A", "it is all over now")]
    rows += [
        (n, "Timeout", f"no answer from {host} in time") for n, host in enumerate(("maps", "jira", "maps"))
    ]
    assert [(row["error_type"], row["n"], row["pattern"]) for row in patterns_of(spark, rows)] == [
        ("A", 1, "it is all over now"),
        ("A", 1, "it is over"),
        ("B", 1, "it is over"),
        ("Timeout", 3, "no answer from <*> in time"),
    ]


TRENDS = {
    "more than the day before": ([0, 30, 49, 50, 60, 70], "rising", True),
    "less": ([30, 31, 32, 33, 71], "falling", True),
    "as often": ([0, 30, 40, 60, 71], "steady", True),
    "a burst within one hour": ([71, 71, 71, 71, 71, 71], "new", False),
    "too few": ([0, 71], "steady", False),
}


def test_trends_and_what_is_systematic(spark: SparkSession) -> None:
    newest = [(72 * HOUR_US - 1, "Other", "the newest of all")]
    rows = [
        (hour * HOUR_US + 5, case, "it is over") for case, (hours, *_) in TRENDS.items() for hour in hours
    ]
    found = {row["error_type"]: row for row in patterns_of(spark, [*rows, *newest])}
    for case, (hours, trend, systematic) in TRENDS.items():
        row = found[case]
        assert (row["trend"], row["systematic"]) == (trend, systematic), case
        assert row["first_us"] == min(hours) * HOUR_US + 5
        assert [tuple(hour) for hour in row["hours"]] == sorted(
            Counter(hour * HOUR_US for hour in hours).items()
        )
        assert 1 <= len(row["samples"]) <= patterns.SAMPLES_MAX


# ---- a history -----------------------------------------------------------------------------------------


def masked_by_duckdb(column: str) -> str:
    text = f"substr(coalesce({column}, ''), 1, 400)"
    for mask, name in patterns.MASKS:
        quoted = mask.replace("'", "''")
        text = f"regexp_replace({text}, '{quoted}', '{name.replace('$1', chr(92) + '1')}', 'g')"
    return f"trim({text})"


def names(column: str) -> str:
    """The distinct values of a column. Mail has no organizations."""
    return f"coalesce(list_sort(list(DISTINCT {column}) FILTER ({column} IS NOT NULL)), [])"


LETTERS = f"""
    SELECT day, ts_us, ts_us // {HOUR_US} * {HOUR_US} AS hour_us,
           coalesce(error_type, '') AS error_type, {masked_by_duckdb("error")} AS template,
           message_id, org_id, type, substr(error, 1, 400) AS error
    FROM events WHERE kind = 'dead_letter'
"""  # noqa: S608 - of constants


TEMPLATE_COLUMNS = ["day", "hour_us", "error_type", "template", "n", "first", "last", "orgs", "types"]


def expected_templates(folder: Path) -> Rows:
    said = oracle(folder).execute(f"""
        SELECT day, hour_us, error_type, template, count(*),
               min((ts_us, message_id, error)), max((ts_us, message_id, error)),
               {names("org_id")}, {names("type")}
        FROM ({LETTERS}) GROUP BY ALL""")  # noqa: S608 - of constants
    return in_order(plain(row) for row in said.fetchall())


def test_templates_of_a_history_are_what_the_oracle_says(tables_of: TablesOf) -> None:
    folder, tables = tables_of(faults=True)
    rows = expected_templates(folder)
    assert rows
    assert stored(tables, "gold_dlq_templates", TEMPLATE_COLUMNS) == rows


ALIKE = """
CREATE TEMP MACRO words(text) AS string_split(text, ' ');
CREATE TEMP MACRO alike(one, other) AS
    len(list_filter(list_zip(words(one), words(other)), lambda pair: pair[1] = pair[2])) * 100
    >= len(words(one)) * 60;
"""

FOLLOWERS = """
CREATE TEMP TABLE followers AS
WITH RECURSIVE ranked AS (
    SELECT error_type, template, len(words(template)) AS n_words,
           row_number() OVER (PARTITION BY error_type, n_words ORDER BY count(*) DESC, template) AS turn
    FROM letters GROUP BY error_type, template
),
choosing AS (
    SELECT error_type, n_words, 0::BIGINT AS turn, NULL::VARCHAR AS template, []::VARCHAR[] AS leaders,
           NULL::VARCHAR AS leader
    FROM ranked WHERE turn = 1
    UNION ALL
    SELECT error_type, n_words, ranked.turn, ranked.template,
           CASE WHEN first_alike IS NULL THEN list_append(leaders, ranked.template) ELSE leaders END,
           coalesce(first_alike, ranked.template)
    FROM choosing JOIN ranked USING (error_type, n_words),
         LATERAL (SELECT list_filter(leaders, lambda one: alike(one, ranked.template))[1] AS first_alike)
    WHERE ranked.turn = choosing.turn + 1
)
SELECT error_type, template, leader FROM choosing WHERE turn > 0
"""
"""The most frequent first, each joins the first leader it is like, or leads."""

PLACES = """
CREATE TEMP TABLE places AS
WITH spelled AS (
    SELECT error_type, leader, unnest(words(template)) AS word,
           generate_subscripts(words(template), 1) AS place
    FROM followers
),
kept AS (
    SELECT error_type, leader, place,
           CASE WHEN count(DISTINCT word) = 1 THEN min(word) ELSE '<*>' END AS word
    FROM spelled GROUP BY error_type, leader, place
)
SELECT error_type, leader, string_agg(word, ' ' ORDER BY place) AS pattern FROM kept GROUP BY ALL
"""

ENDS = """
CREATE TEMP TABLE ends AS
WITH told AS (
    SELECT error_type, leader,
           min((ts_us, message_id, error)) AS early, max((ts_us, message_id, error)) AS late
    FROM letters JOIN followers USING (error_type, template) GROUP BY error_type, leader, hour_us, template
),
each AS (
    SELECT error_type, leader, early AS told FROM told UNION SELECT error_type, leader, late FROM told
)
SELECT error_type, leader, list(told ORDER BY told)[:3] AS samples FROM each GROUP BY ALL
"""

PATTERNS = f"""
WITH mine AS (
    SELECT *, (SELECT max(ts_us) FROM letters) AS newest_us
    FROM letters JOIN followers USING (error_type, template)
),
hourly AS (
    SELECT error_type, leader, list((hour_us, n) ORDER BY hour_us) AS hours
    FROM (SELECT error_type, leader, hour_us, count(*) AS n FROM mine GROUP BY ALL) GROUP BY ALL
),
summed AS (
    SELECT error_type, leader, count(*) AS n, count(DISTINCT template) AS templates,
           min(ts_us) AS first_us, max(ts_us) AS last_us, max(newest_us) AS newest_us,
           count(*) FILTER (newest_us - hour_us < {24 * HOUR_US}) AS lately,
           count(*) FILTER (newest_us - hour_us BETWEEN {24 * HOUR_US} AND {48 * HOUR_US - 1}) AS earlier,
           {names("org_id")} AS orgs, {names("type")} AS types
    FROM mine GROUP BY error_type, leader
)
SELECT sha256(error_type || ' ' || leader)[:12], error_type, pattern, n, templates, first_us, last_us,
       lately, earlier,
       CASE WHEN first_us > newest_us - {24 * HOUR_US} THEN 'new'
            WHEN lately >= 2 * greatest(earlier, 1) THEN 'rising'
            WHEN earlier >= 2 * greatest(lately, 1) THEN 'falling' ELSE 'steady' END,
       n >= 5 AND len(hours) >= 3, orgs, types, hours, samples
FROM summed JOIN hourly USING (error_type, leader) JOIN places USING (error_type, leader)
     JOIN ends USING (error_type, leader)
"""  # noqa: S608 - of constants


def patterns_by_duckdb(duckdb: DuckDBPyConnection, letters: str) -> list[Any]:
    """The patterns of what a query says of dead letters, without the templates of an hour in between."""
    for statement in (ALIKE, f"CREATE TEMP TABLE letters AS {letters}", FOLLOWERS, PLACES, ENDS):
        duckdb.execute(statement)
    return in_order(plain(row) for row in duckdb.execute(PATTERNS).fetchall())


def expected_patterns(folder: Path) -> Rows:
    return patterns_by_duckdb(oracle(folder).cursor(), LETTERS)


def test_patterns_of_a_history_are_what_the_oracle_says(tables_of: TablesOf) -> None:
    folder, tables = tables_of(faults=True)
    rows = expected_patterns(folder)
    assert len(rows) == len({row[1] for row in rows}) > 3  # one pattern for each family of errors
    assert stored(tables, "gold_dlq_patterns") == rows


def test_patterns_of_texts_that_are_much_alike_are_what_the_oracle_says(spark: SparkSession) -> None:
    rng = random.Random(8)
    texts = [" ".join(rng.choice("abc") * 3 for _ in range(rng.randint(1, 7))) for _ in range(600)]
    rows = [(rng.randrange(72 * HOUR_US), rng.choice("EF"), text) for text in texts]
    events = letters(spark, rows)
    found = in_order(
        plain(tuple(row)) for row in patterns.dlq_patterns(patterns.dlq_templates(events)).collect()
    )
    con = connect()
    con.register("events", events.toArrow())
    assert found == patterns_by_duckdb(con, LETTERS)
    assert len(found) > 20
    assert any(row[4] > 2 for row in found)  # templates of one pattern
