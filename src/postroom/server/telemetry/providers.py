"""The providers of OpenTelemetry in one process, with exporters over OTLP.

They export spans of engines, task queues and HTTP requests, metrics, and the logs of library and server.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Final, Protocol

from opentelemetry import metrics, trace
from opentelemetry._logs import Logger, LogRecord, SeverityNumber
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from postroom.engine.global_queue import GlobalQueue
from postroom.server.telemetry.child_spans import ChildSpans
from postroom.server.telemetry.engine_spans import EngineGauges, EngineSpans, TaskSpans
from postroom.server.telemetry.redaction import redacted_resource, redacting
from postroom.server.telemetry.server_log import ServerLog, error_location

SCOPE = "postroom"
FLUSH_MS = 5_000  # for the last export at the end of a process
QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})  # asked all the time by machines
SERVER_ERROR = 500
NANOS_PER_S = 1_000_000_000
_EXPORTERS: Final[Mapping[str, tuple[str, str]]] = {
    "traces": ("trace_exporter", "OTLPSpanExporter"),
    "metrics": ("metric_exporter", "OTLPMetricExporter"),
    "logs": ("_log_exporter", "OTLPLogExporter"),
}
_SEVERITIES = (
    (logging.CRITICAL, SeverityNumber.FATAL),
    (logging.ERROR, SeverityNumber.ERROR),
    (logging.WARNING, SeverityNumber.WARN),
    (logging.INFO, SeverityNumber.INFO),
)
_propagator = TraceContextTextMapPropagator()


class SpannedApp(Protocol):
    """An ASGI app whose task queues note spans."""

    task_spans: TaskSpans | None


class Telemetry:
    """The providers of one process. `protocols` has the protocol of each exported signal."""

    def __init__(self, service: str, protocols: Mapping[str, str], environ: Mapping[str, str]) -> None:
        attributes = environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        is_named = environ.get("OTEL_SERVICE_NAME") or "service.name=" in attributes
        self._protocols = protocols
        resource = redacted_resource(Resource.create({} if is_named else {"service.name": service}))
        self._closers: list[Callable[[], object]] = []
        self._child_spans: ChildSpans | None = None
        self._gauges: EngineGauges | None = None
        self._traces = self._trace_provider(resource) if "traces" in protocols else None
        self._metrics = self._metric_provider(resource) if "metrics" in protocols else None
        self._logs = self._log_provider(resource) if "logs" in protocols else None

    def _exporter(self, signal: str) -> Any:
        """The exporter of a signal. Only the library of its protocol is imported."""
        library = "grpc" if self._protocols[signal] == "grpc" else "http"
        module, name = _EXPORTERS[signal]
        exporter = getattr(import_module(f"opentelemetry.exporter.otlp.proto.{library}.{module}"), name)
        return redacting(exporter, signal)()

    def _trace_provider(self, resource: Resource) -> TracerProvider:
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._child_spans = ChildSpans(BatchSpanProcessor(self._exporter("traces")), resource)
        provider.add_span_processor(self._child_spans)
        trace.set_tracer_provider(provider)  # for the spans that handlers make
        self._closers.append(provider.shutdown)
        return provider

    def _metric_provider(self, resource: Resource) -> MeterProvider:
        reader = PeriodicExportingMetricReader(self._exporter("metrics"))
        provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        metrics.set_meter_provider(provider)
        self._closers.append(lambda: provider.shutdown(FLUSH_MS))
        return provider

    def _log_provider(self, resource: Resource) -> LoggerProvider:
        provider = LoggerProvider(resource, shutdown_on_exit=False)
        provider.add_log_record_processor(BatchLogRecordProcessor(self._exporter("logs")))
        handler = OtelHandler(provider.get_logger(SCOPE))
        logger = logging.getLogger(SCOPE)
        logger.addHandler(handler)
        self._closers += [lambda: logger.removeHandler(handler), provider.shutdown]
        return provider

    def attach(self, engine: GlobalQueue, *, while_working: bool = False) -> None:
        """Trace and measure an engine. `while_working` reads its store only while it works."""
        tracer = (self._traces or trace.NoOpTracerProvider()).get_tracer(SCOPE)
        meter = (self._metrics or metrics.NoOpMeterProvider()).get_meter(SCOPE)
        engine.core.additions.telemetry = EngineSpans(tracer, meter, self._child_spans)
        if self._gauges is None:
            self._gauges = EngineGauges(meter)
        self._gauges.engines[engine] = while_working

    def task_spans(self) -> TaskSpans | None:
        """The spans of task queues; None when spans are not exported."""
        return None if self._traces is None else TaskSpans(self._traces.get_tracer(SCOPE))

    def observe(self, gauges: Mapping[str, Callable[[], float | None]]) -> None:
        """Export what functions return, by the name of the metric. None is not a value."""
        if self._metrics is None:
            return

        def observations(read: Callable[[], float | None], _: CallbackOptions) -> Iterator[Observation]:
            found = read()
            if found is not None:
                yield Observation(found)

        meter = self._metrics.get_meter(SCOPE)
        for name, read in gauges.items():
            meter.create_observable_gauge(name, [partial(observations, read)])

    def follow(self, server_log: ServerLog) -> None:
        """Export the lines of a server log."""
        if self._logs is not None:
            server_log.listener = line_emitter(self._logs.get_logger(SCOPE))

    def serving(self, app: SpannedApp, engine: GlobalQueue, server_log: ServerLog) -> Any:
        """An app whose requests, engine and log are exported."""
        self.attach(engine)
        app.task_spans = self.task_spans()
        self.follow(server_log)
        return app if self._traces is None else TracedApp(app, self._traces.get_tracer(SCOPE))

    def close(self) -> None:
        """Export what is left, and end."""
        for close in self._closers:
            close()


class TracedApp:
    """An ASGI app around another one. All other attributes are those of the inner app."""

    def __init__(self, app: Any, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] in QUIET_PATHS:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
        with self._tracer.start_as_current_span(
            scope["method"], _propagator.extract(headers), SpanKind.SERVER, attributes
        ) as span:

            async def noting(message: Any) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= SERVER_ERROR:
                        span.set_status(StatusCode.ERROR)
                await send(message)

            await self._app(scope, receive, noting)


class OtelHandler(logging.Handler):
    """Exports what the library logs. The text of a traceback stays here: it may quote a payload."""

    def __init__(self, logger: Logger) -> None:
        super().__init__(logging.INFO)
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        attributes: dict[str, Any] = {"logger.name": record.name}
        if record.exc_info and record.exc_info[1] is not None:
            attributes["error.type"] = error_location(record.exc_info[1])
        severity = next(
            (number for level, number in _SEVERITIES if record.levelno >= level), SeverityNumber.DEBUG
        )
        self._logger.emit(
            LogRecord(
                timestamp=round(record.created * NANOS_PER_S), severity_number=severity,
                severity_text=record.levelname, body=record.getMessage(), attributes=attributes,
            )
        )  # fmt: skip


def line_emitter(logger: Logger) -> Callable[[dict[str, Any]], None]:
    """A function that exports one line of a server log."""

    def emit(line: dict[str, Any]) -> None:
        attributes = {
            name: value if isinstance(value, str | bool | int | float) else repr(value)
            for name, value in line.items()
            if name not in ("ts", "event") and value != ""
        }
        severity = SeverityNumber.WARN if line["event"] == "refused" else SeverityNumber.INFO
        logger.emit(
            LogRecord(
                timestamp=round(line["ts"] * NANOS_PER_S), severity_number=severity, body=line["event"],
                attributes=attributes,
            )
        )  # fmt: skip

    return emit
