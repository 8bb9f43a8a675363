"""Two followers of the events of a store: results become decisions, and new tasks become nudges.

Rule 1: the position of the results is saved after the decisions are stored. A crash in between reads the
        events again, which is harmless: a result becomes one decision, however often its event is read.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from postroom.contracts.tasks.task_operations import TaskCall, holds_decisions
from postroom.contracts.tasks.tasks import Tasks
from postroom.errors import PostroomError, Rejected
from postroom.message import ENGINE_PREFIX, Event
from postroom.server.access.registry import Agents
from postroom.server.access.task_names import shown_id
from postroom.server.harness.nudger import Nudger
from postroom.system.atomic import read_file, replace_file

POSITION_FILE = "harness.position"
EVENTS_A_READ = 1_000
DECISIONS_A_COMMIT = 50


class EventPosition(msgspec.Struct, frozen=True):
    """The last event that was read. Its facts show whether the store is still the same one."""

    seq: int = 0
    ts_us: int = 0
    message_id: str = ""


class ResultFollower:
    """Opens decisions for the results of a store. `log` is called with an event name and facts."""

    def __init__(self, tasks: Tasks, folder: Path, log: Callable[..., None]) -> None:
        self._tasks = tasks
        self._path = folder / POSITION_FILE
        self._position: EventPosition | None = None
        self._log = log
        self.ready: dict[str, None] = {}
        """Queues in which decisions were ready since the first read. Who finds none removes the queue."""

    def open_decisions(self) -> None:
        """Read the new events, and open a decision for every result among them."""
        position = self._position or self._load()
        while events := self._tasks.events(after=position.seq, limit=EVENTS_A_READ):
            completed = [
                event.message_id
                for event in events
                if event.kind == "execution_completed"
                and not holds_decisions(event.queue)
                and not event.queue.startswith(ENGINE_PREFIX)
            ]
            for event in events:
                if event.state == "QUEUED" and holds_decisions(event.queue):
                    self.ready.setdefault(event.queue)
            for start in range(0, len(completed), DECISIONS_A_COMMIT):
                self._open(completed[start : start + DECISIONS_A_COMMIT])
            position = self._position = _position_of(events[-1])
            replace_file(self._path, msgspec.json.encode(position), "os")  # see rule 1
        self._position = position

    def _open(self, task_ids: list[str]) -> None:
        def opening(task_id: str) -> TaskCall:
            return lambda operations: operations.open_decision(task_id)

        outcomes = self._tasks.run_many([opening(task_id) for task_id in task_ids])
        for task_id, outcome in zip(task_ids, outcomes, strict=True):
            if isinstance(outcome, Rejected):  # the task was purged meanwhile
                self._log("decision_not_opened", task_id=task_id, error=type(outcome).__name__)
            elif isinstance(outcome, PostroomError):
                raise outcome
            elif outcome is not None:
                self._log("decision_opened", task_id=task_id, decision=outcome)

    def _load(self) -> EventPosition:
        """The saved position, if the store still has its event; else the beginning.

        Every queue of decisions counts as ready: what was enqueued before is not read again.
        """
        queues = self._tasks.store.read(lambda transaction: transaction.lanes.queues())
        self.ready.update(dict.fromkeys(filter(holds_decisions, queues)))
        try:
            position = msgspec.json.decode(read_file(self._path), type=EventPosition)
        except (OSError, msgspec.MsgspecError, ValueError):
            return EventPosition()
        at = self._tasks.events(after=position.seq - 1, limit=1) if position.seq > 0 else []
        if not at or (at[0].seq == position.seq and _position_of(at[0]) != position):
            return EventPosition()
        return position


def _position_of(event: Event) -> EventPosition:
    return EventPosition(event.seq, event.ts_us, event.message_id)


class AgentNudges:
    """Finds agents with new tasks and nudges them. `wake` is called when there may be new tasks."""

    def __init__(self, tasks: Tasks, agents: Agents, nudger: Nudger, wake: Callable[[], None]) -> None:
        self._tasks = tasks
        self._agents = agents
        self._ids = tasks.store.read(lambda transaction: transaction.ids)
        self._nudger = nudger
        self._wake = wake
        self._position: int | None = None
        """The last event that was read; None while no agent has an address."""
        self._subscriptions: dict[str, AbstractContextManager[None]] = {}

    def start(self) -> None:
        """Begin with the events from now on."""
        if self._position is None:
            self._position = self._tasks.store.newest_event()

    def run(self) -> None:
        """Nudge every agent with an address that got new tasks since the last run."""
        named = self._agents.with_url()
        new = [agent for agent in named if agent not in self._subscriptions]
        self._subscribe_to(named)
        if not named:
            self._position = None
            return
        newest = self._new_tasks(named)
        for agent in new:  # tasks may have waited before the agent had an address
            for waiting in self._tasks.find(agent=agent, state="QUEUED", limit=1):
                newest.setdefault(agent, waiting.task_id)
        for agent, task_id in newest.items():
            known = named[agent]
            self._nudger.nudge(agent, known.url or "", shown_id(self._ids, known.org, task_id))

    def _new_tasks(self, named: Collection[str]) -> dict[str, str]:
        """The newest task of each of these agents that was enqueued since the last run."""
        if self._position is None:  # the first agent with an address was registered
            self._position = self._tasks.store.newest_event()
        newest: dict[str, str] = {}
        while events := self._tasks.events(after=self._position, limit=EVENTS_A_READ):
            newest.update(
                (event.queue, event.message_id)
                for event in events
                if event.kind == "enqueued" and event.queue in named
            )
            self._position = events[-1].seq
        return newest

    def _subscribe_to(self, named: Collection[str]) -> None:
        """Receive the wake-ups for exactly these agents."""
        for agent in [agent for agent in self._subscriptions if agent not in named]:
            self._subscriptions.pop(agent).__exit__(None, None, None)
        for agent in named:
            if agent not in self._subscriptions:
                subscription = self._tasks.notifier.subscribed(agent, self._wake)
                subscription.__enter__()
                self._subscriptions[agent] = subscription

    def close(self) -> None:
        """End all subscriptions."""
        self._subscribe_to(())
