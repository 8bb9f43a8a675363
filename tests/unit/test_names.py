"""Names become file names, so the whole string is checked, and only ASCII passes."""

import pytest

from postroom.core.names import NAME_CHARS_MAX, checked_name, is_name
from postroom.errors import InvalidName, Rejected

GOOD = [
    "a",
    "7",
    "builder",
    "Builder-2",
    "a.b_c-d",
    "a..b",
    "a.",
    "all",
    "broadcast",
    "x.cursor",
    "x.tmp",
    "a" * NAME_CHARS_MAX,
]

BAD = {
    "empty": "",
    "dot": ".",
    "two dots": "..",
    "leading dot": ".lock",
    "leading dash": "-rf",
    "leading underscore": "_a",
    "slash": "a/b",
    "climbing": "../a",
    "absolute": "/etc/passwd",
    "backslash": "a\\b",
    "newline at the end": "a\n",
    "newline inside": "a\nb",
    "carriage return": "a\r",
    "NUL": "a\0",
    "space": "a b",
    "space at the end": "a ",
    "colon": "c:d",
    "star": "a*",
    "Cyrillic look-alike": "\u0430gent",
    "full-width letter": "\uff41",
    "Arabic digit": "a٣",
    "superscript digit": "²",
    "accent": "café",
    "long s, which folds to s": "\u017f",
    "Kelvin sign, which folds to k": "\u212a",
    "zero-width space": "a\u200bb",
    "emoji": "🤖",
    "one too long": "a" * (NAME_CHARS_MAX + 1),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_name_is_given_back(name: str) -> None:
    assert checked_name("agent", name) == name
    assert is_name(name)


@pytest.mark.parametrize("name", BAD.values(), ids=BAD.keys())
def test_a_bad_name_is_refused(name: str) -> None:
    assert not is_name(name)
    with pytest.raises(InvalidName):
        checked_name("agent", name)


@pytest.mark.parametrize("name", [None, 1, b"agent", ["agent"], ("agent",), object()])
def test_what_is_no_text_is_refused(name: object) -> None:
    with pytest.raises(InvalidName):
        checked_name("session", name)


def test_the_error_carries_its_facts_and_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"recipient '\.\.' is not allowed") as caught:
        checked_name("recipient", "..")
    error = caught.value
    assert isinstance(error, InvalidName)
    assert isinstance(error, Rejected)
    assert (error.kind, error.name) == ("recipient", "..")
