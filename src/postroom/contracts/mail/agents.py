"""The registry of agents: cards that can be found by their words.

Rule 1: a card is whatever JSON object an agent registers; all text in it can be searched.
Rule 2: the more of the words of a search an agent has, and the rarer they are, the earlier it comes.
"""

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from postroom.contracts.mail.records import Agent
from postroom.contracts.mail.shelves import Shelves
from postroom.core import mq9
from postroom.core import mq9replies as replies
from postroom.core.mq9 import Refused

AGENTS_MAX = 100_000
CARD_BYTES_MAX = 64 << 10
CARDS_BYTES_MAX = 64 << 20  # of all cards, which stand in memory
WORDS_MAX = 64  # of a search
DEFAULT_DISCOVER = 20
PREFIX_CHARS_MIN = 3  # of a search's word to find longer words that begin with it

# Scripts without blanks are searched by the character.
_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W{_IDEOGRAPHS}]+")


class Agents:
    """Who is there, and what each can do."""

    def __init__(self, shelves: Shelves) -> None:
        self._shelves = shelves
        self._cards: dict[str, dict[str, Any]] = {}
        self._names: dict[str, str] = {}  # a mailbox to its agent
        self._found: dict[str, set[str]] = {}  # a word to the agents that have it
        self._stamp = self._bytes = 0
        for agent in shelves.agents.values():
            self._stamp = max(self._stamp, agent.stamp)
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                card = msgspec.json.decode(agent.card, type=dict[str, Any])
                self._add(agent.name, card, _card_words(card))
                self._bytes += len(agent.card)

    def register(self, payload: bytes) -> None:
        """Put a card in, in place of an earlier one of the same name."""
        card = mq9.card(payload)
        name = mq9.agent_names(card)[0]
        if len(payload) > CARD_BYTES_MAX:
            raise Refused(400, f"a card has at most {CARD_BYTES_MAX} bytes")
        if name not in self._cards and len(self._cards) >= AGENTS_MAX:
            raise Refused(429, f"there are {AGENTS_MAX} agents, which is the limit")
        if self._bytes + len(payload) > CARDS_BYTES_MAX:
            raise Refused(429, f"the cards of all agents have {CARDS_BYTES_MAX} bytes, which is the limit")
        card = {**card, "name": name, "registered_at": self._shelves.clock.wall_us() // 1_000_000}
        words = _card_words(card)  # before anything is changed: a card can be nested too deeply for it
        self._remove(name)
        self._add(name, card, words)
        self._write(name)

    def report(self, payload: bytes) -> None:
        """A sign of life, with whatever an agent says about itself."""
        said = mq9.card(payload)
        name = self._known(said)
        facts = {key: value for key, value in said.items() if key not in ("name", "mailbox", "report_info")}
        info = said.get("report_info", facts or None)
        card = self._cards[name]
        card["report_info"], card["reported_at"] = info, self._shelves.clock.wall_us() // 1_000_000
        if len(replies.encode(card)) > 2 * CARD_BYTES_MAX:
            card["report_info"] = None
            raise Refused(400, f"a report has at most {CARD_BYTES_MAX} bytes")
        self._write(name)

    def unregister(self, payload: bytes) -> None:
        name = self._known(mq9.card(payload))
        self._remove(name)
        self._write(name)

    def discover(self, payload: bytes) -> list[dict[str, Any]]:
        """One page of those that fit; of all without a search."""
        asked = mq9.body(payload, mq9.Discover)
        limit = min(mq9.DISCOVER_MAX, max(1, asked.limit or DEFAULT_DISCOVER))
        first = limit * (max(1, asked.page or 1) - 1)
        searched = " ".join(text for text in (asked.text, asked.semantic) if text)
        names = self._search(searched) if searched else sorted(self._cards)
        return [self._cards[name] for name in names[first : first + limit]]

    def _search(self, text: str) -> list[str]:
        scores: dict[str, float] = {}
        for word in list(dict.fromkeys(_words(text)))[:WORDS_MAX]:
            names = self._with(word)
            weight = math.log(1 + len(self._cards) / (1 + len(names)))
            for name in names:
                scores[name] = scores.get(name, 0.0) + weight
        return sorted(scores, key=lambda name: (-scores[name], name))

    def _with(self, word: str) -> set[str]:
        """Who has a word, or else one that begins with it."""
        exact = self._found.get(word)
        if exact is not None or len(word) < PREFIX_CHARS_MIN:
            return exact or set()
        longer = (names for known, names in self._found.items() if known.startswith(word))
        return set().union(*longer)

    def _known(self, said: dict[str, Any]) -> str:
        for name in mq9.agent_names(said):
            known = name if name in self._cards else self._names.get(name)
            if known is not None:
                return known
        raise Refused(404, "no such agent is registered")

    def _add(self, name: str, card: dict[str, Any], words: set[str]) -> None:
        self._cards[name] = card
        for other in mq9.agent_names(card)[1:]:
            self._names[other] = name
        for word in words:
            self._found.setdefault(word, set()).add(name)

    def _remove(self, name: str) -> None:
        card = self._cards.pop(name, None)
        if card is None:
            return
        for other in mq9.agent_names(card)[1:]:
            if self._names.get(other) == name:
                del self._names[other]
        for word in _card_words(card):
            names = self._found.get(word)
            if names is not None:
                names.discard(name)
                if not names:
                    del self._found[word]

    def _write(self, name: str) -> None:
        card, known = self._cards.get(name), self._shelves.agents.get(name)
        self._stamp += 1
        agent = Agent(name, self._stamp, b"" if card is None else replies.encode(card))
        self._bytes += len(agent.card) - (len(known.card) if known is not None else 0)
        self._shelves.keep_agent(agent)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _card_words(card: dict[str, Any]) -> set[str]:
    return set(_words(" ".join(_texts(card))))


def _texts(value: object) -> Iterator[str]:
    """All text in a card, and no keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
