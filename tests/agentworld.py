"""A world of coordinators, agents and workers around one store, driven by random numbers from a seed.

Agents send requests and read their answers while coordinators, agents and workers crash, pause and come back.
Then the world is drained. By then every request must have ended in one of two ways: its agent saw exactly one
last part and acknowledged it, or the answer bounced to its creator. No threads, no real time.

    report = AgentWorld(seed=7).run()
    assert report.ok, report

`python -m tests.agentworld --seed 7` prints the history of one seed.
"""

import argparse
import itertools
import random
import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from postroom.core.agents import FINAL_PARTS, AgentRules, OnDead
from postroom.core.lifecycle.fairness import Rotation
from postroom.core.lifecycle.retry import Retry
from postroom.engine.agents.agent_operations import AgentOperations, Asked, NewParts
from postroom.engine.agents.agent_sweeps import Swept, sweep
from postroom.engine.agents.answer_parts import Position
from postroom.engine.agents.inboxes import Inboxes
from postroom.engine.agents.leases import Leases
from postroom.engine.message_input import Registry
from postroom.engine.rules.cells import BOUNCES, Part
from postroom.engine.rules.claims import Claimed, Claims
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.outcomes import Outcome
from postroom.engine.rules.policy import REQUEST_TYPES, Policy
from postroom.errors import AgentReplaced, Bounced, StaleLease, UnknownTask
from postroom.stores.memory import MemoryStore
from postroom.system.manual_clock import ManualClock
from postroom.testing.events import check_consistency
from postroom.testing.reports import SeedReport
from postroom.testing.world import CommitLost
from postroom.testing.world_checker import Broken

T = TypeVar("T")

STEPS: Final = (50, 110)
DRAIN_ROUNDS_MAX: Final = 500
EVENTS_MAX: Final = 100_000
AGENTS: Final = ("a0", "a1", "a2")
ORGANIZATIONS: Final = ("acme", "bolt")
COORDINATORS: Final = ("c0", "c1")
CREATORS: Final = (None, {"type": "user", "id": "ada"}, {"type": "system", "id": "a\x1fb"})
CHUNKS_MAX: Final = 4

RULES: Final[dict[str, str]] = {
    "lost": "a request has neither an acknowledged last part nor a bounce after the world was drained",
    "both": "a request was acknowledged by its agent and bounced",
    "repeated": "an agent that lives saw a part twice, or a last part was shown after it was acknowledged",
    "order": "a part came behind a gap, or after parts of a later attempt",
    "fenced": "a registration that was replaced saw a part",
    "chunks": "the chunks of a completed answer are not those of its last attempt",
    "epoch": "a coordinator has an epoch that is not larger than that of an earlier one",
    "letter": "a message to an agent was shown before it was stored, or lost",
    "creator": "a bounced answer is not with the creator of its message, or is there more than once",
    "books": "the counters or the events of the store do not match its records",
}


class AgentReport(SeedReport, frozen=True, kw_only=True):
    """The outcome of one seed."""

    program = "tests.agentworld"
    requests: int


class _Request(msgspec.Struct):
    """A request as the world knows it."""

    agent: tuple[str, str]
    acknowledged: int = 0
    bounced: int = 0


class _Reading(msgspec.Struct):
    """How far one agent has come in one answer."""

    position: Position = Position()
    attempt: int = 0
    chunks: list[Any] = msgspec.field(default_factory=list)
    seen: set[tuple[int, int]] = msgspec.field(default_factory=set)
    has_last: bool = False


class _Agent(msgspec.Struct):
    """One registration that lives, with what is in its memory."""

    org_id: str
    agent_id: str
    session: int
    coordinator: str
    reading: dict[str, _Reading] = msgspec.field(default_factory=dict)
    acknowledging: set[str] = msgspec.field(default_factory=set)
    """Requests whose last part it saw, and whose acknowledgment is not committed."""

    @property
    def name(self) -> tuple[str, str]:
        return self.org_id, self.agent_id


class AgentWorld:
    """One seeded history. `run` makes it, drains it and checks it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._random = random.Random(seed)
        self._clock = ManualClock()
        on_dead: OnDead = self._random.choice(("keep", "cancel"))
        self._policy = Policy(
            lease_s=5.0,
            poison_crashes=1_000,
            retries={"model_call": Retry(max_retries=2, delay_s=1.0)},
            agents=AgentRules(on_dead=on_dead, keep_responses_s=self._random.choice((60.0, 86_400.0))),
        )
        self._store = MemoryStore(clock=self._clock, store_id="t00000001")
        self._registry = Registry(REQUEST_TYPES)
        self._rotation = Rotation()
        self._epochs: dict[str, int] = {}
        """The coordinators that run, with their epochs."""
        self._paused: set[str] = set()
        """Coordinators whose processes stand still, and the agents in them with them."""
        self._agents: list[_Agent] = []
        """Registrations that live, replaced ones included: they do not know it yet."""
        self._held: list[Claimed] = []
        self._sent: dict[str, list[int]] = {}
        self._requests: dict[str, _Request] = {}
        self._letters: dict[str, tuple[str, str]] = {}
        self._acted: set[str] = set()
        self._position = 0
        self._broken: list[Broken] = []
        self._counts: dict[str, int] = {}
        self._trace: list[str] = []

    # ---- the course of the world ---------------------------------------------------------------

    def run(self) -> AgentReport:
        """Make the history, drain the world, and check the rules."""
        actions: dict[Callable[[], None], int] = {
            self._start_coordinator: 2,
            self._register: 5,
            self._request: 8,
            self._work: 8,
            self._stream: 8,
            self._finish: 8,
            self._read: 14,
            self._acknowledge: 8,
            self._crash_agent: 2,
            self._crash_coordinator: 2,
            self._pause_coordinator: 2,
            self._continue_coordinator: 2,
            self._crash_worker: 1,
            self._beat: 5,
            self._sweep: 3,
            self._send: 3,
            self._inbox: 3,
            self._wait: 5,
        }
        names, weights = [*actions], [*actions.values()]
        self._start_coordinator()
        for _ in range(self._random.randint(*STEPS)):
            action = self._random.choices(names, weights)[0]
            self._counts[action.__name__.strip("_")] = self._counts.get(action.__name__.strip("_"), 0) + 1
            action()
            self._hear()
        self._drain()
        self._check()
        return AgentReport(
            seed=self.seed, broken=self._broken, actions=self._counts,
            requests=len(self._requests), trace=self._trace,
        )  # fmt: skip

    def _note(self, *words: object) -> None:
        self._trace.append(" ".join(str(word) for word in words))

    def _report(self, rule: str, message_id: str, sentence: str) -> None:
        self._broken.append(Broken(rule, message_id, sentence))

    def _write(self, work: Callable[[AgentOperations], T], *, may_fail: bool = False) -> T:
        """A commit. Now and then it fails, and nothing of it is kept."""
        fails = may_fail and self._random.random() < 0.1

        def run(transaction: Any) -> T:
            result = work(AgentOperations(transaction, self._policy))
            if fails:
                raise CommitLost("the commit failed")
            return result

        return self._store.write(run)

    def _engine(self, work: Callable[[Operations], T]) -> T:
        return self._store.write(lambda transaction: work(Operations(transaction, self._policy)))

    # ---- coordinators and agents ---------------------------------------------------------------

    def _start_coordinator(self) -> None:
        coordinator = self._random.choice(COORDINATORS) + f".{len(self._trace)}"
        epoch = self._write(lambda agents: Leases(agents).start(coordinator, "here")).epoch
        if any(epoch <= other for other in self._epochs.values()):
            self._report("epoch", "", f"coordinator {coordinator} has epoch {epoch}")
        self._epochs[coordinator] = epoch
        self._note("coordinator", coordinator, "starts with epoch", epoch)

    def _crash_coordinator(self) -> None:
        """A coordinator dies, and its agents with it: they live in its process."""
        if not self._epochs:
            return
        coordinator = self._random.choice(sorted(self._epochs))
        del self._epochs[coordinator]
        self._paused.discard(coordinator)
        gone = [agent for agent in self._agents if agent.coordinator == coordinator]
        self._agents = [agent for agent in self._agents if agent not in gone]
        self._note("coordinator", coordinator, "crashes with", len(gone), "agents")

    def _pause_coordinator(self) -> None:
        """The process of a coordinator stands still. It renews no lease, and its agents read nothing."""
        running = sorted(self._epochs.keys() - self._paused)
        if running:
            self._paused.add(self._random.choice(running))
            self._note("coordinators", *sorted(self._paused), "stand still")

    def _continue_coordinator(self) -> None:
        """A process continues where it stood. Its coordinator may have been taken for dead meanwhile."""
        if self._paused:
            coordinator = self._random.choice(sorted(self._paused))
            self._paused.remove(coordinator)
            self._note("coordinator", coordinator, "continues")
            self._renew(coordinator)

    @property
    def _running(self) -> list[_Agent]:
        """The agents whose process does not stand still."""
        return [agent for agent in self._agents if agent.coordinator not in self._paused]

    def _register(self) -> None:
        if not self._epochs.keys() - self._paused:
            self._start_coordinator()
        self._register_as(self._random.choice(ORGANIZATIONS), self._random.choice(AGENTS))

    def _register_as(self, org_id: str, agent_id: str) -> _Agent:
        coordinator = self._random.choice(sorted(self._epochs.keys() - self._paused))
        entry = self._write(lambda agents: agents.register(org_id, agent_id, coordinator))
        agent = _Agent(org_id, agent_id, entry.session, coordinator)
        self._agents.append(agent)
        self._note("agent", org_id, agent_id, "registers at", coordinator, "session", entry.session)
        self._resume(agent)
        return agent

    def _resume(self, agent: _Agent) -> None:
        for message_id in self._store.read(
            lambda transaction: AgentOperations(transaction, self._policy).open_requests(*agent.name)
        ):
            agent.reading.setdefault(message_id, _Reading())

    def _crash_agent(self) -> None:
        if self._agents:
            agent = self._random.choice(self._agents)
            self._agents.remove(agent)
            self._note("agent", *agent.name, "session", agent.session, "crashes")

    def _is_newest(self, agent: _Agent) -> bool:
        return self._store.read(
            lambda transaction: AgentOperations(transaction, self._policy).is_held(*agent.name, agent.session)
        )

    def _beat(self) -> None:
        running = sorted(self._epochs.keys() - self._paused)
        for coordinator in running:
            self._renew(coordinator)
        if running:
            coordinator = self._random.choice(running)
            lost = self._write(lambda agents: Leases(agents).take_over(coordinator))
            if lost:
                self._note(coordinator, "takes over from", *lost)

    def _renew(self, coordinator: str) -> None:
        """A heartbeat of a coordinator. One that was taken for dead takes its agents back."""

        def work(agents: AgentOperations) -> None:
            if not Leases(agents).renew(coordinator, self._epochs[coordinator], "here"):
                for agent in self._agents:
                    if agent.coordinator == coordinator:
                        Leases(agents).reclaim(coordinator, *agent.name, agent.session)

        self._write(work)

    def _sweep(self) -> None:
        self._write(lambda agents: sweep(agents, Swept()))

    # ---- requests ------------------------------------------------------------------------------

    def _request(self) -> None:
        if not self._running:
            return
        agent = self._random.choice(self._running)
        message: dict[str, Any] = {
            "type": "model_call", "org_id": agent.org_id, "agent_id": agent.agent_id, "payload": {},
            "durability": "os", "max_retries": self._random.choice((0, 2)),
            "created_by": self._random.choice(CREATORS),
        }  # fmt: skip
        prepared = self._registry.prepare(message, self._policy, self._store.wall_us())
        try:
            message_id, _ = self._write(
                lambda agents: agents.request(agent.agent_id, agent.session, prepared), may_fail=True
            )
        except AgentReplaced:
            self._end(agent)
            return
        except CommitLost:
            return
        self._requests[message_id] = _Request(agent.name)
        agent.reading[message_id] = _Reading()
        self._note("agent", *agent.name, "requests", message_id)

    def _end(self, agent: _Agent) -> None:
        """A registration learns that it was replaced."""
        if self._is_newest(agent):
            self._report("fenced", "", f"{agent.name} was refused although it is the newest registration")
        if agent in self._agents:
            self._agents.remove(agent)

    def _read(self) -> None:
        if self._running:
            self._read_as(self._random.choice(self._running))

    def _read_as(self, agent: _Agent) -> None:
        """A look of the coordinator for one agent. It shows what it finds at once."""
        asked = [
            Asked(*agent.name, agent.session, message_id, reading.position)
            for message_id, reading in agent.reading.items()
            if not reading.has_last
        ]
        answers = self._store.read(
            lambda transaction: AgentOperations(transaction, self._policy).answers(asked)
        )
        newest = self._is_newest(agent)
        for one, answer in zip(asked, answers, strict=True):
            if answer.is_replaced:
                self._end(agent)
                return
            if answer.is_closed:
                del agent.reading[one.message_id]
            elif not newest and answer.parts:
                self._report("fenced", one.message_id, f"{agent.name} session {agent.session} saw a part")
            else:
                self._show(agent, one.message_id, answer)

    def _show(self, agent: _Agent, message_id: str, answer: NewParts) -> None:
        reading = agent.reading[message_id]
        for position, part in answer.parts:
            self._judge(message_id, reading, part)
            if part.type == "stream_chunk":
                reading.chunks = [*reading.chunks, part.chunk] if part.chunk_index else [part.chunk]
                reading.attempt = part.attempt
            elif part.type in FINAL_PARTS:
                self._judge_last(message_id, reading, part)
                reading.has_last = True
                agent.acknowledging.add(message_id)
            reading.position = position
        if answer.parts:
            self._note(
                *agent.name, "session", agent.session, "saw", *(p.type for _, p in answer.parts), message_id
            )

    def _judge(self, message_id: str, reading: _Reading, part: Part) -> None:
        if part.attempt < reading.attempt:
            self._report("order", message_id, f"a part of attempt {part.attempt} after {reading.attempt}")
        if part.chunk_index is not None:
            name = part.attempt, part.chunk_index
            if name in reading.seen:
                self._report("repeated", message_id, f"chunk {name} was shown twice")
            reading.seen.add(name)
            expected = len(reading.chunks) if part.attempt == reading.attempt else 0
            if part.chunk_index != expected:
                self._report("order", message_id, f"chunk {part.chunk_index} came, and {expected} was next")

    def _judge_last(self, message_id: str, reading: _Reading, part: Part) -> None:
        if self._requests[message_id].acknowledged:
            self._report("repeated", message_id, "its last part was shown after it was acknowledged")
        if reading.has_last:
            self._report("repeated", message_id, "its last part was shown twice")
        if part.type in ("result", "stream_complete"):
            shown = reading.chunks if part.attempt == reading.attempt else []
            if shown != self._sent.get(f"{message_id}.{part.attempt}", []):
                self._report("chunks", message_id, f"the agent saw {shown}")

    def _acknowledge(self) -> None:
        waiting = [agent for agent in self._running if agent.acknowledging]
        if waiting:
            self._acknowledge_as(self._random.choice(waiting), may_fail=True)

    def _acknowledge_as(self, agent: _Agent, *, may_fail: bool = False) -> None:
        ids = sorted(agent.acknowledging)
        try:
            closed = self._write(
                lambda agents: agents.acknowledge(*agent.name, agent.session, ids), may_fail=may_fail
            )
        except AgentReplaced:
            self._end(agent)
            return
        except CommitLost:
            return
        agent.acknowledging.clear()
        for message_id in closed:
            self._requests[message_id].acknowledged += 1
            self._note(*agent.name, "acknowledges", message_id)

    # ---- workers -------------------------------------------------------------------------------

    def _work(self) -> None:
        self._held += self._store.write(
            lambda transaction: Claims(transaction, self._policy, "w", self._rotation, {}).claim(2)
        )

    def _stream(self) -> None:
        if self._held:
            self._stream_as(self._random.choice(self._held))

    def _stream_as(self, held: Claimed) -> None:
        record = held.record
        chunks = self._sent.setdefault(f"{record.message_id}.{record.attempt}", [])
        if held.type != "model_call" or len(chunks) >= CHUNKS_MAX:
            return
        count = self._random.randint(1, 2)
        parts = [
            Part(
                record.message_id, "stream_chunk", "now",
                chunk=len(chunks) + index, chunk_index=len(chunks) + index, attempt=record.attempt,
            )
            for index in range(count)
        ]  # fmt: skip
        try:
            self._engine(lambda one: one.add_parts(record.message_id, record.lease, parts, len(chunks)))
        except (StaleLease, UnknownTask):
            self._held.remove(held)
            return
        chunks += [part.chunk for part in parts]

    def _finish(self) -> None:
        if not self._held:
            return
        held = self._held.pop(self._random.randrange(len(self._held)))
        kind: Any = self._random.choice(("completed", "completed", "failed", "released"))
        self._commit(held, kind)

    def _commit(self, held: Claimed, kind: Any) -> None:
        record = held.record
        outcome = Outcome(
            kind=kind, message_id=record.message_id, lease=record.lease, type=held.type,
            error="no" if kind == "failed" else "", body=held.body,
        )  # fmt: skip
        stale = self._engine(lambda one: one.finish([outcome]))
        self._note("worker:", record.message_id, kind, "too late" if stale else "")

    def _crash_worker(self) -> None:
        self._held.clear()

    # ---- messages between agents ---------------------------------------------------------------

    def _send(self) -> None:
        if not self._running:
            return
        agent, to = self._random.choice(self._running), self._random.choice(AGENTS)
        message = {
            "type": "agent_message", "org_id": agent.org_id, "agent_id": agent.agent_id,
            "payload": {"to": to, "body": 1}, "durability": "os",
        }  # fmt: skip
        prepared = self._registry.prepare(message, self._policy, self._store.wall_us())
        try:
            message_id = self._write(
                lambda agents: Inboxes(agents).send(agent.agent_id, agent.session, prepared, to, 1)
            )
        except AgentReplaced:
            self._end(agent)
        except Bounced:
            self._note("a message to", to, "bounces")
        else:
            self._letters[message_id] = agent.org_id, to

    def _inbox(self) -> None:
        if self._running:
            self._inbox_as(self._random.choice(self._running))

    def _inbox_as(self, agent: _Agent) -> None:
        def work(agents: AgentOperations) -> list[str]:
            found = [(key, one) for key, one in Inboxes(agents).letters(*agent.name) if not one.is_bounce]
            keys = [key for key, _ in found]
            for receipt in ("fetched", "shown", "acted_on"):
                Inboxes(agents).note_receipt(*agent.name, agent.session, keys, receipt)
            return [one.message_id for _, one in found]

        try:
            acted = self._write(work)
        except AgentReplaced:
            self._end(agent)
            return
        for message_id in acted:
            if self._letters.get(message_id) != agent.name or message_id in self._acted:
                self._report("letter", message_id, f"{agent.name} got a message that is not its own")
            self._acted.add(message_id)

    # ---- time and events -----------------------------------------------------------------------

    def _wait(self) -> None:
        seconds = self._random.choice((0.5, 2.0, 6.0, 16.0, 40.0, 70.0))
        self._clock.advance(seconds)
        self._note(f"{seconds:g} s pass")

    def _hear(self) -> None:
        """Learn of bounces from the events."""
        for event in self._store.events(self._position, EVENTS_MAX):
            self._position = event.seq
            message_id = event.detail.get("message_id", "")
            if event.kind == "bounced" and message_id in self._requests:
                self._requests[message_id].bounced += 1
                self._note("bounced:", message_id)

    # ---- the end -------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Bring every agent back, and work until every request is closed."""
        self._note("the world is drained")
        self._paused.clear()
        self._start_coordinator()
        self._agents.clear()
        agents = [self._register_as(org_id, name) for org_id in ORGANIZATIONS for name in AGENTS]
        for _ in range(DRAIN_ROUNDS_MAX):
            self._held.clear()
            self._work()
            for held in list(self._held):
                self._commit(held, "completed")
            for agent in agents:
                self._read_as(agent)
                self._acknowledge_as(agent)
                self._inbox_as(agent)
            self._beat()
            self._hear()
            if all(one.acknowledged or one.bounced for one in self._requests.values()):
                return
            self._clock.advance(1.0)

    def _check(self) -> None:
        for message_id, request in self._requests.items():
            if not request.acknowledged and not request.bounced:
                self._report("lost", message_id, f"{request.agent} never got an answer")
            if request.acknowledged and request.bounced:
                self._report("both", message_id, "it was acknowledged and bounced")
            if request.acknowledged > 1 or request.bounced > 1:
                self._report("repeated", message_id, "it was closed twice")
        self._check_creators()
        for message_id in self._letters.keys() - self._acted:
            self._report("letter", message_id, "it was sent, and never shown")
        try:
            check_consistency(self._store)
        except (AssertionError, ValueError) as error:
            self._report("books", "", str(error).partition("\n")[0])

    def _check_creators(self) -> None:
        """Compare the bounced requests with the inboxes of agents and the bounces of users and systems."""
        found: list[str] = []

        def read(agents: AgentOperations) -> None:
            for name in itertools.product(ORGANIZATIONS, AGENTS):
                found.extend(
                    letter.message_id for _, letter in Inboxes(agents).letters(*name) if letter.is_bounce
                )
            found.extend(bounce.message_id for _, bounce in BOUNCES.all(agents.transaction))

        self._write(read)
        bounced = sorted(message_id for message_id, one in self._requests.items() if one.bounced)
        for message_id in set(bounced) ^ set(found) | {one for one in found if found.count(one) > 1}:
            self._report("creator", message_id, f"its creator has it {found.count(message_id)} times")


def main(arguments: list[str] | None = None) -> int:
    """Replay one seed and print its history; exit code 1 when a rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.agentworld", description=main.__doc__)
    parser.add_argument("--seed", type=int, required=True)
    report = AgentWorld(parser.parse_args(arguments).seed).run()
    sys.stdout.write("\n".join([*report.trace, str(report), ""]))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
