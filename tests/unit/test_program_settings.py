"""How postroom is entered into the settings of agent programs, and removed again."""

import tomllib

import pytest

from postroom.cli.connect.program_settings import PROGRAMS, ServerEntry
from postroom.errors import InvalidSetting

ENTRY = ServerEntry(
    ["/opt/post room/postroom", "mcp", "--data", 'a "b" \\ ü\x7f', "--agent", "planner"],
    {"POSTROOM_TOKEN": "pr_secret"},
)
CODEX = '# my settings\nmodel = "x"  # the best\n\n[tools]\nweb = true\n'
JSON = '{\n    "theme": "dark",\n    "name": "ü"\n}\n'
BEFORE = {"codex": CODEX, **dict.fromkeys(("claude", "gemini", "opencode"), JSON)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_entry_is_added_read_replaced_and_removed(name: str) -> None:
    program, before = PROGRAMS[name], BEFORE[name]
    assert program.read(before) is None
    added = program.add(before, ENTRY)
    found = program.read(added)
    assert found is not None
    assert (list(found.command), dict(found.env)) == (list(ENTRY.command), dict(ENTRY.env))
    assert (found.option("--agent"), found.option("--url")) == ("planner", None)
    other = ServerEntry(["postroom", "mcp"], {})
    again = program.read(program.add(added, other))
    assert again is not None
    assert list(again.command) == list(other.command)
    assert program.remove(added) == before


@pytest.mark.parametrize("name", PROGRAMS)
def test_file_that_does_not_exist_is_made(name: str) -> None:
    program = PROGRAMS[name]
    assert program.read(program.add("", ENTRY)) is not None


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("codex", "[mcp_servers.postroom]\ncommand = 'mine'\n", "written by somebody else"),
        ("codex", "model = \n", "not TOML"),
        ("gemini", '{"theme": "dark" // comment\n}', "not plain JSON"),
        ("gemini", "[]", "not an object"),
        ("opencode", '{"mcp": []}', "not an object"),
        ("gemini", '{"mcpServers": {"postroom": 5}}', "not an object"),
        ("gemini", '{"mcpServers": {"postroom": {"args": 7}}}', "Expected `array`"),
        ("codex", "mcp_servers = 5\n", "not an object"),
        ("codex", "[mcp_servers.postroom]\nargs = 7\n", "Expected `array`"),
        ("claude", '{"a":' * 100_000, "not plain JSON"),
    ],
)
def test_file_that_cannot_be_changed_safely_is_refused(name: str, text: str, words: str) -> None:
    with pytest.raises(InvalidSetting, match=words):
        PROGRAMS[name].add(text, ENTRY)
    with pytest.raises(InvalidSetting, match=words):
        PROGRAMS[name].remove(text)


def test_codex_entry_that_would_break_the_file_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="cannot follow mcp_servers as it is written"):
        PROGRAMS["codex"].add("mcp_servers = {}\n", ENTRY)


def test_codex_keeps_what_stands_between_a_lost_comment_and_the_entry() -> None:
    codex = PROGRAMS["codex"]
    lost = "# Written by `postroom connect`, which also removes it.\n[mine]\nx = 1\n"
    assert codex.remove(codex.add(lost, ENTRY)) == lost


def test_codex_is_told_to_wait_for_the_tools() -> None:
    settings = tomllib.loads(PROGRAMS["codex"].add(CODEX, ENTRY))
    server = settings["mcp_servers"]["postroom"]
    assert (server["required"], server["startup_timeout_sec"]) == (True, 30)
    assert settings["tools"] == {"web": True}


def test_variables_of_the_programs_name_their_files() -> None:
    environ = {"HOME": "/h", "CODEX_HOME": "/c", "XDG_CONFIG_HOME": "/x"}
    assert [str(PROGRAMS[name].path(environ)) for name in ("codex", "opencode", "gemini", "claude")] == [
        "/c/config.toml",
        "/x/opencode/opencode.json",
        "/h/.gemini/settings.json",
        "/h/.claude.json",
    ]
