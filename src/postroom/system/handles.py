"""Open handles across fork.

A child shares its parent's open files and therefore its file locks: both would consider the lock their own.
So every handle that keeps descriptors registers here, and is reset in the child before other code runs.
"""

import ctypes
import os
import weakref
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Protocol, Self, runtime_checkable


class Closing(ABC):
    """A handle that a `with` block closes."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Forkable(Protocol):
    """A handle that can be reset in a forked child."""

    def after_fork(self) -> None:
        """Drop descriptors and thread locks that belong to the parent."""


@runtime_checkable
class Closable(Forkable, Protocol):
    """A handle that must not be open while its process forks."""

    def before_fork(self) -> None:
        """Finish current work, and close everything that a child must not inherit."""

    def after_fork_in_parent(self) -> None:
        """Resume."""


_handles: "weakref.WeakSet[Forkable]" = weakref.WeakSet()


def reset_after_fork(handle: Forkable) -> None:
    """Register a handle: `handle.after_fork()` is called in every child forked from now on."""
    _handles.add(handle)


def _pause_all() -> None:
    for handle in list(_handles):
        if isinstance(handle, Closable):
            handle.before_fork()


def _resume_all() -> None:
    for handle in list(_handles):
        if isinstance(handle, Closable):
            handle.after_fork_in_parent()


def _reset_all() -> None:
    for handle in list(_handles):
        handle.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_pause_all, after_in_parent=_resume_all, after_in_child=_reset_all)


_leaked: list[object] = []


def leak(thing: object) -> None:
    """Keep an object forever, because closing it in a child would affect its parent."""
    _leaked.append(thing)
    # The extra reference also keeps it when the interpreter exits and clears its modules.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
