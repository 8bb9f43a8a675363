"""The settings of token budgets: providers, models, their limits, and the shares of priority tiers.

Rule 1: the error for a wrong setting names the provider or the model.
Rule 2: a limit is counted in windows of a minute or a day. Tiers share the first limit of a model.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import msgspec

from postroom.calls.fields import TOKENS_MAX
from postroom.errors import InvalidSetting, shown

TIERS: Final = 4
SHARED: Final = 4  # the pool of tokens that no tier reserves
WINDOWS: Final = ("tokens_per_minute", "tokens_per_day", "requests_per_minute", "requests_per_day")
TOKENS_MINUTE, TOKENS_DAY, REQUESTS_MINUTE, REQUESTS_DAY = range(4)
SPARE_SHARE: Final = 0.5  # of the tokens that a tier left unused; rebalancing gives them to short tiers

PROVIDERS_MAX: Final = 100
MODELS_A_PROVIDER_MAX: Final = 1_000
MODEL_CHARS_MAX: Final = 128

Shortage: TypeAlias = Literal["queue", "degrade", "defer"]
Four: TypeAlias = tuple[int, int, int, int]
Five: TypeAlias = tuple[int, int, int, int, int]
NONE_OF_4: Final[Four] = (0, 0, 0, 0)


class ModelRule(msgspec.Struct, frozen=True, gc=False):
    """One model of one provider."""

    provider: str
    name: str
    limits: Four
    """By window; 0 for no limit."""
    main: int
    """The window that tiers share: the first one that is limited."""
    pools: Five
    """The limit of that window by tier, and what no tier reserves."""
    usd_per_million_tokens: float = 0.0
    reach: Four = NONE_OF_4
    """The most tokens that a message of each tier can ever get: its pools, all loans, and rebalancing."""


class TokenRules(msgspec.Struct, frozen=True):
    """The budgets of a policy."""

    models: tuple[ModelRule, ...]
    named: Mapping[str, tuple[ModelRule, ...]]
    """Models by name, and by provider and name with a slash between them."""
    tiers: tuple[float, ...]
    shortage: Shortage = "defer"

    def candidates(self, names: Sequence[str]) -> tuple[ModelRule, ...]:
        """The models that a message may use, the preferred one first; without names, all of them."""
        if not names:
            return self.models
        if len(names) == 1:
            return self.named.get(names[0], ())
        return tuple(dict.fromkeys(rule for name in names for rule in self.named.get(name, ())))

    def cost_usd(self, model: str, tokens: int) -> float:
        """What tokens of a model cost; 0 when no price is known."""
        prices = [rule.usd_per_million_tokens for rule in self.named.get(model, ())]
        return prices[0] * tokens / 1_000_000 if prices else 0.0


def token_rules(config: Mapping[str, Any]) -> TokenRules | None:
    """The rules of `Policy(tokens=…)`, or an error that says what does not fit; None when there are none."""
    if not config:
        return None
    _only(config, "tokens", ("providers", "tiers", "shortage"))
    providers = _object(config.get("providers"), "tokens needs providers", PROVIDERS_MAX)
    tiers = _tiers(config.get("tiers", (0.0,) * TIERS))
    shortage = config.get("shortage", "defer")
    if shortage not in ("queue", "degrade", "defer"):
        raise InvalidSetting(
            f'the shortage of tokens must be "queue", "degrade" or "defer", not {shown(shortage)}'
        )
    models = tuple(
        _model(provider, name, limits, tiers)
        for provider, found in providers.items()
        for name, limits in _models(provider, found).items()
    )
    named: dict[str, tuple[ModelRule, ...]] = {}
    for rule in models:
        for name in (rule.name, f"{rule.provider}/{rule.name}"):
            named[name] = (*named.get(name, ()), rule)
    return TokenRules(models, named, tiers, shortage)


def _only(config: Mapping[str, Any], whose: str, known: Sequence[str]) -> None:
    for name in config:
        if name not in known:
            raise InvalidSetting(f"{whose} has no key {name!r}: the keys are {', '.join(known)}")


def _object(value: object, what: str, limit: int) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not 0 < len(value) <= limit:
        raise InvalidSetting(f"{what}: an object of 1 to {limit} names")
    for name in value:
        if not isinstance(name, str) or not 0 < len(name) <= MODEL_CHARS_MAX or not name.isprintable():
            raise InvalidSetting(
                f"a provider or model has a name of up to {MODEL_CHARS_MAX} printable characters, "
                f"not {shown(name)}"
            )
    return value


def _models(provider: str, found: object) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise InvalidSetting(f"provider {provider} must be an object with models, not {shown(found)}")
    _only(found, f"provider {provider}", ("models",))
    return _object(found.get("models"), f"provider {provider} needs models", MODELS_A_PROVIDER_MAX)


def _tiers(tiers: object) -> tuple[float, ...]:
    shares = tuple(tiers) if isinstance(tiers, list | tuple) else ()
    is_share = [type(share) in (int, float) and 0 <= share <= 1 for share in shares]
    if len(shares) != TIERS or not all(is_share) or not math.fsum(shares) <= 1 + 1e-9:
        raise InvalidSetting(
            f"tiers of tokens must be four shares, for P0 to P3, of at most 1 in all, not {shown(tiers)}"
        )
    return tuple(float(share) for share in shares)


def _model(provider: str, name: str, limits: object, tiers: tuple[float, ...]) -> ModelRule:
    whose = f"model {name} of provider {provider}"
    if not isinstance(limits, Mapping):
        raise InvalidSetting(f"{whose} must be an object with limits, not {shown(limits)}")
    _only(limits, whose, (*WINDOWS, "usd_per_million_tokens"))
    found = [_limit(whose, window, limits.get(window)) for window in WINDOWS]
    if not any(found):
        raise InvalidSetting(f"{whose} needs at least one limit, such as tokens_per_minute")
    price = limits.get("usd_per_million_tokens", 0.0)
    if type(price) not in (int, float) or not 0 <= price <= TOKENS_MAX:
        raise InvalidSetting(
            f"usd_per_million_tokens of {whose} must be a number of 0 or more, not {shown(price)}"
        )
    main = next(window for window, limit in enumerate(found) if limit)
    pools = pools_of(found[main], tiers)
    return ModelRule(provider, name, four(found), main, pools, price, _reach(found, pools))


def _limit(whose: str, window: str, limit: object) -> int:
    if limit is None:
        return 0
    if type(limit) is not int or not 0 < limit <= TOKENS_MAX:
        raise InvalidSetting(
            f"{window} of {whose} must be a whole number from 1 to {TOKENS_MAX}, not {shown(limit)}"
        )
    return limit


def pools_of(limit: int, tiers: Sequence[float]) -> Five:
    """A limit by tier, and what no tier reserves."""
    own = [int(limit * share + 1e-9) for share in tiers]
    return own[0], own[1], own[2], own[3], limit - sum(own)


def _reach(limits: Sequence[int], pools: Five) -> Four:
    of_tokens = [limit for limit in limits[:REQUESTS_MINUTE] if limit]
    if not of_tokens:
        return (TOKENS_MAX,) * TIERS
    spare = [int(SPARE_SHARE * size) for size in pools]
    reach = [sum(spare[:tier]) + sum(pools[tier:TIERS]) + pools[SHARED] for tier in range(TIERS)]
    return four([min(*of_tokens, one) for one in reach])


def four(values: Sequence[int]) -> Four:
    """The first four values as a tuple."""
    return values[0], values[1], values[2], values[3]
