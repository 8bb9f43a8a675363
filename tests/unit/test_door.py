"""Every text that leaves through a log is redacted: lines, facts, exceptions and their causes."""

import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import postroom
from postroom.core.door import leaving, leaving_facts, leaving_value
from postroom.core.nats import natswire
from postroom.core.redaction import Redactor
from postroom.server.telemetry.server_log import ServerLog, ServerLogHandler
from postroom.system.log import library_log
from tests import redactioncarriers
from tests.redactioncorpus import survives
from tests.redactionsecrets import SECRETS

KEY = "ghp_" + "aB7" * 12
PASSWORD = "Pq7rT-wX2v"  # noqa: S105 - nobody's
CARRIED = [
    one for one in redactioncarriers.SECRETS if not survives(one.value, Redactor("medium").text(one.text))
]
FOUND = [one for one in SECRETS if not survives(one.value, Redactor("medium").text(one.text))]


class Keeping(logging.Handler):
    """Keeps the records themselves, as a handler that reports to a service reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What a handler of the application writes."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    log = library_log("postroom.store")
    log.addHandler(handler)
    yield stream
    log.removeHandler(handler)


def test_ids_numbers_and_ip_addresses_leave_as_they_are() -> None:
    for text in (
        "7d793037-a076-44f0-b0d1-2c1f6b1d6a52",
        "message 7d793037-a076-44f0-b0d1-2c1f6b1d6a52 of agent worker-1 failed in attempt 2",
        "listening on 10.0.0.7:8800 and [::1]:8800",
        "12:30:45.123",
    ):
        assert leaving(text) == text
    assert leaving_value((1, 2.5, True, None, [KEY])) == (1, 2.5, True, None, ["<key>"])


def test_facts_with_telling_names_leave_masked() -> None:
    facts = {"api_key": "tulip", "tokens": "12", "password": "", "n": 7, "list": [{"secret": "tulip"}]}
    assert leaving_facts(facts) == {
        "api_key": "<redacted>", "tokens": "12", "password": "", "n": 7, "list": [{"secret": "<redacted>"}],
    }  # fmt: skip


@pytest.mark.parametrize("secret", FOUND, ids=lambda one: one.text[:40])
def test_line_of_the_library_holds_no_secret(secret: object, lines: io.StringIO) -> None:
    assert isinstance(secret, tuple)
    _, value, text = secret
    library_log("postroom.store").warning("message %s failed: %s", "m-1", text)
    assert not survives(value, lines.getvalue())
    assert lines.getvalue().startswith("message m-1 failed: ")


def test_traceback_holds_no_secret_of_any_cause(lines: io.StringIO) -> None:
    keeping = Keeping()
    log = library_log("postroom.store")
    log.addHandler(keeping)
    error = ValueError(f"postgres://u:{PASSWORD}@h/d")
    error.add_note(f"Bearer {KEY}")
    error.__cause__ = KeyError(f"token {KEY}")
    log.error("it failed for %s", KEY, exc_info=error)
    log.removeHandler(keeping)
    text = lines.getvalue()
    assert "the direct cause of the following exception" in text
    assert "ValueError: postgres://u:<redacted>@h/d" in text
    assert "KeyError" in text
    [record] = keeping.records
    assert record.exc_info is not None
    assert record.exc_info[1] is not None
    seen = f"{text}{record.exc_info[1]!r}{record.exc_info[1].__cause__!r}{record.exc_info[1].__notes__}"
    assert KEY not in seen
    assert PASSWORD not in seen


def test_error_whose_text_fails_and_a_wrong_line_are_logged(lines: io.StringIO) -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    library_log("postroom.store").warning("it failed", exc_info=Broken())
    library_log("postroom.store").warning("%d", "no number")
    assert "Broken" in lines.getvalue()
    assert lines.getvalue().endswith("%d\n")


def test_every_logger_of_the_library_redacts() -> None:
    allowed = {
        "client",
        "testing",
    }  # the client logs its own sentences, and those of a server, which are redacted
    source = Path(postroom.__file__).parent
    plain = [
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if re.search(r"= logging\.getLogger\((\"postroom\.|__name__)", path.read_text("utf-8"))
    ]
    assert {name.partition("/")[0] for name in plain} == allowed, plain


def test_server_log_is_redacted_before_it_is_cut() -> None:
    stream = io.StringIO()
    server_log = ServerLog(stream)
    reason = f"{'x ' * 490}{KEY} tail"
    server_log.write("refused", agent=KEY, reason=reason, more={"token": "tulip"}, odd=[KEY])
    ServerLogHandler(server_log).handle(
        logging.LogRecord("uvicorn.error", logging.ERROR, "f", 1, "bad %s", (KEY,), None)
    )
    server_log.close()
    text = stream.getvalue()
    assert KEY[:12] not in text
    first, second = map(json.loads, text.splitlines())
    assert (first["agent"], first["more"], first["odd"]) == ("<key>", {"token": "<redacted>"}, ["<key>"])
    assert second["message"] == "bad <key>"


@pytest.mark.parametrize("secret", CARRIED, ids=lambda one: one.text[:40])
def test_no_exit_lets_a_secret_out_that_the_rules_find(secret: redactioncarriers.Secret) -> None:
    stream = io.StringIO()
    server_log = ServerLog(stream)
    server_log.write("refused", reason=secret.text, more={"said": [secret.text]})
    server_log.close()
    left = (
        stream.getvalue(),
        natswire.error(secret.text).decode(),
        str(leaving_facts({"said": secret.text, "path": (secret.text,)})),
    )
    assert not any(survives(secret.value, text) for text in left)


def test_error_of_the_nats_protocol_is_redacted() -> None:
    assert natswire.error(f"no such subject {KEY}") == b"-ERR 'no such subject <key>'\r\n"
