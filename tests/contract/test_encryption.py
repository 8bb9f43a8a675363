"""Encryption at rest: no stored byte shows what a message says, and nothing else changes.

Rule 1: every test that stores a marker looks for it in all bytes of the folder, the WAL included.
"""

import asyncio
import os
import signal
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import pytest

from postroom import Engine, Policy, Retry, Tasks, open_store
from postroom.contracts.mail.options import MailOptions
from postroom.contracts.move import move_store
from postroom.errors import InvalidSetting, KeyInUse, KeyMissing, UnreadableValue
from postroom.logs.mail_log import count_keys, damaged_stretches, log_segments
from postroom.logs.mail_records import Framing, Started
from postroom.message import Envelope
from postroom.stores import conversion
from postroom.stores.base import CHUNKS, ByIds
from postroom.stores.event_runs import UNREADABLE
from postroom.stores.postgres import keys as postgres_keys
from postroom.stores.sqlite.snapshot import SqliteSnapshot
from postroom.stores.sqlite.store import SqliteStore
from postroom.stores.store import Store
from postroom.system.crypto.encryption import KEY_FILE_VARIABLE, Encryption
from postroom.system.crypto.key_file import add_key, remove_key
from postroom.testing import ManualClock, StoreContract, check_consistency
from tests import children
from tests.children import no_child_left
from tests.mailservice import FakeLink, Harness
from tests.postgresserver import database, postgres
from tests.privatepostgres import PostgresServer
from tests.waiting import until

__all__ = ["database", "no_child_left", "postgres"]  # fixtures

MARKER = "the canary sings"
LARGE = MARKER * 8_000  # stored apart from its message


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "away" / "postroom.keys"
    path.parent.mkdir()
    add_key(path, "first")
    return path


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_keys, "KEYS_LOOK_S", 0.05)


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of an empty store, and the folder that has all its bytes."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/data/queue.db", tmp_path / "data"
        return
    server: PostgresServer = request.getfixturevalue("postgres")
    yield str(request.getfixturevalue("database")), Path(server.folder)


def holds(folder: Path, text: str = MARKER) -> list[str]:
    """The files that hold a text."""
    found = []
    for path in folder.rglob("*"):
        with suppress(OSError):  # a file of the server that has just gone
            if path.is_file() and text.encode() in path.read_bytes():
                found.append(path.name)
    return found


def second(path: Path, name: str = "second") -> None:
    """Add a key."""
    add_key(path, name)


def converted(store: Store) -> conversion.Progress:
    while not (progress := store.convert()).is_done:
        pass
    return progress


def changed(path: Path, query: str, *values: Any) -> None:
    """Change a store file behind the back of postroom."""
    connection = apsw.Connection(str(path))
    connection.execute(query, values)
    connection.close()


# ---- what is stored --------------------------------------------------------------------------------


class TestEncryptedSqlite(StoreContract):
    def open(self, folder: Path, clock: ManualClock) -> Store:
        if not (folder / "keys").exists():
            add_key(folder / "keys", "first")
        return SqliteStore(folder / "queue.db", clock=clock, encryption=Encryption(folder / "keys"))


async def talk(url: str, keys: Path) -> None:
    """Store the marker in every kind of field of an engine."""
    policy = Policy(retries={"tool_call": Retry(max_retries=0)})
    async with Engine.open(url, policy=policy, key_file=keys) as engine:

        @engine.handler("model_call")
        async def answer(message: Any, ctx: Any) -> Any:
            await ctx.progress(0.1, MARKER)
            await ctx.stream(MARKER)
            return await ctx.effect("call", lambda: {"said": MARKER})

        @engine.handler("tool_call")
        async def fail(message: Any, ctx: Any) -> None:
            raise ValueError(MARKER)

        await engine.goals.start("acme", "g", context={"plan": MARKER})
        await engine.graph.main().save("node", {"text": MARKER})
        await engine.graph.branch("g").save("node", {"text": MARKER + "!"})
        worker = asyncio.create_task(engine.run())
        payloads = ({"text": MARKER}, {"text": LARGE})
        sent = [await engine.submit(type="model_call", org_id="acme", payload=each) for each in payloads]
        failed = await engine.submit(
            type="tool_call", org_id="acme", payload={"text": MARKER}, idempotency_key="once"
        )
        for handle in sent:
            assert await handle.result() == MARKER  # what it streamed
        with suppress(Exception):
            await failed.result()
        await engine.submit(type="model_call", org_id="acme", payload={"text": MARKER}, delay_s=600)
        await engine.stop()
        await worker


def write_everywhere(url: str, keys: Path) -> None:
    """Store the marker by Tasks and by Engine, and end by SIGKILL."""
    with Tasks.open(url, key_file=keys) as tasks:
        for n in range(4):
            tasks.enqueue(
                agent="a", payload={"n": n, "text": MARKER}, task_id=f"given-{n}" if n % 2 else None
            )
        done, failed, *_ = tasks.claim(agent="a", worker="w", limit=3)
        tasks.complete(done.task_id, done.lease, {"text": MARKER})
        tasks.fail(failed.task_id, failed.lease, MARKER)
        asyncio.run(talk(url, keys))
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.statement("audit-encrypted", "encryption-rest")
@pytest.mark.usefixtures("no_child_left")
def test_no_byte_of_a_store_shows_what_messages_say(place: tuple[str, Path], keys: Path) -> None:
    url, folder = place
    pid = children.start(lambda: write_everywhere(url, keys))
    _, status = os.waitpid(pid, 0)
    children._running.discard(pid)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert holds(folder) == []
    store = open_store(url, key_file=keys)
    assert MARKER in str([store.load(f"given-{n}") for n in (1, 3)])
    events = store.events(0, 10_000)
    assert [event for event in events if MARKER in event.error]
    kinds = store.read(
        lambda t: [kind for kind, _ in ((k, t.cells.page(k)) for k in t.cells.kinds()) if MARKER in str(_)]
    )
    assert {"engine.body", "engine.effect", "goal.context", "graph.node", "graph.staged"} <= {*kinds}
    assert MARKER in str(store.read(lambda t: t.cells.page(CHUNKS)))
    check_consistency(store)
    assert store.count_keys().keys() == {Encryption(keys).current}
    store.close()
    assert holds(folder) == []


def test_a_store_without_a_key_holds_what_messages_say(tmp_path: Path) -> None:
    with Tasks.open(f"sqlite:///{tmp_path}/queue.db") as tasks:
        tasks.enqueue(agent="a", payload={"text": MARKER})
    assert holds(tmp_path)


# ---- keys ------------------------------------------------------------------------------------------


def test_keys_of_a_store_in_a_broker_are_those_of_its_ledger(tmp_path: Path, keys: Path) -> None:
    ledger = f"sqlite:///{tmp_path}/queue.db"
    with Tasks.open(ledger) as tasks:
        tasks.enqueue(agent="a", payload={"text": MARKER})
    store = open_store(f"amqp://127.0.0.1:1/?ledger={ledger}", key_file=keys)
    while not store.convert().is_done:
        pass
    assert store.count_keys().keys() == {Encryption(keys).current}
    assert store.keys_in_use() is not None
    with pytest.raises(KeyInUse, match="encrypts with this key"):
        store.retire_key(Encryption(keys).current)
    assert store.wipe()
    store.close()


def test_p0_that_only_the_broker_has_is_refused_with_encryption(tmp_path: Path, keys: Path) -> None:
    with pytest.raises(InvalidSetting, match="p0=broker-only keeps P0 in the broker"):
        open_store(f"amqp://127.0.0.1:1/?p0=broker-only&ledger=sqlite:///{tmp_path}/queue.db", key_file=keys)


def test_a_missing_or_wrong_key_is_refused_and_nothing_changes(place: tuple[str, Path], keys: Path) -> None:
    url, _ = place
    with Tasks.open(url, key_file=keys) as tasks:
        task_id = tasks.enqueue(agent="a", payload={"text": MARKER})
    other = keys.with_name("other.keys")
    add_key(other, "first")
    for wrong, said in (
        (None, "is encrypted: name its key file"),
        (
            other,
            r"needs the key 'first' \(fingerprint \w{16}\), and key file .*other.keys has the key 'first' \(",
        ),
        (keys.with_name("none.keys"), "none.keys cannot be read: No such file"),
    ):
        with pytest.raises(KeyMissing, match=said):
            open_store(url, key_file=wrong).load(task_id)
    keys.chmod(0o640)
    with pytest.raises(Exception, match="accessible to other users: run chmod 600"):
        open_store(url, key_file=keys)
    keys.chmod(0o600)
    with Tasks.open(url, key_file=keys) as tasks:
        assert tasks.get(task_id).payload == {"text": MARKER}


def test_a_process_without_the_key_stops_when_encryption_begins(place: tuple[str, Path], keys: Path) -> None:
    url, _ = place
    with Tasks.open(url) as plain, Tasks.open(url, key_file=keys) as keyed:
        old = plain.enqueue(agent="a", payload={"text": "old"})
        keyed.enqueue(agent="a", payload={"text": "new"})
        plain.store._look_at_keys = 0.0  # type: ignore[attr-defined]  # else within its pause
        with pytest.raises(KeyMissing, match="is encrypted"):
            plain.enqueue(agent="a", payload={"text": "lost"})
        plain.store._look_at_keys = 0.0  # type: ignore[attr-defined]
        with pytest.raises(KeyMissing, match="is encrypted"):
            plain.get(old)
        claimed = keyed.claim(agent="a", worker="w", limit=9)
        assert [one.payload for one in claimed] == [{"text": "old"}, {"text": "new"}]


def test_encryption_of_an_existing_store_leaves_no_plain_byte(tmp_path: Path, keys: Path) -> None:
    url = f"sqlite:///{tmp_path}/data/queue.db"
    with Tasks.open(url) as tasks:
        ids = [tasks.enqueue(agent="a", payload={"text": MARKER}, idempotency_key=f"k{n}") for n in range(50)]
        for one in tasks.claim(agent="a", worker="w", limit=20):
            tasks.fail(one.task_id, one.lease, MARKER)
        tasks.store.write(lambda t: t.records.forget(t.records.find(ByIds(tuple(ids[40:])))))
    assert holds(tmp_path / "data")
    store = open_store(url, key_file=keys)
    progress = converted(store)
    assert progress.was_plain == progress.converted > 60
    assert store.wipe()
    assert holds(tmp_path / "data") == []
    assert store.count_keys().keys() == {Encryption(keys).current}
    check_consistency(store)
    store.close()


# ---- changed bytes ---------------------------------------------------------------------------------


def test_swapped_ciphertexts_are_detected_and_quarantined(tmp_path: Path, keys: Path) -> None:
    path = tmp_path / "data" / "queue.db"
    with Tasks.open(f"sqlite:///{path}", key_file=keys) as tasks:
        first, other, last = (tasks.enqueue(agent="a", payload={"n": n}) for n in range(3))
    changed(path, "UPDATE records SET payload = (SELECT payload FROM records LIMIT 1) WHERE seq = 3")
    with SqliteSnapshot(path) as snapshot, pytest.MonkeyPatch.context() as patch:
        with pytest.raises(KeyMissing):
            snapshot.faults()
        patch.setenv(KEY_FILE_VARIABLE, str(keys))
        assert "the payload of record 3 in" in snapshot.faults()[0]
    with Tasks.open(f"sqlite:///{path}", key_file=keys) as tasks:
        with pytest.raises(UnreadableValue, match="were changed, or belong to another record"):
            tasks.get(other)
        shown = tasks.store.read(lambda t: t.records.payloads([first, other]))
        assert shown == {first: b'{"n":0}', other: b'"[cannot be decrypted]"'}
        claimed = tasks.claim(agent="a", worker="w", limit=1)
        claimed += tasks.claim(agent="a", worker="w", limit=9)
        assert [one.task_id for one in claimed] == [first, last]
        [record] = tasks.store.find(ByIds((other,)))
        assert record.state == "QUARANTINED"
        second(keys)
        with Tasks.open(f"sqlite:///{path}", key_file=keys) as later:
            assert converted(later.store).unreadable == 1  # it stays
        with pytest.raises(UnreadableValue):
            tasks.get(other)


@pytest.mark.parametrize(
    ("change", "look"),
    [
        ("UPDATE records SET result = payload WHERE seq = 1", lambda tasks, one: tasks.get(one)),
        ("UPDATE cells SET key = 'b' WHERE kind = 'note'", lambda tasks, _: tasks.store.read(note)),
        ("UPDATE records SET payload = substr(payload, 1, 20)", lambda tasks, one: tasks.get(one)),
    ],
)
def test_a_value_in_another_place_cannot_be_read(
    tmp_path: Path, keys: Path, change: str, look: Callable[[Tasks, str], object]
) -> None:
    path = tmp_path / "queue.db"
    with Tasks.open(f"sqlite:///{path}", key_file=keys) as tasks:
        task_id = tasks.enqueue(agent="a", payload={"n": 1})
        tasks.store.write(lambda t: t.cells.put("note", "a", b"text"))
        [one] = tasks.claim(agent="a", worker="w")
        tasks.complete(one.task_id, one.lease, {})
        look(tasks, task_id)
    changed(path, change)
    with Tasks.open(f"sqlite:///{path}", key_file=keys) as tasks, pytest.raises(UnreadableValue):
        look(tasks, task_id)


def test_events_in_another_place_are_replaced_by_alerts(tmp_path: Path, keys: Path) -> None:
    path = tmp_path / "queue.db"
    with Tasks.open(f"sqlite:///{path}", key_file=keys) as tasks:
        tasks.enqueue(agent="a", payload={"n": 1})
        tasks.claim(agent="a", worker="w")
        assert [event.kind for event in tasks.store.events()] == ["created", "enqueued", "dequeued"]
    changed(path, "UPDATE events SET seq = seq + 100")
    with Tasks.open(f"sqlite:///{path}", key_file=keys) as tasks:
        assert {event.error_type for event in tasks.store.events()} == {UNREADABLE}


def note(transaction: Any) -> object:
    return transaction.cells.page("note")


# ---- rotation --------------------------------------------------------------------------------------


def work_until_killed(url: str, keys: Path) -> None:
    """Enqueue, claim and complete tasks of agent b."""
    tasks = Tasks.open(url, key_file=keys)
    while True:
        tasks.enqueue(agent="b", payload={"text": MARKER})
        for one in tasks.claim(agent="b", limit=2):
            assert one.payload == {"text": MARKER}
            tasks.complete(one.task_id, one.lease, {"text": MARKER})


def rotate_slowly(url: str, keys: Path, steps: int) -> None:
    """Convert in small steps, and end by SIGKILL."""
    conversion.CONVERSION_ROWS_MAX = 3
    store = open_store(url, key_file=keys)
    for _ in range(steps):
        store.convert()
    os.kill(os.getpid(), signal.SIGKILL)


def done_by_b(tasks: Tasks) -> int:
    return tasks.store.count().get("b", {}).get("COMPLETED", 0)


@pytest.mark.statement("encryption-rest")
@pytest.mark.usefixtures("no_child_left")
def test_a_killed_rotation_continues_while_workers_go_on(place: tuple[str, Path], keys: Path) -> None:
    url, _ = place
    tasks = Tasks.open(url, key_file=keys)
    sent = [tasks.enqueue(agent="a", payload={"n": n, "text": MARKER}) for n in range(20)]
    worker = children.start(lambda: work_until_killed(url, keys))
    until(lambda: done_by_b(tasks) > 2)
    second(keys)
    for steps in (1, 3):
        pid = children.start(lambda s=steps: rotate_slowly(url, keys, s))  # type: ignore[misc]
        os.waitpid(pid, 0)
        children._running.discard(pid)
        sent.append(tasks.enqueue(agent="a", payload={"n": len(sent), "text": MARKER}))
        for one in tasks.claim(agent="a", worker="w", limit=3):
            tasks.complete(one.task_id, one.lease, {"text": MARKER})
    store = open_store(url, key_file=keys)
    assert store.convert().rows > 12  # continued: 4 steps of 3 rows were noted, and not started again
    converted(store)
    before = done_by_b(tasks)
    until(lambda: done_by_b(tasks) > before)  # by the new key
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    children._running.discard(worker)
    current = Encryption(keys).current
    assert store.count_keys().keys() == {current}
    old = next(key for key, name in Encryption(keys).names.items() if name == "first")
    store.retire_key(old)
    remove_key(keys, "first")
    assert sorted(tasks.get(one).payload["n"] for one in sent) == list(range(22))
    tasks.enqueue(agent="a", payload={})
    check_consistency(store)
    tasks.close()
    store.close()


def test_a_key_is_not_retired_while_a_value_needs_it(place: tuple[str, Path], keys: Path) -> None:
    url, _ = place
    store = open_store(url, key_file=keys)
    store.write(lambda t: t.insert([Envelope(queue="a", payload=b"{}")]))
    first = Encryption(keys).current
    with pytest.raises(KeyInUse, match="encrypts with this key: rotate"):
        store.retire_key(first)
    store.close()
    second(keys)
    store = open_store(url, key_file=keys)
    with pytest.raises(KeyInUse, match=r"\d values in .* are encrypted with this key"):
        store.retire_key(first)
    store.write(lambda t: t.insert([Envelope(queue="a", payload=b"{}")]))  # the refusal changed nothing
    converted(store)
    store.retire_key(first)
    assert store.keys_in_use() is not None
    store.close()


# ---- moves, Mail -----------------------------------------------------------------------------------


def test_a_moved_store_stays_encrypted(
    database: str, postgres: PostgresServer, tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(keys))
    text = "moved canary"
    with Tasks.open(f"sqlite:///{tmp_path}/queue.db") as tasks:
        ids = [tasks.enqueue(agent="a", payload={"text": text}, idempotency_key=f"k{n}") for n in range(5)]
        for one in tasks.claim(agent="a", worker="w", limit=2):
            tasks.fail(one.task_id, one.lease, text)
    move_store(f"sqlite:///{tmp_path}/queue.db", database)
    with Tasks.open(database) as tasks:
        assert [tasks.get(one).payload for one in ids] == [{"text": text}] * 5
        assert [event for event in tasks.store.events(0, 100) if event.error == text]
        assert tasks.store.count_keys().keys() == {Encryption(keys).current}
    assert holds(Path(postgres.folder), text) == []


@pytest.fixture
def services_closed() -> Iterator[None]:
    yield
    Harness.close_all()


@pytest.mark.usefixtures("services_closed")
def test_mail_is_encrypted_and_follows_a_rotation(tmp_path: Path, keys: Path) -> None:
    folder = tmp_path / "mail"
    plain = Harness(folder)
    link = FakeLink()
    old = plain.create(link, ttl=100_000)
    plain.send(link, old, MARKER.encode())
    plain.service.close()
    assert holds(folder)
    harness = Harness(folder, key_file=keys)
    link = FakeLink()
    new = harness.create(link, ttl=100_000, desc=MARKER)
    harness.send(link, new, MARKER.encode())
    for _ in range(2):  # compaction encrypts what was plain
        harness.tick(60.0)
    harness.tick(1.0)
    assert holds(folder) == []
    assert count_keys(folder).keys() == {Encryption(keys).current}
    second(keys)
    harness.service._mailboxes.journal.log._look_at_keys_s = 0.0  # type: ignore[union-attr]
    for _ in range(5):
        harness.tick(60.0)
    assert count_keys(folder).keys() == {Encryption(keys).current}
    harness.service.close()
    harness.options = MailOptions()
    with pytest.raises(KeyMissing, match="the mail log is encrypted"):
        harness.opened()
    again = Harness(folder, key_file=keys)
    for mail_id in (old, new):
        reader = FakeLink()
        again.subscribe(reader, f"{mail_id}.*")
        assert [MARKER.encode() in got for got in reader.payloads()] == [True]


@pytest.mark.usefixtures("services_closed")
def test_a_changed_record_of_mail_is_damage(tmp_path: Path, keys: Path) -> None:
    harness = Harness(tmp_path, key_file=keys)
    link = FakeLink()
    harness.send(link, harness.create(link), b"text")
    harness.service.close()
    encryption = Encryption(keys)
    assert list(damaged_stretches(tmp_path, encryption)) == []
    [path] = log_segments(tmp_path)
    secret = bytes.fromhex(path.name.split("-")[1])
    frame = Framing(secret, encryption).frame(Started(9))
    body = frame[12:-1] + bytes([frame[-1] ^ 1])  # behind mark, length and checksum
    head = struct.pack("<4sII", secret[:4], len(body), zlib.crc32(body, int.from_bytes(secret[4:], "little")))
    path.write_bytes(head + body + path.read_bytes())
    [(_, damage)] = damaged_stretches(tmp_path, encryption)
    assert damage.reason == "a record that cannot be decrypted: it was changed"
