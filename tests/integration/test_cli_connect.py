"""`postroom connect`: settings of agent programs, their tokens, and a round trip with what was written."""

import json
import stat
from pathlib import Path

import pytest

from postroom.cli.connect.connect import TOKEN_ID_VARIABLE
from postroom.cli.connect.program_settings import PROGRAMS
from postroom.server.access.registry import Agents
from postroom.server.access.tokens import TokenRegistry
from tests.integration.commandline import isolate, postroom
from tests.smalldisk import fill, small_disk

__all__ = ["small_disk"]


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    isolate(monkeypatch, tmp_path)
    monkeypatch.delenv("CODEX_HOME", raising=False)


def file_of(name: str, home: Path) -> Path:
    return PROGRAMS[name].path({"HOME": str(home)})


def test_program_is_connected_checked_and_disconnected(tmp_path: Path) -> None:
    home, data = tmp_path / "home", tmp_path / "run"
    done = postroom("connect", "codex", "--agent", "planner", "--org", "acme", "--data", data)
    assert (done.code, done.line["agent"], done.line["org"]) == (0, "planner", "acme")
    path = file_of("codex", home)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    entry = PROGRAMS["codex"].read(path.read_text())
    assert entry is not None
    identity = Agents(data).identify(entry.env["POSTROOM_TOKEN"])
    assert identity is not None
    assert (identity.name, identity.org, identity.role) == ("planner", "acme", "agent")
    assert f"+{'[mcp_servers.postroom]'}" in done.errors
    assert entry.env["POSTROOM_TOKEN"] not in done.errors
    [line] = postroom("connect", "list", "--check").lines
    assert line == {
        "program": "codex", "agent": "planner", "org": "acme", "place": str(data), "file": str(path),
        "works": "yes",
    }  # fmt: skip
    removed = postroom("connect", "codex", "--remove")
    assert (removed.code, removed.line["removed"]) == (0, True)
    assert entry.env["POSTROOM_TOKEN"] not in removed.errors
    assert path.read_text() == ""
    assert Agents(data).identify(entry.env["POSTROOM_TOKEN"]) is None
    assert postroom("connect", "list").out == ""
    assert "nothing was changed" in postroom("connect", "codex", "--remove").error


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_connecting_again_replaces_the_entry_and_its_token(name: str, tmp_path: Path) -> None:
    data = tmp_path / "run"
    for agent in ("planner", "builder"):
        assert postroom("connect", name, "--agent", agent, "--data", data).code == 0
    [valid] = TokenRegistry(data).list()
    assert (valid.agent, valid.org) == ("builder", "default")
    [line] = postroom("connect", "list").lines
    assert (line["program"], line["agent"]) == (name, "builder")
    entry = PROGRAMS[name].read(Path(line["file"]).read_text())
    assert entry is not None
    assert entry.env[TOKEN_ID_VARIABLE] == valid.token_id


def test_settings_that_cannot_be_read_are_left_alone_and_get_no_token(tmp_path: Path) -> None:
    path = file_of("gemini", tmp_path / "home")
    path.parent.mkdir(parents=True)
    path.write_text("{ // mine\n}")
    done = postroom("connect", "gemini", "--agent", "planner", "--data", tmp_path / "run")
    assert (done.code, "Nothing was changed" in done.error) == (1, True)
    assert path.read_text() == "{ // mine\n}"
    assert not (tmp_path / "run").exists()


def test_link_to_the_settings_stays_a_link(tmp_path: Path) -> None:
    path, kept = file_of("claude", tmp_path / "home"), tmp_path / "dotfiles.json"
    path.parent.mkdir(parents=True)
    kept.write_text(json.dumps({"projects": {"a": 1}}))
    path.symlink_to(kept)
    assert postroom("connect", "claude", "--agent", "planner", "--data", tmp_path / "run").code == 0
    assert path.is_symlink()
    assert json.loads(kept.read_text())["projects"] == {"a": 1}


def test_check_says_why_an_entry_does_not_work(tmp_path: Path) -> None:
    data = tmp_path / "run"
    postroom("connect", "claude", "--agent", "planner", "--data", data)
    [token] = TokenRegistry(data).list()
    assert postroom("token", "revoke", token.token_id, "--data", data).code == 0
    [line] = postroom("connect", "list", "--check").lines
    assert line["works"] != "yes"


def test_wrong_calls_give_a_one_line_error(tmp_path: Path) -> None:
    assert "--agent NAME" in postroom("connect", "codex", "--data", tmp_path / "run").errors
    assert "--data DIR" in postroom("connect", "codex", "--agent", "planner").errors
    refused = postroom("connect", "codex", "--agent", "a/b", "--data", tmp_path / "run")
    assert (refused.code != 0, file_of("codex", tmp_path / "home").exists()) == (True, False)


def test_settings_on_a_full_disk_are_kept_and_leave_no_valid_token(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(small_disk))
    path = file_of("gemini", small_disk)
    path.parent.mkdir()
    path.write_text('{"theme": "dark"}')
    fill(small_disk)
    done = postroom("connect", "gemini", "--agent", "planner", "--data", tmp_path / "run")
    assert (done.code != 0, "No space left" in done.errors.splitlines()[-1]) == (True, True)
    assert path.read_text() == '{"theme": "dark"}'
    assert TokenRegistry(tmp_path / "run").list() == []


def test_unreadable_settings_of_one_program_hide_no_other(tmp_path: Path) -> None:
    path = file_of("gemini", tmp_path / "home")
    path.parent.mkdir(parents=True)
    path.write_text("{ // mine\n}")
    postroom("connect", "claude", "--agent", "planner", "--data", tmp_path / "run")
    listed = postroom("connect", "list")
    assert ([line["program"] for line in listed.lines], listed.code) == (["claude"], 0)
    assert "not plain JSON" in listed.errors
