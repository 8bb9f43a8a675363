"""The registry of a data folder: its agents and operators, identified by tokens.

Rule 1: a token is shown once, when it is made. The file holds only its SHA-256.
Rule 2: the token alone identifies a caller, never the text of a request.
Rule 3: when the file cannot be read, every caller is refused.
"""

import hmac
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from postroom.calls.fields import Role
from postroom.contracts.tasks.tasks import DECISIONS
from postroom.core.names import checked_name, scoped, split_scoped
from postroom.errors import AgentExists, InvalidMessage, UnknownAgent
from postroom.server.access.nudge_urls import checked_url
from postroom.server.access.registry_file import RegistryFile
from postroom.server.access.tokens import (
    NO_PERMISSIONS,
    TOKEN_CHARS,
    TOKENS_MAX,
    Permissions,
    RegisteredToken,
    TokenRegistry,
    digest_of,
    new_token,
)

FILE_NAME = "agents.json"
AGENTS_MAX = 10_000
MAY_SEND_TO_MAX = 1_000  # agents that one agent may send to


class RegisteredAgent(msgspec.Struct, frozen=True):
    """One entry of the file."""

    name: str
    role: Role
    url: str | None
    token_sha256: str
    created: datetime
    may_send_to: tuple[str, ...] = ()
    """Agents that this agent may send tasks to. An operator may send to all."""
    org: str = ""
    """The organization whose messages it may submit and see in the global queue; empty for none."""

    @property
    def identity(self) -> "Identity":
        """The owner of the token that was made with the agent."""
        return Identity(
            self.name, self.role, self.url, self.may_send_to, self.org, registered_targets=self.may_send_to
        )


class Identity(msgspec.Struct, frozen=True):
    """The owner of a token."""

    name: str
    role: Role
    url: str | None = None
    may_send_to: tuple[str, ...] = ()
    org: str = ""
    """Empty for an operator or admin of all organizations, and for an agent of none."""
    token_id: str = ""
    """Empty for the token that was made with the agent."""
    rate: float = 0.0
    """Calls a second that the token may make; 0 for the limit of the server."""
    permissions: Permissions = NO_PERMISSIONS
    registered_targets: tuple[str, ...] = ()
    """Those of `may_send_to` that stand in the registry of agents, whose names are plain."""

    @property
    def caller(self) -> str:
        """Names the token, or the agent of a token that was made with it."""
        return self.token_id or f"{self.role}:{self.name}"

    @property
    def holder(self) -> tuple[str, str]:
        """Whose share of a resource the calls use. Agents of two organizations may have the same name."""
        return self.org, self.name

    @property
    def is_operator(self) -> bool:
        """Whether the caller may use every queue of every organization."""
        return self.role != "agent" and not self.org

    def acting_as(self, agent: str, org: str) -> "Identity":
        """The identity of an agent that an operator of all organizations acts for."""
        return msgspec.structs.replace(
            self, name=checked_name("agent", agent), role="agent", org=checked_name("organization", org)
        )


class _Index(NamedTuple):
    """The agents of one version of the file."""

    version: tuple[int, int, int]
    by_digest: dict[str, tuple[str, Identity]]
    by_name: dict[str, RegisteredAgent]
    by_token: dict[str, tuple[RegisteredToken, Identity]]
    """The owners of further tokens. An entry counts only while its token is the one in the file."""


class Agents:
    """The agents and operators of a data folder. A file changed by another process is read again."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.tokens = TokenRegistry(data)
        """Further tokens, which can expire and be rotated."""
        self._file = RegistryFile(data / FILE_NAME, "agents", RegisteredAgent)
        self._known = _Index((0, 0, 0), {}, {}, {})

    def add(
        self,
        name: str,
        url: str | None = None,
        role: Role = "agent",
        may_send_to: Iterable[str] = (),
        org: str = "",
    ) -> str:
        """Add an agent or operator. Returns its token, which is not stored."""
        checked_name("agent", name)
        if name == DECISIONS:
            raise InvalidMessage(f"{DECISIONS} is the queue of the harness: choose another name")
        if role not in ("agent", "operator"):
            raise InvalidMessage(f"role must be agent or operator, not {role!r}")
        checked = None if url is None else checked_url(url)
        targets = _targets(may_send_to)
        if org:
            checked_name("organization", org)
            if role == "operator":
                raise InvalidMessage("an operator belongs to no organization: it may act for every one")
        token = new_token()
        with self._file.changing() as agents:
            if any(agent.name == name for agent in agents):
                raise AgentExists(name)
            self._check_free(name, org)
            if len(agents) >= AGENTS_MAX:
                raise InvalidMessage(f"there are {AGENTS_MAX} agents already, which is the limit")
            agents.append(
                RegisteredAgent(name, role, checked, digest_of(token), datetime.now(UTC), targets, org)
            )
        return token

    def _check_free(self, name: str, org: str) -> None:
        """Refuse a name whose tasks belong to another caller, or are already in another queue."""
        owner = self.tokens.owner(name)
        if owner not in ("", org):
            raise InvalidMessage(f"the name {name!r} belongs to organization {owner!r}: choose another one")
        if org and not owner and org in self.tokens.orgs_of(name):
            raise InvalidMessage(
                f"{org!r} has tokens of the agent {name!r}, whose tasks are those of {scoped(org, name)}: "
                "choose another name"
            )

    def remove(self, name: str) -> None:
        """Remove an agent or operator. Its token is invalid from now on. Its organization keeps the name."""
        with self._file.changing() as agents:
            kept = [agent for agent in agents if agent.name != name]
            if len(kept) == len(agents):
                raise UnknownAgent(name)
            org = next(agent.org for agent in agents if agent.name == name)
            if org:
                self.tokens.keep_owner(name, org)
            agents[:] = kept

    def allow(self, name: str, targets: Iterable[str]) -> tuple[str, ...]:
        """Let an agent also send tasks to these agents. Returns all agents that it may send to now."""
        return self._change_targets(name, lambda before: _targets((*before, *targets)))

    def deny(self, name: str, targets: Iterable[str]) -> tuple[str, ...]:
        """Stop an agent from sending tasks to these agents. Returns the agents that it may still send to."""
        denied = dict.fromkeys(targets)

        def without_denied(before: tuple[str, ...]) -> tuple[str, ...]:
            for target in denied:
                if target not in before:
                    raise InvalidMessage(f"agent {name!r} has no permission to send to {target!r}")
            return tuple(target for target in before if target not in denied)

        return self._change_targets(name, without_denied)

    def _change_targets(
        self, name: str, change: Callable[[tuple[str, ...]], tuple[str, ...]]
    ) -> tuple[str, ...]:
        with self._file.changing() as agents:
            for index, agent in enumerate(agents):
                if agent.name == name:
                    if agent.role == "operator":
                        raise InvalidMessage(f"{name!r} is an operator and may send to every agent")
                    agents[index] = msgspec.structs.replace(agent, may_send_to=change(agent.may_send_to))
                    return agents[index].may_send_to
            raise UnknownAgent(name)

    def list(self) -> list[RegisteredAgent]:
        """All agents and operators in the order in which they were added."""
        return [*self._file.read()]

    @property
    def version(self) -> tuple[object, ...]:
        """Differs when an agent or a token was changed, also by another process."""
        return self._file.current_version(), self.tokens.version

    def identify(self, token: str) -> Identity | None:
        """The owner of a token. A new token is known at once, a removed one for `CHECK_EVERY_S` more."""
        return self.identify_digest(digest_of(token)) if len(token) == TOKEN_CHARS else None

    def identify_digest(self, digest: str) -> Identity | None:
        """The owner of the token with this checksum, as `identify`."""
        recent = self._recent()
        found = recent.by_digest.get(digest)
        if found is None:
            further = self._by_further_token(digest, recent)
            if further is not None:
                return further
            found = self._index().by_digest.get(digest)  # the agent may be new
        return found[1] if found is not None and hmac.compare_digest(found[0], digest) else None

    def _by_further_token(self, digest: str, agents: _Index) -> Identity | None:
        token = self.tokens.find(digest)
        if token is None:
            return None
        known = agents.by_token.get(digest)
        if known is None or known[0] is not token:
            if len(agents.by_token) >= TOKENS_MAX:
                agents.by_token.clear()
            known = agents.by_token[digest] = token, self._identity_of(token, agents.by_name.get(token.agent))
        return known[1]

    def _identity_of(self, token: RegisteredToken, agent: RegisteredAgent | None) -> Identity:
        is_registered = agent is not None and self.queue_of(token.org, token.agent) == token.agent
        url, registered = (agent.url, agent.may_send_to) if agent and is_registered else (None, ())
        targets = (*registered, *token.may_send_to, *token.permissions.may_send_to)
        return Identity(
            token.agent or token.token_id, token.role, url, targets, token.org, token.token_id, token.rate,
            token.permissions, registered,
        )  # fmt: skip

    def adopt(self, name: str, org: str) -> None:
        """Make a registered agent of none that of an organization: an operator gave it such a token."""
        agent = self._index().by_name.get(name)
        if org and agent is not None and agent.role == "agent" and not self.owner_of(name):
            self.tokens.keep_owner(name, org)

    # ---- the queues of tasks -------------------------------------------------------------------

    def owner_of(self, name: str) -> str:
        """The organization whose agent has the plain queue of this name; empty for none."""
        agent = self._recent().by_name.get(name)
        return (agent.org if agent is not None else "") or self.tokens.owner(name)

    def queue_of(self, org: str, name: str) -> str:
        """The queue of tasks of an agent of an organization: `@ORG:NAME`.

        It is the plain name if the agent is registered with the organization, or was its own in an earlier
        version.
        """
        return name if not org or self.owner_of(name) == org else scoped(org, name)

    def plain_queues(self, org: str) -> Sequence[str]:
        """The plain names that are queues of agents of an organization."""
        registered = (agent.name for agent in self._index().by_name.values() if agent.org == org)
        named = {*registered, *self.tokens.owned_names(org)}
        return sorted(name for name in named if self.owner_of(name) == org)

    def orgs_of(self, name: str) -> AbstractSet[str]:
        """The organizations with an agent that callers without an organization name plainly.

        A name in the registry of agents, and one that an operator has, means just itself.
        """
        found = self.tokens.orgs_of(name)
        is_plain = name in self._index().by_name or "" in found or self.tokens.owner(name)
        return frozenset() if is_plain else found

    def knows(self, queue: str) -> bool:
        """Whether an agent or operator with this queue of tasks is registered, or has a token."""
        if queue in self._index().by_name or self.tokens.owner(queue) or "" in self.tokens.orgs_of(queue):
            return True
        org, name = split_scoped(queue)
        return bool(org) and org in self.tokens.orgs_of(name)

    def with_url(self) -> dict[str, RegisteredAgent]:
        """The agents that have a nudge address, by their names."""
        return {agent.name: agent for agent in self._file.read() if agent.url is not None}

    def _recent(self) -> _Index:
        """The agents as they were a moment ago."""
        known = self._known
        return known if self._file.is_fresh and known.version == self._file.version else self._index()

    def _index(self) -> _Index:
        found, known = self._file.read_all(), self._known
        if known.version != found.version:
            by_digest = {agent.token_sha256: (agent.token_sha256, agent.identity) for agent in found.entries}
            by_name = {agent.name: agent for agent in found.entries}
            self._known = known = _Index(found.version, by_digest, by_name, {})
        return known


def _targets(names: Iterable[str]) -> tuple[str, ...]:
    """Checked names without duplicates."""
    targets = tuple(dict.fromkeys(checked_name("agent", name) for name in names))
    if len(targets) > MAY_SEND_TO_MAX:
        raise InvalidMessage(f"an agent may send to at most {MAY_SEND_TO_MAX} agents by name")
    return targets
