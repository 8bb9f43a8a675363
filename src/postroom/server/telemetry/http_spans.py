"""A span for each HTTP request, with the trace context that the caller sent."""

from typing import Any

from opentelemetry.trace import SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

QUIET_PATHS = frozenset({"/health", "/ready", "/metrics"})  # asked all the time by machines
SERVER_ERROR = 500

_propagator = TraceContextTextMapPropagator()


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
