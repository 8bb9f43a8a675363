"""Patterns of dead letters: groups of errors with a similar text.

Rule 1: first, masking. Ids, numbers and addresses are replaced by a name in angle brackets, so that millions
        of texts become a few hundred templates a day.
Rule 2: then, similarity. Templates of the same class and number of words form a group when enough words at
        the same position are equal. The most frequent templates come first, and each joins the first leader
        that it resembles. The result does not depend on partitioning.
Rule 3: only built-in expressions: no row leaves the JVM.
"""

from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.follow.columns import hour_us
from postroom.pipeline.follow.merge import Sums
from postroom.pipeline.follow.refresh import Table
from postroom.pipeline.gold.columns import DAY
from postroom.pipeline.times import DAY_US

TEXT_MAX: Final = 400  # characters of an error that are compared
SIMILAR: Final = 60  # percent of the words
TEMPLATES_MAX: Final = 500  # of one class and length that are compared; rarer ones are groups of one
SAMPLES_MAX: Final = 3
SYSTEMATIC_MIN: Final = 5  # dead letters
SYSTEMATIC_HOURS: Final = 3  # different ones
RISE: Final = 2  # times as often as on the day before
ANY: Final = "<*>"

MASKS: Final = (
    (r"\s+", " "),
    (r"[A-Za-z][A-Za-z0-9+.-]*://[^ '\"<>)]+", "<url>"),
    (r"[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+", "<mail>"),
    (r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b", "<id>"),
    (r"\b[0-9]{1,3}(\.[0-9]{1,3}){3}\b", "<ip>"),
    (r"\b[A-Za-z]{1,4}[-_][0-9a-fA-F]{6,}\b", "<id>"),
    (r"\b(0x)?[0-9a-fA-F]{8,}\b", "<id>"),
    (r"(^|[ '\"(=])/[^ '\"<>):,;]*", "$1<path>"),
    (r"[0-9]+([.,][0-9]+)*", "<n>"),
)
"""In this order: a longer form before a form that is part of it."""


def masked(text: Column) -> Column:
    """The text with its variable parts masked."""
    short = F.substring(text, 1, TEXT_MAX)
    return F.trim(reduce(lambda so_far, mask: F.regexp_replace(so_far, *mask), MASKS, short))


def dlq_templates(events: DataFrame) -> DataFrame:
    """One row for each hour, class of error and masked text of dead letters: the input of the patterns."""
    sample = F.struct("ts_us", "message_id", F.substring("error", 1, TEXT_MAX).alias("error"))
    return (
        events.where("kind = 'dead_letter'")
        .withColumn("error_type", F.coalesce("error_type", F.lit("")))
        .withColumn("template", masked(F.coalesce("error", F.lit(""))))
        .withColumn("hour_us", hour_us(F.col("ts_us")))
        .groupBy("day", "hour_us", "error_type", "template")
        .agg(
            F.count("*").alias("n"),
            F.min(sample).alias("first"),
            F.max(sample).alias("last"),
            F.sort_array(F.collect_set("org_id")).alias("orgs"),
            F.sort_array(F.collect_set("type")).alias("types"),
        )
    )


def dlq_patterns(templates: DataFrame) -> DataFrame:
    """One row for each pattern: its count, period, organizations, trend, and whether it is systematic.

    `trend` compares the last day before the newest dead letter with the day before that. A pattern that is
    frequent over several hours is systematic; a burst or a single dead letter is not.
    """
    leaders = _leaders(templates)
    newest_us = F.max(F.col("last.ts_us")).alias("newest_us")
    rows = (
        templates.join(leaders, ["error_type", "template"], "left")
        .withColumn("leader", F.coalesce("leader", "template"))
        .crossJoin(F.broadcast(templates.agg(newest_us)))
    )
    hourly = rows.groupBy("error_type", "leader", "hour_us", "newest_us").agg(
        F.sum("n").alias("n"),
        F.min("first").alias("first"),
        F.max("last").alias("last"),
        F.collect_set("template").alias("templates"),
        F.flatten(F.collect_list("orgs")).alias("orgs"),
        F.flatten(F.collect_list("types")).alias("types"),
    )
    return _summed(hourly)


def _summed(hourly: DataFrame) -> DataFrame:
    age_us = F.col("newest_us") - F.col("hour_us")
    lately = F.sum(F.when(age_us < DAY_US, F.col("n")).otherwise(0))
    earlier = F.sum(F.when((age_us >= DAY_US) & (age_us < 2 * DAY_US), F.col("n")).otherwise(0))
    ends = F.array_sort(F.array_distinct(F.flatten(F.collect_list(F.array("first", "last")))))
    patterns = hourly.groupBy("error_type", "leader").agg(
        F.sum("n").alias("n"),
        F.min("first.ts_us").alias("first_us"),
        F.max("last.ts_us").alias("last_us"),
        F.array_sort(F.array_distinct(F.flatten(F.collect_list("templates")))).alias("templates"),
        F.array_sort(F.array_distinct(F.flatten(F.collect_list("orgs")))).alias("orgs"),
        F.array_sort(F.array_distinct(F.flatten(F.collect_list("types")))).alias("types"),
        F.sort_array(F.collect_list(F.struct("hour_us", "n"))).alias("hours"),
        lately.alias("last_day"),
        earlier.alias("day_before"),
        F.slice(ends, 1, SAMPLES_MAX).alias("samples"),
        F.max("newest_us").alias("newest_us"),
    )
    return patterns.select(
        F.substring(F.sha2(F.concat_ws(" ", "error_type", "leader"), 256), 1, 12).alias("pattern_id"),
        "error_type",
        _common(F.col("templates")).alias("pattern"),
        "n",
        F.size("templates").alias("templates"),
        "first_us",
        "last_us",
        "last_day",
        "day_before",
        _trend().alias("trend"),
        ((F.col("n") >= SYSTEMATIC_MIN) & (F.size("hours") >= SYSTEMATIC_HOURS)).alias("systematic"),
        "orgs",
        "types",
        "hours",
        "samples",
    )


def _trend() -> Column:
    lately, earlier = F.col("last_day"), F.col("day_before")
    return (
        F.when(F.col("first_us") > F.col("newest_us") - DAY_US, "new")
        .when(lately >= RISE * F.greatest(earlier, F.lit(1)), "rising")
        .when(earlier >= RISE * F.greatest(lately, F.lit(1)), "falling")
        .otherwise("steady")
    )


# ---- similarity ------------------------------------------------------------------------------------------


def _words(template: Column) -> Column:
    return F.split(template, " ")


def _resemble(one: Column, other: Column) -> Column:
    """Whether enough words of two templates of one length are equal at the same position."""
    same = F.size(F.filter(F.zip_with(_words(one), _words(other), lambda a, b: a == b), lambda equal: equal))
    return same * 100 >= F.size(_words(one)) * SIMILAR


def _leaders(templates: DataFrame) -> DataFrame:
    """The leader of each template, by a fold over those of one class and length, the frequent ones first."""
    counted = templates.groupBy("error_type", "template").agg(F.sum("n").alias("n"))
    # By the negative count, so that templates with equal counts are in the order of their text.
    ranked = F.slice(
        F.sort_array(F.collect_list(F.struct((-F.col("n")).alias("order"), "template"))), 1, TEMPLATES_MAX
    )["template"]
    blocks = counted.groupBy("error_type", F.size(_words(F.col("template"))).alias("words")).agg(
        ranked.alias("ranked")
    )
    none = F.array().cast("array<string>")
    leaders = F.aggregate("ranked", none, _joined)
    return (
        blocks.withColumn("leaders", leaders)
        .select("error_type", "leaders", F.explode("ranked").alias("template"))
        .select("error_type", "template", _first_like(F.col("leaders"), F.col("template")).alias("leader"))
    )


def _joined(leaders: Column, template: Column) -> Column:
    """The leaders after one more template, which is a new leader unless it resembles one."""
    is_known = F.exists(leaders, lambda leader: _resemble(leader, template))
    return F.when(is_known, leaders).otherwise(F.concat(leaders, F.array(template)))


def _first_like(leaders: Column, template: Column) -> Column:
    return F.element_at(F.filter(leaders, lambda leader: _resemble(leader, template)), 1)


def _common(templates: Column) -> Column:
    """The words that all templates share, with a wildcard at each position where they differ."""
    first = _words(templates[0])
    places = F.transform(
        first,
        lambda word, at: F.when(
            F.forall(templates, lambda other: F.get(_words(other), at) == word), word
        ).otherwise(ANY),
    )
    return F.array_join(places, " ")


_TEMPLATES: Final = Sums(
    ("day", "hour_us", "error_type", "template"),
    ("n",),
    smallest=("first",),
    largest=("last",),
    sets=("orgs", "types"),
    moment="hour_us",
)
TABLES: Final = {
    "gold_dlq_templates": Table(
        dlq_templates,
        ("silver_events",),
        DAY,
        _TEMPLATES,
        "hour_us",
        grain="hour, class, masked text of dead letters",
    ),
    "gold_dlq_patterns": Table(
        dlq_patterns,
        ("gold_dlq_templates",),
        grain="pattern: count, trend, first and last, samples, systematic or not",
    ),
}
