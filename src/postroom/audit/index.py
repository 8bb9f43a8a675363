"""The index of a segment: the offsets of the lines of each message, its children and its trace.

The file holds a header with the number of words and the SHA-256 of the segment, then a sorted array of
little-endian 64-bit words (36 bits of the hash of an id, 28 bits of the line's offset), then a CRC-32 per
block of 512 words. When the hashes of two ids collide, a search only reads a few unrelated lines.
"""

import hashlib
import mmap
import os
import struct
import sys
import zlib
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec

from postroom.core.formats.events import AuditEvent
from postroom.system.atomic import open_safely

OFFSET_BITS = 28
SEGMENT_BYTES_MAX = 1 << OFFSET_BITS
WORD_BYTES = 8
SUM_BYTES = 4
BLOCK_WORDS = 512
BLOCK_BYTES = BLOCK_WORDS * WORD_BYTES
SCAN_SHARE = 16  # with more ids than a 16th of the words, all words are scanned instead of searched
_HEAD = struct.Struct("<8sQ32s")
_MAGIC = b"postidx2"
_OFFSET_MASK = SEGMENT_BYTES_MAX - 1
_empty = hashlib.blake2b(digest_size=WORD_BYTES)


class LineKeys(msgspec.Struct, frozen=True, gc=False):
    """The fields of a line that the index and the statistics use."""

    source: str
    seq: int
    ts_us: int
    message_id: str = ""
    parent_message_id: str = ""
    trace_id: str = ""


Keyed: TypeAlias = LineKeys | AuditEvent
"""Something with the fields of `LineKeys`."""


class IndexDamaged(Exception):
    """The index cannot be trusted; the segment itself can still be read from end to end."""


def key_of(wanted: str) -> int:
    """The upper 36 bits of every index word of an id. Part of the file format."""
    digest = _empty.copy()  # faster than a new object
    digest.update(wanted.encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest(), "big") >> OFFSET_BITS << OFFSET_BITS


class IndexBuilder:
    """Collects the offsets of ids while a segment grows. Hashing and sorting are done when it is sealed."""

    def __init__(self) -> None:
        self._places: defaultdict[str, list[int]] = defaultdict(list)

    def add(self, marks: Sequence[Keyed], offsets: Sequence[int]) -> None:
        """Add lines and their offsets."""
        places = self._places
        for mark, offset in zip(marks, offsets, strict=False):  # `offsets` may also hold the end of the last
            if wanted := mark.message_id:
                places[wanted].append(offset)
            if wanted := mark.parent_message_id:
                places[wanted].append(offset)
            if wanted := mark.trace_id:
                places[wanted].append(offset)

    def encode(self, sha256: str) -> bytes:
        """The whole index file for the segment with this hash."""
        by_key: dict[int, list[int]] = {}
        for wanted, offsets in self._places.items():
            key = key_of(wanted)
            by_key[key] = sorted(by_key[key] + offsets) if key in by_key else offsets
        words = array("Q", [key | offset for key in sorted(by_key) for offset in by_key[key]])
        if sys.byteorder == "big":
            words.byteswap()
        body = words.tobytes()
        sums = array(
            "I", [zlib.crc32(body[at : at + BLOCK_BYTES]) for at in range(0, len(body), BLOCK_BYTES)]
        )
        head = _HEAD.pack(_MAGIC, len(words), bytes.fromhex(sha256))
        return head + body + struct.pack(f"<{len(sums)}I", *sums)


class Index:
    """Searches the index of the segment with the hash `sha256`; each block is verified before use."""

    def __init__(self, path: Path, sha256: str) -> None:
        self._path = path
        fd = open_safely(path, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            if size < _HEAD.size:
                raise IndexDamaged(f"{path} is cut short")
            self._count = self._checked_count(os.pread(fd, _HEAD.size, 0), size, sha256)
            self._map = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        finally:
            os.close(fd)
        self._sums_at = _HEAD.size + self._count * WORD_BYTES
        self._words: memoryview[int] | array[int]
        if self._count and sys.byteorder == "little":
            self._words = memoryview(self._map)[_HEAD.size : self._sums_at].cast("Q")
        else:
            self._words = array("Q", self._map[_HEAD.size : self._sums_at])
            self._words.byteswap()
        self._good_blocks: set[int] = set()

    def _checked_count(self, head: bytes, size: int, sha256: str) -> int:
        magic: bytes
        owner: bytes
        magic, count, owner = _HEAD.unpack(head)
        words = int(count)
        blocks = -(-words // BLOCK_WORDS)
        if magic != _MAGIC or size != _HEAD.size + words * WORD_BYTES + blocks * SUM_BYTES:
            raise IndexDamaged(f"{self._path} is not an index, or is cut short")
        if owner.hex() != sha256:
            raise IndexDamaged(f"{self._path} is the index of another segment")
        return words

    def close(self) -> None:
        if isinstance(self._words, memoryview):
            self._words.release()
        self._map.close()

    def offsets(self, wanted: str) -> list[int]:
        """The offsets of an id's lines, and possibly of a few others."""
        return self.offsets_of({key_of(wanted)})

    def offsets_of(self, keys: Collection[int]) -> list[int]:
        """The sorted offsets of the lines of these keys, and possibly of a few others."""
        if len(keys) * SCAN_SHARE < self._count:
            return sorted({word & _OFFSET_MASK for key in keys for word in self._found(key)})
        self._check_blocks(0, self._count)
        return sorted({word & _OFFSET_MASK for word in self._words if word & ~_OFFSET_MASK in keys})

    def _found(self, key: int) -> list[int]:
        words = self._words
        first = bisect_left(words, key)
        end = bisect_left(words, key + SEGMENT_BYTES_MAX, lo=first)
        # A damaged word may have misled the binary search. The result is correct if the blocks around both
        # ends are intact and their words are on the right sides of the key.
        self._check_blocks(max(0, first - 1), min(self._count, end + 1))
        found = list(words[first:end])
        before = words[first - 1] if first else -1
        after = words[end] if end < self._count else 1 << 64
        if not before < key or not after >= key + SEGMENT_BYTES_MAX or any(word < key for word in found):
            raise IndexDamaged(f"{self._path} is not in order")
        return found

    def _check_blocks(self, start: int, end: int) -> None:
        for block in range(start // BLOCK_WORDS, -(-end // BLOCK_WORDS)):
            if block in self._good_blocks:
                continue
            begin = _HEAD.size + block * BLOCK_BYTES
            data = self._map[begin : min(begin + BLOCK_BYTES, self._sums_at)]
            if zlib.crc32(data) != struct.unpack_from("<I", self._map, self._sums_at + block * SUM_BYTES)[0]:
                raise IndexDamaged(f"block {block} of {self._path} was changed")
            self._good_blocks.add(block)
