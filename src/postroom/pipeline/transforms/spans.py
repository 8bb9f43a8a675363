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

from postroom.pipeline.transforms.joining import sent

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    Sending = Callable[[DataFrame], DataFrame]
    """How the smaller side of a join comes to the larger one."""

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


def places(nodes: "DataFrame", anchors: "DataFrame", *, few: bool = False) -> "DataFrame":
    """Grain: message_id that a node has as its parent: its root and its stack. A root is NULL if it is lost.

    Anchors are parents that are no nodes: their place is known and stays. A message without children has its
    place from its parent, so only those that have some are climbed.

    Every node points at its parent. In a round each takes over the pointer of the one that it points at, so
    the distance doubles: a tree of depth 30 takes five joins, where level by level it would take thirty.
    A round uses the one before twice, so the plan is cut off after every other one, or it would double on
    and on. What is `few` is sent to every executor instead of being shuffled.
    """
    sending = partial(sent, few=few)
    known = anchors.select("message_id", "root_message_id", "stack")
    here = _pointers(nodes, known, sending).localCheckpoint()
    for _ in range(0, ROUNDS_MAX, 2):
        if here.where("up IS NOT NULL").isEmpty():
            break
        here = _climb(_climb(here, sending), sending).localCheckpoint()
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
    inner = nodes.join(sending(named.distinct()), "message_id", "left_semi").select(
        "message_id", "parent_message_id", _frame().alias("frame")
    )
    ids = nodes.select(F.col("message_id").alias("parent_message_id"), F.lit(1).alias("is_node"))
    joined = inner.join(sending(ids), "parent_message_id", "left").join(
        sending(_above(known)), "parent_message_id", "left"
    )
    is_open = F.col("is_node").isNotNull()
    return joined.select(
        "message_id",
        F.when(is_open, F.col("parent_message_id")).alias("up"),
        F.when(~is_open, _root()).alias("root_message_id"),
        F.when(is_open, F.col("frame")).otherwise(_stack()).alias("stack"),
    )


def _climb(here: "DataFrame", sending: "Sending") -> "DataFrame":
    above = here.select(
        F.col("message_id").alias("up"),
        F.col("up").alias("next_up"),
        F.col("root_message_id").alias("next_root"),
        F.col("stack").alias("next_stack"),
    )
    return here.join(sending(above), "up", "left").select(
        "message_id",
        F.col("next_up").alias("up"),
        F.coalesce("root_message_id", "next_root").alias("root_message_id"),
        F.concat_ws(";", "next_stack", "stack").alias("stack"),
    )


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


def met(rows: "DataFrame", changed: "DataFrame", *, few: bool) -> "DataFrame":
    """The rows of the table that a change concerns, each with how.

    `mine` is about a message that changed, and `moved` if that has another parent or type now. `below` has
    one as its root. `above` did not change and is the parent of one that did, and only there is the stack.
    Parents are looked up by a number, so by chance, hardly ever, a row is `above` that need not be.
    """
    # By number, because that is looked up in a fraction of the time. Both have the same columns, and all of
    # them are needed, so that it is sent once.
    own = changed.select(_number("message_id").alias("own"), "message_id", _link().alias("link"))
    own = own.toDF("own", "own_id", "own_link")
    root = own.toDF("root", "root_id", "root_link")
    named = changed.where("parent_message_id IS NOT NULL")
    parent = named.select(_number("parent_message_id").alias("parent")).distinct()
    joined = (
        rows.join(sent(own, few=few), _number("message_id") == F.col("own"), "left")
        .join(sent(root, few=few), _number("root_message_id") == F.col("root"), "left")
        .join(sent(parent, few=few), _number("message_id") == F.col("parent"), "left")
    )
    mine = _is("own_id", "message_id")
    below = _is("root_id", "root_message_id") & F.col("root_link").isNotNull()
    above = F.col("parent").isNotNull() & ~mine
    return joined.where(mine | above | below).select(
        "file",
        "message_id",
        "root_message_id",
        F.when(above, F.col("stack")).alias("stack"),
        mine.alias("mine"),
        (mine & (_link() != F.col("own_link"))).alias("moved"),
        below.alias("below"),
        above.alias("above"),
    )


def _is(found: str, looked_for: str) -> "Column":
    """Whether the id that has the right number is the right one."""
    return F.coalesce(F.col(found) == F.col(looked_for), F.lit(False))  # noqa: FBT003 - SQL's


def _number(name: str) -> "Column":
    return F.xxhash64(name)


def _link() -> "Column":
    """What of a message the places below it depend on, as one number."""
    return F.xxhash64("parent_message_id", "type", F.col("parent_message_id").isNull())
