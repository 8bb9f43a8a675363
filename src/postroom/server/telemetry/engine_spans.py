"""Spans and metrics of an engine, by the messaging conventions of OpenTelemetry.

The trace of a message: `send` (its sender) is the parent of `process` (its handler) across processes and
machines, because the message carries the context of `send`. `receive` (the claim of a worker) has links to
the messages of its batch. `settle` (the commit of the outcome) is a child of `process`.
"""

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from postroom.engine.additions import NoteOutcome, Submit
from postroom.engine.global_queue import GlobalQueue
from postroom.engine.inspection import EngineStatus, status_of
from postroom.engine.rules.claims import Claimed
from postroom.engine.rules.operations import Operations, Submitted
from postroom.engine.rules.outcomes import Outcome
from postroom.errors import PostroomError
from postroom.message import ENGINE_PREFIX
from postroom.server.telemetry.child_spans import ChildSpans

SYSTEM = "postroom"
ATTEMPTS_KEPT_MAX = 10_000  # spans of attempts whose outcome is not committed yet
STATUS_KEPT_S = 1.0  # the gauges of one export share a look at the store

NAME, TYPE = "messaging.operation.name", "messaging.operation.type"
DESTINATION, MESSAGE_ID = "messaging.destination.name", "messaging.message.id"
GOOD = frozenset({"completed", "deferred", "released"})
"""Outcomes that are not errors."""

_propagator = TraceContextTextMapPropagator()


class EngineSpans:
    """The `EngineTelemetry` of a process."""

    def __init__(self, tracer: Tracer, meter: Meter, child_spans: ChildSpans | None = None) -> None:
        self._tracer = tracer
        self._child_spans = child_spans
        self._attempts: OrderedDict[tuple[str, int], contexts.Context] = OrderedDict()
        self._sent = meter.create_counter("messaging.client.sent.messages", "{message}")
        self._consumed = meter.create_counter("messaging.client.consumed.messages", "{message}")
        self._operation_s = meter.create_histogram("messaging.client.operation.duration", "s")
        self._process_s = meter.create_histogram("messaging.process.duration", "s")

    # ---- sending -------------------------------------------------------------------------------------

    async def send(self, messages: Sequence[Mapping[str, Any]], submit: Submit) -> list[Submitted]:
        started = time.perf_counter()
        with ExitStack() as stack:
            spans, stamped = self._begin_send(messages, stack)
            try:
                submitted = await submit(stamped)
            except Exception as error:
                for span in spans:
                    _note_error(span, type(error).__qualname__, str(error))
                self._note_operation("send", started, len(spans), type(error).__qualname__)
                raise
            for span, one in zip(spans, submitted, strict=True):
                span.set_attribute(MESSAGE_ID, one.message_id)
                span.set_attribute("postroom.message.duplicate", one.duplicate)
            self._sent.add(len(spans), _operation("send"))
            self._note_operation("send", started, len(spans), "")
            return submitted

    def _begin_send(
        self, messages: Sequence[Mapping[str, Any]], stack: ExitStack
    ) -> tuple[list[Span], list[Mapping[str, Any]]]:
        """A span for each message. A batch has a span of its own above them."""
        is_batch = len(messages) > 1
        if is_batch:
            attributes = {**_operation("send"), "messaging.batch.message_count": len(messages)}
            batch = self._tracer.start_as_current_span("send", kind=SpanKind.CLIENT, attributes=attributes)
            stack.enter_context(batch)
        name = "create" if is_batch else "send"
        spans: list[Span] = []
        stamped: list[Mapping[str, Any]] = []
        for message in messages:
            destination = f"{ENGINE_PREFIX}{message.get('org_id')}"
            named = {  # nothing has checked these fields yet
                "postroom.message.type": message.get("type"),
                "messaging.message.conversation_id": message.get("goal_id"),
            }
            known = {name: value for name, value in named.items() if isinstance(value, str) and value}
            span = self._tracer.start_span(
                f"{name} {destination}", _sender_context(message), SpanKind.PRODUCER,
                {**_operation(name), DESTINATION: destination, **known},
            )  # fmt: skip
            stack.callback(span.end)
            carrier: dict[str, str] = {}
            _propagator.inject(carrier, trace.set_span_in_context(span))
            spans.append(span)
            stamped.append({**message, **carrier})
        return spans, stamped

    # ---- the worker ----------------------------------------------------------------------------------

    def received(self, claimed: Sequence[Claimed], worker_id: str, started_ns: int) -> None:
        links = [
            Link(found)
            for one in claimed
            if (found := trace.get_current_span(_context_of(one)).get_span_context()).is_valid
        ]
        attributes = {
            **_operation("receive"),
            "messaging.batch.message_count": len(claimed),
            "messaging.client.id": worker_id,
        }
        span = self._tracer.start_span(
            "receive", contexts.Context(), SpanKind.CLIENT, attributes, links, start_time=started_ns
        )
        span.end()
        self._consumed.add(len(claimed), _operation("receive"))
        self._operation_s.record((time.time_ns() - started_ns) / 1e9, _operation("receive"))

    @contextmanager
    def processing(self, claimed: Claimed, worker_id: str) -> Iterator[NoteOutcome]:
        record, started = claimed.record, time.perf_counter()
        attributes = {
            **_operation("process"), DESTINATION: record.queue, MESSAGE_ID: record.message_id,
            "messaging.client.id": worker_id, "postroom.message.type": claimed.type,
            "postroom.message.attempt": record.attempt, "postroom.message.priority": record.lane,
            "messaging.message.body.size": len(claimed.raw),
        }  # fmt: skip
        if claimed.body is not None and claimed.body.goal_id:
            attributes["messaging.message.conversation_id"] = claimed.body.goal_id
        measured = {**_operation("process"), "postroom.message.type": claimed.type}

        def note(outcome: Outcome | None) -> None:
            kind = "dropped" if outcome is None else outcome.kind
            span.set_attribute("postroom.outcome", kind)
            if outcome is not None and kind not in GOOD:
                _note_error(span, outcome.error_type or kind, outcome.error)
                measured["error.type"] = outcome.error_type or kind
            if outcome is not None:
                self._attempts[outcome.message_id, outcome.lease] = trace.set_span_in_context(span)
                if len(self._attempts) > ATTEMPTS_KEPT_MAX:
                    self._attempts.popitem(last=False)

        with self._tracer.start_as_current_span(
            f"process {record.queue}", _context_of(claimed), SpanKind.CONSUMER, attributes
        ) as span:
            try:
                yield note
            finally:
                self._process_s.record(time.perf_counter() - started, measured)

    # ---- handlers in forked processes ----------------------------------------------------------------

    def in_child(self) -> None:
        if self._child_spans is not None:
            self._child_spans.collect()

    def from_child(self) -> bytes:
        return b"" if self._child_spans is None else self._child_spans.collected()

    def add(self, spans: bytes) -> None:
        if self._child_spans is not None and spans:
            self._child_spans.add(spans)

    # ---- outcomes ------------------------------------------------------------------------------------

    def settled(self, outcomes: Sequence[Outcome], stale: Sequence[str], started_ns: int) -> None:
        for outcome in outcomes:
            context = self._attempts.pop((outcome.message_id, outcome.lease), None)
            if context is None:
                continue
            destination = f"{ENGINE_PREFIX}{outcome.org_id}"
            attributes = {
                **_operation("settle"), DESTINATION: destination, MESSAGE_ID: outcome.message_id,
                "postroom.outcome": outcome.kind,
            }  # fmt: skip
            span = self._tracer.start_span(
                f"settle {destination}", context, SpanKind.CLIENT, attributes, start_time=started_ns
            )
            if outcome.message_id in stale:
                _note_error(span, "StaleLease", "the lease was over, so the outcome is dropped")
            span.end()

    def _note_operation(self, name: str, started: float, count: int, error_type: str) -> None:
        attributes = _operation(name) | ({"error.type": error_type} if error_type else {})
        if count:
            self._operation_s.record(time.perf_counter() - started, attributes)


class EngineGauges:
    """The depth of each lane of each organization, and the workers, whenever metrics are exported."""

    def __init__(self, meter: Meter) -> None:
        self.engines: WeakKeyDictionary[GlobalQueue, bool] = WeakKeyDictionary()
        """Engine -> whether its store is only read while the engine works: a program may have closed it."""
        self._statuses: list[EngineStatus] = []
        self._looked = -STATUS_KEPT_S
        meter.create_observable_gauge("postroom.queue.messages", [self._depths], "{message}")
        meter.create_observable_gauge("postroom.workers", [self._workers], "{worker}")

    def _look(self) -> list[EngineStatus]:
        now = time.monotonic()
        if now >= self._looked + STATUS_KEPT_S:
            self._looked, self._statuses = now, []
            for engine, while_working in list(self.engines.items()):
                if engine.is_working or not while_working:
                    self._statuses += _status(engine)
        return self._statuses

    def _depths(self, _: CallbackOptions) -> Iterator[Observation]:
        for status in self._look():
            for org_id, found in status.organizations.items():
                for lane, depth in enumerate(found.lanes):
                    attributes: dict[str, Any] = {
                        DESTINATION: f"{ENGINE_PREFIX}{org_id}",
                        "postroom.message.priority": lane,
                    }
                    yield Observation(depth, attributes)

    def _workers(self, _: CallbackOptions) -> Iterator[Observation]:
        for status in self._look():
            yield Observation(len(status.workers))


def _status(engine: GlobalQueue) -> list[EngineStatus]:
    policy = engine.policy
    with suppress(PostroomError):  # the store reports its trouble itself
        return [engine.store.read(lambda found: status_of(Operations(found, policy), policy))]
    return []


class TaskSpans:
    """The spans of task queues: below the span of the request that sends, receives or settles tasks."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def note(self, operation: str, agent: str, task_ids: Sequence[str], started_ns: int) -> None:
        """Note an operation on the queue of an agent that was committed now."""
        attributes = {**_operation(operation), DESTINATION: agent}
        if len(task_ids) == 1:
            attributes[MESSAGE_ID] = task_ids[0]
        else:
            attributes["messaging.batch.message_count"] = len(task_ids)
        kind = SpanKind.PRODUCER if operation == "send" else SpanKind.CLIENT
        span = self._tracer.start_span(
            f"{operation} {agent}", kind=kind, attributes=attributes, start_time=started_ns
        )
        span.end()


def _operation(name: str) -> dict[str, Any]:
    return {"messaging.system": SYSTEM, NAME: name, TYPE: name}


def _sender_context(message: Mapping[str, Any]) -> contexts.Context:
    """The context of the sender: that of a named trace, unless the current span is part of that trace."""
    current = trace.get_current_span().get_span_context()
    named = _extracted(message.get("traceparent"), message.get("tracestate"))
    found = trace.get_current_span(named).get_span_context()
    is_elsewhere = found.is_valid and found.trace_id != current.trace_id
    return named if is_elsewhere or not current.is_valid else contexts.get_current()


def _context_of(claimed: Claimed) -> contexts.Context:
    """The context under which a message was sent."""
    body = claimed.body
    return contexts.Context() if body is None else _extracted(body.traceparent, body.tracestate)


def _extracted(traceparent: object, tracestate: object) -> contexts.Context:
    carrier = {"traceparent": traceparent, "tracestate": tracestate}
    texts = {name: value for name, value in carrier.items() if isinstance(value, str) and value}
    return _propagator.extract(texts, contexts.Context())


def _note_error(span: Span, error_type: str, text: str) -> None:
    span.set_attribute("error.type", error_type)
    span.set_status(StatusCode.ERROR, text)
