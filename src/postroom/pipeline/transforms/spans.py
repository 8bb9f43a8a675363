"""Who called whom: every message at its place in the tree of its parents and children.

Rule 1: a place depends on a message's ancestors alone. So a change touches the message itself, and those
        below one whose parent or type is new; everything else keeps its row.
Rule 2: the root is the topmost id that is named, also when that message itself is not known so far. It is how
        the children of one that comes late are found.
Rule 3: deeper than `DEPTH_MAX`, or in a circle, a message has no place: its root, depth and stack are NULL.
"""

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

ROUNDS_MAX: Final = 7
DEPTH_MAX: Final = 1 << ROUNDS_MAX
UNKNOWN: Final = "?"
PLACE: Final = ("root_message_id", "depth", "stack")
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


def places(nodes: "DataFrame", anchors: "DataFrame") -> "DataFrame":
    """Grain: message_id of a node. Anchors are parents that are no nodes: their place is known and stays.

    Every node points at its parent. In a round each takes over the pointer of the one that it points at, so
    the distance doubles: a tree of depth 30 takes five joins, where level by level it would take thirty.
    A round uses the one before twice, so its plan is cut off there, or it would double too.
    """
    here = _pointers(nodes, anchors).localCheckpoint()
    for _ in range(ROUNDS_MAX):
        if here.where("up IS NOT NULL").isEmpty():
            break
        here = _climb(here).localCheckpoint()
    found = F.col("up").isNull()
    depth = F.size(F.split("stack", ";")) - 1
    return here.select(
        "message_id",
        F.when(found, F.col("root_message_id")).alias("root_message_id"),
        F.when(found, depth).cast("int").alias("depth"),
        F.when(found, F.col("stack")).alias("stack"),
    )


def _pointers(nodes: "DataFrame", anchors: "DataFrame") -> "DataFrame":
    """`up` is the parent, NULL where the place is known already; `stack` is what lies between, and itself."""
    parents = nodes.select(F.col("message_id").alias("parent_message_id"), F.lit(1).alias("is_node"))
    fixed = anchors.select(
        F.col("message_id").alias("parent_message_id"),
        F.col("root_message_id").alias("anchor_root"),
        F.col("stack").alias("anchor_stack"),
    )
    known = nodes.select("message_id", "parent_message_id", _frame().alias("stack"))
    joined = known.join(parents, "parent_message_id", "left").join(fixed, "parent_message_id", "left")
    parent, open_end = F.col("parent_message_id"), F.col("is_node").isNotNull()
    above = F.coalesce("anchor_stack", F.when(parent.isNotNull(), F.lit(UNKNOWN)))
    return joined.select(
        "message_id",
        F.when(open_end, parent).alias("up"),
        F.when(~open_end, F.coalesce("anchor_root", parent, "message_id")).alias("root_message_id"),
        F.when(open_end, F.col("stack")).otherwise(F.concat_ws(";", above, "stack")).alias("stack"),
    )


def _climb(here: "DataFrame") -> "DataFrame":
    above = here.select(
        F.col("message_id").alias("up"),
        F.col("up").alias("next_up"),
        F.col("root_message_id").alias("next_root"),
        F.col("stack").alias("next_stack"),
    )
    return here.join(above, "up", "left").select(
        "message_id",
        F.col("next_up").alias("up"),
        F.coalesce("root_message_id", "next_root").alias("root_message_id"),
        F.concat_ws(";", "next_stack", "stack").alias("stack"),
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
    """The rows with their place, in the order of the table's columns."""
    whole = rows.drop(*PLACE).join(found, "message_id", "left")
    return whole.select("message_id", "parent_message_id", *PLACE, *_OWN[2:], *_TIMES)


def uprooted(changed: "DataFrame", before: "DataFrame") -> "DataFrame":
    """Grain: `root_message_id` of trees in which places may be new, because a message came in or moved."""
    old = before.select(
        "message_id",
        "root_message_id",
        F.col("parent_message_id").alias("old_parent"),
        F.col("type").alias("old_type"),
        F.lit(1).alias("known"),
    )
    moved = changed.join(old, "message_id", "left").where(
        F.col("known").isNull()
        | ~F.col("parent_message_id").eqNullSafe(F.col("old_parent"))
        | ~F.col("type").eqNullSafe(F.col("old_type"))
    )
    ids = F.explode(F.array("message_id", "root_message_id"))
    return moved.select(ids.alias("root_message_id")).where("root_message_id IS NOT NULL").distinct()
