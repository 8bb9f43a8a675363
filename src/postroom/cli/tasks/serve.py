"""For the server: `postroom tasks serve`."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from postroom.cli.places import DATABASE
from postroom.cli.program import Programs
from postroom.cli.server_options import (
    FROM_ENVIRONMENT,
    STORE_VARIABLE,
    allowed_hosts_option,
    listen_options,
    store_option,
    tls_options,
    with_store,
)
from postroom.cli.shell import Shell, parse_rate, parse_wait, path_option
from postroom.cli.tasks.options import durability_option, needed_folder_option
from postroom.system.log import library_log

if TYPE_CHECKING:
    from postroom.contracts.tasks.tasks import LeasedTask, Tasks
    from postroom.core.redaction import Redactor
    from postroom.settings import AuditSettings

PORT_DEFAULT = 8800
BUS_MAX_BYTES_DEFAULT = 1 << 30
LEASE_S_MAX = 2_592_000.0  # as in the contract, which --help must not import
CONCURRENCY_DEFAULT = 4


@click.command()
@needed_folder_option
@store_option("The store of the tasks, such as postgres://user@host/db, instead of DIR/queue.db.")
@listen_options(PORT_DEFAULT)
@click.option(
    "--overlap",
    is_flag=True,
    help="Let another server with --overlap listen on the same port: an upgrade without downtime.",
)
@click.option(
    "--execute",
    metavar="CMD",
    help="A shell command that acts on each decision. It gets JSON with task_id, agent, payload and decision "
    "on its stdin, and has to end with exit code 0.",
)
@click.option(
    "--allow-nudge",
    "allowed_nudge_hosts",
    multiple=True,
    metavar="HOST",
    help="A private host at which agents may be nudged. May be repeated.",
)
@click.option(
    "--bus-max-bytes",
    type=click.IntRange(1),
    default=BUS_MAX_BYTES_DEFAULT,
    show_default=True,
    metavar="N",
    help="The largest size of one bus with its archives; a post beyond it is refused.",
)
@path_option(
    "--audit",
    metavar="FOLDER",
    text="Ship every event to this audit stream, in a process of its own; see `postroom audit ship`.",
)
@click.option(
    "--max-lease-s", "lease_s_max", type=parse_wait, default=LEASE_S_MAX, show_default=True, metavar="S",
    help="The longest lease. Requests for longer leases are shortened to it.",
)  # fmt: skip
@click.option(
    "--concurrency", type=click.IntRange(1, 256), default=CONCURRENCY_DEFAULT, show_default=True, metavar="N",
    help="How many decisions are executed at the same time.",
)  # fmt: skip
@click.option(
    "--token-rate", type=parse_rate, default=0.0, show_default=True, metavar="N",
    help="Calls a second that a token without a rate of its own may make; 0: no limit.",
)  # fmt: skip
@click.option("--in-order", is_flag=True, help="Execute the decisions of each agent one after the other.")
@click.option(
    "--app",
    metavar="MODULE:ENGINE",
    help="An engine whose types and rules the global queue has; see `engine work`.",
)
@tls_options
@click.option("--page/--no-page", default=True, help="Serve the live page.  [default: yes]")
@click.option("--mcp/--no-mcp", default=True, help="Serve MCP at /mcp.  [default: yes]")
@allowed_hosts_option
@click.option("--while-stdin", is_flag=True, hidden=True, help="Stop when stdin ends: the parent has exited.")
@durability_option("group")
@click.pass_obj
def serve(
    shell: Shell, /, data: Path, store: str | None, host: str, execute: str | None, audit: Path | None,
    app: str | None, tls_cert: Path | None, tls_key: Path | None, page: bool, mcp: bool,
    allowed_hosts: str | None, while_stdin: bool, durability: Any, **terms: Any,
) -> None:  # fmt: skip
    """Run the harness: an HTTP server for the agents, and its background loops.

    Agents claim their tasks there and report their decisions; --execute acts on the decisions. Without
    --execute, tasks stay completed. The address is printed once the server listens. The log is JSON lines on
    stderr. SIGTERM ends the server cleanly.

    \b
    Example:
      postroom tasks serve --data run --port 8800
      postroom tasks serve --data run --execute './act-on-decision'
    """
    try:
        from postroom.server.app import serve as run_server
    except ModuleNotFoundError as error:  # only this command needs more than the core
        missing = f"the server needs {error.name}, which is not installed: pip install 'postroom[server]'"
        raise click.ClickException(missing) from None

    def print_address(bound_port: int) -> None:
        scheme = "http" if tls_cert is None else "https"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound_port}"
        note_files()
        shell.output.facts({"url": url, "data": str(data), "pid": os.getpid()}, f"{data} is served at {url}")
        shell.output.flush()

    import msgspec

    from postroom.contracts.tasks.tasks import Tasks
    from postroom.mcp.mount import mount
    from postroom.page.mount import mount as mount_page
    from postroom.server.folder.manifest import keeping
    from postroom.server.harness.engine_workers import load_app
    from postroom.server.http.hosts import checked_hosts
    from postroom.server.telemetry.alert_sinks import sinks_of
    from postroom.system.crypto.tls import server_context
    from postroom.system.parent import stop_with_stdin

    address = store or f"sqlite:///{data / DATABASE}"
    settings = shell.settings
    hidden = msgspec.structs.replace(settings.audit, redaction=settings.up.page_redaction)
    if while_stdin:
        stop_with_stdin()
    note_files: Callable[[], object] = bool

    @contextmanager
    def beside() -> Iterator[None]:
        nonlocal note_files
        say = library_log("postroom.manifest").warning
        with keeping(data, store, say) as keeper, shipping(shell, data, store, audit):
            if keeper is not None:  # else `up` keeps the manifest
                note_files = keeper.start
            yield

    if tls_key is not None and tls_cert is None:
        raise click.UsageError("--tls-key needs --tls-cert")
    tls = None if tls_cert is None else (tls_cert, tls_key)
    if tls is not None:
        server_context(*tls)  # refuses files that do not fit
    with Tasks.open(address) as tasks, Programs() as programs:  # opens no file before its first use
        act = None if execute is None else executor(tasks, programs, execute)
        run_server(
            data, store=store, host=host, execute=act, ready=print_address,
            durability=durability or "group", beside=beside(),
            app_engine=None if app is None else load_app(app), tls=tls,
            mounted=partial(mount, is_early=while_stdin) if mcp else None,
            page=mount_page(lambda: page_redactor(hidden)) if page else None,
            sinks=sinks_of(settings.alerts),
            hosts=checked_hosts(allowed_hosts or settings.up.allowed_hosts), **terms,
        )  # fmt: skip


@contextmanager
def shipping(shell: Shell, data: Path, store: str | None, folder: Path | None) -> Iterator[None]:
    """Run the audit shipper while the harness runs. It ends after the harness."""
    from postroom.server.up.supervisor import Supervisor

    if folder is None:
        yield
        return
    config = [] if shell.config is None else ["--config", str(shell.config)]
    where = ["--data", str(data)] if store is None else ["--store", f"{FROM_ENVIRONMENT}{STORE_VARIABLE}"]
    what = ["audit", "ship", *where, "--to", str(folder), "--while-stdin"]
    command = [sys.executable, "-m", "postroom.cli.main", *config, *what]
    shipper = Supervisor(command, name="the shipper", environment=with_store(store))
    shipper.start()
    try:
        yield
    finally:
        shipper.stop()


def page_redactor(settings: "AuditSettings") -> "Redactor":
    """Hides secrets on the live page. Only a server with a page open pays for the import."""
    from postroom.server.folder.shipping import redactor_of

    return redactor_of(settings)


def executor(store: "Tasks", programs: Programs, command: str) -> Callable[["LeasedTask"], None]:
    """The function that a harness calls with each decision."""

    def execute(decision: "LeasedTask") -> None:
        task = store.get(decision.parent)
        programs.run(
            command,
            {
                "task_id": task.task_id,
                "agent": task.agent,
                "type": task.type,
                "payload": task.payload,
                "decision": decision.payload,
                "decision_id": decision.task_id,
                "attempt": decision.attempt,
            },
        )

    return execute


COMMANDS = (serve,)
