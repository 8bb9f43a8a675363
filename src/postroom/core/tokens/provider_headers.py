"""What a provider says about its limits in the headers of an answer: `x-ratelimit-*` and `retry-after`.

Rule 1: a provider can lower a limit, report use by others, and ask for a pause. It cannot raise a limit.
Rule 2: a header that cannot be read is left out. No header can raise an error.
"""

import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Final

import msgspec
from msgspec.structs import replace

from postroom.calls.fields import TOKENS_MAX
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.tokens.token_rules import (
    REQUESTS_DAY,
    REQUESTS_MINUTE,
    TOKENS_DAY,
    TOKENS_MINUTE,
    Four,
    four,
)
from postroom.core.tokens.tokens import Account, free_of

HEADER_S_MAX: Final = 86_400.0  # a longer wait in a header counts as this one
DIGITS_MAX: Final = 18  # a longer number counts as `TOKENS_MAX`


class Observed(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the headers of a provider's answer say; None for what they do not say."""

    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    reset_tokens_s: float | None = None
    limit_requests: int | None = None
    remaining_requests: int | None = None
    reset_requests_s: float | None = None
    retry_after_s: float | None = None


_DURATION: Final = re.compile(
    r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?(?:(\d+(?:\.\d+)?)ms)?"
)
_UNIT_S: Final = (86_400.0, 3_600.0, 60.0, 1.0, 0.001)


def observed(headers: Mapping[str, str], wall_us: int) -> Observed:
    """Read `x-ratelimit-*` and `retry-after`. Values that cannot be read are left out."""
    found = {str(name).lower(): str(value).strip() for name, value in headers.items()}

    def number(name: str) -> int | None:
        value = found.get(name, "")
        if not (value.isascii() and value.isdigit()):
            return None
        digits = value.lstrip("0")
        return TOKENS_MAX if len(digits) > DIGITS_MAX else min(int(digits or "0"), TOKENS_MAX)

    def seconds(name: str) -> float | None:
        return _seconds(found.get(name, ""))

    return Observed(
        number("x-ratelimit-limit-tokens"),
        number("x-ratelimit-remaining-tokens"),
        seconds("x-ratelimit-reset-tokens"),
        number("x-ratelimit-limit-requests"),
        number("x-ratelimit-remaining-requests"),
        seconds("x-ratelimit-reset-requests"),
        _after(found, wall_us),
    )


def _seconds(text: str) -> float | None:
    """A number of seconds, or a duration such as 6m0s or 120ms."""
    try:
        value = float(text)
    except ValueError:
        match = _DURATION.fullmatch(text)
        if match is None or not text:
            return None
        value = sum(unit * float(part) for unit, part in zip(_UNIT_S, match.groups(), strict=True) if part)
    return min(value, HEADER_S_MAX) if value >= 0 else None


def _after(found: Mapping[str, str], wall_us: int) -> float | None:
    """`retry-after`: seconds, or a date."""
    text = found.get("retry-after", "")
    value = _seconds(text)
    if value is None and text:
        try:
            value = parsedate_to_datetime(text).timestamp() - wall_us / 1e6
        except (ValueError, TypeError, OverflowError):
            return None
    return None if value is None else min(max(value, 0.0), HEADER_S_MAX)


def observe(account: Account, said: Observed, now_ns: int) -> Account:
    """Follow what a provider says: a lower limit, fewer tokens left, a later reset, a pause."""
    tokens = TOKENS_MINUTE if account.limits[TOKENS_MINUTE] else TOKENS_DAY
    requests = REQUESTS_MINUTE if account.limits[REQUESTS_MINUTE] else REQUESTS_DAY
    account = _observe_window(
        account, tokens, said.limit_tokens, said.remaining_tokens, said.reset_tokens_s, now_ns
    )
    account = _observe_window(
        account, requests, said.limit_requests, said.remaining_requests, said.reset_requests_s, now_ns
    )
    if said.retry_after_s is not None:
        until = now_ns + round(said.retry_after_s * NANOS_PER_S)
        account = replace(account, blocked_until=max(account.blocked_until, until))
    return account


def _observe_window(
    account: Account,
    window: int,
    limit: int | None,
    remaining: int | None,
    reset_s: float | None,
    now_ns: int,
) -> Account:
    if not account.limits[window]:
        return account
    if limit:
        account = replace(account, stated=_with(account.stated, window, limit))
    missing = 0 if remaining is None else free_of(account, window) - remaining
    if missing <= 0:
        return account
    account = replace(account, outside=_with(account.outside, window, account.outside[window] + missing))
    if reset_s is None:
        return account
    resets = _with(account.resets, window, max(now_ns + round(reset_s * NANOS_PER_S), now_ns + 1))
    next_ns = min(end for end, limit in zip(resets, account.limits, strict=True) if limit)
    return replace(account, resets=resets, next_ns=next_ns)


def _with(values: Four, window: int, value: int) -> Four:
    changed = [*values]
    changed[window] = value
    return four(changed)
