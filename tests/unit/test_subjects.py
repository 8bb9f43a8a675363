from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.core.nats import subjects
from postroom.core.nats.subjects import SubjectIndex


@dataclass(eq=False)
class Interest:
    pattern: bytes
    group: bytes = b""


TOKENS = st.sampled_from([b"a", b"b", b"*", b">", b"a*"])
PATTERNS = st.lists(TOKENS, min_size=1, max_size=4).map(b".".join).filter(subjects.is_pattern)
LITERALS = st.lists(st.sampled_from([b"a", b"b", b"a*"]), min_size=1, max_size=4).map(b".".join)


@pytest.mark.parametrize(
    "subject", [b"a", b"a.b", b"*", b">", b"a.*.c", b"a.>", b"a*b", b"\xc3\xa4", b"$mq9.x"]
)
def test_patterns(subject: bytes) -> None:
    assert subjects.is_pattern(subject)


@pytest.mark.parametrize(
    "subject", [b"", b".", b"a.", b".a", b"a..b", b">.a", b"a b", b"a\tb", b"a\n", b"a\r"]
)
def test_invalid_patterns_are_refused(subject: bytes) -> None:
    assert not subjects.is_pattern(subject)


def test_a_pattern_has_a_maximum_length() -> None:
    assert subjects.is_pattern(b"a" * subjects.SUBJECT_BYTES_MAX)
    assert not subjects.is_pattern(b"a" * (subjects.SUBJECT_BYTES_MAX + 1))
    assert subjects.is_pattern(b".".join([b"a"] * subjects.TOKENS_MAX))
    assert not subjects.is_pattern(b".".join([b"a"] * (subjects.TOKENS_MAX + 1)))


@pytest.mark.parametrize(
    ("subject", "literal"), [(b"a.b", True), (b"a*.b", True), (b"a>", True), (b"a.*", False), (b">", False)]
)
def test_wildcards_are_whole_tokens(subject: bytes, literal: bool) -> None:
    assert subjects.has_wildcard(subject) == (not literal)


@pytest.mark.parametrize(
    ("pattern", "subject", "matches"),
    [
        (b"a.b", b"a.b", True),
        (b"a.*", b"a.b", True),
        (b"a.*", b"a", False),
        (b"a.*", b"a.b.c", False),
        (b"a.>", b"a.b.c", True),
        (b"a.>", b"a", False),
        (b">", b"a", True),
        (b"*.>", b"a", False),
        (b"a*", b"ab", False),
    ],
)
def test_matches(pattern: bytes, subject: bytes, matches: bool) -> None:
    assert subjects.matches(pattern, subject) == matches


@given(
    st.lists(st.tuples(PATTERNS, st.sampled_from([b"", b"g", b"h"])), max_size=12),
    st.lists(LITERALS),
    st.data(),
)
def test_the_tree_matches_like_single_patterns(
    wanted: list[tuple[bytes, bytes]], published: list[bytes], data: st.DataObject
) -> None:
    tree: SubjectIndex[Interest] = SubjectIndex()
    interests = [Interest(*each) for each in wanted]
    for count, interest in enumerate(interests, 1):
        tree.add(interest.pattern, interest)
        for subject in published:
            check(tree, interests[:count], subject)
    while True:
        assert len(tree) == len(interests)
        for subject in published:
            check(tree, interests, subject)
        if not interests:
            break
        leaving = interests.pop(data.draw(st.integers(0, len(interests) - 1)))
        tree.remove(leaving.pattern, leaving)
    assert tree._root.is_empty()
    assert not tree._literal


def check(tree: SubjectIndex[Interest], interests: list[Interest], subject: bytes) -> None:
    each, groups = tree.match(subject)
    matching = [interest for interest in interests if subjects.matches(interest.pattern, subject)]
    assert set(each) == {interest for interest in matching if not interest.group}
    assert len(each) == len(set(each))
    assert {frozenset(group) for group in groups} == {
        frozenset(interest for interest in matching if interest.group == name)
        for name in {interest.group for interest in matching} - {b""}
    }
    assert set(tree.literal(subject)) == {interest for interest in interests if interest.pattern == subject}


def test_cached_matches_are_dropped() -> None:
    tree: SubjectIndex[Interest] = SubjectIndex(subjects.CacheUse(10))
    tree.add(b"in.*", Interest(b"in.*"))
    for number in range(100):
        assert len(tree.match(b"in.%d" % number).each) == 1
        assert len(tree._cache) <= 10


def test_matches_with_many_subscriptions_are_kept_only_up_to_a_limit() -> None:
    subscriptions: SubjectIndex[Interest] = SubjectIndex(subjects.CacheUse(subscriptions_max=100))
    for number in range(40):
        subscriptions.add(b">", Interest(b">", b"g" if number % 2 else b""))
    for number in range(20):
        assert len(subscriptions.match(b"a.%d" % number).each) == 20
        kept = subscriptions._cache.values()
        assert sum(len(made.each) + sum(map(len, made.groups)) for made in kept) <= 100
    own = Interest(b"a.19")
    for _ in range(10):  # dropped entries make room
        subscriptions.add(b"a.19", own)
        subscriptions.match(b"a.19")
        subscriptions.remove(b"a.19", own)
        subscriptions.match(b"a.19")
    assert len(subscriptions._cache) == 2


def test_several_indexes_cache_no_more_together_than_one() -> None:
    use = subjects.CacheUse(10, 15)
    indexes: list[SubjectIndex[Interest]] = [SubjectIndex(use) for _ in range(3)]
    for count, index in enumerate(indexes):
        for _ in range(count):
            index.add(b">", Interest(b">"))
    for number in range(100):
        for index in indexes:
            index.match(b"a.%d" % number)
            kept = [match for each in indexes for match in each._cache.values()]
            assert (len(kept), sum(match.size for match in kept)) == (use.matches, use.subscriptions)
            assert use.matches <= 10
            assert use.subscriptions <= 15


def test_an_index_without_subscriptions_keeps_no_matches() -> None:
    """The router drops such an index: what it has counted as cached would never be given back."""
    use = subjects.CacheUse()
    index: SubjectIndex[Interest] = SubjectIndex(use)
    for pattern in (b"a", b"*.a"):
        interest = Interest(pattern)
        index.add(pattern, interest)
        for n in range(10):
            index.match(b"x%d" % n)
        index.remove(pattern, interest)
        assert (use.matches, use.subscriptions) == (0, 0)
