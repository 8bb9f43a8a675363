"""`postroom engine`: the global queue. One file for each audience.

A command works on a data folder (`--data`) or through a server (`--url`). Both have the same verbs with the
same results: an engine answers them from the folder, `EngineClient` over HTTP.
"""

import click

from postroom.cli.engine import agents, dead_letters, goals, load, operate, submit, tokens, work
from postroom.cli.shell import HELP_OPTIONS, add_json_option


@click.group(context_settings=HELP_OPTIONS)
def engine() -> None:
    """The global queue: messages of many organizations, with priorities, retries and dead letters.

    A message is leased to one worker at a time and is delivered at least once. The store is shared with
    `postroom tasks`, and so is its server.

    \b
    Example:
      postroom engine submit --data run --type tool_call --org acme --payload '{"tool": "search"}'
      postroom engine work --app app:engine
      postroom engine status --data run --watch
    """


for _command in (
    *submit.COMMANDS,
    *work.COMMANDS,
    *operate.COMMANDS,
    *agents.COMMANDS,
    *tokens.COMMANDS,
    *load.COMMANDS,
    *goals.COMMANDS,
    *goals.GROUPS,
):
    engine.add_command(_command)
add_json_option(engine)
engine.add_command(dead_letters.dlq)
