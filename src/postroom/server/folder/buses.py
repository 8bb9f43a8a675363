"""The buses of a server, below the data folder.

Rule 1: a bus and its archives together hold at most `bytes_max` bytes. The buses of an organization hold at
        most `FULL_BUSES_AN_ORGANIZATION_MAX` times as much, or half of what is free on the disk. A post
        beyond that is refused.
Rule 2: posts stop before the disk is full, because the store needs the rest.
Rule 3: the first post creates a bus. An agent and an organization may create a limited number, and operators
        have a reserve.
Rule 4: a bus belongs to the organization of its creator, and a name is one within it. A name means the bus of
        the caller's organization, else that of no organization, which is for everybody. Nothing of a bus is
        read before its owner is known.
"""

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

import msgspec

from postroom.calls.server import PostToBus
from postroom.contracts.bus import Bus
from postroom.core.gate import Owner, namespaces, permit, refused
from postroom.core.names import checked_name
from postroom.errors import (
    BusFull,
    InvalidMessage,
    NotAllowed,
    TooMany,
    Unavailable,
    UnknownBus,
)
from postroom.logs import busfile
from postroom.message import BusMessage, Durability
from postroom.server.access.registry import Identity
from postroom.server.folder.bus_owners import (
    FILES,
    FOLDER,
    OF_ORGANIZATION,
    OWNERS,
    BusKey,
    BusRecord,
    known,
    owner_of,
    place_of,
    record_of,
)
from postroom.stores.store import Store
from postroom.stores.transaction import Transaction
from postroom.system import lock
from postroom.system.atomic import PRIVATE_FILE_MODE, PRIVATE_FOLDER_MODE, make_folder
from postroom.system.resources import free_bytes

OPEN_BUSES_MAX = 64  # the most recently used
BUSES_MAX = 1_000
BUS_ANSWER_BYTES_MAX = 8 * 1024 * 1024  # of message bodies; a reply has at least one message
BUSES_AN_ORGANIZATION_MAX = 250
BUSES_AN_AGENT_MAX = 50
OPERATOR_BUSES_RESERVE = 100
BUS_BYTES_MAX = 1024 * 1024 * 1024  # of a bus with its archives, by default
FULL_BUSES_AN_ORGANIZATION_MAX = 8  # as many full buses may an organization have
MEASURED_PARTS = 16  # the buses of an organization are measured again after this part of their limit
ROTATE_BYTES = 64 * 1024 * 1024
FILES_A_BUS = 4  # at least, so that moving one archive away makes room and leaves history
RECORD_EXTRA_BYTES = 512  # of a record, besides the posted fields
RETRY_AFTER_S = 60.0
LOCK_FILE = "buses.lock"  # held while buses are created or removed
LOCK_TIMEOUT_S = 10.0

_encode = msgspec.json.Encoder().encode


class FoundBus(NamedTuple):
    """The bus that a caller means by a name."""

    key: BusKey
    record: BusRecord | None
    """None when it is unknown whose bus it is: then only operators of all organizations find it."""

    @property
    def owner(self) -> Owner:
        """Whom the bus belongs to."""
        return owner_of(self.key, self.record)


class BusLimits(msgspec.Struct, frozen=True):
    """How many buses there may be."""

    all: int = BUSES_MAX
    of_organization: int = BUSES_AN_ORGANIZATION_MAX
    of_agent: int = BUSES_AN_AGENT_MAX

    def fault(
        self, records: Mapping[BusKey, BusRecord], org: str, creator: str, caller: Identity
    ) -> Exception | None:
        """Why a caller may create no more buses; None when it may."""
        buses_max = self.all if caller.is_operator else self.all - OPERATOR_BUSES_RESERVE
        if len(records) >= buses_max:
            return InvalidMessage(f"there are {buses_max} buses already, which is the limit")
        of_org = [record for key, record in records.items() if key.org == org]
        if org and len(of_org) >= self.of_organization:
            return TooMany(org, "buses of its own", self.of_organization, RETRY_AFTER_S)
        if creator and sum(record.creator == creator for record in of_org) >= self.of_agent:
            return TooMany(creator, "buses of its own", self.of_agent, RETRY_AFTER_S)
        return None


class _RemovedMeanwhile(Exception):
    """A bus was removed since its owner was looked up."""


class Buses:
    """Buses by name. Safe to share between threads."""

    def __init__(
        self,
        data: Path,
        store: Store,
        durability: Durability,
        bytes_max: int = BUS_BYTES_MAX,
        unreadable: Unavailable | None = None,
        limits: BusLimits | None = None,
    ) -> None:
        self._limits = limits or BusLimits()
        self._data = data
        self._store = store
        self._durability: Durability = durability
        self._bytes_max = bytes_max
        self._unreadable = unreadable
        """Why the owners of an earlier version cannot be read."""
        self._rotate_bytes = max(1, min(ROTATE_BYTES, bytes_max // FILES_A_BUS))
        self._archived: dict[BusKey, tuple[int, int]] = {}
        """The inode of the bus file, and the bytes of its archives at that time."""
        self._measured: dict[str, tuple[int, int]] = {}
        """By organization: the bytes of its buses when they were measured, and what was posted since."""
        self._arriving: Counter[BusKey] = Counter()
        """Bytes of posts that are being written."""
        self._refused: dict[BusKey, int] = {}
        """The size of the last post that did not fit."""
        self.removals = 0
        """How many buses were removed: a post whose bus was looked up before looks again."""
        self._open: OrderedDict[BusKey, Bus] = OrderedDict()
        self._mutex = threading.Lock()
        self._written = threading.Condition(self._mutex)

    # ---- owners of buses -----------------------------------------------------------------------

    def find(
        self, name: str, caller: Identity, org_id: str = "", action: str = "bus.read"
    ) -> FoundBus | None:
        """The bus that a caller means by a name; None without one. Reads no file of a bus.

        With `org_id`, only buses of that organization are found.
        """
        checked_name("bus", name)
        self._check_caller(caller, org_id)
        return self._store.read(lambda transaction: self._find(transaction, name, caller, org_id, action))

    def _check_caller(self, caller: Identity, org_id: str) -> None:
        if self._unreadable is not None and not caller.is_operator:
            raise Unavailable(str(self._unreadable))
        why = refused(caller, "bus.read", Owner(org_id or caller.org))
        if why:
            raise NotAllowed(HTTPStatus.FORBIDDEN, why)

    def _find(
        self, transaction: Transaction, name: str, caller: Identity, org_id: str, action: str
    ) -> FoundBus | None:
        for org in (org_id,) if org_id else namespaces(caller):
            key = BusKey(org, name)
            record = record_of(transaction, key)
            is_there = record is not None or (caller.is_operator and key.exists(self._data))
            if is_there and permit(caller, action, owner_of(key, record), name):
                return FoundBus(key, record)
        if not caller.is_operator or org_id or action == "bus.post":  # a post without organization is for all
            return None
        found = [FoundBus(key, record) for key, record in known(transaction).items() if key.name == name]
        if len(found) > 1:
            raise InvalidMessage(f"several organizations have a bus {name!r}: name one of them with org_id")
        return found[0] if found else None

    # ---- posting -------------------------------------------------------------------------------

    def append(self, new: PostToBus, caller: Identity) -> str:
        """Append a message and return its id."""
        while True:
            removals = self.removals
            found = self.find(new.bus, caller, new.org_id, "bus.post")
            try:
                if found is not None:
                    return self._append(found.key, new, removals)
                with self._changing():  # until the file exists, so that a record without a file is old
                    key = self._create(new.bus, caller, new.org_id)
                    return self._append(key, new, self.removals)
            except _RemovedMeanwhile:
                continue

    def _append(self, key: BusKey, new: PostToBus, removals: int) -> str:
        with self._room_for(key, len(_encode(new)) + RECORD_EXTRA_BYTES, removals):
            return self._bus(key).append(
                type=new.type,
                project_id=new.project_id,
                task_id=new.task_id,
                run_id=new.run_id,
                parents=new.parents,
                attachment=new.attachment,
                body=new.body,
                ts=new.ts,
            )

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock that every thread and process takes to create or remove a bus."""
        make_folder(self._data / FOLDER, self._durability)
        path = self._data / LOCK_FILE
        fd = lock.open_lock_file(path)
        try:
            lock.acquire(fd, LOCK_TIMEOUT_S, path)
            yield
        finally:
            os.close(fd)

    def _create(self, name: str, caller: Identity, org_id: str) -> BusKey:
        """Note the owner of a new bus. Raises when the caller may create no more."""
        found = self.find(name, caller, org_id, "bus.post")
        if found is not None:  # created a moment ago
            return found.key
        key, creator = BusKey(org_id or caller.org, name), "" if caller.is_operator else caller.name
        if key.exists(self._data):
            raise NotAllowed(
                HTTPStatus.FORBIDDEN, f"it is unknown whose bus {name!r} is: only operators may use it"
            )
        records, place = self._store.read(known), place_of(self._data)
        gone: list[BusKey] = []
        if self._limits.fault(records, key.org, creator, caller) is not None:
            for each, record in records.items():
                if record.place == place and not each.exists(self._data):
                    gone.append(each)
            left = {each: record for each, record in records.items() if each not in gone}
            fault = self._limits.fault(left, key.org, creator, caller)
            if fault is not None:
                raise fault

        def note(transaction: Transaction) -> None:
            for each in gone:
                OWNERS.put(transaction, None, *each)
            OWNERS.put(transaction, BusRecord(creator, transaction.wall_us, place), *key)
            transaction.synced = True

        self._store.write(note)
        return key

    # ---- removing ------------------------------------------------------------------------------

    def remove(self, name: str, caller: Identity, org_id: str = "") -> BusKey:
        """Remove a bus with its archives. Its creator and operators may. Raises `UnknownBus`."""
        with self._changing():
            found = self.find(name, caller, org_id)
            if found is None:
                raise UnknownBus(name)
            if not permit(caller, "bus.remove", found.owner, name):
                raise NotAllowed(
                    HTTPStatus.FORBIDDEN,
                    f"only the agent that created the bus {name!r} and operators may remove it",
                )
            self._forget(found.key, caller)
            with self._written:
                self.removals += 1
                self._written.wait_for(lambda: not self._arriving[found.key])
                opened = self._open.pop(found.key, None)
                self._refused.pop(found.key, None)
                self._measured.pop(found.key.org, None)
            if opened is not None:
                opened.close()
            path = found.key.path(self._data)
            for file in (*busfile.archives(path), path):
                file.unlink(missing_ok=True)
        return found.key

    def _forget(self, key: BusKey, caller: Identity) -> None:
        """Remove the record of a bus. The event of it is part of the same commit."""
        path = key.path(self._data)
        size = _size(path) + self._archive_bytes(path)
        detail = {"bus": key.name, "org_id": key.org, "who": caller.name, "bytes": size}

        def forget(transaction: Transaction) -> None:
            OWNERS.put(transaction, None, *key)
            transaction.emit("deleted", type="bus", detail=detail)
            transaction.synced = True

        self._store.control(forget)

    # ---- limits of bytes -----------------------------------------------------------------------

    @contextmanager
    def _room_for(self, key: BusKey, size: int, removals: int) -> Iterator[None]:
        """Reserve the bytes of one record while it is written."""
        free = free_bytes(self._data)
        if free < size:
            raise BusFull("the disk of the server is nearly full: nothing is posted to a bus", RETRY_AFTER_S)
        with self._mutex:
            if self.removals != removals:
                raise _RemovedMeanwhile
            if not self._fits(key, size):
                self._refused[key] = size
                raise BusFull(
                    f"bus {key.name!r} and its archives may have at most {self._bytes_max} bytes: "
                    "an operator has to move archives away",
                    RETRY_AFTER_S,
                )
            if key.org:
                self._check_share(key.org, size, free)
            self._refused.pop(key, None)
            self._arriving[key] += size
        try:
            yield
        finally:
            with self._mutex:
                self._arriving[key] -= size
                if not self._arriving[key]:
                    del self._arriving[key]
                    self._written.notify_all()

    def _check_share(self, org: str, size: int, free: int) -> None:
        """Refuse a post beyond the share of an organization; else count it."""
        bytes_max = min(self._bytes_max * FULL_BUSES_AN_ORGANIZATION_MAX, free)
        measured, added = self._measured.get(org, (0, bytes_max))
        if added + size > bytes_max // MEASURED_PARTS or measured + added + size > bytes_max:
            folder = BusKey(org, "").path(self._data).parent
            measured = sum(map(_size, folder.iterdir())) if folder.is_dir() else 0
            added = sum(each for key, each in self._arriving.items() if key.org == org)
        if measured + added + size > bytes_max:
            raise BusFull(
                f"the buses of organization {org!r} may have at most {bytes_max} bytes together: remove one",
                RETRY_AFTER_S,
            )
        self._measured[org] = measured, added + size

    def _fits(self, key: BusKey, size: int) -> bool:
        """Whether a record fits. Archives are measured again after a rotation and before a refusal."""
        path = key.path(self._data)
        left = self._bytes_max - self._arriving[key] - size
        try:
            found = path.stat()
        except FileNotFoundError:
            return self._archive_bytes(path) <= left
        inode, archived = self._archived.get(key, (0, 0))
        if inode != found.st_ino or found.st_size + archived > left:
            archived = self._archive_bytes(path)
            self._archived[key] = found.st_ino, archived
        return found.st_size + archived <= left

    def _archive_bytes(self, path: Path) -> int:
        return sum(_size(archive) for archive in busfile.archives(path))

    def full(self) -> list[BusKey]:
        """The buses whose last post did not fit and still does not."""
        with self._mutex:
            for key in [key for key, size in self._refused.items() if self._fits(key, size)]:
                del self._refused[key]
            return [*self._refused]

    def disk_is_nearly_full(self) -> bool:
        """Whether posts are refused because the rest of the disk is reserved for the store."""
        try:
            return free_bytes(self._data) < 0
        except OSError:
            return True

    # ---- reading -------------------------------------------------------------------------------

    def read(self, name: str, since: str, limit: int, caller: Identity, org_id: str = "") -> list[BusMessage]:
        """The messages after `since`, archives included: at most `limit`, fewer when they are long."""
        found = self.find(name, caller, org_id)
        if found is None:
            return []
        messages = self._bus(found.key).scan(since, archives=True)
        return _page(messages, limit, BUS_ANSWER_BYTES_MAX)[0]

    def newest(self, name: str, limit: int, caller: Identity, org_id: str = "") -> list[BusMessage]:
        """The newest messages of the bus file, oldest first. Archives are not read."""
        found = self.find(name, caller, org_id)
        if found is None or not found.key.path(self._data).exists():
            return []
        return self._bus(found.key).tail(limit)

    def follow(self, name: str, since: str, caller: Identity, org_id: str = "") -> "Follower":
        """A reader that continues where it stopped."""
        self.find(name, caller, org_id)
        return Follower(self, lambda: self.find(name, caller, org_id), since)

    def version(self, key: BusKey) -> tuple[int, int, int]:
        """Changes with every post. A new file may have the inode and the size of a removed one."""
        try:
            found = key.path(self._data).stat()
        except OSError:
            return 0, 0, 0
        return found.st_ino, found.st_size, found.st_mtime_ns

    def is_current(self, found: FoundBus) -> bool:
        """Whether a bus that was found before is still the same one."""
        if found.record is None:
            return found.key.exists(self._data)
        return self._store.read(lambda transaction: record_of(transaction, found.key)) == found.record

    def scan(self, key: BusKey, since: str) -> Iterator[BusMessage]:
        """The messages after `since`, archives included."""
        return self._bus(key).scan(since, archives=True)

    def names(self, caller: Identity) -> dict[str, list[str]]:
        """The buses that the caller may read: by organization, their names in order."""
        self._check_caller(caller, "")
        folder = self._data / FOLDER
        orgs = namespaces(caller)
        if caller.is_operator:
            orgs = ("", *sorted(path.name[1:] for path in folder.glob(f"{OF_ORGANIZATION}*")))
        records = self._store.read(known)
        found: dict[str, list[str]] = {}
        for org in orgs:
            files = BusKey(org, "").path(self._data).parent.glob(FILES)
            keys = [BusKey(org, file.stem) for file in files]
            found[org] = sorted(
                key.name
                for key in keys
                if permit(caller, "bus.read", owner_of(key, records.get(key)), key.name)
            )
        return found

    def _bus(self, key: BusKey) -> Bus:
        with self._mutex:
            bus = self._open.pop(key, None) or _PrivateBus(
                key.path(self._data), durability=self._durability, rotate_bytes=self._rotate_bytes
            )
            self._open[key] = bus
            if len(self._open) > OPEN_BUSES_MAX:
                self._open.popitem(last=False)[1].close()
        return bus

    def close(self) -> None:
        """Close every file."""
        with self._mutex:
            for bus in self._open.values():
                bus.close()
            self._open.clear()


class _PrivateBus(Bus):
    """A bus whose files only the user of the server may read and write."""

    _file_mode, _folder_mode = PRIVATE_FILE_MODE, PRIVATE_FOLDER_MODE


class BusRemoved(Exception):
    """The bus that is followed was removed."""


class Follower:
    """Reads a bus page by page. It opens the file only after the bus has changed.

    Its position is looked up again only after it has read to the end.
    """

    def __init__(self, buses: Buses, find: Callable[[], FoundBus | None], since: str) -> None:
        self._buses = buses
        self._find = find
        self._found: FoundBus | None = None
        self._messages: Iterator[BusMessage] | None = None
        self._seen: tuple[int, int] | None = None
        """The inode of the file, and how many buses were removed then."""
        self._read_version: tuple[int, int, int] | None = None
        """The version of the file that was read to its end."""
        self.since = since

    def page(self, limit: int, bytes_max: int) -> list[BusMessage]:
        """The next messages, possibly none. Raises `SinceIdNotFound` and `BusRemoved`."""
        self._found = self._found or self._find()
        if self._found is None:
            return []
        version = self._buses.version(self._found.key)
        if version == self._read_version:
            return []
        seen = version[0], self._buses.removals  # a new file may have the inode of a removed one
        if self._seen not in (None, seen) and not self._buses.is_current(self._found):
            raise BusRemoved
        self._seen = seen
        if self._messages is None:
            self._messages = self._buses.scan(self._found.key, self.since)
        page, ended = _page(self._messages, limit, bytes_max)
        if page:
            self.since = page[-1].msg_id
        else:
            self._read_version = version
        if ended:
            self._messages = None
        return page


def _page(messages: Iterator[BusMessage], limit: int, bytes_max: int) -> tuple[list[BusMessage], bool]:
    """Up to `limit` messages or about `bytes_max` bytes, and whether the end was reached."""
    page: list[BusMessage] = []
    size = 0
    for message in messages:
        page.append(message)
        size += len(message.body)
        if len(page) == limit or size >= bytes_max:
            return page, False
    return page, True


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:  # moved away a moment ago
        return 0
