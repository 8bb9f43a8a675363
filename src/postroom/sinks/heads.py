"""The head of a chain, noted outside of the folder that it stands for.

The chain alone cannot show that a folder was wiped, cut at its end or begun anew: what is left is whole. So
the shipper notes the last sealed segment in a file beside the folder, and in every store that it ships.

Rule 1: a head is noted after its segment is sealed. A crash between the two leaves an older head, which the
        chain still holds.
Rule 2: nobody replaces a head that the folder does not hold. A person does, by removing the file.
"""

from pathlib import Path

import msgspec

from postroom.core.jsoninput import guarded
from postroom.errors import StoreDamaged, UnsafePath
from postroom.sinks.chain import Chain
from postroom.sinks.layout import STREAM
from postroom.system.atomic import read_file, replace_file

SUFFIX = ".head"


class StreamHead(msgspec.Struct, frozen=True):
    """The last sealed segment of a stream, at some time."""

    stream: str
    """The name of the stream; empty when it has none."""
    segment: int
    hash: str


_decode = guarded(msgspec.json.Decoder(StreamHead).decode)


def head_path(folder: Path) -> Path:
    """The file that the head of a folder is noted in: `audit.head` beside `audit`."""
    return folder.with_name(folder.name + SUFFIX)


def noted_head(folder: Path) -> StreamHead | None:
    """What the file beside the folder says; None without one."""
    path = head_path(folder)
    try:
        return _decode(read_file(path))
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, OSError, UnsafePath) as error:
        raise StoreDamaged(f"{path} cannot be read as the head of a stream: {error}") from None


def note_head(folder: Path, head: StreamHead) -> None:
    replace_file(head_path(folder), msgspec.json.encode(head) + b"\n", "group")


def stream_of(folder: Path) -> str:
    """The name that a folder keeps wherever it is moved; empty before the first shipper gave it one."""
    try:
        return read_file(folder / STREAM).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return ""


def fault_of(head: StreamHead, stream: str, chain: Chain) -> str:
    """Why a folder with this name and chain is not the one that the head was noted of; empty when it is."""
    if head.stream and head.stream != stream:
        return f"stream {head.stream} was noted, and the folder is {_shown(stream)}: it was begun anew"
    if head.segment > chain.last:
        return (
            f"segment {head.segment} was noted as sealed, and {_end(chain)}: "
            "its end was cut off, or it was wiped"
        )
    known = {entry.n: entry.hash for entry in chain.entries}
    if chain.checkpoint:
        known[chain.checkpoint.checkpoint] = chain.checkpoint.head
    if known.get(head.segment) != head.hash:
        return f"segment {head.segment} has another hash than was noted: the chain was written anew"
    return ""


def _shown(stream: str) -> str:
    return f"stream {stream}" if stream else "no stream that a shipper began"


def _end(chain: Chain) -> str:
    return f"the chain ends with segment {chain.last}" if chain.last else "no segment is in the chain"
