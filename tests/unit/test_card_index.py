"""The index of the words of agents' cards, compared with a search that looks at everything."""

import math
import random

from postroom.contracts.mail.cards import card_index
from postroom.contracts.mail.cards.card_index import CardIndex, SortedTexts
from postroom.contracts.mail.options import MailLimits
from postroom.core.mail.mailbox import AgentKey

LIMITS = MailLimits()


def test_sorted_texts_are_those_of_a_sorted_set() -> None:
    chance = random.Random(7)
    texts, known = SortedTexts(4), set[str]()
    for growth in (0.8, 0.2, 0.8, 0.0):
        for _ in range(300):
            text = "".join(chance.choices("ab\0é", k=chance.randrange(6)))
            if text not in known and chance.random() < growth:
                texts.add(text)
                known.add(text)
            elif known and chance.random() >= growth:
                gone = chance.choice(sorted(known))
                texts.remove(gone)
                known.remove(gone)
            assert list(texts.since(text)) == [each for each in sorted(known) if each >= text]
    assert list(texts.since("")) == sorted(known)


def everything(cards: dict[AgentKey, list[str]], words: list[str]) -> list[AgentKey]:
    """All cards that have a word of the search, the best first."""
    scores: dict[AgentKey, float] = {}
    for word in words:
        keys = {key for key, known in cards.items() if word in known}
        if not keys and len(word) >= card_index.PREFIX_CHARS_MIN:
            keys = {key for key, known in cards.items() if any(each.startswith(word) for each in known)}
        for key in keys:
            scores[key] = scores.get(key, 0.0) + math.log(1 + len(cards) / (1 + len(keys)))
    return sorted(scores, key=lambda key: (-round(scores[key], 9), key[1], key[0]))


def test_search_within_its_limits_equals_a_full_scan() -> None:
    chance = random.Random(7)
    indexes = {org: CardIndex(org, 4) for org in ("", "acme")}
    cards: dict[AgentKey, list[str]] = {}

    def text() -> str:
        return "".join(chance.choices("ab", k=chance.randint(1, 6)))

    for _ in range(300):
        key = chance.choice(["", "acme"]), f"n{chance.randrange(40)}"
        if key in cards:
            indexes[key[0]].remove(key, cards.pop(key))
        if chance.random() < 0.7:
            cards[key] = list({text(): None for _ in range(chance.randrange(8))})
            indexes[key[0]].add(key, cards[key])
        words = list({text(): None for _ in range(chance.randint(1, 3))})
        assert card_index.best(indexes.values(), words, 0, 100, LIMITS) == everything(cards, words)
        assert card_index.best(indexes.values(), words, 3, 2, LIMITS) == everything(cards, words)[3:5]
        by_name = sorted(cards, key=lambda key: (key[1], key[0]))
        assert card_index.by_name(indexes.values(), 3, 5) == by_name[3:8]
