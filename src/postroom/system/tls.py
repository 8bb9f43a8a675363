"""TLS of the servers: contexts from files, and a self-signed certificate for a start."""

import ssl
from pathlib import Path

from postroom.errors import InvalidSetting


def server_context(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """The TLS context of a server."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        why = error.strerror or type(error).__name__
        raise InvalidSetting(f"cannot use the certificate {certificate} with its key: {why}") from None
    return context
