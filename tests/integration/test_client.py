"""`TaskClient` against a real harness: real processes, real kills, and replies that are really lost."""

import asyncio
import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from postroom import Tasks
from postroom.client import (
    NoResult,
    NotAllowed,
    StaleLease,
    Task,
    TaskClient,
    TaskFailed,
    UnknownTask,
    nudge_endpoint,
)
from tests.integration.harnesses import Harness, serving
from tests.waiting import HANG_GUARD_S, until

SHORT_LEASE_S = 0.6
NEVER_S = 3_600.0  # longer than any test


@pytest.fixture(scope="module", name="harness")
def one_harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """Most tests share one harness; each test has its own agents."""
    with serving(tmp_path_factory.mktemp("harness")) as harness:
        yield harness


_numbers = count()


@pytest.fixture
def agent() -> str:
    return f"agent-{next(_numbers)}"


@contextmanager
def working(client: TaskClient, handler: Any, **options: Any) -> Iterator[None]:
    """`client.work` in a thread, ended at the end of the block."""
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(client.work, handler, **options)
        try:
            yield
        finally:
            client.stop()
            work.result(HANG_GUARD_S)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


# ---- the words -----------------------------------------------------------------------------------------


def test_every_call_of_a_lease_holder(harness: Harness, agent: str) -> None:
    with harness.client(agent) as client, harness.tasks() as tasks:
        assert client.next_task() is None
        ids = [tasks.enqueue(agent=agent, payload={"n": n}, type="sum") for n in range(4)]
        first = client.next_task(lease_s=60.0)
        assert first is not None
        assert (first.task_id, first.payload, first.attempt) == (ids[0], {"n": 0}, 1)
        assert (first.type, first.lease_s) == ("sum", 60.0)
        client.heartbeat(first.task_id)
        client.complete_task(first.task_id, {"sum": 1})
        client.complete_task(first.task_id, {"sum": 1})  # a repeated call changes nothing
        rest = client.next_tasks(10)
        assert [task.task_id for task in rest] == ids[1:]
        client.fail_task(ids[1], "boom", 0.0)
        client.release_task(ids[2])
        assert [tasks.get(task_id).status for task_id in ids] == [
            "completed",
            "pending",
            "pending",
            "claimed",
        ]
        assert tasks.get(ids[0]).result == {"sum": 1}
        assert tasks.get(ids[1]).errors == ["boom"]
        assert tasks.get(ids[2]).retry_count == 0


def test_a_wait_at_the_harness_ends_with_the_task(harness: Harness, agent: str) -> None:
    with harness.client(agent) as client, harness.tasks() as tasks, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(client.next_task, 20.0)
        task_id = tasks.enqueue(agent=agent, payload=1)
        task = asking.result(HANG_GUARD_S)
        assert task is not None
        assert task.task_id == task_id


def test_stale_leases_unknown_tasks_and_bad_tokens_raise_own_errors(harness: Harness, agent: str) -> None:
    with harness.client(agent) as client, harness.tasks() as tasks:
        task_id = tasks.enqueue(agent=agent, payload=1)
        first = client.next_task()
        assert first is not None
        client.release_task(first)
        second = client.next_task()
        assert second is not None
        with pytest.raises(StaleLease):
            client.complete_task(first, "late")
        with pytest.raises(UnknownTask):
            client.heartbeat("nothing", lease=1)
        with harness.client(f"{agent}-other") as other, pytest.raises(UnknownTask):
            other.complete_task(task_id, "stolen", lease=second.lease)
        wrong = harness.token(agent)[:-1] + "!"
        with TaskClient(harness.url, agent=agent, token=wrong) as nobody, pytest.raises(NotAllowed):
            nobody.next_task()
        liar = TaskClient(harness.url, agent="boss", token=harness.token(agent))
        with liar, pytest.raises(NotAllowed):
            liar.next_task()
        assert tasks.get(task_id).status == "claimed"


def test_agents_ask_each_other(harness: Harness, agent: str) -> None:
    """The planner asks during its own task. The critic answers, or fails on request."""
    planner, critic = f"{agent}-planner", f"{agent}-critic"
    harness.tokens[planner] = harness.agents.add(planner, may_send_to=[critic])

    def judge(task: Task) -> Any:
        if task.payload == "fail":
            raise TaskFailed("no opinion")
        return {"about": task.payload}

    with harness.client(planner) as asking, harness.client(critic) as answering:
        with working(answering, judge):
            assert asking.ask(critic, "a plan", timeout_s=HANG_GUARD_S) == {"about": "a plan"}
            with pytest.raises(NoResult, match="ended as failed: no opinion") as none:
                asking.ask(critic, "fail", timeout_s=HANG_GUARD_S, max_retries=0)
            assert (none.value.task.sender, none.value.task.agent) == (planner, critic)
            assert asyncio.run(asking.aask(critic, 1, timeout_s=HANG_GUARD_S)) == {"about": 1}
        task_id = asking.enqueue(critic, "later", type="note", idempotency_key="once")
        assert asking.enqueue(critic, "later", type="note", idempotency_key="once") == task_id
        assert (asking.get(task_id).status, asking.wait(task_id, 0.05).ended) == ("pending", False)
        with pytest.raises(NoResult, match="did not end in time: it is pending"):
            asking.ask(critic, "unanswered", timeout_s=0)
        with pytest.raises(NotAllowed, match=f"may not send to '{planner}'"):
            answering.enqueue(planner, "back")
        with harness.client(agent) as other, pytest.raises(UnknownTask):
            other.get(task_id)
        with pytest.raises(ValueError, match="timeout_s"):
            asking.wait(task_id, -1)


def test_the_same_from_asyncio(harness: Harness, agent: str) -> None:
    async def agents_life(client: TaskClient) -> Any:
        task = await client.anext_task(wait_s=10.0)
        assert task is not None
        await client.aheartbeat(task)
        await client.acomplete_task(task.task_id, "fine")
        return task.task_id

    with harness.client(agent) as client, harness.tasks() as tasks:
        tasks.enqueue(agent=agent, payload=1)
        assert tasks.get(asyncio.run(agents_life(client))).result == "fine"


# ---- work ----------------------------------------------------------------------------------------------


def test_the_start_up_drain_takes_every_task_that_waits(harness: Harness, agent: str) -> None:
    """Foreman's poll at the start claimed one task and left the rest to the next nudge."""
    with harness.tasks() as tasks, harness.client(agent, poll_every_s=NEVER_S) as client:
        ids = [tasks.enqueue(agent=agent, payload=n) for n in range(12)]
        with working(client, lambda task: task.payload * 2, nudge_port=free_port()):
            until(lambda: tasks.status().agents[agent].depth == 0)
            until(lambda: tasks.status().agents[agent].in_flight == 0)
        assert [tasks.get(task_id).result for task_id in ids] == [n * 2 for n in range(12)]


def test_later_tasks_are_claimed_without_a_nudge_endpoint(harness: Harness, agent: str) -> None:
    client = harness.client(agent)
    with harness.tasks() as tasks, client, working(client, lambda task: task.payload):
        for n in range(3):
            task_id = tasks.enqueue(agent=agent, payload=n)
            until(completed(tasks, task_id))


def test_heartbeats_keep_the_lease_of_a_long_handler(harness: Harness, agent: str) -> None:
    """Foreman's agents sent no heartbeat during a long model call, and the call was made twice."""
    stolen = []

    def slow(task: Task) -> str:
        beats: set[Any] = set()
        while len(beats) < 8:  # three waits of a third of the lease each: far longer than one lease
            stolen.extend(rival.next_tasks(1, wait_s=0.05))
            beats.add(tasks.get(task.task_id).last_heartbeat)
        assert not task.lost.is_set()
        return "slowly"

    with (
        harness.tasks() as tasks,
        harness.client(agent) as client,
        harness.client(agent) as rival,
    ):
        task_id = tasks.enqueue(agent=agent, payload=1)
        client.work(slow, lease_s=SHORT_LEASE_S, until_empty=True)
        done = tasks.get(task_id)
        assert (done.result, done.attempt, stolen) == ("slowly", 1, [])
        assert tasks.status().agents[agent].lapses == 0


def test_without_heartbeats_the_same_handler_would_lose_its_task(harness: Harness, agent: str) -> None:
    with harness.tasks() as tasks, harness.client(agent) as client, harness.client(agent) as rival:
        task_id = tasks.enqueue(agent=agent, payload=1)
        held = client.next_task(lease_s=0.05)
        assert held is not None
        taken = rival.next_task(wait_s=20.0)
        assert taken is not None
        assert (taken.task_id, taken.attempt) == (task_id, 2)
        with pytest.raises(StaleLease):
            client.complete_task(task_id, "late")


def test_lost_is_set_when_a_task_is_cancelled(harness: Harness, agent: str) -> None:
    lost: list[bool] = []

    def handler(task: Task) -> str:
        tasks.cancel(task.task_id)
        lost.append(task.lost.wait(HANG_GUARD_S))
        return "in vain"

    with harness.tasks() as tasks, harness.client(agent) as client:
        task_id = tasks.enqueue(agent=agent, payload=1)
        client.work(handler, lease_s=SHORT_LEASE_S, until_empty=True)
        assert lost == [True]
        assert tasks.get(task_id).status == "cancelled"
        assert tasks.get(task_id).result is None


def test_an_exception_of_a_handler_is_in_the_history(harness: Harness, agent: str) -> None:
    def handler(task: Task) -> str:
        if task.attempt == 1:
            raise TaskFailed("the model is busy", retry_in_s=0.0)
        return "second time lucky"

    with harness.tasks() as tasks, harness.client(agent) as client:
        task_id = tasks.enqueue(agent=agent, payload=1)
        client.work(handler, until_empty=True)
        done = tasks.get(task_id)
        assert (done.result, done.errors, done.retry_count) == (
            "second time lucky", ["the model is busy"], 1,
        )  # fmt: skip


def test_many_slots_and_two_agents_do_every_task_once(harness: Harness, agent: str) -> None:
    handled: Counter[str] = Counter()
    lock = threading.Lock()

    def handler(task: Task) -> int:
        with lock:
            handled[task.task_id] += 1
        return int(task.payload)

    with harness.tasks() as tasks, harness.client(agent) as one, harness.client(agent) as two:
        ids = tasks.enqueue_many([{"agent": agent, "payload": n} for n in range(60)])
        with working(one, handler, concurrency=4), working(two, handler, concurrency=3):
            until(lambda: tasks.status().agents[agent].states.get("COMPLETED", 0) == 60)
        assert handled == Counter(ids)


# ---- nudges --------------------------------------------------------------------------------------------


def test_a_nudge_of_the_harness_wakes_the_agent_at_once(tmp_path: Path) -> None:
    port = free_port()
    urls = {"a": f"http://127.0.0.1:{port}"}
    with serving(tmp_path, "--allow-nudge", "127.0.0.1", urls=urls) as harness, harness.tasks() as tasks:
        client = harness.client("a", poll_every_s=NEVER_S)
        with client, working(client, lambda task: task.payload, nudge_port=port):
            until(lambda: answers("GET", port, "/health") == 200)
            until(lambda: looked_for_new_tasks(harness))
            for n in range(3):  # found by nudges only: the interval is an hour
                until(completed(tasks, tasks.enqueue(agent="a", payload=n)))


def test_the_nudge_endpoint_takes_any_nudge_and_nothing_else(harness: Harness, agent: str) -> None:
    port = free_port()
    client = harness.client(agent, poll_every_s=NEVER_S)
    with harness.tasks() as tasks, client, working(client, lambda task: task.payload, nudge_port=port):
        until(lambda: answers("GET", port, "/health") == 200)
        task_id = tasks.enqueue(agent=agent, payload=1)
        assert answers("POST", port, "/task", b'{"task_id": "another"}') == 202
        until(completed(tasks, task_id))
        assert answers("POST", port, "/task", b"no json") == 202
        assert answers("POST", port, "/task") == 202
        assert answers("POST", port, "/other", b"{}") == 404
        assert answers("GET", port, "/task") == 404
        assert answers("POST", port, "/task", b"x" * (nudge_endpoint.NUDGE_BODY_BYTES_MAX + 1)) == 413


def test_callers_that_hold_the_nudge_endpoint_do_not_stop_the_work(harness: Harness, agent: str) -> None:
    port = free_port()
    client = harness.client(agent, poll_every_s=0.05)
    with harness.tasks() as tasks, client, working(client, lambda task: task.payload, nudge_port=port):
        until(lambda: answers("GET", port, "/health") == 200)
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        until(completed(tasks, tasks.enqueue(agent=agent, payload=1)))
        for connection in held:
            connection.close()


def looked_for_new_tasks(harness: Harness) -> bool:
    """A harness nudges only for tasks that are enqueued after its first look."""
    if "boss" not in harness.tokens:
        harness.tokens["boss"] = harness.agents.add("boss", role="operator")
    with harness.client("boss") as boss:
        return bool(boss.request("GET", "/queue/status")["harness"]["loops"]["nudge"]["runs"])


def completed(tasks: Tasks, task_id: str) -> Callable[[], bool]:
    return lambda: tasks.get(task_id).status == "completed"


def answers(method: str, port: int, path: str, body: bytes | None = None) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_GUARD_S)
    try:
        connection.request(method, path, body)
        return connection.getresponse().status
    except ConnectionError:
        return 0
    finally:
        connection.close()


# ---- ends ----------------------------------------------------------------------------------------------

AGENT = """
import sys, time
from pathlib import Path
from postroom.client import TaskClient
from postroom.client.worker import TaskWorker

url, agent, token, folder, grace_s = sys.argv[1:]
stop = TaskWorker.stop

def told_to_stop(worker):
    stop(worker)
    (Path(folder) / "stopping").touch()

TaskWorker.stop = told_to_stop

def handler(task):
    (Path(folder) / "started").touch()
    while not (Path(folder) / "go").exists():
        if task.lost.wait(0.01):
            (Path(folder) / "told").touch()
            raise RuntimeError("taken away")
    return "done"

with TaskClient(url, agent=agent, token=token) as client:
    client.work(handler, grace_s=float(grace_s))
print("returned")
"""


@contextmanager
def agent_process(
    harness: Harness, agent: str, folder: Path, grace_s: float
) -> Iterator[subprocess.Popen[str]]:
    """An agent whose handler runs until the file `go` exists. The block begins when it holds a task."""
    arguments = [harness.url, agent, harness.token(agent), str(folder), str(grace_s)]
    with subprocess.Popen(
        [sys.executable, "-c", AGENT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            until((folder / "started").exists)
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, errors = process.communicate(timeout=HANG_GUARD_S)
    assert "Traceback" not in errors
    return process.returncode, out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_handler_finish_and_claims_nothing_more(
    harness: Harness, agent: str, tmp_path: Path, number: int
) -> None:
    with harness.tasks() as tasks:
        first, second = (tasks.enqueue(agent=agent, payload=n) for n in range(2))
        with agent_process(harness, agent, tmp_path, 60.0) as process:
            process.send_signal(number)
            until((tmp_path / "stopping").exists)
            (tmp_path / "go").touch()
            assert ended(process) == (0, "returned\n")
        assert tasks.get(first).result == "done"
        assert tasks.get(second).status == "pending"
        assert tasks.get(second).attempt == 0


def test_after_the_grace_held_tasks_are_released_without_a_retry(
    harness: Harness, agent: str, tmp_path: Path
) -> None:
    with harness.tasks() as tasks:
        task_id = tasks.enqueue(agent=agent, payload=1)
        with agent_process(harness, agent, tmp_path, 0.05) as process:
            process.terminate()
            assert ended(process) == (0, "returned\n")
        given_back = tasks.get(task_id)
        assert (given_back.status, given_back.retry_count, given_back.errors) == ("pending", 0, [])


IDLE_AGENT = """
import sys
from postroom.client import TaskClient

print("up", flush=True)
TaskClient(sys.argv[1], agent=sys.argv[2], token=sys.argv[3]).work(print)
"""


def test_an_idle_agent_ends_cleanly(harness: Harness, agent: str) -> None:
    command = [sys.executable, "-c", IDLE_AGENT, harness.url, agent, harness.token(agent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, harness.tasks() as tasks:
        assert process.stdout is not None
        process.stdout.readline()
        tasks.enqueue(agent=agent, payload=1)
        until(lambda: tasks.status().agents[agent].states.get("COMPLETED") == 1)  # the handler runs
        process.terminate()
        assert process.wait(HANG_GUARD_S) == 0


# ---- a harness that is away, and answers that are lost -------------------------------------------------


def test_a_killed_and_restarted_harness_loses_nothing(tmp_path: Path) -> None:
    """One task is being handled while the harness is down; its result is kept until the harness is back."""
    away, back = threading.Event(), threading.Event()

    def handler(task: Task) -> Any:
        if task.payload == 0:
            away.set()
            back.wait(HANG_GUARD_S)
        return task.payload

    with (
        serving(tmp_path) as harness,
        harness.tasks() as tasks,
        harness.client("a", poll_every_s=0.1, retries=0) as client,
    ):
        ids = [tasks.enqueue(agent="a", payload=0)]
        with working(client, handler):
            assert away.wait(HANG_GUARD_S)
            harness.end(signal.SIGKILL)
            ids += [tasks.enqueue(agent="a", payload=n) for n in (1, 2)]
            back.set()
            threading.Event().wait(0.3)  # the client cannot connect
            harness.start()
            until(lambda: {tasks.get(task_id).status for task_id in ids} == {"completed"})
        assert [tasks.get(task_id).result for task_id in ids] == [0, 1, 2]
        assert [tasks.get(task_id).attempt for task_id in ids] == [1, 1, 1]


class LossyProxy(ThreadingHTTPServer):
    """Forwards every request to the harness, and drops one reply in three."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        self.harness_port = port
        self.luck = random.Random(7)
        self.lost: Counter[str] = Counter()
        super().__init__(("127.0.0.1", 0), LossyHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class LossyHandler(BaseHTTPRequestHandler):
    server: LossyProxy
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        onward = http.client.HTTPConnection("127.0.0.1", self.server.harness_port, timeout=HANG_GUARD_S)
        onward.request("POST", self.path, body, {"Authorization": self.headers["Authorization"]})
        answer = onward.getresponse()
        text = answer.read()
        onward.close()
        if self.server.luck.random() < 1 / 3:
            self.server.lost[self.path] += 1
            self.close_connection = True
            return
        self.send_response(answer.status)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


def test_lost_answers_delay_tasks_but_lose_none(harness: Harness, agent: str) -> None:
    proxy = LossyProxy(harness.port)
    serving_thread = threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True)
    serving_thread.start()
    try:
        with harness.tasks() as tasks, harness.client(agent, proxy.url, poll_every_s=0.1) as client:
            # A task whose answer is lost counts as an attempt, and here one in three is.
            ids = [tasks.enqueue(agent=agent, payload=n, max_retries=1_000) for n in range(10)]
            with working(client, lambda task: task.payload, lease_s=SHORT_LEASE_S):
                until(lambda: tasks.status().agents[agent].states.get("COMPLETED", 0) == 10)
            assert [tasks.get(task_id).result for task_id in ids] == list(range(10))
    finally:
        proxy.shutdown()
        proxy.server_close()
        serving_thread.join()
    assert proxy.lost["/queue/next"]
    assert proxy.lost["/queue/complete"]


def test_a_forked_child_does_not_use_its_parents_connection(harness: Harness, agent: str) -> None:
    with harness.client(agent) as client, harness.tasks() as tasks:
        assert client.next_task() is None  # the connection stays open
        (kept,) = client._connections._idle
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                client.next_task()
                code = 0 if kept not in client._connections._idle else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        task_id = tasks.enqueue(agent=agent, payload=1)
        task = client.next_task()
        assert task is not None
        assert task.task_id == task_id
