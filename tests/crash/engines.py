"""An engine on one SQLite file whose senders and workers are killed -9.

`kills-engine`: at the end, every accepted message is stored and has ended once. Every effect happened once,
unless its message ended with `EffectUnknown`: then it happened at most once. After each kill, the
reserved tokens of the model are those of the live leases, and with the used and free ones they are its limit.
At the end none is reserved.
"""

import asyncio
import itertools
import time
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random

import msgspec

from postroom import Engine
from postroom.core.formats.events import of_store
from postroom.core.history.history_checker import History
from postroom.core.lifecycle import lifecycle
from postroom.engine.messages import decode_body
from postroom.engine.token_status import ModelTokens, status_of
from postroom.message import Record, Stored
from postroom.stores.base import Listing
from postroom.stores.transaction import Transaction
from postroom.testing import check_consistency
from tests.crash import engineprograms
from tests.crash.engineprograms import FINISH_LEASE_S, effects_file, open_engine, register
from tests.crash.ledger import Tally, number_of
from tests.crash.rounds import Tick, in_rounds
from tests.crash.workers import STUCK_S, Crew, Worker

LINES_MAX = 6
SENDER_PAUSE_S = 0.02  # the messages have to be finished by the end of each round
RECORDS_MAX = 100_000
EVENTS_MAX = 1_000_000
LOOK_EVERY_S = 0.05


def run(kills: int, seed: int, tick: Tick = lambda _: None, sabotage: str = "") -> Tally:
    """Kill `kills` times, in rounds with a file each."""
    return in_rounds("kills-engine", kills, seed, tick, partial(_round, sabotage=sabotage))


class Cast:
    """The processes of a round, and their replacements."""

    def __init__(self, folder: Path, crew: Crew, rng: Random, sabotage: str) -> None:
        self._folder = str(folder)
        self._crew = crew
        self._rng = rng
        self._sabotage = sabotage
        self._names = (f"w{number}" for number in itertools.count())
        self.living = [self._sender(), self._worker(), self._worker()]

    def kill_one(self) -> None:
        """Kill one process, mostly a worker, and start a replacement."""
        place = self._rng.choice((0, 1, 2, 1, 2))
        victim = self.living[place]
        self._crew.kill_at_random(victim, self._rng, LINES_MAX)
        self.living[place] = self._sender() if place == 0 else self._worker()

    def _sender(self) -> Worker:
        """The sender continues after the last acknowledged token; the next one may be stored already."""
        before = [line for worker in self._crew.workers if worker.name == "sender" for line in worker.lines]
        first = number_of(before[-1].split(" ")[0]) + 1 if before else 0
        return self._crew.start(
            "sender",
            engineprograms.sender,
            folder=self._folder,
            name="s",
            seed=self._rng.getrandbits(32),
            first=first,
            pause_s=SENDER_PAUSE_S,
            early=self._sabotage == "early",
        )

    def _worker(self) -> Worker:
        name = next(self._names)
        return self._crew.start(
            f"worker:{name}",
            engineprograms.worker,
            folder=self._folder,
            name=name,
            without_effect=self._sabotage == "plain",
        )


def _round(folder: Path, kills: int, rng: Random, tally: Tally, *, sabotage: str) -> None:
    with Crew() as crew, open_engine(folder) as reader:
        cast = Cast(folder, crew, rng, sabotage)
        for _ in range(kills):
            cast.kill_one()
            tally.count("kills")
            judge_tokens(reader, tally)
        crew.kill_all()
        accepted = dict(
            line.split(" ") for worker in crew.workers if worker.name == "sender" for line in worker.lines
        )
    tally.acknowledged += len(accepted)
    with open_engine(folder, FINISH_LEASE_S) as engine:
        register(engine, folder, without_effect=sabotage == "plain")
        finish(engine)
        judge(engine, folder, accepted, tally)
        if judge_tokens(engine, tally).reserved:
            tally.breaks("tokens are reserved, and no message runs")
        judge_settlements(engine, tally)


def finish(engine: Engine) -> None:
    """Work in this process until every message has ended."""

    async def work() -> None:
        running = asyncio.create_task(engine.run(concurrency=10))
        deadline = time.monotonic() + STUCK_S
        await asyncio.sleep(0)  # `stop` ends only workers that have begun
        while any(record.state not in lifecycle.ENDED for record in records_of(engine)):
            if time.monotonic() > deadline or running.done():
                break
            await asyncio.sleep(LOOK_EVERY_S)
        await engine.stop()
        await running

    asyncio.run(work())


def records_of(engine: Engine) -> list[Record]:
    return engine.store.find(Listing(limit=RECORDS_MAX))


def judge(engine: Engine, folder: Path, accepted: dict[str, str], tally: Tally) -> None:
    """Compare the stored messages with the accepted ones, and the effects with the stored messages."""
    happened = (
        Counter(effects_file(folder).read_text().split()) if effects_file(folder).exists() else Counter()
    )
    ids = {record.message_id for record in records_of(engine)}
    tally.lost += len(set(accepted.values()) - ids)
    for message_id in ids:
        stored = engine.store.load(message_id)
        if stored is not None:
            _judge_message(stored, happened, tally)
    tally.count("attempts", sum(record.attempt for record in records_of(engine)))
    _judge_events(engine, tally)


def judge_tokens(engine: Engine, tally: Tally) -> ModelTokens:
    """Compare the books of the model with the live leases, at one instant."""

    def look(transaction: Transaction) -> tuple[ModelTokens, int]:
        held = 0
        for record in transaction.records.find(Listing(state="PROCESSING", limit=RECORDS_MAX)):
            stored = transaction.records.load(record.message_id)
            if stored is not None and record.lease_until > transaction.steady_ns:
                held += decode_body(stored.envelope.payload).tokens
        return status_of(transaction, engine.policy.token_rules).providers["p"].models["small"], held

    model, held = engine.store.read(look)
    tally.count("reserved", model.reserved)
    if model.used + model.reserved + model.free != engineprograms.MODEL[model.window]:
        tally.breaks(f"the books of the model do not add up: {model}")
    if model.reserved != held:
        tally.breaks(f"{model.reserved} tokens are reserved, and live leases hold {held}")
    return model


def judge_settlements(engine: Engine, tally: Tally) -> None:
    """Every reservation was settled once."""
    reserved: Counter[int] = Counter()
    for event in engine.store.events(0, EVENTS_MAX):
        if event.kind == "tokens_reserved":
            reserved[event.lease] += event.detail["tokens"]
        elif event.kind == "tokens_returned":
            reserved[event.lease] -= event.detail["tokens"] + event.detail["used"]
            tally.count("tokens", event.detail["used"])
    if any(reserved.values()):
        tally.breaks(f"reservations of {sum(map(bool, reserved.values()))} leases were not settled once")


def _judge_message(stored: Stored, happened: Counter[str], tally: Tally) -> None:
    message_id, state = stored.record.message_id, stored.record.state
    token = str(msgspec.json.decode(stored.envelope.payload)["payload"]["token"])
    times = happened[token]
    tally.count(state.lower())
    match state:
        case "COMPLETED":
            tally.lost += times == 0
            tally.doubled += max(0, times - 1)
            if stored.result != f'{{"token":"{token}"}}'.encode():
                tally.breaks(f"message {message_id} has the result {stored.result!r}")
        case "DEAD_LETTER":
            tally.doubled += max(0, times - 1)
            if stored.history[-1].error_type != "EffectUnknown":
                tally.breaks(f"message {message_id} is dead: {stored.history[-1].error}")
        case _:
            tally.breaks(f"message {message_id} is {state} at the end")


def _judge_events(engine: Engine, tally: Tally) -> None:
    try:
        check_consistency(engine.store)
    except (AssertionError, ValueError) as error:
        tally.breaks(str(error).partition("\n")[0])
    history = History()
    completed: Counter[str] = Counter()
    for event in engine.store.events(0, EVENTS_MAX):
        history.add(of_store(event, "engine:kills", "engine"))
        completed[event.message_id] += event.kind == "execution_completed"
    tally.doubled += sum(times - 1 for times in completed.values() if times > 1)
    for violation in history.verdict().violations:
        if violation.rule != "order":  # the order of a key differs from the order of a priority
            tally.breaks(f"{violation.rule}: {violation.sentence}")
