"""Spans of handlers that run in forked processes: the child collects them, and its worker exports them.

A child that exported by itself would share the connection of its worker, would delay the outcome
of its message, and would lose spans at its end, which is sudden.

Rule 1: at most `SPANS_MAX` spans of one child are kept, the first ones.
Rule 2: a child that dies before its outcome loses its spans.
Rule 3: a span that cannot be passed on is a line in the log, and never the failure of a message.
"""

from typing import Any, TypeAlias

import msgspec
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from postroom.system.log import library_log

SPANS_MAX = 1_000  # of one handler

_log = library_log("postroom.telemetry")

Attributes: TypeAlias = dict[str, Any]


class ContextData(msgspec.Struct, frozen=True, array_like=True):
    """A `SpanContext`."""

    trace_id: str
    span_id: str
    flags: int
    state: str


class EventData(msgspec.Struct, frozen=True, array_like=True):
    """An event of a span."""

    name: str
    attributes: Attributes
    time_ns: int


class SpanData(msgspec.Struct, frozen=True, array_like=True):
    """A span that has ended."""

    name: str
    context: ContextData
    parent: ContextData | None
    kind: int
    attributes: Attributes
    events: list[EventData]
    links: list[tuple[ContextData, Attributes]]
    status: int
    status_text: str | None
    start_ns: int
    end_ns: int
    scope: tuple[str, str, str]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[SpanData]).decode


class ChildSpans(SpanProcessor):
    """Passes spans on to another processor. In a forked child, it collects them."""

    def __init__(self, exporting: SpanProcessor, resource: Resource) -> None:
        self._exporting = exporting
        self._resource = resource
        self._collected: list[ReadableSpan] | None = None
        """None in the process that exports."""

    def collect(self) -> None:
        """Collect spans from here on: this is a forked child."""
        self._collected = []

    def collected(self) -> bytes:
        """The collected spans, encoded."""
        try:
            return _encode([_data_of(span) for span in self._collected or ()])
        except Exception as error:  # noqa: BLE001 - rule 3
            _log.warning("the spans of a handler in its own process are lost: %s", error)
            return b""

    def add(self, collected: bytes) -> None:
        """Export what a child has collected."""
        try:
            for data in _decode(collected):
                self._exporting.on_end(_span_of(data, self._resource))
        except Exception as error:  # noqa: BLE001 - rule 3
            _log.warning("the spans of a handler in its own process are lost: %s", error)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        if self._collected is None:
            self._exporting.on_start(span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        if self._collected is None:
            self._exporting.on_end(span)
        elif len(self._collected) < SPANS_MAX and span.context.trace_flags.sampled:
            self._collected.append(span)

    def shutdown(self) -> None:
        if self._collected is None:
            self._exporting.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._collected is not None or self._exporting.force_flush(timeout_millis)


def _data_of(span: ReadableSpan) -> SpanData:
    scope = span.instrumentation_scope
    return SpanData(
        span.name, _context_data(span.context), None if span.parent is None else _context_data(span.parent),
        span.kind.value, dict(span.attributes or {}),
        [EventData(one.name, dict(one.attributes or {}), one.timestamp) for one in span.events],
        [(_context_data(one.context), dict(one.attributes or {})) for one in span.links],
        span.status.status_code.value, span.status.description, span.start_time or 0, span.end_time or 0,
        ("", "", "") if scope is None else (scope.name, scope.version or "", scope.schema_url or ""),
    )  # fmt: skip


def _context_data(context: SpanContext) -> ContextData:
    return ContextData(
        f"{context.trace_id:032x}", f"{context.span_id:016x}", int(context.trace_flags),
        context.trace_state.to_header(),
    )  # fmt: skip


def _span_of(data: SpanData, resource: Resource) -> ReadableSpan:
    name, version, schema_url = data.scope
    return ReadableSpan(
        data.name,
        _context_of(data.context),
        None if data.parent is None else _context_of(data.parent),
        resource,
        data.attributes,
        [Event(one.name, one.attributes, one.time_ns) for one in data.events],
        [Link(_context_of(context), attributes) for context, attributes in data.links],
        SpanKind(data.kind),
        None,
        Status(StatusCode(data.status), data.status_text),
        data.start_ns,
        data.end_ns,
        InstrumentationScope(name, version or None, schema_url or None),
    )


def _context_of(data: ContextData) -> SpanContext:
    return SpanContext(
        int(data.trace_id, 16), int(data.span_id, 16), is_remote=False, trace_flags=TraceFlags(data.flags),
        trace_state=TraceState.from_header([data.state] if data.state else []),
    )  # fmt: skip
