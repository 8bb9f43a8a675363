"""Open handles, and what becomes of them across fork.

A child shares its parent's open files, and with them the parent's locks: both would believe to be alone.
So every handle that keeps descriptors registers here and is reset in the child before anything else runs.
"""

import ctypes
import os
import weakref
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Protocol, Self, runtime_checkable


class Closing(ABC):
    """What can be the subject of a `with` block, which closes it."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Forkable(Protocol):
    """A handle that can start afresh in a forked child."""

    def after_fork(self) -> None:
        """Drop descriptors and thread locks that belong to the parent."""


@runtime_checkable
class Closable(Forkable, Protocol):
    """A handle that must not be open while its process forks."""

    def before_fork(self) -> None:
        """Come to rest, and close what a child must not inherit."""

    def after_fork_in_parent(self) -> None:
        """Go on."""


_handles: "weakref.WeakSet[Forkable]" = weakref.WeakSet()


def reset_after_fork(handle: Forkable) -> None:
    """Have `handle.after_fork()` called in every child forked from now on."""
    _handles.add(handle)


def _rest_all() -> None:
    for handle in list(_handles):
        if isinstance(handle, Closable):
            handle.before_fork()


def _go_on_all() -> None:
    for handle in list(_handles):
        if isinstance(handle, Closable):
            handle.after_fork_in_parent()


def _reset_all() -> None:
    for handle in list(_handles):
        handle.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_rest_all, after_in_parent=_go_on_all, after_in_child=_reset_all)


_leaked: list[object] = []


def leak(thing: object) -> None:
    """Never let go of what a child must not close, because its parent still uses it."""
    _leaked.append(thing)
    # Also not when the interpreter ends and clears its modules.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
