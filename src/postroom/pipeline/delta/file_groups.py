"""Which rows of a table share a file.

Changing one row rewrites its whole file. Rows that may still change therefore get files of their own, and the
files of all other rows are seldom written again.
"""

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.delta.delta_log import DataFile
from postroom.pipeline.delta.tables import Split, Tables
from postroom.pipeline.times import DAY_US, HOUR_US, HOURS_A_DAY

EVENTS: Final = "silver_events"
OPEN, DEAD, HOURS_FROM = 0, 1, 2  # the numbers of the groups
GRACE_US: Final = HOUR_US // 4  # a row stays in the open group this long after its end
IDLE_US: Final = DAY_US  # a message that never ends, as on a bus, leaves the open group after this
TASK_ROWS: Final = 250_000  # rows that one task writes
GROUP_TASKS_MAX: Final = 64  # of one group
HOURLY_EVENTS_MIN: Final = 50_000  # events an hour; above, a group holds an hour instead of a day


class FileGroups(NamedTuple):
    """The columns that decide on the group of a row."""

    ended_us: Column
    """When the subject of the row ended; NULL while it is open."""
    last_us: str
    """When something else was last recorded about it."""
    may_reopen: Column | None = None
    """Whether the row may change even after its end."""
    by_hour_only: bool = False
    """Whether rows share the files of a day if there are too few for files by the hour."""


def file_group(
    tables: Tables, groups: FileGroups, hours: Collection[int] | None = None, rows: int = 0
) -> Split | None:
    """The groups of rows, by the time and the rate of the events in `silver_events`; None for a single one.

    `hours` are the starts of the hours in which rows have changed, as far as they are known; `rows` is about
    the number of rows.
    """
    hourly = is_dense(tables)
    if groups.by_hour_only and not hourly:
        return None
    if hours is None and hourly:
        first_us, last_us = tables.listing(EVENTS).extent("ts_us") or (0, DAY_US)
        hours = range(max(first_us, last_us - DAY_US), last_us + HOUR_US, HOUR_US)
    rest = {hour // HOUR_US % HOURS_A_DAY for hour in hours or ()} if hourly else {0}
    expected = [OPEN, DEAD, *(HOURS_FROM + hour for hour in sorted(rest))]
    return Split(
        group_at(newest_us(tables), groups, hourly=hourly),
        expected,
        first_tasks=min(1 + rows // TASK_ROWS, GROUP_TASKS_MAX),
        tasks=min(1 + rows // TASK_ROWS // len(expected), GROUP_TASKS_MAX),
    )


def hours_of(files: Iterable[DataFile], column: str) -> set[int] | None:
    """The hours from the lowest to the highest value of each file; None when these are not known or many."""
    hours: set[int] = set()
    for file in files:
        low, high = file.low.get(column), file.high.get(column)
        if low is None or high is None or high - low > DAY_US:
            return None
        hours.update(range(low - low % HOUR_US, high + 1, HOUR_US))
    return hours


def group_at(now_us: int, groups: FileGroups, *, hourly: bool) -> Column:
    """`OPEN`, `DEAD`, or a group for the rest of a day; if `hourly`, one for each hour.

    Rows that may reopen are few. A group of their own keeps a replay from rewriting many other rows.
    """
    last_us = F.greatest(groups.ended_us, groups.last_us)
    quiet_us = F.lit(now_us) - last_us
    is_open = (quiet_us <= IDLE_US) & (groups.ended_us.isNull() | (quiet_us <= GRACE_US))
    group = F.when(is_open, OPEN)
    if groups.may_reopen is not None:
        group = group.when(groups.may_reopen, DEAD)
    hour = F.pmod(F.floor(last_us / HOUR_US), F.lit(HOURS_A_DAY)).cast("int")
    rest = F.lit(HOURS_FROM)
    return group.otherwise(rest + F.coalesce(hour, F.lit(0)) if hourly else rest)


def is_dense(tables: Tables) -> bool:
    """Whether an hour of events fills files of its own. Otherwise hourly files would be many and tiny."""
    if not tables.exists(EVENTS):
        return False
    files = tables.listing(EVENTS)
    oldest_us, latest_us = files.extent("ts_us") or (0, newest_us(tables))
    return files.rows >= (1 + (latest_us - oldest_us) // HOUR_US) * HOURLY_EVENTS_MIN


def newest_us(tables: Tables) -> int:
    """The time of the newest event."""
    return int(tables.listing(EVENTS).newest("ts_us") or 0) if tables.exists(EVENTS) else 0
