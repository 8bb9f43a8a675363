"""Which rows of a table share a file.

Changing one row rewrites its whole file. Rows that may still change therefore get files of their own, and the
files of all other rows are seldom written again.
"""

from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.tables import Tables, rows_of
from postroom.pipeline.times import DAY_US, HOUR_US, HOURS_A_DAY

if TYPE_CHECKING:
    from pyspark.sql import Column

FILE_GROUP: Final = "file_group"
"""The column that names the group. It decides on the file and is not stored."""
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


def file_group(tables: Tables, groups: FileGroups) -> "Column":
    """The group of a row, by the time and the rate of the events in `silver_events`."""
    return group_at(newest_us(tables), groups, hourly=is_dense(tables))


def group_at(now_us: int, groups: FileGroups, *, hourly: bool) -> "Column":
    """`open`, `dead`, an hour of the day if `hourly`, or `day`.

    Rows that may reopen (`dead`) are few. A group of their own keeps a replay from rewriting many other rows.
    """
    last_us = F.greatest(groups.ended_us, groups.last_us)
    quiet_us = F.lit(now_us) - last_us
    is_open = (quiet_us <= IDLE_US) & (groups.ended_us.isNull() | (quiet_us <= GRACE_US))
    group = F.when(is_open, "open")
    if groups.may_reopen is not None:
        group = group.when(groups.may_reopen, "dead")
    hour = F.pmod(F.floor(last_us / HOUR_US), F.lit(HOURS_A_DAY)).cast("string")
    return group.otherwise(F.coalesce(hour, F.lit("day")) if hourly else F.lit("day"))


def is_dense(tables: Tables) -> bool:
    """Whether an hour of events fills files of its own. Otherwise hourly files would be many and tiny."""
    files = tables.files("silver_events")
    oldest_us = min((file.low.get("ts_us") or 0 for file in files), default=0)
    hours = 1 + (newest_us(tables) - oldest_us) // HOUR_US
    return rows_of(files) >= hours * HOURLY_EVENTS_MIN


def newest_us(tables: Tables) -> int:
    """The time of the newest event."""
    return max((file.high.get("ts_us") or 0 for file in tables.files("silver_events")), default=0)
