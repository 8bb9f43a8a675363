"""Redaction of any input: idempotent, complete for planted secrets, JSON stays JSON, no exception."""

import json
import math
import random
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from postroom.core.redaction import DEPTH_MAX, EVERYTHING, Redactor
from postroom.core.redaction.triggers import TriggerHits
from tests import redactioncorpus
from tests.redactioncorpus import FRAMES, PLANTED, survives

LEVELS = ("none", "medium", "full")
REDACTORS = {
    "none": Redactor("none"),
    "medium": Redactor("medium"),
    "medium with tokens": Redactor("medium", key=b"k"),
    "medium with patterns": Redactor(
        "medium", patterns={"staff": r"EMP[0-9]+", "tail": r"(?<=>).x"}, key=b"k"
    ),
    "full": Redactor("full"),
    "full with tokens": Redactor("full", key=b"k"),
}
ACTIVE = {name: redactor for name, redactor in REDACTORS.items() if name != "none"}

any_text = st.text(st.characters(codec=None, exclude_categories=[]))  # lone surrogates included
pieces = st.sampled_from(
    [
        "password", "api_key", "token", "Authorization", "phone", "ssn", "key", "is", "Bearer", "=", ":",
        ": ", '"', "'", "\\", '\\"', "<", ">", "<email>", "<phone>", "<redacted:0123456789ab>", "<text:32>",
        "@", "a@b.example", "sk-", "ghp_", "eyJ", ".", "-", "+", "4111 1111 1111 1111", "4111111111111111",
        "10.0.0.1", "fe80::1", "::", "555-234-5678", "+49 170 1234567", "DE89370400440532013000",
        "123-45-6789", "hunter2", "x" * 20, "1" * 9, "://", "u:p@", "?sig=", "&", "\n", " ", "{", "}", "[",
        "]", ",", "EMP7", "\ud800", "\ude00", "é", "\u212a", "\\u0040", "-----BEGIN PRIVATE KEY-----", "`",
        "“", "\\n", "\\t", "\t", "%20", "%", "\u00a0", "\u2011", "  ", "4111", "1111", "b'", "[", "|\n  ",
        "\n  ", ":=", "==",
        "AKIAIOSFODNN7EXAMPLE", "\x1b[31m",
    ]
)  # fmt: skip
hostile = st.lists(pieces, max_size=12).map("".join)
samples = st.builds(
    lambda kind, seed, frame: FRAMES[frame].replace("{}", PLANTED[kind](random.Random(seed))),
    st.sampled_from(sorted(PLANTED)),
    st.integers(0, 10_000),
    st.integers(0, len(FRAMES) - 1),
)
texts = st.one_of(any_text, hostile, samples)
names = st.one_of(
    st.sampled_from(
        ["password", "apiKey", "X-Api-Key", "max_tokens", "note", "auth", "a@b.example", "c@b.example"]
    ),
    texts,
)
scalars = st.one_of(
    texts,
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(),
    st.sampled_from([4111111111111111, -4111111111111111, 4111111111111111.0, 10**4000]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(names, inner, max_size=4)),
    max_leaves=12,
)
without_huge = st.recursive(
    st.one_of(
        texts,
        st.none(),
        st.booleans(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.integers(),
        st.sampled_from([-4111111111111111, 4111111111111111.0, 4.111111111111111e18]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(names, inner, max_size=4)),
    max_leaves=12,
)
documents = st.builds(
    json.dumps,
    without_huge,
    ensure_ascii=st.booleans(),
    indent=st.sampled_from([None, 1]),
    allow_nan=st.just(True),
)


def same(one: Any, other: Any) -> bool:
    """Equal, with NaN equal to itself."""
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    return type(one) is type(other) and bool(one == other)


def structure(obj: Any) -> Any:
    """Objects and lists with their sizes; a string or a number is a leaf of either kind."""
    if isinstance(obj, dict):
        return [structure(value) for value in obj.values()]
    if isinstance(obj, list):
        return tuple(structure(item) for item in obj)
    return obj if obj is None or isinstance(obj, bool) else "leaf"


@pytest.mark.parametrize("name", REDACTORS)
@given(text=texts)
@example(text="password=<email>x")
@example(text='"\\ud83d\\ude00 a@b.example"')
@example(text="[" * 5_000)
@example(text="0@0.AA4111111111111111")
def test_redacting_a_text_twice_changes_nothing(name: str, text: str) -> None:
    redactor = REDACTORS[name]
    once = redactor.text(text)
    assert redactor.text(once) == once
    payload = redactor.payload(text)
    assert redactor.payload(payload) == payload


@given(text=texts, document=documents)
def test_the_medium_level_finds_nothing_in_what_the_full_level_leaves(text: str, document: str) -> None:
    medium, full = REDACTORS["medium"], REDACTORS["full"]
    left = full.text(text)
    assert medium.text(left) == left
    for payload in map(full.payload, (text, document)):
        assert medium.payload(payload) == payload


@pytest.mark.parametrize("name", REDACTORS)
@given(document=documents)
@example(document='{"a": "call +49 170 1234567", "phone": 1}')
@example(document='{"a": "call +49 170 1234567"}')
def test_a_payload_redacted_twice_is_redacted_once(name: str, document: str) -> None:
    redactor = REDACTORS[name]
    once = redactor.payload(document)
    assert redactor.payload(once) == once


@pytest.mark.parametrize("name", REDACTORS)
@given(value=values)
def test_a_value_redacted_twice_is_redacted_once(name: str, value: Any) -> None:
    once = REDACTORS[name].value(value)
    assert same(REDACTORS[name].value(once), once)


@pytest.mark.parametrize("name", REDACTORS)
@given(document=documents)
@example(document='{"a@b.example": 1, "c@b.example": 2, "<email>": 3}')
def test_json_stays_json_of_the_same_structure(name: str, document: str) -> None:
    redacted = json.loads(REDACTORS[name].payload(document))
    assert structure(redacted) == structure(json.loads(document))


@pytest.mark.parametrize("name", ACTIVE)
@given(kind=st.sampled_from(sorted(PLANTED)), seed=st.integers(0, 2**32), frame=st.sampled_from(FRAMES))
def test_nothing_of_a_planted_value_is_left(name: str, kind: str, seed: int, frame: str) -> None:
    secret = PLANTED[kind](random.Random(seed))
    text = frame.replace("{}", secret)
    redactor = ACTIVE[name]
    assert not survives(secret, redactor.text(text))
    for payload in (text, json.dumps({"a": [text]}), json.dumps({"n": 1, "a": text}, ensure_ascii=False)):
        assert not survives(secret, redactor.payload(payload))
    assert not survives(secret, str(redactor.value({"a": {"b": (text, 1)}})))


@pytest.mark.parametrize("name", ACTIVE)
@given(
    secret=st.text(min_size=6).filter(lambda text: not text.isspace()),
    path=st.sampled_from(["{}", '{{"x": [1, {}]}}']),
)
def test_nothing_is_left_of_the_value_of_a_field(name: str, secret: str, path: str) -> None:
    document = path.format(json.dumps({"dbPassword": secret, "n": 1, "auth": {"deep": [secret]}}))
    redacted = json.loads(ACTIVE[name].payload(document))
    inner = redacted["x"][1] if "x" in redacted else redacted
    for value in (inner["dbPassword"], inner["auth"]["deep"][0]):
        assert value.startswith("<") and value.endswith(">")  # noqa: PT018 - one fact
        assert len(value) <= len("<redacted:0123456789ab>") or value == secret


@pytest.mark.parametrize("name", REDACTORS)
@given(value=values)
def test_any_python_value_is_redacted_without_error(name: str, value: Any) -> None:
    REDACTORS[name].value(value)


@given(document=st.one_of(documents, texts))
def test_triggers_fire_for_every_match(document: str) -> None:
    """The fast path gives the same result as the slow path."""
    quick = REDACTORS["medium with tokens"]
    slow = Redactor("medium", key=b"k")
    slow._scan = lambda text: TriggerHits(EVERYTHING, text)
    assert loaded(quick.payload(document)) == loaded(slow.payload(document))
    assert quick.text(document) == slow.text(document)


def loaded(text: str) -> Any:
    """Parsed as JSON, so that spaces and escapes do not matter."""
    try:
        return json.dumps(json.loads(text)).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    except ValueError:
        # In-place replacements are JSON strings, even when the whole text is not JSON.
        return re.sub(r"[\x00-\x1f]", lambda found: json.dumps(found[0])[1:-1], text)


@given(text=st.builds("".join, st.lists(samples, min_size=1, max_size=3)))
def test_a_token_is_the_same_for_the_same_key_and_value_alone(text: str) -> None:
    one, again, other = (Redactor("medium", key=key) for key in (b"one", b"one", b"two"))
    assert one.text(text) == again.text(text)
    if one.text(text) != text:
        assert one.text(text) != other.text(text)


def test_the_limit_of_nesting_is_kept() -> None:
    for depth in (DEPTH_MAX - 1, DEPTH_MAX, DEPTH_MAX + 1, 500, 100_000):
        for level in ("medium", "full"):
            redacted = Redactor(level).payload("[" * depth + '"a@b.example"' + "]" * depth)
            if level == "full" or depth > DEPTH_MAX:
                assert "a@b" not in redacted
            assert Redactor(level).payload(redacted) == redacted


def test_the_corpus_is_the_same_for_the_same_seed() -> None:
    assert redactioncorpus.corpus(5, 3) == redactioncorpus.corpus(5, 3)
