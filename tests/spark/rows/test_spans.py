"""Where a message stands in its tree, and that one without an end has no place."""

from collections.abc import Mapping

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.silver import spans
from postroom.pipeline.silver.spans import DEPTH_MAX, PLACE

Place = tuple[str | None, int | None, str | None]
NOWHERE: Place = (None, None, None)
CHAIN = {f"m{n}": f"m{n - 1}" if n else None for n in range(DEPTH_MAX + 4)}
CIRCLE = {"a": "b", "b": "c", "c": "a", "below": "a", "further": "below", "self": "self"}
ANCHORS: dict[str, Place] = {
    "placed": ("root", 1, "r;p"),
    "lost": NOWHERE,
    "deep": ("root", DEPTH_MAX - 2, ";".join("t" * (DEPTH_MAX - 1))),
}
CHILDREN = {
    "x": "placed",
    "y": "x",
    "of the lost": "lost",
    "below that": "of the lost",
    "orphan": "nobody",
    "last": "deep",
    "too deep": "last",
}


def places_of(
    spark: SparkSession, parents: Mapping[str, str | None], anchors: Mapping[str, Place], *, few: bool
) -> dict[str, Place]:
    """The places of messages that have only an id, a parent and `t` as their type."""
    rows = spark.createDataFrame(list(parents.items()), "message_id STRING, parent_message_id STRING")
    told = {
        name: F.lit(None).cast("string") for name in (*spans._OWN, *spans._TIMES) if name not in rows.columns
    }
    nodes = rows.withColumns({**told, "type": F.lit("t")})
    known = spark.createDataFrame(
        [(name, *place) for name, place in anchors.items()],
        "message_id STRING, root_message_id STRING, depth INT, stack STRING",
    )
    found = spans.placed(nodes, spans.places(nodes, known, few=few))
    return {row["message_id"]: tuple(row[name] for name in PLACE) for row in found.collect()}


@pytest.fixture(scope="module", params=[True, False], ids=["broadcast", "shuffled"])
def found(spark: SparkSession, request: pytest.FixtureRequest) -> dict[str, Place]:
    """All of them at once: they have nothing to do with each other."""
    return places_of(spark, {**CHAIN, **CIRCLE, **CHILDREN}, ANCHORS, few=request.param)


def test_a_tree_has_places_down_to_the_limit_and_none_below(found: dict[str, Place]) -> None:
    places = [("m0", n, ";".join("t" * (n + 1))) for n in range(DEPTH_MAX)]
    assert [found[name] for name in CHAIN] == places + [NOWHERE] * (len(CHAIN) - DEPTH_MAX)


def test_messages_in_and_below_a_cycle_have_no_place(found: dict[str, Place]) -> None:
    assert {found[name] for name in CIRCLE} == {NOWHERE}


def test_a_child_is_placed_below_the_known_place_of_its_parent(found: dict[str, Place]) -> None:
    """Of a parent that has a place, of one that is lost, and of one that nobody told of."""
    assert {name: found[name] for name in CHILDREN} == {
        "x": ("root", 2, "r;p;t"),
        "y": ("root", 3, "r;p;t;t"),
        "of the lost": NOWHERE,
        "below that": NOWHERE,
        "orphan": ("nobody", 1, "?;t"),
        "last": ("root", DEPTH_MAX - 1, ";".join("t" * DEPTH_MAX)),  # the limit counts from the root
        "too deep": NOWHERE,
    }
