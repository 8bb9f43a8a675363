"""Options of commands that start a server, or call one."""

import os
from collections.abc import Callable
from typing import Any

import click

from postroom.cli.program import TOKEN_VARIABLE
from postroom.cli.shell import Decorated, path_option, together

FROM_ENVIRONMENT = "env:"
STORE_VARIABLE = "POSTROOM_STORE_OF_PARENT"
"""The variable that gives a store to the processes that a command starts: `ps` shows command lines."""
HOST_DEFAULT = "127.0.0.1"
PORT = click.IntRange(0, 65535)

token_option = click.option(
    "--token",
    metavar="TOKEN",
    help="The token for --url. Other users can see it in the list of processes.  "
    f"[default: ${TOKEN_VARIABLE}]",
)
tls_options = together(
    path_option("--tls-cert", metavar="FILE", text="Speak TLS with this certificate."),
    path_option("--tls-key", metavar="FILE", text="The key of the certificate, if it is in another file."),
)

allowed_hosts_option = click.option(
    "--allowed-hosts",
    metavar="NAMES",
    help="Names, with commas, that the page and MCP answer for besides localhost and the certificate's.",
)


def as_store(_context: click.Context, _parameter: click.Parameter, value: Any) -> Any:
    """The address of a store, or several of them. `env:NAME` stands for the value of a variable."""
    return tuple(map(_store, value)) if isinstance(value, tuple) else value and _store(value)


def _store(address: str) -> str:
    name = address.removeprefix(FROM_ENVIRONMENT)
    if name == address:
        return address
    if not os.environ.get(name):
        raise click.BadParameter(f"the variable {name} has no address of a store")
    return os.environ[name]


def with_store(store: str | None) -> dict[str, str] | None:
    """The environment of a process that gets a store; None for that of this process."""
    return None if store is None else {**os.environ, STORE_VARIABLE: store}


def store_option(text: str, *, multiple: bool = False) -> Callable[[Decorated], Decorated]:
    """`--store`: the address of a store."""
    return click.option(
        "--store", metavar="URL", multiple=multiple, callback=as_store,
        help=f"{text} {FROM_ENVIRONMENT}NAME takes it from a variable, which keeps a password out of sight.",
    )  # fmt: skip


def listen_options(port_default: int) -> Callable[[Decorated], Decorated]:
    return together(
        click.option(
            "--host", default=HOST_DEFAULT, show_default=True, metavar="HOST", help="Where to listen."
        ),
        click.option(
            "--port", type=PORT, default=port_default, show_default=True, metavar="N",
            help="The port; 0 takes a free one.",
        ),
    )  # fmt: skip
