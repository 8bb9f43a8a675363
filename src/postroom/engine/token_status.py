"""`engine.tokens`: the status of the token budgets."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.tokens import tokens
from postroom.core.tokens.token_rules import REQUESTS_MINUTE, SHARED, WINDOWS, ModelRule, TokenRules
from postroom.core.tokens.tokens import Account
from postroom.engine.rules.cells import ACCOUNTS, SEPARATOR, TOKEN_USES, Hold, TokenUse
from postroom.engine.rules.token_budgets import all_holds
from postroom.stores.transaction import Transaction

if TYPE_CHECKING:
    from postroom.engine.commits import Commits


class WindowTokens(msgspec.Struct, frozen=True):
    """One limit of a model. used + reserved + free is the limit."""

    limit: int
    used: int
    reserved: int
    free: int
    resets_in_s: float


class TierTokens(msgspec.Struct, frozen=True):
    """The pool of one priority. Tier -1 is the pool of tokens that no priority reserves."""

    tier: int
    limit: int
    used: int
    reserved: int
    free: int


class OrganizationTokens(msgspec.Struct, frozen=True):
    """The figures of an organization for one model in the present window."""

    used: int = 0
    reserved: int = 0
    borrowed: int = 0
    refused: int = 0


class ModelTokens(msgspec.Struct, frozen=True):
    """The tokens of a model, in the first of its windows. used + reserved + free is the limit."""

    limit: int
    used: int
    reserved: int
    free: int
    borrowed: int
    """Used and reserved tokens that came from a lower tier; they are among them."""
    window: str
    """The limit that these figures are about, such as tokens_per_minute."""
    resets_in_s: float
    blocked_s: float
    """Seconds until the end of a pause that the provider asked for."""
    windows: dict[str, WindowTokens]
    tiers: list[TierTokens]
    organizations: dict[str, OrganizationTokens]


class ProviderTokens(msgspec.Struct, frozen=True):
    """The models of a provider."""

    models: dict[str, ModelTokens]


class TokenStatus(msgspec.Struct, frozen=True):
    """The status of the token budgets."""

    providers: dict[str, ProviderTokens]

    def of_organization(self, org_id: str) -> "TokenStatus":
        """This status without the figures of other organizations."""
        return TokenStatus(
            {
                name: ProviderTokens(
                    {
                        model: replace(found, organizations=_only(found.organizations, org_id))
                        for model, found in provider.models.items()
                    }
                )
                for name, provider in self.providers.items()
            }
        )


def _only(found: Mapping[str, OrganizationTokens], org_id: str) -> dict[str, OrganizationTokens]:
    return {name: each for name, each in found.items() if name == org_id}


class Tokens:
    """`engine.tokens`."""

    def __init__(self, commits: "Commits") -> None:
        self._commits = commits

    async def status(self) -> TokenStatus:
        """The tokens of each model, and what each organization used, reserved, borrowed and was refused."""
        rules = self._commits.policy.token_rules
        return await self._commits.read(lambda operations: status_of(operations.transaction, rules))


def status_of(transaction: Transaction, rules: TokenRules | None) -> TokenStatus:
    """The status of the budgets. Without rules, the limits are those of the last reservation."""
    stored = {_name(key): account for key, account in ACCOUNTS.all(transaction)}
    known = {(rule.provider, rule.name): rule for rule in rules.models} if rules else {}
    holds = all_holds(transaction)
    uses = dict(TOKEN_USES.all(transaction))
    providers: dict[str, ProviderTokens] = {}
    for name in {**known, **stored} if rules is None else known:
        account, rule = stored.get(name, Account()), known.get(name)
        rule = rule or _rule_of(*name, account)
        live: list[Hold] = []
        for hold, is_live in holds:
            if (hold.grant.provider, hold.grant.model) != name:
                continue
            if is_live:
                live.append(hold)
            else:
                account = tokens.settle(account, hold.grant, 0, ran=False)
        account, _ = tokens.current(account, rule, transaction.steady_ns)
        shown = _model(account, rule, live, _uses_of(uses, name, account, rule), transaction.steady_ns)
        providers.setdefault(name[0], ProviderTokens({})).models[name[1]] = shown
    return TokenStatus(providers)


def _name(key: str) -> tuple[str, str]:
    provider, _, model = key.partition(SEPARATOR)
    return provider, model


def _rule_of(provider: str, model: str, account: Account) -> ModelRule:
    """The rule of a model as its account remembers it."""
    main = next((window for window, limit in enumerate(account.limits) if limit), 0)
    return ModelRule(provider, model, account.limits, main, account.pools)


def _uses_of(
    uses: Mapping[str, TokenUse], name: tuple[str, str], account: Account, rule: ModelRule
) -> dict[str, TokenUse]:
    prefix = SEPARATOR.join(name) + SEPARATOR
    until_ns = account.resets[rule.main]
    return {
        key.removeprefix(prefix): use
        for key, use in uses.items()
        if key.startswith(prefix) and use.until_ns == until_ns
    }


def _model(
    account: Account, rule: ModelRule, live: list[Hold], uses: Mapping[str, TokenUse], now_ns: int
) -> ModelTokens:
    windows = {
        name: _window(account, number, now_ns)
        for number, name in enumerate(WINDOWS)
        if account.limits[number]
    }
    main = windows[WINDOWS[rule.main]]
    return ModelTokens(
        limit=main.limit,
        used=main.used,
        reserved=main.reserved,
        free=main.free,
        borrowed=tokens.borrowed_of(account),
        window=WINDOWS[rule.main],
        resets_in_s=main.resets_in_s,
        blocked_s=max(0, account.blocked_until - now_ns) / NANOS_PER_S,
        windows=windows,
        tiers=_tiers(account, rule),
        organizations=_organizations(live, uses),
    )


def _window(account: Account, window: int, now_ns: int) -> WindowTokens:
    reserved = account.tokens if window < REQUESTS_MINUTE else account.requests
    used, free = account.used[window] + account.outside[window], tokens.free_of(account, window)
    # A provider or a new policy may lower a limit below what is in use: the limit follows when that ends.
    return WindowTokens(
        used + reserved + free, used, reserved, free, (account.resets[window] - now_ns) / NANOS_PER_S
    )


def _tiers(account: Account, rule: ModelRule) -> list[TierTokens]:
    if rule.main >= REQUESTS_MINUTE:
        return []
    books = zip(account.pools, account.pool_used, account.pool_reserved, strict=True)
    return [
        TierTokens(-1 if pool == SHARED else pool, size, used, reserved, size - used - reserved)
        for pool, (size, used, reserved) in enumerate(books)
    ]


def _organizations(live: list[Hold], uses: Mapping[str, TokenUse]) -> dict[str, OrganizationTokens]:
    found = {org: OrganizationTokens(use.used, 0, use.borrowed, use.refused) for org, use in uses.items()}
    for hold in live:
        before = found.get(hold.org_id, OrganizationTokens())
        found[hold.org_id] = replace(
            before,
            reserved=before.reserved + hold.grant.tokens,
            borrowed=before.borrowed + hold.grant.borrowed,
        )
    return dict(sorted(found.items()))
