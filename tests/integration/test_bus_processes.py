"""Many processes on one bus: no message is torn, lost or duplicated."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from postroom import Bus, BusMessage, LockTimeout
from postroom.errors import UnsafePath
from tests.faultydisk import in_background
from tests.integration.busworkers import END

ROOT = Path(__file__).parents[2]


def run(scenario: str, path: Path) -> dict[str, list[tuple[str, str]]]:
    """Run a scenario; returns the ids acknowledged to each worker, in order."""
    folder = path.parent / "ledgers"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.busworkers", scenario, str(path), str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {
        ledger.name: [tuple(json.loads(line)) for line in ledger.read_text().splitlines()]
        for ledger in sorted(folder.iterdir())
    }


def assert_nothing_lost_torn_or_doubled(
    ledgers: dict[str, list[tuple[str, str]]], messages: list[BusMessage]
) -> None:
    found = {message.msg_id: message.body for message in messages}
    assert len(found) == len(messages), "an id twice"
    assert found == {msg_id: body for ledger in ledgers.values() for msg_id, body in ledger}
    position = {message.msg_id: number for number, message in enumerate(messages)}
    for ledger in ledgers.values():
        places = [position[msg_id] for msg_id, _ in ledger]
        assert places == sorted(places), "every writer's messages stand in its order"


@pytest.mark.parametrize("scenario", ["hammer", "inherited", "inherited_group"])
def test_concurrent_writers_lose_tear_and_duplicate_nothing(tmp_path: Path, scenario: str) -> None:
    """Ten processes; and eight forked children of one open bus."""
    bus = Bus(tmp_path / "bus.yaml")
    ledgers = run(scenario, bus.path)
    messages = bus.read()
    assert_nothing_lost_torn_or_doubled(ledgers, messages)
    order = [message.msg_id for message in messages]
    assert order == sorted(order)
    report = bus.verify()
    assert report.ok
    assert (report.messages, report.unchecked, report.torn_tail_bytes) == (len(messages), 0, 0)


def test_concurrent_rotations_lose_nothing(tmp_path: Path) -> None:
    """Defect 5 of the original, where 2,000 messages left 175."""
    bus = Bus(tmp_path / "bus.yaml")
    ledgers = run("rotating", bus.path)
    messages = bus.read(archives=True)
    assert_nothing_lost_torn_or_doubled(ledgers, messages)
    order = [message.msg_id for message in messages]
    assert order == sorted(order), "also across the archives"
    assert len(bus.archives()) > 5
    single_max = 50_000  # a batch of large bodies may exceed the limit by itself
    assert all(archive.stat().st_size < single_max for archive in bus.archives())


def test_writers_of_the_original_and_ours_exclude_each_other(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml")
    ledgers = run("with_the_original", bus.path)
    assert_nothing_lost_torn_or_doubled(ledgers, bus.read())
    assert bus.verify().ok


def test_followers_see_every_message_once_across_rotations(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml")
    ledgers = run("followed", bus.path)
    seen = [ledgers.pop("seen-1"), ledgers.pop("seen-2")]
    stored = [(m.msg_id, m.body) for m in bus.read(archives=True) if m.body != END]
    assert len(bus.archives()) > 20
    assert sorted(stored) == sorted(pair for ledger in ledgers.values() for pair in ledger)
    for follower in seen:
        assert follower == stored


HOLDER = """
import fcntl, sys
log = open(sys.argv[1], "ab")
fcntl.flock(log, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_lock_held_by_another_program_raises_after_the_timeout(tmp_path: Path) -> None:
    bus = Bus(tmp_path / "bus.yaml", lock_timeout_s=0.05)
    bus.append(type="t", project_id="p", body="before")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(bus.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(LockTimeout):
            bus.append(type="t", project_id="p", body="refused")
        with pytest.raises(LockTimeout):
            bus.rotate()
        assert [message.body for message in bus.read()] == ["before"]
        holder.kill()
        Bus(bus.path, lock_timeout_s=60).append(type="t", project_id="p", body="after its death")
    assert [message.body for message in bus.read()] == ["before", "after its death"]


def test_a_symlink_that_comes_and_goes_is_never_followed(tmp_path: Path) -> None:
    """Defect 7 of the original: it checked the path before opening it, and missed a swap in between."""
    real, path, victim = tmp_path / "real", tmp_path / "bus.yaml", tmp_path / "victim"
    Bus(victim).append(type="t", project_id="p", body="secret")
    content = victim.read_bytes()
    real.touch()
    os.link(real, path)
    done = threading.Event()

    def swap() -> None:
        aside = tmp_path / "aside"
        while not done.is_set():
            aside.symlink_to(victim)
            os.replace(aside, path)
            os.link(real, aside)
            os.replace(aside, path)

    swapper = in_background(swap)
    acknowledged: list[str] = []
    refused = 0
    try:
        while len(acknowledged) < 100 or refused < 100:
            try:
                acknowledged.append(Bus(path).append(type="t", project_id="p", body="mine"))
                assert {message.body for message in Bus(path).read()} == {"mine"}
                assert {message.body for message in Bus(path).tail(1)} == {"mine"}
            except UnsafePath:
                refused += 1
    finally:
        done.set()
        swapper.join()
    assert victim.read_bytes() == content
    assert [message.msg_id for message in Bus(real).read()] == acknowledged


def test_a_symlink_that_comes_and_goes_is_never_followed_by_an_open_handle(tmp_path: Path) -> None:
    real, path, victim = tmp_path / "real", tmp_path / "bus.yaml", tmp_path / "victim"
    Bus(victim).append(type="t", project_id="p", body="secret")
    content = victim.read_bytes()
    bus = Bus(path)
    acknowledged = [bus.append(type="t", project_id="p", body="mine")]
    os.link(path, real)
    for _ in range(50):
        path.unlink()
        path.symlink_to(victim)
        with pytest.raises(UnsafePath):
            bus.append(type="t", project_id="p", body="lost")
        path.unlink()
        os.link(real, path)
        acknowledged.append(bus.append(type="t", project_id="p", body="mine"))
    assert victim.read_bytes() == content
    assert [message.msg_id for message in Bus(real).read()] == acknowledged
