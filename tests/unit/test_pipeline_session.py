"""The memory, compiler and page settings of a local session."""

import os
from pathlib import Path

import pytest

from postroom.errors import InvalidSetting
from postroom.pipeline import paths
from postroom.pipeline.delta.tables import Tables
from postroom.pipeline.spark import session

GIB = 1 << 30


@pytest.mark.parametrize(
    ("cores", "limit", "memory"),
    [
        (2, "max\n", "3g"),
        (16, f"{8 * GIB}\n", "4g"),  # a container on a large machine
        (2, f"{GIB}\n", "1g"),
    ],
)
def test_memory_depends_on_the_cores_and_the_container_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, limit: str, memory: str
) -> None:
    (tmp_path / "limit").write_text(limit)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * GIB // 4096}.__getitem__)
    monkeypatch.setattr(session, "CONTAINER_LIMITS", (tmp_path / "nowhere", tmp_path / "limit"))
    assert session.settings("local[*]", {})[session.MEMORY] == memory
    assert session.settings("local[*]", {session.MEMORY: "9g"})[session.MEMORY] == "9g"


@pytest.mark.parametrize(
    ("content", "used"),
    [("always [madvise] never\n", True), ("always madvise [never]\n", False), (None, False)],
)
def test_huge_pages_are_requested_only_where_they_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, used: bool
) -> None:
    if content is not None:
        (tmp_path / "enabled").write_text(content)
    monkeypatch.setattr(session, "HUGE_PAGES", tmp_path / "enabled")
    options = session.settings("local[*]", {})[session.DRIVER_OPTIONS]
    assert ("UseTransparentHugePages" in options) == used


def test_a_folder_name_with_a_space_is_one_java_argument() -> None:
    assert f"={session.LOG_SETTINGS.as_uri()}" in session.SETTINGS[session.DRIVER_OPTIONS].split()[-1]


@pytest.mark.parametrize(
    "master", ["nonsense", "", "local[0]", "local[]", "sc://127.0.0.1:15002", "spark://"]
)
def test_an_invalid_master_is_refused_before_a_jvm_starts(master: str) -> None:
    with pytest.raises(InvalidSetting, match="is not a master: it is local"):
        session.spark_session(master)


@pytest.mark.parametrize(
    "master", ["local", "local[*]", "local[2]", "local[2,4]", "spark://a:7077,b:7077", "k8s://https://h:443"]
)
def test_masters_of_spark_are_accepted(master: str) -> None:
    assert session.MASTER.fullmatch(master)


def test_a_small_session_compiles_little_and_the_users_settings_stay() -> None:
    wanted = {"spark.sql.shuffle.partitions": "5"}
    small = session.settings("local[*]", wanted, is_small=True)
    assert small["spark.sql.codegen.wholeStage"] == "false"
    assert small["spark.sql.shuffle.partitions"] == "5"
    assert session.QUICK_COMPILER in small[session.DRIVER_OPTIONS]
    large = session.settings("local[*]", wanted)
    assert "spark.sql.codegen.wholeStage" not in large
    assert session.QUICK_COMPILER not in large[session.DRIVER_OPTIONS]
    assert session.settings("spark://h:7077", {}, is_small=True) == session.settings("spark://h:7077", {})


def test_data_is_small_up_to_a_size(tmp_path: Path) -> None:
    tables = Tables(tmp_path / "nowhere")
    assert tables.is_small_with(paths.SMALL_BYTES)
    assert not tables.is_small_with(paths.SMALL_BYTES + 1)
