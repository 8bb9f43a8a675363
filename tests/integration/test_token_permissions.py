"""What a token may send, claim and read, and that its end takes effect in a running server."""

import json
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from postroom.engine.rules.policy import CONTROL_TYPES
from postroom.server.access.tokens import NewToken, Permissions, TokenRegistry
from tests.integration.commandline import finish, postroom, start
from tests.waiting import HANG_GUARD_S, until


class World:
    """A running server of tasks, and its tokens."""

    def __init__(self, url: str, data: Path) -> None:
        self.url, self.data = url, data
        self.tokens = TokenRegistry(data)
        self.admin = self.tokens.create("admin").token

    def agent(self, name: str, **allowed: Any) -> NewToken:
        return self.tokens.create("agent", "acme", name, permissions=Permissions(**allowed))

    def call(self, token: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(self.url + path, data, headers)  # noqa: S310 - our own server
        try:
            with urllib.request.urlopen(request, timeout=HANG_GUARD_S) as answer:  # noqa: S310
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def enqueue(self, agent: str) -> str:
        """Store a task under an id that is the same to everybody."""
        task = {"agent": agent, "payload": 1, "task_id": f"t-{uuid.uuid4()}"}
        return str(self.call(self.admin, "/queue/enqueue", task)[1]["task_id"])


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


def test_a_token_claims_and_ends_the_tasks_that_it_may_claim_and_no_others(world: World) -> None:
    plain, pool = world.agent("plain").token, world.agent("pool", may_claim=("reviews",)).token
    world.enqueue("reviews")
    assert world.call(plain, "/queue/next", {"agent": "reviews"})[0] == 403
    assert world.call(pool, "/queue/next", {"agent": "other"})[0] == 403
    status, task = world.call(pool, "/queue/next", {"agent": "reviews"})
    assert status == 200
    done = {"task_id": task["task_id"], "lease": task["lease"], "decision": "good"}
    assert world.call(plain, "/queue/complete", done)[0] == 404
    assert world.call(pool, "/queue/complete", done)[0] == 202


def test_a_token_reads_the_tasks_that_it_may_read_and_no_others(world: World) -> None:
    task_id = world.enqueue("@acme:books")
    reader, plain = world.agent("reader", may_read=("books",)).token, world.agent("plain").token
    assert world.call(reader, f"/tasks/{task_id}")[0] == 200
    shown = world.call(reader, f"/tasks/{task_id}")[1]["task_id"]
    assert [line["task_id"] for line in world.call(reader, "/tasks?agent=books")[1]["tasks"]] == [shown]
    assert "books" in world.call(reader, "/queue/status")[1]["agents"]
    assert world.call(plain, f"/tasks/{task_id}")[0] == 404
    assert world.call(plain, "/tasks?agent=books")[0] == 403
    assert world.call(reader, "/queue/next", {"agent": "books"})[0] == 403


def test_a_read_only_token_changes_nothing(world: World) -> None:
    made = postroom("token", "create", "--data", world.data, "--role", "operator", "--read-only").line
    assert world.call(made["token"], "/engine/status")[0] == 200
    status, answer = world.call(made["token"], "/queue/enqueue", {"agent": "a", "payload": 1})
    assert (status, answer["message"]) == (403, "this token may only read")
    silent = world.agent("silent", is_read_only=True).token
    for path in ("inbox", "stream"):  # would register the agent, and note what it has read
        assert world.call(silent, f"/engine/agents/silent/{path}")[0] == 403
    assert "silent" not in str(world.call(world.admin, "/engine/agents")[1])


def test_a_token_uses_only_its_buses_and_messages_only_its_agents(world: World) -> None:
    kept = world.agent("kept", only_buses=("team",), only_message=("lead",)).token
    note = {"type": "note", "project_id": "p", "body": "hello"}
    assert world.call(kept, "/bus/team/messages", note)[0] == 201
    assert world.call(kept, "/bus/other/messages", note)[0] == 403
    assert world.call(kept, "/bus/other/messages")[0] == 403
    world.call(world.agent("lead").token, "/engine/agents/lead/beat", {})
    world.call(world.agent("stranger").token, "/engine/agents/stranger/beat", {})
    send = "/engine/agents/kept/messages"
    assert world.call(kept, send, {"to": "lead", "payload": {"text": "hi"}})[0] == 202
    assert world.call(kept, send, {"to": "stranger", "payload": {"text": "hi"}})[0] == 403
    for path in ("/engine/messages", "/engine/request"):  # a worker would deliver it
        for to, status in (("lead", 202), ("stranger", 403)):
            message = {"type": "agent_message", "payload": {"to": to, "body": "hi"}}
            waits = {"timeout_s": 0} if path == "/engine/request" else {}
            assert world.call(kept, path, message | waits)[0] == status


def test_only_message_token_neither_starts_nor_ends_other_agents(world: World) -> None:
    kept, free = world.agent("kept", only_message=("lead",)).token, world.agent("free").token
    for kind in sorted(CONTROL_TYPES):
        message = {"type": kind, "payload": {"agent_id": "stranger"}}
        for path, waits in (("/engine/messages", {}), ("/engine/request", {"timeout_s": 0})):
            status, answer = world.call(kept, path, message | waits)
            assert (status, "starts and ends no agents" in answer["message"]) == (403, True), path
            assert world.call(free, path, message | waits)[0] == 202
        batch = {"messages": [{"type": "tool_call", "payload": {}}, message]}
        assert world.call(kept, "/engine/messages", batch)[0] == 403


def test_a_token_cancels_no_message_to_an_agent_that_it_may_not_message(world: World) -> None:
    kept, free = world.agent("kept", only_message=("lead",)).token, world.agent("free").token

    def submitted(kind: str, payload: Any) -> str:
        status, answer = world.call(free, "/engine/messages", {"type": kind, "payload": payload})
        assert status == 202
        return str(answer["message_id"])

    for kind, payload in (
        ("agent_message", {"to": "stranger", "body": "hi"}),
        ("agent_terminate", {"agent_id": "stranger"}),
    ):
        message_id = submitted(kind, payload)
        for path in ("/engine/messages", "/page/messages"):
            assert world.call(kept, f"{path}/{message_id}/cancel", {})[0] == 403
    to_lead = submitted("agent_message", {"to": "lead", "body": "hi"})
    assert world.call(kept, f"/engine/messages/{to_lead}/cancel", {})[0] == 202


def _claim_over_http(world: World, token: str) -> str:
    return str(world.call(token, "/queue/next", {"wait_s": 20}))


def _claim_over_mcp(world: World, token: str) -> str:
    return _wait_over_mcp(world, token, "claim")


def _wait_over_mcp(world: World, token: str, name: str) -> str:
    tool = {"name": name, "arguments": {"wait_s": 20}}
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": tool}
    headers = {"authorization": f"Bearer {token}", "accept": "application/json, text/event-stream"}
    return httpx2.post(f"{world.url}/mcp", json=call, headers=headers, timeout=HANG_GUARD_S).text


@pytest.mark.parametrize("claim", [_claim_over_http, _claim_over_mcp])
def test_a_revoked_token_gets_no_task_for_a_claim_that_waits(
    world: World, claim: Callable[[World, str], str]
) -> None:
    made = world.agent("waiter")
    answers: list[str] = []
    waiting = threading.Thread(target=lambda: answers.append(claim(world, made.token)))
    waiting.start()
    until(lambda: b"postroom_waiting_requests 1" in _metrics(world))
    world.tokens.revoke(made.token_id)
    until(lambda: world.call(made.token, "/whoami")[0] == 401)
    task_id = world.enqueue("waiter")
    waiting.join(HANG_GUARD_S)
    assert "the token has expired or was revoked" in answers[0]
    assert world.call(world.admin, f"/tasks/{task_id}")[1]["state"] == "QUEUED"
    world.call(world.admin, f"/tasks/{task_id}/cancel", {})


def test_a_tool_that_waits_for_messages_ends_with_its_token(world: World) -> None:
    made = world.agent("sitter")
    answers: list[str] = []
    waiting = threading.Thread(target=lambda: answers.append(_wait_over_mcp(world, made.token, "inbox")))
    waiting.start()
    until(lambda: "sitter" in str(world.call(world.admin, "/engine/agents")[1]))
    world.tokens.revoke(made.token_id)
    waiting.join(HANG_GUARD_S)
    assert "the token has expired or was revoked" in answers[0]


def _metrics(world: World) -> bytes:
    request = urllib.request.Request(  # noqa: S310 - our own server
        f"{world.url}/metrics", headers={"authorization": f"Bearer {world.admin}"}
    )
    with urllib.request.urlopen(request, timeout=HANG_GUARD_S) as answer:  # noqa: S310
        return bytes(answer.read())


def test_an_expired_token_is_refused(world: World) -> None:
    brief, lasting = (world.tokens.create("operator", expires_s=lifetime_s) for lifetime_s in (1.0, 3_600.0))
    until(lambda: world.call(brief.token, "/engine/status")[0] == 401)
    assert world.call(lasting.token, "/engine/status")[0] == 200


def test_the_list_of_tokens_shows_the_permissions(world: World) -> None:
    who = ("--role", "agent", "--org", "acme", "--agent", "x")
    allowed = ("--may-claim", "y", "--only-bus", "team", "--rate", "3")
    made = postroom("token", "create", "--data", world.data, *who, *allowed).line
    rows = {row["token_id"]: row for row in postroom("token", "list", "--data", world.data).lines}
    assert rows[made["token_id"]]["permissions"] == "may-claim y, only-bus team"
    assert rows[made["token_id"]]["rate"] == 3
