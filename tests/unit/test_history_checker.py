"""Every rule of the checker, with histories that violate it and histories that only seem to."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from postroom.core.formats.events import SCHEMA, AuditEvent, Contract, event_id
from postroom.core.history.history_checker import History, HistoryLimits, HistoryVerdict, Open, Violation

S = 1_000_000
FIRST_US = 1_700_000_000 * S
HORIZON_US = 3_600 * S


class Story:
    """Events of one source, one second apart by default."""

    def __init__(self, source: str = "s", contract: Contract = "tasks", first: int = 1) -> None:
        self.source = source
        self.contract: Contract = contract
        self.seq = first - 1
        self.ts_us = FIRST_US
        self.events: list[AuditEvent] = []
        self.limits = HistoryLimits()

    def tell(self, kind: Any, message_id: str = "m", **facts: Any) -> int:
        self.seq += 1
        self.ts_us += S
        facts = {"queue": "q", "priority": 2, **facts}
        self.events.append(
            AuditEvent(
                event_id=event_id(self.source, self.seq), seq=self.seq, ts_us=self.ts_us, kind=kind,
                contract=self.contract, source=self.source, schema=SCHEMA, message_id=message_id, **facts,
            )
        )  # fmt: skip
        return self.seq

    def accept(self, message_id: str = "m", **facts: Any) -> int:
        seq = self.tell("created", message_id, state="QUEUED", **facts)
        self.tell("enqueued", message_id, state="QUEUED", **facts)
        return seq

    def lease(self, message_id: str = "m", **facts: Any) -> int:
        return self.tell("dequeued", message_id, lease=self.seq + 1, **facts)

    def complete(self, lease: int, message_id: str = "m") -> int:
        return self.tell("execution_completed", message_id, lease=lease)

    def pass_by(self, message_id: str) -> None:
        """All events of one message, in a queue of its own."""
        self.accept(message_id, queue=message_id)
        self.complete(self.lease(message_id, queue=message_id), message_id)


def verdict(*stories: Story, horizon_us: int | None = None, **options: Any) -> HistoryVerdict:
    history = History(limits=stories[0].limits)
    for story in stories:
        for event in story.events:
            history.add(event)
    return history.verdict(horizon_us=horizon_us, **options)


def found(*stories: Story, **options: Any) -> list[Violation]:
    return verdict(*stories, **options).violations


def only(*stories: Story, **options: Any) -> Violation:
    [violation] = found(*stories, **options)
    return violation


def proof(violation: Violation) -> tuple[str, str, tuple[int, ...]]:
    return (
        violation.rule,
        violation.message_id,
        tuple(int(one.rpartition("#")[2]) for one in violation.event_ids),
    )


@pytest.fixture
def story() -> Story:
    return Story()


# ---- lost --------------------------------------------------------------------------------------------


def test_message_silent_beyond_the_horizon_is_lost(story: Story) -> None:
    created = story.accept()
    story.ts_us += HORIZON_US + 2 * S
    story.pass_by("other")
    assert found(story) == []
    assert found(story, horizon_us=2 * HORIZON_US) == []
    assert proof(only(story, horizon_us=HORIZON_US)) == ("lost", "m", (created, created + 1))


def test_delayed_message_is_not_silent(story: Story) -> None:
    story.tell("created", state="SCHEDULED", detail={"delay_s": 7_200})
    story.ts_us += HORIZON_US + 2 * S
    story.pass_by("other")
    assert found(story, horizon_us=HORIZON_US) == []
    story.ts_us += 7_200 * S
    story.pass_by("third")
    assert only(story, horizon_us=HORIZON_US).rule == "lost"


def test_a_retry_is_silent_from_when_it_is_due(story: Story) -> None:
    story.accept()
    story.tell("execution_failed", lease=story.lease())
    story.tell("retry_scheduled", detail={"delay_s": 7_200})
    story.ts_us += 7_200 * S
    story.pass_by("other")
    assert found(story, horizon_us=HORIZON_US) == []


def test_message_absent_from_the_store_is_lost(story: Story) -> None:
    story.accept("gone")
    story.accept("kept")
    story.pass_by("ended")
    asked: list[Open] = []

    def absent(message: Open) -> bool:
        asked.append(message)
        return message.message_id == "gone"

    assert only(story, absent=absent).message_id == "gone"
    assert asked == [Open("s", "tasks", "gone"), Open("s", "tasks", "kept")]


def test_overtaking_a_lost_message_is_no_order_violation(story: Story) -> None:
    story.accept("lost")
    story.accept("other")
    story.complete(story.lease("other"), "other")
    story.ts_us += HORIZON_US + 2 * S
    story.pass_by("third")
    assert [one.rule for one in found(story)] == ["order"]
    assert [one.rule for one in found(story, horizon_us=HORIZON_US)] == ["lost"]


@pytest.mark.parametrize("contract", ["bus", "mail", "queue"])
def test_messages_of_files_are_never_lost(contract: Contract) -> None:
    story = Story(contract=contract)
    story.tell("created")
    story.ts_us += 2 * HORIZON_US
    story.tell("created", "other")
    assert found(story, horizon_us=HORIZON_US) == []


# ---- unknown -----------------------------------------------------------------------------------------


def test_delivery_of_an_unaccepted_message_is_a_violation(story: Story) -> None:
    story.pass_by("other")
    lease = story.lease()
    story.complete(lease)
    assert proof(only(story)) == ("unknown", "m", (lease,))


def test_delivery_of_a_rejected_message_is_a_violation(story: Story) -> None:
    story.tell("rejected")
    story.complete(story.lease())
    assert only(story).rule == "unknown"


def test_messages_accepted_before_the_range_are_not_a_violation() -> None:
    story = Story(first=100)
    story.complete(57)
    story.tell("heartbeat", "b", lease=60)
    story.complete(60, "b")
    story.complete(story.lease("c"), "c")
    assert found(story) == []


def test_violations_after_the_start_of_the_range_are_found() -> None:
    story = Story(first=100)
    story.tell("heartbeat", lease=60)
    story.tell("heartbeat", lease=61)
    assert proof(only(story)) == ("overlap", "m", (101,))


@pytest.mark.parametrize("contract", ["mail", "queue"])
def test_delivery_may_be_shipped_before_the_acceptance(contract: Contract) -> None:
    reader, writer = Story("reader", contract), Story("writer", contract)
    reader.tell("delivered", recipient="a")
    assert proof(only(reader)) == ("unknown", "m", (1,))
    writer.tell("created")
    assert found(reader, writer) == []
    assert found(Story("later", contract, first=5), reader) != []
    later = Story("later", contract, first=5)
    later.tell("created", "other")
    assert found(later, reader) == []


def test_two_stores_may_use_the_same_message_id() -> None:
    one, other = Story("one"), Story("other")
    one.accept()
    other.accept()
    one.complete(one.lease())
    other.complete(other.lease())
    assert found(one, other) == []


# ---- overlap -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["heartbeat", "execution_completed", "execution_failed", "lease_lapsed", "released"]
)
def test_events_under_a_lease_must_name_it(story: Story, kind: Any) -> None:
    story.accept()
    lease = story.lease()
    word = story.tell(kind)
    assert proof(only(story)) == ("overlap", "m", (lease, word))


def test_contracts_without_leases_need_no_lease() -> None:
    mail = Story(contract="mail")
    mail.tell("created")
    mail.tell("heartbeat")
    assert found(mail) == []


def test_second_open_lease_is_an_overlap(story: Story) -> None:
    story.accept()
    first = story.lease()
    second = story.lease()
    story.complete(second)
    assert proof(only(story)) == ("overlap", "m", (first, second))


@pytest.mark.parametrize("kind", ["heartbeat", "execution_failed", "released", "execution_completed"])
def test_event_of_an_expired_lease_is_an_overlap(story: Story, kind: Any) -> None:
    story.accept()
    stale = story.lease()
    story.tell("lease_lapsed", lease=stale)
    story.tell("enqueued")
    current = story.lease()
    word = story.tell(kind, lease=stale)
    assert proof(only(story)) == ("overlap", "m", (current, word))


def test_event_after_release_is_an_overlap(story: Story) -> None:
    story.accept()
    lease = story.lease()
    story.tell("released", lease=lease)
    word = story.tell("heartbeat", lease=lease)
    assert proof(only(story)) == ("overlap", "m", (lease, word))


@pytest.mark.parametrize(
    "ways", [["released"], ["execution_failed", "retry_scheduled", "enqueued"], ["lease_lapsed", "enqueued"]]
)
def test_consecutive_leases_are_not_a_violation(story: Story, ways: list[Any]) -> None:
    story.accept()
    lease = story.lease()
    story.tell("heartbeat", lease=lease)
    story.tell("execution_started", lease=lease)
    for number, kind in enumerate(ways):
        story.tell(kind, lease=0 if number else lease)
    story.complete(story.lease())
    assert found(story) == []


# ---- order -------------------------------------------------------------------------------------------


def test_overtaking_is_an_order_violation(story: Story) -> None:
    first, second = story.accept("first"), story.accept("second")
    lease = story.lease("second")
    story.lease("first")
    assert proof(only(story)) == ("order", "second", (first, second, lease))


def test_overtaken_message_is_reported_once(story: Story) -> None:
    for name in ("a", "b", "c", "d"):
        story.accept(name)
    for name in ("b", "c", "d", "a"):
        story.lease(name)
    assert [one.message_id for one in found(story)] == ["b"]


@pytest.mark.parametrize(
    "facts",
    [{"priority": 1}, {"queue": "other"}, {"detail": {"key": "other"}}],
    ids=lambda facts: next(iter(facts)),
)
def test_each_lane_has_its_own_order(story: Story, facts: dict[str, Any]) -> None:
    story.accept("first")
    story.accept("second", **facts)
    story.lease("second", **facts)
    story.lease("first")
    assert found(story) == []


def leaves_delayed(story: Story) -> None:
    story.tell("created", "first", state="SCHEDULED")
    story.tell("enqueued", "first")


def leaves_promoted(story: Story) -> None:
    story.accept("first")
    story.tell("promoted", "first", priority=1, detail={"from": 2})


def leaves_cancelled(story: Story) -> None:
    story.accept("first")
    story.tell("cancelled", "first")


def leaves_leased(story: Story) -> None:
    story.accept("first")
    story.tell("released", "first", lease=story.lease("first"))


def leaves_replayed(story: Story) -> None:
    leaves_cancelled(story)
    story.tell("replayed", "first")
    story.tell("enqueued", "first")


@pytest.mark.parametrize(
    "leave", [leaves_delayed, leaves_promoted, leaves_cancelled, leaves_leased, leaves_replayed]
)
def test_order_applies_only_to_first_deliveries_without_delay(
    story: Story, leave: Callable[[Story], None]
) -> None:
    leave(story)
    story.accept("second")
    story.lease("second")
    assert found(story) == []


def test_promoted_message_leaves_its_lane(story: Story) -> None:
    story.accept("first")
    story.accept("second")
    story.lease("second", priority=1)
    story.lease("first")
    assert found(story) == []


def test_responses_of_a_stream_arrive_in_order() -> None:
    story = Story(contract="engine")
    story.accept("chunk-1")
    story.accept("chunk-2")
    story.tell("delivered", "chunk-2")
    story.tell("delivered", "chunk-1")
    assert only(story).rule == "order"


# ---- terminal ----------------------------------------------------------------------------------------

ENDS = ["execution_completed", "dead_letter", "cancelled", "expired", "quarantined"]


@pytest.mark.parametrize(("one", "other"), [*pairwise(ENDS), ("execution_completed", "execution_completed")])
def test_second_end_is_a_violation(story: Story, one: Any, other: Any) -> None:
    story.accept()
    lease = story.lease()
    first, second = story.tell(one, lease=lease), story.tell(other, lease=lease)
    assert proof(only(story)) == ("terminal", "m", (first, second))


def test_second_acceptance_is_a_violation(story: Story) -> None:
    first = story.accept()
    second = story.tell("created", state="QUEUED")
    assert proof(only(story)) == ("terminal", "m", (first, second))


def test_message_may_be_accepted_again_after_a_gap(story: Story) -> None:
    story.accept()
    story.seq += 1
    story.tell("created", state="QUEUED")
    assert [one.rule for one in found(story)] == ["gap"]


def test_replay_of_an_open_message_is_a_violation(story: Story) -> None:
    accepted = story.accept()
    replayed = story.tell("replayed")
    assert proof(only(story)) == ("terminal", "m", (accepted, replayed))


def test_replay_after_an_unseen_end_is_not_a_violation() -> None:
    later = Story(first=100)
    later.tell("replayed")
    assert found(later) == []
    holey = Story()
    holey.accept()
    holey.seq += 1
    holey.tell("replayed")
    assert [one.rule for one in found(holey)] == ["gap"]


def test_delivery_after_the_end_is_a_violation(story: Story) -> None:
    story.accept()
    end = story.tell("cancelled")
    lease = story.lease()
    story.complete(lease)
    assert proof(only(story)) == ("terminal", "m", (end, lease))


def test_replay_reopens_a_message(story: Story) -> None:
    story.accept()
    for end in ("dead_letter", "cancelled", "expired"):
        story.tell(end)
        story.tell("replayed")
        story.tell("enqueued")
    story.complete(story.lease())
    result = verdict(story)
    assert (result.violations, result.accepted, result.ended, result.open) == ([], 1, 1, 0)


def test_allowed_events_after_an_end_are_not_a_violation(story: Story) -> None:
    story.accept("task")
    story.complete(story.lease("task"), "task")
    story.tell("execution_started", "task", detail={"decision": "d"})
    story.tell("delivered", "task")
    story.accept("bad")
    story.tell("dead_letter", "bad")
    story.tell("quarantined", "bad")
    story.tell("deleted", "", detail={"records": 2})
    story.accept("task")  # its record was removed, so its id may be used again
    assert found(story) == []


def test_second_delivery_of_a_result_is_a_violation(story: Story) -> None:
    story.accept()
    story.complete(story.lease())
    first, second = story.tell("delivered"), story.tell("delivered")
    assert proof(only(story)) == ("terminal", "m", (first, second))


def test_a_mail_is_delivered_many_times_and_deleted_once() -> None:
    story = Story(contract="mail")
    story.tell("created")
    for reader in ("a", "b", "a"):
        story.tell("delivered", recipient=reader)
    story.tell("deleted")
    assert found(story) == []
    story.tell("expired")
    assert only(story).rule == "terminal"


def test_a_queue_gives_each_reader_a_message_once() -> None:
    story = Story(contract="queue")
    story.tell("created")
    story.tell("delivered", recipient="a")
    story.tell("delivered", recipient="b")
    story.tell("delivered", "", recipient="a", detail={"matched": 3})
    story.tell("expired")
    assert found(story) == []
    again = Story(contract="queue")
    again.tell("created")
    again.tell("delivered", recipient="a")
    again.tell("delivered", recipient="a")
    assert only(again).rule == "terminal"


def test_ended_messages_are_recognised_after_compaction(story: Story) -> None:
    story.limits = HistoryLimits(ended_kept_max=4)
    story.accept()
    end = story.complete(story.lease())
    story.accept("replayed")
    story.tell("cancelled", "replayed")
    for number in range(20):
        story.pass_by(f"other-{number}")
    story.tell("replayed", "replayed")
    story.tell("enqueued", "replayed")
    story.complete(story.lease("replayed"), "replayed")
    second = story.tell("cancelled")
    assert proof(only(story)) == ("terminal", "m", (end, second))


# ---- gap ---------------------------------------------------------------------------------------------


def test_missing_sequence_number_is_a_gap(story: Story) -> None:
    for number in range(4):
        story.pass_by(f"m-{number}")
    del story.events[5:7]
    violation = only(story)
    assert proof(violation) == ("gap", "", (5, 8))
    assert violation.sentence == "of source s, 6 to 7 are missing"


def test_events_possible_in_a_gap_are_not_a_violation(story: Story) -> None:
    story.accept()
    story.accept("b")
    first = story.lease()
    story.seq += 9  # released, replayed, accepted: anything may have happened in the gap
    story.complete(story.lease())
    story.complete(story.lease("b"), "b")
    story.complete(story.lease("c"), "c")
    story.tell("execution_started")
    assert first
    assert [one.rule for one in found(story)] == ["gap"]


def test_violations_after_a_gap_are_found(story: Story) -> None:
    story.accept()
    story.seq += 1
    story.lease()
    story.lease()
    assert {one.rule for one in found(story)} == {"gap", "overlap"}


def test_the_same_event_twice_is_harmless(story: Story) -> None:
    story.pass_by("a")
    story.pass_by("b")
    story.events += story.events[2:6]
    result = verdict(story)
    assert (result.violations, result.events, result.repeats) == ([], 8, 4)


@pytest.mark.parametrize(
    "change", [{"ts_us": 1}, {"error": "x"}, {"detail": {"a": 1}}, {"message_id": "other"}], ids=str
)
def test_two_events_with_one_number_are_a_gap(story: Story, change: dict[str, Any]) -> None:
    story.pass_by("a")
    story.events += [msgspec.structs.replace(story.events[1], **change)] * 2
    assert proof(only(story)) == ("gap", change.get("message_id", "a"), (2,))


def test_events_that_arrive_out_of_order_are_sorted(story: Story) -> None:
    for number in range(5):
        story.pass_by(f"m-{number}")
    first, *rest = story.events
    story.events = [first, *reversed(rest)]
    assert found(story) == []


def test_gap_is_skipped_after_the_reorder_limit(story: Story) -> None:
    story.limits = HistoryLimits(reorder_max=10)
    for number in range(20):
        story.pass_by(f"m-{number}")
    late = story.events.pop(20)
    story.events.append(late)
    result = verdict(story)
    assert ([one.rule for one in result.violations], result.uncompared) == (["gap"], 1)


def test_repeats_are_compared_with_the_latest_events(story: Story) -> None:
    story.limits = HistoryLimits(digests_max=4)
    for number in range(6):
        story.pass_by(f"m-{number}")
    story.events += [story.events[0], story.events[-1]]
    result = verdict(story)
    assert (result.violations, result.repeats, result.uncompared) == ([], 1, 1)


def test_violations_above_the_limit_are_only_counted(story: Story) -> None:
    story.limits = HistoryLimits(violations_max=3)
    for number in range(5):
        story.lease(f"m-{number}")
    result = verdict(story)
    assert (len(result.violations), result.more) == (3, 2)


# ---- a stretch ---------------------------------------------------------------------------------------


def test_source_ends_before_its_first_event_after_until(story: Story) -> None:
    story.accept()
    lease = story.lease()
    stepped_back_us = story.ts_us
    story.ts_us += 100 * S
    story.tell("heartbeat", lease=lease)
    story.ts_us = stepped_back_us  # a clock that was set back causes no gap
    story.complete(lease)
    history = History(since_us=FIRST_US + 2 * S, until_us=FIRST_US + 50 * S)
    for event in story.events:
        history.add(event)
    result = history.verdict()
    assert (result.violations, result.events, result.sources) == ([], 2, {"s": 3})
    assert history.sources() == {"s": ("tasks", 3)}
    assert [one.message_id for one in history.open()] == ["m"]
