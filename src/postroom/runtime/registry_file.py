"""A small JSON file of entries that several processes read and change.

Rule 1: a change is made under a lock, and replaces the whole file.
Rule 2: a file that cannot be read is an error, never an empty registry.
"""

import os
import time
from collections.abc import Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from postroom.core.fieldfaults import field_fault
from postroom.errors import StoreDamaged
from postroom.system import lock
from postroom.system.atomic import make_folder, open_safely, read_file, replace_file

LOCK_TIMEOUT_S = 10.0
CHECK_EVERY_S = 0.2  # between checks of the file, so that not every request needs one

E = TypeVar("E", bound=msgspec.Struct)


class RegistryFile(Generic[E]):
    """The entries of one file, which is an object with one list."""

    def __init__(self, path: Path, field: str, entry: type[E]) -> None:
        self._path = path
        self._field = field
        self._decoder = msgspec.json.Decoder(dict[str, list[entry]])  # type: ignore[valid-type]
        self._checked = -CHECK_EVERY_S
        self._entries: tuple[E, ...] = ()
        self.version: tuple[int, int, int] = (0, 0, 0)
        """Differs when the file was changed."""

    @property
    def is_fresh(self) -> bool:
        """Whether the file was checked a moment ago."""
        return time.monotonic() < self._checked + CHECK_EVERY_S

    def read(self) -> Sequence[E]:
        """The entries. A file that was changed by another process is read again."""
        self._checked = time.monotonic()
        try:
            found = self._path.stat()
            version = (found.st_ino, found.st_mtime_ns, found.st_size)
        except FileNotFoundError:
            self._entries, self.version = (), (0, 0, 0)
            return ()
        except OSError as error:
            raise StoreDamaged(f"{self._path} cannot be read: {error.strerror}") from error
        if version != self.version:
            self._entries, self.version = self._load(), version
        return self._entries

    @contextmanager
    def changing(self) -> Iterator[MutableSequence[E]]:
        """The entries as a list under the lock. The list is written at the end of the block."""
        make_folder(self._path.parent, "fsync")
        fd = open_safely(self._path.with_name(f"{self._path.name}.lock"), os.O_RDWR | os.O_CREAT)
        try:
            lock.acquire(fd, LOCK_TIMEOUT_S, self._path)
            entries = [*self.read()]
            yield entries
            data = msgspec.json.format(msgspec.json.encode({self._field: entries}), indent=1)
            replace_file(self._path, data + b"\n", "fsync")
            self._checked = -CHECK_EVERY_S
        finally:
            os.close(fd)

    def _load(self) -> tuple[E, ...]:
        try:
            return tuple(self._decoder.decode(read_file(self._path))[self._field])
        except msgspec.ValidationError as error:
            fault = field_fault(error, "the file")
            raise StoreDamaged(f"{self._path} is not a list of {self._field}: {fault}") from error
        except KeyError:
            raise StoreDamaged(f"{self._path} is not a list of {self._field}: it has no such list") from None
        except (msgspec.MsgspecError, ValueError, RecursionError, OSError) as error:
            raise StoreDamaged(f"{self._path} is not a list of {self._field}: {error}") from error
