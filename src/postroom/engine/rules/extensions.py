"""Extension points inside the transactions of an engine: lists of functions that the layers above add to.

Rule 1: a function is added when its module is imported, so it holds for every engine of the process.
Rule 2: a function runs in the transaction of what it is told about, and what it writes commits with that.
Rule 3: most messages do not concern it, and every message pays for it: it returns after one cheap test.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeAlias

from postroom.core.goals.advice import ReversalClass
from postroom.engine.message_input import Prepared
from postroom.engine.messages import Body
from postroom.engine.rules.cells import Effect
from postroom.engine.rules.policy import Policy
from postroom.message import Record
from postroom.stores.base import Head
from postroom.stores.transaction import Transaction


class Gate(Protocol):
    """Decides which messages one claim may lease."""

    @property
    def marker(self) -> bytes:
        """Every body that concerns the gate contains these bytes; a payload may contain them, too."""

    def admits(self, head: Head, body: Body) -> bool:
        """Whether a message may run now. Otherwise the gate has deferred or ended it."""

    def enter(self, head: Head, body: Body) -> None:
        """A message that every gate admits is about to be leased."""

    def leased(self, records: Sequence[Record]) -> None:
        """Messages were leased."""


# ---- the life of a message -------------------------------------------------------------------------

on_submit: Final[list[Callable[[Transaction, Sequence[Prepared]], None]]] = []
"""New messages are about to be stored. A function refuses all of them by an exception."""

on_accept: Final[list[Callable[[Transaction, Prepared, str], None]]] = []
"""A new message was stored under this id."""

on_claim: Final[list[Callable[[Transaction, Policy], Gate]]] = []
"""A claim begins."""

on_complete: Final[list[Callable[[Transaction, Policy, str, Body, bytes], None]]] = []
"""A message was completed with a result."""

on_end: Final[list[Callable[[Transaction, Policy, Record], None]]] = []
"""A message has ended without a result."""

on_release: Final[list[Callable[[Transaction, Policy, Record], None]]] = []
"""An attempt has ended, and its message waits for the next one."""

on_replay: Final[list[Callable[[Transaction, str], None]]] = []
"""A dead letter is queued again."""

on_forget: Final[list[Callable[[Transaction, Record], None]]] = []
"""A message is forgotten."""

Forget: TypeAlias = Callable[[Transaction, Mapping[str, str]], Mapping[str, str]]

on_purge: Final[list[Forget]] = []
"""A purge forgets old values. A function continues after the keys of its last answer, by kind of cell."""

# ---- effects ---------------------------------------------------------------------------------------

NoteEffect: TypeAlias = Callable[[Transaction, Policy, str, str, Effect, ReversalClass | None], Effect]

on_effect: Final[list[NoteEffect]] = []
"""An effect of a message is about to begin: message id, key, intent, class. The returned intent is stored."""

on_target: Final[list[Callable[[Transaction, Policy, Record, str], str | None]]] = []
"""An effect on a named target is about to begin. A function returns the message that works on the target."""

on_target_left: Final[list[Callable[[Transaction, Policy, str, str], None]]] = []
"""An effect of a message on a named target has ended: message id, target."""

on_effect_dropped: Final[list[Callable[[Transaction, str, Effect], None]]] = []
"""An effect of a message did not happen."""
