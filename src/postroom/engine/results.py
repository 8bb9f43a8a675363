"""The result of a message, or what went wrong."""

from typing import Any

import msgspec

from postroom.calls.submit import AttemptError
from postroom.core.times import utc_text
from postroom.errors import failure_of
from postroom.message import Stored


def result_of(stored: Stored) -> Any:
    """The result of a message that has ended."""
    if stored.record.state in ("COMPLETED", "EXECUTING", "DONE"):
        return None if stored.result is None else msgspec.json.decode(stored.result)
    raise failure_of(stored.record.message_id, stored.record.state, error_history(stored))


def error_history(stored: Stored) -> list[AttemptError]:
    """What went wrong, attempt by attempt."""
    return [
        {
            "attempt": event.attempt,
            "error_type": event.error_type,
            "error": event.error,
            "timestamp": utc_text(event.ts_us * 1000),
            "worker_id": event.worker_id,
        }
        for event in stored.history
        if event.error and event.kind in ("execution_failed", "lease_lapsed", "quarantined")
    ]
