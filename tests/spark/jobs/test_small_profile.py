"""Which session a command chooses by itself. No JVM starts here."""

from pathlib import Path
from typing import Any

import pytest

from postroom.cli.main import PROGRAM, cli
from postroom.cli.shell import run
from postroom.errors import Unavailable
from postroom.pipeline import paths
from postroom.pipeline.spark import session
from postroom.pipeline.spark.session import SMALL_SETTINGS
from tests.spark.stories import happened, write_segment


@pytest.mark.parametrize(
    ("words", "is_small"),
    [(("run",), True), (("backfill",), True), (("stream",), True), (("stream", "--every", "60"), False)],
)
def test_a_command_chooses_the_small_profile_for_little_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], is_small: bool
) -> None:
    """An endless stream grows, so it is never small."""
    assert (chosen(tmp_path, monkeypatch, words).items() >= SMALL_SETTINGS.items()) == is_small


@pytest.mark.parametrize("command", ["run", "backfill", "stream"])
def test_a_command_compiles_code_for_much_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(paths, "SMALL_BYTES", 10)
    settings = chosen(tmp_path, monkeypatch, (command,))
    assert (settings["spark.sql.adaptive.enabled"], "spark.sql.codegen.wholeStage" in settings) == (
        "true",
        False,
    )


def chosen(folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> dict[str, str]:
    """The settings of the session that a command asks for over one segment."""
    write_segment(folder / "events", 1, [happened("s", 1, "m")])
    asked: dict[str, str] = {}
    settings = session.settings

    def noted(*args: Any, **options: Any) -> dict[str, str]:
        asked.update(settings(*args, **options))
        raise Unavailable("no session here")

    monkeypatch.setattr(session, "settings", noted)
    places = ["--events", str(folder / "events"), "--tables", str(folder / "tables")]
    assert run(cli, PROGRAM, ["pipeline", *words, *places]) == 1
    return asked
