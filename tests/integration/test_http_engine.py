"""The global queue over real HTTP: messages, streams, dead letters and permissions."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw
from prometheus_client.parser import text_string_to_metric_families

from postroom import Engine
from postroom.calls.submit import CreatedBy
from postroom.client import EngineClient, GuardTripped
from postroom.engine.inspection import SEARCHED_BYTES_MAX
from postroom.engine.messages import Body, encode_body
from postroom.message import Envelope
from postroom.server.access.registry import Identity
from postroom.server.http.exchange import Refusal
from postroom.server.http.task_server import DECODED_AT_ONCE_BYTES
from postroom.server.routes.engine_handlers import attributed, check_attribution
from tests.deployfiles import dashboard_queries
from tests.integration.engineworkers import working
from tests.integration.harnesses import serving as harness_of
from tests.integration.servers import Server, serving
from tests.waiting import until

UNKNOWN = "0190163d-8694-739b-aea5-966c26f8ad91"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("engine") / "data", execute=True) as running:
        running.tokens["caller"] = running.agents.add("caller", org="acme")
        running.tokens["spy"] = running.agents.add("spy", org="umbrella")
        yield running


@pytest.fixture(scope="module")
def worker(server: Server) -> Iterator[Engine]:
    with working(server.data) as engine:
        yield engine


def submit(server: Server, who: str = "caller", /, **fields: Any) -> str:
    answer = server.post(who, "/engine/messages", **{"type": "tool_call", "payload": {}, **fields})
    assert answer.status == 202, answer
    return str(answer.json["message_id"])


def path_of(message_id: str, rest: str = "") -> str:
    return f"/engine/messages/{message_id}{rest}"


def held(server: Server, who: str = "caller", /, **fields: Any) -> str:
    """A message that no worker runs."""
    return submit(server, who, **{"delay_s": 3600, **fields})


def dead(server: Server, who: str = "caller", /, **fields: Any) -> str:
    message_id = submit(server, who, **{"payload": {"fails": True}, "max_retries": 0, **fields})
    assert server.get(who, path_of(message_id, "?wait_s=30")).json["state"] == "DEAD_LETTER"
    return message_id


# ---- tokens ----------------------------------------------------------------------------------------


def test_budgets_are_shown_without_what_other_organizations_do(server: Server, worker: Engine) -> None:
    message_id = submit(server, tokens=100, models=["small"])
    assert server.get("caller", path_of(message_id, "?wait_s=30")).json["state"] == "COMPLETED"
    seen = {who: server.get(who, "/engine/tokens").json for who in ("boss", "caller", "spy")}
    models = {who: facts["providers"]["p"]["models"]["small"] for who, facts in seen.items()}
    assert (models["boss"]["limit"], models["boss"]["used"], models["boss"]["reserved"]) == (1_000_000, 50, 0)
    use = {"used": 50, "reserved": 0, "borrowed": 0, "refused": 0}
    assert models["boss"]["organizations"] == models["caller"]["organizations"] == {"acme": use}
    assert models["spy"]["organizations"] == {}


# ---- messages --------------------------------------------------------------------------------------


def test_a_message_from_submit_to_result(server: Server, worker: Engine) -> None:
    message_id = submit(server, payload={"say": "hello"}, priority=0)
    shown = server.get("caller", path_of(message_id, "?wait_s=30")).json
    assert (shown["state"], shown["result"]) == ("COMPLETED", {"said": "hello"})
    assert (shown["accepted_priority"], shown["message"]["org_id"]) == (0, "acme")
    assert shown["message"]["created_by"] == {"type": "agent", "id": "caller"}
    assert [event["kind"] for event in shown["history"]][:2] == ["created", "enqueued"]


def test_several_messages_are_stored_whole_or_not_at_all(server: Server) -> None:
    good = {"type": "tool_call", "payload": {}, "delay_s": 3600, "goal_id": "g"}
    answer = server.post("caller", "/engine/messages", messages=[good, good])
    assert (answer.status, len(set(answer.json["message_ids"]))) == (202, 2)
    before = server.get("caller", "/engine/status").json
    refused = server.post("caller", "/engine/messages", messages=[good, {**good, "type": "nothing"}])
    assert (refused.status, refused.json["error"]) == (400, "UnknownType")
    assert server.get("caller", "/engine/status").json == before


@pytest.mark.parametrize(
    ("fields", "status", "error"),
    [
        ({"type": "nothing"}, 400, "UnknownType"),
        ({"payload": []}, 400, "InvalidMessage"),
        ({"priority": 4}, 400, "InvalidPriority"),
        ({"version": "9.0.0"}, 400, "UnsupportedVersion"),
        ({"expires_at": "2020-01-01T00:00:00Z"}, 400, "InvalidExpiry"),
        ({"what": 1}, 400, "InvalidMessage"),
        ({"hop": 0}, 400, "InvalidMessage"),
        ({"tokens": -1}, 400, "InvalidMessage"),
        ({"tokens": 5, "models": "small"}, 400, "InvalidMessage"),
    ],
)
def test_an_invalid_message_is_refused(
    server: Server, fields: dict[str, Any], status: int, error: str
) -> None:
    answer = server.post("caller", "/engine/messages", **{"type": "tool_call", "payload": {}, **fields})
    assert (answer.status, answer.json["error"]) == (status, error), answer


def test_fields_of_a_newer_minor_version_are_kept(server: Server) -> None:
    message_id = held(server, version="1.7.0", mood="calm")
    assert server.get("caller", path_of(message_id)).json["message"]["mood"] == "calm"


def test_a_key_stores_one_message(server: Server) -> None:
    fields = {"type": "tool_call", "payload": {"a": 1}, "delay_s": 3600, "idempotency_key": "k1"}
    first, second = (server.post("caller", "/engine/messages", **fields) for _ in range(2))
    assert (first.json["message_id"], second.json["duplicate"]) == (second.json["message_id"], True)
    other = server.post("caller", "/engine/messages", **{**fields, "payload": {"a": 2}})
    assert (other.status, other.json["error"]) == (409, "KeyReused")
    server.post("boss", "/engine/messages/" + first.json["message_id"] + "/cancel")


def test_a_message_is_explained_and_cancelled(server: Server) -> None:
    message_id = held(server)
    assert (
        "submitted with a delay" in server.get("caller", path_of(message_id, "/explain")).json["explanation"]
    )
    cancelled = server.send("caller", "POST", path_of(message_id, "/cancel"))
    assert (cancelled.status, cancelled.json) == (202, {"message_id": message_id})
    again = server.send("caller", "POST", path_of(message_id, "/cancel"))
    assert (again.status, again.json["error"]) == (409, "WrongState")


def test_a_wait_ends_when_the_message_is_cancelled(server: Server) -> None:
    message_id = held(server)
    connection = server.connect()
    headers = {"Authorization": f"Bearer {server.tokens['caller']}"}
    connection.request("GET", path_of(message_id, "?wait_s=30"), headers=headers)
    server.send("caller", "POST", path_of(message_id, "/cancel"))
    assert json.loads(connection.getresponse().read())["state"] == "CANCELLED"
    connection.close()


# ---- streams ---------------------------------------------------------------------------------------


def test_a_stream_gives_every_part_and_ends(server: Server, worker: Engine) -> None:
    message_id = submit(server, payload={"chunks": 3, "say": "x"})
    with server.stream("caller", path_of(message_id, "/stream")) as stream:
        parts = stream.take(5)
        assert stream.next() is None
    assert [part.event for part in parts] == ["acknowledgment", *["stream_chunk"] * 3, "stream_complete"]
    assert [part.data["chunk"] for part in parts[1:4]] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert (parts[4].data["total_chunks"], parts[4].data["result"]) == (3, {"said": "x"})


def test_a_stream_continues_after_the_last_part(server: Server, worker: Engine, tmp_path: Path) -> None:
    go = tmp_path / "go"
    message_id = submit(server, payload={"chunks": 3, "waits_for": str(go)})
    with server.stream("caller", path_of(message_id, "/stream")) as stream:
        parts = stream.take(3)
    go.touch()
    with server.stream("caller", path_of(message_id, "/stream"), Last_Event_ID=parts[-1].id) as stream:
        rest = stream.take(2)
        assert stream.next() is None
    assert [part.data.get("chunk") for part in (*parts, *rest)] == [None, {"n": 0}, {"n": 1}, {"n": 2}, None]
    assert rest[-1].data["total_chunks"] == 3
    with server.stream("caller", path_of(message_id, "/stream"), Last_Event_ID=rest[0].id) as stream:
        assert [part.event for part in stream.take(1)] == ["stream_complete"]


def test_a_stream_of_a_failed_message_ends_with_its_error(server: Server, worker: Engine) -> None:
    with server.stream("caller", path_of(dead(server), "/stream")) as stream:
        last = stream.take(2)[-1]
    assert (last.event, last.data["error"]) == ("error", {"type": "ValueError", "message": "no such thing"})


def test_a_wrong_position_is_refused(server: Server) -> None:
    answer = server.get("caller", path_of(held(server), "/stream"), Last_Event_ID="x")
    assert (answer.status, answer.json["error"]) == (400, "InvalidMessage")


# ---- who may do what -------------------------------------------------------------------------------


@pytest.mark.statement("created-by")
@pytest.mark.parametrize(
    "fields",
    [
        {"org_id": "umbrella"},
        {"agent_id": "spy"},
        {"created_by": {"type": "agent", "id": "spy"}},
        {"created_by": {"type": "system", "id": "postroom"}},
    ],
)
def test_a_token_submits_for_its_own_agent_and_organization(server: Server, fields: dict[str, Any]) -> None:
    message = {"type": "tool_call", "payload": {}, "delay_s": 3600, **fields}
    for body in (message, {"messages": [{"type": "tool_call", "payload": {}}, message]}):
        answer = server.send("caller", "POST", "/engine/messages", body)
        assert (answer.status, answer.json["error"]) == (403, "Forbidden")
    org = fields.get("org_id", "acme")
    by_operator = server.post("boss", "/engine/messages", **{**message, "org_id": org})
    assert by_operator.status == 202


def test_an_agent_may_name_itself(server: Server) -> None:
    own = {"org_id": "acme", "agent_id": "caller", "created_by": {"type": "agent", "id": "caller"}}
    message_id = held(server, **own)
    assert server.get("caller", path_of(message_id)).json["message"]["agent_id"] == "caller"


def test_an_agent_without_an_organization_submits_nothing(server: Server) -> None:
    answer = server.post("triage", "/engine/messages", type="tool_call", payload={})
    assert (answer.status, "belongs to no organization" in answer.json["message"]) == (403, True)
    assert server.get("triage", "/engine/dlq").status == 403
    assert server.get("triage", "/engine/status").json["organizations"] == {}


def test_an_operator_names_the_organization(server: Server) -> None:
    assert server.post("boss", "/engine/messages", type="tool_call", payload={}).status == 400


@pytest.mark.statement("ownership")
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/engine/messages/{id}"),
        ("GET", "/engine/messages/{id}?wait_s=1"),
        ("GET", "/engine/messages/{id}/stream"),
        ("GET", "/engine/messages/{id}/explain"),
        ("POST", "/engine/messages/{id}/cancel"),
        ("GET", "/engine/dlq/{id}"),
        ("GET", "/engine/dlq?after={id}"),
    ],
)
def test_a_foreign_message_is_answered_like_an_unknown_one(
    server: Server, worker: Engine, method: str, path: str
) -> None:
    foreign = dead(server)
    answers = {
        message_id: server.send("spy", method, path.format(id=message_id))
        for message_id in (foreign, UNKNOWN)
    }
    assert [answer.status for answer in answers.values()] == [404, 404]
    sentences = {answer.json["message"].replace(message_id, "") for message_id, answer in answers.items()}
    assert len(sentences) == 1
    assert server.get("boss", path_of(foreign)).json["state"] == "DEAD_LETTER"


def test_a_foreign_message_cannot_be_taken_over_by_its_id(server: Server) -> None:
    foreign = held(server)
    answer = server.post(
        "spy", "/engine/messages", type="tool_call", payload={}, message_id=foreign, ordering_key="k"
    )
    assert (answer.status, answer.json["error"]) == (400, "InvalidMessage")
    assert server.get("caller", path_of(foreign)).json["message"]["org_id"] == "acme"


@pytest.mark.parametrize("path", ["dlq/replay", "dlq/purge", "pause", "resume"])
def test_operations_are_for_operators(server: Server, path: str) -> None:
    assert server.post("caller", f"/engine/{path}").status == 403


def test_an_agent_sees_the_state_of_its_organization_only(server: Server) -> None:
    held(server)
    held(server, "spy")
    assert set(server.get("caller", "/engine/status").json["organizations"]) == {"acme"}
    assert {"acme", "umbrella"} <= set(server.get("boss", "/engine/status").json["organizations"])


def test_events_of_messages_are_for_operators(server: Server) -> None:
    message_id = held(server)
    task_id = server.enqueue("review", 1)
    with server.stream("review", "/events") as stream:
        until(lambda: (event := stream.next()) is not None and event.data["message_id"] == task_id)
    with server.stream("boss", "/events") as stream:
        until(lambda: (event := stream.next()) is not None and event.data["message_id"] == message_id)
    with server.stream("caller", "/events") as stream:
        own = server.enqueue("caller", 1)
        first = stream.next()
        assert first is not None
        assert server.get("boss", f"/tasks/{first.data['message_id']}").json["task_id"] == own


# ---- messages and tasks ----------------------------------------------------------------------------


def test_the_routes_of_tasks_know_no_messages(server: Server) -> None:
    message_id = held(server)
    assert server.get("boss", f"/tasks/{message_id}").status == 404
    assert server.send("boss", "POST", f"/tasks/{message_id}/cancel").status == 404
    assert server.send("boss", "POST", f"/tasks/{message_id}/retry").status == 404
    holder = {"task_id": message_id, "lease": 1}
    assert server.post("boss", "/queue/complete", **holder, decision=1).status == 404
    assert server.post("boss", "/queue/heartbeat", **holder).status == 404
    assert server.post("boss", "/harness/result", task_id=message_id).status == 404
    assert "org:acme" not in server.get("boss", "/queue/status").json["agents"]
    assert message_id not in str(server.get("boss", "/tasks?limit=1000").json)


def test_the_routes_of_messages_know_no_tasks(server: Server) -> None:
    task_id = server.enqueue("triage", 1)
    assert server.get("boss", path_of(task_id)).status == 404
    assert server.send("boss", "POST", path_of(task_id, "/cancel")).status == 404


def test_the_harness_executes_no_completed_message(server: Server, worker: Engine) -> None:
    message_id = submit(server, payload={"say": 1})
    assert server.get("caller", path_of(message_id, "?wait_s=30")).json["state"] == "COMPLETED"
    task_id = server.enqueue("triage", 1)
    while (task := server.claim("triage"))["task_id"] != task_id:
        pass
    server.post("triage", "/queue/complete", task_id=task_id, lease=task["lease"], decision=1)
    until(lambda: server.get("boss", f"/tasks/{task_id}").json["status"] == "done")
    assert message_id not in (server.data / "executed").read_text()
    assert server.get("caller", path_of(message_id)).json["state"] == "COMPLETED"


# ---- stored JSON is passed on as it is ---------------------------------------------------------------


def planted(server: Server, payload: bytes) -> str:
    """A message whose payload is stored in these bytes. A decoder and an encoder would change them."""
    body = Body(payload=Raw(payload), goal_id="g", task_id="t", created_by=CreatedBy("system", "x"))
    envelope = Envelope(
        queue="org:acme", payload=encode_body(body), type="tool_call", delay_ns=3_600_000_000_000
    )
    with server.tasks() as tasks:
        return tasks.store.write(lambda transaction: transaction.insert([envelope]))[0].message_id


@pytest.mark.statement("json")
def test_a_stored_payload_is_passed_on_as_it_is(server: Server) -> None:
    message_id = planted(server, b'{"n":1.000}')
    assert b'"payload":{"n":1.000}' in server.get("caller", path_of(message_id)).body
    found = server.get("caller", "/engine/messages?limit=1000&text=1.000").json["messages"]
    assert [line["message_id"] for line in found] == [message_id]
    with server.tasks() as tasks:
        envelope = Envelope(queue="triage", payload=b"[1.000]")
        task_id = tasks.store.write(lambda transaction: transaction.insert([envelope]))[0].message_id
    assert b'"payload":[1.000]' in server.get("boss", f"/tasks/{task_id}").body
    until(lambda: b'"payload":[1.000]' in server.post("triage", "/queue/next").body)


def test_a_long_message_keeps_its_fields(server: Server, worker: Engine) -> None:
    fields = {
        "payload": {"text": "long " * DECODED_AT_ONCE_BYTES},
        "version": "1.9.0",
        "colour": {"of": "moon"},
    }
    long = {"type": "tool_call", **fields, "context": None, "max_retries": 1, "delay_s": 3600}
    batch = server.post("caller", "/engine/messages", messages=[long, {**long, "payload": {}}])
    ids = [submit(server, **long), *batch.json["message_ids"]]
    asked = server.post("caller", "/engine/request", **{**long, "timeout_s": 0})
    ids.append(asked.json["message_id"])
    for message_id in ids:
        message = server.get("caller", path_of(message_id)).json["message"]
        assert (message["version"], message["colour"], message["max_retries"]) == ("1.9.0", {"of": "moon"}, 1)
        assert message["payload"] == ({} if message_id == ids[2] else fields["payload"])
    refused = server.post("caller", "/engine/messages", **{**long, "org_id": "other"})
    assert refused.status == 403


def test_a_search_ends_when_it_has_looked_at_enough_bytes(server: Server) -> None:
    text = "long " * (SEARCHED_BYTES_MAX // 5 // 3)
    for number in range(4):
        submit(server, "spy", payload={"text": text, "number": number}, delay_s=3600)
    cursor, pages = "", list[int]()
    while True:
        page = server.get("spy", f"/engine/messages?text=long&cursor={cursor}").json
        pages.append(len(page["messages"]))
        cursor = page["cursor"]
        if not cursor:
            break
    assert pages == [3, 1]


# ---- dead letters ----------------------------------------------------------------------------------


def test_dead_letters_are_listed_replayed_and_purged(server: Server, worker: Engine) -> None:
    first = dead(server, type="tool_call", goal_id="x")
    foreign = dead(server, "spy")
    listed = [
        letter["message_id"] for letter in server.get("caller", "/engine/dlq?limit=1000").json["letters"]
    ]
    assert first in listed
    assert foreign not in listed
    assert server.get("caller", "/engine/dlq?org_id=umbrella").status == 403
    everything = server.get("boss", "/engine/dlq?limit=1000&error_type=ValueError").json["letters"]
    assert {first, foreign} <= {letter["message_id"] for letter in everything}
    assert server.get("boss", "/engine/dlq?since=never").status == 400
    shown = server.get("caller", f"/engine/dlq/{first}").json
    assert shown["failure_reason"] == "ValueError: no such thing"
    again = server.post("caller", "/engine/messages", **shown["original_message"])
    assert (again.status, again.json) == (202, {"message_id": first, "duplicate": True})
    dry = server.post("boss", "/engine/dlq/replay", message_ids=[first], dry_run=True)
    assert (dry.status, dry.json) == (
        202,
        {"replayed": 1, "refused": 0, "left": 0, "reasons": {}, "message_ids": [first]},
    )
    assert server.post("boss", "/engine/dlq/replay", message_ids=[first], priority=1).status == 202
    until(lambda: server.get("boss", path_of(first)).json["attempt"] == 2)
    until(lambda: server.get("boss", path_of(first)).json["state"] == "DEAD_LETTER")
    purged = server.post("boss", "/engine/dlq/purge", org_id="umbrella", limit=1000)
    assert foreign in purged.json["message_ids"]
    assert server.get("boss", f"/engine/dlq/{foreign}").status == 404
    assert server.get("boss", f"/engine/dlq/{held(server)}").status == 409


# ---- pauses, overload, metrics ---------------------------------------------------------------------


def test_the_kill_switch_refuses_submits_until_a_resume(server: Server) -> None:
    assert server.post("boss", "/engine/pause", org_id="umbrella", kill=True).status == 202
    refused = server.post("spy", "/engine/messages", type="tool_call", payload={})
    assert (refused.status, refused.json["error"]) == (429, "Overloaded")
    assert int({name.lower(): value for name, value in refused.headers.items()}["retry-after"]) >= 1
    assert "kill switch" in refused.json["message"]
    assert server.get("spy", "/engine/status").json["pauses"] == [{"org_id": "umbrella", "type": ""}]
    assert server.get("caller", "/engine/status").json["pauses"] == []
    assert server.post("boss", "/engine/resume", org_id="umbrella").status == 202
    held(server, "spy")


@pytest.mark.statement("metrics-standard")
def test_metrics_of_the_queue(server: Server, worker: Engine) -> None:
    server.post("boss", "/engine/pause", org_id="paused")
    submit(server, "boss", org_id="paused", priority=1)
    families = text_string_to_metric_families(server.get("boss", "/metrics").body.decode())
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }
    assert found["postroom_engine_depth", "P1", "paused"] == 1
    assert found["postroom_engine_workers",] == 1
    assert ("postroom_queue_depth", "org:paused") not in found


def samples_of(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """The samples of a scrape: name to values by labels."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(word for pair in sorted(sample.labels.items()) for word in pair)
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


@pytest.mark.statement("metrics-standard")
def test_every_query_of_the_dashboard_has_its_metric_in_a_scrape(server: Server, worker: Engine) -> None:
    dead(server)  # it has ended when this returns, so its events are committed
    text = server.get("boss", "/metrics").body.decode()
    found = samples_of(text)
    assert found["postroom_events_total"]["kind", "dead_letter"] > 0
    labels = ("organization", "acme", "priority", "P2", "type", "tool_call")
    for time in ("wait", "run", "total"):
        assert found[f"postroom_{time}_seconds_count"][labels] > 0
    assert sum(found["postroom_errors_total"].values()) > 0
    for query in dashboard_queries():
        [name] = set(re.findall(r"postroom_\w+", query))
        has_no_sample_yet = re.search(rf"^# TYPE {name} (counter|gauge)$", text, re.MULTILINE)
        assert name in found or has_no_sample_yet, query


APP = """
from postroom import Engine, Guard, Policy

engine = Engine.open("memory://", policy=Policy(guard=Guard(messages=1)))
engine.register_type("own_type")
"""


def test_a_server_has_the_types_and_rules_of_an_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rules.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    with harness_of(tmp_path, "--app", "rules:engine") as harness:
        token = harness.agents.add("caller", org="acme")
        with EngineClient(harness.url, token) as client:
            client.submit(type="own_type", payload={}, goal_id="g")
            with pytest.raises(GuardTripped, match="has used 1 of at most 1 messages"):
                client.submit(type="own_type", payload={}, goal_id="g")


def test_a_migration_gives_a_message_to_no_other_organization() -> None:
    with Engine.open("memory://") as engine:

        @engine.migration(0)
        def renamed(fields: dict[str, Any]) -> dict[str, Any]:
            tenant = fields.pop("tenant")
            return {**fields, "org_id": tenant}

        sent = {"type": "tool_call", "payload": {}, "version": "0.9.0", "tenant": "umbrella"}
        caller = Identity("caller", "agent", org="acme")
        registry, policy = engine.core.registry, engine.policy
        prepared = registry.prepare(attributed(caller, sent), policy, engine.store.wall_us())
        with pytest.raises(Refusal, match="for its organization only"):
            check_attribution(caller, prepared)


# ---- operators of one organization -----------------------------------------------------------------


@pytest.mark.statement("auth-organization")
def test_an_operator_of_one_organization_changes_only_that_one(server: Server, worker: Engine) -> None:
    server.tokens["chief"] = server.agents.tokens.create("operator", "acme").token
    own, foreign = dead(server), dead(server, "spy")
    found = server.post("chief", "/engine/dlq/replay", dry_run=True).json["message_ids"]
    assert own in found
    assert foreign not in found
    assert server.post("chief", "/engine/dlq/replay", org_id="umbrella").status == 403
    assert server.post("chief", "/engine/dlq/replay", message_ids=[foreign]).status == 404
    assert server.post("chief", "/engine/dlq/purge", message_ids=[own]).json["message_ids"] == [own]
    assert server.post("chief", "/engine/dlq/purge", message_ids=[foreign]).status == 404
    assert server.get("spy", path_of(foreign)).json["state"] == "DEAD_LETTER"


def test_an_operator_of_one_organization_pauses_only_that_one(server: Server) -> None:
    server.tokens["chief"] = server.agents.tokens.create("operator", "acme").token
    paused = server.post("chief", "/engine/pause", type="memory_update")
    assert (paused.status, paused.json) == (202, {"org_id": "acme", "type": "memory_update"})
    assert server.post("chief", "/engine/pause", org_id="umbrella").status == 403
    assert server.post("chief", "/engine/resume", type="memory_update").json["org_id"] == "acme"
    assert server.post("caller", "/engine/pause", org_id="acme").status == 403
    assert server.get("chief", "/metrics").status == 403
