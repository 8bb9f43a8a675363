"""A `TaskClient` for a data folder: its calls go to the store itself, without a server."""

import time
from typing import Any

import msgspec

from postroom.client.connections import Call, Connections
from postroom.client.tasks import TaskClient
from postroom.contracts.tasks.tasks import Tasks
from postroom.errors import HandleDead, InvalidMessage

STOP_CHECK_S = 0.25  # how often a wait for a task checks whether the worker is stopping

_decode = msgspec.json.Decoder().decode


class LocalClient(TaskClient):
    """`TaskClient` on a store of this machine. It needs no token: write access to the folder is enough."""

    def __init__(self, tasks: Tasks, agent: str, **options: Any) -> None:
        super().__init__("http://localhost", agent, "none", **options)
        self._connections = _StoreConnection(tasks, agent)


class _StoreConnection(Connections):
    """Answers an agent's calls as the routes of a server do."""

    def __init__(self, tasks: Tasks, agent: str) -> None:
        super().__init__("http://localhost")
        self.url = tasks.store.url
        self._tasks = tasks
        self._agent = agent

    def ask(self, call: Call) -> Any:
        try:
            return self._answer(call, _decode(call.body or b"{}"))
        except HandleDead:
            self._tasks.reopen()
            raise

    def _answer(self, call: Call, body: dict[str, Any]) -> Any:
        tasks = self._tasks
        match call.path:
            case "/queue/next":
                return self._next(call, body)
            case "/queue/complete":
                return self._complete(body)
            case "/queue/heartbeat":
                tasks.heartbeat(body["task_id"], body["lease"])
            case "/queue/fail":
                tasks.fail(body["task_id"], body["lease"], body["error"], body.get("retry_in_s"))
            case "/queue/release":
                tasks.release(body["task_id"], body["lease"])
            case _:
                raise InvalidMessage(f"{call.path} needs a harness")
        return None

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        claimed = self._tasks.complete(
            body["task_id"], body["lease"], body["decision"], claim_next=body.get("claim_next", 0)
        )
        return {"tasks": msgspec.to_builtins(claimed)}

    def _next(self, call: Call, body: dict[str, Any]) -> dict[str, Any]:
        """Wait in short pieces, so that a worker that is stopping does not wait to the end."""
        deadline = time.monotonic() + body["wait_s"]
        while True:
            wait_s = min(STOP_CHECK_S, max(0.0, deadline - time.monotonic()))
            claimed = self._tasks.claim(
                agent=self._agent,
                limit=body["limit"],
                lease_s=body["lease_s"],
                wait_s=wait_s,
                worker=body["worker"],
            )
            if claimed or call.aborted or time.monotonic() >= deadline:
                return {"tasks": msgspec.to_builtins(claimed)}

    def close(self) -> None:
        """Nothing to close here: the caller closes the store."""
