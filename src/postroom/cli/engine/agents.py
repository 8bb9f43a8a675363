"""For operators: the agents of the global queue, their health, and what waits for what."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from postroom.cli.engine.options import org_option, where_options
from postroom.cli.engine.places import open_place, plain
from postroom.cli.shell import Shell

COLUMNS = [
    "organization",
    "agent",
    "health",
    "silent_s",
    "waits_for",
    "waited_for_by",
    "coordinator",
    "epoch",
]
BOUNCE_COLUMNS = ["key", "created_by", "agent_id", "message_id", "reason", "bounced_at"]


@click.command()
@where_options
@org_option
@click.pass_obj
def agents(shell: Shell, data: Path | None, url: str | None, token: str | None, org_id: str | None) -> None:
    """Show the registered agents.

    For each agent: its health (registered, alive, suspect, dead), for how long it was not heard of, how many
    of its requests are open, how many messages wait in its inbox, and its coordinator. As JSON, one line for
    each agent with the ids of the requests and messages.

    \b
    Example:
      postroom engine agents --data run
      postroom engine agents --data run --org acme
      postroom engine agents --url http://127.0.0.1:8800 | jq .health
    """
    with open_place(shell, data, url, token) as place:
        found = plain(place.agents(org_id))
    if shell.output.readable:
        shell.output.rows(COLUMNS, [_row(info) for info in found], empty="there is no registered agent")
        return
    for info in found:
        shell.output.json_line(info)


def _row(info: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "organization": info["org_id"],
        "agent": info["agent_id"],
        "health": info["health"],
        "silent_s": f"{info['silent_s']:.1f}",
        "waits_for": len(info["waits_for"]),
        "waited_for_by": len(info["waited_for_by"]),
        "coordinator": info["coordinator"],
        "epoch": info["epoch"],
    }


@click.command()
@where_options
@org_option
@click.option(
    "--by", "created_by", metavar="TYPE:ID", help="Only of this creator, such as user:ada or system:billing."
)
@click.option(
    "--done",
    "keys",
    metavar="KEY",
    multiple=True,
    help="Remove the bounce with this key, because its creator has it. May be repeated.",
)
@click.pass_obj
def bounces(
    shell: Shell,
    data: Path | None,
    url: str | None,
    token: str | None,
    org_id: str | None,
    created_by: str | None,
    keys: tuple[str, ...],
) -> None:
    """Show answers that no agent fetched, for the users and systems that created the messages.

    Bounces of agents are in their inboxes. The oldest 100 are shown, as JSON with their answers. With --done,
    bounces are removed, and the keys that were there are printed.

    \b
    Example:
      postroom engine bounces --data run --by user:ada
      postroom engine bounces --data run --done acme/17
    """
    with open_place(shell, data, url, token) as place:
        if keys:
            for key in place.bounces.done(*keys):
                shell.output.facts({"key": key}, key)
            return
        found = plain(place.bounces.list(org_id, created_by=created_by))
    if shell.output.readable:
        shell.output.rows(BOUNCE_COLUMNS, [_bounce_row(one) for one in found], empty="there is no bounce")
        return
    for one in found:
        shell.output.json_line(one)


def _bounce_row(bounce: Mapping[str, Any]) -> dict[str, Any]:
    creator = f"{bounce['created_by']['type']}:{bounce['created_by']['id']}"
    return {**{name: bounce[name] for name in BOUNCE_COLUMNS if name in bounce}, "created_by": creator}


COMMANDS = (agents, bounces)
