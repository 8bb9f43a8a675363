"""HTTP connections to one harness, and what its answers mean.

Rule 1: an answer above 299 becomes an error of `errors.py` with the harness's sentence as its text.
Rule 2: no secret is logged or shown.
"""

import contextlib
import http.client
import math
import os
import random
import socket
import ssl
import time
import urllib.parse
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from postroom.calls.verb import Verb
from postroom.client import arguments
from postroom.errors import (
    AgentReplaced,
    Bounced,
    ContextChanged,
    GoalEnded,
    GuardTripped,
    HarnessRefused,
    InvalidExpiry,
    InvalidMessage,
    InvalidParent,
    InvalidPriority,
    KeyReused,
    NotAllowed,
    Overloaded,
    PostroomError,
    ResultGone,
    RollbackRefused,
    StaleLease,
    UnknownCheckpoint,
    UnknownGoal,
    UnknownNode,
    UnknownTask,
    UnknownToken,
    UnknownType,
    Unreachable,
    UnsupportedVersion,
    ValidationError,
    WrongState,
)

RETRY_AFTER_S_MAX = 30.0  # a longer `Retry-After` is cut to this
ANSWER_BYTES_MAX = 256 * 1024 * 1024
IDLE_CONNECTIONS_MAX = 64

_ONLY_SENTENCES = (InvalidExpiry, InvalidParent, InvalidPriority, ValidationError)
"""Errors that have no facts besides their sentence."""

_SUCCESS_BELOW = 300
_WRONG_ARGUMENT = (400, 413)
_NOT_ALLOWED = (401, 403)
_TOO_MANY = 429
_SERVER_ERROR = 500

_decode = msgspec.json.Decoder().decode
_Answer = tuple[int, http.client.HTTPMessage, bytes]


class LongPolls:
    """The long polls of one worker. `abort` ends them early.

    `abort` closes only our half of each connection. A harness that sees this releases what it has claimed for
    us; a task that was already on its way still arrives.
    """

    def __init__(self) -> None:
        self._connections: set[http.client.HTTPConnection] = set()
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_WR)

    @contextlib.contextmanager
    def track(self, connection: http.client.HTTPConnection) -> Iterator[None]:
        self._connections.add(connection)
        try:
            if self.aborted:
                self.abort()
            yield
        finally:
            self._connections.discard(connection)


class Call(NamedTuple):
    """One request. `long_polls` is set when a worker may abort it."""

    method: str
    path: str
    body: bytes | None
    headers: dict[str, str]
    timeout_s: float
    long_polls: LongPolls | None = None
    verb: Verb | None = None

    @property
    def aborted(self) -> bool:
        return self.long_polls is not None and self.long_polls.aborted


class Connections:
    """Keep-alive connections to one server: as many as there are calls at the same time."""

    def __init__(self, url: str) -> None:
        parts, self._host, self._port = _address(url)
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._prefix = parts.path.rstrip("/")
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._generation = (os.getpid(), 0)
        """Changes with every close and every fork. A connection of an older generation is not kept."""

    def ask(self, call: Call) -> Any:
        """Send one request. Returns the decoded answer, or None for an empty one."""
        try:
            status, headers, body = self._exchange_on_any(call)
        except TimeoutError:
            raise Unreachable(f"{self.url} did not answer within {call.timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"cannot reach {self.url}: {_reason(error)}") from error
        if status >= _SUCCESS_BELOW:
            raise refusal(call, status, headers, body)
        try:
            return _decode(body) if body else None
        except msgspec.DecodeError as error:
            raise HarnessRefused(status, f"the answer of {self.url} is not JSON: {error}") from None

    def lines(self, call: Call, until: float = math.inf) -> Iterator[str]:
        """The lines of a long answer as they come, on a connection of its own.

        Raises `TimeoutError` at `until`, a time of the monotonic clock.
        """
        connection = self._kind(self._host, self._port, timeout=call.timeout_s)
        try:
            connection.request(call.method, self._prefix + call.path, call.body, call.headers)
            response = connection.getresponse()
            if response.status >= _SUCCESS_BELOW:
                raise refusal(call, response.status, response.headers, self._read(response))
            while True:
                if connection.sock is not None:
                    connection.sock.settimeout(max(0.001, min(call.timeout_s, until - time.monotonic())))
                if not (line := response.readline(ANSWER_BYTES_MAX)):
                    return
                yield line.decode().rstrip("\r\n")
        except TimeoutError:
            if time.monotonic() >= until:
                raise
            raise Unreachable(f"{self.url} sent nothing for {call.timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"cannot reach {self.url}: {_reason(error)}") from error
        finally:
            connection.close()

    def _exchange_on_any(self, call: Call) -> _Answer:
        """Use an idle connection, or a new one when the server has closed the idle one meanwhile."""
        idle = self._take_idle()
        if idle is not None:
            try:
                return self._exchange(idle, call)
            except (ConnectionError, http.client.BadStatusLine):
                if call.aborted:
                    raise
            self.close()  # the other idle connections are as old
        return self._exchange(self._kind(self._host, self._port, timeout=call.timeout_s), call)

    def _exchange(self, connection: http.client.HTTPConnection, call: Call) -> _Answer:
        generation = self._generation
        try:
            if connection.sock is not None:
                connection.sock.settimeout(call.timeout_s)
            connection.request(call.method, self._prefix + call.path, call.body, call.headers)
            with contextlib.nullcontext() if call.long_polls is None else call.long_polls.track(connection):
                response = connection.getresponse()
            body = self._read(response)
        except BaseException:
            connection.close()
            raise
        full = len(self._idle) >= IDLE_CONNECTIONS_MAX
        if response.will_close or call.aborted or generation != self._generation or full:
            connection.close()
        else:
            self._idle.append(connection)
        return response.status, response.headers, body

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        if (response.length or 0) > ANSWER_BYTES_MAX:
            raise HarnessRefused(
                response.status, f"the answer of {self.url} is longer than {ANSWER_BYTES_MAX} bytes"
            )
        return response.read()

    def _take_idle(self) -> http.client.HTTPConnection | None:
        if self._generation[0] != os.getpid():
            self.close()  # they are the parent's; closing this process's copy leaves the parent's open
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def close(self) -> None:
        self._generation = (os.getpid(), self._generation[1] + 1)
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()


def _address(url: str) -> tuple[urllib.parse.SplitResult, str, int | None]:
    """The parts of a harness's address, its host and its port."""
    wrong = InvalidMessage("url must be the address of a harness, such as http://127.0.0.1:8800")
    arguments.text("url", url)
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError:  # such as a port that is not a number
        raise wrong from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
        raise wrong
    return parts, parts.hostname, port


def untrusted(error: ssl.SSLCertVerificationError, names: str) -> str:
    """Why a certificate is not accepted. `names` is what names the certificates to trust."""
    said = error.verify_message.rstrip(".")
    is_of_another_host = "mismatch" in said  # no other certificate to trust would help
    return said if is_of_another_host else f"{said}. {names} names the certificates to trust"


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return untrusted(error, "SSL_CERT_FILE")
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


# ---- refusals ------------------------------------------------------------------------------------------


class _ErrorAnswer(msgspec.Struct, frozen=True):
    error: str = ""
    message: str = ""


class _Subject(msgspec.Struct, frozen=True):
    """The task and the lease that a call was about; empty and 0 when it named none."""

    task_id: str = ""
    lease: int = 0


def refusal(call: Call, status: int, headers: http.client.HTTPMessage, body: bytes) -> PostroomError:
    """The error that an answer above 299 stands for."""
    error = _error_of(call, status, headers, body)
    error.http_status = status
    return error


def _error_of(call: Call, status: int, headers: http.client.HTTPMessage, body: bytes) -> PostroomError:
    try:
        answer = msgspec.json.decode(body, type=_ErrorAnswer)
    except msgspec.DecodeError:
        answer = _ErrorAnswer()
    message = answer.message or f"the harness answered with status {status}"
    if status == _TOO_MANY or status >= _SERVER_ERROR:
        retry_after_s = _retry_after_s(headers.get("Retry-After", ""))
        if answer.error == "Overloaded":
            return Overloaded(message, retry_after_s, message)
        return Unreachable(message, retry_after_s)
    if status in _NOT_ALLOWED:
        return NotAllowed(status, message)
    subject = _subject(call)
    named: dict[str, PostroomError] = {
        "StaleLease": StaleLease(subject.task_id, subject.lease, message),
        "UnknownTask": UnknownTask(subject.task_id, message),
        "UnknownToken": UnknownToken("", message),
        "UnknownGoal": UnknownGoal("", message),
        "UnknownNode": UnknownNode("", message),
        "UnknownCheckpoint": UnknownCheckpoint("", message),
        "GoalEnded": GoalEnded("", "", "", message),
        "ContextChanged": ContextChanged("", 0, 0, message),
        "RollbackRefused": RollbackRefused("", (), message),
        "WrongState": WrongState(subject.task_id, call.path.rpartition("/")[2], "", message),
        "KeyReused": KeyReused("", "", message),
        "ResultGone": ResultGone("", "", message),
        "GuardTripped": GuardTripped("", "", 0, 0, message),
        "Bounced": Bounced("", message, message),
        "AgentReplaced": AgentReplaced("", message),
        "UnknownType": UnknownType("", (), message),
        "UnsupportedVersion": UnsupportedVersion("", "", message),
        **{kind.__name__: kind(message) for kind in _ONLY_SENTENCES},
    }
    other = InvalidMessage(message) if status in _WRONG_ARGUMENT else HarnessRefused(status, message)
    return named.get(answer.error, other)


def _subject(call: Call) -> _Subject:
    try:
        if call.body:
            return msgspec.json.decode(call.body, type=_Subject)
    except msgspec.DecodeError:
        return _Subject()
    path = call.path.partition("?")[0].removeprefix("/engine").split("/")  # such as /tasks/t-1/retry
    named = path[1:2] in (["tasks"], ["messages"], ["dlq"]) and len(path) > 2  # noqa: PLR2004
    return _Subject(urllib.parse.unquote(path[2]) if named else "")


def _retry_after_s(header: str) -> float:
    try:
        return max(0.0, min(float(header), RETRY_AFTER_S_MAX))
    except ValueError:
        return 0.0


class RetryPauses(msgspec.Struct, frozen=True):
    """How long a client waits before it repeats a call. Users do not set it."""

    first_s: float = 0.1  # doubled each time, with jitter
    longest_s: float = 2.0

    def after(self, attempt: int, retry_after_s: float) -> float:
        """A pause in seconds. Random, so that many agents do not return at once."""
        longest_s = min(self.longest_s, self.first_s * 2**attempt)
        return min(retry_after_s, RETRY_AFTER_S_MAX) + random.uniform(0.0, longest_s)  # noqa: S311 - not a secret
