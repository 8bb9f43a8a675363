"""The table of permissions, and that nothing is served without an entry of it."""

from contextlib import nullcontext
from typing import ClassVar

import pytest

from postroom.calls.verb import Route, Verb, get
from postroom.contracts.mail import service
from postroom.core.gate import (
    GATE,
    UNKNOWN,
    WHO,
    Owner,
    namespaces,
    of_organization,
    permit,
    refused,
    visible_org,
)
from postroom.core.redaction import Redactor
from postroom.errors import NoEntry
from postroom.mcp import resources
from postroom.mcp.mount import mount
from postroom.mcp.tools import Arguments, Tool, who_is_there
from postroom.page.mount import PageMount
from postroom.server import app
from postroom.server.access.registry import Identity
from postroom.server.access.tokens import Permissions
from postroom.server.app import TasksApp
from postroom.server.http.endpoint import ServedRoute
from postroom.server.routes.monitoring import caller as handler
from postroom.server.routes.table import ROUTES

BOSS = Identity("boss", "admin")
HAND = Identity("hand", "operator")
CHIEF = Identity("chief", "admin", org="acme")
STRANGER = Identity("stranger", "admin", org="zeta")
ADA = Identity("ada", "agent", org="acme")
BOB = Identity("bob", "agent", org="acme")
PLAIN = Identity("plain", "agent")
ALL = {
    "boss": BOSS,
    "hand": HAND,
    "chief": CHIEF,
    "stranger": STRANGER,
    "ada": ADA,
    "bob": BOB,
    "plain": PLAIN,
}

OF_ADA = Owner("acme", "ada")
ALLOWED = {
    "anybody": {*ALL},
    "caller": {*ALL},
    "organization": {"boss", "hand", "chief", "ada", "bob"},
    "agent": {"boss", "hand", "ada"},
    "reader": {"boss", "hand", "ada"},
    "named": {"boss", "hand"},
    "member": {"ada"},
    "maker": {"ada"},
    "creator": {"boss", "hand", "chief", "ada"},
    "operator": {"boss", "hand", "chief"},
    "admin": {"boss", "chief"},
    "operator of all": {"boss", "hand"},
}
"""Who may do with an object of the agent ada of acme what is for each word of the table."""


def with_permissions(**allowed: object) -> Identity:
    return Identity("ada", "agent", org="acme", permissions=Permissions(**allowed))  # type: ignore[arg-type]


@pytest.mark.parametrize("action", GATE)
def test_an_entry_allows_those_that_its_word_names(action: str) -> None:
    found = {name for name, caller in ALL.items() if permit(caller, action, OF_ADA)}
    assert found == ALLOWED[GATE[action].who]


@pytest.mark.parametrize("action", GATE)
def test_object_of_an_unknown_owner_is_for_global_operators_only(action: str) -> None:
    found = {name for name, caller in ALL.items() if permit(caller, action, UNKNOWN)}
    assert found == ALLOWED[GATE[action].who] & {"boss", "hand"} or GATE[action].who in ("anybody", "caller")


@pytest.mark.parametrize("action", GATE)
def test_a_caller_is_refused_without_an_object_what_it_may_do_with_none(action: str) -> None:
    """A refusal before the object is known never keeps a caller from an object that it may use."""
    for caller in ALL.values():
        if permit(caller, action, OF_ADA):
            assert not refused(caller, action)


@pytest.mark.parametrize("action", GATE)
def test_a_token_that_may_only_read_is_refused_what_changes(action: str) -> None:
    reader = with_permissions(is_read_only=True)
    assert (refused(reader, action) == "this token may only read") == GATE[action].changes


@pytest.mark.parametrize("action", GATE)
def test_a_permission_adds_the_agents_that_it_names(action: str) -> None:
    of_bob, of_others = Owner("acme", "bob"), Owner("zeta", "bob")
    for name in ("may_claim", "may_read"):
        caller, plain = with_permissions(**{name: ("bob",)}), permit(ADA, action, of_bob)
        assert permit(caller, action, of_bob) == (plain or name in GATE[action].also)
        assert permit(caller, action, of_others) == permit(ADA, action, of_others)
    sender = Identity("ada", "agent", org="acme", may_send_to=("bob",))
    assert permit(sender, action, of_bob) == (
        permit(ADA, action, of_bob) or "may_send_to" in GATE[action].also
    )


@pytest.mark.parametrize("action", GATE)
def test_a_permission_limits_a_token_to_the_names_that_it_has(action: str) -> None:
    for name in ("only_message", "only_buses"):
        caller, is_limited = with_permissions(**{name: ("lead",)}), GATE[action].only == name
        for other in ("lead", "other"):
            is_left = permit(ADA, action, OF_ADA, other) and not (is_limited and other == "other")
            assert permit(caller, action, OF_ADA, other) == is_left


def test_a_sender_reads_its_task_and_does_not_claim_it() -> None:
    task = Owner("acme", "ada", "bob")
    assert [permit(BOB, action, task) for action in ("task.read", "task.claim", "task.settle")] == [
        True, False, False,
    ]  # fmt: skip


def test_a_bus_without_an_organization_is_shared_by_all() -> None:
    assert all(permit(caller, "bus.read", Owner("")) for caller in ALL.values())
    assert not permit(PLAIN, "message.submit", of_organization(PLAIN.org))


def test_lists_are_those_of_the_caller() -> None:
    assert [visible_org(caller) for caller in (BOSS, CHIEF, PLAIN)] == [None, "acme", ""]
    assert [namespaces(caller) for caller in (BOSS, CHIEF)] == [("",), ("acme", "")]


def test_every_word_of_the_table_is_explained() -> None:
    assert {entry.who for entry in GATE.values()} == WHO.keys()


# ---- nothing is served without an entry --------------------------------------------------------------


UNGATED = ServedRoute(Route("GET", "/secrets", "secret.read", {200: None}), handler)


def test_a_server_with_a_route_without_an_entry_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "ROUTES", [*ROUTES, UNGATED])
    with pytest.raises(
        NoEntry, match=r"GET /secrets names the permission 'secret\.read', which is not in the table"
    ):
        TasksApp(nullcontext)


def test_a_page_with_a_route_without_an_entry_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageMount, "routes", lambda _: [UNGATED])
    with pytest.raises(NoEntry, match="GET /secrets"):
        PageMount(TasksApp(nullcontext), Redactor)


class Peek(Verb, frozen=True, kw_only=True):
    route: ClassVar[Route] = get("/secrets", "secret.read")


def test_a_tool_without_an_entry_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Tool("peek", Arguments, who_is_there, Peek)
    monkeypatch.setattr(resources, "TOOLS", [tool])
    with pytest.raises(NoEntry, match="peek names"):
        mount(TasksApp(nullcontext))


def test_a_mail_service_with_a_call_without_an_entry_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(service.ENTRIES, "fetch", "secret.read")
    with pytest.raises(NoEntry, match="the call fetch of Mail names"):
        service.MailService(None, lambda work: work())
