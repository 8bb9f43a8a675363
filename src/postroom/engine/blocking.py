"""The verbs of an engine for plain code: each call waits for its outcome."""

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from postroom.engine.handle import BlockingHandle, Wait
from postroom.system.handles import reset_after_fork

if TYPE_CHECKING:
    from postroom.engine.global_queue import GlobalQueue

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


class BlockingDeadLetters:
    """`engine.dlq` for plain code."""

    def __init__(self, engine: "GlobalQueue", wait: Wait) -> None:
        self._dlq = engine.dlq
        self._wait = wait

    def list(self, **filters: Any) -> Any:
        """As `DeadLetters.list`."""
        return self._wait(self._dlq.list(**filters))

    def show(self, message_id: str) -> Any:
        """As `DeadLetters.show`."""
        return self._wait(self._dlq.show(message_id))

    def replay(self, message_ids: Iterable[str] | None = None, **options: Any) -> Any:
        """As `DeadLetters.replay`."""
        return self._wait(self._dlq.replay(message_ids, **options))

    def purge(self, message_ids: Iterable[str] | None = None, **options: Any) -> Any:
        """As `DeadLetters.purge`."""
        return self._wait(self._dlq.purge(message_ids, **options))


class BlockingTokens:
    """`engine.tokens` for plain code."""

    def __init__(self, engine: "GlobalQueue", wait: Wait) -> None:
        self._tokens = engine.tokens
        self._wait = wait

    def status(self) -> Any:
        """As `Tokens.status`."""
        return self._wait(self._tokens.status())


class BlockingBounces:
    """`engine.bounces` for plain code."""

    def __init__(self, engine: "GlobalQueue", wait: Wait) -> None:
        self._bounces = engine.bounces
        self._wait = wait

    def list(self, org_id: str | None = None, **filters: Any) -> Any:
        """As `Bounces.list`."""
        return self._wait(self._bounces.list(org_id, **filters))

    def done(self, *keys: str) -> Any:
        """As `Bounces.done`."""
        return self._wait(self._bounces.done(*keys))


class Blocking:
    """`engine.blocking`: the verbs of an engine for plain code."""

    def __init__(self, engine: "GlobalQueue") -> None:
        self._engine = engine
        self._thread = LoopThread()
        self.wait = self._thread.wait
        self.dlq = BlockingDeadLetters(engine, self.wait)
        self.tokens = BlockingTokens(engine, self.wait)
        self.bounces = BlockingBounces(engine, self.wait)

    def submit(self, **fields: Any) -> BlockingHandle:
        """As `Engine.submit`."""
        return BlockingHandle(self.wait(self._engine.submit(**fields)), self.wait)

    def submit_many(self, messages: Iterable[Mapping[str, Any]]) -> list[BlockingHandle]:
        """As `Engine.submit_many`."""
        return [BlockingHandle(handle, self.wait) for handle in self.wait(self._engine.submit_many(messages))]

    def request(self, **fields: Any) -> Any:
        """As `Engine.request`."""
        return self.wait(self._engine.request(**fields))

    def agents(self, org_id: str | None = None) -> Any:
        """As `Engine.agents`."""
        return self.wait(self._engine.agents(org_id))

    def run(self, **options: Any) -> None:
        """As `Engine.run`, in the calling thread."""
        asyncio.run(self._engine.run(**options))

    def stop(self) -> None:
        """As `Engine.stop`."""
        self.wait(self._engine.stop())

    def get(self, message_id: str) -> Any:
        """As `Engine.get`."""
        return self.wait(self._engine.get(message_id))

    def explain(self, message_id: str) -> str:
        """As `Engine.explain`."""
        return str(self.wait(self._engine.explain(message_id)))

    def status(self) -> Any:
        """As `Engine.status`."""
        return self.wait(self._engine.status())

    def put_back(self, worker_id: str) -> int:
        """As `Engine.put_back`."""
        return int(self.wait(self._engine.put_back(worker_id)))

    def cancel(self, message_id: str) -> None:
        """As `Engine.cancel`."""
        self.wait(self._engine.cancel(message_id))

    def pause(self, **scope: Any) -> None:
        """As `Engine.pause`."""
        self.wait(self._engine.pause(**scope))

    def resume(self, **scope: Any) -> None:
        """As `Engine.resume`."""
        self.wait(self._engine.resume(**scope))

    def close(self) -> None:
        """End the thread of the event loop."""
        self._thread.close()
