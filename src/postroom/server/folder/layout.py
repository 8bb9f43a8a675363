"""The layout of a data folder: which files hold data, and which of them only serve running processes."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from postroom.core.formats.manifest import MANIFEST_FILE
from postroom.errors import Unavailable
from postroom.server.access import registry, tokens
from postroom.server.folder import bus_owners
from postroom.server.up import parts
from postroom.system.crypto.key_file import check_outside

DATABASE = "queue.db"
MAIL_FOLDER = "mail"
AUDIT_FOLDER = "audit"
TABLES_FOLDER = "tables"
BREACHES_FOLDER = "_breaches"
"""Below the tables: one file for each check of the pipeline that found a broken expectation."""
REPORT_FILE = "report.html"

_OWN_FILES = (DATABASE, registry.FILE_NAME, tokens.FILE_NAME)
_MARKS = (*_OWN_FILES, MANIFEST_FILE, bus_owners.FOLDER, MAIL_FOLDER, AUDIT_FOLDER)
_BESIDE = frozenset({TABLES_FOLDER, REPORT_FILE, "postroom.toml"})
"""What people and the pipeline put into a data folder, perhaps before it has data."""
_TRANSIENT = re.compile(
    r".*\.lock|.*\.gate|.*\.ballast|.*\.db-(?:wal|shm|journal)|.*\.bells"
    rf"|\..*\.tmp|{re.escape(parts.STATES_FILE)}"
)
_COPY = re.compile(rf"{re.escape(DATABASE)}\.before-\d+")


def is_data_folder(folder: Path) -> bool:
    """Whether the folder holds data of postroom."""
    return any((folder / name).exists() for name in _MARKS)


def checked_data_folder(folder: Path) -> Path:
    """The folder. Raises `Unavailable` with the reason when it is not a data folder."""
    if not folder.exists():
        raise Unavailable(f"there is no data folder {folder}: {_how_to_start(folder)}")
    if not folder.is_dir():
        raise Unavailable(f"{folder} is a file, and not a data folder")
    try:
        found = is_data_folder(folder)
    except PermissionError:
        raise Unavailable(f"this user may not read {folder}") from None
    if not found:
        raise Unavailable(f"{folder} holds no postroom data: {_how_to_start(folder)}")
    return folder


def check_key_place(path: Path) -> None:
    """Refuse a new key file inside a data folder. A folder `mail` alone is not a sign of one: /var has it."""
    for folder in path.absolute().parents:
        if any((folder / name).exists() for name in _OWN_FILES):
            check_outside(path, folder)


def nothing_in(folder: Path, what: str) -> Unavailable:
    """The error for a folder without a store, which a command needs."""
    return Unavailable(f"there are no {what} in {folder}: {_how_to_start(folder)}")


def _how_to_start(folder: Path) -> str:
    return f"check the path, or start a data folder there with `postroom up --data {folder}`"


def is_new_data_folder(folder: Path) -> bool:
    """Whether a data folder can be started here: it is absent, or holds no data. False for a data folder.

    A folder with files of something else is refused, because its path is probably a typing error.
    """
    is_taken = folder.exists() and (
        not folder.is_dir()
        or any(not is_transient(path.name) and path.name not in _BESIDE for path in folder.iterdir())
    )
    if is_taken:
        checked_data_folder(folder)
    return not is_taken


def files_of(folder: Path) -> Iterator[Path]:
    """The files and symlinks below a folder, in order. Symlinks are not followed."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_transient(name))
        links = [name for name in folders if Path(parent, name).is_symlink()]
        for name in sorted([*files, *links]):
            yield Path(parent, name)


def is_transient(name: str) -> bool:
    """Whether a file or folder of this name serves running processes only and holds no data."""
    return _TRANSIENT.fullmatch(name) is not None


def is_copy(name: str) -> bool:
    """Whether a file is the copy of a store that an upgrade has left."""
    return _COPY.fullmatch(name) is not None


def upgrade_copies(folder: Path) -> list[str]:
    """The copies that upgrades have left in a folder."""
    return sorted(path.name for path in folder.glob(f"{DATABASE}.before-*") if is_copy(path.name))
