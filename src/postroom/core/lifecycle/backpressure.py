"""Backpressure: which submits are admitted, and how many workers are wanted.

Rule 1: the depth is the number of QUEUED messages, of one organization and of all together.
Rule 2: a stage is entered strictly above its threshold and left at 80 % of it.
Rule 3: the transaction that stores the messages reads the depth, from the same ledger. A ledger that cannot
        tell the depth cannot store a message of any priority either.
"""

from typing import Final

import msgspec

from postroom.calls.fields import Number
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.settings_fields import fit_fields

P2: Final = 2
P3: Final = 3
SCALE, LIGHT, HEAVY, EMERGENCY_STAGE = 1, 2, 3, 4  # the stages
LEAVE_AT: Final = 0.8
THROTTLED_SHARE: Final = 0.5
THROTTLED_SHARE_HEAVY: Final = 0.1  # P3 in stage 3
RATE_MIN: Final = 1.0  # messages a second that are admitted at least
WINDOW_S: Final = 10.0  # completions are counted over this time
EMERGENCY_RETRY_S: Final = 5.0
SCALE_UP_COOLDOWN_S: Final = 10.0
SCALE_DOWN_COOLDOWN_S: Final = 60.0
PROMOTED_SHARE_MAX: Final = 0.1  # of the claims of the last 30 s
CRITICAL: Final = "Queue depth critical"
EMERGENCY: Final = "EMERGENCY: Queue overflow"
ALERTS: Final = {HEAVY: CRITICAL, EMERGENCY_STAGE: EMERGENCY}


class Backpressure(msgspec.Struct, frozen=True, kw_only=True):
    """Depths above which the stages begin, and the limits of worker scaling."""

    scale: Number = 100
    light: Number = 500
    heavy: Number = 1_000
    emergency: Number = 5_000
    max_workers: Number = 50
    increment: Number = 5

    def __post_init__(self) -> None:
        fit_fields(self)

    @property
    def thresholds(self) -> tuple[int, int, int, int]:
        """The thresholds of stages 1 to 4."""
        return self.scale, self.light, self.heavy, self.emergency


def stage_of(depth: int, rule: Backpressure, previous: int = 0) -> int:
    """The stage for a depth, given the previous stage."""
    reached = sum(depth > threshold for threshold in rule.thresholds)
    while previous > reached and depth <= LEAVE_AT * rule.thresholds[previous - 1]:
        previous -= 1
    return max(reached, previous)


def share_of(stage: int, priority: int) -> float:
    """The share of an organization's completion rate at which submits are admitted; 1 for all of them.

    0 refuses every submit.
    """
    if stage >= EMERGENCY_STAGE and priority > 0:
        return 0.0
    if stage == HEAVY and priority >= P2:
        return THROTTLED_SHARE_HEAVY if priority == P3 else THROTTLED_SHARE
    if stage == LIGHT and priority == P3:
        return THROTTLED_SHARE
    return 1.0


class Throttle(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is remembered of an organization under backpressure."""

    samples: tuple[tuple[int, int], ...] = ()
    """(time, completions so far), about one a second, the oldest first."""
    next_ns: tuple[int, ...] = (0, 0, 0, 0)
    """For each priority, when the next submit is admitted."""


def sampled(throttle: Throttle, now_ns: int, completed: int) -> Throttle:
    """Note how many messages were completed so far, at most once a second."""
    samples = throttle.samples
    if samples and now_ns - samples[-1][0] < NANOS_PER_S:
        return throttle
    oldest_ns = now_ns - round((WINDOW_S + 1) * NANOS_PER_S)
    kept = tuple(sample for sample in samples if sample[0] >= oldest_ns)
    return msgspec.structs.replace(throttle, samples=(*kept, (now_ns, completed)))


def completion_rate(throttle: Throttle, now_ns: int, completed: int) -> float:
    """Completions a second over the last 10 s."""
    oldest_ns = now_ns - round(WINDOW_S * NANOS_PER_S)
    first = next((count for at, count in throttle.samples if at >= oldest_ns), completed)
    return max(0, completed - first) / WINDOW_S


def admit(
    throttle: Throttle, priority: int, rate: float, now_ns: int, count: int = 1
) -> tuple[Throttle, float]:
    """Admit a batch of `count` messages when the batch before it is paid off at `rate` messages a second.

    Returns the new state, and after how many seconds to try again; 0 when the batch is admitted.
    """
    due_ns = throttle.next_ns[priority]
    if now_ns < due_ns:
        return throttle, (due_ns - now_ns) / NANOS_PER_S
    nexts = [*throttle.next_ns]
    nexts[priority] = now_ns + round(count * NANOS_PER_S / max(rate, RATE_MIN))
    return msgspec.structs.replace(throttle, next_ns=tuple(nexts)), 0.0


def wanted_workers(
    current: int,
    stage: int,
    promoted_share: float,
    idle_s: float,
    rested_s: float,
    rule: Backpressure,
    least: int = 1,
) -> int:
    """How many workers there should be, one step from the current number.

    `idle_s` is for how long the depth has been below stage 1, `rested_s` the time since the last change.
    """
    if stage >= LIGHT:
        wanted = rule.max_workers
    elif stage == SCALE or promoted_share > PROMOTED_SHARE_MAX:
        wanted = min(current + rule.increment, rule.max_workers)
    else:
        wanted = min(current, rule.max_workers)
        if idle_s >= SCALE_DOWN_COOLDOWN_S:
            wanted -= rule.increment
    wanted = max(wanted, least)
    pause_s = SCALE_UP_COOLDOWN_S if wanted > current else SCALE_DOWN_COOLDOWN_S
    return wanted if rested_s >= pause_s else current
