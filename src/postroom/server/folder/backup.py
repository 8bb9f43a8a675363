"""Copies a data folder into one archive while servers use it, and restores the archive into a new folder.

Rule 1: the copy is a state that the folder could have had after a crash. So a restored folder needs no more
        than what every start does.
Rule 2: the audit stream is looked at before the store: the store then knows every event of the stream.
Rule 3: no server waits for a backup. Locks are held only to note the sizes of files that grow; the store is
        read from a snapshot.
Rule 4: the archive gets its name when it is whole, durable, and read back.
Rule 5: a restore compares every hash before it writes the first byte. The folder gets its name when all its
        files are durable: a restore that is killed leaves only a hidden folder. A folder with files is never
        touched.
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

import apsw

from postroom.audit.chain import parse_chain
from postroom.audit.heads import SUFFIX as HEAD_SUFFIX
from postroom.audit.heads import head_path
from postroom.audit.layout import CHAIN, OPEN, STREAM, TORN, chain_locked, holds_stream, index_path, numbered
from postroom.core.formats.backup_format import OWN_NAMES, SETTINGS, BackupManifest, checked_name
from postroom.core.formats.events import SCHEMA
from postroom.core.formats.manifest import MANIFEST_FILE
from postroom.errors import InvalidMessage, PostroomError, StoreDamaged, Unavailable, WriteFailed
from postroom.logs import busfile, eventfiles
from postroom.logs.mail_log import is_log_segment, log_segments
from postroom.server.folder import bus_owners
from postroom.server.folder.archive import BLOCK_BYTES, Archive, ArchiveWriter, Report, reading
from postroom.server.folder.layout import (
    AUDIT_FOLDER,
    DATABASE,
    MAIL_FOLDER,
    checked_data_folder,
    files_of,
    is_copy,
    is_transient,
)
from postroom.stores.sqlite.snapshot import SqliteSnapshot, newest_version
from postroom.system import lock
from postroom.system.atomic import (
    PRIVATE_FOLDER_MODE,
    TEMPORARY_SUFFIX,
    absolute_path,
    make_folder,
    open_safely,
    read_file,
    size_of_whole_lines,
    sync_folder,
    write_all,
)

ATTEMPTS_MAX = 5  # while servers rename and remove files
LOCK_TIMEOUT_S = 10.0
UNFINISHED_SUFFIX = ".restoring"
_SQLITE_SUFFIXES = ("-journal", "-wal", "-shm")  # of the files that SQLite keeps next to a database
_KEY_FILE = re.compile(r".*\.(?:key|keys|pem|p12)")


class Moved(Exception):
    """A server renamed or removed a file meanwhile. The backup starts again."""


class BackupResult(NamedTuple):
    """A finished backup."""

    manifest: BackupManifest
    bytes: int
    """The size of the archive."""
    is_encrypted: bool
    """Whether the values of the store are encrypted."""


def known_formats() -> dict[str, int]:
    """The newest formats of stores that this version can use."""
    return {"store": newest_version(), "audit": SCHEMA}


def back_up(
    data: Path,
    out: Path,
    *,
    settings_file: Path | None = None,
    key_files: Iterable[Path] = (),
    with_keys: bool = False,
    report: Report = lambda *_: None,
) -> BackupResult:
    """Write the archive `out` with all data of a folder. Key files stay out unless `with_keys`."""
    folder = absolute_path("the data folder", checked_data_folder(data))
    target = absolute_path("the archive", out)
    if target.resolve().is_relative_to(folder.resolve()):
        raise InvalidMessage(f"{target} is inside the data folder: a backup has to be elsewhere")
    if target.exists():
        raise Unavailable(f"{target} exists already, and stays as it is")
    if not target.parent.is_dir():
        raise Unavailable(f"there is no folder {target.parent}")
    keys = set() if with_keys else {path.resolve() for path in key_files}
    is_encrypted = False
    with _temporary(target) as (temporary, database_copy):
        settings = None if settings_file is None else settings_file.read_bytes()

        def write_once() -> None:
            nonlocal is_encrypted
            selection = _Selection(folder, keys, with_keys=with_keys)
            with temporary.open("wb") as file, selection:
                writer = ArchiveWriter(file, report)
                selection.write(writer, database_copy, report)
                is_encrypted = selection.is_encrypted
                if settings is not None:
                    writer.add_bytes(SETTINGS, settings)
                writer.finish(selection.formats, selection.left_out)

        _repeated(write_once, folder, target)
        with reading(temporary) as archive:
            manifest = archive.check(known_formats(), report)
        temporary.rename(target)
        sync_folder(target.parent)
    return BackupResult(manifest, target.stat().st_size, is_encrypted)


def _repeated(write_once: Callable[[], None], folder: Path, target: Path) -> None:
    """Write the archive, again when a server renamed or removed a file meanwhile."""
    for attempt in range(1, ATTEMPTS_MAX + 1):
        try:
            write_once()
        except PostroomError:
            raise
        except (Moved, FileNotFoundError) as error:
            if attempt == ATTEMPTS_MAX:
                raise Unavailable(f"files of {folder} changed all the time: {error}; try again") from error
        except OSError as error:
            raise WriteFailed(target, error) from error
        else:
            return


@contextmanager
def _temporary(target: Path) -> Iterator[tuple[Path, Path]]:
    """The names of the unfinished archive and of the copy of the store. Both are removed at the end.

    So is what backups that were killed have left.
    """
    left = re.compile(
        rf"\.{re.escape(target.name)}(?:\.db)?\.(\d+){re.escape(TEMPORARY_SUFFIX)}"
        rf"(?:{'|'.join(_SQLITE_SUFFIXES)})?"
    )
    for path in target.parent.iterdir():
        found = left.fullmatch(path.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            path.unlink(missing_ok=True)
    archive = target.with_name(f".{target.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    database = target.with_name(f".{target.name}.db.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        os.close(open_safely(archive, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        yield archive, database
    except apsw.FullError as error:
        raise WriteFailed(target, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))) from error
    finally:
        for path in (archive, database, *(Path(f"{database}{suffix}") for suffix in _SQLITE_SUFFIXES)):
            path.unlink(missing_ok=True)


class _Selection:
    """The files of a folder that belong to one state of it. A context manager."""

    def __init__(self, folder: Path, keys: set[Path], *, with_keys: bool) -> None:
        self._folder = folder
        self._keys = keys
        self._with_keys = with_keys
        self._stack = ExitStack()
        self._small: dict[str, bytes] = {}
        self._growing: list[tuple[str, int, int]] = []
        """Files that are appended to: the name, the descriptor, and how many bytes belong to the backup."""
        self._sealed: list[tuple[str, int | None]] = []
        """Files that never change, with their size if it is known."""
        self._snapshot: SqliteSnapshot | None = None
        self.formats: dict[str, int] = {}
        self.is_encrypted = False
        self.left_out: list[str] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            with suppress(FileNotFoundError):  # first: everything grows, and has at least what it names
                self._small[MANIFEST_FILE] = read_file(self._folder / MANIFEST_FILE)
            audit = self._folder / AUDIT_FOLDER
            if holds_stream(audit):
                with chain_locked(audit):
                    self._note_stream(audit, stack)
                    self._pin_store(stack)
            else:
                self._pin_store(stack)
            self._note_mail(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()

    # ---- noting what belongs to the state ------------------------------------------------------------

    def _note_stream(self, audit: Path, stack: ExitStack) -> None:
        """Note the stream, under the lock of its chain: no segment is sealed or removed meanwhile."""
        self.formats["audit"] = SCHEMA
        # The head first: it is recorded after its segment is in the chain.
        for path in (head_path(audit), audit / STREAM, audit / CHAIN):
            with suppress(FileNotFoundError):
                self._small[self._name(path)] = read_file(path)
        chain = parse_chain(self._small.get(self._name(audit / CHAIN), b""))
        entries = {entry.n: entry for entry in chain.entries}
        for n, path in numbered(audit / OPEN, ".jsonl").items():
            entry = entries.get(n)
            if entry is None:
                self._note_growing(path, stack, whole_lines=True)
            elif not (audit / entry.name).exists():  # sealed, and moved by the next start
                self._note_growing(path, stack)
                del entries[n]
                self._sealed.append((self._name(index_path(audit, n)), None))
        for entry in entries.values():
            self._sealed.append((self._name(audit / entry.name), entry.bytes))
            self._sealed.append((self._name(index_path(audit, entry.n)), None))

    def _pin_store(self, stack: ExitStack) -> None:
        path = self._folder / DATABASE
        if not path.exists():
            return
        self._snapshot = stack.enter_context(SqliteSnapshot(path))
        if self._snapshot.is_newer:
            raise StoreDamaged(f"{path} was written by a newer postroom: back it up with that version")
        self.formats["store"] = self._snapshot.version
        self.is_encrypted = self._snapshot.is_encrypted

    def _note_mail(self, stack: ExitStack) -> None:
        """Note the segments of Mail's log. Opened, their bytes outlive a compaction that removes them."""
        folder = self._folder / MAIL_FOLDER
        if not folder.is_dir():
            return
        for path in log_segments(folder):
            self._note_growing(path, stack)
        for file in eventfiles.full_files(folder):
            self._note_growing(file.path, stack)
        with suppress(FileNotFoundError):
            self._note_growing(folder / eventfiles.GROWING, stack, whole_lines=True)

    def _note_growing(self, path: Path, stack: ExitStack, *, whole_lines: bool = False) -> None:
        fd = open_safely(path, os.O_RDONLY)
        stack.callback(os.close, fd)
        size = os.fstat(fd).st_size
        self._growing.append((self._name(path), fd, size_of_whole_lines(fd, size) if whole_lines else size))

    # ---- writing -------------------------------------------------------------------------------------

    def write(self, writer: ArchiveWriter, database_copy: Path, report: Report) -> None:
        """Write all members."""
        written = {DATABASE}
        if self._snapshot is not None:
            self._write_store(self._snapshot, writer, database_copy, report)
        for name, data in self._small.items():
            writer.add_bytes(name, data)
            written.add(name)
        for name, fd, size in self._growing:
            writer.add(name, fd, size)
            written.add(name)
        for name, known_size in self._sealed:
            self._write_file(writer, name, known_size)
            written.add(name)
        for bus in bus_owners.bus_files(self._folder):
            written |= self._write_bus(writer, bus)
        for path in self._others(written):
            with suppress(FileNotFoundError):  # removed since the list was made: it belongs to no part
                self._write_file(writer, self._name(path), None)

    def _write_store(
        self, snapshot: SqliteSnapshot, writer: ArchiveWriter, copy: Path, report: Report
    ) -> None:
        done = 0

        def note(copied: int, _: int) -> None:
            nonlocal done
            report("copying the store", copied - done)
            done = copied

        copy.unlink(missing_ok=True)
        snapshot.copy_to(copy, note)
        with SqliteSnapshot(copy, at_rest=True) as copied:
            faults = copied.page_faults()
        if faults:
            raise StoreDamaged(f"{self._folder / DATABASE} is damaged: {faults[0]}; see `postroom doctor`")
        self._write_file(writer, DATABASE, None, copy)
        copy.unlink()

    def _write_file(
        self, writer: ArchiveWriter, name: str, known_size: int | None, path: Path | None = None
    ) -> None:
        path = path or self._folder / name
        with os.fdopen(open_safely(path, os.O_RDONLY), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if known_size is not None and size != known_size:
                raise StoreDamaged(f"{path} has {size} bytes instead of {known_size}")
            writer.add(name, file.fileno(), size)

    def _write_bus(self, writer: ArchiveWriter, bus: Path) -> set[str]:
        """Write a bus with its archives. Under its lock it is neither rotated nor appended to."""
        with os.fdopen(open_safely(bus, os.O_RDONLY), "rb") as file:
            fd = file.fileno()
            lock.acquire(fd, LOCK_TIMEOUT_S, bus)
            if os.fstat(fd).st_ino != bus.stat().st_ino:
                raise Moved(f"{bus} was rotated")
            archives, size = busfile.archives(bus), os.fstat(fd).st_size
            lock.release(fd)
            for path in archives:
                self._write_file(writer, self._name(path), None)
            writer.add(self._name(bus), fd, size)
        return {self._name(path) for path in (*archives, bus)}

    def _others(self, written: set[str]) -> Iterator[Path]:
        """The registry, and files that belong to no part."""
        for path in files_of(self._folder):
            name = self._name(path)
            if is_transient(path.name) or name in written or name == SETTINGS or _is_of_part(name, written):
                continue
            is_key = path.resolve() in self._keys or _KEY_FILE.fullmatch(path.name) is not None
            is_kept_out = is_key and not self._with_keys
            if path.is_symlink() or not path.is_file() or is_copy(path.name) or is_kept_out:
                self.left_out.append(name)
            else:
                yield path


def _is_of_part(name: str, written: set[str]) -> bool:
    """Whether a part owns the file. Files that a part made since its state was noted are not part of it."""
    folder, _, rest = name.partition("/")
    if folder == AUDIT_FOLDER:
        return not rest.startswith(f"{TORN}/")
    if folder == MAIL_FOLDER:
        return is_log_segment(rest) or rest == eventfiles.GROWING or eventfiles.is_full_name(rest)
    if folder == bus_owners.FOLDER:
        bus, suffix, _ = name.rpartition(bus_owners.SUFFIX)  # of an archive, its bus
        return bus + suffix in written
    return name == f"{AUDIT_FOLDER}{HEAD_SUFFIX}"


# ---- restoring -----------------------------------------------------------------------------------------


def restore(archive: Path, data: Path, *, report: Report = lambda *_: None) -> BackupManifest:
    """Restore a backup into the folder `data`, which must not exist or be empty."""
    target = absolute_path("the data folder", data)
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise Unavailable(f"{target} is not a folder")
    if target.is_dir() and any(target.iterdir()):
        raise Unavailable(f"{target} is not empty: a backup is restored into a new folder")
    with reading(absolute_path("the archive", archive)) as source:
        manifest = source.check(known_formats(), report)
        make_folder(target.parent, "group")
        disk = os.statvfs(target.parent)
        free = disk.f_bavail * disk.f_frsize
        if free < manifest.bytes:
            needed = f"the backup needs {manifest.bytes:,} bytes"
            raise Unavailable(f"{needed}, and {free:,} are free in {target.parent}")
        unfinished = target.with_name(f".{target.name}.{os.getpid()}{UNFINISHED_SUFFIX}")
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(mode=PRIVATE_FOLDER_MODE)
            _extract(source, manifest, unfinished, report)
            for parent, _, _ in os.walk(unfinished, topdown=False):
                sync_folder(Path(parent))
            unfinished.rename(target)  # replaces only an empty folder
            sync_folder(target.parent)
        except OSError as error:
            raise WriteFailed(target, error) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return manifest


def _extract(source: Archive, manifest: BackupManifest, folder: Path, report: Report) -> None:
    """Write the files durably. Their hashes are compared again: the archive may have changed meanwhile."""
    hashes = {member.name: member.sha256 for member in manifest.members}
    for info, content in source.members():
        if info.name in OWN_NAMES:
            continue
        path, digest = folder / checked_name(info.name), hashlib.sha256()
        path.parent.mkdir(mode=PRIVATE_FOLDER_MODE, parents=True, exist_ok=True)
        with os.fdopen(open_safely(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            while data := content.read(BLOCK_BYTES):
                write_all(file.fileno(), data)
                digest.update(data)
                report("restoring", len(data))
            os.fsync(file.fileno())
        if digest.hexdigest() != hashes.get(info.name):
            raise StoreDamaged("it was changed while it was restored")
