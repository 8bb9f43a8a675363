"""A worker's client for a data folder: the calls of `TaskClient` go to the store itself, without a server."""

import time
from typing import Any

import msgspec

from postroom import errors
from postroom.client import TaskClient
from postroom.client import tasks as client
from postroom.contracts.tasks import Tasks

STOP_LOOK_S = 0.25  # how long a wait for a task goes on after the worker was told to stop

_decode = msgspec.json.Decoder().decode


class LocalClient(TaskClient):
    """`TaskClient` on a store of this machine. It needs no token: who may write to the folder may do this."""

    def __init__(self, tasks: Tasks, agent: str, **options: Any) -> None:
        super().__init__("http://localhost", agent, "none", **options)
        self._connections = _Store(tasks, agent)


class _Store(client._Connections):  # noqa: SLF001 - it takes the place of the network
    """Answers what an agent says, as the routes of a server do."""

    def __init__(self, tasks: Tasks, agent: str) -> None:
        super().__init__("http://localhost")
        self.url = tasks.store.url
        self._tasks = tasks
        self._agent = agent

    def ask(self, call: client._Call) -> Any:
        body = _decode(call.body or b"{}")
        try:
            return self._answer(call, body)
        except errors.StaleLease as error:
            raise client.StaleLease(str(error)) from None
        except errors.UnknownTask as error:
            raise client.UnknownTask(str(error)) from None
        except errors.WrongState as error:
            raise client.WrongState(str(error)) from None
        except errors.Rejected as error:
            raise client.Refused(str(error)) from None
        except errors.PostroomError as error:
            if isinstance(error, errors.HandleDead):
                self._tasks.reopen()
            raise client.Unreachable(str(error)) from None

    def _answer(self, call: client._Call, body: dict[str, Any]) -> Any:
        tasks = self._tasks
        match call.path:
            case "/queue/next":
                return self._next(call, body)
            case "/queue/complete":
                tasks.complete(body["task_id"], body["lease"], body["decision"])
            case "/queue/heartbeat":
                tasks.heartbeat(body["task_id"], body["lease"])
            case "/queue/fail":
                tasks.fail(body["task_id"], body["lease"], body["error"], body.get("retry_in_s"))
            case "/queue/release":
                tasks.release(body["task_id"], body["lease"])
            case "/harness/result":
                pass  # a harness of this folder reads the events
            case _:
                raise client.Refused(f"{call.path} needs a harness")
        return None

    def _next(self, call: client._Call, body: dict[str, Any]) -> dict[str, Any]:
        """Wait in short pieces: a worker that is told to stop does not wait to the end."""
        deadline = time.monotonic() + body["wait_s"]
        while True:
            wait_s = min(STOP_LOOK_S, max(0.0, deadline - time.monotonic()))
            found = self._tasks.claim(
                agent=self._agent,
                limit=body["limit"],
                lease_s=body["lease_s"],
                wait_s=wait_s,
                worker=body["worker"],
            )
            if found or call.broken_off or time.monotonic() >= deadline:
                return {"tasks": msgspec.to_builtins(found)}

    def close(self) -> None:
        """There is no connection to close; the caller closes the store."""
