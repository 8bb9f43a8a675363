"""The registry of agents: cards, and a search for words in them.

Rule 1: a card is any JSON object that an agent registers. Its text can be searched.
Rule 2: agents that have more, and rarer, words of a search come first. The work of a search is limited.
Rule 3: a name belongs to the client that registered it. Its connection and its login need no proof; every
        other connection needs the secret that REGISTER returned. When the connection has ended, the same
        network address may use the name, and after `HOLD_S` without a report everybody may.
Rule 4: a mailbox in a card is owned in the same way: no card of another client may name it.
Rule 5: names belong to an organization, as those of mailboxes: cards of other organizations do not exist. A
        name of no organization is taken in every one, until it may be used by everybody.
Rule 6: the same limit applies to every card, whether it is registered, updated by a report, or restored.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec
from msgspec.structs import replace

from postroom.contracts.mail import Link
from postroom.contracts.mail.cards import card_index
from postroom.contracts.mail.cards.card_index import CardIndex
from postroom.contracts.mail.mailboxes import Mailboxes
from postroom.contracts.mail.quotas import ORGANIZATION_SHARE, share_used
from postroom.core.mail import mq9
from postroom.core.mail import mq9replies as replies
from postroom.core.mail.mailbox import AgentKey, MailAccount, size_of
from postroom.core.mail.mq9 import Mq9Error
from postroom.logs.mail_records import AgentRecord

CARD_BYTES_MAX = 64 << 10  # of a card with its last report and the fields that the server adds
CARD_WORDS_MAX = 500  # distinct words of a card that are indexed
AGENT_COST_BYTES = 880  # of an agent besides its card and its words, about as measured
WORD_COST_BYTES = 300  # of a word in the index that no other card has, as measured
WORDS_MAX = 64  # of a search
SEARCH_CHARS_MAX = 8_192  # of a search; the rest is not looked at
DEFAULT_DISCOVER = 20
HOLD_S = 3600  # for which a name is kept for a client without a connection and without a report
SECRET_BYTES = 16
MICROS_PER_S = 1_000_000

# Scripts without blanks are indexed by character.
_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W{_IDEOGRAPHS}]+")


class _Entry(msgspec.Struct, eq=False):
    """What the registry keeps of an agent besides its record."""

    account: MailAccount
    cost: int
    aliases: list[str]
    link: int
    """The connection that owns the name; 0 when it has ended."""


class AgentRegistry:
    """The registered agents of one server."""

    def __init__(self, mailboxes: Mailboxes) -> None:
        self._mailboxes = mailboxes
        self._limits = mailboxes.options.limits
        self._entries: dict[AgentKey, _Entry] = {}
        self._by_mailbox: dict[AgentKey, AgentKey] = {}  # agents by organization and mailbox
        self._indexes: dict[str, CardIndex] = {}  # of the cards of each organization that has any
        self._held: dict[int, set[AgentKey]] = {}  # agents by the connection that owns them
        self._stamp = self._cost = 0
        for agent in mailboxes.agents.values():
            self._stamp = max(self._stamp, agent.stamp)
            if _decoded(agent.card):  # an unreadable card stays in the log and is not shown
                self._add(agent, 0)

    # ---- calls ---------------------------------------------------------------------------------

    def register(self, link: Link, payload: bytes) -> dict[str, str]:
        """Add a card, or replace the card of the same name. Returns the secret of the name."""
        card = mq9.card(payload)
        names = mq9.agent_names(card)
        for new in names:  # a new name must not look like another
            if self._agent(link.org, new) is None and self._of_mailbox(link.org, new) is None:
                mq9.checked_agent_name(new)
        name = names[0]
        secret_given = _pop_secret(card)
        known = self._agent(link.org, name)
        self._check_mailbox(card, name, link)
        secret = secret_given if known is not None and self._check_holder(known, link, secret_given) else ""
        secret = secret or secrets.token_hex(SECRET_BYTES)
        card = {**card, "name": name, "registered_at": self._now_us() // MICROS_PER_S}
        self._keep(AgentRecord(name, 0, b"", link.client, _digest(secret), org=link.org), card, link.number)
        if known is not None and known.org != link.org:
            self._forget(known)  # a name of no organization belongs to this one now
        return {"secret": secret}

    def report(self, link: Link, payload: bytes) -> dict[str, str]:
        """Record that an agent is alive, with its report."""
        body = mq9.card(payload)
        secret_given = _pop_secret(body)
        known = self._known(body, link.org)
        self._check_holder(known, link, secret_given)
        facts = {key: value for key, value in body.items() if key not in ("name", "mailbox", "report_info")}
        card = _decoded(known.card)
        card["report_info"] = body.get("report_info", facts or None)
        card["reported_at"] = self._now_us() // MICROS_PER_S
        self._keep(known, card, self._entries[_key(known)].link or link.number)
        return {}

    def unregister(self, link: Link, payload: bytes) -> dict[str, str]:
        """Remove a card, and free its name."""
        body = mq9.card(payload)
        secret_given = _pop_secret(body)
        known = self._known(body, link.org)
        self._check_holder(known, link, secret_given)
        self._forget(known)
        return {}

    def discover(self, link: Link, payload: bytes) -> list[msgspec.Raw]:
        """One page of the visible agents that match a search; of all visible ones without it."""
        body = mq9.body(payload, mq9.Discover)
        limit = min(mq9.DISCOVER_MAX, max(1, body.limit or DEFAULT_DISCOVER))
        first = limit * (max(1, body.page or 1) - 1)
        searched = " ".join(text for text in (body.text, body.semantic) if text)
        orgs = self._indexes if link.sees_all else dict.fromkeys(("", link.org))
        visible = [self._indexes[org] for org in orgs if org in self._indexes]
        if searched:
            words = _distinct(searched[:SEARCH_CHARS_MAX], WORDS_MAX)
            keys = card_index.best(visible, words, first, limit, self._limits)
        else:
            keys = card_index.by_name(visible, first, limit)
        return [msgspec.Raw(self._mailboxes.agents[key].card) for key in keys]

    def close(self, link: Link) -> None:
        """Let other connections of the client use the names of an ended connection."""
        for key in self._held.pop(link.number, ()):
            self._entries[key].link = 0

    # ---- ownership of names --------------------------------------------------------------------

    def _check_holder(self, agent: AgentRecord, link: Link, secret_given: str) -> bool:
        """Refuse a client that does not own a name. Returns whether the secret proved ownership."""
        if secret_given and hmac.compare_digest(_digest(secret_given), agent.secret):
            return True
        if not self._is_holder(agent, link):
            raise Mq9Error(409, "the name belongs to another client: its secret is needed")
        return False

    def _is_holder(self, agent: AgentRecord, link: Link) -> bool:
        """Whether a connection may use a name without its secret."""
        holder = self._entries[_key(agent)].link
        if holder == link.number or (link.user and agent.client == link.client):
            return True
        is_lapsed = self._now_us() - agent.seen_us > HOLD_S * MICROS_PER_S
        return holder == 0 and (agent.client in ("", link.client) or is_lapsed)

    def _check_mailbox(self, card: dict[str, Any], name: str, link: Link) -> None:
        """Refuse a card with the mailbox of another agent, unless the caller owns that agent as well."""
        mailbox = card.get("mailbox")
        owner = self._of_mailbox(link.org, mailbox) or self._agent(link.org, mailbox)
        if owner is not None and owner.name != name and not self._is_holder(owner, link):
            raise Mq9Error(409, "the mailbox of this card belongs to another agent")

    def _known(self, body: dict[str, Any], org: str) -> AgentRecord:
        """The agent that a call names, by its name or its mailbox."""
        name, mailbox = body.get("name"), body.get("mailbox")
        found = self._agent(org, name) or self._of_mailbox(org, mailbox)
        found = found or self._of_mailbox(org, name) or self._agent(org, mailbox)
        if found is None:
            raise Mq9Error(404, "no such agent is registered")
        return found

    def _agent(self, org: str, name: object) -> AgentRecord | None:
        """The agent of a name in an organization: its own, else that of no organization."""
        if not isinstance(name, str):
            return None
        key = (org, name) if (org, name) in self._entries else ("", name)
        return self._mailboxes.agents[key] if key in self._entries else None

    def _of_mailbox(self, org: str, mailbox: object) -> AgentRecord | None:
        """The agent whose card names a mailbox."""
        if not isinstance(mailbox, str):
            return None
        key = self._by_mailbox.get((org, mailbox)) or self._by_mailbox.get(("", mailbox))
        return None if key is None else self._mailboxes.agents[key]

    # ---- changes -------------------------------------------------------------------------------

    def _keep(self, agent: AgentRecord, card: dict[str, Any], link: int) -> None:
        """Set the card of an agent, within every limit."""
        agent = replace(agent, card=replies.encode(card), seen_us=self._now_us())
        self._check_limits(agent, card)
        if _key(agent) in self._entries:
            self._remove(self._mailboxes.agents[_key(agent)])
        self._write(agent)
        self._add(agent, link)

    def _check_limits(self, agent: AgentRecord, card: dict[str, Any]) -> None:
        if len(agent.card) > CARD_BYTES_MAX:
            raise Mq9Error(400, f"a card has at most {CARD_BYTES_MAX} bytes, with its last report")
        entry = self._entries.get(_key(agent))
        if entry is None and len(self._entries) >= self._limits.agents_max:
            raise Mq9Error(429, f"there are {self._limits.agents_max} agents, which is the limit")
        account = self._mailboxes.quotas.accounts[agent.client]
        quota = self._mailboxes.options.client_quota_agents
        is_own = entry is not None and entry.account is account
        if quota and not is_own and account.agents >= quota:
            raise Mq9Error(429, f"this client has registered {quota} agents, which is its quota")
        cost = _cost(agent.card, _card_words(card))
        freed = entry.cost if entry is not None else 0
        if self._cost + cost - freed > self._limits.cards_bytes_max:
            raise Mq9Error(
                429, f"the cards of all agents cost {self._limits.cards_bytes_max} bytes, which is the limit"
            )
        if account.card_bytes + cost - (freed if is_own else 0) > self._limits.client_cards_bytes_max:
            raise Mq9Error(
                429, f"the cards of this client cost {self._limits.client_cards_bytes_max} bytes, its limit"
            )
        if account.organization is not None:
            is_of_org = entry is not None and entry.account.organization is account.organization
            organization, agents_max = account.organization, int(self._limits.agents_max * ORGANIZATION_SHARE)
            if organization.agents + (0 if is_of_org else 1) > agents_max:
                raise share_used(organization, agents_max, "agents")
            bytes_max = int(self._limits.cards_bytes_max * ORGANIZATION_SHARE)
            if organization.card_bytes + cost - (freed if is_of_org else 0) > bytes_max:
                raise share_used(organization, bytes_max, "bytes of cards")

    def _add(self, agent: AgentRecord, link: int) -> None:
        card = _decoded(agent.card)
        words = _card_words(card)
        account = self._mailboxes.quotas.accounts[agent.client]
        aliases = mq9.agent_names(card)[1:]
        entry = _Entry(account, _cost(agent.card, words), aliases, link)
        key = _key(agent)
        self._entries[key] = entry
        self._cost += entry.cost
        account.add_agent(entry.cost, 1)
        if link:
            self._held.setdefault(link, set()).add(key)
        for alias in aliases:
            self._by_mailbox.setdefault((agent.org, alias), key)  # the first agent of a mailbox wins
        if agent.org not in self._indexes:
            self._indexes[agent.org] = CardIndex(agent.org)
        self._indexes[agent.org].add(key, words)

    def _remove(self, agent: AgentRecord) -> None:
        key = _key(agent)
        entry = self._entries.pop(key)
        self._cost -= entry.cost
        entry.account.add_agent(-entry.cost, -1)
        held = self._held.get(entry.link)
        if held is not None:
            held.discard(key)
            if not held:
                del self._held[entry.link]
        for alias in entry.aliases:
            if self._by_mailbox.get((agent.org, alias)) == key:
                del self._by_mailbox[agent.org, alias]
        index = self._indexes[agent.org]
        index.remove(key, _card_words(_decoded(agent.card)))
        if not index.size:
            del self._indexes[agent.org]

    def _forget(self, agent: AgentRecord) -> None:
        self._remove(agent)
        self._write(AgentRecord(agent.name, 0, b"", org=agent.org))

    def _write(self, agent: AgentRecord) -> None:
        self._stamp += 1
        self._mailboxes.keep_agent(replace(agent, stamp=self._stamp))

    def _now_us(self) -> int:
        return self._mailboxes.clock.wall_us()


def _key(agent: AgentRecord) -> AgentKey:
    return agent.org, agent.name


def _pop_secret(body: dict[str, Any]) -> str:
    """Take the secret out of a call, so that it never appears in a card."""
    secret = body.pop("secret", "")
    return secret if isinstance(secret, str) else ""


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "replace")).digest()


def _decoded(card: bytes) -> dict[str, Any]:
    """A card from the log; empty when it cannot be read."""
    try:
        return msgspec.json.decode(card, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def _cost(card: bytes, words: list[str]) -> int:
    return len(card) + AGENT_COST_BYTES + sum(WORD_COST_BYTES + size_of(word) for word in words)


def _distinct(text: str, count: int) -> list[str]:
    """The first `count` distinct words of a text."""
    return list(islice(dict.fromkeys(_WORD.findall(text.casefold())), count))


def _card_words(card: dict[str, Any]) -> list[str]:
    """The distinct words of a card that are indexed."""
    try:
        return _distinct(" ".join(_texts(card)), CARD_WORDS_MAX)
    except RecursionError:  # a card that an earlier version accepted
        return []


def _texts(value: object) -> Iterator[str]:
    """All text values in a card, without the keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
