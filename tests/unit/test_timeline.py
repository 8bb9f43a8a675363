"""Events of several sources in the order of time."""

from postroom.core.formats.events import SCHEMA, AuditEvent
from postroom.core.history.tracing import Latest, Timeline


def event(source: str, seq: int, ts_us: int) -> AuditEvent:
    return AuditEvent(
        event_id=f"{source}#{seq}",
        seq=seq,
        ts_us=ts_us,
        kind="created",
        contract="mail",
        source=source,
        schema=SCHEMA,
    )


def test_the_latest_are_in_the_order_of_time() -> None:
    latest = Latest(3, Timeline())
    latest.add([event("a", 1, 10), event("a", 2, 40)])
    latest.add([event("b", 1, 20), event("b", 2, 30)])
    assert [one.event_id for one in latest.events()] == ["b#1", "b#2", "a#2"]


def test_event_without_a_time_gets_that_of_its_predecessor() -> None:
    latest = Latest(3, Timeline())
    latest.add([event("a", 1, 50), event("a", 2, 0), event("b", 1, 10), event("b", 2, 60)])
    assert [one.event_id for one in latest.events()] == ["a#1", "a#2", "b#2"]


def test_latest_of_zero_keeps_nothing() -> None:
    latest = Latest(0, Timeline())
    latest.add([event("a", 1, 50)])
    assert latest.events() == []
