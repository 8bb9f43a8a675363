"""Where alerts go: a webhook and a command.

Rule 1: a sink gets the same notice again until it has accepted it. The id of a notice shows repetitions.
Rule 2: texts pass the door before they leave. An error shows the host of an address alone: with many
        services the path is the secret.
Rule 3: a sink ends in time and takes little memory, whatever is at its other end.
"""

import hashlib
import hmac
import http.client
import os
import signal
import socket
import ssl
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Thread, Timer
from typing import IO, Final
from urllib.parse import SplitResult, urlsplit

import msgspec

from postroom.core.door import leaving
from postroom.core.times import EPOCH, MICROSECOND
from postroom.errors import InvalidSetting
from postroom.message import Alert
from postroom.settings import AlertSettings

WEBHOOK_S: Final = 5.0
COMMAND_S: Final = 10.0
SECRET_BYTES_MIN: Final = 16
SIGNATURE: Final = "X-Postroom-Signature"
SAID_CHARS_MAX: Final = 200
SAID_S: Final = 1.0  # for the rest of what a failed command says

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
        address = checked_address(settings.webhook)
        sinks["webhook"] = lambda notice: post(address, notice, secret)
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


def checked_address(url: str) -> SplitResult:
    """The parts of the address of a webhook. No error shows the address, which may hold a secret."""
    with suppress(ValueError):
        parts = urlsplit(url)
        is_plain = url.isascii() and url.isprintable() and " " not in url and "@" not in parts.netloc
        if is_plain and parts.hostname and parts.port != 0:  # a port that is none raises
            return parts
    raise InvalidSetting(
        "alerts.webhook must have a host, a port from 1 to 65535 if any, no user name and no characters but "
        "those of a URL"
    )


def post(parts: SplitResult, notice: bytes, secret: bytes, within_s: float = WEBHOOK_S) -> str:
    """Post a notice. Redirects are not followed: the signature is for one address."""
    headers = {"Content-Type": "application/json", "User-Agent": "postroom"}
    if secret:
        headers[SIGNATURE] = f"sha256={hmac.new(secret, notice, hashlib.sha256).hexdigest()}"
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.create_default_context()
        connection = http.client.HTTPSConnection(parts.netloc, timeout=within_s, context=context)
    else:
        connection = http.client.HTTPConnection(parts.netloc, timeout=within_s)

    def hang_up() -> None:
        with suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)

    shown = f"{parts.scheme}://{parts.netloc}"
    try:
        connection.connect()
        late = Timer(within_s, hang_up)  # the timeout of a socket begins again with each byte
        late.start()
        try:
            target = f"{parts.path or '/'}{parts.query and '?'}{parts.query}"
            connection.request("POST", target, notice, headers)
            status = connection.getresponse().status
        finally:
            late.cancel()
            late.join()
    except (OSError, http.client.HTTPException, ValueError) as error:
        return f"{shown} cannot be reached: {leaving(str(error)) or type(error).__name__}"
    finally:
        connection.close()
    return "" if 200 <= status < 300 else f"{shown} answered {status}"  # noqa: PLR2004 - success


def run(command: list[str], notice: bytes, within_s: float = COMMAND_S) -> str:
    """Run a command with a notice on its standard input. No shell reads the words of the command.

    What it has started ends with it when it fails or is late, and goes on when it succeeds.
    """
    try:
        process = subprocess.Popen(  # noqa: S603 - the command of the settings
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return f"{command[0]} cannot be run: {error.strerror}"
    except ValueError as error:
        return f"{command[0]!r} cannot be run: {error}"
    assert process.stdin is not None  # noqa: S101 - for the type checker
    assert process.stderr is not None  # noqa: S101 - as above
    said = bytearray()
    listener = Thread(target=_listen, args=(process.stderr, said), daemon=True)
    listener.start()
    try:
        with suppress(BrokenPipeError), process.stdin as stdin:  # a notice is shorter than a pipe
            stdin.write(notice)
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not end within {within_s:g} s"
    finally:
        if process.returncode != 0:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode == 0:
        return ""
    listener.join(SAID_S)
    text = leaving(said.decode("utf-8", "replace").strip()[:SAID_CHARS_MAX])
    return f"{command[0]} ended with {process.returncode}: {text}"


def _listen(stream: IO[bytes], said: bytearray) -> None:
    """Read a stream to its end, and keep its beginning."""
    with stream:
        while chunk := os.read(stream.fileno(), 65_536):
            said += chunk[: 4 * SAID_CHARS_MAX - len(said)]
