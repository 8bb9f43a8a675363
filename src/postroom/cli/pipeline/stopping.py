"""Commands that use a JVM, and end it at the first signal.

Rule 1: the main thread never waits for the JVM. Its connection would be busy then, so that a request to stop
        Spark would wait until the pending answer arrives.
Rule 2: when a signal arrives while a JVM starts, the command waits for the start and then ends the JVM. An
        abandoned JVM would not notice that its parent has gone. Further signals are ignored meanwhile.
"""

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial, wraps
from typing import Any, Final, TypeVar

from postroom.cli.shell import Stopped

T = TypeVar("T")

starting = threading.Lock()
"""Held while a JVM starts, and for good once no JVM may start any more."""
RETRY_EVERY_S: Final = 0.1


def beside_spark(command: Callable[..., T]) -> Callable[..., T]:
    """Run a command in its own thread. With --remote (Spark Connect) there is no JVM to end."""

    @wraps(command)
    def run_beside(*arguments: Any, **options: Any) -> T:
        if options.get("remote") is not None:
            return command(*arguments, **options)
        done: Future[T] = Future()
        work = partial(command, *arguments, **options)
        worker = threading.Thread(target=_run, args=(done, work), daemon=True)
        try:
            worker.start()
            return done.result()
        except Stopped:
            _end_jvm()
            raise

    return run_beside


def follower(command: Callable[..., None]) -> Callable[..., None]:
    """Let a signal end a command normally that runs a batch every `every_s` seconds."""

    @wraps(command)
    def follow(*arguments: Any, **options: Any) -> None:
        try:
            command(*arguments, **options)
        except Stopped:
            if options["every_s"] is None:
                raise

    return follow


def _run(done: "Future[T]", work: Callable[[], T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001 - the main thread raises it
        done.set_exception(error)


def _end_jvm() -> None:
    from postroom.pipeline.spark.jvm import end_jvm

    for number in (signal.SIGTERM, signal.SIGINT):
        # Not SIG_IGN: a JVM that starts later would inherit it, and ignore the signal that is to end it.
        signal.signal(number, lambda *_: None)
    # A JVM can be ended as soon as it exists, also while it waits for a cluster that does not answer.
    is_held = False
    while not end_jvm() and not is_held:
        is_held = starting.acquire(timeout=RETRY_EVERY_S)
