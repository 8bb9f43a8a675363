"""`postroom up`: all parts of a data folder as real processes, killed and stopped."""

import asyncio
import json
import os
import signal
import ssl
import subprocess
from pathlib import Path
from typing import Any

import nats
import pytest

from postroom import Tasks
from postroom.client import EngineClient
from postroom.contracts.audit import Audit
from postroom.server.access.tokens import TokenRegistry
from postroom.stores.base import ByIds
from tests.integration.commandline import finish, isolate, postroom, run, start
from tests.integration.ups import Running, answer_to_login, running
from tests.postgresserver import database, postgres
from tests.waiting import HANG_GUARD_S, until

ALL_RUN = {"status": "ok", "parts": dict.fromkeys(("http", "mail", "audit"), "running")}

__all__ = ["database", "postgres"]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


async def echo(url: str, token: str) -> bytes:
    client = await nats.connect(url, token=token, allow_reconnect=False)
    try:
        waiting = await client.subscribe("plain.subject")
        await client.publish("plain.subject", b"hello")
        return (await waiting.next_msg(timeout=HANG_GUARD_S)).data
    finally:
        await client.close()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_one_token_opens_http_and_nats_and_is_printed_once(tmp_path: Path) -> None:
    data = tmp_path / "run"
    with running(data) as up:
        assert up.token is not None
        assert up.nats
        assert up.get("/health", None) == (200, ALL_RUN)
        assert up.get("/ready", None) == (200, ALL_RUN)
        assert up.get("/engine/status", None)[0] == 401
        assert up.get("/engine/status", up.token)[0] == 200
        assert asyncio.run(echo(up.nats, up.token)) == b"hello"
        assert b"Authorization Violation" in answer_to_login(up.nats, "pr_" + "x" * 43)
        pids = [part["pid"] for part in up.parts(data).values()]
        assert set(up.parts(data)) == {"http", "mail", "audit"}
    assert up.process.returncode == 0
    assert not any(is_alive(pid) for pid in pids)
    assert not (data / "up.json").exists()
    (data / "tokens.json").unlink()  # an agent's token is no reason to leave the owner without one
    assert (
        postroom("token", "create", "--data", data, "--role", "agent", "--org", "o", "--agent", "a").code == 0
    )
    with running(data, "--no-mail", "--no-audit") as agents_only:
        assert agents_only.token is not None
    with running(data, "--no-mail", "--no-audit") as again:
        assert again.token is None
        assert not again.nats
        assert again.get("/engine/status", agents_only.token)[0] == 200


def test_a_killed_part_is_restarted_and_shows_as_degraded_until_then(tmp_path: Path) -> None:
    data = tmp_path / "run"
    with running(data) as up:
        pid = up.parts(data)["mail"]["pid"]
        os.kill(pid, signal.SIGKILL)
        until(lambda: up.get("/health", None)[1]["parts"]["mail"] == "restarting after 1 failures")
        assert up.get("/health", None)[1]["status"] == "degraded"
        assert up.get("/ready", None)[0] == 503
        until(lambda: up.get("/health", None) == (200, ALL_RUN))
        assert up.parts(data)["mail"]["pid"] != pid
        assert up.parts(data)["mail"]["restarts"] == 1
        assert up.nats
        assert up.token is not None
        assert asyncio.run(echo(up.nats, up.token)) == b"hello"  # at the same address as before


def test_a_stopped_part_shows_as_degraded_until_it_goes_on(tmp_path: Path) -> None:
    data = tmp_path / "run"
    with running(data) as up:
        for name in ("audit", "mail"):  # both at the same time: each waits for `BEAT_LATE_S`
            os.kill(up.parts(data)[name]["pid"], signal.SIGSTOP)
        until(lambda: set(hung(up)) == {"audit", "mail"})
        assert "has given no sign of life for 15 s" in hung(up)["audit"]
        assert up.get("/ready", None)[0] == 503
        found = postroom("doctor", "--data", data, "--quick").line["findings"]
        assert any("the part audit does not work: hung" in each["what"] for each in found)
        for name in ("audit", "mail"):
            os.kill(up.parts(data)[name]["pid"], signal.SIGCONT)
        until(lambda: up.get("/health", None) == (200, ALL_RUN))
        assert {part["restarts"] for part in up.parts(data).values()} == {0}


def hung(up: Running) -> dict[str, str]:
    parts = up.get("/health", None)[1]["parts"]
    return {name: why for name, why in parts.items() if why.startswith("hung")}


def test_no_part_outlives_a_killed_up(tmp_path: Path) -> None:
    data = tmp_path / "run"
    with running(data) as up:
        pids = [part["pid"] for part in up.parts(data).values()]
        up.process.kill()
        until(lambda: not any(is_alive(pid) for pid in pids))
    with running(data) as again:
        assert again.get("/health", None) == (200, ALL_RUN)


def test_stopped_parts_and_their_workers_end_with_a_killed_up(tmp_path: Path) -> None:
    Path("slow.py").write_text(SLOW_APP)
    data = tmp_path / "run"
    with running(data, "--app", "slow:engine") as up:
        parts = up.parts(data)
        workers = parts["workers"]["pid"]
        until(lambda: len(children(workers)) == 2)
        pids = [*(part["pid"] for part in parts.values()), *children(workers)]
        until(lambda: all(len(threads(pid)) > 1 for pid in pids))  # one of them watches the parent
        for part in parts.values():
            os.kill(part["pid"], signal.SIGSTOP)
        up.process.kill()
        until(lambda: not any(is_alive(pid) for pid in pids))


def threads(pid: int) -> list[str]:
    return os.listdir(f"/proc/{pid}/task")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_revoked_token_ends_its_open_connection(tmp_path: Path) -> None:
    data = tmp_path / "run"
    with running(data, "--no-audit") as up:
        assert up.nats
        made = postroom("token", "create", "--data", data, "--role", "operator").line

        async def connected_until_revoked() -> None:
            closed = asyncio.Event()

            async def note_closed() -> None:
                closed.set()

            client = await nats.connect(
                up.nats, token=made["token"], allow_reconnect=False, closed_cb=note_closed
            )
            await client.flush()
            assert postroom("token", "revoke", made["token_id"], "--data", data).code == 0
            await asyncio.wait_for(closed.wait(), HANG_GUARD_S)

        asyncio.run(connected_until_revoked())
        until(lambda: up.get("/queue/status", made["token"])[0] == 401)


def test_a_port_in_use_gives_a_one_line_error_and_leaves_no_process(tmp_path: Path) -> None:
    with running(tmp_path / "one", "--no-audit", "--no-mail") as up:
        port = up.http.rsplit(":", 1)[1]
        refused = finish(
            start("postroom", "up", "--data", tmp_path / "two", "--http-port", port, "--nats-port", 0)
        )
    assert refused.code == 1
    assert refused.raw == b""
    assert "the part http cannot start: cannot listen on 127.0.0.1 port" in refused.error
    assert TokenRegistry(tmp_path / "two").list() == []  # the next start prints a first token


def test_a_second_up_of_a_folder_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    data = tmp_path / "run"
    with running(data, "--no-audit", "--no-mail") as up:
        before = up.parts(data)
        refused = postroom("up", "--data", data, "--http-port", 0, "--no-audit", "--no-mail")
        assert (refused.code, refused.raw) == (1, b"")
        said = f"another `postroom up` serves {data}: stop it first (process {up.process.pid})"
        assert said in refused.error
        assert up.parts(data) == before


def test_an_address_other_than_loopback_needs_tls(tmp_path: Path) -> None:
    refused = postroom("up", "--data", tmp_path / "run", "--host", "192.0.2.1")
    assert refused.code == 2
    assert "tokens would cross the network in the clear" in refused.errors
    assert not (tmp_path / "run").exists()


def test_unusable_certificate_is_refused_before_anything_starts(tmp_path: Path) -> None:
    made = postroom("tls", "self-signed", "--out", tmp_path / "tls").line
    for words, said in {
        ("--tls-cert", made["key"]): f"there is no certificate in {made['key']}",
        ("--tls-key", made["key"]): "--tls-key has no effect without --tls-cert",
    }.items():
        refused = postroom("up", "--data", tmp_path / "run", *words)
        assert (refused.code, said in refused.error, (tmp_path / "run").exists()) == (2, True, False)


def test_tls_covers_http_and_nats(tmp_path: Path) -> None:
    made = postroom("tls", "self-signed", "--out", tmp_path / "tls").line
    data = tmp_path / "run"
    with running(data, "--no-audit", "--demo", "--tls-cert", made["cert"], "--tls-key", made["key"]) as up:
        assert up.token is not None
        assert up.nats
        trusting = ssl.create_default_context(cafile=made["cert"])
        assert up.http.startswith("https://")
        assert up.get("/engine/status", up.token, trusting)[0] == 200
        assert up.get("/nothing", up.token, trusting)[0] == 404

        async def echo_over_tls() -> bytes:
            client = await nats.connect(up.nats, token=up.token, tls=trusting)
            waiting = await client.subscribe("plain.subject")
            await client.publish("plain.subject", b"hello")
            data = (await waiting.next_msg(timeout=HANG_GUARD_S)).data
            await client.close()
            return data

        assert asyncio.run(echo_over_tls()) == b"hello"
        until(lambda: up.get("/engine/status", up.token, trusting)[1]["organizations"])  # of the demo
        look = ("top", "--once", "--url", up.http, "--token", up.token)
        refused = run("postroom", *look)
        assert (refused.code, "SSL_CERT_FILE" in refused.error) == (1, True)
        trusted = {**os.environ, "SSL_CERT_FILE": made["cert"]}
        assert run("postroom", *look, env=trusted).line["organizations"]
        hello = {
            "protocolVersion": "2025-03-26",
            "capabilities": {},
            "clientInfo": {"name": "t", "version": "1"},
        }
        asked = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}
        tools = start(
            "postroom", "mcp", "--url", up.http, "--token", up.token, env=trusted, stdin=subprocess.PIPE
        )
        assert (
            json.loads(finish(tools, json.dumps(asked).encode() + b"\n").out)["result"]["serverInfo"]["name"]
            == "postroom"
        )


def test_init_writes_a_file_that_changes_nothing_and_is_never_overwritten(tmp_path: Path) -> None:
    made = postroom("init").line
    assert made == {"path": "postroom.toml"}
    text = Path("postroom.toml").read_text()
    assert "# http_port = 8800" in text
    assert postroom("bus", "tail", "--bus", tmp_path / "bus.yaml").code == 0  # reads the file
    again = postroom("init")
    assert again.code == 1
    assert "exists already" in again.error
    uncommented = text.replace("# http_port = 8800", "http_port = 0").replace("# nats_port", "nats_port")
    Path("postroom.toml").write_text(uncommented.replace("nats_port = 4222", "nats_port = 0"))
    with running(tmp_path / "run", "--no-audit") as up:
        assert up.nats


APP = """
from postroom import Engine

engine = Engine.open("memory://")


@engine.handler("tool_call")
async def call(message, ctx):
    return {"sum": sum(message.payload["numbers"])}
"""


def test_all_parts_use_the_store_and_no_process_shows_its_password(tmp_path: Path, database: str) -> None:
    Path("sums.py").write_text(APP)
    user, _, rest = database.removeprefix("postgres://").partition("@")
    secret = f"postgres://{user}:hidden-word@{rest}"
    data = tmp_path / "run"
    with running(data, "--store", secret, "--no-mail", "--app", "sums:engine") as up:
        assert up.token is not None
        with EngineClient(up.http, up.token) as remote:
            message_id = remote.submit(type="tool_call", org_id="acme", payload={"numbers": [1, 2, 3]})
            assert remote.result(message_id, HANG_GUARD_S) == {"sum": 6}
        until(lambda: any(message_id in str(event) for event in Audit(data / "audit").query()))
        parts = up.parts(data)
        lines = [Path(f"/proc/{part['pid']}/cmdline").read_bytes() for part in parts.values()]
        assert set(parts) == {"http", "audit", "workers"}
    assert not any(b"hidden-word" in line for line in lines)
    assert not (data / "queue.db").exists()
    assert not any(b"hidden-word" in path.read_bytes() for path in data.rglob("*") if path.is_file())


def test_an_address_that_is_not_a_store_is_refused_without_the_password(tmp_path: Path) -> None:
    for store in ("postgre://me:hidden-word@host/db", "memory://"):
        refused = postroom("up", "--data", tmp_path / "run", "--store", store)
        assert refused.code in (1, 2)
        assert "hidden-word" not in refused.errors
        assert not (tmp_path / "run").exists()


def test_the_demo_fills_every_part_and_leaves_no_token(tmp_path: Path) -> None:
    folder = tmp_path / "postroom-demo"  # of the current folder
    process = start("postroom", "up", "--demo", "--http-port", 0, "--nats-port", 0, "--no-audit")
    try:
        assert process.stdout is not None
        facts = json.loads(process.stdout.readline())
        assert (facts["demo"], facts["data"]) == (True, "postroom-demo")
        up = Running(process, facts)

        def organizations() -> dict[str, Any]:
            return dict(up.get("/engine/status", up.token)[1]["organizations"])

        until(lambda: sum("COMPLETED" in one["states"] for one in organizations().values()) > 1)
        until(lambda: len(up.get("/bus/demo-team/messages", up.token)[1]["messages"]) > 1)
        until(lambda: '"demo.help/1"' in (folder / "mail" / "events.jsonl").read_text())
        until(lambda: up.get("/tasks?agent=demo-coder", up.token)[1]["tasks"])
        assert all(name.startswith("demo-") for name in organizations())
    finally:
        process.terminate()
        ended = finish(process)
    assert ended.code == 0
    assert [known.role for known in TokenRegistry(folder).list()] == ["admin"]


SLOW_APP = """
import asyncio
from pathlib import Path
from postroom import Engine

engine = Engine.open("memory://")


@engine.handler("tool_call")
async def call(message, ctx):
    while not Path("is-stopping").exists():
        await asyncio.sleep(0.01)
    return "finished"
"""


def test_sigterm_lets_a_worker_finish_and_log_lines_name_their_part(tmp_path: Path) -> None:
    Path("slow.py").write_text(SLOW_APP)
    data = tmp_path / "run"
    with running(data, "--no-mail", "--no-audit", "--app", "slow:engine") as up:
        with EngineClient(up.http, up.token or "") as remote:
            message_id = remote.submit(type="tool_call", org_id="acme", payload={})
        path = f"/engine/messages/{message_id}"
        until(lambda: up.get(path, up.token)[1]["state"] == "PROCESSING")
        up.process.send_signal(signal.SIGTERM)
        until(lambda: not up.is_ready())
        Path("is-stopping").touch()
        ended = finish(up.process)
    assert ended.code == 0
    parts = {json.loads(line)["part"] for line in ended.errors.splitlines()}
    assert {"http"} <= parts <= {"http", "workers"}  # a worker that ends cleanly logs nothing
    with Tasks.open(f"sqlite:///{data / 'queue.db'}") as tasks:
        [record] = tasks.store.find(ByIds((message_id,)))
    assert record.state == "COMPLETED"


def test_each_part_can_be_switched_off(tmp_path: Path) -> None:
    with running(tmp_path / "plain", "--no-page", "--no-mcp", "--no-mail", "--no-audit") as up:
        assert up.nats == ""
        assert [up.get(path, up.token)[0] for path in ("/", "/page/overview", "/mcp")] == [404, 404, 404]
        assert up.get("/queue/status", up.token)[0] == 200
        assert set(up.parts(tmp_path / "plain")) == {"http"}
    data = tmp_path / "mail"
    with running(data, "--no-http") as up:
        assert up.http is None
        assert asyncio.run(echo(up.nats, up.token or "")) == b"hello"
        assert set(up.parts(data)) == {"mail", "audit"}
    nothing = postroom("up", "--data", data, "--no-http", "--no-mail", "--no-audit")
    assert (nothing.code, nothing.raw) == (2, b"")
    assert "every part is switched off" in nothing.error
