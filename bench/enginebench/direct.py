"""An engine without workers and event loops: its operations, called directly."""

from collections.abc import Iterable, Mapping
from typing import Any

from postroom import Engine, Policy
from postroom.core.lifecycle.fairness import Rotation
from postroom.engine.message_input import Prepared, Registry, stored
from postroom.engine.rules.breakers import service_called
from postroom.engine.rules.claims import Claimed, Claims
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.outcomes import Outcome, OutcomeKind, Usage
from postroom.engine.rules.policy import REQUEST_TYPES
from postroom.engine.rules.routes import HandlerRoute
from postroom.message import org_of
from postroom.system.clock import Clock

WORKER = "bench"


class Direct:
    """Submits, claims and finishes, each in a commit of its own."""

    def __init__(
        self, url: str, policy: Policy, services: Mapping[str, str], clock: Clock | None = None
    ) -> None:
        self._engine = Engine.open(url, policy, clock)
        self._store = self._engine.store
        self._policy = policy
        self._services = services
        self._routes = {name: (HandlerRoute(service),) for name, service in services.items()}
        self._registry = Registry(REQUEST_TYPES)
        self._rotation = Rotation()

    def submit(self, messages: Iterable[Mapping[str, Any]]) -> None:
        prepared = self._prepared(messages)
        self._store.write(lambda transaction: Operations(transaction, self._policy).submit(prepared))

    def fill(self, messages: Iterable[Mapping[str, Any]]) -> None:
        """Store messages without admission, to fill a store quickly."""
        inline_max = self._policy.body_inline_bytes_max
        envelopes = [stored(one, inline_max) for one in self._prepared(messages)]
        self._store.write(lambda transaction: transaction.insert(envelopes))

    def _prepared(self, messages: Iterable[Mapping[str, Any]]) -> list[Prepared]:
        wall_us = self._store.wall_us()
        return [self._registry.prepare(fields, self._policy, wall_us) for fields in messages]

    def claim(self, limit: int) -> list[Claimed]:
        return self._store.write(
            lambda transaction: Claims(transaction, self._policy, WORKER, self._rotation, self._routes).claim(
                limit
            )
        )

    def finish(self, claimed: Iterable[Claimed], kind: OutcomeKind, usage: Usage | None = None) -> None:
        outcomes = [
            Outcome(
                kind=kind,
                message_id=one.record.message_id,
                lease=one.record.lease,
                type=one.type,
                service=service_called(org_of(one.record.queue), "", self._services.get(one.type, "")),
                body=one.body,
                usage=usage,
            )
            for one in claimed
        ]
        stale = self._store.write(lambda transaction: Operations(transaction, self._policy).finish(outcomes))
        assert not stale

    def close(self) -> None:
        self._engine.close()
