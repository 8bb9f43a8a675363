"""Where a command works: in a data folder, or on a server.

Rule 1: a place answers the verbs of `postroom.calls`. A server answers them over HTTP, and a folder with the
        same values from its own files, so a command does not know where it works.
"""

import os
from pathlib import Path

import click

from postroom.cli.program import TOKEN_VARIABLE
from postroom.cli.render import warn
from postroom.cli.shell import Shell, StoreAddress

DATABASE = "queue.db"


def check_place(data: Path | None, url: str | None, what: str) -> None:
    if data is not None and url is not None:
        raise click.UsageError(f"--data and --url name two places for the {what}: give one of them")
    if data is None and url is None:
        raise click.UsageError(f"say where the {what} are: --data DIR, or --url URL with --token TOKEN")


def needed_token(token: str | None) -> str:
    """The token for `--url`, from the option or the environment."""
    token = token or os.environ.get(TOKEN_VARIABLE)
    if not token:
        raise click.UsageError(f"--url needs a token: pass --token, or set {TOKEN_VARIABLE}")
    return token


def store_in(shell: Shell, data: Path, what: str, *, create: bool) -> str:
    """The address of the store of a data folder."""
    place = shell.store_place(data)
    if isinstance(place, StoreAddress):
        return place.url
    database = place / DATABASE
    if not database.exists():
        if not create:
            from postroom.server.folder.layout import nothing_in

            raise nothing_in(place, what)
        warn(shell.program, f"warning: there was no store in {place}: a new one is made")
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return f"sqlite:///{database}"
