"""Every part of the bench of goals runs, at a size that measures nothing, and yields whole figures."""

import json
from pathlib import Path

import bench_goals
import pytest


@pytest.mark.parametrize("part", bench_goals.BENCHES)
def test_part_yields_figures_with_a_value_and_a_verdict(part: str, tmp_path: Path) -> None:
    sizes = bench_goals.Sizes(quick=True)
    found = [json.loads(figure.as_json()) for figure in bench_goals.BENCHES[part](tmp_path, sizes)]
    assert found
    for figure in found:
        assert figure["value"] > 0
        assert isinstance(figure["ok"], bool) == (figure["goal"] is not None)
