"""What a gold table declares: its transform, its inputs, and how it follows a change of them."""

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.delta.file_groups import FileGroups


class Sums(NamedTuple):
    """For a table of sums: added input rows are added to it, and removed input rows are subtracted."""

    keys: tuple[str, ...]
    sums: tuple[str, ...]
    decimals: tuple[tuple[str, str], ...] = ()
    """Sums and the types to cast them to: Spark widens a decimal type with each sum."""
    smallest: tuple[str, ...] = ()
    largest: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    """Sorted arrays of distinct values."""
    shares: tuple[tuple[str, str, str], ...] = ()
    """Quotients: a name, the numerator and the denominator."""
    whole: tuple[str, ...] = ()
    """The columns of the input that rows are computed from. An input row depends on the others of its day
    with the same value in the first of these columns."""
    moment: str = ""
    """The column of the table with the time of a row. Files of other hours stay."""
    each: Callable[[DataFrame], DataFrame] | None = None
    """The addends of input rows, which are summed together with the existing rows in one shuffle. None:
    `build` aggregates them first, because rows depend on each other, or their sets have to become small."""
    scattered: bool = False
    """Whether a change affects few rows in many places of a large table: only their files are rewritten."""

    @property
    def is_narrow(self) -> bool:
        """Whether some files of a day can stay."""
        return bool(self.moment) or self.scattered

    @property
    def is_reversible(self) -> bool:
        """Whether rows can be subtracted. From a minimum, a maximum or a set they cannot."""
        return not (self.smallest or self.largest or self.sets)

    def negated(self, rows: DataFrame) -> DataFrame:
        return rows.withColumns({name: -F.col(name) for name in self.sums})

    def summed(self, rows: DataFrame) -> DataFrame:
        """One row for each key, with the types of the rows. A key whose sums are all 0 has no row.

        `rows.columns` is not used: a declarative pipeline may not ask for it.
        """
        kinds = dict(self.decimals)
        sums = {name: F.sum(name) for name in self.sums}
        sums |= {name: total.cast(kinds[name]) for name, total in sums.items() if name in kinds}
        unions = {name: F.sort_array(F.array_distinct(F.flatten(F.collect_list(name)))) for name in self.sets}
        summed = rows.groupBy(*self.keys).agg(
            *[total.alias(name) for name, total in sums.items()],
            *[F.min(name).alias(name) for name in self.smallest],
            *[F.max(name).alias(name) for name in self.largest],
            *[union.alias(name) for name, union in unions.items()],
        )
        shares = [F.try_divide(part, of).alias(name) for name, part, of in self.shares]
        is_nonzero = reduce(or_, [F.col(name) != 0 for name in self.sums])
        return summed.where(is_nonzero).select("*", *shares)


class Hours(NamedTuple):
    """For a table that cannot be summed: changed hours are rebuilt from all of their input rows."""

    moment: Callable[[], Column]
    """The time of an input row, between its `first_us` and `last_us`. Its hour is `hour_us` of the table."""
    compared: tuple[str, ...]
    """The columns of the input that matter, including a key. A row with the same values has not changed."""


class Running(NamedTuple):
    """A running total. A change affects its hour and all later hours, until later changes cancel it out.

    `build` gets the totals before its first row, and the days of the table. On each day it begins with a row
    for every key whose total is not 0, so that no earlier day has to be read.
    """

    keys: tuple[str, ...]
    sums: tuple[str, str]
    """The columns of the input that are added to the total and subtracted from it."""
    total: str
    moment: str
    """The time of a row, in the input and in the table."""


class GoldTable(NamedTuple):
    """A table that is computed from others, and how it follows their changes."""

    build: Callable[..., DataFrame]
    """Pure. It gets one DataFrame for each input, in that order."""
    inputs: tuple[str, ...]
    """Silver tables, or gold tables that are declared before it."""
    partition_by: tuple[str, ...] = ()
    change: Sums | Hours | Running | None = None
    """Only for tables that are partitioned by the day of their input. None: the table is rebuilt.

    A second input can only be `silver_messages`: it supplies the type and the organization of a message.
    """
    file_groups: Callable[[], FileGroups] | None = None
    """None: the rows of a day share files."""
