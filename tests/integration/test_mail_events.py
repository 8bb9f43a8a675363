"""The events of a mail server: each once, without private ids, and complete after a full disk."""

import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from postroom import Mail, MailRefused
from postroom.contracts.audit import Audit
from postroom.contracts.feeds import FileFeeds
from postroom.contracts.mail.options import MailOptions
from postroom.core.formats.events import OPERATIONS, AuditEvent
from postroom.core.mail.mailbox import RANKS, Letter, Priority
from postroom.server.nats.mail_server import EventFileLimits, EventLog
from tests.integration.commandline import isolate, postroom
from tests.integration.mailservers import MailServer, serving
from tests.mailservice import FakeLink, Harness
from tests.waiting import HANG_GUARD_S, until

BODY = "what nobody else may read"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


def everything(server: MailServer) -> str:
    """One of each event that a healthy server emits. Returns the private id."""
    with Mail(server.url) as mail:
        box = mail.create(ttl_s=60)
        mail.create("all.see", ttl_s=0.3, public=True)
        mail.create("all.see", ttl_s=60, public=True)
        number = mail.send(box, BODY, priority="critical")
        with mail.subscribe(box, group="g") as member:
            assert member.next(HANG_GUARD_S) is not None
            mail.delete(box, number)
        mail.send(box, BODY, priority="critical")
        mail.messages(box)
        with pytest.raises(MailRefused):
            mail.send(box + "-not", "x")
        with pytest.raises(MailRefused):
            mail.subscribe(box[:-1])
        with mail.subscribe(box, group="g") as member:  # ends without a delete: a failed delivery
            assert member.next(HANG_GUARD_S) is not None
        until(lambda: mail.list(f"{box}.dead"))  # listed when it is stored
    until(lambda: "expired" in {event["kind"] for event in server.events()})
    return box


def shipped() -> int:
    done = postroom("audit", "ship", "--mail", "data", "--to", "audit", "--once")
    assert (done.code, done.errors) == (0, "")
    return int(done.line["shipped"])


def test_refused_calls_in_a_loop_are_counted_in_the_stream(tmp_path: Path) -> None:
    calls = 500
    with serving(tmp_path / "data") as server, Mail(server.url, name="n" * 1_000) as mail:
        for _ in range(calls):
            with pytest.raises(MailRefused):
                mail.send("nobody", "x")
        server.end()
    emitted = len(server.events())
    assert shipped() == emitted
    events = [event for event in Audit(tmp_path / "audit").query(contract="mail") if event.kind == "rejected"]
    assert sum(int(event.detail.get("refused", 1)) for event in events) == calls


def test_every_event_goes_to_the_stream_once_and_no_private_id_with_it(tmp_path: Path) -> None:
    with serving(tmp_path / "data", "--receipts", "--dead-letter-after", "1") as server:
        assert shipped() == 0  # no event was emitted yet
        box = everything(server)
        emitted = len(server.events())
        assert shipped() == emitted
        assert shipped() == 0
        server.end(signal.SIGKILL)
        assert shipped() == 0
        server.start()
        with Mail(server.url) as mail:
            mail.create(ttl_s=60)
        until(lambda: len(server.events()) == emitted + 1)
        assert shipped() == 1
        events = list(Audit(tmp_path / "audit").query(contract="mail"))
        code, errors = server.end()
    assert (code, errors) == (0, "")
    assert [event.seq for event in events] == list(range(1, emitted + 2))
    assert len({event.event_id for event in events}) == emitted + 1
    assert {event.kind for event in events} == {
        kind
        for operation, kinds in OPERATIONS["mail"].items()
        if not operation.startswith(("damage", "a log"))
        for kind in kinds
    }
    assert nowhere(box, tmp_path, errors)
    assert nowhere(BODY, tmp_path, errors)
    [found] = Audit(tmp_path / "audit").query(kind="rejected", type="send")
    assert (found.error_type, found.error) == ("404", "the mailbox does not exist")


def nowhere(text: str, folder: Path, errors: str) -> bool:
    """Whether the id is in no file except the mail log."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("mail-")]
    assert any(path.name == "events.jsonl" for path in files)
    assert any("audit" in path.parts for path in files)
    return text not in errors and not any(text.encode() in path.read_bytes() for path in files)


def test_an_event_line_matches_the_event_of_the_stream(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log("created", queue="all.see", message_id="all.see/7", priority=0, sender="ada", body_bytes=3)
    log("expired", queue="all.see", type="mailbox")
    log.close()
    first, second = read(tmp_path)
    assert (first.seq, first.kind, first.contract, first.queue) == (1, "created", "mail", "all.see")
    assert (first.message_id, first.priority, first.sender, first.agent_id) == ("all.see/7", 0, "ada", "ada")
    assert (second.seq, second.kind, second.type, second.source) == (2, "expired", "mailbox", first.source)
    assert first.ts_us <= second.ts_us


@pytest.mark.parametrize("sender", ["", 'ada "the first"'])
def test_events_of_stored_messages_have_the_common_form(tmp_path: Path, sender: str) -> None:
    label = 'a"b\\c.ä'
    sent: list[tuple[Priority, int]] = [("urgent", 1), ("urgent", 1), ("urgent", 20), ("low", 20)]
    letters = [
        Letter(number, word, RANKS[word], size, b"x" * size, b"", 10 + number // 3, durable=True)
        for number, (word, size) in enumerate(sent)
    ]
    log = opened(tmp_path)
    log.stored(label, letters, sender)
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert lines == [
        {
            "kind": "created",
            "ts_us": letter.created_us,
            "queue": label,
            "message_id": f"{label}/{letter.number}",
            "priority": letter.rank,
            "body_bytes": len(letter.payload),
            **({"sender": sender} if sender else {}),
        }
        for letter in letters
    ]


def test_all_events_of_a_turn_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soon: list[Callable[[], None]] = []
    log = EventLog(tmp_path / "events.jsonl", soon.append)
    log.open()
    writes = counted(monkeypatch)
    for _ in range(100):
        log("created")
    assert len(soon) == 1
    soon[0]()
    assert len(writes) == 1
    log("created")
    assert len(soon) == 2
    log.close()
    assert len(read(tmp_path)) == 101


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    writes: list[int] = []
    write = os.write

    def counting(fd: int, data: bytes) -> int:
        writes.append(len(data))
        return write(fd, data)

    monkeypatch.setattr(os, "write", counting)
    return writes


def test_a_torn_line_becomes_an_alert_and_the_next_line_is_whole(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes(b'{"kind":"created","ts_us":1}\n{"kind":"crea')
    log = opened(tmp_path)
    log("deleted")
    log.close()
    found = read(tmp_path)
    assert [event.kind for event in found] == ["created", "alert", "deleted"]
    assert (found[1].contract, found[1].error_type) == ("mail", "UnreadableLine")


def test_events_wait_for_space_and_lost_ones_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = opened(tmp_path)
    log.limits = EventFileLimits(waiting_bytes_max=2_000)
    log("created", queue="before")
    log.write()
    size = (tmp_path / "events.jsonl").stat().st_size
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 30, before[1]))
    try:
        for number in range(100):
            log("created", queue=f"full.{number}")
            log.write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log("created", queue="after")
    log.write()
    log.close()
    assert len(caplog.records) == 1
    found = read(tmp_path)
    assert found[0].queue == "before"
    waited = [event.queue for event in found if event.queue.startswith("full.")]
    assert waited == [f"full.{number}" for number in range(len(waited))]
    assert found[-1].kind == "alert"
    assert found[-1].error.startswith(f"{100 - len(waited)} events are missing")
    assert found[-2].queue == "after"


def opened(folder: Path) -> EventLog:
    log = EventLog(folder / "events.jsonl", lambda _: None)
    log.open()
    return log


def read(folder: Path) -> list[AuditEvent]:
    feeds = FileFeeds(mail_folders=[folder])
    try:
        [feed] = feeds()
        return feed.read(0, 1_000)
    finally:
        feeds.close()


def test_damage_of_the_log_is_an_event_of_the_stream(tmp_path: Path) -> None:
    """Damage and alerts, which a healthy server does not emit."""
    harness = Harness(tmp_path / "data", receipts=True)
    link = FakeLink()
    box = harness.create(link, ttl=60)
    harness.send(link, box, b"x", "critical")
    harness.service.close()
    [segment] = (tmp_path / "data").glob("mail-*.log")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 0xFF
    segment.write_bytes(data)
    log = EventLog(tmp_path / "data" / "events.jsonl", lambda _: None)
    harness.options = MailOptions()
    harness.events.clear()
    harness.service = harness.opened()
    log.open()
    for kind, fields in harness.events:
        log(kind, **fields)
    log.close()
    Harness.close_all()
    assert [event.kind for event in read(tmp_path / "data")] == ["quarantined"]


def test_events_are_json_lines_that_a_person_can_read(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as server, Mail(server.url) as mail:
        mail.create("all.see", public=True, ttl_s=60)
        until(server.events)
        facts: dict[str, Any] = json.loads((tmp_path / "data" / "events.jsonl").read_text())
    assert (facts["kind"], facts["queue"], facts["detail"]) == ("created", "all.see", {"ttl_s": 60.0})
