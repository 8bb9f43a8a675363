"""A call of an agent that stays open is a heartbeat, also when it is a wait or a stream of one answer."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from postroom.client import EngineClient, RemoteAgent
from postroom.server.access.registry import Agents
from tests import warmpython
from tests.integration.engineworkers import working
from tests.waiting import HANG_GUARD_S, until

SERVER = """
import sys
from pathlib import Path
from postroom import AgentRules, Engine, Policy
from postroom.server.app import serve

data = Path(sys.argv[1])
engine = Engine.open(f"sqlite:///{data}/queue.db", Policy(agents=AgentRules(heartbeat_s=0.4)))
serve(data, port=0, app_engine=engine, durability="os", ready=lambda port: print(port, flush=True))
"""


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, EngineClient]]:
    data = tmp_path_factory.mktemp("presence")
    registry = Agents(data)
    tokens = {name: registry.add(name, org="acme") for name in ("request", "stream", "resume")}
    tokens["boss"] = registry.add("boss", role="operator")
    with warmpython.popen([sys.executable, "-c", SERVER, str(data)], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        try:
            with working(data), ExitStack() as stack:
                yield {name: stack.enter_context(EngineClient(url, token)) for name, token in tokens.items()}
        finally:
            server.terminate()


def ask(agent: RemoteAgent, call: str, gate: Path) -> Any:
    fields: dict[str, Any] = {"type": "tool_call", "payload": {"say": 1, "waits_for": str(gate)}}
    match call:
        case "request":
            return agent.request(**fields, timeout_s=HANG_GUARD_S)
        case "stream":
            return [*agent.stream(**fields)][-1]["result"]
        case _:
            agent._request(fields, 0.0)
            return [*agent.resume()][-1]["result"]


@pytest.mark.parametrize("call", ["request", "stream", "resume"])
def test_a_call_that_stays_open_is_heard(clients: dict[str, EngineClient], call: str, tmp_path: Path) -> None:
    gate, agent, answers = tmp_path / "gate", clients[call].agent(), list[Any]()
    assert agent.registration.session
    asking = threading.Thread(target=lambda: answers.append(ask(agent, call, gate)), daemon=True)
    asking.start()

    def silent_s() -> float:
        [found] = [one for one in clients["boss"].agents() if one["agent_id"] == call]
        return float(found["silent_s"])

    def is_open() -> bool:
        [found] = [one for one in clients["boss"].agents() if one["agent_id"] == call]
        return bool(found["waits_for"])

    until(is_open)
    for _ in range(4):  # of the calls of the agent only the first one is heard at once
        until(lambda: silent_s() > 0.1)
        until(lambda: silent_s() < 0.1)
    gate.touch()
    asking.join(HANG_GUARD_S)
    assert answers == [{"said": 1}]
