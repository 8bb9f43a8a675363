"""A world of one engine store, its senders and its workers, driven by random numbers from a seed.

Nothing here has threads or reads the real time, so a seed gives the same history every time. Messages are
submitted, claimed, finished, cancelled, paused and replayed while workers crash, calls are repeated, outcomes
come late and the wall clock steps. Then the world is drained, and `world_checker` says which rules broke.

    report = World(seed=7).run()
    assert report.ok, report

`python -m postroom.testing.world --seed 7 --store sqlite` prints the history of one seed.
"""

import argparse
import random
import sys
import tempfile
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

import postroom.goals.extensions  # noqa: F401 - the world checks operations, too
from postroom.core.formats.events import of_store
from postroom.core.goals import conflicts
from postroom.core.history.history_checker import History
from postroom.core.lifecycle import breaker, lifecycle, poison
from postroom.core.lifecycle.backpressure import Backpressure
from postroom.core.lifecycle.breaker import Breaker, Circuit
from postroom.core.lifecycle.fairness import PROMOTED_EVERY, Rotation
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.lifecycle.retry import Retry
from postroom.core.times import EPOCH, MICROSECOND
from postroom.core.tokens.provider_headers import Observed
from postroom.core.tokens.token_rules import WINDOWS
from postroom.core.tokens.tokens import WINDOW_NS
from postroom.engine.message_input import Prepared, Registry
from postroom.engine.rules.admission import ALL
from postroom.engine.rules.breakers import Service, service_called
from postroom.engine.rules.cells import CIRCUITS, GOALS, SEPARATOR, Effect, Part
from postroom.engine.rules.claims import Claimed, Claims
from postroom.engine.rules.operations import Operations, Submitted
from postroom.engine.rules.outcomes import Outcome, OutcomeKind, Usage
from postroom.engine.rules.policy import REQUEST_TYPES, Guard, Organization, Policy
from postroom.engine.rules.routes import HandlerRoute
from postroom.engine.token_status import status_of
from postroom.errors import (
    EffectUnknown,
    GuardTripped,
    KeyReused,
    Overloaded,
    ResultGone,
    StaleLease,
    Unavailable,
    WrongState,
)
from postroom.message import Event, Record, State, Stored, org_of
from postroom.stores.base import FOREVER_NS, Ending, Listing
from postroom.stores.memory import MemoryStore
from postroom.stores.open import open_store
from postroom.stores.sqlite.store import SqliteStore
from postroom.stores.store import Store
from postroom.stores.transaction import Transaction
from postroom.system.manual_clock import ManualClock
from postroom.testing.events import check_consistency
from postroom.testing.reports import SeedReport
from postroom.testing.world_checker import WORKER_DIED, Checker, Sent

T = TypeVar("T")
StoreName: TypeAlias = str
"""`memory`, `sqlite`, or the address of an empty store."""

STEPS: Final = (25, 75)
DRAIN_ROUNDS_MAX: Final = 2_000
RECORDS_MAX: Final = 10_000
EVENTS_MAX: Final = 100_000
CLAIM_MAX: Final = 4
FLOOD: Final = 12

ORGANIZATIONS: Final = ("acme", "bolt", "crux")
TYPES: Final = ("tool_call", "model_call", "memory_save")
SERVICES: Final = ("", "", "search", "model")
ON_OPEN: Final[tuple[dict[str, Any], ...]] = (
    {"p0": "fail"},
    {"p0": "defer"},
    {"on_open": "fail", "p0": "defer"},
)
TOOLS: Final = ("draw", "write", "read")
TARGETS: Final = ("deploy", "ledger")
ROUTES: Final = {"model_call": (HandlerRoute("model"), HandlerRoute("image", "draw"))}
"""Model calls that name no service call the one that their handler declares. Those with the tool draw have
another handler."""
KEYS: Final = ("", "", "", "a", "b")
GOALS_OF_THE_WORLD: Final = ("g1", "g2")
MODELS: Final[dict[str, Any]] = {
    "large": {"tokens_per_minute": 200, "requests_per_minute": 6},
    "small": {"tokens_per_minute": 100, "tokens_per_day": 1_000},
}
MODELS_ASKED: Final[tuple[list[str], ...]] = ([], ["small"], ["large"], ["small", "large"])
TOKENS_ASKED_MAX: Final = 50  # P3 can get them of every model
_ENDS: Final[dict[str, State]] = {
    "dead_letter": "DEAD_LETTER",
    "expired": "EXPIRED",
    "quarantined": "QUARANTINED",
}
"""Ends that no answer reports to a caller."""


class Report(SeedReport, frozen=True, kw_only=True):
    """The outcome of one seed on one store."""

    program = "postroom.testing.world"
    store: StoreName
    messages: int

    @property
    def command(self) -> str:
        return f"{super().command} --store {self.store}"


class CommitLost(Unavailable):
    """The commit of a write fails: nothing of it is kept."""


class _Held(msgspec.Struct, frozen=True):
    """An attempt, as its worker knows it."""

    claimed: Claimed
    worker: str

    @property
    def message_id(self) -> str:
        return self.claimed.record.message_id

    @property
    def lease(self) -> int:
        return self.claimed.record.lease


class _Passed(msgspec.Struct):
    """The last deliveries of one worker."""

    since_promoted: int = PROMOTED_EVERY
    """Since a promoted message was delivered before one of a higher class."""
    over: int = 0
    """While a promoted message waited all the time."""


class World:
    """One seeded history. `run` makes it, drains it and checks it."""

    def __init__(self, seed: int, *, store: StoreName = "memory") -> None:
        self.seed = seed
        self.store_name: StoreName = store
        self.clock = ManualClock()
        self._random = random.Random(seed)  # noqa: S311 - a history must be repeatable
        self.policy = _policy(self._random)
        self.checker = Checker(self.policy.poison_crashes)
        self._registry = Registry(REQUEST_TYPES)
        self._rotations = {f"w{number}": Rotation() for number in range(3)}
        self._passed = {worker: _Passed() for worker in self._rotations}
        self._held: list[_Held] = []
        self._lost: list[_Held] = []
        """Attempts of workers that crashed. Some of them report all the same: zombies."""
        self._sent_outcomes: list[Outcome] = []
        self._submits: list[Prepared] = []
        """Submits with a key that were acknowledged."""
        self._paused: set[tuple[str, str]] = set()
        self._down: set[str] = set()
        """Services whose calls fail at present."""
        self._operations: dict[str, Claimed] = {}
        """The last delivery of each message with an operation."""
        self._position = 0
        self._counts: dict[str, int] = {}
        self._trace: list[str] = []

    # ---- the course of the world ---------------------------------------------------------------

    def run(self) -> Report:
        """Make the history, drain the world, and check the rules."""
        with ExitStack() as closing:
            self._store = self._open(closing)
            actions = self._weights()
            for action in self._random.choices(
                [*actions], [*actions.values()], k=self._random.randint(*STEPS)
            ):
                name = action.__name__.strip("_")
                self._counts[name] = self._counts.get(name, 0) + 1
                action()
                self._hear()
                self._check_tokens()
            self._drain()
            self._check()
        return Report(
            seed=self.seed,
            store=self.store_name,
            broken=self.checker.broken,
            actions=self._counts,
            messages=len(self.checker.accepted),
            trace=self._trace,
        )

    def _open(self, closing: ExitStack) -> Store:
        if self.store_name == "memory":
            return MemoryStore(clock=self.clock)
        if self.store_name != "sqlite":
            opened = open_store(self.store_name, clock=self.clock)
            closing.callback(opened.close)
            return opened
        folder = closing.enter_context(
            tempfile.TemporaryDirectory(prefix="postroom-world-", dir=_fast_folder())
        )
        store = SqliteStore(f"{folder}/queue.db", clock=self.clock)
        closing.callback(store.close)
        return store

    def _weights(self) -> dict[Callable[[], None], int]:
        """What may happen next, and how likely."""
        return {
            self._submit: 18,
            self._submit_again: 4,
            self._flood: 2,
            self._cancel: 3,
            self._claim: 20,
            self._finish: 14,
            self._finish_many: 5,
            self._finish_again: 4,
            self._finish_late: 4,
            self._heartbeat: 4,
            self._crash: 4,
            self._run_effect: 6,
            self._stream: 2,
            self._pause: 2,
            self._resume: 3,
            self._replay: 3,
            self._purge: 1,
            self._outage: 3,
            self._throttle: 1,
            self._sweep: 3,
            self._wait: 9,
            self._step_wall: 1,
        }

    def _note(self, *words: object) -> None:
        self._trace.append(f"{self._now_ns() / NANOS_PER_S:9.3f}  {' '.join(map(str, words))}")

    def _now_ns(self) -> int:
        return self.clock.boot_ns()

    def _write(self, work: Callable[[Operations], T]) -> T:
        policy = self.policy
        return self._store.write(lambda transaction: work(Operations(transaction, policy)))

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _hear(self, claimed: dict[str, Claimed] | None = None) -> None:
        """Tell the checker about ends and deliveries, in the order of their events."""
        events = self._store.events(self._position, EVENTS_MAX)
        for event in events:
            if event.kind in _ENDS:
                self.checker.seen(event.message_id, _ENDS[event.kind])
            elif event.kind == "dequeued" and claimed and event.message_id in claimed:
                self._tell_claim(claimed.pop(event.message_id), event)
        if events:
            self._position = events[-1].seq
        for message_id in claimed or ():
            self.checker.report("history", message_id, "it was delivered without an event")

    def _tell_claim(self, claimed: Claimed, event: Event) -> None:
        record = claimed.record
        if record.lease != event.lease:
            self.checker.report("history", record.message_id, "its lease is not that of the event")
        until_ns = self._now_ns() + round(self.policy.lease_s * NANOS_PER_S)
        self.checker.claimed(
            record.message_id, record.lease, self._now_ns(), until_ns, alone=poison.runs_alone(record)
        )

    # ---- senders -------------------------------------------------------------------------------

    def _submit(self) -> None:
        """Submit one to three messages in one commit."""
        self._submit_all([self._message() for _ in range(self._random.choice((1, 1, 1, 2, 3)))])

    def _flood(self) -> None:
        """An organization submits more than a worker claims at once, which nothing holds back."""
        org_id, priority = self._random.choice(ORGANIZATIONS), self._random.choice((0, 0, 1, 3))
        self._submit_all([self._plain_message(org_id, priority) for _ in range(FLOOD)])

    def _submit_all(self, prepared: list[Prepared]) -> None:
        message_ids = [one.envelope.message_id for one in prepared]
        fails = self._chance(0.05)
        try:
            answers = self._write(lambda operations: _then(operations.submit(prepared), fails=fails))
        except (Overloaded, GuardTripped, CommitLost) as error:
            self._note("submit refused:", type(error).__name__, *message_ids)
            self.checker.refused(message_ids)
            return
        for one, answer in zip(prepared, answers, strict=True):
            self._accepted(one, answer)

    def _accepted(self, prepared: Prepared, answer: Submitted) -> None:
        envelope, body = prepared.envelope, prepared.body
        self._note(
            "accepted", answer.message_id, prepared.org_id, envelope.type, f"P{envelope.priority}",
            f"key {body.ordering_key or '-'}", f"service {body.service or '-'}",
        )  # fmt: skip
        self.checker.submitted(
            Sent(
                message_id=envelope.message_id, org_id=prepared.org_id, type=envelope.type,
                goal_id=body.goal_id, ordering_key=body.ordering_key, stops=body.on_dead == "stop",
                service=body.service,
                expires_ns=self._now_ns() + envelope.ttl_ns if envelope.ttl_ns else 0,
            )
        )  # fmt: skip
        if body.idempotency_key:
            self._submits.append(prepared)

    def _plain_message(self, org_id: str, priority: int) -> Prepared:
        fields = {
            "type": TYPES[0],
            "org_id": org_id,
            "payload": {},
            "priority": priority,
            "message_id": self._message_id(),
            "goal_id": GOALS_OF_THE_WORLD[0],
        }
        return self._registry.prepare(fields, self.policy, self.clock.wall_us())

    def _message_id(self) -> str:
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))

    def _message(self) -> Prepared:
        chance = self._random
        delay_s = chance.choice((0, 0, 0, 0, chance.uniform(0, 20)))
        key = chance.choice(KEYS) or None
        fields: dict[str, Any] = {
            "type": chance.choice(TYPES),
            "org_id": chance.choice(ORGANIZATIONS),
            "payload": {"number": (number := chance.randrange(1000)), "tool": TOOLS[number % len(TOOLS)]},
            "priority": chance.randrange(4),
            "message_id": self._message_id(),
            "goal_id": chance.choice(GOALS_OF_THE_WORLD),
            "delay_s": delay_s,
            "max_retries": chance.randrange(4),
            "service": chance.choice(SERVICES),
            "ordering_key": key,
            "on_dead": chance.choice(("continue", "continue", "stop")) if key else "continue",
            "operation": self._operation() if chance.random() < 0.3 else None,
            "idempotency_key": f"k{chance.getrandbits(40)}" if chance.random() < 0.5 else None,
            "tokens": chance.choice((0, chance.randint(1, TOKENS_ASKED_MAX))),
            "models": chance.choice(MODELS_ASKED),
        }
        if self.checker.accepted and chance.random() < 0.5:
            fields["parent_message_id"] = chance.choice(self.checker.accepted[-4:])
        if chance.random() < 0.15:
            lives = timedelta(seconds=delay_s + chance.uniform(1, 40))
            fields["expires_at"] = EPOCH + self.clock.wall_us() * MICROSECOND + lives
        return self._registry.prepare(fields, self.policy, self.clock.wall_us())

    def _operation(self) -> dict[str, Any]:
        chance = self._random
        return {
            "target": chance.choice(TARGETS),
            "resources": chance.choice(([], ["gpu"], {"seats": 1}, {"seats": 2})),
            "mode": chance.choice(("exclusive", "shared")),
            "constraints": chance.choice(({}, {}, {"not_with": ["deploy"]}, {"at_most": 1})),
        }

    def _submit_again(self) -> None:
        """A sender repeats a submit with its key, perhaps with another payload."""
        if not self._submits:
            return
        first = self._random.choice(self._submits)
        again = first
        if self._chance(0.2):
            again = replace(first, digest="another")
        message_id = first.envelope.message_id
        try:
            [answer] = self._write(lambda operations: operations.submit([again]))
        except KeyReused:
            if again is first:
                self.checker.report(
                    "duplicate", message_id, "a repeated submit was taken for another message"
                )
        except ResultGone:
            self._note("submitted again after it was purged", message_id)
        except Overloaded:
            self.checker.report("duplicate", message_id, "a repeated submit was refused like a new one")
        else:
            self._note("submitted again", message_id)
            self.checker.repeated(message_id, answer.message_id, duplicate=answer.duplicate)

    def _cancel(self) -> None:
        if not (records := self._records()):
            return
        message_id = self._random.choice(records).message_id
        try:
            self._write(lambda operations: operations.cancel(message_id))
        except (WrongState, LookupError):
            return
        self._note("cancelled", message_id)
        self.checker.cancelled(message_id)

    def _records(self, state: State | None = None) -> list[Record]:
        return self._store.find(Listing(state=state, limit=RECORDS_MAX))

    def _loaded(self, message_id: str) -> Stored:
        stored = self._store.load(message_id)
        assert stored is not None
        return stored

    # ---- workers -------------------------------------------------------------------------------

    def _claim(self) -> None:
        worker = self._random.choice([*self._rotations])
        self._claim_as(worker, self._random.randint(1, CLAIM_MAX))

    def _claim_as(self, worker: str, limit: int) -> list[_Held]:
        rotation, policy = self._rotations[worker], self.policy
        circuits = self._open_circuits()

        def work(transaction: Transaction) -> list[Claimed]:
            return Claims(transaction, policy, worker, rotation, ROUTES).claim(limit)

        claimed = self._store.write(work)
        self._hear({one.record.message_id: one for one in claimed})
        for each in claimed:
            if self._is_paused(org_of(each.record.queue), each.type):
                self.checker.report("paused", each.record.message_id, "its organization or type is paused")
        self._check_services(claimed, circuits)
        self._check_priority(worker, claimed)
        self._check_operations(claimed)
        held = [_Held(one, worker) for one in claimed]
        for one in held:
            self._note(worker, "claimed", one.message_id, "lease", one.lease)
            self.checker.within(one.message_id, policy.guard.tokens)
            if (grant := one.claimed.grant) is not None:
                self._note("  with", grant.tokens, "tokens of", grant.model, f"({grant.borrowed} borrowed)")
                self.checker.reserved(one.message_id, one.lease, grant.model, grant.tokens)
        self._held += held
        return held

    def _take(self) -> _Held | None:
        """One attempt that is under way, or that its worker believes to be."""
        if not self._held:
            return None
        return self._held.pop(self._random.randrange(len(self._held)))

    def _finish(self) -> None:
        held = self._take()
        if held is not None:
            self._commit([self._outcome(held)])

    def _finish_many(self) -> None:
        """A worker commits several outcomes at once, and claims in the next commit."""
        taken = [held for held in (self._take() for _ in range(3)) if held is not None]
        self._commit([self._outcome(held) for held in taken])

    def _finish_again(self) -> None:
        """An outcome is sent twice, for example because the first answer was lost."""
        if self._sent_outcomes:
            self._commit([self._random.choice(self._sent_outcomes[-10:])])

    def _finish_late(self) -> None:
        """A worker that was thought dead reports, perhaps together with the present holder."""
        if not self._lost:
            return
        zombie = self._lost.pop(self._random.randrange(len(self._lost)))
        outcomes = [self._outcome(zombie)]
        holder = next((held for held in self._held if held.message_id == zombie.message_id), None)
        if holder is not None and self._chance(0.5):
            self._held.remove(holder)
            outcomes.insert(self._random.randrange(2), self._outcome(holder))
        self._commit(outcomes)

    def _outcome(self, held: _Held) -> Outcome:
        claimed, chance = held.claimed, self._random
        service = _service_of(claimed)
        kind: OutcomeKind = "failed"
        if service is None or service.name not in self._down:
            kind = chance.choices(_OUTCOMES, (60, 18, 8, 8, 6))[0]
        return Outcome(
            kind=kind, message_id=held.message_id, lease=held.lease, type=claimed.type, service=service,
            org_id=org_of(claimed.record.queue),
            result=msgspec.json.encode(f"{held.worker} under {held.lease}"), body=claimed.body,
            error="the call failed", error_type="Failed", is_final=chance.random() < 0.1,
            retry_in_s=chance.choice((None, None, 0.0, 5.0)), spread=chance.random(),
            delay_s=chance.uniform(0, 10), counts_for_breaker=service is not None,
            usage=self._usage(claimed) if chance.random() < 0.3 else None,
            keeps_priority=chance.random() < 0.3, grant=claimed.grant,
        )  # fmt: skip

    def _usage(self, claimed: Claimed) -> Usage:
        """What an attempt used; of an estimate, no more than that, because more counts up to the limits."""
        used = self._random.randrange(50)
        grant = claimed.grant
        return Usage(tokens_in=min(used, grant.tokens) if grant and grant.is_estimate else used)

    def _commit(self, outcomes: list[Outcome]) -> None:
        """Send outcomes in one commit. A commit that fails is sent again."""
        if not outcomes:
            return
        if self._chance(0.05):
            try:
                self._write(lambda operations: _then(operations.finish(outcomes), fails=True))
            except CommitLost:
                self._note("the commit of outcomes failed")
        stale = self._write(lambda operations: operations.finish(outcomes))
        self._sent_outcomes += outcomes
        completed = [one for one in outcomes if one.kind == "completed"]
        others = [one for one in outcomes if one.kind != "completed"]
        message_ids = [one.message_id for one in outcomes]
        for outcome in completed + others:  # the order in which they are applied
            message_id = outcome.message_id
            accepted = message_id not in stale
            if message_ids.count(message_id) > 1:  # the answer does not tell which of them was stale
                accepted = self.checker.is_live(message_id, outcome.lease, self._now_ns())
            self._tell_outcome(outcome, accepted=accepted)
        self._hear()

    def _tell_outcome(self, outcome: Outcome, *, accepted: bool) -> None:
        self._note(
            outcome.kind, outcome.message_id, "lease", outcome.lease, "accepted" if accepted else "stale"
        )
        self.checker.finished(
            outcome.message_id, outcome.lease, outcome.kind, self._now_ns(), accepted=accepted,
            result=outcome.result, tokens=0 if outcome.usage is None else outcome.usage.tokens_in,
        )  # fmt: skip

    def _heartbeat(self) -> None:
        if not self._held:
            return
        held = self._random.choice(self._held)
        lost = self._write(lambda operations: operations.heartbeat({held.message_id: held.lease}))
        until_ns = self._now_ns() + round(self.policy.lease_s * NANOS_PER_S)
        accepted = not lost
        self._note("heartbeat", held.message_id, "lease", held.lease, "accepted" if accepted else "stale")
        self.checker.renewed(held.message_id, held.lease, self._now_ns(), until_ns, accepted=accepted)

    def _crash(self) -> None:
        """A worker disappears with its leases; a supervisor may notice."""
        worker = self._random.choice([*self._rotations])
        gone = [held for held in self._held if held.worker == worker]
        self._held = [held for held in self._held if held.worker != worker]
        self._lost += gone
        self._rotations[worker], self._passed[worker] = Rotation(), _Passed()
        self._note(worker, "crashed with", len(gone), "leases")
        if self._chance(0.4):
            self._write(lambda operations: operations.crash_worker(worker))
            for held in [*gone, *self._lost]:
                if held.worker == worker and self.checker.is_live(
                    held.message_id, held.lease, self._now_ns()
                ):
                    self.checker.over(held.message_id, WORKER_DIED)

    # ---- effects -------------------------------------------------------------------------------

    def _run_effect(self) -> None:
        """An effect: intent, call and outcome, with a crash, an error or a late report in between."""
        if not self._held:
            return
        held = self._random.choice(self._held)
        key, runs_unknown = self._random.choice(("mail", "pay")), self._chance(0.3)
        if not self._begin_effect(held, key, runs_unknown=runs_unknown):
            return
        match self._random.randrange(6):
            case 0:
                self._note("crash after the intent of", key, held.message_id)
                self._held.remove(held)
                self._lost.append(held)
                return
            case 1:
                if self._change_effect(held, lambda one: one.drop_effect(held.message_id, held.lease, key)):
                    self.checker.effect_dropped(held.message_id, key)
                return
            case 2:
                self._pass_time(self.policy.lease_s * 1.5)
        outcome = f"{key} under {held.lease}"
        if self._change_effect(held, lambda one: one.end_effect(held.message_id, held.lease, key, outcome)):
            self.checker.effect_ended(held.message_id, key, outcome)

    def _begin_effect(self, held: _Held, key: str, *, runs_unknown: bool) -> bool:
        message_id = held.message_id
        try:
            known = self._write(
                lambda one: one.begin_effect(message_id, held.lease, key, runs_unknown=runs_unknown)
            )
        except (EffectUnknown, StaleLease, LookupError) as error:
            live = self.checker.is_live(message_id, held.lease, self._now_ns())
            if isinstance(error, StaleLease) and live:
                self.checker.report("refused", message_id, f"effect {key} was refused under a live lease")
            return False
        if isinstance(known, Effect):
            self.checker.effect_known(message_id, key, known.outcome)
            return False
        self._note("begins effect", key, message_id, "lease", held.lease)
        if not self.checker.is_live(message_id, held.lease, self._now_ns()):
            self.checker.report("effect", message_id, f"effect {key} was begun under a lease that was over")
        self.checker.effect_begun(message_id, key, runs_unknown=runs_unknown)
        return True

    def _change_effect(self, held: _Held, work: Callable[[Operations], None]) -> bool:
        try:
            self._write(work)
        except (StaleLease, LookupError):
            return False
        if not self.checker.is_live(held.message_id, held.lease, self._now_ns()):
            self.checker.report("effect", held.message_id, "an effect changed under a lease that was over")
        return True

    def _stream(self) -> None:
        """A handler reports progress; only a live lease may."""
        if not self._held:
            return
        held = self._random.choice(self._held)
        part = Part(held.message_id, "progress", "now", progress=0.5)
        accepted = True
        try:
            self._write(lambda one: one.add_parts(held.message_id, held.lease, [part], 0))
        except (StaleLease, LookupError):
            accepted = False
        if accepted != self.checker.is_live(held.message_id, held.lease, self._now_ns()):
            rule = "stale" if accepted else "refused"
            self.checker.report(rule, held.message_id, f"a progress report under lease {held.lease}")

    # ---- operators and the surroundings --------------------------------------------------------

    def _pause(self) -> None:
        org_id = self._random.choice((ALL, *ORGANIZATIONS))
        type_name = self._random.choice((ALL, *TYPES))
        kill = not type_name and self._chance(0.2)
        self._write(lambda operations: operations.pause(org_id, type_name, kill=kill))
        self._paused.add((org_id, type_name))
        self._note("paused", org_id or "*", type_name or "*", "kill" if kill else "")

    def _resume(self) -> None:
        if self._paused:
            self._resume_scope(*self._random.choice(sorted(self._paused)))

    def _resume_scope(self, org_id: str, type_name: str) -> None:
        self._write(lambda operations: operations.resume(org_id, type_name))
        if type_name:
            while self._write(lambda operations: operations.unpark(type_name, org_id)):
                pass
        self._paused.discard((org_id, type_name))
        self._note("resumed", org_id or "*", type_name or "*")

    def _replay(self) -> None:
        """Replay a dead letter, or a message that was cancelled or expired."""
        states: tuple[State, ...] = ("DEAD_LETTER", "QUARANTINED", "CANCELLED", "EXPIRED")
        ended = [record for state in states for record in self._records(state)]
        if ended:
            priority = self._random.choice((None, None, 0, 3))
            self._replay_one(self._random.choice(ended).message_id, priority)

    def _replay_one(self, message_id: str, priority: int | None = None) -> None:
        self._write(lambda operations: operations.replay(message_id, priority))
        self._note("replayed", message_id)
        self.checker.replayed(message_id)

    def _purge(self) -> None:
        """Forget a dead letter."""
        dead = self._records("DEAD_LETTER")
        if dead:
            record = self._random.choice(dead)
            self._write(lambda operations: operations.forget([record]))
            self._note("purged", record.message_id)
            self.checker.forgotten(record.message_id)

    def _outage(self) -> None:
        """A service goes down, or comes back."""
        service = self._random.choice(SERVICES[-2:])
        self._down ^= {service}
        self._note("service", service, "is down" if service in self._down else "is up")

    def _throttle(self) -> None:
        """A provider asks for a pause."""
        model = self._random.choice([*MODELS])
        self._write(lambda operations: operations.observe("p", model, Observed(retry_after_s=5.0)))
        self._note("the provider of", model, "asks for a pause")

    def _sweep(self) -> None:
        self._write(lambda operations: operations.sweep())

    def _wait(self) -> None:
        self._pass_time(self._random.choice((0.1, 1.0, 3.0, 8.0, self.policy.lease_s + 1.0, 60.0)))

    def _pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self._note(f"{seconds:g} s pass")

    def _step_wall(self) -> None:
        """NTP or a person sets the clock: no deadline may depend on it."""
        self.clock.step_wall(self._random.choice((-86_400, -10, 10, 86_400)))
        self._note("the wall clock steps")

    # ---- what a claim must not return ----------------------------------------------------------

    def _open_circuits(self) -> dict[tuple[str, str], tuple[Circuit, int]]:
        """The breakers that are not closed, by organization and service, each with the time of the store."""
        return self._store.read(
            lambda transaction: {
                _scope_of(key): (circuit, transaction.steady_ns)
                for key, circuit in CIRCUITS.scan(transaction)
                if circuit.state != breaker.CLOSED.state
            }
        )

    def _is_paused(self, org_id: str, type_name: str) -> bool:
        scopes = {(ALL, ALL), (org_id, ALL), (ALL, type_name), (org_id, type_name)}
        return not scopes.isdisjoint(self._paused)

    def _check_services(
        self, claimed: list[Claimed], circuits: dict[tuple[str, str], tuple[Circuit, int]]
    ) -> None:
        """One message probes a service after the cooldown, and another one when the probe is overdue."""
        for (org_id, name), (circuit, now_ns) in circuits.items():
            reached = [one for one in claimed if _holds_for(org_id, name, _service_of(one))]
            may_probe = now_ns >= max(circuit.open_until, circuit.probe_until)
            for number, one in enumerate(reached):
                is_probe = one.record.message_id == circuit.probe
                if number or not (may_probe or is_probe):
                    self.checker.report("breaker", one.record.message_id, f"the breaker of {name} is open")

    def _check_operations(self, claimed: list[Claimed]) -> None:
        """No two operations whose leases live have a conflict."""
        for one in claimed:
            if one.body is not None and one.body.operation is not None:
                self._operations[one.record.message_id] = one
        live = [
            one
            for message_id, one in self._operations.items()
            if self.checker.is_live(message_id, one.record.lease, self._now_ns())
        ]
        for one in live:
            others = [
                (other.record.message_id, other.body.operation)
                for other in live
                if other is not one and other.record.queue == one.record.queue
                and other.body is not None and other.body.operation is not None
            ]  # fmt: skip
            assert one.body is not None
            assert one.body.operation is not None
            found = conflicts.found(one.body.operation, others, self.policy.capacities)
            if found is not None:
                said = f"its operation conflicts with that of {found.other} ({found.kind} {found.what})"
                self.checker.report("conflict", one.record.message_id, said)

    def _check_priority(self, worker: str, claimed: list[Claimed]) -> None:
        """No message of a more urgent class waits, but for the share of promoted messages."""
        if not claimed:
            return
        waiting = [record for record in self._records("QUEUED") if self._may_run(record)]
        lowest = max([one.record.lane for one in claimed if not one.is_promoted], default=0)
        for record in waiting:
            if record.lane < lowest:
                said = f"it waits in P{record.lane} while P{lowest} was claimed"
                self.checker.report("priority", record.message_id, said)
        oldest = [record for record in self._oldest() if record in waiting]
        for at, one in enumerate(claimed):
            later = [each.record for each in claimed[at + 1 :]]
            self._check_share(self._passed[worker], one, [*waiting, *later])
            if one.is_promoted and any(one.record.lane > each.record.lane for each in claimed):
                self._passed[worker].over = 0
                continue
            behind = [record for record in [*oldest, *later] if self._class_of(record) <= one.record.lane]
            passed, behind = self._passed[worker], [each for each in behind if each.lane > one.record.lane]
            passed.over = passed.over + 1 if behind else 0  # one of eight deliveries goes to a promoted one
            if passed.over >= PROMOTED_EVERY:
                said = f"{passed.over} deliveries of one worker passed it over"
                self.checker.report("share", behind[0].message_id, said)

    def _check_share(self, passed: _Passed, claimed: Claimed, waiting: list[Record]) -> None:
        """At most one of eight deliveries goes to a promoted message while one of a higher class waits."""
        lane, since = claimed.record.lane, passed.since_promoted
        if not claimed.is_promoted or all(record.lane >= lane for record in waiting):
            passed.since_promoted += 1
            return
        if since < PROMOTED_EVERY - 1:
            said = f"it went before a higher class {since} deliveries after the last one"
            self.checker.report("share", claimed.record.message_id, said)
        passed.since_promoted = 0

    def _class_of(self, record: Record) -> int:
        age_ns = self._store.steady_ns() - record.ready_at
        return lifecycle.effective_lane(record.lane, age_ns, self.policy.promote_after_ns)

    def _may_run(self, record: Record) -> bool:
        """Whether nothing can hold a message back."""
        stored = self._loaded(record.message_id)
        body = msgspec.json.decode(stored.envelope.payload)
        return (
            body.keys().isdisjoint({"service", "ordering_key", "operation"})
            and stored.envelope.type not in ROUTES
            and not self._is_paused(org_of(record.queue), stored.envelope.type)
        )

    def _oldest(self) -> list[Record]:
        """The record that has waited longest in each lane, if it is also the first of its organization."""
        oldest: dict[int, Record] = {}
        first: dict[tuple[str, int], Record] = {}
        for record in self._records("QUEUED"):
            oldest[record.lane] = min(oldest.get(record.lane, record), record, key=attrgetter("ready_at"))
            key = record.queue, record.lane
            first[key] = min(first.get(key, record), record, key=attrgetter("place"))
        return [record for record in oldest.values() if first[record.queue, record.lane] == record]

    # ---- what must hold at every instant -------------------------------------------------------

    def _check_tokens(self) -> None:
        rules = self.policy.token_rules
        if rules is None:
            return
        status = self._store.read(lambda transaction: status_of(transaction, rules))
        for name, model in status.providers["p"].models.items():
            for window, found in model.windows.items():
                is_whole = found.used + found.reserved + found.free == found.limit == MODELS[name][window]
                if not is_whole or min(found.used, found.reserved, found.free) < 0:
                    self.checker.report("tokens", "", f"{window} of {name} does not add up: {found}")
            begun_ns = self._now_ns() + round(model.resets_in_s * NANOS_PER_S)
            begun_ns -= WINDOW_NS[WINDOWS.index(model.window)]
            self.checker.books(name, model.used, model.reserved, self._now_ns(), begun_ns)
            if sum(tier.limit for tier in model.tiers) != model.limit:
                self.checker.report("tokens", "", f"the pools of {name} are not its limit: {model.tiers}")

    # ---- the end -------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Resume everything, bring services back, and work until nothing is left to do."""
        self._note("the world is drained")
        for scope in sorted(self._paused):
            self._resume_scope(*scope)
        self._down.clear()
        if self.policy.guard.is_set:  # a person raises the limits: else a dead letter stops its key for good
            self.policy = replace(self.policy, guard=Guard(messages=RECORDS_MAX))
        self._lost += self._held
        self._held.clear()
        for _ in range(DRAIN_ROUNDS_MAX):
            position = self._position
            self._commit([self._success(held) for held in self._claim_as("w0", CLAIM_MAX)])
            self._held.clear()
            if self._position == position and not self._move_on():
                return

    def _success(self, held: _Held) -> Outcome:
        body = held.claimed.body
        return Outcome(
            kind="completed", message_id=held.message_id, lease=held.lease, type=held.claimed.type,
            service=_service_of(held.claimed), body=body,
        )  # fmt: skip

    def _move_on(self) -> bool:
        """Move the clock to the next deadline, or release a key that a dead letter stops."""
        step_ns = self._store.read(_next_ns)
        if step_ns is not None:
            self.clock.advance((step_ns + 1) / NANOS_PER_S)
            self._sweep()
            self._hear()
            return True
        if not any(record.state not in lifecycle.ENDED for record in self._records()):
            return False
        self.clock.advance(self.policy.breaker.cooldown_s)  # an open breaker would fail a replay again
        dead = [*self._records("DEAD_LETTER"), *self._records("QUARANTINED")]
        for record in dead:
            self._replay_one(record.message_id)
        return bool(dead)

    def _check(self) -> None:
        records = {}
        for record in self._records():
            records[record.message_id] = (record.state, self._loaded(record.message_id).result)
        self.checker.drained(records)
        self._check_tokens()
        self._check_books()
        if self.policy.guard.is_set:
            for key, use in self._store.read(GOALS.scan):
                org_id, _, goal_id = key.partition(SEPARATOR)
                self.checker.used(org_id, goal_id, use.tokens)

    def _check_books(self) -> None:
        try:
            check_consistency(self._store)
        except (AssertionError, ValueError) as error:
            self.checker.report("books", "", str(error).partition("\n")[0])
        history = History()
        for event in self._store.events(0, EVENTS_MAX):
            history.add(of_store(event, "engine:world", "engine"))
        for violation in history.verdict().violations:
            if violation.rule != "order":  # the engine promises order by key, which the checker judges
                self.checker.report(
                    "history", violation.message_id, f"{violation.rule}: {violation.sentence}"
                )


def _policy(chance: random.Random) -> Policy:
    """The rules of one world. Limits are small, so that short histories meet them."""
    return Policy(
        promote_after_s=chance.choice(((5.0, 15.0, 30.0), (1.0, 2.0, 3.0))),
        lease_s=chance.choice((2.0, 15.0)),
        poison_crashes=chance.choice((1, 3)),
        retries={"tool_call": Retry(strategy=chance.choice(("linear", "exponential")), delay_s=2.0)},
        backpressure=chance.choice((Backpressure(), Backpressure(scale=3, light=6, heavy=9, emergency=12))),
        breaker=Breaker(
            failures=chance.choice((2, 5)),
            cooldown_s=chance.choice((5.0, 300.0)),
            **chance.choice(ON_OPEN),
        ),
        capacities={"seats": 3.0},
        guard=chance.choice((Guard(), Guard(tokens=1_000_000), Guard(tokens=60), Guard(messages=20))),
        tokens=chance.choice(({}, _budgets(chance))),
        organizations={
            "acme": Organization(weight=chance.choice((0.5, 1.0, 3.0))),
            "bolt": Organization(max_depth=chance.choice((None, 5))),
            "crux": Organization(rate_per_s=chance.choice((None, 2.0))),
        },
    )


def _budgets(chance: random.Random) -> dict[str, Any]:
    return {
        "providers": {"p": {"models": MODELS}},
        "tiers": chance.choice(([0.4, 0.3, 0.2, 0.1], [0.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.0, 0.0])),
        "shortage": chance.choice(("defer", "queue", "degrade")),
    }


def _service_of(claimed: Claimed) -> Service | None:
    """The service of the handler that a message is for, worked out apart from the rules of the engine."""
    body = claimed.body
    if body is None:
        return None
    declared = ""
    if claimed.type == "model_call":
        draws = msgspec.json.decode(body.payload).get("tool") == "draw"
        declared = "image" if draws and not body.service else "model"
    return service_called(org_of(claimed.record.queue), body.service, declared)


def _scope_of(key: str) -> tuple[str, str]:
    """The organization and the service of a breaker."""
    org_id, _, service = key.partition(SEPARATOR)
    return org_id, service


def _holds_for(org_id: str, name: str, service: Service | None) -> bool:
    return service is not None and service.name == name and org_id in service.scopes


def _then(result: T, *, fails: bool) -> T:
    if fails:
        raise CommitLost("the commit failed")
    return result


def _next_ns(transaction: Transaction) -> int | None:
    """After how long something is due; None when nothing is, but messages without an end of their delay."""
    ends = [record.due for record in transaction.records.find(Ending("delay", FOREVER_NS, 1))]
    ends += [record.lease_until for record in transaction.records.find(Ending("lease", FOREVER_NS, 1))]
    soonest = min(ends, default=FOREVER_NS)
    return None if soonest > FOREVER_NS // 4 else max(0, soonest - transaction.steady_ns)


def _fast_folder() -> str | None:
    """A folder in memory, where the system has one."""
    memory = Path("/dev/shm")  # noqa: S108 - only private folders are made in it
    return str(memory) if memory.is_dir() else None


_OUTCOMES: Final[tuple[OutcomeKind, ...]] = ("completed", "failed", "released", "deferred", "crashed")


def main(arguments: list[str] | None = None) -> int:
    """Replay one seed and print its history; exit code 1 when a rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m postroom.testing.world", description=main.__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--store", default="memory", help="memory, sqlite, or the address of an empty store")
    options = parser.parse_args(arguments)
    report = World(options.seed, store=options.store).run()
    sys.stdout.write("\n".join([*report.trace, str(report), ""]))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
