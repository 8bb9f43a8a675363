"""A client of the global queue: submit messages to a server over HTTP, and follow their answers.

    with EngineClient("http://127.0.0.1:8800", TOKEN) as client:
        message_id = client.submit(type="tool_call", payload={"tool": "search"})
        print(client.result(message_id, timeout_s=30))
        agent = client.agent()
        print(agent.request(type="model_call", payload={"prompt": "hello"}, timeout_s=60))

Rule 1: imports only the standard library, msgspec, `postroom.errors` and `postroom.calls`.
Rule 2: the client makes the id of a message, so that a submit can be repeated when its answer is lost.
Rule 3: a call of an agent that is lost on the way is repeated with the same ids, so a server that dies loses
        nothing and repeats nothing to an agent that lives.
Rule 4: no secret is logged or shown.
"""

import itertools
import json
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Literal, TypeAlias, Unpack

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from postroom.calls import agents, goals, messages
from postroom.calls.agents import RegisteredAnswer
from postroom.calls.messages import ListFields, MessageList, MessagesAnswer, Replayed, Submit
from postroom.calls.submit import ChildFields, MessageOptions
from postroom.client import arguments
from postroom.client.calls import CHANGE_TIMEOUT_S, HttpClient, deadline_after
from postroom.client.goals import DecisionCalls, GoalCalls, GraphCalls
from postroom.errors import (
    AgentReplaced,
    InvalidMessage,
    MessageFailed,
    StreamRestarted,
    UnknownTask,
    Unreachable,
    WrongState,
    failure_of,
)

WAIT_S_MAX = 30.0  # of one request; a longer wait is several
ANSWERED_KEPT_MAX = 10_000
FINAL_PARTS = ("result", "stream_complete", "error")

Ids: TypeAlias = list[str]
Rows: TypeAlias = list[dict[str, Any]]

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


class _RequestAnswer(msgspec.Struct, frozen=True):
    message_id: str
    state: str = ""
    result: Any = None
    errors: list[dict[str, Any]] = []


class EngineClient(HttpClient):
    """A client of the global queue. Safe to share between threads.

    An agent's token names its organization, so `org_id` is needed with an operator's token only.
    """

    def __init__(self, url: str, token: str, **options: Any) -> None:
        super().__init__(url, token, **options)
        self.dlq = DeadLetterCalls(self)
        self.bounces = BouncedAnswers(self)
        self.goals = GoalCalls(self)
        self.graph = GraphCalls(self)
        self.decisions = DecisionCalls(self)

    def __repr__(self) -> str:
        return f"EngineClient({self._connections.url!r})"

    # ---- messages ------------------------------------------------------------------------------

    def submit(
        self,
        *,
        type: str,  # noqa: A002 - the contract's word
        payload: Mapping[str, Any],
        **fields: Unpack[ChildFields],
    ) -> str:
        """Store one message and return its id. `fields` are those of `Engine.submit`."""
        [message_id] = self.submit_many([{"type": type, "payload": payload, **fields}])
        return message_id

    def submit_many(self, messages: Iterable[Mapping[str, Any]]) -> Ids:
        """Store several messages in one commit: all or none."""
        named = [{"message_id": str(uuid.uuid4()), **message} for message in messages]
        if not named:
            return []
        answer = self.request("POST", Submit.route.path, {"messages": named})
        return self.converted(answer, MessagesAnswer).message_ids

    def get(self, message_id: str, *, wait_s: float = 0.0) -> MessageView:
        """Return a message, or wait up to `wait_s` (at most 30) for its end."""
        wait_s = arguments.seconds("wait_s", wait_s)
        verb = messages.ShowMessage(message_id=message_id, wait_s=round(min(wait_s, WAIT_S_MAX), 3))
        return self.converted(self.call(verb, timeout_s=self.timeout_s + wait_s), MessageView)

    def list(self, **fields: Unpack[ListFields]) -> MessageList:
        """Messages, the newest first, as `Engine.list`; with an agent's token, of its organization."""
        given = {name: value for name, value in _texts(fields).items() if value is not None}
        return self.converted(self.call(messages.FindMessages(**given)), MessageList)

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
                time.sleep(self.pauses.after(failed, error.retry_after_s))
        raise TimeoutError(f"the answer to {message_id} did not come within {timeout_s:g} s")

    def _parts(self, message_id: str, after: str, until: float) -> Iterator[dict[str, Any]]:
        headers = {"Last-Event-ID": arguments.text("after", after)} if after else {}
        for event in self.events(messages.StreamMessage(message_id=message_id), headers, until=until):
            yield {"id": event.get("id", ""), **json.loads(event["data"])}
        raise Unreachable(f"{self._connections.url} ended the stream before the answer was complete")

    def agent(self) -> "RemoteAgent":
        """The agent that the token names: its requests, its inbox, and what it resumes."""
        return RemoteAgent(self)

    def agents(self, org_id: str | None = None) -> Rows:
        """Registered agents: health, and what waits for what; with an agent's token, of its organization."""
        return list(self.call(agents.ListAgents(org_id=UNSET if org_id is None else org_id))["agents"])

    def explain(self, message_id: str) -> str:
        """Which rule holds a message, and what would release it."""
        return str(self.call(messages.Explain(message_id=message_id))["explanation"])

    def cancel(self, message_id: str) -> None:
        """Cancel a message. Its running handler is cancelled within a second."""
        self.call(messages.Cancel(message_id=message_id))

    # ---- the queue -----------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Depths, stages, workers, breakers and pauses; with an agent's token, of its organization."""
        return dict(self.call(messages.ReadEngineStatus()))

    def tokens(self) -> dict[str, Any]:
        """The token budgets; with an agent's token, without what other organizations do."""
        return dict(self.call(messages.ReadTokenBudgets()))

    def pause(self, *, org_id: str = "", type: str = "", kill: bool = False) -> None:  # noqa: A002
        """Stop deliveries of an organization, of a type, of both together, or all of them."""
        self.call(messages.Pause(org_id=org_id, type=type, kill=kill))

    def resume(self, *, org_id: str = "", type: str = "") -> None:  # noqa: A002
        """End a pause of the same scope."""
        self.call(messages.Resume(org_id=org_id, type=type))

    def conflicts(self) -> dict[str, Any]:
        """Operations that are under way, and messages that wait for them."""
        return dict(self.call(goals.ListConflicts()))


class BouncedAnswers:
    """`client.bounces`: answers that no agent fetched, for users and systems."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def list(self, org_id: str | None = None, **filters: Any) -> Rows:
        """Bounces, the oldest first, each with its `key`. Filters: created_by (user:ada), after, limit."""
        asked = agents.ListBounces(org_id=UNSET if org_id is None else org_id, **filters)
        return list(self._client.call(asked)["bounces"])

    def done(self, *keys: str) -> Ids:
        """Remove bounces that their creator has. Returns the keys that were there."""
        return list(self._client.call(agents.BouncesDone(keys=[*keys]))["keys"])


class DeadLetterCalls:
    """`client.dlq`."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def list(self, **filters: Any) -> Rows:
        """Dead letters by acceptance, with the filters of `Engine.dlq.list`."""
        return list(self._client.call(messages.ListLetters(**_texts(filters)))["letters"])

    def show(self, message_id: str) -> dict[str, Any]:
        """One dead letter."""
        return dict(self._client.call(messages.ShowLetter(message_id=message_id)))

    def replay(
        self,
        message_ids: Iterable[str] | None = None,
        *,
        dry_run: bool = False,
        priority: int | None = None,
        rate_per_s: float | None = None,
        **filters: Any,
    ) -> Replayed:
        """Queue dead letters again: those named, else all that match the filters of `list`.

        With `rate_per_s`, one request for each.
        """
        asked = messages.Replay(**_choice(message_ids, filters), priority=priority, dry_run=dry_run)
        if rate_per_s is None or dry_run:
            return self._replay(asked)
        return self._replay_slowly(asked, 1 / rate_per_s)

    def _replay(self, verb: messages.Replay) -> Replayed:
        answer = self._client.call(verb, retries=0, timeout_s=max(CHANGE_TIMEOUT_S, self._client.timeout_s))
        return self._client.converted(answer, Replayed)

    def _replay_slowly(self, asked: messages.Replay, pause_s: float) -> Replayed:
        """List the matching dead letters by a dry run, then replay each one by its id."""
        plan = page = self._replay(replace(asked, dry_run=True))
        seen, gone = 0, 0
        while page.message_ids:
            for message_id in page.message_ids:
                try:
                    self._replay(messages.Replay(message_ids=[message_id], priority=asked.priority))
                except (UnknownTask, WrongState):
                    gone += 1
                time.sleep(pause_s)
            seen += len(page.message_ids)
            if seen >= plan.replayed:
                break
            rest = replace(asked, dry_run=True, after=page.message_ids[-1], limit=plan.replayed - seen)
            page = self._replay(rest)
        reasons = {**plan.reasons, "it was replayed or purged meanwhile": gone} if gone else plan.reasons
        return replace(plan, replayed=seen - gone, refused=plan.refused + gone, reasons=reasons)

    def purge(
        self, message_ids: Iterable[str] | None = None, *, dry_run: bool = False, **filters: Any
    ) -> Ids:
        """Delete dead letters, without ids all that match; returns their ids."""
        verb = messages.Purge(**_choice(message_ids, filters), dry_run=dry_run)
        answer = self._client.call(verb, retries=0, timeout_s=max(CHANGE_TIMEOUT_S, self._client.timeout_s))
        return self._client.converted(answer, MessagesAnswer).message_ids


def _choice(message_ids: Iterable[str] | None, filters: Mapping[str, Any]) -> dict[str, Any]:
    if message_ids is None:
        return _texts(filters)
    if filters:
        raise InvalidMessage("name dead letters by ids or by filters, not by both")
    return {"message_ids": list(message_ids)}


def _texts(filters: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.isoformat() if isinstance(value, datetime) else value for name, value in filters.items()
    }


# ---- an agent outside of the server's process ---------------------------------------------------------


class RemoteAgent:
    """The agent that a token names. It is registered with the first call."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._registered: RegisteredAnswer | None = None
        self._answered: deque[str] = deque(maxlen=ANSWERED_KEPT_MAX)
        """Requests whose answer this object has got. The server may learn of that a little later."""

    def __repr__(self) -> str:
        name = "not registered" if self._registered is None else self._registered.agent_id
        return f"RemoteAgent({name})"

    @property
    def registration(self) -> RegisteredAnswer:
        """The registration of this object. Earlier ones of the same agent are fenced by it."""
        if self._registered is None:
            self._registered = self._client.converted(self._client.call(agents.Register()), RegisteredAnswer)
        return self._registered

    @property
    def _own(self) -> dict[str, Any]:
        """The fields of each call of this agent."""
        return {"agent_id": self.registration.agent_id, "session": self.registration.session}

    # ---- requests ------------------------------------------------------------------------------

    def request(
        self,
        *,
        type: str,  # noqa: A002 - the contract's word
        payload: Mapping[str, Any],
        timeout_s: float | None = None,
        **fields: Unpack[MessageOptions],
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

    def _request(self, message: Mapping[str, Any], wait_s: float) -> _RequestAnswer:
        body = {**message, "timeout_s": round(wait_s, 3), "session": self.registration.session}
        answer = self._client.request(
            "POST", messages.Request.route.path, body, timeout_s=self._client.timeout_s + wait_s
        )
        return self._client.converted(answer, _RequestAnswer)

    def stream(
        self,
        *,
        type: str,  # noqa: A002 - the contract's word
        payload: Mapping[str, Any],
        timeout_s: float | None = None,
        restart: Literal["raise", "replace"] = "raise",
        **fields: Unpack[MessageOptions],
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
                time.sleep(self._client.pauses.after(failed, error.retry_after_s))
            else:
                return

    def _resumed(self) -> Iterator[dict[str, Any]]:
        """The parts that one connection gives, until no request is open."""
        waiting: set[str] = set()
        for event in self._client.events(agents.StreamAgent(**self._own)):
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
        self._client.call(agents.Ack(**self._own, message_ids=[*message_ids]))

    # ---- messages between agents ---------------------------------------------------------------

    def send(self, *, to: str, payload: Any, priority: int = 2) -> str:
        """Send a message to another agent of the organization; its id. Raises `Bounced`."""
        new_id = str(uuid.uuid4())
        sent = agents.Send(**self._own, to=to, payload=payload, priority=priority, message_id=new_id)
        return str(self._client.call(sent)["message_id"])

    def receipts(self, message_id: str) -> dict[str, int]:
        """What the recipient has done with a message, each with its time in microseconds."""
        return dict(self._client.call(messages.ReadReceipts(message_id=message_id)))

    def inbox(self, *, peek: bool = False) -> list[dict[str, Any]]:
        """The messages that the agent has not acted on, each with its `key`.

        Their senders get the receipt `fetched`, unless this is a `peek`.
        """
        found: list[dict[str, Any]] = []
        while True:
            after = found[-1]["key"] if found else UNSET
            page = self._client.call(agents.ReadInbox(**self._own, after=after, peek=peek))["messages"]
            if not page:
                return found
            found += page

    def done(self, *keys: str) -> None:
        """The agent has acted on messages of its inbox."""
        self._client.call(agents.InboxDone(**self._own, keys=[*keys]))

    # ---- life ----------------------------------------------------------------------------------

    def beat(self) -> None:
        """Send a heartbeat. Every other call is one, too: only an idle agent needs this, every 10 s."""
        self._client.call(agents.Beat(**self._own))

    def leave(self) -> None:
        """End the registration. The next call registers the agent again."""
        self._client.call(agents.Leave(**self._own), retries=0)
        self._registered = None


class PartStream:
    """An iterator over the parts of one answer. The message is submitted with the first step."""

    def __init__(
        self,
        agent: RemoteAgent,
        client: EngineClient,
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
