"""The words of agents' cards, one index for each organization, and a search in several of them.

Rule 1: a search looks at the indexes of the organizations that its caller sees. What others register changes
        neither its answer nor the time it takes.
Rule 2: a search looks at a limited number of words and cards, because no other client is served meanwhile.
        At a limit it answers with the best of what it has looked at.
Rule 3: the rarest words of a search come first, because they say the most about a card.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import merge, nsmallest
from itertools import chain, islice
from typing import NamedTuple, TypeAlias

from postroom.contracts.mail.options import MailLimits
from postroom.core.mail.mailbox import AgentKey

PREFIX_CHARS_MIN = 3  # of a searched word to match longer words as their prefix
BLOCK_TEXTS = 1_000  # of a sorted list, before a block of it is split

Keys: TypeAlias = dict[AgentKey, None]


class SortedTexts:
    """Distinct texts in order, in blocks: to add or to remove one moves the texts of one block only."""

    __slots__ = ("_block_texts", "_blocks", "_firsts")

    def __init__(self, block_texts: int = BLOCK_TEXTS) -> None:
        self._block_texts = block_texts
        self._blocks: list[list[str]] = []  # none is empty
        self._firsts: list[str] = []  # for each block a text up to which the one before it ends

    def add(self, text: str) -> None:
        """Add a text that is not there yet."""
        if not self._blocks:
            self._blocks, self._firsts = [[text]], [""]
            return
        index = self._block_of(text)
        block = self._blocks[index]
        insort(block, text)
        if len(block) > self._block_texts:
            middle = len(block) // 2
            self._blocks[index : index + 1] = [block[:middle], block[middle:]]
            self._firsts.insert(index + 1, block[middle])

    def remove(self, text: str) -> None:
        """Remove a text that is there."""
        index = self._block_of(text)
        block = self._blocks[index]
        del block[bisect_left(block, text)]
        if not block:
            del self._blocks[index], self._firsts[index]
            if self._firsts:
                self._firsts[0] = ""

    def since(self, text: str) -> Iterator[str]:
        """Every text that is not less than `text`, in order."""
        if not self._blocks:
            return
        index = self._block_of(text)
        yield from islice(self._blocks[index], bisect_left(self._blocks[index], text), None)
        for block in islice(self._blocks, index + 1, None):
            yield from block

    def _block_of(self, text: str) -> int:
        return bisect_right(self._firsts, text) - 1


class CardIndex:
    """The cards of one organization."""

    __slots__ = ("_by_word", "_names", "_org", "_words", "size")

    def __init__(self, org: str, block_texts: int = BLOCK_TEXTS) -> None:
        self.size = 0  # cards
        self._org = org
        self._names = SortedTexts(block_texts)
        self._by_word: dict[str, Keys] = {}
        self._words = SortedTexts(block_texts)

    def add(self, key: AgentKey, words: Iterable[str]) -> None:
        """Add a card that is not there yet."""
        self.size += 1
        self._names.add(key[1])
        for word in words:
            keys = self._by_word.get(word)
            if keys is None:
                keys = self._by_word[word] = {}
                self._words.add(word)
            keys[key] = None

    def remove(self, key: AgentKey, words: Iterable[str]) -> None:
        """Remove a card. `words` are those that it was added with."""
        self.size -= 1
        self._names.remove(key[1])
        for word in words:
            keys = self._by_word[word]
            del keys[key]
            if not keys:
                del self._by_word[word]
                self._words.remove(word)

    def with_word(self, word: str) -> Collection[AgentKey]:
        """The cards with a word."""
        return self._by_word.get(word, ())

    def with_prefix(self, prefix: str) -> Iterator[Keys]:
        """For each word that begins with `prefix`, the cards with that word."""
        for word in self._words.since(prefix):
            if not word.startswith(prefix):
                return
            yield self._by_word[word]

    def by_name(self) -> Iterator[tuple[str, str]]:
        """The name and the organization of each card, ordered."""
        return ((name, self._org) for name in self._names.since(""))


class _Match(NamedTuple):
    """The cards that a word of a search matches."""

    parts: list[Collection[AgentKey]]  # a card may be in several
    size: int  # of all parts together


def by_name(indexes: Iterable[CardIndex], first: int, count: int) -> list[AgentKey]:
    """A page of all cards, ordered by name."""
    indexes = list(indexes)
    if first >= sum(index.size for index in indexes):
        return []
    ordered = merge(*(index.by_name() for index in indexes))
    return [(org, name) for name, org in islice(ordered, first, first + count)]


def best(
    indexes: Iterable[CardIndex],
    words: Sequence[str],
    first: int,
    count: int,
    limits: MailLimits,
) -> list[AgentKey]:
    """A page of the cards that have any of the words, the best first."""
    scores = _scores(list(indexes), words, limits)
    if first >= len(scores):
        return []
    page = nsmallest(first + count, scores, key=lambda key: (-scores[key], key[1], key[0]))
    return page[first:]


def _scores(indexes: Sequence[CardIndex], words: Sequence[str], limits: MailLimits) -> dict[AgentKey, float]:
    total = sum(index.size for index in indexes)
    matches = [_match(indexes, word, limits.prefix_words_max // len(words)) for word in words]
    scores: dict[AgentKey, float] = {}
    left = limits.cards_looked_max
    for match in sorted(matches, key=lambda match: match.size):
        keys = dict.fromkeys(islice(chain.from_iterable(match.parts), left))
        size = len(keys) if match.size <= left else min(match.size, total)
        weight = math.log(1 + total / (1 + size))
        for key in keys:
            scores[key] = scores.get(key, 0.0) + weight
        left -= min(left, match.size)
    return scores


def _match(indexes: Sequence[CardIndex], word: str, words_max: int) -> _Match:
    """The cards with a word; if there is none, those with a longer word that begins with it."""
    parts = [keys for index in indexes if (keys := index.with_word(word))]
    if not parts and len(word) >= PREFIX_CHARS_MIN:
        longer = chain.from_iterable(index.with_prefix(word) for index in indexes)
        parts = list(islice(longer, words_max))
    return _Match(parts, sum(map(len, parts)))
