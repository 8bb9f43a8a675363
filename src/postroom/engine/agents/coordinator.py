"""`Coordinator`: hands the answers of requests to the agents of one server.

Rule 1: one loop reads the answers for all agents, in one read of the store. An agent has no task of its own.
Rule 2: a request is closed only after its last part was handed over. Until then another coordinator, or a
        restarted agent, gets the answer.
Rule 3: a coordinator keeps only the positions of its readers in memory. Everything that must survive a crash
        is in the store.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from msgspec.structs import replace

from postroom.engine.agents.agent import PARTS_WAITING_MAX, Agent, Reader
from postroom.engine.agents.agent_operations import AgentInfo, AgentOperations, Asked, NewParts
from postroom.engine.agents.agent_sweeps import Swept, sweep
from postroom.engine.agents.leases import LEASE_S, Leases
from postroom.engine.rules.cells import AgentEntry
from postroom.errors import AgentReplaced, Bounced, CoordinatorStopped, PostroomError, Unavailable
from postroom.system.log import library_log

if TYPE_CHECKING:
    from postroom.engine.core import EngineCore
    from postroom.engine.global_queue import GlobalQueue

T = TypeVar("T")

_log = library_log("postroom.engine")

BEAT_S: Final = LEASE_S / 3
SWEEP_S: Final = 5.0
PAUSE_S: Final = 0.1  # after an error of a background loop


class Coordinator:
    """The agents of this process, and the loop that hands them their answers.

    async with Coordinator(engine) as coordinator:
        agent = await coordinator.register("planner", "acme")
        print(await agent.request(type="model_call", payload={"prompt": "hello"}, timeout_s=60))
    """

    def __init__(self, engine: "GlobalQueue", *, name: str = "") -> None:
        self.core: EngineCore = engine.core
        self.name = name or socket.gethostname()[:64]
        """The name of the server. Two coordinators of the same name may overlap during an upgrade."""
        self.id = f"{self.name}-{os.getpid()}-{os.urandom(3).hex()}"
        self.epoch = 0
        """A number that is larger than the epoch of every earlier coordinator. Each part carries it."""
        self._agents: dict[tuple[str, str], Agent] = {}
        self._readers: set[Reader] = set()
        self._closing: list[tuple[Agent, str]] = []
        """Requests whose answer was handed over, and which the store still has as open."""
        self._acknowledging = asyncio.Event()
        self._one_acknowledges = asyncio.Lock()
        self._woken = asyncio.Event()
        self._news: asyncio.Future[None] | None = None
        self._wakeups = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._stack = ExitStack()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False

    # ---- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin the lease, and start the loops."""
        self._loop = asyncio.get_running_loop()
        info = await self.write(lambda agents: Leases(agents).start(self.id, self.name))
        self.epoch = info.epoch
        self._stack.enter_context(self.core.wakeups.listening_for_answers(self._count_wakeup))
        loops = (self._distribute, self._acknowledge, self._beat)
        self._tasks = [asyncio.create_task(self._kept_running(each)) for each in loops]

    async def stop(self) -> None:
        """Close the requests whose answers were handed over, and end the lease. Open requests stay open."""
        if self._stopped:
            return
        self._stopped = True
        self._stack.close()
        for reader in list(self._readers):
            self._fail(reader, CoordinatorStopped(reader.message_id))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(PostroomError):
            await self._acknowledge_all()
            await self.write(lambda agents: Leases(agents).stop(self.id))
        self._wake_inboxes()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def _kept_running(self, loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await loop()
            except Exception as error:  # noqa: BLE001 - whatever it is, agents must go on
                level = logging.WARNING if isinstance(error, Unavailable) else logging.ERROR
                _log.log(level, "a loop of coordinator %s failed and is started again: %s", self.id, error)
                await asyncio.sleep(PAUSE_S)

    async def write(self, work: Callable[[AgentOperations], T]) -> T:
        """Run operations on agents in a commit."""
        policy = self.core.policy
        return await self.core.commits.write_raw(
            lambda transaction: work(AgentOperations(transaction, policy)), makes_room=True
        )

    async def read(self, work: Callable[[AgentOperations], T]) -> T:
        """Run operations on agents on one committed state."""
        commits = self.core.commits
        return await commits.read(
            lambda operations: work(AgentOperations(operations.transaction, commits.policy))
        )

    # ---- agents --------------------------------------------------------------------------------

    async def register(self, agent_id: str, org_id: str, *, is_local: bool = True) -> Agent:
        """Register an agent. An earlier registration of the same id, anywhere, is fenced from now on.

        An agent that is not `is_local` runs elsewhere and has to send heartbeats: see `Agent.beat`.
        """
        if self._stopped or not self.epoch:
            raise CoordinatorStopped("")
        entry = await self.write(lambda agents: agents.register(org_id, agent_id, self.id, is_local=is_local))
        return self._attached(org_id, agent_id, entry)

    async def attach(self, agent_id: str, org_id: str, session: int) -> Agent:
        """Serve an agent that is registered already, here or at another coordinator."""
        known = self._agents.get((org_id, agent_id))
        if known is not None and known.session == session:
            return known
        entry = await self.write(lambda agents: agents.beat(org_id, agent_id, session, self.id))
        return self._attached(org_id, agent_id, entry)

    def served(self, org_id: str, agent_id: str) -> Agent | None:
        """An agent that is served here; None when it is not."""
        return self._agents.get((org_id, agent_id))

    def _attached(self, org_id: str, agent_id: str, entry: AgentEntry) -> Agent:
        agent = self._agents[org_id, agent_id] = Agent(
            self, org_id, agent_id, entry.session, is_local=entry.is_local
        )
        self.look()  # readers of an earlier registration learn that they are replaced
        return agent

    def forget(self, agent: Agent) -> None:
        """Stop serving an agent."""
        if self._agents.get((agent.org_id, agent.agent_id)) is agent:
            del self._agents[agent.org_id, agent.agent_id]

    async def agents(self, org_id: str | None = None) -> list[AgentInfo]:
        """The agents of an organization, or of all, wherever they are registered."""
        await self._acknowledge_all()  # so that an answer that was just handed over is not listed
        return await self.read(lambda agents: agents.list(org_id))

    # ---- readers -------------------------------------------------------------------------------

    @property
    def wakeups(self) -> int:
        """The number of wake-ups so far. Each one means that answers may have come."""
        return self._wakeups

    def add_reader(self, agent: Agent, message_id: str, wakeups: int | None = None) -> Reader:
        """Begin to read an answer.

        `wakeups` is the count before the submit: when no wake-up came since, a read is saved.
        """
        if self._stopped:
            raise CoordinatorStopped(message_id)
        reader = Reader(agent, message_id)
        self._readers.add(reader)
        agent.reading[message_id] += 1
        if wakeups != self._wakeups:
            self._woken.set()
        return reader

    def remove_reader(self, reader: Reader) -> None:
        """Stop reading an answer."""
        if reader in self._readers:
            self._readers.remove(reader)
            reader.agent.reading[reader.message_id] -= 1
            if not reader.agent.reading[reader.message_id]:
                del reader.agent.reading[reader.message_id]

    def handed_over(self, agent: Agent, message_id: str) -> None:
        """The agent has the last part of an answer: close the request soon."""
        if message_id not in agent.reading:  # otherwise another reader of the same answer closes it
            self._closing.append((agent, message_id))
            self._acknowledging.set()

    def _fail(self, reader: Reader, error: Exception) -> None:
        reader.error = error
        self.remove_reader(reader)
        reader.wake()

    # ---- the loops -----------------------------------------------------------------------------

    def _count_wakeup(self) -> None:
        """Wake the loop that reads answers. Called from any thread."""
        self._wakeups += 1
        with suppress(RuntimeError):  # the loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._woken.set)

    def look(self) -> None:
        """Have the loop read answers as soon as it can."""
        self._woken.set()

    def _wake_inboxes(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
        self._news = None

    async def wait_for_news(self, timeout_s: float) -> None:
        """Return when a message or an answer may have come for an agent, or after `timeout_s`."""
        if self._stopped:
            raise CoordinatorStopped("")
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._news], timeout=timeout_s)

    async def _distribute(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.core.wakeups.look_again_s):
                    await self._woken.wait()
            self._woken.clear()
            self._wake_inboxes()
            readers = [reader for reader in self._readers if len(reader.parts) < PARTS_WAITING_MAX]
            if readers:
                await self._look(readers)

    async def _look(self, readers: list[Reader]) -> None:
        """Read the answers for all readers at once, and hand out what is new."""
        asked = [
            Asked(agent.org_id, agent.agent_id, agent.session, reader.message_id, reader.position)
            for reader in readers
            for agent in (reader.agent,)
        ]
        found = await self.read(lambda agents: agents.answers(asked))
        for reader, answer in zip(readers, found, strict=True):
            if reader in self._readers:
                self._give(reader, answer)

    def _give(self, reader: Reader, answer: NewParts) -> None:
        if answer.is_replaced:
            self._fail(reader, AgentReplaced(reader.agent.agent_id))
        elif answer.is_closed:
            reason = f"the answer to {reader.message_id} was handed over or bounced before"
            self._fail(reader, Bounced(reader.agent.agent_id, reason))
        elif answer.parts:
            reader.position = answer.parts[-1][0]
            reader.parts.extend(replace(part, epoch=self.epoch) for _, part in answer.parts)
            if answer.has_more:
                self._woken.set()
            reader.wake()

    async def _acknowledge(self) -> None:
        while True:
            await self._acknowledging.wait()
            self._acknowledging.clear()
            await self._acknowledge_all()

    async def _acknowledge_all(self) -> None:
        async with self._one_acknowledges:
            await self._acknowledge_closing()

    async def _acknowledge_closing(self) -> None:
        closing, self._closing = self._closing, []
        if not closing:
            return
        by_agent: dict[Agent, list[str]] = {}
        for agent, message_id in closing:
            by_agent.setdefault(agent, []).append(message_id)

        def work(agents: AgentOperations) -> None:
            for agent, message_ids in by_agent.items():
                if agents.is_held(agent.org_id, agent.agent_id, agent.session):
                    agents.acknowledge(agent.org_id, agent.agent_id, agent.session, message_ids)

        try:
            await self.write(work)
        except Unavailable:
            self._closing = closing + self._closing
            self._acknowledging.set()
            raise
        for agent, message_ids in by_agent.items():
            agent.shown.difference_update(message_ids)

    async def _beat(self) -> None:
        """Renew the lease, take over the agents of lost coordinators, and sweep every `SWEEP_S`."""
        swept_at, after = time.monotonic(), Swept()
        while True:
            await self.write(self._renew)
            if not after.is_complete or time.monotonic() >= swept_at + SWEEP_S:
                if after.is_complete:
                    swept_at = time.monotonic()
                # A commit of its own: a sweep that fails must not cost the lease.
                after = await self.write(partial(sweep, after=after))
            await asyncio.sleep(BEAT_S)

    def _renew(self, agents: AgentOperations) -> None:
        leases = Leases(agents)
        if not leases.renew(self.id, self.epoch, self.name):
            for agent in list(self._agents.values()):
                if agent.is_local:
                    leases.reclaim(self.id, agent.org_id, agent.agent_id, agent.session)
        leases.take_over(self.id)
