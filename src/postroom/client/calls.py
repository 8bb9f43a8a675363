"""Calls of a client to one server: a token, timeouts, and repeated calls while no server answers."""

import itertools
import math
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import msgspec

from postroom.calls.verb import Verb
from postroom.client import arguments
from postroom.client.connections import Call, Connections, LongPolls, RetryPauses
from postroom.errors import HarnessRefused, Overloaded, Unavailable

TIMEOUT_S = 10.0  # of one call; a long poll adds its own time
CHANGE_TIMEOUT_S = 600.0  # of a replay or a purge of all that match, a merge and a rollback
RETRIES = 4
STREAM_SILENCE_S = 45.0  # a silent stream counts as lost; the server sends something every 15 s
ACCEPT_EVENTS = {"Accept": "text/event-stream"}

_T = TypeVar("_T")


def deadline_after(timeout_s: float | None) -> float:
    """The time of the monotonic clock after a timeout; infinity without one."""
    if timeout_s is None:
        return math.inf
    return time.monotonic() + arguments.seconds("timeout_s", timeout_s)


def _part_of_path(name: str, value: Any) -> str:
    return quote(arguments.text(name, value), safe="")


class HttpClient:
    """The base of every client. Safe to share between threads."""

    pauses = RetryPauses()

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.timeout_s = arguments.positive_seconds("timeout_s", timeout_s)
        self.retries = arguments.count("retries", retries)
        self._connections = Connections(url)
        self._headers = {
            "Authorization": f"Bearer {arguments.token(token)}",
            "Content-Type": "application/json",
            **(headers or {}),
        }

    def call(
        self,
        verb: Verb,
        *,
        timeout_s: float | None = None,
        retries: int | None = None,
        long_polls: LongPolls | None = None,
    ) -> Any:
        """Call a verb; gives the decoded answer, or None for an empty one.

        The request is repeated with growing, random pauses while no server answers, so it must be one that
        may arrive twice.
        """
        path, body = verb.target(_part_of_path)
        return self._send(verb.route.method, path, body, timeout_s, retries, long_polls, verb)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float | None = None,
        retries: int | None = None,
    ) -> Any:
        """Send one request of the protocol. Repeated as a `call` is."""
        return self._send(method, path, body, timeout_s, retries)

    def _send(
        self,
        method: str,
        path: str,
        body: Any,
        timeout_s: float | None,
        retries: int | None,
        long_polls: LongPolls | None = None,
        verb: Verb | None = None,
    ) -> Any:
        data = None if body is None else arguments.json_bytes("the request", body)
        longest_s = self.timeout_s
        if timeout_s is not None:
            longest_s = arguments.positive_seconds("timeout_s", timeout_s)
        call = Call(method, path, data, self._headers, longest_s, long_polls, verb)
        retries = self.retries if retries is None else retries
        for attempt in itertools.count():
            try:
                return self._connections.ask(call)
            except Overloaded:
                raise  # the caller decides whether the message is still worth it
            except Unavailable as error:
                if attempt >= retries or call.aborted:
                    raise
                time.sleep(self.pauses.after(attempt, getattr(error, "retry_after_s", 0.0)))
        raise AssertionError("unreachable")  # pragma: no cover - the loop has no end

    def events(
        self, verb: Verb, headers: Mapping[str, str] | None = None, *, until: float = math.inf
    ) -> Iterator[dict[str, str]]:
        """The server-sent events of a verb as they come: `id`, `event` and `data`."""
        path, _ = verb.target(_part_of_path)
        call = Call(
            "GET", path, None, {**self._headers, **(headers or {}), **ACCEPT_EVENTS}, STREAM_SILENCE_S
        )
        fields: dict[str, str] = {}
        for line in self._connections.lines(call, until):
            name, _, value = line.partition(": ")
            if name:  # else a comment, which begins with a colon
                fields[name] = value
            elif not line and fields:
                yield fields
                fields = {}

    def converted(self, answer: Any, kind: type[_T]) -> _T:
        """An answer as a struct. Raises `HarnessRefused` when it does not fit."""
        try:
            return msgspec.convert(answer, kind)
        except msgspec.ValidationError as error:
            wrong = f"the answer of {self._connections.url} does not fit the protocol: {error}"
            raise HarnessRefused(0, wrong) from None

    def close(self) -> None:
        """Close every connection. A later call opens new ones."""
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
