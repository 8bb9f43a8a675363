"""Ends waits for a PostgreSQL server that does not answer.

Rule 1: no connection waits indefinitely. After `answer_timeout_s` its socket is shut.
Rule 2: a connection that has waited for `suspect_s` is looked up on the server, over a new connection. When
        the server does not work for it, the question or the answer was lost: the connection is half open.
        Both of its ends are closed, so that its locks on the server do not outlive it. Behind a pooler the
        session is the one that holds the advisory lock of the transaction.
Rule 3: a server that works is not interrupted before `answer_timeout_s`, and neither is a connection that
        still sends. When in doubt, the connection waits.
"""

import fcntl
import os
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import msgspec
import psycopg

from postroom.errors import PostroomError
from postroom.stores.postgres.trips import Connection
from postroom.system.log import library_log

CONFIRM_S = 0.3  # a server must be seen not to work twice, this far apart
PROBE_TIMEOUT_S = 3.0  # for the answers of a probe
IDLE_WATCHES_MAX = 20  # the watchdog's thread ends when nothing was watched for this many looks

MARK = "pid || '-' || extract(epoch FROM backend_start)"
"""Names one session of a server. The number of a process can be used again, its start cannot."""

_SESSIONS = f"""WITH sessions AS MATERIALIZED (
    SELECT {MARK} AS mark, pid, state, state_change FROM pg_stat_activity
    UNION ALL
    SELECT 'lock-' || (classid::bigint << 32 | objid::bigint), pid, state, state_change
    FROM pg_locks JOIN pg_stat_activity USING (pid)
    WHERE locktype = 'advisory' AND objsubid = 1 AND granted)"""
"""The sessions of a server by mark, and by the advisory locks that they hold."""
_UNANSWERED = f"""{_SESSIONS} SELECT asked.mark FROM unnest(%s::text[]) AS asked (mark) WHERE NOT EXISTS (
    SELECT 1 FROM sessions WHERE sessions.mark = asked.mark
    AND (state NOT LIKE 'idle%%' OR state_change > clock_timestamp() - interval '1 second'))"""
_END = f"{_SESSIONS} SELECT pg_terminate_backend(pid) FROM sessions WHERE mark = ANY(%s)"
_SIZE = struct.Struct("i")
_log = library_log("postroom.store")


class WaitLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How long a store waits for its server. Users do not set it."""

    connect_timeout_s: int = 3
    statement_timeout_s: float = 10.0
    answer_timeout_s: float = 12.0
    suspect_s: float = 2.0
    watch_s: float = 0.5


class _Watched(NamedTuple):
    connection: Connection
    fd: int
    deadline: float


class Watchdog:
    """Shuts the sockets of connections whose server does not answer. `connect` connects a probe."""

    def __init__(self, connect: Callable[[], Connection], limits: WaitLimits) -> None:
        self._connect = connect
        self.limits = limits
        self.fresh()

    def fresh(self) -> None:
        """Reset the state: a forked child has none of the threads."""
        self._watched: dict[int, _Watched] = {}
        self._mutex = threading.Lock()
        self._runs = False
        self._probes = False

    @contextmanager
    def watching(self, connection: Connection, timeout_s: float | None = None) -> Iterator[None]:
        """Watch a connection during a block."""
        timeout_s = self.limits.answer_timeout_s if timeout_s is None else timeout_s
        entry = _Watched(connection, connection.fileno(), time.monotonic() + timeout_s)
        with self._mutex:
            self._watched[id(connection)] = entry
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="postroom-watchdog", daemon=True).start()
        try:
            yield
        finally:
            self._forget(connection)

    def drop(self, connection: Connection) -> None:
        """Close a connection. One that may not answer is shut first, so that closing waits for nothing.

        It is not watched any more: its file descriptor may soon be that of another connection.
        """
        self._forget(connection)
        with suppress(psycopg.Error):
            if connection.pgconn.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                _shut(connection.fileno())
        with suppress(psycopg.Error):
            connection.close()

    def _forget(self, connection: Connection) -> None:
        with self._mutex:
            self._watched.pop(id(connection), None)

    # ---- in the thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        idle = 0
        while idle < IDLE_WATCHES_MAX:
            time.sleep(self.limits.watch_s)
            now = time.monotonic()
            with self._mutex:
                idle = 0 if self._watched else idle + 1
                for entry in list(self._watched.values()):
                    if now > entry.deadline:
                        self._end(entry)
                suspects = [one for one in self._watched.values() if self._is_suspect(one, now)]
                if idle >= IDLE_WATCHES_MAX:
                    self._runs = False
            if suspects and not self._probes:
                self._probes = True
                threading.Thread(
                    target=self._probe, args=(suspects,), name="postroom-probe", daemon=True
                ).start()

    def _is_suspect(self, entry: _Watched, now: float) -> bool:
        """Whether a connection waits for an answer, not for the network to take its question."""
        since = entry.connection.waits_since
        is_long = since and now - since > self.limits.suspect_s
        return bool(is_long and _mark(entry.connection) and not _unsent(entry.fd))

    def _end(self, entry: _Watched) -> None:
        del self._watched[id(entry.connection)]
        _shut(entry.fd)

    # ---- in a thread of its own: a probe may have to wait itself -----------------------------------------

    def _probe(self, suspects: Sequence[_Watched]) -> None:
        """Look up connections on the server, and end those that are half open."""
        waits = {_mark(one.connection): (one, one.connection.waits_since) for one in suspects}
        waits.pop("", None)  # its transaction has ended since
        try:
            for mark in self._unanswered([*waits]):
                entry, since = waits[mark]
                with self._mutex:
                    is_same = self._watched.get(id(entry.connection)) is entry
                    if is_same and entry.connection.waits_since == since:
                        _log.warning("a connection to the database is half open and is closed")
                        self._end(entry)
        except (psycopg.Error, PostroomError) as error:  # then nothing is known, and the connections wait
            _log.debug("the database does not answer a probe: %s", type(error).__name__)
        finally:
            self._probes = False

    def _unanswered(self, marks: list[str]) -> list[str]:
        """The sessions that the server does not work for. The server ends them."""
        probe = self._connect()
        try:
            with self.watching(probe, PROBE_TIMEOUT_S):
                for pause_s in (CONFIRM_S, 0.0):
                    rows = probe.execute(_UNANSWERED, [marks]).fetchall()  # type: ignore[arg-type, unused-ignore]
                    marks = [mark for (mark,) in rows]
                    time.sleep(pause_s if marks else 0.0)
                if marks:
                    probe.execute(_END, [marks])  # type: ignore[arg-type, unused-ignore]
        finally:
            self.drop(probe)
        return marks


def _mark(connection: Connection) -> str:
    """Names the session that works for a connection; empty when it cannot be named."""
    return connection.mark or (f"lock-{connection.lock_number}" if connection.lock_number else "")


def _unsent(fd: int) -> int:
    """How many bytes of a socket the other side has not acknowledged; 0 when that is unknown."""
    with suppress(OSError):
        return int(_SIZE.unpack(fcntl.ioctl(fd, termios.TIOCOUTQ, _SIZE.pack(0)))[0])
    return 0


def _shut(fd: int) -> None:
    """Shut a socket that another thread waits on, without closing its descriptor."""
    with suppress(OSError):
        copy = socket.socket(fileno=os.dup(fd))
        with copy:
            copy.shutdown(socket.SHUT_RDWR)
