"""The circuit breaker of one service, as a value.

Rule 1: closed, it counts failures in a window. Open, it lets nothing through. After the cooldown, one
        message probes the service (half open): its success closes the breaker, its failure opens it again.
Rule 2: a shared breaker counts organizations, not failures: one organization that fails again and again
        opens only its own breaker.
Rule 3: nothing here reads a clock. Times are nanoseconds of the store's clock.
"""

from typing import Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from postroom.calls.fields import Delay
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.settings_fields import Seconds, Some, fit_fields

BreakerState: TypeAlias = Literal["closed", "open", "half_open"]
PROBE_WAIT_NS = NANOS_PER_S  # how long messages are deferred while a probe is under way
SHARED_FAILURES_MIN = 2  # organizations that must fail before a shared breaker opens, whatever its rule says


class Breaker(msgspec.Struct, frozen=True, kw_only=True):
    """When a service counts as down, and for how long."""

    failures: Some = 5
    window_s: Seconds = 60.0
    cooldown_s: Delay = 300.0
    on_open: Literal["defer", "fail"] = "defer"
    """What happens to messages of an open service: they wait for the cooldown, or become dead letters."""

    def __post_init__(self) -> None:
        fit_fields(self)


class Circuit(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of one service's breaker."""

    state: BreakerState = "closed"
    failed_at: tuple[int, ...] = ()
    """When the failures in the window happened."""
    failed_by: tuple[str, ...] = ()
    """In a shared breaker, the organization of each of these failures."""
    open_until: int = 0
    probe: str = ""
    """The message that probes the service."""
    probe_until: int = 0
    """When a probe that gave no outcome counts as lost: another message may probe then."""


CLOSED = Circuit()


def failed(circuit: Circuit, rule: Breaker, message_id: str, now_ns: int) -> Circuit:
    """A call of the service failed."""
    window = round(rule.window_s * NANOS_PER_S)
    recent = (*(at for at in circuit.failed_at if now_ns - at < window), now_ns)[-rule.failures :]
    if circuit.state == "open" or (circuit.state == "half_open" and circuit.probe != message_id):
        return circuit  # a call that began before the breaker opened
    if circuit.state == "half_open" or len(recent) >= rule.failures:
        return opened(rule, now_ns)
    return replace(circuit, failed_at=recent)


def failed_shared(circuit: Circuit, rule: Breaker, message_id: str, org_id: str, now_ns: int) -> Circuit:
    """A call of the service failed for one organization, which counts once in the window.

    A failed probe lets another organization probe at once: its failure may be the fault of its organization,
    whose own breaker opens.
    """
    if circuit.state == "open" or (circuit.state == "half_open" and circuit.probe != message_id):
        return circuit
    window = round(rule.window_s * NANOS_PER_S)
    pairs = zip(circuit.failed_at, circuit.failed_by, strict=True)
    recent = [(at, by) for at, by in pairs if now_ns - at < window and by != org_id]
    recent.append((now_ns, org_id))
    if len(recent) >= max(rule.failures, SHARED_FAILURES_MIN):
        return opened(rule, now_ns)
    failed_at, failed_by = tuple(at for at, _ in recent), tuple(by for _, by in recent)
    return replace(circuit, failed_at=failed_at, failed_by=failed_by, probe="", probe_until=0)


def opened(rule: Breaker, now_ns: int) -> Circuit:
    """A breaker that opens now."""
    return Circuit("open", open_until=now_ns + round(rule.cooldown_s * NANOS_PER_S))


def succeeded(circuit: Circuit, message_id: str) -> Circuit:
    """A call of the service succeeded. Only the probe closes a breaker."""
    return CLOSED if circuit.state == "half_open" and circuit.probe == message_id else circuit


def admits(circuit: Circuit, message_id: str, now_ns: int) -> bool:
    """Whether a message may call the service now, perhaps as the probe."""
    match circuit.state:
        case "closed":
            return True
        case "open":
            return now_ns >= circuit.open_until
        case "half_open":
            return circuit.probe == message_id or now_ns >= circuit.probe_until


def probed(circuit: Circuit, message_id: str, now_ns: int, lease_ns: int) -> Circuit:
    """The message that `admits` let through an open breaker is its probe."""
    if circuit.state == "closed":
        return circuit
    return replace(circuit, state="half_open", probe=message_id, probe_until=now_ns + lease_ns)


def wait_ns(circuit: Circuit, now_ns: int) -> int:
    """How long a message that is not admitted is deferred."""
    return max(circuit.open_until - now_ns, PROBE_WAIT_NS)
