"""The gold tables: aggregates of silver for operators and agents.

Rule 1: a table follows a change without reading the rest of history: it adds sums, or rebuilds the hours that
        changed. A table that spans days is computed from a small table by day: `gold_depth` from `gold_flow`,
        `gold_poison_suspects` from `gold_crashes`, `gold_dlq_patterns` from `gold_dlq_templates`.
Rule 2: percentiles are exact, and do not depend on partitioning: the value at the nearest rank of the sorted
        list. A histogram of fixed buckets next to them can be summed over any groups.
Rule 3: money is decimal from end to end.
Rule 4: `hour_us` is the start of a UTC hour. A message counts in the hour of its creation, an event in the
        hour in which it happened.
"""

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.delta.file_groups import FileGroups
from postroom.pipeline.gold.declaration import GoldTable, Hours, Running, Sums
from postroom.pipeline.gold.patterns import dlq_patterns, dlq_templates
from postroom.pipeline.silver.tables import REVIVED, hour_us, named
from postroom.pipeline.times import DAY_US, HOUR_US, MINUTE_US

SLA_US: Final = {0: 10_000, 1: 50_000, 2: 100_000, 3: 500_000}
"""How long a message of each priority may wait for its first delivery."""
BUCKET_BITS: Final = 4  # a bucket is at most a sixteenth as wide as the values in it
LAPSES_SUSPECT: Final = 2  # a message with at least this many lapsed leases is suspected
ERROR_KINDS: Final = (
    "execution_failed",
    "lease_lapsed",
    "dead_letter",
    "rejected",
    "quarantined",
    "conflict_resolution_failed",
)
WAITING: Final = "QUEUED"
_ARRIVALS: Final = ("created", "enqueued", "released", "replayed")
_ENDS: Final = ("delivered", "expired", "cancelled", "quarantined", "deleted")


def _born_us() -> Column:
    return F.coalesce("created_us", "first_us")


def _born_hour() -> Column:
    return hour_us(_born_us())


def _named(events: DataFrame, messages: DataFrame | None) -> DataFrame:
    """Events with the type and organization of their message. Without `messages` they already have them."""
    return events if messages is None else named(events, messages)


def _count_where(condition: Column) -> Column:
    return F.count(F.when(condition, 1))


def _one(condition: Column | None = None) -> Column:
    """The addend of a row to a count: 1, or 0 if the condition does not hold."""
    one = F.lit(1) if condition is None else F.when(condition, 1).otherwise(0)
    return one.cast("bigint")


# ---- latency and its targets ---------------------------------------------------------------------------


def latency(messages: DataFrame) -> DataFrame:
    """One row for each hour, organization, type and priority: how long its messages waited (`queue_us`).

    Two aggregations take one shuffle: rows are partitioned by the outer keys, so the buckets need no other.
    A group is one type of message of one organization in an hour, so its list is small.
    """
    keys = ["day", "hour_us", "org_id", "type", "priority"]
    waits = messages.where("queue_us IS NOT NULL").select(
        "day", _born_hour().alias("hour_us"), "org_id", "type", "priority", "queue_us"
    )
    return (
        waits.withColumn("le_us", bucket_us(F.greatest("queue_us", F.lit(0))))
        .repartition(*keys)
        .groupBy(*keys, "le_us")
        .agg(F.collect_list("queue_us").alias("waits"))
        .groupBy(*keys)
        .agg(
            F.sort_array(F.flatten(F.collect_list("waits"))).alias("waits"),
            F.sort_array(F.collect_list(F.struct("le_us", F.size("waits").cast("bigint").alias("n")))).alias(
                "histogram"
            ),
        )
        .select(
            *keys,
            F.size("waits").cast("bigint").alias("n"),
            *(nearest_rank(F.col("waits"), percent).alias(f"p{percent}_us") for percent in (50, 95, 99)),
            F.element_at("waits", -1).alias("max_us"),
            "histogram",
        )
    )


def nearest_rank(values: Column, percent: int) -> Column:
    """The smallest of the sorted values that `percent` of them do not exceed. In whole numbers, unrounded."""
    rank = F.floor((F.size(values) * percent + 99) / F.lit(100)).cast("int")
    return F.element_at(values, rank)


def bucket_us(value: Column) -> Column:
    """The upper limit of the bucket of a value: exact below 32, then sixteen buckets an octave."""
    bits = F.length(F.bin(value)) - (BUCKET_BITS + 1)
    shift = F.greatest(bits, F.lit(0))
    cut = F.call_function("shiftright", value, shift)
    return F.call_function("shiftleft", cut + 1, shift) - 1


def sla(messages: DataFrame) -> DataFrame:
    """One row for each hour, organization, type and priority: the number delivered within the target."""
    return _SLA.summed(_sla_of(messages))


def _sla_of(messages: DataFrame) -> DataFrame:
    targets = F.create_map(*(F.lit(part) for pair in SLA_US.items() for part in pair))
    target_us = targets[F.col("priority")].cast("bigint")
    return messages.where(F.col("queue_us").isNotNull() & target_us.isNotNull()).select(
        "day",
        _born_hour().alias("hour_us"),
        "org_id",
        "type",
        "priority",
        target_us.alias("target_us"),
        _one().alias("n"),
        _one(F.col("queue_us") <= target_us).alias("within"),
        F.lit(None).cast("double").alias("attainment"),
    )


# ---- flow ----------------------------------------------------------------------------------------------


_KINDS: Final = {
    "created": "created",
    "delivered": "delivered",
    "dequeued": "dequeued",
    "completed": "execution_completed",
    "failed": "execution_failed",
    "retried": "retry_scheduled",
    "dead_letters": "dead_letter",
    "expired": "expired",
    "cancelled": "cancelled",
    "quarantined": "quarantined",
    "rejected": "rejected",
    "duplicates": "duplicate",
    "replayed": "replayed",
}
"""Which column counts which events."""


def throughput(events: DataFrame, messages: DataFrame | None = None) -> DataFrame:
    """One row for each hour, organization and type: the number of events of each counted kind."""
    return _THROUGHPUT.summed(_throughput_of(_named(events, messages)))


def _throughput_of(events: DataFrame) -> DataFrame:
    kind = F.col("kind")
    bytes_in = F.when(kind == "created", F.coalesce("body_bytes", F.lit(0))).otherwise(0)
    return events.where("message_id IS NOT NULL").select(
        "day",
        hour_us(F.col("ts_us")).alias("hour_us"),
        "org_id",
        "type",
        _one().alias("events"),
        *(_one(kind == counted).alias(name) for name, counted in _KINDS.items()),
        bytes_in.cast("bigint").alias("bytes"),
    )


_ERROR_KEYS: Final = ("day", "hour_us", "org_id", "type", "kind", "error_type")


def errors(events: DataFrame, messages: DataFrame | None = None) -> DataFrame:
    """One row for each hour, organization, type, kind of event and class of error."""
    return _ERRORS.summed(_errors_of(_named(events, messages)))


def _errors_of(events: DataFrame) -> DataFrame:
    return (
        events.where(F.col("kind").isin(*ERROR_KINDS))
        .withColumn("hour_us", hour_us(F.col("ts_us")))
        .select(
            *_ERROR_KEYS,
            _one().alias("n"),
            F.col("ts_us").alias("first_us"),
            F.col("ts_us").alias("last_us"),
        )
    )


_FLOW_INPUT: Final = (
    *("message_id", "source", "seq", "day", "ts_us", "org_id", "queue"),
    *("state", "prior", "kind", "contract", "duration_us", "lease"),
)


def flow(events: DataFrame) -> DataFrame:
    """One row for each minute and queue in which a message began or stopped waiting.

    An event is compared with the previous state of its message. For the first event of a message in a day,
    that state is its `prior`, or its kind implies it.

    An end that an earlier version wrote has no `prior`. If its previous event was on an earlier day, it
    counts as the end of a waiting message, unless it has a lease or is the `delivered` of a task.
    """
    # The id first: Spark sorts by the first bytes of the first column, and there are few sources.
    before = Window.partitionBy("message_id", "source", "day").orderBy("seq")
    waited = F.coalesce(F.lag("waits").over(before), F.col("must_have_waited"))
    minute_us = F.col("ts_us") - F.pmod(F.col("ts_us"), F.lit(MINUTE_US))
    states = events.where("message_id IS NOT NULL AND state IS NOT NULL AND queue IS NOT NULL").select(
        "message_id",
        "source",
        "seq",
        "day",
        minute_us.alias("minute_us"),
        "org_id",
        "queue",
        (F.col("state") == WAITING).cast("int").alias("waits"),
        _must_have_waited().cast("int").alias("must_have_waited"),
    )
    return (
        states.select("day", "minute_us", "org_id", "queue", (F.col("waits") - waited).alias("change"))
        .where("change <> 0")
        .groupBy("day", "minute_us", "org_id", "queue")
        .agg(
            _count_where(F.col("change") > 0).alias("arrived"),
            _count_where(F.col("change") < 0).alias("left"),
        )
    )


def _must_have_waited() -> Column:
    """Whether a message has been waiting since an earlier day, by its first event of this day."""
    kind = F.col("kind")
    day_us = F.col("ts_us") - F.pmod(F.col("ts_us"), F.lit(DAY_US))
    return (
        F.when(F.col("prior").isNotNull(), F.col("prior") == WAITING)
        .when(kind.isin(*_ARRIVALS), F.lit(0) == 1)
        .when(
            kind == "dequeued",
            F.col("duration_us").isNull() | (F.col("ts_us") - F.col("duration_us") < day_us),
        )
        .when((kind == "delivered") & (F.col("contract") == "tasks"), F.lit(0) == 1)
        .when(kind.isin(*_ENDS), F.col("lease").isNull())
        .otherwise(F.col("state") == WAITING)
    )


def depth(flows: DataFrame, before: DataFrame | None = None, days: DataFrame | None = None) -> DataFrame:
    """One row for each minute and queue whose depth changed: the number waiting at the end of that minute.

    Each day begins with a row for every queue in which messages wait, even if none arrives or leaves in that
    minute. `before` has the depths before the first of these minutes, `days` the days of the table; without
    it these are the days of the flows.
    """
    keys = ["day", "minute_us", "org_id", "queue"]
    moves = flows.select(*keys, "arrived", "left")
    if before is not None:
        known = before.select("org_id", "queue", F.col("depth").alias("arrived"), _none().alias("left"))
        moves = moves.unionByName(known, allowMissingColumns=True)
    own_days = flows.agg(F.collect_set("day").alias("days")).select(F.explode("days").alias("day"))
    every = (own_days if days is None else days).select(F.col("day").cast("date"))
    midnights = moves.select("org_id", "queue").distinct().crossJoin(F.broadcast(every))
    midnight_us = F.unix_date("day").cast("bigint") * DAY_US
    empty = midnights.withColumns({"minute_us": midnight_us, "arrived": _none(), "left": _none()})
    so_far = Window.partitionBy("org_id", "queue").orderBy(F.col("minute_us").asc_nulls_first())
    return (
        moves.unionByName(empty)
        .groupBy(*keys)
        .agg(F.sum("arrived").alias("arrived"), F.sum("left").alias("left"))
        .withColumn("depth", F.sum(F.col("arrived") - F.col("left")).over(so_far))
        .where("minute_us IS NOT NULL AND (arrived <> 0 OR left <> 0 OR depth <> 0)")
    )


def _none() -> Column:
    return F.lit(0).cast("bigint")


def traffic(messages: DataFrame) -> DataFrame:
    """One row for each day, organization, sender, recipient and type.

    Without a sender, the contract counts as one. Without a recipient, it is the service, the agent or the
    queue.
    """
    return _TRAFFIC.summed(_traffic_of(messages))


def _traffic_of(messages: DataFrame) -> DataFrame:
    return messages.where("created_us IS NOT NULL").select(
        "day",
        "org_id",
        F.coalesce("sender", "contract").alias("sender"),
        F.coalesce("recipient", "service", "agent_id", "queue").alias("recipient"),
        "type",
        _one().alias("messages"),
        F.coalesce("body_bytes", F.lit(0)).cast("bigint").alias("bytes"),
        _one(F.col("outcome") == "dead_letter").alias("dead_letters"),
    )


# ---- tokens and money ----------------------------------------------------------------------------------

_DOLLARS: Final = "decimal(28,9)"
_SPENDERS: Final = ("day", "hour_us", "org_id", "goal_id", "agent_id", "model")


_BUDGETS: Final = ("tokens_reserved", "tokens_borrowed", "tokens_returned", "tokens_refused")
"""Events of token budgets. Each has a column of its name: the sum of the `tokens` in its detail."""


def tokens(events: DataFrame, messages: DataFrame | None = None) -> DataFrame:
    """One row for each hour, organization, goal, agent and model: tokens in and out, and those of budgets."""
    return _TOKENS.summed(_tokens_of(_named(events, messages)))


def _tokens_of(events: DataFrame) -> DataFrame:
    kind = F.col("kind")
    is_call = F.col("tokens_in").isNotNull() | F.col("tokens_out").isNotNull()
    stated = F.get_json_object("detail", "$.tokens").try_cast("bigint")
    return (
        events.where(is_call | kind.isin(*_BUDGETS))
        .withColumn("hour_us", hour_us(F.col("ts_us")))
        .select(
            *_SPENDERS,
            _one(is_call).alias("calls"),
            F.coalesce("tokens_in", F.lit(0)).cast("bigint").alias("tokens_in"),
            F.coalesce("tokens_out", F.lit(0)).cast("bigint").alias("tokens_out"),
            *(F.coalesce(F.when(kind == name, stated), F.lit(0)).alias(name) for name in _BUDGETS),
        )
    )


def cost(events: DataFrame) -> DataFrame:
    """One row for each hour, organization, goal, agent and model: the exact sum of dollars."""
    return _COST.summed(_cost_of(events))


def _cost_of(events: DataFrame) -> DataFrame:
    return (
        events.where("cost_usd IS NOT NULL")
        .withColumn("hour_us", hour_us(F.col("ts_us")))
        .select(*_SPENDERS, _one().alias("calls"), F.col("cost_usd").cast(_DOLLARS))
    )


# ---- poison --------------------------------------------------------------------------------------------


def crashes(events: DataFrame, messages: DataFrame | None = None) -> DataFrame:
    """One row for each message and day on which its lease lapsed, or on which it was quarantined."""
    return (
        _named(events, messages)
        .where(F.col("kind").isin("lease_lapsed", "quarantined") & F.col("message_id").isNotNull())
        .groupBy("day", "message_id")
        .agg(
            _count_where(F.col("kind") == "lease_lapsed").alias("lapses"),
            _count_where(F.col("kind") == "quarantined").alias("quarantines"),
            F.min(F.struct("ts_us", "org_id", "type", "agent_id", "goal_id", "queue")).alias("first"),
            F.max("ts_us").alias("last_us"),
            F.sort_array(F.collect_set(F.when(F.col("kind") == "lease_lapsed", F.col("worker_id")))).alias(
                "workers"
            ),
        )
    )


def poison_suspects(crashed: DataFrame) -> DataFrame:
    """One row for each message that crashes its workers: two lapsed leases, or quarantined."""
    return (
        crashed.groupBy("message_id")
        .agg(
            F.min("first").alias("first"),
            F.sum("lapses").alias("lapses"),
            F.size(F.array_distinct(F.flatten(F.collect_list("workers")))).alias("workers"),
            (F.sum("quarantines") > 0).alias("quarantined"),
            F.max("last_us").alias("last_us"),
        )
        .where((F.col("lapses") >= LAPSES_SUSPECT) | F.col("quarantined"))
        .select(
            "message_id",
            *(
                F.col(f"first.{name}").alias(name)
                for name in ("org_id", "type", "agent_id", "goal_id", "queue")
            ),
            "lapses",
            "workers",
            "quarantined",
            F.col("first.ts_us").alias("first_us"),
            "last_us",
        )
    )


# ---- flame graphs --------------------------------------------------------------------------------------


def _flame_of(spans: DataFrame) -> DataFrame:
    """The addends of each message."""
    waited_us = F.coalesce("queue_us", F.lit(0))
    worked_us = F.greatest(F.coalesce("duration_us", F.lit(0)) - waited_us, F.lit(0))
    return spans.where("goal_id IS NOT NULL").select(
        "day",
        hour_us(F.col("start_us")).alias("hour_us"),
        "goal_id",
        "org_id",
        "stack",
        F.lit(1).cast("bigint").alias("messages"),
        worked_us.alias("work_us"),
        waited_us.alias("wait_us"),
        F.when(F.col("outcome").isin(*REVIVED), 1).otherwise(0).cast("bigint").alias("dead_letters"),
        F.when(F.col("end_us").isNull(), 1).otherwise(0).cast("bigint").alias("open"),
    )


_FLAMES: Final = Sums(
    ("day", "hour_us", "goal_id", "org_id", "stack"),
    ("messages", "work_us", "wait_us", "dead_letters", "open"),
    each=_flame_of,
    scattered=True,
)


def flames(spans: DataFrame) -> DataFrame:
    """One row for each hour, goal and stack, which has the types from the root of a message tree downwards.

    A message counts in the hour of its creation; the hour is NULL if that is not known. `work_us` is the time
    of the messages themselves, `wait_us` the time until their delivery. Their children have stacks of their
    own, so the sum over a stack and all stacks that begin with it is the whole branch. A message that has not
    ended is `open`, and has no time yet. `dead_letters` are dead or quarantined.
    """
    return _FLAMES.summed(_flame_of(spans))


# ---- the declarations ----------------------------------------------------------------------------------

_NAMED_EVENTS: Final = ("silver_events", "silver_messages")
"""Events, and the messages that supply their type and organization."""
_DAY: Final = ("day",)
_LATENCY: Final = Hours(_born_us, ("message_id", "org_id", "type", "priority", "queue_us"))
_SLA: Final = Sums(
    ("day", "hour_us", "org_id", "type", "priority", "target_us"),
    ("n", "within"),
    shares=(("attainment", "within", "n"),),
    moment="hour_us",
    each=_sla_of,
)
_THROUGHPUT: Final = Sums(
    ("day", "hour_us", "org_id", "type"),
    ("events", *_KINDS, "bytes"),
    moment="hour_us",
    each=_throughput_of,
)
_ERRORS: Final = Sums(
    _ERROR_KEYS,
    ("n",),
    smallest=("first_us",),
    largest=("last_us",),
    moment="hour_us",
    each=_errors_of,
)
_FLOW: Final = Sums(
    ("day", "minute_us", "org_id", "queue"), ("arrived", "left"), whole=_FLOW_INPUT, moment="minute_us"
)
_DEPTH: Final = Running(("org_id", "queue"), ("arrived", "left"), "depth", "minute_us")
_TOKENS: Final = Sums(
    _SPENDERS, ("calls", "tokens_in", "tokens_out", *_BUDGETS), moment="hour_us", each=_tokens_of
)
_COST: Final = Sums(
    _SPENDERS,
    ("calls", "cost_usd"),
    decimals=(("cost_usd", _DOLLARS),),
    moment="hour_us",
    each=_cost_of,
)
_CRASHES: Final = Sums(
    ("day", "message_id"),
    ("lapses", "quarantines"),
    smallest=("first",),
    largest=("last_us",),
    sets=("workers",),
)
_TEMPLATES: Final = Sums(
    ("day", "hour_us", "error_type", "template"),
    ("n",),
    smallest=("first",),
    largest=("last",),
    sets=("orgs", "types"),
    moment="hour_us",
)
_TRAFFIC: Final = Sums(
    ("day", "org_id", "sender", "recipient", "type"),
    ("messages", "bytes", "dead_letters"),
    each=_traffic_of,
)


def _hour_file_groups() -> FileGroups:
    return FileGroups(F.col("hour_us") + (HOUR_US - 1), "hour_us")


def _minute_file_groups() -> FileGroups:
    return FileGroups(hour_us(F.col("minute_us")) + (HOUR_US - 1), "minute_us")


def _flame_file_groups() -> FileGroups:
    ended_us = F.when(F.col("open") == 0, F.col("hour_us") + (HOUR_US - 1))
    return FileGroups(ended_us, "hour_us", F.col("dead_letters") > 0)


FORM_ID: Final = "form"  # the application id under which a gold table remembers its form
FORM: Final = 6
"""The version of the columns, partitions and meaning of the tables. A table of another form is rebuilt."""
GOLD: Final[dict[str, GoldTable]] = {
    "gold_latency": GoldTable(latency, ("silver_messages",), _DAY, _LATENCY, _hour_file_groups),
    "gold_sla": GoldTable(sla, ("silver_messages",), _DAY, _SLA, _hour_file_groups),
    "gold_throughput": GoldTable(throughput, _NAMED_EVENTS, _DAY, _THROUGHPUT, _hour_file_groups),
    "gold_errors": GoldTable(errors, _NAMED_EVENTS, _DAY, _ERRORS, _hour_file_groups),
    "gold_flow": GoldTable(flow, ("silver_events",), _DAY, _FLOW, _minute_file_groups),
    "gold_depth": GoldTable(depth, ("gold_flow",), _DAY, _DEPTH, _minute_file_groups),
    "gold_tokens": GoldTable(tokens, _NAMED_EVENTS, _DAY, _TOKENS, _hour_file_groups),
    "gold_cost": GoldTable(cost, ("silver_events",), _DAY, _COST, _hour_file_groups),
    "gold_crashes": GoldTable(crashes, _NAMED_EVENTS, _DAY, _CRASHES),
    "gold_poison_suspects": GoldTable(poison_suspects, ("gold_crashes",)),
    "gold_dlq_templates": GoldTable(dlq_templates, ("silver_events",), _DAY, _TEMPLATES, _hour_file_groups),
    "gold_dlq_patterns": GoldTable(dlq_patterns, ("gold_dlq_templates",)),
    "gold_traffic": GoldTable(traffic, ("silver_messages",), _DAY, _TRAFFIC),
    "gold_flames": GoldTable(flames, ("silver_spans",), _DAY, _FLAMES, _flame_file_groups),
}
"""In the order in which they are built."""
