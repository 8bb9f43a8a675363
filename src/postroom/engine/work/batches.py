"""Handlers that take several messages at once."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from postroom.engine.messages import Message
from postroom.engine.work.context import Context
from postroom.engine.work.handlers import Handler, HandlerExit, limited
from postroom.errors import ValidationError


class _Batch(msgspec.Struct):
    messages: list[Message]
    contexts: list[Context]
    futures: "list[asyncio.Future[Any]]"
    timer: asyncio.TimerHandle | None = None


Call = Callable[[Handler, Any, Any], Awaitable[Any]]


class Batches:
    """Gathers messages of one handler until a batch is full or has waited long enough."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._open: dict[int, _Batch] = {}
        """By the identity of the handler."""
        self._running: set[asyncio.Task[None]] = set()
        self.waiting = 0
        """Messages that wait for their batch. They use no slot: a batch can be larger than the slots."""

    async def call(self, handler: Handler, message: Message, context: Context) -> Any:
        """The result of one message of a batch."""
        loop = asyncio.get_running_loop()
        batch = self._open.get(id(handler))
        if batch is None:
            batch = self._open[id(handler)] = _Batch([], [], [])
            batch.timer = loop.call_later(handler.within_ms / 1000, self._begin, handler)
        future: asyncio.Future[Any] = loop.create_future()
        batch.messages.append(message)
        batch.contexts.append(context)
        batch.futures.append(future)
        self.waiting += 1
        if len(batch.messages) >= handler.batch:
            self._begin(handler)
        return await future

    def _begin(self, handler: Handler) -> None:
        batch = self._open.pop(id(handler), None)
        if batch is None:
            return
        self.waiting -= len(batch.messages)
        if batch.timer is not None:
            batch.timer.cancel()
        task = asyncio.get_running_loop().create_task(self._run(handler, batch))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, handler: Handler, batch: _Batch) -> None:
        """Run the handler. Its error is the error of every message of the batch."""
        try:
            returned = await limited(self._call(handler, batch.messages, batch.contexts), handler.timeout_s)
            results = checked_results(returned, len(batch.messages))
        except Exception as error:  # noqa: BLE001 - whatever the handler raises is the outcome
            results = [error] * len(batch.messages)
        for future, result in zip(batch.futures, results, strict=True):
            if future.done():
                continue
            if isinstance(result, StopIteration):  # a future cannot hold it
                future.set_exception(HandlerExit(result))
            elif isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)


def checked_results(returned: Any, count: int) -> Sequence[Any]:
    """What a handler of `count` messages returned, one result or exception for each."""
    if not isinstance(returned, list | tuple) or len(returned) != count:
        raise ValidationError(f"a handler of {count} messages returns a list of as many results")
    return returned


def only_result(returned: Any) -> Any:
    """The result of a batch of one message. Raises the exception that the list has instead of a result."""
    [result] = checked_results(returned, 1)
    if isinstance(result, Exception):
        raise result
    return result
