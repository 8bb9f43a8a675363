"""Parsing of the calls of mq9 clients, as pure functions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.core.mail import mq9
from postroom.core.mail.mailbox import RANKS
from postroom.core.mail.mq9 import MailCall, Mq9Error


@pytest.mark.parametrize(
    ("subject", "call"),
    [
        ("$mq9.AI.MAILBOX.CREATE", MailCall("create")),
        ("$mq9.AI.MAILBOX.MSG.task.queue", MailCall("send", "task.queue", "normal")),
        ("$mq9.AI.MAILBOX.MSG.task.queue.normal", MailCall("send", "task.queue", "normal")),
        ("$mq9.AI.MAILBOX.MSG.m-1.critical", MailCall("send", "m-1", "critical")),
        ("$mq9.AI.MAILBOX.MSG.m-1.urgent", MailCall("send", "m-1", "urgent")),
        ("$mq9.AI.MAILBOX.MSG.m-1.high", MailCall("send", "m-1", "high")),
        ("$mq9.AI.MAILBOX.MSG.m-1.low", MailCall("send", "m-1", "low")),
        ("$mq9.AI.MAILBOX.MSG.m-1.lower", MailCall("send", "m-1.lower", "normal")),
        ("$mq9.AI.MAILBOX.MSG.critical", MailCall("send", "critical", "normal")),
        ("$mq9.AI.MAILBOX.LIST.a.b", MailCall("list", "a.b")),
        ("$mq9.AI.MAILBOX.DELETE.a.b.17", MailCall("delete", "a.b", "17")),
        ("$mq9.AI.MAILBOX.DELETE.a.b.", MailCall("delete", "a.b", "")),
        ("$mq9.AI.MAILBOX.EXTEND.a", MailCall("extend", "a")),
        ("$mq9.AI.MSG.SEND.a.b", MailCall("send3", "a.b")),
        ("$mq9.AI.MSG.FETCH.a", MailCall("fetch", "a")),
        ("$mq9.AI.MSG.ACK.a", MailCall("ack", "a")),
        ("$mq9.AI.MSG.QUERY.a", MailCall("query", "a")),
        ("$mq9.AI.MSG.DELETE.a.b.17", MailCall("delete3", "a.b", "17")),
        ("$mq9.AI.AGENT.REGISTER", MailCall("register")),
        ("$mq9.AI.AGENT.DISCOVER", MailCall("discover")),
    ],
)
def test_subjects_of_every_dialect(subject: str, call: MailCall) -> None:
    assert mq9.parse(subject) == call


@pytest.mark.parametrize(
    ("subject", "code"),
    [
        ("$mq9.AI.PUBLIC.LIST", 403),
        ("$mq9.AI.MAILBOX.CREATE.x", 400),
        ("$mq9.AI.MAILBOX.LIST", 400),
        ("$mq9.AI.INBOX.x.urgent", 400),
        ("$mq9.AI", 400),
        ("$mq9.", 400),
        ("$mq9.AI.AGENT.REGISTER.x", 400),
    ],
)
def test_other_subjects_are_refused_with_a_code(subject: str, code: int) -> None:
    with pytest.raises(Mq9Error) as refused:
        mq9.parse(subject)
    assert refused.value.code == code


@given(st.text())
def test_every_subject_is_parsed_or_refused(text: str) -> None:
    for subject in (text, mq9.PREFIX + text, mq9.ROOT + text, mq9.SEND + text):
        for function in (mq9.parse, mq9.subscription):
            try:
                function(subject)
            except Mq9Error as error:
                assert str(error)  # noqa: PT017 - it may also pass


@pytest.mark.parametrize(
    ("rest", "mail_id", "ranks"),
    [
        ("a.*", "a", 0b1111),
        ("a", "a", 0b0100),
        ("a.normal", "a", 0b0100),
        ("a.critical", "a", 0b0001),
        ("a.urgent", "a", 0b0010),
        ("a.high", "a", 0b0010),
        ("a.low", "a", 0b1000),
        ("task.queue.*", "task.queue", 0b1111),
    ],
)
def test_subscription_subjects_are_parsed(rest: str, mail_id: str, ranks: int) -> None:
    assert mq9.subscription(mq9.SEND + rest) == (mail_id, ranks)


@pytest.mark.parametrize("rest", ["*", ">", "*.*", "a.>", "*.a.*", "a.*.*", "", ".", "a..*", "a b.*"])
def test_a_wildcard_in_the_id_is_refused(rest: str) -> None:
    with pytest.raises(Mq9Error) as refused:
        mq9.subscription(mq9.SEND + rest)
    assert refused.value.code == 403


@given(st.text(max_size=140))
def test_an_accepted_name_is_valid_in_send_and_subscribe(name: str) -> None:
    try:
        mq9.checked_name(name)
    except Mq9Error:
        return
    assert mq9.parse(mq9.SEND + name) == MailCall("send", name, "normal")
    for word in RANKS:
        assert mq9.parse(f"{mq9.SEND}{name}.{word}") == MailCall("send", name, word)
    assert mq9.subscription(f"{mq9.SEND}{name}.*")[0] == name


@pytest.mark.parametrize("payload", [b"", b"  ", b"{}", b'""', b"null"])
def test_nothing_is_an_empty_body(payload: bytes) -> None:
    assert mq9.body(payload, mq9.Creation) == mq9.Creation()


def test_unknown_keys_and_nulls_are_ignored() -> None:
    body = mq9.body(b'{"ttl":60,"token":"t","name":null}', mq9.Creation)
    assert body == mq9.Creation(ttl=60)


def test_a_fetch_has_the_defaults_of_its_dialect_and_bounds() -> None:
    plain = mq9.body(b"", mq9.Fetch)
    assert (plain.deliver, plain.limit, plain.wait_ms) == ("latest", 100, 500)
    greedy = mq9.body(b'{"config":{"num_msgs":99999,"max_wait_ms":-1}}', mq9.Fetch)
    assert (greedy.limit, greedy.wait_ms) == (mq9.FETCH_MAX, 0)
    assert mq9.body(b'{"deliver":"from_time","from_time":1.5}', mq9.Fetch).bound == 1_500_000


def test_headers_become_options_in_any_case() -> None:
    headers = (
        b"NATS/1.0\r\nMQ9-Priority: Critical\r\nmq9-key:k\r\nmq9-delay: 2\r\nX: y\r\nMq9-Tags: a, b,\r\n\r\n"
    )
    assert mq9.send_options(headers) == ("critical", "k", 2.0, 0.0, ("a", "b"))
    assert mq9.send_options(b"NATS/1.0\r\nX: y\r\n\r\n") is mq9.PLAIN


@given(st.binary(max_size=200))
def test_all_headers_are_parsed_or_refused(headers: bytes) -> None:
    for block in (headers, b"NATS/1.0\r\nmq9-ttl: " + headers, b"NATS/1.0\r\nmq9-tags:" + headers):
        try:
            mq9.send_options(block)
        except Mq9Error as error:
            assert error.code == 400  # noqa: PT017 - it may also pass
