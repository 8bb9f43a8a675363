"""The numbers of a store as clients see them."""

from hypothesis import given
from hypothesis import strategies as st

from postroom.core.formats.ids import IdRule
from postroom.message import Envelope
from postroom.stores.memory import MemoryStore
from postroom.stores.own_ids import COVERED, OwnIds, first_rule
from postroom.stores.transaction import NUMBERS_AHEAD, Transaction

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


def test_refused_ids_of_callers_do_not_tell_how_far_the_store_has_counted() -> None:
    """A caller could find the largest number that is refused by trying ids, which need not exist."""
    store, at_us = MemoryStore(store_id="t1234"), 1_700_000_000_000_000

    def refused() -> list[bool]:
        def work(transaction: Transaction) -> list[bool]:
            new = transaction.ids.messages.new
            around = (NUMBERS_AHEAD, 2 * NUMBERS_AHEAD)
            tried = [number for limit in around for number in range(limit - 200, limit + 200)]
            return [transaction.is_reserved(new(number, at_us)) for number in tried]

        return store.read(work)

    before = refused()
    assert {True, False} == {*before}
    store.write(lambda transaction: transaction.insert([Envelope(queue="a", payload=b"1")] * 50))
    assert refused() == before


def test_neighbours_show_no_distance_and_each_store_has_its_own_cover() -> None:
    covered = [ids.cover(number) for number in range(1, 1_001)]
    assert len(set(covered)) == 1_000
    assert covered != sorted(covered)
    assert not set(covered) & {other.cover(number) for number in range(1, 1_001)}


def test_ids_that_the_store_did_not_make_stay_the_same() -> None:
    for name in ("build", "t9999-7", "t1234-x", "t1234-07", "t1234-", str(COVERED)):
        assert ids.cover_id(name) == ids.uncover_id(name) == name
        assert not ids.is_guess(name)


def test_only_plain_numbers_from_before_masking_are_accepted() -> None:
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
