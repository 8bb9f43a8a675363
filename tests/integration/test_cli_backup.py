"""`postroom backup` and `postroom restore`: beside real servers, killed, damaged, and on a full disk."""

import hashlib
import io
import os
import random
import sqlite3
import tarfile
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from postroom import Bus, Tasks
from postroom.client import EngineClient, TaskClient
from postroom.client.mail import Mail
from postroom.core.formats import backup_format
from postroom.errors import Unavailable
from postroom.server.folder import archive, backup
from tests.integration.commandline import finish, isolate, postroom, start
from tests.integration.ups import running
from tests.smalldisk import filled, small_disk
from tests.waiting import until

__all__ = ["small_disk"]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


def filled_folder(folder: Path, tasks: int = 20, size: int = 10) -> Path:
    """A data folder with tasks, a bus, a token and a key file."""
    folder.mkdir(mode=0o700)
    with Tasks.open(f"sqlite:///{folder / 'queue.db'}") as store:
        store.enqueue_many([{"agent": "triage", "payload": "x" * size} for _ in range(tasks)])
    bus = folder / "buses" / "team.yaml"
    bus.parent.mkdir()
    assert (
        postroom("bus", "post", "--bus", bus, "--type", "note", "--project", "p", "--body", "hello").code == 0
    )
    assert postroom("token", "create", "--data", folder, "--role", "admin").code == 0
    (folder / "payloads.keys").write_text("secret")
    return folder


def names_in(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


def test_a_restored_folder_has_the_same_data(tmp_path: Path) -> None:
    data, out, again = filled_folder(tmp_path / "run"), tmp_path / "run.tar", tmp_path / "again"
    (tmp_path / "postroom.toml").write_text("[up]\nhttp_port = 0\n")
    (data / "link").symlink_to("/etc/passwd")
    done = postroom("backup", "--data", data, "--out", out).line
    assert done["verified"]
    assert done["bytes"] == out.stat().st_size
    assert done["left_out"] == ["link", "payloads.keys"]
    assert {"queue.db", "buses/team.yaml", "tokens.json", "backup-settings.toml"} <= set(names_in(out))
    assert not {name for name in names_in(out) if name.endswith((".lock", ".keys", "-wal", ".ballast"))}
    assert out.stat().st_mode & 0o777 == 0o600
    restored = postroom("restore", "--from", out, "--data", again).line
    assert restored["files"] == done["files"]
    assert (again / "backup-settings.toml").read_text() == "[up]\nhttp_port = 0\n"
    assert again.stat().st_mode & 0o777 == 0o700
    assert postroom("verify", "--data", again).code == 0
    with Tasks.open(f"sqlite:///{again / 'queue.db'}") as tasks:
        assert tasks.status().agents["triage"].depth == 20
        assert len(tasks.claim(agent="triage", limit=30)) == 20
    assert (again / "tokens.json").read_bytes() == (data / "tokens.json").read_bytes()
    assert (again / "buses/team.yaml").read_bytes() == (data / "buses/team.yaml").read_bytes()
    twice = postroom("backup", "--data", again, "--out", tmp_path / "twice.tar")
    assert twice.code == 0
    assert postroom("backup", "--data", data, "--out", tmp_path / "keys.tar", "--with-keys").line[
        "left_out"
    ] == ["link"]
    assert "payloads.keys" in names_in(tmp_path / "keys.tar")


def test_wrong_targets_are_refused_and_stay_as_they_are(tmp_path: Path) -> None:
    data, out = filled_folder(tmp_path / "run"), tmp_path / "run.tar"
    inside = postroom("backup", "--data", data, "--out", data / "run.tar")
    assert "inside the data folder" in inside.error
    assert "no data folder" in postroom("backup", "--data", tmp_path / "none", "--out", out).error
    assert "there is no folder" in postroom("backup", "--data", data, "--out", tmp_path / "no" / "x").error
    assert postroom("backup", "--data", data, "--out", out).code == 0
    before = out.read_bytes()
    assert "exists already" in postroom("backup", "--data", data, "--out", out).error
    assert out.read_bytes() == before
    assert "is not empty" in postroom("restore", "--from", out, "--data", data).error
    assert (
        "there is no backup"
        in postroom("restore", "--from", tmp_path / "none", "--data", tmp_path / "x").error
    )
    assert (
        "is not a backup" in postroom("restore", "--from", data / "queue.db", "--data", tmp_path / "x").error
    )
    assert not (tmp_path / "x").exists()
    (tmp_path / "empty").mkdir()
    assert postroom("restore", "--from", out, "--data", tmp_path / "empty").code == 0


# ---- beside servers ----------------------------------------------------------------------------------


class Writers:
    """Threads that write to a server until they are stopped, each with its own client."""

    def __init__(self, *work: Callable[[int], object]) -> None:
        self._stop = threading.Event()
        self.counts = [0] * len(work)
        self._threads = [threading.Thread(target=self._run, args=each) for each in enumerate(work)]
        for thread in self._threads:
            thread.start()

    def _run(self, place: int, work: Callable[[int], object]) -> None:
        while not self._stop.is_set():
            with suppress(Unavailable):  # slowed down: the next turn tries again
                work(self.counts[place])
                self.counts[place] += 1

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_backups_while_servers_write_restore_to_folders_that_verify(tmp_path: Path) -> None:
    data = tmp_path / "run"
    (tmp_path / "postroom.toml").write_text("[audit]\nseal_after_s = 0.2\n")
    with running(data) as up:
        token = up.token or ""
        tasks, engine = TaskClient(up.http, agent="triage", token=token), EngineClient(up.http, token)
        mail = Mail(up.nats, token=token)
        box = mail.create(ttl_s=3600)

        def work_off(n: int) -> None:
            tasks.enqueue("triage", {"n": n})
            for task in tasks.next_tasks(1):
                tasks.complete_task(task, n)

        writers = Writers(
            work_off,
            lambda n: engine.submit(org_id="acme", type="tool_call", payload={"tool": "t", "n": n}),
            lambda n: mail.send(box, f"{n}", priority="urgent"),
        )
        stored: list[list[int]] = []
        try:
            for n in range(2):
                until(lambda n=n: min(writers.counts) > 10 * (n + 1))  # type: ignore[misc]
                stored.append([*writers.counts])
                made = postroom("backup", "--data", data, "--out", tmp_path / f"{n}.tar")
                assert made.code == 0, made.errors
        finally:
            writers.stop()
        for client in (mail, tasks, engine):
            client.close()
    for n, counts in enumerate(stored):
        again = tmp_path / f"again{n}"
        assert postroom("restore", "--from", tmp_path / f"{n}.tar", "--data", again).code == 0
        verified = postroom("verify", "--data", again)
        assert verified.code == 0, verified.out
        with closing(sqlite3.connect(again / "queue.db")) as connection:
            [(ended,)] = connection.execute(
                "SELECT count(*) FROM records WHERE state IN ('COMPLETED', 'DONE')"
            )
            [(messages,)] = connection.execute("SELECT count(*) FROM records WHERE line > 1099511627776")
        assert ended >= counts[0]  # everything acknowledged before the backup began
        assert messages >= counts[1]
    with running(tmp_path / "again1") as up:  # servers go on, and the shipper with its stream
        with Mail(up.nats, token=token) as mail, EngineClient(up.http, token) as engine:
            assert len(mail.list(box)) >= stored[1][2]
            assert engine.submit(org_id="acme", type="tool_call", payload={"tool": "t"})
        assert up.get("/health", None)[1]["status"] == "ok"
    assert postroom("verify", "--data", tmp_path / "again1").code == 0


def test_what_changes_after_the_state_was_noted_stays_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out, again = filled_folder(tmp_path / "run"), tmp_path / "run.tar", tmp_path / "again"
    bus, audit = data / "buses" / "team.yaml", data / "audit"

    def change_everything() -> None:
        with Tasks.open(f"sqlite:///{data / 'queue.db'}") as tasks:
            tasks.enqueue(agent="triage", payload="later")
        assert postroom("audit", "ship", "--data", data, "--to", audit, "--once").code == 0
        assert postroom("bus", "rotate", "--bus", bus).code == 0
        note = ("--type", "note", "--project", "p", "--body", "later")
        assert postroom("bus", "post", "--bus", bus, *note).code == 0

    class Late(archive.ArchiveWriter):
        def __init__(self, *facts: Any) -> None:
            change_everything()
            super().__init__(*facts)

    assert postroom("audit", "ship", "--data", data, "--to", audit, "--once").code == 0
    monkeypatch.setattr(backup, "ArchiveWriter", Late)
    assert postroom("backup", "--data", data, "--out", out).code == 0
    assert postroom("restore", "--from", out, "--data", again).code == 0
    assert postroom("verify", "--data", again).code == 0
    copied = Bus(again / "buses" / "team.yaml").scan(archives=True)  # a bus is noted when it is written
    assert [message.body for message in copied] == ["hello", "later"]
    assert len(list(again.glob("audit/date=*/hour=*/*"))) == 1
    assert len(list(audit.glob("date=*/hour=*/*"))) == 2
    with Tasks.open(f"sqlite:///{again / 'queue.db'}") as tasks:
        assert tasks.status().agents["triage"].depth == 20


# ---- kills -------------------------------------------------------------------------------------------


def killed_at_random(command: list[object], seen: Callable[[], bool], delay_s: float) -> None:
    """Start a command, wait until it works, and kill it."""
    process = start("postroom", *command)
    try:
        until(lambda: seen() or process.poll() is not None)
        time.sleep(delay_s)
    finally:
        process.kill()
        finish(process)


def test_a_killed_backup_leaves_no_archive_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    data = filled_folder(tmp_path / "run", tasks=300, size=100_000)
    out, target = tmp_path / "out" / "run.tar", tmp_path / "out"
    target.mkdir()
    command = ["backup", "--data", data, "--out", out]
    kills = 0
    for n in range(3):
        killed_at_random(command, lambda: any(target.iterdir()), n * 0.02)
        if out.exists():  # it was quicker
            assert postroom("restore", "--from", out, "--data", tmp_path / f"early{n}").code == 0
            out.unlink()
        else:
            kills += 1
            assert all(path.name.startswith(".run.tar.") for path in target.iterdir())
    assert kills
    assert postroom(*command).code == 0
    assert [path.name for path in target.iterdir()] == ["run.tar"]
    assert postroom("verify", "--data", data).code == 0


def test_a_backup_removes_the_files_of_sqlite_that_a_killed_one_has_left(tmp_path: Path) -> None:
    data, target = filled_folder(tmp_path / "run"), tmp_path / "out"
    target.mkdir()
    gone, alive = 2**22 + 1, os.getppid()  # more than the highest process id of Linux
    names = [
        f".a[1].tar.db.{pid}.tmp{suffix}" for pid in (gone, alive) for suffix in ("", "-journal", "-wal")
    ]
    for name in (*names, f".a[1].tar.{gone}.tmp", f".b.tar.db.{gone}.tmp"):
        (target / name).touch()
    assert postroom("backup", "--data", data, "--out", target / "a[1].tar").code == 0
    left = {path.name for path in target.iterdir()}
    assert left == {"a[1].tar", f".b.tar.db.{gone}.tmp", *(name for name in names if f".{alive}." in name)}


def test_a_killed_restore_leaves_no_data_folder(tmp_path: Path) -> None:
    data, out = filled_folder(tmp_path / "run", tasks=300, size=100_000), tmp_path / "run.tar"
    assert postroom("backup", "--data", data, "--out", out).code == 0
    parent = tmp_path / "target"
    parent.mkdir()
    again, kills = parent / "again", 0
    for n in range(3):
        killed_at_random(["restore", "--from", out, "--data", again], lambda: any(parent.iterdir()), n * 0.02)
        if again.exists():  # whole, because it has its name
            assert postroom("verify", "--data", again).code == 0
            again.rename(tmp_path / f"whole{n}")
        else:
            kills += 1
    assert kills
    assert postroom("restore", "--from", out, "--data", again).code == 0
    assert postroom("verify", "--data", again).code == 0


# ---- damage ------------------------------------------------------------------------------------------


def test_damaged_archive_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    data, out = filled_folder(tmp_path / "run"), tmp_path / "run.tar"
    assert postroom("backup", "--data", data, "--out", out).code == 0
    whole, again, bad = out.read_bytes(), tmp_path / "again", tmp_path / "bad.tar"
    end = whole.rindex(b"manifest.sha256") + 512 + 65
    chance = random.Random(7)
    for size in [0, 1, 511, 512, end - 1, *(chance.randrange(end) for _ in range(10))]:
        bad.write_bytes(whole[:size])
        refused = postroom("restore", "--from", bad, "--data", again)
        assert (refused.code, refused.raw) == (1, b""), size
        assert refused.error
    with tarfile.open(out) as tar:
        contents = [(info.offset_data, info.size) for info in tar]
    places = [chance.randrange(start, start + size) for start, size in contents if size for _ in range(3)]
    for place in places:
        bad.write_bytes(
            whole[:place] + bytes([whole[place] ^ (1 << chance.randrange(8))]) + whole[place + 1 :]
        )
        refused = postroom("restore", "--from", bad, "--data", again)
        assert (refused.code, refused.raw) == (1, b""), place
        assert "Traceback" not in refused.errors
    assert not again.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.tar", "run", "run.tar"]


def forged(path: Path, members: list[tuple[tarfile.TarInfo, bytes]], *, format_: int = 1) -> Path:
    """An archive with a manifest that fits its members."""
    infos = [
        backup_format.MemberInfo(info.name, len(data), hashlib.sha256(data).hexdigest())
        for info, data in members
    ]
    manifest = backup_format.encoded(backup_format.BackupManifest(format_, "9.9", "now", {}, infos))
    head = backup_format.encoded(backup_format.BackupHead(format_, "9.9", "now"))
    with tarfile.open(path, "w") as tar:
        for name, data in [(backup_format.HEAD, head)]:
            tar.addfile(sized(tarfile.TarInfo(name), data), io.BytesIO(data))
        for info, data in members:
            tar.addfile(sized(info, data), io.BytesIO(data))
        for name, data in [
            (backup_format.MANIFEST, manifest),
            (backup_format.MANIFEST_HASH, hashlib.sha256(manifest).hexdigest().encode()),
        ]:
            tar.addfile(sized(tarfile.TarInfo(name), data), io.BytesIO(data))
    return path


def sized(info: tarfile.TarInfo, data: bytes) -> tarfile.TarInfo:
    info.size = len(data) if info.isreg() else 0
    return info


def test_hostile_archives_write_nothing_outside_the_folder(tmp_path: Path) -> None:
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc"
    hostile = [
        [(tarfile.TarInfo("../outside"), b"x")],
        [(tarfile.TarInfo(str(tmp_path / "outside")), b"x")],
        [(tarfile.TarInfo("a/../../outside"), b"x")],
        [(link, b""), (tarfile.TarInfo("link/x"), b"x")],
    ]
    for n, members in enumerate(hostile):
        path = forged(tmp_path / f"{n}.tar", members)
        refused = postroom("restore", "--from", path, "--data", tmp_path / "again")
        assert (refused.code, refused.raw) == (1, b"")
    newer = forged(tmp_path / "newer.tar", [(tarfile.TarInfo("a"), b"x")], format_=2)
    refused = postroom("restore", "--from", newer, "--data", tmp_path / "again")
    assert "it has format 2 and was written by postroom 9.9" in refused.error
    assert not (tmp_path / "again").exists()
    assert not (tmp_path / "outside").exists()
    fine = forged(tmp_path / "fine.tar", [(tarfile.TarInfo("a/b"), b"x")])
    assert postroom("restore", "--from", fine, "--data", tmp_path / "again").code == 0


def test_a_full_disk_gives_a_one_line_error_and_leaves_nothing(small_disk: Path, tmp_path: Path) -> None:
    data = filled_folder(tmp_path / "run", tasks=10, size=100_000)
    out = tmp_path / "run.tar"
    assert postroom("backup", "--data", data, "--out", out).code == 0
    for left in (100_000, 1_200_000):  # no room for the copy of the store, and for the archive
        with filled(small_disk, left):
            refused = postroom("backup", "--data", data, "--out", small_disk / "run.tar")
            assert (refused.code, refused.raw) == (1, b"")
            assert "No space left on device" in refused.error
            assert [path.name for path in small_disk.iterdir()] == ["ballast"]
    with filled(small_disk, 300_000):
        refused = postroom("restore", "--from", out, "--data", small_disk / "again")
        assert "are free in" in refused.error
        assert [path.name for path in small_disk.iterdir()] == ["ballast"]
    assert postroom("restore", "--from", out, "--data", small_disk / "again").code == 0


def test_a_copy_of_the_store_that_fails_half_way_leaves_nothing(small_disk: Path, tmp_path: Path) -> None:
    data = filled_folder(tmp_path / "run", tasks=60, size=100_000)  # copied in several steps
    with filled(small_disk, 1_000_000):
        refused = postroom("backup", "--data", data, "--out", small_disk / "run.tar")
        assert "No space left on device" in refused.error
        assert [path.name for path in small_disk.iterdir()] == ["ballast"]


def test_a_backup_that_cannot_be_read_back_gets_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, out = filled_folder(tmp_path / "run"), tmp_path / "run.tar"

    class Faulty(archive.ArchiveWriter):
        def finish(self, *facts: Any) -> backup_format.BackupManifest:
            manifest = super().finish(*facts)
            self._file.seek(2_000)
            self._file.write(b"\xff")
            return manifest

    monkeypatch.setattr(backup, "ArchiveWriter", Faulty)
    refused = postroom("backup", "--data", data, "--out", out)
    assert refused.code == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
