"""What a handler gets besides its message: progress, streams, effects, children, cancellation."""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, TypeVar, Unpack

from postroom.calls.fields import RESULT_BYTES_MAX
from postroom.calls.submit import ChildFields, Payload, SubmitFields
from postroom.contracts.tasks.task_input import checked_text, encoded
from postroom.core.goals import conflicts
from postroom.core.goals.advice import REVERSAL_CLASSES, ReversalClass, checked_reversal
from postroom.core.times import utc_text
from postroom.core.tokens.provider_headers import observed
from postroom.core.tokens.tokens import Grant
from postroom.engine.handle import BlockingHandle, Handle, Wait
from postroom.engine.messages import Message
from postroom.engine.rules.cells import Effect, Part
from postroom.engine.rules.operations import PARTS_MAX, STREAM_BYTES_MAX, Operations
from postroom.engine.rules.outcomes import Usage
from postroom.errors import EffectUnknown, InvalidMessage, TargetBusy, TokensExhausted, ValidationError, shown

if TYPE_CHECKING:
    from postroom.engine.core import EngineCore

T = TypeVar("T")

EFFECT_KEY_CHARS_MAX = 512
EFFECT_BYTES_MAX = 64 * 1024
USAGE_MAX = 10**12  # tokens or US dollars of one call of `usage`
_UNCERTAIN = (TimeoutError, ConnectionError)
"""Errors of an effect that leave open whether it happened."""


PARTS_A_COMMIT_MAX: Final = 64


class PartWriter:
    """The parts of one attempt."""

    def __init__(self, core: "EngineCore", message_id: str, lease: int, attempt: int) -> None:
        self._core = core
        self._message_id = message_id
        self._lease = lease
        self.attempt = attempt
        self._pending: list[Part] = []
        self._stored = 0
        self._bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self.chunks = 0
        self.waits = False
        """Whether each call returns after the commit: in a process whose event loop ends with the call."""

    async def add(self, kind: str, **facts: Any) -> None:
        """Send a part."""
        self._raise_error()
        if self._stored + len(self._pending) >= PARTS_MAX:
            raise InvalidMessage(f"one attempt may send at most {PARTS_MAX} progress reports and chunks")
        timestamp = utc_text(self._core.store.wall_us() * 1000)
        part = Part(self._message_id, kind, timestamp, attempt=self.attempt, **facts)
        self._count_bytes(part)
        self._pending.append(part)
        self.chunks += kind == "stream_chunk"
        if self._task is None:
            self._task = asyncio.create_task(self._store_all())
            await asyncio.sleep(0)  # lets the task begin, even if the handler never awaits anything else
        if self.waits or len(self._pending) >= PARTS_A_COMMIT_MAX:
            await self.flush()

    def _count_bytes(self, part: Part) -> None:
        size = len(encoded("a chunk", part.chunk)) if part.chunk is not None else len(part.message)
        if self._bytes + size > STREAM_BYTES_MAX:
            raise InvalidMessage(f"the chunks of one attempt may have at most {STREAM_BYTES_MAX} bytes")
        self._bytes += size

    async def flush(self) -> None:
        """Wait until every part is stored."""
        if self._task is not None:
            await asyncio.wait([self._task])
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    async def _store_all(self) -> None:
        try:
            while self._pending:
                parts, self._pending = self._pending[:PARTS_A_COMMIT_MAX], self._pending[PARTS_A_COMMIT_MAX:]
                await self._core.commits.write(
                    partial(_add, self._message_id, self._lease, parts, self._stored), makes_room=True
                )
                self._core.wakeups.wake_waiting([self._message_id])
                self._core.wakeups.wake_readers()
                self._stored += len(parts)
        except Exception as error:  # noqa: BLE001 - the handler gets it
            self._error = error
            self._pending.clear()
        finally:
            self._task = None


def _add(message_id: str, lease: int, parts: list[Part], first: int, operations: Operations) -> None:
    operations.add_parts(message_id, lease, parts, first)


class EffectOptions(TypedDict, total=False):
    """The options of an effect. `Context.effect` says what they mean."""

    reversal: Mapping[str, Any] | None
    reversal_class: ReversalClass | None
    target: str
    probe: Callable[[], Any] | None
    on_unknown: Literal["raise", "run"]


class Calls:
    """What a handler writes under the lease of its message, committed by this process."""

    def __init__(self, core: "EngineCore", message_id: str, lease: int, attempt: int) -> None:
        self.core = core
        self.message_id = message_id
        self.lease = lease
        self.parts = PartWriter(core, message_id, lease, attempt)

    async def progress(self, share: float, text: str) -> None:
        """Send a progress report."""
        await self.parts.add("progress", progress=share, message=text)

    async def stream(self, chunk: Any) -> None:
        """Send a part of the answer."""
        await self.parts.add("stream_chunk", chunk=chunk, chunk_index=self.parts.chunks)

    async def submit(self, fields: SubmitFields) -> Handle:
        """Submit a child."""
        [submitted] = await self.core.submits.submit([fields])
        return Handle(self.core, submitted.message_id, duplicate=submitted.duplicate)

    async def begin_effect(
        self,
        key: str,
        reversal: Any,
        reversal_class: ReversalClass | None,
        target: str,
        *,
        runs_unknown: bool,
    ) -> Effect | None:
        """As `Operations.begin_effect`. Raises `TargetBusy`."""
        begun = await self._write(
            lambda operations: operations.begin_effect(
                self.message_id,
                self.lease,
                key,
                runs_unknown=runs_unknown,
                reversal=reversal,
                reversal_class=reversal_class,
                target=target,
            )
        )
        if isinstance(begun, TargetBusy):
            raise begun
        return begun

    async def end_effect(self, key: str, outcome: Any) -> None:
        """As `Operations.end_effect`."""
        await self._write(lambda operations: operations.end_effect(self.message_id, self.lease, key, outcome))

    async def drop_effect(self, key: str) -> None:
        """As `Operations.drop_effect`."""
        await self._write(lambda operations: operations.drop_effect(self.message_id, self.lease, key))

    async def _write(self, work: Callable[[Operations], T]) -> T:
        return await self.core.commits.write(work, makes_room=True)


class Context:
    """One attempt of a message, for an `async` handler."""

    def __init__(
        self,
        core: "EngineCore",
        message: Message,
        lease: int,
        attempt: int,
        grant: Grant | None = None,
    ) -> None:
        self._core = core
        self._grant = grant
        self.calls = Calls(core, message.message_id, lease, attempt)
        """Where the attempt writes: a forked process has another one."""
        self.message = message
        self.attempt = attempt
        self.cancelled = False
        """Whether the message was cancelled, or its lease lost. A handler in a thread looks at it."""
        self.used: Usage | None = None

    async def progress(self, share: float, text: str = "") -> None:
        """Report to readers of the answer how far the work is: a number from 0 to 1, and perhaps a text."""
        if type(share) not in (int, float) or not math.isfinite(share):
            raise InvalidMessage(f"progress must be a number from 0 to 1, not {shown(share)}")
        said = checked_text("the text of a progress report", text, limit=None)
        await self.calls.progress(float(share), said)

    async def stream(self, chunk: Any) -> None:
        """Send a part of the answer. It is stored before the message completes."""
        await self.calls.stream(chunk)

    @property
    def chunks(self) -> int:
        """How many chunks were streamed in this attempt."""
        return self.calls.parts.chunks

    async def flush(self) -> None:
        """Return when every progress report and chunk is stored."""
        await self.calls.parts.flush()

    def store_at_once(self) -> None:
        """From now on, each progress report and chunk is stored before its call returns."""
        self.calls.parts.waits = True

    def usage(
        self, *, model: str = "", tokens_in: int = 0, tokens_out: int = 0, cost_usd: float = 0.0
    ) -> None:
        """Report what the work cost. Calls add up."""
        checked_text("model", model)
        for name, value in (("tokens_in", tokens_in), ("tokens_out", tokens_out)):
            if type(value) is not int or not 0 <= value <= USAGE_MAX:
                raise InvalidMessage(f"{name} must be a whole number up to {USAGE_MAX}, not {shown(value)}")
        if type(cost_usd) not in (int, float) or not 0 <= cost_usd <= USAGE_MAX:
            raise InvalidMessage(f"cost_usd must be a number from 0 to {USAGE_MAX}, not {shown(cost_usd)}")
        used = self.used or Usage()
        self.used = Usage(
            model or used.model,
            used.tokens_in + tokens_in,
            used.tokens_out + tokens_out,
            used.cost_usd + cost_usd,
        )

    # ---- tokens --------------------------------------------------------------------------------

    @property
    def model(self) -> str:
        """The model whose tokens are reserved; without a reservation, the first one of `models`."""
        if self._grant is not None:
            return self._grant.model
        return self.message.models[0] if self.message.models else ""

    @property
    def provider(self) -> str:
        """The provider of the reserved model."""
        return "" if self._grant is None else self._grant.provider

    @property
    def tokens(self) -> int:
        """The reserved tokens that are left."""
        return 0 if self._grant is None else max(0, self._grant.tokens - self._spent)

    @property
    def _spent(self) -> int:
        return 0 if self.used is None else self.used.tokens_in + self.used.tokens_out

    def use_tokens(self, n: int) -> int:
        """Count tokens as used. Returns how many are left of the reservation.

        Raises `TokensExhausted` when the reservation does not hold them: it is used up then. An estimate
        stops nobody: use beyond it counts, too.
        """
        if type(n) is not int or not 0 <= n <= USAGE_MAX:
            raise InvalidMessage(f"tokens must be a whole number from 0 to {USAGE_MAX}, not {shown(n)}")
        is_over = self._grant is not None and not self._grant.is_estimate and n > self.tokens
        self.usage(model=self.model, tokens_out=self.tokens if is_over else n)
        if is_over and self._grant is not None:
            message_id = self.message.message_id
            used_up = f"message {message_id} has used up its {self._grant.tokens} tokens of {self.model}"
            raise TokensExhausted(message_id, "PROCESSING", [], used_up)
        return self.tokens

    async def provider_headers(self, headers: Mapping[str, str]) -> None:
        """Tell the budgets what the answer of the provider said: `x-ratelimit-*` and `retry-after`."""
        grant = self._grant
        if grant is None:
            return
        if not isinstance(headers, Mapping):
            raise InvalidMessage(f"headers must be names with values, not {type(headers).__name__}")

        def work(operations: Operations) -> None:
            operations.observe(grant.provider, grant.model, observed(headers, operations.transaction.wall_us))

        await self._core.commits.write(work, makes_room=True)

    async def submit(self, *, type: str, payload: Payload, **fields: Unpack[ChildFields]) -> Handle:  # noqa: A002
        """Submit a child: it inherits organization, goal, trace and the limits of the goal."""
        message = self.message
        inherited: SubmitFields = {
            "type": type,
            "payload": payload,
            "org_id": message.org_id,
            "agent_id": message.agent_id,
            "user_id": message.user_id,
            "goal_id": message.goal_id,
            "parent_message_id": message.message_id,
            "priority": message.accepted_priority,
            "traceparent": message.traceparent,
            "tracestate": message.tracestate,
            "hop": message.hop + 1,
        }
        if message.expires_at is not None:
            inherited["expires_at"] = message.expires_at
        return await self.calls.submit({**inherited, **fields})

    async def effect(
        self,
        key: str,
        run: Callable[[], Any],
        *,
        reversal: Mapping[str, Any] | None = None,
        reversal_class: ReversalClass | None = None,
        target: str = "",
        probe: Callable[[], Any] | None = None,
        on_unknown: Literal["raise", "run"] = "raise",
    ) -> Any:
        """Run something that must not happen twice for this message, and return its outcome.

        The intent is committed before `run`, and the outcome after it. An attempt that finds an outcome
        returns it. An attempt that finds only an intent asks `probe` (the outcome, or None when nothing
        happened), runs again with `on_unknown="run"`, or raises `EffectUnknown`. An ordinary error of `run`
        means that nothing happened; a timeout or a lost connection leaves that open.

        `reversal` is the type and payload of the message that undoes the effect when its goal is rolled back,
        and `reversal_class` is REVERSIBLE, COMPENSATABLE or IRREVERSIBLE. Without a class the adviser decides
        once a rollback needs to know.

        `target` names what the effect works on, as the `operation` of a message does. While another message
        works on it, the call raises `TargetBusy`, which defers the message and counts no retry.
        """
        checked_reversal(reversal)
        if reversal_class is not None and reversal_class not in REVERSAL_CLASSES:
            raise InvalidMessage(f"reversal_class must be one of {', '.join(REVERSAL_CLASSES)}")
        if not isinstance(key, str) or not 0 < len(key) <= EFFECT_KEY_CHARS_MAX or not key.isprintable():
            raise InvalidMessage(
                f"the key of an effect is printable text of up to {EFFECT_KEY_CHARS_MAX} characters"
            )
        _check_size("the reversal", key, reversal, EFFECT_BYTES_MAX)
        runs_unknown = on_unknown == "run"
        if target != "" and not conflicts.is_target(target):
            raise InvalidMessage(f"the target of an effect must be {conflicts.TARGET_RULE}")
        begin = partial(self.calls.begin_effect, key, reversal, reversal_class, target)
        try:
            known = await begin(runs_unknown=runs_unknown)
        except EffectUnknown:
            if probe is None:
                raise
            outcome = await _called(probe)
            if outcome is not None:
                return await self._end(key, outcome)
            known = await begin(runs_unknown=True)
        if known is not None:
            return known.outcome
        try:
            outcome = await _called(run)
        except _UNCERTAIN:
            raise
        except Exception:
            await self.calls.drop_effect(key)
            raise
        return await self._end(key, outcome)

    async def _end(self, key: str, outcome: Any) -> Any:
        _check_size("the outcome", key, outcome, RESULT_BYTES_MAX)
        await self.calls.end_effect(key, outcome)
        return outcome

    def in_thread(self, wait: Wait) -> "ThreadContext":
        """This context for a plain handler. `wait` runs a coroutine to its end."""
        return ThreadContext(self, wait)


def _check_size(what: str, key: str, value: Any, bytes_max: int) -> None:
    """Refuse a value that the store cannot hold. An outcome that is refused leaves the intent behind."""
    name = f"{what} of effect {shown(key)}"
    try:
        size = len(encoded(name, value))
    except InvalidMessage as error:
        raise ValidationError(str(error)) from None
    if size > bytes_max:
        raise ValidationError(
            f"{name} has {size} bytes, and at most {bytes_max} are kept: return less, such as an id"
        )


async def _called(call: Callable[[], Any]) -> Any:
    result = call()
    return await result if inspect.isawaitable(result) else result


class ThreadContext:
    """As `Context`, for a plain handler, which runs in a thread. Its calls block."""

    def __init__(self, context: Context, wait: Wait) -> None:
        self._context = context
        self._wait = wait
        self.message = context.message
        self.attempt = context.attempt

    @property
    def cancelled(self) -> bool:
        """Whether the message was cancelled, or its lease lost."""
        return self._context.cancelled

    def progress(self, share: float, text: str = "") -> None:
        """As `Context.progress`."""
        self._wait(self._context.progress(share, text))

    def stream(self, chunk: Any) -> None:
        """As `Context.stream`."""
        self._wait(self._context.stream(chunk))

    def flush(self) -> None:
        """As `Context.flush`."""
        self._wait(self._context.flush())

    def usage(
        self, *, model: str = "", tokens_in: int = 0, tokens_out: int = 0, cost_usd: float = 0.0
    ) -> None:
        """As `Context.usage`."""
        self._context.usage(model=model, tokens_in=tokens_in, tokens_out=tokens_out, cost_usd=cost_usd)

    @property
    def model(self) -> str:
        """As `Context.model`."""
        return self._context.model

    @property
    def provider(self) -> str:
        """As `Context.provider`."""
        return self._context.provider

    @property
    def tokens(self) -> int:
        """As `Context.tokens`."""
        return self._context.tokens

    def use_tokens(self, n: int) -> int:
        """As `Context.use_tokens`."""
        return self._context.use_tokens(n)

    def provider_headers(self, headers: Mapping[str, str]) -> None:
        """As `Context.provider_headers`."""
        self._wait(self._context.provider_headers(headers))

    def submit(self, *, type: str, payload: Payload, **fields: Unpack[ChildFields]) -> BlockingHandle:  # noqa: A002
        """As `Context.submit`; returns a handle that blocks."""
        handle = self._wait(self._context.submit(type=type, payload=payload, **fields))
        return BlockingHandle(handle, self._wait)

    def effect(self, key: str, run: Callable[[], Any], **options: Unpack[EffectOptions]) -> Any:
        """As `Context.effect`."""
        return self._wait(self._context.effect(key, run, **options))
