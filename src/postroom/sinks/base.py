"""The seam between who has events and who keeps them."""

from collections.abc import Sequence
from typing import Protocol

from postroom.core.events import AuditEvent


class Sink(Protocol):
    """Keeps events for good. It is the only memory of how far each source has come."""

    def position(self, source: str) -> int:
        """The last `seq` of a source that is held for good; 0 for none."""

    def write(self, events: Sequence[AuditEvent]) -> None:
        """Keep all of them, in order, or raise `WriteFailed` and keep none."""

    def reopen(self) -> None:
        """Start afresh after an error of the disk, with what is there."""

    def close(self) -> None: ...
