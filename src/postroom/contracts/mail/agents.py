"""The registry of agents: cards, and a search for words in them.

Rule 1: a card is any JSON object that an agent registers. Its text can be searched.
Rule 2: agents that have more, and rarer, words of a search come first.
Rule 3: a name belongs to the client that registered it. Its connection and its login need no proof; every
        other connection needs the secret that REGISTER returned. When the connection has ended, the same
        network address may use the name, and after `HOLD_S` without a report everybody may.
Rule 4: a mailbox in a card is owned in the same way: no card of another client may name it.
Rule 5: the same limit applies to every card, whether it is registered, updated by a report, or restored.
"""

import hashlib
import hmac
import math
import re
import secrets
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec
from msgspec.structs import replace

from postroom.contracts.mail import Link
from postroom.contracts.mail.mailboxes import Mailboxes
from postroom.core import mq9
from postroom.core import mq9replies as replies
from postroom.core.mailbox import Account, size_of
from postroom.core.mq9 import Mq9Error
from postroom.logs.mail_records import AgentRecord

AGENTS_MAX = 100_000
CARD_BYTES_MAX = 64 << 10  # of a card with its last report and the fields that the server adds
CARD_WORDS_MAX = 500  # distinct words of a card that are indexed
CARDS_BYTES_MAX = 256 << 20  # memory of all cards
CLIENT_CARDS_BYTES_MAX = 64 << 20  # memory of the cards of one client
AGENT_COST_BYTES = 800  # of an agent besides its card and its words, about as measured
WORD_COST_BYTES = 300  # of a word in the index that no other card has, as measured
WORDS_MAX = 64  # of a search
DEFAULT_DISCOVER = 20
PREFIX_CHARS_MIN = 3  # of a searched word to match longer words as their prefix
HOLD_S = 3600  # for which a name is kept for a client without a connection and without a report
SECRET_BYTES = 16
MICROS_PER_S = 1_000_000

# Scripts without blanks are indexed by character.
_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W{_IDEOGRAPHS}]+")


class _Entry:
    """What the registry keeps of an agent besides its record."""

    __slots__ = ("account", "aliases", "cost", "link")

    def __init__(self, account: Account, cost: int, aliases: list[str], link: int) -> None:
        self.account = account
        self.cost = cost
        self.aliases = aliases
        self.link = link  # the connection that owns the name; 0 when it has ended


class AgentRegistry:
    """The registered agents of one server."""

    def __init__(self, mailboxes: Mailboxes) -> None:
        self._mailboxes = mailboxes
        self._entries: dict[str, _Entry] = {}
        self._by_mailbox: dict[str, str] = {}  # agents by mailbox
        self._by_word: dict[str, set[str]] = {}  # agents by word
        self._held: dict[int, set[str]] = {}  # names by the connection that owns them
        self._stamp = self._cost = 0
        for agent in mailboxes.agents.values():
            self._stamp = max(self._stamp, agent.stamp)
            if _decoded(agent.card):  # an unreadable card stays in the log and is not shown
                self._add(agent, 0)

    # ---- calls ---------------------------------------------------------------------------------

    def register(self, link: Link, payload: bytes) -> dict[str, str]:
        """Add a card, or replace the card of the same name. Returns the secret of the name."""
        card = mq9.card(payload)
        name = self._checked_names(card)[0]
        secret_given = _pop_secret(card)
        known = self._agent(name)
        self._check_mailbox(card, name, link)
        secret = secret_given if known is not None and self._check_holder(known, link, secret_given) else ""
        secret = secret or secrets.token_hex(SECRET_BYTES)
        card = {**card, "name": name, "registered_at": self._now_us() // MICROS_PER_S}
        self._keep(AgentRecord(name, 0, b"", link.client, _digest(secret)), card, link.number)
        return {"secret": secret}

    def report(self, link: Link, payload: bytes) -> dict[str, str]:
        """Record that an agent is alive, with its report."""
        body = mq9.card(payload)
        secret_given = _pop_secret(body)
        known = self._known(body)
        self._check_holder(known, link, secret_given)
        facts = {key: value for key, value in body.items() if key not in ("name", "mailbox", "report_info")}
        card = _decoded(known.card)
        card["report_info"] = body.get("report_info", facts or None)
        card["reported_at"] = self._now_us() // MICROS_PER_S
        self._keep(known, card, self._entries[known.name].link or link.number)
        return {}

    def unregister(self, link: Link, payload: bytes) -> dict[str, str]:
        """Remove a card, and free its name."""
        body = mq9.card(payload)
        secret_given = _pop_secret(body)
        known = self._known(body)
        self._check_holder(known, link, secret_given)
        self._remove(known)
        self._write(AgentRecord(known.name, 0, b""))
        return {}

    def discover(self, payload: bytes) -> list[msgspec.Raw]:
        """One page of the agents that match a search; of all agents without one."""
        body = mq9.body(payload, mq9.Discover)
        limit = min(mq9.DISCOVER_MAX, max(1, body.limit or DEFAULT_DISCOVER))
        first = limit * (max(1, body.page or 1) - 1)
        searched = " ".join(text for text in (body.text, body.semantic) if text)
        names = self._search(searched) if searched else sorted(self._entries)
        return [msgspec.Raw(self._mailboxes.agents[name].card) for name in names[first : first + limit]]

    def close(self, link: Link) -> None:
        """Let other connections of the client use the names of an ended connection."""
        for name in self._held.pop(link.number, ()):
            self._entries[name].link = 0

    def _checked_names(self, card: dict[str, Any]) -> list[str]:
        """The names in a card. New names must not look like others."""
        names = mq9.agent_names(card)
        for name in names:
            if name not in self._entries and name not in self._by_mailbox:
                mq9.checked_agent_name(name)
        return names

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
        holder = self._entries[agent.name].link
        if holder == link.number or (link.user and agent.client == link.client):
            return True
        return holder == 0 and (agent.client in ("", link.client) or self._is_lapsed(agent))

    def _check_mailbox(self, card: dict[str, Any], name: str, link: Link) -> None:
        """Refuse a card with the mailbox of another agent, unless the caller owns that agent as well."""
        mailbox = card.get("mailbox")
        owner = self._agent(self._alias(mailbox)) or self._agent(mailbox)
        if owner is not None and owner.name != name and not self._is_holder(owner, link):
            raise Mq9Error(409, "the mailbox of this card belongs to another agent")

    def _is_lapsed(self, agent: AgentRecord) -> bool:
        return self._now_us() - agent.seen_us > HOLD_S * MICROS_PER_S

    def _known(self, body: dict[str, Any]) -> AgentRecord:
        """The agent that a call names, by its name or its mailbox."""
        name, mailbox = body.get("name"), body.get("mailbox")
        for found in (name, self._alias(mailbox), self._alias(name), mailbox):
            agent = self._agent(found)
            if agent is not None:
                return agent
        raise Mq9Error(404, "no such agent is registered")

    def _agent(self, name: object) -> AgentRecord | None:
        return self._mailboxes.agents[name] if isinstance(name, str) and name in self._entries else None

    def _alias(self, name: object) -> str | None:
        return self._by_mailbox.get(name) if isinstance(name, str) else None

    # ---- changes -------------------------------------------------------------------------------

    def _keep(self, agent: AgentRecord, card: dict[str, Any], link: int) -> None:
        """Set the card of an agent, within every limit."""
        agent = replace(agent, card=replies.encode(card), seen_us=self._now_us())
        self._check_limits(agent, card)
        known = self._agent(agent.name)
        if known is not None:
            self._remove(known)
        self._write(agent)
        self._add(agent, link)

    def _check_limits(self, agent: AgentRecord, card: dict[str, Any]) -> None:
        if len(agent.card) > CARD_BYTES_MAX:
            raise Mq9Error(400, f"a card has at most {CARD_BYTES_MAX} bytes, with its last report")
        entry = self._entries.get(agent.name)
        if entry is None and len(self._entries) >= AGENTS_MAX:
            raise Mq9Error(429, f"there are {AGENTS_MAX} agents, which is the limit")
        account = self._mailboxes.quotas.accounts[agent.client]
        quota = self._mailboxes.options.client_quota_agents
        is_own = entry is not None and entry.account is account
        if quota and not is_own and account.agents >= quota:
            raise Mq9Error(429, f"this client has registered {quota} agents, which is its quota")
        cost = _cost(agent.card, _card_words(card))
        freed = entry.cost if entry is not None else 0
        if self._cost + cost - freed > CARDS_BYTES_MAX:
            raise Mq9Error(429, f"the cards of all agents cost {CARDS_BYTES_MAX} bytes, which is the limit")
        if account.card_bytes + cost - (freed if is_own else 0) > CLIENT_CARDS_BYTES_MAX:
            raise Mq9Error(429, f"the cards of this client cost {CLIENT_CARDS_BYTES_MAX} bytes, its limit")

    def _add(self, agent: AgentRecord, link: int) -> None:
        card = _decoded(agent.card)
        words = _card_words(card)
        account = self._mailboxes.quotas.accounts[agent.client]
        aliases = mq9.agent_names(card)[1:]
        entry = _Entry(account, _cost(agent.card, words), aliases, link)
        self._entries[agent.name] = entry
        self._cost += entry.cost
        account.agents += 1
        account.card_bytes += entry.cost
        if link:
            self._held.setdefault(link, set()).add(agent.name)
        for alias in aliases:
            self._by_mailbox.setdefault(alias, agent.name)  # the first agent of a mailbox wins
        for word in words:
            self._by_word.setdefault(word, set()).add(agent.name)

    def _remove(self, agent: AgentRecord) -> None:
        entry = self._entries.pop(agent.name)
        self._cost -= entry.cost
        entry.account.agents -= 1
        entry.account.card_bytes -= entry.cost
        held = self._held.get(entry.link)
        if held is not None:
            held.discard(agent.name)
            if not held:
                del self._held[entry.link]
        for alias in entry.aliases:
            if self._by_mailbox.get(alias) == agent.name:
                del self._by_mailbox[alias]
        for word in _card_words(_decoded(agent.card)):
            names = self._by_word[word]
            names.discard(agent.name)
            if not names:
                del self._by_word[word]

    def _write(self, agent: AgentRecord) -> None:
        self._stamp += 1
        self._mailboxes.keep_agent(replace(agent, stamp=self._stamp))

    def _now_us(self) -> int:
        return self._mailboxes.clock.wall_us()

    # ---- search --------------------------------------------------------------------------------

    def _search(self, text: str) -> list[str]:
        scores: dict[str, float] = {}
        for word in islice(dict.fromkeys(_words(text)), WORDS_MAX):
            names = self._names_with(word)
            weight = math.log(1 + len(self._entries) / (1 + len(names)))
            for name in names:
                scores[name] = scores.get(name, 0.0) + weight
        return sorted(scores, key=lambda name: (-scores[name], name))

    def _names_with(self, word: str) -> set[str]:
        """Agents with this word; if there is none, those with a longer word that begins with it."""
        exact = self._by_word.get(word)
        if exact is not None or len(word) < PREFIX_CHARS_MIN:
            return exact or set()
        longer = (names for known, names in self._by_word.items() if known.startswith(word))
        return set().union(*longer)


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


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _card_words(card: dict[str, Any]) -> list[str]:
    """The distinct words of a card that are indexed."""
    try:
        return list(islice(dict.fromkeys(_words(" ".join(_texts(card)))), CARD_WORDS_MAX))
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
