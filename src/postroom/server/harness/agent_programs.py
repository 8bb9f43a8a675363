"""Runs the programs of agents: `agent_spawn` asks for a program, and `agent_terminate` for its end.

Rule 1: the store says which programs are wanted. A supervisor that is started again starts them again.
Rule 2: a program that dies is started again, with growing pauses.
Rule 3: the supervisor that holds the lease runs the programs of a store. When it dies, another one takes over
        within seconds.
"""

import os
import threading
from collections.abc import Mapping
from typing import Final, Self

from postroom.engine.agents.leases import WantedPrograms
from postroom.engine.rules.cells import WantedProgram
from postroom.errors import PostroomError
from postroom.goals.engine import Engine
from postroom.server.up.supervisor import Supervisor
from postroom.system.log import library_log

_log = library_log("postroom.engine")

LOOK_S: Final = 0.5
PROGRAMS_MAX: Final = 1_000  # that one supervisor runs


class AgentPrograms:
    """Keeps the wanted programs of one engine running on this machine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: dict[tuple[str, str], tuple[WantedProgram, Supervisor]] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._holder = f"{os.getpid()}-{os.urandom(3).hex()}"

    def start(self) -> None:
        """Look for wanted programs in a thread, until `stop`."""
        self._thread = threading.Thread(target=self._run, name="postroom-agents", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End all programs. They stay wanted, and the next supervisor starts them."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def pids(self) -> Mapping[tuple[str, str], int | None]:
        """The processes by organization and agent."""
        return {agent: supervisor.pid for agent, (_, supervisor) in list(self._running.items())}

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self.adjust()
                except PostroomError as error:
                    _log.warning("the wanted programs of agents cannot be read: %s", error)
                self._stopping.wait(LOOK_S)
        finally:
            self._end_all()

    def adjust(self) -> None:
        """Start wanted programs that do not run, and end running ones that are no longer wanted."""
        wanted = self._wanted()
        for agent, (program, supervisor) in list(self._running.items()):
            if wanted.get(agent) != program:
                _log.info("agent %s of %s is ended", agent[1], agent[0])
                supervisor.stop()
                del self._running[agent]
        for agent, program in wanted.items():
            if agent not in self._running and len(self._running) < PROGRAMS_MAX:
                _log.info("agent %s of %s is started", agent[1], agent[0])
                supervisor = Supervisor(
                    program.command, name=f"agent {agent[1]}", environment=environment_of(*agent, program),
                    is_foreign=True,
                )  # fmt: skip
                supervisor.start()
                self._running[agent] = program, supervisor

    def _wanted(self) -> dict[tuple[str, str], WantedProgram]:
        """The wanted programs, if this supervisor holds the lease."""
        policy = self._engine.policy
        return self._engine.store.write(
            lambda transaction: WantedPrograms(transaction, policy).wanted_by(self._holder),
            makes_room=True,
        )

    def _end_all(self) -> None:
        for _, supervisor in self._running.values():
            supervisor.stop()
        self._running.clear()
        policy = self._engine.policy
        try:
            self._engine.store.write(
                lambda transaction: WantedPrograms(transaction, policy).release(self._holder),
                makes_room=True,
            )
        except PostroomError as error:
            _log.warning("the programs of agents are not passed on: %s", error)


def environment_of(org_id: str, agent_id: str, program: WantedProgram) -> dict[str, str]:
    """The environment of a program: who it is, and which tools it may use."""
    return {
        **os.environ,
        "POSTROOM_ORG_ID": org_id,
        "POSTROOM_AGENT_ID": agent_id,
        "POSTROOM_AGENT_TOOLS": ",".join(program.tools),
        "POSTROOM_AGENT_PROMPT": program.prompt,
        "POSTROOM_SPAWNED_BY": program.message_id,
    }
