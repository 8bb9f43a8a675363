"""The breakers of services inside one transaction.

Rule 1: each organization has a breaker of its own for each service that its messages call.
Rule 2: the service of a handler also has a breaker that all organizations share. It opens only when several
        organizations fail. A service that only a message names has none: a message can name any service.
"""

from functools import partial
from typing import NamedTuple

from postroom.core.lifecycle import breaker
from postroom.core.lifecycle.breaker import CLOSED, Circuit
from postroom.engine.messages import Body
from postroom.engine.rules.admission import ALL
from postroom.engine.rules.bodies import payload_of
from postroom.engine.rules.cells import CIRCUITS
from postroom.engine.rules.policy import Policy
from postroom.engine.rules.routes import Routes, chosen
from postroom.stores.transaction import Transaction


class Service(NamedTuple):
    """The service that the messages of an organization call."""

    org_id: str
    name: str
    is_shared: bool = False
    """Whether the handler declares the service."""

    @property
    def scopes(self) -> tuple[str, ...]:
        """The organizations whose breakers hold for a call."""
        return (self.org_id, ALL) if self.is_shared else (self.org_id,)


def service_called(org_id: str, named: str, declared: str) -> Service | None:
    """The service of a message: the one that it names, else the one that its handler declares."""
    name = named or declared
    return Service(org_id, name, is_shared=name == declared) if name else None


def service_of(
    transaction: Transaction, routes: Routes, type_name: str, org_id: str, body: Body
) -> Service | None:
    """The service of a stored message: the one that it names, else that of the handler that would run it."""
    known = routes.get(type_name)
    route = chosen(known, body.service, partial(payload_of, transaction, body)) if known else None
    return service_called(org_id, body.service, route.service if route else "")


class Breakers:
    """Looks up and changes breakers. Each is read once in a transaction."""

    def __init__(self, transaction: Transaction, policy: Policy) -> None:
        self._transaction = transaction
        self._policy = policy
        self._known: dict[tuple[str, str], Circuit] = {}
        self._any: bool | None = None

    @property
    def any(self) -> bool:
        """Whether any service has failed lately."""
        if self._any is None:
            self._any = bool(CIRCUITS.scan(self._transaction, limit=1))
        return self._any

    def held_by(self, service: Service, message_id: str) -> Circuit | None:
        """The breaker that does not let a message call a service; None when it may call."""
        now = self._transaction.steady_ns
        circuits = [self.circuit(org_id, service.name) for org_id in service.scopes]
        refusing = [circuit for circuit in circuits if not breaker.admits(circuit, message_id, now)]
        return max(refusing, key=lambda circuit: circuit.open_until, default=None)

    def let_through(self, service: Service, message_id: str, lease_ns: int) -> None:
        """A message calls a service: it probes the breakers that are not closed."""
        for org_id in service.scopes:
            circuit = self.circuit(org_id, service.name)
            after = breaker.probed(circuit, message_id, self._transaction.steady_ns, lease_ns)
            self._set(org_id, service.name, after)

    def failed(self, service: Service, message_id: str) -> None:
        """A call failed."""
        rule, now = self._policy.breaker_of(service.name), self._transaction.steady_ns
        own = breaker.failed(self.circuit(service.org_id, service.name), rule, message_id, now)
        if service.is_shared:
            shared = self.circuit(ALL, service.name)
            if shared.probe == message_id:
                own = breaker.opened(rule, now)
            after = breaker.failed_shared(shared, rule, message_id, service.org_id, now)
            self._set(ALL, service.name, after)
        self._set(service.org_id, service.name, own)

    def succeeded(self, service: Service, message_id: str) -> None:
        """A call succeeded."""
        if self.any:
            for org_id in service.scopes:
                circuit = self.circuit(org_id, service.name)
                self._set(org_id, service.name, breaker.succeeded(circuit, message_id))

    def circuit(self, org_id: str, name: str) -> Circuit:
        """The breaker of an organization, or the one that all organizations share."""
        key = org_id, name
        if key not in self._known:
            self._known[key] = CIRCUITS.get(self._transaction, *key) or CLOSED
        return self._known[key]

    def _set(self, org_id: str, name: str, after: Circuit) -> None:
        before = self.circuit(org_id, name)
        if after == before:
            return
        self._known[org_id, name], self._any = after, True
        CIRCUITS.put(self._transaction, after, org_id, name)
        detail = {"service": name} | ({"org_id": org_id} if org_id else {})
        if after.state == "open" and before.state != "open":
            self._transaction.emit("breaker_opened", detail=detail)
        elif after.state == "closed" and before.state != "closed":
            self._transaction.emit("breaker_closed", detail=detail)
