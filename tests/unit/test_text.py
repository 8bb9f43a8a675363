"""Control characters are shown as escapes and never sent to a terminal."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.core.text import visible, visible_json, visible_line

ANY_TEXT = st.text(st.characters(codec=None, exclude_categories=[]))  # lone surrogates included


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, ünïcödé 漢字 🦀", "plain text, ünïcödé 漢字 🦀"),
        ("tab\tand\nnewline", "tab\tand\nnewline"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\rb", "a\\x0db"),
        ("\x00\x07\x08\x7f\x9b", "\\x00\\x07\\x08\\x7f\\x9b"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\udcff", "\\udcff"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_one_line_has_no_newline_and_no_tab() -> None:
    assert visible_line("a\tb\nc\r\n") == "a\\tb\\nc\\x0d\\n"


@given(ANY_TEXT)
def test_visible_escapes_all_terminal_controls(text: str) -> None:
    for char in visible_line(text):
        assert unicodedata.category(char) not in ("Cc", "Cs")
        assert unicodedata.bidirectional(char) not in (
            "LRE",
            "RLE",
            "PDF",
            "LRO",
            "RLO",
            "LRI",
            "RLI",
            "FSI",
            "PDI",
        )
    visible(text).encode("utf-8")


def test_json_escapes_are_those_of_json() -> None:
    assert visible_json('"é\x7f\u202e\udcff\U000e0041"') == '"é\\u007f\\u202e\\udcff\\udb40\\udc41"'
    assert json.loads('"\\udb40\\udc41"') == "\U000e0041"


@given(ANY_TEXT)
def test_visible_json_keeps_the_value_and_escapes_controls(text: str) -> None:
    encoded = visible_json(json.dumps(text, ensure_ascii=False))
    encoded.encode("utf-8")
    assert visible_line(encoded) == encoded
    if not any("\ud800" <= char <= "\udfff" for char in text):  # two in a row would read as a pair
        assert json.loads(encoded) == text


@given(st.binary())
def test_bytes_that_are_not_text_survive_json(raw: bytes) -> None:
    text = raw.decode("utf-8", "surrogateescape")
    decoded = json.loads(visible_json(json.dumps(text, ensure_ascii=False)))
    assert decoded.encode("utf-8", "surrogateescape") == raw
