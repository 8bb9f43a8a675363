"""A small JSON file of entries that several processes read and change.

Rule 1: a change is made under a lock, and replaces the whole file.
Rule 2: a file that cannot be read, or was changed, is an error, never an empty registry.
Rule 3: a file without a checksum is one of an earlier release, or was edited by an operator.
"""

import os
import time
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from postroom.core.fieldfaults import field_fault
from postroom.core.formats.checksummed import checksum_fits, with_checksum
from postroom.errors import StoreDamaged
from postroom.stores.disk_reserve import keep_control_reserve, with_control_reserve
from postroom.system import lock
from postroom.system.atomic import make_folder, read_file, replace_file

LOCK_TIMEOUT_S = 10.0
CHECK_EVERY_S = 0.2  # between checks of the file, so that not every request needs one

NO_FILE = 0, 0, 0
"""The version of a file that does not exist."""

E = TypeVar("E", bound=msgspec.Struct)


@dataclass(slots=True)
class Content(Generic[E]):
    """The content of one file, which may be changed."""

    entries: list[E]
    owners: dict[str, str]
    """By name: the organization that owns it, for as long as the file exists. Most files have none."""


class FileContents(NamedTuple, Generic[E]):
    """The content of the file when it was read."""

    version: tuple[int, int, int]
    """Differs when the file was changed."""
    entries: Sequence[E]
    owners: Mapping[str, str]


class RegistryFile(Generic[E]):
    """The entries of one file, which is an object with one list, and perhaps the owners of names."""

    def __init__(self, path: Path, field: str, entry: type[E]) -> None:
        self._path = path
        self._field = field
        fields: list[tuple[str, Any, Any]] = [
            (field, list[entry] | msgspec.UnsetType, msgspec.UNSET),  # type: ignore[valid-type]
            ("owners", dict[str, str], msgspec.field(default_factory=dict)),
            ("crc32", int | None, None),
        ]
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
            msgspec.defstruct("Registry", fields, forbid_unknown_fields=True)
        )
        self._checked = -CHECK_EVERY_S
        self._found: FileContents[E] = FileContents(NO_FILE, (), {})

    @property
    def version(self) -> tuple[int, int, int]:
        """The version that was read last. Another thread may have read it."""
        return self._found.version

    @property
    def is_fresh(self) -> bool:
        """Whether the file was checked a moment ago."""
        return time.monotonic() < self._checked + CHECK_EVERY_S

    def read(self) -> Sequence[E]:
        """The entries. A file that was changed by another process is read again."""
        return self.read_all().entries

    def read_all(self) -> FileContents[E]:
        """The entries, the owners of names, and the version of the file."""
        self._checked = time.monotonic()
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            found: FileContents[E] = FileContents(NO_FILE, (), {})
            self._found = found
            return found
        except OSError as error:
            raise StoreDamaged(f"{self._path} cannot be read: {error.strerror}") from error
        version, found = (stat.st_ino, stat.st_mtime_ns, stat.st_size), self._found
        if version != found.version:
            self._found = found = FileContents(version, *self._load())
        return found

    def current_version(self) -> tuple[int, int, int]:
        """The version of the file as it is now."""
        return self.read_all().version

    @contextmanager
    def changing(self) -> Iterator[MutableSequence[E]]:
        """The entries as a list under the lock. The list is written at the end of the block."""
        with self.changing_all() as content:
            yield content.entries

    @contextmanager
    def changing_all(self) -> Iterator[Content[E]]:
        """The entries and the owners of names, as `changing`."""
        make_folder(self._path.parent, "fsync")
        fd = lock.open_lock_file(self._path.with_name(f"{self._path.name}.lock"))
        try:
            lock.acquire(fd, LOCK_TIMEOUT_S, self._path)
            found = self.read_all()
            content = Content([*found.entries], {**found.owners})
            yield content
            written: dict[str, Any] = {self._field: content.entries}
            if content.owners:
                written["owners"] = content.owners
            data = with_checksum(written)
            with_control_reserve(self._path.parent, lambda: replace_file(self._path, data, "fsync"))
            keep_control_reserve(self._path.parent)
            self._checked = -CHECK_EVERY_S
        finally:
            os.close(fd)

    def _load(self) -> tuple[tuple[E, ...], dict[str, str]]:
        try:
            data = read_file(self._path)
            read = self._decoder.decode(data)
        except msgspec.ValidationError as error:
            fault = field_fault(error, "the file")
            raise StoreDamaged(f"{self._path} is not a list of {self._field}: {fault}") from error
        except (msgspec.MsgspecError, ValueError, RecursionError, OSError) as error:
            raise StoreDamaged(f"{self._path} is not a list of {self._field}: {error}") from error
        entries = getattr(read, self._field)
        if entries is msgspec.UNSET:
            raise StoreDamaged(f"{self._path} is not a list of {self._field}: it has no such list")
        if read.crc32 is not None and not checksum_fits(data):
            raise StoreDamaged(
                f"{self._path} was changed, its checksum does not match: restore it from a backup, or remove "
                f"its field crc32 to use it as it is"
            )
        return tuple(entries), read.owners
