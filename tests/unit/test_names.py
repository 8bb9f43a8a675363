"""Names become file names, so the whole string is checked, and only ASCII passes."""

import pytest

from postroom.core.names import NAME_CHARS_MAX, checked_name, is_name, look_alike_fault
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
def test_a_name_of_one_script_is_taken(name: str) -> None:
    assert look_alike_fault(name) == ""


@pytest.mark.parametrize(
    ("name", "fault"),
    {
        "\u0430gent": "mixes letters of different scripts (cyrillic, latin)",
        "build\u0435r": "mixes letters of different scripts (cyrillic, latin)",
        "\u03bfps": "mixes letters of different scripts (greek, latin)",
        "строитель\u03bf": "mixes letters of different scripts (cyrillic, greek)",
        "a٣": "mixes letters of different scripts (arabic, latin)",
        "\u0430\u0441\u0435": "has only letters that look like those of another script",
        "\u0421\u0415\u041e-1": "has only letters that look like those of another script",
        "\u039d\u0391\u03a4\u039f": "has only letters that look like those of another script",
        "\uff41gent": "has characters in another form than the usual one",
        "\U0001d41agent": "has characters in another form than the usual one",
        "e\u0301": "has characters in another form than the usual one",
        "bu\u200bilder": "has characters that nobody sees",
        "x\u202ey": "has characters that nobody sees",
        "builder\ufe0f": "has characters that nobody sees",
        "bu\u034filder": "has characters that nobody sees",
        "\u115fbuilder": "has characters that nobody sees",
        "builder\U000e0101": "has characters that nobody sees",
        "a\u1680b": "has characters that nobody sees",
        "a\u2800b": "has characters that nobody sees",
        "a\x85b": "has characters that nobody sees",
        "a\x07b": "has characters that nobody sees",
        "a\tb": "has characters that nobody sees",
        "a\ue000": "has characters that nobody sees",
        "a\u0378": "has characters that nobody sees",
        "a\ud800": "has characters that nobody sees",
        " builder": "begins or ends with a blank, or has several in a row",
        "builder ": "begins or ends with a blank, or has several in a row",
        "a  b": "begins or ends with a blank, or has several in a row",
        "q\u0303": "has marks that no letter has in its usual form",
        "builder\u0338": "has marks that no letter has in its usual form",
        "\u0441\u0442\u0440\u043e\u0331": "has marks that no letter has in its usual form",
        "a\u093f": "mixes letters of different scripts (devanagari, latin)",
        "task\u2010queue": "has characters that look like those of ASCII",
        "task\u2212queue": "has characters that look like those of ASCII",
        "\u0251gent": "has characters that look like those of ASCII",
        "b\u1d0fx": "has characters that look like those of ASCII",
        "\u0585\u057d": "has only letters that look like those of another script",
        "\u13aa\u13df\u13ac": "has only letters that look like those of another script",
        "\ua4d0\ua4f3\ua4eb": "has only letters that look like those of another script",
        "\u0441\u043e\u0441\u043e": "has only letters that look like those of another script",
    }.items(),
)
def test_a_name_that_can_be_taken_for_another_is_refused(name: str, fault: str) -> None:
    assert look_alike_fault(name) == fault


def test_mail_refuses_mailboxes_and_agents_with_such_names() -> None:
    from postroom.core import mq9

    with pytest.raises(mq9.Mq9Error, match="the mailbox name mixes letters"):
        mq9.checked_name("\u0430lerts")
    assert mq9.checked_name("\u0430lerts", known=True) == "\u0430lerts"
    with pytest.raises(mq9.Mq9Error, match="the agent's name mixes letters"):
        mq9.checked_agent_name("\u0430gent")
    assert mq9.checked_name("alerts") == "alerts"
    assert mq9.checked_agent_name("Агент 7") == "Агент 7"
