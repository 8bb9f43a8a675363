"""The history checker over the tables: DuckDB sorts the events by message, and Python checks the messages.

Rule 1: rules and sentences are those of `core.history`: `lost`, `unknown`, `overlap`, `terminal` and
        `gap`. Only `postroom verify` checks the order of first deliveries, which needs all events of a lane
        in one place.
Rule 2: the lives of messages are checked for stores (`LEASED`), where one source has all events of a message.
        Event numbers are checked for every source.
Rule 3: any event may be missing in a gap, so the state before a gap proves nothing after it.
Rule 4: events that `retain` deleted are not a gap. It deletes whole messages, so all others are checked as
        usual. A message with later events is checked as after a gap.
Rule 5: memory does not grow with the number of events. DuckDB sorts on the disk. One message at a time is in
        memory, and of each source its gaps and the hashes of messages that `retain` deleted unfinished.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias, cast

import msgspec
import xxhash

from postroom.core.formats.events import SCHEMA, AuditEvent, Contract, event_id
from postroom.core.history.history_checker import gone, ids_of, lost
from postroom.core.history.message_checker import LEASED, MICROS_PER_S, Life, Lives, Rule
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.follow.deleted_numbers import TABLE as DELETED_NUMBERS
from postroom.pipeline.query.database import Database, text_in_sql
from postroom.pipeline.schema import NOT_IN_LINE

SAMPLES_MAX: Final = 1_000  # violations of a rule that are shown; the rest is counted
HORIZON_S: Final = 86_400.0
RULES: Final[tuple[Rule, ...]] = ("lost", "unknown", "overlap", "terminal", "gap")
_DELAYED: Final = ("created", "deferred", "retry_scheduled")
"""Kinds of events whose `detail` may have a delay."""
Numbers: TypeAlias = "array[int]"
HELD_MAX: Final = 2 * SAMPLES_MAX  # samples of a rule in memory
SPARK_SEED: Final = 42  # of `xxhash64`


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
    """Messages that were accepted. A mailbox is created, too, and is not a message."""

    @property
    def violations(self) -> int:
        return sum(self.counts.values())


class _Found:
    """The number of violations of each rule, and the first samples by message and event."""

    def __init__(self) -> None:
        self._counts: dict[Rule, int] = {}
        self._samples: dict[Rule, list[ViolationSample]] = {}

    def add(self, sample: ViolationSample) -> None:
        rule = sample.rule
        self._counts[rule] = self._counts.get(rule, 0) + 1
        held = self._samples.setdefault(rule, [])
        held.append(sample)
        if len(held) > HELD_MAX:
            held.sort()
            del held[SAMPLES_MAX:]

    def result(self, events: int, accepted: int) -> CheckResult:
        counts = {rule: self._counts[rule] for rule in RULES if rule in self._counts}
        samples = [one for rule in sorted(counts) for one in sorted(self._samples[rule])[:SAMPLES_MAX]]
        return CheckResult(counts, samples, events, accepted)


class _Source(NamedTuple):
    """Facts about a source of events that the checks of each of its messages use."""

    is_whole: bool
    """Whether its events are known from number 1 on."""
    newest_us: int
    behind_gaps: Numbers
    """The first number after each gap, in order."""
    returned: Numbers
    """The hashes of messages that `retain` deleted before their end, in order."""


def check_tables(tables: Tables, *, horizon_s: float = HORIZON_S) -> CheckResult:
    """Check the history in a folder of tables."""
    database = Database(tables, ("bronze_events", "silver_events"))
    # Opened last: `retain` records numbers before it deletes events.
    has_deleted = tables.exists(DELETED_NUMBERS)
    if has_deleted:
        database.open(tables, DELETED_NUMBERS)
    database.execute(f"CREATE TEMP VIEW numbers AS {_numbers(has_deleted=has_deleted)}")
    found = _Found()
    sources = _sources(database, found, has_deleted=has_deleted)
    for (name, _), rows in groupby(_events(database), itemgetter("source", "message_id")):
        _check_message(list(rows), sources[name], round(horizon_s * MICROS_PER_S), found)
    for sample in _doubled(database, tables):
        found.add(sample)
    [sizes] = database.rows(
        """SELECT count(*) AS events, count(message_id) FILTER (kind = 'created') AS accepted
           FROM silver_events"""
    )
    return found.result(sizes["events"], sizes["accepted"])


# ---- numbers -------------------------------------------------------------------------------------------


def _numbers(*, has_deleted: bool) -> str:
    """SQL for ranges of numbers: those of the events, and those that `retain` has deleted."""
    there = "SELECT source, seq AS first_seq, seq AS last_seq, ts_us AS newest_us FROM silver_events"
    deleted = f" UNION ALL SELECT source, first_seq, last_seq, newest_us FROM {DELETED_NUMBERS}"  # noqa: S608 - a constant
    return there + deleted if has_deleted else there


def _sources(database: Database, found: _Found, *, has_deleted: bool) -> dict[str, _Source]:
    """Every source, with its gaps, which are violations."""
    gaps: dict[str, Numbers] = {}
    for row in database.each(_GAPS):
        source, before, behind = row["source"], row["before"], row["first_seq"]
        gaps.setdefault(source, array("q")).append(behind)
        n = behind - before - 1
        which = f"{before + 1} is" if n == 1 else f"{before + 1} to {behind - 1} are"
        proof = (event_id(source, before), event_id(source, behind))
        found.add(ViolationSample("gap", "", proof, f"of source {source}, {which} missing"))
    returned = _returned(database) if has_deleted else {}
    ends = database.rows(
        "SELECT source, min(first_seq) AS lowest, max(newest_us) AS newest_us FROM numbers GROUP BY source"
    )
    nothing = array("q")
    return {
        row["source"]: _Source(
            row["lowest"] == 1,
            row["newest_us"],
            gaps.get(row["source"], nothing),
            returned.get(row["source"], nothing),
        )
        for row in ends
    }


_GAPS: Final = """
    SELECT source, before, first_seq
    FROM (SELECT source, first_seq, max(last_seq) OVER (
              PARTITION BY source ORDER BY first_seq ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
          ) AS before FROM numbers)
    WHERE first_seq - before > 1 ORDER BY source, first_seq
"""


def _returned(database: Database) -> dict[str, Numbers]:
    """The hashes of messages whose first events were deleted, by source."""
    hashes: dict[str, Numbers] = {}
    for row in database.each(
        f"SELECT DISTINCT source, message FROM {DELETED_NUMBERS} WHERE message IS NOT NULL ORDER BY ALL"  # noqa: S608 - a constant
    ):
        hashes.setdefault(row["source"], array("q")).append(row["message"])
    return hashes


def _doubled(database: Database, tables: Tables) -> Iterator[ViolationSample]:
    """Numbers with two different lines. The same line twice is not a violation."""
    wire = ", ".join(name for name in tables.schema("bronze_events").names if name not in NOT_IN_LINE)
    rows = database.each(
        f"""SELECT source, seq, coalesce(min(message_id), '') AS message_id FROM bronze_events
            GROUP BY source, seq HAVING min(hash({wire})) <> max(hash({wire}))"""  # noqa: S608 - our own names
    )
    for row in rows:
        name = event_id(row["source"], row["seq"])
        yield ViolationSample("gap", row["message_id"], (name,), f"{name} stands for two different events")


# ---- messages ------------------------------------------------------------------------------------------


def _events(database: Database) -> Iterator[dict[str, Any]]:
    """The events of stores, by source, message and number."""
    leased, delayed = (", ".join(map(text_in_sql, sorted(names))) for names in (LEASED, _DELAYED))
    return database.each(
        f"""SELECT source, message_id, seq, ts_us, kind, contract, state, coalesce(lease, 0) AS lease,
                   CASE WHEN kind IN ({delayed}) THEN detail END AS detail
            FROM silver_events WHERE contract IN ({leased}) AND message_id IS NOT NULL
            ORDER BY source, message_id, seq"""  # noqa: S608 - constants
    )


def _check_message(rows: list[dict[str, Any]], source: _Source, horizon_us: int, found: _Found) -> None:
    """Check the life of one message, whose state before a gap proves nothing after it."""
    first = rows[0]
    lives = Lives(cast("Contract", first["contract"]), partial(_report, found))
    lives.whole = source.is_whole and not _has_returned(first["message_id"], source.returned)
    passed = 0
    for row in rows:
        gaps = bisect_right(source.behind_gaps, row["seq"])
        if gaps > passed:
            passed = gaps
            lives.skip()
        lives.take(_event(row))
    lives.newest_us = source.newest_us
    for life in lives.open():
        if reason := gone(lives, life, horizon_us, None):
            violation = lost(life, reason)
            found.add(ViolationSample("lost", life.message_id, violation.event_ids, violation.sentence))


def _has_returned(message_id: str, returned: Numbers) -> bool:
    if not returned:
        return False
    wanted = spark_hash(message_id)
    at = bisect_left(returned, wanted)
    return at < len(returned) and returned[at] == wanted


def spark_hash(text: str) -> int:
    """Spark's `xxhash64` of a text, a signed number."""
    return int.from_bytes(xxhash.xxh64_digest(text.encode(), seed=SPARK_SEED), "big", signed=True)


def _report(
    found: _Found, rule: Rule, source: str, life: Life, seqs: tuple[int, ...], said: str, _: Life | None
) -> None:
    if rule in RULES:
        ids = ids_of(source, seqs)
        found.add(ViolationSample(rule, life.message_id, ids, f"{life.message_id} {said}"))


def _event(row: dict[str, Any]) -> AuditEvent:
    return AuditEvent(
        event_id="",
        seq=row["seq"],
        ts_us=row["ts_us"],
        kind=row["kind"],
        contract=row["contract"],
        source=row["source"],
        schema=SCHEMA,
        message_id=row["message_id"],
        state=row["state"],
        lease=row["lease"],
        detail=_detail(row["detail"]),
    )


def _detail(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}
