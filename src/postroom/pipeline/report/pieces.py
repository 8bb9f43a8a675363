"""Pieces that the sections of the page are made of."""

from collections.abc import Iterable, Sequence
from typing import Final

from postroom.pipeline.report.facts import Facts, Times
from postroom.pipeline.report.plots import COLOURS, Series, Stretch
from postroom.pipeline.report.words import esc, label, moment

CALM: Final = (0, 5, 3, 2, 4, 6, 7, 1)
LOUD: Final = (1, 2, 4, 0, 3, 6, 5, 7)
"""Colours in their order; red is for what went wrong."""


def sheet(title: str, *parts: str, style: str = "") -> str:
    heading = f"<h3>{esc(title)}</h3>" if title else ""
    return f'<div class="sheet {style}">{heading}{"".join(parts)}</div>'


def lead(text: str) -> str:
    return f'<p class="lead">{esc(text)}</p>'


def legend(names: Iterable[tuple[str, str]]) -> str:
    items = "".join(f'<span><i class="{style}"></i>{esc(name)}</span>' for style, name in names)
    return f'<div class="legend">{items}</div>'


def numbers(columns: Sequence[str], rows: Iterable[Sequence[str]], name: str = "The numbers") -> str:
    """A table behind a fold."""
    return (
        f'<details><summary>{esc(name)}</summary><div class="scroll">{table(columns, rows)}</div></details>'
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    shown = list(rows)
    styles = [' class="n"' if _is_number(shown, n) else "" for n in range(len(columns))]
    head = "".join(f'<th scope="col"{styles[n]}>{esc(column)}</th>' for n, column in enumerate(columns))
    body = "".join(
        f"<tr>{''.join(f'<td{styles[n]}>{esc(cell)}</td>' for n, cell in enumerate(row))}</tr>"
        for row in shown
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _is_number(rows: Sequence[Sequence[str]], n: int) -> bool:
    """Whether a column stands to the right, digit below digit."""
    return n > 0 and all(row[n][:1] in "$-0123456789" for row in rows)


def ranked(names: Sequence[str], rows: Sequence[tuple[str, float, str]], colour: int = 0) -> str:
    """Names with bars: what, how much of the largest, and in words."""
    top = max((value for _, value, _ in rows), default=0) or 1
    body = "".join(
        f'<tr><td title="{esc(name)}"><code>{esc(label(name))}</code></td><td class="bar"><span '
        f'style="width:{100 * value / top:.1f}%;background:var(--c{colour})"></span></td>'
        f'<td class="n">{esc(said)}</td></tr>'
        for name, value, said in rows
    )
    head = f'<th scope="col">{esc(names[0])}</th><th></th><th scope="col" class="n">{esc(names[1])}</th>'
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def empty(what: str) -> str:
    return f'<p class="empty">{esc(what)}</p>'


def stretch(facts: Facts) -> Stretch:
    return Stretch(facts.since_us, facts.until_us, facts.step_us)


def over_time(parts: dict[str, Times], colours: Sequence[int] = CALM) -> list[Series]:
    """Series in the order of their size; what is beyond the colours is one more."""
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


def time_table(series: Sequence[Series], step_us: int) -> str:
    times = sorted({at for one in series for at in one.values})
    rows = [[moment(at, step_us), *(f"{one.values.get(at, 0):,.0f}" for one in series)] for at in times]
    return numbers(["from", *(one.name for one in series)], rows)
