"""Handlers: what runs for a message, and what its errors mean."""

import asyncio
import inspect
import math
from collections.abc import Callable, Coroutine
from typing import Any, Final, Literal, TypeAlias

import msgspec

from postroom.calls.fields import DELAY_S_MAX, RESULT_BYTES_MAX
from postroom.contracts.tasks.task_input import checked_text, encoded
from postroom.core.lifecycle.lifecycle import ERROR_CHARS_MAX
from postroom.core.lifecycle.retry import NEVER, RATE_LIMIT_S, Retry
from postroom.engine.messages import Message
from postroom.engine.rules.breakers import Service, service_called
from postroom.engine.rules.claims import Claimed
from postroom.engine.rules.outcomes import Outcome, Usage
from postroom.engine.rules.policy import Policy
from postroom.engine.rules.routes import HandlerRoute, chosen, tool_of
from postroom.engine.work.error_rules import rule_of
from postroom.errors import (
    Bounced,
    EffectUnknown,
    GuardTripped,
    InvalidMessage,
    InvalidSetting,
    Overloaded,
    RateLimited,
    SandboxUnavailable,
    TargetBusy,
    TokensExhausted,
    ToolFailed,
    ValidationError,
    clipped,
    shown,
)
from postroom.message import org_of

TOO_MANY_REQUESTS: Final = 429
TIMEOUT_S_MAX: Final = 86_400.0
_FINAL = (ValidationError, EffectUnknown, GuardTripped, TokensExhausted, Bounced, ToolFailed)
"""Errors that another attempt would meet again."""
_BUGS = (
    TypeError, LookupError, NameError, AttributeError, ArithmeticError, AssertionError, ImportError,
)  # fmt: skip
"""Errors that show a bug in a handler. So does a `ValidationError` of any library."""

Pool: TypeAlias = Literal["thread", "process"]
Shape: TypeAlias = Any
"""A type that msgspec can decode, such as a Struct or `dict[str, int]`; None for any JSON object."""


class Handler(msgspec.Struct, frozen=True, kw_only=True):
    """What runs for the messages of one type, or for those of one service or tool among them."""

    run: Callable[..., Any]
    timeout_s: float | None = None
    service: str = ""
    tool: str = ""
    payload: Shape = None
    """The shape of the payload; None leaves it a plain object."""
    retry: Retry | None = None
    batch: int = 1
    """How many messages one call gets. Above 1, the handler gets a list and returns a list of results."""
    within_ms: float = 20.0
    """How long a batch waits until it is full."""
    pool: Pool = "thread"
    """Where a plain function runs. `process` also runs an async handler in a process of its own."""
    is_own: bool = False
    """Whether it is part of postroom: it runs in the worker, whose connections it uses."""

    @property
    def is_async(self) -> bool:
        """Whether the handler is a coroutine function."""
        return inspect.iscoroutinefunction(self.run)


class Handlers:
    """The handlers of one engine."""

    def __init__(self) -> None:
        self.registered: dict[str, dict[HandlerRoute, Handler]] = {}
        self.built_in: dict[str, Handler] = {}
        """Handlers of postroom itself, for messages that no handler of the application fits."""

    def share(self, other: "Handlers") -> None:
        """Use the registered handlers of another engine, also later ones."""
        self.registered = other.registered

    def add(self, type_name: str, handler: Handler) -> None:
        """Register a handler."""
        of_type, route = (
            self.registered.setdefault(type_name, {}),
            HandlerRoute(handler.service, handler.tool),
        )
        if route in of_type:
            name = getattr(of_type[route].run, "__name__", "a function")
            what = "".join(f" of {word} {value}" for word, value in route._asdict().items() if value)
            raise InvalidSetting(f"type {type_name}{what} has a handler already: {name}")
        of_type[route] = handler

    def find(self, type_name: str, service: str, payload: bytes) -> Handler | None:
        """The handler of a message that names this service: the one that fits best, or the default one."""
        of_type = self.registered.get(type_name)
        route = chosen(of_type, service, lambda: payload) if of_type else None
        return of_type[route] if of_type and route is not None else self.built_in.get(type_name)

    def shape_of(self, type_name: str, service: str, payload: bytes) -> Shape:
        """The shape that the handler of a message asks for; None when it takes any object."""
        handler = self.find(type_name, service, payload) if type_name in self.registered else None
        return None if handler is None else handler.payload

    def missing(self, type_name: str, service: str, payload: bytes) -> str:
        """Why no handler runs a message."""
        of_type = self.registered.get(type_name)
        if not of_type:
            return f"no handler for type {type_name}"
        services = sorted({route.service for route in of_type if route.service})
        tools = sorted({route.tool for route in of_type if route.tool})
        kind = "an MCP server or " if any(handler.is_own for handler in of_type.values()) else ""
        said = [f"service must be {kind}that of a handler ({', '.join(services)}), not {shown(service)}"]
        if tools:
            said.append(f"tool one of {', '.join(tools)}, not {shown(tool_of(payload))}")
        return f"no handler of {type_name} fits: {' and '.join(said if services else said[1:])}"


def _takes_two(run: Callable[..., Any]) -> bool:
    try:
        inspect.signature(run).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def checked_handler(handler: Handler) -> Handler:
    """The handler itself, or an error that says what does not fit."""
    if not callable(handler.run):
        raise InvalidSetting(f"a handler is a function, not {shown(handler.run)}")
    if not _takes_two(handler.run):
        raise InvalidSetting("a handler takes two arguments: the message and its context")
    if handler.retry is not None and not isinstance(handler.retry, Retry):
        raise InvalidSetting(
            f"retry must be a Retry, such as Retry(max_retries=3), not {shown(handler.retry)}"
        )
    timeout_s = handler.timeout_s
    if timeout_s is not None and not (type(timeout_s) in (int, float) and 0 < timeout_s <= TIMEOUT_S_MAX):
        raise InvalidSetting(f"timeout_s must be from 0 to {TIMEOUT_S_MAX:g}, not {shown(timeout_s)}")
    if handler.pool not in ("thread", "process"):
        raise InvalidSetting(f'pool must be "thread" or "process", not {shown(handler.pool)}')
    _check_types(handler)
    check_shape(handler.payload)
    if handler.batch < 1 or (handler.batch > 1 and handler.pool == "process"):
        raise InvalidSetting("batch must be at least 1, and a batch runs in the worker itself")
    return handler


def _check_types(handler: Handler) -> None:
    checked_text("service", handler.service)
    checked_text("tool", handler.tool)
    if type(handler.batch) is not int:
        raise InvalidSetting(f"batch must be a whole number, not {shown(handler.batch)}")
    within_ms = handler.within_ms
    if type(within_ms) not in (int, float) or not 0 <= within_ms <= TIMEOUT_S_MAX * 1000:
        raise InvalidSetting(f"within_ms must be a number of milliseconds, not {shown(within_ms)}")


def check_shape(payload: Any) -> None:
    """Raise unless payloads can be decoded as this type."""
    if payload is None:
        return
    try:
        msgspec.json.Decoder(payload)
    except (TypeError, ValueError) as error:
        raise InvalidSetting(
            f"payload must be a type, such as a msgspec.Struct, not {shown(payload)}: {clipped(error)}"
        ) from None


def timeout_of(handler: Handler, message: Message) -> float | None:
    """How long an attempt may take: the shorter one of the handler's and the message's own limit."""
    limits = [handler.timeout_s, message.resource_limits.time if message.resource_limits else None]
    return min((limit for limit in limits if limit is not None), default=None)


# ---- calls -----------------------------------------------------------------------------------------


class HandlerExit(RuntimeError):
    """A handler raised an exception that would end its thread or its event loop, such as SystemExit."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"the handler raised {type(error).__name__}: {error}")


def called(run: Callable[..., Any], message: Any, context: Any) -> Any:
    """Call a plain handler. An exception that no future can hold becomes a `HandlerExit`."""
    try:
        return run(message, context)
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            raise
        raise HandlerExit(error) from error


async def awaited(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Await an async handler. A cancellation that nobody asked for is an error of the handler."""
    try:
        return await coroutine
    except (Exception, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise HandlerExit(error) from error


# ---- outcomes --------------------------------------------------------------------------------------


def completed(claimed: Claimed, handler: Handler, result: Any, usage: Usage | None) -> Outcome:
    """The handler returned."""
    try:
        data = encoded("the result", result)
        _check_size(data)
    except InvalidMessage as error:
        return failed(claimed, handler, ValidationError(str(error)))
    record = claimed.record
    return Outcome(
        kind="completed", message_id=record.message_id, lease=record.lease, result=data, type=claimed.type,
        service=service_of(claimed, handler), body=claimed.body, usage=usage, org_id=org_of(record.queue),
    )  # fmt: skip


CUT: Final = {"cut_at": "tokens"}
"""The result of a stream that used up its reservation."""


def _check_size(data: bytes) -> None:
    if len(data) > RESULT_BYTES_MAX:
        raise InvalidMessage(f"the result has {len(data)} bytes, and at most {RESULT_BYTES_MAX} are kept")


def failed(
    claimed: Claimed,
    handler: Handler | None,
    error: BaseException,
    *,
    spread: float = 0.0,
    keeps_priority: bool = False,
    error_type: str = "",
    usage: Usage | None = None,
    policy: Policy | None = None,
) -> Outcome:
    """The handler raised. `policy` has the rules of errors."""
    record, known = claimed.record, (*_FINAL, RateLimited, Overloaded)
    rule = None if policy is None else rule_of(error, policy.errors, with_causes=not isinstance(error, known))
    is_final = handler is None or (isinstance(error, _FINAL) if rule is None else rule is NEVER)
    retry = handler.retry if rule is None and handler is not None else rule
    retry_in_s = _retry_in_s(error, has_rule=rule is not None)
    most = None
    if retry is not None:
        is_default = policy is None or record.max_retries == policy.retry_of(claimed.type).max_retries
        most = retry.max_retries if is_default else min(retry.max_retries, record.max_retries)
        if retry_in_s is None:
            retry_in_s = retry.delay_ns(record.retries, spread) / 1e9
    return Outcome(
        kind="failed",
        message_id=record.message_id,
        lease=record.lease,
        org_id=org_of(record.queue),
        error=_text_of(error)[:ERROR_CHARS_MAX] or type(error).__name__,
        error_type=error_type or type(error).__name__,
        is_final=is_final,
        retry_in_s=retry_in_s,
        max_retries=most,
        keeps_priority=keeps_priority,
        spread=spread,
        type=claimed.type,
        service=None if handler is None else service_of(claimed, handler),
        counts_for_breaker=rule is not NEVER and _is_of_service(error),
        body=claimed.body,
        usage=usage,
        grant=claimed.grant,
    )


def _is_of_service(error: BaseException) -> bool:
    """Whether an error shows a failure of the service that the handler called."""
    if isinstance(error, ToolFailed):
        return not error.is_callers_fault
    if isinstance(error, (*_FINAL, *_BUGS, RateLimited, Overloaded)):
        return False
    return all(kind.__name__ != "ValidationError" for kind in type(error).__mro__)


def ended(claimed: Claimed, kind: Literal["released", "crashed"], error: str = "") -> Outcome:
    """The attempt ended without a result or an exception of the handler."""
    return Outcome(kind=kind, message_id=claimed.record.message_id, lease=claimed.record.lease, error=error)


def deferred(claimed: Claimed, error: SandboxUnavailable | TargetBusy, usage: Usage | None) -> Outcome:
    """The attempt cannot go on now, and no retry is counted."""
    record = claimed.record
    return Outcome(
        kind="deferred", message_id=record.message_id, lease=record.lease, error=str(error),
        delay_s=error.retry_after_s, org_id=org_of(record.queue), body=claimed.body, usage=usage,
        has_run=isinstance(error, TargetBusy),
    )  # fmt: skip


def service_of(claimed: Claimed, handler: Handler) -> Service | None:
    """The service that an attempt calls."""
    named = "" if claimed.body is None else claimed.body.service
    return service_called(org_of(claimed.record.queue), named, handler.service)


def _text_of(error: BaseException) -> str:
    """The text of an error, as the store can hold it: handlers raise anything."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - `__str__` of a handler's own class
        return ""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _retry_in_s(error: BaseException, *, has_rule: bool) -> float | None:
    """When the service asks to be called again; None leaves it to the retry rule."""
    asked_s = _asked_s(error, None if has_rule else RATE_LIMIT_S)
    if asked_s is None:
        return None
    return min(max(asked_s, 0.0), DELAY_S_MAX) if math.isfinite(asked_s) else RATE_LIMIT_S


def _asked_s(error: BaseException, default_s: float | None) -> float | None:
    if isinstance(error, Overloaded):
        return error.retry_after
    after = getattr(error, "retry_after_s", None)
    if after is None:
        after = getattr(error, "retry_after", None)
    if isinstance(error, RateLimited) or getattr(error, "status_code", None) == TOO_MANY_REQUESTS:
        return float(after) if isinstance(after, int | float) else default_s
    return None


class HandlerTimeout(TimeoutError):
    """A handler ran longer than it may."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"the handler ran longer than {timeout_s:g} s")


async def limited(coroutine: Any, timeout_s: float | None) -> Any:
    """Wait for a coroutine, at most `timeout_s`."""
    if timeout_s is None:
        return await coroutine
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await coroutine
    except TimeoutError:
        if limit.expired():
            raise HandlerTimeout(timeout_s) from None
        raise
