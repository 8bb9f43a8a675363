"""Wake-ups across machines through PostgreSQL's LISTEN and NOTIFY.

Rule 1: a wake-up is sent after the commit that it is about, by another thread in another transaction. NOTIFY
        inside a transaction would make all commits of the server wait for each other.
Rule 2: wake-ups are never trusted. `hears_other_processes` is false, and waiters poll, until a wake-up of our
        own has come back. It is sent over another connection than it is heard on: behind PgBouncer in
        transaction mode, none comes back then.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from postroom.nudges.notifier import Callback, Notifier
from postroom.system.log import library_log

_log = library_log("postroom.store")

SEND_PAUSE_S = 0.005  # wake-ups of this time are sent together
LISTEN_S = 0.5  # how often a listening thread checks whether it is still needed
RECONNECT_S = 1.0
PROBE_S = 10.0  # how often a listening connection is probed
NAMES_MAX = 1_000  # names that wait to be sent; more of them are lost
NAME_BYTES_MAX = 7_000  # PostgreSQL sends less than 8,000 bytes
SEPARATOR = "|"
# NOTIFY would make the commit wait for the disk. A setting of the session would stay in the pool of a pooler.
_NOTIFY = """SELECT pg_notify(%s, name), set_config('synchronous_commit', 'off', true)
    FROM unnest(%s::text[]) AS name"""


class DatabaseNotifier(Notifier):
    """The wake-ups of one store in a database. `connect` makes connections in autocommit mode."""

    def __init__(self, connect: Callable[[], Any], channel: str) -> None:
        self._connect = connect
        self._channel = channel
        super().__init__(None)

    def _start(self) -> None:
        super()._start()
        self._own = f"{os.getpid():x}{os.urandom(4).hex()}"
        self._names: dict[str, None] = {}
        self._is_any = threading.Event()
        self._stopped = threading.Event()
        self._sends = False
        self._listens = False

    def notify(self, queue: str) -> bool:
        if queue in self._callbacks:
            self._call(queue)
        if len(self._names) < NAMES_MAX:
            self._names[queue] = None
        if not self._is_any.is_set():
            self._is_any.set()
            self._start_to_send()
        return False

    def notify_rarely_awaited(self, queue: str) -> None:
        self.notify(queue)

    @contextmanager
    def subscribed(self, queue: str, callback: Callback) -> Iterator[None]:
        with super().subscribed(queue, callback):
            if not self._listens:
                self._start_to_send()  # a thread that listens sends a wake-up to itself
                self._listens = self._run(self._listen_all, "postroom-listen")
            yield

    def _start_to_send(self) -> None:
        if not self._sends:
            self._sends = self._run(self._send_all, "postroom-notify")

    def _run(self, work: Callable[[threading.Event, threading.Event], None], name: str) -> bool:
        """Start a thread with the events of now: those of `close` are for later threads."""
        events = self._stopped, self._is_any
        threading.Thread(target=work, args=events, name=name, daemon=True).start()
        return True

    def close(self) -> None:
        """End both threads. The next call starts them again."""
        self._stopped.set()
        self._is_any.set()
        self._stopped, self._is_any = threading.Event(), threading.Event()
        self._sends = self._listens = self._watching = False

    # ---- in the threads ------------------------------------------------------------------------

    def _send_all(self, stopped: threading.Event, is_any: threading.Event) -> None:
        connection = None
        while not stopped.is_set():
            is_any.wait()
            is_any.clear()
            names, self._names = list(self._names), {}
            try:
                connection = connection or self._connect()
                self._send(connection, names)
            except Exception as error:  # noqa: BLE001 - a lost wake-up only makes waiters poll
                _log.warning("wake-ups were not sent through the database: %s", type(error).__name__)
                _close(connection)
                connection = None
                stopped.wait(RECONNECT_S)
            time.sleep(SEND_PAUSE_S)
        _close(connection)

    def _send(self, connection: Any, names: list[str]) -> None:
        texts = [f"{self._own}{SEPARATOR}{name}".replace("\0", "\x1a0") for name in names]
        fitting = [text for text in texts if len(text.encode()) <= NAME_BYTES_MAX]
        with connection.watched():
            connection.execute(_NOTIFY, [self._channel, fitting])

    def _listen_all(self, stopped: threading.Event, is_any: threading.Event) -> None:
        def call_itself() -> None:  # `notify` would start a thread again that `close` has stopped
            self._names[self._own] = None
            is_any.set()

        while not stopped.is_set():
            connection = None
            try:
                connection = self._connect()
                with connection.watched():
                    connection.execute(f'LISTEN "{self._channel}"')
                call_itself()  # comes back when LISTEN works here
                probe_at = time.monotonic() + PROBE_S
                while not stopped.is_set():
                    for heard in connection.notifies(timeout=LISTEN_S):
                        self._hear(heard.payload)
                        if stopped.is_set():
                            break
                    if time.monotonic() >= probe_at:
                        probe_at = time.monotonic() + PROBE_S
                        self._send(connection, [])  # an error here: the server is gone
                        if not self._watching:
                            call_itself()
            except Exception as error:  # noqa: BLE001 - waiters poll until LISTEN works again
                if not stopped.is_set():
                    _log.warning("LISTEN is started again: %s", type(error).__name__)
                    self._watching = False
                    stopped.wait(RECONNECT_S)
            _close(connection)

    def _hear(self, payload: str) -> None:
        sender, _, name = payload.partition(SEPARATOR)
        if sender != self._own:
            self._call(name.replace("\x1a0", "\0"))
        elif name == self._own:
            self._watching = True
            with self._mutex:  # what was sent before may have been missed
                queues = list(self._callbacks)
            for queue in queues:
                self._call(queue)


def _close(connection: Any) -> None:
    if connection is not None:
        with suppress(Exception):
            connection.close()
