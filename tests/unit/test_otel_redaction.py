"""What OpenTelemetry exports holds no secret: spans, log records, metrics and resources."""

from typing import Any

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext, StatusCode

from postroom.server.telemetry.redaction import redacted_resource, redacting

KEY = "ghp_" + "aB7" * 12


class Kept(MetricExporter):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.data: list[Any] = []

    def export(self, metrics_data: Any, *_: Any, **__: Any) -> MetricExportResult:
        self.data.append(metrics_data)
        return MetricExportResult.SUCCESS

    def force_flush(self, *_: Any, **__: Any) -> bool:
        return True

    def shutdown(self, *_: Any, **__: Any) -> None:
        pass


def test_span_is_exported_without_secrets() -> None:
    exporter = redacting(InMemorySpanExporter, "traces")()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    links = [Link(SpanContext(1, 2, is_remote=False), {"of": KEY})]
    with tracer.start_as_current_span(
        f"call {KEY}", attributes={"url.path": f"/a/{KEY}"}, links=links
    ) as span:
        span.set_attributes({"password": "tulip", "names": ["a", KEY], "n": 7, KEY: "x"})
        span.add_event(f"asked {KEY}", {"with": KEY})
        span.record_exception(ValueError(f"no {KEY}"))
        span.set_status(StatusCode.ERROR, f"failed: {KEY}")
    with tracer.start_as_current_span("plain", attributes={"n": 7, "names": ["a"]}):
        pass
    found, plain = exporter.get_finished_spans()
    assert KEY not in found.to_json()
    assert "tulip" not in found.to_json()
    assert found.name == "call <key>"
    assert found.attributes["url.path"] == "/a/<key>"
    assert (found.attributes["names"], found.attributes["n"]) == (("a", "<key>"), 7)
    assert found.events[0].name == "asked <key>"
    assert found.status.description == "failed: <key>"
    assert found.links[0].attributes == {"of": "<key>"}
    assert (plain.name, plain.attributes["n"]) == ("plain", 7)
    assert found.context.span_id != plain.context.span_id


def test_log_record_is_exported_without_secrets() -> None:
    exporter = redacting(InMemoryLogRecordExporter, "logs")()
    provider = LoggerProvider()
    provider.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    log = provider.get_logger("test")
    for body in (f"failed: {KEY}", {"token": "tulip", "list": [KEY]}, "plain"):
        log.emit(
            LogRecord(
                timestamp=1, severity_number=SeverityNumber.INFO, body=body, attributes={"a": KEY, "n": 7}
            )
        )
    logs = exporter.get_finished_logs()
    assert [one.log_record.body for one in logs] == [
        "failed: <key>", {"token": "<redacted>", "list": ["<key>"]}, "plain",
    ]  # fmt: skip
    assert all(dict(one.log_record.attributes or {}) == {"a": "<key>", "n": 7} for one in logs)


def test_metric_is_exported_without_secrets() -> None:
    exporter = redacting(Kept, "metrics")()
    provider = MeterProvider([PeriodicExportingMetricReader(exporter)])
    provider.get_meter("test").create_counter("calls").add(1, {"of": KEY, "n": 7})
    provider.shutdown()
    [data] = [one for one in exporter.data if one.resource_metrics]
    assert KEY not in data.to_json()
    [point] = data.resource_metrics[0].scope_metrics[0].metrics[0].data.data_points
    assert point.attributes == {"of": "<key>", "n": 7}


def test_resource_is_redacted() -> None:
    resource = redacted_resource(Resource({"service.name": "a", "deployment.token": "tulip", "x": KEY}))
    assert resource.attributes == {"service.name": "a", "deployment.token": "<redacted>", "x": "<key>"}
