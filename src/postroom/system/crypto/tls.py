"""TLS of the servers: contexts from files, and a self-signed certificate to start with."""

import ipaddress
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from postroom.errors import InvalidSetting, Unavailable
from postroom.system.atomic import make_folder, replace_file

if TYPE_CHECKING:
    from cryptography import x509

LOOPBACK = ("localhost", "127.0.0.1", "::1")
HANDSHAKE_FAILED = "the TLS handshake failed"
_FAULTS = {
    "HTTP_REQUEST": "plain HTTP to the port of TLS",
    "TLSV1_ALERT_UNKNOWN_CA": "the client does not trust the certificate",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the client does not accept the certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the client does not accept the certificate",
    "UNSUPPORTED_PROTOCOL": "the client's version of TLS is too old",
    "HTTPS_PROXY_REQUEST": "the client does not speak TLS",  # a line such as CONNECT of NATS
    "WRONG_VERSION_NUMBER": "the client does not speak TLS",
    "UNEXPECTED_MESSAGE": "the client does not speak TLS",
}
"""Sentences for the reasons that OpenSSL names."""


def server_context(certificate: Path, key: Path | None) -> ssl.SSLContext:
    """The TLS context of a server."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        _check_files(certificate, key)
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        why = (error.reason or "one of the two is damaged").replace("_", " ").lower()
        if error.reason == "KEY_VALUES_MISMATCH":
            why = "the key is that of another certificate"
        raise InvalidSetting(f"cannot use the certificate {certificate} with its key: {why}") from None
    except OSError as error:
        raise InvalidSetting(f"cannot use {error.filename}: {error.strerror}") from None
    return context


def _check_files(certificate: Path, key: Path | None) -> None:
    """Refuse files without a certificate or a key, for which OpenSSL has no sentence."""
    if b"-BEGIN CERTIFICATE-" not in certificate.read_bytes():
        raise InvalidSetting(f"there is no certificate in {certificate}: --tls-cert needs one in PEM form")
    key_file = key or certificate
    text = key_file.read_bytes()
    if b"PRIVATE KEY-" not in text:
        raise InvalidSetting(f"there is no key in {key_file}: --tls-key names the file that has it")
    if b"-BEGIN ENCRYPTED " in text or b"Proc-Type: 4,ENCRYPTED" in text:  # OpenSSL would ask a terminal
        raise InvalidSetting(f"the key in {key_file} needs a password: store it without one")


def end_of(certificate: Path) -> datetime | None:
    """When a certificate ends; None when it cannot be read, or without the package that reads it."""
    try:
        from cryptography import x509  # noqa: PLC0415 - an extra

        return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    except (ImportError, OSError, ValueError):
        return None


def handshake_fault(error: OSError) -> str:
    """Why a handshake failed, without anything that the peer wrote."""
    if isinstance(error, ConnectionAbortedError):  # of the event loop
        return f"{HANDSHAKE_FAILED}: it took too long"
    if isinstance(error, ssl.SSLError) and error.reason:
        why = _FAULTS.get(error.reason, error.reason.replace("_", " ").lower())
        return f"{HANDSHAKE_FAILED}: {why}"
    return f"{HANDSHAKE_FAILED}: the connection was closed"


def make_self_signed(folder: Path, hosts: Sequence[str], days: int) -> tuple[Path, Path]:
    """Write `cert.pem` and `key.pem` for these hosts and for loopback. Existing files are not overwritten."""
    from cryptography import x509  # noqa: PLC0415 - an extra
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    from cryptography.x509.oid import NameOID  # noqa: PLC0415

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "postroom")])
    now = datetime.now(UTC)
    names = dict.fromkeys([*hosts, *LOOPBACK])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))  # for clients whose clocks are behind
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, clear = serialization.Encoding.PEM, serialization.NoEncryption()
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, clear)
    make_folder(folder, "os")
    files = (folder / "cert.pem", certificate.public_bytes(pem)), (folder / "key.pem", private)
    for path, _ in files:
        if path.exists():
            raise Unavailable(f"{path} exists already, and stays as it is")
    for path, data in files:
        replace_file(path, data, "fsync")
    return folder / "cert.pem", folder / "key.pem"


def _general_name(host: str) -> "x509.GeneralName":
    from cryptography import x509  # noqa: PLC0415 - an extra

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
