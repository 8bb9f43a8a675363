"""`postroom tls`: certificates for a start."""

from pathlib import Path

import click

from postroom.cli.shell import HELP_OPTIONS, Shell, add_json_option, path_option

DAYS_DEFAULT = 365


@click.group(context_settings=HELP_OPTIONS)
def tls() -> None:
    """Certificates for `postroom up`, `tasks serve` and `mail serve`.

    \b
    Example:
      postroom tls self-signed --out tls
      postroom up --data run --host 0.0.0.0 --tls-cert tls/cert.pem --tls-key tls/key.pem
    """


@tls.command(name="self-signed")
@path_option("--out", metavar="DIR", text="The folder of the two files.", required=True)
@click.option(
    "--host", "hosts", multiple=True, metavar="NAME", help="A name or address of the server. May be repeated."
)
@click.option(
    "--days", type=click.IntRange(1, 3_650), default=DAYS_DEFAULT, show_default=True, metavar="N",
    help="How long it is valid.",
)  # fmt: skip
@click.pass_obj
def self_signed(shell: Shell, out: Path, hosts: tuple[str, ...], days: int) -> None:
    """Make a key and a certificate that it signs itself. Clients have to trust the certificate by its file.

    The names localhost, 127.0.0.1 and ::1 are always included. Existing files are never overwritten.

    \b
    Example:
      postroom tls self-signed --out tls --host queue.example
    """
    try:
        from postroom.system.crypto.tls import make_self_signed
    except ModuleNotFoundError as error:
        missing = f"certificates need {error.name}, which is not installed: pip install 'postroom[audit]'"
        raise click.ClickException(missing) from None
    certificate, key = make_self_signed(out, hosts, days)
    facts = {"cert": str(certificate), "key": str(key)}
    shell.output.facts(facts, f"the certificate is {certificate}, and its key is {key}")


add_json_option(tls)
