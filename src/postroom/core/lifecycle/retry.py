"""When a failed message is tried again.

Rule 1: nothing here draws random numbers: `spread` is a number from 0 to 1 that the caller drew.
"""

from typing import Final, Literal, TypeAlias

import msgspec

from postroom.calls.fields import Delay, Retries
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.settings_fields import Amount, fit_fields

LANE_LAST: Final = 3
DELAY_S_MAX_DEFAULT: Final = 300.0
RATE_LIMIT_S: Final = 60.0  # after a rate limit that names no time


class RetryPolicy(msgspec.Struct, frozen=True):
    """The number of retries, and an exponential delay between them."""

    max_retries: int = 3
    first_delay_s: float = 1.0
    factor: float = 2.0
    delay_s_max: float = DELAY_S_MAX_DEFAULT

    def delay_ns(self, retries: int, retry_in_s: float | None) -> int:
        """The delay after a failure with `retries` retries before it; `retry_in_s` overrides the policy."""
        if retry_in_s is None:
            retry_in_s = min(self.first_delay_s * self.factor**retries, self.delay_s_max)
        return round(retry_in_s * NANOS_PER_S)


Strategy: TypeAlias = Literal["exponential", "linear"]


class Retry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The retry rule of one message type.

    `exponential` doubles the pause after each failure: 1, 2, 4, 8 times `delay_s`. `linear` adds `delay_s`
    each time: 1, 2, 3 times. `jitter` lengthens a pause by up to this share, so that messages that failed
    together do not return together.
    """

    max_retries: Retries = 3
    strategy: Strategy = "exponential"
    delay_s: Delay = 1.0
    jitter: Amount = 0.1
    delay_s_max: Delay = DELAY_S_MAX_DEFAULT

    def __post_init__(self) -> None:
        fit_fields(self)

    def delay_ns(self, retries: int, spread: float) -> int:
        """The pause after the failure that follows `retries` earlier ones."""
        steps = 2.0 ** min(retries, 60) if self.strategy == "exponential" else retries + 1
        seconds = min(self.delay_s * steps, self.delay_s_max)
        return round(seconds * (1 + self.jitter * spread) * NANOS_PER_S)


NEVER: Final = Retry(max_retries=0)
"""The rule of an error that another attempt would meet again, by the fault of the message or its sender. It
is no failure of a service, either, which `Retry(max_retries=0)` does not say."""


def demoted(priority: int, retries: int) -> int:
    """The lane of a retry: one level below the accepted priority for each failure, down to the last lane."""
    return min(priority + retries, LANE_LAST)
