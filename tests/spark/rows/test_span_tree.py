"""Messages that come one after the other get the places that they get all at once.

So do many, shuffled, in `test_silver`, where they are too many to be sent to everybody.
"""

from contextlib import ExitStack
from pathlib import Path

from pyspark.sql import SparkSession

from postroom.pipeline.delta.delta_log import DataFile
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.silver.span_tree import SPANS, SpanPlacement
from tests.spark.plainrows import records

Messages = dict[str, str | None]
"""The parent of each."""
COLUMNS = (
    "message_id string, parent_message_id string, org_id string, goal_id string, trace_id string,"
    " span_id string, agent_id string, type string, outcome string, created_us long, finished_us long,"
    " total_us long, queue_us long, attempts int, day string"
)
BATCHES: dict[str, list[Messages]] = {
    "below known ones": [{"a": None, "b": "a"}, {"c": "b", "d": "c"}],
    "parents that come late": [{"d": "c"}, {"c": "b", "x": None}, {"b": "a"}, {"a": None}],
    "another parent": [{"a": None, "b": "a", "c": "b", "d": "c", "e": None}, {"b": "e"}],
    "no longer a circle": [{"a": "b", "b": "a"}, {"b": None}],
    "as it was": [{"a": None, "b": "a", "c": "b"}, {"b": "a"}],
}
"""Trees that have nothing to do with each other, and what comes of each first, and then."""


class Growing:
    """`silver_messages` and `silver_spans`, one file for every batch, that follow each other."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark = spark
        self.tables = Tables(folder)
        self.told: dict[str, Messages] = {}
        """Of each file of `silver_messages`."""

    def take(self, messages: Messages, *, is_there: bool = True) -> list[DataFile]:
        """The files of `silver_spans` that were written anew."""
        with self.tables.small():
            return self._taken(messages, is_there=is_there)

    def _taken(self, messages: Messages, *, is_there: bool) -> list[DataFile]:
        before = self.tables.files("silver_messages")
        removed = [file for file in before if self.told[file.path].keys() & messages.keys()]
        for file in reversed(removed):
            messages = {**self.told[file.path], **messages}
        nothing = (None,) * 5
        rows = [
            (name, parent, *nothing, "t", "open", *nothing, "2025-01-01") for name, parent in messages.items()
        ]
        frame = self.spark.createDataFrame(rows, COLUMNS).coalesce(1)
        version = self.tables.version("silver_messages")
        self.tables.swap("silver_messages", frame, removed, partition_by=("day",))
        added, _ = self.tables.changed("silver_messages", version)
        self.told.update({file.path: messages for file in added})
        for file in removed if not is_there else ():  # they were removed after a week
            (self.tables.folder / "silver_messages" / file.path).unlink()
        with ExitStack() as held:
            placed = SpanPlacement(self.spark, self.tables, added, removed, held)
            touched, found = (
                placed.updated_rows() if self.tables.exists(SPANS) else ([], placed.rebuilt_rows())
            )
            self.tables.swap(SPANS, found.coalesce(1), touched, partition_by=("day",))
        return touched

    def places(self) -> list[tuple[object, ...]]:
        names = ("message_id", "parent_message_id", "root_message_id", "depth", "stack")
        return sorted(tuple(row[name] for name in names) for row in records(self.tables, SPANS))


def test_places_do_not_depend_on_the_order_of_messages(spark: SparkSession, tmp_path: Path) -> None:
    growing, whole = Growing(spark, tmp_path / "growing"), Growing(spark, tmp_path / "whole")
    rounds = [together(at) for at in range(max(map(len, BATCHES.values())))]
    for batch in rounds:
        growing.take(batch)
    whole.take({message: parent for batch in rounds for message, parent in batch.items()})
    assert growing.places() == whole.places()


def together(at: int) -> Messages:
    """One batch of all trees."""
    found: Messages = {}
    for tree, batches in BATCHES.items():
        for name, parent in batches[at].items() if at < len(batches) else ():
            found[f"{tree}: {name}"] = None if parent is None else f"{tree}: {parent}"
    return found


def test_who_is_far_from_all_others_leaves_them_alone(spark: SparkSession, tmp_path: Path) -> None:
    growing = Growing(spark, tmp_path)
    growing.take({"a": None, "b": "a"})
    assert growing.take({"z": None}) == []
    assert growing.take({"zz": "b"}) == []
    assert [place[:3] for place in growing.places()] == [
        ("a", None, "a"),
        ("b", "a", "a"),
        ("z", None, "z"),
        ("zz", "b", "a"),
    ]


def test_without_the_previous_rows_all_places_are_computed_again(spark: SparkSession, tmp_path: Path) -> None:
    growing = Growing(spark, tmp_path)
    growing.take({"a": None, "b": "a"})
    growing.take({"x": None, "y": "b"})
    assert len(growing.take({"b": "x"}, is_there=False)) == 2
    assert [place[:3] for place in growing.places()] == [
        ("a", None, "a"),
        ("b", "x", "x"),
        ("x", None, "x"),
        ("y", "b", "x"),
    ]
