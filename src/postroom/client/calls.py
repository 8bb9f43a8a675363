"""Calls of a client to one server: a token, timeouts, and repeated calls while no server answers."""

import itertools
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from postroom.client import arguments
from postroom.client.connections import Call, Connections, pause_s
from postroom.errors import HarnessRefused, Overloaded, Unavailable

TIMEOUT_S = 10.0  # of one answer; a long poll adds its own time
RETRIES = 4

_T = TypeVar("_T")


class HttpClient:
    """The base of every client. Safe to share between threads."""

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

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        timeout_s: float | None = None,
        retries: int | None = None,
    ) -> Any:
        """Send one request of the protocol; gives the decoded answer, or None for an empty one.

        The request is repeated with growing, random pauses while no server answers, so it must be one that
        may arrive twice.
        """
        data = None if body is None else arguments.json_bytes("the request", body)
        longest_s = self.timeout_s
        if timeout_s is not None:
            longest_s = arguments.positive_seconds("timeout_s", timeout_s)
        call = Call(method, path, data, self._headers, longest_s)
        return self._call(call, self.retries if retries is None else retries)

    def _call(self, call: Call, retries: int) -> Any:
        for attempt in itertools.count():
            try:
                return self._connections.ask(call)
            except Overloaded:
                raise  # the caller decides whether the message is still worth it
            except Unavailable as error:
                if attempt >= retries or call.aborted:
                    raise
                time.sleep(pause_s(attempt, getattr(error, "retry_after_s", 0.0)))
        raise AssertionError("unreachable")  # pragma: no cover - the loop has no end

    def _converted(self, answer: Any, kind: type[_T]) -> _T:
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
