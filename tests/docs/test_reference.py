"""The generated pages match the code, and every command explains itself."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click
import pytest

from postroom.cli import main
from postroom.cli.queue import zosmq
from postroom.contracts.tasks.tasks import Tasks
from postroom.core.lifecycle.lifecycle import TRANSITIONS
from postroom.message import EventKind, State
from postroom.server.routes.table import ROUTES

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"


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
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from every_command(below, f"{path} {name}")


SPEAK_FOR_THEMSELVES = (
    "NAME", "TASK_ID", "FILE", "MESSAGE", "DIR", "QUERY", "[FOLDER]", "MAIL_ID", "MSG_ID", "MESSAGE_ID",
    "[MESSAGE_ID]...", "GOAL_ID", "CHECKPOINT_ID", "NODE_ID", "JSON", "[JSON]", "DECISION_ID", "CHOICE",
    "RULE_ID", "ORGANIZATION", "TOKEN_ID", "FROM", "[TO]", "URL", "[bash|zsh|fish]", "[P1 P2 P3]",
)  # fmt: skip
COMMANDS = dict([*every_command(main.cli, "postroom"), *every_command(zosmq.cli, "zos-mq")])


@pytest.mark.parametrize("path", COMMANDS)
def test_the_help_of_every_command_has_an_example(path: str) -> None:
    text = COMMANDS[path].help or ""
    first_sentence = text.partition("\n")[0]
    assert first_sentence.endswith(".")
    assert text.partition("Example:")[2].count(path) >= 1


@pytest.mark.parametrize("path", COMMANDS)
def test_every_option_has_a_help_text(path: str) -> None:
    for parameter in COMMANDS[path].params:
        if isinstance(parameter, click.Argument):
            assert parameter.metavar in SPEAK_FOR_THEMSELVES, f"{path} {parameter.name}"
            continue
        assert isinstance(parameter, click.Option)
        assert parameter.help, f"{path} {parameter.opts}"


PERMISSIONS = [
    (path, option)
    for path, command in COMMANDS.items()
    for parameter in command.params
    for option in parameter.opts
    if option.startswith(("--may-", "--only-"))
]


@pytest.mark.parametrize(("path", "option"), PERMISSIONS)
def test_every_permission_has_an_example(path: str, option: str) -> None:
    command = COMMANDS[path]
    [parameter] = [one for one in command.params if option in one.opts]
    assert isinstance(parameter, click.Option)
    assert f"Example: {option} " in (parameter.help or "")
    assert f" {option} " in (command.help or "").partition("Example:")[2]


NOT_JSON = {
    "postroom mcp",  # stdout is the protocol
    "postroom completion",  # a script for a shell
}


def test_every_command_that_prints_results_has_the_option_json() -> None:
    without = {
        path
        for path, command in COMMANDS.items()
        if path.startswith("postroom ")
        and not isinstance(command, click.Group)
        and not any("--json" in parameter.opts for parameter in command.params)
    }
    assert without == NOT_JSON


@pytest.mark.parametrize("path", COMMANDS)
def test_the_reference_has_a_section_for_every_command(path: str) -> None:
    assert f"\n## {path}\n" in (REFERENCE / "cli.md").read_text("utf-8")


def test_the_diagram_has_exactly_the_transitions_of_the_table() -> None:
    text = (REFERENCE / "lifecycle.md").read_text("utf-8")
    drawn = {
        (source, verb, target)
        for source, target, verbs in re.findall(r"^    (\S+) --> (\S+): (.+)$", text, re.MULTILINE)
        for verb in verbs.split(", ")
    }
    assert drawn == {(arrow.source or "[*]", arrow.verb, arrow.target) for arrow in TRANSITIONS}


@pytest.mark.parametrize(("page", "names"), [("lifecycle.md", State), ("events.md", EventKind)])
def test_every_state_and_every_kind_of_event_has_a_row(page: str, names: object) -> None:
    lines = (REFERENCE / page).read_text("utf-8").splitlines()
    for name in get_args(names):
        assert sum(line.startswith(f"| `{name}` | ") for line in lines) >= 1, name


@pytest.mark.parametrize("page", ["lifecycle.md", "events.md"])
def test_the_calls_that_a_page_names_exist(page: str) -> None:
    for name in re.findall(r"`Tasks\.(\w+)", (REFERENCE / page).read_text("utf-8")):
        assert callable(getattr(Tasks, name)), name


def test_every_route_has_a_row() -> None:
    text = (REFERENCE / "http.md").read_text("utf-8")
    for route in (served.route for served in ROUTES):
        assert f"\n| `{route.method} {route.path}` | " in text


def names_in(path: Path) -> set[str]:
    """Top-level functions and classes of a file, and its methods as `Class.method`."""
    tree = ast.parse(path.read_text("utf-8")).body
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    top = [node for node in tree if isinstance(node, kinds)]
    classes = [node for node in top if isinstance(node, ast.ClassDef)]
    methods = {
        f"{found.name}.{node.name}"
        for found in classes
        for node in found.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return {node.name for node in top} | methods


def test_every_step_of_the_architecture_page_names_code_that_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    places = re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", text)
    assert len(places) > 1
    for path, names in places:
        assert set(re.findall(r"[\w.]+", names)) <= names_in(ROOT / "src/postroom" / path), path
    routes = {f"{served.route.method} {served.route.path}" for served in ROUTES}
    assert set(re.findall(r"`((?:GET|POST) /\S*)`", text)) <= routes
