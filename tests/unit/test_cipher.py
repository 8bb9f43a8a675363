"""Encrypted payloads: readable only with the key, and only in their own event."""

import base64
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from postroom.audit.cipher import Cipher, UnreadablePayload
from postroom.audit.reader import Segments
from postroom.audit.segment_writer import SegmentSink
from postroom.errors import InvalidSetting, Unavailable, UnsafePath
from postroom.system.crypto.key_file import add_key, read_keys, remove_key
from postroom.system.lock import alone
from tests.segmentstories import events

KEY = bytes(range(32))
[EVENT] = events(1, 1, payload='{"to": "ada"}')


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_decrypt_reverses_encrypt(payload: str) -> None:
    cipher = Cipher({"k": KEY})
    event = replace(EVENT, payload=payload)
    assert cipher.decrypt(cipher.encrypt(event)) == event


def test_encrypted_payload_has_the_documented_format() -> None:
    cipher = Cipher({"k1": KEY})
    first, second = cipher.encrypt(EVENT).payload, cipher.encrypt(EVENT).payload
    assert first.startswith("enc:1:k1:")
    sealed = base64.urlsafe_b64decode(first.rpartition(":")[2])
    assert len(sealed) == 12 + len(EVENT.payload) + 16  # nonce, text, tag
    assert first != second  # a nonce is used once


def test_empty_and_plain_payloads_stay_unchanged() -> None:
    cipher = Cipher({"k": KEY})
    empty = replace(EVENT, payload="")
    assert cipher.encrypt(empty) is empty
    assert cipher.decrypt(EVENT) is EVENT


@pytest.mark.statement("audit-encrypted")
def test_a_segment_holds_no_payload_in_the_clear(tmp_path: Path) -> None:
    cipher = Cipher({"k": KEY})
    with SegmentSink(tmp_path, cipher=cipher) as sink:
        sink.write(events(1, 5, payload="the canary sings"))
        sink.seal()
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"canary" not in path.read_bytes()
    assert [cipher.decrypt(event) for event in Segments(tmp_path).events()] == events(
        1, 5, payload="the canary sings"
    )


def test_a_payload_belongs_to_its_event() -> None:
    cipher = Cipher({"k": KEY})
    moved = replace(cipher.encrypt(EVENT), event_id="tasks:t1#2")
    with pytest.raises(
        UnreadablePayload, match=r"the payload of tasks:t1#2 cannot be decrypted with the key 'k'"
    ):
        cipher.decrypt(moved)


@pytest.mark.parametrize("text", ["", "A", "AAAA", "!", "A" * 64, "ü"])
def test_a_changed_payload_raises_a_one_line_error(text: str) -> None:
    with pytest.raises(UnreadablePayload, match="or the payload was changed"):
        Cipher({"k": KEY}).decrypt(replace(EVENT, payload=f"enc:1:k:{text}"))


def test_every_changed_character_is_detected() -> None:
    cipher = Cipher({"k": KEY})
    sealed = cipher.encrypt(EVENT)
    start = len("enc:1:k:")
    for at in range(start, len(sealed.payload.rstrip("=")) - 1):
        other = "A" if sealed.payload[at] != "A" else "B"
        changed = sealed.payload[:at] + other + sealed.payload[at + 1 :]
        with pytest.raises(UnreadablePayload):
            cipher.decrypt(replace(sealed, payload=changed))


def test_a_wrong_or_missing_key_raises_a_one_line_error() -> None:
    sealed = Cipher({"k": KEY}).encrypt(EVENT)
    with pytest.raises(UnreadablePayload, match="this is another key of that name"):
        Cipher({"k": KEY[::-1]}).decrypt(sealed)
    with pytest.raises(UnreadablePayload, match="needs the key 'k', which is missing"):
        Cipher({"other": KEY}).decrypt(sealed)


def test_rotation_writes_with_the_new_key_and_reads_with_all(tmp_path: Path) -> None:
    keys = tmp_path / "audit.keys"
    add_key(keys, "2026-01")
    old = Cipher.from_file(keys).encrypt(EVENT)
    add_key(keys, "2026-02")
    cipher = Cipher.from_file(keys)
    new = cipher.encrypt(EVENT)
    assert old.payload.startswith("enc:1:2026-01:")
    assert new.payload.startswith("enc:1:2026-02:")
    assert cipher.decrypt(old) == cipher.decrypt(new) == EVENT
    assert keys.stat().st_mode & 0o777 == 0o600
    with pytest.raises(InvalidSetting, match="already"):
        add_key(keys, "2026-01")


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_key_file_may_have_comments(tmp_path: Path) -> None:
    text = base64.urlsafe_b64encode(KEY).decode()
    assert read_keys(key_file(tmp_path, f"# ours\n\nk {text}\n")) == {"k": KEY}


def test_two_commands_do_not_change_a_key_file_together(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    add_key(path, "first")
    with alone(tmp_path / ".keys.lock", ""):
        with pytest.raises(Unavailable, match="another command changes key file"):
            add_key(path, "second")
        with pytest.raises(Unavailable, match="another command changes key file"):
            remove_key(path, "first")
    assert [*read_keys(path)] == ["first"]


@pytest.mark.parametrize(
    "line", ["k", "k AAAA", "k !", f"ü {'A' * 43}=", f"a:b {'A' * 43}=", f"{'k' * 65} {'A' * 43}="]
)
def test_an_invalid_key_line_is_reported_without_the_key(tmp_path: Path, line: str) -> None:
    with pytest.raises(InvalidSetting, match=r"line 1 of key file .* is not a key") as caught:
        read_keys(key_file(tmp_path, line + "\n"))
    assert "AAAA" not in str(caught.value)


def test_invalid_key_files_are_refused(tmp_path: Path) -> None:
    text = base64.urlsafe_b64encode(KEY).decode()
    for mode in (0o604, 0o640):
        with pytest.raises(UnsafePath, match="accessible to other users: run chmod 600"):
            read_keys(key_file(tmp_path, f"k {text}\n", mode))
    with pytest.raises(InvalidSetting, match="twice"):
        read_keys(key_file(tmp_path, f"k {text}\nk {text}\n"))
    with pytest.raises(InvalidSetting, match="at least one key"):
        Cipher.from_file(key_file(tmp_path, "# none\n"))
    with pytest.raises(InvalidSetting, match="32"):
        Cipher({"k": b"short"})


@pytest.mark.parametrize(
    ("missing", "code"),
    [
        ("cryptography", "from postroom.audit.cipher import Cipher; Cipher({'k': bytes(32)})"),
        ("fsspec", "from postroom.audit.remote import Publisher; Publisher('.', 'memory://x')"),
    ],
)
def test_missing_library_error_names_the_extra(missing: str, code: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None\n{code}"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=False
    )
    assert run.stderr.splitlines()[-1].endswith('pip install "postroom[audit]"')


def test_a_mounted_secret_is_a_link_to_a_file_that_a_group_may_read(tmp_path: Path) -> None:
    mount = tmp_path / "mount"
    (mount / "..2026").mkdir(parents=True)
    target = key_file(mount / "..2026", f"k {base64.urlsafe_b64encode(KEY).decode()}\n")
    (mount / "..data").symlink_to("..2026")
    link = mount / "keys"
    link.symlink_to(f"..data/{target.name}")
    for mode in (0o400, 0o440):
        target.chmod(mode)
        assert read_keys(link) == {"k": KEY}
    for mode in (0o444, 0o460, 0o404):
        target.chmod(mode)
        with pytest.raises(UnsafePath, match="accessible to other users"):
            read_keys(link)
    target.chmod(0o600)
    with pytest.raises(UnsafePath, match="is a link: change the file that it leads to"):
        add_key(link, "new")
    with pytest.raises(UnsafePath, match="is a link: change the file that it leads to"):
        remove_key(link, "k")
    assert link.is_symlink()
    link.unlink()
    link.symlink_to(link.name)
    with pytest.raises(OSError, match="symbolic links"):
        read_keys(link)
