"""Agents over real HTTP: requests that wait, streams, inboxes, and who may see whom."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom import Coordinator, Engine
from postroom.calls.fields import WAIT_S_MAX
from postroom.client import AgentReplaced, Bounced, EngineClient, MessageFailed, NotAllowed, RemoteAgent
from postroom.engine.agents.agent_operations import WAITS_SHOWN_MAX, AgentOperations
from postroom.engine.agents.agent_sweeps import bounce
from postroom.engine.rules.cells import BOUNCES, Bounce
from postroom.errors import InvalidMessage
from tests.integration.engineworkers import working
from tests.integration.servers import Server, serving
from tests.waiting import HANG_GUARD_S, until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("agents") / "data") as running:
        for name in ("planner", "writer"):
            running.tokens[name] = running.agents.add(name, org="acme")
        running.tokens["spy"] = running.agents.add("spy", org="umbrella")
        running.tokens["loner"] = running.agents.add("loner")
        yield running


@pytest.fixture(scope="module", autouse=True)
def worker(server: Server) -> Iterator[Engine]:
    with working(server.data) as engine:
        yield engine


def client_of(server: Server, who: str, **options: Any) -> EngineClient:
    return EngineClient(f"http://127.0.0.1:{server.port}", server.tokens[who], **options)


@pytest.fixture
def planner(server: Server) -> Iterator[RemoteAgent]:
    with client_of(server, "planner") as client:
        yield client.agent()


@pytest.fixture
def writer(server: Server) -> Iterator[RemoteAgent]:
    with client_of(server, "writer") as client:
        yield client.agent()


def test_a_request_waits_for_its_answer(planner: RemoteAgent) -> None:
    assert planner.request(type="tool_call", payload={"say": "hello"}, timeout_s=HANG_GUARD_S) == {
        "said": "hello"
    }
    joined = planner.request(type="tool_call", payload={"chunks": 3}, timeout_s=HANG_GUARD_S)
    assert joined == [{"n": 0}, {"n": 1}, {"n": 2}]
    with pytest.raises(MessageFailed, match="no such thing"):
        planner.request(type="tool_call", payload={"fails": True}, max_retries=0, timeout_s=HANG_GUARD_S)
    assert [*planner.resume()] == []


def test_a_request_without_python(server: Server) -> None:
    body = {"type": "tool_call", "payload": {"say": 1}, "timeout_s": WAIT_S_MAX}
    answer = server.post("planner", "/engine/request", **body)
    assert (answer.status, answer.json["state"], answer.json["result"]) == (200, "COMPLETED", {"said": 1})
    assert answer.json["epoch"] > 0
    later = server.post("planner", "/engine/request", **{**body, "delay_s": 3600, "timeout_s": 0})
    assert later.status == 202
    server.post("planner", f"/engine/messages/{later.json['message_id']}/cancel")
    server.post("planner", "/engine/agents/planner/ack", message_ids=[later.json["message_id"]])
    assert server.post("boss", "/engine/request", **body, org_id="acme").json["result"] == {"said": 1}


def test_a_stream_gives_the_parts_and_is_acknowledged(planner: RemoteAgent) -> None:
    parts = [*planner.stream(type="tool_call", payload={"chunks": 2})]
    assert [part["type"] for part in parts] == ["acknowledgment", *["stream_chunk"] * 2, "stream_complete"]
    assert [*planner.resume()] == []


def test_late_answers_are_resumed_with_the_epoch(planner: RemoteAgent, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    for say in (1, 2):
        with pytest.raises(TimeoutError):
            planner.request(
                type="tool_call", payload={"say": say, "waits_for": str(gate), "chunks": 1}, timeout_s=0.05
            )
    parts = list[dict[str, Any]]()
    for part in planner.resume():
        parts.append(part)
        gate.touch()  # after the first part, which is an acknowledgment
    ends = [part for part in parts if part["type"] == "stream_complete"]
    assert sorted(part["result"]["said"] for part in ends) == [1, 2]
    assert {part["epoch"] for part in parts} == {planner.registration.epoch}
    assert len({part["id"] for part in parts}) == len(parts)


def test_the_stream_of_an_agent_is_plain_server_sent_events(server: Server) -> None:
    body = {"type": "tool_call", "payload": {"chunks": 1}, "timeout_s": 0}
    message_id = server.post("writer", "/engine/request", **body).json["message_id"]
    events = list[Any]()
    with server.stream("writer", "/engine/agents/writer/stream") as stream:
        [begin] = stream.take(1)
        assert begin.data == {"request_ids": [message_id]}
        while not events or events[-1]["type"] != "stream_complete":
            [message] = stream.take(1)
            events.append(message.data)
    assert {event["request_id"] for event in events} == {message_id}
    assert server.post("writer", "/engine/agents/writer/ack", message_ids=[message_id]).status == 202
    assert server.post("writer", "/engine/agents/writer/ack", message_ids=[message_id]).json == {
        "message_ids": []
    }


def test_messages_between_agents_have_receipts(planner: RemoteAgent, writer: RemoteAgent) -> None:
    assert writer.inbox() == []
    message_id = planner.send(to="writer", payload={"a": 1})
    assert [*planner.receipts(message_id)] == ["stored"]
    [message] = writer.inbox(peek=True)
    assert [*planner.receipts(message_id)] == ["stored"]
    assert writer.inbox() == [message]
    assert (message["sender"], message["payload"]) == ("planner", {"a": 1})
    writer.done(message["key"])
    assert set(planner.receipts(message_id)) == {"stored", "fetched", "acted_on"}
    assert writer.inbox() == []
    with pytest.raises(Bounced, match="no agent of this name"):
        planner.send(to="spy", payload=1)


def test_the_newest_registration_is_the_only_one(server: Server, planner: RemoteAgent) -> None:
    assert planner.registration.session
    with client_of(server, "planner") as other:
        assert other.agent().registration.session > planner.registration.session
        with pytest.raises(AgentReplaced):
            planner.request(type="tool_call", payload={}, timeout_s=1)
        with pytest.raises(AgentReplaced):
            planner.inbox()


def test_an_agent_leaves_and_comes_back(server: Server, planner: RemoteAgent) -> None:
    session = planner.registration.session
    planner.beat()
    planner.leave()
    with client_of(server, "planner") as client:
        assert "planner" not in [one["agent_id"] for one in client.agents()]
    assert planner.request(type="tool_call", payload={"say": 1}, timeout_s=HANG_GUARD_S) == {"said": 1}
    assert planner.registration.session > session
    for call in ("beat", "leave"):  # an older registration keeps nobody alive, and ends nobody
        assert server.post("planner", f"/engine/agents/planner/{call}?session={session}").status == 409


def test_the_stream_of_a_remote_agent_ends_after_its_timeout(planner: RemoteAgent, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    stream = planner.stream(type="tool_call", payload={"say": 1, "waits_for": str(gate)}, timeout_s=0.2)
    with pytest.raises(TimeoutError, match="did not come within"):
        list(stream)
    gate.touch()
    assert [part["type"] for part in planner.resume()][-1] == "result"
    with pytest.raises(InvalidMessage, match="timeout_s"):
        planner.stream(type="tool_call", payload={}, timeout_s=-1)


def test_more_open_requests_than_a_list_shows_are_resumed(planner: RemoteAgent, tmp_path: Path) -> None:
    count, gate = WAITS_SHOWN_MAX + 20, tmp_path / "gate"
    for number in range(count):
        payload = {"say": number, "waits_for": str(gate)}
        planner._request({"type": "tool_call", "payload": payload}, 0.0)
    gate.touch()
    results = [part["result"]["said"] for part in planner.resume() if part["type"] == "result"]
    assert sorted(results) == list(range(count))
    assert [*planner.resume()] == []


def test_a_resume_ends_when_a_request_bounces(server: Server, planner: RemoteAgent) -> None:
    later = planner._request({"type": "tool_call", "payload": {}, "delay_s": 3600}, 0.0).message_id
    parts = planner.resume()
    reading = threading.Thread(target=lambda: list(parts), daemon=True)
    reading.start()
    with working(server.data) as engine:
        policy = engine.policy
        engine.store.write(
            lambda transaction: bounce(
                AgentOperations(transaction, policy), "acme", "planner", later, "the agent is dead"
            ),
            makes_room=True,
        )
        reading.join(HANG_GUARD_S)
        assert not reading.is_alive()
        engine.blocking.cancel(later)


def test_each_event_of_an_answer_has_its_own_id(server: Server, planner: RemoteAgent) -> None:
    parts = [*planner.stream(type="tool_call", payload={"chunks": 3})]
    ids = [part["id"] for part in parts]
    assert len(set(ids)) == len(ids) == 5
    path = f"/engine/messages/{parts[0]['request_id']}/stream"
    for number, last in enumerate(ids[:-1]):
        with server.stream("planner", path, **{"Last-Event-ID": last}) as stream:
            assert [event.id for event in stream.take(len(ids) - number - 1)] == ids[number + 1 :]
    complete = server.get("planner", path, **{"Last-Event-ID": ids[-1]})
    assert (complete.status, complete.body) == (204, b"")
    assert server.get("spy", path, **{"Last-Event-ID": ids[-1]}).status == 404


def test_a_bounce_is_fetched_and_removed(server: Server, planner: RemoteAgent) -> None:
    message_id = planner._request({"type": "tool_call", "payload": {"say": 9}}, WAIT_S_MAX).message_id
    with working(server.data) as engine:

        def to_a_user(transaction: Any) -> None:
            kept = Bounce(message_id, "planner", "user", "ada", {"result": 9}, "late", transaction.wall_us)
            BOUNCES.put(transaction, kept, "acme", 7)

        engine.store.write(to_a_user)
    with client_of(server, "writer") as client, client_of(server, "spy") as spy:
        [found] = client.bounces.list(created_by="user:ada")
        assert (found["key"], found["message_id"], found["answer"]) == ("acme/7", message_id, {"result": 9})
        assert client.bounces.list(created_by="user:bob") == []
        assert spy.bounces.list() == []
        assert spy.bounces.done(found["key"]) == []
        with pytest.raises(NotAllowed):
            spy.bounces.list("acme")
        assert client.bounces.done(found["key"]) == [found["key"]]
        assert client.bounces.list() == []


# ---- who may see whom ------------------------------------------------------------------------------


def test_an_organization_sees_its_own_agents_only(server: Server, planner: RemoteAgent) -> None:
    assert planner.registration.session
    with client_of(server, "spy") as spy:
        assert spy.agent().registration.org_id == "umbrella"
        assert [one["agent_id"] for one in spy.agents()] == ["spy"]
        with pytest.raises(NotAllowed):
            spy.agents("acme")
    with client_of(server, "boss") as boss:
        seen = {(one["org_id"], one["agent_id"]) for one in boss.agents()}
        assert {("acme", "planner"), ("umbrella", "spy")} <= seen
        assert {one["org_id"] for one in boss.agents("acme")} == {"acme"}


@pytest.mark.parametrize("who", ["spy", "writer", "loner"])
@pytest.mark.parametrize(
    ("method", "rest", "body"),
    [
        ("GET", "stream", None),
        ("GET", "inbox", None),
        ("POST", "ack", {"message_ids": ["x"]}),
        ("POST", "messages", {"to": "writer", "payload": 1}),
        ("POST", "inbox/done", {"keys": ["1"]}),
    ],
)
def test_another_agent_is_answered_like_one_that_does_not_exist(
    server: Server, who: str, method: str, rest: str, body: Any
) -> None:
    answers = [
        server.send(who, method, f"/engine/agents/{name}/{rest}", body) for name in ("planner", "nobody")
    ]
    status = 403 if who == "loner" else 404  # an agent of no organization has no messages
    assert [answer.status for answer in answers] == [status, status]
    assert answers[0].json["message"].replace("planner", "nobody") == answers[1].json["message"]


def test_an_agent_acts_for_no_other_agent(server: Server) -> None:
    body = {"type": "tool_call", "payload": {}, "timeout_s": 0}
    assert server.post("spy", "/engine/request", **body, org_id="acme").status == 403
    assert server.post("spy", "/engine/request", **body, agent_id="planner").status == 403
    assert server.post("spy", "/engine/agents", agent_id="planner").status == 403
    assert server.post("loner", "/engine/agents").status == 403
    assert server.post("boss", "/engine/agents").status == 403
    assert server.send("boss", "GET", "/engine/agents/planner/inbox").status == 403


def test_receipts_of_another_organization_are_not_shown(
    server: Server, planner: RemoteAgent, writer: RemoteAgent
) -> None:
    writer.inbox()
    message_id = planner.send(to="writer", payload=1)
    assert server.get("spy", f"/engine/messages/{message_id}/receipts").status == 404
    writer.done(*(message["key"] for message in writer.inbox()))


# ---- a server that dies ----------------------------------------------------------------------------


def test_a_request_survives_the_kill_of_its_server(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with serving(tmp_path / "data") as server, working(server.data):
        token = server.agents.add("planner", org="acme")
        with EngineClient(f"http://127.0.0.1:{server.port}", token, retries=50) as client:
            agent, answers = client.agent(), list[Any]()
            assert agent.registration.session

            def ask(say: int) -> None:
                payload = {"say": say, "waits_for": str(gate)}
                answers.append(agent.request(type="tool_call", payload=payload, timeout_s=HANG_GUARD_S))

            threads = [threading.Thread(target=ask, args=(say,), daemon=True) for say in range(4)]
            for thread in threads:
                thread.start()
            until(lambda: len(client.agents()[0]["waits_for"]) == 4)
            port = server.port
            server.end(signal.SIGKILL)
            server.start(port)
            gate.touch()
            for thread in threads:
                thread.join(HANG_GUARD_S)
            assert sorted(answer["said"] for answer in answers) == [0, 1, 2, 3]
            assert [*agent.resume()] == []


def test_call_without_a_session_uses_the_newest_registration(server: Server, worker: Engine) -> None:
    body = {"type": "tool_call", "payload": {"say": 1}, "timeout_s": WAIT_S_MAX}
    assert server.post("planner", "/engine/request", **body).status == 200  # this server knows a session now

    async def register_elsewhere() -> None:
        async with Coordinator(worker) as coordinator:
            await coordinator.register("planner", "acme")

    worker.blocking.wait(register_elsewhere())
    assert server.post("planner", "/engine/request", **body).status == 200
