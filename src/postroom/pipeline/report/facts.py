"""What the report shows, as plain values: the page knows nothing of tables, and the tables nothing of it."""

from decimal import Decimal
from typing import Final, NamedTuple

from postroom.pipeline.report.flames import Profile
from postroom.pipeline.times import HOUR_US


class Percentiles(NamedTuple):
    """How long messages waited."""

    n: int
    p50_us: int
    p95_us: int
    p99_us: int


class Attained(NamedTuple):
    """How many of them were delivered within their target."""

    n: int
    within: int

    @property
    def share(self) -> float:
        return self.within / self.n if self.n else 1.0


class QueueFacts(NamedTuple):
    """A queue, how many messages came to it, and how full it was."""

    name: str
    messages: int
    """Each counts once, also when it was put back and waited again."""
    peak: int
    waiting: int


class Spender(NamedTuple):
    """Who or what cost something."""

    name: str
    calls: int
    tokens: int
    cost_usd: Decimal


class Pair(NamedTuple):
    """Who talks to whom."""

    sender: str
    recipient: str
    messages: int
    dead_letters: int


class Pattern(NamedTuple):
    """Dead letters that are one error."""

    pattern_id: str
    error_type: str
    pattern: str
    n: int
    templates: int
    first_us: int
    last_us: int
    trend: str
    systematic: bool
    orgs: int
    types: tuple[str, ...]
    hours: dict[int, int]
    samples: tuple[tuple[str, str], ...]
    """Ids of messages, and what their errors say."""


class Suspect(NamedTuple):
    """A message that brings down who takes it."""

    message_id: str
    org_id: str
    type: str
    lapses: int
    workers: int
    quarantined: bool
    last_us: int


class GoalFacts(NamedTuple):
    """A goal, and what its messages spent their time with."""

    goal_id: str
    org_id: str
    messages: int
    from_us: int | None
    """The hours in which its messages were created, if that is known."""
    until_us: int | None
    profile: Profile


KEPT: Final = "kept"
"""The outcome of messages that can be read for ever: those of a bus, a queue of files or a mailbox."""
REMOVED: Final = "removed"
"""The same, when somebody deleted them: that is no failure."""
Times = dict[int, int]
"""A number for each column of time, by its beginning."""


class ReportFacts(NamedTuple):
    """Everything in a report. Columns of time are `step_us` wide."""

    since_us: int
    until_us: int
    step_us: int
    events: int
    outcomes: dict[str, int]
    latency: dict[int, dict[int, Percentiles]]
    overall: dict[int, Percentiles]
    targets_us: dict[int, int]
    """By priority: what the caller asked for. There are none by themselves."""
    sla: dict[int, dict[int, Attained]]
    throughput: dict[str, Times]
    depth: Times
    queues: list[QueueFacts]
    errors: dict[str, Times]
    tokens: dict[str, Times]
    spending: dict[str, list[Spender]]
    cost_usd: Decimal
    traffic: list[Pair]
    patterns: list[Pattern]
    suspects: list[Suspect]
    goals: list[GoalFacts]
    decisions: dict[str, int]
    """How the harness' own messages ended. Only their errors and dead letters are counted elsewhere, too."""
    decision_queue: QueueFacts | None
    lapses: int
    """Leases that ran out."""
    timeouts: int
    """Errors whose class is a timeout."""

    @property
    def is_fine(self) -> bool:
        """Whether columns of time are shorter than an hour: then they are drawn from silver."""
        return self.step_us < HOUR_US

    @property
    def messages(self) -> int:
        """Those of the harness are not among them."""
        return sum(self.outcomes.values())

    def attained(self, priority: int) -> Attained:
        """Over the whole time."""
        parts = self.sla.get(priority, {}).values()
        return Attained(sum(part.n for part in parts), sum(part.within for part in parts))
