"""JSON files that carry a checksum of their own text as the last field.

Rule 1: the checksum covers the bytes before it, so any changed byte is detected.
Rule 2: a file without the field was written by an earlier release. Its reader refuses unknown fields, so a
        damaged field name does not pass as such a file.
"""

import re
import zlib

import msgspec

_CHECKSUMMED = re.compile(rb'(.*),\n "crc32": ([0-9]+)\n\}\n', re.DOTALL)


def with_checksum(value: object) -> bytes:
    """The text of an object with at least one field, and its checksum."""
    body = msgspec.json.format(msgspec.json.encode(value), indent=1)[: -len(b"\n}")]
    return body + b',\n "crc32": %d\n}\n' % zlib.crc32(body)


def checksum_fits(data: bytes) -> bool:
    """Whether the text ends with its checksum."""
    found = _CHECKSUMMED.fullmatch(data)
    return found is not None and zlib.crc32(found[1]) == int(found[2])
