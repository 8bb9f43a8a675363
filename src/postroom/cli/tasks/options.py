"""Options that several `tasks` commands share."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from postroom.cli.render import warn
from postroom.cli.server_options import token_option
from postroom.cli.shell import (
    DATA_DEFAULT,
    Decorated,
    Shell,
    needed_data_option,
    parse_wait,
    place_option,
    timeout_option,
    together,
)
from postroom.errors import InvalidMessage, reason

FOLDER = click.Path(file_okay=False)

data_option = place_option(
    f"The data folder of a harness, or the address of its store (postgres://...).  {DATA_DEFAULT}"
)
needed_folder_option = needed_data_option("The data folder of the harness.")


@contextmanager
def starting_folder(shell: Shell, data: Path) -> Iterator[None]:
    """The block may make the data folder, if that is absent or empty. A new folder is a warning.

    Its path may be a typing error.
    """
    from postroom.server.folder.layout import is_new_data_folder

    is_new = is_new_data_folder(data)
    yield
    if is_new:
        warn(shell.program, f"warning: there was no data folder {data}: a new one is made")


url_option = click.option("--url", metavar="URL", help="The address of a harness, instead of --data.")
where_options = together(data_option, url_option, token_option)
agent_option = click.option(
    "--agent", metavar="NAME", help="The agent whose queue is used. An agent's token implies it."
)
task_argument = click.argument("task_id", metavar="TASK_ID")
leased_options = together(
    task_argument,
    where_options,
    agent_option,
    click.option(
        "--lease", type=click.INT, required=True, metavar="N", help="The lease that came with the task."
    ),
)
wait_option = timeout_option("Wait at most S seconds.  [default: until the task has ended]")


def lease_s_option(default: float) -> Callable[[Decorated], Decorated]:
    return click.option(
        "--lease-s",
        type=parse_wait,
        default=default,
        show_default=True,
        metavar="S",
        help="How long the lease lasts without a heartbeat.",
    )


def durability_option(default: str) -> Callable[[Decorated], Decorated]:
    return click.option(
        "--durability",
        type=click.Choice(["os", "group", "fsync"]),
        help="When a task counts as stored: in the page cache, or after an fsync (shared with others, or its "
        f"own).  [default: {default}]",
    )


def read_json(option: str, text: str | None, file: str | None, default: Any = ...) -> Any:
    """A JSON value from an option, a file or stdin."""
    import msgspec

    if text is not None and file is not None:
        raise click.UsageError(f"give it once: {option} or {option}-file, not both")
    if text is None and file is None:
        if default is not ...:
            return default
        raise click.UsageError(f"give {option} JSON, or {option}-file FILE (- is stdin)")
    if file is not None:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    else:
        raw = os.fsencode(str(text))
    given = option if file is None else f"{option}-file"
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidMessage(f"{given} is not JSON: {reason(error)}") from None
    except RecursionError:
        raise InvalidMessage(f"{given} is nested too deeply") from None
