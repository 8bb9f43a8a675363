"""Commands that wait for a JVM, and end with it at the first signal.

Rule 1: the main thread never waits for the JVM. It could not be stopped there: its connection would be busy,
        and whatever it then says to Spark, also that it shall stop, would wait behind the answer.
Rule 2: a JVM that is being started is waited for. Left alone, it would not notice that nobody wants it.
        Whoever is impatient meanwhile, and sends another signal, is not heard.
"""

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import wraps
from typing import Any, Final, TypeVar

from postroom.cli.shell import Stopped

T = TypeVar("T")

starting = threading.Lock()
"""Held while a JVM is started, and for good once none shall be."""
LOOK_S: Final = 0.1


def beside_spark(command: Callable[..., T]) -> Callable[..., T]:
    """Let a command do its work in a thread of its own. Behind Spark Connect there is no JVM to end."""

    @wraps(command)
    def waiting(*words: Any, **options: Any) -> T:
        if options.get("remote") is not None:
            return command(*words, **options)
        done: Future[T] = Future()
        worker = threading.Thread(target=_work, args=(done, lambda: command(*words, **options)), daemon=True)
        try:
            worker.start()
            return done.result()
        except Stopped:
            _end_jvm()
            raise

    return waiting


def follower(command: Callable[..., None]) -> Callable[..., None]:
    """Of a command that goes on for ever, with a turn `every_s` seconds, a signal is the normal end."""

    @wraps(command)
    def following(*words: Any, **options: Any) -> None:
        try:
            command(*words, **options)
        except Stopped:
            if options["every_s"] is None:
                raise

    return following


def _work(done: "Future[T]", work: Callable[[], T]) -> None:
    try:
        done.set_result(work())
    except BaseException as error:  # noqa: BLE001 - whoever waits gets it
        done.set_exception(error)


def _end_jvm() -> None:
    from postroom.pipeline.jvm import end_jvm

    for number in (signal.SIGTERM, signal.SIGINT):
        # Not SIG_IGN: a JVM that is yet to start would inherit it, and not hear that it shall end.
        signal.signal(number, lambda *_: None)
    # As soon as there is one it can be ended, also while it looks for a cluster that does not answer.
    is_held = False
    while not end_jvm() and not is_held:
        is_held = starting.acquire(timeout=LOOK_S)
