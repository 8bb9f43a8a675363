"""Attacks on encryption at rest: kills, full disks, wrong key files, rotations at the same time."""

from pathlib import Path

import pytest

from postroom import Tasks, open_store
from postroom.errors import InvalidSetting, KeyMissing, Unavailable, WriteFailed
from postroom.server.folder.key_rotation import EncryptedData
from postroom.stores import conversion
from postroom.stores.base import Listing
from postroom.stores.sqlite.store import SqliteStore
from postroom.system.crypto import key_file
from postroom.system.crypto.encryption import Encryption
from postroom.system.crypto.key_file import add_key, read_keys
from tests import children
from tests.children import no_child_left
from tests.smalldisk import filled, small_disk
from tests.waiting import until

__all__ = ["no_child_left", "small_disk"]  # fixtures

MARKER = "the canary sings"
TASKS = 12


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "away" / "postroom.keys"
    path.parent.mkdir()
    add_key(path, "first")
    return path


def store_plain(data: Path, tasks_each: int = TASKS, text: str = MARKER) -> None:
    """A store that is not encrypted."""
    with Tasks.open(f"sqlite:///{data}/queue.db") as tasks:
        for number in range(tasks_each):
            tasks.enqueue(agent="a", payload={"n": number, "text": text})


def numbers(data: Path, keys: Path) -> list[int]:
    """The payloads that can be read."""
    with Tasks.open(f"sqlite:///{data}/queue.db", key_file=keys) as tasks:
        found = tasks.store.find(Listing(limit=100))
        return sorted(tasks.get(one.message_id).payload["n"] for one in found)


def holders(data: Path) -> list[str]:
    """The files that hold the marker."""
    return [path.name for path in data.rglob("*") if path.is_file() and MARKER.encode() in path.read_bytes()]


def encrypt(data: Path, keys: Path) -> conversion.Progress | None:
    return EncryptedData(Encryption(keys), data, None).convert(lambda _: None)


STEPS = ((key_file, "replace_file"), (SqliteStore, "convert"), (SqliteStore, "wipe"))


@pytest.mark.parametrize("after", [False, True])
def test_rotation_killed_at_each_step_loses_nothing(
    tmp_path: Path, keys: Path, no_child_left: None, monkeypatch: pytest.MonkeyPatch, *, after: bool
) -> None:
    monkeypatch.setattr(conversion, "CONVERSION_ROWS_MAX", 5)
    data, step = tmp_path / "run", 0
    store_plain(data)

    def rotate_and_die() -> None:
        children.die_at_calls(step, STEPS, after=after)
        add_key(keys, f"key-{step}")
        encrypt(data, keys)

    while children.killed(rotate_and_die):
        assert numbers(data, keys) == list(range(TASKS))
        step += 1
    assert step > len(STEPS)
    assert holders(data) == []
    with_counts = EncryptedData(Encryption(keys), data, None).uses()
    assert [use.values for use in with_counts if not use.is_current] == [0] * (len(with_counts) - 1)


@pytest.mark.usefixtures("no_child_left")
def test_encryption_killed_before_the_rewrite_rewrites_the_file_later(tmp_path: Path, keys: Path) -> None:
    data = tmp_path / "run"
    store_plain(data, text=MARKER * 1_000)
    with Tasks.open(f"sqlite:///{data}/queue.db") as tasks:  # its pages are free, and keep the text
        tasks.store.write(
            lambda transaction: transaction.records.forget(transaction.records.find(Listing(limit=TASKS - 1)))
        )

    def encrypt_and_die() -> None:
        children.die_at_calls(0, [(SqliteStore, "wipe")])
        encrypt(data, keys)

    assert children.killed(encrypt_and_die)
    assert holders(data)
    add_key(keys, "second")  # also when another key comes first
    encrypt(data, keys)
    assert holders(data) == []
    progress = encrypt(data, keys)
    assert progress is not None
    assert progress.was_plain == 0  # and it is not rewritten again and again


def test_a_full_disk_stops_an_encryption_which_continues_later(small_disk: Path, keys: Path) -> None:
    data = small_disk / "run"
    store_plain(data, text=MARKER * 8_000)
    with filled(small_disk, 256 * 1024), pytest.raises(WriteFailed, match="No space left on device"):
        encrypt(data, keys)
    assert numbers(data, keys) == list(range(TASKS))
    store = open_store(f"sqlite:///{data}/queue.db", key_file=keys)
    while not store.convert().is_done:
        pass
    store.close()
    with filled(small_disk, 256 * 1024), pytest.raises(WriteFailed, match="No space left on device"):
        encrypt(data, keys)  # all values are converted, and the file cannot be rewritten
    assert numbers(data, keys) == list(range(TASKS))
    assert encrypt(data, keys) is not None
    assert holders(data) == []
    assert numbers(data, keys) == list(range(TASKS))


def test_a_key_is_not_added_on_a_full_disk_and_the_others_stay(small_disk: Path) -> None:
    path = small_disk / "postroom.keys"
    add_key(path, "first")
    before = path.read_bytes()
    with filled(small_disk, 0), pytest.raises((WriteFailed, OSError), match="No space left on device"):
        add_key(path, "second")
    assert path.read_bytes() == before
    assert [one.name for one in small_disk.iterdir() if "postroom" in one.name and one.suffix == ".tmp"] == []


def test_a_truncated_key_file_gives_a_one_line_error_and_the_copy_opens_the_store(
    tmp_path: Path, keys: Path
) -> None:
    data, whole = tmp_path / "run", keys.read_bytes()
    store_plain(data)
    encrypt(data, keys)
    for length in range(len(whole) - 1):  # the last byte is a newline
        keys.write_bytes(whole[:length])
        with pytest.raises((InvalidSetting, KeyMissing)) as refused:
            numbers(data, keys)
        assert str(keys) in str(refused.value)
        assert "\n" not in str(refused.value)
    keys.write_bytes(whole)
    assert numbers(data, keys) == list(range(TASKS))


def test_the_key_file_of_another_store_changes_nothing(tmp_path: Path, keys: Path) -> None:
    data, other = tmp_path / "run", tmp_path / "other.keys"
    store_plain(data)
    encrypt(data, keys)
    add_key(other, "first")  # the same name, and another key
    with pytest.raises(KeyMissing, match=r"needs the key 'first' .* key file"):
        encrypt(data, other)
    with pytest.raises(KeyMissing, match=r"needs the key 'first' .* key file"):
        EncryptedData(Encryption(other), data, None).check()
    assert numbers(data, keys) == list(range(TASKS))


def is_added(keys: Path, name: str) -> bool:
    """Add a key, unless another command changes the file right now."""
    try:
        add_key(keys, name)
    except Unavailable:
        return False
    return True


@pytest.mark.usefixtures("no_child_left")
def test_two_rotations_at_once_end_with_one_current_key(tmp_path: Path, keys: Path) -> None:
    data = tmp_path / "run"
    store_plain(data)

    def rotate(name: str) -> None:
        conversion.CONVERSION_ROWS_MAX = 2
        until(lambda: is_added(keys, name))
        encrypt(data, keys)

    children.run(lambda: rotate("second"), lambda: rotate("third"))
    encrypt(data, keys)
    uses = EncryptedData(Encryption(keys), data, None).uses()
    assert [(use.name, bool(use.values)) for use in uses if use.is_current or use.values] == [
        (next(iter(read_keys(keys))), True)
    ]
    assert numbers(data, keys) == list(range(TASKS))
