"""Three-way merges of nodes."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from postroom.core.goals.merge import PropertyConflict, changed, merged, merged_edges

properties = st.dictionaries(st.sampled_from("abc"), st.integers(0, 2))
edges = st.sets(st.tuples(st.sampled_from("xy"), st.sampled_from("12")))


def test_each_side_keeps_what_it_changed() -> None:
    assert merged({"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 1, "b": 3}) == ({"a": 2, "b": 3}, [])


def test_different_changes_are_a_conflict_with_both_sides_and_the_base() -> None:
    result, conflicts = merged({"a": 1}, {"a": 2}, {"a": 3})
    assert conflicts == [PropertyConflict("a", 1, 2, 3)]
    assert result == {"a": 3}
    assert merged({"a": 1}, {"a": 2}, {"a": 3}, {"a": "branch"}) == ({"a": 2}, [])
    assert merged({"a": 1}, {"a": 2}, {"a": 3}, {"a": "base"}) == ({"a": 1}, [])


def test_a_removal_against_a_change_is_a_conflict() -> None:
    _, conflicts = merged({"a": 1}, {}, {"a": 3})
    assert conflicts == [PropertyConflict("a", 1, None, 3)]


def test_edges_are_added_and_removed() -> None:
    base, branch, main = (
        {("k", "1"), ("k", "2")},
        {("k", "1"), ("k", "3")},
        {("k", "1"), ("k", "2"), ("k", "4")},
    )
    assert merged_edges(base, branch, main) == {("k", "1"), ("k", "3"), ("k", "4")}


def test_none_removes_a_property() -> None:
    assert changed({"a": 1, "b": 2}, {"a": None, "c": 3}) == {"b": 2, "c": 3}


@given(properties, properties, properties)
def test_a_merge_decides_every_property(base: Any, branch: Any, main: Any) -> None:
    result, conflicts = merged(base, branch, main)
    open_names = {each.name for each in conflicts}
    for name in {*base, *branch, *main} - open_names:
        assert result.get(name) in (branch.get(name), main.get(name))
    again, left = merged(base, branch, main, dict.fromkeys(open_names, "branch"))
    assert not left
    assert all(again.get(name) == branch.get(name) for name in open_names)


@given(properties, properties)
def test_a_side_that_changed_nothing_takes_the_other(base: Any, other: Any) -> None:
    assert merged(base, other, base) == (other, [])
    assert merged(base, base, other) == (other, [])


@given(edges, edges)
def test_edges_of_a_branch_alone_are_taken(base: Any, branch: Any) -> None:
    assert merged_edges(base, branch, base) == branch
