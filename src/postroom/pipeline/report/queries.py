"""The queries of the report, which DuckDB runs over the tables without a JVM.

Rule 1: the size of every result is bounded: columns of time, and the first rows of each ranking.
Rule 2: a history of at least a day is drawn from gold, in columns of whole hours. A shorter one is drawn from
        silver in finer columns, where silver has at most a day.
Rule 3: percentiles over several groups are computed from the histograms in `gold_latency`, which can be
        summed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Final, get_args

import msgspec

from postroom.contracts.tasks.tasks import DECISIONS
from postroom.core.formats.events import Contract
from postroom.core.history.message_checker import ENDLESS
from postroom.core.names import scoped
from postroom.errors import InvalidMessage
from postroom.pipeline.delta.delta_log import DataFile, rows_of
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.gold.columns import ERROR_KINDS
from postroom.pipeline.gold.tables.queues import WAITING
from postroom.pipeline.query.database import Database, text_in_sql
from postroom.pipeline.query.expectations import EXPECTATIONS, Expectation, breaches, measure
from postroom.pipeline.report.facts import (
    KEPT,
    REMOVED,
    Attained,
    GoalProfile,
    Pair,
    Pattern,
    Percentiles,
    QueueFacts,
    ReportFacts,
    Spender,
    Suspect,
    Times,
)
from postroom.pipeline.report.flames import STACK_OF_WAITING, Profile, Stack, speedscope
from postroom.pipeline.report.page import MATRIX_MAX, page
from postroom.pipeline.report.plots import COLUMNS_MAX
from postroom.pipeline.silver.spans import UNKNOWN
from postroom.pipeline.spark.session import table_errors
from postroom.pipeline.times import DAY_US, HOUR_US, MINUTE_US
from postroom.system.atomic import replace_file

RANKED_MAX: Final = 8  # rows of a ranking
PATTERNS_MAX: Final = 12
SUSPECTS_MAX: Final = 50
GOALS_MAX: Final = 6  # flame graphs on the page
PROFILES_MAX: Final = 100  # goals in a file for speedscope
STACKS_MAX: Final = 20_000  # of all goals
SERIES_MAX: Final = 40  # classes of errors, and models
FINE_COLUMNS: Final = 120  # at most, of a step below an hour
FINE_STEPS_US: Final = tuple(
    int(seconds * 1_000_000) for seconds in (0.1, 0.5, 1, 5, 15, 60, 5 * 60, 15 * 60)
)
"""Widths of columns below an hour."""
NAMELESS_ERROR: Final = "without a class"
UNNAMED: Final = "unnamed"
TABLES: Final = (
    *("silver_events", "silver_messages", "gold_latency", "gold_throughput", "gold_depth", "gold_errors"),
    *("gold_tokens", "gold_cost", "gold_traffic", "gold_dlq_patterns", "gold_poison_suspects", "gold_flames"),
)

_HAPPENED: Final = {
    "completed": ("execution_completed", "completed"),
    "delivered": ("delivered", "delivered"),
    "failed": ("execution_failed", "failed attempts"),
    "dead_letters": ("dead_letter", "dead letters"),
    "rejected": ("rejected", "rejected"),
    "expired": ("expired", "expired"),
    "cancelled": ("cancelled", "cancelled"),
}
"""For each column of `gold_throughput`, the kind of event that it counts, and its name on the page."""
_ARRIVALS: Final = ("created", "enqueued", "released", "replayed")
"""Kinds of events before which a message did not wait."""
Progress = Callable[[str], None]
Targets = Mapping[int, int]
"""The maximum wait of a message in microseconds, by priority."""


def write_report(
    tables: Tables,
    out: Path,
    speedscope_out: Path | None = None,
    *,
    targets_us: Targets | None = None,
    expected: Sequence[Expectation] | None = None,
    progress: Progress | None = None,
) -> ReportFacts:
    """Write the page, and a file for speedscope if its path is given.

    The page names breaches of what is `expected`, by default of the built-in expectations.
    """
    report = progress or (lambda _: None)
    _need_all(tables)
    report("reading the tables")
    reader = ReportReader(tables, targets_us or {}, expected)
    facts = reader.facts()
    report("drawing")
    replace_file(out, page(facts).encode(), "os")
    if speedscope_out is not None:
        profiles = [goal.profile for goal in reader.goals(PROFILES_MAX)]
        replace_file(speedscope_out, msgspec.json.encode(speedscope(profiles, "postroom goals")), "os")
    return facts


def _need_all(tables: Tables) -> None:
    for name in TABLES:
        with table_errors(name):
            is_there = tables.exists(name)
        if not is_there:
            raise InvalidMessage(
                f"there is no table {name} in {tables.storage}: `postroom pipeline run` builds it"
            )


def step_of(since_us: int, until_us: int) -> int:
    """The width of the columns for a period: the finest that stays within the maximum number."""
    span_us = until_us - since_us
    if span_us < DAY_US:
        return next((step for step in FINE_STEPS_US if span_us <= FINE_COLUMNS * step), HOUR_US)
    hours = until_us // HOUR_US - since_us // HOUR_US + 1
    return HOUR_US * -(-hours // COLUMNS_MAX)


class ReportReader:
    """Reads the facts of one report from one folder of tables."""

    def __init__(
        self,
        tables: Tables,
        targets_us: Targets,
        expected: Sequence[Expectation] | None = None,
    ) -> None:
        self._tables = tables
        self._expected = expected
        self._targets_us = dict(targets_us)
        self._db = Database(tables, [name for name in TABLES if tables.exists(name)])
        first_us, last_us, is_whole = self._extent()
        self._step_us = step_of(first_us, last_us) if is_whole else max(HOUR_US, step_of(first_us, last_us))
        self._since_us = first_us - first_us % self._step_us
        self._until_us = last_us - last_us % self._step_us + self._step_us
        self._is_fine = self._step_us < HOUR_US

    def facts(self) -> ReportFacts:
        latency, overall = self._latency()
        depth, queues = self._depth()
        return ReportFacts(
            self._since_us,
            self._until_us,
            self._step_us,
            rows_of(self._tables.files("silver_events")),
            self._ends(_OF_AGENTS),
            latency,
            overall,
            self._targets_us,
            self._sla(),
            self._throughput(),
            depth,
            queues,
            self._errors(),
            self._tokens(),
            {name: self._spending(column) for name, column in _SPENDERS.items()},
            self._db.rows("SELECT sum(cost_usd) AS cost_usd FROM gold_cost")[0]["cost_usd"] or Decimal(0),
            self._traffic(),
            self._patterns(),
            self._suspects(),
            self.goals(GOALS_MAX),
            self._ends(_OF_HARNESS),
            next(iter(self._queues(_OF_HARNESS)), None),
            *self._lapses(),
            self._breaches(),
        )

    def _breaches(self) -> tuple[str, ...]:
        """Breached expectations: what `expect` reports at this moment."""
        expected = self._expected
        if expected is None:  # tables of an earlier version may lack some
            expected = [one for one in EXPECTATIONS if self._tables.exists(one.table)]
        found = measure(self._tables, expected, time.time_ns() // 1000)
        return tuple(one.sentence for one in breaches(found))

    def _extent(self) -> tuple[int, int, bool]:
        """The first and the last time of the history, and whether silver has all of it.

        Gold may have hours whose events `retain` has deleted.
        """
        events = _range(self._tables.files("silver_events"), "ts_us")
        hours = _range(self._tables.files("gold_throughput"), "hour_us")
        if events is None or hours is None:
            return *(events or (0, 0)), True
        is_whole = events[0] < hours[0] + HOUR_US and events[1] >= hours[1]
        return (*events, True) if is_whole else (min(events[0], hours[0]), max(events[1], hours[1]), False)

    def _at(self, column: str) -> str:
        """SQL for the column of time that a time belongs to."""
        return f"(({column}) - ({column}) % {self._step_us})"

    def _ends(self, whose: str) -> dict[str, int]:
        """The outcomes of messages of agents, or of the harness.

        A message of a contract without ends is kept or removed, and not open.
        """
        rows = self._db.rows(
            f"""SELECT CASE WHEN NOT coalesce(contract IN ({_listed(sorted(ENDLESS))}), false) THEN outcome
                           WHEN outcome = 'open' THEN '{KEPT}' WHEN outcome = 'cancelled' THEN '{REMOVED}'
                           ELSE outcome END AS outcome, count(*) AS n
               FROM silver_messages WHERE {whose} GROUP BY ALL"""
        )
        return {row["outcome"]: row["n"] for row in rows}

    # ---- over time -----------------------------------------------------------------------------------

    def _latency(self) -> tuple[dict[int, dict[int, Percentiles]], dict[int, Percentiles]]:
        self._db.define("waits", self._waits())
        by_time: dict[int, dict[int, Percentiles]] = {}
        for row in self._db.rows(_percentiles("priority, at_us")):
            by_time.setdefault(row["priority"], {})[row["at_us"]] = _percentiles_of(row)
        overall = {row["priority"]: _percentiles_of(row) for row in self._db.rows(_percentiles("priority"))}
        return by_time, overall

    def _waits(self) -> str:
        """Grain: priority, column of time, and wait or bucket of waits: the number of messages."""
        if self._is_fine:
            return f"""SELECT priority, {self._at(_BORN_US)} AS at_us, greatest(queue_us, 0) AS le_us,
                              count(*) AS n
                       FROM silver_messages
                       WHERE priority IS NOT NULL AND queue_us IS NOT NULL AND {_OF_AGENTS} GROUP BY ALL"""
        return f"""SELECT priority, {self._at("hour_us")} AS at_us, bucket.le_us AS le_us,
                          sum(bucket.n) AS n
                   FROM (SELECT priority, hour_us, unnest(histogram) AS bucket
                         FROM gold_latency WHERE priority IS NOT NULL) GROUP BY ALL"""

    def _sla(self) -> dict[int, dict[int, Attained]]:
        """The number of messages within the target, for each priority with a target."""
        found: dict[int, dict[int, Attained]] = {}
        for priority, target_us in self._targets_us.items():
            rows = self._db.rows(
                f"""SELECT {self._at(_BORN_US)} AS at_us, count(*) AS n,
                           count(*) FILTER (WHERE queue_us <= {int(target_us)}) AS within
                    FROM silver_messages
                    WHERE queue_us IS NOT NULL AND priority = {int(priority)} AND {_OF_AGENTS}
                    GROUP BY ALL"""
            )
            if rows:
                found[priority] = {row["at_us"]: Attained(row["n"], row["within"]) for row in rows}
        return found

    def _throughput(self) -> dict[str, Times]:
        if self._is_fine:
            sums = ", ".join(
                f"count(*) FILTER (WHERE kind = '{kind}') AS {column}"
                for column, (kind, _) in _HAPPENED.items()
            )
            source = f"""SELECT {self._at("ts_us")} AS at_us, {sums} FROM silver_events
                         WHERE message_id IS NOT NULL AND {_OF_AGENTS} GROUP BY ALL"""
        else:
            sums = ", ".join(f"sum({column}) AS {column}" for column in _HAPPENED)
            source = f"SELECT {self._at('hour_us')} AS at_us, {sums} FROM gold_throughput GROUP BY ALL"
        rows = self._db.rows(source)
        series = {
            name: {row["at_us"]: row[column] for row in rows} for column, (_, name) in _HAPPENED.items()
        }
        return {name: times for name, times in series.items() if any(times.values())}

    def _errors(self) -> dict[str, Times]:
        name = f"coalesce(nullif(error_type, ''), '{NAMELESS_ERROR}')"
        if self._is_fine:
            kinds = ", ".join(f"'{kind}'" for kind in ERROR_KINDS)
            source = f"(SELECT * FROM silver_events WHERE kind IN ({kinds}))"
            return self._series(source, "ts_us", name, "1")
        return self._series("gold_errors", "hour_us", name, "n")

    def _tokens(self) -> dict[str, Times]:
        if self._is_fine:
            source = "(SELECT * FROM silver_events WHERE tokens_in IS NOT NULL OR tokens_out IS NOT NULL)"
            measure = "coalesce(tokens_in, 0) + coalesce(tokens_out, 0)"
            return self._series(source, "ts_us", _named("model"), measure)
        return self._series("gold_tokens", "hour_us", _named("model"), "tokens_in + tokens_out")

    def _series(self, source: str, time: str, name: str, measure: str) -> dict[str, Times]:
        """A sum for each name and column of time, for the names with the largest sums."""
        rows = self._db.rows(
            f"""WITH parts AS (SELECT {name} AS name, {self._at(time)} AS at_us, sum({measure}) AS n
                               FROM {source} GROUP BY ALL),
                     largest AS (SELECT name FROM parts GROUP BY name
                                 ORDER BY sum(n) DESC, name LIMIT {SERIES_MAX})
                SELECT * FROM parts WHERE name IN (SELECT name FROM largest)"""
        )
        found: dict[str, Times] = {}
        for row in rows:
            found.setdefault(row["name"], {})[row["at_us"]] = row["n"]
        return found

    def _depth(self) -> tuple[Times, list[QueueFacts]]:
        """The number of waiting messages in all queues, and the busiest queues."""
        self._db.define("moves", self._moves())
        total = self._db.rows(
            f"""WITH changes AS (SELECT moment_us, sum(change) AS change FROM moves
                                 WHERE {_OF_AGENTS} GROUP BY ALL),
                     depths AS (SELECT moment_us, sum(change) OVER (ORDER BY moment_us) AS depth FROM changes)
                SELECT {self._at("moment_us")} AS at_us, max(depth) AS peak,
                       max_by(depth, moment_us) AS last
                FROM depths GROUP BY ALL ORDER BY at_us"""
        )
        return self._held(total), self._queues(_OF_AGENTS)

    def _queues(self, whose: str) -> list[QueueFacts]:
        """The busiest queues. `_depth` creates the table `moves`."""
        rows = self._db.rows(
            f"""WITH changes AS (SELECT {_QUEUE} AS queue, moment_us, sum(change) AS change FROM moves
                                 WHERE {whose} GROUP BY ALL),
                     depths AS (SELECT *, sum(change) OVER (PARTITION BY queue ORDER BY moment_us) AS depth
                                FROM changes),
                     arrived AS (SELECT {_QUEUE} AS queue, count(*) AS messages FROM silver_messages
                                 GROUP BY ALL)
                SELECT queue, coalesce(any_value(messages), 0) AS messages, max(depth) AS peak,
                       sum(change) AS waiting
                FROM depths LEFT JOIN arrived USING (queue) GROUP BY queue
                ORDER BY messages DESC, queue NULLS LAST LIMIT {RANKED_MAX}"""
        )
        return [QueueFacts(row["queue"], row["messages"], row["peak"], row["waiting"]) for row in rows]

    def _moves(self) -> str:
        """Grain: time and queue: the change of the number of waiting messages.

        `gold_depth` has whole minutes. Within a minute, an event is compared with the previous state of its
        message. A message whose arrival is not in the history does not count as waiting.
        """
        if self._step_us >= MINUTE_US:
            return """SELECT minute_us AS moment_us, queue, sum(arrived - gold_depth.left) AS change
                      FROM gold_depth GROUP BY ALL"""
        kinds = ", ".join(f"'{kind}'" for kind in _ARRIVALS)
        return f"""WITH states AS (SELECT ts_us, queue, CAST(state = '{WAITING}' AS INT) AS waits,
                                        kind IN ({kinds}) AS arrives,
                                        lag(CAST(state = '{WAITING}' AS INT)) OVER (
                                            PARTITION BY message_id, source ORDER BY seq) AS waited
                                 FROM silver_events
                                 WHERE message_id IS NOT NULL AND state IS NOT NULL AND queue IS NOT NULL)
                   SELECT ts_us AS moment_us, queue,
                          sum(waits - coalesce(waited, CASE WHEN arrives THEN 0 ELSE waits END)) AS change
                   FROM states GROUP BY ALL"""

    def _held(self, rows: list[dict[str, Any]]) -> Times:
        """The peak of every column from the first change on. A depth lasts until the next change."""
        found: Times = {}
        moved = {row["at_us"]: row for row in rows}
        depth = 0
        for at in range(min(moved, default=self._until_us), self._until_us, self._step_us):
            row = moved.get(at)
            found[at] = depth if row is None else max(depth, row["peak"])
            depth = depth if row is None else row["last"]
        return found

    def _lapses(self) -> tuple[int, int]:
        """Leases that ran out, and errors that are timeouts."""
        [row] = self._db.rows(
            """SELECT coalesce(sum(n) FILTER (WHERE kind = 'lease_lapsed'), 0) AS lapses,
                      coalesce(sum(n) FILTER (WHERE kind = 'execution_failed'
                                              AND error_type ILIKE '%timeout%'), 0) AS timeouts
               FROM gold_errors"""
        )
        return int(row["lapses"]), int(row["timeouts"])

    # ---- rankings ------------------------------------------------------------------------------------

    def _spending(self, column: str) -> list[Spender]:
        rows = self._db.rows(
            f"""WITH cost AS (SELECT {_named(column)} AS name, sum(cost_usd) AS cost_usd, sum(calls) AS calls
                              FROM gold_cost GROUP BY ALL),
                     tokens AS (SELECT {_named(column)} AS name, sum(tokens_in + tokens_out) AS tokens
                                FROM gold_tokens GROUP BY ALL)
                SELECT name, calls, coalesce(tokens, 0) AS tokens, cost_usd
                FROM cost LEFT JOIN tokens USING (name)
                ORDER BY cost_usd DESC, name LIMIT {RANKED_MAX}"""
        )
        return [Spender(**row) for row in rows]

    def _traffic(self) -> list[Pair]:
        """The pairs of the busiest senders and recipients. A contract does not count as a sender."""
        rows = self._db.rows(
            f"""WITH named AS (SELECT CASE WHEN sender IS NULL OR sender IN ({_listed(get_args(Contract))})
                                           THEN '{UNNAMED}' ELSE sender END AS sender,
                                      {_named("recipient")} AS recipient, messages, dead_letters
                               FROM gold_traffic WHERE NOT {_is_of_harness("recipient")}),
                     senders AS (SELECT sender FROM named GROUP BY sender
                                 ORDER BY sum(messages) DESC, sender LIMIT {MATRIX_MAX}),
                     recipients AS (SELECT recipient FROM named GROUP BY recipient
                                    ORDER BY sum(messages) DESC, recipient LIMIT {MATRIX_MAX})
                SELECT sender, recipient, sum(messages) AS messages, sum(dead_letters) AS dead_letters
                FROM named SEMI JOIN senders USING (sender) SEMI JOIN recipients USING (recipient)
                GROUP BY ALL ORDER BY messages DESC, sender, recipient"""
        )
        return [Pair(**row) for row in rows]

    def _patterns(self) -> list[Pattern]:
        rows = self._db.rows(
            f"""SELECT pattern_id, error_type, pattern, n, templates, first_us, last_us, trend, systematic,
                       len(orgs) AS orgs, types, hours, samples
                FROM gold_dlq_patterns ORDER BY n DESC, pattern_id LIMIT {PATTERNS_MAX}"""
        )
        for row in rows:
            row["types"] = tuple(row["types"])
            row["hours"] = {hour["hour_us"]: hour["n"] for hour in row["hours"]}
            row["samples"] = tuple((sample["message_id"], sample["error"] or "") for sample in row["samples"])
        return [Pattern(**row) for row in rows]

    def _suspects(self) -> list[Suspect]:
        rows = self._db.rows(
            f"""SELECT message_id, coalesce(org_id, '') AS org_id, coalesce(type, '') AS type,
                       lapses, workers, quarantined, last_us
                FROM gold_poison_suspects
                ORDER BY quarantined, lapses DESC, message_id LIMIT {SUSPECTS_MAX}"""
        )
        return [Suspect(**row) for row in rows]

    def goals(self, limit: int) -> list[GoalProfile]:
        """The goals with most messages, the largest first."""
        rows = self._db.rows(
            f"""WITH largest AS (SELECT goal_id, sum(messages) AS size, sum(work_us + wait_us) AS whole_us
                                 FROM gold_flames WHERE goal_id IS NOT NULL GROUP BY goal_id
                                 HAVING whole_us > 0
                                 ORDER BY size DESC, whole_us DESC, goal_id LIMIT {int(limit)})
                SELECT gold_flames.* FROM gold_flames JOIN largest USING (goal_id)
                ORDER BY size DESC, whole_us DESC, goal_id, stack NULLS FIRST, hour_us NULLS FIRST
                LIMIT {STACKS_MAX}"""
        )
        by_goal: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_goal.setdefault(row["goal_id"], []).append(row)
        return [
            goal_of(goal_id, parts, (self._since_us, self._until_us)) for goal_id, parts in by_goal.items()
        ]


def _range(files: list[DataFile], column: str) -> tuple[int, int] | None:
    """The lowest and the highest value of a column, from the log of its table."""
    lows = [file.low[column] for file in files if file.low.get(column) is not None]
    highs = [file.high[column] for file in files if file.high.get(column) is not None]
    return (min(lows), max(highs)) if lows and highs else None


def _is_of_harness(queue: str) -> str:
    return f"coalesce({queue} = '{DECISIONS}' OR {queue} LIKE '{scoped('%', DECISIONS)}', false)"


_OF_HARNESS: Final = _is_of_harness("queue")
_OF_AGENTS: Final = f"NOT {_OF_HARNESS}"
_QUEUE: Final = f"CASE WHEN {_OF_HARNESS} THEN '{DECISIONS}' ELSE queue END"
_BORN_US: Final = "coalesce(created_us, first_us)"
_SPENDERS: Final = {"model": "model", "organization": "org_id", "agent": "agent_id", "goal": "goal_id"}


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(map(text_in_sql, texts))


def _named(column: str) -> str:
    return f"coalesce({column}, '{UNNAMED}')"


def _percentiles(keys: str) -> str:
    """SQL for nearest ranks from the counts of buckets: each is the upper limit of its bucket."""
    picks = ", ".join(
        f"min(le_us) FILTER (WHERE so_far * 100 >= whole * {percent}) AS p{percent}_us"
        for percent in (50, 95, 99)
    )
    return f"""WITH counts AS (SELECT {keys}, le_us, sum(n) AS n FROM waits GROUP BY ALL),
                    ranked AS (SELECT *, sum(n) OVER (PARTITION BY {keys} ORDER BY le_us) AS so_far,
                                      sum(n) OVER (PARTITION BY {keys}) AS whole FROM counts)
               SELECT {keys}, max(whole) AS n, {picks} FROM ranked GROUP BY ALL"""


def _percentiles_of(row: Mapping[str, Any]) -> Percentiles:
    return Percentiles(row["n"], row["p50_us"], row["p95_us"], row["p99_us"])


def goal_of(goal_id: str, rows: list[dict[str, Any]], extent: tuple[int, int]) -> GoalProfile:
    """A goal from its rows in `gold_flames`. Its hours are clipped to the period of the history."""
    sums: dict[tuple[str, ...], int] = {}
    for row in rows:
        path = tuple((row["stack"] or UNKNOWN).split(";"))
        for stack, us in ((path, row["work_us"]), ((*path, STACK_OF_WAITING), row["wait_us"])):
            if us:
                sums[stack] = sums.get(stack, 0) + us
    stacks: list[Stack] = sorted(sums.items())
    hours = [row["hour_us"] for row in rows if row["hour_us"] is not None]
    return GoalProfile(
        goal_id,
        next((row["org_id"] for row in rows if row["org_id"] is not None), UNNAMED),
        sum(row["messages"] for row in rows),
        max(min(hours), extent[0]) if hours else None,
        min(max(hours) + HOUR_US, extent[1]) if hours else None,
        Profile(goal_id, stacks),
    )
