"""The NATS protocol as bytes, and subjects. Nothing here knows a socket, a server or Mail."""
