"""The generated pages are what the code says now, and every command explains itself."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from postroom.cli import main, zosmq

ROOT = Path(__file__).resolve().parents[2]


def test_the_reference_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "tools/gen_reference.py", "--check"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def every_command(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from every_command(below, f"{path} {name}")


COMMANDS = dict([*every_command(main.cli, "postroom"), *every_command(zosmq.cli, "zos-mq")])


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_has_a_help_with_an_example_of_itself(path: str) -> None:
    text = COMMANDS[path].help or ""
    first_sentence = text.partition("\n")[0]
    assert first_sentence.endswith(".")
    assert text.partition("Example:")[2].count(path) >= 1


@pytest.mark.parametrize("path", COMMANDS)
def test_every_option_says_what_it_is_for(path: str) -> None:
    for parameter in COMMANDS[path].params:
        assert isinstance(parameter, click.Option)
        assert parameter.help, f"{path} {parameter.opts}"


@pytest.mark.parametrize("path", COMMANDS)
def test_the_reference_has_a_section_for_every_command(path: str) -> None:
    assert f"\n## {path}\n" in (ROOT / "docs" / "reference" / "cli.md").read_text("utf-8")
