"""The messages view: the newest messages, one message with its life and its children, and what can be done.

Rule 1: one call reads a bounded number of records, however many are stored. A search that has not reached the
        end returns a cursor.
"""

from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from postroom.calls.fields import Name, Number, Text
from postroom.contracts.tasks.task_operations import TaskOperations
from postroom.core.formats.jsoninput import raw_value
from postroom.core.gate import of_organization, permit, visible_org
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.names import unscoped, unscoped_text
from postroom.core.times import EPOCH, MICROSECOND
from postroom.engine.explanation import explain
from postroom.engine.inspection import MessageInfo, info_of
from postroom.engine.messages import body_of, checked_message_id
from postroom.engine.rules.operations import Operations
from postroom.errors import InvalidMessage, UnknownTask
from postroom.goals.goal_cells import STATES
from postroom.message import ENGINE_PREFIX, Event, Record, State, Stored, org_of
from postroom.page.redaction import shown_by, shown_json, shown_name, shown_text, shown_texts
from postroom.server.access.registry import Identity
from postroom.server.access.task_names import stored_id
from postroom.server.http.exchange import HttpReply, HttpRequest
from postroom.server.http.task_server import TaskServer
from postroom.server.routes.engine_handlers import (
    SEARCHED_BYTES_MAX,
    cancel_allowed,
    operated_org,
    searchable,
    shown_info,
    visible,
)
from postroom.stores.base import Listing, by_state
from postroom.stores.own_ids import OwnIds
from postroom.stores.transaction import Transaction

T = TypeVar("T")

LINES_DEFAULT: Final = 50
LINES_MAX: Final = 200
PageSize = Annotated[int, Meta(ge=1, le=LINES_MAX)]
CHILDREN_LOOKED_MAX: Final = 500  # messages that one message's children are looked for among
TREE_NODES_MAX: Final = 200
TREE_LOOKED_MAX: Final = 2_000
PARENTS_MAX: Final = 50


class WalkLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How far one call walks back. Users do not set it."""

    looked_max: int = 500  # messages that one search decodes
    numbers_a_read: int = 100_000  # that one look at the records walks back; records have every fourth
    reads_max: int = 10


WALK: Final = WalkLimits()
FREE_FIELDS: Final = ("context", "metadata", "resource_limits", "extra")
"""Fields that a sender may fill with anything."""
PLAIN_FIELDS: Final = (
    "message_id", "state", "priority", "accepted_priority", "attempt", "retry_count", "crashes", "created_at",
    "ended_at",
)  # fmt: skip
"""Fields of a message that postroom writes itself."""
REPLAYABLE: Final = ("DEAD_LETTER", "QUARANTINED", "CANCELLED", "EXPIRED")

_encode = msgspec.json.Encoder().encode


class MessagesViewQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /page/messages`: the newest first. `before` is the cursor of the previous page."""

    org_id: Name | UnsetType = UNSET
    state: State | UnsetType = UNSET
    type: Text = ""
    text: Text = ""
    before: Number = 0
    limit: PageSize = LINES_DEFAULT


class MessageRow(msgspec.Struct, frozen=True):
    """A message in the list."""

    message_id: str
    org_id: str
    state: str
    type: str
    agent_id: str
    priority: int
    attempt: int
    created_at: datetime
    error_type: str


class MessageRows(msgspec.Struct, frozen=True):
    """A page of the list. `before` is the cursor of the next page; 0 at the end."""

    messages: list[MessageRow]
    before: int
    reached: datetime | None = None
    """The time up to which the list was searched; None at its end."""


class TreeNode(msgspec.Struct, frozen=True):
    """A message in the tree."""

    message_id: str
    parent_message_id: str
    type: str
    state: str
    created_at: datetime
    depth: int


# ---- the list --------------------------------------------------------------------------------------


async def find(server: TaskServer, request: HttpRequest) -> HttpReply:
    query: MessagesViewQuery = request.call
    scope = visible_org(request.identity)
    org_id = scope if scope is not None else (None if query.org_id is UNSET else query.org_id)
    if org_id == "" or (scope is not None and query.org_id not in (UNSET, scope)):
        return HttpReply(200, _encode(MessageRows([], 0)))
    query = msgspec.structs.replace(query, before=place_of(server.ids, query.before))
    found = await read(server, request, partial(lines, query=query, org_id=org_id))

    def shown() -> MessageRows:
        return msgspec.structs.replace(
            found,
            messages=[_shown_line(request, line) for line in found.messages],
            before=shown_place(server.ids, found.before),
        )

    return await shown_by(server, request, shown)


def _shown_line(request: HttpRequest, line: MessageRow) -> MessageRow:
    return msgspec.structs.replace(
        line,
        message_id=unscoped(request.identity.org, line.message_id),
        type=shown_name(request, line.type),
        agent_id=shown_name(request, line.agent_id),
        error_type=shown_name(request, line.error_type),
    )


def lines(
    operations: Operations, query: MessagesViewQuery, org_id: str | None, limits: WalkLimits = WALK
) -> MessageRows:
    """The newest messages that fit a query."""
    by_id = _by_id(operations, query.text, org_id)
    if by_id is not None and not query.before:
        return MessageRows([by_id], 0)
    found: list[MessageRow] = []
    last, searched, wanted = None, 0, query.text.strip().casefold()
    queue = None if org_id is None else ENGINE_PREFIX + org_id
    state = None if query.state is UNSET else query.state
    size = limits.looked_max if query.text or query.type else query.limit
    newest = newest_first(operations.transaction, queue, state, query.before, size, limits)
    of_organizations = (one for one in newest if isinstance(one, int) or org_of(one.queue))
    for looked, record in enumerate(of_organizations, 1):
        if isinstance(record, int):  # the numbers that one call may walk are used up
            return MessageRows(found, record, None if last is None else accepted_at(last))
        last = record
        stored = operations.loaded(record.message_id)
        line = _line(stored)
        if query.type in ("", stored.envelope.type):
            if not wanted or wanted in line.message_id.casefold() or wanted in line.error_type.casefold():
                found.append(line)  # without reading the message
            else:
                content = searchable(operations, stored).decode().casefold()
                searched += len(content)
                found += [line] if wanted in content else []
        if len(found) == query.limit or looked == limits.looked_max or searched >= SEARCHED_BYTES_MAX:
            return MessageRows(found, record.seq, accepted_at(record))
    return MessageRows(found, 0)


def newest_first(
    transaction: Transaction,
    queue: str | None,
    state: State | None,
    before: int,
    page: int,
    limits: WalkLimits = WALK,
) -> "Iterator[Record | int]":
    """Records below the number `before`, the newest first. Ends with the number to go on from, if any.

    `before` 0 begins with the newest. `page` is how many records one read of the store gives.
    """
    before = before or transaction.events.newest() + 1
    counts = by_state(transaction.lanes.total() if queue is None else transaction.lanes.depth(queue))
    if not any(n for what, n in counts.items() if what != "LAPSES" and state in (None, what)):
        return  # by the counters: no record is looked at
    for _ in range(limits.reads_max):
        lowest = max(0, before - limits.numbers_a_read)
        while found := transaction.records.find(Listing(queue, state, lowest - 1, page, before)):
            yield from found
            before = found[-1].seq
            if len(found) < page:
                break
        if not lowest:
            return
        before = lowest
    yield before


def place_of(ids: OwnIds, shown: int) -> int:
    """The number of a record that a list goes on from, by the cursor of the page before."""
    number = ids.place(shown)
    if number is None:
        raise InvalidMessage("'before' must be the cursor of an earlier answer: load the list again")
    return number


def shown_place(ids: OwnIds, number: int) -> int:
    """A cursor as pages get it: covered, because numbers count the records of all organizations."""
    return ids.cover(number) if number else 0


def _by_id(operations: Operations, text: str, org_id: str | None) -> MessageRow | None:
    """The message whose id was searched for."""
    try:
        transaction = operations.transaction
        message_id = stored_id(transaction, org_id or "", checked_message_id(text.strip()))
        record = transaction.records.get(message_id)
        if record is None or org_id not in (None, org_of(record.queue)):
            return None
        return _line(operations.loaded(record.message_id))
    except (UnknownTask, ValueError):
        return None


def _line(stored: Stored) -> MessageRow:
    record, body = stored.record, body_of(stored.envelope.payload)
    errors = [event.error_type for event in stored.history if event.error_type]
    return MessageRow(
        message_id=record.message_id,
        org_id=org_of(record.queue),
        state=record.state,
        type=stored.envelope.type,
        agent_id="" if body is None else body.agent_id,
        priority=record.lane,
        attempt=record.attempt,
        created_at=accepted_at(record),
        error_type=errors[-1] if errors else "",
    )


def accepted_at(record: Record) -> datetime:
    return EPOCH + record.created_us * MICROSECOND


# ---- one message -----------------------------------------------------------------------------------


async def show(server: TaskServer, request: HttpRequest) -> HttpReply:
    asked, identity = checked_message_id(request.path_param("id")), request.identity
    core = server.engine.core

    def work(operations: Operations) -> dict[str, Any]:
        stored = operations.loaded(visible(operations, asked, identity).message_id)
        message_id = stored.record.message_id
        info = info_of(operations, message_id, raw_value)
        goal = STATES.get(operations.transaction, info.message.get("goal_id", ""))
        left_ns = stored.record.lease_until - operations.transaction.steady_ns
        is_leased = stored.record.state == "PROCESSING"
        return {
            "info": info,
            "has_goal": goal is not None,
            "explanation": explain(operations, core.policy, message_id, core.handlers.services),
            "lease_left_s": round(left_ns / NANOS_PER_S, 1) if is_leased else None,
            "tree": tree(operations, stored),
        }

    found = await read(server, request, work)

    def shown() -> dict[str, Any]:
        return {
            **_shown(request, shown_info(server.ids, identity, found["info"]), identity),
            "has_goal": found["has_goal"],
            "explanation": shown_text(request, unscoped_text(identity.org, found["explanation"])),
            "lease_left_s": found["lease_left_s"],
            "tree": [_shown_node(request, node) for node in found["tree"]],
        }

    return await shown_by(server, request, shown)


def _shown(request: HttpRequest, info: MessageInfo, identity: Identity) -> dict[str, Any]:
    """A message for the page: everything that others wrote is redacted text."""
    message = dict(info.message)
    payload = message.pop("payload", None)
    free = {name: message.pop(name) for name in FREE_FIELDS if message.get(name)}
    org_id = info.message.get("org_id", "")
    owner = of_organization(org_id)
    return {
        **{name: getattr(info, name) for name in PLAIN_FIELDS},
        "worker_id": shown_name(request, info.worker_id),
        "history": [shown_event(request, event) for event in info.history],
        "errors": [
            shown_error(request, error["attempt"], error["error_type"], error["error"])
            for error in info.errors
        ],
        "org_id": org_id,
        "message": msgspec.json.format(_encode(shown_texts(request, message)), indent=2).decode(),
        "free": shown_json(request, free) if free else None,
        "payload": shown_json(request, payload),
        "result": None if info.result is None else shown_json(request, info.result),
        "type": shown_name(request, info.message.get("type", "")),
        "parent_message_id": shown_name(request, info.message.get("parent_message_id", "")),
        "goal_id": info.message.get("goal_id", ""),
        "can_cancel": not info.ended and permit(identity, "message.cancel", owner),
        "can_retry": info.state in REPLAYABLE and permit(identity, "letter.replay", owner),
    }


def shown_event(request: HttpRequest, event: Event) -> dict[str, Any]:
    return {
        "ts_us": event.ts_us,
        "kind": event.kind,
        "worker_id": shown_name(request, event.worker_id),
        "error_type": shown_name(request, event.error_type),
        "error": shown_text(request, event.error),
    }


def shown_error(request: HttpRequest, attempt: int, error_type: str, text: str) -> dict[str, Any]:
    return {
        "attempt": attempt,
        "error_type": shown_name(request, error_type),
        "error": shown_text(request, text),
    }


def _shown_node(request: HttpRequest, node: TreeNode) -> TreeNode:
    org = request.identity.org
    return msgspec.structs.replace(
        node,
        message_id=unscoped(org, node.message_id),
        type=shown_name(request, node.type),
        parent_message_id=shown_name(request, unscoped(org, node.parent_message_id)),
    )


def tree(operations: Operations, stored: Stored) -> list[TreeNode]:
    """The ancestors of a message, the message, and its descendants, each after its parent."""
    above = [_node(one, 0) for one in _ancestors(operations, stored)]
    nodes = [msgspec.structs.replace(node, depth=depth) for depth, node in enumerate(above)]
    own = _node(stored, len(nodes))
    looked = [0]
    return [*nodes, own, *_descendants(operations, stored, len(nodes) + 1, looked, {own.message_id})]


def _ancestors(operations: Operations, stored: Stored) -> list[Stored]:
    """The parents of a message, the first one first. A parent of another organization is not shown."""
    found: list[Stored] = []
    seen = {stored.record.message_id}
    parent_id = stored.envelope.parent_message_id
    while parent_id and parent_id not in seen and len(found) < PARENTS_MAX:
        seen.add(parent_id)
        try:
            parent = operations.loaded(parent_id)
        except UnknownTask:
            break
        if parent.record.queue != stored.record.queue:
            break
        found.append(parent)
        parent_id = parent.envelope.parent_message_id
    return found[::-1]


def _descendants(
    operations: Operations, stored: Stored, depth: int, looked: list[int], seen: set[str]
) -> list[TreeNode]:
    """The children of a message with theirs.

    A child is accepted after the first delivery of its parent, and is looked for among the next messages of
    the organization.
    """
    claims = [event.seq for event in stored.history if event.kind == "dequeued"]
    if not claims or looked[0] >= TREE_LOOKED_MAX:
        return []
    limit = min(CHILDREN_LOOKED_MAX, TREE_LOOKED_MAX - looked[0])
    later = operations.transaction.records.find(Listing(stored.record.queue, None, claims[0], limit))
    looked[0] += len(later)
    found: list[TreeNode] = []
    for record in later:
        if record.message_id in seen or len(seen) >= TREE_NODES_MAX:
            continue
        child = operations.loaded(record.message_id)
        if child.envelope.parent_message_id == stored.record.message_id:
            seen.add(record.message_id)
            found += [_node(child, depth), *_descendants(operations, child, depth + 1, looked, seen)]
    return found


def _node(stored: Stored, depth: int) -> TreeNode:
    record, envelope = stored.record, stored.envelope
    return TreeNode(
        record.message_id, envelope.parent_message_id, envelope.type, record.state, accepted_at(record), depth
    )


# ---- changes ---------------------------------------------------------------------------------------


async def cancel(server: TaskServer, request: HttpRequest) -> HttpReply:
    return await _change(server, request, "cancelled", partial(cancel_allowed, request.identity))


async def retry(server: TaskServer, request: HttpRequest) -> HttpReply:
    def replay(operations: Operations, message_id: str) -> None:
        record = visible(operations, message_id, request.identity)
        operated_org(request.identity, "letter.replay", org_of(record.queue))
        operations.replay(record.message_id, None)

    return await _change(server, request, "replayed", replay)


async def _change(
    server: TaskServer, request: HttpRequest, event: str, change: Callable[[Operations, str], Any]
) -> HttpReply:
    message_id, policy = checked_message_id(request.path_param("id")), server.engine.policy

    def work(task_operations: TaskOperations) -> None:
        change(Operations(task_operations.transaction, policy), message_id)

    await server.writer.submit(work, request.identity, makes_room=True)
    server.wake_streams()
    server.server_log.write(event, task_id=message_id, agent=request.identity.name)
    return HttpReply(200, _encode({"message_id": message_id}))


async def read(server: TaskServer, request: HttpRequest, work: Callable[[Operations], T]) -> T:
    """Run a read of the engine in a reader thread."""
    store, policy = server.engine.store, server.engine.policy
    return await server.read_for(
        request, lambda: store.read(lambda transaction: work(Operations(transaction, policy)))
    )
