"""The messages view: a list of messages, one message with its life and its children, and what can be done."""

from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Meta

from postroom.calls.messages import FindMessages, MessageLine, MessageList
from postroom.contracts.tasks.task_operations import TaskOperations
from postroom.core.gate import of_organization, permit, visible_org
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.names import unscoped, unscoped_text
from postroom.engine.explanation import explain
from postroom.engine.inspection import StoredMessage, accepted_at, stored_message
from postroom.engine.messages import checked_message_id
from postroom.engine.rules.operations import Operations
from postroom.errors import UnknownTask
from postroom.goals.goal_cells import STATES
from postroom.message import Event, Stored, org_of
from postroom.page.redaction import shown_by, shown_json, shown_name, shown_text, shown_texts
from postroom.server.access.registry import Identity
from postroom.server.http.exchange import HttpReply, HttpRequest
from postroom.server.http.task_server import TaskServer
from postroom.server.routes.engine_handlers import (
    cancel_allowed,
    listed,
    operated_org,
    shown_info,
    visible,
)
from postroom.stores.base import Listing

T = TypeVar("T")

LINES_DEFAULT: Final = 50
LINES_MAX: Final = 200
PageSize = Annotated[int, Meta(ge=1, le=LINES_MAX)]
CHILDREN_LOOKED_MAX: Final = 500  # messages that one message's children are looked for among
TREE_NODES_MAX: Final = 200
TREE_LOOKED_MAX: Final = 2_000
PARENTS_MAX: Final = 50
FREE_FIELDS: Final = ("context", "metadata", "resource_limits", "extra")
"""Fields that a sender may fill with anything."""
PLAIN_FIELDS: Final = (
    "message_id", "state", "priority", "accepted_priority", "attempt", "retry_count", "crashes", "created_at",
    "ended_at",
)  # fmt: skip
"""Fields of a message that postroom writes itself."""
REPLAYABLE: Final = ("DEAD_LETTER", "QUARANTINED", "CANCELLED", "EXPIRED")

_encode = msgspec.json.Encoder().encode


class MessagesViewQuery(FindMessages, frozen=True, kw_only=True):
    """`GET /page/messages`: a page of `GET /engine/messages`."""

    limit: PageSize = LINES_DEFAULT


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
    if scope is not None and (not scope or query.org_id not in (UNSET, scope)):
        return HttpReply(200, _encode(MessageList([])))
    found = await listed(server, request, scope or query.org_id or None)

    def shown() -> MessageList:
        return msgspec.structs.replace(
            found, messages=[_shown_line(request, line) for line in found.messages]
        )

    return await shown_by(server, request, shown)


def _shown_line(request: HttpRequest, line: MessageLine) -> MessageLine:
    return msgspec.structs.replace(
        line,
        message_id=unscoped(request.identity.org, line.message_id),
        type=shown_name(request, line.type),
        goal_id=shown_name(request, line.goal_id),
        agent_id=shown_name(request, line.agent_id),
        error_type=shown_name(request, line.error_type),
    )


# ---- one message -----------------------------------------------------------------------------------


async def show(server: TaskServer, request: HttpRequest) -> HttpReply:
    asked, identity = checked_message_id(request.path_param("id")), request.identity
    core = server.engine.core

    def work(operations: Operations) -> dict[str, Any]:
        stored = operations.loaded(visible(operations, asked, identity).message_id)
        message_id = stored.record.message_id
        info = stored_message(operations, message_id)
        goal = STATES.get(operations.transaction, info.message.get("goal_id", ""))
        left_ns = stored.record.lease_until - operations.transaction.steady_ns
        is_leased = stored.record.state == "PROCESSING"
        return {
            "info": info,
            "has_goal": goal is not None,
            "explanation": explain(operations, core.policy, message_id, core.handlers.registered),
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


def _shown(request: HttpRequest, info: StoredMessage, identity: Identity) -> dict[str, Any]:
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
