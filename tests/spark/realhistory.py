"""A history of all contracts, by real parts: an engine, a store of tasks, files and a mail server."""

import signal
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import pytest

from postroom import (
    Breaker,
    Bus,
    Mail,
    Organization,
    Overloaded,
    Policy,
    Queue,
    Retry,
    Tasks,
    ValidationError,
)
from postroom.core.lifecycle.lifecycle import ENDED
from postroom.engine.agents.agent_operations import AgentOperations
from postroom.engine.agents.agent_sweeps import Swept, sweep
from postroom.engine.agents.inboxes import Inboxes
from postroom.engine.rules.outcomes import Outcome
from postroom.engine.work.handlers import ended
from postroom.pipeline.times import DAY_US
from postroom.server.folder.shipping import Sources, opened
from postroom.settings import AuditSettings
from tests.engines import EngineUnderTest
from tests.integration.mailservers import serving
from tests.integration.test_mail_events import everything
from tests.spark.segmentfiles import sealed_segments
from tests.waiting import until

T = TypeVar("T")

BEFORE_MIDNIGHT_S = (24 - 2) * 3_600 - 40 * 60 - 180
"""From the first moment of the clock, 2:40, to three minutes before midnight."""
DAY_S = 86_400
TOKENS_IN, TOKENS_OUT = 100, 20
POLICY = Policy(
    retries={"tool_call": Retry(max_retries=1)},
    breakers={"slack": Breaker(failures=3, cooldown_s=60)},
    organizations={"slow": Organization(rate_per_s=1)},
    tokens={
        "providers": {
            "p": {"models": {"small": {"tokens_per_minute": 10**6}, "tiny": {"tokens_per_minute": 100}}}
        },
        "tiers": [0.1, 0.1, 0.4, 0.4],
    },
)


class World:
    """An engine in a SQLite file, and messages that meet every rule of it, before and after midnight."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder}/queue.db"
        self.engine = EngineUnderTest(self.url, POLICY)
        self.engine.clock.advance(BEFORE_MIDNIGHT_S)
        self.slack_is_down = True
        self.spent: Counter[tuple[str, str]] = Counter()
        self._register()

    def _register(self) -> None:
        engine = self.engine.engine

        @engine.handler("model_call")
        async def think(message: Any, ctx: Any) -> None:
            ctx.usage(model="small", tokens_in=TOKENS_IN, cost_usd=0.1)
            ctx.usage(tokens_out=TOKENS_OUT, cost_usd=0.2)  # 0.1 + 0.2 is a little more than 0.3
            self.spent[message.org_id, message.goal_id] += 1

        @engine.handler("tool_call", service="slack")
        async def call(_message: Any, _ctx: Any) -> None:
            if self.slack_is_down:
                raise ConnectionError("slack does not answer")

        @engine.handler("memory_save")
        async def save(_message: Any, ctx: Any) -> None:
            if ctx.attempt == 1:
                raise ValidationError("not a node")

    def live(self) -> None:
        """Messages with every end, and everything that can hold them up on the way."""
        for org_id in ("acme", "zen"):
            for priority in range(4):
                self.engine.submit(
                    type="model_call", org_id=org_id, priority=priority, goal_id=f"g{priority % 2}",
                    agent_id="a1", user_id="u1", tokens=1_000, models=["small"],
                )  # fmt: skip
        self.engine.clock.advance(0.2)
        self.engine.run_all()
        self._promotion()
        self._outage()
        self._order_and_pause()
        self._ends()
        self._crashes()
        self._deferral_by_the_holder()
        self._shortage()
        self._conflict()
        self._agents()

    def _promotion(self) -> None:
        self.engine.submit(type="model_call", priority=3, goal_id="g3")
        self.engine.clock.advance(31)
        self.engine.run_all()

    def _outage(self) -> None:
        """Three failures open the breaker. The rest is deferred, and one message dies of its last retry."""
        self.engine.submit_many(3, type="tool_call", org_id="zen", goal_id="g4")
        self.engine.run_all()
        self.engine.submit_many(2, type="tool_call", org_id="zen", goal_id="g4", max_retries=0)
        self.engine.clock.advance(5)
        self.engine.run_all()
        self.engine.clock.advance(60)
        self.engine.run(slots=1)  # the probe fails, and is a dead letter
        self.slack_is_down = False
        for _ in range(3):
            self.engine.clock.advance(61)
            self.engine.run_all()
        dlq = self.engine.engine.dlq
        assert self.engine.wait(dlq.replay(type="tool_call")).replayed == 1
        self.engine.run_all()

    def _order_and_pause(self) -> None:
        wait, engine = self.engine.wait, self.engine.engine
        self.engine.submit_many(3, type="model_call", ordering_key="k", goal_id="g5")
        self.engine.run_all()
        wait(engine.pause(type="model_call"))
        self.engine.submit(type="model_call", goal_id="g5")
        self.engine.run_all()
        wait(engine.resume(type="model_call"))
        self.engine.run_all()

    def _ends(self) -> None:
        now = datetime.fromtimestamp(self.engine.clock.wall_us() / 1e6, UTC)
        self.engine.submit(type="memory_save", goal_id="g6")  # a dead letter at once
        self.engine.submit(type="agent_spawn", goal_id="g6")  # the same: there is no handler
        gone = self.engine.submit(type="model_call", goal_id="g6", delay_s=100)
        self.engine.wait(gone.cancel())
        self.engine.submit(type="model_call", goal_id="g6", delay_s=5, expires_at=now + timedelta(seconds=9))
        self.engine.run_all()
        self.engine.clock.advance(10)
        self.engine.run_all()
        for _ in range(2):
            self.engine.submit(type="model_call", idempotency_key="once", goal_id="g6")
        self.engine.submit(org_id="slow", type="model_call", goal_id="g7")
        with pytest.raises(Overloaded):
            self.engine.submit(org_id="slow", type="model_call", goal_id="g7")
        self.engine.run_all()

    def _crashes(self) -> None:
        """Each claim is a process that dies with the only message that it runs."""
        self.engine.submit(type="agent_message", org_id="zen", goal_id="g8")
        for _ in range(POLICY.poison_crashes):
            [held] = self.engine.claim()
            self.engine.finish(ended(held, "crashed", "the process of the handler died with signal 9"))
        assert not self.engine.claim()  # it is quarantined

    def _deferral_by_the_holder(self) -> None:
        self.engine.submit(type="model_call", goal_id="g9")
        [held] = self.engine.claim()
        record = held.record
        self.engine.finish(
            Outcome(kind="deferred", message_id=record.message_id, lease=record.lease, delay_s=5)
        )
        self.engine.clock.advance(6)
        self.engine.run_all()

    def _shortage(self) -> None:
        """One message borrows from P3, because another one waits for it; the next one has to wait."""
        facts = {"type": "model_call", "org_id": "zen", "agent_id": "a2", "goal_id": "g9"}
        first = self.engine.submit(**facts, priority=2, tokens=60, models=["tiny"])
        self.engine.submit_many(4, **facts, parent_message_id=first.message_id)
        self.engine.submit(**facts, priority=2, tokens=20, models=["tiny"])
        self.engine.run_all()
        self.engine.clock.advance(61)
        self.engine.run_all()

    def _conflict(self) -> None:
        """Two steps of a goal work on one target: the second one waits for the first one."""
        self.engine.wait(self.engine.engine.goals.start("acme", "g2"))
        self.engine.submit_many(2, type="tool_call", goal_id="g2", operation={"target": "page"})
        self.engine.run_all()

    def _agents(self) -> None:
        """An agent fetches one answer and gets a message. It dies, and its second answer bounces."""
        entry = self._as_agent(lambda one: one.register("acme", "planner", "c1", is_local=False))
        core = self.engine.engine.core
        facts = {"type": "tool_call", "org_id": "acme", "agent_id": "planner", "goal_id": "g2"}
        message: dict[str, Any] = {**facts, "payload": {}}
        asked = [
            self._as_agent(
                lambda one: one.request(
                    "planner", entry.session, core.registry.prepare(message, POLICY, core.store.wall_us())
                )
            )[0]
            for _ in range(2)
        ]
        self.engine.run_all()
        self._as_agent(lambda one: one.acknowledge("acme", "planner", entry.session, asked[:1]))
        self._as_agent(
            lambda one: Inboxes(one).deliver("acme", "planner", "boss", asked[0], {"text": "well done"})
        )
        self.engine.clock.advance(DAY_S + 1)
        self._as_agent(lambda one: sweep(one, Swept()))

    def _as_agent(self, work: Callable[[AgentOperations], T]) -> T:
        store = self.engine.engine.store
        return store.write(lambda transaction: work(AgentOperations(transaction, POLICY)))

    def count(self) -> dict[str, dict[str, int]]:
        """How many messages of each organization have which end. None is left open."""
        organizations = self.engine.wait(self.engine.engine.status()).organizations
        return {
            org_id: {state.lower(): n for state, n in one.states.items() if state in ENDED}
            for org_id, one in organizations.items()
        }


def others(folder: Path) -> Sources:
    """A bus, a queue, a store of tasks and a mail server."""
    for number in range(3):
        Bus(folder / "bus.yaml").append(type="FACT", project_id="p", body=f"fact {number}")
    with closing(Queue(folder / "queue")) as queue:
        for number in range(3):
            queue.send("ask", f"body {number}", to="ada", session="s", sender="bob")
        queue.poll("ada", session="s")
    with Tasks.open(f"sqlite:///{folder}/queue.db") as tasks:
        for number in range(4):
            tasks.enqueue(agent="ada", payload={"n": number}, type="issue")
        for number, task in enumerate(tasks.claim(agent="ada", limit=3, worker="w1")):
            if number % 2:
                tasks.fail(task.task_id, task.lease, "no route", error_type="IOError")
            else:
                tasks.complete(task.task_id, task.lease, "done")
    mail(folder / "mail")
    return Sources(
        (f"sqlite:///{folder}/queue.db",), (folder / "queue",), (folder / "bus.yaml",), (folder / "mail",)
    )


def mail(folder: Path) -> None:
    """Every event of a mail server, messages of every priority, a crash, and more messages after it."""
    with serving(folder, "--receipts", "--dead-letter-after", "1") as server:
        everything(server)
        server.end(signal.SIGKILL)
        server.start()
        with Mail(server.url, name="ada") as client:
            box = client.create("all.read", ttl_s=60, public=True)
            numbers = [
                client.send(box, f"{word} news", priority=word)
                for word in ("critical", "urgent", "normal", "low")
            ]
            assert len(client.messages(box)) == len(numbers)
            client.delete(box, numbers[0])
        until(lambda: server.events()[-1]["kind"] == "deleted")


class RealHistory(NamedTuple):
    """What really happened, and the audit stream of it as `postroom audit ship --once` writes it."""

    world: World
    stream: Path
    published: str
    """The URL of its copy, which the shipper has published."""

    def lines(self) -> list[bytes]:
        """All lines. Those of contracts that have no clock of a test are moved: midnight is their middle."""
        found = [
            msgspec.json.decode(text)
            for segment in sealed_segments(self.stream)
            for text in segment.path.read_bytes().splitlines()
        ]
        times = defaultdict(list)
        for event in found:
            times[event["source"]].append(event["ts_us"])
        midnight_us = -(-times[self._engine(found)][0] // DAY_US) * DAY_US
        for event in found:
            if event["contract"] != "engine":
                own = times[event["source"]]
                event["ts_us"] += midnight_us - sorted(own)[len(own) // 2]
        return [msgspec.json.encode(event) for event in found]

    @staticmethod
    def _engine(found: list[dict[str, Any]]) -> str:
        return str(next(event["source"] for event in found if event["contract"] == "engine"))


def lived(folder: Path) -> RealHistory:
    """A history in a folder. The caller closes the engine of its world."""
    world = World(folder)
    world.live()
    own = others(folder / "others")
    sources = Sources((world.url, *own.stores), own.queue_roots, own.buses, own.mail)
    published = (folder / "published").as_uri()
    with opened(folder / "audit", sources, AuditSettings(publish=published)) as shipping:
        shipping.once()
    return RealHistory(world, folder / "audit", published)
