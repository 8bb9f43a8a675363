"""`agent_spawn` starts a real program under a supervisor, and `agent_terminate` ends it."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from postroom import AgentRules, Engine, MessageFailed, Organization, Policy
from postroom.server.harness.agent_programs import AgentPrograms
from tests.waiting import HANG_GUARD_S, until

PROGRAM = """
import os, sys
from pathlib import Path
name = ".".join(os.environ[f"POSTROOM_{word}"] for word in ("ORG_ID", "AGENT_ID", "AGENT_TOOLS"))
(Path(sys.argv[1]) / f"{name}.{os.getpid()}").touch()
sys.stdin.read()
"""


@contextmanager
def working(folder: Path, *, program: str = PROGRAM) -> Iterator[Engine]:
    command = (sys.executable, "-c", program, str(folder)) if program else ()
    policy = Policy(agents=AgentRules(program=command), organizations={"small": Organization(max_agents=1)})
    engine = Engine.open(f"sqlite:///{folder}/queue.db", policy)
    thread = threading.Thread(target=lambda: asyncio.run(engine.run()), daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        engine.blocking.stop()
        thread.join(HANG_GUARD_S)
        engine.close()


def ask(engine: Engine, type: str, org_id: str = "acme", **payload: Any) -> Any:  # noqa: A002
    return engine.blocking.request(
        type=type, org_id=org_id, payload=payload, max_retries=0, timeout_s=HANG_GUARD_S
    )


def started(folder: Path, name: str) -> list[int]:
    """The processes that have run as an agent, the oldest first."""
    found = sorted(folder.glob(f"{name}.*"), key=lambda path: path.stat().st_mtime_ns)
    return [int(path.name.rpartition(".")[2]) for path in found]


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.statement("type-agent-spawn")
def test_a_program_is_started_kept_running_and_ended(tmp_path: Path) -> None:
    with working(tmp_path) as engine, AgentPrograms(engine) as programs:
        assert ask(engine, "agent_spawn", agent_id="writer", tools=["search"]) == {"agent_id": "writer"}
        until(lambda: len(started(tmp_path, "acme.writer.search")) == 1)
        [first] = started(tmp_path, "acme.writer.search")
        assert programs.pids["acme", "writer"] == first
        os.kill(first, signal.SIGKILL)
        until(lambda: len(started(tmp_path, "acme.writer.search")) == 2)
        second = started(tmp_path, "acme.writer.search")[1]
        assert ask(engine, "agent_terminate", agent_id="writer") == {"agent_id": "writer", "ended": True}
        until(lambda: is_gone(second))
        assert ask(engine, "agent_terminate", agent_id="writer") == {"agent_id": "writer", "ended": False}


def test_the_next_supervisor_starts_what_is_wanted(tmp_path: Path) -> None:
    with working(tmp_path) as engine:
        with AgentPrograms(engine), AgentPrograms(engine):
            ask(engine, "agent_spawn", agent_id="writer")
            until(lambda: started(tmp_path, "acme.writer."))
        [first] = started(tmp_path, "acme.writer.")
        assert is_gone(first)
        with AgentPrograms(engine):
            until(lambda: len(started(tmp_path, "acme.writer.")) == 2)


def test_a_program_that_ignores_its_stdin_ends_with_a_killed_supervisor(tmp_path: Path) -> None:
    program = PROGRAM.replace("sys.stdin.read()", "import time; time.sleep(10_000)")
    with working(tmp_path, program=program) as engine:
        ask(engine, "agent_spawn", agent_id="writer")
    pid = os.fork()
    if pid == 0:
        with working(tmp_path, program=program) as engine:
            AgentPrograms(engine).start()
            until(lambda: started(tmp_path, "acme.writer."))
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    [orphan] = started(tmp_path, "acme.writer.")
    until(lambda: is_gone(orphan))


def test_an_organization_spawns_a_limited_number_of_agents(tmp_path: Path) -> None:
    with working(tmp_path) as engine:
        ask(engine, "agent_spawn", "small", agent_id="a0")
        ask(engine, "agent_spawn", "small", agent_id="a0")
        with pytest.raises(MessageFailed, match="at most 1 agents"):
            ask(engine, "agent_spawn", "small", agent_id="a1")
        ask(engine, "agent_terminate", "small", agent_id="a0")
        ask(engine, "agent_spawn", "small", agent_id="a1")


@pytest.mark.parametrize(
    "payload", [{}, {"agent_id": "a b"}, {"agent_id": 1}, {"agent_id": "a", "tools": "x"}]
)
def test_a_payload_that_does_not_fit_is_a_dead_letter(tmp_path: Path, payload: dict[str, Any]) -> None:
    with working(tmp_path) as engine, pytest.raises(MessageFailed):
        ask(engine, "agent_spawn", **payload)


def test_agent_that_sleeps_is_started_once_a_program_is_configured(tmp_path: Path) -> None:
    with working(tmp_path, program="") as engine, AgentPrograms(engine) as programs:
        assert ask(engine, "agent_spawn", agent_id="writer")["health"] == "asleep"
        assert programs.pids == {}
    with working(tmp_path) as engine, AgentPrograms(engine):
        until(lambda: len(started(tmp_path, "acme.writer.")) == 1)
