"""For operators: the agents of the global queue, their health, and what waits for what."""

from collections.abc import Mapping
from typing import Any

import click

from postroom.cli.engine.options import org_option
from postroom.cli.engine.places import Place, on_place, plain
from postroom.cli.shell import Shell

COLUMNS = [
    "organization", "agent", "health", "silent_s", "waits_for", "waited_for_by", "coordinator", "epoch",
]  # fmt: skip
BOUNCE_COLUMNS = ["key", "created_by", "agent_id", "message_id", "reason", "bounced_at"]


@click.command()
@on_place
@org_option
def agents(shell: Shell, place: Place, org_id: str | None) -> None:
    """Show the registered agents.

    For each agent: its health (registered, alive, suspect, dead, asleep), for how long it was not heard of,
    how many of its requests are open, how many messages wait in its inbox, and its coordinator. As JSON, one
    line for each agent with the ids of the requests and messages.

    \b
    Example:
      postroom engine agents --data run
      postroom engine agents --data run --org acme
      postroom engine agents --url http://127.0.0.1:8800 | jq .health
    """
    found = plain(place.agents(org_id))
    rows = [_row(info) for info in found] if shell.output.readable else found
    shell.output.rows(COLUMNS, rows, empty="there is no registered agent")


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
@on_place
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
def bounces(
    shell: Shell, place: Place, org_id: str | None, created_by: str | None, keys: tuple[str, ...]
) -> None:
    """Show answers that no agent fetched, for the users and systems that created the messages.

    Bounces of agents are in their inboxes. The oldest 100 are shown, as JSON with their answers. With --done,
    bounces are removed, and the keys that were there are printed.

    \b
    Example:
      postroom engine bounces --data run --by user:ada
      postroom engine bounces --data run --done acme/17
    """
    if keys:
        for key in place.bounces.done(*keys):
            shell.output.facts({"key": key}, key)
        return
    found = plain(place.bounces.list(org_id, created_by=created_by))
    rows = [_bounce_row(one) for one in found] if shell.output.readable else found
    shell.output.rows(BOUNCE_COLUMNS, rows, empty="there is no bounce")


def _bounce_row(bounce: Mapping[str, Any]) -> dict[str, Any]:
    creator = f"{bounce['created_by']['type']}:{bounce['created_by']['id']}"
    return {**{name: bounce[name] for name in BOUNCE_COLUMNS if name in bounce}, "created_by": creator}


COMMANDS = (agents, bounces)
