"""The retry policy of failed tasks."""

import msgspec

from postroom.core.lifecycle import NANOS_PER_S


class RetryPolicy(msgspec.Struct, frozen=True):
    """The number of retries, and an exponential delay between them."""

    max_retries: int = 3
    first_delay_s: float = 1.0
    factor: float = 2.0
    delay_s_max: float = 300.0

    def delay_ns(self, retries: int, retry_in_s: float | None) -> int:
        """The delay after a failure with `retries` retries before it; `retry_in_s` overrides the policy."""
        if retry_in_s is None:
            retry_in_s = min(self.first_delay_s * self.factor**retries, self.delay_s_max)
        return round(retry_in_s * NANOS_PER_S)
