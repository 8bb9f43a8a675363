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


_CARD_DIGITS_MIN: Final = 13
_LAST_GROUP: Final = re.compile(r"[^0-9]+[0-9]+$")


def card(found: str) -> int:
    """Numbers after a card may look like its last groups, so shorter candidates are tried as well."""
    while len(digits := "".join(filter(str.isdigit, found))) >= _CARD_DIGITS_MIN:
        if _ISSUED.fullmatch(digits) and luhn(digits):
            return len(found)
        if digits == found:
            break
        found = _LAST_GROUP.sub("", found)
    return 0


def mod97(iban: str) -> bool:
    """Whether the check digits of an IBAN without spaces are correct."""
    return int("".join(str(int(char, 36)) for char in iban[4:] + iban[:4])) % 97 == 1


_IBAN_COUNTRIES: Final = {  # by the number of characters
    15: "NO", 16: "BE BI", 18: "DK FI FK FO GL NL SD", 19: "MK SI", 20: "AT BA EE KZ LT LU MN XK",
    21: "CH HR LI LV", 22: "BG BH CR DE GB GE IE ME RS VA", 23: "AE GI IL IQ OM SO TL",
    24: "AD CZ DZ ES MD PK RO SA SE SK ST TN VG", 25: "AO CV GW LY MZ PT", 26: "IR IS TR",
    27: "BF CF CG CM DJ EG FR GA GF GP GQ GR IT KM MC MG MQ MR NC PF PM RE SM TD TF WF YT",
    28: "AL AZ BJ BY CI CY DO GT HN HU LB MA ML NE NI PL SN SV TG", 29: "BR PS QA UA",
    30: "JO KW MU YE", 31: "MT SC", 32: "LC", 33: "RU",
}  # fmt: skip
IBAN_CHARS: Final = {country: n for n, countries in _IBAN_COUNTRIES.items() for country in countries.split()}


def iban(found: str) -> int:
    """Words after an IBAN may look like its last groups: the country says where it ends."""
    at = [place for place, char in enumerate(found) if char.isalnum()]
    glued = "".join(found[place] for place in at).upper()
    chars = IBAN_CHARS.get(glued[:2], len(glued) + 1)
    if chars > len(glued) or not mod97(glued[:chars]):
        return 0
    end = at[chars - 1] + 1
    return 0 if found[end : end + 1].isalnum() else end


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
