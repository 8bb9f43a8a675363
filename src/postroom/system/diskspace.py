"""How much of a disk is free."""

import os
from pathlib import Path

FREE_BYTES_MIN = 512 * 1024 * 1024
FREE_SHARE_MIN = 20  # on a small disk a twentieth of it is enough


def free_bytes(folder: Path) -> int:
    """Bytes that may still be written on the disk of a folder, beyond the reserve; negative inside it."""
    found = os.statvfs(folder)
    reserve = min(FREE_BYTES_MIN, found.f_blocks * found.f_frsize // FREE_SHARE_MIN)
    return found.f_bavail * found.f_frsize - reserve
