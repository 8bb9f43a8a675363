"""The command `postroom`."""

import importlib
import os
import sys
from pathlib import Path

import click

from postroom.cli.shell import CONFIG_VARIABLE, HELP_FLAGS, HELP_OPTIONS, Shell, leave, path_option, run

PROGRAM = "postroom"
COMMANDS = {  # name: module and function
    "alerts": "alerts:alerts",
    "audit": "audit.audit:audit",
    "backup": "folder.backup:backup",
    "bus": "bus:bus",
    "completion": "completion:completion",
    "connect": "connect.connect:connect",
    "doctor": "folder.doctor:doctor",
    "engine": "engine:engine",
    "init": "up:init",
    "keys": "folder.keys:keys",
    "mail": "mail:mail",
    "mcp": "mcp:mcp",
    "move": "folder.move:move",
    "pipeline": "pipeline.pipeline:pipeline",
    "queue": "queue.queue:queue",
    "restore": "folder.backup:restore",
    "tasks": "tasks:tasks",
    "tls": "folder.tls:tls",
    "token": "tokens.token:token",
    "top": "top:top",
    "up": "up:up",
    "verify": "folder.verify:verify_command",
}
OPENS_STORES = {
    "alerts", "audit", "backup", "doctor", "engine", "keys", "mail", "mcp", "move", "pipeline", "restore",
    "tasks", "top", "up", "verify",
}  # fmt: skip
"""Commands that may open an encrypted store. The others do not look for a key file."""


class _Commands(click.Group):
    """Imports a command when it is used: a call pays only for its own imports."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - the same
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(f"postroom.cli.{module}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with a similar name for one that is unknown: click looks at imported commands only."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError:
            from difflib import get_close_matches

            similar = get_close_matches(args[0], COMMANDS, 1)
            if similar:
                ctx.fail(f"No such command {args[0]!r}. Did you mean {similar[0]!r}?")
            raise


@click.group(cls=_Commands, context_settings=HELP_OPTIONS)
@click.version_option(package_name="postroom", prog_name=PROGRAM, message="%(prog)s %(version)s")
@path_option(
    "--config",
    metavar="FILE",
    text="The settings file.  [default: $POSTROOM_CONFIG, else ./postroom.toml if there is one]",
)
@path_option(
    "--key-file",
    metavar="FILE",
    text="The keys of encrypted stores.  [default: $POSTROOM_KEY_FILE, else key_file in [encryption] of the "
    "settings]",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines, also on a terminal.")
@click.pass_context
def cli(context: click.Context, config: Path | None, key_file: Path | None, as_json: bool) -> None:
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
    shell = context.obj = Shell(PROGRAM, "json" if as_json else "auto", config)
    if HELP_FLAGS.intersection(sys.argv):
        return
    if key_file is not None:
        shell.use_key_file(key_file)
    if config is not None or (os.environ.get(CONFIG_VARIABLE) and context.invoked_subcommand != "init"):
        shell.check_settings()
    if key_file is None and context.invoked_subcommand in OPENS_STORES:
        shell.use_key_file_of_settings()


def main() -> None:
    leave(run(cli, PROGRAM))


if __name__ == "__main__":
    main()
