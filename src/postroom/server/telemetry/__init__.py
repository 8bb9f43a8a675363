"""What leaves for OpenTelemetry: spans, metrics, log records; and the log of a server."""
