"""Compares acknowledged messages with delivered ones.

Every message carries a token, `writer.number.size`, and a body that is derived from the token. So a checker
that knows only tokens can tell a complete body from a torn one, and one delivery from two.
"""

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

BROKEN_MAX = 20  # sentences about other broken rules that are kept; the first ones are enough


class Delivery(NamedTuple):
    """A delivered message."""

    token: str
    msg_id: str
    body: str


class Tally(msgspec.Struct):
    """The figures of one scenario. Everything but `acknowledged` and `facts` has to stay 0 or empty."""

    acknowledged: int = 0
    lost: int = 0
    torn: int = 0
    doubled: int = 0
    broken: list[str] = []
    """Other broken rules, one sentence each."""
    facts: dict[str, int] = {}
    """What happened meanwhile: kills, skipped torn tails, deliveries that a kill cut off."""

    @property
    def ok(self) -> bool:
        return not (self.lost or self.torn or self.doubled or self.broken)

    def count(self, fact: str, number: int = 1) -> None:
        self.facts[fact] = self.facts.get(fact, 0) + number

    def breaks(self, sentence: str) -> None:
        self.count("rules_broken")
        if len(self.broken) < BROKEN_MAX:
            self.broken.append(sentence)

    def add(self, other: "Tally") -> None:
        self.acknowledged += other.acknowledged
        self.lost += other.lost
        self.torn += other.torn
        self.doubled += other.doubled
        self.broken = (self.broken + other.broken)[:BROKEN_MAX]
        for fact, number in other.facts.items():
            self.count(fact, number)


def token_of(writer: str, number: int, size: int) -> str:
    return f"{writer}.{number}.{size}"


def writer_of(token: str) -> str:
    return token.rsplit(".", 2)[0]


def number_of(token: str) -> int:
    return int(token.rsplit(".", 2)[1])


def body_of(token: str) -> str:
    """The body of a token: of the length in the token, and full of text that misleads a careless reader."""
    size = int(token.rsplit(".", 1)[1])
    unit = (
        f"{token}\n---\nmsg_id: forged-{token}\nts: 2026-01-01T00:00:00Z\ntype: forged\nproject_id: p\n---\n"
        f'{{"msg_id":"forged","body":"@file:../{token}"}}\n\n'
    )
    return (unit * (size // len(unit) + 1))[:size]


def acknowledged_in(lines: Iterable[str]) -> dict[str, str]:
    """Token to id, from the lines `token id` that a writer reported."""
    return dict(line.split(" ", 1) for line in lines)


def compare(acknowledged: Mapping[str, str], delivered: Iterable[Delivery], tally: Tally) -> None:
    """Count what a reader of everything did not get, got torn, or got twice."""
    tokens: set[str] = set()
    ids: set[str] = set()
    for token, msg_id, body in delivered:
        if not _is_whole(token, body):
            tally.torn += 1
        if token in tokens or msg_id in ids:
            tally.doubled += 1
        elif acknowledged.get(token, msg_id) != msg_id:
            tally.breaks(f"{token} was acknowledged as {acknowledged[token]} and delivered as {msg_id}")
        tokens.add(token)
        ids.add(msg_id)
    tally.lost += len(acknowledged.keys() - tokens)
    tally.count("unacknowledged_but_whole", len(tokens - acknowledged.keys()))


def _is_whole(token: str, body: str) -> bool:
    try:
        return body == body_of(token)
    except (ValueError, IndexError):
        return False  # not even a token: a forged message


def check_writers_in_order(tokens: Iterable[str], tally: Tally) -> None:
    """Each writer's messages are in the order of writing, and none is missing before a later one."""
    following: dict[str, int] = {}
    for token in tokens:
        writer, number = writer_of(token), number_of(token)
        if number != following.get(writer, 0):
            tally.breaks(f"{writer}: message {number} stands where {following.get(writer, 0)} belongs")
        following[writer] = number + 1


class AppendOnly:
    """Checks that a log only grows: unreadable bytes are kept as well."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: list[tuple[int, int]] = []

    def look(self) -> None:
        """Record the current content of the file."""
        data = self._path.read_bytes() if self._path.exists() else b""
        self._seen.append((len(data), zlib.crc32(data)))

    def check(self, tally: Tally) -> None:
        """Every earlier content has to be a prefix of the last."""
        if not self._seen:
            return  # where files are rotated, a kill can leave none under this name
        data = self._path.read_bytes()
        end = checksum = 0
        for size, expected in self._seen:
            checksum = zlib.crc32(data[end:size], checksum)
            end = size
            if size > len(data) or checksum != expected:
                tally.breaks(f"of the first {size} bytes of {self._path.name} some were changed or removed")
                return
