"""The bench beside Celery runs with real brokers, at a size that measures nothing, and leaves no process."""

import json
from pathlib import Path

import bench_peers
import figures as shared
import pytest
from peersbench import brokers


def test_each_broker_has_a_figure_for_sending_and_one_for_working(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "REPEATS", 1)
    found = [json.loads(figure.as_json()) for figure in bench_peers.figures(bench_peers.SMALL)]
    assert len({figure["name"] for figure in found}) == 4
    assert all(figure["value"] > 0 and figure["ratio"] > 0 for figure in found)


def test_a_broker_ends_with_its_block_and_all_its_processes(tmp_path: Path) -> None:
    with brokers.rabbitmq(tmp_path):
        assert _processes_of(tmp_path)
    assert not _processes_of(tmp_path)


def _processes_of(folder: Path) -> list[str]:
    """Processes whose home is the folder."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"HOME={folder}\0".encode() in environment.read_bytes():
                found.append(environment.parent.name)
        except OSError:
            continue
    return found
