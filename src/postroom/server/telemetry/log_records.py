"""Log records of the library, and lines of a server log, as log records of OpenTelemetry."""

import logging
from collections.abc import Callable
from typing import Any

from opentelemetry._logs import Logger, LogRecord, SeverityNumber

from postroom.server.telemetry.server_log import error_location

_SEVERITIES = (
    (logging.CRITICAL, SeverityNumber.FATAL),
    (logging.ERROR, SeverityNumber.ERROR),
    (logging.WARNING, SeverityNumber.WARN),
    (logging.INFO, SeverityNumber.INFO),
)
NANOS_PER_S = 1_000_000_000


class OtelHandler(logging.Handler):
    """Exports what the library logs. The text of a traceback stays here: it may quote a payload."""

    def __init__(self, logger: Logger) -> None:
        super().__init__(logging.INFO)
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        attributes: dict[str, Any] = {"logger.name": record.name}
        if record.exc_info and record.exc_info[1] is not None:
            attributes["error.type"] = error_location(record.exc_info[1])
        severity = next(
            (number for level, number in _SEVERITIES if record.levelno >= level), SeverityNumber.DEBUG
        )
        self._logger.emit(
            LogRecord(
                timestamp=round(record.created * NANOS_PER_S), severity_number=severity,
                severity_text=record.levelname, body=record.getMessage(), attributes=attributes,
            )
        )  # fmt: skip


def line_emitter(logger: Logger) -> Callable[[dict[str, Any]], None]:
    """A function that exports one line of a server log."""

    def emit(line: dict[str, Any]) -> None:
        facts = {name: value for name, value in line.items() if name not in ("ts", "event") and value != ""}
        severity = SeverityNumber.WARN if line["event"] == "refused" else SeverityNumber.INFO
        logger.emit(
            LogRecord(
                timestamp=round(line["ts"] * NANOS_PER_S), severity_number=severity, body=line["event"],
                attributes={name: _plain(value) for name, value in facts.items()},
            )
        )  # fmt: skip

    return emit


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | bool | int | float) else repr(value)
