"""Patterns of dead letters: which errors are one error.

Rule 1: masking first. What looks like an id, a number or an address becomes a name in angle brackets, so that
        millions of texts become a few hundred templates, by day.
Rule 2: then similarity. Templates of one class and as many words belong together when enough of their words
        are the same, place by place. The most frequent come first, and each joins the first leader that it
        resembles: the outcome depends on the rows alone, and not on how they are spread.
Rule 3: built-in expressions only: nothing leaves the JVM.
"""

from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.silver.tables import hour_us
from postroom.pipeline.times import DAY_US

TEXT_MAX: Final = 400  # characters of an error that are looked at
SIMILAR: Final = 60  # percent of the words
TEMPLATES_MAX: Final = (
    500  # of one class and length that are compared; the rarest beyond stand for themselves
)
SAMPLES_MAX: Final = 3
SYSTEMATIC_MIN: Final = 5  # dead letters
SYSTEMATIC_HOURS: Final = 3  # different ones
RISE: Final = 2  # so many times as often as the day before
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
"""In this order: what is longer before what is part of it."""


def masked(text: Column) -> Column:
    """The text without what is never the same."""
    short = F.substring(text, 1, TEXT_MAX)
    return F.trim(reduce(lambda so_far, mask: F.regexp_replace(so_far, *mask), MASKS, short))


def dlq_templates(events: DataFrame) -> DataFrame:
    """One row for each hour, class of error and masked text of dead letters: what patterns are made of."""
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
    """One row for each pattern: how often, since when, where, how it develops, and whether it is systematic.

    `trend` compares the last day before the newest dead letter with the day before that. A pattern that comes
    often, and over hours, is systematic; a burst or a single letter is not.
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
    """Whether enough words of two templates of one length are the same, place by place."""
    same = F.size(F.filter(F.zip_with(_words(one), _words(other), lambda a, b: a == b), lambda equal: equal))
    return same * 100 >= F.size(_words(one)) * SIMILAR


def _leaders(templates: DataFrame) -> DataFrame:
    """The leader of each template: a fold over those of one class and length, the frequent ones first."""
    counted = templates.groupBy("error_type", "template").agg(F.sum("n").alias("n"))
    # Sorted by a negative count, so that equals stand in the order of their text.
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
    """One more template: a leader of its own unless it resembles one."""
    is_known = F.exists(leaders, lambda leader: _resemble(leader, template))
    return F.when(is_known, leaders).otherwise(F.concat(leaders, F.array(template)))


def _first_like(leaders: Column, template: Column) -> Column:
    return F.element_at(F.filter(leaders, lambda leader: _resemble(leader, template)), 1)


def _common(templates: Column) -> Column:
    """What all of them say; a place in which they differ can be anything."""
    first = _words(templates[0])
    places = F.transform(
        first,
        lambda word, at: F.when(
            F.forall(templates, lambda other: F.get(_words(other), at) == word), word
        ).otherwise(ANY),
    )
    return F.array_join(places, " ")
