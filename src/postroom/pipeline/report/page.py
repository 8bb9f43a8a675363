"""The page: sections in the order of the questions that a person has.

Rule 1: the file stands alone. It loads nothing, and its own policy forbids it to: no script, font or image.
Rule 2: every plot has its numbers beside it as a table, for who cannot see it.
"""

import re
from collections import Counter
from collections.abc import Iterable
from decimal import Decimal
from importlib import resources
from typing import Final

from postroom.pipeline.report import plots
from postroom.pipeline.report.facts import KEPT, REMOVED, Facts, Goal, Pair, Pattern, Queue, Spender, Times
from postroom.pipeline.report.findings import findings
from postroom.pipeline.report.flames import flame_graph
from postroom.pipeline.report.pieces import (
    CALM,
    LOUD,
    empty,
    lead,
    legend,
    numbers,
    over_time,
    ranked,
    sheet,
    stretch,
    table,
    time_table,
)
from postroom.pipeline.report.plots import Cell, Series
from postroom.pipeline.report.words import (
    count,
    day,
    duration,
    esc,
    moment,
    money,
    plural,
    share,
    width,
)

MATRIX_MAX: Final = 14  # rows, and columns
SPARKS_MAX: Final = 48
SUSPECTS_SHOWN: Final = 8  # the others behind a fold
SLA_GOOD: Final = 0.95  # of what is delivered shall be within its target
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"

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


def page(facts: Facts) -> str:
    """The whole file."""
    parts = (
        _latency(facts),
        _sla(facts),
        _throughput(facts),
        _depth(facts),
        _errors(facts),
        _dead_letters(facts),
        _cost(facts),
        _traffic(facts),
        _flames(facts),
    )
    body = "".join(
        f'<section id="{name}"><h2>{esc(title)}</h2>{part}</section>'
        for (name, title), part in zip(_SECTIONS, parts, strict=True)
    )
    links = "".join(f'<a href="#{name}">{esc(title)}</a>' for name, title in _SECTIONS)
    css = resources.files(__package__).joinpath("style.css").read_text()
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>postroom: {esc(_period(facts))}</title><style>{css}</style></head><body>"
        f'<div class="airmail"></div><div class="wrap">{_head(facts)}</div><nav aria-label="Sections">'
        f'<div class="wrap">{links}</div></nav><main class="wrap">{_summary(facts)}{body}</main>'
        f'<div class="wrap"><footer>Times are UTC. {esc(plural(facts.events, "event"))} of the audit stream. '
        "Point at a mark to read its values; the tables below the plots have them all.</footer></div>"
        "</body></html>\n"
    )


def _period(facts: Facts) -> str:
    return f"{moment(facts.since_us, facts.step_us)} to {moment(facts.until_us, facts.step_us)}"


def a_width(facts: Facts) -> str:
    """How long a column of time is, in a sentence."""
    told = width(facts.step_us)
    return told if told[0].isdigit() else f"{'an' if told == 'hour' else 'one'} {told}"


def _head(facts: Facts) -> str:
    waves = "".join(f'<path d="M4 {y}q14 -9 28 0t28 0t28 0t28 0"/>' for y in (38, 52, 66, 80))
    stamp = (
        f'<svg class="postmark" viewBox="0 0 224 124" aria-hidden="true">{waves}'
        '<circle cx="160" cy="62" r="57"/>'
        '<circle cx="160" cy="62" r="37"/><path id="upper" class="way" d="M117 62a43 43 0 0 1 86 0"/>'
        '<path id="lower" class="way" d="M109 62a51 51 0 0 0 102 0"/>'
        '<text text-anchor="middle"><textPath href="#upper" startOffset="50%">POSTROOM</textPath></text>'
        '<text text-anchor="middle"><textPath href="#lower" startOffset="50%">AUDIT</textPath></text>'
        f'<text x="160" y="59" text-anchor="middle">{esc(day(facts.until_us).upper())}</text>'
        f'<text x="160" y="76" text-anchor="middle">{esc(moment(facts.until_us)[:4])}</text></svg>'
    )
    return (
        f"<header><div><h1>What the messages did</h1><p>{esc(_period(facts))} UTC. "
        f"{esc(plural(facts.messages, 'message'))}, {esc(plural(facts.events, 'event'))}.</p></div>"
        f"{stamp}</header>"
    )


# ---- the summary -------------------------------------------------------------------------------------


def _summary(facts: Facts) -> str:
    dead = facts.outcomes.get("dead_letter", 0)
    ended = sum(n for name, n in facts.outcomes.items() if name not in ("open", KEPT, REMOVED))
    urgent = facts.attained(0)
    keys = [
        ("", count(facts.messages), "messages"),
        ("", share(facts.outcomes.get("completed", 0) / ended) if ended else "none", "ended well"),
        ("bad" if dead else "", count(dead), "dead letters"),
        ("", count(facts.outcomes.get("open", 0)), "still open"),
        *([("", count(kept), "kept for readers")] if (kept := facts.outcomes.get(KEPT, 0)) else []),
        *([("", count(own), "decisions of the harness")] if (own := sum(facts.decisions.values())) else []),
        ("", count(sum(sum(times.values()) for times in facts.tokens.values())), "tokens"),
        ("", money(facts.cost_usd), "for models"),
    ]
    if urgent.n:
        keys.insert(2, ("bad" if urgent.share < SLA_GOOD else "", share(urgent.share), "of P0 in time"))
    shown = "".join(
        f'<div class="key {style}"><b>{esc(value)}</b><span>{esc(name)}</span></div>'
        for style, value, name in keys
    )
    told = "".join(f'<li class="{found.level}">{esc(found.text)}</li>' for found in findings(facts))
    return (
        f'<section id="summary" aria-label="Summary"><div class="sheet keys">{shown}</div>{_terms(facts)}'
        f'<h2 class="gap">What stands out</h2><ul class="outstanding">{told}</ul></section>'
    )


_PRIORITIES: Final = (
    "P0 to P3 are priorities, the most urgent first. Mail sets them: critical is P0, urgent and high are P1, "
    "normal is P2, low is P3. Every task is P2. Messages of a bus and of a queue of files have none. No "
    "contract sets a target: `report --target` does."
)
_DECISIONS: Final = (
    "A decision is what the harness does about the result of a task. It is a message of the harness to "
    "itself, and is counted apart from the messages of agents."
)


def _terms(facts: Facts) -> str:
    """What the words of the page mean, in front of their first use."""
    told = [_PRIORITIES] if facts.latency or facts.sla else []
    told += [_DECISIONS] if facts.decisions else []
    return "".join(f'<p class="terms">{esc(text)}</p>' for text in told)


# ---- latency and targets -----------------------------------------------------------------------------

_PERCENTILES: Final = (("p50", "p50_us"), ("p95", "p95_us"), ("p99", "p99_us"))


def _latency(facts: Facts) -> str:
    if not facts.latency:
        return empty("Nothing was delivered.")
    plots_ = "".join(_latency_of(facts, priority) for priority in sorted(facts.latency))
    return (
        lead(
            "How long messages wait for their first delivery, on a logarithmic scale. Half of them wait less "
            "than p50; one in a hundred longer than p99." + _with_decisions(facts)
        )
        + f'<div class="grid">{plots_}</div>'
    )


def _with_decisions(facts: Facts) -> str:
    """Tables by the hour do not know queues."""
    return " Decisions of the harness are among them." if facts.decisions and not facts.is_fine else ""


def _latency_of(facts: Facts, priority: int) -> str:
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
        over=stretch(facts),
    )
    rows = [
        [
            moment(at, facts.step_us),
            f"{one.n:,}",
            *(duration(getattr(one, field)) for _, field in _PERCENTILES),
        ]
        for at, one in sorted(times.items())
    ]
    return sheet(
        f"P{priority}: {said}",
        legend((style, style) for style, _ in _PERCENTILES),
        plot,
        numbers(["from", "messages", "p50", "p95", "p99"], rows),
    )


def _sla(facts: Facts) -> str:
    if not facts.sla:
        return empty("Nobody set a target: `report --target P0=10ms` sets one.")
    bullets, strips, rows = [], [], []
    for priority in sorted(facts.sla):
        whole, target_us = facts.attained(priority), facts.targets_us[priority]
        style = "" if whole.share >= SLA_GOOD else "miss"
        bullets.append(
            f'<div class="bullet {style}"><span>P{esc(priority)}</span><div class="track"><span '
            f'style="width:{100 * whole.share:.2f}%"></span></div><b>{esc(share(whole.share))}</b>'
            f"<small>within {esc(duration(target_us))}, {esc(plural(whole.n, 'message'))}</small></div>"
        )
        strips.append((f"P{priority}", _sla_cells(facts, priority)))
        rows += [
            [f"{moment(at, facts.step_us)} P{priority}", f"{one.n:,}", f"{one.within:,}", share(one.share)]
            for at, one in sorted(facts.sla[priority].items())
        ]
    strip = plots.strip(
        strips,
        title="Targets over time",
        said="green where most were in time, red where many were not",
        over=stretch(facts),
    )
    return (
        lead("Messages whose first delivery came within the target of their priority.")
        + sheet("", *bullets)
        + sheet(
            f"A cell is {a_width(facts)}: the redder, the more were late",
            strip,
            numbers(_SLA_COLUMNS, rows),
            style="gap",
        )
    )


_SLA_COLUMNS: Final = ("from", "messages", "in time", "share")


def _sla_cells(facts: Facts, priority: int) -> dict[int, Cell]:
    cells = {}
    for at, one in facts.sla[priority].items():
        late = 1 - one.share
        style = "ok" if one.share >= SLA_GOOD else "miss"
        strength = 0.35 + 0.65 * (1 - late / (1 - SLA_GOOD)) if style == "ok" else 0.3 + 0.7 * late
        when = f"{moment(at, facts.step_us)} UTC"
        told = f"{when}\nP{priority}: {share(one.share)} of {plural(one.n, 'message')} in time"
        cells[at] = Cell(style, strength, told)
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


def _throughput(facts: Facts) -> str:
    if not facts.throughput:
        return empty("Nothing happened.")
    series = [
        Series(f"c{_FATES[name]}", name, {at: float(n) for at, n in facts.throughput[name].items()})
        for name in _FATES
        if name in facts.throughput
    ]
    totals = ", ".join(f"{count(sum(one.values.values()))} {one.name}" for one in series)
    plot = plots.stacked(series, title="Throughput", said=totals, words=count, over=stretch(facts))
    return lead(f"What happened to messages. A column is {a_width(facts)}.{_with_decisions(facts)}") + sheet(
        totals, legend((one.style, one.name) for one in series), plot, time_table(series, facts.step_us)
    )


def _depth(facts: Facts) -> str:
    if not facts.depth:
        return empty("Nothing ever waited.")
    peak_at = max(facts.depth, key=lambda at: facts.depth[at])
    peak = plural(facts.depth[peak_at], "message")
    said = f"at most {peak} waited, at {moment(peak_at, facts.step_us)}"
    plot = plots.area(
        {at: float(n) for at, n in facts.depth.items()},
        title="Queue depth",
        said=said,
        words=count,
        name="waiting at most",
        over=stretch(facts),
    )
    rows = [[moment(at, facts.step_us), f"{n:,}"] for at, n in sorted(facts.depth.items())]
    own = [facts.decision_queue] if facts.decision_queue is not None else []
    return (
        lead(
            "Messages that wait in all queues of agents together: the highest number in each column of time."
        )
        + sheet(said, plot, numbers(("from", "waiting"), rows))
        + sheet("The busiest queues", _queues(facts.queues), style="gap")
        + (sheet("The harness' own queue, of its decisions", _queues(own), style="gap") if own else "")
    )


def _queues(queues: Iterable[Queue]) -> str:
    rows = [
        (one.name, float(one.messages), f"{one.messages:,} / {one.peak:,} / {one.waiting:,}")
        for one in queues
    ]
    return ranked(("queue", "messages / waiting at most / waiting now"), rows, 3)


# ---- errors ------------------------------------------------------------------------------------------


def _errors(facts: Facts) -> str:
    if not facts.errors:
        return empty("Nothing went wrong.")
    series = over_time(facts.errors, LOUD)
    total = sum(sum(times.values()) for times in facts.errors.values())
    plot = plots.stacked(
        series, title="Errors", said=plural(total, "error"), words=count, over=stretch(facts)
    )
    return lead(
        "Failed attempts, lost leases, refused and buried messages, by the class of their error."
    ) + sheet(
        plural(total, "error"),
        legend((one.style, one.name) for one in series),
        plot,
        time_table(series, facts.step_us),
    )


def _dead_letters(facts: Facts) -> str:
    parts = [lead("Dead letters whose errors say the same. What differs from one to the next is marked.")]
    if facts.patterns:
        parts.append(sheet("", *(_pattern(facts, one) for one in facts.patterns)))
    else:
        parts.append(empty("There is no dead letter."))
    if facts.suspects:
        rows = [
            [one.message_id, one.type, one.org_id, f"{one.lapses}", f"{one.workers}", _fate(one.quarantined)]
            for one in facts.suspects
        ]
        columns = ("message", "type", "organization", "leases lost", "workers", "now")
        first = table(columns, rows[:SUSPECTS_SHOWN])
        rest = numbers(columns, rows[SUSPECTS_SHOWN:], "Further ones") if len(rows) > SUSPECTS_SHOWN else ""
        parts.append(
            sheet("Poison suspects: messages that bring down who takes them", first, rest, style="gap")
        )
    return "".join(parts)


_MASK: Final = re.compile(r"(<[a-z*]+>)")


def _fate(quarantined: bool) -> str:
    return "put aside" if quarantined else "still in its queue, or gone"


def _pattern(facts: Facts, pattern: Pattern) -> str:
    words = "".join(
        f"<mark>{esc(part)}</mark>" if _MASK.fullmatch(part) else esc(part)
        for part in _MASK.split(pattern.pattern)
    )
    kind = "systematic" if pattern.systematic else "single"
    said = "systematic" if pattern.systematic else "occasional"
    samples = "".join(
        f"<tr><td><code>{esc(name)}</code></td><td>{esc(text)}</td></tr>" for name, text in pattern.samples
    )
    trend = (
        ""
        if facts.is_fine
        else plots.spark(
            _sparks(facts, pattern.hours),
            title="When",
            said=f"{plural(pattern.n, 'dead letter')} over time, {pattern.trend}",
        )
    )
    where = [plural(pattern.orgs, "organization")] if pattern.orgs else []
    first, last = (moment(us, facts.step_us) for us in (pattern.first_us, pattern.last_us))
    meta = ", ".join([f"{first} to {last}", *where, *pattern.types])
    return (
        f'<div class="pattern"><div><span class="tag {kind}">{said}</span>'
        f'<span class="tag {esc(pattern.trend)}">{esc(pattern.trend)}</span>'
        f"<b>{esc(pattern.error_type or 'without a class')}</b>"
        f'<div class="text">{words}</div><div class="meta">{esc(meta)}</div>'
        '<details><summary>Samples</summary><div class="scroll">'
        f'<table>{samples}</table></div></details></div><div><div class="count">{esc(count(pattern.n))}</div>'
        f"{trend}</div></div>"
    )


def _sparks(facts: Facts, hours: Times) -> list[float]:
    """Counts of an equal number of columns, whatever the span."""
    span = max(1, facts.until_us - facts.since_us)
    values = [0.0] * SPARKS_MAX
    for at, n in hours.items():
        place = (at - facts.since_us) * SPARKS_MAX // span
        values[min(SPARKS_MAX - 1, max(0, place))] += n
    return values


# ---- money -------------------------------------------------------------------------------------------


def _cost(facts: Facts) -> str:
    if not facts.tokens and not facts.cost_usd:
        return empty("No model was called.")
    series = over_time(facts.tokens)
    total = sum(sum(times.values()) for times in facts.tokens.values())
    said = f"{count(total)} tokens, {money(facts.cost_usd)}"
    plot = plots.stacked(series, title="Tokens by model", said=said, words=count, over=stretch(facts))
    ranks = "".join(
        sheet(f"By {name}", ranked((name, "cost"), [_spent(one) for one in spenders], 2))
        for name, spenders in facts.spending.items()
        if spenders
    )
    return (
        lead("Tokens that went in and came out, by the model, and what they cost. Sums are exact.")
        + sheet(
            said, legend((one.style, one.name) for one in series), plot, time_table(series, facts.step_us)
        )
        + f'<div class="grid gap">{ranks}</div>'
    )


def _spent(one: Spender) -> tuple[str, float, str]:
    return one.name, float(max(one.cost_usd, Decimal(0))), money(one.cost_usd)


# ---- traffic -----------------------------------------------------------------------------------------


def _traffic(facts: Facts) -> str:
    if not facts.traffic:
        return empty("Nobody talked to anybody.")
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
    return lead(
        "Who talks to whom: senders on the left, recipients on top, the busiest of both. "
        "Red is where a dead letter is among the messages. Who a message does not name is unnamed."
    ) + sheet(
        said,
        plots.matrix(senders, recipients, cells, title="Traffic", said=said),
        numbers(("from → to", "messages", "dead letters"), rows),
    )


def _largest(parts: Iterable[tuple[str, int]]) -> list[str]:
    sums: dict[str, int] = {}
    for name, n in parts:
        sums[name] = sums.get(name, 0) + n
    return sorted(sums, key=lambda name: (-sums[name], name))[:MATRIX_MAX]


def _pair(pair: Pair, top: int) -> Cell:
    told = f"{pair.sender} → {pair.recipient}\n{plural(pair.messages, 'message')}"
    if pair.dead_letters:
        told += f", {plural(pair.dead_letters, 'dead letter')}"
    strength = 0.18 + 0.82 * (pair.messages / top) ** 0.5
    return Cell("c1" if pair.dead_letters else "c0", strength, told)


# ---- flames ------------------------------------------------------------------------------------------


def _flames(facts: Facts) -> str:
    if not facts.goals:
        return empty("No goal has a message that ended.")
    frames = Counter(
        frame.split(" ", 1)[0] for goal in facts.goals for path, _ in goal.profile.stacks for frame in path
    )
    del frames["waiting"]
    kinds = sorted(frames, key=lambda kind: (-frames[kind], kind))
    colours = {kind: CALM[n % len(CALM)] for n, kind in enumerate(kinds)}
    goals = "".join(_goal(goal, colours, facts.step_us) for goal in facts.goals)
    return lead(
        "The goals that most messages serve. Each box is a kind of message, below it what it led to; width "
        "is time. Pale boxes are time spent waiting."
    ) + sheet("", goals)


def _goal(goal: Goal, colours: dict[str, int], step_us: int) -> str:
    said = f"{duration(goal.profile.total_us)} in {plural(goal.messages, 'message')}"
    if goal.from_us is not None and goal.until_us is not None:
        said += f", created from {moment(goal.from_us, step_us)} to {moment(goal.until_us, step_us)}"
    rows = [
        [" ; ".join(path), duration(us)] for path, us in sorted(goal.profile.stacks, key=lambda one: -one[1])
    ]
    return (
        f'<div class="goal"><h3><code>{esc(goal.goal_id)}</code> of {esc(goal.org_id)}</h3><p>{esc(said)}</p>'
        f"{flame_graph(goal.profile, said, colours)}{numbers(('stack', 'time'), rows)}</div>"
    )
