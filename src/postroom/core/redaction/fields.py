"""The names of fields whose values go as a whole, and how an assignment to one looks within a text."""

import re
from typing import Final

from postroom.core.redaction.checks import trimmed
from postroom.core.redaction.rules import (
    BARE,
    BLOCK,
    EQUALS,
    FIELDS,
    NESTED,
    NEXT_LINE,
    QUOTED,
    SPACE,
    UNQUOTED,
    Rule,
)

SUFFIX_CHARS_MIN: Final = 6  # a field this long is found at the end of a glued name, such as `dbpassword`

DEFAULT_FIELDS: Final = frozenset(
    (
        "password",
        "passwd",
        "pwd",
        "passphrase",
        "passcode",
        "secret",
        "secret_key",
        "token",
        "access_token",
        "refresh_token",
        "id_token",
        "auth_token",
        "session_token",
        "bearer_token",
        "csrf_token",
        "api_key",
        "access_key",
        "private_key",
        "signing_key",
        "encryption_key",
        "account_key",
        "auth",
        "authorization",
        "cookie",
        "credential",
        "connection_string",
        "ssn",
        "social_security_number",
        "pin",
        "cvv",
        "cvc",
        "otp",
        "card_number",
        "account_number",
        "passport_number",
        "tax_id",
        "date_of_birth",
        "dob",
        "phone",
        "tel",
        "phone_number",
        "mobile_number",
    )
)
"""The value of a field of such a name goes as a whole, also as `userPassword`, `X-Api-Key` or `api_keys`."""

HEADERS: Final = (["authorization"], ["cookie"])
JOINT: Final = r"[_. -]"
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_STRONG: Final = (
    "pass",
    "pwd",
)  # behind `password: ` anything is one; behind `token: ` only what looks like one


def _low(text: str) -> str:
    """In lower case as far as ASCII goes, one character a byte: quick, and the same for every reader."""
    if text.isascii():
        return text.lower()
    return text.encode("utf-8", "surrogatepass").lower().decode("latin-1")


def words_of(field: str) -> list[str]:
    return [word for word in re.split(rf"{JOINT}+", _low(_CAMEL.sub("_", field))) if word]


def is_long(words: list[str]) -> bool:
    return sum(map(len, words)) >= SUFFIX_CHARS_MIN


def _named(fields: list[list[str]]) -> str:
    """A pattern of the names at the end of which a field stands."""
    long = [rf"{JOINT}{{0,2}}".join(map(re.escape, words)) for words in fields if is_long(words)]
    short = [rf"{JOINT}{{0,2}}".join(map(re.escape, words)) for words in fields if not is_long(words)]
    parts = [rf"(?:{'|'.join(long)})s?"] * bool(long) + [rf"(?<![A-Za-z0-9])(?:{'|'.join(short)})"] * bool(
        short
    )
    return f"(?i:{'|'.join(parts)})"


def assignments(fields: list[list[str]]) -> list[Rule]:
    """`password=…`, `"api_key": "…"`, `<token>…</token>` and the like within a text."""
    if not fields:
        return []
    digit = rf"(?={BARE}{{0,256}}[0-9]|{BARE}{{20}})"
    behind = rf"[\"'\\\]]{{0,8}}{SPACE}"
    gap = f"{SPACE}{NEXT_LINE}"
    values = (
        rf":{SPACE}{BLOCK}|(?:{EQUALS}|:){gap}(?:{NESTED}|{QUOTED})|{EQUALS}{gap}{UNQUOTED}"
        rf"|:{gap}{digit}{UNQUOTED}|>([^<>]{{1,4096}})(?=<)"
    )
    found = [Rule("redacted", FIELDS, rf"{_named(fields)}{behind}(?:{values})", ("=", ":", ">"), trimmed)]
    strong = [words for words in fields if words[0].startswith(_STRONG)]
    if strong:
        found.append(Rule("redacted", FIELDS, rf"{_named(strong)}{behind}:{gap}{UNQUOTED}", (":",), trimmed))
    return found
