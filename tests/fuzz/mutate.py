"""Seeded, structure-aware mutation: every input follows from a seed and its number, and from nothing else.

An input starts from a valid one and is changed one to four times: in its bits, its lines, its numbers, its
lengths, its encoding or its nesting. What is plainly broken is soon refused; the changes that keep most of
the structure are the ones that get far.
"""

from collections.abc import Callable, Sequence
from random import Random

CHANGES_MAX = 4
INPUT_BYTES_MAX = 20_000
WORD_SHARE = 0.2  # of the changes insert a word of the target's own language

NUMBERS = (
    *(
        b"0",
        b"-1",
        b"1",
        b"007",
        b"9",
        b"99999",
        b"2147483648",
        b"18446744073709551616",
        b"1.5",
        b"+5",
        b" 7",
    ),
    *(b"-9223372036854775809", b"1e309", b"-0.0", b"NaN", b"Infinity", b"1_000", b"0x10", b"0o17", b"1:30"),
    *(b"9" * 400, b"9" * 5000, b"", b"\xd9\xa3"),
)
BYTES = (
    *(b"\0", b"\0" * 512, b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe2\x80\xa8"),
    *(b"\xef\xbb\xbf", b"\r", b"\r\n", b"\n", b"\n\n", b"\x85", b"\x1b[31m", b"\x7f", b"\t", b"\x0b", b" "),
    *(b"\\", b'"', b"'", b"---", b"---\n", b"...\n", b"\n---\n", b"--- \n", b"%YAML 1.1\n", b"#", b": "),
    *(b"- ", b"? ", b"{", b"}", b"[", b"]", b",", b"~", b"null", b"true", b"no", b"&a ", b"*a", b"|\n"),
    *(b"!!python/object/apply:os.system [x]", b"!!binary aGk=", b"<<: *a", b">-\n"),
)
NESTS = ((b"[", b"]"), (b"{a: ", b"}"), (b'{"a":', b"}"), (b"- ", b""), (b"? ", b""), (b"\n ", b""))
NEST_DEPTHS = (2, 5, 20, 100, 1000)
DIGITS = b"0123456789"

Mutator = Callable[[Random, bytes, "Sequence[bytes]"], bytes]


def mutated(rng: Random, corpus: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    """A valid input, changed."""
    data = _pick(rng, corpus)
    for _ in range(1 + int(rng.random() * CHANGES_MAX)):
        if words and rng.random() < WORD_SHARE:
            data = _insert_word(rng, data, words)
        else:
            data = MUTATORS[int(rng.random() * len(MUTATORS))](rng, data, corpus)
    return data[:INPUT_BYTES_MAX]


def _pick(rng: Random, choices: Sequence[bytes]) -> bytes:
    return choices[int(rng.random() * len(choices))]


def _at(rng: Random, data: bytes) -> int:
    return int(rng.random() * (len(data) + 1))


def _span(rng: Random, data: bytes) -> tuple[int, int]:
    """A stretch, more often short than long."""
    begin = _at(rng, data)
    return begin, min(len(data), begin + 1 + int(rng.random() ** 4 * len(data)))


def _insert_word(rng: Random, data: bytes, words: Sequence[bytes]) -> bytes:
    place = _at(rng, data)
    if rng.random() < 0.5:  # at the start of a line, where most words mean something
        place = data.rfind(b"\n", 0, place) + 1
    return data[:place] + _pick(rng, words) + data[place:]


def _flip(rng: Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    if not data:
        return data
    place = int(rng.random() * len(data))
    return data[:place] + bytes([data[place] ^ 1 << int(rng.random() * 8)]) + data[place + 1 :]


def _set_byte(rng: Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    place = int(rng.random() * len(data))
    return data[:place] + bytes([int(rng.random() * 256)]) + data[place + 1 :]


def _insert(rng: Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    place = _at(rng, data)
    return data[:place] + _pick(rng, BYTES) + data[place:]


def _delete(rng: Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    begin, end = _span(rng, data)
    return data[:begin] + data[end:]


def _repeat(rng: Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    begin, end = _span(rng, data)
    return data[:end] + data[begin:end] * (1 + int(rng.random() ** 6 * 50)) + data[end:]


def _move(rng: Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    begin, end = _span(rng, data)
    piece, rest = data[begin:end], data[:begin] + data[end:]
    place = _at(rng, rest)
    return rest[:place] + piece + rest[place:]


def _splice(rng: Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    other = _pick(rng, corpus)
    return data[: _at(rng, data)] + other[_at(rng, other) :]


def _cut(rng: Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    return data[: _at(rng, data)]


def _grow(rng: Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    return data + rng.choice((b"", b"\n", b"\n\n")) + _pick(rng, corpus)


def _lines(rng: Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    """Remove, double or swap whole lines."""
    lines = data.split(b"\n")
    here, there = int(rng.random() * len(lines)), int(rng.random() * len(lines))
    match int(rng.random() * 3):
        case 0:
            del lines[here]
        case 1:
            lines.insert(there, lines[here])
        case _:
            lines[here], lines[there] = lines[there], lines[here]
    return b"\n".join(lines)


def _number(rng: Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    """Lie about a length, a time or an offset."""
    start = _at(rng, data)
    while start < len(data) and data[start] not in DIGITS:
        start += 1
    end = start
    while end < len(data) and data[end] in DIGITS:
        end += 1
    if rng.random() < 0.5 and start < end <= start + 15:
        new = b"%d" % (int(data[start:end]) + int(rng.random() * 5) - 2)
    else:
        new = _pick(rng, NUMBERS)
    return data[:start] + new + data[end:]


def _nest(rng: Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    opening, closing = NESTS[int(rng.random() * len(NESTS))]
    depth = NEST_DEPTHS[int(rng.random() * len(NEST_DEPTHS))]
    place = _at(rng, data)
    return data[:place] + opening * depth + b"x" + closing * depth + data[place:]


def _case(rng: Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    begin, end = _span(rng, data)
    return data[:begin] + data[begin:end].swapcase() + data[end:]


MUTATORS: tuple[Mutator, ...] = (
    *(_flip, _flip, _set_byte, _insert, _insert, _delete, _repeat, _move, _splice, _cut, _grow),
    *(_lines, _lines, _lines, _number, _number, _nest, _case),
)
