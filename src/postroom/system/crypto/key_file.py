"""Key files: the keys that encrypt values at rest.

A key file holds one key per line, `<name> <base64url of 32 bytes>`, newest first. The first key encrypts new
values; the others decrypt older ones. Only the owner may have access to the file. A mounted secret, which is
a link or a file of root, may also be readable by its group.
"""

import base64
import binascii
import hashlib
import hmac
import os
import secrets
import stat
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from postroom.errors import InvalidSetting, UnsafePath
from postroom.system.atomic import open_safely, read_file, replace_file
from postroom.system.lock import alone

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
NONCE_BYTES = 12
KEY_ID_CHARS_MAX = 64
FINGERPRINT_BYTES = 8


def read_keys(path: Path) -> dict[str, bytes]:
    """The keys of a file, newest first. Empty lines and lines that begin with `#` are ignored."""
    keys: dict[str, bytes] = {}
    for number, line in enumerate(_content(path).decode("utf-8", "replace").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        key_id, _, text = line.strip().partition(" ")
        if key_id in keys:
            raise InvalidSetting(f"key file {path} has the key {key_id!r} twice")
        try:
            keys[key_id] = base64.b64decode(text.strip(), altchars=b"-_", validate=True)
            check_key(key_id, keys[key_id])
        except (binascii.Error, InvalidSetting):
            raise InvalidSetting(
                f"line {number} of key file {path} is not a key: "
                f"a key is a name, a space and {KEY_BYTES} bytes as base64url"
            ) from None
    return keys


def _content(path: Path) -> bytes:
    """The content of a key file. A link is followed, because mounted secrets of Kubernetes are links."""
    fd = open_safely(os.path.realpath(path, strict=True), os.O_RDONLY)
    with open(fd, "rb") as file:
        info, user = os.fstat(fd), os.geteuid()
        is_mounted = (path.is_symlink() and info.st_uid == user) or info.st_uid == 0 != user
        refused = stat.S_IRWXO | (stat.S_IWGRP | stat.S_IXGRP if is_mounted else stat.S_IRWXG)
        if info.st_mode & refused:
            raise UnsafePath(f"key file {path} is accessible to other users: run chmod 600 on it")
        return file.read()


def add_key(path: str | os.PathLike[str], key_id: str) -> None:
    """Add a new random key before the others, which stay to decrypt older values.

    The file is created if necessary. A running writer uses the new key after it opens the file again.
    """
    place = Path(path)
    key = secrets.token_bytes(KEY_BYTES)
    check_key(key_id, key)
    with _changing(place):
        before = b""
        if place.exists():
            if key_id in read_keys(place):
                raise InvalidSetting(f"key file {place} has the key {key_id!r} already")
            before = read_file(place)
        line = f"{key_id} {base64.urlsafe_b64encode(key).decode()}\n"
        replace_file(place, line.encode() + before, "group")


def remove_key(path: Path, key_id: str) -> None:
    """Remove a key. Values that it encrypted can never be read again."""
    with _changing(path):
        if key_id not in read_keys(path):
            raise InvalidSetting(f"key file {path} has no key {key_id!r}")
        lines = read_file(path).splitlines()
        kept = [line for line in lines if line.strip().partition(b" ")[0] != key_id.encode()]
        replace_file(path, b"".join(line + b"\n" for line in kept), "group")


def _changing(path: Path) -> AbstractContextManager[None]:
    """Let one command at a time change the file: of two commands that replace it, one would lose its key."""
    if path.is_symlink():
        raise UnsafePath(f"key file {path} is a link: change the file that it leads to")
    return alone(path.with_name(f".{path.name}.lock"), f"another command changes key file {path}: try again")


def check_outside(path: Path, folder: Path) -> None:
    """Refuse a key file inside a data folder. A copy of the folder would hold the key that protects it."""
    if path.resolve().is_relative_to(folder.resolve()):
        raise InvalidSetting(
            f"key file {path} is inside the data folder {folder}, so every copy of the folder would hold the "
            "key: keep the key file elsewhere"
        )


def fingerprint(key: bytes) -> bytes:
    """A short identifier that reveals nothing about the key. Keys of the same name have different ones."""
    return hmac.digest(key, b"postroom fingerprint", hashlib.sha256)[:FINGERPRINT_BYTES]


def check_key(key_id: str, key: bytes) -> None:
    """Refuse a name or a key of the wrong form."""
    if not key_id.isascii() or not key_id.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise InvalidSetting(f"the name of a key must be letters, digits, '.', '_' and '-', not {key_id!r}")
    if len(key_id) > KEY_ID_CHARS_MAX:
        raise InvalidSetting(f"the name of a key has at most {KEY_ID_CHARS_MAX} characters")
    if len(key) != KEY_BYTES:
        raise InvalidSetting(f"key {key_id!r} has {len(key)} bytes instead of {KEY_BYTES}")


def aes_gcm(key: bytes) -> "AESGCM":
    """The cipher of a key."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - an extra
    except ImportError:
        raise _no_library() from None
    return AESGCM(key)


def decryption_failures() -> tuple[type[Exception], ...]:
    """The errors of a cipher for bytes that it did not encrypt."""
    try:
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - an extra
    except ImportError:
        raise _no_library() from None
    return (InvalidTag, ValueError)


def _no_library() -> InvalidSetting:
    return InvalidSetting('encryption needs a library: pip install "postroom[audit]"')
