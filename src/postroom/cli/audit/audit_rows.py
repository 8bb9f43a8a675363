"""Events and spans as the commands of `postroom audit` print them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from postroom.cli.shell import Shell

if TYPE_CHECKING:
    from postroom.core.formats.events import AuditEvent
    from postroom.core.history.tracing import Span

STEPS_MAX = 10  # deepest indent of a message in a trace; a deeper message shows its depth as a number
COLUMNS = ("time", "kind", "queue", "message_id", "worker_id", "error")
SPAN_COLUMNS = (
    "at_ms",
    "message",
    "type",
    "queue",
    "waited_ms",
    "took_ms",
    "attempts",
    "outcome",
    "next_try",
    "error",
)


def print_events(shell: Shell, events: Any) -> None:
    """Print events as a table, or as lines of JSON."""
    if shell.output.readable:
        shell.output.rows(COLUMNS, map(_row, events), "no events")
        return
    for event in events:
        shell.output.json_line(as_plain(event))
    shell.output.flush()


def as_plain(struct: Any) -> Any:
    """A struct as values that JSON has."""
    import msgspec

    return msgspec.json.decode(msgspec.json.encode(struct))


def _time_text(ts_us: int) -> str:
    """A time as text; the number itself when no date can represent it."""
    from postroom.core.times import utc_text

    try:
        return utc_text(ts_us * 1000)
    except OverflowError:
        return str(ts_us)


def _row(event: "AuditEvent") -> dict[str, Any]:
    return {
        "time": _time_text(event.ts_us),
        "kind": event.kind,
        "queue": event.queue,
        "message_id": event.message_id,
        "worker_id": event.worker_id,
        "error": event.error,
    }


def _indented(span: "Span") -> str:
    if span.depth <= STEPS_MAX:
        return "  " * span.depth + span.message_id
    return "  " * STEPS_MAX + f"[{span.depth}] {span.message_id}"


def span_rows(span: "Span") -> Iterator[dict[str, Any]]:
    """A row for the message, and one for each attempt that failed."""
    yield {
        "at_ms": f"{span.offset_us / 1000:.1f}",
        "message": _indented(span),
        "type": span.type,
        "queue": span.queue,
        "waited_ms": None if span.wait_us is None else f"{span.wait_us / 1000:.1f}",
        "took_ms": f"{span.total_us / 1000:.1f}",
        "attempts": span.attempts,
        "outcome": span.outcome,
        "next_try": None if span.due_us is None else _time_text(span.due_us),
    }
    for failure in span.failures:
        yield {
            "at_ms": f"{failure.offset_us / 1000:.1f}",
            "message": _indented(span),
            "attempts": failure.attempt,
            "outcome": "failed",
            "error": ": ".join(filter(None, (failure.error_type, failure.error))),
        }
