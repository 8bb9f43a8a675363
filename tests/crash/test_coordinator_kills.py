"""40 kills -9 of coordinators, their agents and workers; `make crash` does the same 2,000 times.

A server is killed and upgraded under load, too, while agents in another process go on.
"""

import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom.client import EngineClient
from postroom.server.access.registry import Agents
from tests import warmpython
from tests.crash import coordinators
from tests.crash.ledger import Tally
from tests.integration.engineworkers import working
from tests.waiting import HANG_GUARD_S

KILLS = 40
SERVER_KILLS = 4
UPGRADES = 3
AGENTS = 3

PROGRAM = """
import sys
from pathlib import Path
from postroom.server.app import serve

serve(Path(sys.argv[1]), port=int(sys.argv[2]), overlap=True, durability="os",
      ready=lambda port: print(port, flush=True))
"""


@pytest.mark.statement("coordinator-routes")
def test_kills_lose_no_answer_and_repeat_none_to_an_agent_that_lives() -> None:
    seed = secrets.randbits(32)
    print(f"python -m tests.crash.run --only kills-coordinator --kills {KILLS} --seed {seed}")
    tally = coordinators.run(KILLS, seed)
    assert tally.facts["kills"] == KILLS
    assert tally.acknowledged > KILLS
    assert tally.ok, tally


def test_an_agent_that_acknowledges_too_early_is_caught() -> None:
    tally = Tally()
    for seed in range(10):
        tally.add(coordinators.run(10, seed, sabotage="early"))
        if tally.lost:
            break
    assert tally.lost, tally


# ---- agents that live while servers die ------------------------------------------------------------


class Server:
    """A server process that shares its port with the next one."""

    def __init__(self, data: Path, port: int = 0) -> None:
        self.process = warmpython.popen(
            [sys.executable, "-c", PROGRAM, str(data), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        self.process.communicate(timeout=HANG_GUARD_S)
        return self.process.returncode


class Load:
    """Agents in threads of this process that request until killed."""

    def __init__(self, port: int, tokens: dict[str, str]) -> None:
        self.answers: dict[str, list[Any]] = {name: [] for name in tokens}
        self.errors: list[Exception] = []
        self._stopping = threading.Event()
        self._clients = [
            EngineClient(f"http://127.0.0.1:{port}", token, retries=40) for token in tokens.values()
        ]
        self._threads = [
            threading.Thread(target=self._ask, args=(name, client), daemon=True)
            for name, client in zip(tokens, self._clients, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, name: str, client: EngineClient) -> None:
        try:
            agent, number = client.agent(), 0
            while not self._stopping.is_set():
                payload = {"say": number, "chunks": number % 3}
                answer = agent.request(type="tool_call", payload=payload, timeout_s=HANG_GUARD_S)
                self.answers[name].append(answer)
                number += 1
            self.answers[name] += [part for part in agent.resume() if part["type"] != "acknowledgment"]
        except Exception as error:  # noqa: BLE001 - the test shows it
            self.errors.append(error)

    def await_more(self, count: int) -> None:
        """Return when every agent has that many answers more."""
        wanted = {name: len(answers) + count for name, answers in self.answers.items()}
        pause, rounds = threading.Event(), 0
        while any(len(self.answers[name]) < least for name, least in wanted.items()) and not self.errors:
            pause.wait(0.01)
            rounds += 1
            assert rounds < HANG_GUARD_S * 100, "an agent gets no answers any more"

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(HANG_GUARD_S)
        for client in self._clients:
            client.close()

    def check(self) -> None:
        """Every agent has the answers to its requests, each once and in order, and nothing else."""
        assert not self.errors
        for answers in self.answers.values():
            expected = [
                [{"n": n} for n in range(number % 3)] if number % 3 else {"said": number}
                for number in range(len(answers))
            ]
            assert answers == expected


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "data").mkdir()
    registry = Agents(tmp_path / "data")
    return {f"a{number}": registry.add(f"a{number}", org="acme") for number in range(AGENTS)}


@pytest.fixture
def first(tmp_path: Path, tokens: dict[str, str]) -> Iterator[Server]:
    server = Server(tmp_path / "data")
    yield server
    if server.process.poll() is None:
        server.end(signal.SIGKILL)


def test_killed_servers_lose_nothing_and_repeat_nothing(
    tmp_path: Path, tokens: dict[str, str], first: Server
) -> None:
    server = first
    with working(tmp_path / "data"):
        load = Load(first.port, tokens)
        try:
            for _ in range(SERVER_KILLS):
                load.await_more(3)
                server.end(signal.SIGKILL)
                server = Server(tmp_path / "data", first.port)
            load.await_more(3)
        finally:
            load.stop()
            server.end(signal.SIGKILL)
    load.check()


@pytest.mark.statement("coordinator-upgrade")
def test_a_rolling_upgrade_under_load_loses_nothing(
    tmp_path: Path, tokens: dict[str, str], first: Server
) -> None:
    server = first
    with working(tmp_path / "data"):
        load = Load(first.port, tokens)
        try:
            for _ in range(UPGRADES):
                load.await_more(3)
                new = Server(tmp_path / "data", first.port)  # both serve now
                load.await_more(3)
                assert server.end(signal.SIGTERM) == 0
                server = new
            load.await_more(3)
        finally:
            load.stop()
            assert server.end(signal.SIGTERM) == 0
    load.check()
