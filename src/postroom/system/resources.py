"""Resources of the machine: open files of this process, and free space of a disk."""

import os
import resource
from contextlib import suppress
from pathlib import Path

FREE_BYTES_MIN = 512 * 1024 * 1024
FREE_SHARE_MIN = 20  # on a small disk the reserve is a twentieth of it


def raise_descriptor_limit(at_most: int) -> int:
    """Raise the soft limit of open files to the hard limit; returns the limit, or `at_most` if lower."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return at_most if soft == resource.RLIM_INFINITY else min(soft, at_most)


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of a folder above the reserve; negative once the reserve is in use."""
    found = os.statvfs(folder)
    reserve = min(FREE_BYTES_MIN, found.f_blocks * found.f_frsize // FREE_SHARE_MIN)
    return found.f_bavail * found.f_frsize - reserve
