"""Subjects, wildcards, and an index of subscriptions by subject.

Rule 1: a subject is bytes, as on the wire. It consists of non-empty tokens between dots.
Rule 2: in a subscription, the token `*` matches one token and a final token `>` matches one or more. In a
        published subject, and as part of a token, both are ordinary characters.
Rule 3: a match is cached until a subscription that could change it is added or removed.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

SUBJECT_BYTES_MAX = 4096  # the limit of a control line
TOKENS_MAX = 512  # of a subscription: the depth of the tree
MATCHES_KEPT_MAX = 16_384  # cached subjects: every request has a new inbox
MATCHED_KEPT_MAX = 1_000_000  # subscriptions in all cached matches together

ANY_ONE = b"*"
ANY_MORE = b">"

_BLANKS = b" \t\r\n"


class Grouped(Protocol):
    """A subscription, as the index sees it."""

    @property
    def group(self) -> bytes:
        """Its queue group; empty for none."""


T = TypeVar("T", bound=Grouped)


class Match(NamedTuple, Generic[T]):
    """The subscriptions that match a subject."""

    each: tuple[T, ...]
    """Each of these gets a message,"""
    groups: tuple[tuple[T, ...], ...]
    """and one member of each of these."""

    @property
    def size(self) -> int:
        """The number of subscriptions."""
        return len(self.each) + sum(map(len, self.groups))


def merged(matches: Iterable[Match[T]]) -> Match[T]:
    """One match of several indexes. Queue groups of the same name become one."""
    found = [match for match in matches if match.each or match.groups]
    if len(found) <= 1:
        return found[0] if found else Match((), ())
    groups: dict[bytes, tuple[T, ...]] = {}
    for match in found:
        for members in match.groups:
            groups[members[0].group] = groups.get(members[0].group, ()) + members
    return Match(tuple(chain.from_iterable(match.each for match in found)), tuple(groups.values()))


def is_pattern(subject: bytes) -> bool:
    """Whether a subject is valid in a subscription, with or without wildcards."""
    if not 0 < len(subject) <= SUBJECT_BYTES_MAX or subject.translate(None, _BLANKS) != subject:
        return False
    tokens = subject.split(b".")
    return len(tokens) <= TOKENS_MAX and b"" not in tokens and ANY_MORE not in tokens[:-1]


def has_wildcard(pattern: bytes) -> bool:
    """Whether a valid pattern has wildcards."""
    if ANY_ONE not in pattern and ANY_MORE not in pattern:
        return False
    tokens = pattern.split(b".")
    return ANY_ONE in tokens or tokens[-1] == ANY_MORE


def matches(pattern: bytes, subject: bytes) -> bool:
    """Whether a subscription to `pattern` matches a published `subject`."""
    wanted, given = pattern.split(b"."), subject.split(b".")
    if wanted[-1] == ANY_MORE:
        wanted.pop()
        if len(given) <= len(wanted):
            return False
        given = given[: len(wanted)]
    return len(wanted) == len(given) and all(
        want in (ANY_ONE, token) for want, token in zip(wanted, given, strict=True)
    )


class _Node(Generic[T]):
    """One token of the wildcard patterns, and the tokens that follow it."""

    __slots__ = ("here", "more", "next", "one")

    def __init__(self) -> None:
        self.next: dict[bytes, _Node[T]] = {}
        self.one: _Node[T] | None = None
        self.here: list[T] = []
        """Subscriptions that end here."""
        self.more: list[T] = []
        """Subscriptions that end here with `>`."""

    def child(self, token: bytes) -> "_Node[T]":
        if token == ANY_ONE:
            if self.one is None:
                self.one = _Node()
            return self.one
        return self.next.setdefault(token, _Node())

    def is_empty(self) -> bool:
        return not (self.here or self.more or self.next or self.one)

    def forget(self, token: bytes) -> None:
        """Drop an empty child."""
        if token == ANY_ONE:
            if self.one is not None and self.one.is_empty():
                self.one = None
        elif token in self.next and self.next[token].is_empty():
            del self.next[token]


class CacheUse:
    """Shared use of the caches of several indexes. Above a limit, all caches are emptied."""

    def __init__(
        self, matches_max: int = MATCHES_KEPT_MAX, subscriptions_max: int = MATCHED_KEPT_MAX
    ) -> None:
        self.matches_max = matches_max
        self.subscriptions_max = subscriptions_max
        self.matches = 0
        self.subscriptions = 0
        self.indexes: WeakSet[SubjectIndex[Any]] = WeakSet()

    def make_room(self, size: int) -> None:
        """Make room for one more match with `size` subscriptions."""
        if self.matches >= self.matches_max or self.subscriptions + size > self.subscriptions_max:
            for index in self.indexes:
                index.clear_cache()


class SubjectIndex(Generic[T]):
    """Subscriptions by subject: a dictionary for literals, a tree for wildcards, and a cache of matches."""

    def __init__(self, cache_use: CacheUse | None = None) -> None:
        self._literal: dict[bytes, list[T]] = {}
        self._root: _Node[T] = _Node()
        self._wildcards = 0
        self._cache: dict[bytes, Match[T]] = {}
        self._cached_size = 0  # subscriptions in these matches
        self._use = cache_use or CacheUse()
        self._use.indexes.add(self)

    def __len__(self) -> int:
        return self._wildcards + sum(map(len, self._literal.values()))

    def __bool__(self) -> bool:
        return bool(self._wildcards or self._literal)

    def add(self, pattern: bytes, subscription: T) -> None:
        if not has_wildcard(pattern):
            self._literal.setdefault(pattern, []).append(subscription)
            self._uncache(pattern)
            return
        self._place(self._path(pattern)[-1], pattern).append(subscription)
        self._wildcards += 1
        self.clear_cache()

    def remove(self, pattern: bytes, *gone: T) -> None:
        """Remove subscriptions that were added."""
        if not has_wildcard(pattern):
            found = self._literal[pattern]
            _take_out(found, gone)
            if not found:
                del self._literal[pattern]
            if self:
                self._uncache(pattern)
            else:  # its owner may drop it, and what it holds of `CacheUse` with it
                self.clear_cache()
            return
        path = self._path(pattern)
        _take_out(self._place(path[-1], pattern), gone)
        for parent, token in zip(path[-2::-1], reversed(self._walked(pattern)), strict=True):
            parent.forget(token)
        self._wildcards -= len(gone)
        self.clear_cache()

    def match(self, subject: bytes) -> Match[T]:
        """The subscriptions that match a published subject, in no particular order."""
        match = self._cache.get(subject)
        if match is None:
            match = _match(self._matching(subject))
            self._use.make_room(match.size)
            if match.size <= self._use.subscriptions_max:
                self._cache[subject] = match
                self._count_cached(1, match.size)
        return match

    def _uncache(self, subject: bytes) -> None:
        match = self._cache.pop(subject, None)
        if match is not None:
            self._count_cached(-1, -match.size)

    def clear_cache(self) -> None:
        self._count_cached(-len(self._cache), -self._cached_size)
        self._cache.clear()

    def _count_cached(self, matches: int, subscriptions: int) -> None:
        self._cached_size += subscriptions
        self._use.matches += matches
        self._use.subscriptions += subscriptions

    def literal(self, subject: bytes) -> tuple[T, ...]:
        """The subscriptions to exactly this subject."""
        return tuple(self._literal.get(subject, ()))

    def _matching(self, subject: bytes) -> Iterator[T]:
        yield from self._literal.get(subject, ())
        if not self._wildcards:
            return
        level = [self._root]
        tokens = subject.split(b".")
        for token in tokens:
            below = []
            for node in level:
                if node.more:
                    yield from node.more
                if token in node.next:
                    below.append(node.next[token])
                if node.one is not None:
                    below.append(node.one)
            if not below:
                return
            level = below
        for node in level:
            yield from node.here

    def _path(self, pattern: bytes) -> list[_Node[T]]:
        """The nodes from the root to the last token of a pattern. Missing nodes are created."""
        path = [self._root]
        for token in self._walked(pattern):
            path.append(path[-1].child(token))
        return path

    @staticmethod
    def _walked(pattern: bytes) -> list[bytes]:
        tokens = pattern.split(b".")
        return tokens[:-1] if tokens[-1] == ANY_MORE else tokens

    @staticmethod
    def _place(node: _Node[T], pattern: bytes) -> list[T]:
        ends_open = pattern == ANY_MORE or pattern.endswith(b".>")
        return node.more if ends_open else node.here


def _take_out(found: list[T], gone: tuple[T, ...]) -> None:
    if len(gone) == 1:
        found.remove(gone[0])
    else:  # in one pass
        ids = set(map(id, gone))
        found[:] = [each for each in found if id(each) not in ids]


def _match(found: Iterable[T]) -> Match[T]:
    each: list[T] = []
    groups: dict[bytes, list[T]] = {}
    for subscription in found:
        (groups.setdefault(subscription.group, []) if subscription.group else each).append(subscription)
    return Match(tuple(each), tuple(map(tuple, groups.values())))
