"""Token budgets inside a transaction: reservations of claims, settlements of outcomes, and refills.

Rule 1: tokens are reserved in the commit that leases a message, and returned in the one that ends its lease.
Rule 2: a reservation belongs to a lease. It stops counting when the lease is over, for whatever reason: the
        status leaves it out, and the next sweep removes it.
Rule 3: accounts are read once and written once in a transaction, by `flush`.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import msgspec
from msgspec.structs import replace

from postroom.core.lifecycle import lifecycle
from postroom.core.names import unscoped
from postroom.core.tokens import tokens
from postroom.core.tokens.provider_headers import Observed, observe
from postroom.core.tokens.token_rules import SHARED, TIERS, ModelRule, TokenRules
from postroom.core.tokens.tokens import Account, Grant, Need, Purse, Short
from postroom.engine.messages import Body
from postroom.engine.rules import bodies
from postroom.engine.rules.cells import (
    ACCOUNTS,
    DEPENDANTS,
    HOLDS,
    HOLDS_SWEPT,
    SEPARATOR,
    TOKEN_USES,
    Hold,
    TokenUse,
    joined,
)
from postroom.message import ENGINE_PREFIX, Noted, Record, org_of
from postroom.stores.base import ByIds
from postroom.stores.transaction import Transaction

CLAIMS_SWEPT_MAX: Final = 1_000
LEASE_LAST: Final = 2**63 - 1
DEPENDANTS_LOOKED_MAX: Final = 100
MODEL_CALL: Final = "model_call"
"""The type of messages that use a model without naming one."""
SHORT: Final = "the token budget"
"""The beginning of the reason for which a message waits for tokens."""

Name: TypeAlias = tuple[str, str]
"""A provider and a model."""


class Spent(msgspec.Struct, frozen=True):
    """How a lease with a reservation ended."""

    used: int = 0
    ran: bool = False
    """Whether a request was made: False for a crash, a release and a deferral."""
    facts: dict[str, Any] = {}
    """Further facts for the event."""


NOTHING: Final = Spent()


class TokenBooks:
    """The accounts of one transaction."""

    def __init__(self, transaction: Transaction, rules: TokenRules) -> None:
        self._transaction = transaction
        self._rules = rules
        self._accounts: dict[Name, Account] = {}
        self._stored: dict[Name, Account | None] = {}
        self._purses: dict[Name, Purse] = {}
        """Accounts in the form for claims. An account with a purse is changed through it."""
        self._quick: dict[str, Purse] = {}
        """Purses by model name, for names that only one provider has."""
        self._uses: dict[tuple[str, str, str], TokenUse] = {}
        self._leased: list[tuple[Record, Grant]] = []
        """Messages that this transaction leased, with their tokens."""
        self._held: dict[str, dict[int, Hold]] = {}
        """Reservations of earlier claims that this transaction changes, by key and lease."""
        self._keys: dict[int, str] = {}
        """Their keys by lease."""
        self._events: list[Noted] = []

    # ---- accounts ------------------------------------------------------------------------------

    def account(self, rule: ModelRule) -> Account:
        """The books of a model at the time of the transaction."""
        name = rule.provider, rule.name
        purse = self._purses.pop(name, None)
        if purse is not None:
            self._accounts[name] = purse.account
            self._quick.clear()
        account = self._accounts.get(name)
        if account is None:
            stored = self._stored[name] = ACCOUNTS.get(self._transaction, *name)
            account, refill = tokens.current(stored or Account(), rule, self._transaction.steady_ns)
            self._accounts[name] = account
            if refill is not None:
                detail = {
                    "provider": rule.provider,
                    "model": rule.name,
                    "repaid": refill.repaid,
                    "moved": refill.moved,
                    "pools": [*refill.pools],
                }
                self._events.append(Noted("tokens_rebalanced", detail=detail))
        return account

    def _purse(self, rule: ModelRule) -> Purse:
        name = rule.provider, rule.name
        purse = self._purses.get(name)
        if purse is None:
            purse = Purse(rule, self.account(rule), self._transaction.steady_ns)
            self._purses[name] = purse
        return purse

    def flush(self) -> None:
        """Write what has changed."""
        transaction = self._transaction
        for name, purse in self._purses.items():
            self._accounts[name] = purse.account
        for name, account in self._accounts.items():
            if account is not self._stored[name]:
                ACCOUNTS.put(transaction, account, *name)
        for use_key, use in self._uses.items():
            TOKEN_USES.put(transaction, use, *use_key)
        for key, holds in self._held.items():
            HOLDS.put(transaction, [*holds.values()] or None, key)
        if self._leased:
            self._hold_all()
        if self._events:
            transaction.note(self._events)
        self._accounts, self._stored, self._purses, self._quick, self._uses = {}, {}, {}, {}, {}
        self._leased, self._held, self._keys, self._events = [], {}, {}, []

    # ---- claims --------------------------------------------------------------------------------

    def asking(self, type_name: str, record: Record, body: Body) -> Body | None:
        """The body with the tokens that it asks for; None when its message uses no model with a budget.

        A message that names a model but no tokens, and a model call, ask for an estimate.
        """
        if body.tokens:
            return body
        models = self._rules.candidates(body.models)
        if not models or not (body.models or type_name == MODEL_CALL):
            return None
        estimate = tokens.estimate(bodies.payload_of(self._transaction, body))
        most = max(rule.reach[record.priority] for rule in models)
        return replace(body, tokens=min(estimate, most))

    def take(self, record: Record, body: Body) -> Grant | Short | None:
        """Reserve the tokens of a message. `hold` follows when it is leased, or `give_back`.

        Returns None when none of its models can ever give the tokens.
        """
        names = body.models
        purse = self._quick.get(names[0]) if len(names) == 1 else None
        grant = None if purse is None else purse.take(body.tokens, record.priority)
        return grant or self._take(record, body)

    def _take(self, record: Record, body: Body) -> Grant | Short | None:
        models = self._rules.candidates(body.models)
        if len(models) == 1 or body.models:
            for rule in models:
                purse = self._purse(rule)
                if len(models) == 1 and body.models:
                    self._quick[body.models[0]] = purse
                grant = purse.take(body.tokens, record.priority)
                if grant is not None:
                    return grant
        found = self.decide(record, body, prunes=True)
        if isinstance(found, Grant):
            name = found.provider, found.model
            self._accounts[name] = tokens.reserve(self._accounts[name], found)
        return found

    def give_back(self, grant: Grant) -> None:
        """Return the tokens of a message that was not leased after all."""
        account = self._account_of(grant)
        self._accounts[grant.provider, grant.model] = tokens.settle(account, grant, 0, ran=False)

    def decide(self, record: Record, body: Body, *, prunes: bool = False) -> Grant | Short | None:
        """Which model a message may use now; None when none of its models can ever give the tokens."""
        rules, now = self._rules, self._transaction.steady_ns
        models = rules.candidates(body.models)
        candidates = [(rule, self.account(rule)) for rule in models]
        need = Need(body.tokens, record.priority, 0.0, bool(body.models), "defer")
        found = tokens.allocate(need, candidates, now)
        if isinstance(found, Grant):
            return found
        if not any(rule.reach[need.tier] >= need.tokens for rule in models):
            return None
        weight = 1.0  # P0 gets what is free at once, or fails
        if record.priority:
            weight = tokens.importance(self._blocked(record, prunes=prunes), record.retries)
        if not weight and rules.shortage != "degrade":
            return found
        others = [] if rules.shortage != "degrade" else [rule for rule in rules.models if rule not in models]
        return tokens.allocate(
            replace(need, importance=weight, shortage=rules.shortage),
            candidates,
            now,
            [(rule, self.account(rule)) for rule in others],
        )

    def _blocked(self, record: Record, *, prunes: bool) -> int:
        """How many open messages have this one as their parent, counted up to `BLOCKED_FULL`."""
        transaction, message_id = self._transaction, record.message_id
        names = dict.fromkeys((message_id, unscoped(org_of(record.queue), message_id)))
        count = 0
        for key, _ in [
            found
            for name in names
            for found in DEPENDANTS.under(transaction, name, limit=DEPENDANTS_LOOKED_MAX)
        ]:
            child = transaction.records.get(key.partition(SEPARATOR)[2])
            if child is not None and child.state not in lifecycle.ENDED:
                count += child.queue == record.queue  # the child may have come before the parent got its id
                if count == tokens.BLOCKED_FULL:
                    break
            elif prunes:
                transaction.cells.put(DEPENDANTS.name, key, None)
        return count

    def hold(self, leased: Sequence[tuple[Record, Grant]]) -> None:
        """Tie reservations to the leases of their messages."""
        self._leased += leased

    def _hold_all(self) -> None:
        prefix = len(ENGINE_PREFIX)
        holds = [
            Hold(record.message_id, record.lease, record.attempt, record.queue[prefix:], grant)
            for record, grant in self._leased
        ]
        HOLDS.put(self._transaction, holds, _key_of(holds[0].lease))
        details: dict[int, dict[str, Any]] = {}
        for one, grant in self._leased:
            detail = details.get(id(grant))  # messages of one claim share their grants
            if detail is None:
                detail = details[id(grant)] = _reserved(grant)
            self._events.append(
                Noted(
                    "tokens_reserved", one.queue, one.message_id, "PROCESSING", one.attempt, one.lane,
                    one.lease, detail,
                )
            )  # fmt: skip
            if "lenders" in detail:
                facts = {**detail, "tokens": grant.borrowed}
                self._events.append(
                    Noted(
                        "tokens_borrowed", one.queue, one.message_id, "PROCESSING", one.attempt, one.lane,
                        one.lease, facts,
                    )
                )  # fmt: skip

    def refuse(self, record: Record, body: Body) -> None:
        """Book that a message did not get its tokens."""
        rule = self._rules.candidates(body.models)[0]
        name = rule.provider, rule.name
        self._accounts[name] = tokens.refuse(self.account(rule), record.priority, body.tokens)
        org_id = org_of(record.queue)
        use = self._use(rule, org_id)
        self._uses[*name, org_id] = replace(use, refused=use.refused + body.tokens)
        detail = {
            "tokens": body.tokens, "tier": record.priority, "provider": rule.provider, "model": rule.name,
            "models": list(body.models),
        }  # fmt: skip
        message_id, attempt, lane = record.message_id, record.attempt, record.lane
        self._events.append(
            Noted("tokens_refused", record.queue, message_id, record.state, attempt, lane, 0, detail)
        )

    # ---- ends of leases ------------------------------------------------------------------------

    def settle(self, lease: int, spent: Spent = NOTHING) -> None:
        """Book what an ended lease has used of its reservation, and return the rest."""
        if lease not in self._keys:
            self._load(lease)
        hold = self._held.get(self._keys.get(lease, ""), {}).pop(lease, None)
        if hold is not None:
            self._settle(hold, spent)

    def settle_all(self, leases: Iterable[int]) -> None:
        """Return the whole reservations of leases that ended without a report of their use."""
        for lease in leases:
            self.settle(lease)
        self.flush()

    def _load(self, lease: int) -> None:
        """Read the reservations of the claim that a lease belongs to: the last claim up to that lease."""
        for key, holds in HOLDS.scan(self._transaction, joined(_key_of(lease) - 1), 1):
            if key not in self._held and any(one.lease == lease for one in holds):
                self._held[key] = {one.lease: one for one in holds}
                self._keys.update(dict.fromkeys(self._held[key], key))

    def _settle(self, hold: Hold, spent: Spent) -> None:
        grant = hold.grant
        account = self._account_of(grant)
        if grant.is_estimate and spent.used > grant.tokens:
            account, grant = tokens.extend(account, grant, spent.used)
        used = min(spent.used, grant.tokens)
        self._accounts[grant.provider, grant.model] = tokens.settle(account, grant, used, ran=spent.ran)
        if used:
            self._book_use(grant, hold.org_id, used)
        detail = {
            "tokens": grant.tokens - used, "used": used, "provider": grant.provider, "model": grant.model,
            **spent.facts,
        }  # fmt: skip
        queue, tier, message_id = ENGINE_PREFIX + hold.org_id, grant.tier, hold.message_id
        self._events.append(
            Noted("tokens_returned", queue, message_id, "PROCESSING", hold.attempt, tier, hold.lease, detail)
        )

    def _account_of(self, grant: Grant) -> Account:
        """The books that a grant belongs to, also of a model that the policy no longer names."""
        rule = self._rule(grant.provider, grant.model)
        if rule is not None:
            return self.account(rule)
        name = grant.provider, grant.model
        if name not in self._accounts:
            self._stored[name] = ACCOUNTS.get(self._transaction, *name)
            self._accounts[name] = self._stored[name] or Account()
        return self._accounts[name]

    def _rule(self, provider: str, model: str) -> ModelRule | None:
        found = self._rules.named.get(model, ())
        return next((rule for rule in found if rule.provider == provider), None)

    def _book_use(self, grant: Grant, org_id: str, used: int) -> None:
        rule = self._rule(grant.provider, grant.model)
        if rule is not None:
            parts = tokens.used_parts(grant, used)
            borrowed = used - parts[grant.tier] - parts[SHARED]
            use = self._use(rule, org_id)
            more = replace(use, used=use.used + used, borrowed=use.borrowed + borrowed)
            self._uses[grant.provider, grant.model, org_id] = more

    def _use(self, rule: ModelRule, org_id: str) -> TokenUse:
        """What an organization used of a model in the present window."""
        key = rule.provider, rule.name, org_id
        use = self._uses.get(key)
        if use is None:
            until_ns = self.account(rule).resets[rule.main]
            use = TOKEN_USES.get(self._transaction, *key)
            if use is None or use.until_ns != until_ns:
                use = TokenUse(until_ns)
        return use

    # ---- headers and sweeps --------------------------------------------------------

    def observe(self, provider: str, model: str, said: Observed) -> None:
        """Apply the headers of a provider to the account of a model."""
        rule = self._rule(provider, model)
        if rule is not None:
            account = observe(self.account(rule), said, self._transaction.steady_ns)
            self._accounts[provider, model] = account

    def sweep(self) -> None:
        """Begin the windows that are due, and return the reservations of leases that are over."""
        for key, holds in self._next_claims():
            over = [hold for hold in holds if not is_live(self._transaction, hold)]
            for hold in over:
                self._settle(hold, NOTHING)
            if over:
                self._held[key] = {hold.lease: hold for hold in holds if hold not in over}
        for rule in self._rules.models:
            self.account(rule)
        self.flush()

    def _next_claims(self) -> list[tuple[str, list[Hold]]]:
        """The next claims of a sweep, which continues where the last one stopped and wraps around."""
        after = HOLDS_SWEPT.get(self._transaction, "") or ""
        found = HOLDS.scan(self._transaction, after, CLAIMS_SWEPT_MAX)
        reached = found[-1][0] if len(found) == CLAIMS_SWEPT_MAX else ""
        if reached != after:
            HOLDS_SWEPT.put(self._transaction, reached or None, "")
        return found


def _reserved(grant: Grant) -> dict[str, Any]:
    detail: dict[str, Any] = {
        "tokens": grant.tokens, "tier": grant.tier, "provider": grant.provider, "model": grant.model
    }  # fmt: skip
    if grant.wanted:
        detail["wanted"] = grant.wanted
    if grant.borrowed:
        parts = enumerate(grant.parts[:TIERS])
        detail["lenders"] = {f"P{pool}": part for pool, part in parts if part and pool != grant.tier}
    return detail


def _key_of(lease: int) -> int:
    """The key of a claim by its first lease. Any lease belongs to the claim of the first key after it."""
    return LEASE_LAST - lease


def is_live(transaction: Transaction, hold: Hold) -> bool:
    """Whether the lease of a reservation is alive."""
    record = transaction.records.get(hold.message_id)
    return (
        record is not None
        and record.state == "PROCESSING"
        and record.lease == hold.lease
        and record.lease_until > transaction.steady_ns
    )


def note_dependant(transaction: Transaction, queue: str, parent_id: str, child_id: str) -> None:
    """Remember that a message waits for another one, which may be stored later.

    A parent that waits for tokens is queued again: it is more important now, so it may borrow more.
    """
    parent = transaction.records.get(parent_id)
    if parent is not None and parent.queue != queue:
        return
    DEPENDANTS.put(transaction, True, parent_id, child_id)  # noqa: FBT003
    stored = transaction.records.load(parent_id) if parent and parent.state == "SCHEDULED" else None
    deferred = [event for event in stored.history if event.kind == "deferred"] if stored else []
    if deferred and deferred[-1].detail.get("reason", "").startswith(SHORT):
        transaction.apply(ByIds((parent_id,)), lifecycle.wake)


def all_holds(transaction: Transaction) -> list[tuple[Hold, bool]]:
    """Every reservation, and whether its lease is alive."""
    return [(hold, is_live(transaction, hold)) for _, holds in HOLDS.all(transaction) for hold in holds]


def short_text(body: Body, rules: TokenRules, priority: int) -> str:
    """Why a message waits for tokens, for `explain`."""
    names = ", ".join(rule.name for rule in rules.candidates(body.models))
    return f"{SHORT}: its {body.tokens} tokens are more than P{priority} has free of {names}"
