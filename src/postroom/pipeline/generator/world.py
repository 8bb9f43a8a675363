"""The organizations, agents, payloads and errors of a generated history.

Rule: all randomness comes from the generator that is passed in, through the two calls that give the same
numbers in every version of Python.
"""

import math
from random import Random
from typing import Final, NamedTuple

import msgspec

SOURCES: Final = ("engine-eu", "engine-us", "engine-ap")
ORGS: Final = 40
AGENTS_MAX: Final = 48
PAYLOADS: Final = 512  # different bodies
STEPS: Final = 4_096  # of a table of waits
SCALE: Final = 1_024
DIGITS: Final = 4_000  # that are made at once

REQUESTS: Final = (
    "model_call",
    "tool_call",
    "agent_message",
    "memory_save",
    "memory_retrieve",
    "memory_update",
    "agent_spawn",
    "agent_terminate",
)
_REQUEST_SHARES: Final = (38, 26, 12, 8, 9, 4, 2, 1)
RESPONSES: Final = ("result", "stream_chunk", "stream_complete", "error", "progress", "acknowledgment")
MAX_RETRIES: Final = {"model_call": 3, "tool_call": 5, "memory_save": 10}
MAX_RETRIES_ELSE: Final = 3
SERVICES: Final = ("calendar", "slack", "github", "jira", "stripe", "maps", "search", "sandbox")
PROMOTE_AFTER_US: Final = (0, 5_000_000, 15_000_000, 30_000_000)
"""How long a message of each priority waits until it is promoted by one."""


class Model(NamedTuple):
    """A model and its prices, in billionths of a dollar a token."""

    name: str
    in_nano: int
    out_nano: int


MODELS: Final = (
    Model("atlas-large", 3_000, 15_000),
    Model("atlas-small", 250, 1_250),
    Model("kestrel-2", 2_500, 10_000),
    Model("kestrel-2-mini", 150, 600),
    Model("orchid-vision", 1_250, 5_000),
)


class Family(NamedTuple):
    """Errors with the same cause and a similar text."""

    error_type: str
    text: str
    types: tuple[str, ...]
    retried: bool = True
    pause_s: int = 2


FAMILIES: Final = (
    Family(
        "RateLimitError",
        "429 from api.{host}.example: {n} requests a minute exceed the limit of {limit}, request req_{hex}",
        ("model_call",),
        pause_s=60,
    ),
    Family(
        "TimeoutError",
        "no answer from {host}.internal:{port} within {seconds} s (call {hex})",
        ("model_call", "tool_call", "memory_retrieve"),
    ),
    Family(
        "ContextLengthExceeded",
        "the prompt has {n} tokens, and the window of the model holds {limit} (session {hex})",
        ("model_call",),
        retried=False,
    ),
    Family(
        "ValidationError",
        "field 'items[{small}].due_date' of call {hex} is not a date: '{n}'",
        ("tool_call", "agent_spawn"),
        retried=False,
    ),
    Family(
        "ConnectionError",
        "connection to {host}-{small}.internal:{port} was refused after {seconds} tries",
        ("tool_call", "memory_save", "memory_update", "memory_retrieve"),
    ),
    Family(
        "PermissionDenied",
        "403: user u-{hex} may not write to project {n}\nask its owner for the role 'editor'",
        ("tool_call",),
        retried=False,
    ),
    Family(
        "GraphConflict",
        "node {hex} was changed by transaction {n} while transaction {limit} held it",
        ("memory_save", "memory_update"),
    ),
    Family(
        "AgentUnavailable",
        "agent a-{hex} has not answered for {seconds} s, its queue holds {small} messages",
        ("agent_message", "agent_terminate", "agent_spawn"),
    ),
)
_TOPICS: Final = (
    "the offsite in Lisbon", "invoice 4711", "the flaky test of the importer", "Q3 churn by region",
    "the letter to Müller & Söhne", "a refund", "the on-call rota", "release notes of 2.4",
)  # fmt: skip
_ASKED: Final = (
    "Summarise what is known about {topic} for {name}@example.com",
    "Find a free slot to talk about {topic}; call +49 30 555 {n:04} if there is none",
    "Write a first draft on {topic}, at most {n} words",
    "Check {topic} against the record {n} and name what differs",
)
_NAMES: Final = ("ada", "grace", "edsger", "barbara", "alan", "radia")


class Org(NamedTuple):
    """An organization, its users and its agents."""

    org_id: str
    source: int
    users: tuple[str, ...]
    agents: tuple[str, ...]


FATES: Final = (
    ("cancelled", 4),
    ("expired", 4),
    ("poison", 2),
    ("lapse", 6),
    ("release", 4),
    ("cancelled while held", 2),
    ("conflict", 6),
    ("conflict that stays", 1),
    ("failure", 60),
    ("dead", 10),
    ("delayed", 15),
    ("rejected", 2),
)
"""The fates of requests, in thousandths. All others complete at once."""
THOUSAND: Final = 1_000


class HistoryWorld:
    """The random facts of one history."""

    def __init__(self, random: Random) -> None:
        self.bits = random.getrandbits
        self.chance = random.random
        self._digits = ""
        self._at = DIGITS
        self._waits = [round(-math.log(1 - (i + 0.5) / STEPS) * SCALE) for i in range(STEPS)]
        self._types = [name for name, n in zip(REQUESTS, _REQUEST_SHARES, strict=True) for _ in range(n)]
        self._fates = [name for name, n in FATES for _ in range(n)]
        self.orgs = [self._org(rank) for rank in range(ORGS)]
        self._skewed = [org for rank, org in enumerate(self.orgs) for _ in range(-(-4 * ORGS // (rank + 1)))]
        self.payloads = [self._payload() for _ in range(PAYLOADS)]
        self.errors = {name: [family for family in FAMILIES if name in family.types] for name in REQUESTS}

    def digits(self, n: int) -> str:
        """`n` hexadecimal digits, cut from a long number: formatting each id would take twice as long."""
        at = self._at
        if at + n > DIGITS:
            self._digits = f"{self.bits(4 * DIGITS):0{DIGITS}x}"
            at = 0
        self._at = at + n
        return self._digits[at : at + n]

    def below(self, limit: int) -> int:
        """A whole number from 0 to below `limit`."""
        return int(self.chance() * limit)

    def wait_us(self, mean_us: int) -> int:
        """A random wait with this mean, exponentially distributed."""
        return mean_us * self._waits[self.bits(12)] // SCALE + 1

    def org(self) -> Org:
        """A random organization. The first one has over a fifth of the traffic, the last ones almost none."""
        return self._skewed[int(self.chance() * len(self._skewed))]

    def request(self) -> str:
        return self._types[int(self.chance() * len(self._types))]

    def fate(self) -> str:
        """The fate of a request; empty when it completes at once."""
        at = int(self.chance() * THOUSAND)
        return self._fates[at] if at < len(self._fates) else ""

    def error(self, family: Family) -> str:
        """The text of the family with random facts."""
        return family.text.format(
            host=SERVICES[self.bits(3)],
            port=(443, 5432, 6379, 8443)[self.bits(2)],
            hex=self.digits(12),
            n=1_000 + self.bits(14),
            limit=1_000 + 500 * self.bits(4),
            seconds=1 + self.bits(6),
            small=self.bits(5),
        )

    def _org(self, rank: int) -> Org:
        name = f"org-{self.digits(6)}"
        n = max(2, AGENTS_MAX // (rank + 1))
        users = tuple(f"u-{self.digits(8)}" for _ in range(n + 1))
        return Org(name, rank % len(SOURCES), users, tuple(f"a-{self.digits(8)}" for _ in range(n)))

    def _payload(self) -> tuple[str, int]:
        """A body as JSON for a line, and its length."""
        asked = _ASKED[self.bits(2)].format(
            topic=_TOPICS[self.bits(3)], name=_NAMES[self.below(len(_NAMES))], n=self.bits(10)
        )
        body = msgspec.json.encode({"ask": asked, "version": "1.0.0", "context": {"step": self.bits(4)}})
        return msgspec.json.encode(body.decode()).decode(), len(body)
