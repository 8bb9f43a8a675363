"""The audit log never fails an operation: a failed write is logged, and every entry has its own line."""

import json
import logging
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from postroom.logs import auditfile
from postroom.logs.auditfile import AuditFile


class Entry(msgspec.Struct):
    n: int


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "root" / "audit.jsonl"


@pytest.fixture
def audit(path: Path) -> Iterator[AuditFile]:
    file = AuditFile(path, "os")
    yield file
    file.close()


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """A disk that is full once a file has `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_each_entry_is_one_line_and_the_folder_is_made(audit: AuditFile, path: Path) -> None:
    audit.write(Entry(1))
    audit.write(Entry(2))
    assert path.read_bytes() == b'{"n":1}\n{"n":2}\n'


def test_only_the_owner_may_read_the_file(audit: AuditFile, path: Path) -> None:
    audit.write(Entry(1))
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_closed_file_opens_again(audit: AuditFile, path: Path) -> None:
    audit.write(Entry(1))
    audit.close()
    audit.close()
    audit.write(Entry(2))
    assert numbers(path) == [1, 2]


def test_an_entry_starts_a_new_line_after_an_unfinished_one(audit: AuditFile, path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b'{"n":0}\n{"n":')
    audit.write(Entry(1))
    assert path.read_bytes() == b'{"n":0}\n{"n":\n{"n":1}\n'


def test_lines_follow_a_file_that_was_moved_away(audit: AuditFile, path: Path) -> None:
    audit.reopen_every_s = 0.0
    audit.write(Entry(1))
    path.rename(path.with_name("audit.old"))
    audit.write(Entry(2))
    assert numbers(path.with_name("audit.old")) == [1]
    assert numbers(path) == [2]


def test_short_write_is_logged_and_the_next_entry_starts_a_new_line(
    audit: AuditFile, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audit.write(Entry(1))
    with files_end_at(12):
        audit.write(Entry(2))
    audit.write(Entry(3))
    assert path.read_bytes() == b'{"n":1}\n{"n"\n{"n":3}\n'
    assert "an audit line is missing" in caplog.text


def test_a_line_that_cannot_be_written_at_all_is_reported(
    audit: AuditFile, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audit.write(Entry(1))
    with files_end_at(8):
        audit.write(Entry(2))
    audit.write(Entry(3))
    assert [json.loads(line)["n"] for line in path.read_text().split()] == [1, 3]
    assert "an audit line is missing" in caplog.text


def as_symlink(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))


def as_folder(path: Path) -> None:
    path.mkdir()


def as_fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("obstacle", [as_symlink, as_folder, as_fifo])
def test_unsafe_audit_path_is_logged_and_not_raised(
    audit: AuditFile, path: Path, caplog: pytest.LogCaptureFixture, obstacle: Callable[[Path], None]
) -> None:
    # The operation has already happened: an error now would hide its result from the caller.
    path.parent.mkdir()
    obstacle(path)
    with caplog.at_level(logging.WARNING, "postroom.queue"):
        audit.write(Entry(1))
    assert "an audit line is missing" in caplog.text
    assert not path.with_name("elsewhere").exists()


def test_a_root_that_cannot_be_made_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("no folder")
    AuditFile(tmp_path / "file" / "audit.jsonl", "os").write(Entry(1))
    assert "an audit line is missing" in caplog.text


def test_threads_do_not_close_the_file_during_a_write(
    audit: AuditFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The next file to be opened gets the number of the closed descriptor, and the line would go there.
    audit.write(Entry(1))
    encode = auditfile._encode
    closer = threading.Thread(target=audit.close)

    def encode_while_another_closes(entry: object) -> bytes:
        closer.start()
        closer.join(0.2)
        return encode(entry)

    monkeypatch.setattr(auditfile, "_encode", encode_while_another_closes)
    audit.write(Entry(2))
    closer.join()
    assert numbers(path) == [1, 2]


def test_forked_child_opens_its_own_audit_file(audit: AuditFile, path: Path) -> None:
    audit.write(Entry(1))
    audit.after_fork()
    audit.write(Entry(2))
    assert numbers(path) == [1, 2]
