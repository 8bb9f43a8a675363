"""The context of a message within a budget, and the limits of resources."""

from typing import Any

import pytest

from postroom import Policy, Sandbox
from postroom.contracts.goals.context import BuiltContext, ContextProvider, fitted
from postroom.errors import InvalidMessage, SandboxUnavailable, ValidationError
from tests.engines import EngineUnderTest


@pytest.fixture
def world(tmp_path: Any) -> Any:
    one = EngineUnderTest(f"sqlite:///{tmp_path}/queue.db", Policy())
    yield one
    one.close()


def test_parts_fit_whole_or_are_named_in_the_digest() -> None:
    built = fitted({"first": "x" * 20, "large": "y" * 400, "last": [1]}, 20)
    assert built.parts == {"first": "x" * 20, "last": [1]}
    assert built.tokens <= 20
    [left] = built.digest
    assert (left["name"], left["tokens"]) == ("large", 102)


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


def test_the_memory_of_a_handler_is_limited(world: EngineUnderTest) -> Any:
    @world.engine.handler("tool_call", pool="process")
    def run(message: Any, ctx: Any) -> Any:
        try:
            return len(bytearray(message.payload["size"]))
        except MemoryError:
            raise ValidationError("out of memory") from None

    limits = {"memory": "50MB"}
    small = world.submit(payload={"size": 1_000_000}, resource_limits=limits)
    large = world.submit(payload={"size": 200_000_000}, resource_limits=limits)
    free = world.submit(payload={"size": 200_000_000})
    world.run_all()
    assert [world.state(one) for one in (small, large, free)] == ["COMPLETED", "DEAD_LETTER", "COMPLETED"]


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
