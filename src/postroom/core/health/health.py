"""Whether messages flow: the verdict of `doctor`, `engine status`, `top`, the live page and `GET /health`.

Rule 1: only `judge` decides whether a queue is well. Whatever shows health passes it the facts.
Rule 2: what waits for a person, such as a dead letter, is not ill health: other messages flow.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from postroom.core.lifecycle.backpressure import EMERGENCY_STAGE, LIGHT

Level: TypeAlias = Literal["ok", "warning", "problem"]
LEVELS: Final[tuple[Level, ...]] = ("ok", "warning", "problem")
Check: TypeAlias = Literal["backlog", "breakers", "server"]

UNATTENDED_S: Final = 60.0  # a worker that starts may take some seconds
BACKLOG_AGE_S: Final = 600.0


class HealthFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the verdict depends on. What is not known is left out."""

    waiting: int = 0
    """Messages of organizations that a worker could claim."""
    oldest_s: float = 0.0
    """How long the oldest of them has waited."""
    stage: int = 0
    """The stage of backpressure."""
    workers: int = 0
    is_paused: bool = False
    """Whether nothing at all is delivered."""
    breakers: Sequence[str] = ()
    """Services that no organization can call at present. A name may be hidden, and is empty then."""
    broken: Mapping[str, str] = {}
    """Parts of the server that do not work, and why."""
    slowed: Mapping[str, str] = {}
    """Parts without which the server goes on, and why they do not work."""
    has_figures: bool = True
    """Whether the reasons say how many messages wait, which is not for everybody."""


NO_PARTS: Final = HealthFacts()
"""Of a store without a server."""


class Reason(msgspec.Struct, frozen=True):
    """Why something is not well."""

    check: Check
    level: Level
    what: str
    why: str


class Verdict(msgspec.Struct, frozen=True):
    """Whether all is well; the level is that of the worst reason."""

    level: Level = "ok"
    reasons: list[Reason] = []


def judge(facts: HealthFacts) -> Verdict:
    """The verdict on the facts."""
    reasons = [*_backlog(facts), *_breakers(facts), *_parts(facts)]
    return Verdict(worst(reason.level for reason in reasons), reasons)


def worst(levels: "Iterator[Level]") -> Level:
    """The highest of the levels."""
    return max(levels, key=LEVELS.index, default="ok")


def _backlog(facts: HealthFacts) -> Iterator[Reason]:
    """At most one reason: the one that the others follow from."""
    if not facts.waiting:
        return
    waiting = messages(facts.waiting) if facts.has_figures else "messages"
    wait = f"{waiting} wait{'s' if waiting == '1 message' else ''}"
    is_throttled = facts.stage >= LIGHT
    at_stage = f" (stage {facts.stage})" if is_throttled else ""
    if facts.is_paused:
        yield Reason("backlog", "warning", f"all deliveries are paused, and {wait}{at_stage}", _paused)
    elif not facts.workers and (is_throttled or facts.oldest_s > UNATTENDED_S):
        level: Level = "problem" if is_throttled else "warning"
        yield Reason("backlog", level, f"no worker runs, and {wait}{at_stage}", _unattended)
    elif facts.stage >= EMERGENCY_STAGE:
        yield Reason("backlog", "problem", f"{wait}{at_stage}", "only P0 messages are accepted")
    elif is_throttled:
        yield Reason("backlog", "warning", f"{wait}{at_stage}", _throttled)
    elif facts.oldest_s > BACKLOG_AGE_S:
        which = f"oldest of {waiting}" if facts.has_figures else "oldest message"
        oldest = f"the {which} has waited {span(facts.oldest_s)}"
        yield Reason("backlog", "warning", oldest, "there are too few workers")


_paused: Final = "they run after a resume"
_unattended: Final = "nothing is delivered before a worker starts"
_throttled: Final = "new messages of low priority are refused for the time being"


def _breakers(facts: HealthFacts) -> Iterator[Reason]:
    if facts.breakers:
        count = len(facts.breakers)
        names = ", ".join(filter(None, facts.breakers))
        verb = "breaker is" if count == 1 else "breakers are"
        what = f"{count} {verb} open for all organizations{names and f': {names}'}"
        yield Reason("breakers", "warning", what, "messages that call these services are delayed")


def _parts(facts: HealthFacts) -> Iterator[Reason]:
    for name, why in facts.broken.items():
        yield Reason("server", "problem", f"the part {name} does not work: {why}", "its calls wait or fail")
    for name, why in facts.slowed.items():
        yield Reason("server", "warning", f"the part {name} does not work: {why}", "the server goes on")


# ---- words -------------------------------------------------------------------------------------------


def messages(n: int) -> str:
    """A number of messages."""
    return f"{n:,} message{'' if n == 1 else 's'}"


def span(seconds: float) -> str:
    """A span of time in its largest fitting unit."""
    for unit, length in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
