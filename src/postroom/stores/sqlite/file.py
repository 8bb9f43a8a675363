"""The file of a SQLite store: opening, migrating and checking it."""

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import apsw

from postroom.errors import StoreDamaged, WriteFailed
from postroom.stores.sqlite.sql.queries import ask
from postroom.system.atomic import PRIVATE_FILE_MODE, TEMPORARY_SUFFIX, sync_file, sync_folder
from postroom.system.log import library_log

SQLITE_OLDEST = (3, 51, 3)  # older versions can damage a WAL that several processes write
BUSY_TIMEOUT_S = 10.0  # wait for programs that open the file without our lock
WAL_BYTES_MAX = 64 * 1024 * 1024  # the WAL is truncated to this after a checkpoint
CACHE_KIB = 64 * 1024
COPY_PAGES = 4_096  # copied between two reports of progress
OUR_TABLES = {"facts", "queues", "records", "events"}

_log = library_log("postroom.store")


def check_library() -> None:
    """Refuse a SQLite library that is too old or lacks arrays."""
    if tuple(int(part) for part in apsw.sqlite_lib_version().split(".")) < SQLITE_OLDEST:
        raise StoreDamaged(
            f"SQLite {apsw.sqlite_lib_version()} can damage a database that several processes write: "
            f"install apsw with SQLite {'.'.join(map(str, SQLITE_OLDEST))} or newer"
        )
    if not hasattr(apsw, "carray"):
        raise StoreDamaged(
            "this apsw was built without SQLite's arrays (carray): install its wheel from PyPI"
        )


def check_kind(path: Path) -> None:
    """Refuse a file of another program before changing it.

    The file is read through SQLite: closing a descriptor of our own would release this process's locks on it.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise StoreDamaged(f"{path} is not a file, so it cannot be a store of tasks")
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    connection.set_busy_timeout(round(BUSY_TIMEOUT_S * 1000))
    try:
        tables = {name for (name,) in ask(connection, "SELECT name FROM sqlite_schema WHERE type = 'table'")}
    except apsw.NotADBError:
        raise StoreDamaged(
            f"{path} is not a store of tasks: it is not a SQLite database, or its beginning is damaged"
        ) from None
    finally:
        connection.close()
    if tables and not tables.issuperset(OUR_TABLES):
        raise StoreDamaged(f"{path} is not a store of tasks: it is the database of another program")


def refused_access(path: Path) -> OSError | None:
    """Why the system does not let SQLite open a store and its WAL; None when access is not the reason."""
    try:
        if os.statvfs(path.parent).f_flag & os.ST_RDONLY:
            return OSError(errno.EROFS, os.strerror(errno.EROFS))
    except OSError:
        return None
    may_write = os.access(path.parent, os.W_OK | os.X_OK) and os.access(path, os.R_OK | os.W_OK)
    return None if may_write or not path.exists() else OSError(errno.EACCES, os.strerror(errno.EACCES))


def check_pages(connection: apsw.Connection, path: Path) -> None:
    """Check all pages: after a failed fsync it is unknown which of them reached the disk."""
    [(found,)] = ask(connection, "PRAGMA quick_check(1)")
    if found != "ok":
        raise StoreDamaged(f"{path} is damaged: {found}")


def connect(path: Path) -> apsw.Connection:
    """A connection with the settings of a store."""
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(round(BUSY_TIMEOUT_S * 1000))
    # Without this setting, SQLite plans statements on partial indexes again when values change.
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    for pragma in (
        "journal_mode = WAL",
        "synchronous = NORMAL",
        f"journal_size_limit = {WAL_BYTES_MAX}",
        f"cache_size = -{CACHE_KIB}",
        "temp_store = MEMORY",
    ):
        connection.execute(f"PRAGMA {pragma}").fetchall()
    return connection


@contextmanager
def transaction(connection: apsw.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    """Run statements in a transaction: committed at the end, rolled back after an error."""
    connection.execute(f"BEGIN {kind}")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def migrate(connection: apsw.Connection, path: Path) -> None:
    """Bring the file to the current version, one script per transaction."""
    version = connection.pragma("user_version")
    scripts = migrations()
    if version > max(scripts):
        raise StoreDamaged(
            f"{path} was written by a newer postroom (its version {version}): upgrade this one"
        )
    if 0 < version < max(scripts):
        keep_copy(connection, path, version)
    for number, script in scripts.items():
        if number > version:
            with transaction(connection):
                connection.execute(script)
                connection.execute(f"PRAGMA user_version = {number}")


def keep_copy(connection: apsw.Connection, path: Path, version: int) -> None:
    """Copy the store before an upgrade, into a file next to it, such as `queue.db.before-5`."""
    kept = path.with_name(f"{path.name}.before-{version}")
    temporary = path.with_name(f".{kept.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        temporary.unlink(missing_ok=True)
        copy_database(connection, temporary)
        temporary.chmod(PRIVATE_FILE_MODE)
        sync_file(temporary)
        temporary.rename(kept)
        sync_folder(path.parent)
    except (apsw.Error, OSError) as error:
        temporary.unlink(missing_ok=True)
        cause = error if isinstance(error, OSError) else OSError(errno.ENOSPC, str(error))
        raise WriteFailed(kept, cause) from error
    _log.warning("%s is upgraded from format %d; a copy of it stays in %s", path, version, kept)


def copy_database(
    connection: apsw.Connection, path: Path, report: Callable[[int, int], None] | None = None
) -> None:
    """Copy a database into a new file. `report` gets the copied bytes and all bytes."""
    page_bytes = int(connection.pragma("page_size"))
    target = apsw.Connection(os.fspath(path))
    try:
        with target.backup("main", connection, "main") as copy:
            while not copy.done:
                copy.step(COPY_PAGES)
                if report is not None:
                    report((copy.page_count - copy.remaining) * page_bytes, copy.page_count * page_bytes)
    finally:
        target.close()


def migrations() -> dict[int, str]:
    """The scripts in `sql/`, by number."""
    scripts = {}
    for file in resources.files("postroom.stores.sqlite.sql").iterdir():
        number = re.fullmatch(r"(\d{4})_\w+\.sql", file.name)
        if number:
            scripts[int(number[1])] = file.read_text()
    return dict(sorted(scripts.items()))
