"""When to try again."""

import msgspec

from postroom.core.lifecycle import NANOS_PER_S


class RetryPolicy(msgspec.Struct, frozen=True):
    """How often, and with which pauses."""

    max_retries: int = 3
    first_delay_s: float = 1.0
    factor: float = 2.0
    delay_s_max: float = 300.0

    def delay_ns(self, retries: int, retry_in_s: float | None) -> int:
        """The pause after the failure that follows `retries` earlier ones; a caller's own wish wins."""
        if retry_in_s is None:
            retry_in_s = min(self.first_delay_s * self.factor**retries, self.delay_s_max)
        return round(retry_in_s * NANOS_PER_S)
