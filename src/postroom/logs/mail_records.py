"""The record format of the mail log: records in frames.

    frame   mark (4 bytes) | length of the body (u32, little endian) | crc32 (u32) | body
    body    one record as a MessagePack array that begins with its kind; with a key file, encrypted

Rule 1: records can be read in any order and more than once. The number of a letter and the serial of a
        mailbox are never reused, and a removed letter does not come back.
Rule 2: mark and checksum start from a secret of the folder. So no payload can pass for a frame when the
        reader looks for the next frame after a damaged stretch.
Rule 3: an encrypted body is bound to its folder, not to its place in the log: Rule 1 allows any place.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from postroom.core.mail.mailbox import RANK_COUNT, Priority
from postroom.core.times import SECONDS_MAX
from postroom.errors import UnreadableValue
from postroom.message import Damage
from postroom.system.crypto.encryption import HEAD_BYTES, MARK, Encryption, key_needed

RECORD_BYTES_MAX = 65 << 20
ROW_BYTES_MAX = 1 << 20  # cost of the letters in one record
SECRET_BYTES = 8
STARTS_MAX = (1 << 31) - 1
_HEAD = struct.Struct("<4sII")

Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=SECONDS_MAX)]


class Started(msgspec.Struct, array_like=True, tag=0, frozen=True, gc=False):
    """The count of the server's starts. The first record of every segment."""

    start: Annotated[int, Meta(ge=0, le=STARTS_MAX)]


class Opened(msgspec.Struct, array_like=True, tag=1, frozen=True, gc=False):
    """A mailbox was created."""

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
    """The client whose quota it counts against."""
    org: str = ""
    """The organization of its creator; empty for none, and in records of earlier versions."""


class Extended(msgspec.Struct, array_like=True, tag=2, frozen=True, gc=False):
    """The lifetime of a mailbox was extended. The latest end wins."""

    serial: Count
    ttl_s: Seconds
    expires_us: Count


class MailboxExpired(msgspec.Struct, array_like=True, tag=3, frozen=True, gc=False):
    """A mailbox has expired."""

    serial: Count


class Put(msgspec.Struct, array_like=True, tag=4, frozen=True, gc=False):
    """A letter. With `due_us` it is delayed until then, and gets its final number when it is due."""

    serial: Count
    number: Count
    priority: Priority
    payload: bytes
    headers: bytes
    created_us: Count
    expires_us: Count = 0
    due_us: Count = 0
    key: str = ""
    tags: tuple[str, ...] = ()
    client: str = ""


class PutRow(msgspec.Struct, array_like=True, tag=8, frozen=True, gc=False):
    """A batch of letters that differ in their payloads only. Their numbers are consecutive."""

    serial: Count
    first: Count
    priority: Priority
    created_us: Count
    payloads: list[bytes]
    client: str = ""

    def puts(self) -> list[Put]:
        """One record for each letter."""
        return [
            Put(self.serial, number, self.priority, payload, b"", self.created_us, client=self.client)
            for number, payload in enumerate(self.payloads, self.first)
        ]


class Removed(msgspec.Struct, array_like=True, tag=5, frozen=True, gc=False):
    """Letters that were deleted, replaced or expired."""

    serial: Count
    numbers: list[Count]


class Pulled(msgspec.Struct, array_like=True, tag=6, frozen=True, gc=False):
    """Acknowledgements of a pull group. Records of one turn add up; a later turn replaces earlier ones.

    The first record of a turn names the client that created the group.
    """

    serial: Count
    group: str
    turn: Count
    through: Annotated[list[Count], Meta(min_length=RANK_COUNT, max_length=RANK_COUNT)]
    done: list[Count]
    client: str = ""


class AgentRecord(msgspec.Struct, array_like=True, tag=7, frozen=True, gc=False):
    """An agent of the registry. The highest stamp wins. Without a card the agent was removed."""

    name: str
    stamp: Count
    card: bytes
    client: str = ""
    secret: bytes = b""
    """The SHA-256 of the secret that proves ownership of the name."""
    seen_us: Count = 0
    """When the agent last registered or reported."""
    org: str = ""
    """The organization of the client that registered it, as of a mailbox."""


Record: TypeAlias = (
    Started | Opened | Extended | MailboxExpired | Put | PutRow | Removed | Pulled | AgentRecord
)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode


class Framing:
    """Frames with the secret of one folder."""

    def __init__(self, secret: bytes, encryption: Encryption | None = None) -> None:
        self._mark = secret[:4]
        self._seed = int.from_bytes(secret[4:], "little")
        self._encryption = encryption
        self._place = f"a record of the mail log {secret.hex()}"
        self._unreadable = -1
        """The offset of the last whole frame that could not be decrypted."""
        self.is_outdated = False
        """Whether a record was read that the current key did not encrypt."""

    def frame(self, record: Record) -> bytes:
        body = _encode(record)
        if self._encryption is not None:
            body = self._encryption.seal(body, self._place)
        return _HEAD.pack(self._mark, len(body), zlib.crc32(body, self._seed)) + body

    def scan(self, data: bytes) -> Iterator[Record | Damage]:
        """The records of a segment, and its damaged stretches."""
        offset = 0
        while offset < len(data):
            found = self._at(data, offset)
            if found is None:
                following = self._resume(data, offset + 1)
                torn = following == len(data)
                reason = "the end is torn" if torn else "not a record, or its checksum does not fit"
                if self._unreadable == offset:
                    reason = "a record that cannot be decrypted: it was changed"
                yield Damage(offset, following - offset, reason)
                offset = following
            else:
                record, offset = found
                yield record

    def heads(self, data: bytes) -> Iterator[bytes]:
        """How the bodies of the whole frames up to the first damage begin: enough to see their keys."""
        offset = 0
        while (body := self._body_at(data, offset)) is not None:
            yield body[:HEAD_BYTES]
            offset += _HEAD.size + len(body)

    def _body_at(self, data: bytes, offset: int) -> bytes | None:
        """The body of the frame at `offset`; None without a whole frame."""
        start = offset + _HEAD.size
        if start > len(data):
            return None
        mark, length, checksum = _HEAD.unpack_from(data, offset)
        end = start + length
        if mark != self._mark or length > RECORD_BYTES_MAX or end > len(data):
            return None
        body = data[start:end]
        return body if zlib.crc32(body, self._seed) == checksum else None

    def _at(self, data: bytes, offset: int) -> tuple[Record, int] | None:
        """The record of the frame at `offset`, and the end of the frame; None without a whole frame."""
        body = self._body_at(data, offset)
        if body is None:
            return None
        end = offset + _HEAD.size + len(body)
        try:
            if self._encryption is not None:
                self.is_outdated = self.is_outdated or not body.startswith(self._encryption.head)
                body = self._encryption.open(body, self._place)
            elif body[: len(MARK)] == MARK:
                raise key_needed("the mail log")
            return _decode(body), end
        except UnreadableValue:
            self._unreadable = offset
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def _resume(self, data: bytes, offset: int) -> int:
        """The offset of the next whole frame; the end of the data when there is none."""
        while True:
            offset = data.find(self._mark, offset)
            if offset < 0:
                return len(data)
            if self._at(data, offset) is not None:
                return offset
            offset += 1
