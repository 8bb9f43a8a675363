"""Names become file names, so the whole string is checked, and only ASCII passes."""

import pytest

from postroom.calls.fields import NAME_CHARS_MAX
from postroom.core.names import checked_name, is_name, look_alike_fault
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
def test_a_valid_name_is_returned(name: str) -> None:
    assert checked_name("agent", name) == name
    assert is_name(name)


@pytest.mark.parametrize("name", BAD.values(), ids=BAD.keys())
def test_a_bad_name_is_refused(name: str) -> None:
    assert not is_name(name)
    with pytest.raises(InvalidName):
        checked_name("agent", name)


@pytest.mark.parametrize("name", [None, 1, b"agent", ["agent"], ("agent",), object()])
def test_a_name_that_is_not_text_is_refused(name: object) -> None:
    with pytest.raises(InvalidName):
        checked_name("session", name)


def test_the_error_carries_its_facts_and_is_a_value_error() -> None:
    with pytest.raises(ValueError, match=r"recipient '\.\.' is not allowed") as caught:
        checked_name("recipient", "..")
    error = caught.value
    assert isinstance(error, InvalidName)
    assert isinstance(error, Rejected)
    assert (error.kind, error.name) == ("recipient", "..")


# ---- names of any text ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "builder",
        "строитель",
        "κατασκευή",
        "Müller",
        "漢字",
        "漢字-bot",
        "ひらがなとカタカナー",
        "한국어",
        "العربية",
        "🤖",
        "über-7",
        "Агент 7",
        "kırmızı",
        "\u0939\u093f\u0928\u094d\u0926\u0940",  # Hindi, with vowel signs
        "\u0e44\u0e17\u0e22\u0e48",  # Thai, with a tone mark
        "a b",
    ],
)
def test_a_name_of_one_script_is_accepted(name: str) -> None:
    assert look_alike_fault(name) == ""


@pytest.mark.parametrize(
    ("name", "fault"),
    {
        "\u0430gent": "mixes letters of different scripts (cyrillic, latin)",
        "build\u0435r": "mixes letters of different scripts (cyrillic, latin)",
        "\u03bfps": "mixes letters of different scripts (greek, latin)",
        "строитель\u03bf": "mixes letters of different scripts (cyrillic, greek)",
        "a٣": "mixes letters of different scripts (arabic, latin)",
        "\u0430\u0441\u0435": "has only letters that look like Latin letters",
        "\u0421\u0415\u041e-1": "has only letters that look like Latin letters",
        "\u039d\u0391\u03a4\u039f": "has only letters that look like Latin letters",
        "\uff41gent": "is not in the Unicode normal form NFKC",
        "\U0001d41agent": "is not in the Unicode normal form NFKC",
        "e\u0301": "is not in the Unicode normal form NFKC",
        "bu\u200bilder": "has invisible characters",
        "x\u202ey": "has invisible characters",
        "builder\ufe0f": "has invisible characters",
        "bu\u034filder": "has invisible characters",
        "\u115fbuilder": "has invisible characters",
        "builder\U000e0101": "has invisible characters",
        "a\u1680b": "has invisible characters",
        "a\u2800b": "has invisible characters",
        "a\x85b": "has invisible characters",
        "a\x07b": "has invisible characters",
        "a\tb": "has invisible characters",
        "a\ue000": "has invisible characters",
        "a\u0378": "has invisible characters",
        "a\ud800": "has invisible characters",
        " builder": "begins or ends with a blank, or has several in a row",
        "builder ": "begins or ends with a blank, or has several in a row",
        "a  b": "begins or ends with a blank, or has several in a row",
        "q\u0303": "has stray combining marks",
        "builder\u0338": "has stray combining marks",
        "\u0441\u0442\u0440\u043e\u0331": "has stray combining marks",
        "a\u093f": "mixes letters of different scripts (devanagari, latin)",
        "task\u2010queue": "has characters that look like ASCII characters",
        "task\u2212queue": "has characters that look like ASCII characters",
        "\u0251gent": "has characters that look like ASCII characters",
        "b\u1d0fx": "has characters that look like ASCII characters",
        "\u0585\u057d": "has only letters that look like Latin letters",
        "\u13aa\u13df\u13ac": "has only letters that look like Latin letters",
        "\ua4d0\ua4f3\ua4eb": "has only letters that look like Latin letters",
        "\u0441\u043e\u0441\u043e": "has only letters that look like Latin letters",
    }.items(),
)
def test_a_look_alike_name_is_refused(name: str, fault: str) -> None:
    assert look_alike_fault(name) == fault


def test_mail_refuses_mailboxes_and_agents_with_such_names() -> None:
    from postroom.core.mail import mq9

    with pytest.raises(mq9.Mq9Error, match="the mailbox name mixes letters"):
        mq9.checked_name("\u0430lerts")
    assert mq9.checked_name("\u0430lerts", known=True) == "\u0430lerts"
    with pytest.raises(mq9.Mq9Error, match="the agent's name mixes letters"):
        mq9.checked_agent_name("\u0430gent")
    assert mq9.checked_name("alerts") == "alerts"
    assert mq9.checked_agent_name("Агент 7") == "Агент 7"
