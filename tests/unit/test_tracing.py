"""The tree of a request, built from events."""

from postroom.core.formats.events import SCHEMA, AuditEvent, event_id
from postroom.core.history.tracing import related, spans
from postroom.message import EventKind


def event(
    seq: int, kind: EventKind, message_id: str, parent: str = "", *, ts_us: int | None = None, **more: object
) -> AuditEvent:
    return AuditEvent(
        event_id=event_id("s", seq), seq=seq, ts_us=1_000 * seq if ts_us is None else ts_us, kind=kind,
        contract="engine", source="s", schema=SCHEMA, message_id=message_id, parent_message_id=parent, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_request_is_a_tree_in_the_order_of_time() -> None:
    events = [
        event(1, "created", "a", type="ask"),
        event(2, "enqueued", "a"),
        event(5, "dequeued", "a", attempt=1),
        event(6, "created", "c", "a"),
        event(4, "created", "b", "a"),
        event(7, "created", "d", "b"),
        event(8, "execution_completed", "b"),
        event(9, "execution_completed", "a", attempt=1),
        event(9, "execution_completed", "a", attempt=1),  # shipped twice
    ]
    found = spans(events)
    assert [(span.message_id, span.depth) for span in found] == [("a", 0), ("b", 1), ("d", 2), ("c", 1)]
    a = found[0]
    assert (a.type, a.wait_us, a.total_us, a.attempts, a.outcome) == ("ask", 3_000, 8_000, 1, "completed")
    assert [span.offset_us for span in found] == [0, 3_000, 6_000, 5_000]
    assert [event.seq for event in a.events] == [1, 2, 5, 9]


def test_children_of_a_missing_parent_are_shown() -> None:
    [span] = spans([event(1, "created", "b", "gone")])
    assert (span.depth, span.parent_message_id, span.outcome, span.wait_us) == (0, "gone", "open", None)


def test_messages_that_name_each_other_as_parents_are_all_shown() -> None:
    found = spans([event(1, "created", "a", "b"), event(2, "created", "b", "a")])
    assert [(span.message_id, span.depth) for span in found] == [("a", 0), ("b", 1)]


def test_a_long_chain_does_not_recurse() -> None:
    chain = [event(n, "created", f"m{n}", f"m{n - 1}" if n > 1 else "") for n in range(1, 5_001)]
    assert [span.depth for span in spans(chain)] == list(range(5_000))


def test_a_replay_opens_a_message_again() -> None:
    dead = [event(1, "created", "a"), event(2, "dead_letter", "a", error="no")]
    assert (spans(dead)[0].outcome, spans(dead)[0].error) == ("dead_letter", "no")
    assert spans([*dead, event(3, "replayed", "a")])[0].outcome == "open"


def test_related_finds_parents_and_children() -> None:
    found = [event(1, "created", "a", "root", trace_id="t"), event(2, "created", "b", "a")]
    assert related(found, {"a"}) == {"root", "b", "t"}


def test_every_failed_attempt_is_shown_with_its_error() -> None:
    [span] = spans(
        [
            event(1, "created", "a"),
            event(2, "dequeued", "a", attempt=1),
            event(3, "execution_failed", "a", attempt=1, error_type="OSError", error="no route"),
            event(4, "retry_scheduled", "a", attempt=1, detail={"delay_s": 1.5}),
            event(5, "enqueued", "a", attempt=1),
            event(6, "lease_lapsed", "a", attempt=2),
            event(7, "retry_scheduled", "a", attempt=2, detail={"delay_s": 2}),
        ]
    )
    assert [(one.attempt, one.offset_us, one.error_type, one.error) for one in span.failures] == [
        (1, 2_000, "OSError", "no route"),
        (2, 5_000, "LeaseLapsed", ""),
    ]
    assert span.due_us == 7_000 + 2_000_000


def test_started_attempt_is_no_longer_due() -> None:
    delayed = event(1, "created", "a", detail={"delay_s": 30})
    assert [span.due_us for span in spans([delayed])] == [30_001_000]
    assert [span.due_us for span in spans([delayed, event(2, "enqueued", "a")])] == [None]
    for odd in ("soon", 1e308, -1, True):
        event_with = event(1, "retry_scheduled", "a", detail={"delay_s": odd})
        assert [span.due_us for span in spans([event_with])] == [None]
