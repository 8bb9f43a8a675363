"""The verbs of an engine for plain code: each call waits for its outcome.

Rule 1: a verb is one line, `pause = waits(GlobalQueue.pause)`. Its arguments, types and docstring are those
        of the coroutine.
"""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from postroom.engine.agents.bounces import Bounces
from postroom.engine.dlq import DeadLetters
from postroom.engine.handle import Wait
from postroom.engine.token_status import Tokens
from postroom.system.handles import reset_after_fork

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._reset()
        reset_after_fork(self)

    def _reset(self) -> None:
        self._mutex = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def after_fork(self) -> None:
        """A child has no thread."""
        self._reset()

    def wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine and return its result. An interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._running())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._mutex:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_run, args=(self._loop,), name="postroom-engine", daemon=True
                )
                self._thread.start()
            return self._loop

    def close(self) -> None:
        """End the thread."""
        with self._mutex:
            loop, self._loop = self._loop, None
        if loop is not None and self._thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(CLOSE_TIMEOUT_S)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


class BlockingPart(Generic[S]):
    """Verbs of an object with coroutines, each of which waits for its outcome."""

    def __init__(self, of: S, wait: Wait) -> None:
        self.of = of
        self.wait = wait


def waits(verb: Callable[Concatenate[S, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """A method of a `BlockingPart` that calls the coroutine method and waits for its outcome."""

    @functools.wraps(verb)
    def call(part: BlockingPart[S], /, *args: P.args, **kwargs: P.kwargs) -> T:
        outcome: T = part.wait(getattr(part.of, verb.__name__)(*args, **kwargs))  # a subclass may override it
        return outcome

    return call


class BlockingDeadLetters(BlockingPart[DeadLetters]):
    """`engine.blocking.dlq`."""

    list = waits(DeadLetters.list)
    show = waits(DeadLetters.show)
    replay = waits(DeadLetters.replay)
    purge = waits(DeadLetters.purge)


class BlockingTokens(BlockingPart[Tokens]):
    """`engine.blocking.tokens`."""

    status = waits(Tokens.status)


class BlockingBounces(BlockingPart[Bounces]):
    """`engine.blocking.bounces`."""

    list = waits(Bounces.list)
    done = waits(Bounces.done)
