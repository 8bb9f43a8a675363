"""The layout of a data folder: which files hold data, and which of them only serve running processes."""

import re
from pathlib import Path

from postroom.errors import Unavailable
from postroom.runtime import agents, buses, parts, tokens

DATABASE = "queue.db"
MAIL_FOLDER = "mail"
AUDIT_FOLDER = "audit"

_MARKS = (DATABASE, agents.FILE_NAME, tokens.FILE_NAME, buses.FOLDER, MAIL_FOLDER, AUDIT_FOLDER)
_TRANSIENT = re.compile(
    r".*\.lock|.*\.gate|.*\.ballast|.*\.db-(?:wal|shm|journal)|.*\.bells"
    rf"|\..*\.tmp|{re.escape(parts.STATES_FILE)}"
)
_COPY = re.compile(rf"{re.escape(DATABASE)}\.before-\d+")


def is_data_folder(folder: Path) -> bool:
    """Whether the folder holds data of postroom."""
    return any((folder / name).exists() for name in _MARKS)


def checked_data_folder(folder: Path) -> Path:
    """The folder, or one sentence that says why it is no data folder."""
    if not folder.exists():
        raise Unavailable(f"there is no data folder {folder}")
    if not folder.is_dir():
        raise Unavailable(f"{folder} is a file, and not a data folder")
    try:
        found = is_data_folder(folder)
    except PermissionError:
        raise Unavailable(f"this user may not read {folder}") from None
    if not found:
        raise Unavailable(f"{folder} is no data folder: it holds neither {DATABASE} nor another part")
    return folder


def is_transient(name: str) -> bool:
    """Whether a file or folder of this name serves running processes only and holds no data."""
    return _TRANSIENT.fullmatch(name) is not None


def is_copy(name: str) -> bool:
    """Whether a file is the copy of a store that an upgrade has left."""
    return _COPY.fullmatch(name) is not None


def upgrade_copies(folder: Path) -> list[str]:
    """The copies that upgrades have left in a folder."""
    return sorted(path.name for path in folder.glob(f"{DATABASE}.before-*") if is_copy(path.name))
