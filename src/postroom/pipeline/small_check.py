"""The history checker for small tables: `core.history_checker` over their events, without Spark.

Rule: it reports exactly what `check` reports for the same tables. Large tables, and tables from which
`retain` has deleted messages, are left to Spark.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from postroom.core.events import SCHEMA, AuditEvent, event_id
from postroom.core.history_checker import History, Violation
from postroom.core.message_checker import LEASED, MICROS_PER_S
from postroom.pipeline.check import HORIZON_S, RULES, SAMPLES_MAX, CheckResult, ViolationSample
from postroom.pipeline.database import Database
from postroom.pipeline.retention.deleted_numbers import TABLE as DELETED_NUMBERS
from postroom.pipeline.schema import NOT_IN_LINE
from postroom.pipeline.session import table_errors

if TYPE_CHECKING:
    from postroom.pipeline.tables import Tables

SMALL_EVENTS: Final = 200_000  # a few seconds of work; Spark checks larger tables
_COLUMNS: Final = ("source", "seq", "ts_us", "kind", "contract", "message_id", "state", "lease", "detail")


def is_small(tables: "Tables") -> bool:
    """Whether these tables are checked here."""
    with table_errors("bronze_events"):
        return not tables.exists(DELETED_NUMBERS) and tables.row_count("bronze_events") <= SMALL_EVENTS


def check_small(tables: "Tables", *, horizon_s: float = HORIZON_S) -> CheckResult:
    """Check the history in a folder of tables."""
    database = Database(tables, ("bronze_events", "silver_events"))
    history = History()
    events = accepted = 0
    for event in _events(database):
        events += 1
        accepted += event.kind == "created"
        history.add(event)
    contracts = {source: contract for source, (contract, _) in history.sources().items()}
    verdict = history.verdict(horizon_us=round(horizon_s * MICROS_PER_S))
    checked = [one for one in verdict.violations if _is_checked(one, contracts)]
    found = [ViolationSample(one.rule, one.message_id, tuple(one.event_ids), one.sentence) for one in checked]
    return _result([*found, *_doubled(database, tables)], events, accepted)


def _is_checked(violation: Violation, contracts: dict[str, Any]) -> bool:
    """Numbers are checked for every source, lives for stores."""
    source = violation.event_ids[0].rpartition("#")[0]
    return violation.rule == "gap" or (violation.rule in RULES and contracts.get(source) in LEASED)


def _events(database: Database) -> Iterator[AuditEvent]:
    """The events of silver by source and number, each number once."""
    query = f"SELECT {', '.join(_COLUMNS)} FROM silver_events ORDER BY source, seq, ts_us"  # noqa: S608 - constants
    before = ("", 0)
    for row in database.each(query):
        if before != (before := (row["source"], row["seq"])):
            yield _event(row)


def _event(row: dict[str, Any]) -> AuditEvent:
    fields = {name: value for name, value in row.items() if value is not None and name != "detail"}
    detail = _detail(row["detail"])
    return AuditEvent(event_id=event_id(row["source"], row["seq"]), schema=SCHEMA, detail=detail, **fields)


def _detail(text: str | None) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _doubled(database: Database, tables: "Tables") -> Iterator[ViolationSample]:
    """Numbers with two different lines. The same line twice is no violation."""
    wire = ", ".join(name for name in tables.schema("bronze_events").names if name not in NOT_IN_LINE)
    rows = database.rows(
        f"""SELECT source, seq, coalesce(min(message_id), '') AS message_id FROM bronze_events
            GROUP BY source, seq HAVING min(hash({wire})) <> max(hash({wire}))"""  # noqa: S608 - our own names
    )
    for row in rows:
        name = event_id(row["source"], row["seq"])
        yield ViolationSample("gap", row["message_id"], (name,), f"{name} stands for two different events")


def _result(found: list[ViolationSample], events: int, accepted: int) -> CheckResult:
    by_rule = {rule: sorted(one for one in found if one.rule == rule) for rule in RULES}
    counts = {rule: len(samples) for rule, samples in by_rule.items() if samples}
    samples = [one for rule in sorted(by_rule) for one in by_rule[rule][:SAMPLES_MAX]]
    return CheckResult(counts, samples, events, accepted)
