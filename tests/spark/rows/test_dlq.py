"""Patterns of dead letters: masks by example, grouping against a plain loop, and all rows against DuckDB."""

import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from datetime import date
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.transforms import dlq
from tests.spark.conftest import TablesOf
from tests.spark.oracle import in_order, oracle, stored
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


def test_where_members_differ_anything_may_stand_and_other_classes_and_lengths_are_other_patterns(
    spark: SparkSession,
) -> None:
    rows = [(1, "A", "it is over"), (2, "B", "it is over"), (3, "A", "it is all over now")]
    rows += [
        (n, "Timeout", f"no answer from {host} in time") for n, host in enumerate(("maps", "jira", "maps"))
    ]
    assert [(row["error_type"], row["n"], row["pattern"]) for row in patterns(spark, rows)] == [
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
    found = {row["error_type"]: row for row in patterns(spark, [*rows, *newest])}
    for case, (hours, trend, systematic) in TRENDS.items():
        row = found[case]
        assert (row["trend"], row["systematic"]) == (trend, systematic), case
        assert row["first_us"] == min(hours) * HOUR_US + 5
        assert [tuple(hour) for hour in row["hours"]] == sorted(
            Counter(hour * HOUR_US for hour in hours).items()
        )
        assert 1 <= len(row["samples"]) <= dlq.SAMPLES_MAX


# ---- a history -----------------------------------------------------------------------------------------


def masked_by_duckdb(column: str) -> str:
    text = f"substr(coalesce({column}, ''), 1, 400)"
    for mask, name in dlq.MASKS:
        quoted = mask.replace("'", "''")
        text = f"regexp_replace({text}, '{quoted}', '{name.replace('$1', chr(92) + '1')}', 'g')"
    return f"trim({text})"


LETTERS = f"""
    SELECT day, ts_us, ts_us // {HOUR_US} * {HOUR_US} AS hour_us,
           coalesce(error_type, '') AS error_type, {masked_by_duckdb("error")} AS template,
           message_id, org_id, type, substr(error, 1, 400) AS error
    FROM events WHERE kind = 'dead_letter'
"""  # noqa: S608 - of constants


def test_templates_of_a_history_are_what_the_oracle_says(tables_of: TablesOf) -> None:
    folder, tables = tables_of(faults=True)
    said = oracle(folder).execute(f"""
        SELECT day, hour_us, error_type, template, count(*),
               min((ts_us, message_id, error)), max((ts_us, message_id, error)),
               list_sort(list(DISTINCT org_id)), list_sort(list(DISTINCT type))
        FROM ({LETTERS}) GROUP BY ALL""")  # noqa: S608 - of constants
    columns = ["day", "hour_us", "error_type", "template", "n", "first", "last", "orgs", "types"]
    rows = in_order(plain(row) for row in said.fetchall())
    assert rows
    assert stored(tables, "gold_dlq_templates", columns) == rows


def test_patterns_of_a_history_are_what_plain_loops_say(tables_of: TablesOf) -> None:
    """Every row and column, from the dead letters themselves, without the templates in between."""
    folder, tables = tables_of(faults=True)
    found = oracle(folder).execute(LETTERS)
    names = [column[0] for column in found.description or ()]
    letters = [dict(zip(names, row, strict=True)) for row in found.fetchall()]
    rows = in_order(pattern_of(*group) for group in families(letters))
    assert len(rows) == len({row[1] for row in rows}) > 3  # one pattern for each family of errors
    assert stored(tables, "gold_dlq_patterns") == rows


def families(letters: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]], int]]:
    """The leader and the letters of each pattern, and when the newest letter of all came."""
    newest_us = max(letter["ts_us"] for letter in letters)
    for error_type in {letter["error_type"] for letter in letters}:
        mine = [letter for letter in letters if letter["error_type"] == error_type]
        for leader, members in grouped(Counter(letter["template"] for letter in mine)).items():
            yield leader, [letter for letter in mine if letter["template"] in members], newest_us


def pattern_of(leader: str, letters: list[dict[str, Any]], newest_us: int) -> tuple[Any, ...]:
    error_type = letters[0]["error_type"]
    templates = sorted({letter["template"] for letter in letters})
    times = sorted(letter["ts_us"] for letter in letters)
    hours = Counter(letter["hour_us"] for letter in letters)
    ages = [newest_us - letter["hour_us"] for letter in letters]
    lately, earlier = (sum(n <= age // dlq.DAY_US < n + 1 for age in ages) for n in (0, 1))
    return (
        hashlib.sha256(f"{error_type} {leader}".encode()).hexdigest()[:12],
        error_type,
        " ".join(
            words[0] if len(set(words)) == 1 else "<*>"
            for words in zip(*(template.split(" ") for template in templates), strict=True)
        ),
        len(letters),
        len(templates),
        times[0],
        times[-1],
        lately,
        earlier,
        trend_of(times[0] > newest_us - dlq.DAY_US, lately, earlier),
        len(letters) >= 5 and len(hours) >= 3,
        tuple(sorted({letter["org_id"] for letter in letters})),
        tuple(sorted({letter["type"] for letter in letters})),
        tuple(sorted(hours.items())),
        samples_of(letters),
    )


def trend_of(is_new: bool, lately: int, earlier: int) -> str:
    if is_new:
        return "new"
    if lately >= 2 * max(earlier, 1):
        return "rising"
    return "falling" if earlier >= 2 * max(lately, 1) else "steady"


def samples_of(letters: list[dict[str, Any]]) -> tuple[Any, ...]:
    """The first three of the first and last letters of each hour and template."""
    ends: set[tuple[Any, ...]] = set()
    for place in {(letter["hour_us"], letter["template"]) for letter in letters}:
        told = [
            (letter["ts_us"], letter["message_id"], letter["error"])
            for letter in letters
            if (letter["hour_us"], letter["template"]) == place
        ]
        ends |= {min(told), max(told)}
    return tuple(sorted(ends)[:3])
