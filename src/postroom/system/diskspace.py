"""Free space on a disk."""

import os
from pathlib import Path

FREE_BYTES_MIN = 512 * 1024 * 1024
FREE_SHARE_MIN = 20  # on a small disk the reserve is a twentieth of it


def free_bytes(folder: Path) -> int:
    """Bytes that may be written to the disk of a folder before its reserve is used; may be negative."""
    found = os.statvfs(folder)
    reserve = min(FREE_BYTES_MIN, found.f_blocks * found.f_frsize // FREE_SHARE_MIN)
    return found.f_bavail * found.f_frsize - reserve
