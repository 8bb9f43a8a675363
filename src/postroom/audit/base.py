"""The interface between the sources of events and the places that store them."""

from collections.abc import Sequence
from typing import Protocol

from postroom.core.formats.events import AuditEvent


class Sink(Protocol):
    """Stores events durably. Only the sink knows how far each source has been shipped."""

    def position(self, source: str) -> int:
        """The last `seq` of a source that is stored durably; 0 for none."""

    def write(self, events: Sequence[AuditEvent]) -> None:
        """Store all events, in order, or raise `WriteFailed` and store none."""

    def reopen(self) -> None:
        """Continue after a disk error, with the data that is on disk."""

    def close(self) -> None: ...
