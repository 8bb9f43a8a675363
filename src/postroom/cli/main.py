"""The command `postroom`."""

from pathlib import Path

import click

from postroom.cli.audit import audit
from postroom.cli.backup import backup, restore
from postroom.cli.bus import bus
from postroom.cli.doctor import doctor
from postroom.cli.engine import engine
from postroom.cli.mail import mail
from postroom.cli.mcp import mcp
from postroom.cli.move import move
from postroom.cli.pipeline import pipeline
from postroom.cli.queue import queue
from postroom.cli.shell import HELP_OPTIONS, Shell, leave, path_option, run
from postroom.cli.tasks import tasks
from postroom.cli.tls import tls
from postroom.cli.token import token
from postroom.cli.up import init, up
from postroom.cli.verify import verify_command

PROGRAM = "postroom"


@click.group(context_settings=HELP_OPTIONS)
@click.version_option(package_name="postroom", prog_name=PROGRAM, message="%(prog)s %(version)s")
@path_option(
    "--config",
    metavar="FILE",
    text="The settings file.  [default: $POSTROOM_CONFIG, else ./postroom.toml if there is one]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines, also on a terminal.")
@click.pass_context
def cli(context: click.Context, config: Path | None, as_json: bool) -> None:
    """Mailboxes, logs and task queues for AI agents.

    Results are JSON lines in a pipe or a file, and readable text on a terminal. The exit code is 0 after
    success, 1 after a failure, 2 after a usage error.

    \b
    Example:
      postroom bus post --bus runs/bus.yaml --type note --project demo --body "hello"
      postroom bus tail --bus runs/bus.yaml -n 5
      postroom queue send --topic ask --to builder --body "is it green?"
      postroom tasks enqueue --data run --agent triage --payload '{"issue": 7}'
    """
    context.obj = Shell(PROGRAM, "json" if as_json else "auto", config)


cli.add_command(audit)
cli.add_command(backup)
cli.add_command(bus)
cli.add_command(doctor)
cli.add_command(engine)
cli.add_command(mail)
cli.add_command(mcp)
cli.add_command(move)
cli.add_command(pipeline)
cli.add_command(queue)
cli.add_command(restore)
cli.add_command(tasks)
cli.add_command(tls)
cli.add_command(token)
cli.add_command(up)
cli.add_command(init)
cli.add_command(verify_command)


def main() -> None:
    leave(run(cli, PROGRAM))


if __name__ == "__main__":
    main()
