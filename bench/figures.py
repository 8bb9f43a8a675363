"""Figures of a bench: each next to its peer or limit of the same run, and compared with a stated goal.

Rule 1: a figure is the median of five repeats. Both sides of a comparison take turns within each repeat, so
        that the noise of the machine affects both. The value of a repeat is the median of its turns, and the
        ratio is the median of the repeats' ratios.
Rule 2: `ok` is computed from the goals. A missed goal is printed as missed and fails nothing: a bench is no
        test.
Rule 3: output is a table on a terminal, and one JSON object a line otherwise.
"""

import json
import operator
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

REPEATS = int(os.environ.get("BENCH_REPEATS", "5"))

NAME_COLUMNS = 44
VALUE_COLUMNS = 20
AGAINST_COLUMNS = 48
RATIO_COLUMNS = 10
GREEN, RED, PLAIN = "\x1b[32m", "\x1b[31m", "\x1b[0m"

_COMPARE = {">=": operator.ge, "<=": operator.le, "<": operator.lt}


@dataclass(frozen=True)
class Goal:
    """A bound for a figure's value or ratio."""

    of: Literal["value", "ratio"]
    relation: Literal[">=", "<=", "<"]
    bound: float

    def holds(self, figure: "Figure") -> bool:
        measured = figure.value if self.of == "value" else figure.ratio
        return measured is not None and bool(_COMPARE[self.relation](measured, self.bound))

    def text(self, unit: str) -> str:
        unit = f" {unit}" if self.of == "value" else ""
        return f"{self.of} {self.relation} {self.bound:,g}{unit}"


@dataclass(frozen=True)
class Figure:
    """One measured number. A figure without goals is information."""

    name: str
    value: float
    unit: str
    against: str = ""
    ratio: float | None = None
    goals: Sequence[Goal] = ()

    @property
    def goal(self) -> str:
        return " and ".join(goal.text(self.unit) for goal in self.goals)

    @property
    def ok(self) -> bool | None:
        return all(goal.holds(self) for goal in self.goals) if self.goals else None

    def as_json(self) -> str:
        return json.dumps(
            {
                "name": self.name,
                "value": _rounded(self.value),
                "unit": self.unit,
                "against": self.against or None,
                "ratio": None if self.ratio is None else _rounded(self.ratio),
                "goal": self.goal or None,
                "ok": self.ok,
            }
        )

    def as_row(self) -> str:
        judged = {True: f"{GREEN}ok{PLAIN}", False: f"{RED}missed{PLAIN}", None: ""}[self.ok]
        ratio = "" if self.ratio is None else readable(self.ratio)
        value = f"{readable(self.value)} {self.unit}"
        return (
            f"{self.name:<{NAME_COLUMNS}}{value:<{VALUE_COLUMNS}}{self.against:<{AGAINST_COLUMNS}}"
            f"{ratio:<{RATIO_COLUMNS}}{self.goal or '-'}  {judged}"
        )


@dataclass
class Report:
    """Prints figures as they are added."""

    title: str
    figures: list[Figure] = field(default_factory=list)
    _table: bool = field(default_factory=sys.stdout.isatty)
    _begun: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        if self._table:
            print(self.title)
            print(
                f"{'figure':<{NAME_COLUMNS}}{'value':<{VALUE_COLUMNS}}{'against':<{AGAINST_COLUMNS}}"
                f"{'ratio':<{RATIO_COLUMNS}}goal"
            )

    def add(self, figure: Figure) -> None:
        self.figures.append(figure)
        print(figure.as_row() if self._table else figure.as_json(), flush=True)

    def end(self) -> None:
        judged = [figure.ok for figure in self.figures if figure.ok is not None]
        if self._table:
            print(f"{sum(judged)} of {len(judged)} goals met in {time.monotonic() - self._begun:.0f} s")


@dataclass(frozen=True)
class Comparison:
    """The medians of both sides, and the median of the repeats' ratios."""

    ours: float
    theirs: float
    ratio: float


def median_of(measure: Callable[[], float]) -> float:
    """The median of five repeats."""
    return statistics.median(measure() for _ in range(REPEATS))


def compare(ours: Callable[[], float], theirs: Callable[[], float], *, turns: int = 1) -> Comparison:
    """Measure both sides in five repeats of `turns` alternating turns. The ratio is ours to theirs."""
    pairs = [_repeat(ours, theirs, turns) for _ in range(REPEATS)]
    return Comparison(
        statistics.median(mine for mine, _ in pairs),
        statistics.median(other for _, other in pairs),
        statistics.median(mine / other for mine, other in pairs),
    )


def _repeat(ours: Callable[[], float], theirs: Callable[[], float], turns: int) -> tuple[float, float]:
    measured = [(theirs(), ours()) for _ in range(turns)]
    return statistics.median(mine for _, mine in measured), statistics.median(other for other, _ in measured)


def seconds(work: Callable[[], object]) -> float:
    """The duration of one call."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def run(bench: Callable[[], None]) -> None:
    """Run a bench to its end, or until the reader of its output closes the pipe."""
    try:
        bench()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def readable(number: float) -> str:
    """Three significant digits, and thousands in groups."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def load_figure() -> Figure:
    """How many processes wanted a core in the last minute: what a rate of a busy machine is read with."""
    return Figure("load of the machine, 1 minute", os.getloadavg()[0], "processes")


def machine() -> str:
    """Cores, architecture, system and Python version."""
    system = os.uname()
    python = ".".join(map(str, sys.version_info[:3]))
    return f"{os.cpu_count()} cores, {system.machine}, {system.sysname}, Python {python}"


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")
