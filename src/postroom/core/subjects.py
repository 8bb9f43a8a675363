"""Subjects: names in dots, wildcards, and who has subscribed to what.

Rule 1: a subject is bytes, as on the wire. Tokens stand between dots, and none is empty.
Rule 2: `*` is any one token and `>` at the end is one token or more, in a subscription only. In what somebody
        publishes, and inside a token, both are letters like any other.
Rule 3: a match is computed once and kept until a subscription that could change it comes or goes.
"""

from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

SUBJECT_BYTES_MAX = 4096  # a control line is no longer
TOKENS_MAX = 512  # of a subscription: the tree gets no deeper
MATCHES_KEPT_MAX = 16_384  # inboxes are new with every request; the memory for them is not
MATCHED_KEPT_MAX = 1_000_000  # subscriptions in all of these matches, each time that they stand there

ANY_ONE = b"*"
ANY_MORE = b">"

_BLANKS = b" \t\r\n"


class Grouped(Protocol):
    """A subscription, as far as it matters here."""

    @property
    def group(self) -> bytes:
        """The queue group that it shares its messages with; empty for none."""


T = TypeVar("T", bound=Grouped)


class Match(NamedTuple, Generic[T]):
    """Who gets what is published to a subject."""

    each: tuple[T, ...]
    """All of these get it,"""
    groups: tuple[tuple[T, ...], ...]
    """and of each of these, one."""

    @property
    def size(self) -> int:
        """How many subscriptions stand in it."""
        return len(self.each) + sum(map(len, self.groups))


def is_pattern(subject: bytes) -> bool:
    """Whether it has the form of a subscription: what is literal is one too."""
    if not 0 < len(subject) <= SUBJECT_BYTES_MAX or subject.translate(None, _BLANKS) != subject:
        return False
    tokens = subject.split(b".")
    return len(tokens) <= TOKENS_MAX and b"" not in tokens and ANY_MORE not in tokens[:-1]


def is_literal(subject: bytes) -> bool:
    """Whether it can be published to: a pattern without wildcards."""
    return is_pattern(subject) and not has_wildcard(subject)


def has_wildcard(pattern: bytes) -> bool:
    """Whether a valid pattern can match more than itself."""
    if ANY_ONE not in pattern and ANY_MORE not in pattern:
        return False
    tokens = pattern.split(b".")
    return ANY_ONE in tokens or tokens[-1] == ANY_MORE


def matches(pattern: bytes, subject: bytes) -> bool:
    """Whether a subscription to `pattern` gets what is published to `subject`."""
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
    """One token of the wildcard patterns, and what follows it."""

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
        """Drop a child that holds nothing any more."""
        if token == ANY_ONE:
            if self.one is not None and self.one.is_empty():
                self.one = None
        elif token in self.next and self.next[token].is_empty():
            del self.next[token]


class Subscriptions(Generic[T]):
    """Who gets what: a dictionary for literal subjects, a tree for wildcards, and the matches made so far."""

    def __init__(self) -> None:
        self._literal: dict[bytes, list[T]] = {}
        self._root: _Node[T] = _Node()
        self._wild = 0
        self._made: dict[bytes, Match[T]] = {}
        self._made_size = 0  # subscriptions in these matches

    def __len__(self) -> int:
        return self._wild + sum(map(len, self._literal.values()))

    def add(self, pattern: bytes, subscription: T) -> None:
        if not has_wildcard(pattern):
            self._literal.setdefault(pattern, []).append(subscription)
            self._forget(pattern)
            return
        self._place(self._path(pattern)[-1], pattern).append(subscription)
        self._wild += 1
        self._forget_all()

    def remove(self, pattern: bytes, subscription: T) -> None:
        """Take out what was added. It has to be there."""
        if not has_wildcard(pattern):
            found = self._literal[pattern]
            found.remove(subscription)
            if not found:
                del self._literal[pattern]
            self._forget(pattern)
            return
        path = self._path(pattern)
        self._place(path[-1], pattern).remove(subscription)
        for parent, token in zip(path[-2::-1], reversed(self._walked(pattern)), strict=True):
            parent.forget(token)
        self._wild -= 1
        self._forget_all()

    def match(self, subject: bytes) -> Match[T]:
        """Who gets what is published to a subject, in no order that anybody may rely on."""
        made = self._made.get(subject)
        if made is None:
            made = _match(self._found(subject))
            self._keep(subject, made)
        return made

    def _keep(self, subject: bytes, made: Match[T]) -> None:
        size = made.size
        if len(self._made) >= MATCHES_KEPT_MAX or self._made_size + size > MATCHED_KEPT_MAX:
            self._forget_all()
        if size <= MATCHED_KEPT_MAX:
            self._made[subject] = made
            self._made_size += size

    def _forget(self, subject: bytes) -> None:
        made = self._made.pop(subject, None)
        if made is not None:
            self._made_size -= made.size

    def _forget_all(self) -> None:
        self._made.clear()
        self._made_size = 0

    def literal(self, subject: bytes) -> tuple[T, ...]:
        """Those whose subscription is this very subject."""
        return tuple(self._literal.get(subject, ()))

    def _found(self, subject: bytes) -> Iterator[T]:
        yield from self._literal.get(subject, ())
        if not self._wild:
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
        """The nodes from the root to a pattern's last, which are made where they are missing."""
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


def _match(found: Iterable[T]) -> Match[T]:
    each: list[T] = []
    groups: dict[bytes, list[T]] = {}
    for subscription in found:
        (groups.setdefault(subscription.group, []) if subscription.group else each).append(subscription)
    return Match(tuple(each), tuple(map(tuple, groups.values())))
