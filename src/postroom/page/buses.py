"""The view of buses: a bus as a conversation, from its newest messages on, and live."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from postroom.calls.fields import Scope, Text
from postroom.message import BusMessage
from postroom.page.redaction import REDACTED_CHARS_MAX, begin_view, shown_body, shown_by, shown_name
from postroom.server.http.exchange import HttpReply, HttpRequest
from postroom.server.http.task_server import TaskServer
from postroom.server.routes.event_streams import EventStream, bus_pages

BUS_LINES_DEFAULT: Final = 100


class BusViewQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /page/buses/{name}`: without `since`, the newest messages."""

    since: Text = ""
    org_id: Scope = ""


async def read(server: TaskServer, request: HttpRequest) -> HttpReply:
    """The newest messages of a bus, oldest first."""
    name, identity, org_id = request.path_param("name"), request.identity, request.call.org_id
    newest = await server.on_bus(
        request, lambda: server.buses.newest(name, BUS_LINES_DEFAULT, identity, org_id)
    )

    def shown() -> dict[str, Any]:
        return {"messages": [_shown(request, message) for message in reversed(newest)][::-1]}

    return await shown_by(server, request, shown)


def _shown(request: HttpRequest, message: BusMessage) -> dict[str, Any]:
    names = ("type", "project_id", "task_id", "run_id")
    return {
        "msg_id": message.msg_id,
        "ts": message.ts,
        "parents": message.parents,
        "body": shown_body(request, message.body),
        **{name: shown_name(request, getattr(message, name)) for name in names},
    }


async def stream(server: TaskServer, request: HttpRequest, is_allowed: Callable[[], bool]) -> None:
    """The messages of a bus as they come, from the position of the page on."""
    query: BusViewQuery = request.call
    since = request.header(b"last-event-id") or query.since

    def shown(message: BusMessage) -> dict[str, Any]:
        begin_view(request)
        return _shown(request, message)

    page = await bus_pages(server, request, since, shown, REDACTED_CHARS_MAX // 2)
    run = partial(server.on_bus, request)
    await EventStream(server, request, page, run, is_allowed=is_allowed).send(since)
