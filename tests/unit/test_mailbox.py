"""The counters and holds of a mailbox when letters are added and removed."""

import sys

import pytest

from postroom.core.mail import mailbox
from postroom.core.mail.mailbox import (
    EVERY_RANK,
    GROUP_COST_BYTES,
    MAILBOX_COST_BYTES,
    MESSAGE_COST_BYTES,
    RANKS,
    Letter,
    Mailbox,
    Priority,
    PullGroup,
    cost_of,
    group_cost,
    mailbox_cost,
    size_of,
)

NOW_NS = 1_000


def letter(number: int, word: Priority = "normal", payload: bytes = b"x", key: str = "") -> Letter:
    cost = cost_of(len(payload), key)
    return Letter(number, word, RANKS[word], cost, payload, b"", 10, key=key)


@pytest.fixture
def box() -> Mailbox:
    return Mailbox(1, "box", public=False, named=True, label="box")


def add(box: Mailbox, *letters: Letter) -> Letter | None:
    return box.add(list(letters), sum(each.cost for each in letters))


def numbers(box: Mailbox) -> list[int]:
    return [each.number for each in box.replay(EVERY_RANK, NOW_NS)]


def test_a_letter_costs_its_bytes_and_a_fixed_amount() -> None:
    assert cost_of(0) == MESSAGE_COST_BYTES
    assert cost_of(10) == MESSAGE_COST_BYTES + 10
    assert cost_of(10, "key") > cost_of(10) + len("key")
    assert cost_of(10, "", ("a", "b")) > cost_of(10, "", ("a",)) > cost_of(10)


@pytest.mark.parametrize("char", ["a", "\u00e4", "\u6f22", "\U0001f916"])
def test_a_text_costs_the_memory_that_it_takes_up(char: str) -> None:
    text = char * 4_000
    held = sys.getsizeof(text) - sys.getsizeof(char[:0])
    assert size_of(text) >= held - 100
    assert size_of("a" * 4_000) == 4_000
    assert size_of("a" * 3_999 + char) >= sys.getsizeof("a" * 3_999 + char) - 100
    assert cost_of(0, text) >= MESSAGE_COST_BYTES + size_of(text)
    assert cost_of(0, "", (text, text)) >= MESSAGE_COST_BYTES + 2 * size_of(text)
    assert mailbox_cost("name", text) == MAILBOX_COST_BYTES + size_of(text)
    assert group_cost(char * 128) >= GROUP_COST_BYTES + (0 if char == "a" else size_of(char * 128))


def test_the_bytes_of_removed_letters_are_subtracted_exactly(box: Mailbox) -> None:
    add(box, letter(1, "critical", b"1"))
    add(box, letter(2), letter(3, payload=b"333"))
    assert box.bytes == cost_of(1) + cost_of(1) + cost_of(3)
    assert box.remove(3) is not None
    assert box.bytes == 2 * cost_of(1)
    assert box.remove(3) is None
    assert box.remove(99) is None
    assert box.bytes == 2 * cost_of(1)
    box.remove(1)
    box.remove(2)
    assert (box.bytes, len(box.letters), numbers(box)) == (0, 0, [])


def test_add_returns_the_letter_that_the_key_replaces(box: Mailbox) -> None:
    add(box, letter(1, payload=b"long" * 10, key="k"))
    replaced = add(box, letter(2, "urgent", b"s", key="k"))
    assert replaced is not None
    assert replaced.number == 1
    assert box.bytes == cost_of(1, "k")
    assert box.keys == {"k": 2}
    assert add(box, letter(3, payload=b"s", key="other")) is None
    box.remove(2)
    assert box.keys == {"other": 3}
    assert add(box, letter(4, key="k")) is None
    assert numbers(box) == [3, 4]


def test_removing_an_older_letter_keeps_the_key_of_a_newer_one(box: Mailbox) -> None:
    add(box, letter(1, key="k"))
    box.keys["k"] = 7  # a newer one has taken the key
    box.remove(1)
    assert box.keys == {"k": 7}


def test_a_removed_letter_is_forgotten_by_all_groups(box: Mailbox) -> None:
    for number in (1, 2, 3):
        add(box, letter(number))
    groups = [box.group(name, "earliest", 0, restart=False)[0] for name in ("g", "h")]
    for group in groups:
        group.hand(group.next(box.lanes, 7, 10, NOW_NS), 7)
    groups[0].settle([2])
    box.failures[2] = 1
    box.remove(2)
    box.remove(3)
    assert [group.handed for group in groups] == [{1: 7}, {1: 7}]
    assert [group.done for group in groups] == [set(), set()]
    assert box.failures == {}


def test_a_group_marks_what_it_hands_out_as_held_by_that_connection(box: Mailbox) -> None:
    for number in (1, 2, 3):
        add(box, letter(number))
    group, _ = box.group("g", "earliest", 0, restart=False)
    first = group.next(box.lanes, 7, 2, NOW_NS)
    group.hand(first, 7)
    assert group.handed == {1: 7, 2: 7}
    assert [each.number for each in group.next(box.lanes, 8, 10, NOW_NS)] == [3]
    assert [each.number for each in group.next(box.lanes, 7, 10, NOW_NS)] == [1, 2, 3]
    assert group.lose(8) == []
    assert group.lose(7) == [1, 2]
    assert group.handed == {}
    assert [each.number for each in group.next(box.lanes, 8, 10, NOW_NS)] == [1, 2, 3]


def test_an_acknowledgement_ends_the_hold_and_moves_the_position(box: Mailbox) -> None:
    for number in (1, 2, 3):
        add(box, letter(number))
    group, _ = box.group("g", "earliest", 0, restart=False)
    group.hand(group.next(box.lanes, 7, 3, NOW_NS), 7)
    assert sorted(group.acknowledge(2)) == [1, 2]
    assert group.handed == {3: 7}
    group.advance(box.lanes)
    assert (group.done, group.through[RANKS["normal"]]) == (set(), 2)


def test_dead_numbers_are_dropped_when_they_are_more_than_half() -> None:
    box = Mailbox(1, "box", public=False, named=True, label="box")
    count = 4 * mailbox.DEAD_NUMBERS_MAX
    for number in range(1, count + 1):
        add(box, letter(number))
    for number in range(1, count):
        box.remove(number)
    lane = box.lanes[RANKS["normal"]]
    assert list(lane.above(0))[-1] == count
    assert len(list(lane.above(0))) <= mailbox.DEAD_NUMBERS_MAX + 2
    assert numbers(box) == [count]


def test_a_restarted_group_holds_nothing(box: Mailbox) -> None:
    add(box, letter(1))
    group, _ = box.group("g", "earliest", 0, restart=False)
    group.hand(group.next(box.lanes, 7, 3, NOW_NS), 7)
    again, begins = box.group("g", "earliest", 0, restart=True)
    assert begins
    assert isinstance(again, PullGroup)
    assert (again.turn, again.handed, again.done) == (group.turn + 1, {}, set())
