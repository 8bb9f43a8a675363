"""The silver tables: the state of every message and every attempt, and the declarations of all of them.

Rule 1: a fold is one aggregation of minima and maxima, which are idempotent and commutative. Late, repeated
        and reordered events result in the same row, and no watermark is needed.
Rule 2: a row of the table is itself a state of the fold, so new events are folded into the existing row.
"""

from collections.abc import Sequence
from typing import Final

from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.delta.file_groups import FileGroups
from postroom.pipeline.follow.columns import day_of, named
from postroom.pipeline.follow.merge import Fold
from postroom.pipeline.follow.refresh import Table
from postroom.pipeline.silver.events import Append, events
from postroom.pipeline.silver.span_tree import Tree
from postroom.pipeline.silver.spans import spans

# ---- silver_messages -------------------------------------------------------------------------------------

ATTRIBUTES: Final = [
    "org_id",
    "type",
    "priority",
    "agent_id",
    "goal_id",
    "parent_message_id",
    "user_id",
    "task_id",
    "queue",
    "contract",
    "source",
    "trace_id",
    "span_id",
    "sender",
    "recipient",
    "service",
    "body_bytes",
]
"""From the event `created`, or from the earliest event. They are not group keys, because those would split a
message whose events disagree."""

OUTCOMES: Final = ("", "cancelled", "expired", "completed", "dead_letter", "quarantined")
"""The index is the code. Of two ends at the same time the later one in this list counts."""
REVIVED: Final = ("dead_letter", "quarantined")
"""Outcomes that a replay reverts."""
CODE_BITS: Final = 3
WEIGHT_SHIFT: Final = 56  # a time in µs takes 51 bits, and a code 3
_ENDS: Final[dict[str, tuple[int, str]]] = {
    "execution_completed": (3, "completed"),
    "dead_letter": (3, "dead_letter"),
    "cancelled": (3, "cancelled"),
    "quarantined": (3, "quarantined"),
    "delivered": (2, "completed"),  # ends a response; a request was completed before
    "expired": (1, "expired"),  # a file drops old messages, read or not
    "deleted": (0, "cancelled"),  # counts only without another end
}
"""The weight and the outcome of each kind of end."""
_EXPIRED_IN_STORE: Final = 3  # in a store it counts like any other end
_STORES: Final = ("engine", "tasks")

_SMALLEST: Final = (
    "created_us",
    "enqueued_us",
    "first_dequeued_us",
    "first_delivered_us",
    "rejected_us",
    "first_us",
)
_LARGEST: Final = ("replayed_us", "last_us", "attempts", "end_code")


def messages(
    events: DataFrame, before: DataFrame | None = None, seen: Observation | None = None
) -> DataFrame:
    """Grain: message_id. Folds events, and the existing rows `before`, which are states of the fold too.

    `seen` counts as `renamed` the messages whose type or organization changes.
    """
    states = _event_states(events)
    if before is not None:
        states = states.unionByName(_message_states(before))
    folded = states.groupBy("message_id").agg(
        F.min("attributes").alias("attributes"),
        F.max("names").alias("names"),
        *[F.min(name).alias(name) for name in _SMALLEST],
        *[F.max(name).alias(name) for name in _LARGEST],
    )
    flat = folded.select("message_id", "attributes.*", "names", *_SMALLEST, *_LARGEST)
    if seen is not None:
        flat = flat.observe(seen, F.count_if(F.col("names") != _names()).alias("renamed"))
    return _message_rows(flat)


def _names() -> Column:
    """A hash of the type and the organization of a message."""
    return F.xxhash64("type", "org_id", F.col("type").isNull())


def message_keys(events: DataFrame) -> DataFrame:
    """The keys of the rows of `messages` that events change."""
    return events.where(F.col("message_id").isNotNull()).select("message_id")


def _event_states(events: DataFrame) -> DataFrame:
    kind, ts_us = F.col("kind"), F.col("ts_us")
    return events.where(F.col("message_id").isNotNull()).select(
        "message_id",
        _attributes(F.when(kind == "created", 0).otherwise(1), ts_us).alias("attributes"),
        F.lit(None).cast("bigint").alias("names"),
        F.when(kind == "created", ts_us).alias("created_us"),
        F.when(kind == "enqueued", ts_us).alias("enqueued_us"),
        F.when(kind == "dequeued", ts_us).alias("first_dequeued_us"),
        F.when(kind == "delivered", ts_us).alias("first_delivered_us"),
        F.when(kind == "rejected", ts_us).alias("rejected_us"),
        ts_us.alias("first_us"),
        F.when(kind == "replayed", ts_us).alias("replayed_us"),
        ts_us.alias("last_us"),
        F.coalesce("attempt", F.lit(0)).alias("attempts"),
        _end_code().alias("end_code"),
    )


def _message_states(rows: DataFrame) -> DataFrame:
    rank = F.when(F.col("created_us").isNotNull(), 0).otherwise(1)
    attributes = _attributes(rank, F.coalesce("created_us", "first_us"))
    return rows.select(
        "message_id", attributes.alias("attributes"), _names().alias("names"), *_SMALLEST, *_LARGEST
    )


def _attributes(rank: Column, ts_us: Column) -> Column:
    """The attributes, preceded by their precedence, so that the smallest struct has the valid ones."""
    return F.struct(rank.alias("rank"), ts_us.alias("ts_us"), *ATTRIBUTES)


def _end_code() -> Column:
    """An end as one long: weight, time and outcome. The largest one of a message counts."""
    kind = F.col("kind")
    code = F.when(
        (kind == "expired") & F.col("contract").isin(*_STORES), _packed(_EXPIRED_IN_STORE, "expired")
    )
    for name, (weight, outcome) in _ENDS.items():
        code = code.when(kind == name, _packed(weight, outcome))
    return code


def _packed(weight: int, outcome: str) -> Column:
    head = (weight << WEIGHT_SHIFT) + OUTCOMES.index(outcome)
    return F.shiftleft(F.col("ts_us"), CODE_BITS) + F.lit(head).cast("long")


def end_us() -> Column:
    """The time in an `end_code`."""
    time_bits = (1 << WEIGHT_SHIFT) - 1
    return F.shiftright(F.col("end_code").bitwiseAND(F.lit(time_bits).cast("long")), CODE_BITS)


def _meaning(codes: Sequence[str]) -> Column:
    """The outcome in an `end_code`; NULL where there is none."""
    code = F.col("end_code") % (1 << CODE_BITS)
    meaning = F.when(code == 0, F.lit(None))
    for number, word in enumerate(codes[1:], 1):
        meaning = meaning.when(code == number, word)
    return meaning


def _message_rows(flat: DataFrame) -> DataFrame:
    # A replay reopens a message that ended before it.
    over = F.col("end_code").isNotNull() & ~F.coalesce(F.col("replayed_us") > end_us(), F.lit(False))  # noqa: FBT003 - SQL's
    ended = flat.withColumns(
        {"finished_us": F.when(over, end_us()), "outcome": F.when(over, _meaning(OUTCOMES)).otherwise("open")}
    )
    return ended.select(
        "message_id",
        *ATTRIBUTES,
        "created_us",
        "enqueued_us",
        "first_dequeued_us",
        "first_delivered_us",
        "finished_us",
        "rejected_us",
        "replayed_us",
        "first_us",
        "last_us",
        "attempts",
        "outcome",
        (F.col("first_dequeued_us") - F.col("enqueued_us")).alias("queue_us"),
        (F.col("finished_us") - F.col("created_us")).alias("total_us"),
        "end_code",
        day_of(F.coalesce("created_us", "first_us")).alias("day"),
    )


def message_file_groups() -> FileGroups:
    return FileGroups(F.coalesce("finished_us", "rejected_us"), "last_us", _is_revivable())


def span_file_groups() -> FileGroups:
    return FileGroups(F.col("end_us"), "start_us", _is_revivable())


def _is_revivable() -> Column:
    """Whether a person may replay the message."""
    return F.col("outcome").isin(*REVIVED)


# ---- silver_attempts -------------------------------------------------------------------------------------

RESULTS: Final = ("", "released", "cancelled", "lapsed", "failed", "completed")
_RESULT_OF: Final = {
    "execution_completed": "completed",
    "execution_failed": "failed",
    "lease_lapsed": "lapsed",
    "released": "released",
    "deferred": "released",
    "cancelled": "cancelled",
}
_MAY_HAVE_NO_HOLDER: Final = ("cancelled", "deferred")
_BEGINNING: Final = ["org_id", "type", "priority", "agent_id", "goal_id", "queue", "worker_id", "lease"]
_ENDING: Final = ["error_type", "error", "model", "service", "tokens_in", "tokens_out", "cost_usd"]
_ATTEMPT_SMALLEST: Final = ("dequeued_us", "started_us", "first_us", "waited_us")
_ATTEMPT_KINDS: Final = ("dequeued", "execution_started", "heartbeat", *_RESULT_OF)


def attempts(events: DataFrame, messages: DataFrame | None = None) -> DataFrame:
    """Grain: message_id and attempt, from 1 on. One lease of a message, from its delivery to its end.

    The holder comes from `dequeued`, the result from the first end. `messages` supply names that events lack.
    """
    rows = folded_attempts(events)
    return rows if messages is None else named(rows, messages)


def folded_attempts(events: DataFrame, before: DataFrame | None = None) -> DataFrame:
    """The rows of events, folded into the existing rows `before`. Events may lack names."""
    states = _attempt_states(events)
    if before is not None:
        states = states.unionByName(_states_of_attempts(before))
    folded = states.groupBy("message_id", "attempt").agg(
        F.min("begun").alias("begun"),
        F.min("done").alias("done"),
        *[F.min(name).alias(name) for name in _ATTEMPT_SMALLEST],
        F.max("heartbeat_us").alias("heartbeat_us"),
    )
    return _attempt_rows(folded)


def attempt_keys(events: DataFrame) -> DataFrame:
    """The keys of the rows of `attempts` that events change."""
    return _of_attempts(events).select("message_id", "attempt")


def _of_attempts(events: DataFrame) -> DataFrame:
    kind = F.col("kind")
    leased = events.where((F.col("attempt") > 0) & F.col("message_id").isNotNull())
    was_held = ~kind.isin(*_MAY_HAVE_NO_HOLDER) | F.col("worker_id").isNotNull()
    return leased.where(kind.isin(*_ATTEMPT_KINDS) & was_held)


def _attempt_states(events: DataFrame) -> DataFrame:
    kind, ts_us = F.col("kind"), F.col("ts_us")
    done = F.struct(ts_us.alias("ts_us"), _result_code().alias("code"), *_ENDING)
    return _of_attempts(events).select(
        "message_id",
        "attempt",
        _begun(F.when(kind == "dequeued", 0).otherwise(1), ts_us).alias("begun"),
        F.when(kind.isin(*_RESULT_OF), done).alias("done"),
        F.when(kind == "dequeued", ts_us).alias("dequeued_us"),
        F.when(kind == "execution_started", ts_us).alias("started_us"),
        ts_us.alias("first_us"),
        F.when(kind == "dequeued", F.col("duration_us")).alias("waited_us"),
        F.when(kind == "heartbeat", ts_us).alias("heartbeat_us"),
    )


def _states_of_attempts(rows: DataFrame) -> DataFrame:
    rank = F.when(F.col("dequeued_us").isNotNull(), 0).otherwise(1)
    done = F.struct(F.col("ended_us").alias("ts_us"), F.col("end_code").cast("int").alias("code"), *_ENDING)
    return rows.select(
        "message_id",
        "attempt",
        _begun(rank, F.coalesce("dequeued_us", "first_us")).alias("begun"),
        F.when(F.col("ended_us").isNotNull(), done).alias("done"),
        *_ATTEMPT_SMALLEST,
        "heartbeat_us",
    )


def _begun(rank: Column, ts_us: Column) -> Column:
    return F.struct(rank.alias("rank"), ts_us.alias("ts_us"), *_BEGINNING)


def _result_code() -> Column:
    code = F.lit(None).cast("int")
    for kind, result in _RESULT_OF.items():
        code = F.when(F.col("kind") == kind, RESULTS.index(result)).otherwise(code)
    return code


def _attempt_rows(folded: DataFrame) -> DataFrame:
    flat = folded.select(
        "*",
        F.col("done.ts_us").alias("ended_us"),
        F.col("done.code").cast("long").alias("end_code"),
    )
    return flat.select(
        "message_id",
        "attempt",
        *[f"begun.{name}" for name in _BEGINNING],
        "dequeued_us",
        "started_us",
        "ended_us",
        "heartbeat_us",
        "first_us",
        "waited_us",
        (F.col("ended_us") - F.col("dequeued_us")).alias("worked_us"),
        F.coalesce(_meaning(RESULTS), F.lit("open")).alias("result"),
        *[f"done.{name}" for name in _ENDING],
        "end_code",
        day_of(F.col("first_us")).alias("day"),
    )


def attempt_file_groups() -> FileGroups:
    return FileGroups(F.col("ended_us"), "first_us")


# ---- the declarations ------------------------------------------------------------------------------------

_DAY: Final = ("day",)
SILVER: Final[dict[str, Table]] = {
    "silver_events": Table(events, ("bronze_events",), _DAY, Append(), outlives_events=False),
    "silver_messages": Table(
        messages,
        ("silver_events",),
        _DAY,
        Fold(message_keys, messages, observes_renames=True),
        file_groups=message_file_groups,
        outlives_events=False,
    ),
    "silver_spans": Table(
        spans, ("silver_messages",), _DAY, Tree(), file_groups=span_file_groups, outlives_events=False
    ),
    "silver_attempts": Table(
        attempts,
        ("silver_events", "silver_messages"),
        _DAY,
        Fold(attempt_keys, folded_attempts),
        file_groups=attempt_file_groups,
        outlives_events=False,
    ),
}
"""In the order in which they are built. Gold needs spans and not attempts, so spans come first."""
