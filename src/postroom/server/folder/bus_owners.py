"""The owners of buses: records in the store, one for each bus.

Rule 1: the organization of a bus is in the key of its record and in the path of its file. When one of the two
        is missing or damaged, the owner is unknown.
Rule 2: a file of an earlier version is taken over once. What it does not say for certain stays unknown.
"""

import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from postroom.core.gate import UNKNOWN, Owner
from postroom.core.names import is_name
from postroom.engine.rules.cells import SEPARATOR, Kind
from postroom.errors import Unavailable
from postroom.logs import busfile
from postroom.stores.store import Store
from postroom.stores.transaction import Transaction
from postroom.system.atomic import make_folder, read_file
from postroom.system.log import library_log

FOLDER = "buses"
SUFFIX = ".yaml"
OF_ORGANIZATION = "@"  # before its name, so that its folder is not a bus
FILES = f"[!{OF_ORGANIZATION}]*{SUFFIX}"  # in a folder
EARLIER_FILE = "bus-makers.json"  # bus to the agent that created it, as AGENT or ORGANIZATION/AGENT
TAKEN_OVER_SUFFIX = ".taken-over"

_log = library_log("postroom.buses")
_decode_creators = msgspec.json.Decoder(dict[str, str]).decode


class BusKey(NamedTuple):
    """The name of a bus within its organization."""

    org: str
    """Empty for a bus of no organization."""
    name: str

    def path(self, data: Path) -> Path:
        """The file of the bus."""
        folder = data / FOLDER
        return (folder / f"{OF_ORGANIZATION}{self.org}" if self.org else folder) / f"{self.name}{SUFFIX}"

    def exists(self, data: Path) -> bool:
        """Whether the bus has a file, or archives of one."""
        path = self.path(data)
        return path.exists() or bool(busfile.archives(path))


class BusRecord(msgspec.Struct, frozen=True):
    """Who created a bus, when and where."""

    creator: str
    """The agent; empty for an operator."""
    created_us: int
    place: str
    """The machine and the folder of its file: servers of several folders may share a store."""


OWNERS = Kind("bus.owner", BusRecord)


def place_of(data: Path) -> str:
    """The place of the buses of a folder."""
    return f"{socket.gethostname()}:{data.absolute()}"


def record_of(transaction: Transaction, key: BusKey) -> BusRecord | None:
    """The record of a bus; None when there is none that can be read."""
    with suppress(msgspec.MsgspecError, ValueError):
        return OWNERS.get(transaction, *key)
    return None


def owner_of(key: BusKey, record: BusRecord | None) -> Owner:
    """The owner of a bus."""
    return UNKNOWN if record is None else Owner(key.org, record.creator)


def known(transaction: Transaction) -> dict[BusKey, BusRecord]:
    """All records that can be read."""
    found: dict[BusKey, BusRecord] = {}
    after = ""
    while page := transaction.cells.page(OWNERS.name, after):
        for key, value in page:
            org, _, name = key.partition(SEPARATOR)
            with suppress(msgspec.MsgspecError, ValueError):
                found[BusKey(org, name)] = msgspec.json.decode(value, type=BusRecord)
        after = page[-1][0]
    return found


def bus_files(data: Path) -> list[Path]:
    """The bus files of a data folder, without their archives."""
    folder = data / FOLDER
    return sorted([*folder.glob(FILES), *folder.glob(f"{OF_ORGANIZATION}*/{FILES}")])


# ---- earlier versions ------------------------------------------------------------------------------


def take_over(data: Path, store: Store, is_agent: Callable[[str], bool]) -> None:
    """Move the owners that an earlier version has noted in a file into the store, and the buses to them.

    Raises `Unavailable` when the file cannot be read: nothing is changed then.
    """
    file = data / EARLIER_FILE
    try:
        creators = _decode_creators(read_file(file))
    except FileNotFoundError:
        return
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        _log.error("%s cannot be read: %s", file, error)
        raise Unavailable(
            f"who owns the buses cannot be read from {EARLIER_FILE}: only operators of all organizations use "
            "buses until the file is repaired or removed and the server is started again"
        ) from error
    names = [path.stem for path in sorted((data / FOLDER).glob(FILES))]
    owned = {name: _owner(creators, name, is_agent, is_whole=creators.keys() <= {*names}) for name in names}
    keys = {name: BusKey(owner.org, name) for name, owner in owned.items() if owner.org is not None}
    place = place_of(data)

    def note(transaction: Transaction) -> None:
        for name, key in keys.items():
            if OWNERS.get(transaction, *key) is None:
                OWNERS.put(transaction, BusRecord(owned[name].agent, transaction.wall_us, place), *key)
        transaction.synced = True

    store.write(note)
    for name, key in keys.items():
        _move(BusKey("", name).path(data), key.path(data))
    file.replace(file.with_name(f"{file.name}{TAKEN_OVER_SUFFIX}"))
    unknown = [name for name in names if name not in keys]
    if unknown:
        _log.warning("only operators use these buses, because it is unknown whose they are: %s", unknown)


def _owner(
    creators: Mapping[str, str], name: str, is_agent: Callable[[str], bool], *, is_whole: bool
) -> Owner:
    """The owner of a bus of an earlier version, which noted no creator of the buses of operators.

    A bus without a creator is an operator's when every creator is that of a bus: else a name is damaged.
    """
    org, slash, agent = creators.get(name, "").rpartition("/")
    if slash and is_name(org):
        return Owner(org, agent)
    is_known = is_agent(agent) if agent else is_whole
    return Owner("", agent) if is_known and is_name(name) and not slash else UNKNOWN


def _move(before: Path, after: Path) -> None:
    """Move a bus with its archives, unless it was moved before."""
    if before == after or after.exists():
        return
    make_folder(after.parent, "group")
    for path in (*busfile.archives(before), before):
        path.rename(after.with_name(path.name))
