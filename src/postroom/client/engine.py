"""A client of the global queue: submit messages to a server over HTTP, and follow their answers.

    with EngineClient("http://127.0.0.1:8800", TOKEN) as client:
        message_id = client.submit(type="tool_call", payload={"tool": "search"})
        print(client.result(message_id, timeout_s=30))

Rule 1: imports only the standard library, msgspec and `postroom.errors`.
Rule 2: the client makes the id of a message, so that a submit can be repeated when its answer is lost.
Rule 3: no secret is logged or shown.
"""

import itertools
import json
import math
import time
import urllib.parse
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, TypeAlias

import msgspec

from postroom.client import arguments
from postroom.client.agent import RemoteAgent, deadline_after
from postroom.client.calls import HttpClient
from postroom.client.connections import Call, pause_s
from postroom.errors import InvalidMessage, Unreachable, failure_of

WAIT_S_MAX = 30.0  # of one request; a longer wait is several
STREAM_SILENCE_S = 45.0  # after which a stream is taken for lost; the server sends something every 15 s
FINAL_PARTS = ("result", "stream_complete", "error")
ACCEPT_EVENTS = {"Accept": "text/event-stream"}

Ids: TypeAlias = list[str]
Letters: TypeAlias = list[dict[str, Any]]

_SUCCEEDED = ("COMPLETED", "EXECUTING", "DONE")
_ENDED = (*_SUCCEEDED, "DEAD_LETTER", "CANCELLED", "EXPIRED", "QUARANTINED")


class MessageView(msgspec.Struct, frozen=True):
    """A message as its organization and operators see it."""

    message_id: str
    state: str
    priority: int = 2
    accepted_priority: int = 2
    attempt: int = 0
    retry_count: int = 0
    crashes: int = 0
    errors: list[dict[str, Any]] = []
    message: dict[str, Any] = {}
    result: Any = None
    worker_id: str = ""
    created_at: datetime | None = None
    ended_at: datetime | None = None

    @property
    def ended(self) -> bool:
        """Whether the message has a result or failed for good."""
        return self.state in _ENDED

    @property
    def succeeded(self) -> bool:
        """Whether the message has a result."""
        return self.state in _SUCCEEDED


class _Submitted(msgspec.Struct, frozen=True):
    message_ids: list[str]


class EngineClient(HttpClient):
    """A client of the global queue. Safe to share between threads.

    An agent's token names its organization, so `org_id` is needed with an operator's token only.
    """

    def __init__(self, url: str, token: str, **options: Any) -> None:
        super().__init__(url, token, **options)
        self.dlq = DeadLetters(self)
        self.bounces = BouncedAnswers(self)

    def __repr__(self) -> str:
        return f"EngineClient({self._connections.url!r})"

    # ---- messages ------------------------------------------------------------------------------

    def submit(self, *, type: str, payload: Mapping[str, Any], **fields: Any) -> str:  # noqa: A002 - the contract's word
        """Store one message and return its id. `fields` are those of `Engine.submit`."""
        [message_id] = self.submit_many([{"type": type, "payload": payload, **fields}])
        return message_id

    def submit_many(self, messages: Iterable[Mapping[str, Any]]) -> list[str]:
        """Store several messages in one commit: all or none."""
        named = [{"message_id": str(uuid.uuid4()), **message} for message in messages]
        if not named:
            return []
        answer = self.request("POST", "/engine/messages", {"messages": named})
        return self._converted(answer, _Submitted).message_ids

    def get(self, message_id: str, *, wait_s: float = 0.0) -> MessageView:
        """Return a message, or wait up to `wait_s` (at most 30) for its end."""
        path = _message_path(message_id)
        if arguments.seconds("wait_s", wait_s):
            path += f"?wait_s={min(wait_s, WAIT_S_MAX):.3f}"
        answer = self.request("GET", path, timeout_s=self.timeout_s + wait_s)
        return self._converted(answer, MessageView)

    def result(self, message_id: str, timeout_s: float | None = None) -> Any:
        """Wait for the result of a message.

        Raises `MessageFailed` when the message ends without one, and `TimeoutError` after `timeout_s`.
        """
        deadline = deadline_after(timeout_s)
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            message = self.get(message_id, wait_s=min(left_s, WAIT_S_MAX))
            if message.succeeded:
                return message.result
            if message.ended:
                raise failure_of(message_id, message.state, message.errors)
            if time.monotonic() >= deadline:
                raise TimeoutError(f"message {message_id} has not ended within {timeout_s:g} s")

    def stream(
        self, message_id: str, *, after: str = "", timeout_s: float | None = None
    ) -> Iterator[dict[str, Any]]:
        """The parts of the answer as they come, to the last one. Each has its `id`.

        A lost connection is opened again, and the stream continues after the last part. `after` is the `id`
        of a part that an earlier stream gave. Raises `TimeoutError` after `timeout_s`.
        """
        failures = itertools.count()
        until = deadline_after(timeout_s)
        while time.monotonic() < until:
            try:
                for part in self._parts(message_id, after, until):
                    after, failures = part["id"], itertools.count()
                    yield part
                    if part["type"] in FINAL_PARTS:
                        return
            except TimeoutError:
                break
            except Unreachable as error:
                failed = next(failures)
                if failed >= self.retries:
                    raise
                time.sleep(pause_s(failed, error.retry_after_s))
        raise TimeoutError(f"the answer to {message_id} did not come within {timeout_s:g} s")

    def _parts(self, message_id: str, after: str, until: float) -> Iterator[dict[str, Any]]:
        headers = {"Last-Event-ID": arguments.text("after", after)} if after else {}
        for event in self.events(f"{_message_path(message_id)}/stream", headers, until=until):
            yield {"id": event.get("id", ""), **json.loads(event["data"])}
        raise Unreachable(f"{self._connections.url} ended the stream before the answer was complete")

    def events(
        self, path: str, headers: Mapping[str, str] | None = None, *, until: float = math.inf
    ) -> Iterator[dict[str, str]]:
        """The server-sent events of a path as they come: `id`, `event` and `data`."""
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

    def agent(self) -> RemoteAgent:
        """The agent that the token names: its requests, its inbox, and what it resumes."""
        return RemoteAgent(self)

    def agents(self, org_id: str | None = None) -> list[dict[str, Any]]:
        """Registered agents: health, and what waits for what; with an agent's token, of its organization."""
        query = "" if org_id is None else f"?org_id={urllib.parse.quote(org_id, safe='')}"
        return list(self.request("GET", f"/engine/agents{query}")["agents"])

    def explain(self, message_id: str) -> str:
        """Which rule holds a message, and what would release it."""
        return str(self.request("GET", f"{_message_path(message_id)}/explain")["explanation"])

    def cancel(self, message_id: str) -> None:
        """Cancel a message. Its running handler is cancelled within a second."""
        self.request("POST", f"{_message_path(message_id)}/cancel")

    # ---- the queue -----------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Depths, stages, workers, breakers and pauses; with an agent's token, of its organization."""
        return dict(self.request("GET", "/engine/status"))

    def tokens(self) -> dict[str, Any]:
        """The token budgets; with an agent's token, without what other organizations do."""
        return dict(self.request("GET", "/engine/tokens"))

    def pause(self, *, org_id: str = "", type: str = "", kill: bool = False) -> None:  # noqa: A002
        """Stop deliveries of an organization, of a type, of both together, or all of them."""
        self.request("POST", "/engine/pause", {"org_id": org_id, "type": type, "kill": kill})

    def resume(self, *, org_id: str = "", type: str = "") -> None:  # noqa: A002
        """End a pause of the same scope."""
        self.request("POST", "/engine/resume", {"org_id": org_id, "type": type})


class BouncedAnswers:
    """`client.bounces`: answers that no agent fetched, for users and systems."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def list(self, org_id: str | None = None, **filters: Any) -> Letters:
        """Bounces, the oldest first, each with its `key`. Filters: created_by (user:ada), after, limit."""
        named = {"org_id": org_id, **filters}
        query = urllib.parse.urlencode({name: value for name, value in named.items() if value is not None})
        return list(self._client.request("GET", f"/engine/bounces?{query}")["bounces"])

    def done(self, *keys: str) -> Ids:
        """Remove bounces that their creator has. Returns the keys that were there."""
        return list(self._client.request("POST", "/engine/bounces/done", {"keys": list(keys)})["keys"])


class DeadLetters:
    """`client.dlq`."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def list(self, **filters: Any) -> Letters:
        """Dead letters by acceptance: org_id, type, error_type, since, until, limit."""
        query = urllib.parse.urlencode({name: _text(value) for name, value in filters.items()})
        return list(self._client.request("GET", f"/engine/dlq?{query}")["letters"])

    def show(self, message_id: str) -> dict[str, Any]:
        """One dead letter."""
        return dict(self._client.request("GET", f"/engine/dlq/{_quoted(message_id)}"))

    def replay(
        self,
        message_ids: Iterable[str] | None = None,
        *,
        dry_run: bool = False,
        priority: int | None = None,
        rate_per_s: float | None = None,
        **filters: Any,
    ) -> Ids:
        """Queue dead letters again; returns their ids. With `rate_per_s`, one request for each."""
        body = _choice(message_ids, filters)
        if priority is not None:
            body["priority"] = priority
        if rate_per_s is None or dry_run:
            return self._changed("replay", {**body, "dry_run": dry_run})
        pause = 1 / rate_per_s
        chosen = self._changed("replay", {**body, "dry_run": True})
        for message_id in chosen:
            self._changed("replay", {**_choice([message_id], {}), **_only(body, "priority")})
            time.sleep(pause)
        return chosen

    def purge(
        self, message_ids: Iterable[str] | None = None, *, dry_run: bool = False, **filters: Any
    ) -> Ids:
        """Delete dead letters; returns their ids."""
        return self._changed("purge", {**_choice(message_ids, filters), "dry_run": dry_run})

    def _changed(self, verb: str, body: dict[str, Any]) -> Ids:
        answer = self._client.request("POST", f"/engine/dlq/{verb}", body, retries=0)
        return self._client._converted(answer, _Submitted).message_ids  # noqa: SLF001 - the same module


def _choice(message_ids: Iterable[str] | None, filters: Mapping[str, Any]) -> dict[str, Any]:
    if message_ids is None:
        return {name: _text(value) for name, value in filters.items()}
    if filters:
        raise InvalidMessage("name dead letters by ids or by filters, not by both")
    return {"message_ids": list(message_ids)}


def _only(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {name: body[name]} if name in body else {}


def _text(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def _message_path(message_id: str) -> str:
    return f"/engine/messages/{_quoted(message_id)}"


def _quoted(message_id: str) -> str:
    return urllib.parse.quote(arguments.text("message_id", message_id), safe="")
