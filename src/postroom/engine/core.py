"""What an engine is made of: its data (types, handlers, additions), its commits, submits and wake-ups.

Rule 1: a part of the engine takes those of these that it needs. Only what needs most of them takes the core.
"""

from postroom.engine.additions import Additions
from postroom.engine.commits import Commits
from postroom.engine.message_input import Registry
from postroom.engine.rules.policy import PAYLOAD_KEYS, REQUEST_TYPES, Policy
from postroom.engine.rules.purge import EnginePurge
from postroom.engine.submits import Submits
from postroom.engine.wakeups import Wakeups
from postroom.engine.work.handlers import Handlers
from postroom.stores.store import Store


class EngineCore:
    """The inside of an engine, for its worker, its coordinator, and servers."""

    def __init__(self, store: Store, policy: Policy) -> None:
        self.store = store
        self.is_in_memory = store.url.startswith("memory:")
        """Whether the store belongs to this process: a forked process has a copy of it."""
        is_lost = not (store.capabilities.survives_kills or self.is_in_memory)  # in memory, all classes are
        self.handlers = Handlers()
        self.registry = Registry(
            REQUEST_TYPES,
            urgent="group" if is_lost else "os",
            payload_keys=PAYLOAD_KEYS,
            shapes=self.handlers,
        )
        self.additions = Additions()
        self.commits = Commits(store, policy)
        self.submits = Submits(store, self.registry, self.commits, self.additions)
        self.wakeups = Wakeups(store, self.commits)
        self.purge = EnginePurge(self.commits)

    @property
    def policy(self) -> Policy:
        """The rules of the engine."""
        return self.commits.policy

    def share(self, other: "EngineCore") -> None:
        """Use the types and handlers of another engine, also those registered later."""
        self.registry.share(other.registry)
        self.handlers.share(other.handlers)

    def close(self) -> None:
        """Close files and threads. They are opened again when they are needed."""
        self.commits.close()
        self.wakeups.close()
        self.store.close()
