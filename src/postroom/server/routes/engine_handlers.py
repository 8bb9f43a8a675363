"""The handlers of the routes of the global queue.

Rule 1: the token alone decides the organization of an agent. A body that names another one is refused.
Rule 2: a message of another organization is answered like a message that does not exist.
Rule 3: writes of requests go to the writer thread, reads to reader threads. No handler blocks the event loop.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from postroom.calls.messages import (
    ExplainAnswer,
    FindMessages,
    ListLetters,
    MessageAnswer,
    MessageList,
    MessagesAnswer,
    Pause,
    Purge,
    Replay,
    Replayed,
    Resume,
    ScopeAnswer,
    ShowMessage,
    Submit,
    SubmitMany,
)
from postroom.calls.submit import CreatedBy
from postroom.calls.verb import Verb
from postroom.contracts.tasks.task_operations import TaskOperations
from postroom.core.formats.jsoninput import raw_value
from postroom.core.gate import Owner, of_organization, permit, visible_org
from postroom.core.names import unscoped, unscoped_text
from postroom.engine import dlq
from postroom.engine.agents.answer_parts import Position, parse_position, read_on
from postroom.engine.explanation import explain as explanation_of
from postroom.engine.inspection import EngineStatus, StoredMessage, list_messages, status_of, stored_message
from postroom.engine.message_input import Prepared
from postroom.engine.messages import checked_message_id, unknown_message
from postroom.engine.rules.cells import Part
from postroom.engine.rules.operations import Operations, Submitted
from postroom.engine.rules.policy import CONTROL_TYPES
from postroom.engine.token_status import TokenStatus
from postroom.engine.token_status import status_of as token_status_of
from postroom.errors import GuardTripped, InvalidMessage, Overloaded
from postroom.message import Record, org_of
from postroom.server.access.registry import Identity
from postroom.server.access.task_names import cursor_of, place_of, shown_event, stored_id
from postroom.server.http.exchange import NO_CONTENT, HttpReply, HttpRequest, Refusal, check_allowed
from postroom.server.http.task_server import DECODED_AT_ONCE_BYTES, TaskServer
from postroom.server.http.writer import TASK_BYTES
from postroom.server.routes.agent_presence import heard
from postroom.server.routes.event_streams import STREAM_PAGE_BYTES_MAX, EventStream, sse
from postroom.server.routes.task_handlers import poll_share
from postroom.stores.own_ids import OwnIds

T = TypeVar("T")

AGENT_MESSAGE = "agent_message"  # the type whose default handler puts the payload into the inbox of `to`
GIVEN_IDS = ("message_id", "parent_message_id")
PARTS_POLL_S = 0.1  # how often a stream looks for parts that a worker process has stored


class _RawMessages(msgspec.Struct):
    """The body of a batch."""

    messages: list[dict[str, msgspec.Raw]]


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_raw_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_raw_messages = msgspec.json.Decoder(_RawMessages).decode


# ---- submitting ------------------------------------------------------------------------------------


async def submit(server: TaskServer, request: HttpRequest) -> MessageAnswer | MessagesAnswer:
    """Store messages."""
    is_batch = isinstance(request.call, SubmitMany)
    given = await server.decode_for(request.identity, partial(given_fields, request.call), request.raw)
    request.call = None  # what it holds may take up far more than its JSON
    messages = [attributed(request.identity, message) for message in given]
    del given
    orgs, org = [message["org_id"] for message in messages], request.identity.org
    server.tasks.check_backlog()
    telemetry = server.engine.core.additions.telemetry
    if telemetry is None:
        submitted = await _submit(server, request, messages)
    else:
        submitted = await telemetry.send(messages, partial(_submit, server, request))
    for org_id, one in zip(orgs, submitted, strict=True):
        server.server_log.write("submitted", task_id=one.message_id, org=org_id)
    if is_batch:
        return MessagesAnswer([unscoped(org, one.message_id) for one in submitted])
    [one] = submitted
    return MessageAnswer(unscoped(org, one.message_id), one.duplicate)


def given_fields(body: Submit | SubmitMany, raw: bytes) -> list[dict[str, Any]]:
    """The fields of messages as they were sent, also those that no struct lists.

    A payload is taken from the struct, because it may be long.
    """
    if isinstance(body, SubmitMany):
        return [*map(_given, body.messages, _raw_messages(raw).messages)]
    return [_given(body, _raw_fields(raw))]


def _given(body: Submit, fields: dict[str, msgspec.Raw]) -> dict[str, Any]:
    return {name: body.payload if name == "payload" else _decode(raw) for name, raw in fields.items()}


async def prepared_if_long(
    server: TaskServer, request: HttpRequest, messages: list[dict[str, Any]]
) -> list[Prepared]:
    """Long messages in their stored form; empties `messages`. Returns nothing for short messages.

    Encoding long messages inside a commit would delay all callers. Short ones are cheap enough there.
    """
    core = server.engine.core
    if request.size <= DECODED_AT_ONCE_BYTES:
        return []

    def prepare(_: bytes) -> list[Prepared]:
        wall_us = core.store.wall_us()
        return [core.registry.prepare(messages.pop(0), core.policy, wall_us) for _ in range(len(messages))]

    return await server.decode_for(request.identity, prepare, request.raw)


async def _submit(
    server: TaskServer, request: HttpRequest, messages: list[dict[str, Any]]
) -> list[Submitted]:
    core, size = server.engine.core, TASK_BYTES * len(messages) + request.size
    prepared = await prepared_if_long(server, request, messages)

    def work(operations: TaskOperations) -> list[Submitted]:
        transaction = operations.transaction
        prepared[:] = prepared or [
            core.registry.prepare(message, core.policy, transaction.wall_us) for message in messages
        ]
        for one in prepared:
            check_attribution(request.identity, one)
        return Operations(transaction, core.policy).submit(prepared)

    try:
        submitted: list[Submitted] = await server.writer.submit(work, request.identity, size)
    except (Overloaded, GuardTripped) as error:
        await core.submits.note_refusal(prepared[0], error)
        raise
    return submitted


def attributed(identity: Identity, message: dict[str, Any]) -> dict[str, Any]:
    """The message with the organization and the creator that the token gives."""
    if "hop" in message:
        raise InvalidMessage("hop is counted by the engine, and cannot be set")
    if identity.is_operator:
        if message.get("org_id") is None:
            raise InvalidMessage("an operator has to name the organization of a message: org_id")
        return message
    own = {"type": "agent", "id": identity.name}
    org_id = message.get("org_id")
    check_allowed(identity, "message.submit", of_organization(identity.org if org_id is None else org_id))
    if message.get("created_by") not in (None, own) or message.get("agent_id") not in (
        None, "", identity.name,
    ):  # fmt: skip
        raise _not_yours(identity, "acts for no other agent")
    return {**message, "org_id": identity.org, "created_by": own}


def check_attribution(identity: Identity, message: Prepared) -> None:
    """Refuse a message that a migration has given to another organization or another agent."""
    check_allowed(identity, "message.submit", of_organization(message.org_id))
    body, creator = message.body, CreatedBy("agent", identity.name)
    is_own = body.created_by == creator and body.agent_id in ("", identity.name) and not body.hop
    if not (identity.is_operator or is_own):
        raise _not_yours(identity, "acts for no other organization and no other agent")
    if identity.permissions.only_message:
        check_reach(identity, message.org_id, message.envelope.type, _decode(message.payload))


def check_reach(identity: Identity, org_id: str, kind: str, payload: Any) -> None:
    """Refuse a message to, or about, an agent that the token may not send messages to."""
    if kind in CONTROL_TYPES:
        check_allowed(identity, "message.control", Owner(org_id))
    if kind == AGENT_MESSAGE:
        to = payload.get("to") if isinstance(payload, dict) else None
        check_allowed(identity, "message.direct", Owner(org_id), str(to))


def _not_yours(identity: Identity, rule: str) -> Refusal:
    return Refusal(403, "Forbidden", f"this is the token of {identity.name}, which {rule}")


# ---- searching -------------------------------------------------------------------------------------


async def find(server: TaskServer, request: HttpRequest) -> MessageList:
    """List messages of an organization; for an operator of all organizations, also of all."""
    call: FindMessages = request.call
    org_id = call.org_id or request.identity.org
    check_allowed(request.identity, "message.list", of_organization(org_id))
    found = await listed(server, request, org_id or None)
    shown = [
        replace(line, message_id=unscoped(request.identity.org, line.message_id)) for line in found.messages
    ]
    return replace(found, messages=shown)


async def listed(server: TaskServer, request: HttpRequest, org_id: str | None) -> MessageList:
    """A page of a list, with its cursor as callers get it."""
    call: FindMessages = request.call
    org, text, before = request.identity.org, call.text.strip(), place_of(server.ids, call.cursor)

    def work(operations: Operations) -> MessageList:
        message_id = stored_id(operations.transaction, org, text)
        return list_messages(operations, call, org_id, before, message_id)

    found = await server.read_for(request, lambda: _read(server, work))
    return replace(found, cursor=cursor_of(server.ids, int(found.cursor or 0)))


# ---- one message -----------------------------------------------------------------------------------


async def show(server: TaskServer, request: HttpRequest) -> StoredMessage:
    call: ShowMessage = request.call
    info = await _read_visible(server, request, stored_message)
    if call.wait_s and not info.ended:
        async with poll_share(server, request) as left:
            await server.result_polls.wait(info.message_id, call.wait_s, left)
        info = await _read_visible(server, request, stored_message)
    return shown_info(server.ids, request.identity, info)


def shown_info(ids: OwnIds, identity: Identity, info: StoredMessage) -> StoredMessage:
    """A message as the caller sees it: with the ids that were given, and without numbers of the store."""
    org = identity.org
    given = {name: unscoped(org, info.message[name]) for name in GIVEN_IDS if name in info.message}
    history = [shown_event(ids, identity, ids.shown(event)) for event in info.history]
    return replace(
        info, message_id=unscoped(org, info.message_id), message={**info.message, **given}, history=history
    )


async def stream(server: TaskServer, request: HttpRequest) -> HttpReply | None:
    """The parts of an answer as they come. 204 tells a client that has the last part to reconnect no more."""
    last = request.header(b"last-event-id")
    begin = parse_position(last) if last else Position()
    if begin.is_end:
        await _read_visible(server, request, lambda *_: None)
        return NO_CONTENT

    def page(position: Position) -> tuple[bytes, Position | None]:
        def read(operations: Operations, message_id: str) -> tuple[bytes, Position | None]:
            parts, is_complete = read_on(operations, message_id, position)
            request_id = unscoped(request.identity.org, message_id)
            stamped = [
                (at, replace(part, epoch=server.epoch or part.epoch, request_id=request_id))
                for at, part in parts
            ]
            return stream_page(stamped, position, is_complete=is_complete)

        return _visible_read(server, request, read)

    run = partial(server.read_for, request)
    with heard(server, request.identity):
        await EventStream(server, request, page, run, poll_s=PARTS_POLL_S).send(begin)
    return None


def stream_page(
    parts: Sequence[tuple[Position, Part]], position: Position, *, is_complete: bool
) -> tuple[bytes, Position | None]:
    """The parts of an answer as events, until a page is full, and the last position; None at the end."""
    data, sent = bytearray(), 0
    while sent < len(parts) and len(data) < STREAM_PAGE_BYTES_MAX:
        position, part = parts[sent]
        data += sse(position.text, part.type, _encode(part))
        sent += 1
    return bytes(data), None if is_complete and sent == len(parts) else position


async def explain(server: TaskServer, request: HttpRequest) -> ExplainAnswer:
    core = server.engine.core

    def read(operations: Operations, message_id: str) -> str:
        return explanation_of(operations, core.policy, message_id, core.handlers.registered)

    text = await _read_visible(server, request, read)
    shown = unscoped_text(request.identity.org, text)
    return ExplainAnswer(request.call.message_id, shown)


async def cancel(server: TaskServer, request: HttpRequest) -> MessageAnswer:
    message_id, policy = checked_message_id(request.call.message_id), server.engine.policy

    def work(task_operations: TaskOperations) -> None:
        operations = Operations(task_operations.transaction, policy)
        cancel_allowed(request.identity, operations, message_id)

    await server.writer.submit(work, request.identity, makes_room=True)
    server.wake_streams()
    server.server_log.write("cancelled", task_id=message_id, agent=request.identity.name)
    return MessageAnswer(message_id)


def cancel_allowed(identity: Identity, operations: Operations, message_id: str) -> None:
    """Cancel a message that the caller sees, unless the token could not have sent it."""
    record = visible(operations, message_id, identity)
    org_id = org_of(record.queue)
    check_allowed(identity, "message.cancel", of_organization(org_id))
    if identity.permissions.only_message:
        stored = operations.loaded(record.message_id)
        message = dlq.original_message(operations, stored) or {}
        check_reach(identity, org_id, stored.envelope.type, message.get("payload"))
    operations.cancel(record.message_id)


def visible(operations: Operations, message_id: str, identity: Identity) -> Record:
    """The record of a message that the caller may see. Raises `UnknownTask` for that of another organization.

    Nothing but the record is read.
    """
    stored = stored_id(operations.transaction, identity.org, checked_message_id(message_id))
    record = operations.transaction.records.get(stored)
    org_id = "" if record is None else org_of(record.queue)
    if record is None or not org_id or not permit(identity, "message.read", of_organization(org_id)):
        raise unknown_message(message_id)
    return record


async def _read_visible(server: TaskServer, request: HttpRequest, read: Callable[[Operations, str], T]) -> T:
    return await server.read_for(request, lambda: _visible_read(server, request, read))


def _visible_read(server: TaskServer, request: HttpRequest, read: Callable[[Operations, str], T]) -> T:
    """Read about the message of the path, if the caller may see it."""
    message_id = checked_message_id(request.call.message_id)

    def work(operations: Operations) -> T:
        return read(operations, visible(operations, message_id, request.identity).message_id)

    return _read(server, work)


def _read(server: TaskServer, work: Callable[[Operations], T]) -> T:
    policy = server.engine.policy
    return server.engine.store.read(lambda transaction: work(Operations(transaction, policy)))


# ---- dead letters ----------------------------------------------------------------------------------


async def dead_letters(server: TaskServer, request: HttpRequest) -> dict[str, Any]:
    call: ListLetters = request.call
    identity, filters = request.identity, call.filters
    check_allowed(identity, "letter.list", of_organization(filters.get("org_id", identity.org)))
    if identity.org:
        filters["org_id"] = identity.org
    wanted = dlq.checked_filters(filters)

    def work(operations: Operations) -> list[dlq.DeadLetter]:
        if wanted.after is not None:
            after = visible(operations, wanted.after, identity).message_id
            return dlq.letters(operations, replace(wanted, after=after), raw_value)
        return dlq.letters(operations, wanted, raw_value)

    found = await server.read_for(request, lambda: _read(server, work))
    return {"letters": [shown_letter(identity, letter) for letter in found]}


async def dead_letter(server: TaskServer, request: HttpRequest) -> dict[str, Any]:
    letter = await _read_visible(server, request, partial(dlq.letter_by_id, read_value=raw_value))
    return shown_letter(request.identity, letter)


def shown_letter(identity: Identity, letter: dlq.DeadLetter) -> dict[str, Any]:
    """A dead letter as the caller sees it: with the ids that were given to it and its parent."""
    fields = dlq.as_json(letter)
    for holder in (fields, fields.get("original_message") or {}):
        holder.update({name: unscoped(identity.org, holder[name]) for name in GIVEN_IDS if name in holder})
    return fields


async def replay(server: TaskServer, request: HttpRequest) -> Replayed:
    call: Replay = request.call
    chosen, filters = await _operated_letters(server, request, call, "letter.replay")
    done = await server.engine.dlq.replay(chosen, dry_run=call.dry_run, priority=call.priority, **filters)
    return replace(done, message_ids=_changed(server, request, "replayed", done.message_ids, call))


async def purge(server: TaskServer, request: HttpRequest) -> MessagesAnswer:
    call: Purge = request.call
    chosen, filters = await _operated_letters(server, request, call, "letter.purge")
    purged = await server.engine.dlq.purge(chosen, dry_run=call.dry_run, **filters)
    return MessagesAnswer(_changed(server, request, "purged", purged, call))


async def _operated_letters(
    server: TaskServer, request: HttpRequest, body: Replay | Purge, action: str
) -> tuple[list[str] | None, dict[str, Any]]:
    """The messages and the filters of a change. An operator of one organization changes only its letters."""
    identity, filters = request.identity, body.filters
    named = None if body.message_ids is UNSET else body.message_ids
    if visible_org(identity) is None:
        return named, filters
    if named is None:
        filters["org_id"] = operated_org(identity, action, filters.get("org_id", ""))

    def stored(operations: Operations, message_ids: Sequence[str]) -> list[str]:
        return [visible(operations, message_id, identity).message_id for message_id in message_ids]

    async def look(message_ids: Sequence[str]) -> list[str]:
        return await server.read_for(request, lambda: _read(server, partial(stored, message_ids=message_ids)))

    if "after" in filters:
        [filters["after"]] = await look([filters["after"]])
    return None if named is None else await look(named), filters


def operated_org(identity: Identity, action: str, org_id: str) -> str:
    """The organization that an operator acts on; empty for all of them."""
    org_id = org_id or identity.org
    check_allowed(identity, action, of_organization(org_id))
    return org_id


def _changed(
    server: TaskServer, request: HttpRequest, event: str, message_ids: list[str], call: Replay | Purge
) -> list[str]:
    """Write changed dead letters into the server log. Returns their ids as the caller sees them."""
    for message_id in () if call.dry_run else message_ids:
        server.server_log.write(event, task_id=message_id, agent=request.identity.name)
    return [unscoped(request.identity.org, one) for one in message_ids]


# ---- the queue -------------------------------------------------------------------------------------


async def status(server: TaskServer, request: HttpRequest) -> EngineStatus:
    org_id = visible_org(request.identity)
    found = await server.read_for(request, lambda: engine_status(server, org_id))
    if org_id is not None:
        return found.of_organization(org_id)
    return found.judged(await server.part_facts())


def engine_status(server: TaskServer, org_id: str | None = None) -> EngineStatus:
    """How the engine of a server stands. With `org_id`, breakers are those of this organization."""
    return _read(server, lambda operations: status_of(operations, server.engine.policy, org_id))


async def tokens(server: TaskServer, request: HttpRequest) -> TokenStatus:
    rules, org_id = server.engine.policy.token_rules, visible_org(request.identity)
    found = await server.read_for(
        request, lambda: _read(server, lambda operations: token_status_of(operations.transaction, rules))
    )
    return found if org_id is None else found.of_organization(org_id)


async def pause(server: TaskServer, request: HttpRequest) -> ScopeAnswer:
    call: Pause = request.call
    org_id = operated_org(request.identity, "engine.pause", call.org_id)
    await server.engine.pause(org_id=org_id, type=call.type, kill=call.kill)
    return _scoped(server, request, org_id, "killed" if call.kill else "paused")


async def resume(server: TaskServer, request: HttpRequest) -> ScopeAnswer:
    call: Resume = request.call
    org_id = operated_org(request.identity, "engine.pause", call.org_id)
    await server.engine.resume(org_id=org_id, type=call.type)
    return _scoped(server, request, org_id, "resumed")


def _scoped(server: TaskServer, request: HttpRequest, org_id: str, event: str) -> ScopeAnswer:
    call: Resume = request.call
    server.server_log.write(event, agent=request.identity.name, org=org_id, type=call.type)
    return ScopeAnswer(org_id, call.type)


async def by_engine(server: TaskServer, request: HttpRequest) -> Any:
    """Call the method of the engine that a verb names, for the organization of the caller.

    A verb without `org_id` is for operators of all organizations.
    """
    call: Verb = request.call
    identity, permission, own = request.identity, call.route.permission, visible_org(request.identity)
    fields = {name: value for name, value in msgspec.structs.asdict(call).items() if value is not UNSET}
    org_id = operated_org(identity, permission, fields.get("org_id") or "")
    if own is not None and ("org_id" not in fields or not own or org_id != own):
        raise _not_yours(identity, "does that for its organization only")
    if "org_id" in fields:
        fields["org_id"] = org_id
    return await attrgetter(call.route.engine)(server.engine)(**fields)
