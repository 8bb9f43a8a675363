"""Plots as inline SVG.

Rule 1: a plot has a title and a sentence about its content. Each mark has a tooltip.
Rule 2: colours are CSS classes. The style sheet defines them for light and dark mode.
Rule 3: the size of a plot is bounded: callers pass at most `COLUMNS_MAX` columns.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from postroom.pipeline.report.words import TENTH_US, clock, day, esc, label, moment
from postroom.pipeline.times import DAY_US, HOUR_US, MICROS_PER_S, MINUTE_US

COLUMNS_MAX: Final = 200  # of a plot over time
CALM: Final = (0, 5, 3, 2, 4, 6, 7, 1)  # colours in the order of use
WIDTH: Final = 1062  # pixels of a sheet; two narrow sheets fit side by side
HALF_WIDTH: Final = 501
SMALLEST: Final = 0.8  # the minimum scale, in a narrow window
LEFT: Final = 58
RIGHT: Final = 12
TOP: Final = 14
BOTTOM: Final = 24
TICKS_MAX: Final = 7
TICK_CHAR: Final = 6.2  # pixels of a character of a label
TICK_GAP: Final = 10  # pixels between two labels
GRID_LINES: Final = 4
COLOURS: Final = 8  # classes c0 to c7
LADDER: Final = (
    1, 10, 100, 1_000, 10_000, 100_000, MICROS_PER_S, 10 * MICROS_PER_S, MINUTE_US, 10 * MINUTE_US, HOUR_US,
    10 * HOUR_US, 100 * HOUR_US, 1_000 * HOUR_US,
)  # fmt: skip
"""Round durations in microseconds for the ticks of a logarithmic scale."""

Words = Callable[[float], str]


class PlotFrame(NamedTuple):
    """Maps times and values to the coordinates of a plot."""

    width: int
    height: int
    since_us: int
    until_us: int
    top: float
    """The largest value."""
    low: float = 0.0
    """The smallest value. Above 0 the scale is logarithmic."""

    def x(self, us: float) -> float:
        span = max(1, self.until_us - self.since_us)
        return LEFT + (self.width - LEFT - RIGHT) * (us - self.since_us) / span

    def y(self, value: float) -> float:
        if self.low > 0:
            part = math.log(max(value, self.low) / self.low) / math.log(self.top / self.low)
        else:
            part = max(0.0, value) / self.top
        return self.height - BOTTOM - (self.height - TOP - BOTTOM) * min(1.0, part)

    @property
    def floor(self) -> float:
        return self.height - BOTTOM


class Period(NamedTuple):
    """The time range of a plot, and the width of a column."""

    since_us: int
    until_us: int
    step_us: int


class Series(NamedTuple):
    """One line: its CSS class, its name, and its values by column."""

    style: str
    name: str
    values: dict[int, float]


class Drawing(str):
    """Markup whose parts are escaped, so the template inserts it as it is."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


def svg(width: int, height: float, title: str, said: str, body: str, style: str = "plot") -> Drawing:
    """A drawing with its accessible label.

    It is never enlarged and hardly reduced, so that text has the same size everywhere; its sheet scrolls. In
    a narrow window the page scales a wide plot to fit, and enlarges its text.
    """
    size = f"min-width:{SMALLEST * width:.0f}px;max-width:{width}px"
    return Drawing(
        f'<svg class="{style}" viewBox="0 0 {width} {height:.0f}" style="{size}" role="img" '
        f'aria-label="{esc(title)}: {esc(said)}">{body}</svg>'
    )


def hint(text: str) -> str:
    """The tooltip of a mark."""
    return f"<title>{esc(text)}</title>"


def _text(style: str, x: float, y: float, text: str, anchor: str = "end") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{esc(text)}</text>'


# ---- axes ---------------------------------------------------------------------------------------------


def _round_up(value: float) -> float:
    """The next round number for the end of a scale. A quarter of it is round too."""
    for top in (4, 8):
        if value <= top:
            return top
    power = 1.0
    while True:
        for top in (12, 16, 20, 24, 32, 40, 60, 80, 100):
            if value <= top * power:
                return top * power
        power *= 10


def _time_ticks(frame: PlotFrame) -> Iterator[tuple[int, str]]:
    """Round times and their labels, which do not overlap or exceed the plot."""
    since_us, until_us = frame.since_us, frame.until_us
    steps = [
        *(tenths * TENTH_US for tenths in (1, 2, 5)),
        *(seconds * MICROS_PER_S for seconds in (1, 2, 5, 10, 15, 30)),
        *(minutes * MINUTE_US for minutes in (1, 2, 5, 10, 15, 30)),
        *(hours * HOUR_US for hours in (1, 2, 3, 6, 12)),
        *(days * DAY_US for days in (1, 2, 7, 14, 28, 91, 365)),
    ]

    def has_room(step: int) -> bool:
        """Whether ticks with this step are few enough, and have room for their labels."""
        apart = frame.x(since_us + step) - LEFT
        wide = TICK_CHAR * len(_tick_name(step, step)) + TICK_GAP
        return (until_us - since_us) / step <= TICKS_MAX and apart >= wide

    step = next(filter(has_room, steps), steps[-1])
    tick = -(-since_us // step) * step
    while tick <= until_us:
        name = _tick_name(tick, step)
        if frame.x(tick) + TICK_CHAR * len(name) / 2 <= frame.width:
            yield tick, name
        tick += step


def _tick_name(tick: int, step: int) -> str:
    return day(tick) if tick % DAY_US == 0 else clock(tick, step)


def _axes(frame: PlotFrame, words: Words) -> str:
    parts = []
    values = [frame.top * n / GRID_LINES for n in range(GRID_LINES + 1)]
    if frame.low > 0:
        values = [float(tick) for tick in LADDER if frame.low <= tick <= frame.top]
    for value in values:
        y = frame.y(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{frame.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            + _text("tick", LEFT - 8, y + 3.5, words(value))
        )
    for tick, name in _time_ticks(frame):
        x = frame.x(tick)
        parts.append(
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.floor}" y2="{frame.floor + 4}"/>'
            + _text("tick", x, frame.height - 6, name, "middle")
        )
    return "".join(parts)


def _columns(frame: PlotFrame, step_us: int, hints: dict[int, str]) -> str:
    """Invisible columns with the tooltips of each time."""
    wide = frame.x(frame.since_us + step_us) - LEFT
    return "".join(
        f'<rect class="hit" x="{frame.x(at):.1f}" y="{TOP}" width="{wide:.2f}" '
        f'height="{frame.floor - TOP}">{hint(text)}</rect>'
        for at, text in sorted(hints.items())
    )


# ---- lines --------------------------------------------------------------------------------------------


def lines(
    series: Sequence[Series],
    *,
    title: str,
    said: str,
    words: Words,
    over: Period,
    target: float | None = None,
    width: int = HALF_WIDTH,
    height: int = 220,
) -> Drawing:
    """Lines over time on a logarithmic scale, with a dashed line for the target."""
    values = [value for one in series for value in one.values.values() if value > 0]
    if target is not None:
        values.append(target)
    smallest, largest = min(values, default=1), max(values, default=1)
    low = max((tick for tick in LADDER if tick <= smallest), default=LADDER[0])
    top = min((tick for tick in LADDER if tick >= largest and tick > low), default=LADDER[-1])
    frame = PlotFrame(width, height, over.since_us, over.until_us, top, low)
    body = [_axes(frame, words)]
    body += [_line(frame, one, over.step_us) for one in series]
    if target is not None:
        y = frame.y(target)
        body.append(
            f'<line class="target" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="target-name" x="{LEFT + 6}" y="{y - 5:.1f}">'
            f"target {esc(words(target))}</text>"
        )
    body.append(_columns(frame, over.step_us, _tooltips(series, words, over.step_us)))
    return svg(width, height, title, said, "".join(body))


def _tooltips(series: Sequence[Series], words: Words, step_us: int) -> dict[int, str]:
    times = sorted({at for one in series for at in one.values})
    return {
        at: "\n".join(
            [
                f"{moment(at, step_us)} UTC",
                *(f"{one.name}: {words(one.values[at])}" for one in series if at in one.values),
            ]
        )
        for at in times
    }


def _line(frame: PlotFrame, series: Series, step_us: int) -> str:
    """A line with breaks where there is no value. A single value is a dot."""
    points = [(at, frame.x(at + step_us / 2), frame.y(value)) for at, value in sorted(series.values.items())]
    path, dots, was_joined = [], [], False
    for n, (at, x, y) in enumerate(points):
        is_joined = n + 1 < len(points) and points[n + 1][0] - at <= 2 * step_us  # to the next one
        path.append(f"{'L' if was_joined else 'M'}{x:.1f} {y:.1f}")
        if not was_joined and not is_joined:
            dots.append(f'<circle class="dot {series.style}" cx="{x:.1f}" cy="{y:.1f}" r="1.6"/>')
        was_joined = is_joined
    return f'<path class="line {series.style}" d="{"".join(path)}"/>{"".join(dots)}'


# ---- bars over time --------------------------------------------------------------------------


def stacked(
    series: Sequence[Series],
    *,
    title: str,
    said: str,
    words: Words,
    over: Period,
    width: int = WIDTH,
    height: int = 280,
) -> Drawing:
    """Stacked bars over time."""
    times = sorted({at for one in series for at in one.values})
    sums = {at: sum(one.values.get(at, 0) for one in series) for at in times}
    frame = PlotFrame(width, height, over.since_us, over.until_us, _round_up(max(sums.values(), default=1)))
    wide = max(0.6, frame.x(over.since_us + over.step_us) - LEFT - 0.8)
    body = [_axes(frame, words)]
    for at in times:
        y = frame.floor
        for one in series:
            value = one.values.get(at, 0)
            if value:
                tall = frame.floor - frame.y(value)
                y -= tall
                body.append(
                    f'<rect class="fill {one.style}" x="{frame.x(at) + 0.4:.1f}" y="{y:.2f}" '
                    f'width="{wide:.2f}" height="{tall:.2f}"/>'
                )
    body.append(
        _columns(frame, over.step_us, _tooltips([one for one in series if one.values], words, over.step_us))
    )
    return svg(width, height, title, said, "".join(body), "plot wide")


def spark(values: Sequence[float], *, title: str, said: str, width: int = 160, height: int = 34) -> Drawing:
    """A small row of bars without axes."""
    top = max(values, default=0) or 1
    step = width / max(1, len(values))
    bars = "".join(
        f'<rect class="fill spark" x="{n * step:.1f}" y="{height - 2 - (height - 4) * value / top:.1f}" '
        f'width="{max(0.8, step - 1):.1f}" height="{2 + (height - 4) * value / top:.1f}"/>'
        for n, value in enumerate(values)
        if value
    )
    base = f'<line class="mark" x1="0" x2="{width}" y1="{height - 0.5}" y2="{height - 0.5}"/>'
    return svg(width, height, title, said, base + bars, "spark-line")


# ---- tables of cells -----------------------------------------------------------------------------------


class Cell(NamedTuple):
    """One cell: its CSS class, its opacity from 0 to 1, and its tooltip."""

    style: str
    strength: float
    text: str


def _cell(cell: Cell, x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect class="cell {cell.style}" fill-opacity="{cell.strength:.2f}" x="{x:.1f}" y="{y}" '
        f'width="{width:.2f}" height="{height}" rx="2">{hint(cell.text)}</rect>'
    )


def strip(
    rows: Sequence[tuple[str, dict[int, Cell]]],
    *,
    title: str,
    said: str,
    over: Period,
    width: int = WIDTH,
    row_height: int = 26,
) -> Drawing:
    """Rows of cells over time."""
    height = TOP + row_height * len(rows) + BOTTOM
    frame = PlotFrame(width, height, over.since_us, over.until_us, 1)
    wide = max(0.6, frame.x(over.since_us + over.step_us) - LEFT - 0.5)
    body = []
    for n, (name, cells) in enumerate(rows):
        y = TOP + n * row_height
        body.append(_text("name", LEFT - 8, y + row_height / 2 + 3, name))
        body += [_cell(cell, frame.x(at), y, wide, row_height - 4) for at, cell in sorted(cells.items())]
    body += [_text("tick", frame.x(tick), height - 6, name, "middle") for tick, name in _time_ticks(frame)]
    return svg(width, height, title, said, "".join(body), "plot wide")


def matrix(
    rows: Sequence[str],
    columns: Sequence[str],
    cells: dict[tuple[str, str], Cell],
    *,
    title: str,
    said: str,
    size: int = 30,
) -> Drawing:
    """A matrix of cells with labelled rows and columns."""
    left, top = 190, 24 + 5 * max(len(label(name, 22)) for name in columns)
    width, height = left + size * len(columns) + 70, top + size * len(rows) + 8
    body = []
    for n, name in enumerate(columns):
        x = left + n * size + size / 2
        place = f"translate({x + 4:.1f} {top - 8}) rotate(-52)"
        body.append(f'<text class="name" transform="{place}">{esc(label(name, 22))}{hint(name)}</text>')
    for n, name in enumerate(rows):
        y = top + n * size
        body.append(_text("name", left - 8, y + size / 2 + 4, label(name, 26)))
        for k, other in enumerate(columns):
            cell = cells.get((name, other), Cell("none", 1, f"{name} → {other}: nothing"))
            body.append(_cell(cell, left + k * size, y, size - 2, size - 2))
    return svg(width, height, title, said, "".join(body), "plot matrix")
