"""Spark's `xxhash64` of a text, for columns that Spark has written: XXH64 of its bytes, with the seed 42."""

from typing import Final

SEED: Final = 42
STRIPE: Final = 32  # bytes that four lanes take at once
_MASK: Final = (1 << 64) - 1
_P1, _P2, _P3, _P4, _P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)


def xxhash64(data: bytes) -> int:
    """The hash as a signed number of 64 bits."""
    at = len(data) // STRIPE * STRIPE
    found = _merged(data, at) if at else SEED + _P5
    found = (found + len(data)) & _MASK
    while at + 8 <= len(data):
        found = _turned(found ^ _round(0, _word(data, at, 8)), 27) * _P1 + _P4 & _MASK
        at += 8
    if at + 4 <= len(data):
        found = _turned(found ^ (_word(data, at, 4) * _P1 & _MASK), 23) * _P2 + _P3 & _MASK
        at += 4
    for byte in data[at:]:
        found = _turned(found ^ (byte * _P5 & _MASK), 11) * _P1 & _MASK
    found = (found ^ found >> 33) * _P2 & _MASK
    found = (found ^ found >> 29) * _P3 & _MASK
    found ^= found >> 32
    return found - (1 << 64) if found >> 63 else found


def _merged(data: bytes, until: int) -> int:
    """The four lanes over all whole stripes, as one number."""
    lanes = [(SEED + start) & _MASK for start in (_P1 + _P2, _P2, 0, -_P1)]
    for at in range(0, until, STRIPE):
        lanes = [_round(lane, _word(data, at + 8 * n, 8)) for n, lane in enumerate(lanes)]
    turns = zip(lanes, (1, 7, 12, 18), strict=True)
    found = sum(_turned(lane, bits) for lane, bits in turns) & _MASK
    for lane in lanes:
        found = ((found ^ _round(0, lane)) * _P1 + _P4) & _MASK
    return found


def _round(lane: int, word: int) -> int:
    return _turned((lane + word * _P2) & _MASK, 31) * _P1 & _MASK


def _turned(number: int, bits: int) -> int:
    return (number << bits | number >> (64 - bits)) & _MASK


def _word(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "little")
