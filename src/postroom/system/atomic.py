"""Whole-file updates: after a crash, a file is either old or new."""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from postroom.errors import InvalidMessage, UnsafePath, WriteFailed
from postroom.message import Durability

PRIVATE_FILE_MODE = 0o600
PRIVATE_FOLDER_MODE = 0o700
TEMPORARY_SUFFIX = ".tmp"
TAIL_BYTES = 1 << 16  # read at once to find the last newline of a file

# A FIFO or device must be refused without blocking, and a symlink must not be followed.
SAFE_FLAGS = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)


def absolute_path(what: str, path: str | os.PathLike[str]) -> Path:
    """The absolute path, which stays valid when the process changes its working folder."""
    try:
        text = os.fspath(path)
    except TypeError:
        raise InvalidMessage(f"{what} must be a path, not {type(path).__name__}") from None
    if not text.strip():
        raise InvalidMessage(f"{what} is empty")
    if not isinstance(text, str) or not is_path(text):
        raise InvalidMessage(f"{what} {text!r} is not a path")
    return Path.cwd() / text


def is_path(text: str) -> bool:
    """Whether the text can be a path on this system."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def open_safely(path: Path | str, flags: int, mode: int = PRIVATE_FILE_MODE) -> int:
    """`os.open` that follows no symlink and opens nothing but a regular file."""
    try:
        fd = os.open(path, flags | SAFE_FLAGS, mode)
    except OSError as error:
        if error.errno == errno.ELOOP or os.path.islink(path):  # the link may have been removed since
            raise UnsafePath(f"{path} is a symlink, which is refused") from error
        if os.path.exists(path) and not os.path.isfile(path):
            raise UnsafePath(f"{path} is not a regular file") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UnsafePath(f"{path} is not a regular file")
    return fd


def read_file(path: Path) -> bytes:
    """The content of a file; symlinks are refused."""
    fd = open_safely(path, os.O_RDONLY)
    with open(fd, "rb") as file:
        return file.read()


def replace_file(path: Path, data: bytes, durability: Durability) -> None:
    """Replace a file atomically. With `group` and `fsync` the result survives a power cut."""
    # The leading dot keeps the temporary file out of lists of agents, bodies and cursors.
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        write_new_file(temporary, data, durability)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise WriteFailed(path, error) from error
    if durability != "os":
        try:
            sync_folder(path.parent)
        except OSError as error:
            raise WriteFailed(path, error, rolled_back=False) from error


def write_new_file(path: Path, data: bytes, durability: Durability) -> None:
    """Write `data` to a file that no other process uses until it is renamed."""
    fd = open_safely(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(fd, data)
        if durability != "os":
            os.fsync(fd)
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write every byte, with as many calls as necessary."""
    written = os.write(fd, data)
    while written < len(data):
        written += os.write(fd, memoryview(data)[written:])


def sync_file(path: Path) -> None:
    """Make the content of a file durable, whichever process has written it."""
    fd = open_safely(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def size_of_whole_lines(fd: int, size: int) -> int:
    """The size of the first `size` bytes of a file up to their last newline."""
    end = size
    while end > 0:
        start = max(0, end - TAIL_BYTES)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def sync_folder(folder: Path) -> None:
    """Make the names of the files in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(folder: Path, durability: Durability, mode: int = PRIVATE_FOLDER_MODE) -> None:
    """Create `folder` and its parents, durably if the class requires it."""
    if folder.is_dir():
        return
    make_folder(folder.parent, durability, mode)
    with suppress(FileExistsError):
        folder.mkdir(mode=mode)
    if durability != "os":
        sync_folder(folder.parent)
