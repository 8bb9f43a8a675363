"""Ids of the bus: sortable as text and strictly increasing, even when the clock steps back."""

import re
import uuid
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.core.formats.ids import (
    PID_MODULUS,
    SEQUENCE_MODULUS,
    IdRule,
    MessageIds,
    bus_id,
    bus_ids,
    is_ordered,
    origin,
)
from postroom.core.times import NANOS_PER_S, utc_text

SHAPE = re.compile(r"MSG-\d{8}-\d{6}-\d{9}-PID\d{5}-\d{4}", re.ASCII)
NOON_NS = int(datetime(2026, 2, 5, 14, 30, 52, tzinfo=UTC).timestamp()) * NANOS_PER_S
instants = st.integers(min_value=NOON_NS, max_value=NOON_NS + 3 * NANOS_PER_S)


def made(epoch_ns: int, pid: int, sequence: int, last: str = "") -> str:
    return bus_id(epoch_ns, origin(pid), sequence, last)[0]


def test_an_id_has_the_documented_shape() -> None:
    msg_id, ts = bus_id(NOON_NS + 123_456, origin(12345), 42, "")
    assert msg_id == "MSG-20260205-143052-000123456-PID12345-0042"
    assert ts == "2026-02-05T14:30:52.000123Z"


def test_pid_and_sequence_wrap_into_their_digits() -> None:
    assert made(NOON_NS, PID_MODULUS + 7, SEQUENCE_MODULUS + 3).endswith("-PID00007-0003")


def test_the_sequence_breaks_a_tie_within_a_nanosecond() -> None:
    first = made(NOON_NS, 1, 1)
    assert made(NOON_NS, 1, 2, first) == first[:-4] + "0002"


def test_a_wrapped_sequence_goes_one_nanosecond_on() -> None:
    last = made(NOON_NS, 1, 9_999)
    assert made(NOON_NS, 1, 10_000, last) == "MSG-20260205-143052-000000001-PID00001-0000"


def test_a_smaller_pid_goes_one_nanosecond_on() -> None:
    last = made(NOON_NS, 99_999, 5)
    assert made(NOON_NS, 3, 6, last) == "MSG-20260205-143052-000000001-PID00003-0006"


def test_a_clock_that_stepped_back_keeps_the_last_instant() -> None:
    last = made(NOON_NS, 1, 1)
    msg_id, ts = bus_id(NOON_NS - 3600 * NANOS_PER_S, origin(1), 2, last)
    assert msg_id == last[:-4] + "0002"
    assert ts == "2026-02-05T13:30:52.000000Z", "the timestamp is the clock's, only the id is held up"


@pytest.mark.parametrize(
    ("last", "following"),
    [
        ("MSG-20260205-143059-999999999-PID99999-9999", "MSG-20260205-143100-000000000-PID00001-0001"),
        ("MSG-20261231-235959-999999999-PID99999-9999", "MSG-20270101-000000-000000000-PID00001-0001"),
        ("MSG-20280228-235959-999999999-PID99999-9999", "MSG-20280229-000000-000000000-PID00001-0001"),
    ],
)
def test_the_last_nanosecond_carries_into_the_next_second(last: str, following: str) -> None:
    assert made(NOON_NS, 1, 1, last) == following


@pytest.mark.parametrize(
    "last",
    ["zzz", "MSG-99991231-235959-999999999-PID99999-9999", "MSG-99999999-999999-999999999-PID99999-9999"],
)
def test_last_possible_id_is_ignored(last: str) -> None:
    assert made(NOON_NS, 1, 1, last) == made(NOON_NS, 1, 1)


@given(
    st.lists(st.tuples(instants, st.integers(1, 200_000), st.integers(0, 30_000)), min_size=1, max_size=50)
)
def test_ids_strictly_increase_whatever_clock_pid_and_sequence_do(
    steps: list[tuple[int, int, int]],
) -> None:
    last = ""
    for epoch_ns, pid, sequence in steps:
        following = made(epoch_ns, pid, sequence, last)
        assert following > last
        assert SHAPE.fullmatch(following)
        last = following


@given(
    instants,
    st.integers(0, 30_000),
    st.lists(st.integers(1, 3), max_size=20),
    st.sampled_from(["", "zzz", "MSG-20260205-143054-999999999-PID99999-9999"]),
)
def test_a_batch_of_ids_is_made_as_one_by_one(epoch_ns: int, first: int, gaps: list[int], last: str) -> None:
    """Gaps are sequence numbers that another thread took."""
    sequences = [first]
    for gap in gaps:
        sequences.append(sequences[-1] + gap)
    one_by_one: list[str] = []
    for sequence in sequences:
        following, ts = bus_id(epoch_ns, origin(7), sequence, one_by_one[-1] if one_by_one else last)
        one_by_one.append(following)
        assert bus_ids(epoch_ns, origin(7), sequences[: len(one_by_one)], last) == (one_by_one, ts)


def test_only_ids_of_the_documented_shape_have_a_place_in_the_order() -> None:
    assert is_ordered("MSG-20260205-143052-000123456-PID12345-0042")
    for foreign in (
        "",
        "zzz",
        "MSG-1",
        "MSG-20260205-143052-000123456-PID12345-0042 ",
        "LEGACY-LINE-000000001",
    ):
        assert not is_ordered(foreign)


@pytest.mark.parametrize(
    "epoch_ns", [0, 1, 999_999_999, NANOS_PER_S, -1, -NANOS_PER_S, 253_402_300_799_999_999_999]
)
def test_instants_around_1970_and_at_the_end_of_time_keep_their_digits(epoch_ns: int) -> None:
    msg_id, ts = bus_id(epoch_ns, origin(1), 1, "")
    assert SHAPE.fullmatch(msg_id)
    assert ts == utc_text(epoch_ns)


# ---- ids of messages -------------------------------------------------------------------------------

RULE = IdRule("8f" * 16, NOON_NS // 1000)


@given(st.integers(1, 2**44 - 1), st.integers(0, 2**57))
def test_a_store_finds_the_number_in_its_ids(number: int, created_us: int) -> None:
    ids = MessageIds("t1", RULE)
    message_id = ids.new(number, created_us)
    assert ids.number(message_id) == number
    assert uuid.UUID(message_id).version == 7
    assert str(uuid.UUID(message_id)) == message_id


def test_ids_do_not_show_numbers() -> None:
    ids = MessageIds("t1", RULE)
    low = [int(ids.new(1000 + n, NOON_NS // 1000 + n)[-12:], 16) >> 18 for n in range(100)]
    differences = {after - before for before, after in pairwise(low)}
    assert len(differences) > 90, "each microsecond has its own cover"
    other = MessageIds("t1", IdRule("11" * 16, 0))
    assert other.new(1000, NOON_NS) != ids.new(1000, NOON_NS), "the cover depends on the secret"


def test_ids_that_an_earlier_version_gave_stay() -> None:
    ids = MessageIds("t1", RULE)
    old = ids.new(99, NOON_NS // 1000 - 1)
    assert int(old[-12:], 16) >> 18 == 99
    assert ids.number(old) == 99
    assert ids.number("00000000-0000-7000-8000-000000000000") == 0
