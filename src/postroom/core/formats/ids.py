"""Message ids of the bus: sortable as text, readable by a person.

    MSG-20260205-143052-000123456-PID12345-0042
        date     time   nanoseconds pid   sequence

Rule: ids are made under the file's lock and are larger than the last id in the file, even when the clock
stepped back or the sequence wrapped.
"""

import re
from datetime import UTC, datetime, timedelta
from functools import cache, lru_cache
from hashlib import blake2b
from uuid import UUID
from zlib import crc32

import msgspec

from postroom.core.times import NANOS_PER_S, second_texts

SEQUENCE_MODULUS = 10_000
SEQUENCE_DIGITS = 4
PID_MODULUS = 100_000

_INSTANT_CHARS = len("MSG-20260205-143052-000123456-")
_BUS_ID = re.compile(r"MSG-(\d{8}-\d{6})-(\d{9})-PID(\d{5})-(\d{4})", re.ASCII)


def origin(pid: int) -> str:
    """The part of an id that names the process."""
    return f"PID{pid % PID_MODULUS:05d}-"


def is_ordered(msg_id: str) -> bool:
    """Whether an id has the format of this module. Other ids may sort anywhere."""
    return _BUS_ID.fullmatch(msg_id) is not None


def bus_id(epoch_ns: int, process: str, sequence: int, last: str) -> tuple[str, str]:
    """The next id and its timestamp: the id of `epoch_ns`, or the smallest id after `last` if that is larger.

    Every append calls this. Slicing the digits of a larger number keeps leading zeros, faster than a format.
    """
    in_id, in_ts = second_stems(epoch_ns // NANOS_PER_S)
    nanos = str(epoch_ns if epoch_ns >= NANOS_PER_S else NANOS_PER_S + epoch_ns % NANOS_PER_S)[-9:]
    msg_id = f"{in_id}{nanos}-{process}{str(SEQUENCE_MODULUS + sequence)[-SEQUENCE_DIGITS:]}"
    if msg_id <= last:
        msg_id = _after(last, msg_id[_INSTANT_CHARS:], msg_id)
    return msg_id, f"{in_ts}{nanos[:6]}Z"


@lru_cache(maxsize=64)
def second_stems(epoch_s: int) -> tuple[str, str]:
    """The common beginnings of the ids and of the timestamps of one second."""
    in_id, in_ts = second_texts(epoch_s)
    return f"MSG-{in_id}-", f"{in_ts}."


def bus_ids(epoch_ns: int, process: str, sequences: list[int], last: str) -> tuple[list[str], str]:
    """As `bus_id`, with one id for each of the increasing `sequences` and one timestamp for all."""
    msg_id, ts = bus_id(epoch_ns, process, sequences[0], last)
    begin = sequences[0] % SEQUENCE_MODULUS
    end = begin + len(sequences)
    if sequences[-1] - sequences[0] == len(sequences) - 1 and end <= SEQUENCE_MODULUS:
        stem = msg_id[:-SEQUENCE_DIGITS]
        return [stem + digits for digits in _sequence_texts()[begin:end]], ts
    msg_ids = [msg_id]  # the sequence wrapped, or another thread took some numbers
    for sequence in sequences[1:]:
        msg_ids.append(bus_id(epoch_ns, process, sequence, msg_ids[-1])[0])
    return msg_ids, ts


@cache
def _sequence_texts() -> list[str]:
    """Every sequence number as text: half a megabyte, made for the first batch."""
    return [f"{sequence:04d}" for sequence in range(SEQUENCE_MODULUS)]


def _after(last: str, tail: str, candidate: str) -> str:
    """The clock is not past `last`: use the instant of `last`, or one nanosecond later."""
    match = _BUS_ID.fullmatch(last)
    if match is None:
        return candidate  # a foreign id, which may sort anywhere
    same_instant = f"MSG-{match[1]}-{match[2]}-{tail}"
    if same_instant > last:
        return same_instant
    nanos = int(match[2]) + 1
    if nanos < NANOS_PER_S:
        return f"MSG-{match[1]}-{nanos:09d}-{tail}"
    try:
        second = datetime.strptime(match[1], "%Y%m%d-%H%M%S").replace(tzinfo=UTC) + timedelta(seconds=1)
    except (ValueError, OverflowError):
        return candidate
    return f"MSG-{second:%Y%m%d-%H%M%S}-{0:09d}-{tail}"


_TAG_BITS = 30  # of ids of earlier versions
_TAG_LOW_BITS = 18
_TAG_LOW = (1 << _TAG_LOW_BITS) - 1
_SEALED_TAG_BITS = 20
_NUMBER_BITS = 44
_LOW = (1 << 62) - 1
_UUID_CHARS = 36
_VERSION = 0x7000
_US_A_MS = 1000
SECRET_BYTES = 16


class IdRule(msgspec.Struct, frozen=True):
    """How a store makes ids. The store keeps the rule next to its identity."""

    secret: str
    """Hides the numbers of records in ids."""
    sealed_from_us: int
    """Ids that were made before this time show the number, as those of earlier versions do."""
    plain_max: int = 0
    """Clients may know plain numbers up to this one, the newest when the store began to cover them."""

    @classmethod
    def of(cls, text: str) -> "IdRule":
        """The rule in its stored form."""
        secret, *numbers = text.split(":")
        return cls(secret, *map(int, numbers))

    @property
    def text(self) -> str:
        """The stored form."""
        return f"{self.secret}:{self.sealed_from_us}:{self.plain_max}"


class MessageIds:
    """The ids of one store for messages of organizations: UUIDs of version 7.

    An id holds the number of its record, so no index by name is needed to find it. The number counts the
    messages of all organizations, so it is hidden: a keyed hash of the microsecond covers it. The
    microsecond is in the id, too.
    """

    def __init__(self, store_id: str, rule: IdRule) -> None:
        self._sealed_from_us = rule.sealed_from_us
        checksum = crc32(store_id.encode())
        self._tag = ~checksum & (1 << _SEALED_TAG_BITS) - 1  # never that of an old id
        self._old_tag = checksum & (1 << _TAG_BITS) - 1
        self._high_tag = self._tag >> _TAG_LOW_BITS | _VERSION
        self._hash = blake2b(digest_size=8, key=bytes.fromhex(rule.secret))
        self._instant = lru_cache(maxsize=4096)(self._new_instant)

    def _new_instant(self, at_us: int) -> tuple[str, int]:
        """The beginning of the ids of a microsecond, and the lower half of its id for the number 0."""
        ms, us = divmod(at_us, _US_A_MS)
        digits = f"{(ms & (1 << 48) - 1) << 16 | us << 2 | self._high_tag:016x}"
        cover = self.mark(at_us) & (1 << _NUMBER_BITS) - 1
        low = 0b10 << 62 | cover << _TAG_LOW_BITS | self._tag & _TAG_LOW
        return f"{digits[:8]}-{digits[8:12]}-{digits[12:]}-", low

    def mark(self, number: int) -> int:
        """64 bits that say nothing about the number to whoever does not know the secret."""
        hashed = self._hash.copy()
        hashed.update(b"%d" % number)
        return int.from_bytes(hashed.digest(), "big")

    def new(self, number: int, created_us: int) -> str:
        """The id of the record with this number."""
        if created_us < self._sealed_from_us:
            high = (created_us // 1000 & (1 << 48) - 1) << 16 | _VERSION | self._old_tag >> _TAG_LOW_BITS
            old = 0b10 << 62 | number << _TAG_LOW_BITS | self._old_tag & _TAG_LOW
            return str(UUID(int=high << 64 | old))
        begin, low = self._instant(created_us)
        digits = f"{number << _TAG_LOW_BITS ^ low:x}"
        return f"{begin}{digits[:4]}-{digits[4:]}"

    def number(self, message_id: str) -> int:
        """The record's number in an id of `new`; 0 for any other text."""
        if len(message_id) != _UUID_CHARS or message_id[14] != "7" or message_id[13] + message_id[18] != "--":
            return 0
        try:
            ms = int(message_id[:8] + message_id[9:13], 16)
            high, low = int(message_id[15:18], 16), int(message_id[19:23] + message_id[24:], 16) & _LOW
        except ValueError:
            return 0
        us, tag = high >> 2, (high & 0b11) << _TAG_LOW_BITS | low & _TAG_LOW
        at_us = ms * _US_A_MS + us
        if tag == self._tag and us < _US_A_MS and at_us >= self._sealed_from_us:
            return (low ^ self._instant(at_us)[1] & _LOW) >> _TAG_LOW_BITS
        is_old = high << _TAG_LOW_BITS | low & _TAG_LOW == self._old_tag
        return low >> _TAG_LOW_BITS if is_old and ms * _US_A_MS < self._sealed_from_us else 0
