"""Results of completed messages in the audit stream: off, as a digest, or whole and redacted."""

import hashlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from postroom import Audit
from postroom.audit.cipher import Cipher
from postroom.audit.reader import Segments
from postroom.audit.segment_writer import SegmentSink
from postroom.core.formats.events import AuditEvent
from postroom.engine.agents import shown_results
from postroom.engine.agents.shown_results import RESULT_SHIPPED_BYTES_MAX
from postroom.errors import WriteFailed
from postroom.server.folder.shipping import Sources, opened
from postroom.settings import AuditSettings
from postroom.system.crypto.key_file import add_key
from tests.engines import EngineUnderTest

RESULT = {"b": [1, "two"], "a": "done"}
CANONICAL = '{"a":"done","b":[1,"two"]}'


@pytest.fixture
def world(tmp_path: Path) -> Iterator[EngineUnderTest]:
    made = EngineUnderTest(f"sqlite:///{tmp_path}/queue.db")

    @made.engine.handler("tool_call")
    async def answer(message: Any, ctx: Any) -> Any:
        for chunk in message.payload.get("chunks", []):
            await ctx.stream(chunk)
        return message.payload.get("result")

    yield made
    made.close()


def run(world: EngineUnderTest, *payloads: dict[str, Any]) -> list[str]:
    """Messages with these payloads, which are completed."""
    handles = [world.submit(payload=payload) for payload in payloads]
    world.run_all()
    return [handle.message_id for handle in handles]


def ship(
    folder: Path,
    mode: Literal["full", "digest", "off"] | None = None,
    redaction: Literal["none", "full"] = "none",
    key_file: Path | None = None,
) -> dict[str, AuditEvent]:
    """Ship the store with these settings; the completed events of the stream by message."""
    more: Any = {} if mode is None else {"results": mode}
    settings = AuditSettings(redaction=redaction, key_file=key_file, **more)
    with opened(folder / "audit", Sources(stores=(f"sqlite:///{folder}/queue.db",)), settings) as shipping:
        shipping.once()
    return completed(folder)


def completed(folder: Path) -> dict[str, AuditEvent]:
    found = [event for event in Segments(folder / "audit").events() if event.kind == "execution_completed"]
    assert len({event.message_id for event in found}) == len(found)
    return {event.message_id: event for event in found}


def digest_of(text: str) -> dict[str, Any]:
    return {"result_bytes": len(text.encode()), "result_sha256": hashlib.sha256(text.encode()).hexdigest()}


def test_stream_has_size_and_digest_of_a_result_by_default(world: EngineUnderTest, tmp_path: Path) -> None:
    [message_id] = run(world, {"result": RESULT})
    event = ship(tmp_path, redaction="full")[message_id]
    assert event.detail == digest_of(CANONICAL)  # no redaction of numbers changes it
    assert event.payload == ""


def test_stream_has_the_whole_result_when_the_settings_say_so(world: EngineUnderTest, tmp_path: Path) -> None:
    large = "x" * RESULT_SHIPPED_BYTES_MAX
    short, long = run(world, {"result": RESULT}, {"result": large})
    events = ship(tmp_path, "full")
    assert (events[short].payload, events[short].detail) == (CANONICAL, digest_of(CANONICAL))
    assert (events[long].payload, events[long].detail) == ("", digest_of(f'"{large}"'))


def test_stream_has_nothing_of_a_result_when_that_is_off(world: EngineUnderTest, tmp_path: Path) -> None:
    [message_id] = run(world, {"result": RESULT})
    event = ship(tmp_path, "off")[message_id]
    assert (event.payload, event.detail) == ("", {})


def test_chunks_of_a_streamed_answer_are_shown_as_one_result(world: EngineUnderTest, tmp_path: Path) -> None:
    streamed, plain = run(world, {"chunks": ["He", "llo"], "result": 1}, {"result": 2})
    events = ship(tmp_path, "full")
    assert (events[streamed].payload, events[streamed].detail) == ('"Hello"', digest_of('"Hello"'))
    assert events[plain].payload == "2"


def test_secret_in_a_result_is_redacted(world: EngineUnderTest, tmp_path: Path) -> None:
    [message_id] = run(world, {"result": {"password": "hunter2", "to": "bob@example.com"}})
    event = ship(tmp_path, "full", redaction="full")[message_id]
    assert event.payload.startswith('{"password":"<redacted>"')
    assert all(
        "hunter2" not in str(one) and "bob@" not in str(one) for one in Segments(tmp_path / "audit").events()
    )


def test_whole_result_is_encrypted_as_payloads_are(world: EngineUnderTest, tmp_path: Path) -> None:
    [message_id] = run(world, {"result": {"password": "hunter2"}})
    key_file = tmp_path / "keys"
    add_key(key_file, "k1")
    event = ship(tmp_path, "full", redaction="full", key_file=key_file)[message_id]
    assert event.payload.startswith("enc:1:k1:")
    [clear] = Audit(tmp_path / "audit", cipher=Cipher.from_file(key_file)).query(
        message_id=message_id, kind="execution_completed"
    )
    assert clear.payload == '{"password":"hunter2"}'


def test_shipper_that_fails_between_results_shows_each_once(
    world: EngineUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.audit.shipper.BATCH_MAX", 4)
    monkeypatch.setattr(shown_results, "RESULTS_A_READ_MAX", 2)
    first = run(world, *({"result": number} for number in range(5)))
    store, written = SegmentSink.write, 0

    def write(sink: SegmentSink, events: Any) -> None:
        nonlocal written
        written += 1
        if written == 7:
            raise WriteFailed(tmp_path, OSError("the disk went away"))
        store(sink, events)

    monkeypatch.setattr(SegmentSink, "write", write)
    with pytest.raises(WriteFailed):
        ship(tmp_path, "full")
    assert 0 < len(completed(tmp_path)) < 5
    second = run(world, {"result": 5})
    events = ship(tmp_path, "full")
    assert [events[message_id].payload for message_id in first + second] == ["0", "1", "2", "3", "4", "5"]
    seqs = [event.seq for event in Segments(tmp_path / "audit").events()]
    assert seqs == list(range(1, len(seqs) + 1))


def test_damaged_or_purged_result_does_not_hold_up_its_event(world: EngineUnderTest, tmp_path: Path) -> None:
    damaged, purged, whole = run(world, {"result": 1}, {"result": 2}, {"result": 3})
    store = world.engine.store
    with sqlite3.connect(tmp_path / "queue.db") as database:
        number = store.read(lambda transaction: transaction.records.get(damaged)).seq  # type: ignore[union-attr]
        database.execute("UPDATE records SET result = ? WHERE seq = ?", (b"{not json", number))
    store.write(
        lambda t: t.records.forget([record for record in [t.records.get(purged)] if record is not None])
    )
    events = ship(tmp_path, "full")
    assert [(events[each].payload, bool(events[each].detail)) for each in (damaged, purged, whole)] == [
        ("", False),
        ("", False),
        ("3", True),
    ]
