"""`EngineClient` and `postroom engine --url` against a real server."""

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom import Engine
from postroom.client import (
    EngineClient,
    InvalidMessage,
    KeyReused,
    MessageFailed,
    NotAllowed,
    Overloaded,
    UnknownTask,
    UnknownType,
    Unreachable,
    WrongState,
)
from tests.integration.commandline import Result, isolate, postroom
from tests.integration.engineworkers import working
from tests.integration.harnesses import Harness, serving
from tests.waiting import HANG_GUARD_S, until

UNKNOWN = "0190163d-8694-739b-aea5-966c26f8ad91"


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    with serving(tmp_path_factory.mktemp("engine-client")) as running:
        running.tokens["caller"] = running.agents.add("caller", org="acme")
        running.tokens["boss"] = running.agents.add("boss", role="operator")
        yield running


@pytest.fixture(scope="module")
def worker(harness: Harness) -> Iterator[Engine]:
    with working(harness.data) as engine:
        yield engine


@pytest.fixture
def client(harness: Harness) -> Iterator[EngineClient]:
    with EngineClient(harness.url, harness.tokens["caller"]) as opened:
        yield opened


@pytest.fixture
def boss(harness: Harness) -> Iterator[EngineClient]:
    with EngineClient(harness.url, harness.tokens["boss"]) as opened:
        yield opened


def submit(client: EngineClient, **fields: Any) -> str:
    return client.submit(**{"type": "tool_call", "payload": {}, **fields})


def test_result_waits_for_the_end(client: EngineClient, worker: Engine) -> None:
    message_id = submit(client, payload={"say": "x"}, priority=1)
    assert client.result(message_id, timeout_s=HANG_GUARD_S) == {"said": "x"}
    view = client.get(message_id)
    assert (view.state, view.ended, view.succeeded, view.message["org_id"]) == (
        "COMPLETED",
        True,
        True,
        "acme",
    )
    assert view.ended_at is not None


def test_the_client_shows_budgets(client: EngineClient, worker: Engine) -> None:
    client.result(submit(client, tokens=10), timeout_s=HANG_GUARD_S)
    model = client.tokens()["providers"]["p"]["models"]["small"]
    assert model["used"] + model["reserved"] + model["free"] == model["limit"] == 1_000_000
    assert model["organizations"]["acme"]["used"] >= 5


def test_a_failed_message_has_its_errors(client: EngineClient, worker: Engine) -> None:
    message_id = submit(client, payload={"fails": True}, max_retries=0)
    with pytest.raises(MessageFailed, match="no such thing") as failed:
        client.result(message_id, timeout_s=HANG_GUARD_S)
    assert (failed.value.state, failed.value.error_history[0]["error_type"]) == ("DEAD_LETTER", "ValueError")


def test_a_wait_ends_after_its_timeout(client: EngineClient) -> None:
    message_id = submit(client, delay_s=3600)
    with pytest.raises(TimeoutError):
        client.result(message_id, timeout_s=0.01)
    client.cancel(message_id)
    with pytest.raises(MessageFailed, match="CANCELLED"):
        client.result(message_id)


def test_several_messages_in_one_commit(client: EngineClient) -> None:
    fields = {"type": "tool_call", "payload": {}, "delay_s": 3600}
    ids = client.submit_many([fields, {**fields, "message_id": UNKNOWN}])
    assert ids[1] == UNKNOWN
    assert client.submit_many([]) == []
    assert client.submit_many([{**fields, "message_id": UNKNOWN}]) == [UNKNOWN]
    client.cancel(UNKNOWN)


def test_a_stream_survives_a_lost_connection(client: EngineClient, worker: Engine, tmp_path: Path) -> None:
    go = tmp_path / "go"
    message_id = submit(client, payload={"chunks": 3, "waits_for": str(go), "say": "x"})
    parts = client.stream(message_id)
    first = [next(parts) for _ in range(3)]
    parts.close()  # type: ignore[attr-defined]
    go.touch()
    rest = list(client.stream(message_id, after=first[-1]["id"]))
    assert [part.get("chunk") for part in (*first, *rest)] == [None, {"n": 0}, {"n": 1}, {"n": 2}, None]
    assert (rest[-1]["type"], rest[-1]["result"], rest[-1]["total_chunks"]) == (
        "stream_complete",
        {"said": "x"},
        3,
    )


def test_a_stream_is_opened_again_after_a_restart_of_the_server(tmp_path: Path) -> None:
    with serving(tmp_path) as own, working(own.data):
        token = own.agents.add("caller", org="acme")
        go = tmp_path / "go"
        seen: list[dict[str, Any]] = []
        with EngineClient(own.url, token, retries=50) as client:
            message_id = submit(client, payload={"chunks": 2, "waits_for": str(go)})
            reader = threading.Thread(target=lambda: seen.extend(client.stream(message_id)))
            reader.start()
            until(lambda: len(seen) == 3)
            own.end(signal.SIGKILL)
            own.start()
            go.touch()
            reader.join(HANG_GUARD_S)
        assert [part["type"] for part in seen] == ["acknowledgment", *["stream_chunk"] * 2, "stream_complete"]


def test_errors_are_those_of_the_library(client: EngineClient, boss: EngineClient, harness: Harness) -> None:
    for call in (client.get, client.explain, client.cancel, client.dlq.show):
        with pytest.raises(UnknownTask, match="there is no message"):
            call("0190163d-8694-739b-aea5-966c26f8ad92")
    with pytest.raises(UnknownTask):
        list(client.stream("0190163d-8694-739b-aea5-966c26f8ad92"))
    with pytest.raises(UnknownType, match="no message type"):
        submit(client, type="nothing")
    submit(client, idempotency_key="k", delay_s=3600)
    with pytest.raises(KeyReused, match="different content"):
        submit(client, idempotency_key="k", payload={"other": 1})
    with pytest.raises(NotAllowed):
        client.pause()
    with pytest.raises(NotAllowed):
        submit(client, org_id="umbrella")
    cancelled = submit(client, delay_s=3600)
    client.cancel(cancelled)
    with pytest.raises(WrongState):
        client.cancel(cancelled)
    boss.pause(org_id="acme", kill=True)
    with pytest.raises(Overloaded, match="kill switch") as refused:
        submit(client)
    assert refused.value.retry_after > 0
    boss.resume(org_id="acme")
    with pytest.raises(InvalidMessage, match="by both"):
        boss.dlq.replay([cancelled], org_id="acme")
    with pytest.raises(Unreachable), EngineClient("http://127.0.0.1:1", "x", retries=0) as nobody:
        nobody.status()
    assert "EngineClient" in repr(client)
    assert harness.tokens["caller"] not in repr(client)


def test_dead_letters_are_listed_replayed_and_purged(
    client: EngineClient, boss: EngineClient, worker: Engine
) -> None:
    ids = [submit(boss, org_id="dead", payload={"fails": True}, max_retries=0) for _ in range(3)]
    for message_id in ids:
        with pytest.raises(MessageFailed):
            boss.result(message_id, timeout_s=HANG_GUARD_S)
    assert [letter["message_id"] for letter in boss.dlq.list(org_id="dead")] == ids
    assert boss.dlq.show(ids[0])["failure_reason"] == "ValueError: no such thing"
    assert boss.dlq.replay(org_id="dead", dry_run=True).message_ids == ids
    done = boss.dlq.replay(org_id="dead", limit=2, rate_per_s=1000, priority=3)
    assert (done.replayed, done.refused, done.left, done.message_ids) == (2, 0, 1, ids[:2])
    assert done.reasons == {"beyond the limit of 2": 1}
    for message_id in ids[:2]:
        until(lambda message_id=message_id: boss.get(message_id).attempt == 2)  # type: ignore[misc]
        with pytest.raises(MessageFailed):
            boss.result(message_id, timeout_s=HANG_GUARD_S)
        assert boss.get(message_id).priority == 3
    assert boss.dlq.purge(ids[:1]) == ids[:1]
    assert boss.dlq.purge(org_id="dead") == ids[1:]
    assert all(letter["message_id"] not in ids for letter in client.dlq.list())


@pytest.mark.statement("list-search")
def test_messages_are_listed_by_filters_and_cursor(client: EngineClient, boss: EngineClient) -> None:
    ids = [submit(client, goal_id="atlas", payload={"number": n}, delay_s=3600) for n in range(3)]
    first = client.list(goal_id="atlas", limit=2)
    rest = client.list(goal_id="atlas", limit=2, cursor=first.cursor)
    assert [line.message_id for line in [*first.messages, *rest.messages]] == ids[::-1]
    assert {line.org_id for line in boss.list(text=ids[0]).messages} == {"acme"}
    assert boss.list(text=ids[0], org_id="umbrella").messages == []
    with pytest.raises(NotAllowed):
        client.list(org_id="umbrella")


# ---- the commands ----------------------------------------------------------------------------------


@pytest.fixture
def command(harness: Harness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    isolate(monkeypatch, tmp_path)

    def run(*arguments: object, who: str = "boss") -> Result:
        monkeypatch.setenv("POSTROOM_TOKEN", harness.tokens[who])
        return postroom("engine", *arguments, "--url", harness.url)

    return run


def test_the_commands_work_through_a_server(command: Any, worker: Engine) -> None:
    payload = ("--payload", json.dumps({"say": "x"}))
    waited = command("submit", "--type", "tool_call", *payload, "--wait-s", 30, who="caller")
    assert waited.line["result"] == {"said": "x"}
    held = ("submit", "--type", "tool_call", "--org", "shell", "--payload", "{}", "--delay-s", 3600)
    message_id = command(*held).line["message_id"]
    assert "delay" in command("explain", message_id).line["explanation"]
    assert [one["message_id"] for one in command("list", "--text", message_id).line["messages"]] == [
        message_id
    ]
    assert command("cancel", message_id).code == 0
    assert command("pause", "--org", "shell").code == 0
    assert {"org_id": "shell", "type": ""} in command("status").line["pauses"]
    assert command("resume", "--org", "shell").code == 0
    failing = json.dumps({"fails": True})
    dead = command(
        "submit", "--type", "tool_call", "--org", "shell", "--payload", failing, "--max-retries", 0
    ).line["message_id"]
    until(lambda: command("dlq", "list", "--org", "shell").lines)
    assert command("dlq", "show", dead).line["state"] == "DEAD_LETTER"
    assert command("dlq", "replay", "--org", "shell", "--dry-run").line["message_ids"] == [dead]
    assert command("dlq", "purge", dead).line == {"message_id": dead}
    assert command("dlq", "list", "--org", "shell").lines == []


def test_refusals_of_a_server_give_a_one_line_error(command: Any) -> None:
    refused = command("pause", who="caller")
    assert (refused.code, "only an operator" in refused.error) == (1, True)
    unknown = command("explain", "0190163d-8694-739b-aea5-966c26f8ad92", who="caller")
    assert (unknown.code, "there is no message" in unknown.error) == (1, True)
    typo = command("submit", "--type", "nothing", "--payload", "{}", who="caller")
    assert (typo.code, "no message type" in typo.error) == (2, True)
