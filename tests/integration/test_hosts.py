"""Which hosts a server answers for: no other site reaches the page or MCP through a browser."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from postroom.server.access.tokens import TokenRegistry
from tests.integration.commandline import finish, postroom, start
from tests.waiting import HANG_GUARD_S

PATHS = ("/", "/page/session", "/page/overview", "/page/nothing", "/mcp")


class Server:
    """A task server that also answers for `postroom.example`, and the token of an agent."""

    def __init__(self, url: str, token: str) -> None:
        self.authority = urlsplit(url).netloc
        self.port = urlsplit(url).port
        self._token = token

    def call(self, path: str, host: str, origin: str = "") -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.authority, timeout=HANG_GUARD_S)
        headers = {"host": host, "authorization": f"Bearer {self._token}"}
        headers |= {"origin": origin} if origin else {}
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}) if path == "/mcp" else None
        if body is not None:
            headers |= {"content-type": "application/json", "accept": "application/json, text/event-stream"}
        try:
            connection.request("GET" if body is None else "POST", path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    data = tmp_path_factory.mktemp("hosts") / "run"
    data.mkdir()
    token = TokenRegistry(data).create("agent", "acme", "ada").token
    options = ("--data", data, "--port", 0, "--allowed-hosts", "postroom.example, other.example")
    process = start("postroom", "tasks", "serve", *options)
    try:
        assert process.stdout is not None
        yield Server(json.loads(process.stdout.readline())["url"], token)
    finally:
        process.terminate()
        finish(process)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("host", ["attacker.example", "localhost.attacker.example", "192.0.2.1", "a b", ""])
def test_a_name_that_is_not_the_servers_is_refused(server: Server, path: str, host: str) -> None:
    for foreign in (host, f"{host}:{server.port}"):
        status, body = server.call(path, foreign)
        assert (status, json.loads(body)["error"]) == (403, "Forbidden"), body
        assert "allowed_hosts" in json.loads(body)["message"]


@pytest.mark.parametrize("path", PATHS)
def test_a_request_of_another_site_is_refused(server: Server, path: str) -> None:
    address = f"http://192.0.2.1:{server.port}"
    for origin in ("http://attacker.example", "null", address, "http://localhost:1"):
        status, body = server.call(path, server.authority, origin)
        assert (status, json.loads(body)["error"]) == (403, "Forbidden"), body
        assert "another site" in json.loads(body)["message"]


@pytest.mark.parametrize("path", ["/", "/page/overview", "/mcp"])
def test_the_names_of_the_server_are_served(server: Server, path: str) -> None:
    names = ("localhost", f"LOCALHOST:{server.port}", "[::1]:99", "Postroom.Example", "other.example:1")
    for host in (server.authority, *names):
        assert server.call(path, host)[0] == 200
        assert server.call(path, host, f"http://{host}")[0] == 200
    behind_a_proxy = server.call(path, server.authority, "https://postroom.example")
    assert behind_a_proxy[0] == 200


def test_routes_that_need_a_token_or_tell_nothing_take_every_name(server: Server) -> None:
    assert server.call("/whoami", "postroom.svc")[0] == 200
    assert server.call("/health", "postroom.svc")[0] == 200


def test_a_host_that_is_not_a_name_is_refused_at_the_start(tmp_path: Path) -> None:
    done = postroom("tasks", "serve", "--data", tmp_path, "--port", 0, "--allowed-hosts", "http://a.example")
    assert done.code == 2
    assert "'http://a.example' is not allowed" in done.error
