"""Which deaths count against a message: real workers are killed, on every kind of store."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from postroom import Engine
from tests import warmpython
from tests.integration.commandline import isolate
from tests.postgresserver import database, postgres
from tests.waiting import HANG_GUARD_S, until

__all__ = ["database", "postgres"]  # fixtures

APP = """
import asyncio, os, signal, sys
from pathlib import Path
from postroom import Engine, Policy

engine = Engine.open(os.environ["APP_STORE"], policy=Policy(lease_s=float(os.environ["APP_LEASE_S"])))

async def run(message, ctx):
    with open("started", "a") as file:
        file.write(f"{message.message_id} {os.getpid()}\\n")
    if message.payload.get("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    while not Path("go").exists():
        await asyncio.sleep(0.01)
    return "done"

engine.handler("tool_call")(run)
engine.handler("model_call", pool="process")(run)
if __name__ == "__main__":
    asyncio.run(engine.run())
"""
SUPERVISED = ("-m", "postroom.cli.main", "engine", "work", "--app", "app:engine", "--min-workers", "1")
ALONE = ("app.py",)
KILLS = 3  # so many deaths of its own process quarantine a message


@pytest.fixture(params=["sqlite", "postgres", "rabbitmq"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    isolate(monkeypatch, tmp_path)
    Path("app.py").write_text(APP)
    found = f"sqlite:///{tmp_path}/run/queue.db"
    if request.param == "postgres":
        found = str(request.getfixturevalue("database"))
    if request.param == "rabbitmq":
        found = str(request.getfixturevalue("rabbit").url(found))
    monkeypatch.setenv("APP_STORE", found)
    return found


@contextmanager
def working(command: tuple[str, ...], lease_s: float) -> Iterator["subprocess.Popen[bytes]"]:
    environ = os.environ | {"APP_LEASE_S": str(lease_s)}
    with Path("work.log").open("ab") as log:
        process = warmpython.popen([sys.executable, *command], stdout=log, stderr=log, env=environ)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(HANG_GUARD_S)


def started() -> list[tuple[str, int]]:
    """The message and the process of each attempt so far."""
    lines = Path("started").read_text().splitlines() if Path("started").exists() else []
    return [(words[0], int(words[1])) for words in map(str.split, lines)]


def children(pid: int) -> list[int]:
    """The processes below one, the deepest first."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, found) for each in (*children(child), child)]


def submit(engine: Engine, count: int = 1, **fields: Any) -> list[str]:
    message: Any = {"type": "tool_call", "org_id": "acme", "payload": {}, **fields}
    return [one.message_id for one in engine.blocking.submit_many([message] * count)]


def outcome(engine: Engine, message_id: str) -> tuple[str, int]:
    info = engine.blocking.get(message_id)
    return info.state, info.crashes


def all_run(ids: list[str], after: int) -> bool:
    """Whether each message was started in an attempt after the first ones."""
    return {name for name, _ in started()[after:]} >= set(ids)


@pytest.mark.parametrize("is_whole_service", [False, True])
def test_kills_from_outside_never_count(url: str, is_whole_service: bool) -> None:
    """A deploy kills a worker, or all processes of the service one after the other."""
    with Engine.open(url) as engine:
        ids = submit(engine, 2) + submit(engine, 2, type="model_call")
        if is_whole_service:
            for _ in range(KILLS):
                before = len(started())
                with working(SUPERVISED, 1.0) as supervisor:
                    until(lambda: all_run(ids, before))  # noqa: B023 - it is called at once
                    for pid in (*children(supervisor.pid), supervisor.pid):
                        os.kill(pid, signal.SIGKILL)
                    supervisor.wait(HANG_GUARD_S)
        else:
            with working(SUPERVISED, 3_600.0) as supervisor:
                for _ in range(KILLS):
                    before = len(started())
                    until(lambda: all_run(ids, before))  # noqa: B023 - as above
                    os.kill(children(supervisor.pid)[-1], signal.SIGKILL)  # the worker itself
        Path("go").touch()
        with working(SUPERVISED, 3_600.0):
            until(lambda: {outcome(engine, one) for one in ids} == {("COMPLETED", 0)})


def test_lapsed_leases_without_a_dead_child_never_count(url: str) -> None:
    """Nobody watches a program that runs its engine itself."""
    with Engine.open(url) as engine:
        ids = submit(engine, 2) + submit(engine, 2, type="model_call")
        for _ in range(KILLS):
            before = len(started())
            with working(ALONE, 1.0) as program:
                until(lambda: all_run(ids, before))  # noqa: B023 - it is called at once
                program.kill()
                program.wait(HANG_GUARD_S)
        Path("go").touch()
        with working(ALONE, 3_600.0):
            until(lambda: {outcome(engine, one) for one in ids} == {("COMPLETED", 0)})


@pytest.mark.statement("poison-quarantine")
def test_killers_of_one_organization_are_quarantined_alone(url: str) -> None:
    with Engine.open(url) as engine, working((*SUPERVISED, "--max-workers", "1"), 3_600.0):
        ids = submit(engine, 2) + submit(engine, 2, type="model_call")
        until(lambda: all_run(ids, 0))
        for kind in ("tool_call", "model_call"):
            [killer] = submit(engine, org_id="umbrella", type=kind, payload={"dies": True})
            until(lambda: outcome(engine, killer) == ("QUARANTINED", 3))  # noqa: B023 - it is called at once
        Path("go").touch()
        until(lambda: {outcome(engine, one) for one in ids} == {("COMPLETED", 0)})
