"""`postroom tasks`: the task queues of a harness. One file for each audience.

A command works on a data folder (`--data`) or through a harness (`--url`). Both have the same verbs with the
same results: `local_client` answers them from the folder, `TaskClient` over HTTP.
"""

import click

from postroom.cli.shell import HELP_OPTIONS, add_json_option
from postroom.cli.tasks import agent_tokens, operate, send, serve, worker


@click.group(context_settings=HELP_OPTIONS)
def tasks() -> None:
    """The task queue of a harness and its agents.

    Every agent has a queue. A claimed task is leased to its worker; when the lease ends without a result, the
    task goes to another worker. Delivery is at least once.

    \b
    Example:
      postroom tasks enqueue --data run --agent triage --payload '{"issue": 7}'
      postroom tasks next --data run --agent triage
      postroom tasks status --data run
    """


for _command in (*serve.COMMANDS, *send.COMMANDS, *worker.COMMANDS, *operate.COMMANDS):
    tasks.add_command(_command)
add_json_option(tasks)
tasks.add_command(agent_tokens.agent)
