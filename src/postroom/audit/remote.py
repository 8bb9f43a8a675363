"""Publishing: copying sealed segments to any file system of fsspec, such as an object store or another disk.

Rule 1: the copy's own chain records what was copied. Segments in that chain are complete; others are sent.
Rule 2: a segment is sent under a name that begins with `_`, then renamed. The chain is written last.
Rule 3: a copy only grows. Local retention removes nothing from it.
Rule 4: a copy has the name of the stream, which is sent before its segments. A reader of the folder can
        continue with the copy.
Rule 5: a copy on a local disk is private, as the stream is.
"""

import errno
import hashlib
import os
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from postroom.audit.chain import Chain, ChainEntry, chain_lines, parse_chain, read_chain
from postroom.audit.heads import stream_of
from postroom.audit.layout import CHAIN, INDEX, STREAM, chain_locked, index_path
from postroom.errors import InvalidSetting, StoreDamaged, WriteFailed
from postroom.system.atomic import PRIVATE_FILE_MODE, absolute_path, make_folder, open_safely, read_file

PART = "_part-"


class Publisher:
    """Copies the sealed segments of a folder to a URL such as `s3://bucket/audit`. One at a time."""

    def __init__(self, folder: str | os.PathLike[str], url: str, **options: Any) -> None:
        self.folder = absolute_path("the folder of segments", folder)
        self.url = url
        self._fs, self._root = _file_system(url, options)
        protocol: str | tuple[str, ...] = self._fs.protocol
        self._is_local = "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def publish(self, sealed_before_us: int | None = None) -> int:
        """Send the sealed segments that the copy lacks; returns their number. With a time, only older ones.

        After `WriteFailed`, call it again to send the rest.
        """
        with chain_locked(self.folder):
            chain = read_chain(self.folder)
        if chain.faults:
            raise StoreDamaged(f"the chain of {self.folder} is damaged, so nothing is sent to {self.url}")
        try:
            remote = self._remote_chain()
            missing = self._missing(chain, remote)
            if sealed_before_us is not None:  # whole segments from the oldest on, as retention removes them
                missing = [*takewhile(lambda entry: entry.sealed_us < sealed_before_us, missing)]
            name = stream_of(self.folder)
            if name and name != self._get(STREAM).decode("utf-8", "replace").strip():
                self._put(STREAM, f"{name}\n".encode())
            for entry in missing:
                self._send_segment(entry)
            if missing:
                remote.entries += missing
                remote.raw |= chain.raw
                self._put(CHAIN, chain_lines(remote))
        except OSError as error:
            raise WriteFailed(self.url, error, rolled_back=False) from error
        return len(missing)

    def _remote_chain(self) -> Chain:
        data = self._get(CHAIN)
        chain = parse_chain(data)
        if chain.faults or chain.whole_bytes < len(data):
            raise StoreDamaged(f"the chain at {self.url} is damaged: move it away to send everything again")
        return chain

    def _missing(self, local: Chain, remote: Chain) -> list[ChainEntry]:
        """The segments after the last one in the copy. A new copy begins where the local chain begins."""
        removed = local.checkpoint
        if not remote.last:
            remote.checkpoint = removed
            return local.entries
        if removed and removed.checkpoint > remote.last:
            raise StoreDamaged(
                f"segments {remote.last + 1} to {removed.checkpoint} were removed from {self.folder} "
                f"before they were sent to {self.url}"
            )
        if remote.head not in {removed.head if removed else "", *(entry.hash for entry in local.entries)}:
            raise StoreDamaged(f"{self.url} holds segments of another stream than {self.folder}")
        return [entry for entry in local.entries if entry.n > remote.last]

    def _send_segment(self, entry: ChainEntry) -> None:
        data = read_file(self.folder / entry.name)
        if hashlib.sha256(data).hexdigest() != entry.sha256:
            raise StoreDamaged(f"{entry.name} was changed after sealing, and is not sent to {self.url}")
        with suppress(FileNotFoundError, NotADirectoryError):  # optional, and `verify` reports a missing one
            index = index_path(self.folder, entry.n)
            self._put(f"{INDEX}/{index.name}", read_file(index))
        self._put(entry.name, data)

    def _get(self, name: str) -> bytes:
        """A file of the copy; empty when there is none."""
        try:
            data: bytes = self._fs.cat_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return b""
        return data

    def _put(self, name: str, data: bytes) -> None:
        """Write a file so that a reader of the copy sees all of it or nothing."""
        folder, _, last = f"{self._root}/{name}".rpartition("/")
        part = f"{folder}/{PART}{last}"
        if self._is_local:  # an empty private file first: on a local disk a copy is as private as the stream
            make_folder(Path(folder), "os")
            fd = open_safely(Path(part), os.O_WRONLY | os.O_CREAT)
            os.fchmod(fd, PRIVATE_FILE_MODE)
            os.close(fd)
        self._fs.makedirs(folder, exist_ok=True)
        self._fs.pipe_file(part, data)
        if self._fs.size(part) != len(data):
            raise OSError(errno.EIO, f"{part} is incomplete")
        self._fs.mv(part, f"{folder}/{last}")


def _file_system(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra
    except ImportError:
        raise InvalidSetting('copies of segments need a library: pip install "postroom[audit]"') from None
    try:
        file_system, root = url_to_fs(url, **options)
    except (ValueError, ImportError) as error:  # no such protocol, or its own library is missing
        raise InvalidSetting(f"{url!r} cannot be reached: {error}") from None
    return file_system, root.rstrip("/")
