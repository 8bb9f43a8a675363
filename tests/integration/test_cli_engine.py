"""`postroom engine` on a data folder, with real worker processes."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest

from postroom import Coordinator, Engine
from postroom.cli.engine.operate import progress_line
from postroom.engine.rules.cells import BOUNCES, Bounce
from postroom.stores.transaction import Transaction
from tests import warmpython
from tests.integration.commandline import Result, isolate, postroom, run_on_terminal
from tests.waiting import HANG_GUARD_S, until

# With this lease no message runs again because its lease ends: only a noticed crash requeues it.
APP = """
import asyncio, os, time
from pathlib import Path
from postroom import Engine, Policy

budgets = {"providers": {"openai": {"models": {"small": {"tokens_per_day": 1000}}}}}
engine = Engine.open("sqlite:///run/queue.db", policy=Policy(lease_s=3600.0, tokens=budgets))
here = Path("run")

@engine.handler("tool_call")
async def run_tool(message, ctx):
    with (here / "started").open("a") as file:
        file.write(f"{message.message_id} {os.getppid()} {os.getpid()}\\n")
    while message.payload.get("waits_for") and not Path(message.payload["waits_for"]).exists():
        await asyncio.sleep(0.01)
    return {"said": message.payload.get("say")}

@engine.handler("own_type")
async def fail(message, ctx):
    raise ValueError("no such thing")
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    isolate(monkeypatch, tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def submit(*options: object, **payload: object) -> str:
    result = postroom(
        "engine", "submit", "--data", "run", "--type", "tool_call", "--org", "acme",
        "--payload", json.dumps(payload), *options,
    )  # fmt: skip
    assert result.code == 0, result.errors
    return str(result.line["message_id"])


def engine(*arguments: object) -> Result:
    return postroom("engine", *arguments, "--data", "run")


def states() -> dict[str, int]:
    found: dict[str, int] = engine("status").line["organizations"].get("acme", {}).get("states", {})
    return found


@contextmanager
def opened() -> Iterator[Engine]:
    with Engine.open("sqlite:///run/queue.db") as store:
        store.register_type("own_type")
        yield store


@contextmanager
def working(*options: object) -> Iterator["subprocess.Popen[bytes]"]:
    """`postroom engine work`, whose workers have reported."""
    command = [sys.executable, "-m", "postroom.cli.main", "engine", "work", "--app", "app:engine"]
    with Path("work.log").open("ab") as errors:
        process = warmpython.popen(
            [*command, "--min-workers", "1", "--max-workers", "1", *map(str, options)],
            stdout=subprocess.PIPE, stderr=errors,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["app"] == "app:engine"
        with opened() as store:
            until(lambda: store.blocking.status().workers)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=HANG_GUARD_S)


def started() -> list[tuple[str, int, int]]:
    """The message, the parent and the process of each attempt so far."""
    path = Path("run/started")
    lines = path.read_text().splitlines() if path.exists() else []
    return [(words[0], int(words[1]), int(words[2])) for words in map(str.split, lines)]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


# ---- tokens ----------------------------------------------------------------------------------------


def test_budgets_are_shown_as_a_table_and_as_json() -> None:
    assert engine("tokens").code == 1, "there is no store yet"
    submit("--tokens", 300, "--model", "small", "--app", "app:engine")
    assert engine("tokens").line == {"providers": {}}, "without the app, nobody knows the budgets yet"
    small = engine("tokens", "--app", "app:engine").line["providers"]["openai"]["models"]["small"]
    figures = {name: small[name] for name in ("limit", "used", "reserved", "free", "borrowed")}
    assert figures == {"limit": 1000, "used": 0, "reserved": 0, "free": 1000, "borrowed": 0}
    table = run_on_terminal("postroom", "engine", "tokens", "--data", "run", "--app", "app:engine")
    assert b"tokens_per_day" in table.raw
    refused = postroom(
        "engine", "submit", "--data", "run", "--type", "tool_call", "--org", "acme", "--payload", "{}",
        "--tokens", "3000", "--app", "app:engine",
    )  # fmt: skip
    assert (refused.code, "would never run: its models give at most 1000" in refused.error) == (2, True)


# ---- messages --------------------------------------------------------------------------------------


@pytest.mark.statement("agent-health-view")
def test_agents_are_shown_with_their_health() -> None:
    async def register(store: Engine) -> None:
        async with Coordinator(store) as coordinator:
            for agent_id, org_id in (("planner", "acme"), ("writer", "bolt")):
                await coordinator.register(agent_id, org_id)

    with opened() as store:
        store.blocking.wait(register(store))
    lines = engine("agents").lines
    assert [(line["org_id"], line["agent_id"]) for line in lines] == [("acme", "planner"), ("bolt", "writer")]
    assert lines[0]["health"] in ("registered", "alive")
    assert [line["agent_id"] for line in engine("agents", "--org", "bolt").lines] == ["writer"]
    assert engine("agents", "--org", "none").lines == []


def test_bounces_are_shown_and_removed() -> None:
    def bounce(transaction: Transaction) -> None:
        kept = Bounce("m1", "planner", "user", "ada", {"result": 1}, "too late", transaction.wall_us)
        BOUNCES.put(transaction, kept, "acme", 7)

    with opened() as store:
        store.store.write(bounce)
    [line] = engine("bounces", "--by", "user:ada").lines
    assert (line["key"], line["message_id"], line["answer"]) == ("acme/7", "m1", {"result": 1})
    assert engine("bounces", "--org", "bolt").lines == []
    assert b"user:ada" in run_on_terminal("postroom", "engine", "bounces", "--data", "run").raw
    assert engine("bounces", "--done", "acme/7").lines == [{"key": "acme/7"}]
    assert engine("bounces").lines == []
    wrong = postroom("engine", "bounces", "--data", "run", "--by", "ada")
    assert (wrong.code, "such as user:ada" in wrong.error) == (2, True)


def test_a_message_is_submitted_explained_and_cancelled() -> None:
    message_id = submit("--priority", 1, say="x")
    assert "no worker is running" in engine("explain", message_id).line["explanation"]
    status = engine("status").line
    assert status["organizations"]["acme"]["lanes"] == [0, 1, 0, 0]
    assert engine("cancel", message_id).line == {"message_id": message_id, "action": "cancel"}
    again = engine("cancel", message_id)
    assert (again.code, again.error.count("CANCELLED")) == (1, 1)


def test_the_same_key_gives_the_same_message() -> None:
    assert submit("--key", "k", say=1) == submit("--key", "k", say=1)
    other = postroom(
        "engine", "submit", "--data", "run", "--type", "tool_call", "--org", "acme",
        "--payload", '{"say": 2}', "--key", "k",
    )  # fmt: skip
    assert (other.code, "different content" in other.error) == (2, True)


def test_options_of_a_submit_reach_the_message() -> None:
    message_id = submit("--delay-s", 60, "--ordering-key", "o", "--agent", "a1", "--max-retries", 7)
    with opened() as store:
        info = store.blocking.get(message_id)
    assert info.state == "SCHEDULED"
    assert info.message is not None
    assert (info.message.ordering_key, info.message.agent_id, info.message.max_retries) == ("o", "a1", 7)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["submit", "--type", "tool_call", "--org", "acme", "--payload", "{}"], "say where the messages are"),
        (["submit", "--data", "run", "--type", "tool_call", "--payload", "{}"], "need --org"),
        (["submit", "--data", "run", "--type", "x", "--org", "a", "--payload", "{}"], "no message type 'x'"),
        (["submit", "--data", "run", "--type", "tool_call", "--org", "a", "--payload", "[]"], "JSON object"),
        (["submit", "--data", "run", "--type", "tool_call", "--org", "a", "--payload", "{"], "is not JSON"),
        (["status", "--data", "run", "--url", "http://x"], "two places"),
        (["status", "--data", "sqlite:///run/queue.db"], "it must be a data folder, or an address"),
        (["status", "--url", "http://127.0.0.1:1"], "--url needs a token"),
        (["pause", "--data", "run", "--kill", "--type", "tool_call"], "not for a type"),
        (["dlq", "replay", "--data", "run"], "choose them"),
        (["dlq", "purge", "--data", "run", "--all", "some-id"], "choose them"),
        (["load", "--mix", "1/2"], "10/40/40/10"),
        (["work", "--app", "nothing"], "module:engine"),
        (["work", "--app", "nothing:engine"], "cannot be loaded"),
        (["work", "--app", "broken:engine"], "broken:engine cannot be loaded: ZeroDivisionError: division"),
        (["work", "--app", "app:here"], "is not an Engine"),
        (["work", "--app", "app:engine", "--min-workers", "3", "--max-workers", "2"], "is below"),
    ],
)
def test_a_wrong_call_gives_a_one_line_error(arguments: list[str], error: str) -> None:
    Path("broken.py").write_text("1 / 0")
    result = postroom("engine", *arguments)
    assert result.code == 2, result.errors
    assert error in result.errors.splitlines()[-1]


def test_a_folder_without_a_store_is_named() -> None:
    result = postroom("engine", "status", "--data", "nowhere")
    assert (result.code, "there are no messages in nowhere" in result.error) == (1, True)
    submit()
    unknown = engine("explain", "0190163d-8694-739b-aea5-966c26f8ad91")
    assert (unknown.code, "there is no message" in unknown.error) == (1, True)


def test_an_app_brings_its_types() -> None:
    result = postroom(
        "engine", "submit", "--data", "run", "--app", "app:engine", "--type", "own_type", "--org", "acme",
        "--payload", "{}",
    )  # fmt: skip
    assert result.code == 0, result.errors
    assert states() == {"QUEUED": 1}


def test_an_app_names_its_own_store() -> None:
    Path("shop.py").write_text(APP)
    result = postroom(
        "engine", "submit", "--app", "shop:engine", "--type", "own_type", "--org", "acme", "--payload", "{}"
    )
    assert result.code == 0, result.errors
    assert engine("explain", result.line["message_id"]).code == 0


def test_a_pause_holds_messages_back() -> None:
    message_id = submit()
    assert engine("pause", "--org", "acme").line["action"] == "pause"
    assert "is paused" in engine("explain", message_id).line["explanation"]
    assert engine("status").line["pauses"] == [{"org_id": "acme", "type": ""}]
    assert engine("resume", "--org", "acme").line["pauses"] == []
    assert engine("status").line["pauses"] == []


@pytest.mark.statement("list-search")
def test_messages_are_listed_by_filters_and_cursor() -> None:
    with opened() as store:
        fields: Any = {"type": "own_type", "org_id": "acme", "payload": {"to": "Oslo"}}
        ids = [store.blocking.submit(**fields, goal_id=f"g{n % 2}").message_id for n in range(3)]
    first = engine("list", "--org", "acme", "--text", "oslo", "--limit", 2).line
    rest = engine("list", "--org", "acme", "--text", "oslo", "--cursor", first["cursor"]).line
    assert [one["message_id"] for one in [*first["messages"], *rest["messages"]]] == ids[::-1]
    assert [one["message_id"] for one in engine("list", "--goal", "g1").line["messages"]] == [ids[1]]
    wrong = engine("list", "--state", "WAITING")
    assert (wrong.code, "WAITING" in wrong.error) == (2, True)


def test_resume_names_the_remaining_pauses() -> None:
    submit()
    engine("pause", "--org", "acme", "--type", "tool_call")
    engine("pause", "--org", "zen")
    left = [{"org_id": "acme", "type": "tool_call"}]
    assert engine("resume", "--org", "acme").line["pauses"] == left
    assert engine("resume", "--org", "acme", "--type", "tool_call").line["pauses"] == []


@pytest.mark.statement("own-types")
def test_an_unknown_type_names_the_option_for_apps() -> None:
    result = postroom(
        "engine", "submit", "--data", "run", "--type", "crunch", "--org", "acme", "--payload", "{}"
    )
    assert (result.code, "--app MODULE:ENGINE" in result.errors) == (2, True)


def test_the_kill_switch_refuses_submits() -> None:
    submit()
    assert engine("pause", "--kill").line["kill"] is True
    refused = postroom(
        "engine", "submit", "--data", "run", "--type", "tool_call", "--org", "acme", "--payload", "{}"
    )
    assert (refused.code, "kill switch" in refused.error) == (1, True)


# ---- on a terminal ---------------------------------------------------------------------------------


def test_a_terminal_gets_tables_and_sentences() -> None:
    message_id = submit("--priority", 0)
    shown = run_on_terminal("postroom", "engine", "status", "--data", "run").out
    assert "organization" in shown
    assert "delayed" in shown
    assert "0 workers" in shown
    assert "is QUEUED" in run_on_terminal("postroom", "engine", "explain", message_id, "--data", "run").out
    assert "no such dead letter" in run_on_terminal("postroom", "engine", "dlq", "list", "--data", "run").out


def test_watching_prints_a_line_for_each_look_until_a_signal() -> None:
    submit()
    command = [sys.executable, "-m", "postroom.cli.main", "engine", "status", "--data", "run", "--watch"]
    process = warmpython.popen([*command, "--every-s", "0.01"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(3):
        assert json.loads(process.stdout.readline())["depth"] == 1
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=HANG_GUARD_S)
    assert process.returncode == 0


# ---- workers ---------------------------------------------------------------------------------------


def test_workers_run_messages_and_a_submit_can_wait() -> None:
    with working("--min-workers", 2, "--max-workers", 2):
        result = postroom(
            "engine", "submit", "--data", "run", "--type", "tool_call", "--org", "acme",
            "--payload", '{"say": "hello"}', "--wait-s", 60,
        )  # fmt: skip
    assert (result.code, result.line["result"]) == (0, {"said": "hello"})
    assert engine("status").line["workers"] == {}


def test_a_submit_without_a_result_in_time_fails() -> None:
    result = postroom(
        "engine", "submit", "--data", "run", "--type", "tool_call", "--org", "acme", "--payload", "{}",
        "--wait-s", "0.01",
    )  # fmt: skip
    assert (result.code, "has not ended within 0.01 s" in result.errors) == (1, True)
    assert result.line["message_id"] in result.errors


@pytest.mark.statement("workers-replaced", "recovery-time-lease")
def test_a_killed_worker_is_replaced_and_its_messages_run_again_at_once() -> None:
    with working() as supervisor:
        message_id = submit(waits_for="go")
        until(started)
        [(_, parent, worker)] = started()
        assert parent == supervisor.pid
        os.kill(worker, signal.SIGKILL)
        until(lambda: len(started()) == 2)
        assert started()[1][0] == message_id
        assert worker not in started()[1][1:]
        Path("go").touch()
        until(lambda: states() == {"COMPLETED": 1})
    assert "died (SIGKILL)" in Path("work.log").read_text()


def test_sigterm_lets_running_messages_finish_and_claims_no_more() -> None:
    with working() as supervisor:
        submit(waits_for="go")
        until(started)
        supervisor.send_signal(signal.SIGTERM)
        with opened() as store:  # a stopping worker takes nothing new
            later = submit(say="later")
            Path("go").touch()
            said, _ = supervisor.communicate(timeout=HANG_GUARD_S)
            assert store.blocking.get(later).state == "QUEUED"
    assert supervisor.returncode == 0
    assert json.loads(said) == {"action": "drain", "in_flight": 1, "at_most_s": 30.0}
    assert states() == {"COMPLETED": 1, "QUEUED": 1}


def test_a_worker_ends_when_its_supervisor_is_killed() -> None:
    with working() as supervisor:
        submit(say="x")
        until(started)
        [(_, _, worker)] = started()
        supervisor.kill()
        supervisor.wait(HANG_GUARD_S)
        until(lambda: not is_alive(worker))


# ---- dead letters ----------------------------------------------------------------------------------


@pytest.fixture
def dead() -> Iterator[list[str]]:
    """Two dead letters of acme, and one of umbrella."""
    ids: list[str] = []
    with opened() as store:
        for org_id in ("acme", "acme", "umbrella"):
            fields: dict[str, Any] = {"type": "own_type", "org_id": org_id, "payload": {}, "max_retries": 0}
            ids.append(store.blocking.submit(**fields).message_id)
        with working():
            until(lambda: len(store.blocking.dlq.list()) == 3)
        yield ids


def ids_of(result: Result) -> list[str]:
    assert result.code == 0, result.errors
    return [line["message_id"] for line in result.lines]


def test_dead_letters_are_listed_replayed_and_purged(dead: list[str]) -> None:
    first, second, third = dead
    assert ids_of(engine("dlq", "list")) == dead
    assert ids_of(engine("dlq", "list", "--org", "umbrella")) == [third]
    assert ids_of(engine("dlq", "list", "--error-type", "ValueError", "--limit", 2)) == [first, second]
    assert ids_of(engine("dlq", "list", "--until", "2020-01-01T00:00:00Z")) == []
    shown = engine("dlq", "show", first).line
    assert shown["failure_reason"] == "ValueError: no such thing"
    assert engine("dlq", "replay", "--org", "acme", "--dry-run").line["message_ids"] == [first, second]
    assert ids_of(engine("dlq", "list")) == dead
    assert engine("dlq", "replay", first, "--priority", 0).line["message_ids"] == [first]
    assert engine("status").line["organizations"]["acme"]["lanes"] == [1, 0, 0, 0]
    done = engine("dlq", "replay", "--all", "--org", "acme", "--rate", 1000).line
    assert done == {"replayed": 1, "refused": 0, "left": 0, "reasons": {}, "message_ids": [second]}
    assert ids_of(engine("dlq", "purge", "--org", "umbrella", "--dry-run")) == [third]
    assert ids_of(engine("dlq", "purge", "--org", "umbrella")) == [third]
    assert ids_of(engine("dlq", "list")) == []
    assert engine("dlq", "show", third).code == 1
    wrong = engine("dlq", "show", first)
    assert (wrong.code, "it is QUEUED" in wrong.error) == (1, True)


def test_dead_letters_fit_into_80_columns() -> None:
    with opened() as store:

        @store.handler("own_type")
        async def fail(_message: Any, _ctx: Any) -> None:
            raise ValueError("a reason that is much longer than the rest of a line of a small terminal")

        store.blocking.submit(type="own_type", org_id="acme", payload={}, max_retries=0)
        thread = threading.Thread(target=store.blocking.run)
        thread.start()
        until(store.blocking.dlq.list)
        store.blocking.stop()
        thread.join(HANG_GUARD_S)
    shown = run_on_terminal("postroom", "engine", "dlq", "list", "--data", "run", env={"COLUMNS": "80"})
    lines = click.unstyle(shown.raw.decode()).splitlines()
    assert [len(line) for line in lines if len(line) > 80] == []
    assert "ValueError: a reason" in lines[1]


# ---- load ------------------------------------------------------------------------------------------


@pytest.mark.statement("load-test")
def test_a_load_prints_the_latencies_of_each_priority() -> None:
    report = postroom("engine", "load", "--rate", 50, "--orgs", 2, "--duration-s", 0.4).line
    assert (report["submitted"], report["unfinished"]) == (20, 0)
    targets = {found["priority"]: found["target_ms"] for found in report["classes"]}
    assert targets == {"P0": 10.0, "P1": 50.0, "P2": 100.0, "P3": 500.0}
    assert sum(found["count"] for found in report["classes"]) == 20


def test_the_live_view_shows_the_progress() -> None:
    states = {"COMPLETED": 2, "DEAD_LETTER": 1, "QUEUED": 1}
    facts = {"organizations": {"acme": {"states": states}}}
    assert progress_line(facts, 2.5) == f"[{'#' * 22}{'.' * 8}]  75%  3 of 4 ended  2.5 a second"
    assert progress_line({"organizations": {}}, None) == f"[{'#' * 30}] 100%  0 of 0 ended"
