"""The rate of calls: how many of them are allowed now.

A caller that was silent for `BURST_S` may make the calls of that time at once, and always one call.
"""

from typing import NamedTuple

BURST_S = 1.0


class Allowance(NamedTuple):
    """How many of the calls are allowed, and the state that remains."""

    calls: int
    paid_until_s: float
    """The time up to which the rate is used up."""
    wait_s: float
    """The time until one more call is allowed."""


def allowance(paid_until_s: float, rate: float, calls: int, now_s: float) -> Allowance:
    """The calls that a caller with this rate may make now, up to `calls`."""
    burst_s = max(BURST_S, 1 / rate)
    begin_s = max(paid_until_s, now_s - burst_s)
    allowed = min(calls, int((now_s - begin_s) * rate + 1e-9))  # a float may lack a little of a whole call
    paid_until_s = begin_s + allowed / rate
    return Allowance(allowed, paid_until_s, max(0.0, paid_until_s + 1 / rate - now_s))
