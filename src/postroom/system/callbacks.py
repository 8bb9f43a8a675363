"""Isolated callbacks: an exception in one client's request does not affect other clients."""

from collections.abc import Callable

from postroom.system.log import library_log

_log = library_log("postroom.mail")


def attempt(call: Callable[..., object], *facts: object) -> bool:
    """Call, and log an exception instead of raising it. Returns whether the call succeeded."""
    try:
        call(*facts)
    except Exception:  # noqa: BLE001 - any exception concerns only this call
        report(call)
        return False
    return True


def report(call: Callable[..., object]) -> None:
    """Log the exception that is being handled. For hot paths, which have their own `try`."""
    _log.exception("a callback of the mail server failed: %s", getattr(call, "__qualname__", call))
