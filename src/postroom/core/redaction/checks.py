"""Checks on candidates that match a rule's pattern.

Each check returns how many leading characters of the candidate are a real match; 0 for no match.
"""

import re
from ipaddress import AddressValueError, IPv6Address
from typing import Final

_ISSUED: Final = re.compile(  # prefixes of card issuers, and the lengths of their numbers
    r"4(?:[0-9]{12}|[0-9]{15}|[0-9]{18})|5[1-5][0-9]{14}|3[47][0-9]{13}|3(?:0[0-5]|[689][0-9])[0-9]{11}"
    r"|2(?:22[1-9]|2[3-9][0-9]|[3-6][0-9]{2}|7[01][0-9]|720)[0-9]{12}"
    r"|(?:35(?:2[89]|[3-8][0-9])|6011|62[0-9]{2}|6(?:4[4-9]|5[0-9])[0-9])[0-9]{12,15}"
)
_AS_IS: Final = bytes.maketrans(b"0123456789", bytes(range(10)))
_DOUBLED: Final = bytes.maketrans(b"0123456789", bytes((0, 2, 4, 6, 8, 1, 3, 5, 7, 9)))


def luhn(digits: str) -> bool:
    """Whether the check digit of a card number is correct."""
    code = digits.encode()
    return (sum(code[-1::-2].translate(_AS_IS)) + sum(code[-2::-2].translate(_DOUBLED))) % 10 == 0


def card(found: str) -> int:
    digits = found if found.isdigit() else "".join(filter(str.isdigit, found))
    return len(found) if _ISSUED.fullmatch(digits) and luhn(digits) else 0


def mod97(iban: str) -> bool:
    """Whether the check digits of an IBAN without spaces are correct."""
    return int("".join(str(int(char, 36)) for char in iban[4:] + iban[:4])) % 97 == 1


_IBAN_CHARS_MIN: Final = 15


def iban(found: str) -> int:
    """Words after an IBAN may look like its last groups, so shorter candidates are tried as well."""
    found = found.replace("\u00a0", " ").replace("\u202f", " ")
    while len(glued := found.replace(" ", "")) >= _IBAN_CHARS_MIN:
        if mod97(glued):
            return len(found)
        found = found.rpartition(" ")[0]
    return 0


def address(found: str) -> int:
    if "." in found and ":" not in found:
        return len(found)
    if found.endswith(":") and not found.endswith("::"):
        found = found[:-1]  # `fe80::1: no route`
    try:
        IPv6Address(found)
    except AddressValueError:
        return 0
    return len(found) if any(map(str.isdigit, found)) else 0  # `abc::def` is a name in a program


_CLOSING: Final = {"[": "]", "{": "}", "(": ")"}


def trimmed(found: str) -> int:
    """Exclude a trailing bracket or separator that belongs to the surrounding text."""
    closing = _CLOSING.get(found[0])
    if closing and found[-1] == closing and found.count(found[0]) == found.count(closing):
        return len(found)
    return len(found) - (len(found) > 1 and found[-1] in ",;)}]")


def trimmed_list(found: str) -> int:
    return trimmed(found) if found[0] in _CLOSING else len(found)
