"""What stands in the mail log: records in frames.

    frame   mark (4 bytes) | length of the body (u32, little endian) | crc32 (u32) | body
    body    one record as a MessagePack array that begins with its kind

Rule 1: records can be read in any order and more than once. A letter's number and a mailbox's serial are
        never given twice, and what is removed does not come back.
Rule 2: mark and checksum start from a secret of the folder, so that no payload can pass for a frame when
        the reader looks for the next one behind a damaged place.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from postroom.core.mailbox import RANK_COUNT, Word
from postroom.core.times import SECONDS_MAX
from postroom.message import Damage

RECORD_BYTES_MAX = 65 << 20
ROW_BYTES_MAX = 1 << 20  # of payloads in one record
SECRET_BYTES = 8
STARTS_MAX = (1 << 31) - 1
_HEAD = struct.Struct("<4sII")

Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]


class Started(msgspec.Struct, array_like=True, tag=0, frozen=True, gc=False):
    """The server's starts, counted. The first record of every segment."""

    start: Annotated[int, Meta(ge=0, le=STARTS_MAX)]


class Opened(msgspec.Struct, array_like=True, tag=1, frozen=True, gc=False):
    """A mailbox."""

    serial: Count
    mail_id: str
    public: bool
    named: bool
    desc: str
    ttl_s: Seconds
    created_us: Count
    expires_us: Count
    creator: str
    client: str = ""
    """Whose quota it counts against."""


class Extended(msgspec.Struct, array_like=True, tag=2, frozen=True, gc=False):
    """A mailbox ends later; the latest end holds."""

    serial: Count
    ttl_s: Seconds
    expires_us: Count


class Gone(msgspec.Struct, array_like=True, tag=3, frozen=True, gc=False):
    """A mailbox has expired."""

    serial: Count


class Put(msgspec.Struct, array_like=True, tag=4, frozen=True, gc=False):
    """A letter. With `due_us` it waits until then, and gets its final number when it is due."""

    serial: Count
    number: Count
    word: Word
    payload: bytes
    headers: bytes
    created_us: Count
    expires_us: Count = 0
    due_us: Count = 0
    key: str = ""
    tags: tuple[str, ...] = ()
    client: str = ""


class PutRow(msgspec.Struct, array_like=True, tag=8, frozen=True, gc=False):
    """Letters in a row that have nothing of their own but what they say. Their numbers follow each other."""

    serial: Count
    first: Count
    word: Word
    created_us: Count
    payloads: list[bytes]
    client: str = ""

    def puts(self) -> list[Put]:
        """Each of them for itself."""
        return [
            Put(self.serial, number, self.word, payload, b"", self.created_us, client=self.client)
            for number, payload in enumerate(self.payloads, self.first)
        ]


class Removed(msgspec.Struct, array_like=True, tag=5, frozen=True, gc=False):
    """Letters that are deleted, replaced or expired."""

    serial: Count
    numbers: list[Count]


class Pulled(msgspec.Struct, array_like=True, tag=6, frozen=True, gc=False):
    """What a group has acknowledged. Records of one turn add up; a later turn begins anew.

    Who made the group stands in the first record of a turn.
    """

    serial: Count
    group: str
    turn: Count
    through: Annotated[list[Count], Meta(min_length=RANK_COUNT, max_length=RANK_COUNT)]
    done: list[Count]
    client: str = ""


class Agent(msgspec.Struct, array_like=True, tag=7, frozen=True, gc=False):
    """An agent of the registry; the highest stamp holds. Without a card it is gone."""

    name: str
    stamp: Count
    card: bytes
    client: str = ""
    secret: bytes = b""
    """The SHA-256 of what proves that the name is one's own."""
    seen_us: Count = 0
    """The last sign of life."""


Record: TypeAlias = Started | Opened | Extended | Gone | Put | PutRow | Removed | Pulled | Agent

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class Framing:
    """Frames under one folder's secret."""

    def __init__(self, secret: bytes) -> None:
        self._mark = secret[:4]
        self._seed = int.from_bytes(secret[4:], "little")

    def frame(self, record: Record) -> bytes:
        body = _encode(record)
        return _HEAD.pack(self._mark, len(body), zlib.crc32(body, self._seed)) + body

    def scan(self, data: bytes) -> Iterator[Record | Damage]:
        """The records in a segment, and the stretches that are none."""
        offset = 0
        while offset < len(data):
            found = self._at(data, offset)
            if found is None:
                following = self._resume(data, offset + 1)
                torn = following == len(data)
                reason = "the end is torn" if torn else "not a record, or its checksum does not fit"
                yield Damage(offset, following - offset, reason)
                offset = following
            else:
                record, offset = found
                yield record

    def _at(self, data: bytes, offset: int) -> tuple[Record, int] | None:
        """The record whose frame begins here, and where it ends."""
        start = offset + _HEAD.size
        if start > len(data):
            return None
        mark, length, checksum = _HEAD.unpack_from(data, offset)
        end = start + length
        if mark != self._mark or length > RECORD_BYTES_MAX or end > len(data):
            return None
        body = data[start:end]
        if zlib.crc32(body, self._seed) != checksum:
            return None
        try:
            return _decode(body), end
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def _resume(self, data: bytes, offset: int) -> int:
        """Where the next whole frame begins; the end when there is none."""
        while True:
            offset = data.find(self._mark, offset)
            if offset < 0:
                return len(data)
            if self._at(data, offset) is not None:
                return offset
            offset += 1
