"""Every call, by every kind of token, against the table of permissions."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from postroom.core.gate import GATE, Owner, refused
from postroom.core.redaction import Redactor
from postroom.page.mount import PageMount
from postroom.server.access.registry import Agents, Identity
from postroom.server.access.tokens import Permissions
from postroom.server.app import TasksApp
from postroom.server.http.endpoint import ServedRoute
from postroom.server.routes.table import ROUTES
from tests.integration.commandline import finish, start
from tests.waiting import HANG_GUARD_S

SERVED = (*ROUTES, *PageMount(TasksApp(nullcontext), Redactor).routes())
ENDLESS = {"/events", "/page/stream", "/page/buses/{name}/stream"}


class World:
    """A running server, and a token of every kind."""

    def __init__(self, url: str, data: Path) -> None:
        self.url = url
        tokens = Agents(data).tokens
        self.tokens = {
            "": "",
            "boss": tokens.create("admin").token,
            "hand": tokens.create("operator").token,
            "chief": tokens.create("admin", "acme").token,
            "foreman": tokens.create("operator", "acme").token,
            "stranger": tokens.create("admin", "zeta").token,
            "ada": tokens.create("agent", "acme", "ada").token,
            "bob": tokens.create("agent", "acme", "bob").token,
            "zoe": tokens.create("agent", "zeta", "zoe").token,
            "reader": tokens.create(
                "agent", "acme", "reader", permissions=Permissions(is_read_only=True)
            ).token,
            "kept": tokens.create(
                "agent", "acme", "kept", permissions=Permissions(only_message=("lead",), only_buses=("team",))
            ).token,
            "pool": tokens.create("agent", "acme", "pool", permissions=Permissions(may_claim=("ada",))).token,
        }
        agents = Agents(data)
        self.callers = {name: agents.identify(token) for name, token in self.tokens.items()}

    def call(self, caller: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if method == "GET" else json.dumps({} if body is None else body).encode()
        token = self.tokens[caller]
        headers = {"authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(self.url + path, data, headers, method=method)  # noqa: S310 - our own
        try:
            with urllib.request.urlopen(request, timeout=HANG_GUARD_S) as answer:  # noqa: S310
                return answer.status, answer.headers.get("content-type")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())["message"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    data = tmp_path_factory.mktemp("permissions") / "run"
    data.mkdir()
    process = start("postroom", "tasks", "serve", "--data", data, "--port", 0)
    try:
        assert process.stdout is not None
        yield World(json.loads(process.stdout.readline())["url"], data)
    finally:
        process.terminate()
        finish(process)


def _named(served: ServedRoute) -> str:
    return f"{served.route.method} {served.route.path}"


@pytest.mark.statement("auth-token")
@pytest.mark.parametrize("served", SERVED, ids=_named)
def test_route_refuses_by_the_table_before_any_read(world: World, served: ServedRoute) -> None:
    """Of objects that do not exist: nothing but the token decides."""
    path = re.sub(r"{\w+}", "none", served.route.path)
    for name, identity in world.callers.items():
        is_open, why = GATE[served.route.permission].who == "anybody", identity and _refused(identity, served)
        if served.route.path in ENDLESS and identity and not why:
            continue
        status, answer = world.call(name, served.route.method, path)
        if identity is None and not is_open:
            assert status == 401, answer
        else:
            assert (status == 403, answer if why else None) == (bool(why), why or None), (name, answer)


def _refused(identity: Identity, served: ServedRoute) -> str:
    owner = Owner(identity.org, "none") if "{agent}" in served.route.path else None
    return refused(
        identity, served.route.permission, owner, name="none" if "{name}" in served.route.path else ""
    )
