"""Encryption of the field `payload` at rest: AES-GCM, with the event id as associated data.

    enc:1:<key id>:<base64url of the 12-byte nonce and the ciphertext>

The keys are those of a key file: see `system.crypto.key_file`.
"""

import base64
import os
import secrets
from pathlib import Path

from msgspec.structs import replace

from postroom.core.formats.events import AuditEvent
from postroom.errors import InvalidSetting, Unavailable
from postroom.system.crypto.key_file import NONCE_BYTES, aes_gcm, check_key, decryption_failures, read_keys

PREFIX = "enc:1:"


class UnreadablePayload(Unavailable):
    """A payload that cannot be decrypted: the key is missing or wrong, or the payload was changed."""


class Cipher:
    """Encrypts payloads with the first of its keys, and decrypts with all of them."""

    def __init__(self, keys: dict[str, bytes]) -> None:
        for key_id, key in keys.items():
            check_key(key_id, key)
        if not keys:
            raise InvalidSetting("a cipher needs at least one key")
        self._ciphers = {key_id: aes_gcm(key) for key_id, key in keys.items()}
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
        try:
            sealed = base64.b64decode(text, altchars=b"-_", validate=True)
            clear = cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], event.event_id.encode())
            return replace(event, payload=clear.decode())
        except decryption_failures():  # binascii.Error and UnicodeDecodeError are ValueErrors, too
            raise UnreadablePayload(
                f"the payload of {event.event_id} cannot be decrypted with the key {key_id!r}: "
                "this is another key of that name, or the payload was changed"
            ) from None
