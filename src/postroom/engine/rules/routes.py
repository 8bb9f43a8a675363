"""Which handler runs a message when a type has several.

Rule 1: the handler of a tool comes first, then that of a service, then that of the whole type.
Rule 2: a message that names no service fits the handlers of all services, but only one of them may fit best.
Rule 3: the only handler of a type runs all its messages, unless it is for one tool.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeAlias

import msgspec


class HandlerRoute(NamedTuple):
    """The messages that a handler of a type is for; empty for any service, or any tool."""

    service: str = ""
    tool: str = ""


Routes: TypeAlias = Mapping[str, Collection[HandlerRoute]]
"""Message type -> what its handlers are for."""


class _ToolCall(msgspec.Struct):
    tool: Any = None


def tool_of(payload: bytes) -> str:
    """The tool that a payload names; empty when it names none."""
    try:
        tool = msgspec.json.decode(payload, type=_ToolCall).tool
    except msgspec.DecodeError:
        return ""
    return tool if isinstance(tool, str) else ""


def chosen(
    routes: Collection[HandlerRoute], service: str, payload: Callable[[], bytes]
) -> HandlerRoute | None:
    """The route of a message that names this service; None when none fits, or several fit equally well."""
    if len(routes) == 1:
        [only] = routes
        if not only.tool:
            return only
    tool = tool_of(payload()) if any(route.tool for route in routes) else ""
    fitting = {
        route: (bool(route.tool), route.service == service)
        for route in routes
        if route.tool in ("", tool) and (not service or route.service in ("", service))
    }
    best = [route for route, rank in fitting.items() if rank == max(fitting.values())]
    return best[0] if len(best) == 1 else None
