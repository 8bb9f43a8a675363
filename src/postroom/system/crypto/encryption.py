"""Encryption of values at rest: AES-256-GCM with the newest key of a key file.

    mark (4 bytes) | fingerprint of the key (8) | nonce (12) | ciphertext and tag (16 more than the value)

Rule 1: no text and no JSON begins with the mark, so encrypted values and older plain ones can be mixed.
Rule 2: the place of a value, such as "the payload of record 7", is authenticated with it. A ciphertext that
        was moved to another place cannot be decrypted.
Rule 3: a value that cannot be decrypted raises. It is never changed or deleted.
"""

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from postroom.errors import InvalidSetting, KeyMissing, PostroomError, UnreadableValue
from postroom.system.crypto.key_file import (
    FINGERPRINT_BYTES,
    NONCE_BYTES,
    aes_gcm,
    decryption_failures,
    fingerprint,
    read_keys,
)
from postroom.system.log import library_log

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MARK = b"\xe5PR1"  # 0xE5 begins a character of three bytes in UTF-8, and "P" does not continue one
TAG_BYTES = 16
HEAD_BYTES = len(MARK) + FINGERPRINT_BYTES
OVERHEAD_BYTES = HEAD_BYTES + NONCE_BYTES + TAG_BYTES
LINE_MARK = "enc:2:"  # of an encrypted line of text: this, then the value as base64url
KEY_FILE_VARIABLE = "POSTROOM_KEY_FILE"
KEYS_FACT = "keys"  # the fact of a store that holds `KeysInUse`
PLAIN = ""  # stands for the key of values that are not encrypted

_log = library_log("postroom.keys")


def key_of(head: bytes) -> str:
    """The fingerprint of the key that encrypted a value that begins with `head`; `PLAIN` when none did."""
    return head[len(MARK) : HEAD_BYTES].hex() if head.startswith(MARK) else PLAIN


class KeysInUse(msgspec.Struct, frozen=True):
    """The keys that the values of a store may need, as the store records them."""

    keys: dict[str, str]
    """Fingerprint in hex -> the name that the key had."""
    current: str
    """The fingerprint of the key that encrypts new values."""

    @classmethod
    def decode(cls, text: str | bytes) -> "KeysInUse":
        return msgspec.json.decode(text, type=cls)

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()


class Encryption:
    """Encrypts values with the first key of a file, and decrypts with all of them."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path.cwd() / path
        self._failures = decryption_failures()
        self.reload()

    def reload(self) -> None:
        """Read the key file again: another process may have added or removed a key."""
        try:
            self._read_stamp = self._stamp()
            keys = read_keys(self.path)
        except OSError as error:
            raise KeyMissing(f"key file {self.path} cannot be read: {error.strerror}") from error
        if not keys:
            raise InvalidSetting(f"key file {self.path} has no key: make one with `postroom keys create`")
        ciphers = {fingerprint(key): aes_gcm(key) for key in keys.values()}
        self.names: Mapping[str, str] = {fingerprint(key).hex(): name for name, key in keys.items()}
        """Fingerprint in hex -> name, newest first."""
        self.current = next(iter(self.names))
        current = bytes.fromhex(self.current)
        # One assignment: other threads see the old keys or the new ones.
        self._state: tuple[bytes, AESGCM, dict[bytes, AESGCM]] = (MARK + current, ciphers[current], ciphers)

    def reload_if_changed(self) -> bool:
        """Read the key file again when it changed. Returns whether another key encrypts from now on.

        A key file that cannot be read at present changes nothing: the known keys stay in use.
        """
        try:
            if self._stamp() == self._read_stamp:
                return False
            before = self.current
            self.reload()
        except (OSError, PostroomError) as error:
            _log.warning("key file %s cannot be read again: %s", self.path, error)
            return False
        return self.current != before

    def _stamp(self) -> tuple[int, int]:
        info = self.path.stat()
        return info.st_ino, info.st_mtime_ns

    @property
    def head(self) -> bytes:
        """The first bytes of every value that the current key encrypts."""
        return self._state[0]

    def seal(self, value: bytes, place: str) -> bytes:
        """The encrypted form of a value."""
        head, cipher, _ = self._state
        nonce = os.urandom(NONCE_BYTES)
        return head + nonce + cipher.encrypt(nonce, value, place.encode())

    def open(self, value: bytes, place: str) -> bytes:
        """The value of an encrypted form. A value that is not encrypted stays as it is."""
        if value[: len(MARK)] != MARK:
            return value
        value = bytes(value)
        key = value[len(MARK) : HEAD_BYTES]
        cipher = self._state[2].get(key)
        if cipher is None:
            self.reload()
            cipher = self._state[2].get(key)
        if cipher is None:
            raise self.lacks(place, {key.hex(): ""})
        nonce, sealed = value[HEAD_BYTES : HEAD_BYTES + NONCE_BYTES], value[HEAD_BYTES + NONCE_BYTES :]
        try:
            return cipher.decrypt(nonce, sealed, place.encode())
        except self._failures:
            raise UnreadableValue(place, self.names[key.hex()]) from None

    def lacks(self, where: str, needed: Mapping[str, str]) -> KeyMissing:
        """The error for data whose keys are not in the key file, by fingerprint. A name may be empty."""
        found = f"key file {self.path} has {_listed(self.names)}"
        return KeyMissing(f"{where} needs {_listed(needed)}, and {found}")

    def seal_line(self, text: str, place: str) -> str:
        """The encrypted form of text, as one line without its newline."""
        return LINE_MARK + base64.urlsafe_b64encode(self.seal(text.encode(), place)).decode()

    def open_lines(self, text: str, place: str) -> str:
        """Lines of text with every encrypted line decrypted."""
        if LINE_MARK not in text:
            return text
        return "".join(self._opened_line(line, place) for line in text.splitlines(keepends=True))

    def _opened_line(self, line: str, place: str) -> str:
        if not line.startswith(LINE_MARK):
            return line
        try:
            sealed = base64.b64decode(line[len(LINE_MARK) :].rstrip("\n"), altchars=b"-_", validate=True)
        except ValueError:
            raise UnreadableValue(place, self.names[self.current]) from None
        if not sealed.startswith(MARK):
            raise UnreadableValue(place, self.names[self.current])
        return self.open(sealed, place).decode()

    # ---- the keys that a store notes -------------------------------------------------------------

    def check(self, where: str, noted: KeysInUse | None) -> KeysInUse:
        """The keys that a store has to record, given those recorded now. Raises when one is missing."""
        if noted is None:
            return KeysInUse({self.current: self.names[self.current]}, self.current)
        missing = self._missing(noted)
        if missing or noted.current != self.current:
            self.reload()
            missing = self._missing(noted)
        if missing:
            raise self.lacks(where, missing)
        if noted.current == self.current:
            return noted
        keys = {**noted.keys, self.current: self.names[self.current]}
        return KeysInUse(keys, self.current)

    def _missing(self, noted: KeysInUse) -> dict[str, str]:
        """The keys that the file lacks. The one that encrypts new values is the first."""
        newest_first = sorted(noted.keys, key=lambda key: key != noted.current)
        return {key: noted.keys[key] for key in newest_first if key not in self.names}


def _listed(keys: Mapping[str, str]) -> str:
    """Keys by fingerprint, as a sentence names them."""
    names = [
        f"{name!r} (fingerprint {key})" if name else f"with the fingerprint {key}"
        for key, name in keys.items()
    ]
    return f"the key{'s' if len(names) > 1 else ''} {', '.join(names)}"


def key_needed(where: str) -> KeyMissing:
    """The error for a store that is encrypted and was opened without a key file."""
    return KeyMissing(
        f"{where} is encrypted: name its key file with `postroom --key-file`, {KEY_FILE_VARIABLE}, key_file "
        "in [encryption] of the settings, or key_file in code"
    )


def check_noted(encryption: Encryption | None, where: str, noted: str) -> None:
    """Refuse a store whose keys are not at hand. `noted` is its fact about keys, empty without encryption."""
    if encryption is None:
        if noted:
            raise key_needed(where)
        return
    encryption.check(where, KeysInUse.decode(noted) if noted else None)


def key_file_encryption(path: str | os.PathLike[str] | None) -> Encryption | None:
    """The encryption with a key file, or with that of the environment; None without one."""
    found = path or os.environ.get(KEY_FILE_VARIABLE)
    return Encryption(found) if found else None
