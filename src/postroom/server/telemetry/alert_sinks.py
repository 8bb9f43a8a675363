"""Where alerts go: a webhook and a command.

Rule 1: a sink gets the same notice again until it has accepted it. The id of a notice shows repetitions.
Rule 2: texts pass the door before they leave. No error shows the whole address, which may hold a secret.
"""

import hashlib
import hmac
import http.client
import ssl
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from postroom.core.door import leaving
from postroom.core.times import EPOCH, MICROSECOND
from postroom.errors import InvalidSetting, shown_address
from postroom.message import Alert
from postroom.settings import AlertSettings

WEBHOOK_S: Final = 5.0
COMMAND_S: Final = 10.0
SECRET_BYTES_MIN: Final = 16
SIGNATURE: Final = "X-Postroom-Signature"
SAID_CHARS_MAX: Final = 200

SendNotice = Callable[[bytes], str]
"""Sends a notice; returns why it was not accepted, and an empty text when it was."""


NO_SINKS: Final[Mapping[str, SendNotice]] = {}


def notice_of(alert: Alert) -> bytes:
    """The newest notice of an alert as JSON."""
    status = "resolved" if alert.resolved_us else "firing"
    facts = {
        "id": f"{alert.name}/{alert.org_id}/{alert.place}/{alert.first_us}/{alert.notice}",
        "status": status, "alert": alert.name, "org_id": alert.org_id, "server": alert.place,
        "text": leaving(alert.text), "count": alert.count, "first": _iso(alert.first_us),
        "last": _iso(alert.last_us), "resolved": _iso(alert.resolved_us) if alert.resolved_us else None,
    }  # fmt: skip
    return msgspec.json.encode(facts)


def _iso(us: int) -> str:
    return (EPOCH + us * MICROSECOND).isoformat()


def sinks_of(settings: AlertSettings) -> Mapping[str, SendNotice]:
    """The sinks of these settings, by name."""
    sinks: dict[str, SendNotice] = {}
    if settings.webhook is not None:
        secret = _secret(settings.secret_file)
        url = settings.webhook
        sinks["webhook"] = lambda notice: post(url, notice, secret)
    if settings.command:
        command = settings.command
        sinks["command"] = lambda notice: run(command, notice)
    return sinks


def _secret(path: Path | None) -> bytes:
    if path is None:
        return b""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise InvalidSetting(f"cannot read the secret of alerts {path}: {error.strerror}") from None
    if len(secret) < SECRET_BYTES_MIN:
        raise InvalidSetting(f"the secret of alerts {path} must have at least {SECRET_BYTES_MIN} bytes")
    return secret


def post(url: str, notice: bytes, secret: bytes) -> str:
    """Post a notice. Redirects are not followed: the signature is for one address."""
    parts = urlsplit(url)
    headers = {"Content-Type": "application/json", "User-Agent": "postroom"}
    if secret:
        headers[SIGNATURE] = f"sha256={hmac.new(secret, notice, hashlib.sha256).hexdigest()}"
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(parts.netloc, timeout=WEBHOOK_S, context=context)
    else:
        connection = http.client.HTTPConnection(parts.netloc, timeout=WEBHOOK_S)
    try:
        connection.request("POST", f"{parts.path or '/'}{parts.query and '?'}{parts.query}", notice, headers)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"{shown_address(url)} cannot be reached: {leaving(str(error)) or type(error).__name__}"
    finally:
        connection.close()
    return "" if 200 <= status < 300 else f"{shown_address(url)} answered {status}"  # noqa: PLR2004 - success


def run(command: list[str], notice: bytes) -> str:
    """Run a command with a notice on its standard input. No shell reads the words of the command."""
    try:
        ended = subprocess.run(  # noqa: S603 - the command of the settings
            command, input=notice, capture_output=True, timeout=COMMAND_S, check=False
        )
    except OSError as error:
        return f"{command[0]} cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not end within {COMMAND_S:g} s"
    said = leaving(ended.stderr.decode("utf-8", "replace").strip()[:SAID_CHARS_MAX])
    return "" if not ended.returncode else f"{command[0]} ended with {ended.returncode}: {said}"
