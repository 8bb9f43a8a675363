"""Forked children for tests: run a job, wait for it, end it with SIGKILL at a chosen step.

A test that forks asks for `no_child_left`, so that its failure leaves no process behind.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

STEPS_MAX = 1000

_running: set[int] = set()


@pytest.fixture
def no_child_left() -> Iterator[None]:
    yield
    while _running:
        pid = _running.pop()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def start(job: Callable[[], object]) -> int:
    """Fork a child that does `job` and ends; gives its pid."""
    pid = os.fork()
    if pid:
        _running.add(pid)
        return pid
    code = 1
    try:
        job()
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, it must not run the rest of the tests twice
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(*pids: int) -> None:
    """Every child ended well."""
    codes = {pid: _exit_code(pid) for pid in pids}
    assert set(codes.values()) <= {0}, f"children ended with {codes}"


def _exit_code(pid: int) -> int:
    _, status = os.waitpid(pid, 0)
    _running.discard(pid)
    return os.waitstatus_to_exitcode(status)


def run(*jobs: Callable[[], object]) -> None:
    """Do the jobs at the same time, each in a process of its own."""
    wait(*[start(job) for job in jobs])


def killed(job: Callable[[], object]) -> bool:
    """Do a job in a child; whether SIGKILL ended it. Any other failure is an error."""
    code = _exit_code(start(job))
    assert code in (0, -signal.SIGKILL), f"the child ended with {code}"
    return code != 0


def die() -> None:
    """What kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(step: int, names: Iterable[str], *, after: bool = False) -> None:
    """In a child: die at the n-th call (from 0) of these functions of `os`, before it or right after it."""
    die_at_calls(step, [(os, name) for name in names], after=after)


def die_at_calls(step: int, calls: Iterable[tuple[Any, str]], *, after: bool = False) -> None:
    """As `die_at`, for functions of modules and methods of classes."""
    made = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal made
            made += 1
            if made == step + 1 and not after:
                die()
            result = real(*args, **kwargs)
            if made == step + 1:
                die()
            return result

        return call

    for owner, name in calls:
        setattr(owner, name, counted(getattr(owner, name)))
