"""What the template draws, as plain values: sheets with a plot, a table or a ranking."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from markupsafe import Markup

from postroom.pipeline.report.facts import Times
from postroom.pipeline.report.plots import COLOURS, Series
from postroom.pipeline.report.words import moment

CALM: Final = (0, 5, 3, 2, 4, 6, 7, 1)
LOUD: Final = (1, 2, 4, 0, 3, 6, 5, 7)
"""Colours in the order of use. Red comes first for failures."""


class Table(NamedTuple):
    """A table, collapsed by default."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    name: str = "The numbers"

    def is_number(self, n: int) -> bool:
        """Whether a column is right-aligned."""
        return n > 0 and all(row[n][:1] in "$-0123456789" for row in self.rows)


class Bar(NamedTuple):
    """One row of a ranking."""

    name: str
    percent: float
    """Of the largest value."""
    text: str


class Ranking(NamedTuple):
    """Names with bars, the largest first."""

    name: str
    unit: str
    bars: Sequence[Bar]
    colour: int = 0


class Sheet(NamedTuple):
    """A framed part of a section."""

    title: str
    plot: Markup | None = None
    legend: Sequence[tuple[str, str]] = ()
    """CSS classes and what they mean."""
    table: Table | None = None
    ranking: Ranking | None = None
    style: str = ""


def ranking(name: str, unit: str, rows: Sequence[tuple[str, float, str]], colour: int) -> Ranking:
    """A ranking of names by their values. Each row has a text for its value."""
    top = max((value for _, value, _ in rows), default=0) or 1
    bars = [Bar(label, 100 * value / top, text) for label, value, text in rows]
    return Ranking(name, unit, bars, colour)


def legend(series: Sequence[Series]) -> list[tuple[str, str]]:
    return [(one.style, one.name) for one in series]


def over_time(parts: dict[str, Times], colours: Sequence[int] = CALM) -> list[Series]:
    """Series by size. The parts beyond the number of colours are joined into one."""
    ranked = sorted(parts.items(), key=lambda part: (-sum(part[1].values()), part[0]))
    kept, rest = ranked[: COLOURS - 1], ranked[COLOURS - 1 :]
    if rest:
        others: Times = {}
        for _, times in rest:
            for at, n in times.items():
                others[at] = others.get(at, 0) + n
        kept.append((f"{len(rest)} others", others))
    return [
        Series(f"c{colours[n]}", name, {at: float(value) for at, value in times.items()})
        for n, (name, times) in enumerate(kept)
    ]


def time_table(series: Sequence[Series], step_us: int) -> Table:
    times = sorted({at for one in series for at in one.values})
    rows = [[moment(at, step_us), *(f"{one.values.get(at, 0):,.0f}" for one in series)] for at in times]
    return Table(["from", *(one.name for one in series)], rows)
