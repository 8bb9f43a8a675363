"""`silver_events`: each event once, redacted.

Rule 1: of events with one id, one is kept, whatever the order in which they arrive: the earlier one; of two
        of the same time, the one whose content has the lower hash.
Rule 2: only events of the hours of new ones are compared with them, so an event of last week reads an hour of
        last week, and not the week.
Rule 3: only the redaction runs Python code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Final

from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.delta import file_index
from postroom.pipeline.delta.delta_log import UNNAMED, rows_of
from postroom.pipeline.delta.file_groups import hours_of
from postroom.pipeline.delta.joins import with_join_hint
from postroom.pipeline.follow import deleted_numbers
from postroom.pipeline.follow.columns import day_of, hour_us, lacks_names
from postroom.pipeline.follow.recompute import HOURS_MAX, files_of_hours, hours_in
from postroom.pipeline.follow.refresh import Refresh, Replacement, Way
from postroom.pipeline.ingest import bronze, redaction
from postroom.pipeline.schema import EVENTS
from postroom.pipeline.times import HOUR_US

HOURS_UNCOUNTED: Final = 2  # hours of a batch by the log, from which on its rows are asked for theirs

_NAMES: Final = ("message_id", "parent_message_id", "org_id", "type", "queue", "goal_id", "worker_id")
"""Fields by which rows are looked up, counted or grouped."""


def repeats(events: DataFrame, known: DataFrame) -> DataFrame:
    """Grain: an event_id of more than one row. `kept` is the row to keep, NULL when that is a known one.

    Of two events with one id the earlier one is kept; of two of the same time, the one of lower `rank`. Both
    inputs are `ranked`; `known` are events of earlier runs. `is_beaten` says that a known one is replaced.
    """
    new = events.select("event_id", F.struct("ts_us", "rank", "row").alias("place"))
    no_row = F.lit(None).cast("long").alias("row")  # sorts before equal events that are new
    old = known.select("event_id", F.struct("ts_us", "rank", no_row).alias("place"))
    grouped = (
        new.unionByName(old)
        .groupBy("event_id")
        .agg(
            F.min("place").alias("kept"),
            F.count(F.lit(1)).alias("rows"),
            F.count_if(F.col("place.row").isNull()).alias("known"),
        )
    )
    is_beaten = (F.col("known") > 0) & F.col("kept.row").isNotNull()
    return grouped.where("rows > 1").select(
        "event_id", F.col("kept.row").alias("kept"), is_beaten.alias("is_beaten")
    )


def ranked(
    rows: DataFrame, suspected: DataFrame, redaction: Mapping[str, Column], *, few: bool = True
) -> DataFrame:
    """Rows that may be repeats, with a `rank` that depends on their redacted content."""
    some = rows.join(with_join_hint(suspected, few=few), _hash() == F.col("suspect"), "left_semi")
    return some.withColumn("rank", rank(redaction))


def rank(redaction: Mapping[str, Column]) -> Column:
    """A hash of the content of an event. It decides between two events of one id and one time."""
    return F.xxhash64(*[redaction.get(name, _text_or_null(name)) for name in EVENTS.names])


def suspects(events: DataFrame, known: DataFrame) -> DataFrame:
    """Grain: the hash of an event_id of more than one row.

    Nearly every id is unique. Only its hash is shuffled to find out.
    """
    ids = events.select("event_id").unionByName(known.select("event_id"))
    return ids.groupBy(_hash().alias("suspect")).count().where("count > 1").select("suspect")


def _hash() -> Column:
    return F.xxhash64("event_id")


def once(events: DataFrame, repeated: DataFrame, *, few: bool = True) -> DataFrame:
    """The rows of `events` without repeats.

    The wide rows are not shuffled, unless there are so many repeats that they are not `few`.
    """
    repeats = with_join_hint(repeated.select(F.col("event_id").alias("repeated_id"), "kept"), few=few)
    is_repeat = (F.col("event_id") == F.col("repeated_id")) & ~F.col("row").eqNullSafe(F.col("kept"))
    return events.join(repeats, is_repeat, "left_anti")


def events(rows: DataFrame, redaction: Mapping[str, Column], done: Column | None = None) -> DataFrame:
    """Grain: event_id. The columns of an event, redacted where `redaction` has one, and the `day` of `ts_us`.

    Spark copies every row for a Python function. Few rows have a text to redact that the shipper has not
    redacted (`done`), so all others are read separately, without the function.
    """
    if not redaction:
        return _events(rows, redaction)
    is_kept = reduce(and_, [F.col(name).isNull() for name in redaction])
    if done is not None:
        is_kept = is_kept | done
    return _events(rows.where(is_kept), {}).unionByName(_events(rows.where(~is_kept), redaction))


def _events(rows: DataFrame, redaction: Mapping[str, Column]) -> DataFrame:
    kept = [redaction.get(name, _text_or_null(name)).alias(name) for name in EVENTS.names]
    return rows.select(*kept, day_of(F.col("ts_us")).alias("day"))


def _text_or_null(name: str) -> Column:
    """A field. An empty id or name is NULL, as in a line that omits it."""
    return F.nullif(F.col(name), F.lit("")) if name in _NAMES else F.col(name)


# ---- appending -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Append(Way):
    """Append the new rows, without those that repeat an earlier row."""

    def follow(self, refresh: Refresh) -> Replacement | None:
        if not refresh.change.added:
            return None
        rows = _new_rows(refresh)
        fresh = _fresh(refresh, rows, _known_events(refresh, rows))
        if fresh is not None:
            return Replacement(fresh, [])
        refresh.progress(f"{refresh.name}: two events have one number, and the later one counts")
        refresh.withdraws = True
        return refresh.rebuild()

    def rebuild(self, refresh: Refresh) -> Replacement:
        rows = _new_rows(refresh)
        fresh = _fresh(refresh, rows, rows.limit(0))
        assert fresh is not None  # noqa: S101 - no event was known
        return Replacement(fresh, refresh.tables.files(refresh.name))


def _new_rows(refresh: Refresh) -> DataFrame:
    """The added rows of bronze, numbered, without events that `retain` deleted before.

    Old segments may be delivered again.
    """
    tables, added = refresh.tables, refresh.change.added
    convert = redaction.redacted_rows(refresh.level)
    read = tables.read_with_row(refresh.spark, refresh.change.source, added, convert)
    rows = bronze.with_mark(bronze.with_all_columns(read))
    newest_us = deleted_numbers.newest_us(tables)
    oldest_us = (file_index.extent(added, "ts_us") or (-1, -1))[0]
    if newest_us < oldest_us:
        return rows
    old = rows.where(F.col("ts_us") <= newest_us)
    left = deleted_numbers.deleted_among(old, tables.read(refresh.spark, deleted_numbers.TABLE))
    if tables.exists(refresh.name):  # a killed `retain` has recorded events that are still there
        there = tables.read(refresh.spark, refresh.name).where(F.col("ts_us") <= newest_us)
        left = left.join(there.select("source", "seq"), ["source", "seq"], "left_anti")
    few = rows_of(added) <= file_index.BROADCAST_IDS_MAX
    return rows.join(with_join_hint(left, few=few), ["source", "seq"], "left_anti")


def _known_events(refresh: Refresh, rows: DataFrame) -> DataFrame:
    """The events of the table that new ones may repeat: those of the same hours."""
    tables, added = refresh.tables, refresh.change.added
    period = file_index.extent(added, "ts_us")
    hours = None if period is None else hours_of(added, "ts_us")
    if not tables.is_small and (hours is None or len(hours) > HOURS_UNCOUNTED):
        found = hours_in(rows.select(hour_us(F.col("ts_us")).alias("hour_us")).distinct())
        hours = set(found) if len(found) <= HOURS_MAX else None
    low, high = (min(hours), max(hours) + HOUR_US - 1) if hours else (period or (None, None))
    near = tables.listing(refresh.name).overlapping("ts_us", low, high)
    if hours:
        near = files_of_hours(near, "ts_us", sorted(hours))
    if not near:
        return rows.limit(0)
    known = refresh.read(refresh.name, near)
    return known.where(hour_us(F.col("ts_us")).isin(sorted(hours))) if hours else known


def _fresh(refresh: Refresh, rows: DataFrame, known: DataFrame) -> DataFrame | None:
    """The rows to append, without repeats; None when one of them counts instead of a known event."""
    done = redaction.is_done(refresh.level)
    masks = {} if refresh.tables.is_small else redaction.redacted(refresh.level, done)
    found = refresh.kept(suspects(rows, known))
    n = found.count()
    if n:
        few = n <= file_index.BROADCAST_IDS_MAX
        new, old = ranked(rows, found, masks, few=few), ranked(known, found, {}, few=few)
        repeated = refresh.kept(repeats(new, old))
        if not repeated.where("is_beaten").isEmpty():
            return None
        rows = once(rows, repeated, few=few)
    refresh.seen = Observation()
    unnamed = F.count_if(lacks_names()).alias(UNNAMED)
    return refresh.table.build(rows, masks, done).observe(refresh.seen, unnamed)
