"""Patterns of dead letters: masks by example, grouping against a plain loop, and all rows against DuckDB."""

import random
from collections import Counter
from datetime import date
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.transforms import dlq
from tests.spark.conftest import TablesOf
from tests.spark.oracle import oracle
from tests.spark.test_gold import plain

HOUR_US = dlq.HOUR_US

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


def test_masks_take_out_what_is_never_the_same(spark: SparkSession) -> None:
    texts = spark.createDataFrame([(text,) for text in MASKED], "text STRING")
    assert dict(map(tuple, texts.select("text", dlq.masked(F.col("text"))).collect())) == MASKED


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


def patterns(spark: SparkSession, rows: list[tuple[int, str, str]]) -> list[Any]:
    return (
        dlq.dlq_patterns(dlq.dlq_templates(letters(spark, rows))).orderBy("error_type", "pattern").collect()
    )


def grouped(texts: Counter[str]) -> dict[str, set[str]]:
    """Leaders and who follows them: a loop, the most frequent first."""
    groups: dict[str, set[str]] = {}
    for text in sorted(texts, key=lambda one: (-texts[one], one)):
        words = text.split(" ")
        for leader, members in groups.items():
            others = leader.split(" ")
            if len(words) == len(others) and sum(map(str.__eq__, words, others)) * 100 >= 60 * len(words):
                members.add(text)
                break
        else:
            groups[text] = {text}
    return groups


def test_templates_are_grouped_as_a_plain_loop_groups_them(spark: SparkSession) -> None:
    rng = random.Random(8)
    texts = [" ".join(rng.choice("abc") * 3 for _ in range(rng.randint(1, 7))) for _ in range(600)]
    found = patterns(spark, [(n, "E", text) for n, text in enumerate(texts)])
    groups = grouped(Counter(texts))
    counted = Counter(texts)
    said = sorted((sum(counted[text] for text in group), len(group)) for group in groups.values())
    assert sorted((row["n"], row["templates"]) for row in found) == said
    assert len(said) > 20


def test_where_the_members_of_a_pattern_differ_anything_may_stand(spark: SparkSession) -> None:
    rows = [
        (n, "Timeout", f"no answer from {host} in time") for n, host in enumerate(("maps", "jira", "maps"))
    ]
    assert [row["pattern"] for row in patterns(spark, rows)] == ["no answer from <*> in time"]


def test_other_classes_and_other_lengths_are_other_patterns(spark: SparkSession) -> None:
    rows = [(1, "A", "it is over"), (2, "B", "it is over"), (3, "A", "it is all over now")]
    assert [(row["error_type"], row["n"]) for row in patterns(spark, rows)] == [("A", 1), ("A", 1), ("B", 1)]


@pytest.mark.parametrize(
    ("hours", "trend", "systematic"),
    [
        ([0, 30, 49, 50, 60, 70], "rising", True),  # one in the day before, four in the last
        ([30, 31, 32, 33, 71], "falling", True),
        ([0, 30, 40, 60, 71], "steady", True),
        ([71, 71, 71, 71, 71, 71], "new", False),  # a burst within one hour
        ([0, 71], "steady", False),
    ],
)
def test_trends_and_what_is_systematic(
    spark: SparkSession, hours: list[int], trend: str, systematic: bool
) -> None:
    newest = [(72 * HOUR_US - 1, "Other", "the newest of all")]
    rows = [(hour * HOUR_US + 5, "E", "it is over") for hour in hours]
    found = next(row for row in patterns(spark, [*rows, *newest]) if row["error_type"] == "E")
    assert (found["trend"], found["systematic"]) == (trend, systematic)
    assert found["first_us"] == min(hours) * HOUR_US + 5
    assert [tuple(hour) for hour in found["hours"]] == sorted(
        Counter(hour * HOUR_US for hour in hours).items()
    )
    assert 1 <= len(found["samples"]) <= dlq.SAMPLES_MAX


def test_templates_of_a_history_are_what_the_oracle_says(spark: SparkSession, tables_of: TablesOf) -> None:
    folder, tables = tables_of(1500, 11, True)
    text = "substr(coalesce(error, ''), 1, 400)"
    for mask, name in dlq.MASKS:
        quoted = mask.replace("'", "''")
        text = f"regexp_replace({text}, '{quoted}', '{name.replace('$1', chr(92) + '1')}', 'g')"
    found = dlq.dlq_templates(tables.read(spark, "silver_events"))
    said = oracle(folder).execute(f"""
        SELECT CAST(day AS VARCHAR), ts_us // 3600000000 * 3600000000, coalesce(error_type, ''), trim({text}),
               count(*), min(ts_us), max(ts_us), list_sort(list(DISTINCT org_id)),
               list_sort(list(DISTINCT type))
        FROM events WHERE kind = 'dead_letter' GROUP BY ALL""")  # noqa: S608 - of constants
    columns = (
        "CAST(day AS STRING)",
        "hour_us",
        "error_type",
        "template",
        "n",
        "first.ts_us",
        "last.ts_us",
        "orgs",
        "types",
    )
    assert sorted(map(plain, found.selectExpr(*columns).collect())) == sorted(map(plain, said.fetchall()))


def test_a_history_has_one_pattern_for_each_family_of_errors(
    spark: SparkSession, tables_of: TablesOf
) -> None:
    _, tables = tables_of(1500, 11, True)
    events = tables.read(spark, "silver_events")
    found = dlq.dlq_patterns(dlq.dlq_templates(events)).collect()
    assert len({row["error_type"] for row in found}) == len(found)
    assert sum(row["n"] for row in found) == events.where("kind = 'dead_letter'").count()
