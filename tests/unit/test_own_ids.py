"""The numbers of a store as clients see them."""

from hypothesis import given
from hypothesis import strategies as st

from postroom.core.ids import IdRule
from postroom.stores.own_ids import COVERED, OwnIds, first_rule

ids = OwnIds("t1234", IdRule("0123456789abcdef" * 2, 0))
other = OwnIds("t1234", IdRule("fedcba9876543210" * 2, 0))
numbers = st.integers(1, COVERED - 1)


@given(numbers)
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
    assert (ids.is_guess(f"t1234-{number}"), ids.is_guess(shown)) == (True, False)


def test_neighbours_show_no_distance_and_each_store_has_its_own_cover() -> None:
    covered = [ids.cover(number) for number in range(1, 1_001)]
    assert len(set(covered)) == 1_000
    assert covered != sorted(covered)
    assert not set(covered) & {other.cover(number) for number in range(1, 1_001)}


def test_ids_that_the_store_did_not_make_stay_the_same() -> None:
    for name in ("build", "t9999-7", "t1234-x", "t1234-07", "t1234-", str(COVERED)):
        assert ids.cover_id(name) == ids.uncover_id(name) == name
        assert not ids.is_guess(name)


def test_only_numbers_from_before_the_store_covered_them_are_known_as_they_are() -> None:
    rule = first_rule("t1234", 7, 1_000)
    assert rule.plain_max == 7
    upgraded = OwnIds("t1234", IdRule.of(rule.text))
    assert upgraded.rule == rule
    assert [upgraded.is_guess(f"t1234-{number}") for number in (7, 8, COVERED - 1, 2 * COVERED)] == [
        False, True, True, True,
    ]  # fmt: skip
    assert [upgraded.place(number, rule.plain_max) for number in (0, 7, 8)] == [0, 7, None]
    assert first_rule("t1234", 0, 1_000).plain_max == 0
    without_number, _, _ = rule.text.rpartition(":")  # as unreleased versions wrote it
    assert OwnIds("t1234", IdRule.of(without_number)).is_guess("t1234-1")
