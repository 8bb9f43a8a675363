"""Refused calls over HTTP, NATS and MCP are events that say who called, from where, and why."""

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import nats
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from postroom import Tasks
from postroom.server.access.tokens import TokenRegistry
from tests.integration.ups import Running, answer_to_login, running
from tests.waiting import HANG_GUARD_S, until

WRONG = "pr_" + "x" * 43
RATE = 2.0


class World:
    """A running server with a fast and a slow agent."""

    def __init__(self, up: Running, data: Path) -> None:
        self.up, self.data = up, data
        tokens = TokenRegistry(data)
        self.agent = tokens.create("agent", "acme", "triage")
        self.slow = tokens.create("agent", "acme", "slow", rate=RATE)

    def post(self, path: str, token: str, body: Any) -> tuple[int, dict[str, str], Any]:
        request = urllib.request.Request(  # noqa: S310 - our own server
            self.up.http + path, json.dumps(body).encode(), {"authorization": f"Bearer {token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=HANG_GUARD_S) as answer:  # noqa: S310
                return answer.status, dict(answer.headers), json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), json.loads(error.read())

    def events(self, **wanted: Any) -> list[dict[str, Any]]:
        """The details of refused calls over HTTP that have these facts."""
        with Tasks.open(f"sqlite:///{self.data / 'queue.db'}") as tasks:
            found = [
                {**one.detail, "error_type": one.error_type, "error": one.error}
                for one in tasks.store.events()
                if one.kind == "rejected" and one.type == "call"
            ]
        return [one for one in found if wanted.items() <= one.items()]

    def mail_events(self, code: str) -> list[dict[str, Any]]:
        lines = (self.data / "mail" / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        return [one for one in events if one["kind"] == "rejected" and one.get("error_type") == code]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    data = tmp_path_factory.mktemp("refused") / "run"
    with running(data, "--no-audit") as up:
        yield World(up, data)


def test_a_wrong_token_is_an_event_without_the_token(world: World) -> None:
    assert world.up.get("/engine/status", WRONG)[0] == 401
    until(lambda: world.events(status=401, call="GET /engine/status"))
    [event] = world.events(status=401, call="GET /engine/status")
    assert event["address"].startswith("127.0.0.1:")
    assert "unknown, expired or revoked" in event["error"]
    assert "who" not in event
    assert not any(WRONG.encode() in path.read_bytes() for path in world.data.rglob("*") if path.is_file())


def test_a_refused_call_names_its_caller_and_the_reason(world: World) -> None:
    body = {"agent": "review", "payload": 1}
    assert world.post("/queue/enqueue", world.agent.token, body)[0] == 403
    until(lambda: world.events(status=403, who="triage"))
    [event] = world.events(status=403, who="triage")
    assert event["token_id"] == world.agent.token_id
    assert (event["org_id"], event["role"], event["via"]) == ("acme", "agent", "http")
    assert event["call"] == "POST /queue/enqueue"
    assert "may not send to 'review'" in event["error"]


def test_an_unknown_path_is_an_event(world: World) -> None:
    assert world.up.get("/no-such-path-of-mine", world.agent.token)[0] == 404
    until(lambda: world.events(call="GET of an unknown path", who="triage"))


def test_refusals_of_the_page_and_of_mcp_themselves_are_events(world: World) -> None:
    token = TokenRegistry(world.data).create("agent", "acme", "lost").token
    status, headers, answer = world.post("/page/overview", token, {})
    assert (status, answer["error"]) == (405, "MethodNotAllowed")
    assert "GET" in headers["allow"]
    assert "content-security-policy" in headers
    assert world.up.get("/page/nothing", token)[0] == 404
    until(lambda: world.events(call="POST of an unknown path", who="lost", status=405))
    until(lambda: world.events(call="GET of an unknown path", who="lost", status=404))
    assert world.up.get("/mcp", token)[0] == 405
    until(lambda: world.events(call="GET /mcp", who="lost", status=405))
    own = {"authorization": f"Bearer {token}", "accept": "text/plain"}
    assert httpx2.post(world.up.http + "/mcp", json={}, headers=own, timeout=HANG_GUARD_S).status_code == 406
    until(lambda: world.events(call="POST /mcp", who="lost", status=406))


def test_a_report_that_is_a_symlink_is_not_served_and_is_an_event(world: World, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not for the page")
    (world.data / "report.html").symlink_to(secret)
    status, answer = world.up.get("/page/report.html", world.up.token)
    assert (status, "symlink" in answer["message"]) == (404, True)
    assert world.up.get("/page/report", world.up.token)[1]["written"] is None
    until(lambda: world.events(call="GET /page/report.html", status=404))


def test_a_token_above_its_rate_gets_429_and_when_to_try_again(world: World) -> None:
    answers = [world.post("/queue/next", world.slow.token, {})[:2] for _ in range(8)]
    refused = [headers for status, headers in answers if status == 429]
    assert refused
    assert refused[0]["retry-after"] == "1"
    assert answers[0][0] != 429
    until(lambda: world.events(status=429, who="slow"))
    assert world.events(status=429, who="slow")[0]["error_type"] == "RateExceeded"
    assert all(world.up.get("/queue/status", world.agent.token)[0] == 200 for _ in range(8))


def test_sign_ins_count_in_the_rate_of_their_token(world: World) -> None:
    slow = TokenRegistry(world.data).create("agent", "acme", "signs", rate=RATE)
    answers = [world.post("/page/sign-in", "", {"token": slow.token})[0] for _ in range(5)]
    assert answers[0] == 200
    assert answers[-1] == 429


def test_a_refused_tool_over_mcp_is_an_event(world: World) -> None:
    async def call(token: str, tool: str, times: int = 1) -> list[Any]:
        async with (
            httpx2.AsyncClient(headers={"Authorization": f"Bearer {token}"}, timeout=HANG_GUARD_S) as http,
            Client(streamable_http_client(f"{world.up.http}/mcp", http_client=http)) as client,
        ):
            return [await client.call_tool(tool, {}) for _ in range(times)]

    [answer] = asyncio.run(call(world.agent.token, "replay"))
    assert answer.is_error
    until(lambda: world.events(via="mcp", who="triage", call="tool replay"))
    [event] = world.events(via="mcp", who="triage", call="tool replay")
    assert event["address"].startswith("127.0.0.1:")
    assert event["status"] == 403
    answers = asyncio.run(call(world.slow.token, "search", 8))
    refused = [answer.content[0].text for answer in answers if answer.is_error]
    assert refused
    assert "may make at most 2 calls a second" in refused[-1]
    until(lambda: world.events(via="mcp", who="slow", status=429))


def test_a_refused_login_over_nats_is_an_event(world: World) -> None:
    assert b"Authorization Violation" in answer_to_login(world.up.nats, WRONG)
    until(lambda: world.mail_events("401"))
    event = world.mail_events("401")[0]
    assert event["type"] == "connect"
    assert event["detail"]["address"].startswith("127.0.0.1:")
    assert event["error"] == "Authorization Violation"


def test_a_malformed_login_over_nats_is_an_event(world: World) -> None:
    address = urlsplit(world.up.nats)
    with socket.create_connection((address.hostname, address.port), timeout=HANG_GUARD_S) as client:
        client.sendall(b"CONNECT {nonsense\r\n")
        assert b"-ERR" in b"".join(iter(lambda: client.recv(4096), b""))
    until(lambda: world.mail_events("400"))
    event = world.mail_events("400")[0]
    assert event["type"] == "connect"
    assert event["detail"]["address"].startswith("127.0.0.1:")


def test_nats_messages_above_the_rate_are_refused_without_disconnect(world: World) -> None:
    errors: list[str] = []

    async def flood() -> list[bytes]:
        async def note(error: Exception) -> None:
            errors.append(str(error))

        client = await nats.connect(world.up.nats, token=world.slow.token, error_cb=note)
        got: list[bytes] = []

        async def take(message: Any) -> None:
            got.append(message.data)

        await client.subscribe("plain", cb=take)
        for number in range(10):
            await client.publish("plain", b"%d" % number)
        await client.flush()
        await client.drain()  # the callback gets what has come
        return got

    assert 1 <= len(asyncio.run(flood())) <= 3
    assert any("may make at most 2 calls a second" in error for error in errors)
    until(lambda: world.mail_events("429"))
    event = world.mail_events("429")[0]
    assert (event["type"], event["sender"]) == ("publish", "acme/slow")
