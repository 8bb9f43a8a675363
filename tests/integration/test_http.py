"""The task server as a real process, over real HTTP."""

import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from postroom.calls.fields import (
    COMPLETE_BYTES_MAX,
    ENQUEUE_BYTES_MAX,
    ENQUEUE_MANY_MAX,
    JSON_DEPTH_MAX,
    SMALL_BODY_BYTES_MAX,
)
from postroom.contracts.tasks.tasks import DECISIONS
from postroom.server.http.listener import DISCARDED_BYTES_MAX, HEAD_BYTES_MAX
from postroom.stores.own_ids import FENCE_BITS
from tests.integration.servers import Answer, Server, serving
from tests.waiting import HANG_GUARD_S, until


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server") / "data", execute=True) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    """The server that all tests here share, with empty queues."""
    for who in ("triage", "review"):
        while (answer := shared.post(who, "/queue/next", limit=100, lease_s=1_000)).status == 200:
            for task in _tasks(answer):
                shared.post("boss", f"/tasks/{task['task_id']}/cancel")
    return shared


def _tasks(answer: Answer) -> list[Any]:
    found = answer.json.get("tasks", [answer.json])
    assert isinstance(found, list)
    return found


def samples(server: Server) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The metrics as Prometheus reads them: name and labels to value."""
    families = text_string_to_metric_families(server.get("boss", "/metrics").body.decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def waiting(server: Server) -> int:
    """How many requests wait for a task."""
    return int(samples(server)["postroom_waiting_requests", frozenset()])


# ---- the way of a task -----------------------------------------------------------------------------


def test_a_task_from_enqueue_to_done(server: Server) -> None:
    task_id = server.enqueue("triage", {"issue": 7}, type="issue.triage")
    task = server.claim("triage", worker="box-1")
    assert task == {
        "task_id": task_id,
        "payload": {"issue": 7},
        "lease": task["lease"],
        "attempt": 1,
        "lease_s": 300.0,
        "type": "issue.triage",
        "parent": "",
    }
    holder = {"task_id": task_id, "lease": task["lease"]}
    assert server.post("triage", "/queue/heartbeat", **holder).status == 202
    done = server.post("triage", "/queue/complete", **holder, decision={"decision": "close"})
    assert (done.status, done.json) == (202, {"task_id": task_id})
    until(lambda: server.get("triage", f"/tasks/{task_id}").json["status"] == "done")
    shown = server.get("triage", f"/tasks/{task_id}").json
    assert shown["result"] == {"decision": "close"}
    assert [event["kind"] for event in shown["history"]][:2] == ["created", "enqueued"]
    assert task_id in (server.data / "executed").read_text()


def test_a_claim_without_a_task_is_204(server: Server) -> None:
    answer = server.post("triage", "/queue/next")
    assert (answer.status, answer.body) == (204, b"")
    assert server.send("triage", "POST", "/queue/next", {"limit": 5}).status == 204


def test_a_batch_is_enqueued_and_claimed(server: Server) -> None:
    answer = server.post(
        "boss", "/queue/enqueue", tasks=[{"agent": "triage", "payload": number} for number in range(5)]
    )
    assert answer.status == 201
    task_ids = answer.json["task_ids"]
    claimed = _tasks(server.post("triage", "/queue/next", limit=3))
    assert [task["task_id"] for task in claimed] == task_ids[:3]
    [fourth] = _tasks(server.post("triage", "/queue/next", limit=1))
    assert fourth["payload"] == 3


def test_a_batch_is_stored_whole_or_not_at_all(server: Server) -> None:
    before = server.get("boss", "/queue/status").json["totals"]
    tasks = [{"agent": "triage", "payload": 1}, {"agent": "triage", "payload": 2, "task_id": "../x"}]
    assert server.post("boss", "/queue/enqueue", tasks=tasks).status == 400
    too_many = [{"agent": "triage", "payload": 1}] * (ENQUEUE_MANY_MAX + 1)
    assert server.post("boss", "/queue/enqueue", tasks=too_many).status == 400
    assert server.get("boss", "/queue/status").json["totals"] == before


def test_the_same_id_stores_one_task(server: Server) -> None:
    assert server.enqueue(task_id="same") == server.enqueue(task_id="same") == "same"
    keyed = {server.enqueue(idempotency_key="event-1") for _ in range(3)}
    assert len(keyed) == 1
    assert len(_tasks(server.post("triage", "/queue/next", limit=10))) == 2


def test_fail_release_cancel_retry(server: Server) -> None:
    task_id = server.enqueue(max_retries=0)
    task = server.claim()
    holder = {"task_id": task_id, "lease": task["lease"]}
    assert server.post("triage", "/queue/release", **holder).status == 202
    task = server.claim()
    assert task["attempt"] == 2
    holder["lease"] = task["lease"]
    assert server.post("triage", "/queue/fail", **holder, error="no model", retry_in_s=0).status == 202
    shown = server.get("triage", f"/tasks/{task_id}").json
    assert (shown["status"], shown["errors"]) == ("failed", ["no model"])
    assert server.post("boss", f"/tasks/{task_id}/retry").status == 202
    assert server.post("boss", f"/tasks/{task_id}/cancel").status == 202
    assert server.get("boss", f"/tasks/{task_id}").json["status"] == "cancelled"
    refused = server.post("boss", f"/tasks/{task_id}/cancel")
    assert (refused.status, refused.json["error"]) == (409, "WrongState")


def test_a_repeated_call_changes_nothing(server: Server) -> None:
    server.enqueue()
    task = server.claim()
    word = {"task_id": task["task_id"], "lease": task["lease"], "decision": 1}
    assert [server.post("triage", "/queue/complete", **word).status for _ in range(3)] == [202] * 3


def test_a_second_decision_is_refused(server: Server) -> None:
    task_id = server.enqueue()
    task = server.claim()
    word = {"task_id": task_id, "lease": task["lease"]}
    first = {"decision": "close", "labels": [1]}
    same = {"labels": [1], "decision": "close"}
    assert server.post("triage", "/queue/complete", **word, decision=first).status == 202
    assert server.post("triage", "/queue/complete", **word, decision=same).status == 202
    for other in ({"decision": "open"}, None, {"decision": "close", "labels": [1.0]}, "close"):
        refused = server.post("triage", "/queue/complete", **word, decision=other)
        assert (refused.status, refused.json["error"]) == (409, "WrongState")
        assert "completed before with another decision" in refused.json["message"]
    until(lambda: server.get("triage", f"/tasks/{task_id}").json["status"] == "done")
    assert server.post("triage", "/queue/complete", **word, decision="late").status == 409
    assert server.post("triage", "/queue/complete", **word, decision=first).status == 202
    assert server.get("triage", f"/tasks/{task_id}").json["result"] == first


def test_completion_claims_the_next_task_once(server: Server) -> None:
    server.enqueue()
    second, third = server.enqueue(), server.enqueue()
    task = server.claim()
    word = {"task_id": task["task_id"], "lease": task["lease"], "claim_next": 1}
    first = server.post("triage", "/queue/complete", **word, decision="a")
    assert [each["task_id"] for each in first.json["tasks"]] == [second]
    assert server.post("triage", "/queue/complete", **word, decision="a").json.get("tasks", []) == []
    assert server.post("triage", "/queue/complete", **word, decision="b").status == 409
    assert server.claim()["task_id"] == third


def test_of_two_simultaneous_decisions_one_is_refused(server: Server) -> None:
    for _ in range(5):
        server.enqueue()
        task = server.claim()
        words = [{"task_id": task["task_id"], "lease": task["lease"], "decision": n} for n in (1, 1, 2, 2)]
        said = [in_thread(partial(server.post, "triage", "/queue/complete", **word)) for word in words]
        for thread, _ in said:
            thread.join(HANG_GUARD_S)
        assert sorted(answers[0].status for _, answers in said) == [202, 202, 409, 409]


def test_a_full_queue_replies_with_retry_after(server: Server) -> None:
    with server.tasks() as tasks:
        tasks.limit_queue("small", max_depth=2)
    for _ in range(2):
        server.enqueue("small")
    answer = server.post("boss", "/queue/enqueue", agent="small", payload=3)
    assert (answer.status, answer.json["error"]) == (429, "QueueFull")
    assert int(answer.headers["retry-after"]) >= 1


def test_lists_are_pages(server: Server) -> None:
    task_ids = [server.enqueue("pages") for _ in range(5)]
    first = server.get("boss", "/tasks?agent=pages&limit=3").json["tasks"]
    rest = server.get("boss", f"/tasks?agent=pages&limit=3&after={first[-1]['seq']}").json["tasks"]
    assert [line["task_id"] for line in [*first, *rest]] == task_ids
    assert server.get("boss", "/tasks?agent=pages&state=DONE").json["tasks"] == []


# ---- who may do what -------------------------------------------------------------------------------

EVERY_ROUTE = [
    ("POST", "/queue/next"),
    ("POST", "/queue/complete"),
    ("POST", "/queue/heartbeat"),
    ("POST", "/queue/fail"),
    ("POST", "/queue/release"),
    ("POST", "/queue/enqueue"),
    ("POST", "/harness/result"),
    ("POST", "/result"),
    ("POST", "/tasks/x/cancel"),
    ("POST", "/tasks/x/retry"),
    ("GET", "/tasks/x"),
    ("GET", "/tasks"),
    ("GET", "/queue/status"),
    ("GET", "/events"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/bus/news/messages"),
    ("POST", "/bus/news/messages"),
]


@pytest.mark.parametrize(("method", "path"), EVERY_ROUTE)
def test_every_route_but_health_needs_a_token(server: Server, method: str, path: str) -> None:
    wrong = "pr_" + "A" * 43
    for headers in (
        {},
        {"Authorization": ""},
        {"Authorization": f"Bearer {wrong}"},
        {"Authorization": f"Basic {server.tokens['boss']}"},
        {"Authorization": server.tokens["boss"]},
        {"Authorization": f"Bearer {server.tokens['boss'][:-1]}"},
    ):
        answer = server.send(None, method, path, raw=b"{}" if method == "POST" else None, headers=headers)
        assert (answer.status, answer.json["error"]) == (401, "Unauthorized")
        assert answer.headers["www-authenticate"] == "Bearer"


def test_a_refusal_says_whether_the_token_is_missing_or_wrong(server: Server) -> None:
    missing = server.send(None, "GET", "/queue/status", headers={})
    assert "Authorization: Bearer TOKEN" in missing.json["message"]
    wrong = server.send(None, "GET", "/queue/status", headers={"Authorization": "Bearer pr_nothing"})
    assert "unknown, expired or revoked" in wrong.json["message"]


def test_an_empty_body_is_named(server: Server) -> None:
    answer = server.send("boss", "POST", "/queue/enqueue", raw=b"")
    assert (answer.status, "the body is empty" in answer.json["message"]) == (400, True)


def test_health_needs_no_token(server: Server) -> None:
    answer = server.get(None, "/health")
    assert (answer.status, answer.json) == (200, {"status": "ok"})


def test_a_token_in_the_query_is_ignored(server: Server) -> None:
    assert server.get(None, f"/queue/status?token={server.tokens['boss']}").status == 401


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/queue/enqueue", {"agent": "triage", "payload": 1}),
        ("POST", "/tasks/x/cancel", None),
        ("POST", "/tasks/x/retry", None),
        ("GET", "/metrics", None),
        ("GET", "/tasks?agent=review", None),
    ],
)
def test_operator_routes_refuse_agents(server: Server, method: str, path: str, body: object) -> None:
    answer = server.send("triage", method, path, body)
    assert (answer.status, answer.json["error"]) == (403, "Forbidden")


@pytest.mark.parametrize("name", [{"agent": "review"}, {"agent_url": "review"}, {"agent_url": "http://x"}])
def test_an_identity_in_a_body_is_refused(server: Server, name: dict[str, str]) -> None:
    """Foreman trusted `agent_url` from the body, so anyone could take another agent's tasks."""
    task_id = server.enqueue("review")
    refused = server.send("triage", "POST", "/queue/next", name)
    assert (refused.status, refused.json["error"]) == (403, "Forbidden")
    assert server.get("boss", f"/tasks/{task_id}").json["status"] == "pending"


def test_an_agent_may_name_itself(server: Server) -> None:
    server.enqueue()
    assert server.claim("triage", agent="triage", agent_url="triage")


def test_an_operator_acts_for_the_agent_it_names(server: Server) -> None:
    server.enqueue("review")
    assert server.post("boss", "/queue/next").status == 400
    assert server.post("boss", "/queue/next", agent="triage").status == 204
    task = server.claim("boss", agent="review")
    word = {"task_id": task["task_id"], "lease": task["lease"]}
    assert server.post("boss", "/queue/heartbeat", **word, agent="triage").status == 404
    assert server.post("boss", "/queue/heartbeat", **word, agent="review").status == 202
    assert server.post("boss", "/queue/release", **word).status == 202


def test_an_agent_cannot_claim_another_agents_task(server: Server) -> None:
    server.enqueue("review")
    assert server.post("triage", "/queue/next").status == 204
    assert server.post("triage", "/queue/next", limit=10).status == 204


WORDS = [
    ("/queue/complete", {"decision": "mine"}),
    ("/queue/heartbeat", {}),
    ("/queue/fail", {"error": "mine"}),
    ("/queue/release", {}),
]


@pytest.mark.parametrize(("path", "rest"), WORDS)
def test_an_agent_cannot_change_another_agents_task(server: Server, path: str, rest: dict[str, Any]) -> None:
    task_id = server.enqueue("review")
    task = server.claim("review")
    before = server.get("boss", f"/tasks/{task_id}").json
    refused = server.post("triage", path, task_id=task_id, lease=task["lease"], **rest)
    unknown = server.post("triage", path, task_id="no-such-task", lease=task["lease"], **rest)
    assert (refused.status, refused.json["error"]) == (404, "UnknownTask")
    assert unknown.json["message"] == refused.json["message"].replace(task_id, "no-such-task")
    assert server.get("boss", f"/tasks/{task_id}").json == before


@pytest.mark.parametrize(("path", "rest"), WORDS)
def test_an_unknown_id_is_refused(server: Server, path: str, rest: dict[str, Any]) -> None:
    """Foreman answered 202 to any id."""
    for task_id in ("no-such-task", "t00000000-7", "t00000000-" + "9" * 60, "\u0000", "ä" * 64):
        for who in ("triage", "boss"):
            answer = server.post(who, path, task_id=task_id, lease=1, **rest)
            assert (answer.status, answer.json["error"]) == (404, "UnknownTask"), task_id


def test_another_agents_task_is_not_seen(server: Server) -> None:
    task_id = server.enqueue("review", "secret")
    assert server.get("triage", f"/tasks/{task_id}").status == 404
    for path in ("/harness/result", "/result"):  # foreman's seed has the second name
        assert server.post("triage", path, task_id=task_id).status == 404
        assert server.post("review", path, task_id=task_id).status == 202
    assert task_id not in server.get("triage", "/tasks").body.decode()
    status = server.get("triage", "/queue/status").json
    assert set(status["agents"]) <= {"triage"}
    assert "harness" not in status
    assert set(server.get("boss", "/queue/status").json["harness"]["loops"]) == {
        "alerts", "drain", "nudge", "sweep",
    }  # fmt: skip


@pytest.mark.parametrize(("path", "rest"), WORDS)
def test_a_stale_lease_is_refused_and_changes_nothing(
    server: Server, path: str, rest: dict[str, Any]
) -> None:  # fmt: skip
    task_id = server.enqueue()
    zombie = server.claim(lease_s=0.05)
    until(lambda: server.post("triage", "/queue/next").status == 200)
    before = server.get("triage", f"/tasks/{task_id}").json
    assert before["attempt"] == 2
    answer = server.post("triage", path, task_id=task_id, lease=zombie["lease"], **rest)
    assert (answer.status, answer.json["error"]) == (409, "StaleLease")
    assert server.get("triage", f"/tasks/{task_id}").json == before


def test_a_zombies_late_complete_does_not_move_a_done_task(server: Server) -> None:
    """In foreman it went back to completed, and its actions ran twice."""
    task_id = server.enqueue()
    zombie = server.claim(lease_s=0.05)
    second: list[Any] = []

    def claimed() -> bool:
        answer = server.post("triage", "/queue/next")
        second.extend([answer.json] if answer.status == 200 else [])
        return bool(second)

    until(claimed)
    server.post("triage", "/queue/complete", task_id=task_id, lease=second[0]["lease"], decision="ok")
    until(lambda: server.get("triage", f"/tasks/{task_id}").json["status"] == "done")
    late = server.post("triage", "/queue/complete", task_id=task_id, lease=zombie["lease"], decision="late")
    assert late.status == 409
    shown = server.get("triage", f"/tasks/{task_id}").json
    assert (shown["status"], shown["result"]) == ("done", "ok")
    assert (server.data / "executed").read_text().split().count(task_id) == 1


def test_a_failed_task_is_not_resurrected(server: Server) -> None:
    task_id = server.enqueue(max_retries=0)
    task = server.claim()
    word = {"task_id": task_id, "lease": task["lease"]}
    server.post("triage", "/queue/fail", **word, error="gave up")
    late = server.post("triage", "/queue/complete", **word, decision="late")
    assert (late.status, late.json["error"]) == (409, "StaleLease")
    assert server.get("triage", f"/tasks/{task_id}").json["status"] == "failed"


def test_a_complete_that_names_another_task_is_refused(server: Server) -> None:
    """In foreman it was silently lost."""
    first, second = server.enqueue(), server.enqueue()
    tasks = {task["task_id"]: task for task in _tasks(server.post("triage", "/queue/next", limit=2))}
    answer = server.post(
        "triage", "/queue/complete", task_id=second, lease=tasks[first]["lease"], decision="first's"
    )
    assert (answer.status, answer.json["error"]) == (409, "StaleLease")
    for task_id in (first, second):
        assert server.get("triage", f"/tasks/{task_id}").json["status"] == "claimed"


def test_a_removed_agent_is_refused(server: Server) -> None:
    server.tokens["gone"] = server.agents.add("gone")
    assert server.post("gone", "/queue/next").status == 204
    server.agents.remove("gone")
    until(lambda: server.post("gone", "/queue/next").status == 401)


def test_decisions_cannot_be_enqueued(server: Server) -> None:
    answer = server.post("boss", "/queue/enqueue", agent=DECISIONS, payload="forged")
    assert (answer.status, answer.json["error"]) == (400, "InvalidMessage")


def test_a_failed_decision_is_shown_in_the_status(server: Server) -> None:
    task_id = server.enqueue()
    task = server.claim()
    before = server.get("boss", "/queue/status").json["harness"]["loops"]["drain"]["errors"]
    server.post("triage", "/queue/complete", task_id=task_id, lease=task["lease"], decision="fail")

    def drain() -> Any:
        return server.get("boss", "/queue/status").json["harness"]["loops"]["drain"]

    until(lambda: drain()["errors"] > before)
    assert drain()["running"] is True
    assert drain()["last_error"] == "ValueError: a secret result"
    assert server.get("triage", f"/tasks/{task_id}").json["status"] == "completed"


# ---- limits ----------------------------------------------------------------------------------------


def test_a_body_has_a_limit(server: Server) -> None:
    for path, limit in (
        ("/queue/next", SMALL_BODY_BYTES_MAX),
        ("/queue/complete", COMPLETE_BYTES_MAX),
        ("/queue/enqueue", ENQUEUE_BYTES_MAX),
    ):
        answer = server.send("boss", "POST", path, raw=b" " * (limit + 1))
        assert (answer.status, answer.json["error"]) == (413, "TooLong")
    longest = b'{"agent": "triage"' + b" " * (SMALL_BODY_BYTES_MAX - 19) + b"}"
    assert server.send("boss", "POST", "/queue/next", raw=longest).status == 204


def refused_within(connection: socket.socket, piece: bytes, pieces: int) -> bool:
    """Whether the server closes the connection before it has read all of this."""
    try:
        for _ in range(pieces):
            connection.sendall(piece)
    except OSError:
        return True
    return False


def test_an_endless_body_is_not_read(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_GUARD_S) as connection:
        head = (
            f"POST /queue/next HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.tokens['triage']}\r\n"
            "Transfer-Encoding: chunked\r\n\r\n"
        )
        connection.sendall(head.encode())
        piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        assert refused_within(connection, piece, 4 * DISCARDED_BYTES_MAX // 0x10000)
    assert server.get(None, "/health").status == 200


def test_a_head_has_a_limit(server: Server) -> None:
    answer = server.get("triage", "/queue/status", X_Long="x" * HEAD_BYTES_MAX)
    assert answer.status == 431
    many = {f"X-{number}": "" for number in range(HEAD_BYTES_MAX // 8)}  # short, but too many
    assert server.send("triage", "GET", "/queue/status", headers=many).status == 431
    with socket.create_connection(("127.0.0.1", server.port), timeout=HANG_GUARD_S) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        assert refused_within(connection, b"X-Pad: " + b"x" * 4_000 + b"\r\n", 10_000)


def test_a_refusal_repeats_no_secret(server: Server) -> None:
    key = "ghp_" + "aB7" * 12
    for path in (f"/queue/{key}", f"/bus/{key}%20/messages", f"/queue/get?task_id={key}"):
        assert key not in json.dumps(server.send("boss", "GET", path).json)
    for body in ({"agent": f"{key} x"}, {key: 1}, {"agent": "triage", "lease_s": key}):
        answer = server.send("boss", "POST", "/queue/next", raw=json.dumps(body).encode())
        assert answer.status == 400
        assert key not in json.dumps(answer.json)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b"[" * 50_000, b'{"task_id": 5}', b'{"unknown": 1}', b"NaN"],
)
def test_an_invalid_body_is_refused_with_a_one_line_error(server: Server, raw: bytes) -> None:
    for path in ("/queue/next", "/queue/complete", "/queue/enqueue", "/harness/result", "/bus/b/messages"):
        answer = server.send("boss", "POST", path, raw=raw)
        assert (answer.status, answer.json["error"]) == (400, "InvalidMessage"), path
        assert "\n" not in answer.json["message"]


def test_a_deeply_nested_payload_is_refused(server: Server) -> None:
    deep = "[" * JSON_DEPTH_MAX + "]" * JSON_DEPTH_MAX
    body = b'{"agent": "triage", "payload": %b}'
    assert server.send("boss", "POST", "/queue/enqueue", raw=body % f"[{deep}]".encode()).status == 400
    assert server.send("boss", "POST", "/queue/enqueue", raw=body % deep.encode()).status == 201
    assert json.dumps(server.claim()["payload"]).replace(" ", "") == deep


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=1001",
        "limit=x",
        "after=-1",
        "after=99999999999999999999",
        "state=GONE",
        "x=1",
        "limit=1&limit=2",
        "state=null",
    ],
)
def test_an_invalid_query_is_refused(server: Server, query: str) -> None:
    answer = server.get("boss", f"/tasks?{query}")
    assert (answer.status, answer.json["error"]) == (400, "InvalidMessage")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            {"agent": "triage", "payload": 1, "max_retries": "3"},
            "max_retries must be a whole number or null, not a",
        ),
        ({"agent": "triage", "payload": 1, "delay_s": -1}, "delay_s must be at least 0"),
        (
            {"agent": "triage", "payload": 1, "durability": "x"},
            "durability cannot be 'x': it is one of fsync, g",
        ),
        ({"agent": "a b", "payload": 1}, "agent is not allowed: use 1 to 128 ASCII letters"),
        ({"agent": "triage"}, "the body lacks the field 'payload'"),
        ({"tasks": [{"agent": 1, "payload": 1}]}, "tasks[0].agent must be a text, not a whole number"),
        ([], "the body must be an object, not a list"),
    ],
)
def test_an_invalid_field_is_described_in_plain_words(server: Server, body: Any, sentence: str) -> None:
    answer = server.send("boss", "POST", "/queue/enqueue", body)
    assert (answer.status, answer.json["message"][: len(sentence)]) == (400, sentence)


def test_an_invalid_query_field_is_described_in_plain_words(server: Server) -> None:
    limit = server.get("boss", "/tasks?limit=x").json["message"]
    assert limit == "limit must be a whole number, not a text"
    state = server.get("boss", "/tasks?state=pending").json["message"]
    assert state.startswith("state cannot be 'pending': it is one of CANCELLED, COMPLETED")


def test_a_lease_grows_with_each_delivery_and_counts_nothing_else(server: Server) -> None:
    server.enqueue()
    leases = []
    for others in (1, 5):
        task = server.claim()
        leases.append(task["lease"])
        server.post("triage", "/queue/release", task_id=task["task_id"], lease=task["lease"])
        for _ in range(others):
            server.post("boss", "/queue/enqueue", agent="other", payload=1)
    assert leases[0] < leases[1]
    assert [lease >> FENCE_BITS for lease in leases] == [1, 2]


@pytest.mark.parametrize("number", ["wait_s", "lease_s", "limit"])
def test_numbers_have_limits(server: Server, number: str) -> None:
    for value in (-1, 1e9, "5", None):
        assert server.send("triage", "POST", "/queue/next", {number: value}).status == 400


def test_unknown_paths_and_methods_are_refused(server: Server) -> None:
    assert server.get("boss", "/nowhere").json["error"] == "NotFound"
    answer = server.get("boss", "/queue/next")
    assert (answer.status, answer.json["error"]) == (405, "MethodNotAllowed")
    assert "POST" in answer.headers["allow"]


# ---- many at once ----------------------------------------------------------------------------------


def test_two_producers_and_two_consumers_meet_no_error(server: Server) -> None:
    """Foreman's one connection gave 50 errors in 1,200 calls when two and two threads shared it."""
    statuses: list[int] = []
    claimed: list[str] = []

    def produce() -> None:
        for number in range(100):
            answer = server.post("boss", "/queue/enqueue", agent="triage", payload=number)
            statuses.append(answer.status)

    def consume() -> None:
        while len(claimed) < 200:
            answer = server.post("triage", "/queue/next", wait_s=0.2)
            statuses.append(answer.status)
            if answer.status == 200:
                task = answer.json
                claimed.append(task["task_id"])
                word = {"task_id": task["task_id"], "lease": task["lease"], "decision": 1}
                statuses.append(server.post("triage", "/queue/complete", **word).status)

    threads = [threading.Thread(target=work) for work in (produce, produce, consume, consume)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(statuses) <= {200, 201, 202, 204}
    assert len(set(claimed)) == len(claimed) == 200


# ---- waiting ---------------------------------------------------------------------------------------


def in_thread(work: Callable[[], Answer]) -> tuple[threading.Thread, list[Answer]]:
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    return thread, answers


def test_a_long_poll_is_woken(server: Server) -> None:
    thread, answers = in_thread(lambda: server.post("triage", "/queue/next", wait_s=30))
    task_id = server.enqueue()
    thread.join(HANG_GUARD_S)
    assert answers[0].json["task_id"] == task_id


def test_a_long_poll_is_woken_by_another_process(server: Server) -> None:
    thread, answers = in_thread(lambda: server.post("triage", "/queue/next", wait_s=30))
    with server.tasks() as tasks:
        task_id = tasks.enqueue(agent="triage", payload=1)
    thread.join(HANG_GUARD_S)
    assert answers[0].json["task_id"] == task_id


def test_a_long_poll_gets_a_delayed_task(server: Server) -> None:
    task_id = server.enqueue(delay_s=0.3)
    assert server.post("triage", "/queue/next").status == 204
    assert server.claim("triage", wait_s=30)["task_id"] == task_id


def test_a_long_poll_gets_a_lapsed_task(server: Server) -> None:
    task_id = server.enqueue()
    server.claim(lease_s=0.3)
    again = server.claim("triage", wait_s=30)
    assert (again["task_id"], again["attempt"]) == (task_id, 2)


def test_a_long_poll_ends_without_a_task(server: Server) -> None:
    assert server.post("triage", "/queue/next", wait_s=0.1).status == 204


def test_a_long_poll_waits_for_a_result(server: Server) -> None:
    task_id = server.enqueue()
    polls = [in_thread(lambda: server.get("boss", f"/tasks/{task_id}?wait_s=30")) for _ in range(3)]
    until(lambda: waiting(server) == 3)
    task = server.claim()
    server.post("triage", "/queue/complete", task_id=task_id, lease=task["lease"], decision={"label": "bug"})
    for thread, answers in polls:
        thread.join(HANG_GUARD_S)
        assert (answers[0].status, answers[0].json["result"]) == (200, {"label": "bug"})
    assert waiting(server) == 0
    assert server.get("boss", f"/tasks/{task_id}?wait_s=30").json["result"] == {"label": "bug"}


def test_a_result_poll_is_woken_by_another_process(server: Server) -> None:
    task_id = server.enqueue()
    thread, answers = in_thread(lambda: server.get("triage", f"/tasks/{task_id}?wait_s=30"))
    until(lambda: waiting(server) == 1)
    with server.tasks() as tasks:
        tasks.cancel(task_id)
    thread.join(HANG_GUARD_S)
    assert answers[0].json["status"] == "cancelled"


def test_a_wait_that_times_out_returns_the_current_task(server: Server) -> None:
    task_id = server.enqueue()
    assert server.get("boss", f"/tasks/{task_id}?wait_s=0.05").json["status"] == "pending"
    lease_s = 60.0
    server.claim(lease_s=lease_s)
    shown = server.get("boss", f"/tasks/{task_id}?wait_s=0.05").json
    assert shown["status"] == "claimed"
    assert shown["lease_ends_at"] > shown["claimed_at"]
    for query in ("wait_s=31", "wait_s=-1", "wait_s=x", "wait=1"):
        assert server.get("boss", f"/tasks/{task_id}?{query}").status == 400


def test_a_disconnected_result_poll_is_dropped(server: Server) -> None:
    task_id = server.enqueue()
    connection = server.connect()
    token = {"Authorization": f"Bearer {server.tokens['boss']}"}
    connection.request("GET", f"/tasks/{task_id}?wait_s=30", headers=token)
    until(lambda: waiting(server) == 1)
    connection.close()
    until(lambda: waiting(server) == 0)


# ---- agents that send ------------------------------------------------------------------------------


def test_an_agent_sends_where_allowed_and_reads_its_tasks(server: Server) -> None:
    server.tokens["planner"] = server.agents.add("planner", may_send_to=["triage"])
    sent = server.post("planner", "/queue/enqueue", agent="triage", payload=1, idempotency_key="k")
    assert sent.status == 201
    task_id = sent.json["task_id"]
    shown = server.get("planner", f"/tasks/{task_id}").json
    assert (shown["sender"], shown["agent"]) == ("planner", "triage")
    assert server.get("triage", f"/tasks/{task_id}").status == 200  # its agent
    assert server.get("boss", f"/tasks/{task_id}").status == 200
    assert server.get("review", f"/tasks/{task_id}").status == 404  # neither
    task = server.claim("triage")
    thread, answers = in_thread(lambda: server.get("planner", f"/tasks/{task_id}?wait_s=30"))
    word = {"task_id": task_id, "lease": task["lease"]}
    assert server.post("planner", "/queue/complete", **word, decision=0).status == 404  # it may only read
    server.post("triage", "/queue/complete", **word, decision="done")
    thread.join(HANG_GUARD_S)
    assert answers[0].json["result"] == "done"
    server.agents.remove("planner")


def test_a_refusal_to_send_names_the_missing_permission(server: Server) -> None:
    server.tokens["critic"] = server.agents.add("critic", may_send_to=["triage"])
    tasks = [{"agent": "triage", "payload": 1}, {"agent": "review", "payload": 1}]
    for body in ({"agent": "review", "payload": 1}, {"tasks": tasks}):
        refused = server.send("critic", "POST", "/queue/enqueue", body)
        assert refused.status == 403
        assert "agent 'critic' may not send to 'review'" in refused.json["message"]
        assert "--may-send-to review" in refused.json["message"]
    assert server.post("critic", "/queue/enqueue", agent="triage", payload=1, sender="boss").status == 400
    assert server.post("triage", "/queue/next").status == 204  # no part of it was stored
    server.agents.remove("critic")


def test_a_task_id_of_another_sender_is_refused(server: Server) -> None:
    server.tokens["planner"] = server.agents.add("planner", may_send_to=["triage"])
    task_id = server.enqueue(task_id="taken-by-the-boss")
    refused = server.post("planner", "/queue/enqueue", agent="triage", payload=1, task_id=task_id)
    assert (refused.status, "another sender" in refused.json["message"]) == (400, True)
    assert server.get("planner", f"/tasks/{task_id}").status == 404
    server.agents.remove("planner")


def test_an_idempotency_key_belongs_to_its_sender(server: Server) -> None:
    for name in ("planner", "critic"):
        server.tokens[name] = server.agents.add(name, may_send_to=["triage"])

    def sent(who: str, key: str) -> str:
        answer = server.post(who, "/queue/enqueue", agent="triage", payload=who, idempotency_key=key)
        assert answer.status == 201, answer
        return str(answer.json["task_id"])

    said = [
        ("boss", "planner:x"), ("planner", "x"), ("critic", "x"), ("boss", "x"), ("boss", ":x"),
        ("planner", "critic:x"), ("critic", "planner:x"), ("boss", "@planner:x"), ("boss", "@:x"),
    ]  # fmt: skip
    task_ids = [sent(who, key) for who, key in said]
    assert len(set(task_ids)) == len(said)
    assert [sent(who, key) for who, key in said] == task_ids
    for name in ("planner", "critic"):
        server.agents.remove(name)


def test_a_foreign_task_and_an_unknown_one_get_the_same_answer(server: Server) -> None:
    server.tokens["planner"] = server.agents.add("planner", may_send_to=["triage"])
    task_id = server.enqueue("triage")
    lease = server.claim("triage")["lease"]
    for who in ("review", "planner"):
        for method, path, body in (
            ("GET", "/tasks/{}", None),
            ("GET", "/tasks/{}?wait_s=20", None),
            ("POST", "/result", {}),
            ("POST", "/queue/complete", {"lease": lease, "decision": 1}),
            ("POST", "/queue/heartbeat", {"lease": lease}),
            ("POST", "/queue/release", {"lease": lease}),
            ("POST", "/queue/fail", {"lease": lease, "error": "x"}),
            ("POST", "/tasks/{}/cancel", None),
        ):
            answers = []
            for asked in (task_id, f"{task_id}0"):
                sent = None if body is None else {**body, "task_id": asked}
                answer = server.send(who, method, path.format(asked), sent)
                answers.append((answer.status, answer.body.replace(asked.encode(), b"ID")))
            assert answers[0] == answers[1]
            assert answers[0][0] in (403, 404)
    server.agents.remove("planner")


def test_a_task_for_an_unregistered_agent_is_stored_with_a_warning(server: Server) -> None:
    one = server.post("boss", "/queue/enqueue", agent="nobody", payload=1)
    assert (one.status, one.json["warning"]) == (201, "no token is for the agent 'nobody': check the name")
    many = [{"agent": agent, "payload": 1} for agent in ("triage", "nobody", "noone")]
    several = server.post("boss", "/queue/enqueue", tasks=many)
    assert several.json["warning"] == "no token is for the agent 'nobody', 'noone': check the name"
    assert set(server.post("boss", "/queue/enqueue", agent="triage", payload=1).json) == {"task_id"}


def test_many_long_polls_get_one_task_each(server: Server) -> None:
    polls = [in_thread(lambda: server.post("triage", "/queue/next", wait_s=30)) for _ in range(12)]
    tasks = [{"agent": "triage", "payload": number} for number in range(12)]
    task_ids = server.post("boss", "/queue/enqueue", tasks=tasks).json["task_ids"]
    for thread, _ in polls:
        thread.join(HANG_GUARD_S)
    got = [answers[0].json["task_id"] for _, answers in polls]
    assert sorted(got) == sorted(task_ids)


def test_no_task_stays_leased_to_a_disconnected_client(server: Server) -> None:
    for _ in range(5):
        connection = server.connect()
        headers = {"Authorization": f"Bearer {server.tokens['triage']}"}
        connection.request("POST", "/queue/next", b'{"wait_s": 30}', headers)
        until(lambda: waiting(server) == 1)
        connection.close()
        until(lambda: waiting(server) == 0)
    task_id = server.enqueue()
    until(lambda: server.get("boss", f"/tasks/{task_id}").json["status"] == "pending")
    task = server.claim("triage", wait_s=30)
    assert task["task_id"] == task_id


# ---- streams ---------------------------------------------------------------------------------------


def test_events_are_a_stream(server: Server) -> None:
    task_id = server.enqueue()
    with server.stream("boss", "/events") as stream:
        assert stream.kind.startswith("text/event-stream")
        first = stream.take(3)
        assert [int(message.id) for message in first] == [1, 2, 3]
        assert all(message.data["kind"] == message.event for message in first)
    last = server.get("triage", f"/tasks/{task_id}").json["history"][-1]["seq"]
    with server.stream("boss", f"/events?after={last}") as stream:
        server.claim()
        message = stream.next()
        while message is not None and message.data["message_id"] != task_id:  # a decision that is retried
            message = stream.next()
    assert message is not None
    assert message.event == "dequeued"


def test_a_stream_resumes_after_the_last_event_id(server: Server) -> None:
    with server.stream("boss", "/events") as stream:
        seen = stream.take(4)
    with server.stream("boss", "/events?after=0", Last_Event_ID=seen[1].id) as stream:
        again = stream.take(2)
    assert again == seen[2:]
    assert server.get("boss", "/events", Last_Event_ID="x").status == 400


def test_an_agent_sees_only_events_of_its_queue(server: Server) -> None:
    server.enqueue("review", "secret")
    own = server.enqueue("triage")
    server.enqueue("review", "secret")
    claimed = server.claim("triage")
    assert claimed["task_id"] == own
    with server.stream("triage", "/events") as stream:
        message = stream.next()
        while message is not None and message.data.get("lease") != claimed["lease"]:
            assert message.data["queue"] == "triage"
            message = stream.next()


def test_a_stream_ends_with_its_token(server: Server) -> None:
    server.tokens["leaves"] = server.agents.add("leaves")
    server.enqueue("leaves")
    with server.stream("leaves", "/events") as stream:
        stream.take(2)
        server.agents.remove("leaves")
        assert stream.next() is None


def test_a_bus_over_http(server: Server) -> None:
    path = "/bus/news/messages"
    message = {"type": "INFO", "project_id": "demo", "body": "hello\nworld", "parents": []}
    first = server.send("triage", "POST", path, message)
    assert first.status == 201
    second = server.send("boss", "POST", path, message | {"body": "again"})
    everything = server.get("review", path).json["messages"]
    assert [entry["body"] for entry in everything] == ["hello\nworld", "again"]
    assert [entry["msg_id"] for entry in everything] == [first.json["msg_id"], second.json["msg_id"]]
    since = server.get("review", f"{path}?since={first.json['msg_id']}&limit=5").json["messages"]
    assert [entry["body"] for entry in since] == ["again"]
    assert (server.data / "buses" / "news.yaml").exists()


def test_a_bus_can_be_followed_as_a_stream(server: Server) -> None:
    path = "/bus/live/messages"
    message = {"type": "INFO", "project_id": "demo"}
    msg_ids = [server.send("triage", "POST", path, message).json["msg_id"] for _ in range(2)]
    with server.stream("triage", path) as stream:
        assert [entry.id for entry in stream.take(2)] == msg_ids
        third = server.send("boss", "POST", path, message).json["msg_id"]
        assert [entry.id for entry in stream.take(1)] == [third]
    with server.stream("triage", path, Last_Event_ID=msg_ids[1]) as stream:
        assert [entry.id for entry in stream.take(1)] == [third]


def test_invalid_posts_and_reads_of_a_bus_are_refused(server: Server) -> None:
    message = {"type": "INFO", "project_id": "demo"}
    assert server.send("triage", "POST", "/bus/a%2Fb/messages", message).status == 404
    assert server.send("triage", "POST", "/bus/.hidden/messages", message).status == 400
    assert server.send("triage", "POST", "/bus/%2e%2e/messages", message).status == 400
    escape = message | {"attachment": "../../agents.json"}
    assert server.send("triage", "POST", "/bus/news/messages", escape).status == 400
    assert server.get("triage", "/bus/nothing/messages").json == {"messages": []}
    assert server.send("triage", "POST", "/bus/known/messages", message).status == 201
    answer = server.get("triage", "/bus/known/messages?since=MSG-1")
    assert (answer.status, answer.json["error"]) == (404, "SinceIdNotFound")
    assert str(server.data) not in answer.body.decode()


# ---- what it says about itself ---------------------------------------------------------------------


def test_metrics_are_prometheus_text(server: Server) -> None:
    server.enqueue()
    server.claim()
    answer = server.get("boss", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = samples(server)
    assert found["postroom_in_flight", frozenset({("agent", "triage")})] >= 1
    assert found["postroom_loop_runs_total", frozenset({("loop", "drain")})] >= 1
    assert found["postroom_requests_total", frozenset({("route", "/queue/next"), ("status", "200")})] >= 1
    assert min(found.values()) >= 0


def test_lapses_and_duplicates_are_in_the_log(server: Server) -> None:
    task_id = server.enqueue(task_id="logged-1", max_retries=0)
    server.enqueue(task_id=task_id, max_retries=0)
    server.claim(lease_s=0.3, worker="sleepy")  # without a further request: the sweep finds it

    def logged() -> list[str]:
        return [line["event"] for line in server.lines if line.get("task_id") == task_id]

    until(lambda: "dead_letter" in logged())
    assert logged() == ["enqueued", "duplicate", "enqueued", "claimed", "lease_lapsed", "dead_letter"]


def test_no_token_and_no_payload_in_the_log(server: Server) -> None:
    secret = "a secret payload"  # noqa: S105 - what must not be logged
    server.enqueue("triage", secret)
    task = server.claim()
    word = {"task_id": task["task_id"], "lease": task["lease"]}
    server.post("triage", "/queue/complete", **word, decision=secret)
    server.get("pr_" + "B" * 43, "/queue/status")
    server.send("triage", "POST", "/queue/next", raw=secret.encode())
    server.send("triage", "POST", "/queue/next", {"agent": "review"})

    def logged() -> dict[str, str]:
        lines = [line for line in server.lines if line["task_id"] == task["task_id"]]
        return {line["event"]: line["agent"] for line in lines}

    until(lambda: {"enqueued", "claimed", "completed"} <= set(logged()))
    assert logged()["claimed"] == "triage"
    text = server.log.read_text()
    assert "secret" not in text
    assert "pr_" not in text
    assert all({"ts", "event", "task_id", "agent"} <= set(line) for line in server.lines)


def test_a_reply_names_no_path_of_the_server(server: Server) -> None:
    for answer in (
        server.get("boss", "/tasks/x"),
        server.send("boss", "POST", "/queue/next", raw=b"{"),
        server.get("boss", "/bus/x/messages?since=y"),
    ):
        assert str(server.data) not in answer.body.decode()


# ---- beginning and end -----------------------------------------------------------------------------


def test_sigterm_ends_long_polls_and_streams(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server:
        polls = [in_thread(lambda: server.post("triage", "/queue/next", wait_s=30)) for _ in range(3)]
        with server.stream("boss", "/events") as stream:
            # This one was claimed and answered, so the earlier polls are waiting.
            server.enqueue("review")
            assert len(stream.take(2)) == 2
            until(lambda: waiting(server) == 3)
            assert server.end() == 0
            assert stream.next() is None
        for thread, answers in polls:
            thread.join(HANG_GUARD_S)
            assert answers[0].status == 204
        assert server.lines[-1]["event"] == "stopped"


def test_sigint_ends_the_server(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server:
        assert server.end(signal.SIGINT) == 0


def test_a_killed_server_keeps_all_acknowledged_tasks(tmp_path: Path) -> None:
    with serving(tmp_path / "data", execute=True) as server:
        waiting = [server.enqueue(payload=number) for number in range(20)]
        task = server.claim()
        server.post("triage", "/queue/complete", task_id=task["task_id"], lease=task["lease"], decision=1)
        server.end(signal.SIGKILL)
        server.start()
        got = _tasks(server.post("triage", "/queue/next", limit=100))
        assert [task["task_id"] for task in got] == waiting[1:]
        until(lambda: server.get("boss", f"/tasks/{waiting[0]}").json["status"] == "done")


def test_an_agent_is_nudged_and_then_finds_its_task(tmp_path: Path) -> None:
    with (
        serving(tmp_path / "data", "127.0.0.1") as server,
        socket.create_server(("127.0.0.1", 0)) as listening,
    ):
        port = listening.getsockname()[1]
        server.tokens["nudged"] = server.agents.add("nudged", f"http://127.0.0.1:{port}")
        server.end()
        server.start()
        task_id = server.enqueue("nudged", "secret")
        listening.settimeout(HANG_GUARD_S)
        connection, _ = listening.accept()
        with connection:
            head, _, body = connection.recv(65_536).partition(b"\r\n\r\n")
            connection.sendall(b"HTTP/1.1 202 Accepted\r\n\r\n")
        assert head.startswith(b"POST /task HTTP/1.1")
        assert json.loads(body) == {"task_id": task_id}
        assert server.claim("nudged")["task_id"] == task_id
