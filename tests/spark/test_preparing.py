"""The archive of classes that a start is quicker with. `make bench-pipeline` makes a whole one."""

import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from postroom.errors import InvalidSetting, Unavailable
from postroom.pipeline import archive, preparing
from postroom.system.lock import alone
from tests.spark.commands import in_its_own_process

PREPARE = """
from postroom.pipeline.preparing import prepare
print(prepare(lambda spark, folder: print(spark.version)).archive)
"""
START = """
from pathlib import Path
from postroom.pipeline.session import spark_session
spark = spark_session("local[1]")
jvm = spark.sparkContext._gateway.proc.pid
mapped = Path(f"/proc/{jvm}/maps").read_text().splitlines()
print({line.split()[-1] for line in mapped if ".jsa" in line})
spark.stop()
"""


def told_by(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_a_jvm_maps_the_archive_that_another_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "a cache"
    monkeypatch.setenv(archive.CACHE, str(cache))
    assert archive.using_archive() == ""
    stale = cache / archive.name_of(1)
    cache.mkdir()
    stale.write_bytes(b"of another size")
    version, path = told_by(PREPARE)
    assert version == pyspark.__version__
    assert {file.name for file in cache.iterdir()} == {Path(path).name, preparing.LOCK}
    [mapped] = told_by(START)
    assert Path(path).name in mapped
    done = in_its_own_process("prepare", "--json")
    assert done.code == 0
    assert f'"{path}"' in done.stdout
    assert '"is_new":false' in done.stdout


def test_an_archive_whose_end_is_missing_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(archive.CACHE, str(tmp_path))
    whole = tmp_path / archive.name_of(6)
    whole.write_bytes(b"classe")
    assert archive.found() == whole
    whole.write_bytes(b"class")
    assert archive.found() is None
    assert archive.using_archive() == ""


def test_the_archive_of_another_java_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = archive.name_of(1)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert archive.name_of(1) != own


def test_a_second_one_at_once_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(archive.CACHE, str(tmp_path))

    def work(_spark: object, _folder: Path) -> None:
        raise AssertionError("it started")

    with alone(tmp_path / preparing.LOCK, ""), pytest.raises(Unavailable, match="another command makes"):
        preparing.prepare(work)


def test_where_the_archive_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(archive.CACHE, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert archive.cache() == Path("/home/me/.cache/postroom")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert archive.cache() == Path("/var/cache/postroom")
    monkeypatch.setenv(archive.CACHE, "/elsewhere")
    assert archive.cache() == Path("/elsewhere")


def test_a_folder_that_java_cannot_name_has_no_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(archive.CACHE, "/a:b")
    with pytest.raises(InvalidSetting, match="set POSTROOM_CACHE"):
        archive.cache()
    assert archive.using_archive() == ""


def test_without_a_home_there_is_no_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError

    for variable in (archive.CACHE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(InvalidSetting, match="no home folder for the archive: set POSTROOM_CACHE"):
        archive.cache()
    assert archive.using_archive() == ""


def test_a_quote_in_its_path_is_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(archive.CACHE, f'{tmp_path}/so "said"')
    whole = archive.cache() / archive.name_of(1)
    whole.parent.mkdir()
    whole.write_bytes(b"1")
    assert f'"-XX:SharedArchiveFile={tmp_path}/so \\"said\\"/{whole.name}"' in archive.using_archive()
