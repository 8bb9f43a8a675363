"""Spans: every message with its place (root, depth, stack) in the tree of parents and children.

Rule 1: a place depends only on a message's ancestors. A change affects the message itself, and the
        descendants of a message whose parent or type has changed. All other rows stay the same.
Rule 2: the root is the topmost id that a message names as a parent, even if that message is not known yet.
        The descendants of a late message are found by it.
Rule 3: deeper than `DEPTH_MAX`, or in a cycle, a message has no place: its root, depth and stack are NULL.
"""

from collections.abc import Callable
from functools import partial
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.delta.joins import with_join_hint

JoinHint = Callable[[DataFrame], DataFrame]
"""Sets the join strategy for the smaller side of a join."""

DEPTH_MAX: Final = 128
STEPS: Final = 3  # pointers that a message follows in a round
STEPS_FEW: Final = 7  # the same where a lookup is cheap
UNKNOWN: Final = "?"
PLACE: Final = ("root_message_id", "depth", "stack")
ANCHOR: Final = ("message_id", "root_message_id", "stack")
"""The columns of a row that the places of its children depend on."""
_OWN: Final = [
    "message_id",
    "parent_message_id",
    "org_id",
    "goal_id",
    "trace_id",
    "span_id",
    "agent_id",
    "type",
    "outcome",
]
_TIMES: Final = ["start_us", "end_us", "duration_us", "queue_us", "attempts", "day"]


def places(nodes: DataFrame, anchors: DataFrame, *, few: bool = False) -> DataFrame:
    """Grain: message_id of a parent of a node: its root and its stack. The root is NULL without a place.

    Anchors are parents that are not nodes; their place is known and stays. A message without children takes
    its place from its parent, so only nodes with children are computed here.

    Every node points at its parent. In each round a node follows several pointers, and the next round starts
    with the longer pointers that result. A tree of depth 30 takes two rounds instead of thirty. The plan is
    checkpointed after each round, because it would grow otherwise. If the nodes are `few` they are broadcast
    once a round, and following a pointer is a lookup. Otherwise it is a shuffle, so a round has fewer steps.
    """
    hinted = partial(with_join_hint, few=few)
    steps = STEPS_FEW if few else STEPS
    known = anchors.select(*ANCHOR)
    here = _pointers(nodes, known, hinted).localCheckpoint()
    reached = 1
    while reached < DEPTH_MAX:
        here = _climbed(here, steps, hinted).localCheckpoint()
        if here.where("up IS NOT NULL").isEmpty():
            break
        reached *= steps + 1
    found = F.col("up").isNull()
    climbed = here.select(
        "message_id",
        F.when(found, F.col("root_message_id")).alias("root_message_id"),
        F.when(found, F.col("stack")).alias("stack"),
    )
    return climbed.unionByName(known)


def _pointers(nodes: DataFrame, known: DataFrame, hinted: "JoinHint") -> DataFrame:
    """The nodes with children. `up` is the parent, NULL where the place is known; `stack` leads up to it."""
    named = nodes.where("parent_message_id IS NOT NULL").select(
        F.col("parent_message_id").alias("message_id")
    )
    inner = nodes.join(hinted(named), "message_id", "left_semi").select(
        "message_id", "parent_message_id", _frame().alias("frame")
    )
    joined = inner.join(hinted(_above(known)), "parent_message_id", "left")
    is_open = F.col("parent_message_id").isNotNull() & F.col("is_known").isNull()
    return joined.select(
        "message_id",
        F.when(is_open, F.col("parent_message_id")).alias("up"),
        F.when(~is_open, _root()).alias("root_message_id"),
        F.when(is_open, F.col("frame")).otherwise(_stack()).alias("stack"),
    )


def _climbed(here: DataFrame, steps: int, hinted: "JoinHint") -> DataFrame:
    """The nodes, each `steps` pointers further up. A parent that is not `here` is the top of its tree."""
    above = hinted(
        here.select(
            F.col("message_id").alias("up"),
            F.col("up").alias("next_up"),
            F.col("root_message_id").alias("next_root"),
            F.col("stack").alias("next_stack"),
            F.lit(1).alias("is_here"),
        )
    )
    has_arrived, is_top = F.col("up").isNull(), F.col("is_here").isNull()
    root = F.when(has_arrived, F.col("root_message_id")).when(is_top, F.col("up"))
    frame = F.when(is_top, F.lit(UNKNOWN)).otherwise(F.col("next_stack"))
    for _ in range(steps):
        here = here.join(above, "up", "left").select(
            "message_id",
            F.col("next_up").alias("up"),
            root.otherwise(F.col("next_root")).alias("root_message_id"),
            F.when(has_arrived, F.col("stack")).otherwise(F.concat_ws(";", frame, "stack")).alias("stack"),
        )
    return here


def _above(places: DataFrame) -> DataFrame:
    """Places with the column names that a child joins on."""
    return places.select(
        F.col("message_id").alias("parent_message_id"),
        F.col("root_message_id").alias("above_root"),
        F.col("stack").alias("above_stack"),
        F.lit(1).alias("is_known"),
    )


def _root() -> Column:
    """The root of a node by the place of its parent; NULL when the parent has no place."""
    known = F.col("is_known").isNotNull()
    return F.when(known, F.col("above_root")).otherwise(F.coalesce("parent_message_id", "message_id"))


def _stack() -> Column:
    frame = F.col("frame")
    return (
        F.when(F.col("is_known").isNotNull(), F.concat(F.col("above_stack"), F.lit(";"), frame))
        .when(F.col("parent_message_id").isNotNull(), F.concat(F.lit(f"{UNKNOWN};"), frame))
        .otherwise(frame)
    )


def _frame() -> Column:
    """The message type as a frame of a stack."""
    return F.translate(F.coalesce("type", F.lit(UNKNOWN)), ";", ",")


def spans(messages: DataFrame) -> DataFrame:
    """Grain: message_id. The span without its place, which `placed` adds."""
    renamed = messages.withColumnsRenamed(
        {"created_us": "start_us", "finished_us": "end_us", "total_us": "duration_us"}
    )
    return renamed.select(*_OWN, *_TIMES)


def placed(rows: DataFrame, found: DataFrame) -> DataFrame:
    """The rows with their places, which follow from those of their parents. Columns as in the table."""
    joined = rows.drop(*PLACE).withColumn("frame", _frame()).join(_above(found), "parent_message_id", "left")
    depth = (F.size(F.split("stack", ";")) - 1).cast("int")
    whole = joined.withColumns({"root_message_id": _root(), "stack": _stack()}).withColumn("depth", depth)
    is_lost = F.col("root_message_id").isNull() | (F.col("depth") >= DEPTH_MAX)
    place = {name: F.when(~is_lost, F.col(name)) for name in PLACE}
    return whole.select(
        "message_id", "parent_message_id", *(place[name].alias(name) for name in PLACE), *_OWN[2:], *_TIMES
    )


def compared(nodes: DataFrame, before: DataFrame, *, few: bool) -> DataFrame:
    """Grain: message_id of a node. Whether it was known before, and whether its parent or type changed."""
    was = before.select("message_id", _link().alias("was"))
    joined = nodes.select("message_id", _link().alias("link")).join(
        with_join_hint(was, few=few), "message_id", "left"
    )
    is_known = F.col("was").isNotNull()
    return joined.select(
        "message_id",
        is_known.alias("is_known"),
        (is_known & (F.col("link") != F.col("was"))).alias("is_moved"),
    )


def related_rows(rows: DataFrame, nodes: DataFrame, known: DataFrame, *, few: bool) -> DataFrame:
    """The rows of the table for known nodes (`mine`), and for parents of nodes.

    Ids are compared by a 64-bit hash, which is much faster. On a collision, which is very rare, the result
    has a row too many.
    """
    named = nodes.where("parent_message_id IS NOT NULL").select(
        _id_hash("parent_message_id").alias("id_hash")
    )
    numbers = known.select(_id_hash("message_id").alias("id_hash")).unionByName(named)
    mine = with_join_hint(known.withColumn("mine", F.lit(1)), few=few)
    found = rows.join(
        with_join_hint(numbers, few=few), _id_hash("message_id") == F.col("id_hash"), "left_semi"
    )
    return found.join(mine, "message_id", "left").select(
        "file", *ANCHOR, F.col("mine").isNotNull().alias("mine"), "is_moved"
    )


def _id_hash(name: str) -> Column:
    return F.xxhash64(name)


def _link() -> Column:
    """A hash of the columns that the places of the children depend on."""
    return F.xxhash64("parent_message_id", "type", F.col("parent_message_id").isNull())
