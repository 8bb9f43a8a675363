"""Tables whose rows are states: new input rows are merged into the rows of their keys."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.pipeline.delta import file_index
from postroom.pipeline.delta.delta_log import DataFile
from postroom.pipeline.delta.file_groups import FileGroups
from postroom.pipeline.delta.joins import with_join_hint
from postroom.pipeline.follow.columns import hour_us, named
from postroom.pipeline.follow.recompute import HOURS_MAX, files_of_hours, hours_in
from postroom.pipeline.follow.refresh import InputChange, Refresh, Replacement, Table, Way


@dataclass(frozen=True)
class Fold(Way):
    """Fold the new rows into the rows of their keys. Only files that hold one of the keys are rewritten."""

    keys: Callable[[DataFrame], DataFrame]
    """The keys of the table's rows that input rows change."""
    fold: Callable[..., DataFrame]
    """The rows from new input rows and existing rows, which may be None."""
    observes_renames: bool = False
    """Whether `fold` takes an `Observation` (`seen`), and counts in it the keys that are `renamed`."""

    def follow(self, refresh: Refresh) -> Replacement | None:
        new = refresh.change.added
        if not new:
            return None
        rows = refresh.read(refresh.change.source, new)
        ids = file_index.lookup_of(self.keys(rows), new, repeat=True)
        touched = file_index.files_with_ids(refresh.spark, refresh.tables, refresh.name, ids)
        before = refresh.read(refresh.name, touched) if touched else None
        refresh.expect(new)
        fold = self.fold
        if self.observes_renames:
            refresh.seen = Observation()
            fold = partial(fold, seen=refresh.seen)
        return Replacement(refresh.named(fold(rows, before)), touched)


@dataclass(frozen=True)
class Sums(Way):
    """Added input rows are added to the sums, and removed ones subtracted. Other hours keep their files."""

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

    def table(
        self, *inputs: str, grain: str = "", file_groups: Callable[[], FileGroups] | None = None
    ) -> Table:
        """The table of these sums, by `each`."""
        return Table(self.built, inputs, ("day",), self, self.moment, file_groups, grain)

    def built(self, rows: DataFrame, messages: DataFrame | None = None) -> DataFrame:
        """All sums of input rows, which get the names of their `messages` if these are given."""
        assert self.each is not None  # noqa: S101 - `table` is for those that have it
        return self.summed(self.each(rows if messages is None else named(rows, messages)))

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

    def follow(self, refresh: Refresh) -> Replacement | None:
        change = refresh.change
        is_reversible = not (self.smallest or self.largest or self.sets)
        if not refresh.has_removed_files() or (change.removed and not is_reversible):
            return refresh.built_days()
        each = self.each or refresh.table.build
        added, removed = self._changed_rows(refresh)
        news = each(added)
        if removed is not None:
            minus = each(removed).withColumns({name: -F.col(name) for name in self.sums})
            news = news.unionByName(minus)
        replaced = refresh.in_days(refresh.name, change.days)
        if (self.moment or self.scattered) and len(replaced) > len(change.days):  # some of a day may stay
            news = refresh.kept(self.summed(news))
            found = self._files_of_sums(refresh, news, replaced)
            if found is None:
                return None
            replaced = found
        own = refresh.read(refresh.name, replaced).select(*news.columns)  # others may have added columns
        return Replacement(self.summed(own.unionByName(news)), replaced)

    def _changed_rows(self, refresh: Refresh) -> tuple[DataFrame, DataFrame | None]:
        """The added and the removed rows of the input; None when no row was removed."""
        change = refresh.change
        added, removed = refresh.named(refresh.read(change.source, change.added)), None
        if change.removed:
            removed = refresh.named(refresh.read(change.source, change.removed))
        if not self.whole:
            return added, removed
        moved = added if removed is None else added.unionByName(removed)
        others = refresh.kept(_others(refresh, change, moved, self.whole))
        # Rows of other groups, after a hash collision, cancel out.
        added = added.select(*self.whole).unionByName(others)
        return added, others if removed is None else removed.select(*self.whole).unionByName(others)

    def _files_of_sums(self, refresh: Refresh, news: DataFrame, own: list[DataFile]) -> list[DataFile] | None:
        """The files that can hold the rows of changed sums; None when no sum has changed."""
        if self.scattered:
            few = refresh.change.rows <= file_index.BROADCAST_IDS_MAX
            key = F.xxhash64(*self.keys)
            # By a hash: on a collision, which is very rare, a file too many is rewritten.
            hashes = with_join_hint(news.select(key.alias("changed")), few=few)

            def among(rows: DataFrame) -> DataFrame:
                return rows.join(hashes, key == F.col("changed"), "left_semi")

            return file_index.files_with_matches(refresh.spark, refresh.tables, refresh.name, own, among)
        hours = hours_in(news.select(hour_us(F.col(self.moment)).alias("hour_us")).distinct())
        if not hours:
            return None
        if len(hours) > HOURS_MAX:
            return own
        refresh.hours = hours
        return files_of_hours(own, self.moment, hours)


def _others(refresh: Refresh, change: InputChange, moved: DataFrame, columns: tuple[str, ...]) -> DataFrame:
    """The unchanged rows of the groups that changed."""
    column = columns[0]
    ids = moved.where(F.col(column).isNotNull()).select(column)
    lookup = file_index.lookup_of(ids, [*change.added, *change.removed], repeat=True)
    known = {file.path for file in change.added}
    files = [file for file in refresh.in_days(change.source, change.days) if file.path not in known]
    files = file_index.narrowed([file for file in files if lookup.may_be_in(file)], lookup)
    rows = refresh.read(change.source, files)
    return lookup.among(rows.select(*columns))
