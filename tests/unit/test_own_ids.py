"""The numbers of a store as clients see them."""

from hypothesis import example, given
from hypothesis import strategies as st

from postroom.core.ids import IdRule
from postroom.stores.own_ids import COVERED, OwnIds

ids = OwnIds("t1234", IdRule("0123456789abcdef" * 2, 0))
other = OwnIds("t1234", IdRule("fedcba9876543210" * 2, 0))
numbers = st.integers(1, COVERED - 1)


@given(numbers)
@example(4)  # the covered number starts with the same digit
def test_a_covered_number_leads_back_to_its_record(number: int) -> None:
    covered = ids.cover(number)
    assert COVERED <= covered < 2 * COVERED
    assert ids.uncover(covered) == ids.uncover(number) == number
    assert (ids.place(covered), ids.place(number), ids.place(2 * covered)) == (number, None, None)
    assert ids.place(0) == 0
    shown = ids.cover_id(f"t1234-{number}")
    assert shown == f"t1234-{covered}"
    assert ids.uncover_id(shown) == ids.uncover_id(f"t1234-{number}") == f"t1234-{number}"
    assert ids.cover_id(shown) == shown
    assert ids.cover_text(f"task 't1234-{number}' of t1234-") == f"task '{shown}' of t1234-"
    assert ids.cover_text(f"no task t1234-{number}", shown.encode()) == f"no task {shown}"
    assert ids.cover_text(f"no task t1234-{number}", b"t1234-%d" % number) == f"no task t1234-{number}"


def test_neighbours_show_no_distance_and_each_store_has_its_own_cover() -> None:
    covered = [ids.cover(number) for number in range(1, 1_001)]
    assert len(set(covered)) == 1_000
    assert covered != sorted(covered)
    assert not set(covered) & {other.cover(number) for number in range(1, 1_001)}


def test_ids_that_the_store_did_not_make_stay_the_same() -> None:
    for name in ("build", "t9999-7", "t1234-x", "t1234-07", "t1234-", str(COVERED)):
        assert ids.cover_id(name) == ids.uncover_id(name) == name
