"""`postroom audit`, and the stream that a harness ships."""

import http.client
import json
import os
import signal
import time
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec.structs import replace

from postroom import Bus, Queue, Tasks
from postroom.audit import reader
from postroom.audit.chain import Chain, read_chain
from postroom.audit.cipher import Cipher
from postroom.audit.segment_writer import SegmentSink
from postroom.cli.audit.audit import CONTRACTS
from postroom.contracts.audit import Audit
from postroom.core.formats.events import SCHEMA, AuditEvent, Contract, from_line
from postroom.core.times import utc_text
from postroom.errors import InvalidMessage, UnknownMessage
from tests.integration.commandline import (
    Result,
    finish,
    isolate,
    postroom,
    run_on_terminal,
    start,
)
from tests.integration.harnesses import serving
from tests.waiting import HANG_GUARD_S, until

CANARY = "sk-canary-7f3a9bd2c41e8f6a5b0c9d8e7f6a5b4c"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


def work(data: Path) -> list[str]:
    """A task, its child task, and a task that becomes a dead letter."""
    with Tasks.open(f"sqlite:///{data}/queue.db") as tasks:
        first = tasks.enqueue(agent="ada", payload={"mail": "bob@example.com"}, type="issue")
        [task] = tasks.claim(agent="ada")
        second = tasks.enqueue(agent="bob", payload=1, parent=first)
        tasks.complete(task.task_id, task.lease, "ok")
        third = tasks.enqueue(agent="ada", payload=2, max_retries=0)
        [task] = tasks.claim(agent="ada")
        tasks.fail(task.task_id, task.lease, "no route to host", error_type="OSError")
    return [first, second, third]


@pytest.fixture(name="shipped")
def one_stream(tmp_path: Path) -> list[str]:
    (tmp_path / "run").mkdir()
    ids = work(tmp_path / "run")
    done = postroom("audit", "ship", "--data", "run", "--to", "audit", "--once")
    assert (done.code, done.errors) == (0, "")
    assert done.line["shipped"] > 8
    return ids


def test_ship_once_ships_everything_and_then_nothing(shipped: list[str]) -> None:
    assert len(shipped) == 3
    assert postroom("audit", "ship", "--data", "run", "--to", "audit", "--once").line == {"shipped": 0}


def test_the_status_of_tasks_shows_the_number_of_waiting_events(shipped: list[str]) -> None:
    work(Path("run"))
    waiting = postroom("tasks", "status", "--data", "run").line["events_waiting"]
    assert waiting > len(shipped)
    shown = run_on_terminal("postroom", "tasks", "status", "--data", "run")
    assert f"{waiting} events wait for the audit stream".encode() in shown.raw


def test_tail_shows_the_last(shipped: list[str]) -> None:
    lines = postroom("audit", "tail", "audit", "-n", 2).lines
    assert [line["kind"] for line in lines] == ["execution_failed", "dead_letter"]
    assert {line["message_id"] for line in lines} == {shipped[2]}
    assert postroom("audit", "tail", "audit", "-n", 0).lines == []


def test_query_filters_by_the_fields_of_an_event(shipped: list[str]) -> None:
    dead = postroom("audit", "query", "audit", "--kind", "dead_letter").line
    assert (dead["message_id"], dead["error_type"]) == (shipped[2], "OSError")
    mine = postroom("audit", "query", "audit", "--message", shipped[1]).lines
    assert [line["kind"] for line in mine] == ["created", "enqueued"]
    assert postroom("audit", "query", "audit", "--agent", "bob", "--limit", 1).line["kind"] == "created"
    assert postroom("audit", "query", "audit", "--since", "2999-01-01T00:00:00Z").lines == []
    assert postroom("audit", "query", "audit", "--until", "1999-01-01T00:00:00Z").lines == []
    wrong = postroom("audit", "query", "audit", "--since", "yesterday")
    assert wrong.code == 2
    assert "RFC 3339" in wrong.error


@pytest.mark.statement("parent", "tracing-correlation")
def test_trace_shows_a_request_through_all_its_messages(shipped: list[str]) -> None:
    for message in shipped[:2]:  # from either end
        spans = postroom("audit", "trace", "audit", message).lines
        assert [(span["message_id"], span["depth"]) for span in spans] == [(shipped[0], 0), (shipped[1], 1)]
        assert [span["outcome"] for span in spans] == ["completed", "open"]
    shown = run_on_terminal("postroom", "audit", "trace", "audit", shipped[0])
    assert f"  {shipped[1]}" in shown.out
    unknown = postroom("audit", "trace", "audit", "nobody")
    assert unknown.code == 1
    assert unknown.error.endswith("/audit names 'nobody'")


def test_trace_shows_errors_and_when_the_next_try_is_due(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with Tasks.open(f"sqlite:///{tmp_path}/run/queue.db") as tasks:
        message = tasks.enqueue(agent="ada", payload=0, max_retries=3)
        [task] = tasks.claim(agent="ada")
        tasks.fail(task.task_id, task.lease, "no route to host", error_type="OSError")
        due_us = tasks.store.events()[-1].ts_us + 1_000_000
    postroom("audit", "ship", "--data", "run", "--to", "audit", "--once")
    [span] = postroom("audit", "trace", "audit", message).lines
    assert (span["due_us"], span["failures"][0]["error_type"]) == (due_us, "OSError")
    shown = run_on_terminal("postroom", "audit", "trace", "audit", message).out
    assert "OSError: no route to host" in shown
    assert utc_text(due_us * 1000) in shown


def test_tail_is_in_the_order_of_time_across_sources(tmp_path: Path) -> None:
    for name, times in (("first", (10, 40)), ("second", (20, 30, 50))):
        (tmp_path / name).mkdir()
        lines = (json.dumps({"kind": "created", "ts_us": ts, "queue": name}) for ts in times)
        (tmp_path / name / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    postroom("audit", "ship", "--mail", "first", "--mail", "second", "--to", "audit", "--once")
    assert [line["ts_us"] for line in postroom("audit", "tail", "audit").lines] == [10, 20, 30, 40, 50]
    assert [line["ts_us"] for line in postroom("audit", "tail", "audit", "-n", "2").lines] == [40, 50]


def test_a_deep_trace_stays_readable(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with Tasks.open(f"sqlite:///{tmp_path}/run/queue.db") as tasks:
        ids = [tasks.enqueue(agent="ada", payload=0)]
        for _ in range(12):
            ids.append(tasks.enqueue(agent="ada", payload=0, parent=ids[-1]))
    postroom("audit", "ship", "--data", "run", "--to", "audit", "--once")
    shown = run_on_terminal("postroom", "audit", "trace", "audit", ids[5])
    assert "  " * 10 + ids[10] in shown.out
    assert "  " * 10 + f"[12] {ids[12]}" in shown.out


def test_a_trace_looks_at_the_folder_once(
    shipped: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any number of generations, and no line is read twice."""
    looks: list[Path] = []
    lines: list[bytes] = []

    def counted_chain(folder: Path) -> Chain:
        looks.append(folder)
        return read_chain(folder)

    def counted_line(line: bytes) -> AuditEvent:
        lines.append(line)
        return from_line(line)

    monkeypatch.setattr(reader, "read_chain", counted_chain)
    monkeypatch.setattr(reader, "from_line", counted_line)
    spans = Audit(tmp_path / "audit").trace(shipped[1])
    assert [span.message_id for span in spans] == shipped[:2]
    assert len(looks) == 1
    assert len(lines) == sum(len(span.events) for span in spans)


def test_verify_names_changed_files(shipped: list[str], tmp_path: Path) -> None:
    clean = postroom("audit", "verify", "audit")
    assert (clean.code, clean.line["segments"]) == (0, 1)
    assert postroom("audit", "verify", "audit", "--head", clean.line["head"]).code == 0
    [segment] = (tmp_path / "audit").glob("date=*/hour=*/*.jsonl")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.chmod(0o600)
    segment.write_bytes(data)
    changed = postroom("audit", "verify", "audit")
    assert changed.code == 1
    assert segment.name in changed.line["file"]


def test_retention_leaves_the_stream_verified(shipped: list[str], tmp_path: Path) -> None:
    removed = postroom("audit", "retain", "audit", "--keep-days", 0).line["removed"]
    assert len(removed) == 1
    assert not list((tmp_path / "audit").glob("date=*/hour=*/*.jsonl"))
    assert postroom("audit", "verify", "audit").code == 0
    assert postroom("audit", "ship", "--data", "run", "--to", "audit", "--once").line == {"shipped": 0}


def test_retain_prints_why_it_removed_nothing(shipped: list[str]) -> None:
    kept = postroom("audit", "retain", "audit", "--keep-days", 1).line
    assert kept["removed"] == []
    assert "was sealed at" in kept["why"]
    assert shipped


def test_a_folder_without_a_stream_is_not_clean(tmp_path: Path) -> None:
    (tmp_path / "wrong").mkdir()
    done = postroom("audit", "verify", "wrong")
    assert done.code == 1
    assert done.error.endswith("wrong holds no audit stream")
    Bus(tmp_path / "bus.yaml").append(type="note", project_id="p", body="")
    postroom("audit", "ship", "--bus", "bus.yaml", "--to", "full", "--once")
    SegmentSink(tmp_path / "new").close()
    assert postroom("audit", "verify", "new").line["segments"] == 0
    assert postroom("audit", "verify", "full").line["segments"] == 1


def test_an_undecryptable_payload_does_not_stop_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    for file in ("lost", "keys"):
        postroom("audit", "key", file, file)
    monkeypatch.setenv("POSTROOM_AUDIT_KEY_FILE", "lost")
    [first, *_] = work(tmp_path / "run")
    postroom("audit", "ship", "--data", "run", "--to", "audit", "--once")
    monkeypatch.setenv("POSTROOM_AUDIT_KEY_FILE", "keys")
    work(tmp_path / "run")
    postroom("audit", "ship", "--data", "run", "--to", "audit", "--once")
    for arguments in (("query", "audit"), ("tail", "audit", "-n", 100), ("trace", "audit", first)):
        done = postroom("audit", *arguments, "--key-file", "keys")
        assert done.code == 0
        [warning] = done.errors.splitlines()
        assert "needs the key 'lost'" in warning
    shown = [line["payload"] for line in postroom("audit", "query", "audit", "--kind", "created").lines]
    assert all(payload.startswith("enc:1:lost:") for payload in shown[:3])
    assert json.loads(shown[3]) == {"mail": "bob@example.com"}


def test_a_body_that_only_looks_encrypted_is_shown(tmp_path: Path) -> None:
    base = AuditEvent(
        event_id="s#1", seq=1, ts_us=1, kind="created", contract="bus", source="s", schema=SCHEMA
    )
    bodies = ["enc:1:", "enc:1:a:b", "enc:1:a:c", "enc:1:" + "x" * 5_000, "plain"]
    with SegmentSink(tmp_path / "audit") as sink:
        sink.write([replace(base, payload=body) for body in bodies])
    troubles: list[str] = []
    audit = Audit(tmp_path / "audit", cipher=Cipher({"k": b"k" * 32}), on_trouble=troubles.append)
    assert [event.payload for event in audit.query()] == bodies
    assert len(troubles) == 2
    assert all(len(sentence) < 200 for sentence in troubles)


def test_encrypted_payloads_are_whole_with_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    assert postroom("audit", "key", "keys", "2026-11").code == 0
    monkeypatch.setenv("POSTROOM_AUDIT_KEY_FILE", "keys")
    [first, *_] = work(tmp_path / "run")
    postroom("audit", "ship", "--data", "run", "--to", "audit", "--once")
    assert not any(b"bob@example.com" in path.read_bytes() for path in files_of(tmp_path / "audit"))
    monkeypatch.delenv("POSTROOM_AUDIT_KEY_FILE")
    concealed = postroom("audit", "query", "audit", "--message", first, "--kind", "created").line
    assert concealed["payload"].startswith("enc:1:2026-11:")
    shown = postroom("audit", "query", "audit", "--message", first, "--kind", "created", "--key-file", "keys")
    assert json.loads(shown.line["payload"]) == {"mail": "bob@example.com"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("ship", "--to", "audit"), "say what to ship"),
        (("ship", "--data", "nothing", "--to", "audit"), "there are no tasks in nothing"),
        (("verify",), "POSTROOM_AUDIT"),
        (("verify", "nowhere"), "nowhere is not a folder"),
        (("tail", "nowhere"), "nowhere is not a folder"),
        (("tail", "a", "-n", "99999999999999999999"), "is not a number from"),
        (("query", "a", "--limit", "99999999999999999999"), "is not a number from"),
        (("retain", "a", "--keep-days", "1000000"), "is not a number from"),
        (("retain", "a", "--keep-days", "nan"), "is not a number of days"),
        (("query", "a", "--kind", "nope"), "there is no kind 'nope'; the kinds are created, "),
        (("query", "a", "--contract", "nope"), "'nope' is not one of 'bus', 'queue'"),
        (
            ("ship", "--bus", "nothing", "--to", "s3://bucket/audit"),
            "s3://bucket/audit is an address, and not",
        ),
        (
            ("ship", "--bus", "nothing", "--to", "file:///tmp/audit"),
            "file:///tmp/audit is an address, and not",
        ),
        (("tail", "s3://bucket/audit"), "s3://bucket/audit is an address, and not a path on this machine"),
        (("trace",), "say which message to trace"),
        (("trace", "a"), "say which message to trace"),
        (("trace", "a", ""), "the id of the message is empty"),
        (("trace", "", "m"), "the path of the folder is empty"),
        (("ship", "--bus", "nothing", "--to", "a"), "there is no bus at nothing"),
        (("ship", "--queue", "nothing", "--to", "a"), "there is no queue at nothing"),
        (("ship", "--mail", "nothing", "--to", "a"), "there is no mail server's data folder at nothing"),
    ],
)
def test_a_wrong_call_gives_a_one_line_error(arguments: tuple[str, ...], says: str) -> None:
    done = postroom("audit", *arguments)
    assert done.code == (2 if "a" in arguments and "--to" not in arguments else done.code)
    assert done.code in (1, 2)
    assert says in done.error


def test_a_stream_at_an_address_is_refused_and_no_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Bus("bus.yaml").append(type="note", project_id="p")
    before = sorted(tmp_path.iterdir())
    for address in ("s3://bucket/audit", f"file://{tmp_path}/audit"):
        ship = ("audit", "ship", "--bus", "bus.yaml", "--once")
        done = postroom(*ship, "--to", address)
        assert (done.code, done.out) == (2, "")
        assert f"{address} is an address" in done.error
        monkeypatch.setenv("POSTROOM_AUDIT", address)
        done = postroom(*ship)
        assert (done.code, done.error) == (2, f"postroom: POSTROOM_AUDIT must be a path, not '{address}'")
        monkeypatch.delenv("POSTROOM_AUDIT")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "words", [("tail",), ("query",), ("trace", "m-1"), ("verify",), ("retain", "--keep-days", "1")]
)
def test_a_folder_without_a_stream_fails(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "letter.txt").touch()
    done = postroom("audit", words[0], "wrong", *words[1:])
    assert (done.code, done.out) == (1, "")
    assert done.error == f"postroom: {tmp_path}/wrong holds no audit stream"


def test_a_file_that_is_not_a_bus_is_not_shipped(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# A project\n")
    done = postroom("audit", "ship", "--bus", "README.md", "--to", "audit", "--once")
    assert (done.code, done.out) == (1, "")
    assert "README.md is not a bus file" in done.error
    assert not (tmp_path / "audit").exists()


def test_the_command_knows_every_contract() -> None:
    assert get_args(Contract) == CONTRACTS


def test_a_second_shipper_of_a_folder_is_refused(shipped: list[str]) -> None:
    first = start("postroom", "audit", "ship", "--data", "run", "--to", "audit")
    assert first.stdout is not None
    first.stdout.readline()
    second = finish(start("postroom", "audit", "ship", "--data", "run", "--to", "audit"))
    first.send_signal(signal.SIGTERM)
    assert finish(first).code == 0
    assert second.code == 1
    assert len(second.errors.splitlines()) == 1
    assert shipped


def test_a_shipper_follows_and_ends_at_a_signal_with_everything_sealed(tmp_path: Path) -> None:
    bus, queue = Bus(tmp_path / "bus.yaml"), Queue(tmp_path / "queue")
    bus.append(type="note", project_id="p", body="one")
    queue.register("ada")
    shipper = start("postroom", "audit", "ship", "--bus", "bus.yaml", "--queue", "queue", "--to", "audit")
    assert shipper.stdout is not None
    shipper.stdout.readline()
    tail = start("postroom", "audit", "tail", "audit", "--follow", "-n", 0)
    queue.send("ask", "hello", sender="ada")
    bus.append(type="note", project_id="p", body="two")
    until(lambda: len(list(Audit(tmp_path / "audit").query())) == 3)
    assert tail.stdout is not None
    assert json.loads(tail.stdout.readline())["contract"] in ("bus", "queue")
    tail.send_signal(signal.SIGTERM)
    ended = finish(tail)
    assert (ended.code, ended.errors) == (0, "")  # a follower ends only by a signal
    shipper.send_signal(signal.SIGTERM)
    assert finish(shipper).code == 0
    assert Audit(tmp_path / "audit").summary()["events"] == 3


# ---- beside a harness ----------------------------------------------------------------------------------


def test_a_harness_ships_its_events_and_a_killed_shipper_is_replaced(tmp_path: Path) -> None:
    with serving(tmp_path, "--audit", tmp_path / "audit") as harness, harness.tasks() as tasks:
        tasks.enqueue(agent="a", payload=1)
        until(lambda: event_count(tmp_path / "audit") > 0)
        assert harness.process is not None
        os.kill(_child_of(harness.process.pid), signal.SIGKILL)
        tasks.enqueue(agent="a", payload=2)
        with harness.client("a") as client:
            client.work(lambda _: None, until_empty=True)
        newest = tasks.store.newest_event()
        until(lambda: event_count(tmp_path / "audit") >= newest)
        tasks.enqueue(agent="a", payload=3)
        assert harness.end(signal.SIGTERM) == 0
        newest = tasks.store.newest_event()
    audit = Audit(tmp_path / "audit")
    assert [event.seq for event in audit.query()] == list(range(1, newest + 1))
    assert audit.verify() == []
    assert audit.summary()["events"] == newest  # all events are sealed


def event_count(folder: Path) -> int:
    """How many events the stream holds now."""
    return len(list(Audit(folder).query())) if folder.is_dir() else 0


def _child_of(parent: int) -> int:
    deadline = time.monotonic() + HANG_GUARD_S
    while time.monotonic() < deadline:
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent:
                return int(path.parent.name)
    raise AssertionError("it has no child")


# ---- a secret --------------------------------------------------------------------------------------------


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_planted_secret_is_in_no_sink_log_or_metric(tmp_path: Path) -> None:
    """The secret is in a payload, a result, an error, a key and a bus message."""
    (tmp_path / "run").mkdir()
    Bus(tmp_path / "bus.yaml").append(type="note", project_id="p", body=f"the key is {CANARY}")
    said: list[Result] = []
    with serving(tmp_path, "--audit", tmp_path / "audit") as harness, harness.tasks() as tasks:
        token = harness.agents.add("boss", role="operator")
        payload: dict[str, Any] = {"api_key": CANARY, "text": f"use {CANARY}, please", "list": [CANARY]}
        tasks.enqueue(agent="a", payload=payload, idempotency_key=CANARY, max_retries=0)
        tasks.enqueue(agent="a", payload=payload, idempotency_key=CANARY)
        [task] = tasks.claim(agent="a")
        tasks.fail(task.task_id, task.lease, f"401 for {CANARY}")
        tasks.enqueue(agent="a", payload=payload)
        [task] = tasks.claim(agent="a")
        tasks.complete(task.task_id, task.lease, {"answer": CANARY})
        newest = tasks.store.newest_event()
        until(lambda: event_count(tmp_path / "audit") >= newest)
        metrics = metrics_of(harness.url, token)
        assert harness.end(signal.SIGTERM) == 0
    said.append(postroom("audit", "ship", "--bus", "bus.yaml", "--to", "audit2", "--once"))
    said += [postroom("audit", "query", folder) for folder in ("audit", "audit2")]
    said.append(postroom("audit", "verify", "audit"))
    log = (tmp_path / "harness.log").read_text()
    written = [*files_of(tmp_path / "audit"), *files_of(tmp_path / "audit2")]
    assert len(written) > 6
    assert "\npostroom_events_waiting " in metrics
    for text in [log, metrics, *(f"{done.out}{done.errors}" for done in said)]:
        assert CANARY not in text
        assert CANARY[10:30] not in text
    assert not [path for path in written if CANARY.encode() in path.read_bytes()]
    assert any("401" in event.error for event in Audit(tmp_path / "audit").query(kind="execution_failed"))


def metrics_of(url: str, token: str) -> str:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=HANG_GUARD_S)
    connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
    text = connection.getresponse().read().decode()
    connection.close()
    return text


# ---- the contract itself -----------------------------------------------------------------------------------


def test_an_audit_of_nothing_and_of_unknown_fields(tmp_path: Path, shipped: list[str]) -> None:
    with pytest.raises(InvalidMessage, match="not a folder"):
        Audit(tmp_path / "nowhere")
    audit = Audit(tmp_path / "audit")
    with pytest.raises(InvalidMessage, match="no field 'colour'"):
        audit.query(colour="red")
    with pytest.raises(UnknownMessage, match="names 'nobody'"):
        audit.trace("nobody")
    assert [event.kind for event in audit.tail(1)] == ["dead_letter"]
    followed = audit.follow(1)
    assert len(next(followed)) == 1
    assert next(followed) == []
    assert shipped
