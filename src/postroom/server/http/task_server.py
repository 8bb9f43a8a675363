"""The parts that all requests of a task server share while it runs.

Rule 1: nothing blocks the event loop. Store reads run in reader threads, writes in the writer thread, and
        bus files are used in bus threads.
Rule 2: neither one token nor one organization can use all threads, long polls, streams or buffer bytes.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from postroom.calls.fields import LEASE_S_MAX
from postroom.contracts.tasks.task_input import checked_terms
from postroom.contracts.tasks.tasks import Tasks
from postroom.core.health.health import HealthFacts
from postroom.engine import Coordinator
from postroom.engine.agents.agent import Agent
from postroom.engine.inspection import status_of
from postroom.engine.rules.operations import Operations
from postroom.errors import PostroomError
from postroom.goals.engine import Engine
from postroom.server.access.rates import RateLimits
from postroom.server.access.refusal_events import RefusalEvents
from postroom.server.access.registry import Agents, Identity
from postroom.server.access.registry_file import CHECK_EVERY_S
from postroom.server.access.shares import Shares
from postroom.server.access.turns import SharedThreads
from postroom.server.folder.buses import Buses
from postroom.server.harness.harness import Harness
from postroom.server.http.exchange import HttpRequest
from postroom.server.http.long_polls import WAITERS_MAX, ResultPolls, TaskPolls
from postroom.server.http.writer import StoreWriter
from postroom.server.telemetry.event_counts import EventCounts
from postroom.server.telemetry.server_log import ServerLog
from postroom.server.up.parts import part_states

if TYPE_CHECKING:
    from postroom.server.telemetry.engine_spans import TaskSpans

T = TypeVar("T")

BUS_THREADS = 8  # apart from the readers: a bus locked by another process delays no read of the store
BUS_THREADS_A_TOKEN_MAX = 2
READERS = 2  # reader threads; a store reads for that many at once
READERS_A_TOKEN_MAX = 1
TOKEN_THREADS = 2  # each change is an fsync under the lock of a file
TOKEN_THREADS_A_TOKEN_MAX = 1
DECODERS = 2  # threads that decode long bodies
DECODERS_A_TOKEN_MAX = 1
DECODED_AT_ONCE_BYTES = 256 * 1024  # bytes that the event loop decodes itself
STREAMS_MAX = 256
STREAMS_A_TOKEN_MAX = 32
OPERATOR_STREAMS_RESERVE = 32
POLLS_A_TOKEN_MAX = 1_000
OPERATOR_POLLS_RESERVE = 100
BODY_BYTES_MAX = 512 * 1024 * 1024  # of all bodies that are arriving or being handled
BODY_BYTES_A_TOKEN_MAX = 64 * 1024 * 1024
BODY_BYTES_RESERVE = 128 * 1024 * 1024
TERMS_KEPT_MAX = 1_024
HEALTH_CHECK_S = 0.5
EXPIRED_EVERY_S = 5.0  # seconds between checks for open calls whose tokens ended by their time alone
COUNT_EVERY_S = 1.0
SCRAPE_LATE_S = 300.0  # without a scrape, after which events are not counted in between
FLOW_WAIT_S = 1.0  # after it, `/health` answers with what the last read found


class OpenCalls:
    """Calls that stay open: long polls and streams. They end when their token or session ends.

    A token that another process revokes gives back what its open calls hold, too.
    """

    def __init__(self, agents: Agents, loop: asyncio.AbstractEventLoop) -> None:
        self._agents = agents
        self._loop = loop
        self._open: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._version = agents.version
        self._checked = loop.time()

    @contextmanager
    def joined(self, is_allowed: Callable[[], bool]) -> "Iterator[asyncio.Future[None]]":
        """A future that is done when a call is no longer allowed."""
        ended = self._loop.create_future()
        self._open[ended] = is_allowed
        if self._timer is None:
            self._timer = self._loop.call_later(CHECK_EVERY_S, self._look)
        try:
            yield ended
        finally:
            del self._open[ended]

    def _look(self) -> None:
        """End the calls of ended tokens, if any token was changed. Nothing is read while no call is open."""
        self._timer = self._loop.call_later(CHECK_EVERY_S, self._look) if self._open else None
        with suppress(PostroomError):  # a file that cannot be read now: every call of a client says so
            version = self._agents.version
            if version != self._version or self._loop.time() >= self._checked + EXPIRED_EVERY_S:
                self.check()
                self._version = version

    def check(self) -> None:
        """End the calls that are no longer allowed."""
        self._checked = self._loop.time()
        for ended, is_allowed in self._open.items():
            if not ended.done() and not is_allowed():
                ended.set_result(None)


class TaskServer:
    """The store, the harness, the threads and the shares of one server."""

    def __init__(
        self,
        tasks: Tasks,
        agents: Agents,
        harness: Harness,
        buses: Buses,
        server_log: ServerLog,
        engine: Engine,
        token_rate: float = 0.0,
    ) -> None:
        self.tasks = tasks
        self.engine = engine
        """The global queue, in the store of the tasks."""
        self.ids = tasks.store.read(lambda transaction: transaction.ids)
        """Covers the numbers of leases."""
        self.agents = agents
        self.harness = harness
        self.buses = buses
        self.server_log = server_log
        self.openapi_json: Callable[[], bytes] = lambda: b"{}"
        self.lease_s_max = LEASE_S_MAX
        """Longer leases are shortened to this; the reply says how long the lease is."""
        self.task_spans: TaskSpans | None = None
        """None without telemetry."""
        self.requests: Counter[tuple[str, int]] = Counter()
        self._event_counts = EventCounts(tasks.store)
        self._counting: asyncio.Task[None] | None = None
        self._scraped = 0.0
        self._loop = asyncio.get_running_loop()
        self._readers = SharedThreads("postroom-reader", READERS, READERS_A_TOKEN_MAX)
        self._bus_threads = SharedThreads("postroom-bus", BUS_THREADS, BUS_THREADS_A_TOKEN_MAX)
        self._token_threads = SharedThreads("postroom-tokens", TOKEN_THREADS, TOKEN_THREADS_A_TOKEN_MAX)
        self._decoders = SharedThreads("postroom-decoder", DECODERS, DECODERS_A_TOKEN_MAX)
        self._health_thread = ThreadPoolExecutor(1, "postroom-health")
        self._health_checked = -HEALTH_CHECK_S
        self._health: tuple[dict[str, str], HealthFacts] = ({}, HealthFacts())
        self._flow = HealthFacts()
        self._flow_checked = 0.0
        self._flow_read: asyncio.Future[HealthFacts] | None = None
        self._coordinator: Coordinator | None = None
        self._coordinator_starts = asyncio.Lock()
        self._beats: dict[tuple[str, str], float] = {}
        """When each agent was last noted as alive. Tokens limit how many there are."""
        self.writer = StoreWriter(tasks)
        self.rates = RateLimits(token_rate)
        self.refusals = RefusalEvents(self.writer.submit, server_log)
        self.long_polls = TaskPolls(tasks, self.writer, self.read, self._loop)
        self.result_polls = ResultPolls(self.long_polls)
        self.streams_woken = self._loop.create_future()
        """Done when a stream should look for new events; replaced by a new future then."""
        self.stream_share = Shares(
            "event streams", STREAMS_MAX, STREAMS_A_TOKEN_MAX, OPERATOR_STREAMS_RESERVE
        )  # fmt: skip
        self.open_calls = OpenCalls(agents, self._loop)
        self.poll_share = Shares("long polls", WAITERS_MAX, POLLS_A_TOKEN_MAX, OPERATOR_POLLS_RESERVE)
        self.body_share = Shares(
            "bytes of bodies", BODY_BYTES_MAX, BODY_BYTES_A_TOKEN_MAX, BODY_BYTES_RESERVE
        )
        # Cached, because an agent usually repeats the same claim.
        self.claim_terms = lru_cache(TERMS_KEPT_MAX)(checked_terms)

    def read(self, look: Callable[[], T]) -> "asyncio.Future[T]":
        """Run a read of the store in a reader thread."""
        return self._readers.run_for_server(look)

    def read_for(self, request: HttpRequest, look: Callable[[], T]) -> "asyncio.Future[T]":
        """Run a read for a request when it has its turn."""
        return self._readers.run(request.identity, look)

    def on_bus(self, request: HttpRequest, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Run work on a bus file in a bus thread when it has its turn."""
        return self._bus_threads.run(request.identity, work)

    def on_tokens(self, request: HttpRequest, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Run work on the files of tokens or sessions in a thread when it has its turn."""
        return self._token_threads.run(request.identity, work)

    async def decode_for(self, identity: Identity, decode: Callable[[bytes], T], data: bytes) -> T:
        """Decode what a caller sent or gets. A long text is decoded in a thread when it has its turn."""
        if len(data) <= DECODED_AT_ONCE_BYTES:
            return decode(data)
        return await self._decoders.run(identity, lambda: decode(data))

    def wake_streams(self) -> None:
        """Make event streams look for new events now."""
        if self.stream_share.used and not self.streams_woken.done():
            self.streams_woken.set_result(None)
            self.streams_woken = self._loop.create_future()

    async def health(self) -> tuple[dict[str, str], HealthFacts]:
        """The state of every part, and what the verdict depends on, for callers without a token.

        They see neither names of services nor how many messages all organizations have.
        """
        states, parts = await self._parts()
        flow = await self._flow_facts()
        return states, replace(
            flow,
            breakers=[""] * len(flow.breakers),
            broken=parts.broken,
            slowed=parts.slowed,
            has_figures=False,
        )

    async def part_facts(self) -> HealthFacts:
        """The parts of this server that do not work."""
        return (await self._parts())[1]

    async def _parts(self) -> tuple[dict[str, str], HealthFacts]:
        """Cached for `HEALTH_CHECK_S`, because `/health` needs no token."""
        if self._loop.time() >= self._health_checked + HEALTH_CHECK_S:
            self._health_checked = self._loop.time()
            self._health = await self._loop.run_in_executor(self._health_thread, self._check_parts)
        return self._health

    def _check_parts(self) -> tuple[dict[str, str], HealthFacts]:
        """Callers without a token see this, so no bus is named."""
        broken: dict[str, str] = {}
        slowed: dict[str, str] = {}
        if self.buses.disk_is_nearly_full():
            broken["disk"] = "the disk is nearly full: posts to buses are refused"
        full = len(self.buses.full())
        if full:
            broken["buses"] = f"{full} of the buses have no room: an operator has to move archives away"
        if self.tasks.store.broker_trouble:
            slowed["broker"] = f"{self.tasks.store.broker_trouble}; messages come from the database meanwhile"
        states = part_states(self.agents.data)
        broken |= {name: part.fault for name, part in states.items() if part.fault}
        shown = {name: part.shown for name, part in states.items()} | broken | slowed
        return shown, HealthFacts(broken=broken, slowed=slowed)

    async def _flow_facts(self) -> HealthFacts:
        """How messages flow, as a read of the store found it. A slow store does not hold up `/health`."""
        read = self._flow_read
        if read is None or (read.done() and self._loop.time() >= self._flow_checked + HEALTH_CHECK_S):
            self._flow_checked = self._loop.time()
            self._flow_read = read = asyncio.ensure_future(self.read(self._read_flow))
        await asyncio.wait((read,), timeout=FLOW_WAIT_S)
        if read.done() and not read.cancelled() and read.exception() is None:
            self._flow = read.result()
        return self._flow

    def _read_flow(self) -> HealthFacts:
        policy = self.engine.policy
        return self.engine.store.read(
            lambda found: status_of(Operations(found, policy), policy, with_idle=False).health_facts()
        )

    async def counted_events(self) -> EventCounts:
        """What the events of the store add up to. They are counted in between until no scrape comes."""
        self._scraped = self._loop.time()
        await asyncio.to_thread(self._event_counts.read)
        if self._counting is None or self._counting.done():
            self._counting = asyncio.create_task(self._count_events())
        return self._event_counts

    async def _count_events(self) -> None:
        """A retention that forgets events between two scrapes would hide them."""
        while self._loop.time() < self._scraped + SCRAPE_LATE_S:
            await asyncio.sleep(COUNT_EVERY_S)
            with suppress(PostroomError):  # the store is not available: the next look goes on
                await asyncio.to_thread(self._event_counts.read)

    async def coordinator(self) -> Coordinator:
        """The coordinator of this server. It starts with the first call for an agent."""
        async with self._coordinator_starts:
            if self._coordinator is None:
                coordinator = Coordinator(self.engine)
                await coordinator.start()
                self._coordinator = coordinator
        return self._coordinator

    @property
    def epoch(self) -> int:
        """The epoch of the coordinator of this server; 0 before it is started."""
        return 0 if self._coordinator is None else self._coordinator.epoch

    async def stop_coordinator(self) -> None:
        """End the lease of the coordinator, so that another server takes over at once."""
        if self._coordinator is not None:
            await self._coordinator.stop()

    def is_beat_due(self, agent: Agent) -> bool:
        """Whether an agent was not noted as alive for a third of its heartbeat."""
        noted = self._beats.get((agent.org_id, agent.agent_id), 0.0)
        return self._loop.time() >= noted + self.engine.policy.agents.heartbeat_s / 3

    def note_beat(self, agent: Agent) -> None:
        """An agent was noted as alive now."""
        self._beats[agent.org_id, agent.agent_id] = self._loop.time()

    def end_waits(self) -> None:
        """End all long polls and streams, so that the server can stop."""
        if self._counting is not None:
            self._counting.cancel()
        self.long_polls.end()

    def close(self) -> None:
        """Finish the pending writes, then stop all threads."""
        self.end_waits()
        self.writer.close()
        self.engine.close()
        for threads in (self._readers, self._decoders, self._bus_threads, self._token_threads):
            threads.close()
        self._health_thread.shutdown()
        self.buses.close()
