"""How a gold table tells the jobs what it is made of, and how it follows a change of that."""

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from postroom.pipeline.file_groups import FileGroups


class Sums(NamedTuple):
    """Of a table whose rows can be added up: what came is added to what there was, what went is taken off."""

    keys: tuple[str, ...]
    sums: tuple[str, ...]
    decimals: tuple[tuple[str, str], ...] = ()
    """Sums that have to be given back their type: Spark makes it wider each time that it adds."""
    smallest: tuple[str, ...] = ()
    largest: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    """Sorted arrays of what differs."""
    shares: tuple[tuple[str, str, str], ...] = ()
    """A name, and the two sums that it is a quotient of."""
    whole: tuple[str, ...] = ()
    """A row depends on the others of its day that have the same value in the first of these columns of the
    input, which are all that it is made of."""
    moment: str | None = None
    """A column of the input whose hour is `hour_us` of the table: files of other hours stay as they are."""
    each: "Callable[[DataFrame], DataFrame] | None" = None
    """What a row of the input adds: it is added up together with what there was, in one shuffle. None: rows
    depend on each other, or there are sets of them, which have to become few beforehand."""
    scattered: bool = False
    """Whether a change is about few rows of a large table, here and there: their files are looked for."""

    @property
    def is_reversible(self) -> bool:
        """Whether something can be taken off: of a minimum nobody knows what was next to it."""
        return not (self.smallest or self.largest or self.sets)

    def negated(self, rows: "DataFrame") -> "DataFrame":
        return rows.withColumns({name: -F.col(name) for name in self.sums})

    def summed(self, rows: "DataFrame") -> "DataFrame":
        """One row a key, with the types that the rows have. Where nothing is left is no row.

        The rows are not asked for their columns: a declared pipeline may ask nothing.
        """
        summed = rows.groupBy(*self.keys).agg(
            *[self._sum(name).alias(name) for name in self.sums],
            *[F.min(name).alias(name) for name in self.smallest],
            *[F.max(name).alias(name) for name in self.largest],
            *[_joined(name).alias(name) for name in self.sets],
        )
        shares = [F.try_divide(part, of).alias(name) for name, part, of in self.shares]
        return summed.where(self.is_nonzero()).select("*", *shares)

    def _sum(self, name: str) -> "Column":
        kind = dict(self.decimals).get(name)
        return F.sum(name) if kind is None else F.sum(name).cast(kind)

    def is_nonzero(self) -> "Column":
        """Whether something of a row is left after all that was taken off."""
        return reduce(or_, [F.col(name) != 0 for name in self.sums])


def _joined(name: str) -> "Column":
    return F.sort_array(F.array_distinct(F.flatten(F.collect_list(name))))


class Hours(NamedTuple):
    """Of a table whose rows cannot be added up: hours that changed are made anew from all of their rows."""

    moment: "Callable[[], Column]"
    """When a row of the input was, between its `first_us` and its `last_us`. The table has its `hour_us`."""
    told: tuple[str, ...]
    """What of an input matters, a key of it included: a row that is the same in this has not changed."""


class Running(NamedTuple):
    """Of a table that counts on from day to day: what changed counts for its day and all that follow."""

    keys: tuple[str, ...]
    sums: tuple[str, ...]
    """Of the input, for each key: what a day begins with is what they come to on all days before."""


class GoldTable(NamedTuple):
    """A table that is derived from others, and how it follows them."""

    build: "Callable[..., DataFrame]"
    """Pure. It gets one DataFrame for each name of `inputs`, in that order."""
    inputs: tuple[str, ...]
    """Silver tables, or gold tables that are listed before it."""
    partition_by: tuple[str, ...] = ()
    change: Sums | Hours | Running | None = None
    """Only for tables that are partitioned by the days of their input. None: the table is made anew.

    A second input can only be `silver_messages`, for the names of those that events are about.
    """
    file_groups: "Callable[[], FileGroups] | None" = None
    """None: the rows of a day share files."""
