"""Replies and deliveries to mq9 clients, as pure functions."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.core.mail import mq9
from postroom.core.mail import mq9replies as replies
from postroom.core.mail.mailbox import RANKS, Letter, Priority
from postroom.core.mail.mq9 import Mq9Error


def letter(payload: bytes = b"x", headers: bytes = b"", word: Priority = "normal", number: int = 7) -> Letter:
    size = len(payload) + len(headers)
    return Letter(number, word, RANKS[word], size, payload, headers, 1_794_702_425_000_000)


@given(st.binary(max_size=100), st.sampled_from(sorted(RANKS)))
def test_an_envelope_decodes_to_the_payload(payload: bytes, word: Priority) -> None:
    subject, [(_, found)] = replies.enveloped("m", [letter(payload, word=word)])
    envelope = json.loads(found)
    assert envelope["payload"]
    assert base64.b64decode(envelope["payload"]) == payload
    assert subject.rpartition(".")[2] == envelope["priority"]
    assert envelope["priority"] in {"high", "normal", "low"}
    assert envelope["msg_id"] == "7"


@pytest.mark.parametrize(
    ("word", "subject"), [("normal", "m"), ("critical", "m.critical"), ("low", "m.low"), ("high", "m.high")]
)
def test_a_raw_delivery_has_the_priority_of_the_sender(word: Priority, subject: str) -> None:
    batch = replies.raw("m", [letter(word=word), letter(b"y", word=word, number=8)])
    assert batch.subject == mq9.SEND + subject
    assert batch.messages == [
        (b"NATS/1.0\r\nMq9-Msg-Id: 7\r\n\r\n", b"x"),
        (b"NATS/1.0\r\nMq9-Msg-Id: 8\r\n\r\n", b"y"),
    ]


def test_a_sender_cannot_forge_a_message_id() -> None:
    headers = b"NATS/1.0\r\nMQ9-MSG-ID: 1\r\nA: b\r\nmq9-msg-id: 2\r\n\r\n"
    [(sent, _)] = replies.raw("m", [letter(headers=headers)]).messages
    assert sent == b"NATS/1.0\r\nMq9-Msg-Id: 7\r\nA: b\r\n\r\n"


@pytest.mark.parametrize(
    ("mode", "name", "expected"),
    [
        ("auto", "robustmq-mq9-python", True),
        ("auto", "robustmq", True),
        ("auto", "", False),
        ("auto", "my robustmq", False),
        ("always", "", True),
        ("never", "robustmq-mq9-python", False),
    ],
)
def test_envelopes_are_for_clients_of_the_sdk(mode: replies.Envelope, name: str, expected: bool) -> None:
    assert replies.is_enveloped(mode, name) is expected


def test_replies_have_the_error_key_only_in_the_newest_dialect() -> None:
    assert json.loads(replies.created("m", is_new=True)) == {
        "mail_id": "m",
        "mail_address": "m",
        "is_new": True,
    }
    assert json.loads(replies.stored("send", 8)) == {"msg_id": 8}
    assert json.loads(replies.stored("send3", -1)) == {"error": "", "msg_id": -1}
    assert json.loads(replies.deleted("delete", found=False)) == {"deleted": False}
    assert json.loads(replies.deleted("delete3", found=True)) == {"error": "", "deleted": True}
    assert json.loads(replies.refused(Mq9Error(404, "gone"))) == {"error": "gone", "code": 404}


@pytest.mark.parametrize(("word", "seen"), [("high", "urgent"), ("low", "normal"), ("critical", "critical")])
def test_a_fetch_uses_the_priorities_of_its_dialect(word: Priority, seen: str) -> None:
    message = json.loads(replies.fetched([letter(b"\xff", b"NATS/1.0\r\n\r\n", word)]))["messages"][0]
    assert message["priority"] == seen
    assert base64.b64decode(message["payload"]) == b"\xff"
    assert bytes(message["header"]) == b"NATS/1.0\r\n\r\n"
    assert (message["msg_id"], message["create_time"]) == (7, 1_794_702_425)


def test_a_reply_is_bounded_and_holds_at_least_one() -> None:
    big = letter(b"x" * (replies.REPLY_BYTES_MAX // 2 + 1))
    assert len(replies.fitting([big, big, big], 10)) == 1
    assert len(replies.fitting([letter()] * 10, 3)) == 3
    huge = letter(b"x" * (replies.REPLY_BYTES_MAX + 1))
    assert len(replies.fitting([huge, huge], 10)) == 1


def test_announcements_of_the_public_list() -> None:
    assert json.loads(replies.announcement("created", "q", "d", 60.0)) == {
        "event": "created",
        "mail_id": "q",
        "desc": "d",
        "ttl": 60,
    }
    assert json.loads(replies.announcement("expired", "q", "d", 60.0)) == {"event": "expired", "mail_id": "q"}
