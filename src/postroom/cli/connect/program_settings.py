"""The settings files of agent programs, and how postroom is entered into them.

Rule 1: everything else in a file stays as it is. A file that cannot be read is not written.
"""

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from postroom.errors import InvalidSetting

SERVER = "postroom"  # the name of the MCP server in every program
START_TIMEOUT_S = 30
CALL_TIMEOUT_S = 60  # above the longest wait of a tool
_BEGIN = "# Written by `postroom connect`, which also removes it."
_END = "# End of postroom."
_BLOCK = re.compile(rf"\n*{re.escape(_BEGIN)}\n(?:(?!{re.escape(_BEGIN)}).)*?{re.escape(_END)}\n", re.DOTALL)


class ServerEntry(NamedTuple):
    """How an agent program starts our MCP server."""

    command: Sequence[str]
    env: Mapping[str, str]

    def option(self, name: str) -> str | None:
        """The value of an option of the command; None when it is not given."""
        found = [value for given, value in zip(self.command, self.command[1:], strict=False) if given == name]
        return found[0] if found else None


class Program(NamedTuple):
    """An agent program: where its settings are, and how an entry is read, added and removed there."""

    title: str
    path: Callable[[Mapping[str, str]], Path]
    """The settings file, found by the variables of the environment."""
    read: Callable[[str], ServerEntry | None]
    add: Callable[[str, ServerEntry], str]
    remove: Callable[[str], str]


class _WrittenEntry(msgspec.Struct):
    """An entry of an MCP server as any of the programs writes it."""

    command: str | list[str] = ""
    args: list[str] = []
    env: dict[str, str] = {}
    environment: dict[str, str] = {}


def _entry_of(settings: Any, section: str) -> ServerEntry | None:
    """Our entry in a section of settings that somebody else may have written."""
    try:
        servers = msgspec.convert(settings, dict[str, Any]).get(section, {})
        found = msgspec.convert(servers, dict[str, Any]).get(SERVER)
        entry = None if found is None else msgspec.convert(found, _WrittenEntry)
    except msgspec.ValidationError as error:
        raise InvalidSetting(
            f"the settings are not an object with an object {section!r} of MCP servers: {error}"
        ) from None
    if entry is None:
        return None
    command = [entry.command] if isinstance(entry.command, str) else entry.command
    return ServerEntry([*command, *entry.args], entry.env or entry.environment)


def _home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HOME") or Path.home())


# ---- Codex, whose settings are TOML ------------------------------------------------------------------


def _read_toml(text: str) -> ServerEntry | None:
    try:
        return _entry_of(tomllib.loads(text), "mcp_servers")
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidSetting(f"the settings are not TOML: {error}") from None


def _add_toml(text: str, entry: ServerEntry) -> str:
    rest = _remove_toml(text)
    command, *arguments = entry.command
    env = ", ".join(f"{name} = {_string(value)}" for name, value in entry.env.items())
    lines = [
        _BEGIN,
        f"[mcp_servers.{SERVER}]",
        f"command = {_string(command)}",
        f"args = [{', '.join(map(_string, arguments))}]",
        f"env = {{ {env} }}",
        "required = true  # else the first turn begins without the tools",
        f"startup_timeout_sec = {START_TIMEOUT_S}",
        f"tool_timeout_sec = {CALL_TIMEOUT_S}",
        _END,
    ]
    added = f"{rest.rstrip()}\n\n".lstrip() + "\n".join(lines) + "\n"
    try:
        _read_toml(added)
    except InvalidSetting:  # such as an inline table, which cannot be extended
        raise InvalidSetting(f"[mcp_servers.{SERVER}] cannot follow mcp_servers as it is written") from None
    return added


def _string(text: str) -> str:
    """A basic string of TOML, which JSON's strings are but for one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _remove_toml(text: str) -> str:
    rest = _BLOCK.sub("\n", text).lstrip("\n")
    if _read_toml(rest) is not None:
        raise InvalidSetting(f"[mcp_servers.{SERVER}] was written by somebody else: remove it yourself")
    return rest


# ---- programs whose settings are JSON ----------------------------------------------------------------


def _json_program(
    title: str, path: Callable[[Mapping[str, str]], Path], section: str, shape: Callable[[ServerEntry], Any]
) -> Program:
    """A program whose file has MCP servers under `section`; `shape` is how it writes one."""

    def parsed(text: str) -> dict[str, Any]:
        try:
            found = json.loads(text or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidSetting(f"the settings are not plain JSON: {error}") from None
        _entry_of(found, section)
        return cast("dict[str, Any]", found)

    def read(text: str) -> ServerEntry | None:
        return _entry_of(parsed(text), section)

    def add(text: str, entry: ServerEntry) -> str:
        settings = parsed(text)
        settings[section] = settings.get(section, {}) | {SERVER: shape(entry)}
        return _printed(settings, text)

    def remove(text: str) -> str:
        settings = parsed(text)
        settings.get(section, {}).pop(SERVER, None)
        if not settings.get(section, True):
            del settings[section]
        return _printed(settings, text)

    return Program(title, path, read, add, remove)


def _printed(settings: dict[str, Any], before: str) -> str:
    indent = re.search(r"^\{\r?\n([ \t]+)", before)
    return json.dumps(settings, indent=indent[1] if indent else 2, ensure_ascii=False) + "\n"


def _stdio(entry: ServerEntry) -> dict[str, Any]:
    command, *arguments = entry.command
    return {"command": command, "args": arguments, "env": dict(entry.env)}


PROGRAMS: Mapping[str, Program] = {
    "claude": _json_program(
        "Claude Code",
        lambda environ: _home(environ) / ".claude.json",
        "mcpServers",
        lambda entry: {"type": "stdio", **_stdio(entry)},
    ),
    "codex": Program(
        "Codex",
        lambda environ: Path(environ.get("CODEX_HOME") or _home(environ) / ".codex") / "config.toml",
        _read_toml,
        _add_toml,
        _remove_toml,
    ),
    "gemini": _json_program(
        "Gemini CLI",
        lambda environ: _home(environ) / ".gemini" / "settings.json",
        "mcpServers",
        lambda entry: {**_stdio(entry), "timeout": 1_000 * CALL_TIMEOUT_S},
    ),
    "opencode": _json_program(
        "opencode",
        lambda environ: (
            Path(environ.get("XDG_CONFIG_HOME") or _home(environ) / ".config") / "opencode" / "opencode.json"
        ),
        "mcp",
        lambda entry: {
            "type": "local",
            "command": list(entry.command),
            "environment": dict(entry.env),
            "enabled": True,
            "timeout": 1_000 * CALL_TIMEOUT_S,
        },
    ),
}
