"""What is wrong with the files of a certificate, in one sentence."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from postroom.errors import InvalidSetting
from postroom.system.crypto.tls import make_self_signed, server_context


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return make_self_signed(tmp_path / "tls", (), 1)


def refusal(certificate: Path, key: Path | None) -> str:
    with pytest.raises(InvalidSetting) as refused:
        server_context(certificate, key)
    return str(refused.value)


def test_a_certificate_and_its_key_are_accepted_in_two_files_and_in_one(files: tuple[Path, Path]) -> None:
    certificate, key = files
    server_context(certificate, key)
    both = certificate.with_name("both.pem")
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    server_context(both, None)


def test_a_file_without_a_certificate_or_a_key_is_named(files: tuple[Path, Path]) -> None:
    certificate, key = files
    assert f"there is no certificate in {key}" in refusal(key, None)
    assert f"there is no certificate in {key}" in refusal(key, certificate)
    assert f"there is no key in {certificate}" in refusal(certificate, None)
    missing = certificate.with_name("missing.pem")
    assert refusal(certificate, missing) == f"cannot use {missing}: No such file or directory"


def test_a_key_that_does_not_fit_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    certificate, key = files
    _, other = make_self_signed(tmp_path / "other", (), 1)
    assert "the key is that of another certificate" in refusal(certificate, other)
    damaged = certificate.with_name("damaged.pem")
    damaged.write_bytes(certificate.read_bytes().replace(b"M", b"-"))
    assert "one of the two is damaged" in refusal(damaged, key)


def test_a_key_with_a_password_is_refused_without_a_question(files: tuple[Path, Path]) -> None:
    certificate, key = files
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    encrypted = serialization.BestAvailableEncryption(b"secret")
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key.write_bytes(private.private_bytes(pem, form, encrypted))
    assert "needs a password" in refusal(certificate, key)
