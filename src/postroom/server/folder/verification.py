"""Reads all data of a folder and reports damage. Nothing is changed, and servers may run meanwhile."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from postroom.audit.heads import StreamHead, head_path
from postroom.audit.layout import holds_stream
from postroom.audit.verify import verify as verify_stream
from postroom.contracts.bus import Bus
from postroom.core.formats.manifest import MANIFEST_FILE, STORE, STREAM
from postroom.core.health.facts import FileFault
from postroom.errors import KeyMissing, PostroomError, StoreUnwritable
from postroom.logs import busfile
from postroom.logs.mail_log import damaged_stretches
from postroom.server.access import registry as agents
from postroom.server.access import tokens
from postroom.server.access.registry import Agents
from postroom.server.folder import bus_owners
from postroom.server.folder.layout import AUDIT_FOLDER, DATABASE, MAIL_FOLDER
from postroom.server.folder.manifest import Comparison
from postroom.stores.base import Outbox
from postroom.stores.sqlite.snapshot import SqliteSnapshot, newest_version, read_at_rest_or_live
from postroom.system.crypto.encryption import key_file_encryption

Report = Callable[[str], None]

_PARTS = {STORE: "store", STREAM: "audit"}  # the history is not checked without them


class DataCheck:
    """The faults of a data folder. `checked` names the parts that were read."""

    def __init__(self, data: Path, report: Report | None = None) -> None:
        self._data = data
        self._report = report or (lambda _: None)
        self.checked: list[str] = []

    def faults(self) -> Iterator[FileFault]:
        """Every fault of every part."""
        yield from self.losses()
        yield from self.store_faults()
        yield from self.file_faults()

    def losses(self, *, whole: bool = True) -> Iterator[FileFault]:
        """What the folder held and no longer holds. With `whole`, all noted content is read."""
        comparison = Comparison(self._data, whole=whole)
        if comparison.manifest is not None:
            self._begin("manifest", MANIFEST_FILE)
        for loss in comparison.losses():
            yield FileFault(_PARTS.get(loss.name, loss.name), loss.file, loss.reason)

    def store_faults(self) -> Iterator[FileFault]:
        """The faults of the database."""
        path = self._data / DATABASE
        if not path.exists():
            return

        def faults(snapshot: SqliteSnapshot) -> list[str]:
            if snapshot.is_newer:
                return [
                    f"its format {snapshot.version} is newer than {newest_version()}, the newest known one"
                ]
            return snapshot.faults()

        self._begin("store", DATABASE)
        try:
            for text in read_at_rest_or_live(path, faults):
                yield FileFault("store", DATABASE, text)
        except StoreUnwritable:  # of a read-only file system: whether the store is damaged is not known
            raise
        except PostroomError as error:
            yield FileFault("store", DATABASE, str(error), isinstance(error, KeyMissing))

    def file_faults(self) -> Iterator[FileFault]:
        """The faults of all other parts."""
        yield from self._registry_faults()
        yield from self._bus_faults()
        yield from self._mail_faults()
        yield from self._stream_faults()

    def _begin(self, part: str, name: str) -> None:
        self.checked.append(part)
        self._report(f"checking {name}")

    def _registry_faults(self) -> Iterator[FileFault]:
        registry = Agents(self._data)
        registries: tuple[tuple[str, Callable[[], object]], ...] = (
            (agents.FILE_NAME, registry.list),
            (tokens.FILE_NAME, registry.tokens.list),
            (tokens.SESSIONS_FILE_NAME, tokens.session_file(self._data).read),
        )
        for name, read in registries:
            if not (self._data / name).exists():
                continue
            self._begin(name.removesuffix(".json"), name)
            try:
                read()
            except PostroomError as error:
                yield FileFault("registry", name, str(error))

    def _bus_faults(self) -> Iterator[FileFault]:
        found = bus_owners.bus_files(self._data)
        if found:
            self._begin("buses", bus_owners.FOLDER)
        for bus in found:
            for path in [*busfile.archives(bus), bus]:
                name = path.relative_to(self._data).as_posix()
                try:
                    report = Bus(path).verify()
                except PostroomError as error:
                    yield FileFault("bus", name, str(error))
                    continue
                for damage in report.damaged:
                    yield FileFault("bus", name, f"{damage.length} bytes at {damage.offset}: {damage.reason}")

    def _mail_faults(self) -> Iterator[FileFault]:
        folder = self._data / MAIL_FOLDER
        if not folder.is_dir():
            return
        self._begin("mail", MAIL_FOLDER)
        try:
            for name, damage in damaged_stretches(folder, key_file_encryption(None)):
                reason = f"{damage.length} bytes at {damage.offset}: {damage.reason}"
                yield FileFault("mail", f"{MAIL_FOLDER}/{name}", reason)
        except (PostroomError, OSError) as error:
            yield FileFault("mail", MAIL_FOLDER, str(error), isinstance(error, KeyMissing))

    def _stream_faults(self) -> Iterator[FileFault]:
        folder = self._data / AUDIT_FOLDER
        if not holds_stream(folder):
            if head_path(folder).exists():
                yield FileFault(
                    "audit", AUDIT_FOLDER, f"{head_path(folder).name} records a stream that is gone"
                )
            return
        self._begin("audit", AUDIT_FOLDER)
        path = self._data / DATABASE
        noted = []
        with suppress(PostroomError):  # a fault of the store, which is reported as such
            outbox = read_at_rest_or_live(path, _outbox_in) if path.exists() else None
            if outbox is not None and outbox.head:
                noted = [StreamHead(outbox.stream, outbox.segment, outbox.head)]
        try:
            for finding in verify_stream(folder, noted=noted):
                yield FileFault("audit", f"{AUDIT_FOLDER}/{finding.file}", finding.reason)
        except (PostroomError, OSError) as error:
            yield FileFault("audit", AUDIT_FOLDER, str(error))


def _outbox_in(snapshot: SqliteSnapshot) -> Outbox | None:
    return snapshot.read(lambda transaction: transaction.outbox()) if snapshot.is_current else None
