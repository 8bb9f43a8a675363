"""The findings of a report, as sentences."""

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from postroom.pipeline.report.facts import Attained, Pattern, ReportFacts
from postroom.pipeline.report.words import count, duration, label, moment, money, plural, share
from postroom.pipeline.times import DAY_US

NAMELESS: Final = "an error without a class"
SLA_GOOD: Final = 0.95
FEW: Final = 20  # messages; a share of fewer is not meaningful
PEAK: Final = 5  # times the mean


class ReportFinding(NamedTuple):
    """One sentence, and its severity."""

    level: Literal["good", "warn", "bad"]
    text: str


def findings(facts: ReportFacts) -> list[ReportFinding]:
    """The worst first."""
    found = [
        *(ReportFinding("bad", f"An expectation is breached: {text}.") for text in facts.breaches),
        *_targets(facts),
        *_dead_letters(facts),
        *_poison(facts),
        *_lapses(facts),
        *_errors(facts),
        *_depth(facts),
        *_money(facts),
    ]
    return sorted(found, key=lambda one: ("bad", "warn", "good").index(one.level))


def _targets(facts: ReportFacts) -> Iterator[ReportFinding]:
    """For priorities with a target."""
    late = [priority for priority in sorted(facts.sla) if facts.attained(priority).share < SLA_GOOD]
    if not late:
        if facts.sla:
            yield ReportFinding(
                "good", f"Every priority keeps its target in at least {share(SLA_GOOD)} of deliveries."
            )
        return
    parts = ", ".join(
        f"P{one} keeps its {duration(facts.targets_us[one])} in {share(facts.attained(one).share)}"
        for one in late
    )
    yield ReportFinding("bad", f"Deliveries come late: {parts} of cases.")
    hours: dict[int, Attained] = {}
    for priority in facts.sla:
        for at, one in facts.sla[priority].items():
            so_far = hours.get(at, Attained(0, 0))
            hours[at] = Attained(so_far.n + one.n, so_far.within + one.within)
    busy = {at: one for at, one in hours.items() if one.n >= FEW}
    if busy:
        worst = min(busy, key=lambda at: busy[at].share)
        yield ReportFinding(
            "warn",
            f"The worst time began at {moment(worst, facts.step_us)}: {share(busy[worst].share)} of "
            f"{count(busy[worst].n)} deliveries were in time.",
        )


def _dead_letters(facts: ReportFacts) -> Iterator[ReportFinding]:
    dead = facts.outcomes.get("dead_letter", 0)
    systematic = [one for one in facts.patterns if one.systematic]
    if systematic:
        are = "is" if len(systematic) == 1 else "are"
        yield ReportFinding(
            "bad",
            f"{plural(len(systematic), 'error')} behind the dead letters {are} systematic. "
            f"{_most_frequent(systematic[0])}",
        )
    elif dead:
        text = f"{plural(dead, 'message')} ended as {'a dead letter' if dead == 1 else 'dead letters'}"
        first = f" {_most_frequent(facts.patterns[0])}" if facts.patterns else ""
        yield ReportFinding("warn", f"{text}, without a systematic error.{first}")
    else:
        yield ReportFinding("good", "There is no dead letter.")
    rising = [one.error_type or NAMELESS for one in facts.patterns if one.trend in ("new", "rising")]
    if rising and facts.until_us - facts.since_us > DAY_US:  # in a shorter history everything is new
        yield ReportFinding(
            "warn", f"New or more frequent in the last day: {', '.join(dict.fromkeys(rising))}."
        )


def _most_frequent(pattern: Pattern) -> str:
    return (
        f"The most frequent is {pattern.error_type or NAMELESS}, {plural(pattern.n, 'time')}: "
        f"{label(pattern.pattern, 120)}"
    )


def _poison(facts: ReportFacts) -> Iterator[ReportFinding]:
    if facts.suspects:
        loose = sum(not one.quarantined for one in facts.suspects)
        yield ReportFinding(
            "bad" if loose else "warn",
            f"{plural(len(facts.suspects), 'message')} brought down several workers"
            + (f", and {loose} of them may do so again." if loose else "; all were put aside."),
        )


def _lapses(facts: ReportFacts) -> Iterator[ReportFinding]:
    if facts.lapses:
        yield ReportFinding(
            "warn",
            f"{plural(facts.lapses, 'lease')} lapsed: the worker died, hung, or sent no heartbeat for too "
            "long. Each time the message was put back or buried.",
        )
    if facts.timeouts:
        are = "is a timeout" if facts.timeouts == 1 else "are timeouts"
        yield ReportFinding("warn", f"{plural(facts.timeouts, 'error')} {are}.")


def _errors(facts: ReportFacts) -> Iterator[ReportFinding]:
    sums: dict[int, int] = {}
    for times in facts.errors.values():
        for at, n in times.items():
            sums[at] = sums.get(at, 0) + n
    if not sums:
        return
    columns = max(1, (facts.until_us - facts.since_us) // facts.step_us)
    mean = sum(sums.values()) / columns
    worst = max(sums, key=lambda at: sums[at])
    if sums[worst] >= max(FEW, PEAK * mean):
        yield ReportFinding(
            "warn",
            f"Errors peak at {moment(worst, facts.step_us)}: {sums[worst]:,}, where {mean:.1f} are usual.",
        )


def _depth(facts: ReportFacts) -> Iterator[ReportFinding]:
    left = sum(one.waiting for one in facts.queues)
    if left > 0:
        yield ReportFinding(
            "warn",
            f"{plural(left, 'message')} still {'waits' if left == 1 else 'wait'} in the busiest queues.",
        )


def _money(facts: ReportFacts) -> Iterator[ReportFinding]:
    models = facts.spending.get("model", [])
    if facts.cost_usd and models:
        part = float(models[0].cost_usd / facts.cost_usd)
        yield ReportFinding(
            "good", f"Models cost {money(facts.cost_usd)}; {share(part)} of it is {label(models[0].name)}."
        )
