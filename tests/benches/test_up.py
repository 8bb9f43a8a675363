"""Every part of the bench of up runs, at a size that measures nothing, and yields whole figures."""

import json
from pathlib import Path

import bench_up
import pytest


@pytest.mark.parametrize("part", bench_up.BENCHES)
def test_part_yields_figures_with_a_value_and_a_verdict(part: str, tmp_path: Path) -> None:
    figures = bench_up.BENCHES[part](tmp_path, bench_up.QUICK)
    found = [json.loads(figure.as_json()) for figure in figures]
    assert len({figure["name"] for figure in found}) == len(found) > 0
    for figure in found:
        assert figure["value"] > 0
        assert isinstance(figure["ok"], bool) == (figure["goal"] is not None)
