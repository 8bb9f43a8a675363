"""Spans, metrics and logs of real processes, as a real OTLP receiver gets them."""

import asyncio
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from postroom.server.telemetry.export import SIGNALS, exporting, protocol_of, wanted_signals
from tests.integration.commandline import finish, isolate, postroom, start
from tests.integration.mcpclients import call, over_stdio
from tests.integration.ups import running
from tests.otlpreceiver import Receiver, attributes, receiving, receiving_grpc
from tests.waiting import HANG_GUARD_S, until

KEY = "ghp_" + "aB7" * 12
"""What the handler that fails puts into its error."""
METRICS = {"postroom.queue.messages", "postroom.mail.mailboxes", "postroom.audit.shipped"}
"""One of each part."""
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
APP = """
from opentelemetry import trace
from postroom import Engine

engine = Engine.open("sqlite:///run/queue.db")
tracer = trace.get_tracer("app")

@engine.handler("tool_call")
def call_tool(message, ctx):
    with tracer.start_as_current_span("inside the handler"):
        if message.payload["tool"] == "broken":
            raise ValueError("no such tool, said " + "ghp_" + "aB7" * 12)
        if message.payload["tool"] == "parent":
            ctx.submit(type="tool_call", payload={"tool": "child"})
    return {"ok": True}

@engine.handler("model_call", pool="process")
def call_model(message, ctx):
    with tracer.start_as_current_span("in a process", attributes={"n": 7, "names": ["a", "b"]}) as span:
        span.add_event("asked", {"model": "m"})
        span.set_attribute("api_key", "tulip-of-nobody")
        ctx.submit(type="tool_call", payload={"tool": "from a process"})
    return {"ok": True}
"""


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def post(address: str, token: str, body: Any, **headers: str) -> Any:
    request = urllib.request.Request(  # noqa: S310 - our own server
        address,
        json.dumps(body).encode(),
        {"authorization": f"Bearer {token}", "content-type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=HANG_GUARD_S) as answer:  # noqa: S310 - the same
        return json.loads(answer.read())


def submit(url: str, token: str, messages: list[dict[str, Any]], **headers: str) -> list[str]:
    return list(post(f"{url}/engine/messages", token, {"messages": messages}, **headers)["message_ids"])


def work_on_a_task(url: str, token: str) -> None:
    post(f"{url}/queue/enqueue", token, {"agent": "triage", "payload": 1})
    task = post(f"{url}/queue/next", token, {"agent": "triage"})
    post(f"{url}/queue/complete", token, {"task_id": task["task_id"], "lease": task["lease"], "decision": 1})


class Traced(NamedTuple):
    """What was received from a server and a worker, and the ids of the messages."""

    receiver: Receiver
    parent: str
    batch: list[str]
    forked: str
    """The message whose handler runs in a process of its own."""

    def spans(self, name: str) -> dict[str, Any]:
        """The spans of one operation by message."""
        return {
            attributes(span)["messaging.message.id"]: span for span in self.receiver.spans(f"{name} org:")
        }


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    """A message that sends another one, and a batch of which one message fails."""
    folder = tmp_path_factory.mktemp("traced")
    (folder / "app.py").write_text(APP)
    with pytest.MonkeyPatch.context() as patch, receiving() as receiver:
        isolate(patch, folder)
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_BLRP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")
        with running(Path("run"), "--app", "app:engine") as up:
            url, token = up.http, str(up.token)
            fine = {"type": "tool_call", "org_id": "acme", "payload": {"tool": "parent"}}
            bad = {**fine, "payload": {"tool": "broken"}, "max_retries": 0}
            [parent] = submit(url, token, [fine], traceparent=f"00-{TRACE_ID}-{SPAN_ID}-01")
            batch = submit(url, token, [{**fine, "payload": {"tool": "a"}}, bad])
            alone = {**fine, "type": "model_call", "payload": {"model": "m", "messages": []}}
            [forked] = submit(url, token, [alone])
            with suppress(urllib.error.HTTPError):
                post(f"{url}/engine/{KEY}", token, {})
            until(lambda: len(receiver.spans("settle")) == 6)
            work_on_a_task(url, token)
            until(lambda: receiver.metrics().keys() >= METRICS)
        yield Traced(receiver, parent, batch, forked)


def names(span: Any) -> tuple[str, str]:
    """Trace and parent of a span."""
    return span.trace_id.hex(), span.parent_span_id.hex()


@pytest.mark.statement("tracing-spans")
def test_a_message_is_one_trace_from_its_sender_to_its_settlement(traced: Traced) -> None:
    assert traced.receiver.services() == {"postroom-http", "postroom-worker"}
    [request] = [span for span in traced.receiver.spans("POST") if span.trace_id.hex() == TRACE_ID]
    assert request.parent_span_id.hex() == SPAN_ID
    assert attributes(request)["http.response.status_code"] == 202
    send, process, settle = (traced.spans(name)[traced.parent] for name in ("send", "process", "settle"))
    assert names(send) == (TRACE_ID, request.span_id.hex())
    assert names(process) == (TRACE_ID, send.span_id.hex())
    assert names(settle) == (TRACE_ID, process.span_id.hex())
    assert [span.kind for span in (send, process, settle)] == [4, 5, 3]  # PRODUCER, CONSUMER, CLIENT


def test_a_handlers_own_spans_and_messages_are_below_its_process_span(traced: Traced) -> None:
    sends, processes = traced.spans("send"), traced.spans("process")
    inside = [span for span in traced.receiver.spans("inside") if span.trace_id.hex() == TRACE_ID]
    assert processes[traced.parent].span_id in [span.parent_span_id for span in inside]
    [child] = [one for one, span in sends.items() if span.trace_id.hex() == TRACE_ID and one != traced.parent]
    assert sends[child].trace_id.hex() == TRACE_ID
    assert sends[child].parent_span_id in [span.span_id for span in inside]
    assert processes[child].parent_span_id == sends[child].span_id


def test_spans_of_a_handler_in_its_own_process_are_below_its_process_span(traced: Traced) -> None:
    process = traced.spans("process")[traced.forked]
    [inside] = traced.receiver.spans("in a process")
    assert names(inside) == (process.trace_id.hex(), process.span_id.hex())
    assert attributes(inside)["n"] == 7
    assert [one.string_value for one in attributes(inside)["names"].values] == ["a", "b"]
    assert [(one.name, attributes(one)) for one in inside.events] == [("asked", {"model": "m"})]
    assert inside.end_time_unix_nano >= inside.start_time_unix_nano >= process.start_time_unix_nano
    [send] = [one for one in traced.spans("send").values() if one.parent_span_id == inside.span_id]
    [below] = [one for one in traced.spans("process").values() if one.parent_span_id == send.span_id]
    assert below.trace_id == process.trace_id


def test_a_task_has_spans_below_the_requests_of_its_sender_and_worker(traced: Traced) -> None:
    requests = {span.span_id for span in traced.receiver.spans("POST")}
    found = {name: traced.receiver.spans(f"{name} triage") for name in ("send", "receive")}
    found["settle"] = [one for one in traced.receiver.spans("settle ") if "org:" not in one.name]
    assert {name: len(spans) for name, spans in found.items()} == {"send": 1, "receive": 1, "settle": 1}
    [ids] = {attributes(span)["messaging.message.id"] for [span] in found.values()}
    assert ids
    assert {span.parent_span_id for [span] in found.values()} <= requests


def test_a_batch_has_a_span_for_each_message_and_claims_link_to_them(traced: Traced) -> None:
    creates = traced.spans("create")
    assert creates.keys() == set(traced.batch)
    [whole] = [span for span in traced.receiver.spans("send") if span.name == "send"]
    assert attributes(whole)["messaging.batch.message_count"] == 2
    assert {span.parent_span_id for span in creates.values()} == {whole.span_id}
    links = {link.span_id for span in traced.receiver.spans("receive") for link in span.links}
    assert links == {span.span_id for span in (*traced.spans("send").values(), *creates.values())}


def test_spans_have_the_attributes_of_the_messaging_conventions(traced: Traced) -> None:
    found = attributes(traced.spans("process")[traced.parent])
    assert found["messaging.system"] == "postroom"
    assert found["messaging.operation.type"] == found["messaging.operation.name"] == "process"
    assert found["messaging.destination.name"] == "org:acme"
    assert found["postroom.message.type"] == "tool_call"
    failed = traced.spans("process")[traced.batch[1]]
    assert failed.status.code == 2
    assert attributes(failed)["error.type"] == "ValueError"


def test_metrics_and_logs_are_exported(traced: Traced) -> None:
    found = traced.receiver.metrics()
    errors = [attributes(point).get("error.type") for point in found["messaging.process.duration"]]
    assert {None, "ValueError"} <= set(errors)
    assert max(point.as_int for point in found["messaging.client.sent.messages"]) == 4  # of the server
    assert {
        attributes(point)["messaging.destination.name"] for point in found["postroom.queue.messages"]
    } == {"org:acme"}
    texts = traced.receiver.log_texts()
    assert "submitted" in texts
    assert any("failed in attempt 1: ValueError: no such tool" in text for text in texts)


def test_nothing_that_is_exported_holds_a_secret(traced: Traced) -> None:
    exported = "".join(str(request) for signal in SIGNALS for request in traced.receiver.received(signal))
    assert "ValueError: no such tool, said <key>" in exported
    assert "/engine/<key>" in exported
    assert KEY not in exported
    assert "tulip" not in exported


PLAIN = """
import asyncio, sys, tempfile
from postroom import Engine

async def run(engine, payload):
    @engine.handler("tool_call", **{"pool": "process"} if "alone" in payload else {})
    def call(message, ctx):
        return 1 / message.payload["by"]

    worker = asyncio.create_task(engine.run())
    handle = await engine.submit(type="tool_call", org_id="acme", payload=payload, max_retries=0)
    await engine.core.wakeups.wait_for_end(handle.message_id, 300)
    await engine.submit(type="tool_call", org_id="acme", payload=payload, delay_s=600)
    if "waits" in payload:
        await asyncio.to_thread(sys.stdin.readline)
    await engine.stop()
    await worker

with tempfile.TemporaryDirectory() as folder:
    for number, payload in enumerate([{"by": 1, "waits": True}, {"by": 0}, {"by": 1, "alone": True}]):
        with Engine.open(f"sqlite:///{folder}/{number}/queue.db") as engine:
            asyncio.run(run(engine, payload))
    if "opentelemetry" in sys.modules:
        sys.modules["opentelemetry.metrics"].get_meter_provider().force_flush()
    print("queue.db" in open("/proc/self/maps").read())
print(sorted(name for name in sys.modules if name.startswith("opentelemetry"))[:1])
"""
"""Nothing but an engine that runs: a program of a user."""


def run_plain(is_seen: Callable[[], bool] = lambda: True, **environ: str) -> str:
    """Run the program; it ends its first engine when something is seen. Returns what it imported."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", PLAIN],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=os.environ | environ,
    ) as program:
        until(is_seen)
        printed, errors = program.communicate("\n", timeout=HANG_GUARD_S)
    assert (program.returncode, "Traceback" in errors) == (0, False), errors
    is_open, imported = printed.splitlines()
    assert is_open == "False", "an export opened a store that was closed"
    return imported


@pytest.mark.parametrize("over", [receiving, receiving_grpc])
def test_the_variables_are_enough_for_a_program_that_runs_an_engine(over: Any) -> None:
    with over() as receiver:
        protocol = "grpc" if over is receiving_grpc else "http/protobuf"
        imported = run_plain(
            lambda: receiver.metrics().keys() >= {"postroom.queue.messages", "postroom.workers"},
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url, OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
            OTEL_SERVICE_NAME="shop", OTEL_RESOURCE_ATTRIBUTES="deployment.environment=test",
            OTEL_METRIC_EXPORT_INTERVAL="100",
        )  # fmt: skip
    assert imported == "['opentelemetry']"
    [resource] = {str(each.resource) for one in receiver.received("traces") for each in one.resource_spans}
    assert receiver.services() == {"shop"}
    assert "deployment.environment" in resource
    sent = receiver.spans("send org:acme")
    assert len(sent) == 6
    processed = receiver.spans("process org:acme")
    assert {span.parent_span_id for span in processed} <= {span.span_id for span in sent}
    assert [attributes(span).get("error.type") for span in processed] == [None, "ZeroDivisionError", None]
    assert len(receiver.spans("settle")) == 3
    assert {"messaging.client.sent.messages", "messaging.process.duration"} <= receiver.metrics().keys()
    assert any("failed in attempt 1: ZeroDivisionError" in text for text in receiver.log_texts())


def test_engine_exports_only_the_configured_signals() -> None:
    with receiving() as receiver:
        run_plain(
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url, OTEL_TRACES_EXPORTER="none", OTEL_LOGS_EXPORTER="none"
        )
    assert not receiver.received("traces")
    assert not receiver.received("logs")
    assert "messaging.client.sent.messages" in receiver.metrics()


def test_engine_without_an_exporter_imports_no_telemetry() -> None:
    """Other variables that choose no signal are below, without a program for each of them."""
    environ: Any = {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    assert wanted_signals(environ) == []
    assert run_plain(**environ) == "[]"


def test_nothing_is_imported_by_a_server_without_a_variable() -> None:
    program = """
import sys
import postroom.server.app
from postroom.server.telemetry.export import exporting
with exporting("x") as telemetry:
    assert telemetry is None
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("environ", "signals"),
    [
        ({}, []),
        ({"OTEL_SERVICE_NAME": "x"}, []),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}, ["traces", "metrics", "logs"]),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318", "OTEL_SDK_DISABLED": "true"}, []),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318", "OTEL_LOGS_EXPORTER": "none"},
            ["traces", "metrics"],
        ),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:4318/v1/traces"}, ["traces"]),
        ({"OTEL_METRICS_EXPORTER": "otlp"}, ["metrics"]),
    ],
)
def test_the_standard_variables_choose_the_signals(environ: dict[str, str], signals: list[str]) -> None:
    assert wanted_signals(environ) == signals


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"), ("OTEL_EXPORTER_OTLP_LOGS_PROTOCOL", "thrift")],
)
def test_a_wrong_protocol_gives_a_one_line_error_and_stops_nothing(
    caplog: pytest.LogCaptureFixture, variable: str, value: str
) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", variable: value}
    with exporting("x", environ) as telemetry:
        assert telemetry is None
    [sentence] = caplog.messages
    assert f"telemetry is not exported: {variable} is '{value}'" in sentence
    assert sentence.endswith("set it to http/protobuf or grpc")


def test_each_signal_has_its_protocol() -> None:
    environ = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "http/protobuf"}
    assert [protocol_of(signal, environ)[1] for signal in SIGNALS] == ["grpc", "grpc", "http/protobuf"]
    assert protocol_of("traces", {}) == ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")


def test_tools_of_mcp_over_stdio_are_exported_over_grpc(tmp_path: Path) -> None:
    async def use(environ: dict[str, str]) -> None:
        async with over_stdio("--data", tmp_path / "run", "--agent", "ann", environ=environ) as client:
            await call(client, "submit", type="tool_call", payload={})

    with receiving_grpc() as receiver:
        asyncio.run(use({"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}))
        assert receiver.services() == {"postroom-mcp"}
        [send] = receiver.spans("send org:")
        assert send.parent_span_id in [span.span_id for span in receiver.spans("POST")]
        assert "messaging.client.sent.messages" in receiver.metrics()
        assert "submitted" in receiver.log_texts()


def test_a_wrong_variable_is_one_line_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    token = postroom("token", "create", "--data", "run", "--role", "admin").line["token"]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    server = start("postroom", "tasks", "serve", "--data", "run", "--port", 0)
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        message = {"type": "tool_call", "org_id": "acme", "payload": {"tool": "t"}}
        assert submit(url, token, [message])
    finally:
        server.terminate()
        done = finish(server)
    assert done.code == 0
    assert "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json', which is not supported" in done.errors
