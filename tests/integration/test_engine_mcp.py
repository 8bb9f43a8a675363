"""Tools of MCP servers as handlers of `tool_call`: a third-party server, and one that misbehaves."""

import asyncio
import io
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from postroom import Breaker, Engine, MessageFailed, Policy, Retry
from postroom.calls.fields import RESULT_BYTES_MAX
from postroom.engine.work.mcp_tools import HEAD_BYTES_MAX
from postroom.errors import InvalidSetting
from postroom.goals.goal_cells import EFFECTS
from tests.waiting import HANG_GUARD_S

TEST_SERVER = Path(__file__).resolve().parents[1] / "mcpserver.py"


def opened(folder: Path, **rules: Any) -> Engine:
    policy = Policy(retries={"tool_call": Retry(delay_s=0.01)}, **rules)
    engine = Engine.open(f"sqlite:///{folder / 'queue.db'}", policy)
    engine.mcp("test", command=[sys.executable, str(TEST_SERVER), str(folder / "calls")])
    return engine


@asynccontextmanager
async def working(engine: Engine) -> AsyncIterator[Engine]:
    worker = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        await engine.stop()
        await worker
        engine.close()


def calling(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_call", "org_id": "acme", "payload": {"tool": tool, "arguments": arguments}}


def calls(folder: Path) -> list[str]:
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


def run(engine: Engine, check: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with working(engine):
            await check(engine)

    asyncio.run(main())


@pytest.mark.statement("type-tool-call", "mcp-call")
def test_tools_of_a_third_party_server_answer_tool_calls(tmp_path: Path) -> None:
    engine = opened(tmp_path)
    engine.mcp("time", command=[sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC"])

    async def check(engine: Engine) -> None:
        call = calling("convert_time", source_timezone="UTC", time="12:00", target_timezone="Asia/Tokyo")
        answer = await engine.request(**call, service="time", timeout_s=HANG_GUARD_S)
        assert "+9.0h" in str(answer)
        wrong = calling("get_current_time", timezone="Nowhere/City")
        with pytest.raises(MessageFailed, match="Invalid timezone"):
            await engine.request(**wrong, service="time", timeout_s=HANG_GUARD_S)
        with pytest.raises(MessageFailed, match="has no tool 'fly', but"):
            await engine.request(**calling("fly"), service="time", timeout_s=HANG_GUARD_S)
        with pytest.raises(MessageFailed, match="service must be an MCP server"):
            await engine.request(**calling("fly"), service="other", timeout_s=HANG_GUARD_S)

    run(engine, check)


@pytest.mark.statement("mcp-answers")
def test_tool_call_passes_on_progress_errors_and_cancellation(tmp_path: Path) -> None:
    async def check(engine: Engine) -> None:
        parts = [part async for part in await engine.submit(**calling("count", steps=3))]
        reports = [(part.progress, part.message) for part in parts if part.type == "progress"]
        assert reports[-1] == (1.0, "step 3")
        assert parts[-1].type == "result"

        with pytest.raises(MessageFailed, match="no such thing"):
            await engine.request(
                **calling("delete", name="missing"), idempotency_key="k-1", timeout_s=HANG_GUARD_S
            )
        assert calls(tmp_path) == ["delete missing k-1"]  # it was not retried

        hanging = await engine.submit(**calling("hang"))
        await until(lambda: "hang begins" in calls(tmp_path))
        await engine.cancel(hanging.message_id)
        await until(lambda: "hang cancelled" in calls(tmp_path))

    run(opened(tmp_path), check)


def test_a_server_starts_in_a_program_that_has_replaced_its_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcp.client.stdio.stdio_client.__wrapped__.__defaults__", (io.StringIO(),))
    monkeypatch.setattr(sys, "stderr", io.StringIO())

    async def check(engine: Engine) -> None:
        await engine.request(**calling("count", steps=1), timeout_s=HANG_GUARD_S)

    run(opened(tmp_path), check)


def test_error_of_a_tool_counts_for_its_server_unless_the_tool_calls_nothing_outside(tmp_path: Path) -> None:
    engine = opened(tmp_path, breaker=Breaker(failures=1))

    async def check(engine: Engine) -> None:
        for tool, state in (("check", None), ("delete", "open")):
            with pytest.raises(MessageFailed, match=r"is not well-formed|no such thing"):
                await engine.request(**calling(tool, name="missing"), timeout_s=HANG_GUARD_S)
            found = (await engine.status()).breakers.get("test")
            assert (found and found.state) == state

    run(engine, check)


@pytest.mark.statement("mcp-idempotent")
def test_a_destructive_tool_whose_server_died_is_not_repeated(tmp_path: Path) -> None:
    async def check(engine: Engine) -> None:
        handle = await engine.submit(**calling("delete", name="crash"))
        with pytest.raises(MessageFailed) as failed:
            await handle.result(timeout_s=HANG_GUARD_S)
        assert failed.value.error_history[-1]["error_type"] == "EffectUnknown"
        assert calls(tmp_path) == [f"delete crash {handle.message_id}"]
        answer = await engine.request(
            **calling("delete", name="file"), timeout_s=HANG_GUARD_S
        )  # a new connection
        assert "deleted file" in str(answer)

    run(opened(tmp_path), check)


def test_a_rollback_finds_the_tool_that_undoes_another_one(tmp_path: Path) -> None:
    async def check(engine: Engine) -> None:
        await engine.goals.start("acme", "g")
        create = calling("create_note", text="hello")
        await engine.request(**create, service="test", goal_id="g", timeout_s=HANG_GUARD_S)
        await engine.goals.rollback("g#1")
        await until(lambda: "delete_note note-7" in calls(tmp_path))
        [taken] = await engine.decisions.list(decided=True)
        assert (taken.kind, taken.choice, taken.by) == ("reversal", "test/delete_note", "rule")
        offered = {one["name"]: one for one in taken.question.facts["tools"]}
        assert offered["test/delete_note"]["annotations"] == {"destructive_hint": True}

    run(opened(tmp_path), check)


def test_hints_of_a_tool_say_whether_a_rollback_can_undo_its_call(tmp_path: Path) -> None:
    async def check(engine: Engine) -> None:
        await engine.goals.start("acme", "g")
        for tool in ("delete", "add", "write"):
            await engine.request(**calling(tool, name="file"), goal_id="g", timeout_s=HANG_GUARD_S)
        await engine.request(**calling("count", steps=1), goal_id="g", timeout_s=HANG_GUARD_S)
        effects = engine.store.read(EFFECTS.all)
        assert [(effect.key, effect.reversal_class) for _, effect in effects] == [
            ("mcp/test/delete", "IRREVERSIBLE"),
            ("mcp/test/add", "COMPENSATABLE"),
            ("mcp/test/write", "IRREVERSIBLE"),  # without a hint, as MCP says; and `count` only reads
        ]

    run(opened(tmp_path), check)


@pytest.mark.statement("mcp-idempotent")
def test_an_idempotent_tool_whose_server_died_is_repeated(tmp_path: Path) -> None:
    async def check(engine: Engine) -> None:
        handle = await engine.submit(**calling("put", name="file"))
        assert "put file" in str(await handle.result(timeout_s=HANG_GUARD_S))
        assert calls(tmp_path) == ["put file", "put file"]
        assert (await engine.get(handle.message_id)).attempt == 2

    run(opened(tmp_path), check)


def test_result_of_a_tool_may_have_any_size(tmp_path: Path) -> None:
    """A tool that has run completes its message: up to the limit whole, and beyond it cut."""

    async def check(engine: Engine) -> None:
        async def reported(size: int) -> Any:
            answer = await engine.request(**calling("report", size=size), timeout_s=HANG_GUARD_S)
            assert calls(tmp_path).count(f"report {size}") == 1
            return answer

        for size in (100_000, RESULT_BYTES_MAX - 1_000):
            assert "x" * size in str(await reported(size))
        cut = await reported(RESULT_BYTES_MAX)
        assert (cut["cut_at"], cut["bytes"] > RESULT_BYTES_MAX) == (RESULT_BYTES_MAX, True)
        assert len(cut["head"]) == HEAD_BYTES_MAX

    run(opened(tmp_path), check)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - another process writes the file
        await asyncio.sleep(0.05)


def test_a_server_that_cannot_start_is_retried_and_names_itself(tmp_path: Path) -> None:
    engine = Engine.open("memory://", Policy(retries={"tool_call": Retry(max_retries=1, delay_s=0.01)}))
    engine.mcp("gone", command=[str(tmp_path / "no-such-program")])

    async def check(engine: Engine) -> None:
        with pytest.raises(MessageFailed, match="MCP server gone cannot be reached"):
            await engine.request(**calling("any"), timeout_s=HANG_GUARD_S)
        with pytest.raises(MessageFailed, match=r"service must be an MCP server \(gone\), not 'other'"):
            await engine.request(**calling("any"), service="other", timeout_s=HANG_GUARD_S)

    run(engine, check)


@pytest.mark.statement("mcp-services")
def test_mcp_servers_and_handlers_of_the_application_share_a_type(tmp_path: Path) -> None:
    engine = opened(tmp_path)

    @engine.handler("tool_call", service="slack")
    async def post(_message: Any, _ctx: Any) -> str:
        return "posted"

    @engine.handler("tool_call", service="test", tool="add")
    async def add(_message: Any, _ctx: Any) -> str:
        return "added here"

    async def check(engine: Engine) -> None:
        count, own = calling("count", steps=1), calling("add", name="x")
        assert await engine.request(**count, service="slack", timeout_s=HANG_GUARD_S) == "posted"
        assert "counted" in str(await engine.request(**count, service="test", timeout_s=HANG_GUARD_S))
        assert await engine.request(**own, service="test", timeout_s=HANG_GUARD_S) == "added here"
        with pytest.raises(MessageFailed, match=r"service must be an MCP server .*\(slack, test\), not ''"):
            await engine.request(**count, timeout_s=HANG_GUARD_S)

    run(engine, check)


def test_a_wrong_server_is_refused_at_once() -> None:
    engine = Engine.open("memory://")
    for wrong in ({}, {"command": ["x"], "url": "http://x"}, {"command": "x"}):
        with pytest.raises(InvalidSetting, match="a command, a list of texts, or a url"):
            engine.mcp("one", **wrong)
    engine.mcp("one", url="http://127.0.0.1:1/mcp")
    with pytest.raises(InvalidSetting, match="already"):
        engine.mcp("one", url="http://127.0.0.1:1/mcp")
    engine.close()
