"""Writes the archive of a backup into a new data folder.

Rule 1: every hash is compared before the first byte is written.
Rule 2: the folder gets its name when all files are durable. A restore that is killed leaves only a hidden
        folder beside it.
Rule 3: a folder that holds anything is never touched.
"""

import hashlib
import os
import shutil
from pathlib import Path
from typing import IO

from postroom.core.formats.backup_format import OWN_NAMES, Manifest, checked_name
from postroom.errors import StoreDamaged, Unavailable, WriteFailed
from postroom.server.folder.archive import BLOCK_BYTES, Archive, Report, reading
from postroom.server.folder.backup import known_formats
from postroom.system.atomic import (
    PRIVATE_FOLDER_MODE,
    absolute_path,
    make_folder,
    open_safely,
    sync_folder,
    write_all,
)

UNFINISHED_SUFFIX = ".restoring"


def restore(archive: Path, data: Path, *, report: Report = lambda *_: None) -> Manifest:
    """Restore a backup into the folder `data`, which must not exist or be empty."""
    target = absolute_path("the data folder", data)
    _check_target(target)
    with reading(absolute_path("the archive", archive)) as source:
        manifest = source.check(known_formats(), report)
        make_folder(target.parent, "group")
        _check_space(target.parent, manifest)
        unfinished = target.with_name(f".{target.name}.{os.getpid()}{UNFINISHED_SUFFIX}")
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(mode=PRIVATE_FOLDER_MODE)
            _extract(source, manifest, unfinished, report)
            _sync_folders(unfinished)
            _name(unfinished, target)
        except OSError as error:
            raise WriteFailed(target, error) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return manifest


def _check_target(target: Path) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise Unavailable(f"{target} is not a folder")
    if target.is_dir() and any(target.iterdir()):
        raise Unavailable(f"{target} is not empty: a backup is restored into a new folder")


def _check_space(folder: Path, manifest: Manifest) -> None:
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < manifest.bytes:
        raise Unavailable(f"the backup needs {manifest.bytes:,} bytes, and {free:,} are free in {folder}")


def _extract(source: Archive, manifest: Manifest, folder: Path, report: Report) -> None:
    hashes = {member.name: member.sha256 for member in manifest.members}
    for info, content in source.members():
        if info.name in OWN_NAMES:
            continue
        path = folder / checked_name(info.name)
        path.parent.mkdir(mode=PRIVATE_FOLDER_MODE, parents=True, exist_ok=True)
        if _write(path, content, report) != hashes.get(info.name):
            raise StoreDamaged("it was changed while it was restored")


def _write(path: Path, content: IO[bytes], report: Report) -> str:
    """Write a file durably, and return its hash."""
    digest = hashlib.sha256()
    fd = open_safely(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        while data := content.read(BLOCK_BYTES):
            write_all(fd, data)
            digest.update(data)
            report("restoring", len(data))
        os.fsync(fd)
    finally:
        os.close(fd)
    return digest.hexdigest()


def _sync_folders(folder: Path) -> None:
    for parent, _, _ in os.walk(folder, topdown=False):
        sync_folder(Path(parent))


def _name(unfinished: Path, target: Path) -> None:
    """Give the folder its name. An empty folder of that name is replaced, any other one is not."""
    unfinished.rename(target)
    sync_folder(target.parent)
