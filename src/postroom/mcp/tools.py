"""The tools: their arguments, their descriptions for a model, and the routes that they call.

Rule 1: the docstring of a struct is the description of its tool, and says all that an agent has to know.
Rule 2: an answer that can have text of others is `labelled`.
Rule 3: a tool waits at most `WAIT_S_MAX`. An answer that is not there yet says which call to make next.
Rule 4: only an acknowledgement by id removes a message from an inbox.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta

from postroom.calls import agents, goals, messages, server, tasks
from postroom.calls.fields import ENQUEUE_MANY_MAX, WAIT_S_MAX
from postroom.calls.verb import Verb
from postroom.core.fieldfaults import field_fault
from postroom.core.gate import GATE
from postroom.errors import InvalidMessage, UnknownTask
from postroom.mcp.backend import Backend, quoted
from postroom.mcp.excerpts import Excerpt, encoded, labelled, page

PART_CHARS = 6_000  # of the whole of a message, in one answer of result
BUS_PAGE = 200  # messages of a bus that one call reads
SEARCH_PAGE_MAX = 100
INBOX_POLL_S = 0.1  # at first; then half as long again each time
INBOX_POLL_S_MAX = 0.5

_ENDED = ("COMPLETED", "EXECUTING", "DONE", "DEAD_LETTER", "CANCELLED", "EXPIRED", "QUARANTINED")

ANY_JSON = ["string", "object", "array", "number", "boolean", "null"]
SHOWN_OF_A_FIELD = ("type", "description", "enum", "items", "anyOf")
IGNORED = frozenset({"wait_for_previous"})
"""Arguments that agent programs add to every call (Gemini CLI)."""

Wait = Annotated[float, Meta(ge=0, le=WAIT_S_MAX, description="Seconds to wait.")]
TaskId = Annotated[str, Meta(min_length=1, description="From claim.")]
Limit = Annotated[int, Meta(ge=1, le=SEARCH_PAGE_MAX, description="At most this many.")]
OnlyType = Annotated[str, Meta(description="Only this message type.")]
OnlyErrorType = Annotated[str, Meta(description="Only with this last error.")]
OnlyOrg = Annotated[str, Meta(description="Only this organization.")]
OnlyGoal = Annotated[str, Meta(description="Only of this goal.")]
OnlyAgent = Annotated[str, Meta(description="Only of this agent.")]
OnlyService = Annotated[str, Meta(description="Only of this service.")]
OnlyFailure = Annotated[str, Meta(description="Only with this text in the reason.")]
Priority = Annotated[int, Meta(ge=0, le=3, description="0 is the most urgent.")]
AnyId = Annotated[str, Meta(min_length=1, description="From submit, enqueue, ask or inbox.")]
AgentName = Annotated[str, Meta(min_length=1, description="As who_is_there shows it.")]
Content = Annotated[Any, Meta(description="Text or any JSON value.", extra_json_schema={"type": ANY_JSON})]
Cursor = Annotated[str, Meta(description="Of the last answer: reads on after it.")]


class Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arguments of a tool."""


Run = Callable[[Backend, Any], Coroutine[Any, Any, dict[str, Any]]]


class Tool(NamedTuple):
    """One tool."""

    name: str
    arguments: type[msgspec.Struct]
    """A verb, or a struct with what the tool needs to know."""
    run: Run
    verb: type[Verb]
    """Who may call this verb may use the tool. The other verbs that it calls have their own permissions."""
    is_team: bool = False
    """Whether an agent joins the team by using it."""

    @property
    def entry(self) -> str:
        """Its entry in the table of `core.gate`."""
        return self.verb.route.permission

    @property
    def is_read_only(self) -> bool:
        """Whether it changes nothing."""
        return not GATE[self.entry].changes


# ---- messages between agents -------------------------------------------------------------------------


class SendArguments(Arguments, frozen=True, kw_only=True):
    """Send a message to the inbox of another agent. Use ask when you need an answer."""

    to: AgentName
    body: Content
    priority: Priority = 2


async def send(backend: Backend, given: SendArguments) -> dict[str, Any]:
    message_id = await _send(backend, given.to, {"kind": "message", "body": given.body}, given.priority)
    return {"message_id": message_id, "to": given.to}


async def _send(backend: Backend, to: str, payload: dict[str, Any], priority: int = 2) -> str:
    sent = agents.Send(agent_id=backend.agent, to=to, payload=payload, priority=priority)
    return str((await backend.ask(sent, as_agent=True))["message_id"])


class InboxArguments(Arguments, frozen=True, kw_only=True):
    """Read your messages, the oldest first. Each stays until you ack its id. Reply to a "question"."""

    ack: Annotated[list[str], Meta(description="The ids of messages that you have dealt with.")] = []
    peek: Annotated[bool, Meta(description="Look, and tell the senders nothing.")] = False
    cursor: Annotated[
        str, Meta(pattern="^[0-9]{0,18}$", description="Of the last answer: reads on after it.")
    ] = ""
    wait_s: Wait = 0.0


async def inbox(backend: Backend, given: InboxArguments) -> dict[str, Any]:
    acknowledged: dict[str, Any] = {}
    if given.ack:
        keys = await _keys_of(backend, given.ack)
        await _done(backend, [*keys.values()])
        acknowledged = {"acknowledged": [*keys], "unknown": [one for one in given.ack if one not in keys]}
    lines = await _lines(backend, given.cursor)
    if not lines and given.wait_s:
        async with aclosing(_polled(backend, given.wait_s, given.cursor)) as pages:
            lines = await anext(pages, [])
    found = page([_entry(line) for line in lines])
    shown = lines[: len(found["messages"])]
    if shown and not given.peek:
        await _fetched(backend, shown)
    return found | acknowledged | ({} if lines else {"cursor": given.cursor, "high_water": given.cursor})


async def _keys_of(backend: Backend, ids: Sequence[str]) -> dict[str, str]:
    """The keys of the messages with these ids that are in the inbox."""
    wanted, after = set(ids), ""
    keys: dict[str, str] = {}
    while wanted and (lines := await _lines(backend, after)):
        keys |= {letter_id: line["key"] for line in lines if (letter_id := _letter_id(line)) in wanted}
        wanted -= keys.keys()
        after = lines[-1]["key"]
    return keys


def _letter_id(line: dict[str, Any]) -> str:
    """What an agent acknowledges. A bounce and a notice have the id of a message that can occur again."""
    is_letter = line["sender"] and not line["is_bounce"]
    return str(line["message_id"]) if is_letter else f"{line['message_id']}#{line['key']}"


async def _lines(backend: Backend, after: str = "") -> list[dict[str, Any]]:
    """A page of the inbox after a message, by key. This leaves no receipt."""
    asked = agents.ReadInbox(agent_id=backend.agent, after=after or UNSET, peek=True)
    answer = await backend.ask(asked, as_agent=True)
    return sorted(answer["messages"], key=lambda line: int(line["key"]))


async def _fetched(backend: Backend, lines: Sequence[dict[str, Any]]) -> None:
    """Note that the agent has got these neighbours in its inbox."""
    before = str(int(lines[0]["key"]) - 1)
    asked = agents.ReadInbox(agent_id=backend.agent, after=before, limit=len(lines))
    await backend.ask(asked, as_agent=True)


async def _polled(
    backend: Backend, wait_s: float, after: str = ""
) -> AsyncGenerator[list[dict[str, Any]], None]:
    """The pages of the inbox, then new messages as they come, each once. Ends after `wait_s`."""
    deadline, pause_s = time.monotonic() + wait_s, INBOX_POLL_S
    with backend.waiting():
        while True:
            lines = await _lines(backend, after)
            if lines:
                yield lines
                after = lines[-1]["key"]
            elif time.monotonic() >= deadline:
                return
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(1.5 * pause_s, INBOX_POLL_S_MAX)


async def _done(backend: Backend, keys: Sequence[str]) -> None:
    for start in range(0, len(keys), ENQUEUE_MANY_MAX):
        some = [*keys[start : start + ENQUEUE_MANY_MAX]]
        await backend.ask(agents.InboxDone(agent_id=backend.agent, keys=some), as_agent=True)


def _entry(line: dict[str, Any]) -> Excerpt:
    letter = _letter(line["payload"])
    facts = {"kind": letter["kind"]}
    if letter.get("reply_to"):
        facts["reply_to"] = letter["reply_to"]
    if line["is_bounce"]:
        facts |= {"kind": "bounce", "reason": line["reason"]}
    return Excerpt(
        _letter_id(line), line["key"], line["sender"], letter["body"], facts, _uri(line["message_id"])
    )


def _uri(message_id: str) -> str:
    return f"postroom://messages/{message_id}"


def _letter(payload: Any) -> dict[str, Any]:
    """The payload as these tools write it. Other programs may send anything."""
    is_ours = isinstance(payload, dict) and {"kind", "body"} <= payload.keys() <= {"kind", "body", "reply_to"}
    return payload if is_ours else {"kind": "message", "body": payload}


class AskArguments(Arguments, frozen=True, kw_only=True):
    """Ask another agent a question and wait for its reply. Not in time: call wait_for with question_id."""

    to: AgentName
    question: Content
    wait_s: Wait = 20.0


async def ask(backend: Backend, given: AskArguments) -> dict[str, Any]:
    question_id = await _send(backend, given.to, {"kind": "question", "body": given.question})
    return await _reply_to(backend, question_id, given.wait_s)


async def _reply_to(backend: Backend, question_id: str, wait_s: float) -> dict[str, Any]:
    """The reply to a question. It stays in the inbox until it is acknowledged."""
    async with aclosing(_polled(backend, wait_s)) as pages:
        async for lines in pages:
            for line in lines:
                letter = _letter(line["payload"])
                if letter.get("reply_to") == question_id:
                    await _fetched(backend, [line])
                    return labelled({
                        "status": "answered", "question_id": question_id, "id": line["message_id"],
                        "from": line["sender"], "body": letter["body"], "whole": _uri(line["message_id"]),
                        "next": "call inbox with ack and this id once you have dealt with it",
                    })  # fmt: skip
    return {
        "status": "waiting", "question_id": question_id,
        "next": "call wait_for with this id, or who_is_there to see whether the agent is alive",
    }  # fmt: skip


class ReplyArguments(Arguments, frozen=True, kw_only=True):
    """Reply to a message of your inbox: it is the answer to a question."""

    message_id: Annotated[str, Meta(min_length=1, description="The id of the message in your inbox.")]
    body: Content


async def reply(backend: Backend, given: ReplyArguments) -> dict[str, Any]:
    asked = messages.ShowMessage(message_id=given.message_id)
    message = (await backend.ask(asked, as_agent=True))["message"]
    is_mine = message.get("type") == "agent_message" and message["payload"].get("to") == backend.agent
    if not is_mine:
        raise InvalidMessage(f"message {given.message_id} was not sent to you: take the id from inbox")
    payload = {"kind": "answer", "body": given.body, "reply_to": given.message_id}
    return {"message_id": await _send(backend, message["agent_id"], payload), "to": message["agent_id"]}


class WaitForArguments(Arguments, frozen=True, kw_only=True):
    """Wait for a result, for the reply to a question, or, without an id, for mail. Do not poll."""

    id: Annotated[str, Meta(description="An id of submit, enqueue or ask. Empty waits for your inbox.")] = ""
    wait_s: Wait = 20.0


async def wait_for(backend: Backend, given: WaitForArguments) -> dict[str, Any]:
    if not given.id:
        return await inbox(backend, InboxArguments(wait_s=given.wait_s))
    if await _is_question(backend, given.id):
        return await _reply_to(backend, given.id, given.wait_s)
    return await result(backend, ResultArguments(id=given.id, wait_s=given.wait_s))


async def _is_question(backend: Backend, message_id: str) -> bool:
    try:
        info = await backend.ask(messages.ShowMessage(message_id=message_id), as_agent=True)
    except UnknownTask:
        return False
    message = info["message"]
    is_own = message.get("type") == "agent_message" and message.get("agent_id") == backend.agent
    return bool(is_own) and _letter(message["payload"].get("body"))["kind"] == "question"


class WhoIsThereArguments(Arguments, frozen=True, kw_only=True):
    """List the agents of your organization. Messages to a dead one bounce until it is back."""


async def who_is_there(backend: Backend, given: WhoIsThereArguments) -> dict[str, Any]:  # noqa: ARG001
    if backend.is_member:
        await backend.ask(agents.Beat(agent_id=backend.agent), as_agent=True)
    answer = await backend.ask(agents.ListAgents(), as_agent=True)
    known = [
        {
            "agent": one["agent_id"],
            "health": "alive" if one["health"] == "registered" else one["health"],
            "silent_s": round(one["silent_s"], 1),
        }
        for one in answer["agents"]
    ]
    own = {"you": backend.agent, "organization": backend.org, "role": backend.role}
    return labelled({**own, "agents": known})


# ---- tasks -------------------------------------------------------------------------------------------


class EnqueueArguments(Arguments, frozen=True, kw_only=True):
    """Put a task into the queue of an agent, which need not be there, or into your own."""

    agent: Annotated[str, Meta(min_length=1, description="The agent whose queue gets the task.")]
    payload: Content
    delay_s: Annotated[float, Meta(ge=0, description="Seconds before it may be claimed.")] = 0.0
    idempotency_key: Annotated[
        str,
        Meta(description="A repeated key stores no second task."),
    ] = ""


async def enqueue(backend: Backend, given: EnqueueArguments) -> dict[str, Any]:
    answer: dict[str, Any] = await backend.ask(tasks.Enqueue(**_filled(given)))
    return answer


class ClaimArguments(Arguments, frozen=True, kw_only=True):
    """Take the next task of your queue. You hold it for lease_s; then another worker gets it.

    End it with complete or fail, both with its task_id and lease.
    """

    agent: Annotated[str, Meta(description="Whose queue, if not your own.")] = ""
    wait_s: Wait = 0.0
    lease_s: Annotated[float, Meta(gt=0, description="Seconds that you need.")] = 300.0


async def claim(backend: Backend, given: ClaimArguments) -> dict[str, Any]:
    asked = tasks.Next(
        agent=given.agent or None,
        wait_s=given.wait_s,
        lease_s=given.lease_s,
        worker=f"mcp:{backend.agent}",
    )
    task = await backend.ask(asked, as_agent=True, wait_s=given.wait_s, put_back=_release)
    if task is None:
        return {"task": None, "next": "there is no task now: call claim again with wait_s, or inbox"}
    return labelled({"task": {**task, "untrusted": True, "whole": _uri(task["task_id"])}})


def _release(task: dict[str, Any]) -> Verb:
    return tasks.Release(task_id=task["task_id"], lease=task["lease"])


class CompleteArguments(Arguments, frozen=True, kw_only=True):
    """Complete a task that you have claimed, with its result."""

    task_id: TaskId
    lease: Annotated[int, Meta(ge=0, description="The lease that claim returned.")]
    result: Content = None


async def complete(backend: Backend, given: CompleteArguments) -> dict[str, Any]:
    done = tasks.Complete(task_id=given.task_id, lease=given.lease, decision=given.result)
    await backend.ask(done, as_agent=True)
    return {"task_id": given.task_id, "completed": True}


class FailArguments(Arguments, frozen=True, kw_only=True):
    """Report that you could not do a claimed task: it is retried, or becomes a dead letter."""

    task_id: TaskId
    lease: Annotated[int, Meta(ge=0, description="The lease that claim returned.")]
    error: Annotated[str, Meta(min_length=1, description="Why it failed, in one sentence.")]
    retry_in_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="Seconds until it is retried."),
    ] = None


async def fail(backend: Backend, given: FailArguments) -> dict[str, Any]:
    await backend.ask(tasks.Fail(**_filled(given)), as_agent=True)
    return {"task_id": given.task_id, "failed": True}


# ---- buses -------------------------------------------------------------------------------------------

BusName = Annotated[str, Meta(min_length=1, description="Such as the name of the team.")]


class PostArguments(Arguments, frozen=True, kw_only=True):
    """Post to a bus: a shared log that the whole team can read."""

    bus: BusName
    body: Annotated[str, Meta(description="Text.")]
    type: Annotated[str, Meta(min_length=1, description="Such as note or decision.")] = "note"
    reply_to: Annotated[str, Meta(description="The id of the message that it answers.")] = ""


async def post(backend: Backend, given: PostArguments) -> dict[str, Any]:
    posted = server.PostToBus(
        bus=given.bus,
        type=given.type,
        project_id=backend.org,
        run_id=backend.agent,
        body=given.body,
        parents=[given.reply_to] if given.reply_to else [],
    )
    answer = await backend.ask(posted)
    return {"bus": given.bus, "cursor": answer["msg_id"]}


class ReadBusArguments(Arguments, frozen=True, kw_only=True):
    """Read a bus from a cursor on, the oldest message first."""

    bus: BusName
    cursor: Cursor = ""


async def read_bus(backend: Backend, given: ReadBusArguments) -> dict[str, Any]:
    entries = await bus_entries(backend, given.bus, given.cursor)
    found = page(entries)
    if not entries:
        found |= {"cursor": given.cursor, "high_water": given.cursor}
        found |= await _missing_bus(backend, given.bus)
    return found | ({"complete": False} if len(entries) == BUS_PAGE else {})


async def bus_entries(backend: Backend, bus: str, cursor: str = "") -> list[Excerpt]:
    """The messages of a bus after a cursor."""
    answer = await backend.ask(server.ReadBus(bus=bus, since=cursor, limit=BUS_PAGE))
    return [_bus_entry(bus, message) for message in answer["messages"]]


async def _missing_bus(backend: Backend, bus: str) -> dict[str, Any]:
    """What to say about a bus without messages that does not exist: its name may be a typing error."""
    buses = (await backend.ask(server.ListBuses()))["buses"]
    if bus in buses:
        return {}
    return {"exists": False, "buses": buses, "next": "there is no such bus: read one of buses, or post first"}


def _bus_entry(bus: str, message: dict[str, Any]) -> Excerpt:
    facts = {"type": message["type"], "ts": message["ts"]}
    if message.get("parents"):
        facts["parents"] = message["parents"]
    uri = f"postroom://buses/{quoted(bus)}"
    msg_id = message["msg_id"]
    return Excerpt(msg_id, msg_id, message.get("run_id", ""), message["body"], facts, uri)


# ---- the global queue --------------------------------------------------------------------------------


class SubmitArguments(Arguments, frozen=True, kw_only=True):
    """Submit a message to the global queue. Get the result with wait_for."""

    type: Annotated[str, Meta(min_length=1, description="Such as tool_call.")]
    payload: Annotated[dict[str, Any], Meta(description="What its handler needs.")]
    priority: Priority = 2
    service: Annotated[str, Meta(description="Of a tool_call: the MCP server.")] = ""
    idempotency_key: Annotated[
        str,
        Meta(description="A repeated key stores no second message."),
    ] = ""
    org_id: Annotated[str, Meta(description="Operators only: the organization.")] = ""


async def submit(backend: Backend, given: SubmitArguments) -> dict[str, Any]:
    body = _filled(given) | {"type": given.type, "payload": given.payload}
    if backend.is_operator:
        body.setdefault("org_id", backend.org)
    answer = await backend.ask(messages.Submit(**body))
    return {**answer, "next": "call wait_for with this id"}


class ResultArguments(Arguments, frozen=True, kw_only=True):
    """Look at a message or a task: its state, and its result or its errors."""

    id: AnyId
    part: Annotated[int, Meta(ge=0, description="From 1: the whole with its payload, in parts.")] = 0
    wait_s: Wait = 0.0


async def result(backend: Backend, given: ResultArguments) -> dict[str, Any]:
    info = await info_of(backend, given.id, given.wait_s)
    if given.part:
        return _part(given, whole_of(info))
    ended, errors = info["state"] in _ENDED, info["errors"]
    found = {"id": given.id, "state": info["state"], "ended": ended, "attempt": info["attempt"]}
    if ended:
        found |= {"result": info["result"], "whole": _uri(given.id)}
    else:
        found |= {"next": "it has not ended: call wait_for with this id, or explain to see what holds it"}
    found |= {"errors": errors} if errors else {}
    return labelled(found) if ended or errors else found


def whole_of(info: dict[str, Any]) -> dict[str, Any]:
    """A message or task with its payload and its result, without its events."""
    return {name: value for name, value in info.items() if name != "history"}


def _part(given: ResultArguments, whole: dict[str, Any]) -> dict[str, Any]:
    text, start = encoded(whole), (given.part - 1) * PART_CHARS
    parts = -(-len(text) // PART_CHARS)
    return labelled(
        {"id": given.id, "part": given.part, "parts": parts, "text": text[start : start + PART_CHARS]}
    )


async def info_of(backend: Backend, message_id: str, wait_s: float = 0.0) -> dict[str, Any]:
    """A message of the global queue, or a task."""
    waited_s = round(wait_s, 3)
    try:
        asked = messages.ShowMessage(message_id=message_id, wait_s=waited_s)
        found: dict[str, Any] = await backend.ask(asked, wait_s=wait_s)
    except UnknownTask:
        found = await backend.ask(tasks.ShowTask(task_id=message_id, wait_s=waited_s), wait_s=wait_s)
    return found


class ExplainArguments(Arguments, frozen=True, kw_only=True):
    """Why a message does not move, and what would release it."""

    id: Annotated[str, Meta(min_length=1, description="The id that submit returned.")]


async def explain(backend: Backend, given: ExplainArguments) -> dict[str, Any]:
    answer = await backend.ask(messages.Explain(message_id=given.id))
    return labelled({"id": given.id, "explanation": answer["explanation"]})


class SearchArguments(Arguments, frozen=True, kw_only=True):
    """Find messages of the global queue, the newest first, or tasks. Use result to see one."""

    text: Annotated[str, Meta(description="Words in it, or its id. Not for tasks.")] = ""
    type: Annotated[str, Meta(description="Not for tasks.")] = ""
    state: Annotated[str, Meta(description="Such as QUEUED or DEAD_LETTER.")] = ""
    goal_id: OnlyGoal = ""
    agent_id: OnlyAgent = ""
    since: Annotated[str, Meta(description="Only accepted since this time (RFC 3339).")] = ""
    where: Annotated[
        Literal["messages", "tasks"],
        Meta(description="Where to look."),
    ] = "messages"
    cursor: Annotated[str, Meta(pattern="^[0-9]{0,19}$", description="Of the last answer.")] = ""
    limit: Limit = 20


async def search(backend: Backend, given: SearchArguments) -> dict[str, Any]:
    state: dict[str, Any] = {"state": given.state} if given.state else {}
    if given.where == "tasks":
        asked = tasks.FindTasks(after=int(given.cursor or 0), limit=given.limit, **state)
        lines = (await backend.ask(asked))["tasks"]
        cursor = str(lines[-1]["seq"]) if len(lines) == given.limit else ""
        return labelled({"tasks": lines, "cursor": cursor})
    query = {name: value for name, value in _filled(given).items() if name not in ("where", "state")}
    own = {"org_id": backend.org} if backend.is_operator else {}
    answer = await backend.ask(messages.FindMessages(**query | {"limit": given.limit} | state | own))
    found: dict[str, Any] = {name: answer[name] for name in ("messages", "cursor")}
    more = {"next": "there may be more: call search with this cursor"} if answer["cursor"] else {}
    return labelled(found | more)


# ---- for operators -----------------------------------------------------------------------------------


class DeadLettersArguments(Arguments, frozen=True, kw_only=True):
    """List messages that failed for good, with their errors."""

    type: OnlyType = ""
    error_type: OnlyErrorType = ""
    goal_id: OnlyGoal = ""
    agent_id: OnlyAgent = ""
    service: OnlyService = ""
    failure: OnlyFailure = ""
    org_id: OnlyOrg = ""
    after: Annotated[str, Meta(description="The last id of the previous page.")] = ""
    limit: Limit = 20


async def dead_letters(backend: Backend, given: DeadLettersArguments) -> dict[str, Any]:
    answer = await backend.ask(messages.ListLetters(**{**_filled(given), "limit": given.limit}))
    return labelled({"letters": answer["letters"]})


class ReplayArguments(Arguments, frozen=True, kw_only=True):
    """Queue dead letters again: those named, else all that match. Only dry_run=false changes anything."""

    message_ids: Annotated[list[str], Meta(description="From dead_letters.")] = []
    type: OnlyType = ""
    error_type: OnlyErrorType = ""
    goal_id: OnlyGoal = ""
    agent_id: OnlyAgent = ""
    service: OnlyService = ""
    failure: OnlyFailure = ""
    org_id: OnlyOrg = ""
    limit: Annotated[int, Meta(ge=0, description="At most this many; 0 for all.")] = 0
    dry_run: Annotated[bool, Meta(description="True, the default, only counts them.")] = True


async def replay(backend: Backend, given: ReplayArguments) -> dict[str, Any]:
    done = await backend.ask(messages.Replay(**_filled(given) | {"dry_run": given.dry_run}))
    found: dict[str, Any] = {
        **done,
        "message_ids": done["message_ids"][:SEARCH_PAGE_MAX],
        "dry_run": given.dry_run,
    }
    return found | ({"next": "call replay with dry_run=false to queue them"} if given.dry_run else {})


async def as_verb(backend: Backend, verb: Verb) -> dict[str, Any]:
    """Call the verb whose fields are the arguments of the tool."""
    return labelled(await backend.ask(verb, wait_s=WAIT_S_MAX))


# ---- all tools ---------------------------------------------------------------------------------------

_GOAL_VERBS: Mapping[str, type[Verb]] = {
    "goals": goals.ListGoals,
    "goal": goals.ShowGoal,
    "start_goal": goals.StartGoal,
    "complete_goal": goals.CompleteGoal,
    "fail_goal": goals.FailGoal,
    "checkpoints": goals.ListCheckpoints,
    "effects": goals.ListEffects,
    "take_checkpoint": goals.TakeCheckpoint,
    "roll_back_goal": goals.RollBackGoal,
    "goal_context": goals.ReadContext,
    "set_goal_context": goals.SetContext,
    "read_node": goals.ReadNode,
    "save_node": goals.SaveNode,
    "update_node": goals.UpdateNode,
    "decisions": goals.ListDecisions,
    "decide": goals.Answer,
    "rules": goals.ListRules,
    "remove_rule": goals.ForgetRule,
}

TOOLS: Sequence[Tool] = (
    Tool("who_is_there", WhoIsThereArguments, who_is_there, agents.ListAgents, is_team=True),
    Tool("send", SendArguments, send, agents.Send, is_team=True),
    Tool("inbox", InboxArguments, inbox, agents.ReadInbox, is_team=True),
    Tool("ask", AskArguments, ask, agents.Send, is_team=True),
    Tool("reply", ReplyArguments, reply, agents.Send, is_team=True),
    Tool("wait_for", WaitForArguments, wait_for, messages.ShowMessage, is_team=True),
    Tool("enqueue", EnqueueArguments, enqueue, tasks.Enqueue),
    Tool("claim", ClaimArguments, claim, tasks.Next),
    Tool("complete", CompleteArguments, complete, tasks.Complete),
    Tool("fail", FailArguments, fail, tasks.Fail),
    Tool("post", PostArguments, post, server.PostToBus),
    Tool("read_bus", ReadBusArguments, read_bus, server.ReadBus),
    Tool("submit", SubmitArguments, submit, messages.Submit),
    Tool("result", ResultArguments, result, messages.ShowMessage),
    Tool("explain", ExplainArguments, explain, messages.Explain),
    Tool("search", SearchArguments, search, messages.FindMessages),
    Tool("dead_letters", DeadLettersArguments, dead_letters, messages.ListLetters),
    Tool("replay", ReplayArguments, replay, messages.Replay),
    *(Tool(name, verb, as_verb, verb) for name, verb in _GOAL_VERBS.items()),
)


def tools_of(backend: Backend) -> list[Tool]:
    """The tools that the token of the caller allows."""
    return [tool for tool in TOOLS if not backend.refuses(tool.entry)]


def checked_arguments(tool: Tool, given: dict[str, Any]) -> msgspec.Struct:
    """The arguments of a call as the struct of its tool. Raises `InvalidMessage`."""
    known = {name: value for name, value in given.items() if name not in IGNORED}
    try:
        return msgspec.convert(known, tool.arguments)
    except msgspec.ValidationError as error:
        raise InvalidMessage(field_fault(error, f"the call of {tool.name}", tool.arguments)) from None


def schema_of(tool: Tool) -> dict[str, Any]:
    """The JSON schema of the arguments: short, because a model reads those of all tools with each turn.

    Agent programs drop the description of a field without a type. Limits and defaults are left out: a call
    that breaks a limit gets an error that names it.
    """
    document = msgspec.json.schema(tool.arguments)
    schema: dict[str, Any] = document["$defs"][tool.arguments.__name__]
    properties = {
        name: {"type": "string"} | {key: value for key, value in field.items() if key in SHOWN_OF_A_FIELD}
        for name, field in schema["properties"].items()
    }
    required = {"required": schema["required"]} if schema["required"] else {}
    return {"type": "object", "properties": properties, **required}


def description_of(tool: Tool) -> str:
    """The docstring of the arguments as one paragraph."""
    return " ".join((tool.arguments.__doc__ or "").split())


def _filled(given: Arguments) -> dict[str, Any]:
    """The arguments that differ from their defaults."""
    return {
        field.name: value
        for field in msgspec.structs.fields(given)
        if (value := getattr(given, field.name)) != field.default and value != []
    }
