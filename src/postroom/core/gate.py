"""Who may do what with which object: one table for HTTP, the live page, MCP and NATS.

Rule 1: `refused` decides before anything of the object is read. It needs only the object's owner, which is in
        its key or in a record of its own.
Rule 2: an object of an unknown owner is for operators of all organizations.
Rule 3: what a caller may not know about is answered like what does not exist. The other refusals depend on
        the caller and the call alone.
Rule 4: every route, tool and command names its entry. A server with one that does not fails to start.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

from postroom.errors import NoEntry

Who: TypeAlias = Literal[
    "anybody", "caller", "organization", "agent", "reader", "named", "member", "maker", "creator", "operator",
    "admin", "operator of all",
]  # fmt: skip

WHO: Final[Mapping[Who, str]] = MappingProxyType(
    {
        "anybody": "callers without a token, too",
        "caller": "every token; it sees what is its organization's",
        "organization": "the tokens of its organization; every token when it belongs to none",
        "agent": "the agent that it is for",
        "reader": "the agent that it is for, and the one that sent it",
        "named": "tokens with a permission that names the agent",
        "member": "the agent itself, if it has an organization",
        "maker": "the client that made it",
        "creator": "the agent that made it; operators and admins of its organization",
        "operator": "operators and admins of its organization",
        "admin": "admins of its organization",
        "operator of all": "operators and admins of all organizations",
    }
)
"""What the words of the table mean. Operators of all organizations may do all that is not for a member, maker
or admin, and admins of all organizations all that is not for a member or maker."""


class Allowed(Protocol):
    """The permissions of a token, besides its role."""

    @property
    def may_claim(self) -> tuple[str, ...]: ...
    @property
    def may_read(self) -> tuple[str, ...]: ...
    @property
    def only_message(self) -> tuple[str, ...]: ...
    @property
    def only_buses(self) -> tuple[str, ...]: ...
    @property
    def is_read_only(self) -> bool: ...


class Caller(Protocol):
    """The owner of a token, as far as the table needs to know it."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def org(self) -> str: ...
    @property
    def may_send_to(self) -> tuple[str, ...]: ...
    @property
    def permissions(self) -> Allowed: ...
    @property
    def is_operator(self) -> bool:
        """Whether the caller operates all organizations."""


class Owner(NamedTuple):
    """Whom an object belongs to."""

    org: str | None
    """Empty for no organization: the object is for everybody. None when it is unknown."""
    agent: str = ""
    """The agent that made the object, or that it is for; empty for an operator."""
    sender: str = ""
    """The agent that sent it."""


UNKNOWN: Final = Owner(None)


def of_organization(org: str) -> Owner:
    """The owner of an object that has to have an organization."""
    return Owner(org or None)


class Entry(NamedTuple):
    """One row of the table."""

    who: Who
    what: str
    changes: bool = True
    """Whether a token that may only read is refused."""
    only: Literal["", "only_message", "only_buses"] = ""
    """The permission that, when a token has it, names the only objects."""
    also: tuple[Literal["may_claim", "may_read", "may_send_to"], ...] = ()
    """The permissions that name further agents whose objects the token may use."""


def _reads(
    who: Who,
    what: str,
    only: Literal["", "only_buses"] = "",
    also: tuple[Literal["may_claim", "may_read"], ...] = (),
) -> Entry:
    return Entry(who, what, changes=False, only=only, also=also)


GATE: Final[Mapping[str, Entry]] = MappingProxyType(
    {
        "server.look": _reads("anybody", "see whether the server runs, load the page, sign in and out"),
        "server.read": _reads("caller", "see the owner of the token and the API"),
        "server.measure": _reads(
            "operator of all", "read metrics, alerts, reports, mailboxes and the names of all agents"
        ),
        "agent.impersonate": _reads("operator of all", "act for an agent"),
        "task.list": _reads("agent", "list tasks, queues and their events", also=("may_claim", "may_read")),
        "task.read": _reads("reader", "read a task", also=("may_claim", "may_read")),
        "task.claim": Entry("agent", "lease a task", also=("may_claim",)),
        "task.settle": Entry("agent", "end or extend a lease", also=("may_claim",)),
        "task.enqueue": Entry("named", "store a task for an agent", also=("may_send_to",)),
        "task.cancel": Entry("operator of all", "end a task without a result"),
        "task.retry": Entry("operator of all", "queue a dead task again"),
        "message.submit": Entry("organization", "submit a message"),
        "message.direct": Entry("organization", "submit or cancel one to an agent", only="only_message"),
        "message.control": Entry(
            "organization", "submit or cancel one that starts or ends an agent", only="only_message"
        ),
        "message.list": _reads("organization", "list and search messages"),
        "message.read": _reads("organization", "read a message, its parts, receipts and what holds it"),
        "message.cancel": Entry("organization", "end a message without a result"),
        "letter.list": _reads("organization", "list dead letters"),
        "letter.read": _reads("organization", "read a dead letter"),
        "letter.replay": Entry("operator", "queue dead letters again"),
        "letter.purge": Entry("operator", "forget dead letters"),
        "engine.read": _reads("caller", "see the state of the global queue and its token budgets"),
        "engine.pause": Entry("operator", "stop and resume deliveries"),
        "goal.read": _reads("operator", "read goals, checkpoints, contexts, the graph and conflicts"),
        "goal.change": Entry("operator", "start, change and end goals, and write the graph"),
        "goal.rollback": Entry("operator", "roll a goal back"),
        "decision.read": _reads("operator", "read decisions that wait for a person"),
        "decision.answer": Entry("operator", "take a decision"),
        "agent.list": _reads("organization", "list agents and their health"),
        "agent.watch": _reads("agent", "see what an agent waits for"),
        "agent.join": Entry("member", "register, beat and leave"),
        "agent.inbox": Entry("member", "fetch and acknowledge messages and answers"),
        "agent.send": Entry("member", "send a message to an agent", only="only_message"),
        "bounce.list": _reads("organization", "list answers that no agent fetched"),
        "bounce.remove": Entry("organization", "remove such answers"),
        "bus.list": _reads("caller", "list the buses that it reads"),
        "bus.read": _reads("organization", "read a bus", only="only_buses"),
        "bus.post": Entry("organization", "post to a bus", only="only_buses"),
        "bus.remove": Entry("creator", "remove a bus", only="only_buses"),
        "nats.connect": Entry("caller", "log in over NATS"),
        "nats.message": Entry("caller", "publish and subscribe to plain subjects in its organization"),
        "mailbox.create": Entry("caller", "create a mailbox, or find a public one"),
        "mailbox.read": Entry("organization", "list, fetch, query and subscribe to a mailbox"),
        "mailbox.send": Entry("organization", "send into a mailbox of an agent", only="only_message"),
        "mailbox.delete": Entry("organization", "delete from a mailbox of an agent", only="only_message"),
        "mailbox.extend": Entry("maker", "extend the lifetime of a mailbox"),
        "card.list": Entry("caller", "find cards of agents in its organization"),
        "card.change": Entry("caller", "register, report and remove a card, with the secret of its name"),
        "token.list": _reads("admin", "list tokens"),
        "token.create": Entry("admin", "make a token"),
        "token.end": Entry("admin", "revoke or rotate a token"),
    }
)
"""By object and action: who may do it."""


def entry_of(action: str, named_by: str) -> Entry:
    """An entry of the table. Raises `NoEntry`, which names what needs one."""
    if action not in GATE:
        raise NoEntry(named_by, action)
    return GATE[action]


def permit(caller: Caller, action: str, owner: Owner | None = None, name: str = "") -> bool:
    """Whether the caller may do this with an object of this owner."""
    return not refused(caller, action, owner, name)


def refused(caller: Caller, action: str, owner: Owner | None = None, name: str = "") -> str:
    """Why the caller may not do this with an object of this owner; empty when it may.

    `name` is that of the bus, or of the agent that gets a message. Without an owner, the caller is refused
    what it may do with no object at all.
    """
    entry = GATE[action]
    why = _refused_role(caller, entry)
    if not why and entry.only:
        why = _refused_name(caller, entry, owner, name)
    if why or owner is None or _is_for(caller, entry, owner):
        return why
    return _refused_object(caller, entry, owner)


def _refused_role(caller: Caller, entry: Entry) -> str:
    """The reason why a caller may not do this at all, whatever the object; empty when it may."""
    if entry.changes and caller.permissions.is_read_only:
        return "this token may only read"
    why = ""
    match entry.who:
        case "member" if caller.is_operator:
            why = "an operator's token is not an agent: use the token of the agent"
        case "member" if not caller.org:
            why = _without_organization(caller)
        case "admin" if caller.role != "admin":
            why = f"only an admin may do that, and this is a token of an {caller.role}"
        case "operator" | "operator of all" if caller.role == "agent":
            why = "only an operator may do that, and this is the token of an agent"
        case "operator of all" if not caller.is_operator:
            whose = f"an {caller.role} of one organization"
            why = f"only an operator of all organizations may do that, and this is the token of {whose}"
    return why


def _refused_name(caller: Caller, entry: Entry, owner: Owner | None, name: str) -> str:
    """Why a permission of the caller keeps it from this bus or agent; empty otherwise."""
    if entry.only == "only_buses":
        allowed = caller.permissions.only_buses
        is_allowed = not (allowed and name) or name in allowed
        return (
            "" if is_allowed else f"this is the token of {caller.name}, which does not use the bus {name!r}"
        )
    allowed = caller.permissions.only_message
    if not allowed or owner is None:
        return ""
    is_near = caller.is_operator or owner.org == caller.org
    if is_near and name in (caller.name, *allowed):
        return ""
    rule = f"sends messages to no agent {name!r}" if name else "starts and ends no agents"
    return f"this is the token of {caller.name}, which {rule}"


def _is_for(caller: Caller, entry: Entry, owner: Owner) -> bool:
    """Whether an object of this owner is for the caller, whose role is enough."""
    return (caller.is_operator and entry.who != "maker") or _HOLDS[entry.who](caller, entry, owner)


def _is_own(caller: Caller, owner: Owner) -> bool:
    return owner.org == caller.org


def _is_agents(caller: Caller, entry: Entry, owner: Owner) -> bool:
    is_named = owner.agent == caller.name or _is_named(caller, entry, owner)
    return is_named and _is_own(caller, owner)


def _is_creators(caller: Caller, entry: Entry, owner: Owner) -> bool:
    is_made = caller.role == "agent" and caller.name == owner.agent and _is_own(caller, owner)
    return is_made or _is_operators(caller, entry, owner)


def _is_operators(caller: Caller, _: Entry, owner: Owner) -> bool:
    return caller.role != "agent" and caller.org != "" and _is_own(caller, owner)


def _is_named(caller: Caller, entry: Entry, owner: Owner) -> bool:
    """Whether a permission of the caller names the agent of its organization that an object is for."""
    is_named = any(owner.agent in _PERMITTED[name](caller) for name in entry.also)
    return is_named and _is_own(caller, owner)


_HOLDS: Final[Mapping[Who, Callable[[Caller, Entry, Owner], bool]]] = {
    "anybody": lambda *_: True,
    "caller": lambda *_: True,
    "organization": lambda caller, _, owner: owner.org in ("", caller.org),
    "agent": _is_agents,
    "reader": lambda caller, entry, owner: (
        _is_agents(caller, entry, owner) or (owner.sender == caller.name and _is_own(caller, owner))
    ),
    "named": _is_named,
    "member": lambda caller, _, owner: owner.agent == caller.name and _is_own(caller, owner),
    "maker": lambda caller, _, owner: owner.agent == caller.name and _is_own(caller, owner),
    "creator": _is_creators,
    "operator": _is_operators,
    "admin": _is_operators,
    "operator of all": lambda *_: False,
}
"""Whether an object of an owner is for a caller that does not operate all organizations."""
_PERMITTED: Final[Mapping[str, Callable[[Caller], tuple[str, ...]]]] = {
    "may_claim": lambda caller: caller.permissions.may_claim,
    "may_read": lambda caller: caller.permissions.may_read,
    "may_send_to": lambda caller: caller.may_send_to,
}


def _refused_object(caller: Caller, entry: Entry, owner: Owner) -> str:
    """Why an object of this owner is not for the caller."""
    if entry.who == "named":
        return (
            f"agent {caller.name!r} may not send to {owner.agent!r}. Allow it on the server: "
            f"postroom tasks agent allow {caller.name} --may-send-to {owner.agent} --data DIR"
        )
    if entry.who in ("agent", "reader"):
        rule = (
            f"does not act for {owner.agent!r}"
            if entry.changes
            else f"may not read the tasks of {owner.agent}"
        )
        return f"this is the token of {caller.name}, which {rule}"
    if not caller.org:
        return _without_organization(caller)
    return f"this is the token of {caller.name}, which does that for its organization only"


def _without_organization(caller: Caller) -> str:
    return (
        f"agent {caller.name!r} belongs to no organization. Register it with one: "
        f"postroom tasks agent add {caller.name} --org NAME --data DIR"
    )


# ---- lists -----------------------------------------------------------------------------------------


def visible_org(caller: Caller) -> str | None:
    """The organization whose objects a caller sees in lists; None for those of all, empty for none."""
    return None if caller.is_operator else caller.org


def namespaces(caller: Caller) -> tuple[str, ...]:
    """The organizations in which a name of the caller is looked up, in this order; empty for none of them."""
    return (caller.org, "") if caller.org else ("",)
