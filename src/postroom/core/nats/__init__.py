"""The NATS protocol as bytes, and subjects."""
