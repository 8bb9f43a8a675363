"""Nudges for new tasks, to the agents that have registered an address."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager

from postroom.contracts.tasks.tasks import Tasks
from postroom.server.access.registry import Agents
from postroom.server.access.task_names import shown_id
from postroom.server.harness.nudger import Nudger

EVENTS_A_READ = 1_000


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
