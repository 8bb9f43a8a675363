"""Every bench of `Tasks` runs, at a size that measures nothing, and yields whole figures."""

import json
from collections.abc import Iterator
from pathlib import Path

import bench_tasks
import pytest

FIELDS = ["name", "value", "unit", "against", "ratio", "goal", "ok"]


def figures(bench: bench_tasks.Bench, folder: Path) -> Iterator[dict[str, object]]:
    for figure in bench(folder, bench_tasks.SMALL):
        yield json.loads(figure.as_json())


@pytest.mark.parametrize("bench", bench_tasks.BENCHES, ids=lambda bench: bench.__name__)
def test_a_bench_yields_figures_with_a_value_and_a_verdict(bench: bench_tasks.Bench, tmp_path: Path) -> None:
    found = list(figures(bench, tmp_path))
    assert found
    for figure in found:
        assert list(figure) == FIELDS
        assert isinstance(figure["value"], float)
        assert figure["value"] > 0
        assert isinstance(figure["ok"], bool) == (figure["goal"] is not None)


def test_every_bench_has_a_name_of_its_own_and_each_peer_is_measured(tmp_path: Path) -> None:
    names = [str(figure["name"]) for figure in figures(bench_tasks.produce, tmp_path)]
    assert len(set(names)) == len(names)
    for peer in ("huey", "litequeue", "persist-queue"):
        assert any(peer in name for name in names)


def test_a_consumer_handles_its_number_of_tasks_and_stops(tmp_path: Path) -> None:
    ours = bench_tasks.Ours(tmp_path, batch=3)
    ours.fill(7)
    assert ours.consume(7, float("inf")) == 7
    assert ours.consume(1, 0.0) == 0
    ours.close()
