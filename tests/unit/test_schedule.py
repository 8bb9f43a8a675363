import threading

import pytest

from postroom.pipeline.schedule import run_in_order
from tests.waiting import HANG_GUARD_S

NEEDS = {"a": ("outside",), "b": ("a",), "c": ("a",), "d": ("b", "c"), "e": ()}


def test_each_job_runs_once_and_after_its_inputs() -> None:
    begun: list[str] = []
    others = threading.Event()
    beside: list[str] = []

    def do(name: str) -> None:
        begun.append(name)
        if name == "a":
            others.wait(HANG_GUARD_S)
            beside.extend(begun)
        if name == "e":
            others.set()

    run_in_order(NEEDS, do, len(NEEDS))
    assert set(beside) == {"a", "e"}
    assert sorted(begun) == sorted(NEEDS)
    assert begun[-1] == "d"


def test_the_most_urgent_ready_job_runs_first() -> None:
    done: list[str] = []
    run_in_order(NEEDS, done.append, 1)
    assert done == ["a", "b", "c", "d", "e"]


def test_jobs_without_inputs_run_at_once() -> None:
    meeting = threading.Barrier(2, timeout=HANG_GUARD_S)

    def do(_: str) -> None:
        meeting.wait()

    run_in_order({"a": (), "b": ()}, do, 2)


def test_a_job_depends_only_on_earlier_jobs() -> None:
    done: list[str] = []
    run_in_order({"a": ("b",), "b": ("a",)}, done.append, 2)
    assert done == ["a", "b"]


def test_the_first_failure_is_raised_and_no_further_job_starts() -> None:
    begun: list[str] = []

    def do(name: str) -> None:
        begun.append(name)
        if name == "b":
            raise ValueError(name)

    with pytest.raises(ValueError, match="b"):
        run_in_order(NEEDS, do, 1)
    assert begun == ["a", "b"]
