"""Keeps the manifest of a data folder, and compares the folder with it.

Rule 1: one process at a time writes the manifest: the one that holds its lock. Parts that remove data
        themselves say so elsewhere: the mail log in a file, the audit stream in its chain, a bus in the names
        of its archives.
Rule 2: the names of new files are noted within a second, their content after `LOOKS_PER_NOTE` looks. What is
        noted was there one such round before, and is synced first: a write that is rolled back is never
        noted.
Rule 3: a loss is never noted as the new state. It stays until an operator accepts it.
Rule 4: a start compares names, sizes and identities, and the content of the newest files. `verify` compares
        everything.
"""

import os
import secrets
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from postroom.audit.chain import read_chain
from postroom.audit.heads import StreamHead, fault_of, head_path, stream_of
from postroom.audit.layout import OPEN, chain_locked, holds_stream, numbered, open_path
from postroom.audit.reader import Segments, StreamPosition
from postroom.contracts.feeds import set_outbox
from postroom.core.formats.manifest import (
    MAIL,
    MANIFEST_FILE,
    NOTHING_NOTED,
    SERVER,
    STORE,
    STREAM,
    FileMark,
    Loss,
    Manifest,
    StoreMark,
    StreamMark,
    decode_manifest,
    encode_manifest,
    refusal,
    without,
)
from postroom.errors import DataLost, InvalidSetting, PostroomError, Unavailable, UnsafePath
from postroom.logs import busfile
from postroom.logs.mail_log import compacted_up_to, is_log_segment, log_segments, segment_number
from postroom.server.access import registry, tokens
from postroom.server.folder import bus_owners
from postroom.server.folder.layout import AUDIT_FOLDER, DATABASE, MAIL_FOLDER
from postroom.stores.base import MANIFEST
from postroom.stores.disk_reserve import keep_control_reserve
from postroom.stores.open import AMQP, MEMORY, SQLITE, open_store
from postroom.stores.sqlite.snapshot import SqliteSnapshot, newest_version, read_at_rest_or_live
from postroom.system import lock
from postroom.system.atomic import open_safely, read_file, replace_file, size_of_whole_lines, sync_file
from postroom.system.clock import SystemClock

NAMES_EVERY_S = 1.0  # between two looks for new files
LOOKS_PER_NOTE = 10  # looks of which one notes the content, too
READ_BYTES = 1 << 20
START_BYTES_MAX = 32 << 20  # of the newest file of a log, compared at a start
FOLDER_ID_BYTES = 8

_REGISTRIES = (tokens.FILE_NAME, registry.FILE_NAME)
_OPEN_SEGMENTS = f"{AUDIT_FOLDER}/{OPEN}/"


class _Seen(NamedTuple):
    """A file at the time of a look."""

    inode: int
    size: int


def read_manifest(data: Path) -> Manifest | None:
    """The manifest of a folder; None without one, and when it was changed."""
    try:
        return decode_manifest(read_file(data / MANIFEST_FILE))
    except (OSError, UnsafePath):
        return None


# ---- the file system ---------------------------------------------------------------------------------


def _checksum(path: Path, size: int, start: FileMark = NOTHING_NOTED) -> int:
    """The checksum of the first `size` bytes of a file, continued from a mark."""
    checksum, at = start.crc32, start.bytes
    fd = open_safely(path, os.O_RDONLY)
    try:
        while at < size and (piece := os.pread(fd, min(READ_BYTES, size - at), at)):
            checksum = zlib.crc32(piece, checksum)
            at += len(piece)
    finally:
        os.close(fd)
    return checksum


def _fits(path: Path, mark: FileMark, *, whole: bool) -> bool:
    """Whether a file begins as it was noted."""
    with suppress(OSError, UnsafePath):
        return path.stat().st_size >= mark.bytes and (not whole or _checksum(path, mark.bytes) == mark.crc32)
    return False


def _growing_files(data: Path) -> dict[str, _Seen]:
    """The files of a folder that are appended to, and archives of buses, by name."""
    mail, stream = data / MAIL_FOLDER, data / AUDIT_FOLDER
    paths = [*(log_segments(mail) if mail.is_dir() else ()), *numbered(stream / OPEN, ".jsonl").values()]
    for path in (data / bus_owners.FOLDER).rglob(f"*{bus_owners.SUFFIX}*"):
        bus, _, rest = path.name.partition(bus_owners.SUFFIX)
        if bus and (not rest or rest.endswith(busfile.ARCHIVE_SUFFIX)):
            paths.append(path)
    found = {}
    for path in paths:
        with suppress(FileNotFoundError):
            stat = path.stat(follow_symlinks=False)
            found[path.relative_to(data).as_posix()] = _Seen(stat.st_ino, stat.st_size)
    return found


# ---- losses ------------------------------------------------------------------------------------------


class Comparison:
    """Compares a folder with its manifest. With `whole`, all noted content is read."""

    def __init__(self, data: Path, *, whole: bool, store: str | None = None) -> None:
        self._data = data
        self._whole = whole
        self._store = store
        self.manifest = read_manifest(data)  # first: the folder only grows meanwhile

    def losses(self) -> list[Loss]:
        """What the folder held and no longer holds."""
        manifest, path = self.manifest, self._data / DATABASE
        known = None
        if path.exists():
            try:
                known = read_at_rest_or_live(path, _known_store)
            except PostroomError:  # a fault of the file, which its own checks report
                known = _KnownStore("", 0, "")
        if manifest is None:
            reason = ""
            if (self._data / MANIFEST_FILE).exists():
                reason = "it was changed"
            elif known is not None and known.folder_id:
                reason = "it is missing, and the store says that there was one"
            own = [Loss(MANIFEST_FILE, MANIFEST_FILE, reason)] if reason else []
            return [*own, *self._unnoted_store_losses(known)]
        missing = [name for name in manifest.registries if not (self._data / name).exists()]
        return [
            *self._store_losses(manifest, known),
            *(Loss(name, name, "it is missing") for name in missing),
            *self._file_losses(manifest),
            *self._stream_losses(manifest),
        ]

    def unnamed_store(self) -> list[Loss]:
        """The store on a server when a start lacks its address: the start would make an empty store."""
        server = None if self.manifest is None else self.manifest.server
        if server is None or self._store is not None or (self._data / DATABASE).exists():
            return []
        return [Loss(SERVER, "the store", f"{server.identity} is on a server: give its address with --store")]

    def _unnoted_store_losses(self, known: "_KnownStore | None") -> Iterator[Loss]:
        """Stores that the audit stream has events of, in a folder without a manifest."""
        if self._store is not None or (known is not None and known.newest_event):
            return
        if known is not None and not known.identity:  # it cannot be read, which is a fault of its own
            return
        what = "missing" if known is None else "empty"
        for source, last in _shipped(self._data / AUDIT_FOLDER).items():
            prefix, _, name = source.partition(":")
            if prefix == "tasks" and (known is None or name != known.identity):
                reason = f"it is {what}, and the audit stream has {last:,} events of the store {name}"
                yield Loss(STORE, STORE, reason)

    def _store_losses(self, manifest: Manifest, known: "_KnownStore | None") -> Iterator[Loss]:
        noted, server = manifest.store, manifest.server
        if self._store is not None and server is not None:
            found = _mark_at(self._store)
            if found is not None and found.identity != server.identity:
                reason = f"it is {found.identity or 'missing'} instead of {server.identity}"
                yield Loss(SERVER, "the store", reason)
            elif found is not None and found.newest_event < server.newest_event:
                yield Loss(SERVER, "the store", _ends_early(found, server))
        if noted is None or (server is not None and server.identity == noted.identity):
            return  # the store was moved to the server
        if known is None:
            yield Loss(STORE, STORE, f"it is missing, with {noted.newest_event:,} events")
        elif known.identity:
            if known.identity != noted.identity:
                was = f"the store {noted.identity} with {noted.newest_event:,} events"
                yield Loss(STORE, STORE, f"{was} was replaced by {known.identity}")
            elif known.newest_event < noted.newest_event:
                yield Loss(STORE, STORE, _ends_early(known, noted))
            if known.folder_id not in ("", manifest.folder_id):
                yield Loss(MANIFEST_FILE, MANIFEST_FILE, "it belongs to another folder than the store")

    def _file_losses(self, manifest: Manifest) -> Iterator[Loss]:
        newest = {max((name for name in manifest.files if _is_mail(name)), default="")}
        for name, mark in manifest.files.items():
            is_newest = name in newest or name.startswith(_OPEN_SEGMENTS)
            whole = self._whole or (is_newest and mark.bytes <= START_BYTES_MAX)
            reason = fault_of_file(self._data, name, mark, whole=whole)
            if reason:
                part = STREAM if name.startswith(_OPEN_SEGMENTS) else MAIL if _is_mail(name) else name
                yield Loss(part, name, reason)

    def _stream_losses(self, manifest: Manifest) -> Iterator[Loss]:
        noted, folder = manifest.stream, self._data / AUDIT_FOLDER
        if noted is None:
            return
        chain = read_chain(folder)
        if chain.checkpoint is not None and chain.checkpoint.checkpoint > noted.segment:
            return  # removed by retention
        reason = fault_of(StreamHead(noted.stream, noted.segment, noted.hash), stream_of(folder), chain)
        if reason:
            yield Loss(STREAM, STREAM, reason)
        if self._whole:  # `verify` reads the segments
            return
        with chain_locked(folder):
            for entry in read_chain(folder).entries:
                path = folder / entry.name
                if not path.exists():
                    path = open_path(folder, entry.n)  # sealed, but not yet moved
                reason = f"it is missing, with {entry.events:,} events"
                with suppress(FileNotFoundError):
                    size = path.stat().st_size
                    reason = (
                        f"it has {size:,} bytes instead of {entry.bytes:,}" if size != entry.bytes else ""
                    )
                if reason:
                    yield Loss(STREAM, f"{AUDIT_FOLDER}/{entry.name}", reason)


def fault_of_file(data: Path, name: str, mark: FileMark, *, whole: bool) -> str:
    """Why a file does not hold what was noted; empty when it does, or when its removal is explained."""
    path = data / name
    if _fits(path, mark, whole=whole) or _is_explained(data, path, name, mark):
        return ""
    try:
        size = path.stat().st_size
    except OSError:
        return f"it is missing, with {mark.bytes:,} bytes"
    if size < mark.bytes:
        return f"it has {size:,} bytes instead of {mark.bytes:,}"
    return f"it was changed in its first {mark.bytes:,} bytes"


def _is_explained(data: Path, path: Path, name: str, mark: FileMark) -> bool:
    """Whether a part itself moved or removed a file, or an operator moved an archive away.

    A bus of an earlier release moves to the folder of its organization.
    """
    if _is_mail(name):
        return not path.exists() and segment_number(path.name) <= compacted_up_to(data / MAIL_FOLDER)
    if name.startswith(_OPEN_SEGMENTS):
        chain = read_chain(data / AUDIT_FOLDER)
        return int(path.stem) <= chain.last
    if name.endswith(busfile.ARCHIVE_SUFFIX):
        return not path.exists()
    folder = data / bus_owners.FOLDER
    moved = folder.glob(f"{bus_owners.OF_ORGANIZATION}*/{path.name}") if path.parent == folder else ()
    return any(_fits(other, mark, whole=True) for other in (*busfile.archives(path), *moved))


def _is_mail(name: str) -> bool:
    folder, _, rest = name.partition("/")
    return folder == MAIL_FOLDER and is_log_segment(rest)


class _KnownStore(NamedTuple):
    """Facts that the store of a folder reports about itself."""

    identity: str
    newest_event: int
    folder_id: str


def _known_store(snapshot: SqliteSnapshot) -> _KnownStore:
    has_cells = snapshot.version == newest_version()
    return _KnownStore(
        snapshot.identity(), snapshot.newest_event(), snapshot.plain_cell(MANIFEST) if has_cells else ""
    )


def _ends_early(found: StoreMark | _KnownStore, noted: StoreMark) -> str:
    return f"it ends with event {found.newest_event:,} instead of {noted.newest_event:,}"


def _mark_at(url: str) -> StoreMark | None:
    """The store at an address; None when it cannot be reached. Nothing is made there."""
    if url.startswith(AMQP):
        from postroom.stores.rabbitmq.store import parse_address  # noqa: PLC0415 - needs the extra of RabbitMQ

        return _mark_at(parse_address(url).ledger)
    if url.startswith(SQLITE):
        path = Path(url.removeprefix(SQLITE))
        known = read_at_rest_or_live(path, _known_store) if path.exists() else _KnownStore("", 0, "")
        return StoreMark(known.identity, known.newest_event)
    if url == MEMORY:
        return None
    with closing(open_store(url, notes_keys=False)) as store:
        try:
            return StoreMark(store.identity(), store.newest_event())
        except Unavailable:
            return None


def _shipped(folder: Path) -> dict[str, int]:
    """The last event of each source in a stream."""
    if not holds_stream(folder):
        return {}
    chain = read_chain(folder)
    positions = chain.positions()
    for events, _ in Segments(folder, on_trouble=lambda _: None).after(StreamPosition(chain.last + 1, 0)):
        for event in events:
            positions[event.source] = max(event.seq, positions.get(event.source, 0))
    return positions


# ---- keeping it --------------------------------------------------------------------------------------


class ManifestKeeper:
    """Notes what a served folder holds. `store` is the address of a store that is not in the folder."""

    def __init__(self, data: Path, store: str | None, say: Callable[[str], None]) -> None:
        self._data = data
        self._store = store
        self._say = say
        self._manifest = Manifest(folder_id=secrets.token_hex(FOLDER_ID_BYTES))
        self._written: Manifest | None = None
        self._seen: dict[str, _Seen] = {}
        self._seen_store: StoreMark | None = None
        self._inodes: dict[str, int] = {}
        """Of files whose mark this process has compared with the file."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, accept: Sequence[str]) -> None:
        """Refuse a folder with losses that are not accepted. Accepted ones are noted."""
        comparison = Comparison(self._data, whole=False, store=self._store)
        losses = [*comparison.losses(), *comparison.unnamed_store()]
        names = {loss.name for loss in losses}
        for name in accept:
            if name not in names:
                raise InvalidSetting(f"nothing of {name} is missing in {self._data}: leave --accept-loss out")
        left = [loss for loss in losses if loss.name not in accept]
        if left:
            raise DataLost(refusal(str(self._data), left))
        if comparison.manifest is not None:
            self._manifest = self._written = comparison.manifest
        elif not losses and (self._look_at_store() is not None or _growing_files(self._data)):
            self._say(f"{self._data} gets {MANIFEST_FILE}, which names what the folder holds")
        if not losses:
            self._tried(self.note_names)
            return
        self._manifest = without(self._manifest, losses, SystemClock().wall_us())
        if STREAM in names:
            self._forget_stream()
        self.note_names()
        for loss in losses:
            self._say(f"the loss of {loss.name} is accepted: {loss.sentence}")

    def _forget_stream(self) -> None:
        """Let the shipper begin a new stream. The rest of the old one is renamed and kept."""
        folder = self._data / AUDIT_FOLDER
        head_path(folder).unlink(missing_ok=True)
        if holds_stream(folder):
            folder.rename(folder.with_name(f"{AUDIT_FOLDER}.damaged-{SystemClock().wall_us()}"))
        files = {
            name: mark for name, mark in self._manifest.files.items() if not name.startswith(_OPEN_SEGMENTS)
        }
        self._manifest = msgspec.structs.replace(self._manifest, files=files)
        url = self._store or f"{SQLITE}{self._data / DATABASE}"
        if self._store is not None or (self._data / DATABASE).exists():
            with closing(open_store(url)) as store:
                set_outbox(store, None)

    def start(self) -> None:
        """Note the files that a start has made, and keep noting in the background."""
        keep_control_reserve(self._data)
        self._tried(self.note_names)
        self._tried(self._note_store)
        self._thread = threading.Thread(target=self._run, name="manifest", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        looks = 0
        while not self._stop.wait(NAMES_EVERY_S):
            looks += 1
            keep_control_reserve(self._data)
            self._tried(self.note_names if looks % LOOKS_PER_NOTE else self.note)

    def _tried(self, note: Callable[[], None]) -> None:
        """Run a note. A full disk does not stop a server: the manifest only names less."""
        try:
            note()
        except (OSError, PostroomError) as error:
            self._say(f"{MANIFEST_FILE} is not up to date: {error}")

    def close(self) -> None:
        """Note the state at the end, when all writers have stopped."""
        self._stop.set()
        if self._thread is None:
            return
        self._thread.join()
        self._seen, self._seen_store = _growing_files(self._data), self._look_at_store()
        self._tried(self.note)

    def note_names(self) -> None:
        """Note the names of new files, and the store when it is new."""
        known = self._manifest
        registries = [name for name in _REGISTRIES if (self._data / name).exists()]
        names = {*known.files, *_growing_files(self._data)}
        store = known.store
        if store is None and (found := self._look_at_store()) is not None:
            store = msgspec.structs.replace(found, newest_event=0)
        self._write(
            msgspec.structs.replace(
                known,
                registries=tuple(dict.fromkeys([*known.registries, *registries])),
                files={name: known.files.get(name, NOTHING_NOTED) for name in sorted(names)},
                store=store,
            )
        )

    def note(self) -> None:
        """Note what was there at the previous look and is synced now."""
        before, store = self._seen, self._seen_store
        self.note_names()
        self._seen, self._seen_store = _growing_files(self._data), self._look_at_store()
        stream, folder = self._manifest.stream, self._data / AUDIT_FOLDER
        if holds_stream(folder):
            with chain_locked(folder):
                chain = read_chain(folder)
            name = stream_of(folder)
            if chain.last and (stream is None or (stream.stream == name and stream.segment < chain.last)):
                stream = StreamMark(name, chain.last, chain.head)
        files = {}
        for name, mark in self._manifest.files.items():
            noted = self._advanced(name, mark, before.get(name))
            if noted is not None:
                files[name] = noted
        self._write(
            msgspec.structs.replace(
                self._manifest, files=files, stream=stream, store=self._advanced_store(store)
            )
        )

    def _advanced(self, name: str, mark: FileMark, before: _Seen | None) -> FileMark | None:
        """The mark of a file now; None when its removal is explained."""
        path, now = self._data / name, self._seen.get(name)
        if now is None or not self._is_noted(name, mark, now):
            self._inodes.pop(name, None)
            if not _is_explained(self._data, path, name, mark):
                return mark
            if now is None:
                return None
            mark = NOTHING_NOTED
        if before is None or before.inode != now.inode or not now.size >= before.size > mark.bytes:
            return mark
        self._inodes[name] = now.inode
        with suppress(FileNotFoundError):  # renamed or removed a moment ago
            size = before.size
            if name.startswith(_OPEN_SEGMENTS):
                with os.fdopen(open_safely(path, os.O_RDONLY), "rb") as file:
                    size = size_of_whole_lines(file.fileno(), size)
            sync_file(path)
            return FileMark(size, _checksum(path, size, mark)) if size > mark.bytes else mark
        return mark

    def _is_noted(self, name: str, mark: FileMark, now: _Seen) -> bool:
        """Whether a file is the noted one. It is read before its mark is extended for the first time."""
        known = self._inodes.get(name)
        if known is None and now.size > mark.bytes:
            return _fits(self._data / name, mark, whole=True)
        return known in (None, now.inode) and now.size >= mark.bytes

    def _look_at_store(self) -> StoreMark | None:
        """The store in the folder; None without one, and when it cannot be read."""
        path = self._data / DATABASE
        if not path.exists():
            return None
        try:
            known = read_at_rest_or_live(path, _known_store)
        except PostroomError:
            return None
        return StoreMark(known.identity, known.newest_event)

    def _advanced_store(self, before: StoreMark | None) -> StoreMark | None:
        noted = self._manifest.store
        if noted is None or before is None or before.identity != noted.identity:
            return noted
        if before.newest_event <= noted.newest_event:
            return noted
        with suppress(FileNotFoundError):  # at rest
            sync_file(self._data / f"{DATABASE}-wal")
        return before

    def _note_store(self) -> None:
        """Note the store on a server, or note the folder in its store."""
        if self._store is not None:
            found = _mark_at(self._store)
            if found is not None:
                self._write(msgspec.structs.replace(self._manifest, server=found))
            return
        path, folder_id = self._data / DATABASE, self._manifest.folder_id
        if not path.exists() or read_at_rest_or_live(path, _known_store).folder_id == folder_id:
            return
        with closing(open_store(f"{SQLITE}{path}")) as store:
            store.write(lambda transaction: transaction.cells.put(MANIFEST, "", folder_id.encode()))

    def _write(self, manifest: Manifest) -> None:
        self._manifest = manifest
        if manifest != self._written:
            replace_file(self._data / MANIFEST_FILE, encode_manifest(manifest), "group")
            self._written = manifest


@contextmanager
def keeping(
    data: Path, store: str | None, say: Callable[[str], None], accept: Sequence[str] = ()
) -> Iterator[ManifestKeeper | None]:
    """Check a folder, and keep its manifest to the end of the block; None when another process does."""
    fd = lock.open_lock_file(data / f"{MANIFEST_FILE}.lock")
    try:
        try:
            lock.flock(fd, lock.EXCLUSIVE_NOW)
        except BlockingIOError:
            yield None
            return
        keeper = ManifestKeeper(data, store, say)
        keeper.begin(accept)
        try:
            yield keeper
        finally:
            keeper.close()
    finally:
        os.close(fd)
