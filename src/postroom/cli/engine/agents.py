"""For operators: the agents of the global queue, their health, and what waits for what."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from postroom.cli.engine.options import org_option, where_options
from postroom.cli.engine.places import open_place
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
        found = place.agents(org_id)
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


COMMANDS = (agents,)
