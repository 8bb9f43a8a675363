"""Refused calls as events in the store: who called, from where, and why the call was refused.

Rule 1: a flood of refused calls cannot fill the disk. In `WINDOW_S`, `EVENTS_EACH_MAX` calls of a caller and
        `EVENTS_ALL_MAX` of all callers are events, half of them at most for one organization; the rest is
        counted, and each caller's count is one event.
Rule 2: an event holds no token and no body, and at most `TEXT_CHARS_MAX` characters of each text.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from postroom.contracts.tasks.task_operations import TaskOperations
from postroom.core.call_limits import RefusalWindow
from postroom.errors import PostroomError
from postroom.server.access.registry import Identity
from postroom.server.nats.options import network_of
from postroom.server.telemetry.server_log import ServerLog, error_location

WINDOW_S = 10.0
EVENTS_EACH_MAX = 5
EVENTS_ALL_MAX = 50
CLIENTS_MAX = 20  # whose refusals are summed one by one
TEXT_CHARS_MAX = 200
CLOSE_TIMEOUT_S = 5.0

TYPE = "call"
"""The type of these events. Refused submits have the type of their message."""


class RefusedCall(msgspec.Struct, frozen=True):
    """One refused call."""

    identity: Identity
    """Of a caller without a valid token: its name is empty."""
    address: str
    """Where the call came from; empty for a call of the same machine over stdio."""
    via: str
    """`http` or `mcp`."""
    call: str
    """The route or the tool, without what the caller wrote.

    `request`, `reply` or `connect` for a refusal without a route.
    """
    status: int
    error_type: str
    error: str

    @property
    def client(self) -> str:
        """Whose refusals are counted together. A new connection has another port, and is the same client."""
        if self.identity.name:
            return self.identity.caller
        return f"address:{network_of(self.address.rpartition(':')[0].strip('[]'))}"

    def facts(self, **further: Any) -> dict[str, Any]:
        """The facts of an event about the call."""
        identity = self.identity
        detail = {
            "who": identity.name, "org_id": identity.org, "role": identity.role if identity.name else "",
            "token_id": identity.token_id, "address": self.address, "via": self.via, "call": self.call,
            "status": self.status, **further,
        }  # fmt: skip
        return {
            "type": TYPE,
            "error_type": self.error_type,
            "error": self.error[:TEXT_CHARS_MAX],
            "detail": {name: _bounded(value) for name, value in detail.items() if value != ""},
        }


Submit = Callable[[Callable[[TaskOperations], None], Identity], "asyncio.Future[Any]"]
_WRITER = Identity("postroom-refusals", "operator")


class RefusalEvents:
    """Emits refused calls, and counts those that do not become events. Used in the event loop only."""

    window_s = WINDOW_S

    def __init__(self, submit: Submit, log: ServerLog) -> None:
        self._submit = submit
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._window: RefusalWindow[RefusedCall] = RefusalWindow(
            each_max=EVENTS_EACH_MAX, all_max=EVENTS_ALL_MAX, clients_max=CLIENTS_MAX
        )
        self._end: asyncio.TimerHandle | None = None
        self._writing: set[asyncio.Future[Any]] = set()

    def note(self, refused: RefusedCall) -> None:
        """A call was refused."""
        if self._end is None:
            self._end = self._loop.call_later(self.window_s, self._end_window)
        if self._window.add(refused.identity.org, refused.client, refused):
            self._emit([refused.facts()])

    def _end_window(self) -> None:
        self._end = None
        events = []
        for one in self._window.end():
            whose = "other callers" if one.is_shared else "this caller"
            error = f"{one.calls} more calls of {whose} were refused in {self.window_s:g} s; the last: "
            summed = msgspec.structs.replace(one.last, error=error + one.last.error)
            events.append(summed.facts(refused=one.calls))
        if events:
            self._emit(events)

    def _emit(self, events: Sequence[dict[str, Any]]) -> None:
        def write(operations: TaskOperations) -> None:
            for facts in events:
                operations.transaction.emit("rejected", **facts)

        try:
            future = self._submit(write, _WRITER)
        except PostroomError as error:
            self._report(error)
            return
        self._writing.add(future)
        future.add_done_callback(self._written)

    def _written(self, future: "asyncio.Future[Any]") -> None:
        self._writing.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            self._report(error)

    def _report(self, error: BaseException) -> None:
        self._log.write_rarely("refusals_lost", error=error_location(error))

    async def close(self) -> None:
        """Emit the sums of the last window."""
        if self._end is not None:
            self._end.cancel()
            self._end_window()
        if self._writing:
            await asyncio.wait(self._writing, timeout=CLOSE_TIMEOUT_S)


def _bounded(value: Any) -> Any:
    return value[:TEXT_CHARS_MAX] if isinstance(value, str) else value
