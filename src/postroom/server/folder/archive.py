"""The tar file of a backup: writing members with their hashes, and reading them back."""

import hashlib
import io
import os
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import IO, BinaryIO

from postroom.core.formats.backup_format import (
    FORMAT,
    HEAD,
    MANIFEST,
    MANIFEST_HASH,
    MEMBERS_MAX,
    OWN_NAMES,
    BackupHead,
    BackupManifest,
    MemberInfo,
    checked_head,
    checked_manifest,
    checked_name,
    difference,
    encoded,
)
from postroom.core.times import utc_text
from postroom.errors import PostroomError, StoreDamaged, Unavailable, WriteFailed
from postroom.system.atomic import PRIVATE_FILE_MODE, open_safely

BLOCK_BYTES = 1 << 20
MANIFEST_BYTES_MAX = 256 << 20

Report = Callable[[str, int], None]
"""Called with what is being done and the number of further bytes done."""


class _HashingReader(io.RawIOBase):
    """The first `size` bytes of a descriptor, hashed while they are read."""

    def __init__(self, fd: int, size: int, report: Callable[[int], None]) -> None:
        super().__init__()
        self._fd, self._left, self._offset = fd, size, 0
        self._report = report
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        wanted = self._left if size < 0 else min(size, self._left)
        data = os.pread(self._fd, wanted, self._offset)
        self._offset += len(data)
        self._left -= len(data)
        self.digest.update(data)
        self._report(len(data))
        return data


class ArchiveWriter:
    """Writes members to an open file."""

    def __init__(self, file: BinaryIO, report: Report) -> None:
        self._file = file
        self._report = report
        self._tar = tarfile.TarFile(fileobj=file, mode="w", format=tarfile.PAX_FORMAT)
        self._members: list[MemberInfo] = []
        self._head = BackupHead(FORMAT, version("postroom"), utc_text(time.time_ns()))
        self._put(HEAD, encoded(self._head))

    def add(self, name: str, fd: int, size: int) -> None:
        """Add the first `size` bytes of a descriptor."""
        reader = _HashingReader(fd, size, lambda n: self._report("writing", n))
        self._tar.addfile(_info(checked_name(name), size), reader)
        self._members.append(MemberInfo(name, size, reader.digest.hexdigest()))

    def add_bytes(self, name: str, data: bytes) -> None:
        """Add a small file."""
        self._put(checked_name(name), data)
        self._members.append(MemberInfo(name, len(data), hashlib.sha256(data).hexdigest()))

    def finish(self, formats: Mapping[str, int], left_out: list[str]) -> BackupManifest:
        """Write the manifest, and end the archive durably."""
        head = self._head
        manifest = BackupManifest(
            FORMAT, head.postroom, head.created, dict(formats), self._members, sorted(left_out)
        )
        data = encoded(manifest)
        self._put(MANIFEST, data)
        self._put(MANIFEST_HASH, hashlib.sha256(data).hexdigest().encode() + b"\n")
        self._tar.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        return manifest

    def _put(self, name: str, data: bytes) -> None:
        self._tar.addfile(_info(name, len(data)), io.BytesIO(data))


def _info(name: str, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, PRIVATE_FILE_MODE, int(time.time())
    return info


# ---- reading -----------------------------------------------------------------------------------------


@contextmanager
def reading(path: Path) -> Iterator["Archive"]:
    """Open an archive. Every error about it names its path."""
    try:
        fd = open_safely(path, os.O_RDONLY)
    except FileNotFoundError:
        raise Unavailable(f"there is no backup {path}") from None
    with os.fdopen(fd, "rb") as file:
        try:
            yield Archive(file)
        except WriteFailed:
            raise
        except PostroomError as error:
            raise type(error)(f"{path} is refused: {error}") from None
        except (tarfile.TarError, EOFError, OSError, UnicodeDecodeError, ValueError) as error:
            raise StoreDamaged(f"{path} is not a backup, or a damaged one: {error}") from error


class Archive:
    """A backup that is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def check(self, known_formats: Mapping[str, int], report: Report) -> BackupManifest:
        """Read every byte and compare it with the manifest, which is returned."""
        found: list[MemberInfo] = []
        own: dict[str, bytes] = {}
        for info, content in self.members():
            if info.name in OWN_NAMES:
                own[info.name] = content.read(MANIFEST_BYTES_MAX)
                if info.name == HEAD:
                    checked_head(own[HEAD])
                continue
            if HEAD not in own:
                raise StoreDamaged("it does not begin with the head of a backup")
            checked_name(info.name)
            digest = hashlib.sha256()
            while data := content.read(BLOCK_BYTES):
                digest.update(data)
                report("checking", len(data))
            found.append(MemberInfo(info.name, info.size, digest.hexdigest()))
        if MANIFEST not in own or MANIFEST_HASH not in own:
            raise StoreDamaged("its manifest is missing, so it was cut short")
        if hashlib.sha256(own[MANIFEST]).hexdigest().encode() != own[MANIFEST_HASH].strip():
            raise StoreDamaged("its manifest was changed")
        manifest = checked_manifest(own[MANIFEST], known_formats)
        if own[HEAD] != encoded(BackupHead(manifest.format, manifest.postroom, manifest.created)):
            raise StoreDamaged("its head was changed")
        if fault := difference(manifest, found):
            raise StoreDamaged(fault)
        return manifest

    def members(self) -> Iterator[tuple[tarfile.TarInfo, IO[bytes]]]:
        """The files in order. Anything but a regular file is refused."""
        self._file.seek(0)
        with tarfile.open(fileobj=self._file, mode="r:") as tar:
            n = 0
            while (info := tar.next()) is not None:
                n += 1
                if n > MEMBERS_MAX:
                    raise StoreDamaged(f"it has more than {MEMBERS_MAX} members")
                content = tar.extractfile(info) if info.isreg() and not info.issparse() else None
                if content is None:
                    raise StoreDamaged(f"{info.name!r} is not a regular file")
                yield info, content
                tar.members.clear()  # type: ignore[attr-defined] # or it keeps every member in memory
