"""The registry of a data folder: its agents and operators, identified by tokens.

Rule 1: a token is shown once, when it is made. The file holds only its SHA-256.
Rule 2: the token alone identifies a caller, never the text of a request.
Rule 3: when the file cannot be read, every caller is refused.
"""

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from postroom.contracts.tasks import DECISIONS
from postroom.core.fieldfaults import field_fault
from postroom.core.names import checked_name
from postroom.errors import AgentExists, InvalidMessage, StoreDamaged, UnknownAgent
from postroom.runtime.nudger import checked_url
from postroom.system import lock
from postroom.system.atomic import make_folder, open_safely, read_file, replace_file

FILE_NAME = "agents.json"
TOKEN_PREFIX = "pr_"  # noqa: S105 - a prefix, and no token
TOKEN_BYTES = 32
TOKEN_CHARS = len(TOKEN_PREFIX) + 43
AGENTS_MAX = 10_000
MAY_SEND_TO_MAX = 1_000  # agents that one agent may send to
LOCK_TIMEOUT_S = 10.0
CHECK_EVERY_S = 0.2  # between checks of the file, so that not every request needs one

Role = Literal["agent", "operator"]


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


class Identity(msgspec.Struct, frozen=True):
    """The owner of a token."""

    name: str
    role: Role
    url: str | None = None
    may_send_to: tuple[str, ...] = ()
    org: str = ""

    @property
    def is_operator(self) -> bool:
        """Whether the caller may use every queue."""
        return self.role == "operator"


class _File(msgspec.Struct, frozen=True):
    agents: list[RegisteredAgent]


class _Known(NamedTuple):
    """The content of the file when it was last read, and the version of the file then."""

    version: tuple[int, int, int]
    agents: tuple[RegisteredAgent, ...]
    by_digest: dict[str, tuple[str, Identity]]
    names: frozenset[str]


_NO_AGENTS = _Known((0, 0, 0), (), {}, frozenset())
_encoder = msgspec.json.Encoder()
_decode = msgspec.json.Decoder(_File).decode


class Agents:
    """The agents and operators of a data folder. A file changed by another process is read again."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self._path = data / FILE_NAME
        self._known = _NO_AGENTS
        self._checked = -CHECK_EVERY_S

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
        token = TOKEN_PREFIX + secrets.token_urlsafe(TOKEN_BYTES)
        with self._changing() as agents:
            if any(agent.name == name for agent in agents):
                raise AgentExists(name)
            if len(agents) >= AGENTS_MAX:
                raise InvalidMessage(f"there are {AGENTS_MAX} agents already, which is the limit")
            agents.append(
                RegisteredAgent(name, role, checked, _digest(token), datetime.now(UTC), targets, org)
            )
        return token

    def remove(self, name: str) -> None:
        """Remove an agent or operator. Its token is invalid from now on."""
        with self._changing() as agents:
            kept = [agent for agent in agents if agent.name != name]
            if len(kept) == len(agents):
                raise UnknownAgent(name)
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
        with self._changing() as agents:
            for index, agent in enumerate(agents):
                if agent.name == name:
                    if agent.role == "operator":
                        raise InvalidMessage(f"{name!r} is an operator and may send to every agent")
                    agents[index] = msgspec.structs.replace(agent, may_send_to=change(agent.may_send_to))
                    return agents[index].may_send_to
            raise UnknownAgent(name)

    def list(self) -> list[RegisteredAgent]:
        """All agents and operators in the order in which they were added."""
        return [*self._read().agents]

    def identify(self, token: str) -> Identity | None:
        """The owner of a token. A new token is known at once, a removed one for `CHECK_EVERY_S` more."""
        if len(token) != TOKEN_CHARS:
            return None
        digest = _digest(token)
        now = time.monotonic()
        known = self._known if now < self._checked + CHECK_EVERY_S else self._read()
        found = known.by_digest.get(digest) or self._read().by_digest.get(digest)
        return found[1] if found is not None and hmac.compare_digest(found[0], digest) else None

    def knows(self, name: str) -> bool:
        """Whether an agent or operator of this name is registered."""
        known = self._known if time.monotonic() < self._checked + CHECK_EVERY_S else self._read()
        return name in known.names or name in self._read().names

    def with_url(self) -> dict[str, str]:
        """The nudge addresses by agent, of the agents that have one."""
        return {agent.name: agent.url for agent in self._read().agents if agent.url is not None}

    @contextmanager
    def _changing(self) -> Iterator[MutableSequence[RegisteredAgent]]:
        """A list of the agents under the lock. The list is written at the end of the block."""
        make_folder(self.data, "fsync")
        fd = open_safely(self._path.with_name(f"{FILE_NAME}.lock"), os.O_RDWR | os.O_CREAT)
        try:
            lock.acquire(fd, LOCK_TIMEOUT_S, self._path)
            agents = [*self._read().agents]
            yield agents
            data = msgspec.json.format(_encoder.encode(_File(agents)), indent=1)
            replace_file(self._path, data + b"\n", "fsync")
        finally:
            os.close(fd)

    def _read(self) -> _Known:
        self._checked = time.monotonic()
        try:
            found = self._path.stat()
        except FileNotFoundError:
            self._known = _NO_AGENTS
            return _NO_AGENTS
        except OSError as error:
            raise StoreDamaged(f"{self._path} cannot be read: {error.strerror}") from error
        version = (found.st_ino, found.st_mtime_ns, found.st_size)
        known = self._known
        if known.version != version:
            known = self._known = self._load(version)
        return known

    def _load(self, version: tuple[int, int, int]) -> _Known:
        try:
            agents = _decode(read_file(self._path)).agents
        except msgspec.ValidationError as error:
            fault = field_fault(error, "the file")
            raise StoreDamaged(f"{self._path} is not a list of agents: {fault}") from error
        except (msgspec.MsgspecError, ValueError, RecursionError, OSError) as error:
            raise StoreDamaged(f"{self._path} is not a list of agents: {error}") from error
        by_digest = {
            agent.token_sha256: (
                agent.token_sha256,
                Identity(agent.name, agent.role, agent.url, agent.may_send_to, agent.org),
            )
            for agent in agents
        }
        names = frozenset(agent.name for agent in agents)
        return _Known(version, tuple(agents), by_digest, names)


def _targets(names: Iterable[str]) -> tuple[str, ...]:
    """Checked names without duplicates."""
    targets = tuple(dict.fromkeys(checked_name("agent", name) for name in names))
    if len(targets) > MAY_SEND_TO_MAX:
        raise InvalidMessage(f"an agent may send to at most {MAY_SEND_TO_MAX} agents by name")
    return targets


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
