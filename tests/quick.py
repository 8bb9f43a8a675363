"""A folder in memory, for tests that make thousands of small files. Elsewhere it is an ordinary one."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_MEMORY = "/dev/shm"  # noqa: S108 - only private folders are made in it
QUICK = _MEMORY if os.access(_MEMORY, os.W_OK) else None


@pytest.fixture
def quick_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="postroom-", dir=QUICK) as folder:
        yield Path(folder)
