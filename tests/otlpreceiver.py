"""Receivers of OTLP over HTTP and over gRPC: they decode what exporters send."""

import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc  # type: ignore[import-untyped, unused-ignore]
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2_grpc
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Receiver:
    """What was received so far."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._mutex = threading.Lock()
        self._requests: dict[str, list[Any]] = {"traces": [], "metrics": [], "logs": []}

    def add(self, path: str, body: bytes) -> None:
        signal = path.removeprefix("/v1/")
        kinds: dict[str, Any] = {
            "traces": ExportTraceServiceRequest,
            "metrics": ExportMetricsServiceRequest,
            "logs": ExportLogsServiceRequest,
        }
        request = kinds[signal]()
        request.ParseFromString(body)
        self.note(signal, request)

    def note(self, signal: str, request: Any) -> None:
        with self._mutex:
            self._requests[signal].append(request)

    def received(self, signal: str) -> list[Any]:
        with self._mutex:
            return list(self._requests[signal])

    def spans(self, name: str = "") -> list[Any]:
        """The spans whose name begins with `name`."""
        return [
            span
            for request in self.received("traces")
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
            if span.name.startswith(name)
        ]

    def services(self) -> set[str]:
        """The names of the services that sent spans."""
        return {
            attributes(resource.resource)["service.name"]
            for request in self.received("traces")
            for resource in request.resource_spans
        }

    def metrics(self) -> dict[str, list[Any]]:
        """The data points of each metric."""
        found: dict[str, list[Any]] = {}
        for request in self.received("metrics"):
            for resource in request.resource_metrics:
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        data = getattr(metric, metric.WhichOneof("data"))
                        found.setdefault(metric.name, []).extend(data.data_points)
        return found

    def log_texts(self) -> list[str]:
        """The texts of all log records."""
        return [
            record.body.string_value
            for request in self.received("logs")
            for resource in request.resource_logs
            for scope in resource.scope_logs
            for record in scope.log_records
        ]


def attributes(holder: Any) -> dict[str, Any]:
    """The attributes of a span, a resource or a data point."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in holder.attributes}


@contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver on a free port of loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.headers["content-type"] == "application/x-protobuf"
            receiver.add(self.path, body)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def receiving_grpc() -> Iterator[Receiver]:
    """As `receiving`, over gRPC."""

    class Service:
        def __init__(self, signal: str, answer: Any) -> None:
            self._signal = signal
            self._answer = answer

        def Export(self, request: Any, _context: Any) -> Any:  # noqa: N802 - the name of the method
            receiver.note(self._signal, request)
            return self._answer()

    server = grpc.server(ThreadPoolExecutor(2))
    traces, metrics, logs = (
        Service("traces", ExportTraceServiceResponse),
        Service("metrics", ExportMetricsServiceResponse),
        Service("logs", ExportLogsServiceResponse),
    )
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(traces, server)  # type: ignore[no-untyped-call]
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(metrics, server)  # type: ignore[no-untyped-call]
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(logs, server)  # type: ignore[no-untyped-call]
    receiver = Receiver(f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None).wait()
