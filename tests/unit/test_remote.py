"""Published copies: complete, without duplicates and in order, after any error."""

import errno
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from postroom.audit.chain import read_chain
from postroom.audit.heads import stream_of
from postroom.audit.layout import STREAM
from postroom.audit.reader import Segments
from postroom.audit.remote import Publisher
from postroom.audit.segment_retention import retain
from postroom.audit.segment_writer import SegmentSink
from postroom.audit.verify import verify
from postroom.errors import InvalidSetting, StoreDamaged, WriteFailed
from postroom.testing import FIRST_WALL_US
from tests.children import no_child_left
from tests.segmentstories import SOURCE, events, files_of, seal_events, sealed_folder, seqs

__all__ = ["no_child_left"]


def grown(folder: Path, first: int, count: int = 10) -> None:
    seal_events(folder, first, count)


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/copy" if request.param == "file" else f"memory://copy-{uuid.uuid4()}"


def copied(url: str, folder: Path) -> Path:
    """The copy as a local folder, for `verify`."""
    file_system, root = url_to_fs(url)
    file_system.get(root, str(folder), recursive=True)
    return folder


def test_publish_sends_each_sealed_segment_once(tmp_path: Path, url: str) -> None:
    sealed_folder(tmp_path / "audit", 2)
    with SegmentSink(tmp_path / "audit") as sink:
        sink.write(events(41, 5))
        publisher = Publisher(tmp_path / "audit", url)
        assert publisher.publish() == 2
        assert publisher.publish() == 0
        sink.seal()
        assert publisher.publish() == 1
    copy = copied(url, tmp_path / "got")
    assert verify(copy, read_chain(tmp_path / "audit").head) == []
    assert list(Segments(copy).events()) == events(1, 45)
    assert Segments(copy).find({f"{SOURCE}-m3"}) == events(15, 5)
    assert not list(copy.rglob("_part-*"))


def test_a_copy_on_a_disk_is_private(tmp_path: Path) -> None:
    sealed_folder(tmp_path / "audit", 2)
    before = os.umask(0o022)
    try:
        Publisher(tmp_path / "audit", f"file://{tmp_path}/copies/audit").publish()
    finally:
        os.umask(before)
    modes = {
        (path.is_dir(), oct(path.stat().st_mode & 0o777))
        for path in [tmp_path / "copies", *(tmp_path / "copies").rglob("*")]
    }
    assert modes == {(True, "0o700"), (False, "0o600")}


def test_another_publisher_continues_after_the_last_segment(tmp_path: Path, url: str) -> None:
    sealed_folder(tmp_path / "audit", 2)
    assert Publisher(tmp_path / "audit", url).publish() == 2
    grown(tmp_path / "audit", 41)
    assert Publisher(tmp_path / "audit", url).publish() == 1
    assert seqs(list(Segments(copied(url, tmp_path / "got")).events())) == list(range(1, 51))


def test_a_copy_has_the_name_of_the_stream(tmp_path: Path, url: str) -> None:
    """Also a copy that was made before the stream had a name, or that has another one."""
    sealed_folder(tmp_path / "audit", 2)
    publisher = Publisher(tmp_path / "audit", url)
    assert publisher.publish() == 2
    assert stream_of(copied(url, tmp_path / "unnamed")) == ""
    for name in ("first", "second"):
        (tmp_path / "audit" / STREAM).write_text(f"{name}\n")
        assert publisher.publish() == 0
        copy = copied(url, tmp_path / name)
        assert (stream_of(copy), verify(copy)) == (name, [])


@pytest.mark.parametrize("method", ["pipe_file", "mv", "makedirs", "cat_file"])
@pytest.mark.parametrize("fails_at", range(7))
def test_next_publish_completes_after_any_error(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, method: str, fails_at: int
) -> None:
    sealed_folder(tmp_path / "audit", 2)
    publisher = Publisher(tmp_path / "audit", url)
    real: Callable[..., Any] = getattr(publisher._fs, method)
    calls = iter(range(1_000))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == fails_at:
            raise OSError(errno.EIO, "the line is dead")
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(publisher._fs, method, failing)
        try:
            publisher.publish()
        except WriteFailed as error:
            assert "the line is dead" in str(error)  # noqa: PT017 - whether it comes so far is not the point
    grown(tmp_path / "audit", 41)
    publisher.publish()
    copy = copied(url, tmp_path / "got")
    assert verify(copy) == []
    assert seqs(list(Segments(copy).events())) == list(range(1, 51))


def test_a_copy_outlives_retention(tmp_path: Path, url: str) -> None:
    folder = tmp_path / "audit"
    sealed_folder(folder, 2)
    publisher = Publisher(folder, url)
    publisher.publish()
    retain(folder, FIRST_WALL_US + 1_000)
    assert publisher.publish() == 0
    grown(folder, 41)
    assert publisher.publish() == 1
    copy = copied(url, tmp_path / "got")
    assert verify(copy) == []
    assert seqs(list(Segments(copy).events())) == list(range(1, 51))


def test_a_copy_that_begins_after_retention_has_its_checkpoint(tmp_path: Path, url: str) -> None:
    folder = tmp_path / "audit"
    sealed_folder(folder, 3)
    retain(folder, FIRST_WALL_US + 41)
    assert Publisher(folder, url).publish() == 1
    copy = copied(url, tmp_path / "got")
    assert verify(copy) == []
    assert seqs(list(Segments(copy).events())) == list(range(41, 61))


def test_publish_reports_segments_removed_before_sending(tmp_path: Path, url: str) -> None:
    folder = tmp_path / "audit"
    sealed_folder(folder, 1)
    Publisher(folder, url).publish()
    grown(folder, 21)
    grown(folder, 31)
    retain(folder, FIRST_WALL_US + 31)
    with pytest.raises(StoreDamaged, match="segments 2 to 2 were removed"):
        Publisher(folder, url).publish()


def test_two_folders_do_not_share_a_copy(tmp_path: Path, url: str) -> None:
    sealed_folder(tmp_path / "one", 2)
    grown(tmp_path / "two", 1, 7)
    (tmp_path / "two" / STREAM).write_text("two\n")
    Publisher(tmp_path / "one", url).publish()
    with pytest.raises(StoreDamaged, match="segments of another stream than"):
        Publisher(tmp_path / "two", url).publish()
    assert stream_of(copied(url, tmp_path / "got")) == ""


def test_publish_refuses_a_changed_segment(tmp_path: Path, url: str) -> None:
    files = sealed_folder(tmp_path / "audit", 2)
    files[1].write_bytes(files[1].read_bytes()[:-9])
    with pytest.raises(StoreDamaged, match="was changed after sealing"):
        Publisher(tmp_path / "audit", url).publish()
    assert files_of(tmp_path / "audit") == files


def test_invalid_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="cannot be reached"):
        Publisher(tmp_path, "nosuch://bucket/x")
