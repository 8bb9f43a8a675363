"""An agent outside of the server's process: requests, streams, messages of other agents, over HTTP.

    with EngineClient("http://127.0.0.1:8800", TOKEN) as client:
        agent = client.agent()
        print(agent.request(type="model_call", payload={"prompt": "hello"}, timeout_s=60))

Rule 1: the standard library, msgspec and `postroom.errors`, and nothing else of postroom.
Rule 2: a call that is lost on the way is repeated with the same ids, so a server that dies loses nothing and
        repeats nothing to an agent that lives.
"""

import itertools
import json
import math
import time
import urllib.parse
import uuid
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from postroom.client import arguments
from postroom.client.connections import pause_s
from postroom.errors import AgentReplaced, InvalidMessage, MessageFailed, StreamRestarted, Unreachable

if TYPE_CHECKING:
    from postroom.client.engine import EngineClient

WAIT_S_MAX = 30.0  # of one request; a longer wait is several
ANSWERED_KEPT_MAX = 10_000
FINAL_PARTS = ("result", "stream_complete", "error")

_SUCCEEDED = ("COMPLETED", "EXECUTING", "DONE")


def deadline_after(timeout_s: float | None) -> float:
    """The time of the monotonic clock after a timeout; infinity without one."""
    if timeout_s is None:
        return math.inf
    return time.monotonic() + arguments.seconds("timeout_s", timeout_s)


class _Registered(msgspec.Struct, frozen=True):
    org_id: str
    agent_id: str
    session: int
    epoch: int


class _Answer(msgspec.Struct, frozen=True):
    message_id: str
    state: str = ""
    result: Any = None
    errors: list[dict[str, Any]] = []


class RemoteAgent:
    """The agent that a token names. It is registered with the first call."""

    def __init__(self, client: "EngineClient") -> None:
        self._client = client
        self._registered: _Registered | None = None
        self._answered: deque[str] = deque(maxlen=ANSWERED_KEPT_MAX)
        """Requests whose answer this object has got. The server may learn of that a little later."""

    def __repr__(self) -> str:
        name = "not registered" if self._registered is None else self._registered.agent_id
        return f"RemoteAgent({name})"

    @property
    def registration(self) -> _Registered:
        """The registration of this object. Earlier ones of the same agent are fenced by it."""
        if self._registered is None:
            answer = self._client.request("POST", "/engine/agents", {})
            self._registered = self._client._converted(answer, _Registered)  # noqa: SLF001 - the same package
        return self._registered

    def _path(self, rest: str, **query: Any) -> str:
        asked = f"?{urllib.parse.urlencode(query)}" if query else ""
        return f"/engine/agents/{urllib.parse.quote(self.registration.agent_id, safe='')}/{rest}{asked}"

    def _post(self, path: str, body: Mapping[str, Any], **options: Any) -> Any:
        body = {**body, "session": self.registration.session}
        return self._client.request("POST", path, body, **options)

    # ---- requests ------------------------------------------------------------------------------

    def request(
        self,
        *,
        type: str,  # noqa: A002 - the contract's word
        payload: Mapping[str, Any],
        timeout_s: float | None = None,
        **fields: Any,
    ) -> Any:
        """Submit a message and wait for its answer; a streamed answer is joined.

        Raises `MessageFailed`, and `TimeoutError` after `timeout_s`: `resume` gives the late answer.
        """
        message = {"message_id": str(uuid.uuid4()), **fields, "type": type, "payload": payload}
        deadline = deadline_after(timeout_s)
        while True:
            wait_s = max(0.0, min(WAIT_S_MAX, deadline - time.monotonic()))
            answer = self._request(message, wait_s)
            if answer.state:
                self._answered.append(answer.message_id)
            if answer.state in _SUCCEEDED:
                return answer.result
            if answer.state:
                raise MessageFailed(answer.message_id, answer.state, answer.errors)
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the answer to {answer.message_id} did not come within {timeout_s:g} s")

    def _request(self, message: Mapping[str, Any], wait_s: float) -> _Answer:
        body = {**message, "timeout_s": round(wait_s, 3)}
        answer = self._post("/engine/request", body, timeout_s=self._client.timeout_s + wait_s)
        return self._client._converted(answer, _Answer)  # noqa: SLF001 - the same package

    def stream(
        self,
        *,
        type: str,  # noqa: A002 - the contract's word
        payload: Mapping[str, Any],
        timeout_s: float | None = None,
        restart: Literal["raise", "replace"] = "raise",
        **fields: Any,
    ) -> "PartStream":
        """Submit a message and iterate over the parts of its answer, the last one included.

        When another attempt begins the answer again, the iterator raises `StreamRestarted` once and then goes
        on. With `restart="replace"` the parts of the new attempt follow. `TimeoutError` comes `timeout_s`
        after the first step, and `resume` gives the late answer.
        """
        if restart not in ("raise", "replace"):
            raise InvalidMessage(f'restart must be "raise" or "replace", not {restart!r}')
        message = {"message_id": str(uuid.uuid4()), **fields, "type": type, "payload": payload}
        deadline_after(timeout_s)  # a wrong timeout is refused here, not by the first step
        return PartStream(self, self._client, message, timeout_s, raises=restart == "raise")

    def resume(self) -> Iterator[dict[str, Any]]:
        """The parts of every open request, until all of them have ended.

        These are late answers, and the requests of an agent that was restarted. A part that is repeated
        after a lost connection is left out.
        """
        seen: set[str] = set()
        failures = itertools.count()
        while True:
            try:
                for part in self._resumed():
                    failures = itertools.count()
                    if part["id"] not in seen:
                        seen.add(part["id"])
                        yield part
                        if part["type"] in FINAL_PARTS:
                            self._answered.append(part["request_id"])
                            self.acknowledge(part["request_id"])
            except Unreachable as error:
                failed = next(failures)
                if failed >= self._client.retries:
                    raise
                time.sleep(pause_s(failed, error.retry_after_s))
            else:
                return

    def _resumed(self) -> Iterator[dict[str, Any]]:
        """The parts that one connection gives, until no request is open."""
        waiting: set[str] = set()
        for event in self._client.events(self._path("stream", session=self.registration.session)):
            data = json.loads(event["data"])
            match event["event"]:
                case "replaced":
                    raise AgentReplaced(self.registration.agent_id)
                case "open":
                    waiting = set(data["request_ids"]).difference(self._answered)
                case "closed":
                    waiting.discard(data["request_id"])
                case kind if data["request_id"] in waiting:
                    yield {"id": event["id"], **data}
                    if kind in FINAL_PARTS:
                        waiting.remove(data["request_id"])
            if not waiting:
                return
        raise Unreachable("the server ended the stream of the agent")

    def acknowledge(self, *message_ids: str) -> None:
        """The agent has the last parts of these answers; `resume` gives them no more."""
        self._post(self._path("ack"), {"message_ids": list(message_ids)})

    # ---- messages between agents ---------------------------------------------------------------

    def send(self, *, to: str, payload: Any, priority: int = 2) -> str:
        """Send a message to another agent of the organization; its id. Raises `Bounced`."""
        body = {"to": to, "payload": payload, "priority": priority, "message_id": str(uuid.uuid4())}
        return str(self._post(self._path("messages"), body)["message_id"])

    def receipts(self, message_id: str) -> dict[str, int]:
        """What the recipient has done with a message, each with its time in microseconds."""
        quoted = urllib.parse.quote(arguments.text("message_id", message_id), safe="")
        return dict(self._client.request("GET", f"/engine/messages/{quoted}/receipts"))

    def inbox(self) -> list[dict[str, Any]]:
        """The messages that the agent has not acted on, each with its `key`."""
        found: list[dict[str, Any]] = []
        while page := self._inbox_page(found[-1]["key"] if found else ""):
            found += page
        return found

    def _inbox_page(self, after: str) -> list[dict[str, Any]]:
        query = {"session": self.registration.session} | ({"after": after} if after else {})
        return list(self._client.request("GET", self._path("inbox", **query))["messages"])

    def done(self, *keys: str) -> None:
        """The agent has acted on messages of its inbox."""
        self._post(self._path("inbox/done"), {"keys": list(keys)})

    # ---- life ----------------------------------------------------------------------------------

    def beat(self) -> None:
        """Send a heartbeat. Every other call is one, too: only an idle agent needs this, every 10 s."""
        self._client.request("POST", self._path("beat", session=self.registration.session))

    def leave(self) -> None:
        """End the registration. The next call registers the agent again."""
        self._client.request("POST", self._path("leave", session=self.registration.session), retries=0)
        self._registered = None


class PartStream:
    """An iterator over the parts of one answer. The message is submitted with the first step."""

    def __init__(
        self,
        agent: RemoteAgent,
        client: "EngineClient",
        message: dict[str, Any],
        timeout_s: float | None,
        *,
        raises: bool,
    ) -> None:
        self._agent = agent
        self._client = client
        self._message = message
        self._timeout_s = timeout_s
        self._raises = raises
        self._parts: Iterator[dict[str, Any]] | None = None
        self._held: dict[str, Any] | None = None
        self._attempt = 0
        self._is_last = False
        self.message_id = str(message["message_id"])

    def __iter__(self) -> "PartStream":
        return self

    def __next__(self) -> dict[str, Any]:
        if self._is_last:
            if self._parts is not None:
                self._parts = None
                self._agent.acknowledge(self.message_id)
            raise StopIteration
        part = self._held or self._next()
        attempt = part.get("attempt", 0)
        is_restart = self._attempt and attempt > self._attempt
        if is_restart and self._held is None and self._raises:
            self._held = part
            raise StreamRestarted(self.message_id, attempt)
        self._held = None
        if is_restart:
            self._attempt = 0
        if part["type"] == "stream_chunk":
            self._attempt = attempt
        self._is_last = part["type"] in FINAL_PARTS
        return part

    def _next(self) -> dict[str, Any]:
        if self._parts is None:
            self._agent._request(self._message, 0.0)  # noqa: SLF001 - the same module
            self._parts = self._client.stream(self.message_id, timeout_s=self._timeout_s)
        return next(self._parts)
