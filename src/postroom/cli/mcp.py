"""`postroom mcp`: an MCP server over stdin and stdout, for agent programs."""

import os
from pathlib import Path
from typing import Any

import click

from postroom.cli.program import TOKEN_VARIABLE
from postroom.cli.shell import DATA_DEFAULT, HELP_OPTIONS, Shell, path_option
from postroom.cli.tasks.options import FOLDER, starting_folder


@click.command(context_settings=HELP_OPTIONS)
@path_option(
    "--data", metavar="DIR", kind=FOLDER,
    text=f"A data folder. It needs no server and no token.  {DATA_DEFAULT}",
)  # fmt: skip
@click.option("--url", metavar="URL", help="The address of a server, instead of --data.")
@click.option(
    "--token",
    metavar="TOKEN",
    help=f"Who you are. Needed with --url.  [default: ${TOKEN_VARIABLE}]",
)
@click.option(
    "--agent", default="", metavar="NAME", help="The agent that you act as, unless the token names one."
)
@click.option(
    "--org", default="", metavar="NAME",
    help="The organization of that agent. With --data and without a token, you see no other organization.  "
    "[default: default for an agent, all for an operator]",
)  # fmt: skip
@click.option(
    "--role",
    type=click.Choice(["agent", "operator", "admin"]),
    default="operator",
    show_default=True,
    help="Which tools exist, with --data and without a token.",
)
@click.option(
    "--may-send-to", multiple=True, metavar="NAME",
    help="An agent that you may send tasks to, with --data and without a token. May be repeated. Without "
    "--org, an operator may send to all. Example: --may-send-to builder",
)  # fmt: skip
@click.pass_obj
def mcp(
    shell: Shell,
    data: Path | None,
    url: str | None,
    token: str | None,
    agent: str,
    org: str,
    role: Any,
    may_send_to: tuple[str, ...],
) -> None:
    """Serve the tools of postroom to an agent program, over stdin and stdout.

    The agent program starts this command by itself: docs/howto/mcp.md has its settings. The tools send and
    read messages of agents, work on tasks, post to buses and use the global queue. A running `postroom up`
    has the same tools over HTTP at /mcp. A folder that is absent or empty becomes a data folder.

    \b
    Example:
      postroom mcp --data run --agent planner --org acme --role agent --may-send-to builder
      POSTROOM_TOKEN=pr_... postroom mcp --url http://127.0.0.1:8800
    """
    data = shell.default_place(data, url)
    if (data is None) == (url is None):
        raise click.UsageError("say where the messages are: --data DIR or --url URL, one of them")
    token = token or os.environ.get(TOKEN_VARIABLE, "")
    if url is not None and not token:
        raise click.UsageError(f"--url needs a token: --token TOKEN, or ${TOKEN_VARIABLE}")
    if role == "agent" and data is not None and not (token or agent):
        raise click.UsageError("--role agent needs --agent NAME, the agent that you act as")
    from postroom.mcp.handshake import greet

    first = greet()  # before the long imports
    try:
        from postroom.mcp.stdio import owner_identity, serve_folder, serve_url
    except ModuleNotFoundError as error:
        missing = f"MCP needs {error.name}, which is not installed: pip install 'postroom[mcp,server]'"
        raise click.ClickException(missing) from None
    if url is not None:
        serve_url(url, token, agent, org, first)
    elif data is not None:
        from postroom.system.atomic import make_folder

        owner = owner_identity(agent, org, role, may_send_to)
        with starting_folder(shell, data):
            make_folder(data, "os")
        serve_folder(data, token, agent, org, owner, first, shell.settings.up.store)
