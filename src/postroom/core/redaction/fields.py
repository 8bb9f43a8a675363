"""The names of fields whose whole values are redacted, and patterns of assignments to them in a text."""

import re
from collections.abc import Collection
from typing import Final

from postroom.core.redaction.checks import trimmed
from postroom.core.redaction.rules import (
    BARE,
    BLOCK,
    EQUALS,
    FIELDS,
    LIST_STARTS,
    NAMED,
    NESTED,
    NEXT_LINE,
    QUOTED,
    SPACE,
    UNQUOTED,
    Rule,
)

SUFFIX_CHARS_MIN: Final = 6  # a field this long also matches at the end of a longer word, as in `dbpassword`

DEFAULT_FIELDS: Final = frozenset(
    (
        "password", "passwd", "pwd", "pw", "*_pass", "passphrase", "passcode", "passwort", "kennwort",
        "contrasena", "mnemonic", "seed_phrase", "sessid", "jsessionid", "secret", "secret_key",
        "token", "access_token", "refresh_token", "id_token", "auth_token", "auth_key", "session_token",
        "bearer_token", "csrf_token", "api_key", "access_key", "private_key", "private_key_id",
        "preshared_key", "psk", "client_key_data", "subscription_key", "signing_key", "encryption_key",
        "account_key", "auth", "authorization", "cookie", "credential", "connection_string", "ssn",
        "social_security_number", "pin", "cvv", "cvc", "otp", "card_number", "account_number",
        "passport_number", "tax_id", "date_of_birth", "dob", "phone", "tel", "phone_number",
        "mobile_number",
    )
)  # fmt: skip
"""Fields whose whole value is redacted, also when spelled `userPassword`, `X-Api-Key` or `api_keys`.

A name that begins with `*_` matches only after another word: `smtpPass` matches, a bare `pass` does not.
"""

NO_OWNERS: Final = ("boarding", "first", "second", "last", "final", "test", "tests", "by", "did", "can", "no")
"""Words before a `*_` field with which it is not a secret: `first_pass`."""

HEADERS: Final = (["authorization"], ["cookie"])
JOINT: Final = r"[_. -]"
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_STRONG: Final = ("pass", "pwd")
"""Any value after `password: ` is a secret; after `token: ` only one that looks like a secret."""


def words_of(field: str) -> list[str]:
    """The words of a name. Only ASCII letters become lower case: that is the same in every reader."""
    text = _CAMEL.sub("_", field)
    low = text.lower() if text.isascii() else text.encode("utf-8", "surrogatepass").lower().decode("latin-1")
    return [word for word in re.split(rf"{JOINT}+", low) if word]


def split_fields(fields: Collection[str]) -> tuple[list[list[str]], list[list[str]]]:
    """The words of the plain names, and of those that need another word before them."""
    names = [words for field in sorted(fields) if (words := words_of(field))]
    return [words for words in names if words[0] != "*"], [words[1:] for words in names if words[0] == "*"]


def is_long(words: list[str]) -> bool:
    return sum(map(len, words)) >= SUFFIX_CHARS_MIN


def _named(fields: list[list[str]]) -> str:
    """A pattern for names that end with a field."""
    long = [rf"{JOINT}{{0,2}}".join(map(re.escape, words)) for words in fields if is_long(words)]
    short = [rf"{JOINT}{{0,2}}".join(map(re.escape, words)) for words in fields if not is_long(words)]
    parts = [rf"(?:{'|'.join(long)})s?"] * bool(long) + [rf"(?<![A-Za-z0-9])(?:{'|'.join(short)})"] * bool(
        short
    )
    return f"(?i:{'|'.join(parts)})"


def _owned(tails: list[list[str]]) -> list[str]:
    """Patterns for names that need another word before them. Each begins with a literal, for speed."""
    found = []
    for tail in ("".join(words) for words in tails):
        first, rest = f"[{tail[0]}{tail[0].upper()}]", re.escape(tail[1:])
        joined = "".join(f"(?<!{word}[_.-]{tail})" for word in NO_OWNERS)
        glued = "".join(f"(?<!{word}{tail})" for word in NO_OWNERS)
        found.append(rf"{first}(?i:{rest}(?<=[a-z0-9][_.-]{tail}){joined})")
        found.append(rf"{first[2]}{rest}(?<=[a-z0-9]{first[2]}{rest})(?i:{glued})")
    return found


def assignments(fields: list[list[str]], tails: list[list[str]]) -> list[Rule]:
    """Rules for assignments in a text: `password=…`, `"api_key": "…"`, `<token>…</token>` and similar."""
    if not fields and not tails:
        return []
    named = "|".join([_named(fields)] * bool(fields) + _owned(tails))
    digit = rf"(?={BARE}{{0,256}}[0-9]|{BARE}{{20}})"
    behind = rf"[\"'\\\]]{{0,8}}{SPACE}"
    gap = f"{SPACE}{NEXT_LINE}"
    values = (
        rf":{SPACE}{BLOCK}|(?:{EQUALS}|:){gap}(?:{NESTED}|{QUOTED})|{EQUALS}{gap}{UNQUOTED}"
        rf"|:{gap}{digit}{UNQUOTED}|>([^<>]{{1,4096}})(?=<)"
    )
    marks, item = r"[\"'\\]{0,8}", r"[\"'\\]{1,8}"
    found = [
        Rule("redacted", FIELDS, rf"(?:{named}){behind}(?:{values})", ("=", ":", ">"), trimmed),
        Rule(
            "redacted",
            NAMED,
            rf"(?i:name|key|header|field|variable|parameter){marks}{SPACE}[:=]{SPACE}{marks}"
            rf"[A-Za-z0-9_./-]{{0,64}}?(?:{named}){marks}(?:[ \t\r\n,;]|\\[nrt]){{1,32}}{marks}"
            rf"(?:[A-Za-z_]{{1,32}}{marks}{SPACE}[:=]{SPACE}{marks}[A-Za-z0-9_]{{1,64}}{marks}"
            rf"[ \t\r\n,;]{{1,32}}{marks}){{0,3}}"
            rf"(?i:[a-z_]{{0,16}}?value){marks}{SPACE}[:=]{SPACE}(?:{QUOTED}|{UNQUOTED})",
            ("alue", "ALUE"),
            trimmed,
        ),
        Rule(  # a name and its value as two items of a list
            "redacted",
            NAMED,
            rf"[\[(,=][ \t\r\n]{{0,16}}[BUbu]?{item}[A-Za-z0-9_.-]{{0,64}}?(?:{named}){item},"
            rf"[ \t\r\n]{{0,16}}(?=[BUbu]?{item}(?:[^\"'\\]{{0,256}}[0-9]|[^\"'\\]{{20}})){QUOTED}",
            LIST_STARTS,
            trimmed,
        ),
    ]
    strong = [words for words in fields if words[0].startswith(_STRONG)]
    if strong:
        found.append(Rule("redacted", FIELDS, rf"{_named(strong)}{behind}:{gap}{UNQUOTED}", (":",), trimmed))
    return found
