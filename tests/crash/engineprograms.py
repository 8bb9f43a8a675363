"""The programs around an engine that get killed: they report after each call has returned.

sender    `TOKEN ID` for every accepted message
worker    `ran TOKEN ATTEMPT` at the end of every run of its handler
"""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Literal

from postroom import Engine, Policy
from postroom.calls.submit import SubmitFields
from tests.crash.ledger import token_of
from tests.crash.workers import Report

LEASE_S = 0.5  # short, so that messages of killed workers are redelivered soon
FINISH_LEASE_S = 15.0  # of the last worker, which nobody kills: a busy machine must not end its leases
CRASHES_MAX = 10_000  # killed workers must not make a message count as poison
SLOTS = 4
ORDERING_KEYS = ("", "", "a", "b")
EFFECT = "append"
TOKENS = (0, 50, 120)
MODEL = {"tokens_per_day": 10**9, "requests_per_minute": 10**9}
BUDGETS = {"providers": {"p": {"models": {"small": MODEL}}}, "tiers": [0.4, 0.3, 0.2, 0.1]}
"""Enough for every message: the books are judged, not the shortage."""

OnUnknown = Literal["raise", "run", "probe"]


def open_engine(folder: str | Path, lease_s: float = LEASE_S) -> Engine:
    policy = Policy(lease_s=lease_s, poison_crashes=CRASHES_MAX, tokens=BUDGETS)
    return Engine.open(f"sqlite:///{folder}/queue.db", policy=policy)


def effects_file(folder: str | Path) -> Path:
    """The outside world: a line for each time that an effect happened."""
    return Path(folder) / "effects.log"


def append_effect(folder: str | Path, token: str) -> str:
    """The effect itself. One small write to a file is complete or absent, whenever the process is killed."""
    fd = os.open(effects_file(folder), os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    try:
        os.write(fd, f"{token}\n".encode())
    finally:
        os.close(fd)
    return token


def register(
    engine: Engine,
    folder: str | Path,
    on_unknown: OnUnknown = "raise",
    ran: Callable[[str, int], None] = lambda _token, _attempt: None,
    die: Callable[[str], None] = lambda _point: None,
    *,
    without_effect: bool = False,
) -> None:
    """The handler of the messages: its effect appends the token to a file.

    `die` is called at each point of the effect, and may kill the process there. `without_effect` is a
    sabotage that the checker must detect: it appends without `ctx.effect`.
    """

    def probe(token: str) -> str | None:
        done = effects_file(folder)
        return token if done.exists() and token in done.read_text().split() else None

    @engine.handler("tool_call")
    async def handle(message: Any, context: Any) -> dict[str, Any]:
        token = message.payload["token"]

        def run() -> str:
            die("after the intent")
            outcome = append_effect(folder, token)
            die("after the run")
            return outcome

        options: dict[str, Any] = {"on_unknown": "run"} if on_unknown == "run" else {}
        if on_unknown == "probe":
            options = {"probe": lambda: probe(token)}
        outcome = run() if without_effect else await context.effect(EFFECT, run, **options)
        context.use_tokens(context.tokens // 3)
        die("after the outcome")
        ran(token, context.attempt)
        return {"token": outcome}


def sender(
    report: Report,
    *,
    folder: str,
    name: str,
    seed: int,
    first: int = 0,
    pause_s: float = 0.0,
    early: bool = False,
) -> None:
    """Submit forever, from number `first` on. The key prevents a duplicate after a kill."""
    rng = Random(seed)
    engine = open_engine(folder)
    number = first
    while True:
        tokens = [token_of(name, number + index, 0) for index in range(rng.randint(1, 3))]
        number += len(tokens)
        messages = [_message(token) for token in tokens]
        if early:
            report(lines=[f"{token} early" for token in tokens])
            time.sleep(0.01)
        handles = engine.blocking.submit_many(messages)
        if not early:
            report(lines=[f"{token} {one.message_id}" for token, one in zip(tokens, handles, strict=True)])
        time.sleep(pause_s)


def _message(token: str) -> SubmitFields:
    """The same message whenever a token is submitted again."""
    rng = Random(token)
    return {
        "type": "tool_call",
        "org_id": rng.choice(("acme", "bolt")),
        "payload": {"token": token},
        "priority": rng.randrange(4),
        "durability": rng.choice(("os", "os", "group")),
        "idempotency_key": token,
        "ordering_key": rng.choice(ORDERING_KEYS) or None,
        "tokens": rng.choice(TOKENS),
    }


def worker(report: Report, *, folder: str, name: str, without_effect: bool = False) -> None:
    """Work forever."""
    engine = open_engine(folder)

    def ran(token: str, attempt: int) -> None:
        report("ran", token, attempt)

    register(engine, folder, ran=ran, without_effect=without_effect)
    asyncio.run(engine.run(concurrency=SLOTS, worker_id=name))
