"""Updates the trees of `silver_spans` for new and changed messages.

Rule 1: the previous state of a message is read from the files that its row was removed from. Few messages
        were known, and fewer have moved. The table is only read where these are, and where parents of new
        ones are.
Rule 2: if those files no longer exist, all places are computed again.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.delta import file_index
from postroom.pipeline.delta.delta_log import DataFile, path_below, rows_of
from postroom.pipeline.delta.file_index import IdLookup
from postroom.pipeline.delta.joins import with_join_hint
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.follow.refresh import MESSAGES, Refresh, Replacement, Way
from postroom.pipeline.silver import spans

BROADCAST_NODES_MAX: Final = 500_000  # messages whose places are broadcast
SPANS: Final = "silver_spans"


@dataclass(frozen=True)
class Tree(Way):
    """Place the new rows in trees. This runs queries over the rows that the table already has."""

    def follow(self, refresh: Refresh) -> Replacement | None:
        if not refresh.change.added:
            return None
        if not refresh.tables.row_count(SPANS):
            return refresh.rebuild()
        refresh.expect(refresh.change.added)
        touched, rows = self._placement(refresh).updated_rows()
        return Replacement(rows, touched)

    def rebuild(self, refresh: Refresh) -> Replacement:
        refresh.expect(refresh.change.added)
        return Replacement(self._placement(refresh).rebuilt_rows(), refresh.tables.files(SPANS))

    def _placement(self, refresh: Refresh) -> "SpanPlacement":
        return SpanPlacement(
            refresh.spark, refresh.tables, refresh.change.added, refresh.change.removed, refresh.held
        )


class SpanPlacement:
    """Computes the places of new and changed messages, which are in the files `added`."""

    def __init__(
        self,
        spark: SparkSession,
        tables: Tables,
        added: list[DataFile],
        removed: list[DataFile],
        held: ExitStack,
    ) -> None:
        self._spark = spark
        self._tables = tables
        self._added = added
        self._removed = removed
        self._held = held
        self._n_nodes = rows_of(added)
        self._nodes = spans.spans(tables.read(spark, MESSAGES, added))

    def rebuilt_rows(self) -> DataFrame:
        """The rows of these messages, when the table has no others."""
        return _placed(self._nodes, _no_anchors(self._nodes), few=_are_few(self._n_nodes))

    def updated_rows(self) -> tuple[list[DataFile], DataFrame]:
        """The files to rewrite, and their rows: changed, moved and unchanged ones."""
        is_there = all(self._tables.file_exists(MESSAGES, file) for file in self._removed)
        # A row without a place may get one when another message moves.
        may_be_unplaced = self._tables.listing(SPANS).may_have_nulls("root_message_id")
        if not is_there or (self._counts["moved"] and may_be_unplaced):
            return self._tables.files(SPANS), self._all()
        mine = {row["file"] for row in self._related.where("mine").select("file").distinct().collect()}
        below, moving = self._below()
        n_moving = sum(moving.values())
        few = _are_few(self._n_nodes + n_moving)
        nodes, anchors = self._nodes, self._related.where("NOT mine").select(*spans.ANCHOR)
        gone = self._known.select("message_id")
        if n_moving:
            ids = with_join_hint(below, few=few)
            rows = self._read(self._files({*moving})).join(ids, "message_id", "left_semi")
            nodes = nodes.unionByName(rows.select(nodes.columns))
            anchors = anchors.join(ids, "message_id", "left_anti")
            gone = gone.unionByName(below)
        touched = self._files({*mine, *moving})
        gone = with_join_hint(gone, few=_are_few(self._counts["known"] + n_moving))
        stay = self._read(touched).join(gone, "message_id", "left_anti")
        return touched, _placed(nodes, anchors, few=few).unionByName(stay)

    def _all(self) -> DataFrame:
        nodes = spans.spans(self._tables.read(self._spark, MESSAGES))
        n = self._tables.row_count(MESSAGES)
        return _placed(nodes, _no_anchors(nodes), few=_are_few(n))

    # ---- the previous state of the messages ----------------------------------------------------------------

    @cached_property
    def _found(self) -> DataFrame:
        """The messages that were known, and the late ones: those that may be the root of an existing row."""
        before = spans.spans(self._tables.read(self._spark, MESSAGES, self._removed))
        compared = spans.compared(self._nodes, before, few=_are_few(rows_of(self._removed)))
        roots = self._tables.listing(SPANS).extent("root_message_id")
        is_late = F.lit(True) if roots is None else F.col("message_id") <= roots[1]  # noqa: FBT003 - SQL's
        return self._kept(compared.where(F.col("is_known") | is_late))

    @cached_property
    def _counts(self) -> Any:
        """How many messages were known, have moved and are late, and the range of the late ids."""
        late = F.when(~F.col("is_known"), F.col("message_id"))
        [counts] = self._found.agg(
            F.count_if("is_known").alias("known"),
            F.count_if("is_moved").alias("moved"),
            F.count(late).alias("late"),
            F.min(late).alias("low"),
            F.max(late).alias("high"),
        ).collect()
        return counts

    @property
    def _known(self) -> DataFrame:
        return self._found.where("is_known").select("message_id", "is_moved")

    # ---- the related rows of the table -----------------------------------------------------------------

    @cached_property
    def _related(self) -> DataFrame:
        """The rows of known messages (`mine`), and those of parents that did not change."""
        rows = self._with_file(self._near_files())
        return self._kept(spans.related_rows(rows, self._nodes, self._known, few=_are_few(self._n_nodes)))

    def _near_files(self) -> list[DataFile]:
        """The files that can hold a row of a known message or of a parent."""
        ranges = {(file.low.get("message_id"), file.high.get("message_id")) for file in self._removed}
        if self._parents is not None:
            ranges.add(self._parents)
        files = self._tables.listing(SPANS)
        near = {file.path: file for ids in ranges for file in files.overlapping("message_id", *ids)}
        return list(near.values())

    @cached_property
    def _parents(self) -> tuple[Any, Any] | None:
        """The range of parent ids according to the log; None when no message has a parent."""
        naming = [added for added in self._added if added.nulls.get("parent_message_id") != added.rows]
        return (file_index.extent(naming, "parent_message_id") or (None, None)) if naming else None

    def _below(self) -> tuple[DataFrame, dict[str, int]]:
        """The ids of other messages that may move, below late or moved ones; and their number by file."""
        counts = self._counts
        ids = self._found.where("NOT is_known").select(F.col("message_id").alias("root_message_id"))
        roots = IdLookup(ids, counts["late"], counts["low"], counts["high"])
        if counts["moved"]:
            own = F.explode(F.array("message_id", "root_message_id")).alias("root_message_id")
            moved = self._related.where("is_moved").select(own).where("root_message_id IS NOT NULL")
            roots = file_index.lookup(ids.unionByName(moved), self._held)
        if not roots.n:
            return ids, {}
        rows = self._with_file(file_index.candidate_files(self._tables, SPANS, roots))
        found = rows.join(with_join_hint(roots.rows, few=_are_few(roots.n)), "root_message_id", "left_semi")
        others = found.join(
            with_join_hint(self._known, few=_are_few(counts["known"])), "message_id", "left_anti"
        )
        below = self._kept(others.select("file", "message_id"))
        moving = {row["file"]: row["count"] for row in below.groupBy("file").count().collect()}
        return below.select("message_id"), moving

    # ---- files -----------------------------------------------------------------------------------------

    def _files(self, urls: set[str]) -> list[DataFile]:
        return self._tables.listing(SPANS).named(path_below(SPANS, url) for url in urls)

    def _read(self, files: list[DataFile]) -> DataFrame:
        return self._own(self._tables.read(self._spark, SPANS, files))

    def _with_file(self, files: list[DataFile]) -> DataFrame:
        return self._own(self._tables.read_with_file(self._spark, SPANS, files), "file")

    def _own(self, rows: DataFrame, *more: str) -> DataFrame:
        """Rows of the table itself, without columns that another program has added."""
        own = {*self._nodes.columns, *spans.PLACE, *more}
        return rows.select(*[name for name in rows.columns if name in own])

    def _kept(self, rows: DataFrame) -> DataFrame:
        rows = rows.persist()
        self._held.callback(rows.unpersist)
        return rows


def _are_few(n: int) -> bool:
    """Whether `n` messages are broadcast."""
    return n <= BROADCAST_NODES_MAX


def _placed(nodes: DataFrame, anchors: DataFrame, *, few: bool) -> DataFrame:
    return spans.placed(nodes, with_join_hint(spans.places(nodes, anchors, few=few), few=few))


def _no_anchors(nodes: DataFrame) -> DataFrame:
    place = {name: F.lit(None).cast("string") for name in spans.PLACE}
    return nodes.limit(0).select("message_id").withColumns(place)
