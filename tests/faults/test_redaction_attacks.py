"""Texts that make a pattern slow which is not linear: it would run into the timeout of the tests."""

import json

import pytest

from postroom.core.redaction import Redactor

HOSTILE_CHARS = 100_000
MEGABYTE = 1_000_000
medium = Redactor("medium")
full = Redactor("full")


@pytest.mark.parametrize(
    "piece",
    [
        "a", "1", "a@", "a.", "@a.", "%40", "-", "1-", "1.", ":", "a:", "1:", "::", "+1", "+1 ", "( ",
        "://a:", "://", "eyJ", "eyJ_", "eyJa.", "sk-", "-sk-", "ghp_", "A", "AA00 ", "DE89 ", "4111 ",
        "4111-", "password", "password=", "password:", "password>", 'password="', 'password=\\"',
        "password: \\", "token ", "token is ", "Bearer ", "Basic A", "?sig=", "&key=", "authorization:",
        "cookie", "-----BEGIN PRIVATE KEY-----", "-----BEGIN ", '"', "'", "'a", " 'a'a", "`", "“", "\\",
        "\\u0040", "<email>", "<", "[", '{"a":', "phone ", "phone 1", "é", "\ud800", "xoxb-", "api_",
        "api_key", "=", "=a", "0x", "\\n", "%20", "%4", "\\u000a", "\\'", " b'", "password=[",
        'password=["', "password={1",
        "password=a&", "password=a<", "password: |\n ", "password:\n", "\u00a0", "4111  ", "4111\u00a0", "&",
        "password=(1", "%25", "a%20 ", "%2525", "QUJDREVGR0hJSktMTU5P", "QUJDREVGR0hJSktMTU5P ",
        "curl -u ", '="a', '["password","', "a:5432:", "de89", "de89 ", "4 ", "41 ", "AUTH ",
        "ya29.", "redis-cli -a ",
        "mysql -",
        'authorization: Digest a="b", ', 'name: "password", a: b, ', "docker login ",
    ],
)  # fmt: skip
def test_no_input_is_slow(piece: str) -> None:
    text = piece * (HOSTILE_CHARS // len(piece))
    full.text(text)  # has the rules of the defaults, and its own
    medium.payload(json.dumps({"a": text}))


@pytest.mark.parametrize("piece", ["%25", "%2525", "a%3Db ", "QUJDREVGR0hJSktMTU5P", "ghp_", "curl -u a:"])
def test_a_megabyte_of_hostile_text_is_redacted(piece: str) -> None:
    text = piece * (MEGABYTE // len(piece))
    assert medium.text(text)
    assert full.text(text)
