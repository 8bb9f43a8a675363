"""Token budgets inside a transaction: reservations of claims, settlements of outcomes, and refills.

Rule 1: tokens are reserved in the commit that leases a message, and returned in the one that ends its lease.
Rule 2: a reservation belongs to a lease. One whose lease is over counts for nothing, whoever ended the lease:
        the status leaves it out, and the next sweep removes it.
Rule 3: accounts are read once and written once in a transaction, by `flush`.
"""

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import msgspec
from msgspec.structs import replace

from postroom.contracts.engine.cells import (
    ACCOUNTS,
    DEPENDANTS,
    HOLDS,
    SEPARATOR,
    TOKEN_USES,
    Hold,
    TokenUse,
)
from postroom.contracts.engine.messages import Body
from postroom.core import lifecycle, tokens
from postroom.core.tokens import Account, Grant, ModelRule, Need, Observed, Refill, Short, TokenRules
from postroom.message import ENGINE_PREFIX, EventKind, Record, org_of
from postroom.stores.base import Ending
from postroom.stores.transaction import Noted, Transaction

HOLDS_SWEPT_MAX: Final = 1_000
DEPENDANTS_LOOKED_MAX: Final = 100

Name: TypeAlias = tuple[str, str]
"""A provider and a model."""


class Spent(msgspec.Struct, frozen=True):
    """How a lease with a reservation ended."""

    used: int = 0
    ran: bool = False
    """Whether a request was made: False for a crash, a release and a deferral."""
    facts: dict[str, Any] = {}
    """What the event says besides the tokens."""


NOTHING: Final = Spent()


class TokenBooks:
    """The accounts of one transaction."""

    def __init__(self, transaction: Transaction, rules: TokenRules) -> None:
        self._transaction = transaction
        self._rules = rules
        self._accounts: dict[Name, Account] = {}
        self._stored: dict[Name, Account | None] = {}
        self._uses: dict[tuple[str, str, str], TokenUse] = {}
        self._events: list[Noted] = []

    # ---- accounts ------------------------------------------------------------------------------

    def account(self, rule: ModelRule) -> Account:
        """The books of a model at the time of the transaction."""
        name = rule.provider, rule.name
        account = self._accounts.get(name)
        if account is None:
            stored = self._stored[name] = ACCOUNTS.get(self._transaction, *name)
            account, refill = tokens.current(stored or Account(), rule, self._transaction.steady_ns)
            self._accounts[name] = account
            if refill is not None:
                self._note_refill(rule, refill)
        return account

    def _note_refill(self, rule: ModelRule, refill: Refill) -> None:
        detail = {
            "provider": rule.provider,
            "model": rule.name,
            "repaid": refill.repaid,
            "moved": refill.moved,
            "pools": [*refill.pools],
        }
        self._events.append(Noted("tokens_rebalanced", detail=detail))

    def flush(self) -> None:
        """Write what has changed."""
        for name, account in self._accounts.items():
            if account is not self._stored[name]:
                ACCOUNTS.put(self._transaction, account, *name)
        for key, use in self._uses.items():
            TOKEN_USES.put(self._transaction, use, *key)
        if self._events:
            self._transaction.note(self._events)
        self._accounts, self._stored, self._uses, self._events = {}, {}, {}, []

    # ---- claims --------------------------------------------------------------------------------

    def decide(self, record: Record, body: Body, *, prunes: bool = True) -> Grant | Short | None:
        """Which model a message may use now; None when none of its models can ever give the tokens."""
        rules, now = self._rules, self._transaction.steady_ns
        models = rules.candidates(body.models)
        candidates = [(rule, self.account(rule)) for rule in models]
        need = Need(body.tokens, record.priority, 0.0, bool(body.models), "defer")
        found = tokens.allocate(need, candidates, now)
        if isinstance(found, Grant):
            return found
        if not any(tokens.reachable(rule, need.tier) >= need.tokens for rule in models):
            return None
        weight = tokens.importance(self._blocked(record.message_id, prunes=prunes), record.retries)
        if not weight and rules.shortage != "degrade":
            return found
        others = [] if rules.shortage != "degrade" else [rule for rule in rules.models if rule not in models]
        return tokens.allocate(
            replace(need, importance=weight, shortage=rules.shortage),
            candidates,
            now,
            [(rule, self.account(rule)) for rule in others],
        )

    def _blocked(self, message_id: str, *, prunes: bool) -> int:
        """How many open messages have this one as their parent, as far as the importance needs it."""
        count = 0
        for key, _ in DEPENDANTS.under(self._transaction, message_id, limit=DEPENDANTS_LOOKED_MAX):
            child = self._transaction.record(key.partition(SEPARATOR)[2])
            if child is not None and child.state not in lifecycle.ENDED:
                count += 1
                if count == tokens.BLOCKED_FULL:
                    break
            elif prunes:
                self._transaction.put_cell(DEPENDANTS.name, key, None)
        return count

    def take(self, grant: Grant) -> None:
        """Reserve what was granted. `hold` follows when the message is leased."""
        name = grant.provider, grant.model
        self._accounts[name] = tokens.reserve(self._accounts[name], grant)

    def hold(self, record: Record, grant: Grant) -> None:
        """Tie a reservation to the lease of a message."""
        message_id, org_id = record.message_id, org_of(record.queue)
        if record.attempt > 1:
            self.settle(message_id)  # of an earlier lease, which somebody else has ended
        HOLDS.put(self._transaction, Hold(record.lease, record.attempt, org_id, grant), message_id)
        detail: dict[str, Any] = {
            "tokens": grant.tokens, "tier": grant.tier, "provider": grant.provider, "model": grant.model
        }  # fmt: skip
        if grant.wanted:
            detail["wanted"] = grant.wanted
        self._note("tokens_reserved", record, detail)
        if borrowed := grant.borrowed:
            lenders = {f"P{pool}": part for pool, part in enumerate(grant.parts[: tokens.TIERS]) if part}
            lenders.pop(f"P{grant.tier}", None)
            self._note("tokens_borrowed", record, {**detail, "tokens": borrowed, "lenders": lenders})

    def refuse(self, record: Record, body: Body) -> None:
        """Note that a message did not get its tokens."""
        rule = self._rules.candidates(body.models)[0]
        name = rule.provider, rule.name
        self._accounts[name] = tokens.refuse(self.account(rule), record.priority, body.tokens)
        org_id = org_of(record.queue)
        use = self._use(rule, org_id)
        self._uses[*name, org_id] = replace(use, refused=use.refused + body.tokens)
        detail = {"tokens": body.tokens, "tier": record.priority, "models": list(body.models)}
        self._note("tokens_refused", record, detail)

    def _note(self, kind: EventKind, record: Record, detail: dict[str, Any]) -> None:
        lease = record.lease if record.state == "PROCESSING" else 0
        attempt, lane = record.attempt, record.lane
        self._events.append(
            Noted(kind, record.queue, record.message_id, record.state, attempt, lane, lease, detail)
        )

    # ---- ends of leases ------------------------------------------------------------------------

    def settle(self, message_id: str, spent: Spent = NOTHING, lease: int | None = None) -> None:
        """The lease of a message has ended: book what was used of its reservation, and return the rest.

        With `lease`, only a reservation of that lease is settled.
        """
        hold = HOLDS.get(self._transaction, message_id)
        if hold is None or (lease is not None and hold.lease != lease):
            return
        HOLDS.put(self._transaction, None, message_id)
        grant = hold.grant
        used = min(spent.used, grant.tokens)
        account = self._account_of(grant)
        name = grant.provider, grant.model
        self._accounts[name] = tokens.settle(account, grant, used, ran=spent.ran)
        if used:
            self._book_use(grant, hold.org_id, used)
        detail = {
            "tokens": grant.tokens - used, "used": used, "provider": grant.provider, "model": grant.model,
            **spent.facts,
        }  # fmt: skip
        queue, tier = ENGINE_PREFIX + hold.org_id, grant.tier
        self._events.append(
            Noted("tokens_returned", queue, message_id, "PROCESSING", hold.attempt, tier, hold.lease, detail)
        )

    def settle_all(self, message_ids: Iterable[str]) -> None:
        """The leases of these messages are over, and nothing is known of what they used."""
        for message_id in message_ids:
            self.settle(message_id)
        self.flush()

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
            borrowed = used - parts[grant.tier] - parts[tokens.SHARED]
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

    # ---- what providers say, and sweeps --------------------------------------------------------

    def observe(self, provider: str, model: str, said: Observed) -> None:
        """Follow what the headers of a provider say about a model."""
        rule = self._rule(provider, model)
        if rule is not None:
            account = tokens.observe(self.account(rule), said, self._transaction.steady_ns)
            self._accounts[provider, model] = account

    def overdue(self, limit: int) -> list[str]:
        """Messages of organizations whose lease is over; whoever ends the leases settles them then."""
        ending = self._transaction.find(Ending("lease", self._transaction.steady_ns, limit))
        return [record.message_id for record in ending if org_of(record.queue)]

    def sweep(self) -> None:
        """Begin the windows that are due, and return what leases hold that others have ended."""
        for message_id, hold in HOLDS.scan(self._transaction, limit=HOLDS_SWEPT_MAX):
            if not is_live(self._transaction, message_id, hold):
                self.settle(message_id)
        for rule in self._rules.models:
            self.account(rule)
        self.flush()


def is_live(transaction: Transaction, message_id: str, hold: Hold) -> bool:
    """Whether the lease of a reservation is alive."""
    record = transaction.record(message_id)
    return (
        record is not None
        and record.state == "PROCESSING"
        and record.lease == hold.lease
        and record.lease_until > transaction.steady_ns
    )


def note_dependant(transaction: Transaction, parent_id: str, child_id: str) -> None:
    """Remember that a message waits for another one, if that one is stored."""
    if transaction.record(parent_id) is not None:
        DEPENDANTS.put(transaction, True, parent_id, child_id)  # noqa: FBT003


def all_holds(transaction: Transaction) -> list[tuple[Hold, bool]]:
    """Every reservation, and whether its lease is alive."""
    return [(hold, is_live(transaction, message_id, hold)) for message_id, hold in HOLDS.all(transaction)]


def short_text(body: Body, rules: TokenRules, priority: int) -> str:
    """Which budget holds a message."""
    names = ", ".join(rule.name for rule in rules.candidates(body.models))
    return f"the token budget: its {body.tokens} tokens are more than P{priority} has free of {names}"
