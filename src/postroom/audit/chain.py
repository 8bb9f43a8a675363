"""The hash chain: one line per sealed segment, each with the hash of the previous line.

Rule 1: `hash` is the SHA-256 of the line's own bytes without `,"hash":"..."`, and the next line's `prev`.
Rule 2: a segment with a line in the chain is complete, even when it was not yet moved to its final path.
Rule 3: one checkpoint, the first line, replaces the lines of all segments that retention removed.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from postroom.audit.layout import CHAIN
from postroom.core.formats.jsoninput import guarded
from postroom.errors import WriteFailed
from postroom.logs.appendfile import truncated
from postroom.system.atomic import open_safely, read_file, sync_folder, write_all

NO_HASH = "0" * 64
"""The `prev` of the very first line."""

_HASHED = re.compile(rb'(\{.*),"hash":"([0-9a-f]{64})"\}', re.DOTALL)
_CHECKPOINT = b'{"checkpoint":'


class ChainEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sealed segment."""

    n: int
    name: str
    events: int
    bytes: int
    sha256: str
    prev: str
    min_ts_us: int
    max_ts_us: int
    sealed_us: int
    sources: dict[str, tuple[int, int]]
    """The lowest and the highest `seq` of each source."""
    index: str
    """The SHA-256 of the segment's index."""
    redaction: str = ""
    """The mark of the redaction that was applied to every event; empty when that is not known."""
    hash: str = ""


class ChainCheckpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Replaces the lines of the segments that retention removed."""

    checkpoint: int
    """The number of the last removed segment."""
    head: str
    """The hash of the last removed segment: the first remaining line has it as `prev`."""
    events: int
    bytes: int
    sources: dict[str, int]
    """The last `seq` of each source in the removed segments."""
    max_ts_us: int
    removed_us: int
    removing: dict[str, str] = {}
    """Names and SHA-256 of segments whose files are still being removed."""
    hash: str = ""


class ChainFault(NamedTuple):
    """A damaged line of the chain."""

    line: int
    reason: str


class Chain(msgspec.Struct):
    """The content of a chain file."""

    checkpoint: ChainCheckpoint | None = None
    entries: list[ChainEntry] = []
    lines: list[int] = []
    """The line number of each entry, counted from 1."""
    raw: dict[str, bytes] = {}
    """The line of each entry, by its hash."""
    faults: list[ChainFault] = []
    whole_bytes: int = 0
    """The size up to the last newline. Bytes after it belong to an unfinished write."""

    @property
    def head(self) -> str:
        """The hash of the last line, which depends on all earlier ones."""
        if self.entries:
            return self.entries[-1].hash
        return self.checkpoint.head if self.checkpoint else NO_HASH

    @property
    def last(self) -> int:
        """The highest segment number; 0 for none."""
        highest = max((entry.n for entry in self.entries), default=0)
        return max(highest, self.checkpoint.checkpoint if self.checkpoint else 0)

    def positions(self) -> dict[str, int]:
        """The last `seq` of every source."""
        positions = dict(self.checkpoint.sources) if self.checkpoint else {}
        for entry in self.entries:
            for source, (_, last) in entry.sources.items():
                positions[source] = max(last, positions.get(source, 0))
        return positions


_encoder = msgspec.json.Encoder()
_entry = guarded(msgspec.json.Decoder(ChainEntry).decode)
_checkpoint = guarded(msgspec.json.Decoder(ChainCheckpoint).decode)


def chain_line(link: ChainEntry | ChainCheckpoint) -> tuple[bytes, str]:
    """The line of an entry or checkpoint whose `hash` is still empty, and the hash."""
    body = _encoder.encode(link)
    digest = hashlib.sha256(body).hexdigest()
    return body[:-1] + b',"hash":"' + digest.encode() + b'"}\n', digest


def chain_lines(chain: Chain) -> bytes:
    """The whole file: a newly encoded checkpoint, then the original bytes of each entry's line."""
    lines = [chain.raw[entry.hash] for entry in chain.entries]
    if chain.checkpoint:
        lines.insert(0, chain_line(msgspec.structs.replace(chain.checkpoint, hash=""))[0])
    return b"".join(lines)


def read_chain(folder: Path) -> Chain:
    """The chain of a folder; empty when there is none."""
    try:
        return parse_chain(read_file(folder / CHAIN))
    except FileNotFoundError:
        return Chain()


def parse_chain(data: bytes) -> Chain:
    chain = Chain(whole_bytes=data.rfind(b"\n") + 1)
    for number, line in enumerate(data[: chain.whole_bytes].split(b"\n")[:-1], start=1):
        fault = _add_line(chain, number, line)
        if fault:
            chain.faults.append(ChainFault(number, fault))
    return chain


def _add_line(chain: Chain, number: int, line: bytes) -> str:
    """Add a line to the chain. Returns why it is damaged, or an empty text."""
    match = _HASHED.fullmatch(line)
    if not match or hashlib.sha256(match[1] + b"}").hexdigest().encode() != match[2]:
        return "it was changed"
    try:
        if line.startswith(_CHECKPOINT):
            if number != 1:
                return "a checkpoint may only be the first line"
            chain.checkpoint = _checkpoint(line)
        else:
            entry = _entry(line)
            chain.entries.append(entry)
            chain.lines.append(number)
            chain.raw[entry.hash] = line + b"\n"
    except msgspec.DecodeError:
        return "it is not an entry of a chain"
    return ""


def append_line(folder: Path, line: bytes) -> None:
    """Append a line durably, or raise. The caller holds the chain's lock."""
    path = folder / CHAIN
    is_new = not path.exists()
    fd = open_safely(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(fd).st_size
        try:
            write_all(fd, line)
        except OSError as error:
            raise WriteFailed(path, error, rolled_back=truncated(fd, size)) from error
        try:
            os.fsync(fd)
            if is_new:
                sync_folder(folder)
        except OSError as error:
            # If this fails, recovery finds the line, which is valid: the segment is complete.
            truncated(fd, size)
            raise WriteFailed(path, error, rolled_back=False) from error
    finally:
        os.close(fd)
