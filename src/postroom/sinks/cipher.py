"""Encryption of the field `payload` at rest: AES-GCM, with the event id as associated data.

    enc:1:<key id>:<base64url of the 12-byte nonce and the ciphertext>

A key file holds one key per line, `<key id> <base64url of 32 bytes>`, newest first. The first key encrypts
new events; the others decrypt older ones.
"""

import base64
import binascii
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from postroom.core.events import AuditEvent
from postroom.errors import InvalidSetting, Unavailable, UnsafePath
from postroom.system.atomic import read_file, replace_file

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PREFIX = "enc:1:"
KEY_BYTES = 32
NONCE_BYTES = 12
KEY_ID_CHARS_MAX = 64


class UnreadablePayload(Unavailable):
    """A payload that cannot be decrypted: the key is missing or wrong, or the payload was changed."""


class Cipher:
    """Encrypts payloads with the first of its keys, and decrypts with all of them."""

    def __init__(self, keys: dict[str, bytes]) -> None:
        for key_id, key in keys.items():
            _check_key(key_id, key)
        if not keys:
            raise InvalidSetting("a cipher needs at least one key")
        self._ciphers = {key_id: _aes_gcm(key) for key_id, key in keys.items()}
        self._current = next(iter(keys))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "Cipher":
        """A cipher with the keys of a file, which other users must not be able to open."""
        return cls(read_keys(Path(path)))

    def encrypt(self, event: AuditEvent) -> AuditEvent:
        """The event with its payload encrypted. An empty payload stays empty."""
        if not event.payload:
            return event
        nonce = secrets.token_bytes(NONCE_BYTES)
        cipher = self._ciphers[self._current]
        sealed = cipher.encrypt(nonce, event.payload.encode(), event.event_id.encode())
        text = base64.urlsafe_b64encode(nonce + sealed).decode()
        return replace(event, payload=f"{PREFIX}{self._current}:{text}")

    def decrypt(self, event: AuditEvent) -> AuditEvent:
        """The event with its payload decrypted. A payload that is not encrypted stays as it is."""
        if not event.payload.startswith(PREFIX):
            return event
        key_id, _, text = event.payload.removeprefix(PREFIX).partition(":")
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise UnreadablePayload(
                f"the payload of {event.event_id} needs the key {key_id!r}, which is missing"
            )
        clear = _decrypted(cipher, text, event.event_id)
        if clear is None:
            raise UnreadablePayload(
                f"the payload of {event.event_id} cannot be decrypted with the key {key_id!r}: "
                "this is another key of that name, or the payload was changed"
            )
        return replace(event, payload=clear)


def read_keys(path: Path) -> dict[str, bytes]:
    """The keys of a file, newest first. Empty lines and lines that begin with `#` are ignored."""
    mode = path.stat().st_mode
    if mode & stat.S_IRWXO:
        raise UnsafePath(f"key file {path} is accessible to all users: run chmod o-rwx on it")
    keys: dict[str, bytes] = {}
    for number, line in enumerate(read_file(path).decode("utf-8", "replace").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        key_id, _, text = line.strip().partition(" ")
        if key_id in keys:
            raise InvalidSetting(f"key file {path} has the key {key_id!r} twice")
        try:
            keys[key_id] = base64.b64decode(text.strip(), altchars=b"-_", validate=True)
            _check_key(key_id, keys[key_id])
        except (binascii.Error, InvalidSetting):
            raise InvalidSetting(
                f"line {number} of key file {path} is not a key: "
                f"a key is a name, a space and {KEY_BYTES} bytes as base64url"
            ) from None
    return keys


def add_key(path: str | os.PathLike[str], key_id: str) -> None:
    """Add a new random key before the others, which stay to decrypt older payloads.

    The file is created if necessary. A running writer uses the new key after it opens the file again.
    """
    place = Path(path)
    key = secrets.token_bytes(KEY_BYTES)
    _check_key(key_id, key)
    before = b""
    if place.exists():
        if key_id in read_keys(place):
            raise InvalidSetting(f"key file {place} has the key {key_id!r} already")
        before = read_file(place)
    replace_file(place, f"{key_id} {base64.urlsafe_b64encode(key).decode()}\n".encode() + before, "group")


def _check_key(key_id: str, key: bytes) -> None:
    if not key_id.isascii() or not key_id.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise InvalidSetting(f"the name of a key must be letters, digits, '.', '_' and '-', not {key_id!r}")
    if len(key_id) > KEY_ID_CHARS_MAX:
        raise InvalidSetting(f"the name of a key has at most {KEY_ID_CHARS_MAX} characters")
    if len(key) != KEY_BYTES:
        raise InvalidSetting(f"key {key_id!r} has {len(key)} bytes instead of {KEY_BYTES}")


def _aes_gcm(key: bytes) -> "AESGCM":
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - an extra
    except ImportError:
        raise InvalidSetting('encryption needs a library: pip install "postroom[audit]"') from None
    return AESGCM(key)


def _decrypted(cipher: "AESGCM", text: str, event_id: str) -> str | None:
    from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - an extra

    try:
        sealed = base64.b64decode(text, altchars=b"-_", validate=True)
        return cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], event_id.encode()).decode()
    except (InvalidTag, ValueError):  # binascii.Error and UnicodeDecodeError are ValueErrors
        return None
