"""Redaction of what OpenTelemetry exports: names, attributes, states, events and log records.

Rule 1: it happens in the exporter. So spans of handlers and of other libraries pass it as well, and only the
        thread that exports waits for it.
Rule 2: what has nothing to redact is exported as it is.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.sdk.metrics.export import Metric, MetricsData
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import Link, Status, StatusCode

from postroom.core.door import leaving, leaving_facts, leaving_value

if TYPE_CHECKING:
    from opentelemetry.sdk._logs import ReadableLogRecord  # earlier releases have another class


def redacting(exporter: type, signal: str) -> type:
    """A subclass of an exporter class that redacts what it exports."""
    redact = _REDACTED[signal]

    class Redacting(exporter):  # type: ignore[misc]
        def export(self, exported: Any, *more: Any, **options: Any) -> Any:
            return super().export(redact(exported), *more, **options)

    return Redacting


def redacted_resource(resource: Resource) -> Resource:
    """The facts about a process, which the environment may have set."""
    return Resource(leaving_facts(resource.attributes), resource.schema_url)


def _span(span: ReadableSpan) -> ReadableSpan:
    before = (
        span.name,
        dict(span.attributes or {}),
        [(one.name, dict(one.attributes or {})) for one in span.events],
        [dict(one.attributes or {}) for one in span.links],
        span.status.description,
    )
    after = (
        leaving(span.name),
        leaving_facts(before[1]),
        [(leaving(name), leaving_facts(attributes)) for name, attributes in before[2]],
        [leaving_facts(attributes) for attributes in before[3]],
        leaving_value(before[4]),
    )
    if after == before:
        return span
    name, attributes, events, links, text = after
    is_error = span.status.status_code is StatusCode.ERROR
    return ReadableSpan(
        name,
        span.context,
        span.parent,
        span.resource,
        attributes,
        [Event(*changed, one.timestamp) for changed, one in zip(events, span.events, strict=True)],
        [Link(one.context, changed) for changed, one in zip(links, span.links, strict=True)],
        span.kind,
        None,
        Status(span.status.status_code, text if is_error else None),
        span.start_time,
        span.end_time,
        span.instrumentation_scope,
    )


def _metrics(data: MetricsData) -> MetricsData:
    def redacted(resource: Any) -> Any:
        scopes = [
            replace(scope, metrics=list(map(_metric, scope.metrics))) for scope in resource.scope_metrics
        ]
        return replace(resource, scope_metrics=scopes)

    return replace(data, resource_metrics=list(map(redacted, data.resource_metrics)))


def _metric(metric: Metric) -> Metric:
    points: list[Any] = [
        replace(
            point,
            attributes=leaving_facts(point.attributes or {}),
            exemplars=[
                replace(one, filtered_attributes=leaving_facts(one.filtered_attributes or {}))
                for one in point.exemplars
            ],
        )
        for point in metric.data.data_points
    ]
    data: Any = metric.data
    return replace(metric, name=leaving(metric.name), data=replace(data, data_points=points))


def _log(record: "ReadableLogRecord") -> "ReadableLogRecord":
    found = record.log_record
    body, attributes = leaving_value(found.body), leaving_facts(found.attributes or {})
    if (body, attributes) == (found.body, found.attributes or {}):
        return record
    inner, outer = copy(found), copy(record)
    inner.body, inner.attributes = body, attributes
    object.__setattr__(outer, "log_record", inner)  # it is frozen
    return outer


_REDACTED: Final[Mapping[str, Callable[[Any], Any]]] = {
    "traces": lambda spans: list(map(_span, spans)),
    "metrics": _metrics,
    "logs": lambda records: list(map(_log, records)),
}
