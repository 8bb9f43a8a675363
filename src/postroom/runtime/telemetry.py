"""Export of spans, metrics and logs to OpenTelemetry, configured by the standard `OTEL_*` variables.

Rule 1: without such a variable nothing is imported.
Rule 2: telemetry never stops a server. What is wrong with it is one line in the log.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from postroom.runtime.otel_export import Telemetry

Signal: TypeAlias = Literal["traces", "metrics", "logs"]
SIGNALS: tuple[Signal, ...] = ("traces", "metrics", "logs")
DISABLED = "OTEL_SDK_DISABLED"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOLS = (
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    *(f"OTEL_EXPORTER_OTLP_{one.upper()}_PROTOCOL" for one in SIGNALS),
)
PROTOCOL = "http/protobuf"

_log = logging.getLogger("postroom.telemetry")


def wanted_signals(environ: Mapping[str, str]) -> list[Signal]:
    """The signals that the variables ask to export: by an endpoint, or by the exporter `otlp`."""
    if environ.get(DISABLED, "").strip().lower() == "true":
        return []
    return [signal for signal in SIGNALS if _is_wanted(signal, environ)]


def _is_wanted(signal: Signal, environ: Mapping[str, str]) -> bool:
    exporter = environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower()
    if exporter:
        return "otlp" in exporter.split(",")
    return bool(environ.get(ENDPOINT) or environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT"))


@contextmanager
def exporting(service: str, environ: Mapping[str, str] = os.environ) -> Iterator["Telemetry | None"]:
    """Export telemetry during a block; None when no variable asks for it.

    `service` is the name of the service when `OTEL_SERVICE_NAME` is not set.
    """
    signals = wanted_signals(environ)
    telemetry = _started(service, signals, environ) if signals else None
    try:
        yield telemetry
    finally:
        if telemetry is not None:
            telemetry.close()


def _started(service: str, signals: list[Signal], environ: Mapping[str, str]) -> "Telemetry | None":
    other = [name for name in PROTOCOLS if environ.get(name, PROTOCOL) not in ("", PROTOCOL)]
    if other:
        _log.warning(
            "telemetry is not exported: %s=%s, and only %s is known", other[0], environ[other[0]], PROTOCOL
        )
        return None
    try:
        from postroom.runtime.otel_export import Telemetry  # noqa: PLC0415 - rule 1

        return Telemetry(service, signals, environ)
    except ModuleNotFoundError as error:
        _log.warning("telemetry needs %s, which is not installed: pip install 'postroom[otel]'", error.name)
    except Exception as error:  # noqa: BLE001 - rule 2: a wrong variable must not stop a server
        _log.warning("telemetry is not exported: %s: %s", type(error).__name__, error)
    return None
