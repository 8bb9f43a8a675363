"""Which rows of a table share a file.

Changing one row rewrites its whole file. Rows that may still change therefore get files of their own, and the
files of all other rows are seldom written again.
"""

from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.tables import Split, Tables
from postroom.pipeline.times import DAY_US, HOUR_US, HOURS_A_DAY

if TYPE_CHECKING:
    from pyspark.sql import Column

EVENTS: Final = "silver_events"
OPEN, DEAD, HOURS_FROM = 0, 1, 2  # the numbers of the groups
GRACE_US: Final = HOUR_US // 4  # a row stays in the open group this long after its end
IDLE_US: Final = DAY_US  # a message that never ends, as on a bus, leaves the open group after this
HOURLY_EVENTS_MIN: Final = 50_000  # events an hour from which on a group holds an hour instead of a day


class FileGroups(NamedTuple):
    """The columns that decide on the group of a row."""

    ended_us: "Column"
    """When the subject of the row ended; NULL while it is open."""
    last_us: str
    """When something else was last recorded about it."""
    may_reopen: "Column | None" = None
    """Whether the row may change even after its end."""


def file_group(tables: Tables, groups: FileGroups) -> Split:
    """The groups of rows, by the time and the rate of the events in `silver_events`."""
    hourly = is_dense(tables)
    return Split(
        group_at(newest_us(tables), groups, hourly=hourly), HOURS_FROM + (HOURS_A_DAY if hourly else 1)
    )


def group_at(now_us: int, groups: FileGroups, *, hourly: bool) -> "Column":
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
