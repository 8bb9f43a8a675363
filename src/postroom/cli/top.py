"""`postroom top`: the overview of a server in a terminal."""

import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from postroom.cli.places import needed_token, store_in
from postroom.cli.server_options import token_option
from postroom.cli.shell import DATA_DEFAULT, HELP_OPTIONS, Shell, Stopped, json_option, place_option

if TYPE_CHECKING:
    from postroom.page.overview import Snapshot

EVERY_S = 1.0
EVERY_S_MAX = 3_600.0
SIZE_UNKNOWN = (100, 40)
OTHER_SCREEN, FIRST_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
HOME, REST_OF_LINE, REST_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


@click.command(context_settings=HELP_OPTIONS)
@place_option(
    "A data folder, or the address of a store (postgres://...). It needs no server and no token.  "
    f"{DATA_DEFAULT}"
)
@click.option("--url", metavar="URL", help="The address of a server, instead of --data.")
@token_option
@click.option(
    "--every-s", type=click.FloatRange(0.1, EVERY_S_MAX), default=EVERY_S, show_default=True, metavar="S",
    help="How often it looks.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Look once, and end.")
@click.pass_obj
def top(
    shell: Shell, data: Path | None, url: str | None, token: str | None, every_s: float, once: bool
) -> None:
    """Show how the global queue stands: depth, rates, waiting times, workers, agents, and open decisions.

    The view is live until Ctrl-C. In a pipe and with --json, each look is a JSON object on a line of its own.

    \b
    Example:
      postroom top --data run
      postroom top --data run --once --json
      POSTROOM_TOKEN=pr_... postroom top --url http://127.0.0.1:8800
    """
    if data is not None and url is not None:
        raise click.UsageError("--data and --url name two places to look at: give one of them")
    if url is None:
        data = shell.data_place(data)
    with _reader(shell, data, url, token) as look:
        where = url or str(data)
        with suppress(Stopped):  # Ctrl-C is the usual end
            if once or not shell.output.readable:
                _print_all(shell, look, where, every_s, once=once)
            else:
                _draw_all(look, where, every_s)


@contextmanager
def _reader(
    shell: Shell, data: Path | None, url: str | None, token: str | None
) -> "Iterator[Callable[[], Snapshot]]":
    import msgspec

    from postroom.page.overview import Snapshot

    if url is not None:
        from postroom.client.calls import HttpClient

        with HttpClient(url, needed_token(token)) as client:
            yield lambda: msgspec.convert(client.request("GET", "/page/overview"), Snapshot)
        return
    from postroom.goals.engine import Engine
    from postroom.page.terminal import StoreReader

    shell.show_warnings()
    with Engine.open(store_in(shell, shell.data_place(data), "messages", create=False)) as engine:
        yield StoreReader(engine.store, engine.policy).snapshot


def _print_all(
    shell: Shell, look: "Callable[[], Snapshot]", where: str, every_s: float, *, once: bool
) -> None:
    import msgspec

    from postroom.page.terminal import drawn, without_colors

    while True:
        found = look()
        if shell.output.readable:
            for line in drawn(found, where, *shutil.get_terminal_size(SIZE_UNKNOWN)):
                shell.output.sentence(without_colors(line))
        else:
            shell.output.json_line(msgspec.to_builtins(found))
        shell.output.flush()
        if once:
            return
        time.sleep(every_s)


def _draw_all(look: "Callable[[], Snapshot]", where: str, every_s: float) -> None:
    """Draw until Ctrl-C. A terminal of another size is drawn again at once."""
    from postroom.page.terminal import drawn

    resized = _Resized()
    out = sys.stdout
    out.write(OTHER_SCREEN)
    try:
        while True:
            found = look()
            due = time.monotonic() + every_s
            while True:
                columns, lines = shutil.get_terminal_size(SIZE_UNKNOWN)
                text = f"{REST_OF_LINE}\r\n".join(drawn(found, where, columns, lines - 1))
                out.write(f"{HOME}{text}{REST_OF_LINE}{REST_OF_SCREEN}")
                out.flush()
                if not resized.wait(due - time.monotonic()):
                    break
    finally:
        out.write(FIRST_SCREEN)
        out.flush()


class _Resized:
    """Whether the size of the terminal has changed."""

    def __init__(self) -> None:
        self._is_changed = False
        signal.signal(signal.SIGWINCH, self._note)

    def _note(self, *_: object) -> None:
        self._is_changed = True

    def wait(self, timeout_s: float) -> bool:
        """Wait for a change. Returns whether there was one before the time is over."""
        end = time.monotonic() + timeout_s
        while not self._is_changed and time.monotonic() < end:
            time.sleep(min(0.1, max(0.0, end - time.monotonic())))
        found, self._is_changed = self._is_changed, False
        return found


top.params.append(json_option())
