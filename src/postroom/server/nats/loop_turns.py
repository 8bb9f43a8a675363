"""The turns of the event loop: a slice of time for the input of all connections, then one write for each.

Rule 1: input beyond the slice waits for that of a later turn: of one organization after the other.
Rule 2: at the end of a turn the handler is flushed, and then each connection with output is written once.
Rule 3: while the handler is overloaded, nothing more is read from the connections that published to it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from time import perf_counter

from postroom.contracts.mail import SubjectHandler
from postroom.server.access.turns import Turns
from postroom.server.nats.connection import ServerConnection
from postroom.server.nats.output import ConnectionOutput
from postroom.system.callbacks import attempt


class LoopTurns:
    """The turns of one server. `failed` is called with an error of the handler."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, slice_s: float, failed: Callable[[BaseException], None]
    ) -> None:
        self.handler: SubjectHandler | None = None
        self._loop = loop
        self._slice_s = slice_s
        self._failed = failed
        self._outputs: list[ConnectionOutput] = []
        self._publishers: set[ServerConnection] = set()
        """Connections that published to the handler in this turn."""
        self._is_open = False
        self._slice_ends = 0.0
        """When the slice of this turn ends; 0 when input waits."""
        self._waiting: Turns[ServerConnection] = Turns()
        """Connections with input that waits for a slice."""
        self._flushing: asyncio.Task[None] | None = None

    def slice_ends(self) -> float:
        """When the slice of this turn ends; 0 when a connection that has input now has to wait."""
        if not self._is_open:
            self._open()
            return self._slice_ends
        return self._slice_ends if perf_counter() < self._slice_ends else 0.0

    def wait(self, link: ServerConnection) -> None:
        """Call `run` of the connection in a slice of a later turn."""
        self._waiting.add(link, link)
        self._slice_ends = 0.0  # input that comes now has to wait as well

    def published(self, link: ServerConnection) -> None:
        """Flush the handler at the end of this turn, because a connection published to it."""
        self._publishers.add(link)
        self._open()

    def has_output(self, output: ConnectionOutput) -> None:
        """Write the output at the end of this turn."""
        self._outputs.append(output)
        self._open()

    def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._slice_ends = 0.0 if self._waiting else perf_counter() + self._slice_s
            self._loop.call_soon(self._end)

    def _end(self) -> None:
        self._is_open = False
        if self._publishers and self._flushing is None and self.handler is not None:
            publishers, self._publishers = self._publishers, set()
            try:
                caught_up = self.handler.flush()
            except Exception as error:  # noqa: BLE001 - the server must not continue without its handler
                self._failed(error)
            else:
                if caught_up is not None:
                    self._flushing = self._loop.create_task(self._await_flush(caught_up, publishers))
        outputs, self._outputs = self._outputs, []
        for output in outputs:
            if not attempt(output.write_out):
                output.link.cut()
        if self._waiting:
            self._run_waiting()

    async def _await_flush(self, caught_up: Awaitable[None], publishers: set[ServerConnection]) -> None:
        """The handler is overloaded: stop reading from its publishers until it has caught up."""
        for link in publishers:
            link.pause_reading()
        try:
            await caught_up
        except Exception as error:  # noqa: BLE001 - the same
            self._failed(error)
        for link in publishers:
            link.resume_reading()
        self._flushing = None
        self._open()

    def _run_waiting(self) -> None:
        self._open()
        ends = perf_counter() + self._slice_s
        while (link := self._waiting.take(lambda _link: True)) is not None:
            if not link.is_closing:
                link.run(ends)
            if perf_counter() >= ends:
                break
        self._slice_ends = 0.0 if self._waiting else ends

    async def finish(self) -> None:
        """End this turn, and wait until the handler has caught up."""
        self._end()
        while self._flushing is not None:
            await asyncio.wait([self._flushing])
