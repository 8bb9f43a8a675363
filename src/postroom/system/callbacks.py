"""Callbacks that fail alone: an exception of one client's request ends nobody else's turn."""

import logging
from collections.abc import Callable

_log = logging.getLogger("postroom.mail")


def attempt(call: Callable[..., object], *facts: object) -> bool:
    """Call, and report an exception in the log instead of raising it. Gives whether the call returned."""
    try:
        call(*facts)
    except Exception:  # noqa: BLE001 - whatever it is, it concerns one call alone
        report(call)
        return False
    return True


def report(call: Callable[..., object]) -> None:
    """Write the exception that is being handled to the log. For hot paths, which have their own `try`."""
    _log.exception("a callback of the mail server failed: %s", getattr(call, "__qualname__", call))
