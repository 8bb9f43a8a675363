"""For the owner of a data folder: `postroom token`, the tokens of agents, operators and admins."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from postroom.cli.places import check_place, needed_token
from postroom.cli.render import rfc3339
from postroom.cli.server_options import token_option
from postroom.cli.shell import (
    DATA_DEFAULT,
    HELP_OPTIONS,
    Decorated,
    Shell,
    add_json_option,
    parse_rate,
    parse_wait,
    path_option,
    together,
)
from postroom.cli.tasks.options import FOLDER, starting_folder
from postroom.errors import UnknownToken

if TYPE_CHECKING:
    from postroom.calls.fields import Role
    from postroom.calls.tokens import MadeTokenAnswer
    from postroom.calls.verb import Verb
    from postroom.server.access.tokens import NewToken

where_options = together(
    path_option("--data", metavar="DIR", text=f"The data folder of the tokens.  {DATA_DEFAULT}", kind=FOLDER),
    click.option("--url", metavar="URL", help="The address of a running server, instead of --data."),
    token_option,
)
id_argument = click.argument("token_id", metavar="TOKEN_ID")


@click.group(context_settings=HELP_OPTIONS)
def token() -> None:
    """The tokens of a data folder. All servers of the folder accept them.

    With --url and the token of an admin, all commands but release work on the tokens of a running server on
    any machine.

    \b
    Example:
      postroom token create --data run --org acme --role agent --agent triage
      postroom token list --data run
      postroom token list --url https://postroom.example --token $ADMIN_TOKEN
    """


def _names_option(
    option: str, text: str, example: str, default: str = ""
) -> Callable[[Decorated], Decorated]:
    more = f"  [default: {default}]" if default else ""
    said = f"{text} May be repeated. Example: {option} {example}{more}"
    return click.option(option, multiple=True, metavar="NAME", help=said)


@token.command()
@where_options
@click.option("--role", type=click.Choice(["agent", "operator", "admin"]), required=True, help="Its rights.")
@click.option(
    "--org", default="", metavar="NAME",
    help="Its organization.  [default: all of them; with --url, that of the admin]",
)  # fmt: skip
@click.option("--agent", default="", metavar="NAME", help="The agent that it acts for. An agent needs one.")
@click.option("--expires-s", type=parse_wait, metavar="S", help="How long it is valid.  [default: no expiry]")
@_names_option("--may-send-to", "An agent that it may send tasks to.", "builder")
@_names_option("--may-claim", "An agent whose tasks it may claim, besides its own.", "builder")
@_names_option("--may-read", "An agent whose tasks it may read, besides its own.", "critic")
@_names_option(
    "--only-message", "An agent: it may send messages to no other.", "lead", "all of its organization"
)
@_names_option("--only-bus", "A bus: it may use no other.", "team", "all")
@click.option("--read-only", is_flag=True, help="Let it change nothing.")
@click.option(
    "--rate", type=parse_rate, default=0.0, metavar="N",
    help="Calls a second that it may make, on HTTP and on NATS.  [default: token_rate in the settings]",
)  # fmt: skip
@click.option("--token-only", is_flag=True, help="Print the bare token, also into a pipe.")
@click.pass_obj
def create(
    shell: Shell,
    /,
    data: Path | None,
    url: str | None,
    token: str | None,
    role: "Role",
    org: str,
    agent: str,
    expires_s: float | None,
    rate: float,
    token_only: bool,
    only_bus: tuple[str, ...],
    read_only: bool,
    **allowed: Any,
) -> None:
    """Make a token and print it. It is shown only once; the folder keeps its checksum.

    An agent works on its own queue and for its own organization. An operator sees and does everything. An
    admin may also make and revoke tokens, over HTTP too. With --org, both keep to that organization. The
    options --may-… give the token of an agent more rights, the options --only-… fewer. A folder that is
    absent or empty becomes a data folder.

    With --url, an admin of one organization makes tokens of that organization only, and a token expires at
    the latest with that of the admin.

    \b
    Example:
      postroom token create --data run --org acme --role agent --agent triage
      postroom token create --data run --role operator --expires-s 86400
      postroom token create --data run --org acme --role agent --agent planner \\
        --may-send-to builder --may-claim builder --may-read critic
      postroom token create --data run --org acme --role agent --agent guest \\
        --only-message lead --only-bus team --read-only
      postroom token create --url https://postroom.example --role operator
      export POSTROOM_TOKEN=$(postroom token create --data run --role admin --token-only)
    """
    from postroom.calls.server import ReadCaller
    from postroom.calls.tokens import CreateToken
    from postroom.server.access.tokens import checked_permissions, permissions_of

    with open_tokens(shell, data, url, token) as call:
        org = org or call(ReadCaller()).org
        if role == "agent" and not (agent and org):
            raise click.UsageError("the token of an agent needs --agent NAME and --org NAME")
        _check_effect(role, org, allowed)
        wanted = CreateToken(
            role=role, org=org or None, agent=agent or None, expires_s=expires_s, rate=rate,
            only_buses=only_bus, read_only=read_only, **allowed,
        )  # fmt: skip
        checked_permissions(role, org, agent, expires_s, rate, permissions_of(wanted))
        made = call(wanted)
    _print(shell, made, {"role": role, "org": org, "agent": agent}, token_only=token_only)


def _check_effect(role: str, org: str, allowed: dict[str, Any]) -> None:
    """Refuse permissions that a token has anyway."""
    from postroom.server.access.tokens import MORE_RIGHTS

    given = [name for name in MORE_RIGHTS if allowed[name]]
    if given and role != "agent" and not org:
        raise click.UsageError(
            f"--{given[0].replace('_', '-')} is for the token of an agent: an {role} of all organizations "
            "may send to every agent, and claim and read all tasks"
        )


@token.command(name="list")
@where_options
@click.pass_obj
def list_tokens(shell: Shell, data: Path | None, url: str | None, token: str | None) -> None:
    """List the tokens by their ids, without the tokens themselves.

    With --url, an admin of one organization sees the tokens of that organization.

    \b
    Example:
      postroom token list --data run
      postroom token list --url https://postroom.example
    """
    from postroom.calls.tokens import ListTokens
    from postroom.server.access.tokens import permissions_of

    with open_tokens(shell, data, url, token) as call:
        lines = call(ListTokens()).tokens
    rows = [
        {
            "token_id": line.token_id, "role": line.role, "org": line.org, "agent": line.agent,
            "created": rfc3339(line.created),
            "expires": None if line.expires is None else rfc3339(line.expires),
            "rate": line.rate or None, "permissions": permissions_of(line).shown(), "valid": line.valid,
        }
        for line in lines
    ]  # fmt: skip
    columns = ["token_id", "role", "org", "agent", "created", "expires", "rate", "permissions", "valid"]
    shell.output.rows(columns, rows, empty="there is no token yet")


@token.command()
@id_argument
@where_options
@click.pass_obj
def revoke(shell: Shell, token_id: str, data: Path | None, url: str | None, token: str | None) -> None:
    """Revoke a token. Running servers refuse it within 0.2 s.

    \b
    Example:
      postroom token revoke 3fa1dee7a434 --data run
      postroom token revoke 3fa1dee7a434 --url https://postroom.example
    """
    from postroom.calls.tokens import RevokeToken

    with open_tokens(shell, data, url, token) as call:
        call(RevokeToken(token_id=token_id))
    shell.output.facts({"token_id": token_id, "revoked": True}, f"{token_id} is revoked")


@token.command()
@id_argument
@where_options
@click.option(
    "--overlap-s", type=parse_wait, default=0.0, show_default=True, metavar="S",
    help="How long the old token stays valid.",
)  # fmt: skip
@click.option("--token-only", is_flag=True, help="Print the bare token, also into a pipe.")
@click.pass_obj
def rotate(
    shell: Shell,
    token_id: str,
    data: Path | None,
    url: str | None,
    token: str | None,
    overlap_s: float,
    token_only: bool,
) -> None:
    """Replace a token by a new one with the same rights.

    \b
    Example:
      postroom token rotate 3fa1dee7a434 --data run --overlap-s 3600
      postroom token rotate 3fa1dee7a434 --url https://postroom.example
    """
    from postroom.calls.tokens import RotateToken

    with open_tokens(shell, data, url, token) as call:
        made = call(RotateToken(token_id=token_id, overlap_s=overlap_s))
    _print(shell, made, {"replaces": token_id}, token_only=token_only)


def _print(
    shell: Shell, made: "NewToken | MadeTokenAnswer", facts: dict[str, str], *, token_only: bool
) -> None:
    if token_only:
        shell.output.sentence(made.token)
    else:
        shell.output.facts({"token": made.token, "token_id": made.token_id, **facts}, made.token)


# ---- places ------------------------------------------------------------------------------------------


@contextmanager
def open_tokens(
    shell: Shell, data: Path | None, url: str | None, token: str | None
) -> Iterator[Callable[["Verb"], Any]]:
    """A function that answers the verbs of tokens, for the folder at `--data` or by the server at `--url`."""
    data = shell.default_place(data, url)
    check_place(data, url, "tokens")
    if data is not None:
        if token is not None:
            raise click.UsageError("--token has no effect on a data folder: leave it out")
        yield partial(_answered, shell, data)
        return
    from postroom.calls.tokens import RevokeToken
    from postroom.client.calls import HttpClient

    with HttpClient(str(url), needed_token(token)) as client:

        def called(verb: "Verb") -> Any:
            if isinstance(verb, RevokeToken) and not (verb.token_id.isascii() and verb.token_id.isalnum()):
                raise UnknownToken(verb.token_id)  # no server has such an id, and no path holds it
            [(kind,)] = verb.route.answers.values()
            # Changes are sent once: a repeated one could make a second token.
            return client.converted(
                client.call(verb, retries=None if verb.route.method == "GET" else 0), kind
            )

        yield called


def _answered(shell: Shell, data: Path, verb: "Verb") -> Any:
    """The answer to a verb, from a data folder."""
    from datetime import UTC, datetime

    from postroom.calls.server import CallerAnswer, ReadCaller
    from postroom.calls.tokens import CreateToken, ListTokens, RevokeToken, RotateToken, TokensAnswer
    from postroom.server.access.registry import Agents
    from postroom.server.access.tokens import TokenRegistry, permissions_of
    from postroom.server.folder.layout import checked_data_folder

    match verb:
        case ReadCaller():
            return CallerAnswer("", "admin", "")
        case CreateToken(role=role, expires_s=expires_s, rate=rate):
            agents, org, agent = Agents(data), verb.org or "", verb.agent or ""
            with starting_folder(shell, data):
                made = agents.tokens.create(role, org, agent, expires_s, permissions_of(verb), rate)
                agents.adopt(agent, org)
            return made
    tokens = TokenRegistry(checked_data_folder(data))
    match verb:
        case ListTokens():
            now = datetime.now(UTC)
            return TokensAnswer([known.line(now) for known in tokens.list()])
        case RotateToken(token_id=token_id, overlap_s=overlap_s):
            return tokens.rotate(token_id, overlap_s)
        case RevokeToken(token_id=token_id):
            return tokens.revoke(token_id)
    raise TypeError(verb)


add_json_option(token)
