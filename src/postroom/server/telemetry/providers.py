"""The providers of OpenTelemetry in one process, with exporters over OTLP."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final, Protocol

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from postroom.engine.global_queue import GlobalQueue
from postroom.server.telemetry.child_spans import ChildSpans
from postroom.server.telemetry.engine_spans import EngineGauges, EngineSpans, TaskSpans
from postroom.server.telemetry.export import Signal, protocol_of
from postroom.server.telemetry.http_spans import TracedApp
from postroom.server.telemetry.log_records import OtelHandler, line_emitter
from postroom.server.telemetry.redaction import redacted_resource, redacting
from postroom.server.telemetry.server_log import ServerLog

SCOPE = "postroom"
FLUSH_MS = 5_000  # for the last export at the end of a process
_EXPORTERS: Final[Mapping[Signal, tuple[str, str]]] = {
    "traces": ("trace_exporter", "OTLPSpanExporter"),
    "metrics": ("metric_exporter", "OTLPMetricExporter"),
    "logs": ("_log_exporter", "OTLPLogExporter"),
}


def _exporter(signal: Signal, environ: Mapping[str, str]) -> Any:
    """The exporter of a signal. Only the library of its protocol is imported."""
    library = "grpc" if protocol_of(signal, environ) == "grpc" else "http"
    module, name = _EXPORTERS[signal]
    exporter = getattr(import_module(f"opentelemetry.exporter.otlp.proto.{library}.{module}"), name)
    return redacting(exporter, signal)()


class SpannedApp(Protocol):
    """An ASGI app whose task queues note spans."""

    task_spans: TaskSpans | None


class Telemetry:
    """The providers of one process."""

    def __init__(self, service: str, signals: Sequence[Signal], environ: Mapping[str, str]) -> None:
        attributes = environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        is_named = environ.get("OTEL_SERVICE_NAME") or "service.name=" in attributes
        self._environ = environ
        resource = redacted_resource(Resource.create({} if is_named else {"service.name": service}))
        self._closers: list[Callable[[], object]] = []
        self._child_spans: ChildSpans | None = None
        self._gauges: EngineGauges | None = None
        self._traces = self._trace_provider(resource) if "traces" in signals else None
        self._metrics = self._metric_provider(resource) if "metrics" in signals else None
        self._logs = self._log_provider(resource) if "logs" in signals else None

    def _trace_provider(self, resource: Resource) -> TracerProvider:
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._child_spans = ChildSpans(BatchSpanProcessor(_exporter("traces", self._environ)), resource)
        provider.add_span_processor(self._child_spans)
        trace.set_tracer_provider(provider)  # for the spans that handlers make
        self._closers.append(provider.shutdown)
        return provider

    def _metric_provider(self, resource: Resource) -> MeterProvider:
        reader = PeriodicExportingMetricReader(_exporter("metrics", self._environ))
        provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        metrics.set_meter_provider(provider)
        self._closers.append(lambda: provider.shutdown(FLUSH_MS))
        return provider

    def _log_provider(self, resource: Resource) -> LoggerProvider:
        provider = LoggerProvider(resource, shutdown_on_exit=False)
        provider.add_log_record_processor(BatchLogRecordProcessor(_exporter("logs", self._environ)))
        handler = OtelHandler(provider.get_logger(SCOPE))
        logger = logging.getLogger(SCOPE)
        logger.addHandler(handler)
        self._closers += [lambda: logger.removeHandler(handler), provider.shutdown]
        return provider

    def attach(self, engine: GlobalQueue, *, while_working: bool = False) -> None:
        """Trace and measure an engine. `while_working` reads its store only while it works."""
        tracer = (self._traces or trace.NoOpTracerProvider()).get_tracer(SCOPE)
        meter = (self._metrics or metrics.NoOpMeterProvider()).get_meter(SCOPE)
        engine.core.telemetry = EngineSpans(tracer, meter, self._child_spans)
        if self._gauges is None:
            self._gauges = EngineGauges(meter)
        self._gauges.engines[engine] = while_working

    def task_spans(self) -> TaskSpans | None:
        """The spans of task queues; None when spans are not exported."""
        return None if self._traces is None else TaskSpans(self._traces.get_tracer(SCOPE))

    def observe(self, gauges: Mapping[str, Callable[[], float | None]]) -> None:
        """Export what functions return, by the name of the metric. None is no value."""
        if self._metrics is None:
            return
        meter = self._metrics.get_meter(SCOPE)
        for name, read in gauges.items():
            meter.create_observable_gauge(name, [partial(_observations, read)])

    def follow(self, server_log: ServerLog) -> None:
        """Export the lines of a server log."""
        if self._logs is not None:
            server_log.listener = line_emitter(self._logs.get_logger(SCOPE))

    def serving(self, app: SpannedApp, engine: GlobalQueue, server_log: ServerLog) -> Any:
        """An app whose requests, engine and log are exported."""
        self.attach(engine)
        app.task_spans = self.task_spans()
        self.follow(server_log)
        return self._traced(app)

    def _traced(self, app: SpannedApp) -> Any:
        """An ASGI app with a span for each request; the app itself when spans are not exported."""
        return app if self._traces is None else TracedApp(app, self._traces.get_tracer(SCOPE))

    def close(self) -> None:
        """Export what is left, and end."""
        for close in self._closers:
            close()


def _observations(read: Callable[[], float | None], _: CallbackOptions) -> Iterator[Observation]:
    found = read()
    if found is not None:
        yield Observation(found)
