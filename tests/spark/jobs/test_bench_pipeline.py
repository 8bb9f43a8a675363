"""The parts of the bench of the pipeline run, at a size that measures nothing, and yield whole figures.

Left out are those that measure commands, as each of their takes starts a JVM, and `growth`, which is only
three runs.
"""

import json
from pathlib import Path

import bench_pipeline
import pytest
from pipelinebench import histories
from pyspark.sql import SparkSession

from postroom.pipeline.ingest.segments import SegmentStream

LEFT_OUT = {"cold", "answer", "small", "growth"}
EVENTS = 300


@pytest.fixture(scope="module")
def bench(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> bench_pipeline.Bench:
    """Its histories and its tables are made once, without gold tables."""
    folder, scale = tmp_path_factory.mktemp("bench"), EVENTS / bench_pipeline.MILLION
    return bench_pipeline.Bench(
        folder, events=EVENTS, scale=scale, batches=1, repeats=1, spark=spark, gold={}
    )


@pytest.mark.parametrize("part", sorted(bench_pipeline.PARTS.keys() - LEFT_OUT))
def test_part_yields_figures_with_a_value_and_a_verdict(
    bench: bench_pipeline.Bench, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_pipeline, "DRIVER_DAYS", (1,))
    found = [json.loads(figure.as_json()) for figure in bench_pipeline.PARTS[part](bench)]
    assert found
    for figure in found:
        assert figure["value"] > 0
        assert isinstance(figure["ok"], bool) == (figure["goal"] is not None)


def test_pieces_of_a_history_are_sealed_segments_of_all_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = histories.history(tmp_path, EVENTS)
    whole = b"".join((events / segment.name).read_bytes() for segment in SegmentStream(events).segments())
    monkeypatch.setattr(histories, "SEGMENT_BYTES", len(whole) // 5)
    made = histories.pieces(events, tmp_path / "pieces", 3)
    assert [len(piece.segments) for piece in made] == [2, 2, 2]
    pending = SegmentStream(tmp_path / "pieces").pending_after(-1)
    assert [segment.number for segment in pending.ready] == [1, 2, 3, 4, 5, 6]
    assert (pending.waiting, pending.gaps) == ([], [])
    assert b"".join(path.read_bytes() for piece in made for path in piece.segments) == whole
    assert sum(piece.lines for piece in made) == whole.count(b"\n")
