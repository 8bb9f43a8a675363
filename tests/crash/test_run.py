"""The runner of the long scenarios accepts no job without figures."""

import sys
import threading
from pathlib import Path

import pytest

from tests.crash import run, workers

FIGURES = '{"tally": {"acknowledged": 7, "facts": {"kills": 25}}}'


@pytest.mark.parametrize(
    ("said", "is_ok", "sentence"),
    [
        (['{"done": 25}', FIGURES], True, ""),
        (['{"done": 0}', '{"done": 25}', FIGURES], True, ""),  # a round without a kill
        (['{"done": 25}', "{}"], False, "the job ended without figures"),
        (['{"done": 25}'], False, "the job ended with exit code 0: "),
    ],
)
def test_a_job_counts_when_it_has_printed_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str], is_ok: bool, sentence: str
) -> None:
    job = tmp_path / "job"
    job.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in said))
    job.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(job))
    board = run.Board([run.Job("kills-pipeline", 0, 25, 1)], seed=1)
    board.work(processes=1)
    result = board.results["kills-pipeline"]
    assert (result.ok, result.error) == (is_ok, sentence)
    assert result.tally.facts == ({"kills": 25} if is_ok else {})


def test_a_worker_without_progress_shows_its_stacks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def hang(report: workers.Report) -> None:
        report("began")
        threading.Event().wait()

    with workers.Crew() as crew:
        worker = crew.start("idler", hang)
        crew.await_that(lambda: worker.lines == ["began"], "the start of the worker")
        monkeypatch.setattr(workers, "STUCK_S", 0.1)
        with pytest.raises(workers.WorkerFailed, match="idler made no progress"):
            crew.await_lines(worker, 1)
    assert "in hang" in capfd.readouterr().err
