"""Where messages that came or changed stand in the trees of `silver_spans`, and who moves because of them.

Rule: the table is looked through once. What is met there is little, and tells everything else.
"""

from contextlib import ExitStack
from functools import cached_property
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline import finding
from postroom.pipeline.finding import Wanted
from postroom.pipeline.tables import DataFile, Tables
from postroom.pipeline.transforms import spans
from postroom.pipeline.transforms.joining import sent

BROADCAST_NODES_MAX: Final = 500_000  # messages whose places are
SPANS: Final = "silver_spans"


class Placing:
    """Messages that changed, the files that they came in, and what is held while they get their places."""

    def __init__(self, spark: SparkSession, tables: Tables, added: list[DataFile], held: ExitStack) -> None:
        self._spark = spark
        self._tables = tables
        self._added = added
        self._held = held
        self._changed = spans.spans(tables.read(spark, "silver_messages", added))

    def anew(self) -> DataFrame:
        """The rows of these messages, where there are no others."""
        return _placed(self._changed, _no_anchors(self._changed), few=_are_few(self._ids.n))

    def among_others(self) -> tuple[list[DataFile], DataFrame]:
        """The files that have to be written anew, and their rows: changed, moved, or as they were."""
        [told] = self._met.agg(
            F.collect_set(F.when(F.col("mine"), F.col("file"))).alias("files"),
            F.count(F.when(F.col("mine"), 1)).alias("mine"),
            F.count(F.when(F.col("moved"), 1)).alias("moved"),
        ).collect()
        if told["moved"] and self._are_any_lost():
            return self._tables.files(SPANS), self._all()
        below = self._kept(self._below(told))
        moving = {row["file"]: row["count"] for row in below.groupBy("file").count().collect()}
        n_moving = sum(moving.values())
        few = _are_few(self._ids.n + n_moving)
        nodes, anchors = self._changed, self._anchors()
        if moving:
            ids = sent(below.select("message_id"), few=few)
            rows = self._read(self._files({*moving})).join(ids, "message_id", "left_semi")
            nodes = nodes.unionByName(rows.select(nodes.columns))
            anchors = anchors.join(ids, "message_id", "left_anti")
        touched = self._files({*told["files"], *moving})
        gone = self._met.where("mine").select("message_id").unionByName(below.select("message_id"))
        gone = sent(gone, few=_are_few(told["mine"] + n_moving))
        stay = self._read(touched).join(gone, "message_id", "left_anti")
        return touched, _placed(nodes, anchors, few=few).unionByName(stay)

    def _are_any_lost(self) -> bool:
        """Whether rows have no root: nothing tells which of them has a place when another one moves."""
        return any(file.nulls.get("root_message_id") != 0 for file in self._tables.files(SPANS))

    def _all(self) -> DataFrame:
        nodes = spans.spans(self._tables.read(self._spark, "silver_messages"))
        n = sum(file.rows for file in self._tables.files("silver_messages"))
        return _placed(nodes, _no_anchors(nodes), few=_are_few(n))

    # ---- what is met -----------------------------------------------------------------------------------

    @cached_property
    def _ids(self) -> Wanted:
        return finding.wanted_of(self._changed.select("message_id"), self._added)

    @cached_property
    def _met(self) -> DataFrame:
        ids = self._ids
        near = [
            file
            for file in self._tables.files(SPANS)
            if ids.may_be_in(file)
            or self._may_have_parents(file)
            or finding.overlaps(file, "root_message_id", ids.low, ids.high)
        ]
        return self._kept(spans.met(self._with_file(near), self._changed, few=_are_few(ids.n)))

    def _may_have_parents(self, file: DataFile) -> bool:
        return self._parents is not None and finding.overlaps(file, "message_id", *self._parents)

    @cached_property
    def _parents(self) -> tuple[Any, Any] | None:
        """Between which ids the parents are, as far as the log tells; None when nobody has one."""
        naming = [added for added in self._added if added.nulls.get("parent_message_id") != added.rows]
        return (finding.extent(naming, "parent_message_id") or (None, None)) if naming else None

    def _below(self, told: Any) -> DataFrame:
        """The others whose place may be new: below a message that is new, or stands elsewhere now."""
        mine = self._met.where("mine")
        still = mine.where("NOT moved").select(F.col("message_id").alias("root_message_id"))
        few = _are_few(told["mine"])
        below = self._met.where("below AND NOT mine").join(
            sent(still, few=few), "root_message_id", "left_anti"
        )
        below = below.select("file", "message_id")
        if not told["moved"]:
            return below
        ids = F.explode(F.array("message_id", "root_message_id")).alias("root_message_id")
        roots = finding.wanted(
            mine.where("moved").select(ids).where("root_message_id IS NOT NULL"), self._held
        )
        rows = self._with_file(finding.near(self._tables, SPANS, roots))
        found = roots.among(rows).select("file", "message_id")
        others = found.join(sent(mine.select("message_id"), few=few), "message_id", "left_anti")
        return below.unionByName(others).distinct()

    def _anchors(self) -> DataFrame:
        """Where the parents are that did not change. One is met twice if numbers are the same by chance."""
        above = self._met.where("above").select("message_id", "root_message_id", "stack")
        return above.dropDuplicates(["message_id"])

    # ---- files -----------------------------------------------------------------------------------------

    def _files(self, urls: set[str]) -> list[DataFile]:
        return finding.called(SPANS, self._tables.files(SPANS), urls)

    def _read(self, files: list[DataFile]) -> DataFrame:
        return self._tables.read(self._spark, SPANS, files)

    def _with_file(self, files: list[DataFile]) -> DataFrame:
        return finding.with_file(self._spark, self._tables, SPANS, files)

    def _kept(self, rows: DataFrame) -> DataFrame:
        rows = rows.persist()
        self._held.callback(rows.unpersist)
        return rows


def _are_few(n: int) -> bool:
    """Whether so many messages are sent to everybody."""
    return n <= BROADCAST_NODES_MAX


def _placed(nodes: DataFrame, anchors: DataFrame, *, few: bool) -> DataFrame:
    return spans.placed(nodes, sent(spans.places(nodes, anchors, few=few), few=few))


def _no_anchors(nodes: DataFrame) -> DataFrame:
    place = {name: F.lit(None).cast("string") for name in spans.PLACE}
    return nodes.limit(0).select("message_id").withColumns(place)
