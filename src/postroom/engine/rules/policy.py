"""The rules of an engine, as frozen values. Every field has a default."""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from postroom.calls.fields import NUMBER_MAX, Number
from postroom.core.agents import AGENTS_AN_ORGANIZATION_MAX, AgentRules
from postroom.core.fieldfaults import field_fault
from postroom.core.goals.advice import CONFIDENCE_MIN
from postroom.core.lifecycle import versions
from postroom.core.lifecycle.backpressure import Backpressure
from postroom.core.lifecycle.breaker import Breaker
from postroom.core.lifecycle.fairness import WEIGHT_DEFAULT, WEIGHT_MIN
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.lifecycle.retry import Retry
from postroom.core.lifecycle.versions import CURRENT_VERSION
from postroom.core.settings_fields import Amount, Kept, Seconds, Share, Some, fit_fields
from postroom.core.tokens.token_rules import TokenRules, token_rules
from postroom.errors import InvalidSetting, UnsupportedVersion, shown

DAY_S: Final = 86_400.0
LEASE_S: Final = 15.0
POISON_CRASHES: Final = 3
BODY_INLINE_BYTES_MAX: Final = 64 * 1024  # a larger payload is stored once and referred to
KEEP_KEYS_S: Final = 30 * DAY_S
KEEP_DEAD_S: Final = 90 * DAY_S
DECISION_TIMEOUT_S: Final = 3_600.0
RECOVERIES: Final = 3
KEEP_EVENTS_S: Final = 7 * DAY_S
KEEP_GOALS_S: Final = 30 * DAY_S  # after the last message of a goal, its use is forgotten
STORED_MESSAGES_MAX: Final = 20_000_000
STORED_BYTES_MAX: Final = 8 * 1024**3
RATE_MIN: Final = 1e-6  # submits a second: one in eleven days
FAILED_KEPT_FACTOR: Final = 2  # cancelled and expired messages are kept longer than completed ones

Tier: TypeAlias = Literal["free", "starter", "pro", "enterprise"]
TIER_DAYS: Final[dict[Tier, float]] = {"free": 7, "starter": 30, "pro": 90, "enterprise": math.inf}
"""How many days an ended message is kept."""

REQUEST_TYPES: Final = (
    "model_call",
    "tool_call",
    "agent_message",
    "memory_save",
    "memory_retrieve",
    "memory_update",
    "agent_spawn",
    "agent_terminate",
)
PAYLOAD_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "agent_message": ("to", "body"),
    "memory_save": ("node_id", "properties", "edges", "scope"),
    "memory_retrieve": ("node_id", "query"),
    "memory_update": ("node_id", "changes", "scope"),
    "agent_spawn": ("agent_id", "tools", "prompt", "task", "specialized_for"),
    "agent_terminate": ("agent_id",),
}
"""The keys that the default handler of a type knows. A type without a default handler takes any object."""
CONTROL_TYPES: Final = frozenset({"agent_spawn", "agent_terminate"})
"""Types whose messages start and end agents."""
RETRIES: Final[dict[str, Retry]] = {
    "model_call": Retry(max_retries=3),
    "tool_call": Retry(max_retries=5),
    "agent_message": Retry(max_retries=3),
    "memory_save": Retry(max_retries=10, strategy="linear"),
    "memory_update": Retry(max_retries=10, strategy="linear"),
    "memory_retrieve": Retry(max_retries=5, strategy="linear", delay_s=0.5),
    "agent_spawn": Retry(max_retries=3),
    "agent_terminate": Retry(max_retries=3),
}

RETRY: Final = Retry()


class Guard(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one goal. None means no limit."""

    hops: Number | None = None
    """How many children may follow each other: a child of a child counts as two."""
    messages: Number | None = None
    tokens: Number | None = None
    usd: Amount | None = None
    recoveries: Number = RECOVERIES
    """Recovery tools that a goal may use before a person has to look."""

    def __post_init__(self) -> None:
        fit_fields(self)

    @property
    def is_set(self) -> bool:
        """Whether anything is limited."""
        return any(limit is not None for limit in (self.hops, self.messages, self.tokens, self.usd))

    @property
    def limits_costs(self) -> bool:
        """Whether a claim has to look at what the goal of a message has spent."""
        return self.tokens is not None or self.usd is not None


class Organization(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy sets for one organization: its share, its limits, how long messages are kept."""

    weight: Annotated[float, Meta(ge=WEIGHT_MIN, le=NUMBER_MAX)] = WEIGHT_DEFAULT
    """Its share of the deliveries, relative to other organizations that wait."""
    tier: Tier | Annotated[float, Meta(ge=0)] = "free"
    """How long ended messages are kept: the name of a tier, or a number of days."""
    retention_s: Annotated[float, Meta(ge=0)] | None = None
    """The same in seconds; None leaves it to the tier."""
    max_depth: Number | None = None
    """How many messages may wait; None leaves it to the store's default."""
    rate_per_s: Annotated[float, Meta(ge=RATE_MIN, le=NUMBER_MAX)] | None = None
    """Submits a second of the organization."""
    user_rate_per_s: Annotated[float, Meta(ge=RATE_MIN, le=NUMBER_MAX)] | None = None
    """Submits a second of each of its users."""
    max_agents: Number = AGENTS_AN_ORGANIZATION_MAX
    """How many agents may be registered, dead ones not counted."""
    max_stored_messages: Number = STORED_MESSAGES_MAX
    """How many messages may be stored, ended ones included, until further submits are refused."""
    max_stored_bytes: Number = STORED_BYTES_MAX
    """The same for the bytes of their payloads, results, streams and effects above 4 KiB each."""

    def __post_init__(self) -> None:
        fit_fields(self)

    @property
    def keep_s(self) -> float:
        """How long an ended message is kept; infinite for ever."""
        if self.retention_s is not None:
            return self.retention_s
        return (TIER_DAYS[self.tier] if isinstance(self.tier, str) else self.tier) * DAY_S


def retry_rule(whose: str, given: object) -> Retry:
    """A retry rule that is given as itself or as an object of its fields, whose `delay` is `delay_s`."""
    if isinstance(given, Retry):
        return given
    if not isinstance(given, Mapping):
        raise InvalidSetting(f"{whose} must be a Retry, or an object of its fields, not {shown(given)}")
    fields = {"delay_s" if name == "delay" else name: value for name, value in given.items()}
    try:
        return msgspec.convert(fields, Retry)
    except msgspec.ValidationError as error:
        raise InvalidSetting(f"{whose}: {field_fault(error, 'it', Retry)}, in {shown(given)}") from None


ErrorName: TypeAlias = type[BaseException] | str
"""A class of errors, or its dotted name, such as "openai.RateLimitError"."""


def _check_errors(errors: object) -> None:
    if not isinstance(errors, Mapping):
        raise InvalidSetting(f"errors must be an object of rules by class, not {shown(errors)}")
    for name, rule in errors.items():
        is_class = isinstance(name, type) and issubclass(name, BaseException)
        parts = name.split(".") if isinstance(name, str) else []
        if not is_class and not (len(parts) > 1 and all(part.isidentifier() for part in parts)):
            raise InvalidSetting(
                f'errors names a class, or its dotted name such as "builtins.TimeoutError", not {shown(name)}'
            )
        if not isinstance(rule, Retry):
            raise InvalidSetting(f"errors must have NEVER or a Retry for {shown(name)}, not {shown(rule)}")


KeepPriority: TypeAlias = Callable[[Any, BaseException], bool]
"""Called with a message and the error of its handler: True keeps the priority of the retry."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of an engine."""

    promote_after_s: tuple[Seconds, ...] = (5.0, 15.0, 30.0)
    """How long a message waits until it is promoted: from P1 to P0, from P2 to P1, from P3 to P2."""
    retries: Mapping[str, Retry | Mapping[str, Any]] = {}
    """By message type, in place of the default ones: a `Retry`, or an object of its fields."""
    errors: Mapping[ErrorName, Retry] = {}
    """By the class of an error or of its cause, in place of the rule of the type: a `Retry`, or `NEVER`."""
    backpressure: Backpressure = Backpressure()
    breaker: Breaker = Breaker()
    breakers: Mapping[str, Breaker] = {}
    """Breaker rules by service, in place of `breaker`."""
    guard: Guard = Guard()
    poison_crashes: Some = POISON_CRASHES
    lease_s: Seconds = LEASE_S
    organization: Organization = Organization()
    """The rules of organizations that `organizations` does not name."""
    organizations: Mapping[str, Organization] = {}
    agents: AgentRules = AgentRules()
    keep_priority: KeepPriority | None = None
    """Asked before a retry is demoted; None demotes every retry."""
    tokens: Mapping[str, Any] = {}
    """Budgets of models: providers with their limits, the shares of the tiers, and what a shortage does."""
    keep_keys_s: Kept = KEEP_KEYS_S
    keep_dead_s: Kept = KEEP_DEAD_S
    adviser: Any = None
    """The `Adviser` that answers the questions of goals and conflicts; None means the rules."""
    adviser_confidence_min: Share = CONFIDENCE_MIN
    """A person decides when advice has less confidence."""
    decision_timeout_s: Seconds = DECISION_TIMEOUT_S
    """How long a person has to decide until the safe default is taken."""
    implicit_goals: bool = True
    """Whether a STAGED save under a goal that its sender named, and nobody started, starts the goal."""
    capacities: Mapping[str, Amount] = {}
    """Resource -> how much of it the operations of an organization may use together."""
    keep_events_s: Kept = KEEP_EVENTS_S
    """How long events are kept that no shipper takes. A `Tasks` on the same store may forget them earlier."""
    body_inline_bytes_max: Number = BODY_INLINE_BYTES_MAX
    version: str = CURRENT_VERSION
    token_rules: TokenRules | None = None
    """Derived from `tokens`; None without budgets."""

    def __post_init__(self) -> None:
        fit_fields(self, besides=("retries", "errors", "keep_priority", "tokens", "token_rules"))
        _check_errors(self.errors)
        if not isinstance(self.retries, Mapping):
            raise InvalidSetting(f"retries must be an object of rules by type, not {shown(self.retries)}")
        retries = {name: retry_rule(f"retries of {name}", rule) for name, rule in self.retries.items()}
        force_setattr(self, "retries", retries)
        if not isinstance(self.tokens, Mapping):
            raise InvalidSetting(f"tokens must be an object with providers, not {shown(self.tokens)}")
        force_setattr(self, "token_rules", token_rules(self.tokens))
        if len(self.promote_after_s) != 3:  # noqa: PLR2004 - P1, P2 and P3
            raise InvalidSetting("promote_after_s must be three numbers: P1 to P0, P2 to P1, P3 to P2")
        if self.keep_priority is not None and not callable(self.keep_priority):
            raise InvalidSetting(f"keep_priority must be a function, not {shown(self.keep_priority)}")
        try:
            versions.parse(self.version)
        except UnsupportedVersion:
            raise InvalidSetting(f"version must be such as 1.0.0, not {shown(self.version)}") from None

    @property
    def has_model(self) -> bool:
        """Whether an adviser answers questions, and not the rules alone."""
        return self.adviser is not None and not self.adviser.is_pure

    @property
    def promote_after_ns(self) -> tuple[int, ...]:
        """The times of promotion in nanoseconds."""
        return tuple(round(seconds * NANOS_PER_S) for seconds in self.promote_after_s)

    def retry_of(self, type_name: str) -> Retry:
        """The retry rule of a message type."""
        rule = self.retries.get(type_name)
        return rule if isinstance(rule, Retry) else RETRIES.get(type_name, RETRY)

    def breaker_of(self, service: str) -> Breaker:
        """The breaker rule of a service."""
        return self.breakers.get(service, self.breaker)

    def organization_of(self, org_id: str) -> Organization:
        """The rules of an organization."""
        return self.organizations.get(org_id, self.organization)
