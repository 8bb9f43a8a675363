"""Options of commands that start a server, or call one."""

from collections.abc import Callable

import click

from postroom.cli.program import TOKEN_VARIABLE
from postroom.cli.shell import Decorated, path_option, together

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
