"""For workers: `postroom engine work`, worker processes and their supervisor."""

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from postroom.cli.places import store_in
from postroom.cli.server_options import FROM_ENVIRONMENT, STORE_VARIABLE, store_option, with_store
from postroom.cli.shell import Shell, path_option
from postroom.cli.tasks.options import FOLDER
from postroom.errors import InvalidSetting

if TYPE_CHECKING:
    import asyncio

    import postroom.server.telemetry.worker_telemetry  # noqa: F401 - it registers itself
    from postroom.goals.engine import Engine

WORKERS = click.IntRange(1, 1_000)
MIN_WORKERS_DEFAULT = 2
MAX_WORKERS_DEFAULT = 50


@click.command()
@click.option(
    "--app", required=True, metavar="MODULE:ENGINE", help="The engine with its handlers, such as app:engine."
)
@click.option(
    "--min-workers", "least", type=WORKERS, default=MIN_WORKERS_DEFAULT, show_default=True, metavar="N",
    help="How many worker processes run at least.",
)  # fmt: skip
@click.option(
    "--max-workers", "most", type=WORKERS, default=MAX_WORKERS_DEFAULT, show_default=True, metavar="N",
    help="How many run at most, when many messages wait.",
)  # fmt: skip
@path_option(
    "--data", metavar="DIR", text="Work on the store of this folder, not on that of the app.", kind=FOLDER
)
@store_option("Work on this store, such as postgres://user@host/db, not on that of the app.")
@click.option("--while-stdin", is_flag=True, hidden=True, help="Stop when stdin ends: the parent has exited.")
@click.option(
    "--as-worker", metavar="ID", hidden=True, help="Be one worker, of the supervisor that starts it."
)
@click.pass_obj
def work(
    shell: Shell,
    /,
    app: str,
    least: int,
    most: int,
    data: Path | None,
    store: str | None,
    while_stdin: bool,
    as_worker: str | None,
) -> None:
    """Run worker processes for the handlers of an app.

    The app is a module with an `Engine`, looked for in the current folder, too. A worker that dies is started
    again, and its messages run again at once. The number of workers follows the backlog. After SIGTERM no
    worker claims any more; what runs has 30 s to finish, and the rest is released. With
    Policy(agents=AgentRules(program=...)), the programs of agents that messages spawn run next to workers.

    \b
    Example:
      postroom engine work --app app:engine
      postroom engine work --app shop.queue:engine --min-workers 4 --max-workers 16
    """
    import asyncio

    from postroom.engine.work.worker import DRAIN_S
    from postroom.server.harness.agent_programs import AgentPrograms
    from postroom.server.harness.engine_workers import WorkerProcesses, default_command, load_app
    from postroom.stores.open import open_store
    from postroom.system.parent import stop_with_stdin

    shell.show_warnings()
    if data is not None and store is not None:
        raise click.UsageError("--data and --store exclude each other")
    store = store if data is None else store_in(shell, data.absolute(), "messages", create=False)
    engine = load_app(app) if store is None else load_app(app).on(open_store(store))
    if while_stdin:
        stop_with_stdin()
    if as_worker is not None:
        asyncio.run(run_worker(engine, as_worker))
        return
    if most < least:
        raise InvalidSetting(f"--max-workers {most} is below --min-workers {least}")

    def drains(in_flight: int) -> None:
        facts = {"action": "drain", "in_flight": in_flight, "at_most_s": DRAIN_S}
        shell.output.facts(facts, f"draining {in_flight} messages, at most {DRAIN_S:g} s")
        shell.output.flush()

    command = default_command(app, "" if store is None else f"{FROM_ENVIRONMENT}{STORE_VARIABLE}")
    processes = WorkerProcesses(
        engine, command, least=least, most=most, on_drain=drains, environment=with_store(store)
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: processes.stop())
    facts = {"app": app, "pid": os.getpid(), "store": engine.store.url, "workers": least}
    shell.output.facts(facts, f"{least} workers of {app} work on {engine.store.url}; Ctrl-C ends them")
    shell.output.flush()
    with engine, AgentPrograms(engine) if engine.policy.agents.program else nullcontext():
        processes.run()


async def run_worker(engine: "Engine", worker_id: str) -> None:
    """Work until a signal."""
    import asyncio

    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    watch = asyncio.create_task(_stop_on_signal(engine, stopping))
    try:
        await engine.run(worker_id=worker_id)
    finally:
        watch.cancel()
        engine.close()


async def _stop_on_signal(engine: "Engine", stopping: "asyncio.Event") -> None:
    await stopping.wait()
    await engine.stop()


COMMANDS = (work,)
