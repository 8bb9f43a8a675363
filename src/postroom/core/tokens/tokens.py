"""Token budgets of models: which model a message may use now, and how many tokens, as values.

Rule 1: an account holds the books of one model. used + reserved + free is its limit at every instant.
Rule 2: `allocate` only decides. `reserve` books what it granted; `settle` books what was used of it, and
        returns the rest. A lease that lapsed has used nothing.
Rule 3: a grant is taken from the message's own tier, then from what no tier reserves, then from lower tiers.
        The unused part is returned in the opposite order, so that loans stay small.
Rule 4: nothing here reads a clock. Times are nanoseconds of the store's clock.
"""

import math
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import msgspec
from msgspec.structs import replace

from postroom.calls.fields import TOKENS_MAX
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.tokens.token_rules import (
    NONE_OF_4,
    REQUESTS_MINUTE,
    SHARED,
    SPARE_SHARE,
    TIERS,
    TOKENS_DAY,
    TOKENS_MINUTE,
    WINDOWS,
    Five,
    Four,
    ModelRule,
    Shortage,
    four,
)

WINDOW_NS: Final = tuple(seconds * NANOS_PER_S for seconds in (60, 86_400, 60, 86_400))
BLOCKED_FULL: Final = 4  # from this number of dependants on, they give their full share of importance
RETRIES_FULL: Final = 3
BLOCKED_WEIGHT: Final = 0.75
DEGRADED_SHARE: Final = 0.5  # of the tokens asked for; a degraded message gets at least these
BYTES_A_TOKEN: Final = 4  # of English text, on average; what an attempt reports corrects it
QUEUE_LOOK_NS: Final = NANOS_PER_S  # how long a message of the policy "queue" waits until it is tried again
NONE_OF_5: Final[Five] = (0, 0, 0, 0, 0)


# ---- estimates -------------------------------------------------------------------------------------


class _Answer(msgspec.Struct):
    """How long the answer to a model call may be, under the names that providers use."""

    max_tokens: Any = 0
    max_completion_tokens: Any = 0
    max_output_tokens: Any = 0


_answer = msgspec.json.Decoder(_Answer).decode


def estimate(payload: bytes) -> int:
    """The tokens of a model call: its payload by its length, and the longest answer that it allows."""
    found = _answer(payload)
    named = (found.max_tokens, found.max_completion_tokens, found.max_output_tokens)
    answer = max([0, *(most for most in named if type(most) is int)])
    return min(TOKENS_MAX, math.ceil(len(payload) / BYTES_A_TOKEN) + answer)


# ---- the books of a model --------------------------------------------------------------------------


class Account(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The books of one model. Windows are numbered as in `WINDOWS`, pools are P0 to P3 and `SHARED`."""

    limits: Four = NONE_OF_4
    """The limits of the policy."""
    next_ns: int = 0
    """When the first window ends."""
    resets: Four = NONE_OF_4
    """When each window ends."""
    used: Four = NONE_OF_4
    outside: Four = NONE_OF_4
    """What others have used of the same limits, as far as the provider says."""
    tokens: int = 0
    """Reserved tokens."""
    requests: int = 0
    """Requests under way."""
    pools: Five = NONE_OF_5
    """Sizes of the pools in this window: by the policy, after repayments and rebalancing."""
    pool_used: Five = NONE_OF_5
    pool_reserved: Five = NONE_OF_5
    lending: int = 0
    """Reserved tokens that are borrowed."""
    debt: Four = NONE_OF_4
    """Used tokens that each tier borrowed in this window."""
    lent: Four = NONE_OF_4
    """Used tokens that each tier lent in this window."""
    short: Four = NONE_OF_4
    """Tokens that were refused in this window, by tier."""
    stated: Four = NONE_OF_4
    """Limits that the provider stated; 0 for none."""
    blocked_until: int = 0
    """The provider asked for a pause up to this time."""


class Refill(msgspec.Struct, frozen=True):
    """How the pools of a new window differ from those of the policy."""

    repaid: int = 0
    """Tokens that tiers gave back to their lenders."""
    moved: int = 0
    """Tokens that rebalancing moved."""
    pools: Five = NONE_OF_5


def limit_of(account: Account, window: int) -> int:
    """The limit of a window: the smaller one of the policy's and the provider's; 0 for none."""
    limit, stated = account.limits[window], account.stated[window]
    return stated if 0 < stated < limit else limit


def taken_of(account: Account, window: int) -> int:
    """Used and reserved tokens or requests of a window."""
    reserved = account.tokens if window < REQUESTS_MINUTE else account.requests
    return account.used[window] + account.outside[window] + reserved


def free_of(account: Account, window: int) -> int:
    """What is free in a window with a limit."""
    return max(0, limit_of(account, window) - taken_of(account, window))


def borrowed_of(account: Account) -> int:
    """Reserved and used tokens of this window that came from another tier."""
    return account.lending + sum(account.debt)


def current(account: Account, rule: ModelRule, now_ns: int) -> tuple[Account, Refill | None]:
    """The account at a time: windows that are over begin again. The second value has changes of the pools."""
    if now_ns < account.next_ns and account.limits == rule.limits:
        return account, None
    resets, used, outside = [*account.resets], [*account.used], [*account.outside]
    for window in range(len(WINDOWS)):
        if now_ns >= resets[window]:
            resets[window] = (now_ns // WINDOW_NS[window] + 1) * WINDOW_NS[window]
            used[window] = outside[window] = 0
    fresh = replace(
        account,
        limits=rule.limits,
        resets=four(resets),
        next_ns=min(end for end, limit in zip(resets, rule.limits, strict=True) if limit),
        used=four(used),
        outside=four(outside),
    )
    if resets[rule.main] != account.resets[rule.main]:
        return _refilled(fresh, rule)
    return (fresh if account.limits == rule.limits else replace(fresh, pools=rule.pools)), None


def _refilled(account: Account, rule: ModelRule) -> tuple[Account, Refill | None]:
    """The pools of a new window: loans are repaid, and short tiers get what others left unused."""
    pools = [*rule.pools]
    repaid = _repay(pools, account)
    moved = _rebalance(pools, account)
    fresh = replace(
        account, pools=_five(pools), pool_used=NONE_OF_5, debt=NONE_OF_4, lent=NONE_OF_4, short=NONE_OF_4
    )
    if repaid or moved or account.pools not in (NONE_OF_5, fresh.pools):
        return fresh, Refill(repaid, moved, fresh.pools)
    return fresh, None


def _repay(pools: list[int], account: Account) -> int:
    """Move what tiers borrowed to their lenders, as far as the borrowers' new pools go."""
    paid = 0
    for tier, debt in enumerate(account.debt):
        for pool in (tier, SHARED):
            part = min(debt, pools[pool])
            pools[pool] -= part
            debt -= part  # noqa: PLW2901 - what is still owed
            paid += part
    left = paid
    for tier in reversed(range(TIERS)):
        part = min(left, account.lent[tier])
        pools[tier] += part
        left -= part
    return paid


def _rebalance(pools: list[int], account: Account) -> int:
    """Move half of what tiers without a shortage left unused to tiers that were short."""
    demand = [used + held for used, held in zip(account.pool_used, account.pool_reserved, strict=True)]
    spare = [
        0 if account.short[tier] else int(SPARE_SHARE * max(0, pools[tier] - demand[tier]))
        for tier in range(TIERS)
    ]
    moved = 0
    for tier, wanted in enumerate(account.short):
        for lender in reversed(range(TIERS)):
            part = min(wanted, spare[lender])
            spare[lender] -= part
            pools[lender] -= part
            pools[tier] += part
            wanted -= part  # noqa: PLW2901 - what is still wanted
            moved += part
    return moved


def _five(values: Sequence[int]) -> Five:
    return values[0], values[1], values[2], values[3], values[4]


# ---- allocation ------------------------------------------------------------------------------------


class Need(msgspec.Struct, frozen=True, gc=False):
    """The tokens that a message requests, and how it may get them."""

    tokens: int
    tier: int
    """Its priority, 0 to 3."""
    importance: float = 0.0
    """From 0 to 1: the share of a lower tier's free tokens that it may borrow."""
    has_preferences: bool = False
    """Whether the order of the candidates is the sender's. Otherwise the one with most free tokens leads."""
    shortage: Shortage = "defer"


class Grant(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Tokens of one model that a message may use."""

    provider: str
    model: str
    tokens: int
    tier: int
    parts: Five
    """How many come from each pool."""
    wanted: int = 0
    """The tokens asked for when they are more than these: the message is degraded."""
    is_estimate: bool = False
    """Whether the sender named no tokens: then the attempt may use more."""

    @property
    def borrowed(self) -> int:
        """Tokens of other tiers."""
        return self.tokens - self.parts[self.tier] - self.parts[SHARED]


class Short(msgspec.Struct, frozen=True, gc=False):
    """No model has the tokens."""

    due_ns: int
    """The earliest time at which one of them may have."""


Candidate: TypeAlias = tuple[ModelRule, Account]


def importance(blocked: int, retries: int) -> float:
    """How much depends on a message, from 0 to 1: messages that wait for it, and its failures."""
    waiting = min(blocked, BLOCKED_FULL) / BLOCKED_FULL
    failed = min(retries, RETRIES_FULL) / RETRIES_FULL
    return BLOCKED_WEIGHT * waiting + (1 - BLOCKED_WEIGHT) * failed


def allocate(
    need: Need, candidates: Sequence[Candidate], now_ns: int, others: Sequence[Candidate] = ()
) -> Grant | Short:
    """Choose a model and reserve nothing yet: own tier, then loans, then what the policy does in a shortage.

    `others` are models that the message did not ask for; a degraded message may get one of them.
    """
    if len(candidates) > 1 and not need.has_preferences:
        candidates = sorted(candidates, key=lambda one: free_of(one[1], one[0].main), reverse=True)
    roomy = [one for one in candidates if _has_room(one[1], need.tokens, now_ns)]
    found = _first(need, roomy, 0.0)
    if found is None and need.importance > 0:
        found = _first(need, roomy, need.importance)
    if found is None and need.shortage == "degrade":
        found = _degraded(need, candidates, now_ns, others)
    return found or Short(_due_ns(need, candidates, now_ns))


def _first(need: Need, roomy: Sequence[Candidate], share: float) -> Grant | None:
    """The first of models with room that has the tokens, with loans of this share of lower tiers' tokens."""
    tokens, tier = need.tokens, need.tier
    for rule, account in roomy:
        if rule.main >= REQUESTS_MINUTE:  # no limit of tokens, so no tiers either
            return Grant(rule.provider, rule.name, tokens, tier, (0, 0, 0, 0, tokens))
        parts = _parts(account, tokens, tier, share)
        if parts is not None:
            return Grant(rule.provider, rule.name, tokens, tier, parts)
    return None


def _has_room(account: Account, tokens: int, now_ns: int) -> bool:
    if account.blocked_until > now_ns:
        return False
    limits, stated, used, outside = account.limits, account.stated, account.used, account.outside
    for window in range(4):
        limit = limits[window]
        if limit:
            if 0 < stated[window] < limit:
                limit = stated[window]
            more = account.tokens + tokens if window < REQUESTS_MINUTE else account.requests + 1
            if used[window] + outside[window] + more > limit:
                return False
    return True


def _parts(account: Account, tokens: int, tier: int, share: float) -> Five | None:
    """How many tokens each pool gives; None when the pools do not suffice."""
    pools, used, reserved = account.pools, account.pool_used, account.pool_reserved
    parts = [0, 0, 0, 0, 0]
    left = tokens
    for pool in (tier, SHARED):
        free = pools[pool] - used[pool] - reserved[pool]
        if free > 0:
            parts[pool] = min(free, left)
            left -= parts[pool]
            if not left:
                return parts[0], parts[1], parts[2], parts[3], parts[4]
    if share:
        for pool in range(TIERS - 1, tier, -1):
            free = pools[pool] - used[pool] - reserved[pool]
            if free > 0:
                parts[pool] = part = min(left, int(share * free))
                left -= part
    return None if left else _five(parts)


def _degraded(
    need: Need, candidates: Sequence[Candidate], now_ns: int, others: Sequence[Candidate]
) -> Grant | None:
    """Another model, or fewer tokens of a model that the message asked for."""
    roomy = [one for one in others if _has_room(one[1], need.tokens, now_ns)]
    found = _first(need, roomy, need.importance)
    if found is not None:
        return found
    least = max(1, math.ceil(need.tokens * DEGRADED_SHARE))
    for rule, account in (*candidates, *others):
        tokens = min(need.tokens, _most(rule, account, need))
        if tokens >= least and _has_room(account, tokens, now_ns):
            found = _first(replace(need, tokens=tokens), [(rule, account)], need.importance)
            if found is not None:
                return replace(found, wanted=need.tokens)
    return None


def _most(rule: ModelRule, account: Account, need: Need) -> int:
    """The most tokens of a model that a message can get now."""
    windows = [
        free_of(account, window) for window in (TOKENS_MINUTE, TOKENS_DAY) if limit_of(account, window)
    ]
    if rule.main >= REQUESTS_MINUTE:
        return need.tokens
    free = [
        max(0, size - used - reserved)
        for size, used, reserved in zip(account.pools, account.pool_used, account.pool_reserved, strict=True)
    ]
    lower = sum(int(need.importance * free[pool]) for pool in range(need.tier + 1, TIERS))
    return min(*windows, free[need.tier] + free[SHARED] + lower)


def _due_ns(need: Need, candidates: Sequence[Candidate], now_ns: int) -> int:
    """When the first model may have the tokens: after the reset of what is missing now."""
    if len(candidates) == 1:
        return _ready_ns(need, *candidates[0], now_ns)
    able = [one for one in candidates if one[0].reach[need.tier] >= need.tokens]
    return min((_ready_ns(need, *one, now_ns) for one in able or candidates), default=now_ns + NANOS_PER_S)


def _ready_ns(need: Need, rule: ModelRule, account: Account, now_ns: int) -> int:
    due = max(account.blocked_until, now_ns + 1)
    if _has_room(account, need.tokens, now_ns):
        return max(due, account.resets[rule.main])  # its tier has too few: the window fills the pools again
    for window, limit in enumerate(account.limits):
        if limit and free_of(account, window) < (need.tokens if window < REQUESTS_MINUTE else 1):
            due = max(due, account.resets[window])
    return due


# ---- booking ---------------------------------------------------------------------------------------


def reserve(account: Account, grant: Grant) -> Account:
    """Book a grant."""
    a, b = account.pool_reserved, grant.parts
    return Account(
        account.limits, account.next_ns, account.resets, account.used, account.outside,
        account.tokens + grant.tokens, account.requests + 1, account.pools, account.pool_used,
        (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4]),
        account.lending + grant.borrowed, account.debt, account.lent, account.short, account.stated,
        account.blocked_until,
    )  # fmt: skip


def settle(account: Account, grant: Grant, used: int, *, ran: bool) -> Account:
    """Book what was used of a grant, and return the rest. `ran` counts a request."""
    parts = used_parts(grant, used)
    debt, lent, lending = account.debt, account.lent, account.lending
    if grant.parts[grant.tier] + grant.parts[SHARED] != grant.tokens:
        lending -= grant.borrowed
        borrowed = [0 if pool == grant.tier else part for pool, part in enumerate(parts[:TIERS])]
        debts = [*debt]
        debts[grant.tier] += sum(borrowed)
        debt, lent = four(debts), four([a + b for a, b in zip(lent, borrowed, strict=True)])
    u, a, b, c = account.used, account.pool_used, account.pool_reserved, grant.parts
    return Account(
        account.limits, account.next_ns, account.resets, (u[0] + used, u[1] + used, u[2] + ran, u[3] + ran),
        account.outside, account.tokens - grant.tokens, account.requests - 1, account.pools,
        (a[0] + parts[0], a[1] + parts[1], a[2] + parts[2], a[3] + parts[3], a[4] + parts[4]),
        (b[0] - c[0], b[1] - c[1], b[2] - c[2], b[3] - c[3], b[4] - c[4]),
        lending, debt, lent, account.short, account.stated, account.blocked_until,
    )  # fmt: skip


def extend(account: Account, grant: Grant, used: int) -> tuple[Account, Grant]:
    """Book what an attempt used beyond its estimate, as far as the limits go, in the pool of its tier."""
    windows = [free_of(account, window) for window in (TOKENS_MINUTE, TOKENS_DAY) if account.limits[window]]
    more = min([used - grant.tokens, *windows])
    pool = grant.tier if grant.parts[grant.tier] else SHARED
    parts, reserved = [*grant.parts], [*account.pool_reserved]
    parts[pool] += more
    reserved[pool] += more
    account = replace(account, tokens=account.tokens + more, pool_reserved=_five(reserved))
    return account, replace(grant, tokens=grant.tokens + more, parts=_five(parts))


def used_parts(grant: Grant, used: int) -> Five:
    """What was used of each pool: loans are used last."""
    if used == grant.tokens:
        return grant.parts
    parts = [0, 0, 0, 0, 0]
    for pool in (grant.tier, SHARED, *range(TIERS - 1, grant.tier, -1)):
        parts[pool] = min(used, grant.parts[pool])
        used -= parts[pool]
    return _five(parts)


class Purse:
    """The free tokens of a model during one claim: `take` is a faster `allocate` for messages without loans.

    A purse gives tokens of a message's own tier and those that no tier reserves. A message that needs others
    goes through `allocate`.
    """

    __slots__ = ("_account", "_begun", "_free", "_grants", "_requests", "_requests_begun", "_room", "_rule")

    def __init__(self, rule: ModelRule, account: Account, now_ns: int) -> None:
        self._rule = rule
        self._account = account
        rooms = [TOKENS_MAX] * 4
        for window, limit in enumerate(account.limits):
            if limit:
                rooms[window] = free_of(account, window)
        self._room = 0 if account.blocked_until > now_ns else min(rooms[:REQUESTS_MINUTE])
        self._requests = self._requests_begun = min(rooms[REQUESTS_MINUTE:])
        if rule.main < REQUESTS_MINUTE:
            books = zip(account.pools, account.pool_used, account.pool_reserved, strict=True)
            self._free = [size - used - reserved for size, used, reserved in books]
        else:
            self._free = [0, 0, 0, 0, self._room]
        self._begun = [*self._free]
        self._grants: dict[tuple[int, int], Grant] = {}

    def take(self, tokens: int, tier: int) -> Grant | None:
        """Reserve tokens; None when this purse does not have them."""
        free = self._free
        if tokens > self._room or not self._requests:
            return None
        if tokens > free[tier]:
            return self._take_shared(tokens, tier)
        free[tier] -= tokens
        self._room -= tokens
        self._requests -= 1
        grant = self._grants.get((tokens, tier))
        if grant is None:
            parts = [0, 0, 0, 0, 0]
            parts[tier] = tokens
            grant = Grant(self._rule.provider, self._rule.name, tokens, tier, _five(parts))
            self._grants[tokens, tier] = grant
        return grant

    def _take_shared(self, tokens: int, tier: int) -> Grant | None:
        free = self._free
        own = max(0, free[tier])
        if own + free[SHARED] < tokens:
            return None
        parts = [0, 0, 0, 0, 0]
        parts[tier], parts[SHARED] = own, tokens - own
        free[tier] -= own
        free[SHARED] -= tokens - own
        self._room -= tokens
        self._requests -= 1
        return Grant(self._rule.provider, self._rule.name, tokens, tier, _five(parts))

    @property
    def account(self) -> Account:
        """The account with everything that was taken."""
        count = self._requests_begun - self._requests
        if count:
            account = self._account
            taken = [begun - free for begun, free in zip(self._begun, self._free, strict=True)]
            self._account = replace(
                account,
                tokens=account.tokens + sum(taken),
                requests=account.requests + count,
                pool_reserved=_five([a + b for a, b in zip(account.pool_reserved, taken, strict=True)]),
            )
            self._begun, self._requests_begun = [*self._free], self._requests
        return self._account


def refuse(account: Account, tier: int, tokens: int) -> Account:
    """Note that a tier was short of tokens: the next rebalancing looks at it."""
    short = [*account.short]
    short[tier] = min(short[tier] + tokens, TOKENS_MAX)
    return replace(account, short=four(short))
