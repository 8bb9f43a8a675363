"""Follows the events of a store and opens a decision for every result.

Rule 1: the position is saved after the decisions are stored. A crash in between reads the events again, which
        is harmless: a result becomes one decision, however often its event is read.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from postroom.contracts.tasks.task_operations import TaskCall, holds_decisions
from postroom.contracts.tasks.tasks import Tasks
from postroom.errors import PostroomError, Rejected
from postroom.message import ENGINE_PREFIX, Event
from postroom.system.atomic import read_file, replace_file

POSITION_FILE = "harness.position"
EVENTS_A_READ = 1_000
DECISIONS_A_COMMIT = 50


class Position(msgspec.Struct, frozen=True):
    """The last event that was read. Its facts show whether the store is still the same one."""

    seq: int = 0
    ts_us: int = 0
    message_id: str = ""


class ResultFollower:
    """Opens decisions for the results of a store. `log` is called with an event name and facts."""

    def __init__(self, tasks: Tasks, folder: Path, log: Callable[..., None]) -> None:
        self._tasks = tasks
        self._path = folder / POSITION_FILE
        self._position: Position | None = None
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
            position = self._save(events[-1])  # see rule 1
        self._position = position

    def _open(self, task_ids: list[str]) -> None:
        outcomes = self._tasks.run_many([_opening(task_id) for task_id in task_ids])
        for task_id, outcome in zip(task_ids, outcomes, strict=True):
            if isinstance(outcome, Rejected):  # the task was purged meanwhile
                self._log("decision_not_opened", task_id=task_id, error=type(outcome).__name__)
            elif isinstance(outcome, PostroomError):
                raise outcome
            elif outcome is not None:
                self._log("decision_opened", task_id=task_id, decision=outcome)

    def _load(self) -> Position:
        """The saved position, if the store still has its event; else the beginning.

        Every queue of decisions counts as ready: what was enqueued before is not read again.
        """
        queues = self._tasks.store.read(lambda transaction: transaction.queues())
        self.ready.update(dict.fromkeys(filter(holds_decisions, queues)))
        try:
            position = msgspec.json.decode(read_file(self._path), type=Position)
        except (OSError, msgspec.MsgspecError, ValueError):
            return Position()
        at = self._tasks.events(after=position.seq - 1, limit=1) if position.seq > 0 else []
        if not at or (at[0].seq == position.seq and _position_of(at[0]) != position):
            return Position()
        return position

    def _save(self, event: Event) -> Position:
        position = self._position = _position_of(event)
        replace_file(self._path, msgspec.json.encode(position), "os")
        return position


def _opening(task_id: str) -> TaskCall:
    return lambda operations: operations.open_decision(task_id)


def _position_of(event: Event) -> Position:
    return Position(event.seq, event.ts_us, event.message_id)
