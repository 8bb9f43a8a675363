"""The log of a start: held back until all parts are ready, so that a start that fails is one sentence."""

import json
import sys
from pathlib import Path

import pytest

from postroom.errors import Unavailable
from postroom.server.up.parts import PartCommand, SupervisedParts


def parts_of(data: Path, program: str) -> SupervisedParts:
    return SupervisedParts(data, [PartCommand("http", (sys.executable, "-c", program))], stop_grace_s=5.0)


def started(parts: SupervisedParts) -> None:
    try:
        parts.start(lambda: False)
    finally:
        parts.stop()


@pytest.mark.parametrize(
    ("lines", "logged"),
    [
        (["postroom: the port is in use"], []),
        (["Traceback", "postroom: the port is in use"], ["Traceback", "postroom: the port is in use"]),
    ],
)
def test_a_failed_start_prints_the_log_only_when_it_says_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[str], logged: list[str]
) -> None:
    program = f"import sys; sys.exit({chr(10).join(lines)!r})"
    with pytest.raises(Unavailable, match="the part http cannot start: the port is in use"):
        started(parts_of(tmp_path, program))
    log = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["text"] for line in log if line["event"] == "log"] == logged


def test_the_log_of_a_start_follows_when_all_parts_are_ready(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = (
        "import sys; print('note', file=sys.stderr, flush=True); print('{}', flush=True); sys.stdin.read()"
    )
    started(parts_of(tmp_path, program))
    assert json.loads(capsys.readouterr().err.splitlines()[0])["text"] == "note"
