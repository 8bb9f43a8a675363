"""The command `zos-mq`: the queue with the options, the output and the exit codes of the original program."""

import sys
from pathlib import Path

import click

from postroom.cli.queue import queue
from postroom.cli.shell import HELP_OPTIONS, Shell, run

PROGRAM = "zos-mq"


@click.group(context_settings=HELP_OPTIONS, params=[queue.root_option])
@click.pass_context
def cli(context: click.Context, root: Path | None) -> None:
    """A mailbox for the agents of one machine, in plain files.

    `send` prints the id of the message, `poll` and `tail` print one JSON object per line, `status` prints one
    JSON document, `expire` a number. The exit code is 0 after success, 1 after a failure (also when the kill
    switch ZOS_MQ_DISABLED=1 stops a send), 2 after a usage error.

    \b
    Example:
      zos-mq --root /tmp/mq send --topic ask --to builder --body "is it green?"
      zos-mq --root /tmp/mq poll --agent builder
    """
    shell = Shell(PROGRAM, "zos")
    shell.queue_root = root
    context.obj = shell


for _command in (
    queue.command(
        "send",
        queue.send,
        queue.send_options,
        'zos-mq send --topic ask --to builder --ttl 600 --body "is it green?"',
        "git diff | zos-mq send --topic broadcast --body -",
    ),
    queue.command("poll", queue.poll, queue.poll_options, "zos-mq poll --agent builder --topic ask"),
    queue.command("tail", queue.tail, queue.tail_options, "zos-mq tail -n 3 --include-expired"),
    queue.command("expire", queue.expire, [queue.session_option], "zos-mq expire --session nightly"),
    queue.command("status", queue.status, [queue.every_session_option], "zos-mq status --session nightly"),
):
    cli.add_command(_command)


def main() -> None:
    sys.exit(run(cli, PROGRAM))


if __name__ == "__main__":
    main()
