"""Completion, JSON on a terminal, and the form of tables."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.commandline import BIN, isolate, postroom, run_on_terminal

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_names_the_program_and_its_variable(shell: str) -> None:
    result = postroom("completion", shell)
    assert result.code == 0
    assert f"_POSTROOM_COMPLETE={shell}_complete" in result.out
    assert "postroom" in result.out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("postroom doc", ["doctor"]),
        ("postroom token ro", ["rotate"]),
        ("postroom backup --wi", ["--with-keys"]),
        ("postroom token create --role a", ["agent", "admin"]),
    ],
)
def test_bash_completes_commands_options_and_values(words: str, expected: list[str], tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("completion in bash was NOT tested: there is no bash")
    script = tmp_path / "completion.bash"
    script.write_bytes(postroom("completion", "bash").raw)
    count = len(words.split()) - 1
    program = f"""
source {script}
COMP_WORDS=({words}) COMP_CWORD={count}
_postroom_completion postroom
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    environ = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", program],
        capture_output=True, text=True, env=environ, check=True,
    )  # fmt: skip
    assert done.stdout.split() == expected


def test_json_on_a_terminal_is_one_value_a_line_with_times_in_utc() -> None:
    assert postroom("token", "create", "--data", "run", "--role", "admin", "--expires-s", 3600).code == 0
    assert postroom("tasks", "enqueue", "--data", "run", "--agent", "a", "--payload", "1").code == 0
    for command in (["token", "list"], ["tasks", "list"], ["doctor"], ["tasks", "status"]):
        shown = run_on_terminal("postroom", *command, "--data", "run", "--json")
        values = [json.loads(line) for line in shown.out.splitlines()]
        assert values
        for name in ("created", "expires", "created_at"):
            assert all(TIME.fullmatch(value[name]) for value in values if name in value)


def test_numbers_in_a_table_are_aligned_to_the_right() -> None:
    for n in range(10):
        assert postroom("tasks", "enqueue", "--data", "run", "--agent", "a", "--payload", n).code == 0
    environ = {**os.environ, "NO_COLOR": "1"}
    shown = run_on_terminal("postroom", "tasks", "list", "--data", "run", env=environ)
    head, first, *_, last = shown.out.splitlines()
    assert head.startswith("seq  task id")
    assert first.startswith("  1  ")
    assert last.startswith(" 19  ")
    assert len({line.index("QUEUED") for line in shown.out.splitlines()[1:]}) == 1


def test_a_similar_command_is_named() -> None:
    refused = postroom("toekn", "list")
    assert (refused.code, "No such command 'toekn'. Did you mean 'token'?" in refused.error) == (2, True)
    assert "Did you mean" not in postroom("zzz").error


def test_documents_on_a_terminal_have_lines(tmp_path: Path) -> None:
    data = str(tmp_path / "run")
    started = postroom("engine", "goals", "start", "acme", "--goal", "trip", "--data", data)
    assert started.code == 0
    for command in (("engine", "goals", "show", "trip"), ("top", "--once")):
        shown = run_on_terminal("postroom", *command, "--data", data)
        assert len(shown.out.splitlines()) > 2
        assert "\\n" not in shown.out
