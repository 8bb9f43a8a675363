"""Gathers the facts about a data folder, or about a store on a server, for `postroom doctor`.

Rule 1: nothing is changed. Stores are opened read-only, and no lock is taken.
Rule 2: a fact that cannot be read is left out or becomes a fault. It never stops the diagnosis.
"""

import os
import platform
import resource
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import apsw
import msgspec

from postroom.core.health.diagnosis import LEASE_LATE_S, LEASE_LONG_S
from postroom.core.health.facts import (
    BacklogFacts,
    CertificateFacts,
    ClockFacts,
    DatabaseFacts,
    EncryptionFacts,
    EnvironmentFacts,
    Facts,
    FileFault,
    FolderFacts,
    LeaseFacts,
    MoveFacts,
    PortFacts,
    ServerFacts,
    ShipperFacts,
    StoreFacts,
    TokenFacts,
)
from postroom.core.health.health import HealthFacts
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.times import epoch_ns_of
from postroom.engine.inspection import status_of
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.policy import Policy
from postroom.errors import KeyMissing, PostroomError, StoreUnwritable, UnreadableValue
from postroom.logs import eventfiles
from postroom.message import Record, org_of
from postroom.server.access.registry import Agents
from postroom.server.folder.layout import (
    BREACHES_FOLDER,
    DATABASE,
    MAIL_FOLDER,
    TABLES_FOLDER,
    files_of,
    upgrade_copies,
)
from postroom.server.folder.verification import DataCheck, Report
from postroom.server.up.parts import States, part_states, read_states
from postroom.settings import UpSettings
from postroom.stores.base import NEWEST, Ending, Listing, by_state, ready, waiting
from postroom.stores.event_quarantine import QUARANTINE
from postroom.stores.sqlite.file import check_library
from postroom.stores.sqlite.snapshot import (
    FAULTS_SHOWN_MAX,
    SqliteSnapshot,
    address_after_move,
    newest_version,
    read_at_rest_or_live,
)
from postroom.stores.transaction import Transaction
from postroom.system.clock import SystemClock
from postroom.system.crypto.encryption import PLAIN, Encryption, key_file_encryption
from postroom.system.crypto.tls import end_of
from postroom.system.resources import free_bytes

if TYPE_CHECKING:  # needs the extra of PostgreSQL
    from postroom.stores.postgres.store import PostgresStore

LEASES_READ_MAX = 1_000
FILES_READ_MAX = 10_000  # whose permissions are looked at
BREACH_SHOWN_S = 3_600.0
QUARANTINED_READ_MAX = 100  # rows of events that are counted
MICROS_PER_S = 1_000_000
MOUNTS = Path("/proc/mounts")
_UNREADABLE = (PostroomError, apsw.Error, ValueError, OSError)
"""What reading a damaged store raises."""


# ---- a data folder -----------------------------------------------------------------------------------


def facts_of_folder(data: Path, settings: UpSettings, *, deep: bool, report: Report | None = None) -> Facts:
    """The facts about a data folder. With `deep`, every file is read whole."""
    check = DataCheck(data, report)
    faults: list[FileFault] = []
    store = _store_in(data, faults)
    moved_to = "" if store is None else address_after_move(data / DATABASE)
    if deep:
        if store is not None:
            found = tuple(fault.reason for fault in check.store_faults())
            store = msgspec.structs.replace(store, faults=found)
        faults += check.file_faults()
    faults += check.losses(whole=deep)
    encryption, encrypted = key_file_encryption(None), None
    if encryption is not None and deep and store is not None and not moved_to:
        counts = read_at_rest_or_live(data / DATABASE, lambda snapshot: snapshot.count_keys(encryption))
        encrypted = _encryption_facts(encryption, counts)
    return Facts(
        data=str(data),
        environment=environment(),
        clock=ClockFacts(SystemClock().wall_us(), _newest_us(data)),
        folder=_folder(data, FILES_READ_MAX),
        server=_server(data, settings),
        certificate=_certificate(settings.tls_cert),
        store=store,
        moved=MoveFacts(str(data / DATABASE), moved_to) if moved_to else None,
        faults=tuple(faults),
        tokens=_tokens(data),
        mail_files_waiting=_mail_files_waiting(data),
        breach=_breach(data),
        encryption=encrypted,
        copies=tuple(upgrade_copies(data)),
        checked=tuple(check.checked),
    )


def facts_of_server(data: Path, certificate: Path | None) -> Facts:
    """What a server looks at all the time: the disk, its parts, tokens and the certificate."""
    states = part_states(data)
    return Facts(
        data=str(data),
        environment=environment(),
        clock=ClockFacts(SystemClock().wall_us(), 0),
        folder=_folder(data, 0),
        server=ServerFacts(
            is_running=True,
            parts={name: part.shown for name, part in states.items()},
            broken={name: part.fault for name, part in states.items() if part.fault},
        ),
        tokens=_tokens(data),
        certificate=_certificate(certificate),
        mail_files_waiting=_mail_files_waiting(data),
        breach=_breach(data),
    )


def _mail_files_waiting(data: Path) -> int:
    return sum(not file.is_shipped for file in eventfiles.full_files(data / MAIL_FOLDER))


def _breach(data: Path) -> str:
    """The names of these files begin with their time. A check without a breach writes none."""
    newest = max((data / TABLES_FOLDER / BREACHES_FOLDER).glob("*.json"), default=None)
    if newest is None or time.time() - newest.stat().st_mtime >= BREACH_SHOWN_S:
        return ""
    return str(newest)


def environment() -> EnvironmentFacts:
    """The versions of the programs."""
    try:
        check_library()
        fault = ""
    except PostroomError as error:
        fault = str(error)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return EnvironmentFacts(
        version("postroom"), platform.python_version(), apsw.sqlite_lib_version(), fault,
        soft if soft != resource.RLIM_INFINITY else 2**31,
    )  # fmt: skip


def _certificate(path: Path | None) -> CertificateFacts | None:
    ends = None if path is None else end_of(path)
    return None if ends is None else CertificateFacts(str(path), epoch_ns_of(ends) // 1000)


def _folder(data: Path, files_max: int) -> FolderFacts:
    disk = os.statvfs(data)
    free = disk.f_bavail * disk.f_frsize
    files = (path for path in files_of(data) if not path.is_symlink() and path.exists())
    looked = islice(files, files_max)
    foreign = [path for path in looked if not os.access(path, os.R_OK | os.W_OK)]
    filesystem = ""
    with suppress(OSError):  # some systems have no list of mounts
        mounts = [line.split()[1:3] for line in MOUNTS.read_text("utf-8", "replace").splitlines()]
        real = data.resolve()
        holding = [
            (len(point), kind) for point, kind in mounts if real.is_relative_to(point.replace("\\040", " "))
        ]
        filesystem = max(holding)[1] if holding else ""
    return FolderFacts(
        path=str(data),
        mode=stat.S_IMODE(data.stat().st_mode),
        is_writable=os.access(data, os.W_OK | os.X_OK),
        is_read_only=bool(disk.f_flag & os.ST_RDONLY),
        foreign=tuple(path.relative_to(data).as_posix() for path in foreign),
        free_bytes=free,
        total_bytes=disk.f_blocks * disk.f_frsize,
        reserve_bytes=free - free_bytes(data),
        filesystem=filesystem,
    )


def _server(data: Path, settings: UpSettings) -> ServerFacts:
    states = _states(data)
    if states is not None:
        return ServerFacts(
            is_running=True,
            parts={name: part.shown for name, part in states.parts.items()},
            broken={name: part.fault for name, part in states.parts.items() if part.fault},
            restarts={name: part.restarts for name, part in states.parts.items()},
        )
    wanted = [("http", settings.http_port)] + ([("nats", settings.nats_port)] if settings.mail else [])
    ports = []
    for part, port in wanted:
        if port:
            is_taken = False
            with suppress(OSError), socket.create_connection((settings.host, port), timeout=1.0):
                is_taken = True  # found without binding the port
            ports.append(PortFacts(part, f"{settings.host}:{port}", is_taken=is_taken))
    return ServerFacts(is_running=False, ports=tuple(ports))


def _states(data: Path) -> States | None:
    """The states of the parts; None when `up` does not run, also after it was killed.

    The lock of `up` is not tried: a start at the same moment would be refused.
    """
    states = read_states(data)
    try:
        if states is not None:
            os.kill(states.pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # the process of another user
        pass
    return states


def _tokens(data: Path) -> tuple[TokenFacts, ...] | None:
    registry = Agents(data)
    try:
        registry.list()
        return tuple(
            TokenFacts(
                token.token_id, token.role, token.agent,
                None if token.expires is None else epoch_ns_of(token.expires) // 1000, token.is_demo,
            )
            for token in registry.tokens.list()
        )  # fmt: skip
    except PostroomError:  # a fault of a file, which is reported as such
        return None


def _store_in(data: Path, faults: list[FileFault]) -> StoreFacts | None:
    path = data / DATABASE
    if not path.exists():
        return None

    def facts(snapshot: SqliteSnapshot) -> StoreFacts:
        known = StoreFacts(DATABASE, snapshot.version, newest_version(), has_clock=snapshot.has_clock)
        if not snapshot.is_current or snapshot.moved_to:
            return known
        return snapshot.read(lambda transaction: _with_messages(known, transaction))

    try:
        return read_at_rest_or_live(path, facts)
    except StoreUnwritable:  # a fault of the folder, which is reported as such
        return None
    except _UNREADABLE as error:
        faults.append(FileFault("store", DATABASE, str(error), isinstance(error, KeyMissing)))
        return None


def _encryption_facts(encryption: Encryption, counts: Mapping[str, int]) -> EncryptionFacts:
    outdated = sum(n for key, n in counts.items() if key not in (PLAIN, encryption.current))
    return EncryptionFacts(encryption.names[encryption.current], counts.get(PLAIN, 0), outdated)


def _newest_us(data: Path) -> int:
    """The time of the newest event; 0 without any, or when the store cannot be read: `_store_in` says why."""
    path = data / DATABASE

    def newest(snapshot: SqliteSnapshot) -> int:
        return snapshot.read(_newest_event_us) if snapshot.is_current else 0

    with suppress(*_UNREADABLE):
        return read_at_rest_or_live(path, newest) if path.exists() else 0
    return 0


# ---- a store -----------------------------------------------------------------------------------------


def facts_of_store(store: "PostgresStore", url: str, *, deep: bool) -> Facts:
    """The facts about a store on a server. With `deep`, records are counted, and encrypted values decrypted.

    Nothing is changed, so `store.notes_keys` has to be False.
    """
    facts = Facts(data=url, environment=environment(), clock=ClockFacts(SystemClock().wall_us(), 0))
    known = StoreFacts(store.url, 1, 1, is_folder=False)
    try:
        newest_us = store.read(_newest_event_us)
        found = store.read(lambda transaction: _with_messages(known, transaction))
    except (KeyMissing, UnreadableValue) as error:
        fault = FileFault("store", store.url, str(error), isinstance(error, KeyMissing))
        return msgspec.structs.replace(facts, faults=(fault,))
    encryption = None
    if deep and store.encryption is not None:
        found = msgspec.structs.replace(found, faults=tuple(store.unreadable_values(FAULTS_SHOWN_MAX)))
        encryption = _encryption_facts(store.encryption, store.count_keys())
    return msgspec.structs.replace(
        facts,
        clock=ClockFacts(facts.clock.now_us, newest_us),
        store=found,
        database=_database(store, deep=deep),
        encryption=encryption,
        checked=(store.url,) if deep else (),
    )


def _database(store: "PostgresStore", *, deep: bool) -> DatabaseFacts:
    from postroom.stores.postgres.inspection import Inspection  # noqa: PLC0415 - needs the extra of PostgreSQL

    address = store.address
    with store.connected() as connection:
        asked = Inspection(connection, address)
        oldest = asked.oldest_transaction()
        return DatabaseFacts(
            psql=address.psql,
            schema=address.schema,
            wrong_counters=tuple(asked.wrong_counters(FAULTS_SHOWN_MAX)) if deep else (),
            broken_indexes=tuple(asked.broken_indexes()),
            missing_indexes=asked.missing_indexes(),
            oldest_s=0.0 if oldest is None else oldest.age_s,
            oldest_pid=0 if oldest is None else oldest.pid,
            oldest_program="" if oldest is None else oldest.program,
            dead_rows={one.table: (one.dead, one.live) for one in asked.dead_rows()},
            hears=asked.hears() if address.listens else None,
        )


def facts_of_other_format(url: str, found: int, newest: int) -> Facts:
    """What can be said about a store on a server without opening it, which would upgrade it."""
    clock = ClockFacts(SystemClock().wall_us(), 0)
    store = StoreFacts(url, found, newest, is_folder=False)
    return Facts(data=url, environment=environment(), clock=clock, store=store)


def _newest_event_us(transaction: Transaction) -> int:
    newest = transaction.events.read(NEWEST, 1)
    return newest[0].ts_us if newest else 0


def _with_messages(known: StoreFacts, transaction: Transaction) -> StoreFacts:
    policy = Policy()  # the rules of an app are not known here
    flow = HealthFacts()
    if known.has_clock:
        flow = status_of(Operations(transaction, policy), policy, with_idle=False).health_facts()
    return msgspec.structs.replace(
        known,
        queues=tuple(_queue(transaction, name) for name in transaction.lanes.queues()),
        flow=flow,
        leases=tuple(_leases(transaction, late=known.has_clock)),
        shipper=_shipper(transaction),
        quarantined_rows=len(transaction.cells.page(QUARANTINE, limit=QUARANTINED_READ_MAX)),
    )


def _queue(transaction: Transaction, name: str) -> BacklogFacts:
    counts = transaction.lanes.depth(name)
    states = by_state(counts)
    is_engine = bool(org_of(name))
    oldest_ns = transaction.oldest_ns(name) if states.get("QUEUED") and not is_engine else None
    return BacklogFacts(
        name=org_of(name) or name,
        depth=waiting(counts),
        delayed=waiting(counts) - ready(counts),
        depth_max=0 if is_engine else transaction.limits(name).max_depth,
        oldest_s=None if oldest_ns is None else oldest_ns / NANOS_PER_S,
        dead_letters=states.get("DEAD_LETTER", 0),
        quarantined=states.get("QUARANTINED", 0),
        is_engine=is_engine,
    )


def _leases(transaction: Transaction, *, late: bool) -> Iterator[LeaseFacts]:
    """Leases that ended a while ago, and those of messages that were claimed long ago."""
    until_ns = transaction.steady_ns - round(LEASE_LATE_S * NANOS_PER_S)
    ended = transaction.records.find(Ending("lease", until_ns, LEASES_READ_MAX)) if late else []
    for record in ended:
        yield _lease(transaction, record, (transaction.steady_ns - record.lease_until) / NANOS_PER_S)
    seen = {record.seq for record in ended}
    for record in transaction.records.find(Listing(state="PROCESSING", limit=LEASES_READ_MAX)):
        lease = _lease(transaction, record, 0.0)
        if record.seq not in seen and lease.claimed_s > LEASE_LONG_S:
            yield lease


def _lease(transaction: Transaction, record: Record, late_s: float) -> LeaseFacts:
    claimed_s = max(0, transaction.wall_us - record.claimed_us) / MICROS_PER_S
    queue = org_of(record.queue) or record.queue
    return LeaseFacts(
        record.message_id, queue, record.worker_id, claimed_s, late_s, is_engine=bool(org_of(record.queue))
    )


def _shipper(transaction: Transaction) -> ShipperFacts | None:
    outbox = transaction.outbox()
    if outbox is None:
        return None
    newest = transaction.events.read(NEWEST, 1)
    unshipped = transaction.events.read(outbox.shipped, 1)
    age_us = transaction.wall_us - unshipped[0].ts_us if unshipped else 0
    return ShipperFacts(
        waiting=max(0, newest[0].seq - outbox.shipped) if newest else 0,
        backlog_max=outbox.backlog_max,
        oldest_s=max(0, age_us) / MICROS_PER_S,
        refuses=outbox.when_behind == "refuse",
    )
