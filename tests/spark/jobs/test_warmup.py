"""The archive of classes that a start is quicker with. `make crash` makes one, on a full disk as well."""

from pathlib import Path

import pytest

from postroom.errors import InvalidSetting, Unavailable
from postroom.pipeline import warmup
from postroom.pipeline.spark import class_archive
from postroom.system.lock import alone


def test_an_archive_whose_end_is_missing_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(class_archive.CACHE, str(tmp_path))
    whole = tmp_path / class_archive.name_of(6)
    whole.write_bytes(b"classe")
    assert class_archive.found() == whole
    whole.write_bytes(b"class")
    assert class_archive.found() is None
    assert class_archive.using_archive() == ""


def test_each_java_has_its_own_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = class_archive.name_of(1)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert class_archive.name_of(1) != own


def test_a_second_concurrent_warmup_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(class_archive.CACHE, str(tmp_path))

    def work(_spark: object, _folder: Path) -> None:
        raise AssertionError("it started")

    with alone(tmp_path / warmup.LOCK, ""), pytest.raises(Unavailable, match="another command makes"):
        warmup.prepare(work)


def test_where_the_archive_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(class_archive.CACHE, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert class_archive.cache() == Path("/home/me/.cache/postroom")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert class_archive.cache() == Path("/var/cache/postroom")
    monkeypatch.setenv(class_archive.CACHE, "/elsewhere")
    assert class_archive.cache() == Path("/elsewhere")


def test_a_folder_that_java_cannot_name_has_no_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(class_archive.CACHE, "/a:b")
    with pytest.raises(InvalidSetting, match="set POSTROOM_CACHE"):
        class_archive.cache()
    assert class_archive.using_archive() == ""


def test_without_a_home_there_is_no_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError

    for variable in (class_archive.CACHE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(InvalidSetting, match="no home folder for the archive: set POSTROOM_CACHE"):
        class_archive.cache()
    assert class_archive.using_archive() == ""


def test_a_path_may_contain_a_quote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(class_archive.CACHE, f'{tmp_path}/so "said"')
    whole = class_archive.cache() / class_archive.name_of(1)
    whole.parent.mkdir()
    whole.write_bytes(b"1")
    assert f'"-XX:SharedArchiveFile={tmp_path}/so \\"said\\"/{whole.name}"' in class_archive.using_archive()
