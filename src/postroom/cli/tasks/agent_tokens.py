"""For the owner of a data folder: `postroom tasks agent`, the agents and their tokens."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from postroom.cli.render import rfc3339
from postroom.cli.shell import HELP_OPTIONS, Shell, add_json_option
from postroom.cli.tasks.options import needed_folder_option, starting_folder

if TYPE_CHECKING:
    from postroom.server.access.registry import Agents

name_argument = click.argument("name", metavar="NAME")
targets_option = click.option(
    "--may-send-to",
    "targets",
    multiple=True,
    required=True,
    metavar="NAME",
    help="The agent that receives the tasks. May be repeated. Example: --may-send-to critic",
)


@click.group(context_settings=HELP_OPTIONS)
def agent() -> None:
    """The agents of a harness, and their tokens.

    \b
    Example:
      postroom tasks agent add triage --data run
      postroom tasks agent list --data run
    """


@agent.command()
@name_argument
@needed_folder_option
@click.option("--url", metavar="URL", help="Where the agent listens for nudges.")
@click.option("--operator", is_flag=True, help="The agent may see and do everything, in every queue.")
@click.option(
    "--may-send-to",
    multiple=True,
    metavar="NAME",
    help="An agent that it may send tasks to. May be repeated, and changed later by `allow` and `deny`. "
    "Example: --may-send-to critic",
)
@click.option("--org", default="", metavar="NAME", help="Its organization in the global queue.")
@click.option("--token-only", is_flag=True, help="Print the bare token, also into a pipe.")
@click.pass_obj
def add(
    shell: Shell,
    name: str,
    data: Path,
    url: str | None,
    operator: bool,
    may_send_to: tuple[str, ...],
    org: str,
    token_only: bool,
) -> None:
    """Register an agent and print its token.

    The token is shown only once; the harness keeps its checksum. A folder that is absent or empty becomes a
    data folder.

    \b
    Example:
      postroom tasks agent add triage --data run --url http://127.0.0.1:9001
      postroom tasks agent add planner --data run --may-send-to critic --may-send-to coder
      postroom tasks agent add caller --data run --org acme
      export POSTROOM_TOKEN=$(postroom tasks agent add boss --data run --operator --token-only)
    """
    from postroom.server.access.registry import Agents

    role = "operator" if operator else "agent"
    with starting_folder(shell, data):
        token = Agents(data).add(name, url, role, may_send_to, org)  # type: ignore[arg-type]
    if token_only:
        shell.output.sentence(token)
        return
    facts = {
        "name": name, "role": role, "url": url, "may_send_to": list(may_send_to), "org": org, "token": token
    }  # fmt: skip
    shell.output.facts(facts, token)


@agent.command(name="list")
@needed_folder_option
@click.pass_obj
def list_agents(shell: Shell, data: Path) -> None:
    """List the agents, without their tokens.

    \b
    Example:
      postroom tasks agent list --data run
    """
    rows = [
        {
            "name": known.name, "role": known.role, "url": known.url,
            "may_send_to": list(known.may_send_to), "org": known.org, "created": rfc3339(known.created),
        }
        for known in registered(data).list()
    ]  # fmt: skip
    columns = ["name", "role", "url", "may_send_to", "org", "created"]
    shell.output.rows(columns, rows, empty="no agent is registered yet")


@agent.command()
@name_argument
@needed_folder_option
@targets_option
@click.pass_obj
def allow(shell: Shell, name: str, data: Path, targets: tuple[str, ...]) -> None:
    """Let an agent send tasks to further agents. Its token stays the same.

    A running harness applies the change within 0.2 s.

    \b
    Example:
      postroom tasks agent allow planner --may-send-to critic --data run
    """
    print_targets(shell, name, registered(data).allow(name, targets))


@agent.command()
@name_argument
@needed_folder_option
@targets_option
@click.pass_obj
def deny(shell: Shell, name: str, data: Path, targets: tuple[str, ...]) -> None:
    """Let an agent send no more tasks to these agents. Tasks that it has sent stay.

    \b
    Example:
      postroom tasks agent deny planner --may-send-to critic --data run
    """
    print_targets(shell, name, registered(data).deny(name, targets))


def registered(data: Path) -> "Agents":
    """The agents of a data folder, which must exist."""
    from postroom.server.access.registry import Agents
    from postroom.server.folder.layout import checked_data_folder

    return Agents(checked_data_folder(data))


def print_targets(shell: Shell, name: str, may_send_to: tuple[str, ...]) -> None:
    sentence = f"{name} may send to {', '.join(may_send_to) or 'nobody'}"
    shell.output.facts({"name": name, "may_send_to": list(may_send_to)}, sentence)


@agent.command()
@name_argument
@needed_folder_option
@click.pass_obj
def remove(shell: Shell, name: str, data: Path) -> None:
    """Remove an agent, so that its token is no longer valid. Its tasks stay.

    \b
    Example:
      postroom tasks agent remove triage --data run
    """
    registered(data).remove(name)
    shell.output.facts({"name": name, "action": "remove"}, f"{name} is removed")


add_json_option(agent)
