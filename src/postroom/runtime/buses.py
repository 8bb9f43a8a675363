"""The buses of a server, below the data folder.

Rule 1: a bus and its archives together hold at most `bytes_max` bytes. A post beyond that is refused. The
        server removes nothing: an operator moves archives away.
Rule 2: posts stop before the disk is full, because the store needs the rest.
Rule 3: the first post creates a bus. An agent may create a limited number, and operators have a reserve.
Rule 4: a bus that a caller of an organization created is for that organization and for operators of
        all. Other buses are for everybody.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path

import msgspec

from postroom.contracts.bus import Bus
from postroom.core.names import checked_name
from postroom.errors import BusFull, InvalidMessage, NotAllowed, StoreDamaged, TooMany
from postroom.logs import busfile
from postroom.message import BusMessage, Durability
from postroom.runtime.agents import Identity
from postroom.runtime.schemas import BUS_ANSWER_BYTES_MAX, NewBusMessage
from postroom.system.atomic import PRIVATE_FILE_MODE, PRIVATE_FOLDER_MODE, read_file, replace_file
from postroom.system.diskspace import free_bytes

FOLDER = "buses"
SUFFIX = ".yaml"
CREATORS_FILE = "bus-makers.json"  # bus name to the agent that created it, as AGENT or ORGANIZATION/AGENT
OPEN_BUSES_MAX = 64  # the most recently used
BUSES_MAX = 1_000
BUSES_AN_AGENT_MAX = 50
OPERATOR_BUSES_RESERVE = 100
BUS_BYTES_MAX = 1024 * 1024 * 1024  # of a bus with its archives, by default
ROTATE_BYTES = 64 * 1024 * 1024
FILES_A_BUS = 4  # at least, so that moving one archive away makes room and leaves history
RECORD_EXTRA_BYTES = 512  # of a record, besides the posted fields
RETRY_AFTER_S = 60.0

_encode = msgspec.json.Encoder().encode
_decode_creators = msgspec.json.Decoder(dict[str, str]).decode


class Buses:
    """Buses by name. Safe to share between threads."""

    def __init__(self, data: Path, durability: Durability, bytes_max: int = BUS_BYTES_MAX) -> None:
        self._data = data
        self._folder = data / FOLDER
        self._durability: Durability = durability
        self._bytes_max = bytes_max
        self._rotate_bytes = max(1, min(ROTATE_BYTES, bytes_max // FILES_A_BUS))
        self._archived: dict[str, tuple[int, int]] = {}
        """By name: the inode of the bus file, and the bytes of its archives at that time."""
        self._arriving: Counter[str] = Counter()
        """By name: bytes of posts that are being written."""
        self._refused: dict[str, int] = {}
        """By name: the size of the last post that did not fit."""
        self._open: OrderedDict[str, Bus] = OrderedDict()
        self._known_creators: tuple[tuple[int, int], dict[str, str]] = ((0, 0), {})
        """The table of creators, and the version of its file."""
        self._mutex = threading.Lock()
        self._creating = threading.Lock()

    def path(self, name: str) -> Path:
        """The file of a bus."""
        return self._folder / f"{checked_name('bus', name)}{SUFFIX}"

    def append(self, name: str, new: NewBusMessage, identity: Identity) -> str:
        """Append a message and return its id."""
        if self.path(name).exists():
            self.check_access(name, identity)
            return self._append(name, new)
        with self._creating:  # until the file exists, so that concurrent creations are counted
            self._check_may_create(name, identity)
            return self._append(name, new)

    def _append(self, name: str, new: NewBusMessage) -> str:
        with self._room_for(name, len(_encode(new)) + RECORD_EXTRA_BYTES):
            return self._bus(name).append(
                type=new.type,
                project_id=new.project_id,
                task_id=new.task_id,
                run_id=new.run_id,
                parents=new.parents,
                attachment=new.attachment,
                body=new.body,
                ts=new.ts,
            )

    def _check_may_create(self, name: str, identity: Identity) -> None:
        """Raise when the bus is missing and the caller may create no more; else record its creator."""
        if self._exists(name):  # created or rotated a moment ago
            self.check_access(name, identity)
            return
        buses_max = BUSES_MAX if identity.is_operator else BUSES_MAX - OPERATOR_BUSES_RESERVE
        if self._folder.exists():
            buses = sum(1 for file in self._folder.iterdir() if file.suffix == SUFFIX)
            if buses >= buses_max:
                raise InvalidMessage(f"there are {buses_max} buses already, which is the limit")
        if identity.is_operator:
            return
        creators = {
            bus: creator for bus, creator in self._creators().items() if bus != name and self._exists(bus)
        }
        creator = f"{identity.org}/{identity.name}" if identity.org else identity.name
        if Counter(creators.values())[creator] >= BUSES_AN_AGENT_MAX:
            raise TooMany(identity.name, "buses of its own", BUSES_AN_AGENT_MAX, RETRY_AFTER_S)
        replace_file(self._data / CREATORS_FILE, _encode({**creators, name: creator}), self._durability)

    def _exists(self, name: str) -> bool:
        path = self.path(name)
        return path.exists() or bool(busfile.archives(path))

    def is_open_to(self, name: str, identity: Identity) -> bool:
        """Whether a caller may use a bus. A bus that does not exist yet is open to everybody."""
        if identity.is_operator:
            return True
        org, slash, _ = self._creators().get(name, "").partition("/")
        return not slash or org == identity.org or not self._exists(name)

    def check_access(self, name: str, identity: Identity) -> None:
        """Refuse a caller of another organization. A read is checked after it: the bus may be new."""
        if not self.is_open_to(name, identity):
            raise NotAllowed(
                HTTPStatus.FORBIDDEN, f"the bus {name!r} belongs to another organization: choose another name"
            )

    def _creators(self) -> dict[str, str]:
        path = self._data / CREATORS_FILE
        try:
            found = path.stat()
            version = found.st_ino, found.st_mtime_ns
            if self._known_creators[0] != version:
                self._known_creators = version, _decode_creators(read_file(path))
            return self._known_creators[1]
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            raise StoreDamaged(f"{path} is not a table of buses and their creators: {error}") from error

    @contextmanager
    def _room_for(self, name: str, size: int) -> Iterator[None]:
        """Reserve the bytes of one record while it is written."""
        if free_bytes(self._data) < size:
            raise BusFull("the disk of the server is nearly full: nothing is posted to a bus", RETRY_AFTER_S)
        with self._mutex:
            if not self._fits(name, size):
                self._refused[name] = size
                raise BusFull(
                    f"bus {name!r} and its archives may have at most {self._bytes_max} bytes: "
                    "an operator has to move archives away",
                    RETRY_AFTER_S,
                )
            self._refused.pop(name, None)
            self._arriving[name] += size
        try:
            yield
        finally:
            with self._mutex:
                self._arriving[name] -= size
                if not self._arriving[name]:
                    del self._arriving[name]

    def _fits(self, name: str, size: int) -> bool:
        """Whether a record fits. Archives are measured again after a rotation and before a refusal."""
        path = self.path(name)
        left = self._bytes_max - self._arriving[name] - size
        try:
            found = path.stat()
        except FileNotFoundError:
            return self._archive_bytes(path) <= left
        inode, archived = self._archived.get(name, (0, 0))
        if inode != found.st_ino or found.st_size + archived > left:
            archived = self._archive_bytes(path)
            self._archived[name] = found.st_ino, archived
        return found.st_size + archived <= left

    def _archive_bytes(self, path: Path) -> int:
        return sum(_size(archive) for archive in busfile.archives(path))

    def full(self) -> list[str]:
        """The buses whose last post did not fit and still does not."""
        with self._mutex:
            for name in [name for name, size in self._refused.items() if self._fits(name, size)]:
                del self._refused[name]
            return [*self._refused]

    def disk_is_nearly_full(self) -> bool:
        """Whether posts are refused because the rest of the disk is reserved for the store."""
        try:
            return free_bytes(self._data) < 0
        except OSError:
            return True

    def read(self, name: str, since: str, limit: int) -> list[BusMessage]:
        """The messages after `since`, archives included: at most `limit`, fewer when they are long."""
        messages = self._bus(name).scan(since, archives=True)
        return _page(messages, limit, BUS_ANSWER_BYTES_MAX)[0]

    def names(self, limit: int) -> list[str]:
        """The buses by name."""
        if not self._folder.exists():
            return []
        return sorted(file.stem for file in self._folder.iterdir() if file.suffix == SUFFIX)[:limit]

    def newest(self, name: str, limit: int) -> list[BusMessage]:
        """The newest messages of the bus file without its archives, the oldest of them first."""
        return self._bus(name).tail(limit) if self.path(name).exists() else []

    def follow(self, name: str, since: str) -> "Follower":
        """A reader that continues where it stopped."""
        return Follower(lambda position: self._bus(name).scan(position, archives=True), since)

    def _bus(self, name: str) -> Bus:
        path = self.path(name)
        with self._mutex:
            bus = self._open.pop(name, None) or _PrivateBus(
                path, durability=self._durability, rotate_bytes=self._rotate_bytes
            )
            self._open[name] = bus
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


class Follower:
    """Reads a bus page by page. It searches for its position only after it has reached the end."""

    def __init__(self, scan: Callable[[str], Iterator[BusMessage]], since: str) -> None:
        self._scan = scan
        self._messages: Iterator[BusMessage] | None = None
        self.since = since

    def page(self, limit: int, bytes_max: int) -> list[BusMessage]:
        """The next messages, possibly none. Raises `SinceIdNotFound`."""
        if self._messages is None:
            self._messages = self._scan(self.since)
        page, ended = _page(self._messages, limit, bytes_max)
        if page:
            self.since = page[-1].msg_id
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
