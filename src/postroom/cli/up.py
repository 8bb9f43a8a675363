"""`postroom up` starts everything that a data folder needs; `init` writes a settings file."""

import ipaddress
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from postroom.cli.server_options import (
    FROM_ENVIRONMENT,
    PORT,
    STORE_VARIABLE,
    allowed_hosts_option,
    store_option,
    with_store,
)
from postroom.cli.shell import CONFIG_NAME, DATA_DEFAULT, HELP_OPTIONS, Shell, json_option, path_option
from postroom.cli.tasks.options import FOLDER

if TYPE_CHECKING:
    from postroom.server.access.tokens import NewToken
    from postroom.server.up.parts import PartCommand
    from postroom.settings import UpSettings

STOP_GRACE_S = 35.0  # workers finish their messages within 30 s
DEMO_FOLDER = "postroom-demo"
MAIL_FOLDER, AUDIT_FOLDER = "mail", "audit"


@click.command(context_settings=HELP_OPTIONS)
@path_option(
    "--data",
    metavar="DIR",
    text=f"The data folder.  {DATA_DEFAULT}",
    kind=FOLDER,
)
@store_option("The store of Tasks and Engine, such as postgres://user@host/db, instead of DIR/queue.db.")
@click.option("--host", metavar="HOST", help="Where to listen.  [default: 127.0.0.1]")
@click.option("--http-port", type=PORT, metavar="N", help="The port of HTTP; 0: a free one.  [default: 8800]")
@click.option("--nats-port", type=PORT, metavar="N", help="The port of NATS; 0: a free one.  [default: 4222]")
@click.option("--http/--no-http", default=None, help="Serve Tasks, Engine and buses.  [default: yes]")
@click.option("--page/--no-page", default=None, help="Serve the live page over HTTP.  [default: yes]")
@click.option("--mcp/--no-mcp", default=None, help="Serve MCP over HTTP.  [default: yes]")
@allowed_hosts_option
@click.option("--mail/--no-mail", default=None, help="Serve Mail over NATS.  [default: yes]")
@click.option("--audit/--no-audit", default=None, help="Ship events to DIR/audit.  [default: yes]")
@click.option("--app", metavar="MODULE:ENGINE", help="Run workers for the handlers of this engine.")
@path_option("--tls-cert", metavar="FILE", text="Speak TLS with this certificate, on HTTP and NATS.")
@path_option("--tls-key", metavar="FILE", text="The key of the certificate, if it is in another file.")
@path_option("--key-file", metavar="FILE", text="Encrypt what Tasks, Engine and Mail store with these keys.")
@click.option("--demo", is_flag=True, help=f"Add traffic of a few agents. Without --data: in {DEMO_FOLDER}.")
@click.option(
    "--accept-loss",
    multiple=True,
    metavar="NAME",
    help="Start although NAME, which the folder held, is missing or cut short. May be repeated.",
)
@click.option("--insecure", is_flag=True, help="Listen without TLS on an address that is not loopback.")
@click.pass_obj
def up(
    shell: Shell, /, demo: bool, insecure: bool, key_file: Path | None, accept_loss: tuple[str, ...],
    **given: Any,
) -> None:  # fmt: skip
    """Start everything: Tasks, Engine and buses over HTTP, Mail over NATS, and the audit shipper.

    Each part is a process of its own. A part that dies is restarted, and /health says so meanwhile. The
    addresses are printed once all parts are ready. The first start of a folder also prints the token of an
    admin, once: a folder that has a token of an operator or admin gets none. The log is JSON lines on
    stderr. SIGTERM ends all parts cleanly.

    \b
    Example:
      postroom up --data run
      postroom up --data run --http-port 0 --nats-port 0 --no-audit
      postroom up --data run --app myagents:engine
      postroom up --data run --key-file postroom.keys
      postroom up --demo
    """
    import msgspec

    from postroom.server.up.parts import LOCK_FILE
    from postroom.system.atomic import make_folder
    from postroom.system.lock import alone

    if demo and given["data"] is None:
        given["data"] = Path(DEMO_FOLDER)
    options = {name: value for name, value in given.items() if value is not None}
    settings = msgspec.structs.replace(shell.settings.up, **options)
    data = shell.data_place(settings.data)
    if key_file is not None:
        shell.use_key_file(key_file)
    _check_settings(settings, demo=demo, insecure=insecure)
    _check_data(data, settings.store)
    make_folder(data, "os")
    with alone(data / LOCK_FILE, f"another `postroom up` serves {data}: stop it first"):
        _run(shell, data, settings, accept_loss, demo=demo)


def _run(
    shell: Shell, data: Path, settings: "UpSettings", accept_loss: tuple[str, ...], *, demo: bool
) -> None:
    from postroom.contracts.tasks.tasks import Tasks
    from postroom.server.access.tokens import TokenRegistry
    from postroom.server.folder.manifest import keeping
    from postroom.server.up.parts import SupervisedParts

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    environment = with_store(settings.store)
    if demo and settings.tls_cert is not None:  # the agents of the demo trust the certificate of this server
        environment = {**(environment or os.environ), "SSL_CERT_FILE": str(settings.tls_cert)}
    parts = SupervisedParts(
        data, _parts(shell, data, settings), stop_grace_s=STOP_GRACE_S, environment=environment
    )
    with keeping(data, settings.store, parts.log, accept_loss) as keeper:
        if not settings.http:  # the shipper reads the store, which the HTTP server makes otherwise
            with Tasks.open(settings.store or f"sqlite:///{data / 'queue.db'}") as tasks:
                tasks.store.identity()
        first, is_printed = _first_token(data), False
        try:
            ready = parts.start(stop.is_set)
            if not stop.is_set():
                if keeper is not None:
                    keeper.start()
                if demo:
                    parts.add(_demo_part(data, ready))
                _print_addresses(shell, data, ready, first and first.token, demo=demo)
                is_printed = True
            parts.run(stop.wait)
        finally:
            parts.stop()
            if first is not None and not is_printed:  # nobody has seen it: the next start makes another
                TokenRegistry(data).revoke(first.token_id)


def _check_settings(settings: "UpSettings", *, demo: bool, insecure: bool) -> None:
    from postroom.stores.open import MEMORY, open_store
    from postroom.system.crypto.tls import server_context

    if not (settings.http or settings.mail or settings.audit or settings.app):
        raise click.UsageError("every part is switched off: there is nothing to start")
    if demo and not settings.http:
        raise click.UsageError("the demo needs HTTP")
    if settings.tls_cert is None and not insecure and not _is_loopback(settings.host):
        raise click.UsageError(
            f"{settings.host} is not loopback: tokens would cross the network in the clear. Give --tls-cert "
            "(a first one: postroom tls self-signed), or --insecure behind a proxy that speaks TLS"
        )
    if settings.tls_cert is not None:
        server_context(settings.tls_cert, settings.tls_key)
    elif settings.tls_key is not None:
        raise click.UsageError("--tls-key has no effect without --tls-cert")
    if settings.store == MEMORY:
        raise click.UsageError("the parts are processes of their own, and memory:// belongs to one process")
    if settings.store is not None:
        open_store(settings.store).close()  # opens no connection, and refuses an address that is none


def _check_data(data: Path, store: str | None) -> None:
    """Refuse a folder of something else, a store that was moved, and a key file that lacks a key of the data.

    Else every write would fail, or parts would encrypt values before the missing key is noticed.
    """
    from postroom.errors import StoreMoved
    from postroom.server.folder.key_rotation import EncryptedData
    from postroom.server.folder.layout import DATABASE, is_new_data_folder
    from postroom.stores.sqlite.snapshot import SqliteSnapshot
    from postroom.system.crypto.encryption import key_file_encryption

    is_new_data_folder(data)  # raises when the folder holds other files
    path = data / DATABASE
    if store is None and path.exists():
        with SqliteSnapshot(path) as snapshot:
            if snapshot.moved_to:
                raise StoreMoved(str(path), snapshot.moved_to)
    encryption = key_file_encryption(None)
    if encryption is not None:
        EncryptedData(encryption, data, store).check()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _first_token(data: Path) -> "NewToken | None":
    """The token of an admin, when the folder has no token of an operator or admin."""
    from postroom.server.access.registry import Agents

    agents = Agents(data)
    roles = [known.role for known in agents.list()] + [known.role for known in agents.tokens.list()]
    if any(role != "agent" for role in roles):
        return None
    return agents.tokens.create("admin")


def _parts(shell: Shell, data: Path, settings: "UpSettings") -> "list[PartCommand]":
    from postroom.server.up.parts import PartCommand

    config: tuple[str, ...] = () if shell.config is None else ("--config", str(shell.config))
    program = (sys.executable, "-m", "postroom.cli.main", *config, "--json")
    tls: tuple[str, ...] = () if settings.tls_cert is None else ("--tls-cert", str(settings.tls_cert))
    tls += () if settings.tls_key is None else ("--tls-key", str(settings.tls_key))
    app = () if settings.app is None else ("--app", settings.app)
    rate = ("--token-rate", str(settings.token_rate))
    listen = ("--host", settings.host, "--while-stdin", *rate, *tls)
    port, folder = str(settings.http_port), str(data)
    store = () if settings.store is None else ("--store", f"{FROM_ENVIRONMENT}{STORE_VARIABLE}")
    records = store or ("--data", folder)
    off = tuple(f"--no-{name}" for name in ("page", "mcp") if not getattr(settings, name))
    parts: list[PartCommand] = []
    if settings.http:
        names = ("--allowed-hosts", settings.allowed_hosts) if settings.allowed_hosts else ()
        serve = ("tasks", "serve", "--data", folder, *store, "--port", port, *listen, *names, *app, *off)
        parts.append(PartCommand("http", (*program, *serve)))
    if settings.mail:
        mail = ("mail", "serve", "--data", str(data / MAIL_FOLDER), "--tokens", folder)
        parts.append(PartCommand("mail", (*program, *mail, "--port", str(settings.nats_port), *listen)))
    if settings.audit:
        sources = (*records, *(("--mail", str(data / MAIL_FOLDER)) if settings.mail else ()))
        ship = ("audit", "ship", *sources, "--to", str(data / AUDIT_FOLDER), "--while-stdin")
        servers = tuple(part.name for part in parts)  # they make what is shipped
        parts.append(PartCommand("audit", (*program, *ship), after=servers, is_silent=True))
    if settings.app is not None:
        work = ("engine", "work", *records, *app, "--while-stdin")
        after = ("http",) if settings.http else ()
        parts.append(PartCommand("workers", (*program, *work), after=after, is_silent=True))
    return parts


def _demo_part(data: Path, ready: Any) -> "PartCommand":
    from postroom.server.up.parts import PartCommand

    where = ("--url", ready["http"]["url"], "--nats", ready.get("mail", {}).get("url", ""))
    command = (sys.executable, "-m", "postroom.server.up.demo", *where, "--data", str(data))
    return PartCommand("demo", (*command, "--store-variable", STORE_VARIABLE), is_silent=True, beats=False)


def _print_addresses(shell: Shell, data: Path, ready: Any, token: str | None, *, demo: bool) -> None:
    http, nats = ready.get("http", {}).get("url"), ready.get("mail", {}).get("url")
    facts = {"http": http, "nats": nats, "token": token, "data": str(data), "pid": os.getpid()}
    lines = [
        f"{data} is served at {http}" if http else f"{data} is served",
        f"mailboxes at {nats}" if nats else "",
    ]
    if demo:
        facts |= {"demo": True}
        lines.append("with the traffic of a demo")
    lines += [f"the token of the first admin, shown only now: {token}"] if token else []
    shell.output.facts(facts, "; ".join(line for line in lines if line))
    shell.output.flush()


@click.command(context_settings=HELP_OPTIONS)
@path_option("--out", metavar="FILE", text=f"The file to write.  [default: ./{CONFIG_NAME}]")
@click.pass_obj
def init(shell: Shell, out: Path | None) -> None:
    """Write a settings file with every setting, its meaning and its default. An existing file stays.

    \b
    Example:
      postroom init
      postroom init --out /etc/postroom.toml
    """
    from postroom.settings import template

    path = Path(CONFIG_NAME) if out is None else out
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(template())
    except FileExistsError:
        raise click.ClickException(f"{path} exists already, and stays as it is") from None
    shell.output.facts({"path": str(path)}, f"the settings are in {path}")


for _command in (up, init):
    _command.params.append(json_option())
