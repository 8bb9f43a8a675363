"""Export of spans, metrics and logs to OpenTelemetry, configured by the standard `OTEL_*` variables.

Rule 1: without such a variable nothing is imported.
Rule 2: telemetry never stops a server. What is wrong with it is one line in the log.
"""

import atexit
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Literal, TypeAlias

from postroom.system.log import library_log

if TYPE_CHECKING:
    from postroom.server.telemetry.providers import Telemetry

Signal: TypeAlias = Literal["traces", "metrics", "logs"]
SIGNALS: tuple[Signal, ...] = ("traces", "metrics", "logs")
DISABLED = "OTEL_SDK_DISABLED"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
PROTOCOLS = ("http/protobuf", "grpc")
"""The protocols of OTLP that can be exported, the default first. The SDK has no exporter for http/json."""

_log = library_log("postroom.telemetry")


def wanted_signals(environ: Mapping[str, str]) -> list[Signal]:
    """The signals that the variables ask to export: by an endpoint, or by the exporter `otlp`."""
    if environ.get(DISABLED, "").strip().lower() == "true":
        return []
    wanted = []
    for signal in SIGNALS:
        exporter = environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower()
        endpoint = environ.get(ENDPOINT) or environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
        if "otlp" in exporter.split(",") if exporter else endpoint:
            wanted.append(signal)
    return wanted


def protocol_of(signal: Signal, environ: Mapping[str, str]) -> tuple[str, str]:
    """The variable that chooses the protocol of OTLP, and the protocol."""
    for name in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", PROTOCOL):
        if value := environ.get(name, "").strip().lower():
            return name, value
    return PROTOCOL, PROTOCOLS[0]


@contextmanager
def exporting(service: str, environ: Mapping[str, str] = os.environ) -> Iterator["Telemetry | None"]:
    """Export telemetry during a block; None when no variable asks for it.

    `service` is the name of the service when `OTEL_SERVICE_NAME` is not set.
    """
    telemetry = _started(service, environ)
    try:
        yield telemetry
    finally:
        if telemetry is not None:
            telemetry.close()


@cache
def telemetry_of_process(service: str) -> "Telemetry | None":
    """Export telemetry until the process ends; None when no variable asks for it."""
    telemetry = _started(service, os.environ)
    if telemetry is not None:
        atexit.register(telemetry.close)
    return telemetry


def _started(service: str, environ: Mapping[str, str]) -> "Telemetry | None":
    protocols = {signal: protocol_of(signal, environ) for signal in wanted_signals(environ)}
    if not protocols:
        return None
    for variable, protocol in protocols.values():
        if protocol not in PROTOCOLS:
            _log.warning(
                "telemetry is not exported: %s is %r, which is not supported: set it to %s",
                variable, protocol, " or ".join(PROTOCOLS),
            )  # fmt: skip
            return None
    try:
        from postroom.server.telemetry.providers import Telemetry  # noqa: PLC0415 - rule 1

        return Telemetry(service, {signal: protocol for signal, (_, protocol) in protocols.items()}, environ)
    except ModuleNotFoundError as error:
        _log.warning("telemetry needs %s, which is not installed: pip install 'postroom[otel]'", error.name)
    except Exception as error:  # noqa: BLE001 - rule 2: a wrong variable must not stop a server
        _log.warning("telemetry is not exported: %s: %s", type(error).__name__, error)
    return None
