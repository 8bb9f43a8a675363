"""Where tables and segments lie, as Spark and as this process reach them.

Rule 1: Spark reads and writes data through Hadoop. This process reads and writes the logs of tables, footers
        and small files through the object store of `deltalake`. Both see the same folder.
Rule 2: an address is the same for both, unless a mount says otherwise.
Rule 3: a file is written once, and moved at most once, under a name of its own.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import pyarrow as pa  # type: ignore[import-untyped]
from deltalake.exceptions import DeltaError
from deltalake.fs import DeltaStorageHandler
from pyarrow import fs as arrow_fs

from postroom.errors import Unavailable, shown_address
from postroom.pipeline.paths import normalized
from postroom.settings import is_address

S3A: Final = ("s3a://", "s3://")
"""Hadoop's name of S3, and the name that everybody else uses."""


class Access(NamedTuple):
    """How this process reaches addresses that are not folders of this machine."""

    options: Mapping[str, str] = {}
    """The `storage_options` of `deltalake`, such as an endpoint. Credentials may stay in the environment."""
    mounts: Mapping[str, str] = {}
    """Beginnings of addresses that only Hadoop knows, such as `viewfs:///`, and what they are here."""


NO_ACCESS: Final = Access()


class StoredFile(NamedTuple):
    """A file below a folder."""

    path: str
    """Relative to the folder."""
    size: int
    modified_ms: int


class Storage:
    """A folder: its address for Spark, and its files for this process."""

    def __init__(self, place: Path | str, access: Access = NO_ACCESS) -> None:
        """`place` is a path of this machine or an address such as `s3a://bucket/tables`."""
        self.place = normalized(place)
        """What Spark opens: a path, or an address."""
        self.access = access
        self.uri = _here(self.place, access.mounts)
        """What this process opens."""
        self.local = Path(unquote(urlsplit(self.uri).path)) if self.uri.startswith("file:") else None
        """The folder, if it lies on this machine."""
        self._fs: Any = None

    def __str__(self) -> str:
        return self.place

    def below(self, path: str) -> "Storage":
        """A folder in this folder."""
        return Storage(f"{self.place}/{path}", self.access)

    def uri_of(self, path: str) -> str:
        """What this process opens for a path below the folder."""
        return f"{self.uri}/{path}"

    def spark_path(self, path: str) -> str:
        """What Spark opens for a path below the folder."""
        return f"{self.place}/{path}"

    @property
    def options(self) -> dict[str, str] | None:
        """The `storage_options` of `deltalake`."""
        return dict(self.access.options) or None

    @property
    def fs(self) -> Any:
        """The folder as a file system of Arrow."""
        if self._fs is None and self.local is not None:
            self._fs = arrow_fs.SubTreeFileSystem(str(self.local), arrow_fs.LocalFileSystem())
        elif self._fs is None:
            try:
                self._fs = arrow_fs.PyFileSystem(_Handler(self.uri, self.options))
            except (OSError, ValueError, DeltaError) as error:
                place = shown_address(self.place)
                raise Unavailable(f"{place} cannot be opened: {_first_line(error)}") from None
        return self._fs

    # ---- files -----------------------------------------------------------------------------------------

    def folders(self) -> list[str]:
        """The names of the folders in it."""
        return sorted(info.base_name for info in self._infos("", deep=False) if not info.is_file)

    def files(self, below: str = "", *, deep: bool = True) -> list[StoredFile]:
        """The files below one of its folders; none if that does not exist."""
        return [
            StoredFile(info.path, info.size, (info.mtime_ns or 0) // 1_000_000)
            for info in self._infos(below, deep=deep)
            if info.is_file
        ]

    def _infos(self, below: str, *, deep: bool) -> list[Any]:
        selector = arrow_fs.FileSelector(below, recursive=deep, allow_not_found=True)
        with _one_sentence(self.place):
            found: list[Any] = self.fs.get_file_info(selector)
        return found

    def size(self, path: str) -> int | None:
        """The bytes of a file; None when there is none."""
        with _one_sentence(self.place):
            info = self.fs.get_file_info(path)
        return info.size if info.is_file else None

    def read(self, path: str, start: int = 0) -> bytes:
        """The bytes of a file, from `start` on. Raises `FileNotFoundError`."""
        if self.size(path) is None:
            raise FileNotFoundError(path)
        with _one_sentence(self.place), self.fs.open_input_file(path) as file:
            file.seek(start)
            return bytes(file.read())

    def write(self, path: str, data: bytes) -> None:
        """Write a whole file."""
        with _one_sentence(self.place):
            if self.local is not None:
                (self.local / path).parent.mkdir(parents=True, exist_ok=True)
            with self.fs.open_output_stream(path) as file:
                file.write(data)

    def move(self, path: str, target: str) -> None:
        """Move a file to a name that no file has."""
        with _one_sentence(self.place):
            if self.local is not None:
                (self.local / target).parent.mkdir(parents=True, exist_ok=True)
            self.fs.move(path, target)

    def delete(self, path: str) -> None:
        """Delete a file."""
        with _one_sentence(self.place):
            self.fs.delete_file(path)

    def delete_folder(self, path: str) -> None:
        """Delete a folder, if there is one."""
        with _one_sentence(self.place):
            if self.local is None or (self.local / path).is_dir():
                self.fs.delete_dir(path)


def as_storage(place: Path | str | Storage) -> Storage:
    """A folder that is given by its path, its address or as it is."""
    return place if isinstance(place, Storage) else Storage(place)


class _Handler(DeltaStorageHandler):
    """The object store of `deltalake`. Arrow hands it buffers, and it takes bytes."""

    def open_output_stream(self, path: str, metadata: dict[str, str] | None = None) -> Any:
        return pa.PythonFile(_TakesBuffers(self._handler.open_output_stream(path, metadata)))


class _TakesBuffers:
    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        return int(self._file.write(bytes(data)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@contextmanager
def _one_sentence(place: str) -> Iterator[None]:
    """Convert errors of a remote file system to one-line errors."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if not is_address(place):
            raise
        raise Unavailable(f"{place} cannot be reached: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "it does not say why")


def _here(place: str, mounts: Mapping[str, str]) -> str:
    """The address that this process opens for an address of Spark. The longest mount counts."""
    if not is_address(place):
        return Path(place).as_uri()
    for start, target in sorted(mounts.items(), key=lambda mount: -len(mount[0])):
        if place.startswith(start):
            return normalized_uri(f"{target.rstrip('/')}/{place[len(start) :].lstrip('/')}")
    hadoop, common = S3A
    return common + place.removeprefix(hadoop) if place.startswith(hadoop) else place


def normalized_uri(text: str) -> str:
    """An address without a slash at its end. A path becomes a `file:` address."""
    place = normalized(text)
    return place if is_address(place) else Path(place).as_uri()
