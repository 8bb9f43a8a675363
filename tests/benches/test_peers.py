"""The bench beside Celery runs with real brokers, at a size that measures nothing, and leaves no process."""

import json
import tempfile
from pathlib import Path

import bench_peers
import pytest


def test_each_broker_has_figures_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # HOME of RabbitMQ is a folder in it
    found = []
    seen: set[str] = set()
    for figure in bench_peers.figures(bench_peers.SMALL):
        found.append(json.loads(figure.as_json()))
        seen.update(_processes_of(tmp_path))
    assert len({figure["name"] for figure in found}) == 4
    assert all(figure["value"] > 0 and figure["ratio"] > 0 for figure in found)
    assert seen
    assert not _processes_of(tmp_path)


def _processes_of(folder: Path) -> list[str]:
    """Processes whose home is in the folder."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"HOME={folder}/".encode() in environment.read_bytes():
                found.append(environment.parent.name)
        except OSError:
            continue
    return found
