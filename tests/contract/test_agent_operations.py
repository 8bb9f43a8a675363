"""Operations on agents on a clock that stands still, on every store: health, takeover, bounces, chunks."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from postroom import (
    AgentReplaced,
    AgentRules,
    Bounced,
    Engine,
    Organization,
    Policy,
    StaleLease,
)
from postroom.engine.agents.agent_operations import AgentOperations
from postroom.engine.agents.agent_sweeps import Swept, sweep
from postroom.engine.agents.answer_parts import PART_CELLS_A_READ_MAX, Position, parse_position, read_on
from postroom.engine.agents.inboxes import Inboxes
from postroom.engine.agents.leases import LEASE_S, Leases, WantedPrograms
from postroom.engine.rules.cells import AGENT_COUNTS, AGENTS, AgentEntry, Part, joined
from postroom.engine.rules.operations import Operations
from postroom.errors import InvalidMessage, TooMany
from postroom.message import Event
from postroom.stores.transaction import Transaction
from postroom.testing import check_consistency
from tests.engines import EngineUnderTest

T = TypeVar("T")


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/queue.db"


def events_of(engine: Engine, kind: str) -> list[Event]:
    return [event for event in engine.store.events(0, 100_000) if event.kind == kind]


# ---- health, takeover and bounces, on a clock that stands still ------------------------------------


class Agents:
    """An engine without background work, and the operations on its agents."""

    def __init__(self, url: str, **rules: Any) -> None:
        self.under = EngineUnderTest(url, Policy(**rules))
        self.clock = self.under.clock
        self.store = self.under.engine.store

    def do(self, work: Callable[[AgentOperations], T]) -> T:
        policy = self.under.engine.policy
        return self.store.write(lambda transaction: work(AgentOperations(transaction, policy)))

    def register(self, agent_id: str = "planner", **options: Any) -> AgentEntry:
        return self.do(lambda agents: agents.register("acme", agent_id, "c1", **options))

    def request(self, entry: AgentEntry, agent_id: str = "planner", **fields: Any) -> str:
        core = self.under.engine.core
        message = {"type": "tool_call", "org_id": "acme", "payload": {}, "agent_id": agent_id, **fields}
        prepared = core.registry.prepare(message, core.policy, self.store.wall_us())
        return self.do(lambda agents: agents.request(agent_id, entry.session, prepared))[0]

    def sweep(self) -> None:
        self.do(lambda agents: sweep(agents, Swept()))

    def health(self, agent_id: str = "planner") -> str:
        return next(one.health for one in self.do(lambda agents: agents.list()) if one.agent_id == agent_id)

    def open(self, agent_id: str = "planner") -> list[str]:
        return self.do(lambda agents: agents.open_requests("acme", agent_id))

    def letters(self, agent_id: str) -> list[Any]:
        return [letter for _, letter in self.do(lambda agents: Inboxes(agents).letters("acme", agent_id))]

    def kinds(self, kind: str) -> list[Event]:
        return events_of(self.under.engine, kind)


@pytest.fixture
def agents_of(url: str) -> Iterator[Callable[..., Agents]]:
    made: list[Agents] = []

    def make(**rules: Any) -> Agents:
        made.append(Agents(url, **rules))
        return made[-1]

    yield make
    for one in made:
        check_consistency(one.store)
        one.under.close()


Made = Callable[..., Agents]


@pytest.mark.statement("agent-registration")
def test_health_is_registered_alive_suspect_and_dead_each_an_event(agents_of: Made) -> None:
    agents = agents_of()
    entry = agents.register(is_local=False)
    assert agents.health() == "registered"
    agents.clock.advance(1)
    agents.do(lambda one: one.beat("acme", "planner", entry.session, "c1"))
    assert agents.health() == "alive"
    agents.clock.advance(16)
    agents.sweep()
    assert agents.health() == "suspect"
    agents.clock.advance(20)
    agents.sweep()
    assert agents.health() == "dead"
    agents.do(lambda one: one.beat("acme", "planner", entry.session, "c1"))
    assert agents.health() == "alive"
    seen = [event.detail["health"] for event in agents.kinds("agent_health")]
    assert seen == ["registered", "alive", "suspect", "dead", "alive"]


def test_local_agents_live_as_long_as_their_coordinator(agents_of: Made) -> None:
    agents = agents_of()
    info = agents.do(lambda one: Leases(one).start("c1", "here"))
    agents.register()
    for _ in range(10):
        agents.clock.advance(5)
        agents.do(lambda one: Leases(one).renew("c1", info.epoch, "here"))
    agents.sweep()
    assert agents.health() == "alive"
    agents.clock.advance(36)
    agents.sweep()
    assert agents.health() == "dead"


def test_sessions_do_not_count_agents_of_other_organizations(agents_of: Made) -> None:
    agents, sessions = agents_of(), []
    for others in (1, 5):
        sessions.append(agents.register().session)
        for number in range(others):
            agents.do(lambda one, name=f"a{number}": one.register("other", name, "c1"))  # type: ignore[misc]
        agents.clock.advance(1)
    assert agents.register().session - sessions[1] == sessions[1] - sessions[0] == 1_000_000


@pytest.mark.statement("recovery-time-coordinator")
def test_another_coordinator_takes_over_when_the_lease_is_over(agents_of: Made) -> None:
    agents = agents_of()
    first = agents.do(lambda one: Leases(one).start("c1", "here"))
    agents.register()
    agents.clock.advance(1)
    second = agents.do(lambda one: Leases(one).start("c2", "there"))
    assert second.epoch > first.epoch
    assert agents.do(lambda one: Leases(one).take_over("c2")) == []
    agents.clock.advance(LEASE_S - 1)
    agents.do(lambda one: Leases(one).renew("c2", second.epoch, "there"))
    assert agents.do(lambda one: Leases(one).take_over("c2")) == ["c1"]
    assert LEASE_S < 5
    [info] = agents.do(lambda one: one.list())
    assert (info.coordinator, info.epoch, info.health) == ("c2", second.epoch, "registered")
    agents.clock.advance(36)
    assert agents.health() == "dead"
    assert [event.error_type for event in agents.kinds("alert")] == ["CoordinatorLost"]


def test_a_coordinator_that_was_only_slow_takes_its_agents_back(agents_of: Made) -> None:
    agents = agents_of()
    first = agents.do(lambda one: Leases(one).start("c1", "here"))
    entry = agents.register()
    agents.clock.advance(4)
    agents.do(lambda one: (Leases(one).start("c2", "there"), Leases(one).take_over("c2")))
    assert not agents.do(lambda one: Leases(one).renew("c1", first.epoch, "here"))
    agents.do(lambda one: Leases(one).reclaim("c1", "acme", "planner", entry.session))
    agents.do(lambda one: Leases(one).reclaim("c1", "acme", "planner", entry.session - 1))
    agents.clock.advance(40)
    assert agents.do(lambda one: Leases(one).renew("c1", first.epoch, "here"))
    [info] = agents.do(lambda one: one.list())
    assert (info.coordinator, info.health, info.epoch) == ("c1", "alive", first.epoch)


def test_a_dead_agent_gets_no_messages_and_leaves_its_place(agents_of: Made) -> None:
    agents = agents_of(organization=Organization(max_agents=1))
    agents.register()
    agents.clock.advance(36)
    with pytest.raises(Bounced, match="dead"):
        agents.do(lambda one: Inboxes(one).check_recipient("acme", "planner"))
    with pytest.raises(TooMany):
        agents.register("other")
    agents.sweep()
    agents.register("other")
    with pytest.raises(TooMany):
        agents.register()


@pytest.mark.statement("agent-orphans")
def test_answers_of_a_dead_agent_are_kept_for_a_day_and_then_bounce(agents_of: Made) -> None:
    agents = agents_of()
    agents.register("boss", is_local=False)
    entry = agents.register()
    message_id = agents.request(entry, created_by={"type": "agent", "id": "boss"})
    agents.under.complete(agents.under.claim())
    agents.clock.advance(86_399)
    agents.sweep()
    assert agents.open() == [message_id]
    agents.clock.advance(2)
    agents.sweep()
    assert agents.open() == []
    [letter] = agents.letters("boss")
    assert (letter.message_id, letter.is_bounce, letter.body["type"]) == (message_id, True, "result")
    [event] = agents.kinds("bounced")
    assert (event.detail["message_id"], event.detail["recipient"]) == (message_id, "boss")
    assert agents.do(lambda one: one.acknowledge("acme", "planner", entry.session, [message_id])) == []


def test_requests_of_a_dead_agent_are_cancelled_if_the_rules_say_so(agents_of: Made) -> None:
    agents = agents_of(agents=AgentRules(on_dead="cancel"))
    entry = agents.register()
    waiting, done = agents.request(entry, delay_s=3600), agents.request(entry)
    agents.under.complete(agents.under.claim())
    agents.clock.advance(20)
    agents.sweep()
    assert len(agents.open()) == 2
    agents.clock.advance(20)
    agents.sweep()
    assert agents.open() == []
    states = {one: agents.under.engine.blocking.get(one).state for one in (waiting, done)}
    assert states == {waiting: "CANCELLED", done: "COMPLETED"}
    assert {event.detail["message_id"] for event in agents.kinds("bounced")} == {waiting, done}


def test_damaged_values_of_one_agent_keep_nothing_of_the_others(agents_of: Made) -> None:
    agents = agents_of()
    entry, other = agents.register(), agents.register("other")
    agents.request(entry), agents.request(other, "other")
    agents.under.complete(agents.under.claim(2))
    agents.store.write(lambda one: one.cells.put(AGENTS.name, joined("acme", "other"), b"{"))
    agents.clock.advance(25 * 3_600)
    agents.sweep()
    assert (agents.open(), len(agents.open("other"))) == ([], 1)


def test_agents_of_another_organization_are_not_listed(agents_of: Made) -> None:
    agents = agents_of()
    agents.register()
    agents.do(lambda one: one.register("acme-2", "planner", "c1"))
    assert [one.org_id for one in agents.do(lambda one: one.list("acme"))] == ["acme"]
    assert agents.do(lambda one: one.list("acm")) == []
    assert len(agents.do(lambda one: one.list())) == 2


# ---- bounces to users and systems ------------------------------------------------------------------


def bounced(agents: Agents, creator: dict[str, str], chunks: int = 0) -> str:
    """Have a request answered and its agent fetch nothing for a day; the id of the message."""
    message_id = agents.request(agents.register(), created_by=creator)
    [claimed] = agents.under.claim()
    if chunks:
        parts = [chunk(message_id, index) for index in range(chunks)]
        policy = agents.under.engine.policy
        agents.store.write(
            lambda transaction: Operations(transaction, policy).add_parts(
                message_id, claimed.record.lease, parts, 0
            )
        )
    agents.under.complete([claimed])
    agents.clock.advance(86_401)
    agents.sweep()
    return message_id


def test_a_bounce_to_a_user_is_kept_until_it_is_done(agents_of: Made) -> None:
    agents = agents_of()
    bounces = agents.under.engine.blocking.bounces
    first = bounced(agents, {"type": "user", "id": "ada"}, chunks=3)
    second = bounced(agents, {"type": "system", "id": "billing"})
    assert [one.message_id for one in bounces.list("acme")] == [first, second]
    [one] = bounces.list(created_by="user:ada")
    assert (one.agent_id, one.reason) == ("planner", "the agent did not fetch it in time")
    assert (one.answer["type"], one.answer["chunk"]) == ("stream_complete", [0, 1, 2])
    assert bounces.list("other") == []
    assert [two.message_id for two in bounces.list(after=one.key)] == [second]
    assert len(bounces.list(limit=1)) == 1
    assert bounces.done(one.key, one.key, "acme/99") == [one.key]
    assert [two.message_id for two in bounces.list()] == [second]
    assert agents.letters("ada") == []


@pytest.mark.parametrize(
    "filters", [{"created_by": "ada"}, {"created_by": "robot:r"}, {"limit": 0}, {"after": "x"}]
)
def test_a_filter_of_bounces_that_does_not_fit_is_refused(agents_of: Made, filters: dict[str, Any]) -> None:
    bounces = agents_of().under.engine.blocking.bounces
    with pytest.raises(InvalidMessage):
        bounces.list(**filters)
    with pytest.raises(InvalidMessage):
        bounces.done("acme")


def test_a_bounce_is_kept_as_long_as_a_message(agents_of: Made) -> None:
    agents = agents_of(organization=Organization(retention_s=200_000))
    bounced(agents, {"type": "user", "id": "ada"})
    agents.clock.advance(199_999)
    agents.sweep()
    assert len(agents.under.engine.blocking.bounces.list()) == 1
    agents.clock.advance(2)
    agents.sweep()
    assert agents.under.engine.blocking.bounces.list() == []


@pytest.mark.parametrize("creator_id", ["a\x1fb", "", "\x1f" * 5, "a b/c", "é" * 50])
def test_any_id_of_a_creator_can_bounce(agents_of: Made, creator_id: str) -> None:
    agents = agents_of()
    message_id = bounced(agents, {"type": "agent", "id": creator_id})
    agents.sweep()  # inboxes and bounces can still be read
    [one] = agents.under.engine.blocking.bounces.list()
    assert (one.message_id, one.created_by.id) == (message_id, creator_id)


# ---- agents that come and go -----------------------------------------------------------------------


def counted(agents: Agents) -> int:
    return agents.store.read(lambda transaction: AGENT_COUNTS.get(transaction, "acme")) or 0


def test_a_dead_agent_that_leaves_is_counted_once(agents_of: Made) -> None:
    agents = agents_of()
    for name in ("a", "b"):
        entry = agents.register(name, is_local=False)
    agents.clock.advance(36)
    agents.do(lambda one: one.beat("acme", "a", entry.session - 1, "c1"))
    agents.sweep()
    assert counted(agents) == 1
    agents.do(lambda one: one.leave("acme", "b", entry.session))
    assert counted(agents) == 1


def test_a_dead_agent_is_forgotten_when_it_waits_for_nothing(agents_of: Made) -> None:
    agents = agents_of(organization=Organization(retention_s=100_000))
    entry = agents.register(is_local=False)
    agents.request(entry, delay_s=200_000)
    agents.register("idle", is_local=False)
    agents.clock.advance(36)
    agents.sweep()
    agents.clock.advance(99_000)
    agents.sweep()
    assert agents.health("idle") == "dead"
    agents.clock.advance(1_000)
    agents.sweep()
    assert [one.agent_id for one in agents.do(lambda one: one.list())] == ["planner"]
    assert agents.kinds("agent_health")[-1].detail["health"] == "forgotten"
    assert counted(agents) == 0
    with pytest.raises(AgentReplaced):
        agents.do(lambda one: one.beat("acme", "idle", entry.session + 1, "c1"))


def test_a_spawned_agent_counts_like_a_registered_one(agents_of: Made) -> None:
    rules = AgentRules(program=("true",))
    agents = agents_of(agents=rules, organization=Organization(max_agents=2))

    def spawn(agent_id: str) -> None:
        agents.do(lambda one: WantedPrograms(one.transaction, one.policy).want("acme", agent_id, "m", []))

    agents.register("a", is_local=False)
    spawn("b")
    spawn("b")
    spawn("a")
    with pytest.raises(TooMany, match="2 agents"):
        spawn("c")
    agents.register("b", is_local=False)
    with pytest.raises(TooMany):
        spawn("c")
    agents.clock.advance(36)
    agents.sweep()
    agents.do(lambda one: WantedPrograms(one.transaction, one.policy).unwant("acme", "b"))
    spawn("c")


@pytest.mark.parametrize("jump_s", [-86_400 * 365, 3_600, 86_400 * 365])
def test_a_jump_of_the_wall_clock_changes_no_lease_and_no_health(agents_of: Made, jump_s: float) -> None:
    agents = agents_of()
    agents.do(lambda one: Leases(one).start("c1", "here"))
    entry = agents.register(is_local=False)
    agents.clock.advance(1)
    agents.do(lambda one: one.beat("acme", "planner", entry.session, "c1"))
    agents.clock.step_wall(jump_s)
    agents.sweep()
    assert agents.do(lambda one: Leases(one).take_over("c2")) == []
    assert agents.health() == "alive"
    agents.clock.advance(36)
    agents.sweep()
    assert agents.do(lambda one: Leases(one).take_over("c2")) == ["c1"]
    assert agents.health() == "dead"


# ---- chunks ----------------------------------------------------------------------------------------


def chunk(message_id: str, index: int) -> Part:
    return Part(message_id, "stream_chunk", "now", chunk=index, chunk_index=index, attempt=1)


@pytest.mark.statement("chunk-position")
def test_a_gap_in_the_chunks_is_noticed(agents_of: Made) -> None:
    agents = agents_of()
    message_id = agents.request(agents.register())
    [claimed] = agents.under.claim()
    policy, lease = agents.under.engine.policy, claimed.record.lease

    def add(first: int, count: int) -> None:
        parts = [chunk(message_id, first + index) for index in range(count)]
        agents.store.write(
            lambda transaction: Operations(transaction, policy).add_parts(message_id, lease, parts, first)
        )

    def read(position: Position) -> tuple[list[tuple[Position, Part]], bool]:
        return agents.store.read(
            lambda transaction: read_on(Operations(transaction, policy), message_id, position)
        )

    add(0, 3)
    add(5, 2)
    parts, is_complete = read(Position())
    assert [part.chunk for _, part in parts[1:]] == [0, 1, 2]
    assert not is_complete
    rest, _ = read(parts[2][0])  # resumed behind the second chunk, in the middle of what one commit stored
    assert [part.chunk for _, part in rest] == [2]
    agents.under.complete([claimed])
    parts, is_complete = read(Position())
    assert is_complete
    assert parts[-1][1].error is not None
    assert parts[-1][1].error["type"] == "ChunksMissing"


def test_a_position_of_an_attempt_that_never_existed_reads_from_the_beginning(agents_of: Made) -> None:
    agents = agents_of()
    message_id = agents.request(agents.register())
    [claimed] = agents.under.claim()
    policy, lease, count = agents.under.engine.policy, claimed.record.lease, 2 * PART_CELLS_A_READ_MAX

    def add(transaction: Transaction) -> None:
        for index in range(count):  # more cells than one read returns
            Operations(transaction, policy).add_parts(message_id, lease, [chunk(message_id, index)], index)

    def read(position: Position) -> tuple[list[tuple[Position, Part]], bool]:
        return agents.store.read(
            lambda transaction: read_on(Operations(transaction, policy), message_id, position)
        )

    agents.store.write(add)
    agents.under.complete([claimed])
    first, _ = read(Position())
    for invented in ("0.9.9.9", "9.0.0.0", "9.9.9.9"):
        assert read(parse_position(invented))[0] == first


def test_chunks_of_a_lost_lease_are_refused(agents_of: Made) -> None:
    agents = agents_of(lease_s=5)
    message_id = agents.request(agents.register())
    [old] = agents.under.claim()
    agents.clock.advance(6)
    [new] = agents.under.claim()
    policy = agents.under.engine.policy

    def add(lease: int) -> None:
        agents.store.write(
            lambda transaction: Operations(transaction, policy).add_parts(
                message_id, lease, [chunk(message_id, 0)], 0
            )
        )

    with pytest.raises(StaleLease):
        add(old.record.lease)
    add(new.record.lease)


@pytest.mark.statement("chunk-position")
def test_every_part_has_a_position_of_its_own(agents_of: Made) -> None:
    agents = agents_of()
    message_id = agents.request(agents.register())
    [claimed] = agents.under.claim()
    policy = agents.under.engine.policy
    parts = [chunk(message_id, index) for index in range(2)]
    agents.store.write(
        lambda transaction: Operations(transaction, policy).add_parts(
            message_id, claimed.record.lease, parts, 0
        )
    )
    agents.under.complete([claimed])

    def read(position: Position) -> list[tuple[Position, Part]]:
        return agents.store.read(
            lambda transaction: read_on(Operations(transaction, policy), message_id, position)
        )[0]

    found = read(Position())
    assert len({at.text for at, _ in found}) == len(found) == 4
    for number, (at, _) in enumerate(found):
        assert parse_position(at.text) == at
        assert read(at) == found[number + 1 :]


@pytest.mark.parametrize("text", ["", "1.2.3", "1.2.3.4.5", "1.2.3.x", "-1.0.0.0", ".end", "1.2.3.4.end.end"])
def test_an_id_that_is_not_a_position_is_refused(text: str) -> None:
    with pytest.raises(InvalidMessage):
        parse_position(text)
