"""Calls of `ctx` in a forked process, carried out by its worker.

A store in memory belongs to the worker: what a forked process wrote to its copy would be lost.

Rule 1: a frame is its length in 4 bytes and msgpack. Each request has one answer, one at a time.
Rule 2: an error of the call is raised in the process of the handler, with its class and its sentence.
"""

import asyncio
import builtins
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any, Final

import msgspec

from postroom import errors
from postroom.calls.submit import SubmitFields
from postroom.core.goals.advice import ReversalClass
from postroom.engine.handle import Handle
from postroom.engine.rules.cells import Effect
from postroom.engine.work.context import Calls

if TYPE_CHECKING:
    from postroom.engine.core import EngineCore

FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
_LENGTH: Final = struct.Struct("!I")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Failure(msgspec.Struct, frozen=True):
    """An error of a call."""

    kind: str
    text: str
    facts: dict[str, Any] = {}


class CallResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a call returned, or its error."""

    value: Any = None
    failure: Failure | None = None


_decode_answer = msgspec.msgpack.Decoder(CallResult).decode


# ---- in the process of the handler -----------------------------------------------------------------


class Line:
    """The connection to the worker. A call blocks until its answer."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._mutex = threading.Lock()

    def ask(self, verb: str, *arguments: Any) -> Any:
        """Have the worker carry out a call."""
        request = _encode([verb, *arguments])
        with self._mutex:
            self._connection.sendall(_LENGTH.pack(len(request)) + request)
            (length,) = _LENGTH.unpack(self._received(_LENGTH.size))
            answer = _decode_answer(self._received(length))
        if answer.failure is not None:
            raise _raised(answer.failure)
        return answer.value

    def _received(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self._connection.recv(count - len(data))
            if not part:
                raise ConnectionError("the worker is gone")
            data += part
        return bytes(data)


class RelayedCalls(Calls):
    """As `Calls`, in a forked process. Each call blocks, and the worker carries it out."""

    def __init__(self, calls: Calls, line: Line) -> None:
        super().__init__(calls.core, calls.message_id, calls.lease, calls.parts.attempt)
        self._line = line

    async def progress(self, share: float, text: str) -> None:
        """As `Calls.progress`."""
        self._line.ask("progress", share, text)

    async def stream(self, chunk: Any) -> None:
        """As `Calls.stream`."""
        self._line.ask("stream", chunk)
        self.parts.chunks += 1

    async def submit(self, fields: SubmitFields) -> Handle:
        """As `Calls.submit`."""
        message_id, duplicate = self._line.ask("submit", fields)
        return RelayHandle(self.core, self._line, message_id, duplicate=duplicate)

    async def begin_effect(
        self,
        key: str,
        reversal: Any,
        reversal_class: ReversalClass | None,
        target: str,
        *,
        runs_unknown: bool,
    ) -> Effect | None:
        """As `Calls.begin_effect`."""
        known = self._line.ask("begin", key, reversal, reversal_class, target, runs_unknown)
        return None if known is None else msgspec.convert(known, Effect)

    async def end_effect(self, key: str, outcome: Any) -> None:
        """As `Calls.end_effect`."""
        self._line.ask("end", key, outcome)

    async def drop_effect(self, key: str) -> None:
        """As `Calls.drop_effect`."""
        self._line.ask("drop", key)


class RelayHandle(Handle):
    """The handle of a child message, in a forked process."""

    def __init__(self, core: "EngineCore", line: Line, message_id: str, *, duplicate: bool) -> None:
        super().__init__(core, message_id, duplicate=duplicate)
        self._line = line

    async def result(self, timeout_s: float | None = None) -> Any:
        """As `Handle.result`."""
        return self._line.ask("result", self.message_id, timeout_s)

    async def cancel(self) -> None:
        """As `Handle.cancel`."""
        self._line.ask("cancel", self.message_id)

    async def explain(self) -> str:
        """As `Handle.explain`."""
        return str(self._line.ask("explain", self.message_id))


def _raised(failure: Failure) -> Exception:
    kind = getattr(errors, failure.kind, None) or getattr(builtins, failure.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RuntimeError(f"{failure.kind}: {failure.text}")
    error: Exception = kind.__new__(kind)
    error.args = (failure.text,)
    error.__dict__.update(failure.facts)
    return error


# ---- in the worker ---------------------------------------------------------------------------------


async def serve(connection: socket.socket, calls: Calls) -> None:
    """Carry out the calls of a forked handler until it ends."""
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        while True:
            (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            if length > FRAME_BYTES_MAX:
                return
            verb, *arguments = _decode(await reader.readexactly(length))
            answer = _encode(await _answered(calls, verb, arguments))
            writer.write(_LENGTH.pack(len(answer)) + answer)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        return
    finally:
        writer.close()


async def _answered(calls: Calls, verb: str, arguments: list[Any]) -> CallResult:
    try:
        return CallResult(await _carried_out(calls, verb, arguments))
    except Exception as error:  # noqa: BLE001 - the handler gets it
        facts = {
            name: value for name, value in vars(error).items() if isinstance(value, str | int | float | list)
        }
        return CallResult(failure=Failure(type(error).__name__, str(error), facts))


async def _carried_out(calls: Calls, verb: str, arguments: list[Any]) -> Any:
    match verb, arguments:
        case "progress" | "stream", _:
            return await getattr(calls, verb)(*arguments)
        case "submit", [fields]:
            submitted = await calls.submit(fields)
            return submitted.message_id, submitted.duplicate
        case "begin", [key, reversal, reversal_class, target, runs_unknown]:
            known = await calls.begin_effect(key, reversal, reversal_class, target, runs_unknown=runs_unknown)
            return None if known is None else msgspec.to_builtins(known)
        case "end", [key, outcome]:
            return await calls.end_effect(key, outcome)
        case "drop", [key]:
            return await calls.drop_effect(key)
        case _:
            return await _asked(Handle(calls.core, arguments[0]), verb, arguments[1:])


async def _asked(handle: Handle, verb: str, arguments: list[Any]) -> Any:
    match verb:
        case "result":
            return await handle.result(*arguments)
        case "cancel":
            return await handle.cancel()
        case _:
            return await handle.explain()
