"""The circuit breaker of one service, as a value.

Rule 1: closed, it counts the messages that failed in a window. Open, it lets nothing through. After the
        cooldown, one message probes the service (half open): its success closes the breaker, its failure
        opens it again.
Rule 2: a shared breaker counts organizations, not failures: one organization that fails again and again
        opens only its own breaker.
Rule 3: nothing here reads a clock. Times are nanoseconds of the store's clock.
"""

from itertools import zip_longest
from typing import Any, Literal, TypeAlias

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
    p0: Literal["defer", "fail"] = "fail"
    """The same for messages that were accepted with P0: nobody waits minutes for the answer to a voice."""

    def __post_init__(self) -> None:
        fit_fields(self)

    def fails(self, priority: int) -> bool:
        """Whether messages of an open service fail that were accepted with this priority; else they wait."""
        return (self.on_open if priority else self.p0) == "fail"


class Circuit(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of one service's breaker."""

    state: BreakerState = "closed"
    failed_at: tuple[int, ...] = ()
    """When the failures in the window happened."""
    failed_by: tuple[str, ...] = ()
    """The message of each of these failures; in a shared breaker, its organization."""
    open_until: int = 0
    probe: str = ""
    """The message that probes the service."""
    probe_until: int = 0
    """When a probe that gave no outcome counts as lost: another message may probe then."""


CLOSED = Circuit()


def failed(circuit: Circuit, rule: Breaker, message_id: str, now_ns: int) -> Circuit:
    """A call of the service failed. Its message counts once in the window."""
    if _is_late(circuit, message_id):
        return circuit
    recent = _recent(circuit, rule, message_id, now_ns)
    if circuit.state == "half_open" or len(recent) >= rule.failures:
        return opened(rule, now_ns)
    return replace(circuit, **_counted(recent))


def failed_shared(circuit: Circuit, rule: Breaker, message_id: str, org_id: str, now_ns: int) -> Circuit:
    """A call of the service failed for one organization, which counts once in the window.

    A failed probe lets another organization probe at once: its failure may be the fault of its organization,
    whose own breaker opens.
    """
    if _is_late(circuit, message_id):
        return circuit
    recent = _recent(circuit, rule, org_id, now_ns)
    if len(recent) >= max(rule.failures, SHARED_FAILURES_MIN):
        return opened(rule, now_ns)
    return replace(circuit, probe="", probe_until=0, **_counted(recent))


def _is_late(circuit: Circuit, message_id: str) -> bool:
    """Whether a call that ended now began before the breaker opened."""
    return circuit.state == "open" or (circuit.state == "half_open" and circuit.probe != message_id)


def _recent(circuit: Circuit, rule: Breaker, by: str, now_ns: int) -> list[tuple[int, str]]:
    """The failures in the window, the newest one of each message or organization, and one by `by` now."""
    window = round(rule.window_s * NANOS_PER_S)
    pairs = zip_longest(circuit.failed_at, circuit.failed_by, fillvalue="")  # stored without names before
    recent = [(int(at), str(name)) for at, name in pairs if now_ns - int(at) < window and name != by]
    return [*recent, (now_ns, by)]


def _counted(recent: list[tuple[int, str]]) -> dict[str, tuple[Any, ...]]:
    return {"failed_at": tuple(at for at, _ in recent), "failed_by": tuple(name for _, name in recent)}


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
