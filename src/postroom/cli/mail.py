"""`postroom mail`: the mail server, and commands for any mq9 server."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from postroom.cli.server_options import HOST_DEFAULT, listen_options, tls_options
from postroom.cli.shell import (
    COUNT_MAX,
    HELP_OPTIONS,
    Decorated,
    Shell,
    Stopped,
    add_json_option,
    body_options,
    parse_rate,
    parse_wait,
    path_option,
    read_body,
    reader_gone,
    timeout_option,
    together,
)
from postroom.errors import InvalidMessage, InvalidSetting

if TYPE_CHECKING:
    from postroom.client.mail import Mail, Subscription
    from postroom.core.mail.mailcalls import MailMessage
    from postroom.server.nats.options import ServerOptions, TokenOwner

SERVICE = "postroom-mail"  # its name in telemetry, unless OTEL_SERVICE_NAME says otherwise
SERVER_VARIABLE = "POSTROOM_MAIL_SERVER"
PASSWORD_VARIABLE = "POSTROOM_MAIL_PASSWORD"  # noqa: S105 - the name of a variable
TOKEN_VARIABLE = "POSTROOM_MAIL_TOKEN"  # noqa: S105 - the same
PORT_DEFAULT = 4222
CALL_TIMEOUT_S = 5.0
ASK_TIMEOUT_S = 30.0
AMOUNT_MAX = 1 << 40
AT_LEAST_ONE = click.IntRange(1, COUNT_MAX)
STORAGES = click.Choice(["memory", "os", "group"])
PRIORITIES = ("critical", "urgent", "high", "normal", "low")
BODY_BYTES_MAX = 64 << 20  # that the command line reads; a server accepts less
ID_FILE_BYTES_MAX = 64 << 10
CHECK_EVERY_S = 0.5  # whether the output was closed
LIST_COLUMNS = ("msg_id", "priority", "time")
PUBLIC_COLUMNS = ("mail_id", "ttl_s", "desc")


def _count_option(name: str, default: int, text: str) -> Callable[[Decorated], Decorated]:
    amount = click.IntRange(0, AMOUNT_MAX)
    return click.option(name, type=amount, default=default, show_default=True, metavar="N", help=text)


user_option = click.option("--user", default="", metavar="NAME", help="The user of the login.")
password_option = click.option(
    "--password",
    default="",
    metavar="TEXT",
    help="The password of --user. Other users can see it in the list of processes.  "
    f"[default: ${PASSWORD_VARIABLE}]",
)
token_option = click.option(
    "--token",
    default="",
    metavar="TEXT",
    help="A token instead of a user. Other users can see it in the list of processes.  "
    f"[default: ${TOKEN_VARIABLE}]",
)
place_options = together(
    click.option(
        "--server",
        metavar="URL",
        help=f"An mq9 server that speaks NATS; several with commas.  [default: ${SERVER_VARIABLE}, else "
        f"nats://{HOST_DEFAULT}:{PORT_DEFAULT}]",
    ),
    user_option,
    password_option,
    token_option,
    path_option(
        "--tls-ca", metavar="FILE", text="Trust servers whose certificate is signed by a CA of this file."
    ),
)


server_options = together(
    place_options, timeout_option("How long to wait for the server's answer.", CALL_TIMEOUT_S)
)
count_option = click.option(
    "-n",
    "--count",
    type=click.IntRange(1, COUNT_MAX),
    metavar="N",
    help="Print at most N messages.  [default: all]",
)
mail_argument = click.argument("mail_id", metavar="MAIL_ID")
message_options = together(
    mail_argument,
    body_options,
    click.option(
        "--priority", type=click.Choice(PRIORITIES), default="normal", show_default=True, help="The priority."
    ),
    click.option(
        "--header", "headers", multiple=True, metavar="NAME:VALUE", help="A header. May be repeated."
    ),
)
only_option = click.option(
    "--priority",
    type=click.Choice([*PRIORITIES, "*"]),
    default="*",
    show_default=True,
    help="Only this priority.",
)


@click.group(context_settings=HELP_OPTIONS)
def mail() -> None:
    """Mailboxes over the NATS protocol, as in the mq9 design.

    MAIL_ID is the id of a private mailbox, the name of a public one, or @FILE with the output of `create`.
    Use a file for a private mailbox: other users can see a command line, and the id is the only key.

    \b
    Example:
      postroom mail serve --data run/mail
      postroom mail create --ttl-s 3600 > box.json
      postroom mail send @box.json --body "hello"
      postroom mail read @box.json
    """


# ---- the server ----------------------------------------------------------------------------------------


@mail.command()
@path_option("--data", metavar="DIR", text="The data folder of the server.", required=True)
@listen_options(PORT_DEFAULT)
@tls_options
@click.option(
    "--tls-first", is_flag=True, help="Start with the TLS handshake; clients have to be configured for it."
)
@user_option
@password_option
@path_option("--users-file", metavar="FILE", text="The users of the server: lines of user:password.")
@token_option
@path_option("--tokens", metavar="DIR", text="Accept the tokens of this data folder: see `postroom token`.")
@click.option(
    "--token-rate", type=parse_rate, default=0.0, show_default=True, metavar="N",
    help="Messages a second that a token of --tokens without a rate of its own may publish; 0: no limit.",
)  # fmt: skip
@click.option("--while-stdin", is_flag=True, hidden=True, help="Stop when stdin ends: the parent has exited.")
@click.option("--durable-normal", is_flag=True, help="Also fsync normal and low messages: --normal group.")
@click.option(
    "--critical", type=STORAGES, default="group", show_default=True, help="Durability of critical messages."
)
@click.option(
    "--urgent",
    type=STORAGES,
    default="group",
    show_default=True,
    help="Durability of urgent and high messages.",
)
@click.option("--normal", type=STORAGES, help="Durability of normal and low messages.  [default: os]")
@click.option(
    "--envelope",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Which clients get messages in an envelope; auto: those of the published SDK.",
)
@click.option(
    "--default-ttl-s",
    type=parse_wait,
    default=86_400.0,
    show_default=True,
    metavar="S",
    help="The lifetime of a mailbox that is created without one; 0: it never ends.",
)
@_count_option("--mailboxes-max", 1_000_000, "Maximum number of mailboxes on the server.")
@_count_option("--stored-bytes-max", 1 << 30, "Maximum memory of all messages and mailboxes, in bytes.")
@_count_option("--quota-messages", 0, "Maximum number of messages in one mailbox; 0 means no quota.")
@_count_option("--quota-bytes", 128 << 20, "Maximum memory of one mailbox, in bytes; 0 means no quota.")
@_count_option(
    "--client-quota-bytes",
    256 << 20,
    "Maximum memory of one client (a login or an address), in bytes; 0 means no quota.",
)
@_count_option("--client-quota-mailboxes", 100_000, "Maximum mailboxes of one client; 0 means no quota.")
@_count_option("--client-quota-agents", 1_000, "Maximum registered agents of one client; 0 means no quota.")
@_count_option("--group-window", 32, "Maximum messages in flight to one member of a group; 0 means no limit.")
@_count_option("--dead-letter-after", 0, "Failed deliveries before a message goes to ID.dead; 0 is never.")
@click.option("--receipts", is_flag=True, help="Emit an event for each delivery.")
@click.option("--extend", is_flag=True, help="Let the creator of a mailbox extend its lifetime.")
@_count_option("--payload-bytes-max", 1 << 20, "Maximum size of one message, in bytes.")
@_count_option(
    "--pending-bytes-max", 64 << 20, "Maximum unsent bytes of a connection; above this it is closed."
)
@_count_option("--connections-max", 65_536, "Maximum number of connections.")
@_count_option("--subscriptions-max", 100_000, "Maximum number of subscriptions of one client.")
@click.option(
    "--ping-interval-s",
    type=click.FloatRange(min=0.1),
    default=120.0,
    show_default=True,
    metavar="S",
    help="How long a client may be silent before the server sends a ping.",
)
@click.pass_obj
def serve(shell: Shell, /, data: Path, host: str, **chosen: Any) -> None:
    """Run the server: mailboxes, and plain NATS on every other subject.

    Clients of mq9 and of NATS work unchanged. The address is printed once the server listens; SIGTERM ends it
    within two seconds. Events are in DIR/events.jsonl; `postroom audit ship --mail DIR` ships them.

    \b
    Example:
      postroom mail serve --data run/mail --port 4222
      postroom mail serve --data run/mail --user ada --durable-normal --quota-messages 10000
    """
    from postroom.contracts.mail.options import MailOptions
    from postroom.server.nats.mail_server import serve as run_server
    from postroom.server.nats.mail_status import mail_gauges
    from postroom.server.telemetry.export import exporting
    from postroom.system.parent import stop_with_stdin

    def print_address(port: int) -> None:
        scheme = "tls" if chosen["tls_cert"] else "nats"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        facts = {"url": url, "data": str(data), "pid": os.getpid()}
        shell.output.facts(facts, f"mailboxes in {data} are served at {url}")
        shell.output.flush()

    options = {name: chosen[name] for name in MailOptions.__struct_fields__ if chosen.get(name) is not None}
    if chosen["durable_normal"] and options.setdefault("normal", "group") != "group":
        raise click.UsageError(f"--durable-normal and --normal {chosen['normal']} exclude each other")
    shell.show_warnings()
    if chosen["while_stdin"]:
        stop_with_stdin()
    with exporting(SERVICE) as telemetry:
        if telemetry is not None:
            telemetry.observe(mail_gauges(data))
        run_server(data, _server_options(host, chosen), MailOptions(**options), ready=print_address)


def _server_options(host: str, chosen: dict[str, Any]) -> "ServerOptions":
    from postroom.server.nats.mail_server import read_users
    from postroom.server.nats.options import ServerOptions
    from postroom.system.crypto.tls import server_context

    users = read_users(chosen["users_file"]) if chosen["users_file"] else {}
    password = chosen["password"] or os.environ.get(PASSWORD_VARIABLE, "")
    if chosen["user"]:
        if not password:
            raise click.UsageError(f"--user needs --password, or {PASSWORD_VARIABLE}")
        users[chosen["user"]] = password
    elif chosen["password"]:
        raise click.UsageError("--user is missing: it belongs to --password")
    if not chosen["tls_cert"] and (chosen["tls_key"] or chosen["tls_first"]):
        raise click.UsageError("--tls-key and --tls-first need --tls-cert")
    names = ("payload_bytes_max", "pending_bytes_max", "connections_max", "subscriptions_max")
    return ServerOptions(
        host=host,
        port=chosen["port"],
        users=users,
        token=chosen["token"] or os.environ.get(TOKEN_VARIABLE, ""),
        identify=None if chosen["tokens"] is None else _identify(chosen["tokens"], chosen["token_rate"]),
        tls=server_context(chosen["tls_cert"], chosen["tls_key"]) if chosen["tls_cert"] else None,
        tls_first=chosen["tls_first"],
        ping_interval_s=chosen["ping_interval_s"],
        **{name: chosen[name] for name in names},
    )


def _identify(data: Path, token_rate: float) -> "Callable[[str], TokenOwner | None]":
    """Find the owner of a token. Users of organizations have names that no other organization has."""
    from postroom.server.access.registry import Agents
    from postroom.server.nats.options import TokenOwner

    agents = Agents(data)

    def owner_of(token: str) -> TokenOwner | None:
        identity = agents.identify(token)
        if identity is None:
            return None
        prefix = f"{identity.org}/" if identity.org else ""
        rate = identity.rate or token_rate
        user, sees_all = f"{prefix}{identity.name}", identity.is_operator
        return TokenOwner(user, identity.caller, rate, identity.org, sees_all, identity)

    return owner_of


# ---- mailboxes -----------------------------------------------------------------------------------------


@mail.command()
@click.option("--name", default="", metavar="NAME", help="Its name; needs --public.  [default: a random id]")
@click.option("--public", is_flag=True, help="List it for all clients; needs --name.")
@click.option("--ttl-s", type=parse_wait, metavar="S", help="Its lifetime.  [default: that of the server]")
@click.option("--desc", default="", metavar="TEXT", help="What it is for.")
@server_options
@click.pass_obj
def create(shell: Shell, /, name: str, public: bool, ttl_s: float | None, desc: str, **where: Any) -> None:
    """Create a mailbox, and print its id and whether it is new. An existing mailbox is not changed.

    \b
    Example:
      postroom mail create --ttl-s 3600
      postroom mail create --public --name task.queue --desc "work for anybody"
    """
    if public != bool(name):
        raise click.UsageError("--public needs --name" if public else "--name needs --public")
    with _mail(shell, where) as client:
        made = client.ensure(name, ttl_s=ttl_s, public=public, desc=desc)
    facts = {"mail_id": made.mail_id, "is_new": made.is_new}
    if made.is_new is None:  # another mq9 server, which does not report it
        del facts["is_new"]
    shell.output.facts(facts, f"{made.mail_id} exists already" if made.is_new is False else made.mail_id)


@mail.command()
@message_options
@click.option("--no-wait", is_flag=True, help="Do not wait until the message is stored.")
@server_options
@click.pass_obj
def send(
    shell: Shell, /, mail_id: str, body: str | None, body_file: str | None, priority: Any,
    headers: tuple[str, ...], no_wait: bool, **where: Any,
) -> None:  # fmt: skip
    """Send a message, and print its id when it is stored.

    \b
    Example:
      postroom mail send task.queue --body '{"job": 7}'
      postroom mail send @box.json --priority critical --body "stop"
    """
    text = read_body(shell, body, body_file, BODY_BYTES_MAX)
    with _mail(shell, where) as client:
        number = client.send(
            _mail_id(mail_id), text, priority=priority, headers=_headers(headers), wait=not no_wait
        )
    if not no_wait:
        shell.output.facts({"msg_id": number}, str(number))


@mail.command()
@message_options
@timeout_option("How long to wait for the answer to the message.", ASK_TIMEOUT_S)
@place_options
@click.pass_obj
def ask(
    shell: Shell, /, mail_id: str, body: str | None, body_file: str | None, priority: Any,
    headers: tuple[str, ...], timeout_s: float, **where: Any,
) -> None:  # fmt: skip
    """Send a message, wait for the answer, and print it.

    The answer is the first message in a private mailbox that is made for it. The id of that mailbox is in the
    header Mq9-Reply-To of the message. Without an answer in time the exit code is 1; the message stays.

    \b
    Example:
      postroom mail ask task.queue --timeout-s 60 --body "is it green?"
    """
    text = read_body(shell, body, body_file, BODY_BYTES_MAX)
    with _mail(shell, where) as client:
        answer = client.ask(
            _mail_id(mail_id), text, priority=priority, headers=_headers(headers), timeout_s=timeout_s
        )
    _print(shell, answer)


def _headers(texts: tuple[str, ...]) -> dict[str, str]:
    pairs = [text.partition(":") for text in texts]
    if any(not colon for _, colon, _ in pairs):
        raise click.UsageError("a header is written as NAME:VALUE")
    return {name.strip(): value.strip() for name, _, value in pairs}


@mail.command()
@mail_argument
@only_option
@click.option("--delete", "take", is_flag=True, help="Delete each message after it was printed.")
@count_option
@server_options
@click.pass_obj
def read(shell: Shell, /, mail_id: str, priority: Any, take: bool, count: int | None, **where: Any) -> None:
    """Print the messages of a mailbox by priority. They stay there.

    \b
    Example:
      postroom mail read @box.json
      postroom mail read task.queue --priority critical --delete
      postroom mail read task.queue -n 1
    """
    box = _mail_id(mail_id)
    with _mail(shell, where) as client:
        for message in client.messages(box, priority=priority)[:count]:
            _print(shell, message)
            if take:
                shell.output.flush()
                client.delete(box, message.msg_id)


@mail.command()
@mail_argument
@only_option
@click.option(
    "--group", default="", metavar="NAME", help="Share the messages with the members of this group."
)
@click.option("--delete", "take", is_flag=True, help="Delete each message after it was printed.")
@count_option
@timeout_option("Stop after S seconds.  [default: never]")
@place_options
@click.pass_obj
def follow(
    shell: Shell, /, mail_id: str, priority: Any, group: str, take: bool, count: int | None,
    timeout_s: float | None, **where: Any,
) -> None:  # fmt: skip
    """Print the messages of a mailbox, then new ones as they arrive. Reconnects when the connection is lost.

    Ends at a signal, after --timeout-s, after -n messages, or when its output is closed.

    \b
    Example:
      postroom mail follow @box.json --timeout-s 60
      postroom mail follow task.queue --group workers --delete
    """
    box = _mail_id(mail_id)
    with _mail(shell, where) as client, client.subscribe(box, priority=priority, group=group) as messages:
        shell.note("following; Ctrl-C ends it")
        printed = 0
        ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while count is None or printed < count:
                message = _next(messages, ends_at)
                if message is None:
                    return
                _print(shell, message)
                shell.output.flush()
                printed += 1
                if take:
                    client.delete(box, message.msg_id)
        except Stopped:
            return  # the normal end of a follower


def _next(messages: "Subscription", ends_at: float | None) -> "MailMessage | None":
    """The next message; None after the timeout, or when the output was closed."""
    while not reader_gone():
        left_s = CHECK_EVERY_S if ends_at is None else min(CHECK_EVERY_S, ends_at - time.monotonic())
        message = messages.next(max(0.0, left_s))
        if message is not None or left_s <= 0:
            return message
    return None


@mail.command()
@mail_argument
@click.argument("msg_ids", metavar="MSG_ID", nargs=-1, required=True, type=click.INT)
@server_options
@click.pass_obj
def delete(shell: Shell, /, mail_id: str, msg_ids: tuple[int, ...], **where: Any) -> None:
    """Delete messages of a mailbox. A missing message is not an error.

    \b
    Example:
      postroom mail delete @box.json 4294967297
    """
    box = _mail_id(mail_id)
    with _mail(shell, where) as client:
        for number in msg_ids:
            found = client.delete(box, number)
            sentence = f"{number} is deleted" if found else f"{number} is not there"
            shell.output.facts({"msg_id": number, "deleted": found}, sentence)


@mail.command("list")
@mail_argument
@server_options
@click.pass_obj
def list_command(shell: Shell, /, mail_id: str, **where: Any) -> None:
    """List the first thousand messages of a mailbox, without their bodies.

    \b
    Example:
      postroom mail list @box.json
    """
    from postroom.core.times import NANOS_PER_S, utc_text

    with _mail(shell, where) as client:
        found = client.list(_mail_id(mail_id))
    rows = [
        {"msg_id": each.msg_id, "priority": each.priority, "time": utc_text(each.created_s * NANOS_PER_S)}
        for each in found
    ]
    shell.output.rows(LIST_COLUMNS, rows, "the mailbox is empty")


@mail.command()
@server_options
@click.pass_obj
def discover(shell: Shell, /, **where: Any) -> None:
    """List the public mailboxes.

    \b
    Example:
      postroom mail discover
    """
    with _mail(shell, where) as client:
        rows = [each._asdict() for each in client.public()]
    shell.output.rows(PUBLIC_COLUMNS, rows, "there are no public mailboxes")


# ---- pieces --------------------------------------------------------------------------------------------


def _mail(shell: Shell, where: dict[str, Any]) -> "Mail":
    import ssl

    from postroom.client.mail import DEFAULT_SERVER, Mail

    shell.show_warnings()
    tls, authorities = None, where["tls_ca"]
    try:
        if authorities:
            tls = ssl.create_default_context(cafile=authorities)
    except (OSError, ssl.SSLError) as error:
        why = error.strerror or "it holds no certificate"
        raise InvalidSetting(f"cannot use the certificates in {authorities}: {why}") from None
    return Mail(
        where["server"] or os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER,
        user=where["user"],
        password=where["password"] or os.environ.get(PASSWORD_VARIABLE, ""),
        token=where["token"] or os.environ.get(TOKEN_VARIABLE, ""),
        tls=tls,
        timeout_s=where.get("timeout_s", CALL_TIMEOUT_S),
        name="postroom-cli",
    )


def _mail_id(text: str) -> str:
    """The id itself, or with @ the content of a file: one line, or the JSON that `create` prints."""
    if not text.startswith("@"):
        return text
    import msgspec

    with Path(text[1:]).open("rb") as file:
        content = file.read(ID_FILE_BYTES_MAX).strip()
    try:
        found = msgspec.json.decode(content) if content.startswith(b"{") else {"mail_id": content.decode()}
        return str(found["mail_id"])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError):
        raise InvalidMessage(f"there is no mailbox id in {text[1:]}") from None


def _print(shell: Shell, message: "MailMessage") -> None:
    text = message.payload.decode("utf-8", "surrogateescape")
    headers = {name: value for name, value in message.headers.items() if name.lower() != "mq9-msg-id"}
    if shell.output.readable:
        shell.output.record([message.priority, str(message.msg_id)], headers, text)
        return
    facts = {"msg_id": message.msg_id, "priority": message.priority, "body": text}
    shell.output.json_line({**facts, "headers": headers} if headers else facts)


add_json_option(mail)
