"""Telemetry of programs that run `engine.run()`. Importing this module registers it with all engines."""

from postroom.engine.global_queue import GlobalQueue, on_work
from postroom.server.telemetry.export import telemetry_of_process

SERVICE = "postroom-worker"  # its name in telemetry, unless OTEL_SERVICE_NAME says otherwise


def export(engine: GlobalQueue) -> None:
    """Export the telemetry of an engine that works, until the process ends, if a variable asks for it."""
    telemetry = telemetry_of_process(SERVICE)
    if telemetry is not None:
        telemetry.attach(engine, while_working=True)


on_work.append(export)
