"""The head of a chain, recorded outside the folder of the chain.

The chain alone cannot show that a folder was emptied, truncated or replaced: the rest is still consistent. So
the shipper records the last sealed segment in a file next to the folder, and in every store that it ships.

Rule 1: a head is recorded after its segment is sealed. A crash between the two leaves an older head, which
        is still in the chain.
Rule 2: a recorded head that is not in the chain is never overwritten. Only an operator can remove its file.
"""

from pathlib import Path

import msgspec

from postroom.audit.chain import Chain
from postroom.audit.layout import STREAM
from postroom.core.formats.jsoninput import guarded
from postroom.errors import StoreDamaged, UnsafePath
from postroom.system.atomic import read_file, replace_file

SUFFIX = ".head"


class StreamHead(msgspec.Struct, frozen=True):
    """The last sealed segment of a stream at the time of recording."""

    stream: str
    """The name of the stream; empty when it has none."""
    segment: int
    hash: str


_decode = guarded(msgspec.json.Decoder(StreamHead).decode)


def head_path(folder: Path) -> Path:
    """The file that records the head of a folder: `audit.head` next to `audit`."""
    return folder.with_name(folder.name + SUFFIX)


def noted_head(folder: Path) -> StreamHead | None:
    """The head recorded next to the folder; None without such a file."""
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
    """The name of a folder's stream, stored in the folder; empty before the first shipper assigns one."""
    try:
        return read_file(folder / STREAM).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return ""


def fault_of(head: StreamHead, stream: str, chain: Chain) -> str:
    """Why a recorded head does not belong to a folder with this stream name and chain; empty when it does."""
    if head.stream and head.stream != stream:
        found = f"stream {stream}" if stream else "no named stream"
        return f"stream {head.stream} was recorded, but the folder holds {found}: it was replaced"
    if head.segment > chain.last:
        end = f"the chain ends with segment {chain.last}" if chain.last else "no segment is in the chain"
        return f"segment {head.segment} was recorded as sealed, but {end}: segments at the end were removed"
    known = {entry.n: entry.hash for entry in chain.entries}
    if chain.checkpoint:
        known[chain.checkpoint.checkpoint] = chain.checkpoint.head
    if known.get(head.segment) != head.hash:
        return f"segment {head.segment} has another hash than the recorded one: the chain was rewritten"
    return ""
