"""`postroom connect`: makes agent programs use postroom, and tells which of them do."""

import os
import re
import sys
from collections.abc import Callable
from difflib import unified_diff
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import click

from postroom.cli.connect.program_settings import PROGRAMS, Program, ServerEntry
from postroom.cli.program import TOKEN_VARIABLE
from postroom.cli.render import warn
from postroom.cli.server_options import token_option
from postroom.cli.shell import DATA_DEFAULT, HELP_OPTIONS, Shell, add_json_option, path_option
from postroom.cli.tasks.options import FOLDER
from postroom.cli.tokens.token import open_tokens
from postroom.errors import InvalidSetting, PostroomError

TOKEN_ID_VARIABLE = "POSTROOM_TOKEN_ID"  # noqa: S105 - the name of a variable
ORG_DEFAULT = "default"
CHECK_TIMEOUT_S = 60.0
HIDDEN = "pr_…"
_TOKEN = re.compile(r"pr_[\w-]+")


@click.group(context_settings=HELP_OPTIONS)
def connect() -> None:
    """Make an agent program use postroom over MCP.

    A command for each program makes a token for the agent, and writes the settings of the program with what
    it needs to start our tools in time. The change is shown first.

    \b
    Example:
      postroom connect codex --agent planner --data run
      postroom connect opencode --agent builder --url http://127.0.0.1:8800
      postroom connect list --check
      postroom connect codex --remove
    """


def _add_command(name: str, program: Program) -> None:
    @connect.command(name=name, help=_help(name, program), short_help=f"Connect {program.title}.")
    @click.option("--agent", default="", metavar="NAME", help="The agent that the program is.")
    @click.option("--org", default="", metavar="NAME", help="Its organization.  [default: default]")
    @path_option("--data", metavar="DIR", text=f"The data folder.  {DATA_DEFAULT}", kind=FOLDER)
    @click.option("--url", metavar="URL", help="The address of a running server, instead of --data.")
    @token_option
    @click.option("--remove", is_flag=True, help="Remove the entry and revoke its token.")
    @click.option("--yes", is_flag=True, help="Write without asking, on a terminal too.")
    @click.pass_obj
    def command(
        shell: Shell,
        agent: str,
        org: str,
        data: Path | None,
        url: str | None,
        token: str | None,
        remove: bool,
        yes: bool,
    ) -> None:
        path = program.path(os.environ).resolve()
        if remove:
            _disconnect(shell, name, program, path, token, is_agreed=yes)
        elif not agent:
            raise click.UsageError("say who the program is: --agent NAME")
        else:
            org = org or ORG_DEFAULT
            _connect(shell, name, program, path, agent, org, (data, url, token), is_agreed=yes)


def _help(name: str, program: Program) -> str:
    return (
        f"Connect {program.title} with an agent, or disconnect it.\n\n"
        "The settings of the program get a token of the agent and the command that serves our tools. Start "
        "the program again afterwards. With --url, the token of an admin is needed, in --token or "
        f"${TOKEN_VARIABLE}.\n\n"
        f"\b\nExample:\n  postroom connect {name} --agent planner --org acme --data run\n"
        f"  postroom connect {name} --remove"
    )


for _name, _program in PROGRAMS.items():
    _add_command(_name, _program)


def _connect(
    shell: Shell,
    name: str,
    program: Program,
    path: Path,
    agent: str,
    org: str,
    where: tuple[Path | None, str | None, str | None],
    *,
    is_agreed: bool,
) -> None:
    from postroom.calls.tokens import CreateToken, RevokeToken

    before, (data, url, token) = _text(path), where
    data = shell.default_place(data, url)
    place = ["--url", str(url)] if data is None else ["--data", str(data.absolute())]
    command = [*_own_program(), "mcp", *place, "--agent", agent, "--org", org]

    def after(made: str, token_id: str) -> str:
        entry = ServerEntry(command, {TOKEN_VARIABLE: made, TOKEN_ID_VARIABLE: token_id})
        return str(_in_file(path, partial(program.add, before, entry)))

    old = _in_file(path, partial(program.read, before))
    with open_tokens(shell, data, url, token) as call:
        if not _agreed(path, before, after(HIDDEN, "…"), is_agreed=is_agreed):
            return
        made = call(CreateToken(role="agent", org=org, agent=agent))
        try:
            _write(path, after(made.token, made.token_id))
        except (PostroomError, click.ClickException):  # nobody has the token
            _revoke(shell, partial(call, RevokeToken(token_id=made.token_id)), made.token_id)
            raise
        old_id = old and old.env.get(TOKEN_ID_VARIABLE)
        if old_id:
            _revoke(shell, partial(call, RevokeToken(token_id=old_id)), old_id)
    shell.output.facts(
        {
            "program": name,
            "agent": agent,
            "org": org,
            "file": str(path),
            "token_id": made.token_id,
        },
        f"{program.title} is {agent} of {org} now: {path}. Start it again to have the tools.",
    )


def _disconnect(
    shell: Shell, name: str, program: Program, path: Path, token: str | None, *, is_agreed: bool
) -> None:
    from postroom.calls.tokens import RevokeToken

    before = _text(path)
    entry = _in_file(path, partial(program.read, before))
    if entry is None:
        raise click.ClickException(f"{path} has no entry of postroom: nothing was changed")
    after = _in_file(path, partial(program.remove, before))
    if not _agreed(path, before, after, is_agreed=is_agreed):
        return
    _write(path, after)
    token_id, folder = entry.env.get(TOKEN_ID_VARIABLE), entry.option("--data")
    if token_id:

        def revoke() -> None:
            with open_tokens(shell, Path(folder) if folder else None, entry.option("--url"), token) as call:
                call(RevokeToken(token_id=token_id))

        _revoke(shell, revoke, token_id)
    shell.output.facts(
        {"program": name, "file": str(path), "removed": True},
        f"{program.title} is no longer connected: {path}",
    )


def _revoke(shell: Shell, revoke: Callable[[], Any], token_id: str) -> None:
    """Revoke the token of an entry that is gone. The entry is not put back when that fails."""
    try:
        revoke()
    except (PostroomError, click.UsageError) as error:
        warn(shell.program, f"warning: the token {token_id} is still valid: {error}")


# ---- looking -----------------------------------------------------------------------------------------


@connect.command(name="list")
@click.option("--check", is_flag=True, help="Start our tools as the program would, and call one.")
@click.pass_obj
def list_programs(shell: Shell, check: bool) -> None:
    """List the agent programs of this user and who they are.

    \b
    Example:
      postroom connect list
      postroom connect list --check
    """
    rows = []
    for name, program in PROGRAMS.items():
        path = program.path(os.environ)
        try:
            entry = _in_file(path, partial(program.read, _text(path)))
        except click.ClickException as error:  # the other programs are listed all the same
            warn(shell.program, f"warning: {error.message}")
            continue
        if entry is not None:
            works = {"works": _checked(entry) or "yes"} if check else {}
            rows.append({
                "program": name, "agent": entry.option("--agent"), "org": entry.option("--org"),
                "place": entry.option("--data") or entry.option("--url"), "file": str(path), **works,
            })  # fmt: skip
    columns = ["program", "agent", "org", "place", "file", *(["works"] if check else [])]
    shell.output.rows(columns, rows, empty="no agent program is connected")


def _checked(entry: ServerEntry) -> str:
    """Why a round trip with our tools fails; empty when it works."""
    import asyncio

    try:
        from mcp import Client, StdioServerParameters, stdio_client
    except ModuleNotFoundError as error:
        missing = f"a check needs {error.name}, which is not installed: pip install 'postroom[mcp,server]'"
        raise click.ClickException(missing) from None
    command, *arguments = entry.command

    async def call(nowhere: TextIO) -> str:
        started = StdioServerParameters(command=command, args=arguments, env={**os.environ, **entry.env})
        async with asyncio.timeout(CHECK_TIMEOUT_S), Client(stdio_client(started, errlog=nowhere)) as client:
            answer = await client.call_tool("who_is_there", {})
        return str(answer.content[0].text) if answer.is_error else ""  # type: ignore[union-attr]

    try:
        with Path(os.devnull).open("w") as nowhere:
            return asyncio.run(call(nowhere))
    except Exception as error:  # noqa: BLE001 - whatever the program of the entry does
        return f"no answer: {type(error).__name__}"


# ---- files -------------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()  # with its ends of lines
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{path} cannot be read: {error}") from None


def _in_file(path: Path, change: Callable[[], Any]) -> Any:
    try:
        return change()
    except InvalidSetting as error:
        raise click.ClickException(f"{path}: {error}. Nothing was changed") from None


def _write(path: Path, text: str) -> None:
    from postroom.system.atomic import replace_file

    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise click.ClickException(f"{path.parent} cannot be made: {error.strerror}") from None
    replace_file(path, text.encode(), "group")


def _agreed(path: Path, before: str, after: str, *, is_agreed: bool) -> bool:
    """Show a change on stderr. On a terminal, the user is asked."""
    lines = unified_diff(before.splitlines(), after.splitlines(), str(path), str(path), lineterm="", n=2)
    for line in lines:
        click.echo(_TOKEN.sub(HIDDEN, line), err=True)
    if is_agreed or not sys.stdin.isatty():
        return True
    return click.confirm("Write this?", err=True)


def _own_program() -> list[str]:
    """The command that starts postroom, whatever the PATH of the agent program is."""
    script = Path(sys.executable).with_name("postroom")
    return [str(script)] if script.exists() else [sys.executable, "-m", "postroom.cli.main"]


add_json_option(connect)
