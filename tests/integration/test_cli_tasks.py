"""`postroom tasks`: its output, the stored tasks and its exit codes, on a folder and through a harness."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import pytest

from postroom import Tasks
from postroom.cli.program import ProgramFailed, Programs
from postroom.cli.tasks.operate import STATES, STATUSES
from postroom.cli.tasks.send import BATCH_TASKS
from postroom.client import TaskClient
from postroom.contracts.tasks.tasks import STATUS
from postroom.core.names import scoped
from postroom.core.times import parse_utc
from postroom.message import State
from postroom.server.access.tokens import TokenRegistry
from tests.integration.commandline import (
    Result,
    finish,
    isolate,
    postroom,
    run_on_terminal,
    start,
)
from tests.integration.harnesses import Harness, serving
from tests.waiting import HANG_GUARD_S, until


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture(scope="module", name="harness")
def one_harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with serving(tmp_path_factory.mktemp("harness")) as harness:
        harness.tokens["boss"] = harness.agents.add("boss", role="operator")
        yield harness


@pytest.fixture(params=["folder", "harness"], name="where")
def both_ways(
    request: pytest.FixtureRequest, tmp_path: Path, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, ...]:
    """The options that name the place of the tasks."""
    if request.param == "folder":
        with Tasks.open(f"sqlite:///{tmp_path}/data/queue.db") as tasks:
            tasks.status()
        return ("--data", str(tmp_path / "data"))
    monkeypatch.setenv("POSTROOM_TOKEN", harness.tokens["boss"])
    return ("--url", harness.url)


@pytest.fixture
def agent(request: pytest.FixtureRequest, harness: Harness) -> str:
    name = f"agent-{zlib.crc32(request.node.nodeid.encode()):x}"  # not as long as a card number
    harness.token(name)
    return name


def tasks_command(*arguments: object, stdin: bytes = b"") -> Any:
    """The one line that a command prints."""
    done = postroom("tasks", *arguments, stdin=stdin)
    assert (done.code, done.errors) == (0, "")
    return done.line


def test_the_states_are_those_of_the_contract() -> None:
    assert set(STATES) == set(get_args(State)) - {"FAILED"}  # no record stays in FAILED
    of_contract = {state: STATUS[state] for state in get_args(State) if state != "FAILED"}
    assert {state: word for word, states in STATUSES.items() for state in states} == of_contract


# ---- both ways -----------------------------------------------------------------------------------------


def test_an_operator_names_a_task_by_the_id_that_a_client_sees(tmp_path: Path) -> None:
    with Tasks.open(f"sqlite:///{tmp_path}/data/queue.db") as tasks:
        task_id = tasks.enqueue(agent="a", payload=1)
        seen: str = tasks.store.read(lambda transaction: transaction.ids.cover_id(task_id))
        assert seen != task_id
        where = ("--data", tmp_path / "data")
        assert tasks_command("show", seen, *where)["task_id"] == task_id
        tasks_command("cancel", seen, *where)
        assert tasks.get(task_id).state == "CANCELLED"
        tasks_command("retry", seen, *where)
        assert tasks.get(task_id).state == "QUEUED"


def test_the_whole_life_of_a_task(where: tuple[str, ...], agent: str) -> None:
    new = ("--agent", agent, "--payload", '{"issue": 7}', "--type", "triage", "--parent", "p1")
    task_id = tasks_command("enqueue", *where, *new)["task_id"]
    task = tasks_command("next", *where, "--agent", agent, "--lease-s", 60, "--worker", "me")
    lease = task["lease"]
    assert task == {
        "task_id": task_id, "payload": {"issue": 7}, "lease": lease, "attempt": 1, "type": "triage",
        "parent": "p1", "lease_s": 60.0,
    }  # fmt: skip
    word = (task_id, *where, "--lease", lease)
    assert tasks_command("heartbeat", *word) == {"task_id": task_id, "action": "heartbeat"}
    tasks_command("release", *word)
    again = tasks_command("next", *where, "--agent", agent)
    assert again["attempt"] == 2
    word = (task_id, *where, "--lease", again["lease"], "--agent", agent)
    tasks_command("fail", *word, "--error", "no such label", "--retry-in-s", "0")
    third = tasks_command("next", *where, "--agent", agent)
    word = (task_id, *where, "--lease", third["lease"])
    tasks_command("complete", *word, "--decision", '{"label": "bug"}')

    shown = tasks_command("show", task_id, *where)
    assert (shown["status"], shown["result"], shown["errors"]) == (
        "completed", {"label": "bug"}, ["no such label"],
    )  # fmt: skip
    assert [event["kind"] for event in shown["history"]][:3] == ["created", "enqueued", "dequeued"]
    assert tasks_command("status", *where)["agents"][agent]["states"] == {"COMPLETED": 1}
    (line,) = postroom("tasks", "list", *where, "--agent", agent).lines
    assert (line["task_id"], line["state"], line["attempt"]) == (task_id, "COMPLETED", 3)
    assert postroom("tasks", "list", *where, "--agent", agent, "--state", "QUEUED").raw == b""


def test_next_without_a_task_prints_nothing(where: tuple[str, ...], agent: str) -> None:
    tasks_command("enqueue", *where, "--agent", agent, "--payload", "1", "--delay-s", 3600)
    done = postroom("tasks", "next", *where, "--agent", agent)
    assert (done.code, done.raw, done.errors) == (0, b"", "")


def test_the_same_id_and_the_same_key_store_one_task(where: tuple[str, ...], agent: str) -> None:
    new = ("enqueue", *where, "--agent", agent, "--payload", "1")
    name = f"{agent}-t"
    assert tasks_command(*new, "--task-id", name)["task_id"] == name
    assert tasks_command(*new, "--task-id", name)["task_id"] == name
    first = tasks_command(*new, "--key", "delivery-93")
    assert tasks_command(*new, "--key", "delivery-93") == first
    assert len(postroom("tasks", "list", *where, "--agent", agent).lines) == 2


def test_several_tasks_are_claimed_and_lists_are_paged(where: tuple[str, ...], agent: str) -> None:
    for n in range(5):
        tasks_command("enqueue", *where, "--agent", agent, "--payload", n)
    taken = postroom("tasks", "next", *where, "--agent", agent, "--limit", 3).lines
    assert [task["payload"] for task in taken] == [0, 1, 2]
    first = postroom("tasks", "list", *where, "--agent", agent, "--limit", 2).lines
    rest = postroom("tasks", "list", *where, "--agent", agent, "--after", first[-1]["seq"]).lines
    assert len(first + rest) == 5


def test_cancel_and_retry(where: tuple[str, ...], agent: str) -> None:
    task_id = tasks_command("enqueue", *where, "--agent", agent, "--payload", "1")["task_id"]
    tasks_command("cancel", task_id, *where)
    refused = postroom("tasks", "cancel", task_id, *where)
    assert (refused.code, refused.raw) == (1, b"")
    assert "CANCELLED" in refused.error
    tasks_command("retry", task_id, *where)
    assert tasks_command("next", *where, "--agent", agent)["task_id"] == task_id


def test_wait_prints_the_result(where: tuple[str, ...], agent: str) -> None:
    new = ("enqueue", *where, "--agent", agent, "--payload", '{"issue": 7}')
    task_id = tasks_command(*new)["task_id"]
    pending = postroom("tasks", "wait", task_id, *where, "--timeout-s", "0.05")
    assert (pending.code, pending.line["status"]) == (1, "pending")
    assert pending.error == f"postroom: task {task_id} has not ended: it is pending"
    waiting = start("postroom", "tasks", "wait", task_id, *where)
    task = tasks_command("next", *where, "--agent", agent)
    tasks_command("complete", task_id, *where, "--lease", task["lease"], "--decision", '{"label": "bug"}')
    done = finish(waiting)
    assert (done.code, done.errors) == (0, "")
    assert done.line == {
        "task_id": task_id, "agent": agent, "status": "completed", "state": "COMPLETED",
        "result": {"label": "bug"}, "errors": [],
    }  # fmt: skip
    asking = start("postroom", "tasks", *new, "--wait", "--timeout-s", "60", "--max-retries", "0")
    asked = tasks_command("next", *where, "--agent", agent, "--wait-s", 60)
    tasks_command("fail", asked["task_id"], *where, "--lease", asked["lease"], "--error", "no such label")
    failed = finish(asking)
    assert (failed.code, failed.line["errors"]) == (1, ["no such label"])
    assert "ended as failed" in failed.error


def test_a_task_shows_its_lease_and_every_time_in_one_form(where: tuple[str, ...], agent: str) -> None:
    task_id = tasks_command("enqueue", *where, "--agent", agent, "--payload", "1")["task_id"]
    tasks_command("next", *where, "--agent", agent, "--lease-s", 60)
    shown = tasks_command("show", task_id, *where)
    listed = postroom("tasks", "list", *where, "--agent", agent).line
    times = [shown[name] for name in ("created_at", "claimed_at", "last_heartbeat", "lease_ends_at")]
    times += [event["at"] for event in shown["history"]]
    times.append(listed["created_at"])
    for text in times:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", text), text
    assert parse_utc(shown["lease_ends_at"]) - parse_utc(shown["claimed_at"]) == timedelta(seconds=60)


def test_tasks_are_enqueued_from_json_lines(where: tuple[str, ...], agent: str) -> None:
    other = f"{agent}-x"
    lines = [{"payload": n} for n in range(3)] + [{"payload": 3, "agent": agent, "type": "last"}]
    text = "\n\n".join(map(json.dumps, lines)).encode()
    done = postroom("tasks", "enqueue", *where, "--agent", agent, "--batch", "-", stdin=text)
    assert (done.code, done.errors) == (0, "")
    taken = postroom("tasks", "next", *where, "--agent", agent, "--limit", 10).lines
    assert [task["payload"] for task in taken] == [0, 1, 2, 3]
    assert [task["task_id"] for task in taken] == [line["task_id"] for line in done.lines]
    Path("tasks.jsonl").write_text('{"payload": 1}\n')
    ids = postroom("tasks", "enqueue", *where, "--agent", other, "--batch", "tasks.jsonl", "--id-only")
    shown = tasks_command("show", ids.out.strip(), *where)
    assert (shown["agent"], shown["payload"]) == (other, 1)


def test_many_lines_are_several_commits(where: tuple[str, ...], agent: str) -> None:
    lines = b"".join(b'{"payload": %d}\n' % n for n in range(BATCH_TASKS + 5))
    done = postroom("tasks", "enqueue", *where, "--agent", agent, "--batch", "-", stdin=lines)
    assert (done.code, len(done.lines)) == (0, BATCH_TASKS + 5)
    assert tasks_command("status", *where)["agents"][agent]["depth"] == BATCH_TASKS + 5


def test_all_dead_letters_are_retried(where: tuple[str, ...], agent: str) -> None:
    new = ("enqueue", *where, "--agent", agent, "--payload", "1", "--max-retries", "0")
    ids = [tasks_command(*new)["task_id"] for _ in range(3)]
    alive = tasks_command("enqueue", *where, "--agent", agent, "--payload", "1", "--delay-s", 60)["task_id"]

    def kill_all() -> None:
        for task in postroom("tasks", "next", *where, "--agent", agent, "--limit", 10).lines:
            tasks_command("fail", task["task_id"], *where, "--lease", task["lease"], "--error", "no")

    def tried_again(*which: object) -> list[str]:
        done = postroom("tasks", "retry", *where, *which)
        assert (done.code, done.errors) == (0, "")
        *retried, counts = done.lines
        assert counts == {"retried": len(retried), "skipped": 0}
        return [line["task_id"] for line in retried]

    kill_all()
    assert tried_again("--agent", f"{agent}-other") == []
    assert tried_again("--agent", agent, "--since", "2100-01-01T00:00:00Z") == []
    assert tried_again("--agent", agent, "--since", "2020-01-01T00:00:00Z") == ids
    kill_all()
    assert tried_again("--agent", agent) == ids
    kill_all()
    assert set(ids) <= set(tried_again("--all-dead"))
    assert tasks_command("show", alive, *where)["state"] == "SCHEDULED"


def test_tasks_are_listed_by_status_and_by_state(where: tuple[str, ...], agent: str) -> None:
    new = ("enqueue", *where, "--agent", agent, "--payload", "1", "--max-retries", "0")
    ids = [tasks_command(*new)["task_id"] for _ in range(3)]
    later = tasks_command(*new, "--delay-s", 60)["task_id"]
    dead, held = postroom("tasks", "next", *where, "--agent", agent, "--limit", 2).lines
    tasks_command("fail", dead["task_id"], *where, "--lease", dead["lease"], "--error", "no")

    def listed(state: str, *options: object) -> list[str]:
        done = postroom("tasks", "list", *where, "--agent", agent, "--state", state, *options)
        assert (done.code, done.errors) == (0, "")
        return [line["task_id"] for line in done.lines]

    assert listed("pending") == [ids[2], later]  # QUEUED and SCHEDULED, in the order they came
    assert listed("pending", "--limit", 1) == [ids[2]]
    assert listed("queued") == listed("QUEUED") == [ids[2]]
    assert listed("claimed") == listed("PROCESSING") == [held["task_id"]]
    assert listed("failed") == listed("dead_letter") == [dead["task_id"]]
    assert listed("done") == []


def test_retry_prints_the_outcome_and_keeps_the_attempts(where: tuple[str, ...], agent: str) -> None:
    new = ("enqueue", *where, "--agent", agent, "--payload", "1", "--max-retries", "0")
    task_id = tasks_command(*new)["task_id"]
    lease = tasks_command("next", *where, "--agent", agent)["lease"]
    tasks_command("fail", task_id, *where, "--lease", lease, "--error", "no")
    dead = tasks_command("show", task_id, *where)
    assert (dead["state"], dead["attempt"], dead["retry_count"]) == ("DEAD_LETTER", 1, 1)
    assert tasks_command("retry", task_id, *where) == {"task_id": task_id, "action": "retry"}
    again = tasks_command("show", task_id, *where)
    assert (again["state"], again["attempt"], again["retry_count"]) == ("QUEUED", 1, 0)
    assert again["errors"] == ["no"]
    assert tasks_command("next", *where, "--agent", agent)["attempt"] == 2


def test_stale_leases_and_unknown_tasks_give_a_one_line_error(where: tuple[str, ...], agent: str) -> None:
    task_id = tasks_command("enqueue", *where, "--agent", agent, "--payload", "1")["task_id"]
    lease = tasks_command("next", *where, "--agent", agent)["lease"]
    stale = postroom("tasks", "complete", task_id, *where, "--lease", lease + 1)
    assert (stale.code, stale.raw) == (1, b"")
    assert "no longer valid" in stale.error
    for command in ("show", "cancel", "retry"):
        unknown = postroom("tasks", command, "nothing", *where)
        assert (unknown.code, unknown.raw) == (1, b"")
        assert "'nothing'" in unknown.error
    assert tasks_command("show", task_id, *where)["status"] == "claimed"


def test_a_payload_and_a_decision_come_from_an_option_a_file_or_stdin(
    where: tuple[str, ...], agent: str
) -> None:
    value = {"text": "ünïcödé 漢字 \x1b[31m\u202e", "n": [1, 2.5, None, True]}
    Path("value.json").write_text(json.dumps(value))
    raw = json.dumps(value).encode()
    new = ("enqueue", *where, "--agent", agent)
    tasks_command(*new, "--payload", raw.decode())
    tasks_command(*new, "--payload-file", "value.json")
    tasks_command(*new, "--payload-file", "-", stdin=raw)
    done = postroom("tasks", "next", *where, "--agent", agent, "--limit", 10)
    assert [task["payload"] for task in done.lines] == [value] * 3
    assert b"\x1b" not in done.raw
    assert "\u202e" not in done.out
    task = done.lines[0]
    word = (task["task_id"], *where, "--lease", task["lease"])
    tasks_command("complete", *word, "--decision-file", "-", stdin=raw)
    assert tasks_command("show", task["task_id"], *where)["result"] == value


# ---- wrong calls ---------------------------------------------------------------------------------------

DATA = ["--data", "data"]
WRONG_CALLS: dict[str, tuple[list[str], str]] = {
    "nowhere": (["status"], "--data"),
    "two places": (["status", *DATA, "--url", "http://127.0.0.1:1"], "--data and --url name two places"),
    "file in place of a folder": (["enqueue", "--data", "data/queue.db", "--agent", "a"], "is a file"),
    "payload that is not text": (
        ["enqueue", *DATA, "--agent", "a", "--payload", '"\udcff"'],
        "not UTF-8 text",
    ),
    "delay over its limit": (
        ["enqueue", *DATA, "--agent", "a", "--payload", "1", "--delay-s", "1e13"],
        "delay_s must be a number of seconds from 0 to 31622400, not 10000000000000.0",
    ),
    "delay a little over its limit": (
        ["enqueue", *DATA, "--agent", "a", "--payload", "1", "--delay-s", "31622401"],
        "delay_s must be a number of seconds from 0 to 31622400, not 31622401.0",
    ),
    "no token": (["status", "--url", "http://127.0.0.1:1"], "POSTROOM_TOKEN"),
    "no address": (["status", "--url", "here", "--token", "x"], "address"),
    "bad token": (["status", "--url", "http://127.0.0.1:1", "--token", "a\nb"], "ASCII"),
    "empty folder": (["status", "--data", ""], "empty"),
    "no agent": (["enqueue", *DATA, "--payload", "1"], "--agent"),
    "no agent to take for": (["next", *DATA], "--agent"),
    "no payload": (["enqueue", *DATA, "--agent", "a"], "--payload"),
    "two payloads": (["enqueue", *DATA, "--agent", "a", "--payload", "1", "--payload-file", "x"], "once"),
    "payload that is not JSON": (["enqueue", *DATA, "--agent", "a", "--payload", "{"], "not JSON"),
    "bad agent": (["enqueue", *DATA, "--agent", "../x", "--payload", "1"], "'../x'"),
    "bad id": (["enqueue", *DATA, "--agent", "a", "--payload", "1", "--task-id", "a b"], "'a b'"),
    "endless delay": (["enqueue", *DATA, "--agent", "a", "--payload", "1", "--delay-s", "inf"], "inf"),
    "batch and payload": (["enqueue", *DATA, "--batch", "-", "--payload", "1"], "--batch"),
    "retry of nothing": (["retry", *DATA], "--all-dead"),
    "retry of one and all": (["retry", "t1", "--all-dead", *DATA], "--all-dead"),
    "retry since no time": (["retry", *DATA, "--since", "yesterday"], "RFC 3339"),
    "endless timeout": (["wait", "t1", *DATA, "--timeout-s", "inf"], "inf"),
    "work at two places": (
        ["work", *DATA, "--url", "http://x", "--agent", "a", "--exec", "true"],
        "two places",
    ),
    "no lease": (["complete", "t1", *DATA], "--lease"),
    "lease that is not a number": (["complete", "t1", *DATA, "--lease", "x"], "--lease"),
    "no task": (["show", *DATA], "TASK_ID"),
    "lease of no length": (["next", *DATA, "--agent", "a", "--lease-s", "0"], "lease_s"),
    "unknown state": (
        ["list", *DATA, "--state", "running"],
        "'running' is neither a status nor a state: a s",
    ),
    "no command to run": (["work", "--url", "http://127.0.0.1:1", "--agent", "a", "--token", "x"], "--exec"),
    "bad agent name": (["agent", "add", "a/b", *DATA], "'a/b'"),
    "bad nudge address": (["agent", "add", "a", *DATA, "--url", "ftp://x"], "http"),
    "no permission to take away": (["agent", "deny", "a", *DATA], "--may-send-to"),
    "bad port": (["serve", *DATA, "--port", "99999"], "--port"),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_a_wrong_call_gives_a_one_line_error_and_exit_code_2(case: str) -> None:
    arguments, expected = WRONG_CALLS[case]
    with Tasks.open("sqlite:///data/queue.db") as tasks:
        tasks.enqueue(agent="a", payload=1)
    done = postroom("tasks", *arguments)
    assert (done.code, done.raw) == (2, b"")
    assert expected in done.error
    assert "codec" not in done.error
    assert "\\n" not in done.error


BAD_LINES = {
    "no JSON": (b'{"payload": 1}\n{', "line 2 of --batch is not a JSON object"),
    "no text": (b'{"payload": "\xff"}', "line 1 of --batch is not a JSON object: byte 0 (0xff) is not UTF-8"),
    "no object": (b"[1]", "line 1 of --batch must be an object, not a list"),
    "unknown key": (b'{"payload": 1, "colour": 2}', "line 1 of --batch has an unknown field 'colour'"),
    "no payload": (b'{"agent": "a"}', "line 1 of --batch has no payload"),
    "no agent": (b'{"payload": 1}', "line 1 of --batch names no agent"),
    "a wrong value": (b'{"agent": "a", "payload": 1, "delay_s": -1}', "delay_s must be"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named_and_nothing_of_its_batch_is_stored(case: str) -> None:
    lines, expected = BAD_LINES[case]
    with Tasks.open("sqlite:///data/queue.db") as tasks:
        tasks.status()
        agent = [] if case == "no agent" else ["--agent", "a"]
        done = postroom("tasks", "enqueue", *DATA, *agent, "--batch", "-", stdin=lines)
        assert (done.code, done.raw) == (2, b"")
        assert expected in done.error
        assert tasks.find() == []


def test_a_new_store_and_an_unregistered_agent_cause_warnings() -> None:
    new = ("enqueue", *DATA, "--payload", "1", "--agent")
    first = postroom("tasks", *new, "a")
    assert (first.code, bool(first.line["task_id"])) == (0, True)
    assert first.error == "postroom: warning: there was no store in data: a new one is made"
    assert postroom("tasks", *new, "b").errors == ""  # a folder without registered agents needs none
    tasks_command("agent", "add", "a", *DATA)
    assert postroom("tasks", *new, "a").errors == ""
    stranger = postroom("tasks", *new, "b")
    said = "postroom: warning: no token in data is for the agent 'b': check the name"
    assert (stranger.code, stranger.error) == (0, said)


def test_a_harness_warns_of_an_unregistered_agent(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTROOM_TOKEN", harness.tokens["boss"])
    done = postroom("tasks", "enqueue", "--url", harness.url, "--agent", "nobody-knows", "--payload", "1")
    assert (done.code, bool(done.line["task_id"])) == (0, True)
    assert done.error == "postroom: warning: no token is for the agent 'nobody-knows': check the name"


def test_token_only_and_may_send_to() -> None:
    added = postroom("tasks", "agent", "add", "planner", *DATA, "--may-send-to", "critic", "--token-only")
    assert re.fullmatch(r"pr_[\w-]{43}\n", added.out)
    tasks_command("agent", "add", "critic", *DATA)
    planner, critic = postroom("tasks", "agent", "list", *DATA).lines
    assert (planner["may_send_to"], critic["may_send_to"]) == (["critic"], [])
    assert planner["created"].endswith("Z")


def test_a_refusal_names_the_command_that_allows_sending(
    harness: Harness, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTROOM_TOKEN", harness.token(agent))
    send = ("tasks", "enqueue", "--url", harness.url, "--agent", "critic", "--payload", "1")
    refused = postroom(*send)
    command = f"postroom tasks agent allow {agent} --may-send-to critic --data DIR"
    assert (refused.code, command in refused.error) == (1, True)
    arguments = command.replace("DIR", str(harness.data)).split()[1:]
    assert postroom(*arguments).line == {"name": agent, "may_send_to": ["critic"]}
    until(lambda: postroom(*send).code == 0)
    deny = ("agent", "deny", agent, "--may-send-to", "critic", "--data", harness.data)
    assert tasks_command(*deny) == {"name": agent, "may_send_to": []}
    until(lambda: postroom(*send).code == 1)
    again = postroom("tasks", *deny)
    assert (again.code, "has no permission to send to 'critic'" in again.error) == (2, True)


def test_the_choices_of_a_missing_option_stand_on_the_same_line() -> None:
    done = postroom("queue", "send")
    assert (done.code, done.raw) == (2, b"")
    assert "'--topic'. Choose from: answer, ask," in done.error
    assert "\\n" not in done.error
    assert "\\t" not in done.error


def test_a_settings_file_that_is_not_text_gives_a_one_line_error() -> None:
    Path("postroom.toml").write_bytes(b"\xff\xfe")
    done = postroom("bus", "tail", "--bus", "bus.yaml")
    assert (done.code, done.raw) == (2, b"")
    assert "postroom.toml is not TOML: byte 0 (0xff) is not UTF-8 text" in done.error


@pytest.mark.parametrize("arguments", [("status",), ("enqueue", "--agent", "a", "--payload", "1")])
def test_a_system_file_as_the_store_is_refused_and_untouched(arguments: tuple[str, ...]) -> None:
    Path("data").mkdir()
    Path("data/queue.db").write_bytes(b"root:x:0:0::/root:/bin/sh\n")
    done = postroom("tasks", arguments[0], "--data", "data", *arguments[1:])
    assert (done.code, done.raw) == (1, b"")
    assert "is not a store of tasks: it is not a SQLite database" in done.error
    assert os.listdir("data") == ["queue.db"]
    assert Path("data/queue.db").read_bytes() == b"root:x:0:0::/root:/bin/sh\n"


def test_an_invalid_call_refused_by_a_harness_has_exit_code_2(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTROOM_TOKEN", harness.tokens["boss"])
    done = postroom("tasks", "next", "--url", harness.url)
    assert (done.code, done.raw) == (2, b"")
    assert "agent" in done.error


def test_failures_give_a_one_line_error_and_exit_code_1(harness: Harness) -> None:
    assert postroom("tasks", "agent", "add", "known", *DATA).code == 0
    for arguments, expected in (
        (("status", "--data", "nothing"), "there are no tasks in nothing"),
        (("next", "--data", "nothing", "--agent", "a", "--wait-s", "9"), "there are no tasks in nothing"),
        (("work", "--data", "nothing", "--agent", "a", "--exec", "true"), "there are no tasks in nothing"),
        (("work", *DATA, "--agent", "a", "--exec", "true"), "there are no tasks in data"),
        (("wait", "t1", "--data", "nothing"), "there are no tasks in nothing"),
        (("agent", "list", "--data", "nothing"), "there is no data folder nothing"),
        (
            ("agent", "allow", "a", "--data", "nothing", "--may-send-to", "b"),
            "there is no data folder nothing",
        ),
        (("agent", "add", "known", *DATA), "agent 'known' exists already"),
        (("agent", "remove", "nobody", *DATA), "there is no agent 'nobody'"),
        (("agent", "allow", "nobody", *DATA, "--may-send-to", "b"), "there is no agent 'nobody'"),
        (("status", "--url", harness.url, "--token", "pr_wrong"), "token"),
        (("status", "--url", "http://127.0.0.1:1", "--token", "x"), "cannot reach"),
    ):
        done = postroom("tasks", *arguments)
        assert (done.code, done.raw) == (1, b"")
        assert expected in done.error
    assert not Path("nothing").exists()
    assert not Path("data/queue.db").exists()


def test_a_token_in_an_option_wins_over_the_environment(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTROOM_TOKEN", "pr_wrong")
    tasks_command("status", "--url", harness.url, "--token", harness.tokens["boss"])


# ---- agents --------------------------------------------------------------------------------------------


def test_agents_and_their_tokens() -> None:
    first = postroom("tasks", "agent", "add", "triage", *DATA, "--url", "http://127.0.0.1:9001")
    assert first.error == "postroom: warning: there was no data folder data: a new one is made"
    added = first.line
    assert added["token"].startswith("pr_")
    assert (added["name"], added["role"], added["url"]) == ("triage", "agent", "http://127.0.0.1:9001")
    boss = tasks_command("agent", "add", "boss", *DATA, "--operator")
    assert boss["role"] == "operator"
    listed = postroom("tasks", "agent", "list", *DATA)
    assert [(row["name"], row["role"]) for row in listed.lines] == [("triage", "agent"), ("boss", "operator")]
    for secret in (added["token"], boss["token"]):
        assert secret not in listed.out
        assert secret not in Path("data/agents.json").read_text()
    tasks_command("agent", "remove", "triage", *DATA)
    assert [row["name"] for row in postroom("tasks", "agent", "list", *DATA).lines] == ["boss"]


# ---- on a terminal -------------------------------------------------------------------------------------


def test_a_terminal_gets_tables_and_records(tmp_path: Path) -> None:
    data = ("--data", tmp_path / "data")
    payload = json.dumps({"title": "evil \x1b[31m title"})
    with Tasks.open(f"sqlite:///{tmp_path}/data/queue.db") as tasks:
        tasks.status()
    task_id = tasks_command("enqueue", *data, "--agent", "triage", "--payload", payload)["task_id"]
    shown = {
        name: run_on_terminal("postroom", "tasks", *arguments, *data)
        for name, arguments in {
            "next": ("next", "--agent", "triage"),
            "status": ("status",),
            "list": ("list",),
            "show": ("show", task_id),
            "token": ("agent", "add", "triage"),
            "agents": ("agent", "list"),
        }.items()
    }
    assert {result.code for result in shown.values()} == {0}
    for result in shown.values():
        assert b"\x1b[31m title" not in result.raw
    assert "lease:" in text(shown["next"])
    assert "in flight" in text(shown["status"])
    assert "PROCESSING" in text(shown["list"])
    assert "dequeued" in text(shown["show"])
    assert text(shown["token"]).startswith("pr_")
    assert "triage" in text(shown["agents"])


def text(result: Result) -> str:
    """Without the colour codes."""
    return (
        result.out.replace("\x1b[1m", "")
        .replace("\x1b[0m", "")
        .replace("\x1b[36m", "")
        .replace("\x1b[2m", "")
    )


# ---- serve ---------------------------------------------------------------------------------------------


def test_a_harness_executes_decisions_with_a_program_and_ends_at_a_signal(tmp_path: Path) -> None:
    note = shlex.join(["tee", "-a", str(tmp_path / "effects")])
    with serving(tmp_path, "--execute", note) as harness, harness.tasks() as tasks:
        task_id = tasks.enqueue(agent="a", payload={"issue": 7}, type="triage")
        with harness.client("a") as client:
            client.work(lambda _: {"label": "bug"}, until_empty=True)
        until(lambda: tasks.get(task_id).status == "done")
        assert harness.end(signal.SIGTERM) == 0
        (effect,) = map(json.loads, (tmp_path / "effects").read_text().splitlines())
        assert effect.pop("decision_id")
        assert effect == {
            "task_id": task_id, "agent": "a", "type": "triage", "payload": {"issue": 7},
            "decision": {"label": "bug"}, "attempt": 1,
        }  # fmt: skip
    log = (tmp_path / "harness.log").read_text().splitlines()
    assert {"ts", "event", "task_id", "agent"} <= set.intersection(*(set(json.loads(line)) for line in log))
    assert harness.tokens["a"] not in "".join(log)


def test_decisions_of_one_organization_leave_room_for_those_of_others(tmp_path: Path) -> None:
    """Each decision of the first organization runs until the test ends it."""
    ending = tmp_path / "ending"
    script = f'read -r it; case "$it" in *slow*) until [ -e {ending} ]; do sleep 0.05; done; esac'
    with (
        serving(tmp_path, "--execute", shlex.join(["sh", "-c", script])) as harness,
        harness.tasks() as tasks,
    ):
        done: dict[str, list[str]] = {}
        for org, result, count in (("acme", "slow", 20), ("other", "quick", 1)):
            agent = scoped(org, "ada")
            done[org] = tasks.enqueue_many({"agent": agent, "payload": result} for _ in range(count))
            token = TokenRegistry(harness.data).create("agent", org, "ada").token
            with TaskClient(harness.url, agent="ada", token=token) as client:
                client.work(lambda task: task.payload, until_empty=True)
        until(lambda: tasks.get(*done["other"]).status == "done")
        states = {tasks.get(task_id).state for task_id in done["acme"]}
        assert "DONE" not in states
        ending.touch()
        until(lambda: all(tasks.get(task_id).status == "done" for task_id in done["acme"]))


def test_a_harness_has_a_longest_lease(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-lease-s", "5") as harness, harness.tasks() as tasks:
        for _ in range(2):
            tasks.enqueue(agent="a", payload=1)
        with harness.client("a") as client:
            given = [client.next_task(lease_s=lease_s) for lease_s in (300.0, 2.0)]
        assert [task.lease_s for task in given if task is not None] == [5.0, 2.0]
    for wrong in ("0", "99999999"):
        done = finish(start("postroom", "tasks", "serve", *DATA, "--max-lease-s", wrong, "--port", "0"))
        assert (done.code, "lease_s_max must be" in done.error) == (2, True)


def test_a_port_in_use_gives_a_one_line_error(harness: Harness, tmp_path: Path) -> None:
    done = finish(start("postroom", "tasks", "serve", "--data", tmp_path / "x", "--port", harness.port))
    assert done.code == 1
    assert f"port {harness.port}: another program listens there, so choose another port" in done.error


def test_two_servers_may_serve_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as one:
        monkeypatch.setenv("POSTROOM_TOKEN", one.agents.add("boss", role="operator"))
        second = start(
            "postroom", "tasks", "serve", "--data", one.data, "--port", 0, stderr=subprocess.DEVNULL
        )
        assert second.stdout is not None
        url = json.loads(second.stdout.readline())["url"]
        one.token("a")
        new = ("enqueue", "--agent", "a", "--payload", "1", "--url")
        ids = [tasks_command(*new, where)["task_id"] for where in (one.url, url)]
        for claimed_at, told_at in ((url, one.url), (one.url, url)):
            task = tasks_command("next", "--agent", "a", "--url", claimed_at)
            waiting = start("postroom", "tasks", "wait", task["task_id"], "--url", claimed_at)
            tasks_command("complete", task["task_id"], "--lease", task["lease"], "--url", told_at)
            assert (finish(waiting).code, task["task_id"] in ids) == (0, True)
        second.terminate()
        assert finish(second).code == 0
        assert tasks_command("status", "--url", one.url)["totals"] == {"completed": 2}


def test_a_command_for_operators_is_refused_to_an_agent(
    harness: Harness, agent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTROOM_TOKEN", harness.token(agent))
    done = postroom("tasks", "retry", "t1", "--url", harness.url)
    assert (done.code, "only an operator may do that" in done.error) == (1, True)
    done = postroom("tasks", "list", "--agent", "other", "--url", harness.url)
    assert (done.code, f"this is the token of {agent}," in done.error) == (1, True)


def test_missing_server_extra_error_names_the_extra(tmp_path: Path) -> None:
    blocked = "import sys; sys.modules['starlette'] = None\nfrom postroom.cli.main import main\nmain()"
    words = [sys.executable, "-c", blocked, "tasks", "serve", "--data", str(tmp_path / "x")]
    done = finish(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    assert done.code == 1
    assert "postroom[server]" in done.error


# ---- work ----------------------------------------------------------------------------------------------


def work(harness: Harness, agent: str, command: str, *options: object, **more: Any) -> Any:
    environ = {**os.environ, "POSTROOM_TOKEN": harness.token(agent)}
    where = ("--url", harness.url, "--agent", agent)
    return start("postroom", "tasks", "work", *where, "--exec", command, *options, env=environ, **more)


def python(code: str) -> str:
    return shlex.join([sys.executable, "-c", code])


def test_any_program_can_be_an_agent(harness: Harness, agent: str) -> None:
    code = "import json, sys; t = json.load(sys.stdin); print(json.dumps([t['payload'] * 2, sorted(t)]))"
    with harness.tasks() as tasks:
        ids = [tasks.enqueue(agent=agent, payload=n) for n in (1, 2)]
        done = finish(work(harness, agent, python(code), "--until-empty"))
        assert (done.code, done.errors) == (0, "")
        assert [(line["task_id"], line["outcome"]) for line in done.lines] == [(i, "completed") for i in ids]
        results = [tasks.get(task_id).result for task_id in ids]
        assert [result[0] for result in results] == [2, 4]
        assert results[0][1] == ["attempt", "lease", "lease_s", "parent", "payload", "task_id", "type"]


def test_a_program_may_be_a_line_of_the_shell_and_may_print_nothing(harness: Harness, agent: str) -> None:
    with harness.tasks() as tasks:
        task_id = tasks.enqueue(agent=agent, payload=1)
        assert finish(work(harness, agent, "cat > /dev/null; true", "--until-empty")).code == 0
        assert (tasks.get(task_id).status, tasks.get(task_id).result) == ("completed", None)


FAILURES = {
    "exit code": (
        "echo first >&2; echo 'the model is gone' >&2; exit 3",
        "exit code 3: first\nthe model is gone",
    ),
    "signal": ("kill -9 $$", "signal 9"),
    "no JSON": ("echo hello", "not JSON"),
    "too much": ("yes | head -c 2000000", "more than 1048576 bytes"),
    "no UTF-8": ("printf '\"\\377\"'", "not JSON: byte 0 (0xff) is not UTF-8 text"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failing_program_fails_the_task_with_its_stderr(harness: Harness, agent: str, case: str) -> None:
    command, expected = FAILURES[case]
    with harness.tasks() as tasks:
        task_id = tasks.enqueue(agent=agent, payload=1, max_retries=0)
        done = finish(work(harness, agent, command, "--until-empty"))
        assert (done.code, done.line["outcome"]) == (0, "failed")
        task = tasks.get(task_id)
        assert task.status == "failed"
        assert expected in task.errors[0]
        assert done.line["error"] == task.errors[0]


@pytest.mark.parametrize("code", [126, 127])
def test_a_program_that_cannot_be_run_ends_the_worker_and_fails_no_task(
    harness: Harness, agent: str, tmp_path: Path, code: int
) -> None:
    program = tmp_path / "program"
    if code == 126:
        program.write_text("#!/bin/sh\n")  # and not executable
    with harness.tasks() as tasks:
        task_id = tasks.enqueue(agent=agent, payload=1, max_retries=0)
        done = finish(work(harness, agent, str(program)))
        assert (done.code, done.line["outcome"]) == (1, "released")
        assert f"the program cannot be run, and no task has failed: exit code {code}" in done.error
        assert (tasks.get(task_id).status, tasks.get(task_id).retry_count) == ("pending", 0)


def test_a_folder_is_worked_on_without_a_harness(tmp_path: Path) -> None:
    with Tasks.open(f"sqlite:///{tmp_path}/queue.db") as tasks:
        good, bad = (tasks.enqueue(agent="a", payload=n, max_retries=0) for n in (1, 2))
        command = python("import json, sys; n = json.load(sys.stdin)['payload']; print(10 / (2 - n))")
        where = ("--data", tmp_path, "--agent", "a", "--exec", command)
        done = finish(start("postroom", "tasks", "work", *where, "--until-empty"))
        assert (done.code, done.errors) == (0, "")
        outcomes = {line["task_id"]: line["outcome"] for line in done.lines}
        assert outcomes == {good: "completed", bad: "failed"}
        assert (tasks.get(good).result, tasks.get(bad).status) == (10.0, "failed")
        assert "ZeroDivisionError" in tasks.get(bad).errors[0]
        process = start("postroom", "tasks", "work", *where)  # waits for more tasks until SIGTERM
        later = tasks.enqueue(agent="a", payload=1)
        assert tasks.wait(later, HANG_GUARD_S).result == 10.0
        process.terminate()
        assert finish(process).code == 0


def test_a_terminal_gets_a_line_for_each_task(tmp_path: Path) -> None:
    with Tasks.open(f"sqlite:///{tmp_path}/queue.db") as tasks:
        task_id = tasks.enqueue(agent="a", payload=1)
        where = ("--data", tmp_path, "--agent", "a")
        shown = run_on_terminal("postroom", "tasks", "work", *where, "--exec", "true", "--until-empty")
        assert (shown.code, text(shown).startswith(f"{task_id}  completed  attempt 1  ")) == (0, True)
        waited = run_on_terminal("postroom", "tasks", "wait", task_id, "--data", tmp_path)
        assert "completed" in text(waited)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "ended"])
def test_a_killed_worker_ends_its_program_and_its_children(tmp_path: Path, number: int) -> None:
    """Including the children of the program, however the worker ends."""
    pids = tmp_path / "pids"
    command = f"sleep 600 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait"
    with Tasks.open(f"sqlite:///{tmp_path}/queue.db") as tasks:
        tasks.enqueue(agent="a", payload=1)
        where = ("--data", tmp_path, "--agent", "a", "--grace-s", "0")
        process = start("postroom", "tasks", "work", *where, "--exec", command)
        until(pids.exists)
        process.send_signal(number)
        finish(process)
    group = [int(pid) for pid in pids.read_text().split()]
    until(lambda: not any(runs(pid) for pid in group))


def runs(pid: int) -> bool:
    """Whether a process still runs; a dead one may be a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_program_does_not_inherit_the_token(harness: Harness, agent: str) -> None:
    code = "import json, os; print(json.dumps(os.environ.get('POSTROOM_TOKEN')))"
    with harness.tasks() as tasks:
        task_id = tasks.enqueue(agent=agent, payload=1)
        finish(work(harness, agent, python(code), "--until-empty"))
        assert (tasks.get(task_id).status, tasks.get(task_id).result) == ("completed", None)


def test_a_signal_lets_the_program_finish(harness: Harness, agent: str, tmp_path: Path) -> None:
    go, started = tmp_path / "go", tmp_path / "started"
    command = f"touch {started}; while [ ! -e {go} ]; do sleep 0.05; done; echo 5"
    with harness.tasks() as tasks:
        first, second = (tasks.enqueue(agent=agent, payload=n) for n in range(2))
        process = work(harness, agent, command)
        until(started.exists)
        process.terminate()
        go.touch()
        assert finish(process).code == 0
        assert (tasks.get(first).result, tasks.get(second).attempt) == (5, 0)


def test_after_the_grace_the_program_ends_and_its_task_is_released(
    harness: Harness, agent: str, tmp_path: Path
) -> None:
    started, ended = tmp_path / "started", tmp_path / "told"
    command = f"trap 'touch {ended}; exit 1' TERM; touch {started}; sleep 600 & wait"
    with harness.tasks() as tasks:
        task_id = tasks.enqueue(agent=agent, payload=1)
        process = work(harness, agent, command, "--grace-s", "0.1")
        until(started.exists)
        process.terminate()
        assert finish(process).code == 0
        assert (tasks.get(task_id).status, tasks.get(task_id).retry_count) == ("pending", 0)
    assert ended.exists()


def test_an_unknown_token_ends_the_work_with_a_one_line_error(harness: Harness) -> None:
    where = ("--url", harness.url, "--agent", "a", "--token", "pr_wrong")
    done = finish(start("postroom", "tasks", "work", *where, "--exec", "true"))
    assert done.code == 1
    assert "token" in done.error


def test_a_program_is_ended_when_its_task_is_lost(tmp_path: Path) -> None:
    unwanted = threading.Event()
    unwanted.set()
    mark = tmp_path / "ended"
    command = f"trap 'touch {mark}; exit 1' TERM; sleep 600 & wait"
    with pytest.raises(ProgramFailed, match="the lease of its task is over"):
        Programs().run(command, {}, unwanted)
    assert mark.exists()


def test_a_program_that_starts_while_its_command_ends_is_ended(tmp_path: Path) -> None:
    mark = tmp_path / "ended"
    command = f"sleep 600; touch {mark}"
    with Programs() as programs:
        pass
    with pytest.raises(ProgramFailed, match="signal 15"):
        programs.run(command, {})
    assert not mark.exists()


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for name, says in (("bad.json", "is not JSON"), ("deep.json", "is nested too deeply")):
        done = postroom("tasks", "enqueue", "--data", "run", "--agent", "a", "--payload-file", name)
        assert done.code == 2
        assert f"--payload-file {says}" in done.error


def test_removing_an_agent_makes_no_folder(tmp_path: Path) -> None:
    done = postroom("tasks", "agent", "remove", "ada", "--data", "nowhere")
    assert (done.code, "there is no data folder nowhere" in done.error) == (1, True)
    assert not (tmp_path / "nowhere").exists()


# ---- a server that cannot start ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [("--bus-max-bytes", 0), ("--port", "x"), ("--host", "256.1.1.1"), ("taken",)]
)
def test_a_refused_serve_leaves_no_files(tmp_path: Path, options: tuple[object, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if options == ("taken",):
            options = ("--port", taken.getsockname()[1])
        data, audit = tmp_path / "new" / "data", tmp_path / "audit"
        process = start("postroom", "tasks", "serve", "--data", data, "--audit", audit, *options)
        done = finish(process)
    assert done.code in (1, 2)
    assert list(tmp_path.iterdir()) == []
