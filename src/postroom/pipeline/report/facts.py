"""The facts of a report as plain values, between the queries and the page."""

from decimal import Decimal
from typing import Final, NamedTuple

from postroom.pipeline.report.flames import Profile
from postroom.pipeline.times import HOUR_US


class Percentiles(NamedTuple):
    """The number of messages, and percentiles of their wait."""

    n: int
    p50_us: int
    p95_us: int
    p99_us: int


class Attained(NamedTuple):
    """The number of messages, and of those delivered within their target."""

    n: int
    within: int

    @property
    def share(self) -> float:
        return self.within / self.n if self.n else 1.0


class QueueFacts(NamedTuple):
    """A queue, its messages and its depth."""

    name: str
    messages: int
    """Each counts once, even if it was put back and waited again."""
    peak: int
    waiting: int


class Spender(NamedTuple):
    """The cost of a model, organization, agent or goal."""

    name: str
    calls: int
    tokens: int
    cost_usd: Decimal


class Pair(NamedTuple):
    """The messages from one sender to one recipient."""

    sender: str
    recipient: str
    messages: int
    dead_letters: int


class Pattern(NamedTuple):
    """Dead letters with a similar error."""

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
    """Message ids, and the texts of their errors."""


class Suspect(NamedTuple):
    """A message that crashes its workers."""

    message_id: str
    org_id: str
    type: str
    lapses: int
    workers: int
    quarantined: bool
    last_us: int


class GoalProfile(NamedTuple):
    """A goal, and where its messages spent their time."""

    goal_id: str
    org_id: str
    messages: int
    from_us: int | None
    """The hours in which its messages were created, if that is known."""
    until_us: int | None
    profile: Profile


KEPT: Final = "kept"
"""The outcome of messages of a bus, a queue of files or a mailbox, which have no end."""
REMOVED: Final = "removed"
"""The outcome of such messages after their deletion, which is not a failure."""
Times = dict[int, int]
"""A number for each column of time, by its start."""


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
    """The targets that the caller gave, by priority. There are no default targets."""
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
    goals: list[GoalProfile]
    decisions: dict[str, int]
    """The outcomes of the harness' own messages. Only their errors and dead letters count elsewhere too."""
    decision_queue: QueueFacts | None
    lapses: int
    """Lapsed leases."""
    timeouts: int
    """Errors whose class is a timeout."""
    breaches: tuple[str, ...] = ()
    """Breached expectations of the tables, as sentences."""

    @property
    def is_fine(self) -> bool:
        """Whether columns of time are shorter than an hour, and drawn from silver."""
        return self.step_us < HOUR_US

    @property
    def messages(self) -> int:
        """The number of messages, without those of the harness."""
        return sum(self.outcomes.values())

    def attained(self, priority: int) -> Attained:
        """Over the whole period."""
        parts = self.sla.get(priority, {}).values()
        return Attained(sum(part.n for part in parts), sum(part.within for part in parts))
