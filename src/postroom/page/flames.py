"""Flame graphs of goals and of messages with their relatives: where the time went, as images.

Rule 1: a graph is drawn by the code of the report, from the events that the store has.
Rule 2: a graph runs no code, and its own policy allows none. The page shows it as an image.
"""

from typing import Final

from msgspec.structs import replace

from postroom.calls.messages import FindMessages
from postroom.core.formats.events import of_store
from postroom.core.history.tracing import spans
from postroom.engine.inspection import WalkLimits, list_messages
from postroom.engine.messages import checked_message_id
from postroom.engine.rules.operations import Operations
from postroom.goals.rollback import goal_of
from postroom.message import Event
from postroom.page.messages import TREE_LOOKED_MAX, TREE_NODES_MAX, read, tree
from postroom.page.redaction import shown_name
from postroom.pipeline.report.flames import profile_of, svg_file
from postroom.server.http.exchange import HttpReply, HttpRequest
from postroom.server.http.task_server import TaskServer
from postroom.server.routes.engine_handlers import visible
from postroom.server.routes.goal_handlers import check_goal

HEADERS: Final = (
    (b"content-type", b"image/svg+xml"),
    (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'; sandbox"),
)


async def of_goal(server: TaskServer, request: HttpRequest) -> HttpReply:
    """The newest messages of a goal."""
    goal_id = request.path_param("id")
    query = FindMessages(goal_id=goal_id, limit=TREE_NODES_MAX)

    def work(operations: Operations) -> list[Event]:
        check_goal(operations.transaction, request.identity, goal_id)
        org_id = goal_of(operations.transaction, goal_id).org_id
        found = list_messages(operations, query, org_id, 0, "", WalkLimits(looked_max=TREE_LOOKED_MAX))
        return _histories(operations, [line.message_id for line in found.messages])

    return await _drawn(server, request, goal_id, await read(server, request, work))


async def of_message(server: TaskServer, request: HttpRequest) -> HttpReply:
    """A message with its ancestors and descendants."""
    asked = checked_message_id(request.path_param("id"))

    def work(operations: Operations) -> list[Event]:
        stored = operations.loaded(visible(operations, asked, request.identity).message_id)
        return _histories(operations, [node.message_id for node in tree(operations, stored)])

    return await _drawn(server, request, asked, await read(server, request, work))


def _histories(operations: Operations, message_ids: list[str]) -> list[Event]:
    return [event for one in message_ids for event in operations.loaded(one).history]


async def _drawn(server: TaskServer, request: HttpRequest, name: str, events: list[Event]) -> HttpReply:
    def drawing() -> bytes:
        found = spans(of_store(event, "", "engine") for event in events)
        shown = (replace(span, type=shown_name(request, span.type)) for span in found)
        return svg_file(profile_of(name, shown)).encode()

    return HttpReply(200, await server.read_for(request, drawing), HEADERS)
