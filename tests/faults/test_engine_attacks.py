"""What `Engine` promises against hostile and broken handlers, tenants and operators."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from postroom import Breaker, Engine, Policy
from postroom.calls.fields import RESULT_BYTES_MAX
from postroom.calls.submit import SubmitFields
from postroom.core.lifecycle.retry import Retry
from postroom.engine.message_input import FIELDS
from postroom.engine.rules.breakers import Service
from postroom.engine.rules.cells import CIRCUITS, EFFECTS
from postroom.engine.rules.outcomes import Outcome
from postroom.engine.work.handlers import ended
from postroom.engine.work.worker import Worker
from postroom.errors import (
    InvalidMessage,
    InvalidSetting,
    KeyReused,
    MessageFailed,
    PostroomError,
    UnknownTask,
    ValidationError,
    WrongState,
)
from tests.engines import EngineUnderTest
from tests.waiting import HANG_GUARD_S, until


class NoTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class TooManyRequestsError(Exception):
    status_code = 429

    def __init__(self, retry_after: float) -> None:
        super().__init__("slow down")
        self.retry_after = retry_after


def served(tmp_path: Path, scenario: Callable[[Engine], Awaitable[None]]) -> None:
    """Run a scenario beside a worker, which must still work for others at the end."""

    async def run() -> None:
        with Engine.open(f"sqlite:///{tmp_path}/queue.db") as engine:
            engine.handler("memory_save")(lambda _message, _ctx: "fine")
            worker = asyncio.create_task(engine.run(concurrency=4))
            await scenario(engine)
            other = await engine.submit(type="memory_save", org_id="other", payload={})
            assert await other.result(timeout_s=HANG_GUARD_S) == "fine"
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)

    asyncio.run(run())


def outcome_of(tmp_path: Path, handler: Callable[..., Any], **options: Any) -> MessageFailed:
    """How a message of a failing handler ends."""
    failures: list[MessageFailed] = []

    async def scenario(engine: Engine) -> None:
        engine.handler("tool_call", retry=Retry(max_retries=0), **options)(handler)
        handle = await engine.submit(type="tool_call", org_id="acme", payload={})
        with pytest.raises(MessageFailed) as failed:
            await handle.result(timeout_s=HANG_GUARD_S)
        failures.append(failed.value)

    served(tmp_path, scenario)
    return failures[0]


# ---- handlers --------------------------------------------------------------------------------------


def raiser(error: BaseException) -> Callable[..., Any]:
    async def run(_message: Any, _ctx: Any) -> None:
        raise error

    return run


def plain_raiser(error: BaseException) -> Callable[..., Any]:
    def run(_message: Any, _ctx: Any) -> None:
        raise error

    return run


@pytest.mark.statement("poisoning")
@pytest.mark.parametrize("options", [{}, {"batch": 2}, {"pool": "process"}], ids=str)
@pytest.mark.parametrize("make", [raiser, plain_raiser])
@pytest.mark.parametrize(
    ("error", "error_type", "text"),
    [
        (asyncio.CancelledError(), "HandlerExit", "the handler raised CancelledError: "),
        (SystemExit(3), "HandlerExit", "the handler raised SystemExit: 3"),
        (ValueError("bad \ud800 name"), "ValueError", "bad ? name"),
        (NoTextError(), "NoTextError", "NoTextError"),
    ],
    ids=["cancelled", "exit", "surrogate", "no text"],
)
def test_whatever_a_handler_raises_fails_its_message_alone(
    tmp_path: Path, error: BaseException, error_type: str, text: str, make: Any, options: dict[str, Any]
) -> None:
    failed = outcome_of(tmp_path, make(error), **options)
    last = failed.error_history[-1]
    assert (failed.state, last["error_type"], last["error"]) == ("DEAD_LETTER", error_type, text)


@pytest.mark.parametrize("options", [{}, {"batch": 2}, {"pool": "process"}], ids=str)
def test_stop_iteration_of_a_plain_handler_fails_its_message(tmp_path: Path, options: dict[str, Any]) -> None:
    failed = outcome_of(tmp_path, plain_raiser(StopIteration()), **options)
    assert failed.error_history[-1]["error"] == "the handler raised StopIteration: "


def test_stop_iteration_in_the_results_of_a_batch_fails_its_message(tmp_path: Path) -> None:
    async def run(messages: list[Any], _contexts: Any) -> list[Any]:
        return [StopIteration() for _ in messages]

    failed = outcome_of(tmp_path, run, batch=2)
    assert failed.error_history[-1]["error_type"] == "HandlerExit"


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e30, -5.0])
def test_an_odd_retry_after_does_not_stop_the_worker(tmp_path: Path, seconds: float) -> None:
    async def scenario(engine: Engine) -> None:
        called = asyncio.Event()

        @engine.handler("tool_call")
        async def run(_message: Any, _ctx: Any) -> None:
            called.set()
            raise TooManyRequestsError(seconds)

        handle = await engine.submit(type="tool_call", org_id="acme", payload={}, max_retries=1)
        await asyncio.wait_for(called.wait(), HANG_GUARD_S)
        other = await engine.submit(type="memory_save", org_id="other", payload={})
        await other.result(timeout_s=HANG_GUARD_S)  # its outcome is committed after that of the first
        assert (await engine.get(handle.message_id)).attempt >= 1

    served(tmp_path, scenario)


@pytest.mark.parametrize("facts", [{"model": "\ud800"}, {"model": 5}, {"tokens_in": 1.5}], ids=str)
def test_usage_that_the_store_cannot_hold_is_refused(tmp_path: Path, facts: dict[str, Any]) -> None:
    async def run(_message: Any, ctx: Any) -> None:
        ctx.usage(**facts)

    assert outcome_of(tmp_path, run).error_history[-1]["error_type"] == "InvalidMessage"


def test_plain_handlers_that_never_return_do_not_hold_up_later_ones(tmp_path: Path) -> None:
    end = threading.Event()

    async def scenario(engine: Engine) -> None:
        @engine.handler("tool_call", timeout_s=0.2, retry=Retry(max_retries=0))
        def hang(_message: Any, _ctx: Any) -> None:
            end.wait(HANG_GUARD_S)

        message: SubmitFields = {"type": "tool_call", "org_id": "acme", "payload": {}}
        for handle in await engine.submit_many([message] * 8):  # twice the slots of the worker
            with pytest.raises(MessageFailed, match="longer than"):
                await handle.result(timeout_s=HANG_GUARD_S)

    try:
        served(tmp_path, scenario)
    finally:
        end.set()


def test_an_isolated_handler_that_closes_its_pipe_and_lives_on_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def run(_message: Any, _ctx: Any) -> None:
        with pids.open("a") as file:
            file.write(f"{os.getpid()}\n")
        os.closerange(3, 1_024)
        time.sleep(60)

    failed = outcome_of(tmp_path, run, pool="process")
    assert failed.state == "QUARANTINED"
    for pid in pids.read_text().split():
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


@pytest.mark.parametrize("is_async", [False, True])
def test_forked_handler_uses_its_context_on_a_store_in_memory(is_async: bool) -> None:
    def plain(_message: Any, ctx: Any) -> Any:
        ctx.progress(0.5, "half")
        ctx.stream("chunk")
        ctx.usage(tokens_in=3)
        child = ctx.submit(type="memory_save", payload={"n": 1})
        with pytest.raises(InvalidMessage, match="priority"):
            ctx.submit(type="memory_save", payload={}, priority=9)
        with pytest.raises(ZeroDivisionError):
            ctx.effect("failing", lambda: 1 / 0)
        return [ctx.effect("k", os.getpid) == os.getpid(), child.result(timeout_s=HANG_GUARD_S), ctx.attempt]

    async def coroutine(_message: Any, ctx: Any) -> Any:
        await ctx.progress(0.5, "half")
        await ctx.stream("chunk")
        child = await ctx.submit(type="memory_save", payload={"n": 1})
        is_own = await ctx.effect("k", os.getpid) == os.getpid()
        return [is_own, await child.result(timeout_s=HANG_GUARD_S), ctx.attempt]

    async def run() -> None:
        with Engine.open("memory://") as engine:
            engine.handler("memory_save")(lambda message, _ctx: message.payload["n"])
            engine.handler("tool_call", pool="process")(coroutine if is_async else plain)
            worker = asyncio.create_task(engine.run())
            handle = await engine.submit(type="tool_call", org_id="acme", payload={})
            assert await handle.result(timeout_s=HANG_GUARD_S) == "chunk"
            assert (await engine.get(handle.message_id)).result == [True, 1, 1]
            parts = [part async for part in handle]
            assert [part.type for part in parts] == [
                "acknowledgment", "progress", "stream_chunk", "stream_complete",
            ]  # fmt: skip
            effects = engine.store.read(EFFECTS.all)
            assert [(key.rpartition("\x1f")[2], effect.is_done) for key, effect in effects] == [("k", True)]
            await engine.stop()
            await worker

    asyncio.run(run())


def test_daemon_of_an_isolated_handler_does_not_hold_its_message(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def run(_message: Any, _ctx: Any) -> str:
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        pid.write_text(str(child))
        return "done"

    async def scenario(engine: Engine) -> None:
        engine.handler("tool_call", pool="process")(run)
        handle = await engine.submit(type="tool_call", org_id="acme", payload={})
        assert await handle.result(timeout_s=HANG_GUARD_S) == "done"

    try:
        served(tmp_path, scenario)
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


@pytest.mark.statement("limit-programs")
def test_timeout_of_an_isolated_handler_ends_the_programs_that_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def run(_message: Any, _ctx: Any) -> None:
        program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        pid.write_text(str(program.pid))
        program.wait()

    failed = outcome_of(tmp_path, run, pool="process", timeout_s=1.0)
    assert failed.error_history[-1]["error_type"] == "HandlerTimeout"
    until(lambda: not is_running(int(pid.read_text())))


def is_running(pid: int) -> bool:
    """Whether a process runs. One that has ended and waits for its parent does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    "outcome", ["x" * RESULT_BYTES_MAX, object(), float("nan")], ids=["long", "object", "nan"]
)
def test_outcome_of_an_effect_that_cannot_be_kept_is_not_run_again(tmp_path: Path, outcome: Any) -> None:
    calls: list[int] = []

    async def run(_message: Any, ctx: Any) -> None:
        def effect() -> Any:
            calls.append(1)
            return outcome

        await ctx.effect("invoice", effect)

    failed = outcome_of(tmp_path, run)
    assert failed.error_history[-1]["error_type"] == "ValidationError"
    assert "the outcome of effect 'invoice'" in failed.error_history[-1]["error"]
    assert calls == [1]


def test_failed_attempt_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outcome_of(tmp_path, raiser(ValueError("first line\nsecond line " + "x" * 10_000)))
    [warning] = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert warning.endswith("(tool_call) failed in attempt 1: ValueError: first line")


# ---- operators -------------------------------------------------------------------------------------


def test_only_messages_are_named_in_the_sentences_about_messages() -> None:
    world = EngineUnderTest("memory://")
    handle = world.submit()
    world.complete(world.claim())
    for call in (handle.cancel, world.engine.handle("none").result, world.engine.handle("\u00e4").result):
        with pytest.raises((WrongState, UnknownTask), match="message") as refused:
            world.wait(call())
        assert "task" not in str(refused.value)
    world.close()


def test_quarantined_message_can_be_replayed_by_its_id_alone() -> None:
    world = EngineUnderTest("memory://", Policy(poison_crashes=1, lease_s=1.0))
    handle = world.submit()
    [claimed] = world.claim()
    world.finish(ended(claimed, "crashed", "the process of the handler died with signal 9"))
    assert world.claim() == []
    [letter] = world.wait(world.engine.dlq.list())
    assert (letter.state, letter.can_replay) == ("QUARANTINED", True)
    assert world.wait(world.engine.dlq.replay(org_id="acme")).refused == 1
    assert world.wait(world.engine.dlq.replay([letter.message_id])).message_ids == [handle.message_id]
    assert world.state(handle) == "QUEUED"
    world.close()


@pytest.mark.parametrize("options", [{"type": "model_call", "kill": True}, {"kill": "yes"}], ids=str)
def test_kill_switch_is_for_organizations(tmp_path: Path, options: dict[str, Any]) -> None:
    async def scenario(engine: Engine) -> None:
        with pytest.raises(InvalidMessage, match="kill switch"):
            await engine.pause(**options)

    served(tmp_path, scenario)


ODD_VALUES: list[Any] = [
    None, 5, -1, 1.5, float("nan"), float("inf"), True, b"x", [], {}, [1], {1: 2}, "", "\ud800", "\0",
    "x\x1fy", object(), 2**70, "9999-12-31T23:59:59Z", datetime.max.replace(tzinfo=UTC),
    {"type": "user", "id": "\ud800"},
    {"type": "user", "id": "x" * 1_000_000}, {"time": 1e300}, {"a": "\ud800"}, ["\ud800"], ["x"] * 200_000,
]  # fmt: skip


def refused_or_done(engine: Engine, call: Callable[[], Awaitable[Any]]) -> None:
    """A call either works or raises an error of postroom."""

    async def run() -> None:
        with suppress(PostroomError):
            await call()

    engine.blocking.wait(run())


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_odd_values_of_a_field_are_refused_with_a_one_line_error(tmp_path: Path, field: str) -> None:
    with Engine.open(f"sqlite:///{tmp_path}/queue.db") as engine:
        for value in ODD_VALUES:
            fields = {"type": "tool_call", "org_id": "acme", "payload": {}, field: value}
            refused_or_done(engine, lambda fields=fields: engine.submit(**fields))  # type: ignore[misc]


@pytest.mark.parametrize(
    "call",
    [
        lambda engine, value: engine.get(value),
        lambda engine, value: engine.explain(value),
        lambda engine, value: engine.cancel(value),
        lambda engine, value: engine.handle(value).result(timeout_s=0.0),
        lambda engine, value: engine.put_back(value),
        lambda engine, value: engine.submit_many(value),
        lambda engine, value: engine.submit_many([value]),
        lambda engine, value: engine.pause(org_id=value),
        lambda engine, value: engine.dlq.show(value),
        lambda engine, value: engine.dlq.replay(value),
        lambda engine, value: engine.dlq.replay([value]),
        lambda engine, value: engine.dlq.replay(rate_per_s=value),
        lambda engine, value: engine.dlq.purge(value),
        lambda engine, value: engine.dlq.list(limit=value),
    ],
)
def test_odd_arguments_are_refused_with_a_one_line_error(call: Any) -> None:
    with Engine.open("memory://") as engine:
        for value in ODD_VALUES:
            refused_or_done(engine, lambda value=value: call(engine, value))  # type: ignore[misc]


@pytest.mark.parametrize("option", ["timeout_s", "service", "retry", "batch", "within_ms", "pool"])
def test_odd_options_of_a_handler_are_refused_with_a_one_line_error(option: str) -> None:
    with Engine.open("memory://") as engine:
        for value in (b"x", object(), float("nan"), "\ud800", [1]):
            with pytest.raises(PostroomError):
                engine.handler("tool_call", **{option: value})(print)  # type: ignore[arg-type]


def test_shape_of_a_payload_must_be_a_type() -> None:
    with Engine.open("memory://") as engine:
        with pytest.raises(InvalidSetting, match=r"payload must be a type, such as a .+, not 5"):
            engine.handler("tool_call", payload=5)(lambda _message, _ctx: None)
        with pytest.raises(InvalidSetting, match="payload must be a type"):
            engine.register_type("tool_call", payload=5)
        engine.blocking.submit(type="tool_call", org_id="acme", payload={})


def test_second_handler_of_a_type_is_refused() -> None:
    with Engine.open("memory://") as engine:
        engine.handler("tool_call")(print)
        with pytest.raises(InvalidSetting, match="type tool_call has a handler already: print"):
            engine.handler("tool_call")(lambda _message, _ctx: None)
        [handler] = engine.core.handlers.registered["tool_call"].values()
        assert handler.run is print


def test_stop_of_a_key_needs_a_key() -> None:
    with Engine.open("memory://") as engine, pytest.raises(InvalidMessage, match="needs an ordering_key"):
        engine.blocking.submit(type="tool_call", org_id="acme", payload={}, on_dead="stop")


HUGE: list[Any] = ["x" * 1_000_000, "\x00" * 1_000_000, 10**5_000, ["y" * 1_000_000], {"z" * 1_000_000: 1}]


@pytest.mark.parametrize("field", sorted(FIELDS | {"unknown"}))
def test_no_sentence_repeats_a_huge_value(field: str) -> None:
    with Engine.open("memory://") as engine:
        for value in HUGE:
            name = field if field != "unknown" else "u" * 1_000_000
            message = {"type": "tool_call", "org_id": "acme", "payload": {}, name: value}
            try:
                engine.blocking.submit(**message)
            except PostroomError as error:
                assert len(str(error)) < 1_000  # noqa: PT017 - some of them are accepted


@pytest.mark.parametrize(
    "call",
    [
        lambda engine, value: engine.get(value),
        lambda engine, value: engine.cancel(value),
        lambda engine, value: engine.explain(value),
        lambda engine, value: engine.handle(value).result(),
        lambda engine, value: engine.pause(org_id=value),
        lambda engine, value: engine.dlq.list(since=value),
        lambda engine, value: engine.dlq.list(**{"x" * 1_000_000: value}),
        lambda engine, value: engine.dlq.replay([value]),
        lambda engine, value: engine.dlq.replay(value),
    ],
)
def test_no_sentence_repeats_a_huge_argument(call: Any) -> None:
    with Engine.open("memory://") as engine:
        for value in HUGE:
            with suppress(TimeoutError), pytest.raises(PostroomError) as refused:
                engine.blocking.wait(call(engine, value))
            assert len(str(refused.value)) < 1_000


# ---- tenants ---------------------------------------------------------------------------------------


def test_an_id_of_the_store_reveals_nothing_about_other_organizations(tmp_path: Path) -> None:
    with Engine.open(f"sqlite:///{tmp_path}/queue.db") as engine:
        fields: Any = {"type": "tool_call", "payload": {}}
        given = engine.blocking.submit(org_id="acme", **fields).message_id
        not_given = engine.store.read(lambda transaction: transaction.ids.messages).new(1, 1)
        sentences = []
        for message_id in (given, not_given):
            with pytest.raises(InvalidMessage) as refused:
                engine.blocking.submit(org_id="spy", message_id=message_id, **fields)
            sentences.append(str(refused.value).replace(message_id, "ID"))
        assert sentences[0] == sentences[1]


def test_an_id_with_another_content_is_not_a_repeated_submit(tmp_path: Path) -> None:
    with Engine.open(f"sqlite:///{tmp_path}/queue.db") as engine:
        message: Any = {"type": "tool_call", "org_id": "acme", "message_id": str(uuid.uuid4())}
        engine.blocking.submit(payload={"n": "x" * 100_000}, **message)
        assert engine.blocking.submit(payload={"n": "x" * 100_000}, **message).duplicate
        with pytest.raises(KeyReused, match="different content"):
            engine.blocking.submit(payload={"n": 2}, **message)
        twice: Any = {**message, "message_id": str(uuid.uuid4())}
        with pytest.raises(KeyReused, match="different content"):
            engine.blocking.submit_many([twice | {"payload": {"n": n}} for n in range(2)])


@pytest.mark.statement("version-migration-fails")
def test_a_migration_that_fails_refuses_the_message() -> None:
    with Engine.open("memory://") as engine:
        engine.migration(0)(lambda fields: {**fields, "payload": fields["body"]})
        with pytest.raises(ValidationError, match="migration of version 0"):
            engine.blocking.submit(type="tool_call", org_id="acme", payload={}, version="0.9.0")


def test_breakers_that_messages_named_are_forgotten() -> None:
    world = EngineUnderTest("memory://", Policy(breaker=Breaker(failures=2)))
    for count in (1, 2):
        world.submit_many(count, service=f"service-{count}", max_retries=0)
        for claimed in world.claim(count):
            record = claimed.record
            world.finish(
                Outcome(
                    kind="failed", message_id=record.message_id, lease=record.lease, error="x", is_final=True,
                    service=Service("acme", f"service-{count}"), counts_for_breaker=True,
                )
            )  # fmt: skip
    names = [name for name, _ in world.engine.store.read(CIRCUITS.all)]
    assert names == ["acme\x1fservice-1", "acme\x1fservice-2"]
    world.wait(world.engine.core.purge.run())
    assert [name for name, _ in world.engine.store.read(CIRCUITS.all)] == names
    world.clock.advance(7_200)
    world.wait(world.engine.core.purge.run())
    assert world.engine.store.read(CIRCUITS.all) == []
    world.close()


@pytest.mark.parametrize("turns", range(5))
def test_a_cancelled_worker_ends_also_when_it_is_woken_at_the_same_moment(turns: int) -> None:
    async def run() -> None:
        with Engine.open("memory://") as engine:
            worker = Worker(engine.core, worker_id="w", slots=1)
            task = asyncio.create_task(worker.run())
            await asyncio.sleep(0.1)
            worker.look()
            worker._wake.set()
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=HANG_GUARD_S)
            assert done == {task}

    asyncio.run(run())
