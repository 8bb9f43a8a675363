"""What `Coordinator` promises, on every store: requests, streams, restarts, health, inboxes and bounces."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import pytest

from postroom import (
    AgentReplaced,
    Bounced,
    Coordinator,
    CoordinatorStopped,
    Engine,
    MessageFailed,
    Organization,
    Policy,
    Retry,
    StreamRestarted,
)
from postroom.engine.agents.agent import PARTS_WAITING_MAX
from postroom.engine.agents.agent_operations import AgentOperations
from postroom.engine.agents.agent_sweeps import bounce
from postroom.engine.agents.answer_parts import PART_CELLS_A_READ_MAX
from postroom.engine.agents.inboxes import LETTERS_BYTES_A_READ_MAX, Inboxes
from postroom.engine.agents.leases import Leases
from postroom.engine.rules.cells import INBOXES, LETTER_BODIES, LETTERS, PARTS, REQUESTS, AgentLetter
from postroom.engine.work.context import PARTS_A_COMMIT_MAX
from postroom.errors import InvalidMessage, TooMany
from postroom.message import Event
from postroom.stores.base import Listing
from postroom.stores.transaction import Transaction
from postroom.testing import check_consistency
from tests.engines import soon
from tests.waiting import HANG_GUARD_S

T = TypeVar("T")
FAST_RETRIES = {"model_call": Retry(max_retries=3, delay_s=0.01), "tool_call": Retry(delay_s=0.01)}


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/queue.db"


GATES: dict[str, asyncio.Event] = {}
"""A handler whose payload names a gate waits until the test opens it."""


def gate(name: str) -> asyncio.Event:
    GATES[name] = asyncio.Event()
    return GATES[name]


async def pass_gate(payload: dict[str, Any]) -> None:
    if "gate" in payload:
        await GATES[payload["gate"]].wait()


def handlers(engine: Engine) -> None:
    @engine.handler("tool_call")
    async def tool(message: Any, _ctx: Any) -> Any:
        payload = message.payload
        await pass_gate(payload)
        if payload.get("fails"):
            raise ValueError("no")
        return {"got": payload.get("n")}

    @engine.handler("model_call")
    async def model(message: Any, ctx: Any) -> Any:
        await ctx.progress(0.5, "thinking")
        for word in message.payload["words"]:
            await ctx.stream(f"{ctx.attempt}{word}")
        if ctx.attempt <= message.payload.get("fails", 0):
            await ctx.flush()
            await pass_gate(message.payload)
            raise ValueError("again")
        return message.payload.get("result")


@asynccontextmanager
async def working(url: str, **rules: Any) -> AsyncIterator[Engine]:
    async with Engine.open(url, Policy(retries=FAST_RETRIES, **rules)) as engine:
        handlers(engine)
        worker = asyncio.create_task(engine.run(concurrency=20))
        try:
            yield engine
        finally:
            await engine.stop()
            await worker
            check_consistency(engine.store)


def events_of(engine: Engine, kind: str) -> list[Event]:
    return [event for event in engine.store.events(0, 100_000) if event.kind == kind]


async def eventually(look: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_GUARD_S):
        while not look():  # noqa: ASYNC110 - the store has no event for it
            await asyncio.sleep(0.01)


def open_requests(engine: Engine) -> list[str]:
    return [key for key, _ in engine.store.read(REQUESTS.all)]


# ---- requests and streams --------------------------------------------------------------------------


@pytest.mark.statement("type-model-call", "response-result", "agent-serializes", "coordinator-joined")
def test_an_agent_gets_results_and_joined_streams_alike(url: str) -> None:
    async def scenario() -> None:
        async with working(url) as engine, Coordinator(engine) as coordinator:
            agent = await coordinator.register("planner", "acme")
            assert await agent.request(type="tool_call", payload={"n": 7}, timeout_s=HANG_GUARD_S) == {
                "got": 7
            }
            words = {"words": ["a", "b"], "result": {"tokens": 2}}
            assert await agent.request(type="model_call", payload=words, timeout_s=HANG_GUARD_S) == "1a1b"
            await eventually(lambda: not open_requests(engine))
            assert len(events_of(engine, "delivered")) == 2

    soon(scenario())


@pytest.mark.statement("response-parts")
def test_acknowledgment_progress_chunks_and_end_are_parts_with_the_epoch(url: str) -> None:
    async def scenario() -> None:
        async with working(url) as engine, Coordinator(engine), Coordinator(engine) as coordinator:
            agent = await coordinator.register("planner", "acme")
            stream = agent.stream(
                type="model_call", payload={"words": "abc", "result": "done"}, timeout_s=HANG_GUARD_S
            )
            parts = [part async for part in stream]
        kinds = ["acknowledgment", "progress", *["stream_chunk"] * 3, "stream_complete"]
        assert [part.type for part in parts] == kinds
        assert [part.chunk_index for part in parts[2:5]] == [0, 1, 2]
        assert (parts[-1].result, parts[-1].total_chunks) == ("done", 3)
        assert {part.epoch for part in parts} == {coordinator.epoch}

    soon(scenario())


def test_a_retry_restarts_the_stream(url: str) -> None:
    async def scenario() -> None:
        async with working(url) as engine, Coordinator(engine) as coordinator:
            agent = await coordinator.register("planner", "acme")
            failing = gate("failing")
            payload = {"words": "ab", "fails": 1, "gate": "failing"}
            stream = agent.stream(type="model_call", payload=payload, timeout_s=HANG_GUARD_S)
            seen: list[Any] = []

            async def read() -> None:
                async for part in stream:
                    seen.append(part.chunk)
                    if part.chunk == "1b":
                        failing.set()

            with pytest.raises(StreamRestarted) as restarted:
                await read()
            assert restarted.value.attempt == 2
            assert seen == [None, None, "1a", "1b"]
            rest = [part async for part in stream]
            chunks = [(part.chunk_index, part.chunk) for part in rest if part.type == "stream_chunk"]
            assert chunks == [(0, "2a"), (1, "2b")]
            assert rest[-1].total_chunks == 2

    soon(scenario())


def test_replace_gives_the_chunks_of_the_next_attempt_without_an_error(url: str) -> None:
    async def scenario() -> None:
        async with working(url) as engine, Coordinator(engine) as coordinator:
            agent = await coordinator.register("planner", "acme")
            fields: dict[str, Any] = {"type": "model_call", "payload": {"words": "ab", "fails": 2}}
            stream = agent.stream(**fields, restart="replace", timeout_s=HANG_GUARD_S)
            chunks = [part.chunk async for part in stream if part.type == "stream_chunk"]
            assert chunks[-2:] == ["3a", "3b"]
            assert await agent.request(**fields, timeout_s=HANG_GUARD_S) == "3a3b"

    soon(scenario())


@pytest.mark.statement("response-error")
def test_failed_message_raises_in_request_and_ends_a_stream(url: str) -> None:
    async def scenario() -> None:
        async with working(url) as engine, Coordinator(engine) as coordinator:
            agent = await coordinator.register("planner", "acme")
            fields: dict[str, Any] = {"type": "tool_call", "payload": {"fails": True}, "max_retries": 0}
            with pytest.raises(MessageFailed, match="no") as failed:
                await agent.request(**fields, timeout_s=HANG_GUARD_S)
            assert failed.value.state == "DEAD_LETTER"
            parts = [part async for part in agent.stream(**fields, timeout_s=HANG_GUARD_S)]
            assert (parts[-1].type, parts[-1].error) == ("error", {"type": "ValueError", "message": "no"})
            await eventually(lambda: not open_requests(engine))

    soon(scenario())


def test_a_late_answer_is_kept_for_resume(url: str) -> None:
    async def scenario() -> None:
        async with working(url) as engine, Coordinator(engine) as coordinator:
            agent = await coordinator.register("planner", "acme")
            late = gate("late")
            with pytest.raises(TimeoutError, match="resume"):
                await agent.request(type="tool_call", payload={"n": 1, "gate": "late"}, timeout_s=0.05)
            [info] = await coordinator.agents("acme")
            assert len(info.waits_for) == 1
            late.set()
            parts = [part async for part in agent.resume()]
            assert (parts[-1].type, parts[-1].result) == ("result", {"got": 1})
            assert parts[-1].request_id == info.waits_for[0]
            assert [part async for part in agent.resume()] == []

    soon(scenario())


@pytest.mark.statement("coordinator-routes", "agent-restart")
def test_a_restarted_agent_resumes_its_open_requests_and_nothing_else(url: str) -> None:
    async def scenario() -> None:
        async with working(url) as engine:
            async with Coordinator(engine) as first:
                agent = await first.register("planner", "acme")
                assert await agent.request(type="tool_call", payload={"n": 0}, timeout_s=HANG_GUARD_S) == {
                    "got": 0
                }
                restarted = gate("restarted")
                tasks = [
                    asyncio.create_task(
                        agent.request(type="tool_call", payload={"n": n, "gate": "restarted"})
                    )
                    for n in (1, 2)
                ]
                await eventually(lambda: len(open_requests(engine)) == 2)
            for task in tasks:
                with pytest.raises(CoordinatorStopped):
                    await task
            async with Coordinator(engine) as second:
                agent = await second.register("planner", "acme")
                restarted.set()
                parts = [part async for part in agent.resume() if part.type == "result"]
                assert sorted(part.result["got"] for part in parts) == [1, 2]
                assert {part.epoch for part in parts} == {second.epoch}
                assert second.epoch > first.epoch
                assert [part async for part in agent.resume()] == []

    soon(scenario())


def test_an_answer_that_was_read_and_not_shown_is_resumed(url: str) -> None:
    async def scenario() -> None:
        async with working(url) as engine, Coordinator(engine) as coordinator:
            agent = await coordinator.register("planner", "acme")
            timed_out = gate("timed out")
            for n in range(5):
                payload = {"n": n, "gate": "timed out"}
                with pytest.raises(TimeoutError):
                    await agent.request(type="tool_call", payload=payload, timeout_s=0.01)
            timed_out.set()
            await eventually(lambda: engine.store.count()["org:acme"].get("COMPLETED") == 5)
            seen = []
            async for part in agent.resume():  # left in the middle
                if part.type == "result":
                    seen.append(part.result["got"])
                    break
            await eventually(lambda: len(open_requests(engine)) == 4)
            seen += [part.result["got"] async for part in agent.resume() if part.type == "result"]
            assert sorted(seen) == [0, 1, 2, 3, 4]

    soon(scenario())


def test_two_reads_of_the_same_message_both_get_the_answer(url: str) -> None:
    async def scenario() -> None:
        async with working(url) as engine, Coordinator(engine) as coordinator:
            agent = await coordinator.register("planner", "acme")
            asked = gate("asked twice")
            fields: dict[str, Any] = {"payload": {"n": 1, "gate": "asked twice"}, "idempotency_key": "once"}
            both = [
                asyncio.create_task(agent.request(type="tool_call", **fields, timeout_s=HANG_GUARD_S))
                for _ in range(2)
            ]
            await eventually(lambda: agent.reading.total() == 2)
            asked.set()
            assert await asyncio.gather(*both) == [{"got": 1}] * 2
            await eventually(lambda: not open_requests(engine))

    soon(scenario())


@pytest.mark.statement("coordinator-chunks")
def test_a_slow_reader_gets_every_chunk_in_order(url: str) -> None:
    async def scenario() -> None:
        async with working(url) as engine, Coordinator(engine) as coordinator:
            agent = await coordinator.register("planner", "acme")
            words = [f"w{n} " for n in range(6_000)]
            stream = agent.stream(type="model_call", payload={"words": words}, timeout_s=HANG_GUARD_S)
            indexes, waiting_most = [], 0
            async for part in stream:
                if part.chunk_index is not None:
                    indexes.append(part.chunk_index)
                if part.chunk_index == 0:  # the reader stands still until the whole answer is stored
                    await eventually(lambda: "COMPLETED" in engine.store.count()["org:acme"])
                reader = stream._reader
                waiting_most = max(waiting_most, 0 if reader is None else len(reader.parts))
            assert indexes == list(range(6_000))
            assert waiting_most < PARTS_WAITING_MAX + PART_CELLS_A_READ_MAX * PARTS_A_COMMIT_MAX

    soon(scenario())


def test_agents_of_a_testing_engine_get_answers() -> None:
    async def scenario() -> None:
        engine = Engine.open("memory://")
        handlers(engine)
        async with engine.testing() as testing, Coordinator(testing) as coordinator:
            agent = await coordinator.register("planner", "acme")
            assert (
                await agent.request(type="model_call", payload={"words": "ab"}, timeout_s=HANG_GUARD_S)
                == "1a1b"
            )

    soon(scenario())


@pytest.mark.statement("agent-serializes", "coordinator-wait")
def test_blocking_request_waits_for_the_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with working(f"sqlite:///{tmp_path}/queue.db") as engine:
            request = engine.blocking.request
            fields: dict[str, Any] = {"org_id": "acme", "timeout_s": HANG_GUARD_S}
            answer = await asyncio.to_thread(request, type="model_call", payload={"words": "ab"}, **fields)
            assert answer == "1a1b"
            assert await asyncio.to_thread(request, type="tool_call", payload={"n": 3}, **fields) == {
                "got": 3
            }
            with pytest.raises(MessageFailed):
                await asyncio.to_thread(
                    request, type="tool_call", payload={"fails": True}, max_retries=0, **fields
                )

    soon(scenario())


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"restart": "never"}, InvalidMessage),
        ({"org_id": "other"}, InvalidMessage),
        ({"agent_id": "other"}, InvalidMessage),
        ({"timeout_s": -1}, InvalidMessage),
    ],
)
def test_a_request_that_does_not_fit_is_refused(fields: dict[str, Any], error: type[Exception]) -> None:
    async def scenario() -> None:
        async with Engine.open("memory://") as engine, Coordinator(engine) as coordinator:
            agent = await coordinator.register("planner", "acme")
            with pytest.raises(error):
                agent.stream(type="tool_call", payload={}, **fields)

    soon(scenario())


# ---- registration ----------------------------------------------------------------------------------


def test_the_newest_registration_of_an_id_is_the_only_one(url: str) -> None:
    async def scenario() -> None:
        async with working(url) as engine, Coordinator(engine) as one, Coordinator(engine) as two:
            old = await one.register("planner", "acme")
            replaced = gate("replaced")
            payload = {"n": 1, "gate": "replaced"}
            waiting = asyncio.create_task(old.request(type="tool_call", payload=payload))
            await eventually(lambda: bool(open_requests(engine)))
            new = await two.register("planner", "acme")
            with pytest.raises(AgentReplaced):
                await waiting
            for call in (
                old.request(type="tool_call", payload={}),
                old.send(to="planner", payload=1),
                old.leave(),
                old.inbox()._all(),
            ):
                with pytest.raises(AgentReplaced):
                    await call
            replaced.set()
            parts = [part async for part in new.resume()]
            assert parts[-1].result == {"got": 1}

    soon(scenario())


@pytest.mark.statement("registration-race")
def test_registrations_at_the_same_time_have_one_winner(url: str) -> None:
    async def scenario() -> None:
        async with working(url) as engine, Coordinator(engine) as one, Coordinator(engine) as two:
            both = await asyncio.gather(*(each.register("planner", "acme") for each in (one, two) * 5))
            calls = [
                agent.request(type="tool_call", payload={"n": 1}, timeout_s=HANG_GUARD_S) for agent in both
            ]
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            assert outcomes.count({"got": 1}) == 1
            assert sum(isinstance(outcome, AgentReplaced) for outcome in outcomes) == 9

    soon(scenario())


@pytest.mark.statement("agent-limit")
def test_an_organization_has_a_limited_number_of_agents(url: str) -> None:
    async def scenario() -> None:
        policy = Policy(organizations={"small": Organization(max_agents=2)})
        async with Engine.open(url, policy) as engine, Coordinator(engine) as coordinator:
            first = await coordinator.register("a0", "small")
            await coordinator.register("a1", "small")
            with pytest.raises(TooMany, match="2 agents"):
                await coordinator.register("a2", "small")
            await coordinator.register("a1", "small")  # the same id again takes no other place
            await first.leave()
            await coordinator.register("a2", "small")
            for number in range(100):
                await coordinator.register(f"b{number}", "large")
            with pytest.raises(TooMany, match="100 agents"):
                await coordinator.register("b100", "large")

    soon(scenario())


STRANGE: list[Any] = [
    "",
    "a b",
    "a/b",
    "../a",
    "-a",
    "a\x1fb",
    "a\n",
    "é",
    "а",
    "a\0",
    "\ud800",
    "a" * 129,
    1,
    None,
]


@pytest.mark.parametrize(
    ("agent_id", "org_id"), [*((name, "acme") for name in STRANGE), *(("a", name) for name in STRANGE)]
)
def test_names_of_agents_are_checked(agent_id: Any, org_id: str) -> None:
    async def scenario() -> None:
        async with Engine.open("memory://") as engine, Coordinator(engine) as coordinator:
            with pytest.raises(InvalidMessage):
                await coordinator.register(agent_id, org_id)

    soon(scenario())


def test_a_stopped_coordinator_says_so() -> None:
    async def scenario() -> None:
        async with Engine.open("memory://") as engine:
            coordinator = Coordinator(engine)
            with pytest.raises(CoordinatorStopped):
                await coordinator.register("planner", "acme")
            async with coordinator:
                agent = await coordinator.register("planner", "acme")
            with pytest.raises(CoordinatorStopped):
                await agent.request(type="tool_call", payload={})

    soon(scenario())


@pytest.mark.statement("coordinator-one")
def test_agents_have_no_queue_and_no_task_of_their_own(url: str) -> None:
    async def scenario() -> None:
        async with working(url) as engine, Coordinator(engine) as coordinator:
            agents = [await coordinator.register(f"a{n}", "acme") for n in range(30)]
            all_ask = gate("all ask")
            payload = {"n": 1, "gate": "all ask"}
            asked = [
                asyncio.create_task(agent.request(type="tool_call", payload=payload, timeout_s=HANG_GUARD_S))
                for agent in agents
            ]
            await eventually(lambda: len(open_requests(engine)) == len(agents))
            assert len(coordinator._tasks) == 3  # answers, acknowledgments and heartbeats of all agents
            assert {*engine.store.count()} == {"org:acme"}
            all_ask.set()
            assert await asyncio.gather(*asked) == [{"got": 1}] * len(agents)

    soon(scenario())


# ---- messages between agents -----------------------------------------------------------------------


def test_a_message_has_four_receipts_each_an_event(url: str) -> None:
    async def scenario() -> None:
        async with working(url) as engine, Coordinator(engine) as coordinator:
            sender = await coordinator.register("sender", "acme")
            reader = await coordinator.register("reader", "acme")
            sent = await sender.send(to="reader", payload={"hello": 1})
            assert [*await sent.receipts()] == ["stored"]
            [info] = [one for one in await engine.agents("acme") if one.agent_id == "reader"]
            assert info.waited_for_by == [sent.message_id]
            async for message in reader.inbox():
                assert (message.sender, message.payload) == ("sender", {"hello": 1})
                assert [*await sent.receipts()] == ["stored", "fetched", "shown"]
                await message.done()
                break
            assert [*await sent.receipts()] == ["stored", "fetched", "shown", "acted_on"]
            assert await reader.inbox() == []
            kinds = [event.detail["receipt"] for event in events_of(engine, "receipt")]
            assert kinds == ["stored", "fetched", "shown", "acted_on"]
            await eventually(lambda: engine.blocking.get(sent.message_id).state == "COMPLETED")
            assert len(events_of(engine, "receipt")) == 4

    soon(scenario())


def test_a_page_of_an_inbox_ends_when_it_has_enough_bytes(url: str) -> None:
    long = "x" * (LETTERS_BYTES_A_READ_MAX // 2)

    async def scenario() -> None:
        async with Engine.open(url) as engine, Coordinator(engine) as coordinator:
            sender = await coordinator.register("sender", "acme")
            reader, other = [await coordinator.register(name, "acme") for name in ("reader", "reader2")]
            for number in range(5):
                await sender.send(to="reader", payload=[number, long])
                await sender.send(to="reader2", payload="short")
            page = await reader.inbox().page()
            assert [msgspec.json.decode(message.payload)[0] for message in page] == [0, 1]
            page = await reader.inbox().page(page[-1].number)
            assert [msgspec.json.decode(message.payload)[0] for message in page] == [2, 3]
            assert [message.payload[0] for message in await reader.inbox()] == [0, 1, 2, 3, 4]
            assert [message.payload for message in await other.inbox()] == ["short"] * 5

    soon(scenario())


class Reading:
    """A transaction that counts the bytes of the cells that it reads."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self.cells = self
        self.size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transaction, name)

    def get(self, kind: str, key: str) -> bytes | None:
        value = self._transaction.cells.get(kind, key)
        self.size += len(value or b"")
        return value

    def page(self, kind: str, after: str = "", limit: int = 1_000) -> list[tuple[str, bytes]]:
        found = self._transaction.cells.page(kind, after, limit)
        self.size += sum(len(value) for _, value in found)
        return found


def test_a_long_inbox_costs_its_senders_and_those_who_list_agents_little(url: str) -> None:
    def cost(transaction: Transaction) -> tuple[int, int]:
        sending, listing = Reading(transaction), Reading(transaction)
        Inboxes(AgentOperations(cast("Transaction", sending), Policy())).check_recipient("acme", "reader")
        AgentOperations(cast("Transaction", listing), Policy()).list("acme")
        return sending.size, listing.size

    async def scenario() -> None:
        async with Engine.open(url) as engine, Coordinator(engine) as coordinator:
            sender = await coordinator.register("sender", "acme")
            reader = await coordinator.register("reader", "acme")
            for number in range(50):
                await sender.send(to="reader", payload=[number, "x" * 20_000])
            sending, listing = engine.store.write(cost)
            assert sending < 1_000
            assert listing < 20_000
            for message in await reader.inbox():
                await message.done()
            assert await reader.inbox() == []
            left = engine.store.read(lambda one: [*LETTER_BODIES.all(one), *INBOXES.all(one)])
            assert left == []

    soon(scenario())


def test_an_inbox_of_an_earlier_version_is_counted_and_read(url: str) -> None:
    def planted(transaction: Transaction) -> None:
        for number in range(1, 4):
            letter = AgentLetter(f"m{number}", "sender", ["x" * 20_000, number], transaction.wall_us)
            LETTERS.put(transaction, letter, "acme", "reader", number)

    async def scenario() -> None:
        async with Engine.open(url) as engine, Coordinator(engine) as coordinator:
            sender = await coordinator.register("sender", "acme")
            reader = await coordinator.register("reader", "acme")
            engine.store.write(planted)
            await sender.send(to="reader", payload=["y", 4])
            assert engine.store.read(INBOXES.all)[0][1] == 4
            assert [message.payload[1] for message in await reader.inbox()] == [1, 2, 3, 4]

    soon(scenario())


def test_an_inbox_waits_for_messages(url: str) -> None:
    async def scenario() -> None:
        async with Engine.open(url) as engine, Coordinator(engine) as one, Coordinator(engine) as two:
            sender, reader = await one.register("sender", "acme"), await two.register("reader", "acme")

            seen: list[Any] = []

            async def read() -> None:
                async for message in reader.inbox():
                    seen.append(message.payload)
                    await message.done()
                    if len(seen) == 3:
                        break

            reading = asyncio.create_task(read())
            for number in range(3):  # each one comes to a reader that waits
                await eventually(lambda: len(seen) == number)  # noqa: B023 - awaited at once
                await sender.send(to="reader", payload=number)
            async with asyncio.timeout(HANG_GUARD_S):
                await reading
            assert seen == [0, 1, 2]

    soon(scenario())


def test_a_message_to_nobody_bounces_at_once(url: str) -> None:
    async def scenario() -> None:
        async with working(url) as engine, Coordinator(engine) as coordinator:
            sender = await coordinator.register("sender", "acme")
            await coordinator.register("reader", "bolt")
            with pytest.raises(Bounced, match="no agent of this name") as bounced:
                await sender.send(to="reader", payload=1)
            assert bounced.value.recipient == "reader"
            with pytest.raises(InvalidMessage, match="to must be the name of an agent"):
                await sender.send(to=None, payload=1)  # type: ignore[arg-type]
            [event] = events_of(engine, "bounced")
            assert (event.error_type, event.detail["recipient"]) == ("Bounced", "reader")
            handle = await engine.submit(
                type="agent_message", org_id="acme", agent_id="sender", payload={"to": "reader", "body": 1}
            )
            with pytest.raises(MessageFailed) as failed:
                await handle.result(timeout_s=HANG_GUARD_S)
            assert failed.value.error_history[-1]["error_type"] == "Bounced"
            assert len(failed.value.error_history) == 1

    soon(scenario())


@pytest.mark.statement("type-agent-message")
def test_a_submitted_agent_message_reaches_the_inbox(url: str) -> None:
    async def scenario() -> None:
        async with working(url) as engine, Coordinator(engine) as coordinator:
            reader = await coordinator.register("reader", "acme")
            handle = await engine.submit(
                type="agent_message", org_id="acme", user_id="ada", payload={"to": "reader", "body": {"a": 1}}
            )
            await handle.result(timeout_s=HANG_GUARD_S)
            [message] = await reader.inbox()
            assert (message.payload, message.message_id) == ({"a": 1}, handle.message_id)

    soon(scenario())


def test_a_paused_coordinator_goes_on(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postroom.engine.agents.coordinator.BEAT_S", 0.05)

    async def scenario() -> None:
        async with working(url) as engine, Coordinator(engine) as coordinator:
            await coordinator.register("planner", "acme")
            await coordinator.write(lambda agents: _forget_coordinator(agents, coordinator.id))
            await eventually(lambda: engine.blocking.agents()[0].coordinator == coordinator.id)

    def _forget_coordinator(agents: AgentOperations, coordinator: str) -> None:
        Leases(agents).stop(coordinator)
        assert Leases(agents).take_over("other") == [coordinator]

    soon(scenario())


def test_a_purge_removes_chunks(url: str) -> None:
    async def scenario() -> None:
        async with working(url) as engine, Coordinator(engine) as coordinator:
            agent = await coordinator.register("planner", "acme")
            await agent.request(type="model_call", payload={"words": ["a"] * 300}, timeout_s=HANG_GUARD_S)
            assert engine.store.read(PARTS.all)
            records = engine.store.find(Listing(limit=1_000))
            await engine.core.commits.write(lambda operations: operations.forget(records))
            assert not engine.store.read(PARTS.all)

    soon(scenario())


def test_the_bytes_of_a_stream_are_limited(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postroom.engine.work.context.STREAM_BYTES_MAX", 100)

    async def scenario() -> None:
        async with working(url) as engine, Coordinator(engine) as coordinator:
            agent = await coordinator.register("planner", "acme")
            with pytest.raises(MessageFailed, match="at most 100 bytes"):
                await agent.request(
                    type="model_call",
                    payload={"words": ["long " * 10] * 3},
                    max_retries=0,
                    timeout_s=HANG_GUARD_S,
                )

    soon(scenario())


def test_a_damaged_answer_ends_with_an_error_and_holds_up_no_other_agent(url: str) -> None:
    async def scenario() -> None:
        async with working(url) as engine, Coordinator(engine) as coordinator:
            first = await coordinator.register("a", "acme")
            other = await coordinator.register("b", "acme")
            opened = gate("damage")
            stream = first.stream(
                type="model_call", payload={"words": ["x"], "fails": 1, "gate": "damage"}, max_retries=0
            )
            parts = [await anext(stream) for _ in range(3)]
            assert parts[-1].type == "stream_chunk"
            *_, (key, _) = engine.store.read(PARTS.all)
            engine.store.write(lambda transaction: transaction.cells.put(PARTS.name, key, b"[{"))
            again = await coordinator.register("a", "acme")
            async with asyncio.timeout(HANG_GUARD_S):
                damaged = [part async for part in again.resume()][-1]
            assert damaged.error is not None
            assert damaged.error["type"] == "AnswerDamaged"
            assert await other.request(type="tool_call", payload={"n": 1}, timeout_s=HANG_GUARD_S) == {
                "got": 1
            }
            opened.set()

    asyncio.run(scenario())


def test_a_damaged_answer_bounces_like_others(url: str) -> None:
    async def scenario() -> None:
        async with working(url) as engine:
            handle = await engine.submit(
                type="model_call", org_id="acme", agent_id="gone", payload={"words": ["x"]},
                created_by={"type": "user", "id": "ada"},
            )  # fmt: skip
            await handle.result(HANG_GUARD_S)
            *_, (key, _) = engine.store.read(PARTS.all)

            def damage(transaction: Transaction) -> None:
                transaction.cells.put(PARTS.name, key, b"[{")
                bounce(AgentOperations(transaction, engine.policy), "acme", "gone", handle.message_id, "late")

            engine.store.write(damage)
            [bounced] = await engine.bounces.list()
            assert bounced.answer["error"]["type"] == "AnswerDamaged"

    asyncio.run(scenario())


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.statement("json-refused")
@pytest.mark.parametrize("chunk", [float("nan"), {"a": float("inf")}, nested(300), "\ud800", {1, object()}])
def test_a_chunk_that_json_cannot_hold_fails_its_message(chunk: Any) -> None:
    async def scenario() -> None:
        async with Engine.open("memory://", Policy(retries={"tool_call": Retry(max_retries=0)})) as engine:

            @engine.handler("tool_call")
            async def send(_message: Any, ctx: Any) -> None:
                await ctx.stream(chunk)

            worker = asyncio.create_task(engine.run())
            async with Coordinator(engine) as coordinator:
                agent = await coordinator.register("a", "acme")
                with pytest.raises(MessageFailed, match="a chunk cannot be written as JSON"):
                    await agent.request(type="tool_call", payload={}, timeout_s=HANG_GUARD_S)
            await engine.stop()
            await worker

    asyncio.run(scenario())


@pytest.mark.parametrize("report", [(float("nan"),), ("half",), (0.5, 7), (0.5, "\ud800")])
def test_a_progress_report_that_does_not_fit_fails_its_message(report: Any) -> None:
    async def scenario() -> None:
        async with Engine.open("memory://", Policy(retries={"tool_call": Retry(max_retries=0)})) as engine:

            @engine.handler("tool_call")
            async def send(_message: Any, ctx: Any) -> None:
                await ctx.progress(*report)

            worker = asyncio.create_task(engine.run())
            with pytest.raises(MessageFailed, match="progress"):
                await engine.request(type="tool_call", org_id="acme", payload={}, timeout_s=HANG_GUARD_S)
            await engine.stop()
            await worker

    asyncio.run(scenario())
