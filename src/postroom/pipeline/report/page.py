"""The page: `page.html` is its template, and this module computes the values in it.

Rule 1: the file stands alone. It loads nothing, and its own policy forbids it to: no script, font or image.
Rule 2: every plot has a table of its numbers next to it, for readers who cannot see it.
Rule 3: the template escapes every value. Only a `Drawing` of `plots` and `flames` is inserted as it is.
"""

import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from functools import cache
from importlib import resources
from typing import Final, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from postroom.pipeline.report import plots, words
from postroom.pipeline.report.facts import (
    KEPT,
    REMOVED,
    GoalProfile,
    Pair,
    Pattern,
    QueueFacts,
    ReportFacts,
    Spender,
    Suspect,
    Times,
)
from postroom.pipeline.report.findings import SLA_GOOD, findings
from postroom.pipeline.report.flames import colours_of, flame_graph
from postroom.pipeline.report.plots import CALM, COLOURS, Cell, Drawing, Period, Series
from postroom.pipeline.report.words import count, duration, moment, money, plural, share, width

MATRIX_MAX: Final = 14  # rows, and columns
SPARKS_MAX: Final = 48
SUSPECTS_SHOWN: Final = 8  # the others are in a collapsed table
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
TEMPLATE: Final = "page.html"

LOUD: Final = (1, 2, 4, 0, 3, 6, 5, 7)
"""Colours in the order of use. Red comes first for failures."""

_SECTIONS: Final = (
    ("latency", "Latency"),
    ("sla", "Targets"),
    ("throughput", "Throughput"),
    ("depth", "Queue depth"),
    ("errors", "Errors"),
    ("dead-letters", "Dead letters"),
    ("cost", "Tokens and cost"),
    ("traffic", "Traffic"),
    ("flames", "Flame graphs"),
)


class DataTable(NamedTuple):
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
    plot: Drawing | None = None
    legend: Sequence[tuple[str, str]] = ()
    """CSS classes and what they mean."""
    table: DataTable | None = None
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


def time_table(series: Sequence[Series], step_us: int) -> DataTable:
    times = sorted({at for one in series for at in one.values})
    rows = [[moment(at, step_us), *(f"{one.values.get(at, 0):,.0f}" for one in series)] for at in times]
    return DataTable(["from", *(one.name for one in series)], rows)


# ---- the page ----------------------------------------------------------------------------------------


def page(facts: ReportFacts) -> str:
    """The whole file."""
    return _template().render(
        facts=facts,
        policy=POLICY,
        css=resources.files(__package__).joinpath("style.css").read_text(),
        period=f"{moment(facts.since_us, facts.step_us)} to {moment(facts.until_us, facts.step_us)}",
        column=column_width(facts),
        sections=_SECTIONS,
        keys=_keys(facts),
        findings=findings(facts),
        latency=[_latency(facts, priority) for priority in sorted(facts.latency)],
        sla=_sla(facts),
        throughput=_throughput(facts),
        depth=_depth(facts),
        errors=_errors(facts),
        patterns=[_pattern(facts, one) for one in facts.patterns],
        suspects=_suspects(facts.suspects),
        cost=_cost(facts),
        traffic=_traffic(facts),
        goals=_goals(facts),
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("postroom.pipeline.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=lambda value: value if hasattr(value, "__html__") else words.printable(value),
    )
    formats = (words.count, words.duration, words.share, words.moment, words.day, words.label, words.plural)
    environment.filters |= {one.__name__: one for one in formats}
    return environment.get_template(TEMPLATE)


def column_width(facts: ReportFacts) -> str:
    """The length of a column of time, as part of a sentence."""
    text = width(facts.step_us)
    return text if text[0].isdigit() else f"{'an' if text == 'hour' else 'one'} {text}"


def _period(facts: ReportFacts) -> Period:
    return Period(facts.since_us, facts.until_us, facts.step_us)


# ---- the summary -------------------------------------------------------------------------------------


class Key(NamedTuple):
    """One of the figures on top of the page."""

    value: str
    name: str
    style: str = ""


def _keys(facts: ReportFacts) -> list[Key]:
    dead = facts.outcomes.get("dead_letter", 0)
    ended = sum(n for name, n in facts.outcomes.items() if name not in ("open", KEPT, REMOVED))
    kept, decisions = facts.outcomes.get(KEPT, 0), sum(facts.decisions.values())
    urgent = facts.attained(0)
    keys = [
        Key(count(facts.messages), "messages"),
        Key(share(facts.outcomes.get("completed", 0) / ended) if ended else "none", "ended well"),
        Key(count(dead), "dead letters", "bad" if dead else ""),
        Key(count(facts.outcomes.get("open", 0)), "still open"),
        *([Key(count(kept), "kept for readers")] if kept else []),
        *([Key(count(decisions), "decisions of the harness")] if decisions else []),
        Key(count(sum(sum(times.values()) for times in facts.tokens.values())), "tokens"),
        Key(money(facts.cost_usd), "for models"),
    ]
    if urgent.n:
        keys.insert(2, Key(share(urgent.share), "of P0 in time", "bad" if urgent.share < SLA_GOOD else ""))
    return keys


# ---- latency and targets -----------------------------------------------------------------------------

_PERCENTILES: Final = (("p50", "p50_us"), ("p95", "p95_us"), ("p99", "p99_us"))


def _latency(facts: ReportFacts, priority: int) -> Sheet:
    times, whole = facts.latency[priority], facts.overall[priority]
    series = [
        Series(style, style, {at: float(getattr(one, field)) for at, one in times.items()})
        for style, field in _PERCENTILES
    ]
    said = (
        f"p50 is {duration(whole.p50_us)}, p95 {duration(whole.p95_us)} and p99 {duration(whole.p99_us)} "
        f"of {plural(whole.n, 'message')}"
    )
    plot = plots.lines(
        series,
        title=f"Latency of P{priority}",
        said=said,
        words=duration,
        target=facts.targets_us.get(priority),
        over=_period(facts),
    )
    rows = [
        [
            moment(at, facts.step_us),
            f"{one.n:,}",
            *(duration(getattr(one, field)) for _, field in _PERCENTILES),
        ]
        for at, one in sorted(times.items())
    ]
    table = DataTable(["from", "messages", "p50", "p95", "p99"], rows)
    return Sheet(f"P{priority}: {said}", plot, legend(series), table)


class TargetResult(NamedTuple):
    """How many messages of a priority were delivered within its target."""

    priority: int
    share: float
    target_us: int
    n: int

    @property
    def is_good(self) -> bool:
        return self.share >= SLA_GOOD


class Targets(NamedTuple):
    """The section of the targets."""

    attained: list[TargetResult]
    sheet: Sheet


def _sla(facts: ReportFacts) -> Targets | None:
    if not facts.sla:
        return None
    priorities = sorted(facts.sla)
    wholes = {priority: facts.attained(priority) for priority in priorities}
    strip = plots.strip(
        [(f"P{priority}", _sla_cells(facts, priority)) for priority in priorities],
        title="Targets over time",
        said="green where most were in time, red where many were not",
        over=_period(facts),
    )
    rows = [
        [f"{moment(at, facts.step_us)} P{priority}", f"{one.n:,}", f"{one.within:,}", share(one.share)]
        for priority in priorities
        for at, one in sorted(facts.sla[priority].items())
    ]
    return Targets(
        [
            TargetResult(priority, one.share, facts.targets_us[priority], one.n)
            for priority, one in wholes.items()
        ],
        Sheet(
            f"A cell is {column_width(facts)}: the redder, the more were late",
            strip,
            table=DataTable(("from", "messages", "in time", "share"), rows),
            style="gap",
        ),
    )


def _sla_cells(facts: ReportFacts, priority: int) -> dict[int, Cell]:
    cells = {}
    for at, one in facts.sla[priority].items():
        late = 1 - one.share
        style = "ok" if one.share >= SLA_GOOD else "miss"
        strength = 0.35 + 0.65 * (1 - late / (1 - SLA_GOOD)) if style == "ok" else 0.3 + 0.7 * late
        when = f"{moment(at, facts.step_us)} UTC"
        hint = f"{when}\nP{priority}: {share(one.share)} of {plural(one.n, 'message')} in time"
        cells[at] = Cell(style, strength, hint)
    return cells


# ---- flow --------------------------------------------------------------------------------------------


_FATES: Final = {
    "completed": 0,
    "delivered": 5,
    "failed attempts": 2,
    "dead letters": 1,
    "rejected": 4,
    "expired": 6,
    "cancelled": 7,
}
"""The colours of what may happen to a message."""


def _throughput(facts: ReportFacts) -> Sheet | None:
    if not facts.throughput:
        return None
    series = [
        Series(f"c{_FATES[name]}", name, {at: float(n) for at, n in facts.throughput[name].items()})
        for name in _FATES
        if name in facts.throughput
    ]
    totals = ", ".join(f"{count(sum(one.values.values()))} {one.name}" for one in series)
    plot = plots.stacked(series, title="Throughput", said=totals, words=count, over=_period(facts))
    return Sheet(totals, plot, legend(series), time_table(series, facts.step_us))


def _depth(facts: ReportFacts) -> list[Sheet]:
    if not facts.depth:
        return []
    peak_at = max(facts.depth, key=lambda at: facts.depth[at])
    peak = plural(facts.depth[peak_at], "message")
    said = f"at most {peak} waited, at {moment(peak_at, facts.step_us)}"
    series = [Series("c0", "waiting at most", {at: float(n) for at, n in facts.depth.items()})]
    plot = plots.stacked(series, title="Queue depth", said=said, words=count, over=_period(facts))
    rows = [[moment(at, facts.step_us), f"{n:,}"] for at, n in sorted(facts.depth.items())]
    sheets = [
        Sheet(said, plot, table=DataTable(("from", "waiting"), rows)),
        Sheet("The busiest queues", ranking=_queues(facts.queues), style="gap"),
    ]
    if facts.decision_queue is not None:
        own = _queues([facts.decision_queue])
        sheets.append(Sheet("The harness' own queue, of its decisions", ranking=own, style="gap"))
    return sheets


def _queues(queues: Iterable[QueueFacts]) -> Ranking:
    rows = [
        (one.name, float(one.messages), f"{one.messages:,} / {one.peak:,} / {one.waiting:,}")
        for one in queues
    ]
    return ranking("queue", "messages / waiting at most / waiting now", rows, 3)


# ---- errors ------------------------------------------------------------------------------------------


def _errors(facts: ReportFacts) -> Sheet | None:
    if not facts.errors:
        return None
    series = over_time(facts.errors, LOUD)
    said = plural(sum(sum(times.values()) for times in facts.errors.values()), "error")
    plot = plots.stacked(series, title="Errors", said=said, words=count, over=_period(facts))
    return Sheet(said, plot, legend(series), time_table(series, facts.step_us))


class Suspects(NamedTuple):
    """The poison suspects that are shown, and those in a collapsed table."""

    first: DataTable
    rest: DataTable


def _suspects(suspects: list[Suspect]) -> Suspects | None:
    if not suspects:
        return None
    columns = ("message", "type", "organization", "leases lost", "workers", "now")
    rows = [
        [
            one.message_id,
            one.type,
            one.org_id,
            f"{one.lapses}",
            f"{one.workers}",
            "put aside" if one.quarantined else "still in its queue, or gone",
        ]
        for one in suspects
    ]
    rest = DataTable(columns, rows[SUSPECTS_SHOWN:], "Further ones")
    return Suspects(DataTable(columns, rows[:SUSPECTS_SHOWN]), rest)


_MASK: Final = re.compile(r"(<[a-z*]+>)")


class PatternView(NamedTuple):
    """A pattern of dead letters, and how it is shown."""

    pattern: Pattern
    words: list[tuple[str, bool]]
    """Parts of its text, and whether each is a mask of what differs."""
    meta: str
    trend: Drawing


def _pattern(facts: ReportFacts, pattern: Pattern) -> PatternView:
    parts = [(part, _MASK.fullmatch(part) is not None) for part in _MASK.split(pattern.pattern)]
    trend = (
        Drawing()
        if facts.is_fine
        else plots.spark(
            _sparks(facts, pattern.hours),
            title="When",
            said=f"{plural(pattern.n, 'dead letter')} over time, {pattern.trend}",
        )
    )
    orgs = [plural(pattern.orgs, "organization")] if pattern.orgs else []
    first, last = (moment(us, facts.step_us) for us in (pattern.first_us, pattern.last_us))
    return PatternView(pattern, parts, ", ".join([f"{first} to {last}", *orgs, *pattern.types]), trend)


def _sparks(facts: ReportFacts, hours: Times) -> list[float]:
    """Counts in a fixed number of columns, whatever the period."""
    span = max(1, facts.until_us - facts.since_us)
    values = [0.0] * SPARKS_MAX
    for at, n in hours.items():
        place = (at - facts.since_us) * SPARKS_MAX // span
        values[min(SPARKS_MAX - 1, max(0, place))] += n
    return values


# ---- money -------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """The section of tokens and cost."""

    sheet: Sheet
    rankings: list[Sheet]


def _cost(facts: ReportFacts) -> Cost | None:
    if not facts.tokens and not facts.cost_usd:
        return None
    series = over_time(facts.tokens)
    total = sum(sum(times.values()) for times in facts.tokens.values())
    said = f"{count(total)} tokens, {money(facts.cost_usd)}"
    plot = plots.stacked(series, title="Tokens by model", said=said, words=count, over=_period(facts))
    rankings = [
        Sheet(f"By {name}", ranking=ranking(name, "cost", [_spent(one) for one in spenders], 2))
        for name, spenders in facts.spending.items()
        if spenders
    ]
    return Cost(Sheet(said, plot, legend(series), time_table(series, facts.step_us)), rankings)


def _spent(one: Spender) -> tuple[str, float, str]:
    return one.name, float(max(one.cost_usd, Decimal(0))), money(one.cost_usd)


# ---- traffic -----------------------------------------------------------------------------------------


def _traffic(facts: ReportFacts) -> Sheet | None:
    if not facts.traffic:
        return None
    senders = _largest((pair.sender, pair.messages) for pair in facts.traffic)
    recipients = _largest((pair.recipient, pair.messages) for pair in facts.traffic)
    top = max(pair.messages for pair in facts.traffic)
    shown = [pair for pair in facts.traffic if pair.sender in senders and pair.recipient in recipients]
    cells = {(pair.sender, pair.recipient): _pair(pair, top) for pair in shown}
    first = facts.traffic[0]
    said = f"most of it from {first.sender} to {first.recipient}: {plural(first.messages, 'message')}"
    rows = [
        [f"{pair.sender} → {pair.recipient}", f"{pair.messages:,}", f"{pair.dead_letters:,}"]
        for pair in facts.traffic
    ]
    plot = plots.matrix(senders, recipients, cells, title="Traffic", said=said)
    return Sheet(said, plot, table=DataTable(("from → to", "messages", "dead letters"), rows))


def _largest(parts: Iterable[tuple[str, int]]) -> list[str]:
    sums: dict[str, int] = {}
    for name, n in parts:
        sums[name] = sums.get(name, 0) + n
    return sorted(sums, key=lambda name: (-sums[name], name))[:MATRIX_MAX]


def _pair(pair: Pair, top: int) -> Cell:
    hint = f"{pair.sender} → {pair.recipient}\n{plural(pair.messages, 'message')}"
    if pair.dead_letters:
        hint += f", {plural(pair.dead_letters, 'dead letter')}"
    strength = 0.18 + 0.82 * (pair.messages / top) ** 0.5
    return Cell("c1" if pair.dead_letters else "c0", strength, hint)


# ---- flames ------------------------------------------------------------------------------------------


class GoalView(NamedTuple):
    """A goal, and how it is shown."""

    goal: GoalProfile
    text: str
    plot: Drawing
    table: DataTable


def _goals(facts: ReportFacts) -> list[GoalView]:
    colours = colours_of(goal.profile for goal in facts.goals)
    return [_goal(goal, colours, facts.step_us) for goal in facts.goals]


def _goal(goal: GoalProfile, colours: dict[str, int], step_us: int) -> GoalView:
    text = f"{duration(goal.profile.total_us)} in {plural(goal.messages, 'message')}"
    if goal.from_us is not None and goal.until_us is not None:
        text += f", created from {moment(goal.from_us, step_us)} to {moment(goal.until_us, step_us)}"
    rows = [
        [" ; ".join(path), duration(us)] for path, us in sorted(goal.profile.stacks, key=lambda one: -one[1])
    ]
    return GoalView(goal, text, flame_graph(goal.profile, text, colours), DataTable(("stack", "time"), rows))
