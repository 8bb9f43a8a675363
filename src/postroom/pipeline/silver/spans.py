"""Who called whom: every message at its place in the tree of its parents and children.

Rule 1: a place depends on a message's ancestors alone. So a change touches the message itself, and those
        below one whose parent or type is new; everything else keeps its row.
Rule 2: the root is the topmost id that is named, also when that message itself is not known so far. It is how
        the children of one that comes late are found.
Rule 3: deeper than `DEPTH_MAX`, or in a circle, a message has no place: its root, depth and stack are NULL.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.silver.joins import with_join_hint

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    Sending = Callable[[DataFrame], DataFrame]
    """How the smaller side of a join comes to the larger one."""

DEPTH_MAX: Final = 128
STEPS: Final = 3  # pointers that a message goes up in a round
STEPS_FEW: Final = 7  # where to look a pointer up is cheap
UNKNOWN: Final = "?"
PLACE: Final = ("root_message_id", "depth", "stack")
ANCHOR: Final = ("message_id", "root_message_id", "stack")
"""What of a row the places below it depend on."""
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


def places(nodes: "DataFrame", anchors: "DataFrame", *, few: bool = False) -> "DataFrame":
    """Grain: message_id that a node has as its parent: its root and its stack. A root is NULL if it is lost.

    Anchors are parents that are no nodes: their place is known and stays. A message without children has its
    place from its parent, so only those that have some are climbed.

    Every node points at its parent. In a round each goes up some pointers, and the next round is about the
    longer pointers that come of it: a tree of depth 30 takes two rounds, where level by level it would take
    thirty. The plan is cut off after each, or it would grow as the distance does. What is `few` is sent to
    every executor, once a round, and to go up is to look it up; otherwise it is a shuffle, so fewer do.
    """
    sending = partial(with_join_hint, few=few)
    steps = STEPS_FEW if few else STEPS
    known = anchors.select(*ANCHOR)
    here = _pointers(nodes, known, sending).localCheckpoint()
    reached = 1
    while reached < DEPTH_MAX:
        here = _climbed(here, steps, sending).localCheckpoint()
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


def _pointers(nodes: "DataFrame", known: "DataFrame", sending: "Sending") -> "DataFrame":
    """Those with children. `up` is the parent, NULL where the place is known; `stack` lies between."""
    named = nodes.where("parent_message_id IS NOT NULL").select(
        F.col("parent_message_id").alias("message_id")
    )
    inner = nodes.join(sending(named), "message_id", "left_semi").select(
        "message_id", "parent_message_id", _frame().alias("frame")
    )
    joined = inner.join(sending(_above(known)), "parent_message_id", "left")
    is_open = F.col("parent_message_id").isNotNull() & F.col("is_known").isNull()
    return joined.select(
        "message_id",
        F.when(is_open, F.col("parent_message_id")).alias("up"),
        F.when(~is_open, _root()).alias("root_message_id"),
        F.when(is_open, F.col("frame")).otherwise(_stack()).alias("stack"),
    )


def _climbed(here: "DataFrame", steps: int, sending: "Sending") -> "DataFrame":
    """The same, each by so many pointers further up. A parent that is not `here` is no node, but the top."""
    above = sending(
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


def _above(places: "DataFrame") -> "DataFrame":
    """Places by the name under which a child looks for them."""
    return places.select(
        F.col("message_id").alias("parent_message_id"),
        F.col("root_message_id").alias("above_root"),
        F.col("stack").alias("above_stack"),
        F.lit(1).alias("is_known"),
    )


def _root() -> "Column":
    """Of a `frame` below what is known of its parent; NULL when the parent is lost."""
    known = F.col("is_known").isNotNull()
    return F.when(known, F.col("above_root")).otherwise(F.coalesce("parent_message_id", "message_id"))


def _stack() -> "Column":
    frame = F.col("frame")
    return (
        F.when(F.col("is_known").isNotNull(), F.concat(F.col("above_stack"), F.lit(";"), frame))
        .when(F.col("parent_message_id").isNotNull(), F.concat(F.lit(f"{UNKNOWN};"), frame))
        .otherwise(frame)
    )


def _frame() -> "Column":
    """A type as one frame of a stack."""
    return F.translate(F.coalesce("type", F.lit(UNKNOWN)), ";", ",")


def spans(messages: "DataFrame") -> "DataFrame":
    """Grain: message_id. What a span tells of its message; its place comes from `placed`."""
    told = messages.withColumnsRenamed(
        {"created_us": "start_us", "finished_us": "end_us", "total_us": "duration_us"}
    )
    return told.select(*_OWN, *_TIMES)


def placed(rows: "DataFrame", found: "DataFrame") -> "DataFrame":
    """The rows, each at its place below its parent's, in the order of the table's columns."""
    joined = rows.drop(*PLACE).withColumn("frame", _frame()).join(_above(found), "parent_message_id", "left")
    depth = (F.size(F.split("stack", ";")) - 1).cast("int")
    whole = joined.withColumns({"root_message_id": _root(), "stack": _stack()}).withColumn("depth", depth)
    is_lost = F.col("root_message_id").isNull() | (F.col("depth") >= DEPTH_MAX)
    place = {name: F.when(~is_lost, F.col(name)) for name in PLACE}
    return whole.select(
        "message_id", "parent_message_id", *(place[name].alias(name) for name in PLACE), *_OWN[2:], *_TIMES
    )


def compared(nodes: "DataFrame", before: "DataFrame", *, few: bool) -> "DataFrame":
    """Grain: message_id of a node. Whether it was known before, and has another parent or type since then."""
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


def met(rows: "DataFrame", nodes: "DataFrame", known: "DataFrame", *, few: bool) -> "DataFrame":
    """The rows of the table that are about nodes, `mine`, or about parents of these.

    They are looked up by a number, because that takes a fraction of the time, so by chance, hardly ever, a
    row is among them that need not be.
    """
    named = nodes.where("parent_message_id IS NOT NULL").select(_number("parent_message_id").alias("number"))
    numbers = known.select(_number("message_id").alias("number")).unionByName(named)
    mine = with_join_hint(known.withColumn("mine", F.lit(1)), few=few)
    found = rows.join(with_join_hint(numbers, few=few), _number("message_id") == F.col("number"), "left_semi")
    return found.join(mine, "message_id", "left").select(
        "file", *ANCHOR, F.col("mine").isNotNull().alias("mine"), "is_moved"
    )


def _number(name: str) -> "Column":
    return F.xxhash64(name)


def _link() -> "Column":
    """What of a message the places below it depend on, as one number."""
    return F.xxhash64("parent_message_id", "type", F.col("parent_message_id").isNull())
