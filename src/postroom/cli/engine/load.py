"""For operators: `postroom engine load`, a load with the latencies of each priority."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from postroom.cli.engine.options import data_option
from postroom.cli.places import DATABASE
from postroom.cli.shell import Shell, StoreAddress, parse_wait

if TYPE_CHECKING:
    from postroom.server.up.engine_load import LoadReport

MIX_DEFAULT = "10/40/40/10"
PRIORITIES = 4


def parse_mix(text: str) -> tuple[float, ...]:
    """Parts of P0 to P3, such as 10/40/40/10."""
    try:
        parts = tuple(float(part) for part in text.split("/"))
    except ValueError:
        parts = ()
    if len(parts) != PRIORITIES or min(parts) < 0 or not 0 < sum(parts) < float("inf"):
        raise click.BadParameter(f"{text!r} is not of the form {MIX_DEFAULT}: the parts of P0, P1, P2 and P3")
    return parts


@click.command()
@data_option
@click.option(
    "--rate", type=click.FloatRange(min=0.01, max=100_000), default=100.0, show_default=True, metavar="N",
    help="Messages a second.",
)  # fmt: skip
@click.option(
    "--orgs", type=click.IntRange(1, 10_000), default=10, show_default=True, metavar="N",
    help="How many organizations send them.",
)  # fmt: skip
@click.option(
    "--mix", type=parse_mix, default=MIX_DEFAULT, show_default=True, metavar="P0/P1/P2/P3",
    help="The parts of the priorities.",
)  # fmt: skip
@click.option(
    "--duration-s", type=parse_wait, default=10.0, show_default=True, metavar="S", help="How long to send."
)
@click.pass_obj
def load(shell: Shell, /, data: Path | None, **terms: Any) -> None:
    """Send messages at a fixed rate, and print how long those of each priority waited.

    One worker in this process handles each message in 5 ms. A latency is the time from the submit to the
    start of the handler; its 99th percentile is shown next to the target: P0 10 ms, P1 50, P2 100, P3 500.
    The store is a new one in a temporary folder, unless --data names another.

    \b
    Example:
      postroom engine load --rate 200 --orgs 20 --duration-s 10
      postroom engine load --data run --rate 50 --mix 25/25/25/25
    """
    import asyncio

    if not terms["duration_s"]:
        raise click.BadParameter("--duration-s must be above 0")
    with store_of(data) as store:
        report = asyncio.run(measured(store, terms))
    print_report(shell, report)


@contextmanager
def store_of(data: Path | None) -> Iterator[str]:
    """The address of the store of a data folder, or of a temporary one."""
    if isinstance(data, StoreAddress):
        yield data.url
        return
    if data is not None:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield f"sqlite:///{data / DATABASE}"
        return
    with tempfile.TemporaryDirectory(prefix="postroom-load-") as made:
        yield f"sqlite:///{made}/{DATABASE}"


async def measured(url: str, terms: dict[str, Any]) -> "LoadReport":
    """Run a worker and a load in this process."""
    import asyncio

    from postroom.goals.engine import Engine
    from postroom.server.up.engine_load import register_probe, run_load

    async with Engine.open(url) as engine:
        register_probe(engine)
        worker = asyncio.create_task(engine.run())
        try:
            return await run_load(engine, **terms)
        finally:
            await engine.stop()
            await worker


def print_report(shell: Shell, report: "LoadReport") -> None:
    rows = [
        {
            "priority": f"P{each.priority}",
            "count": each.count,
            "p50_ms": round(each.p50_ms, 2),
            "p99_ms": round(each.p99_ms, 2),
            "max_ms": round(each.max_ms, 2),
            "target_ms": each.target_ms,
            "within_target": each.is_within_target,
        }
        for each in report.classes
    ]
    facts = {"submitted": report.submitted, "refused": report.refused, "unfinished": report.unfinished}
    if not shell.output.readable:
        shell.output.json_line({**facts, "classes": rows})
        return
    columns = ["priority", "count", "p50_ms", "p99_ms", "max_ms", "target_ms", "within_target"]
    shell.output.rows(columns, rows, empty="no message has a result")
    shell.output.sentence(", ".join(f"{count} {name}" for name, count in facts.items()))


COMMANDS = (load,)
