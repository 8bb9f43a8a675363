"""The context of a message within a budget, and the limits of resources."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from postroom import Engine, Policy, Sandbox
from postroom.core.agents import AgentRules
from postroom.errors import InvalidMessage, SandboxUnavailable, ValidationError
from postroom.goals.context_provider import BuiltContext, ContextProvider, fitted
from postroom.sandbox.sandbox import MockSandbox, checked_limits
from tests.engines import EngineUnderTest
from tests.postgresserver import database, postgres, store_url
from tests.waiting import HANG_GUARD_S, eventually

__all__ = ["database", "postgres"]  # fixtures


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    one = EngineUnderTest(store_url(request, tmp_path), Policy())
    yield one
    one.close()


@pytest.mark.statement("context-provider")
def test_parts_fit_whole_or_are_named_in_the_digest() -> None:
    built = fitted({"first": "x" * 20, "large": "y" * 400, "last": [1]}, 20)
    assert built.parts == {"first": "x" * 20, "last": [1]}
    assert built.tokens <= 20
    [left] = built.digest
    assert (left["name"], left["tokens"]) == ("large", 102)


@pytest.mark.statement("context-content")
def test_context_has_what_failed_before_the_goal_the_message_and_the_graph(world: EngineUnderTest) -> None:
    engine = world.engine
    got: list[BuiltContext] = []

    @engine.handler("tool_call")
    async def run(message: Any, ctx: Any) -> None:
        got.append(await ctx.build_context(200))
        got.append(await ctx.build_context(0))
        with pytest.raises(InvalidMessage):
            await ctx.build_context(-1)

    world.wait(engine.goals.start("acme", "g", context={"plan": "p", "previous_failure": {"error": "e"}}))
    branch = engine.graph.branch("g")
    world.wait(branch.save("a", {"x": 1}, [("k", "b")]))
    world.wait(branch.save("b", {"y": 1}))
    world.submit(goal_id="g", payload={"node_id": "a"}, context={"session": 7})
    world.run_all()
    assert list(got[0].parts) == ["previous_failure", "goal.plan", "message.session", "node.a", "node.b"]
    assert got[0].digest == []
    assert got[1].parts == {}
    assert len(got[1].digest) == 5


@pytest.mark.statement("context-own-provider")
def test_an_application_may_bring_its_own_provider(world: EngineUnderTest) -> Any:
    class Fixed(ContextProvider):
        async def build(self, message: Any, token_budget: Any) -> Any:
            return BuiltContext({"type": message.type}, token_budget, [])

    got: list[BuiltContext] = []
    world.engine.context_provider = Fixed()

    @world.engine.handler("tool_call")
    def run(message: Any, ctx: Any) -> None:
        got.append(ctx.build_context())

    world.submit()
    world.run_all()
    assert got == [BuiltContext({"type": "tool_call"}, 4_000, [])]


def allocate(message: Any, _: Any) -> Any:
    try:
        return len(bytearray(message.payload["size"]))
    except MemoryError:
        raise ValidationError("out of memory") from None


async def allocate_async(message: Any, ctx: Any) -> Any:
    return allocate(message, ctx)


def allocate_all(messages: Any, contexts: Any) -> Any:
    return [allocate(*pair) for pair in zip(messages, contexts, strict=True)]


@pytest.mark.statement("limit-memory")
@pytest.mark.parametrize(
    ("run", "options"),
    [(allocate, {"pool": "process"}), (allocate, {}), (allocate_async, {}), (allocate_all, {"batch": 2})],
)
def test_the_memory_of_a_handler_is_limited(world: EngineUnderTest, run: Any, options: Any) -> Any:
    """Whatever the handler is: threads and coroutines share memory, so it gets a process of its own."""
    world.engine.handler("tool_call", **options)(run)
    limits = {"memory": "50MB"}
    small = world.submit(payload={"size": 1_000_000}, resource_limits=limits)
    large = world.submit(payload={"size": 200_000_000}, resource_limits=limits)
    free = world.submit(payload={"size": 200_000_000})
    world.run_all()
    assert [world.state(one) for one in (small, large, free)] == ["COMPLETED", "DEAD_LETTER", "COMPLETED"]


def test_a_handler_of_postroom_itself_runs_in_the_worker(world: EngineUnderTest) -> None:
    """Its writes would be lost in the copy of a store in memory that a process of its own has."""
    payload = {"node_id": "n", "properties": {"x": 1}}
    saved = world.submit(type="memory_save", payload=payload, resource_limits={"memory": "50MB"})
    world.run_all()
    assert world.state(saved) == "COMPLETED"
    node = world.wait(world.engine.graph.main("acme").get("n"))
    assert node is not None
    assert node.properties == {"x": 1}


@pytest.mark.statement("sandbox-creation-fails")
def test_a_sandbox_that_cannot_be_created_defers_the_message(world: EngineUnderTest) -> Any:
    is_down = [True]

    @world.engine.handler("tool_call")
    async def run(message: Any, ctx: Any) -> Any:
        if is_down:
            raise SandboxUnavailable("the host is full", 30.0)
        async with ctx.sandbox() as box:
            return (await box.run(["echo", "hello"])).stdout

    world.engine.sandboxes.kind = "process"
    handle = world.submit()
    world.run_all()
    info = world.wait(world.engine.get(handle.message_id))
    assert (info.state, info.retry_count) == ("SCHEDULED", 0)
    assert "the host is full" in world.wait(handle.explain())
    is_down.clear()
    world.clock.advance(31)
    world.run_all()
    assert world.wait(handle.result(5)) == "hello\n"


class FullHost(MockSandbox):
    """A kind of sandbox that cannot be created."""

    tries = 0

    async def create(self, resource_limits: Any = None) -> Sandbox:
        checked_limits(resource_limits)
        FullHost.tries += 1
        raise SandboxUnavailable("the host is full", 5.0)


@pytest.mark.statement("sandbox-creation-fails")
def test_creations_that_fail_defer_messages_and_open_the_breaker(world: EngineUnderTest) -> None:
    """Also those of messages without a pool."""
    FullHost.tries = 0
    world.engine.sandboxes.kind = FullHost

    @world.engine.handler("tool_call")
    async def run(message: Any, ctx: Any) -> None:
        async with ctx.sandbox():
            raise AssertionError("there is a sandbox")

    handles = [world.submit() for _ in range(5)]
    world.run_all()
    assert FullHost.tries == 3
    infos = [world.wait(world.engine.get(one.message_id)) for one in handles]
    assert {(one.state, one.retry_count) for one in infos} == {("SCHEDULED", 0)}
    assert "creations have failed lately" in world.wait(handles[-1].explain())


@pytest.mark.statement("sandbox-need")
@pytest.mark.parametrize("has_own_handler", [False, True])
def test_the_tools_of_a_spawned_agent_say_whether_it_gets_warm_sandboxes(
    world: EngineUnderTest, has_own_handler: Any
) -> None:
    engine, boxes = world.engine, world.engine.sandboxes
    boxes.kind = "mock"
    if has_own_handler:
        for type_name in ("agent_spawn", "agent_terminate"):
            engine.handler(type_name)(lambda message, _: message.payload["agent_id"])
    else:
        engine.core.commits.policy = replace(engine.policy, agents=AgentRules(program=("true",)))

    def agent(type_name: str, agent_id: str, tools: Any = ()) -> str:
        payload = {"agent_id": agent_id} | ({"tools": [*tools]} if type_name == "agent_spawn" else {})
        handle = world.submit(type=type_name, payload=payload)
        world.run_all()
        return world.state(handle)

    assert agent("agent_spawn", "reader", ["search"]) == "COMPLETED"
    assert agent("agent_spawn", "coder", ["run_python"]) == "COMPLETED"
    assert agent("agent_spawn", "tester", [{"name": "x", "sandbox": True}]) == "COMPLETED"
    assert {name: pool.warm for name, pool in boxes.status().items()} == {"acme/coder": 2, "acme/tester": 2}
    assert agent("agent_terminate", "tester") == "COMPLETED"
    assert list(boxes.status()) == ["acme/coder"]
    assert agent("agent_spawn", "coder", ["search"]) == "COMPLETED"  # again, with other tools
    assert boxes.status() == {}


def test_an_agent_is_not_spawned_before_its_sandboxes_are_there(world: EngineUnderTest) -> None:
    spawned: list[str] = []
    world.engine.handler("agent_spawn")(lambda message, _: spawned.append(message.payload["agent_id"]))
    world.engine.sandboxes.kind = FullHost
    handle = world.submit(type="agent_spawn", payload={"agent_id": "coder", "tools": ["shell"]})
    world.run_all()
    assert (world.state(handle), spawned) == ("SCHEDULED", [])
    world.engine.sandboxes.kind = "mock"
    world.clock.advance(6)
    world.wait(world.engine.sandboxes.forget("acme", "coder"))  # its pool was of the other kind
    world.run_all()
    assert (world.state(handle), spawned) == ("COMPLETED", ["coder"])


def test_every_worker_process_gets_warm_sandboxes_for_spawned_agents(tmp_path: Path) -> None:
    """The worker that did not handle the `agent_spawn` follows the need that is stored."""
    url = f"sqlite:///{tmp_path}/queue.db"

    async def story() -> None:
        with Engine.open(url) as here, Engine.open(url) as there:
            for engine in (here, there):
                engine.sandboxes.kind = "process"
                engine.handler("agent_spawn")(lambda *_: None)
                engine.handler("agent_terminate")(lambda *_: None)
            worker = asyncio.create_task(here.run())
            payload = {"agent_id": "coder", "tools": ["shell"]}
            spawn = await here.submit(type="agent_spawn", org_id="acme", payload=payload)
            await spawn.result(HANG_GUARD_S)
            await there.sandboxes.tend()
            assert there.sandboxes.status()["acme/coder"].warm == 2
            folders = {box.sandbox._folder for box in there.sandboxes._pools["acme", "coder"]._warm}  # type: ignore[attr-defined]
            assert all(folder.is_dir() for folder in folders)
            end = await here.submit(type="agent_terminate", org_id="acme", payload=payload)
            await end.result(HANG_GUARD_S)
            await there.sandboxes.tend()
            assert there.sandboxes.status() == {}
            assert not any(folder.exists() for folder in folders)
            await (await here.submit(type="agent_spawn", org_id="acme", payload=payload)).result(HANG_GUARD_S)
            assert here.sandboxes.status()
            await here.stop()
            await worker
            await eventually(lambda: not here.sandboxes.status())

    asyncio.run(story())


def test_a_forked_handler_does_not_share_the_warm_sandboxes_of_its_worker(world: EngineUnderTest) -> None:
    boxes = world.engine.sandboxes
    boxes.kind = "process"

    @world.engine.handler("tool_call", pool="process")
    def run(message: Any, ctx: Any) -> Any:
        with ctx.sandbox() as box:
            return box.run(["pwd"]).stdout, os.getpid()

    world.wait(boxes.prepare("acme", "coder", ["shell"], size=1))
    handles = [world.submit(agent_id="coder", priority=0) for _ in range(2)]
    world.run_all()
    folders = {world.wait(handle.result(5))[0] for handle in handles}
    assert len(folders) == 2, "two processes worked in the same folder"
    assert boxes.status()["acme/coder"].created == 1
    world.wait(boxes.close())


def test_a_plain_handler_gets_a_sandbox_and_a_memory_limit_gets_a_new_one(world: EngineUnderTest) -> None:
    boxes = world.engine.sandboxes
    boxes.kind = "process"

    @world.engine.handler("tool_call")
    def run(message: Any, ctx: Any) -> Any:
        with ctx.sandbox() as box:
            box.run(["touch", "left"])
            box.reset()
            return box.run(["sh", "-c", "ls; ulimit -v"]).stdout

    world.wait(boxes.prepare("acme", "coder", ["shell"], size=1))
    free = world.submit(agent_id="coder", priority=0)
    tight = world.submit(agent_id="coder", priority=0, resource_limits={"memory": "300MB"})
    world.run_all()
    assert world.wait(free.result(5)) == "unlimited\n"
    assert world.wait(tight.result(5)) == f"{300_000_000 // 1024}\n"
    world.wait(boxes.close())


@pytest.mark.statement("sandbox-warm")
def test_agents_that_run_code_get_warm_sandboxes_for_p0(world: EngineUnderTest) -> None:
    boxes = world.engine.sandboxes
    boxes.kind = "mock"
    used: list[Sandbox] = []

    @world.engine.handler("tool_call")
    async def run(message: Any, ctx: Any) -> None:
        async with ctx.sandbox() as box:
            used.append(box)

    async def story() -> None:
        assert not await boxes.prepare("acme", "reader", ["search"])
        assert await boxes.prepare("acme", "coder", ["run_python"], size=1)

    world.wait(story())
    for priority in (0, 0, 2):
        world.submit(agent_id="coder", priority=priority)
        world.run_all()
    assert used[0] is used[1]
    assert used[2] is not used[0]
    assert isinstance(used[2], Sandbox)
    assert boxes.status()["acme/coder"].warm == 1
    world.wait(boxes.close())
    assert boxes.status() == {}
