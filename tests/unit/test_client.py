"""`TaskClient` against a small real server: its requests, and how it handles the replies."""

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

import postroom.client
from postroom import errors
from postroom.client import (
    HarnessRefused,
    InvalidMessage,
    NotAllowed,
    NotHeld,
    PostroomError,
    Rejected,
    StaleLease,
    Task,
    TaskClient,
    TaskFailed,
    UnknownTask,
    Unreachable,
    WrongState,
    connections,
    tasks,
    worker,
)
from tests.waiting import HANG_GUARD_S

TOKEN = "pr_secret"  # noqa: S105 - of no harness


class Request(NamedTuple):
    method: str
    path: str
    body: Any
    token: str
    connection: int
    wait_for_end: Callable[[], bytes]
    """Returns when the client has closed its half of the connection."""


class Answer(NamedTuple):
    """The reply of the server. `cut` closes the connection before it, or in the middle of it."""

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = MappingProxyType({})
    cut: str = ""


class Harness:
    """Replies with the result of `say` for each request, and records every request."""

    def __init__(self, say: Callable[[Request], Answer]) -> None:
        self.say = say
        self.requests: list[Request] = []
        harness = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                request = Request(
                    self.command,
                    self.path,
                    json.loads(body) if body else None,
                    self.headers.get("Authorization", ""),
                    self.client_address[1],
                    lambda: self.connection.recv(1),
                )
                harness.requests.append(request)
                self.answer(harness.say(request))

            do_GET = do_POST = handle_any  # noqa: N815 - the base class calls them so

            def answer(self, answer: Answer) -> None:
                if answer.cut == "before":
                    self.close_connection = True
                    return
                body = answer.body
                text = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                if answer.status != 204:
                    self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text[: len(text) // 2] if answer.cut == "middle" else text)
                self.close_connection = self.close_connection or bool(answer.cut)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def paths(self) -> list[str]:
        return [request.path for request in self.requests]


@contextmanager
def harness(*answers: Answer | Callable[[Request], Answer]) -> Iterator[Harness]:
    """A server that gives these replies in turn, and the last one for all further requests."""
    waiting = list(answers)

    def say(request: Request) -> Answer:
        answer = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return answer(request) if callable(answer) else answer

    with running(Harness(say)) as server:
        yield server


@contextmanager
def running(server: Harness) -> Iterator[Harness]:
    thread = threading.Thread(target=server.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.server.shutdown()
        server.server.server_close()
        thread.join()


def given(**facts: Any) -> Answer:
    task = {
        "task_id": "t1",
        "payload": {"n": 1},
        "lease": 7,
        "attempt": 1,
        "lease_s": 300.0,
        "type": "x",
        "parent": "",
    }
    return Answer(200, {**task, **facts})


NONE = Answer(204)
ACCEPTED = Answer(202, {"task_id": "t1"})


def client_of(server: Harness, **options: Any) -> TaskClient:
    given = {"worker": "w", "timeout_s": 5.0, **options}
    client = TaskClient(server.url, agent="triage", token=TOKEN, **given)
    client.pauses = connections.RetryPauses(0.001, 0.01)
    return client


# ---- what it may import ------------------------------------------------------------------------------


def test_client_imports_only_the_standard_library_and_msgspec() -> None:
    code = "import sys; import postroom.client; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {name for name in loaded if name.startswith("postroom")} == {
        "postroom",
        "postroom.calls",
        "postroom.calls.agents",
        "postroom.calls.fields",
        "postroom.calls.goals",
        "postroom.calls.messages",
        "postroom.calls.submit",
        "postroom.calls.tasks",
        "postroom.calls.verb",
        "postroom.client",
        "postroom.client.arguments",
        "postroom.client.calls",
        "postroom.client.connections",
        "postroom.client.engine",
        "postroom.client.goals",
        "postroom.client.nudge_endpoint",
        "postroom.client.tasks",
        "postroom.client.worker",
        "postroom.errors",
        "postroom.message",
    }
    assert not loaded & {"click", "yaml", "apsw", "starlette", "uvicorn"}


# ---- next ----------------------------------------------------------------------------------------------


def test_next_task_claims_a_task() -> None:
    with harness(given()) as server, client_of(server) as client:
        task = client.next_task(lease_s=60.0)
        assert task is not None
        assert (task.task_id, task.payload, task.lease, task.attempt) == ("t1", {"n": 1}, 7, 1)
        assert (task.lease_s, task.type, task.lost.is_set()) == (300.0, "x", False)
    (request,) = server.requests
    assert (request.method, request.path, request.token) == ("POST", "/queue/next", f"Bearer {TOKEN}")
    assert request.body == {"agent": "triage", "limit": 1, "lease_s": 60.0, "wait_s": 0.0, "worker": "w"}


def test_next_task_returns_none_without_a_task() -> None:
    with harness(NONE) as server, client_of(server) as client:
        assert client.next_task() is None
        assert client.next_tasks(5) == []


def test_next_tasks_claims_several_tasks() -> None:
    tasks = [given(task_id=f"t{number}", lease=number).body for number in (1, 2)]
    with harness(Answer(200, {"tasks": tasks})) as server, client_of(server) as client:
        assert [(task.task_id, task.lease) for task in client.next_tasks(2)] == [("t1", 1), ("t2", 2)]


def test_a_wait_longer_than_the_server_allows_is_several_waits() -> None:
    with harness(NONE, given()) as server, client_of(server) as client:
        assert client.next_task(wait_s=45.0) is not None
    assert server.requests[0].body["wait_s"] == tasks.WAIT_S_MAX
    assert len(server.requests) == 2


def test_the_worker_is_named_by_machine_and_process() -> None:
    with harness(NONE) as server, client_of(server, worker=None) as client:
        client.next_task()
    assert server.requests[0].body["worker"].endswith(f":{os.getpid()}")


@pytest.mark.parametrize("answer", [Answer(200, {"task_id": 5}), Answer(200, "tasks"), Answer(200, 5)])
def test_an_answer_that_is_not_a_task_raises(answer: Answer) -> None:
    with (
        harness(answer) as server,
        client_of(server) as client,
        pytest.raises(HarnessRefused, match="does not fit"),
    ):
        client.next_task()


# ---- words -----------------------------------------------------------------------------------------------


def test_a_call_sends_the_lease_of_the_task() -> None:
    with harness(given(), ACCEPTED) as server, client_of(server) as client:
        client.next_task()
        client.heartbeat("t1")
        client.fail_task("t1", "boom")
        client.fail_task("t1", "boom", 5.0)
        client.release_task("t1")
        client.complete_task("t1", {"label": "bug"})
    word = {"agent": "triage", "task_id": "t1", "lease": 7}
    assert [(request.path, request.body) for request in server.requests[1:]] == [
        ("/queue/heartbeat", word),
        ("/queue/fail", {**word, "error": "boom"}),
        ("/queue/fail", {**word, "error": "boom", "retry_in_s": 5.0}),
        ("/queue/release", word),
        ("/queue/complete", {**word, "decision": {"label": "bug"}}),
    ]


def test_a_task_object_sends_its_own_lease_and_an_id_the_latest() -> None:
    with harness(given(), given(lease=9, attempt=2), ACCEPTED) as server, client_of(server) as client:
        first, second = client.next_task(), client.next_task()
        assert first is not None
        assert second is not None
        client.heartbeat(first)
        client.heartbeat("t1")
        client.heartbeat("t1", lease=3)
        client.heartbeat("foreign", lease=4)
    assert [request.body["lease"] for request in server.requests[2:]] == [7, 9, 3, 4]


def test_a_call_about_an_unclaimed_task_needs_a_lease() -> None:
    with harness(ACCEPTED) as server, client_of(server) as client, pytest.raises(NotHeld, match="'t9'"):
        client.complete_task("t9", 1)
    assert server.requests == []


def test_remembered_leases_are_limited() -> None:
    count = tasks.LEASES_REMEMBERED_MAX + 2
    claimed = [given(task_id=f"t{number}", lease=number).body for number in range(count)]
    with harness(Answer(200, {"tasks": claimed}), ACCEPTED) as server, client_of(server) as client:
        client.next_tasks(count)
        client.heartbeat("t2")
        client.heartbeat(f"t{count - 1}")
        with pytest.raises(NotHeld):
            client.heartbeat("t1")


def test_a_decision_that_is_not_json_is_refused_before_it_is_sent() -> None:
    with (
        harness(ACCEPTED) as server,
        client_of(server) as client,
        pytest.raises(InvalidMessage, match="JSON"),
    ):
        client.complete_task("t1", {"when": object()}, lease=1)
    assert server.requests == []


# ---- refusals ----------------------------------------------------------------------------------------------

REFUSALS: dict[str, tuple[Answer, type[PostroomError], str]] = {
    "stale": (Answer(409, {"error": "StaleLease", "message": "it is over"}), StaleLease, "it is over"),
    "state": (Answer(409, {"error": "WrongState", "message": "it is DONE"}), WrongState, "it is DONE"),
    "unknown": (Answer(404, {"error": "UnknownTask", "message": "no t1"}), UnknownTask, "no t1"),
    "no token": (Answer(401, {"error": "Unauthorized", "message": "who?"}), NotAllowed, "who?"),
    "not yours": (Answer(403, {"error": "Forbidden", "message": "no"}), NotAllowed, "no"),
    "invalid": (Answer(400, {"error": "InvalidMessage", "message": "bad"}), InvalidMessage, "bad"),
    "too long": (Answer(413, {"error": "TooLong", "message": "long"}), InvalidMessage, "long"),
    "moved": (Answer(307, None, {"Location": "http://127.0.0.1:1/"}), HarnessRefused, "307"),
    "not ours": (Answer(404, b"<html>"), HarnessRefused, "404"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refused_call_raises_the_servers_message_without_a_retry(case: str) -> None:
    answer, kind, words = REFUSALS[case]
    with harness(answer) as server, client_of(server) as client, pytest.raises(kind, match=words) as caught:
        client.heartbeat("t1", lease=1)
    assert type(caught.value) is kind
    assert isinstance(caught.value, Rejected)
    if isinstance(caught.value, HarnessRefused):
        assert caught.value.status == answer.status
    assert len(server.requests) == 1


def test_the_clients_errors_are_the_classes_of_the_library() -> None:
    shared = [name for name in postroom.client.__all__ if hasattr(errors, name)]
    assert {"StaleLease", "UnknownTask", "WrongState", "Rejected", "Unavailable"} <= set(shared)
    for name in shared:
        assert getattr(postroom.client, name) is getattr(errors, name)
    assert postroom.client.StaleLease is postroom.StaleLease


def test_errors_are_those_of_the_library_and_carry_the_facts_of_the_call() -> None:
    refused = {
        "/queue/heartbeat": REFUSALS["stale"][0],
        "/tasks/t%201/retry": REFUSALS["state"][0],
        "/tasks/t%201": REFUSALS["unknown"][0],
    }
    with harness(lambda request: refused[request.path]) as server, client_of(server) as client:
        with pytest.raises(errors.StaleLease, match="it is over") as stale:
            client.heartbeat("t1", lease=7)
        assert (stale.value.task_id, stale.value.lease) == ("t1", 7)
        with pytest.raises(errors.WrongState, match="it is DONE") as wrong:
            client.request("POST", "/tasks/t%201/retry")
        assert (wrong.value.task_id, wrong.value.verb) == ("t 1", "retry")
        with pytest.raises(errors.UnknownTask, match="no t1") as unknown:
            client.get("t 1")
        assert unknown.value.task_id == "t 1"


def test_an_answer_that_is_not_json_raises() -> None:
    with harness(Answer(200, b"<html>")) as server, client_of(server) as client:
        with pytest.raises(HarnessRefused, match="not JSON"):
            client.request("GET", "/health")
        assert len(server.requests) == 1


def test_an_empty_answer_is_none() -> None:
    with harness(Answer(200)) as server, client_of(server) as client:
        assert client.request("GET", "/health") is None


# ---- trying again ------------------------------------------------------------------------------------------

LOST = [
    Answer(cut="before"),
    Answer(200, {"task_id": "t1", "payload": "x" * 100}, cut="middle"),
    Answer(503, {"error": "LockTimeout", "message": "busy"}),
    Answer(429, {"error": "QueueFull", "message": "full"}),
    Answer(502, b"<html>"),
    Answer(500, None),
]


@pytest.mark.parametrize("lost", LOST, ids=lambda answer: f"{answer.status}{answer.cut}")
def test_a_call_without_an_answer_is_repeated(lost: Answer) -> None:
    with harness(lost, lost, given(), lost, ACCEPTED) as server, client_of(server) as client:
        task = client.next_task()
        assert task is not None
        client.heartbeat(task)
    bodies = [request.body for request in server.requests]
    assert bodies.count(bodies[0]) >= 3
    assert server.paths().count("/queue/heartbeat") >= 2


def test_the_last_retry_raises_the_reason() -> None:
    busy = Answer(503, {"error": "LockTimeout", "message": "the disk sleeps"}, {"Retry-After": "0"})
    with harness(busy) as server, client_of(server, retries=2) as client:
        with pytest.raises(Unreachable, match="the disk sleeps"):
            client.next_task()
        assert len(server.requests) == 3


def test_a_refused_connection_raises_a_one_line_error() -> None:
    with harness(NONE) as server:
        pass
    with client_of(server, retries=0) as client, pytest.raises(Unreachable, match=re.escape(server.url)):
        client.next_task()


def test_a_server_that_does_not_answer_in_time_is_unreachable() -> None:
    hold = threading.Event()

    def sleep(_: Request) -> Answer:
        hold.wait(HANG_GUARD_S)
        return NONE

    with harness(sleep) as server, client_of(server, retries=0, timeout_s=0.05) as client:
        with pytest.raises(Unreachable, match=r"within 0\.05 s"):
            client.next_task()
        hold.set()


def test_pauses_are_random_and_grow_and_obey_the_server_within_reason() -> None:
    usual = connections.RetryPauses()
    for attempt, longest_s in ((0, 0.1), (1, 0.2), (3, 0.8), (40, usual.longest_s)):
        pauses = {usual.after(attempt, 0.0) for _ in range(200)}
        assert len(pauses) > 100
        assert max(pauses) <= longest_s
        assert max(pauses) > longest_s / 2
    assert 5.0 <= usual.after(0, 5.0) <= 5.1
    assert usual.after(0, 1e9) <= connections.RETRY_AFTER_S_MAX + 0.1
    assert [connections._retry_after_s(text) for text in ("2", "", "soon", "-1")] == [2.0, 0.0, 0.0, 0.0]


# ---- connections -------------------------------------------------------------------------------------------


def test_a_connection_is_kept_and_replaced_when_the_server_closed_it() -> None:
    answers = (NONE, NONE, Answer(204, None, {"Connection": "close"}), NONE)
    with harness(*answers) as server, client_of(server, retries=0) as client:
        for _ in range(5):
            client.next_task()
    used = [request.connection for request in server.requests]
    assert used == [used[0]] * 3 + [used[3]] * 2
    assert used[3] != used[0]


def test_replacing_a_dead_idle_connection_uses_no_retry() -> None:
    def cut_second(request: Request) -> Answer:
        return Answer(cut="before") if len(server.requests) == 2 else NONE

    with harness(cut_second) as server, client_of(server, retries=0) as client:
        assert client.next_task() is None
        assert client.next_task() is None
    assert len(server.requests) == 3


def test_threads_that_call_at_the_same_time_have_connections_of_their_own() -> None:
    together = threading.Barrier(4)

    def meet(_: Request) -> Answer:
        together.wait(HANG_GUARD_S)
        return NONE

    with harness(meet) as server, client_of(server) as client:
        threads = [threading.Thread(target=client.next_task) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(client._connections._idle) == 4
    assert len({request.connection for request in server.requests}) == 4
    assert len(client._connections._idle) == 0


@pytest.mark.parametrize(
    "url", ["", "ftp://x", "127.0.0.1:80", "http://", "http://u:p@host/", "http://host/?q=1"]
)
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="address of a harness"):
        TaskClient(url, agent="a", token=TOKEN)


def test_an_address_may_have_a_path() -> None:
    with harness(NONE) as server, TaskClient(f"{server.url}/post/", agent="a", token=TOKEN) as client:
        client.next_task()
    assert server.paths() == ["/post/queue/next"]


def test_a_token_with_a_newline_cannot_become_a_header_and_is_not_shown() -> None:
    for token in ("a\r\nX-Evil: 1", "ü", ""):
        with pytest.raises(ValueError, match="printable ASCII") as caught:
            TaskClient("http://127.0.0.1:1", agent="a", token=token)
        assert not token or token not in str(caught.value)
    assert TOKEN not in repr(TaskClient("http://127.0.0.1:1", agent="a", token=TOKEN))


@pytest.mark.parametrize("name", ["timeout_s", "heartbeat_every_s", "poll_every_s"])
def test_intervals_must_be_positive(name: str) -> None:
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=name):
            TaskClient("http://127.0.0.1:1", agent="a", token=TOKEN, **{name: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("retries", [-1, 1.5, True, None])
def test_retries_are_counted(retries: object) -> None:
    with pytest.raises(ValueError, match="retries must be a whole number"):
        TaskClient("http://127.0.0.1:1", agent="a", token=TOKEN, retries=retries)  # type: ignore[arg-type]


@pytest.mark.parametrize("wait_s", [-1.0, float("nan"), float("inf")])
def test_an_invalid_wait_is_refused(wait_s: float) -> None:
    client = TaskClient("http://127.0.0.1:1", agent="a", token=TOKEN)
    with pytest.raises(ValueError, match="wait_s must be a number of seconds"):
        client.next_task(wait_s)


NAN = float("nan")
WRONG_ARGUMENTS: dict[str, Callable[[TaskClient], object]] = {
    "agent must be a text, not 1": lambda client: client.enqueue(agent=1, payload=1),  # type: ignore[arg-type]
    "task_id must be a text": lambda client: client.enqueue("a", 1, task_id=7),  # type: ignore[arg-type]
    "type must be a text": lambda client: client.enqueue("a", 1, type=None),  # type: ignore[arg-type]
    "parent holds lone surrogates": lambda client: client.enqueue("a", 1, parent="\ud800"),
    "delay_s must be a number of seconds, 0 or more, not '5'": lambda client: client.enqueue(
        "a",
        1,
        delay_s="5",  # type: ignore[arg-type]
    ),
    "delay_s must be a number of seconds, 0 or more, not nan": lambda client: client.enqueue(
        "a", 1, delay_s=NAN
    ),
    "max_retries must be a whole number": lambda client: client.enqueue("a", 1, max_retries=-1),
    "it holds a value of type object": lambda client: client.enqueue("a", [object()]),
    "it holds a dict with a key that is not text": lambda client: client.enqueue("a", {(1, 2): 3}),
    "it holds lone surrogates": lambda client: client.enqueue("a", "\ud800"),
    "holds NaN or an infinite number": lambda client: client.enqueue("a", {"n": [NAN]}),
    "timeout_s must be a number of seconds, 0 or more, not '5'": lambda client: client.ask(
        "a",
        1,
        timeout_s="5",  # type: ignore[arg-type]
    ),
    "timeout_s must be a number of seconds, 0 or more, not -1": lambda client: client.wait("t1", -1),
    "task_id must be a text, not 5": lambda client: client.get(5),  # type: ignore[arg-type]
    "limit must be a whole number, 1 or more, not 0": lambda client: client.next_tasks(0),
    "limit must be a whole number, 1 or more, not '3'": lambda client: client.next_tasks("3"),  # type: ignore[arg-type]
    "lease_s must be a number of seconds above 0, not 0": lambda client: client.next_task(lease_s=0),
    "wait_s must be a number of seconds, 0 or more, not True": lambda client: client.next_task(True),
    "task must be a text, not None": lambda client: client.heartbeat(None, lease=1),  # type: ignore[arg-type]
    "lease must be a whole number": lambda client: client.heartbeat("t1", lease="x"),  # type: ignore[arg-type]
    "error must be a text": lambda client: client.fail_task("t1", ValueError(), lease=1),  # type: ignore[arg-type]
    "retry_in_s must be": lambda client: client.fail_task("t1", "no", NAN, lease=1),
    "handler must be a function": lambda client: client.work(None),  # type: ignore[arg-type]
    "concurrency must be a whole number": lambda client: client.work(print, concurrency="2"),  # type: ignore[arg-type]
    "grace_s must be": lambda client: client.work(print, grace_s=-1),
    "nudge_port must be from 0 to 65535": lambda client: client.work(print, nudge_port=65_536),
}


@pytest.mark.parametrize("sentence", WRONG_ARGUMENTS)
def test_a_wrong_argument_gives_a_one_line_error_and_nothing_is_sent(sentence: str) -> None:
    with harness(NONE) as server, client_of(server) as client:
        with pytest.raises(InvalidMessage) as raised:
            WRONG_ARGUMENTS[sentence](client)
        assert sentence in str(raised.value)
        assert "\n" not in str(raised.value)
    assert server.requests == []


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [("url", 5), ("url", "http://x:99999"), ("agent", 5), ("token", None), ("timeout_s", "5"), ("worker", 5)],
)
def test_invalid_client_arguments_are_refused(argument: str, wrong: Any) -> None:
    right = {"url": "http://127.0.0.1:1", "agent": "a", "token": TOKEN}
    with pytest.raises(InvalidMessage, match=f"^{argument} must be"):
        TaskClient(**{**right, argument: wrong})


# ---- heartbeats --------------------------------------------------------------------------------------------


UNHURRIED_S = 3.0  # a third of this lease is enough to answer a heartbeat on a busy machine


def held(**facts: Any) -> Task:
    return Task(**{"task_id": "t1", "payload": None, "lease": 7, "attempt": 1, "lease_s": 0.03, **facts})


def test_kept_alive_sends_heartbeats_until_its_block_ends() -> None:
    beaten = threading.Event()

    def say(_: Request) -> Answer:
        if len(server.requests) == 3:
            beaten.set()
        return ACCEPTED

    with harness(say) as server, client_of(server) as client:
        with client.kept_alive(held(lease_s=UNHURRIED_S)) as task:
            assert beaten.wait(HANG_GUARD_S)
        assert not task.lost.is_set()
    assert set(server.paths()) == {"/queue/heartbeat"}


@pytest.mark.parametrize("case", ["stale", "unknown", "state"])
def test_a_refused_heartbeat_sets_lost(case: str, caplog: pytest.LogCaptureFixture) -> None:
    kept = held(lease_s=UNHURRIED_S)
    with harness(REFUSALS[case][0]) as server, client_of(server) as client, client.kept_alive(kept) as task:
        assert task.lost.wait(HANG_GUARD_S)
    assert "is lost" in caplog.text
    assert len(server.requests) == 1


def test_a_lease_without_a_confirmed_heartbeat_counts_as_lost() -> None:
    with harness(NONE) as server:
        pass
    with client_of(server) as client, client.kept_alive(held()) as task:
        assert task.lost.wait(HANG_GUARD_S)


def crossing(last_word: str) -> tuple[Callable[[Request], Answer], threading.Event]:
    """A harness that accepts the ending call during a heartbeat, and then refuses the heartbeat."""
    beating, accepted, refused = threading.Event(), threading.Event(), threading.Event()

    def say(request: Request) -> Answer:
        if request.path == "/queue/heartbeat":
            if beating.is_set():
                refused.set()  # a second heartbeat: the client has read the refusal of the first
            beating.set()
            accepted.wait(HANG_GUARD_S)
            return REFUSALS["stale"][0]
        if request.path == last_word:
            accepted.set()
            refused.wait(HANG_GUARD_S)
        return ACCEPTED

    return say, beating


def losses(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged, without the heartbeats that were answered too late on a busy machine."""
    return [line for line in caplog.messages if "did not answer within" not in line]


@pytest.mark.parametrize("verb", ["complete", "fail", "release"])
def test_a_heartbeat_refused_during_the_ending_call_does_not_set_lost(
    verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    say, beating = crossing(f"/queue/{verb}")
    with harness(say) as server, client_of(server, heartbeat_every_s=0.2, timeout_s=20.0) as client:
        task = held(lease_s=60.0)
        with client.kept_alive(task):
            assert beating.wait(HANG_GUARD_S)
            words: dict[str, Callable[[], object]] = {
                "complete": lambda: client.complete_task(task, 1),
                "fail": lambda: client.fail_task("t1", "no", lease=task.lease),
                "release": lambda: client.release_task(task),
            }
            words[verb]()
    assert not task.lost.is_set()
    assert losses(caplog) == []


def test_a_worker_logs_no_loss_when_a_heartbeat_crosses_its_completion(
    caplog: pytest.LogCaptureFixture,
) -> None:
    crossed, beating = crossing("/queue/complete")
    tasks = [given(), NONE]

    def say(request: Request) -> Answer:
        return tasks.pop(0) if request.path == "/queue/next" else crossed(request)

    with harness(say) as server, client_of(server, heartbeat_every_s=0.01, timeout_s=20.0) as client:
        client.work(lambda _: beating.wait(HANG_GUARD_S), until_empty=True)
    assert "/queue/complete" in server.paths()
    assert losses(caplog) == []


def test_heartbeats_detect_a_loss_after_a_refused_ending_call() -> None:
    refuse_beats = threading.Event()

    def say(request: Request) -> Answer:
        if request.path == "/queue/complete":
            return Answer(400, {"error": "InvalidMessage", "message": "the result is too long"})
        return REFUSALS["stale"][0] if refuse_beats.is_set() else ACCEPTED

    kept = held(lease_s=UNHURRIED_S)
    with harness(say) as server, client_of(server) as client, client.kept_alive(kept) as task:
        with pytest.raises(InvalidMessage, match="too long"):
            client.complete_task(task, 1)
        refuse_beats.set()
        assert task.lost.wait(HANG_GUARD_S)


def test_an_unconfirmed_ending_call_is_not_reported_as_a_loss(caplog: pytest.LogCaptureFixture) -> None:
    with harness(NONE) as server:
        pass
    with client_of(server, retries=0) as client, client.kept_alive(held()) as task:
        with pytest.raises(Unreachable):
            client.complete_task(task, 1)
        assert task.lost.wait(HANG_GUARD_S)
    assert "is lost" not in caplog.text
    assert "whether the report arrived is not known" in caplog.text


# ---- asyncio -----------------------------------------------------------------------------------------------


def test_every_call_can_be_awaited() -> None:
    async def talk(client: TaskClient) -> None:
        task = await client.anext_task()
        assert task is not None
        await client.aheartbeat("t1")
        await client.afail_task(task, "boom", 1.0)
        await client.arelease_task(task)
        await client.acomplete_task("t1", 5)

    with harness(given(), ACCEPTED) as server, client_of(server) as client:
        asyncio.run(talk(client))
    assert [path.rpartition("/")[2] for path in server.paths()] == [
        "next", "heartbeat", "fail", "release", "complete",
    ]  # fmt: skip


def test_a_task_claimed_for_a_cancelled_call_is_released() -> None:
    asked, answer = threading.Event(), threading.Event()

    def say(request: Request) -> Answer:
        if request.path != "/queue/next":
            return ACCEPTED
        asked.set()
        answer.wait(HANG_GUARD_S)
        return given()

    async def give_up(client: TaskClient) -> None:
        asking = asyncio.create_task(client.anext_task(wait_s=5.0))
        await asyncio.to_thread(asked.wait, HANG_GUARD_S)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        answer.set()

    with harness(say) as server, client_of(server) as client:
        asyncio.run(give_up(client))
    assert server.paths() == ["/queue/next", "/queue/release"]


# ---- work --------------------------------------------------------------------------------------------------


class Queue:
    """A harness with tasks, which follows the protocol."""

    def __init__(self, *payloads: Any) -> None:
        self.waiting = [given(task_id=f"t{n}", lease=n, payload=p).body for n, p in enumerate(payloads)]
        self.words: list[tuple[str, Any]] = []
        self.refuse: dict[str, Answer] = {}

    def __call__(self, request: Request) -> Answer:
        verb = request.path.rpartition("/")[2]
        if verb in self.refuse:
            return self.refuse[verb]
        if verb == "next":
            return Answer(200, self.waiting.pop(0)) if self.waiting else NONE
        if verb not in ("result", "heartbeat"):
            body = dict(request.body)
            claimed = [self.waiting.pop(0) for _ in range(body.pop("claim_next", 0)) if self.waiting]
            fields = {k: v for k, v in body.items() if k not in ("agent", "lease", "task_id")}
            self.words.append((f"{verb} {request.body['task_id']}", fields))
            return Answer(202, {"task_id": request.body["task_id"], "tasks": claimed})
        return ACCEPTED


def worked(queue: Queue, handler: Callable[[Task], Any], **options: Any) -> list[tuple[str, Any]]:
    with running(Harness(queue)) as server, client_of(server) as client:
        client.work(handler, until_empty=True, **options)
    return queue.words


def test_work_handles_all_waiting_tasks() -> None:
    words = worked(Queue(1, 2, 3), lambda task: task.payload * 10)
    assert words == [(f"complete t{n}", {"decision": (n + 1) * 10}) for n in range(3)]


def test_a_worker_completes_a_task_and_claims_the_next_in_one_request() -> None:
    with running(Harness(Queue(1, 2, 3))) as server, client_of(server) as client:
        client.work(lambda task: task.payload, until_empty=True)
    assert server.paths() == ["/queue/next", *["/queue/complete"] * 3, "/queue/next"]
    assert [request.body["claim_next"] for request in server.requests[1:4]] == [1, 1, 1]


def test_a_stopping_worker_releases_the_task_claimed_with_its_completion() -> None:
    """The worker is stopped while its completion is under way, so the reply still has a task."""
    queue = Queue(1, 2)

    def say(request: Request) -> Answer:
        if request.path == "/queue/complete":
            client.stop()
        return queue(request)

    handled: list[str] = []
    with running(Harness(say)) as server, client_of(server) as client:
        client.work(lambda task: handled.append(task.task_id))
    assert handled == ["t0"]
    assert queue.words == [("complete t0", {"decision": None}), ("release t1", {})]


def test_a_worker_that_is_stopping_claims_no_task_with_its_completion() -> None:
    def handler(_: Task) -> None:
        client.stop()

    with running(Harness(Queue(1, 2))) as server, client_of(server) as client:
        client.work(handler)
    assert server.paths() == ["/queue/next", "/queue/complete"]
    assert "claim_next" not in server.requests[1].body


def test_prefetched_task_is_kept_during_on_end_and_released_if_it_raises() -> None:
    queue = Queue(1, 2)
    beaten = threading.Event()

    def say(request: Request) -> Answer:
        if request.path == "/queue/heartbeat" and request.body["task_id"] == "t1":
            beaten.set()
        return queue(request)

    def on_end(_: worker.TaskEnd) -> None:
        assert beaten.wait(HANG_GUARD_S)
        raise LookupError("on_end is wrong")

    with running(Harness(say)) as server, client_of(server, heartbeat_every_s=0.01) as client:
        with pytest.raises(LookupError, match="on_end is wrong"):
            client.work(lambda _: None, on_end=on_end)
        assert queue.words == [("complete t0", {"decision": None}), ("release t1", {})]


def test_a_refused_decision_ends_as_a_failure() -> None:
    ends: list[worker.TaskEnd] = []
    worked(Queue(1), lambda _: object(), on_end=ends.append)
    (end,) = ends
    assert (end.outcome, "JSON" in end.error) == ("failed", True)


def test_a_failure_with_a_wrong_pause_is_reported_without_it() -> None:
    def handler(_: Task) -> None:
        raise TaskFailed("later", retry_in_s=-1.0)

    ((word, fields),) = worked(Queue(1), handler)
    assert (word, "retry_in_s must be" in fields["error"]) == ("fail t0", True)


def test_an_exception_of_the_handler_is_the_failure() -> None:
    def handler(task: Task) -> None:
        if task.payload:
            raise TaskFailed("come back later", retry_in_s=60.0)
        raise LookupError("no such label")

    assert worked(Queue(0, 1), handler) == [
        ("fail t0", {"error": "LookupError: no such label"}),
        ("fail t1", {"error": "come back later", "retry_in_s": 60.0}),
    ]


def test_a_handler_may_be_async() -> None:
    async def handler(task: Task) -> Any:
        await asyncio.sleep(0)
        return task.payload

    assert worked(Queue("x"), handler) == [("complete t0", {"decision": "x"})]


def test_a_decision_that_is_not_json_fails_the_task() -> None:
    ((word, fields),) = worked(Queue(1), lambda _: object())
    assert word == "fail t0"
    assert "JSON" in fields["error"]


def test_a_decision_that_the_harness_refuses_fails_the_task() -> None:
    queue = Queue(1)
    queue.refuse["complete"] = Answer(413, {"error": "TooLong", "message": "too long"})
    assert worked(queue, lambda _: 5) == [("fail t0", {"error": "too long"})]


def test_a_task_claimed_by_another_worker_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    queue = Queue(1, 2)
    queue.refuse["complete"] = REFUSALS["stale"][0]
    assert worked(queue, lambda _: 5) == []
    assert caplog.text.count("went to another worker") == 2


def test_several_slots_work_at_the_same_time() -> None:
    together = threading.Barrier(3)

    def handler(_: Task) -> int:
        return together.wait(HANG_GUARD_S)

    assert len(worked(Queue(1, 2, 3), handler, concurrency=3)) == 3


@pytest.mark.parametrize("wrong", [0, -1, tasks.CONCURRENCY_MAX + 1])
def test_concurrency_has_limits(wrong: int) -> None:
    with pytest.raises(ValueError, match="concurrency"):
        TaskClient("http://127.0.0.1:1", agent="a", token=TOKEN).work(print, concurrency=wrong)


def test_an_unknown_token_ends_the_work() -> None:
    queue = Queue()
    queue.refuse["next"] = REFUSALS["no token"][0]
    with running(Harness(queue)) as server, client_of(server) as client, pytest.raises(NotAllowed):
        client.work(print, concurrency=2)


def test_a_handler_that_exits_releases_its_task() -> None:
    def handler(_: Task) -> None:
        raise SystemExit(3)

    queue = Queue(1)
    with running(Harness(queue)) as server, client_of(server) as client, pytest.raises(SystemExit):
        client.work(handler)
    assert queue.words == [("release t0", {})]


def test_a_report_is_retried_until_the_harness_is_back(caplog: pytest.LogCaptureFixture) -> None:
    queue = Queue(1)
    away = Answer(503, {"error": "LockTimeout", "message": "busy"})
    tries = iter([away] * 7)

    def say(request: Request) -> Answer:
        if request.path == "/queue/complete" and (answer := next(tries, None)):
            return answer
        return queue(request)

    with running(Harness(say)) as server, client_of(server, retries=1) as client:
        client.work(lambda _: 5, until_empty=True)
    assert queue.words == [("complete t0", {"decision": 5})]
    assert "has to wait" in caplog.text


def test_stop_lets_the_running_handler_finish_and_claims_nothing_more() -> None:
    queue = Queue(1, 2)

    def handler(task: Task) -> Any:
        client.stop()
        return task.payload

    with running(Harness(queue)) as server, client_of(server) as client:
        client.work(handler)
    assert queue.words == [("complete t0", {"decision": 1})]


@pytest.mark.parametrize("how", ["grace is over", "stopped twice"])
def test_unfinished_tasks_are_released_after_the_grace(how: str) -> None:
    queue = Queue(1)
    stopped = threading.Event()

    def handler(task: Task) -> None:
        client.stop()
        if how == "stopped twice":
            client.stop()
        assert task.lost.wait(HANG_GUARD_S)
        stopped.set()

    with running(Harness(queue)) as server, client_of(server) as client:
        client.work(handler, grace_s=0.02 if how == "grace is over" else 60.0)
        assert stopped.wait(HANG_GUARD_S)
        assert queue.words[0] == ("release t0", {})


def test_claims_are_retried_until_the_harness_is_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    answers = [Answer(503, {"error": "X", "message": "not yet"})] * 3
    queue = Queue(1)

    def say(request: Request) -> Answer:
        return answers.pop() if answers else queue(request)

    def handler(_: Task) -> int:
        client.stop()
        return 1

    with running(Harness(say)) as server, client_of(server, retries=0, poll_every_s=0.01) as client:
        client.work(handler)
    assert queue.words == [("complete t0", {"decision": 1})]
    assert "not yet; trying again" in caplog.text


def test_stop_aborts_a_long_poll_and_releases_an_arriving_task() -> None:
    waiting = threading.Event()

    def say(request: Request) -> Answer:
        if request.path != "/queue/next":
            return ACCEPTED
        waiting.set()
        assert request.wait_for_end() == b""
        return given()  # sent before the worker saw the end; it must not be lost

    with harness(say) as server, client_of(server, timeout_s=HANG_GUARD_S) as client:
        working = threading.Thread(target=client.work, args=(print,), kwargs={"grace_s": HANG_GUARD_S})
        working.start()
        assert waiting.wait(HANG_GUARD_S)
        client.stop()
        working.join()
    assert server.paths() == ["/queue/next", "/queue/release"]


def test_a_nudge_between_a_look_and_a_wait_is_not_missed() -> None:
    wakes = worker._Wakeups()
    seen = wakes.count
    wakes.wake()
    assert wakes.wait_past(seen, 0.0)
    assert not wakes.wait_past(wakes.count, 0.0)
