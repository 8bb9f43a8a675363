"""Whether a PostgreSQL server refuses a client for good, or is only not ready yet.

Rule 1: the code of an error decides, not its text: servers translate their texts. libpq hides the code of a
        failed connection, so the server is asked once more, by the first two messages of the protocol.
Rule 2: when in doubt, the answer is that a retry can help.
"""

import re
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

PORT_DEFAULT = 5432
ANSWER_BYTES_MAX = 8_192
PROTOCOL = 3 << 16
NOT_READY = ("57P", "53")  # starting, stopping, in recovery; out of connections, memory or disk
LOCAL_REFUSALS = re.compile(
    r"SSL was required|certificate|unknown ca|alert (?:handshake|bad)|Name or service not known"
)
"""Errors of libpq itself, before it asked for a session. It does not translate them."""
CAN_HEAL = re.compile(
    r"refused|timeout|timed out|closed the connection|reset|unreachable"  # there was no answer
    r"|read-only|standby"  # the other host is the primary, or becomes it
    r"|too many connections"  # of a role or a database: it is counted after the password was checked
)

_HEAD = struct.Struct(">ci")


def is_local(error: object) -> bool:
    """Whether this machine refused: a certificate, a server without TLS, an unknown host."""
    return LOCAL_REFUSALS.search(str(error)) is not None


def are_ready(hosts: Sequence[Mapping[str, Any]], error: object, timeout_s: float) -> bool:
    """Whether every host has a server that takes sessions, so that `error` must be about this client."""
    if CAN_HEAL.search(str(error)):
        return False
    return all(_is_ready(host, timeout_s) for host in hosts)


def _is_ready(host: Mapping[str, Any], timeout_s: float) -> bool:
    with suppress(OSError, struct.error), _connected(host, timeout_s) as server:
        server.sendall(_startup(host))
        answer = server.recv(ANSWER_BYTES_MAX)
        kind, _ = _HEAD.unpack_from(answer)
        return kind == b"R" or (kind == b"E" and not _code(answer).startswith(NOT_READY))
    return False


def _connected(host: Mapping[str, Any], timeout_s: float) -> socket.socket:
    name, port = (
        host.get("hostaddr") or host.get("host") or "localhost",
        int(host.get("port") or PORT_DEFAULT),
    )
    if not name.startswith("/"):
        return socket.create_connection((name, port), timeout_s)
    server = socket.socket(socket.AF_UNIX)
    server.settimeout(timeout_s)
    try:
        server.connect(f"{name}/.s.PGSQL.{port}")
    except OSError:
        server.close()
        raise
    return server


def _startup(host: Mapping[str, Any]) -> bytes:
    user = host.get("user") or "postroom"
    words = {"user": user, "database": host.get("dbname") or user}
    body = b"".join(word.encode() + b"\0" for pair in words.items() for word in pair) + b"\0"
    return struct.pack(">ii", len(body) + 8, PROTOCOL) + body


def _code(answer: bytes) -> str:
    """The SQLSTATE of an error message; empty when it has none."""
    fields = answer[_HEAD.size :].split(b"\0")
    return next((field[1:].decode("ascii", "replace") for field in fields if field[:1] == b"C"), "")
