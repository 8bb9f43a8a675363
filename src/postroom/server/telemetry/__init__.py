"""Telemetry of servers and workers: spans, metrics and logs for OpenTelemetry, and the server's own log.

Servers and commands import `export` and `server_log`. The other modules need the extra `otel`: only `export`
and `worker_telemetry` start them.
"""
