"""The rate limits of tokens in one server process."""

import time
from collections import OrderedDict
from collections.abc import Callable

from postroom.core.call_limits import Allowance, allowance
from postroom.errors import RateExceeded
from postroom.server.access.registry import Identity

CALLERS_MAX = 20_000  # whose last calls are kept: more than there can be tokens and agents


class RateLimits:
    """Counts the calls of each token. A token without a rate of its own has `default`; 0 means no limit."""

    def __init__(self, default: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._default = default
        self._clock = clock
        self._paid_until: OrderedDict[str, float] = OrderedDict()

    def check(self, identity: Identity) -> None:
        """Count one call. Raises `RateExceeded` when it comes too soon."""
        rate = identity.rate or self._default
        if rate and not (found := self.take(identity.caller, rate)).calls:
            raise RateExceeded(identity.name, rate, found.wait_s)

    def take(self, caller: str, rate: float, calls: int = 1) -> Allowance:
        """Count as many of the calls as the rate allows."""
        found = allowance(self._paid_until.pop(caller, 0.0), rate, calls, self._clock())
        self._paid_until[caller] = found.paid_until_s
        if len(self._paid_until) > CALLERS_MAX:
            self._paid_until.popitem(last=False)
        return found
