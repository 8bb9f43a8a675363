"""The fast path of redaction gives exactly the result of the slow path, which is the definition."""

import json
import random
from typing import Any

import pytest

from postroom.core.redaction import EVERYTHING, Level, Redactor
from postroom.core.redaction.triggers import TriggerHits
from tests import redactioncarriers
from tests.redactioncorpus import ASSIGNMENTS, FRAMES, NEAR_MISSES, PLANTED, assigned, secret
from tests.redactionholdout import holdout
from tests.redactionoutside import HARMLESS, SECRETS
from tests.redactionsecrets import ORDINARY
from tests.redactionsecrets import SECRETS as WRITTEN

PAYLOADS = 1_500
SEED = 11
NESTED = 0.3  # of the strings of one kind are JSON themselves
NAMES = (
    "note", "id", "created_at", "max_tokens", "user", "password", "dbPassword", "X-Api-Key", "auth", "pin",
    "userPin", "tax_id", "Authorization", "cookie", "phone", "a b", "größe", "кey", "password_", "token ",
    "api.key", "access_tokens", "keyboard", "x\tpassword", 'q"uote', "userPass", "first_pass", "db_pw",
    "name", "value", "Key", "ParameterValue",
)  # fmt: skip
WORDS = (
    "plain words", "", "line one\nline two", 'he said "no"', "C:\\dir\\x", "tab\there", "<email>", "ünïcode",
    "😀", "[<key>]", "password", "token:", "a/b", "::", "1.2.3", "<redacted:0123456789ab>", "x" * 40,
    "password\t=\tx", "4111\u00a01111\u00a01111\u00a01111", "555  234  5678", "password: |\n  a b\n  c",
    "q=%204111111111111111",
    "x\\nAKIAIOSFODNN7EXAMPLE", "b'my words'", '{"password": ["a b"]}',
)  # fmt: skip
HELD_OUT = [*(sample.text for sample in holdout()), *(text for _, text in SECRETS), *HARMLESS]
HELD_OUT += [*(secret.text for secret in WRITTEN), *ORDINARY, '["curl", "-u", "bo:tulip"]']
HELD_OUT += [*(secret.text for secret in redactioncarriers.SECRETS), *redactioncarriers.HARMLESS]
LABELS = (
    "password",
    "DB_PASSWORD ",
    "smtp_pass",
    "first_pass",
    "max_tokens",
    "Authorization",
    "x",
    "api\tkey",
)
OPTIONS = ("--password", "--db-pass", "-token", "--api_key", "--verbose", "--pw", "-u", "password", "")


def slow_redactor(level: Level, key: bytes | None) -> Redactor:
    """Every rule is tried on every string of the parsed payload."""
    redactor = Redactor(level, key=key)
    redactor._scan = lambda text: TriggerHits(EVERYTHING, text)
    return redactor


def string(rng: random.Random) -> str:
    match rng.randrange(6):
        case 0:
            return rng.choice(FRAMES).replace("{}", PLANTED[rng.choice(sorted(PLANTED))](rng))
        case 1:
            return assigned(rng)[1]
        case 2:
            return rng.choice(FRAMES).replace("{}", rng.choice(NEAR_MISSES)(rng))
        case 3:
            return rng.choice(HELD_OUT)
        case 4:
            text = rng.choice(ASSIGNMENTS).format(secret(rng)) + rng.choice(WORDS)
            return json.dumps({name(rng): text}) if rng.random() < NESTED else text
        case _:
            return rng.choice(WORDS) + rng.choice((" ", "", '"', "\\")) + rng.choice(WORDS)


def value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(10 if depth else 7)
    if kind < 5:
        return string(rng)
    if kind < 7:
        return rng.choice(
            (
                None,
                True,
                0,
                -4.5,
                4111111111111111,
                -4111111111111111,
                4111111111111111.0,
                1770000000000000,
                12345,
                "",
            )
        )
    if kind == 7 and rng.random() < NESTED:
        return {rng.choice(("name", "Key", "header")): rng.choice(LABELS), "value": value(rng, depth - 1)}
    if kind < 9:
        return {name(rng): value(rng, depth - 1) for _ in range(rng.randrange(4))}
    items = [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return [rng.choice(OPTIONS), *items] if rng.random() < NESTED else items


def name(rng: random.Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.95 else string(rng)


def payload(rng: random.Random) -> str:
    body = {name(rng): value(rng, 2) for _ in range(rng.randrange(1, 5))}
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, None, 1)))
    match rng.randrange(12):
        case 0:
            return text[: rng.randrange(len(text))]  # no longer JSON
        case 1:
            return f"{string(rng)} {text}"
        case 2:
            return text.replace("/", "\\/")
        case _:
            return text


def loaded(text: str) -> Any:
    """Parsed as JSON, so that spaces and escapes do not matter."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@pytest.mark.parametrize(("level", "key"), [("medium", None), ("medium", b"k"), ("full", b"k")])
def test_fast_path_equals_slow_path(level: Level, key: bytes | None) -> None:
    rng = random.Random(SEED)
    quick, slow = Redactor(level, key=key), slow_redactor(level, key)
    for _ in range(PAYLOADS):
        text = payload(rng)
        assert loaded(quick.payload(text)) == loaded(slow.payload(text)), text
        assert quick.text(text) == slow.text(text)
