"""The history checker as a Spark job: the rules of `core.history` for histories of any size.

Rule 1: rules and sentences are those of `core.history`: `lost`, `unknown`, `overlap`, `terminal` and
        `gap`. Only `postroom verify` checks the order of first deliveries, which needs all events of a lane
        in one place.
Rule 2: the lives of messages are checked for stores (`LEASED`), where one source has all events of a message.
        Event numbers are checked for every source.
Rule 3: one shuffle by message. Window functions see the earlier events of a message; only violations are
        collected.
Rule 4: any event may be missing in a gap, so the state before a gap proves nothing after it.
Rule 5: events that `retain` deleted are no gap. It deletes whole messages, so all others are checked as
        usual. A message with later events is checked as after a gap.
"""

from functools import reduce
from operator import or_
from typing import Final, NamedTuple

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.window import WindowSpec

from postroom.core.history.message_checker import ENDS, LEASED, MAY_FOLLOW, MICROS_PER_S, Rule
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.retention.deleted_numbers import TABLE as DELETED_NUMBERS
from postroom.pipeline.retention.deleted_numbers import holes_between, numbers_of, returned
from postroom.pipeline.schema import NOT_IN_LINE

SAMPLES_MAX: Final = 1_000  # violations of a rule that are shown; the rest is counted
HORIZON_S: Final = 86_400.0
RULES: Final[tuple[Rule, ...]] = ("lost", "unknown", "overlap", "terminal", "gap")

_END_KINDS: Final = tuple(ENDS)
_WORDS: Final = ("heartbeat", "execution_started", "execution_failed", "lease_lapsed", "released")
"""Events that are valid under their lease only; the last three end it."""
_GIVE_BACK: Final = _WORDS[2:]
_UNDER_LEASE: Final = ("heartbeat", "execution_completed", *_GIVE_BACK)
"""Events that have to name their lease."""
_MOVES: Final = ("created", "enqueued", "promoted", "retry_scheduled", "deferred", "dequeued", "replayed")
_JUDGED: Final = (*_MOVES, *_WORDS, *_END_KINDS)
_STATES: Final = ("created", "dequeued", "replayed", *_END_KINDS)
"""Events that begin or end a life."""
_UNKNOWN_LEASE: Final = -1  # a lease may be open or not


class ViolationSample(NamedTuple):
    """A violation, and the events that prove it."""

    rule: Rule
    message_id: str
    event_ids: tuple[str, ...]
    sentence: str


class CheckResult(NamedTuple):
    """The violations of a history."""

    counts: dict[Rule, int]
    samples: list[ViolationSample]
    """At most `SAMPLES_MAX` of each rule, ordered by rule."""
    events: int
    messages: int
    """Messages that were accepted. A mailbox is created, too, and is no message."""

    @property
    def violations(self) -> int:
        return sum(self.counts.values())


def check_tables(spark: SparkSession, tables: Tables, *, horizon_s: float = HORIZON_S) -> CheckResult:
    """Check the history in a folder of tables."""
    with tables.queried():
        bronze, silver = (tables.read(spark, name) for name in ("bronze_events", "silver_events"))
        # Read last: `retain` records numbers before it deletes events.
        deleted = tables.read(spark, DELETED_NUMBERS) if tables.exists(DELETED_NUMBERS) else None
    return check(bronze, silver, deleted, horizon_s=horizon_s)


def check(
    bronze: DataFrame, silver: DataFrame, deleted: DataFrame | None = None, *, horizon_s: float = HORIZON_S
) -> CheckResult:
    """Check the events of silver, and in bronze whether a number stands for two different events.

    `deleted` has the numbers of the events that `retain` deleted, if any.
    """
    violations = find_violations(bronze, silver, deleted, round(horizon_s * MICROS_PER_S)).persist()
    try:
        counts = {
            row["rule"]: row["n"] for row in violations.groupBy("rule").agg(F.count("*").alias("n")).collect()
        }
        ranked = F.row_number().over(Window.partitionBy("rule").orderBy("message_id", "event_ids"))
        shown = (
            violations.withColumn("rank", ranked).where(F.col("rank") <= SAMPLES_MAX).orderBy("rule", "rank")
        )
        samples = [
            ViolationSample(row["rule"], row["message_id"] or "", tuple(row["event_ids"]), row["sentence"])
            for row in shown.collect()
        ]
    finally:
        violations.unpersist()
    sizes = silver.agg(
        F.count("*"), F.count(F.when(F.col("kind") == "created", F.col("message_id")))
    ).collect()[0]
    return CheckResult({rule: counts[rule] for rule in RULES if rule in counts}, samples, sizes[0], sizes[1])


def find_violations(
    bronze: DataFrame, silver: DataFrame, deleted: DataFrame | None, horizon_us: int
) -> DataFrame:
    """One row for each violation: rule, message_id, event_ids, sentence."""
    numbers = numbers_of(silver) if deleted is None else numbers_of(silver).unionByName(deleted)
    holes = holes_between(numbers)
    events = _of_stores(silver, _sources(numbers, holes))
    whole = events if deleted is None else _without_returned(events, deleted)
    lives = _violations(_with_state(whole), horizon_us)
    return lives.unionByName(_missing(holes)).unionByName(_doubled(bronze))


# ---- numbers -------------------------------------------------------------------------------------------


def _missing(holes: DataFrame) -> DataFrame:
    first, last = F.col("before") + 1, F.col("behind") - 1
    which = F.when(first == last, F.format_string("%d is", first)).otherwise(
        F.format_string("%d to %d are", first, last)
    )
    return holes.select(
        F.lit("gap").alias("rule"),
        F.lit("").alias("message_id"),
        F.array(_event_id(F.col("before")), _event_id(F.col("behind"))).alias("event_ids"),
        F.format_string("of source %s, %s missing", F.col("source"), which).alias("sentence"),
    )


def _doubled(bronze: DataFrame) -> DataFrame:
    """Numbers with two different lines. The same line twice is no violation."""
    wire = [name for name in bronze.columns if name not in NOT_IN_LINE]
    lines = bronze.select("source", "seq", "message_id", F.xxhash64(*wire).alias("content"))
    return (
        lines.groupBy("source", "seq")
        .agg(
            F.min("content").alias("one"),
            F.max("content").alias("other"),
            F.min("message_id").alias("message_id"),
        )
        .where("one <> other")
        .select(
            F.lit("gap").alias("rule"),
            F.coalesce("message_id", F.lit("")).alias("message_id"),
            F.array(_event_id(F.col("seq"))).alias("event_ids"),
            F.concat(_event_id(F.col("seq")), F.lit(" stands for two different events")).alias("sentence"),
        )
    )


def _event_id(seq: Column) -> Column:
    return F.concat_ws("#", F.col("source"), seq.cast("string"))


# ---- the state before each event ----------------------------------------------------------------------


def _with_state(events: DataFrame) -> DataFrame:
    """The events to check, each with the state of its message just before it."""
    life = Window.partitionBy("source", "message_id").orderBy("seq")
    earlier = life.rowsBetween(Window.unboundedPreceding, -1)
    kind, seq, mark = F.col("kind"), F.col("seq"), F.struct("kind", "seq", "epoch")
    begins_or_ends = kind.isin(*_STATES) & (kind != "deleted")
    delivers = kind.isin("dequeued", "delivered")
    # All at once, so that they share one pass over the sorted rows.
    seen = events.withColumns(
        {
            "state_before": F.last(F.when(begins_or_ends, mark), ignorenulls=True).over(earlier),
            "deletion": F.last(F.when(kind == "deleted", mark), ignorenulls=True).over(earlier),
            "created_seq": F.last(F.when(kind == "created", seq), ignorenulls=True).over(earlier),
            "leased_seq": F.last(F.when(kind == "dequeued", seq), ignorenulls=True).over(earlier),
            "first_created": F.min(F.when(kind == "created", seq)).over(earlier),
            "first_delivered": F.min(F.when(delivers & F.col("whole"), seq)).over(earlier),
            "is_first": F.row_number().over(life) == 1,
            "is_last": F.lead("seq").over(life).isNull(),
        }
    )
    was_unaccepted = F.col("first_delivered").isNotNull() & (
        F.col("first_created").isNull() | (F.col("first_delivered") < F.col("first_created"))
    )
    return (
        seen.withColumn("end", _end())
        .withColumn("unaccepted", delivers & F.col("whole") & F.col("first_created").isNull())
        .withColumn("was_unaccepted", was_unaccepted)
        .withColumns(_lives(earlier))
        .withColumn("token", _token())
    )


def _lives(earlier: WindowSpec) -> dict[str, Column]:
    """The number of a life's acceptance, and the epochs of its last certain state and its last event.

    A message that is accepted after its end begins another life. It may have been replayed in a gap, so after
    a gap its state is certain again with its next delivery or end.
    """
    kind, seq, is_over = F.col("kind"), F.col("seq"), F.col("end").isNotNull()
    begins = (kind == "created") & (F.col("is_first") | is_over)
    ends = kind.isin(*_END_KINDS) & ~((kind == "deleted") & is_over)
    is_certain = F.col("is_first") | begins | ends | (kind == "dequeued") | ((kind == "replayed") & is_over)
    born = F.last(F.when(begins, seq), ignorenulls=True).over(earlier)
    accepted = F.coalesce(born, F.when(F.col("was_unaccepted"), 0), "created_seq", F.lit(0))
    return {
        "accepted": accepted,
        "certain_epoch": F.last(F.when(is_certain, F.col("epoch")), ignorenulls=True).over(earlier),
        "last_epoch": F.last(F.when(begins | (kind != "created"), F.col("epoch")), ignorenulls=True).over(
            earlier
        ),
    }


def _sources(numbers: DataFrame, holes: DataFrame) -> DataFrame:
    """The first number, the newest time and the gaps of each source, deleted events included."""
    ends = numbers.groupBy("source").agg(
        F.min("first_seq").alias("first_seq"), F.max("newest_us").alias("newest_us")
    )
    behind = holes.groupBy("source").agg(F.sort_array(F.collect_list("behind")).alias("holes"))
    return ends.join(behind, "source", "left")


def _of_stores(events: DataFrame, sources: DataFrame) -> DataFrame:
    """The events of stores to check, with the facts of their source.

    `epoch` counts the gaps before an event; `whole` says that there is none, back to number 1.
    """
    passed = F.size(F.filter("holes", lambda at: at <= F.col("seq")))
    return (
        events.where(F.col("contract").isin(*LEASED) & F.col("message_id").isNotNull())
        .where(F.col("kind").isin(*_JUDGED))
        .select(
            "source", "message_id", "seq", "ts_us", "kind", "state", "lease", _delay_us().alias("delay_us")
        )
        .join(F.broadcast(sources), "source")
        .withColumn("epoch", F.when(F.col("holes").isNull(), 0).otherwise(passed))
        .withColumn("whole", (F.col("epoch") == 0) & (F.col("first_seq") == 1))
    )


def _without_returned(events: DataFrame, deleted: DataFrame) -> DataFrame:
    """The events, of which none is `whole` if its message was deleted and has later events."""
    gone = returned(deleted).withColumn("has_left", F.lit(True))  # noqa: FBT003 - SQL's
    found = events.withColumn("message", F.xxhash64("message_id")).join(gone, ["source", "message"], "left")
    return found.withColumn("whole", F.col("whole") & F.col("has_left").isNull())


def _delay_us() -> Column:
    """How long a delayed message has no events."""
    held = F.col("kind").isin("retry_scheduled", "deferred") | (
        (F.col("kind") == "created") & (F.col("state") == "SCHEDULED")
    )
    delay_s = F.get_json_object("detail", "$.delay_s").try_cast("decimal(18,6)")
    return F.when(held, F.coalesce((delay_s * MICROS_PER_S).cast("bigint"), F.lit(0))).otherwise(0)


def _end() -> Column:
    """The earlier event that ended the life; NULL where the life is open.

    `deleted` ends a life only if no other event has ended it.
    """
    state, deletion = F.col("state_before"), F.col("deletion")
    return F.when(state["kind"].isin(*_END_KINDS), state).when(
        state.isNull() | (deletion["seq"] > state["seq"]), deletion
    )


def _token() -> Column:
    """The lease that was open before an event: 0 for none, `_UNKNOWN_LEASE` where it is not known.

    A delivery opens a lease; a release, a deferral under it, a failure, a lapse or an end closes it. After a
    gap, the first event under a lease shows which one is open.
    """
    kind, lease = F.col("kind"), F.coalesce("lease", F.lit(0))
    is_over = F.col("end").isNotNull()
    begins = ((kind == "created") & (F.col("is_first") | is_over)) | ((kind == "replayed") & is_over)
    opened = (
        F.when(kind == "dequeued", F.when(lease != 0, lease).otherwise(F.col("seq")))
        .when(kind.isin(*_GIVE_BACK, *_END_KINDS) & ~((kind == "deleted") & is_over), F.lit(0))
        .when(begins | _is_deferred_under_lease(), F.lit(0))
    )
    word = F.when(kind.isin("heartbeat", "execution_started") & (lease != 0), lease)
    since_gap = (
        Window.partitionBy("source", "message_id", "epoch")
        .orderBy("seq")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    return F.coalesce(
        F.last(opened, ignorenulls=True).over(since_gap),
        F.when(F.col("whole"), F.lit(0)),
        F.first(word, ignorenulls=True).over(since_gap),
        F.lit(_UNKNOWN_LEASE),
    )


def _is_deferred_under_lease() -> Column:
    """A holder deferred the message, which ends its lease. A claim defers a message without a lease."""
    return (F.col("kind") == "deferred") & (F.coalesce("lease", F.lit(0)) != 0)


# ---- the rules -----------------------------------------------------------------------------------------


def _violations(states: DataFrame, horizon_us: int) -> DataFrame:
    """Apply every rule to every event, in one pass."""
    found = F.array_compact(F.array(_terminal(), _begun_again(), _overlap(), _unknown(), _lost(horizon_us)))
    proof = F.array_compact(
        F.array(
            F.when(F.col("found.earlier") > 0, _event_id(F.col("found.earlier"))), _event_id(F.col("seq"))
        )
    )
    return states.select("source", "message_id", "seq", F.explode(found).alias("found")).select(
        "found.rule",
        "message_id",
        F.array_distinct(proof).alias("event_ids"),
        F.concat_ws(" ", "message_id", "found.said").alias("sentence"),
    )


def _violation(condition: Column, rule: Rule, earlier: Column, said: Column) -> Column:
    """A violation where a condition holds, else NULL. `earlier` is the number of another proof, or 0."""
    return F.when(
        condition,
        F.struct(F.lit(rule).alias("rule"), earlier.cast("bigint").alias("earlier"), said.alias("said")),
    )


def _in_words(kind: Column) -> Column:
    """An end as part of a sentence."""
    words = F.create_map(*(F.lit(part) for pair in ENDS.items() for part in pair))
    return words[kind]


def _terminal() -> Column:
    """A life continues after its end, or ends again."""
    kind, end = F.col("kind"), F.col("end")
    is_allowed = reduce(
        or_, ((end["kind"] == first) & (kind == second) for first, second in sorted(MAY_FOLLOW))
    )
    again = kind.isin(*_END_KINDS) & (kind != "deleted") & ~is_allowed
    is_sure = end.isNotNull() & (end["epoch"] == F.col("epoch"))
    went_on = F.when(kind == "dequeued", F.lit("was leased")).otherwise(_in_words(kind))
    said = F.concat_ws(" after it ", went_on, _in_words(end["kind"]))
    return _violation(is_sure & (again | (kind == "dequeued")), "terminal", end["seq"], said)


def _begun_again() -> Column:
    """A life begins again before its end."""
    kind, accepted, epoch = F.col("kind"), F.col("accepted"), F.col("epoch")
    is_open = F.col("end").isNull() & ~F.col("is_first")
    again = is_open & (kind == "created") & (accepted > 0) & (F.col("last_epoch") == epoch)
    replayed = is_open & (kind == "replayed") & (F.col("certain_epoch") == epoch)
    said = F.when(again, "was accepted again before it ended").otherwise("was replayed before it ended")
    proof = F.when((accepted == 0) & ~F.col("was_unaccepted"), F.coalesce("leased_seq", F.lit(0)))
    return _violation(again | replayed, "terminal", F.coalesce(proof, accepted), said)


def _overlap() -> Column:
    """A delivery while a lease was open, or an event under another lease, or under none."""
    kind, token, lease = F.col("kind"), F.col("token"), F.coalesce("lease", F.lit(0))
    twice = (kind == "dequeued") & (token > 0) & F.col("end").isNull()
    completes = (kind == "execution_completed") & F.col("end").isNull()
    speaks = kind.isin(*_WORDS) | completes | _is_deferred_under_lease()
    strange = speaks & (lease != 0) & (token != _UNKNOWN_LEASE) & (lease != token)
    nameless = speaks & (lease == 0) & kind.isin(*_UNDER_LEASE)
    state = F.when(token > 0, F.format_string("while lease %d was open", token)).otherwise("which was over")
    said = (
        F.when(twice, F.format_string("was leased while lease %d was open", token))
        .when(nameless, "was held under no lease")
        .otherwise(F.format_string("was held under lease %d, %s", lease, state))
    )
    accepted, leased = F.coalesce("created_seq", F.lit(0)), F.coalesce("leased_seq", F.lit(0))
    proof = F.when(leased > accepted, leased).when(twice, 0).otherwise(accepted)
    return _violation(twice | strange | nameless, "overlap", proof, said)


def _unknown() -> Column:
    """A first delivery without an earlier acceptance."""
    is_first = F.col("unaccepted") & ~F.col("was_unaccepted")
    return _violation(is_first, "unknown", F.lit(0), F.lit("was delivered, and nobody had accepted it"))


def _lost(horizon_us: int) -> Column:
    """An open life without events for longer than the horizon, by the time of its source.

    A message that was never accepted is reported by `_unknown` only.
    """
    kind = F.col("kind")
    goes_on = kind.isin("created", "dequeued", "replayed") | (F.col("end").isNull() & ~kind.isin(*_END_KINDS))
    is_reported = F.col("unaccepted") | F.col("was_unaccepted")
    silent_us = F.col("newest_us") - F.col("ts_us") - F.col("delay_us")
    seconds = F.floor(silent_us / F.lit(MICROS_PER_S))
    said = F.format_string("was accepted, did not end, and has been silent for %d s", seconds)
    is_lost = F.col("is_last") & goes_on & ~is_reported & (silent_us > horizon_us)
    accepted = F.when(kind == "created", 0).otherwise(F.coalesce("created_seq", F.lit(0)))
    return _violation(is_lost, "lost", accepted, said)
