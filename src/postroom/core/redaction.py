"""What must not be written down, taken out of payloads and texts.

Rule 1: what comes out may go in again: redacting twice is redacting once. A text is redacted until nothing
        changes, and a marker such as `<email>` is never looked into.
Rule 2: a payload that is JSON stays JSON of the same structure: the same names (made distinct where redacting
        would make two the same), the same nesting. Only strings and numbers change.
Rule 3: every input has an answer. What is too deep or too stubborn is replaced as a whole, never passed on.
Rule 4: a trigger may only be too eager. What it lets pass unparsed, no rule would have matched.
Rule 5: this file imports the standard library alone, so that it can be shipped to wherever a stream is read.
        Patterns keep to the dialect that Python's `re` (ASCII) and Java's regex share.
"""

import hashlib
import hmac
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from ipaddress import AddressValueError, IPv6Address
from typing import Any, Final, Literal, NamedTuple, TypeAlias

Level: TypeAlias = Literal["none", "medium", "full"]

DEPTH_MAX: Final = 100  # of nesting; what lies deeper becomes <deep>
PASSES_MAX: Final = 20  # a text that still changes then becomes its shape
NAMES_CACHED_MAX: Final = 10_000  # field names whose verdict is remembered
NAME_CHARS_MAX: Final = 100  # of a name that is remembered
INT_CARD_MIN: Final = 10**12  # a number below it is no card
INT_CARD_MAX: Final = 10**19
INT_DIGITS_MAX: Final = 600  # Python may refuse to read longer ones; they become 0
TOKEN_HEX_DIGITS: Final = 12
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


def level_for(environment: str | None) -> Level:
    """The level of an environment. One that is unknown is treated as production."""
    levels: dict[str | None, Level] = {"dev": "none", "staging": "medium"}
    return levels.get(environment, "full")


# ---- what a candidate has to be besides matching ---------------------------------------------------
# Each says how many of the first characters are what the rule looks for; 0 is none.

_ISSUED: Final = re.compile(  # first digits, and how many more such a number has
    r"4(?:[0-9]{12}|[0-9]{15}|[0-9]{18})|5[1-5][0-9]{14}|3[47][0-9]{13}|3(?:0[0-5]|[689][0-9])[0-9]{11}"
    r"|2(?:22[1-9]|2[3-9][0-9]|[3-6][0-9]{2}|7[01][0-9]|720)[0-9]{12}"
    r"|(?:35(?:2[89]|[3-8][0-9])|6011|62[0-9]{2}|6(?:4[4-9]|5[0-9])[0-9])[0-9]{12,15}"
)
_AS_IS: Final = bytes.maketrans(b"0123456789", bytes(range(10)))
_DOUBLED: Final = bytes.maketrans(b"0123456789", bytes((0, 2, 4, 6, 8, 1, 3, 5, 7, 9)))
_OCTETS: Final = r"(?:(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\.){3}(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"


def luhn(digits: str) -> bool:
    """Whether the check digit of a card fits."""
    code = digits.encode()
    return (sum(code[-1::-2].translate(_AS_IS)) + sum(code[-2::-2].translate(_DOUBLED))) % 10 == 0


def _card(found: str) -> int:
    digits = found if found.isdigit() else "".join(filter(str.isdigit, found))
    return len(found) if _ISSUED.fullmatch(digits) and luhn(digits) else 0


def mod97(iban: str) -> bool:
    """Whether the check digits of an IBAN without spaces fit."""
    return int("".join(str(int(char, 36)) for char in iban[4:] + iban[:4])) % 97 == 1


_IBAN_CHARS_MIN: Final = 15


def _iban(found: str) -> int:
    """The words behind an IBAN may look like its last groups, so they are tried with and without."""
    found = found.replace("\u00a0", " ").replace("\u202f", " ")
    while len(glued := found.replace(" ", "")) >= _IBAN_CHARS_MIN:
        if mod97(glued):
            return len(found)
        found = found.rpartition(" ")[0]
    return 0


def _address(found: str) -> int:
    if "." in found and ":" not in found:
        return len(found)
    if found.endswith(":") and not found.endswith("::"):
        found = found[:-1]  # `fe80::1: no route`
    try:
        IPv6Address(found)
    except AddressValueError:
        return 0
    return len(found) if any(map(str.isdigit, found)) else 0  # `abc::def` is a name of a program


_CLOSING: Final = {"[": "]", "{": "}", "(": ")"}


def _trimmed(found: str) -> int:
    """Without a sign that belongs to what is around the value."""
    closing = _CLOSING.get(found[0])
    if closing and found[-1] == closing and found.count(found[0]) == found.count(closing):
        return len(found)
    return len(found) - (len(found) > 1 and found[-1] in ",;)}]")


def _trimmed_list(found: str) -> int:
    return _trimmed(found) if found[0] in _CLOSING else len(found)


# ---- the rules -------------------------------------------------------------------------------------

# What a rule belongs to, as a bit: a trigger wakes a whole group.
CUSTOM, FIELDS, LINKS, EMAILS, PHONES, CARDS, IBANS, SSNS, ADDRESSES = (1 << n for n in range(9))
WORDED, PREFIXED, BEARERS, JWTS, CLOUDS, BLOCKS = (1 << n for n in range(9, 15))  # keys
EVERYTHING: Final = (1 << 15) - 1


class Rule(NamedTuple):
    """One thing to find. When the pattern has groups, the one that took part is replaced, else all of it."""

    name: str
    """The marker's name."""
    group: int
    pattern: str
    hints: tuple[str, ...]
    """A text that holds none of them has no match."""
    check: Callable[[str], int] | None = None
    fold: Callable[[str], str] | None = None
    """What is the same value, written differently, before a token is made of it."""


def _glued(found: str) -> str:
    return "".join(filter(str.isalnum, found)).upper()


_HEX: Final = r"[0-9A-Fa-f]"


def _escapes(behind: str = "") -> str:
    return (
        rf"|(?<=\\[0abefnrtv]{behind})|(?<=%{_HEX}{{2}}{behind})|(?<=\\u{_HEX}{{4}}{behind})"
        rf"|(?<=\\x{_HEX}{{2}}{behind})|(?<=[\[;][0-9]m{behind})|(?<=[\[;][0-9]{{2}}m{behind})"
    )


def _begins(behind: str = "", word: str = "A-Za-z0-9") -> str:
    """The beginning of a word, of which `behind` is read already.

    An escape such as a written newline, as in a quotation or in JSON within a string, ends in a letter or a
    digit and is no part of the word. Neither is the colour of a terminal.
    """
    return f"(?:(?<![{word}]{behind}){_escapes(behind)})"


_ESCAPE_ENDS: Final = rf"(?:(?<=\\)(?:[0abefnrtv]|u{_HEX}{{4}}|x{_HEX}{{2}})|(?<=%){_HEX}{{2}})?"


def _plain(pattern: str) -> str:
    """The same pattern for a text without escapes, which is most and quicker to search."""
    for escapes in (_ESCAPE_ENDS, *map(_escapes, ("", "A", "AIza", "eyJ"))):
        pattern = pattern.replace(escapes, "")
    return pattern


_BEGINS: Final = _begins()
_BLANK: Final = r" \u00a0\u2007\u2009\u202f"
_DASH: Final = r"\u2010-\u2015-"
_GAP: Final = rf"(?:[{_BLANK}.{_DASH}]|[{_BLANK}]{{2}})"  # between groups of digits
_LOCAL: Final = r"[A-Za-z0-9.!#$&*+_~^\u00c0-\u04ff-]"
_LABEL: Final = r"[A-Za-z0-9\u00c0-\u04ff\u3040-\u9fff\uac00-\ud7a3]"
_OPAQUE: Final = r"[A-Za-z0-9_-]"
_SHOWN: Final = r"[A-Za-z0-9+/_.=~-]"
_BARE: Final = r"[^\x00-\x20\"'<>&]"
# What a value may hold besides: `&` unless a further parameter follows, and `<`, `>`, `'` within a word.
_WITHIN: Final = rf"(?:&(?![A-Za-z0-9_.%\[\]-]{{1,64}}=)|<(?!/)|>(?={_BARE})|'(?=[A-Za-z0-9]))"
_LINE_END: Final = r"(?:\r?\n|(?:\\{1,7}r)?\\{1,7}n)"
_UNQUOTED: Final = (
    r"((?:(?i:bearer|basic|token|digest) {1,4})?(?!=|(?:None|null|[Tt]rue|[Ff]alse)[^A-Za-z0-9])"
    rf"(?![|>][0-9+-]{{0,2}}{_LINE_END})"
    rf"{_BARE}{{1,8192}}(?:{_WITHIN}{_BARE}{{0,8192}})*"
    r"(?: [0-9]{2,8}(?![A-Za-z0-9.:]))*)"
)
_QUOTED: Final = (
    r"[BFRUbfru]{0,2}(?:\"((?:[^\"\\]|\\.)+)|'((?:[^'\\]|\\.)+)|"
    r"\\{1,7}[\"']([^\"'\\]+(?:\\{1,7}[^\"'\\]+)*))"  # \"escaped\"
)
# A list or an object within a text goes as a whole, also when its end is missing.
_NESTED: Final = (
    r"((?=[\[{(][\[{( \t\r\n]{0,16}[BUbu]?[\"'\\0-9])"
    r"(?:\[(?:[^\[\]]|\[[^\[\]]*\]){0,8192}\]?|\{(?:[^{}]|\{[^{}]*\}){0,8192}\}?"
    r"|\((?:[^()]|\([^()]*\)){0,8192}\)?))"
)
_SPACE: Final = r"(?:[ \t]|\\{1,7}t){0,4}+"
_NEXT_LINE: Final = rf"(?:{_LINE_END}[ \t]{{1,16}})?+"
# A block of YAML: all its lines.
_BLOCK: Final = rf"[|>][0-9+-]{{0,2}}{_LINE_END}[ \t]{{1,16}}([^ \t\n][^\n]*(?:\n[ \t]+[^\n]+)*)"
_EQUALS: Final = r":?={1,3}>?"

RULES: Final = (
    Rule(
        "key",
        BLOCKS,
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,20}-----[^-\"]*(?:-(?!----)[^-\"]*)*"
        r"(?:-----END [A-Z0-9 ]{0,60}-----)?",
        ("-----BEGIN ",),
    ),
    Rule(
        "redacted",
        LINKS,
        r"://[^\x00-\x20/?#@:\"'<>]{0,128}:([^\x00-\x20/?#\"'<>]{1,256})@",
        ("://",),
    ),
    Rule(
        "redacted",
        FIELDS,
        rf"(?i:authorization|cookie)[\"'\\]{{0,4}}[ \t]{{0,4}}:[ \t]{{0,4}}"
        rf"(?:{_NESTED}|(?:[BUbu](?=[\"']))?[\"'\\]{{0,4}}([^\x00-\x20\"'<>\\][^\x00-\x1f\"'<>\\]*))",
        (":",),
        _trimmed_list,
    ),
    Rule(
        "redacted",
        LINKS,
        rf"[?&;](?i:x-amz-|x-goog-)?(?i:sig|signature|credential|security-token)=({_BARE}+)"
        rf"|[?&;](?i:key|code)=({_BARE}{{16,}})",
        ("=",),
    ),
    Rule(
        "key",
        JWTS,
        rf"eyJ{_begins('eyJ', 'A-Za-z0-9_-')}{_OPAQUE}{{5,}}\.{_OPAQUE}{{5,}}(?:\.{_OPAQUE}*)*",
        ("eyJ",),
    ),
    Rule("key", CLOUDS, rf"A{_begins('A')}(?:KIA|SIA|ROA|IDA|BIA|CCA)[A-Z0-9]{{16}}(?![A-Za-z0-9])", ("A",)),
    Rule("key", CLOUDS, rf"AIza{_begins('AIza')}{_OPAQUE}{{30,}}", ("AIza",)),
    Rule(
        "key",
        PREFIXED,
        rf"{_BEGINS}(?:gh[pousr]|github_pat|hf|npm|[sr]k_(?:live|test)|whsec|shp(?:at|ca|pa|ss)|dop_v1|lin_api|pr)_"
        rf"(?={_OPAQUE}{{0,64}}[0-9]){_OPAQUE}{{20,}}",
        ("_",),
    ),
    Rule(
        "key",
        WORDED,
        rf"{_BEGINS}(?:sk|glpat|pypi|xapp|AGE-SECRET-KEY)-(?={_OPAQUE}{{0,64}}[0-9]){_OPAQUE}{{16,}}",
        ("sk-", "glpat-", "pypi-", "xapp-", "KEY-"),
    ),
    Rule("key", WORDED, r"xox[abeoprs]-[A-Za-z0-9-]{10,}", ("xox",)),
    Rule(
        "key",
        BEARERS,
        rf"(?:[Bb]earer|BEARER) {{1,4}}(?={_SHOWN}{{0,64}}[0-9])({_SHOWN}{{8,}})"
        rf"|(?:Basic|BASIC) {{1,4}}(?=[A-Za-z0-9+/]{{1,64}}[A-Z0-9=])([A-Za-z0-9+/]{{8,}}={{0,2}})",
        ("earer ", "EARER ", "asic ", "ASIC "),
    ),
    Rule(
        "key",
        WORDED,
        rf"(?:[Kk]ey|KEY|[Tt]oken|TOKEN) (?:is |IS )?['`]?(?={_SHOWN}{{0,128}}[0-9])"
        rf"(?={_SHOWN}{{0,128}}[A-Za-z])({_SHOWN}{{16,}})"
        rf"|[Pp]assword (?:is:? )?['`]?(?={_BARE}{{0,128}}[0-9])({_BARE}{{4,}})"
        rf"|--(?:[a-z]{{1,20}}-){{0,3}}(?:password|token|(?:api|access)-key) (?!-)({_BARE}{{4,}})",
        ("key ", "Key ", "KEY ", "oken ", "OKEN ", "word "),
    ),
    Rule(
        "card",
        CARDS,
        rf"{_BEGINS}(?<![0-9]\.)(?:[2-6][0-9]{{12,18}}"
        rf"|[2-6][0-9]{{3}}{_GAP}[0-9]{{4}}{_GAP}[0-9]{{4}}{_GAP}[0-9]{{4}}(?:{_GAP}[0-9]{{1,3}})?"
        rf"|3[0-9]{{3}}{_GAP}[0-9]{{6}}{_GAP}[0-9]{{4,5}})(?![A-Za-z0-9])",
        ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9"),
        _card,
        _glued,
    ),
    Rule(
        "iban",
        IBANS,
        rf"{_BEGINS}[A-Z]{{2}}[0-9]{{2}}(?:[ \u00a0\u202f]?[A-Z0-9]{{4}}){{2,7}}"
        r"(?:[ \u00a0\u202f]?[A-Z0-9]{1,3})?(?![A-Za-z0-9])",
        ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9"),
        _iban,
        _glued,
    ),
    Rule(
        "ssn",
        SSNS,
        rf"{_begins(word='A-Za-z0-9-')}(?!000|666|9)[0-9]{{3}}[-\u2010-\u2013](?!00)[0-9]{{2}}[-\u2010-\u2013](?!0000)"
        r"[0-9]{4}(?![A-Za-z0-9]|-[0-9])",
        tuple("0123456789"),
        None,
        _glued,
    ),
    Rule(
        "email",
        EMAILS,
        rf"{_ESCAPE_ENDS}({_LOCAL}{{1,64}}+(?<!^git)(?<![^A-Za-z0-9]git)(?<!\\[nrt]git)(?<!%{_HEX}{{2}}git)"
        rf"(?:@|%40)(?![0-9]x\.)(?:{_LABEL}(?:{_LABEL}|-){{0,62}}\.){{1,8}}"
        r"[A-Za-z\u00c0-\u04ff]{2,24})",
        ("@", "%40"),
        None,
        str.lower,
    ),
    Rule(
        "phone",
        PHONES,
        rf"{_begins(word='A-Za-z0-9+')}\+[1-9](?:[{_BLANK}()./{_DASH}]{{0,2}}[0-9]){{7,14}}(?![0-9])"
        rf"|{_begins(word='A-Za-z0-9.+-')}(?:1{_GAP})?(?:\([2-9][0-9]{{2}}\)(?:{_GAP})?|[2-9][0-9]{{2}}{_GAP})"
        rf"[2-9][0-9]{{2}}{_GAP}[0-9]{{4}}(?![A-Za-z0-9]|[.-][0-9])",
        tuple("0123456789"),
        None,
        _glued,
    ),
    Rule(
        "phone",
        PHONES,
        rf"(?:[Pp]hone|PHONE)[a-z .:#]{{0,12}}([0-9(](?:[{_BLANK}()./{_DASH}]{{0,2}}[0-9]){{6,14}})(?![0-9])",
        ("hone", "HONE"),
        None,
        _glued,
    ),
    Rule(
        "ip",
        ADDRESSES,
        rf"{_begins(word='A-Za-z0-9.')}(?<![0-9A-Fa-f:]:)(?:[0-9A-Fa-f]{{0,4}}:){{2,8}}"
        rf"(?:{_OCTETS}(?![A-Za-z0-9])|[0-9A-Fa-f]{{0,4}}(?![A-Za-z0-9:]|\.[0-9]))"
        rf"|{_begins(word='A-Za-z0-9.')}(?<![A-Za-z]/)(?<![Vv]ersion )(?<![Rr]elease )"
        rf"{_OCTETS}(?![A-Za-z0-9]|\.[0-9])",
        (".", ":"),
        _address,
    ),
)

# What a text loses besides at the full level: it keeps its words, so that errors of one kind stay alike.
_WORDS_ONLY: Final = (
    Rule("quoted", 0, r"\"(?:[^\"\\\n]|\\.)*(?:\"|(?=\n)|\\?\Z)", ('"',)),
    Rule("quoted", 0, r"`[^`\n]*(?:`|(?=\n)|\Z)", ("`",)),
    Rule(
        "quoted",
        0,
        rf"{_BEGINS}[BFRUbfru]{{0,2}}'(?:\\'|[^'\n]|(?<=[A-Za-z])'(?=[A-Za-z]))*'(?![A-Za-z0-9])",
        ("'",),
    ),
    Rule(
        "quoted",
        0,
        r"[\u00ab\u2018\u201c\u201e][^\u00bb\u2019\u201c\u201d\n]*[\u00bb\u2019\u201c\u201d]?",
        ("\u00ab", "\u2018", "\u201c", "\u201e"),
    ),
    Rule("digits", 0, r"[0-9](?:[0-9]|[.,: _-](?=[0-9])){5,}", tuple("0123456789")),
)


_BUILT_IN: Final = ("redacted", "deep", "other", *dict.fromkeys(rule.name for rule in (*RULES, *_WORDS_ONLY)))

# ---- names of fields -------------------------------------------------------------------------------

_JOINT: Final = r"[_. -]"
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


def _words(field: str) -> list[str]:
    return [word for word in re.split(rf"{_JOINT}+", _low(_CAMEL.sub("_", field))) if word]


def _long(words: list[str]) -> bool:
    return sum(map(len, words)) >= SUFFIX_CHARS_MIN


def _named(fields: list[list[str]]) -> str:
    """A pattern of the names at the end of which a field stands."""
    long = [rf"{_JOINT}{{0,2}}".join(map(re.escape, words)) for words in fields if _long(words)]
    short = [rf"{_JOINT}{{0,2}}".join(map(re.escape, words)) for words in fields if not _long(words)]
    parts = [rf"(?:{'|'.join(long)})s?"] * bool(long) + [rf"(?<![A-Za-z0-9])(?:{'|'.join(short)})"] * bool(
        short
    )
    return f"(?i:{'|'.join(parts)})"


def _assignments(fields: list[list[str]]) -> list[Rule]:
    """`password=…`, `"api_key": "…"`, `<token>…</token>` and the like within a text."""
    if not fields:
        return []
    digit = rf"(?={_BARE}{{0,256}}[0-9]|{_BARE}{{20}})"
    behind = rf"[\"'\\\]]{{0,8}}{_SPACE}"
    gap = f"{_SPACE}{_NEXT_LINE}"
    values = (
        rf":{_SPACE}{_BLOCK}|(?:{_EQUALS}|:){gap}(?:{_NESTED}|{_QUOTED})|{_EQUALS}{gap}{_UNQUOTED}"
        rf"|:{gap}{digit}{_UNQUOTED}|>([^<>]{{1,4096}})(?=<)"
    )
    found = [Rule("redacted", FIELDS, rf"{_named(fields)}{behind}(?:{values})", ("=", ":", ">"), _trimmed)]
    strong = [words for words in fields if words[0].startswith(_STRONG)]
    if strong:
        found.append(
            Rule("redacted", FIELDS, rf"{_named(strong)}{behind}:{gap}{_UNQUOTED}", (":",), _trimmed)
        )
    return found


# ---- what wakes a rule -----------------------------------------------------------------------------

# A text is looked at as a whole first, and most texts hold nothing. Each test below is necessary for a match
# of its group, also in a JSON text with escapes, and much cheaper than the rules. Two views of the text serve
# them, byte by byte. `low`: small letters, every digit a 0, and p, w and x a k, because one jump from k to k
# is quicker than four. `shape`: every digit a 0, every capital an A, one sign for what stands between groups.
_ZEROS: Final = b"0123456789", b"0" * 10
_CAPITALS: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_LOW: Final = bytes.maketrans(
    _CAPITALS + b"pwx" + _ZEROS[0], b"abcdefghijklmnokqrstuvkkyz" + b"kkk" + _ZEROS[1]
)
_SHAPE: Final = bytes.maketrans(_CAPITALS + b" ()./" + _ZEROS[0], b"A" * 26 + b"-----" + _ZEROS[1])

_ENDS_NAME: Final = re.compile(r"\"[ \t\n\r]*:")
_CONSTANT: Final = re.compile(r":[ \t\n\r]*(?:null|true|false)")
# A gap of several signs, or of a sign that is no byte. No view shows it, so it wakes every rule.
_WIDE_GAP: Final = "000--000"
_RARE: Final = r"(?:\xc2\xa0|\xe2\x80[\x87\x89\x90-\x95\xaf]|\\u(?:00[Aa]0|20(?:0[79]|1[0-5]|2[Ff])))"
_RARE_GAP: Final = re.compile(rf"{_RARE}[ .-]?[0-9(]|[0-9)][ .-]?{_RARE}")
_SURROGATE: Final = re.compile(r"\\u[Dd][89A-Fa-f]")
_ESCAPED: Final = re.compile(r"\\(?:/|u00[2-7])")
_WORDED: Final = re.compile(
    rf"k(?:e(?:y|n(?<=token))(?:(?: is)? ['`]?{_SHOWN}{{16}}|(?<=--token)|(?<=-key) |-0)"
    rf"|-(?<=sk-)(?<!task-)(?<!isk-){_OPAQUE}{{16}}|ord (?<=sskord )|ok[abeorsk]-|at-(?<=glkat-)|yki-|akk-"
    r"|(hone[a-z .:#]{0,12}[0(]))"  # the group is for phones
)
_PREFIXED: Final = re.compile(rf"_{_OPAQUE}{{20}}")
_CLOUD: Final = re.compile(rf"A(?:KIA|SIA|ROA|IDA|BIA|CCA|Iza){_OPAQUE}{{16}}")
_CARD_RUN: Final = "0" * 13
_CARD_STARTS: Final = "23456"
_WORD: Final = "0Aabcdefghijklmnopqrstuvwxyz"
_COUNTRY: Final = re.compile("AA00")
_PLUS: Final = re.compile(r"\+[1-9](?:[ ()./-]{0,2}[0-9]){7}")
_DOTTED: Final = re.compile(r"\.0{1,3}\.0")
_GROUPED: Final = re.compile(  # all that is made of groups of digits: cards, phones, SSNs, IPv4
    r"0-0(?:000(?:-0000|(?<=-000-0000)|(?<=000-00-0000))|00000-0000|0{0,2}-0{1,3}-0)"
)
_CARD_GROUPS: Final = re.compile("0000-0000(?:00)?-0000")
_COLONS: Final = re.compile(r":(?::|[0a-f][0a-f]{0,3}:[0a-f]{1,4}:)")


class _Look(NamedTuple):
    """What a first look at a text has shown."""

    woken: int
    """The groups of which the text, or a string within its JSON, may hold something."""
    raw: str = ""
    """The text, one character a byte."""
    low: str = ""
    shape: str = ""
    signs: Sequence[int] = ()
    """Where an assignment to a field may be."""


_NOTHING: Final = _Look(0)
_RAW, _LOWER, _SHAPED = 0, 1, 2

# Where in a text a group's matches are: each lies in the same string as one of these.
_PLACES: Final[tuple[tuple[int, int, "str | re.Pattern[str]"], ...]] = (
    (LINKS, _RAW, "="),
    (EMAILS, _RAW, "@"),
    (EMAILS, _RAW, "%40"),
    (WORDED, _LOWER, _WORDED),
    (PREFIXED, _RAW, _PREFIXED),
    (BEARERS, _LOWER, "earer "),
    (BEARERS, _LOWER, "asic "),
    (JWTS, _RAW, "eyJ"),
    (CLOUDS, _RAW, _CLOUD),
    (BLOCKS, _RAW, "--BEGIN "),
    (CARDS, _SHAPED, _CARD_GROUPS),
    (CARDS, _SHAPED, _CARD_RUN),
    (IBANS, _SHAPED, "AA00"),
    (SSNS, _SHAPED, "000-00-0000"),
    (PHONES, _SHAPED, "-000-0000"),
    (PHONES, _RAW, _PLUS),
    (PHONES, _LOWER, re.compile(r"khone[a-z .:#]{0,12}[0(]")),
    (ADDRESSES, _LOWER, _DOTTED),
    (ADDRESSES, _LOWER, _COLONS),
)


def _every(sought: str, text: str) -> Iterator[int]:
    if sought[0] in text:
        at = text.find(sought)
        while at >= 0:
            yield at
            at = text.find(sought, at + len(sought))


def _wakes_keys(raw: str, low: str) -> int:
    woken = 0
    if match := _WORDED.search(low):
        woken = WORDED | PHONES if match[1] or _WORDED.search(low, match.start() + 1) else WORDED
    if "_" in raw and _PREFIXED.search(raw):
        woken |= PREFIXED
    if "earer " in low:
        woken |= BEARERS
    if "A" in raw and _CLOUD.search(raw):
        woken |= CLOUDS
    if "J" in raw and "eyJ" in raw:
        woken |= JWTS
    if "B" in raw:
        woken |= BEARERS * ("asic " in low) | BLOCKS * ("--BEGIN " in raw)
    return woken


def _starts_card(raw: str, shape: str, at: int) -> bool:
    """Whether a long run of digits begins as cards do; a time in microseconds does not, nor does a hash."""
    while at >= 0:
        if raw[at] in _CARD_STARTS and (not at or shape[at - 1] not in _WORD):
            return True
        at = shape.find(_CARD_RUN, at + len(_CARD_RUN))
    return False


def _wakes_numbers(raw: str, low: str, shape: str) -> int:
    """The groups that are made of digits."""
    woken = 0
    if _WIDE_GAP in shape:
        return EVERYTHING
    if _GROUPED.search(shape):
        woken = PHONES * ("-000-0000" in shape) | ADDRESSES * bool(_DOTTED.search(low))
        woken |= CARDS * bool(_CARD_GROUPS.search(shape)) | SSNS * ("000-00-0000" in shape)
    at = shape.find(_CARD_RUN)
    if at >= 0 and (
        "\\" in raw or "%" in raw or _starts_card(raw, shape, at)
    ):  # an escape may end in a digit
        woken |= CARDS
    if _COUNTRY.search(shape):
        woken |= IBANS
    if "+" in raw and _PLUS.search(raw):
        woken |= PHONES
    return woken


class _Signs:
    """Signs of assignment with the end of a field's name in front of them.

    They are looked for in the reversed text: backwards it is one jump from sign to sign instead of a look for
    every name at every character, and what differs is seen at the first letter.
    """

    def __init__(self, fields: Iterable[list[str]]) -> None:
        ends: _Ends = {}
        for words in fields:
            backwards = [_folded(word[::-1]) for word in reversed(words)]
            _add(ends, backwards)
            if _long(words):
                _add(ends, ["s" + backwards[0], *backwards[1:]])
        self._names = _alternatives(ends)
        self._equals, self._tag = re.compile(f"={self._behind('=')}"), re.compile(f">{self._behind('>')}")
        # A colon near a colon may belong to an IPv6 address, which is the group: one jump serves both.
        self._colon = re.compile(f":(?:{self._behind(':')}|{_COLONS.pattern[1:]}())").search

    def _behind(self, sign: str) -> str:
        ours = "".join(f"(?<!{sign}{_folded(name[::-1])})" for name in _BUILT_IN)  # `<phone>` and `<phone:…>`
        return rf"[ \"'\\\]\t\n\r_.-]*+{self._names}(?:(?!<)|{ours})"

    def find(self, raw: str, low: str) -> tuple[int, Sequence[int]]:
        """The groups that are woken, and where the signs are."""
        woken, signs = self._find(raw, low)
        if "\\" in raw and "\\t" in raw:  # a tab, or a backslash and a name that begins with a t
            more, others = self._find(raw, low.replace("\\t", "  "))
            return woken | more, [*signs, *others]
        return woken, signs

    def _find(self, raw: str, low: str) -> tuple[int, Sequence[int]]:
        back = low[::-1]
        found: list[re.Match[str]] = []
        woken = 0
        match = self._colon(back) if ":" in raw else None
        while match:
            if match.lastindex:
                woken = ADDRESSES
            else:
                found.append(match)
            match = self._colon(back, match.start() + 1)
        if "=" in raw:
            found += self._equals.finditer(back)
        if ">" in raw:
            found += self._tag.finditer(back)
        if not found:
            return woken, ()
        last = len(low) - 1
        return woken | FIELDS, [last - match.start() for match in found]


_Ends: TypeAlias = "dict[str, _Ends]"


def _folded(text: str) -> str:
    return text.encode("utf-8", "surrogatepass").translate(_LOW).decode("latin-1")


def _add(ends: _Ends, words: list[str]) -> None:
    """Letter by letter into the tree; a joint is the empty letter."""
    for number, word in enumerate(words):
        if number:
            ends = ends.setdefault("", {})
        for letter in word:
            ends = ends.setdefault(letter, {})
    ends["end"] = {}


def _alternatives(ends: _Ends) -> str:
    if not ends:
        return "(?!)"
    if "end" in ends:
        return ""
    parts = [
        (re.escape(letter) if letter else f"{_JOINT}*") + _alternatives(rest)
        for letter, rest in sorted(ends.items())
    ]
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


# ---- the redactor ----------------------------------------------------------------------------------

_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_HEADERS: Final = (["authorization"], ["cookie"])
_HEAD: Final = 3  # the rules that come before a deployment's own fields
_DEEP: Final = "<deep>"
_OTHER: Final = "<other>"

_encode = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")
).encode
_encode_any = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode
_decode = json.JSONDecoder().raw_decode


_SHAPES: Final = tuple(f"<text:{1 << bits}>" for bits in range(64))


def shape_of(text: str) -> str:
    """`<text:32>`: 17 to 32 characters. The next power of two, because a length alone can tell a word."""
    return _SHAPES[(len(text) - 1).bit_length()] if text else ""


def _encodable(text: str) -> str:
    """The text with each lone surrogate replaced: every sink writes UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _readable_int(digits: str) -> int:
    return int(digits) if len(digits) <= INT_DIGITS_MAX else 0


class _WholeFloat(float):
    """A number such as `4111111111111111.0`, which may be a card."""

    __slots__ = ()


_WHOLE: Final = re.compile(r"-?[0-9]{13,19}\.0+")


def _float(digits: str) -> float:
    """Only a number that is written out may be a card: of others the first look sees nothing."""
    return _WholeFloat(digits) if _WHOLE.fullmatch(digits) else float(digits)


_load = json.JSONDecoder(parse_float=_float).decode


def _finite(digits: str) -> float:
    return number if math.isfinite(number := _float(digits)) else 0.0


class _Compiled(NamedTuple):
    name: str
    group: int
    search: Callable[..., "re.Match[str] | None"]
    search_plain: Callable[..., "re.Match[str] | None"]
    """The same for a text without escapes."""
    hint: Callable[[str], "re.Match[str] | None"]
    check: Callable[[str], int] | None
    fold: Callable[[str], str] | None


def _compiled(rule: Rule, flags: int = re.ASCII) -> _Compiled:
    search = re.compile(rule.pattern, flags).search
    search_plain = re.compile(_plain(rule.pattern), flags).search
    hint = re.compile("|".join(map(re.escape, rule.hints))).search
    return _Compiled(rule.name, rule.group, search, search_plain, hint, rule.check, rule.fold)


class _Work(NamedTuple):
    """What is to be done with the strings of a payload."""

    rules: tuple[_Compiled, ...]
    suspects: Collection[str] | None = None
    """The strings on which a rule has to be tried; None is all of them."""


class Redactor:
    """Takes out of payloads and texts what a level forbids.

    `patterns` are further rules: a marker's name and a pattern of `re`, whose first group is replaced if it
    has one. With a `key` a marker carries a token: the same value gives the same token, and nobody without
    the key can tell which.
    """

    def __init__(
        self,
        level: Level = "full",
        *,
        patterns: Mapping[str, str] = {},
        fields: Collection[str] = DEFAULT_FIELDS,
        key: bytes | None = None,
    ) -> None:
        if level not in ("none", "medium", "full"):
            raise ValueError(f'"{level}" is no level of redaction: none, medium or full.')
        self._full = level == "full"
        self._none = level == "none"
        self._key = key
        names = [words for field in sorted(fields) if (words := _words(field))]
        self._long = tuple("".join(words) for words in names if _long(words))
        self._short = frozenset(tuple(words) for words in names if not _long(words))
        self._verdicts: dict[Any, tuple[Any, bool]] = {}
        self._signs = _Signs([*names, *_HEADERS])
        custom = [_custom(name, pattern) for name, pattern in patterns.items()]
        self._woken_always = CUSTOM if custom else 0
        self._rules = (*custom, *map(_compiled, (*RULES[:_HEAD], *_assignments(names), *RULES[_HEAD:])))
        self._all = _Work(self._rules)
        self._rules_of: dict[int, tuple[_Compiled, ...]] = {}
        self._finders_of: dict[int, list[tuple[int, str | re.Pattern[str]]]] = {}
        self._words_only = tuple(map(_compiled, _WORDS_ONLY)) if self._full else ()
        known = "|".join(sorted({*_BUILT_IN, *patterns}))
        token = f"[0-9a-f]{{{TOKEN_HEX_DIGITS}}}"
        self._marker = re.compile(rf"(<(?:(?:{known})(?::{token})?|text:[0-9]{{1,10}})>)")

    # ---- the three ways in ----

    def payload(self, text: str) -> str:
        """A body: JSON text in, JSON text out. What is not JSON is one string."""
        if self._none:
            return text
        if not text.isascii():
            text = _encodable(text)
        look = self._look(text)
        if look is _NOTHING and not self._full:
            return text
        for _ in range(PASSES_MAX):
            redacted = None if self._full else self._spliced(look, text)
            if redacted is None:
                redacted = self._parsed(look, text)
            if redacted is not None:
                return redacted
            # Not JSON: what is left of it might be, now that something is gone.
            redacted = self._string(text, _Work(self._awake(look.woken)))
            if redacted == text:
                return text
            text = redacted
            look = self._look(text)
        return shape_of(text)

    def text(self, text: str) -> str:
        """What a program says, such as an error. Words stay; the full level drops quotations and numbers."""
        if self._none:
            return text
        if not text.isascii():
            text = _encodable(text)
        return self._settled(text, self._awake(self._look(text).woken) + self._words_only)

    def value(self, obj: Any) -> Any:
        """What JSON can hold, redacted like a payload; the argument is left as it is."""
        if self._none:
            return obj
        try:
            return self._walk(obj, self._all, DEPTH_MAX)
        except RecursionError:
            return _DEEP

    # ---- payloads, the quick way: only the strings in question are touched ----

    def _spliced(self, look: _Look, text: str) -> str | None:
        """The text with only its suspicious strings redacted, or None when it has to be parsed.

        What is inside a string and what is not is told by counting quotation marks. A rule that looks across
        one, as the names of fields do, and an escape mean something only where the text is JSON.
        """
        raw = look.raw
        escapes = "\\" in raw
        if look.woken & CUSTOM or (escapes and _SURROGATE.search(raw)):
            return None
        if (look.signs or escapes) and not _is_json(text):
            return None
        quotes = _unescaped(raw) if escapes else raw
        signs = frozenset(look.signs)
        edits: list[_Edit] = []
        try:
            for segment in _segments(quotes, [*look.signs, *self._places(look)]):
                if edits and segment.start <= edits[-1].end:
                    continue  # masked already
                edit = self._masking(raw, quotes, segment) if segment.at in signs else None
                edit = edit or self._editing(raw, quotes, segment, look.woken)
                if edit:
                    edits.append(edit)
        except _NeedsParserError:
            return None
        return _edited(raw, edits) if edits else text

    def _editing(self, raw: str, quotes: str, segment: "_Segment", woken: int) -> "_Edit | None":
        """What a string becomes, if anything else."""
        literal = raw[segment.start : segment.end]
        found = _decoded(literal)
        redacted = self._settled(found, self._awake(woken))
        if redacted is found:
            return None
        if not segment.inside or _ENDS_NAME.match(quotes, segment.end):
            raise _NeedsParserError  # a bare number, or a name
        return _Edit(segment.start, segment.end, redacted if literal is found else _literal(redacted))

    def _masking(self, raw: str, quotes: str, segment: "_Segment") -> "_Edit | None":
        """What the string behind a colon becomes, if that is what the name in front of it demands."""
        if segment.inside:
            return None
        name_end = segment.start - 1
        name = _decoded(raw[quotes.rfind('"', 0, name_end) + 1 : name_end])
        _, secret = self._verdicts.get(name) or self._judge(name)
        if not secret:
            return None
        behind = quotes[segment.start : segment.end].strip()
        if behind != ":":
            if _CONSTANT.match(behind):
                return None
            raise _NeedsParserError  # a number, a list or an object
        start = segment.end + 1
        end = quotes.index('"', start)
        return _Edit(start, end, self._masked(_decoded(raw[start:end]), 0))

    # ---- payloads, the slow way, which defines what the quick one has to come to ----

    def _parsed(self, look: _Look, text: str) -> str | None:
        """The payload redacted, or None when it is not JSON."""
        try:
            return self._written(_load(text), look, _encode)
        except json.JSONDecodeError:
            return None
        except ValueError:  # a number that Python does not read, or one that JSON does not write
            lenient = json.loads(text, parse_int=_readable_int, parse_float=_finite)
            return self._written(lenient, look, _encode_any)
        except RecursionError:
            return f'"{_DEEP}"'

    def _written(self, obj: Any, look: _Look, encode: Callable[[Any], str]) -> str:
        rules = self._awake(look.woken)
        text = encode(self._walk(obj, _Work(rules, self._suspects(look)), DEPTH_MAX))
        return text if text.isascii() else _encodable(text)

    def _suspects(self, look: _Look) -> Collection[str] | None:
        """The strings that are worth a look; None is all of them."""
        if look.woken == EVERYTHING or look.woken & CUSTOM:
            return None
        quotes = _unescaped(look.raw) if "\\" in look.raw else look.raw
        segments = _segments(quotes, [*look.signs, *self._places(look)]) if look.woken else ()
        return {_decoded(look.raw[segment.start : segment.end]) for segment in segments}

    def _walk(self, obj: Any, work: _Work, depth: int) -> Any:
        kind = type(obj)
        if kind is str:
            return self._string(obj, work) if obj else obj
        if kind is dict:
            return self._members(obj, work, depth - 1) if depth else _DEEP
        if kind is list:
            return [self._walk(item, work, depth - 1) for item in obj] if depth else _DEEP
        if obj is None or kind is bool:
            return obj
        if kind is int or kind is float:
            return 0 if self._full else self._number(obj, work)
        return self._foreign(obj, work, depth)

    def _members(self, obj: dict[Any, Any], work: _Work, depth: int) -> dict[Any, Any]:
        redacted: dict[Any, Any] = {}
        verdicts = self._verdicts
        for name, value in obj.items():
            kept, secret = verdicts.get(name) or self._judge(name)
            if kept in redacted:
                kept = _distinct(kept, redacted)
            if secret:
                redacted[kept] = self._masked(value, depth)
            elif type(value) is str and value:  # most are, and a call less counts
                redacted[kept] = self._string(value, work)
            else:
                redacted[kept] = self._walk(value, work, depth)
        return redacted

    def _masked(self, obj: Any, depth: int) -> Any:
        """What stands below a field's name: every string and number of it goes."""
        if obj is None or obj is True or obj is False or obj == "":
            return obj
        if isinstance(obj, dict):
            if not depth:
                return _DEEP
            names = self._members(dict.fromkeys(obj), self._all, 0)
            return {
                name: self._masked(value, depth - 1) for name, value in zip(names, obj.values(), strict=True)
            }
        if isinstance(obj, (list, tuple)):
            return [self._masked(item, depth - 1) for item in obj] if depth else _DEEP
        if isinstance(obj, int) and abs(obj) >= INT_CARD_MAX:
            return "<redacted>"
        found = str(obj) if isinstance(obj, (str, int, float)) else _OTHER
        return found if self._marker.fullmatch(found) else self._marked("redacted", found)

    def _number(self, number: float, work: _Work) -> Any:
        if self._full:
            return 0
        if type(number) is float and work is not self._all:
            return number  # of a payload, and not written out
        if not (INT_CARD_MIN <= abs(number) < INT_CARD_MAX or (self._woken_always and type(number) is int)):
            return number
        if abs(number) >= INT_CARD_MAX or number != int(number):
            return number
        digits = str(int(number))
        redacted = self._settled(digits, work.rules)
        return number if redacted == digits else redacted.removeprefix("-")

    def _foreign(self, obj: Any, work: _Work, depth: int) -> Any:
        """What only a program hands in. JSON knows no such type, so neither does the redacted value."""
        if isinstance(obj, str):
            return self._walk(str(obj), work, depth)
        if isinstance(obj, dict):
            return self._walk(dict(obj), work, depth)
        if isinstance(obj, (list, tuple)):
            return self._walk(list(obj), work, depth)
        if isinstance(obj, _WholeFloat):
            return self._number(obj, work)
        if isinstance(obj, (int, float)):
            return self._number(int(obj) if isinstance(obj, int) else float(obj), work)
        return _OTHER

    def _judge(self, name: Any) -> tuple[Any, bool]:
        """What a field's name becomes, and whether its value goes as a whole.

        It is remembered, because names come again and again.
        """
        if not isinstance(name, str):
            return self._walk(name, self._all, 0), False
        words = _words(name)
        glued = "".join(words)
        secret = glued.endswith(self._long) or glued.removesuffix("s").endswith(self._long)
        secret = secret or any(tuple(words[at:]) in self._short for at in range(len(words)))
        verdict = (self._settled(name, self._rules), secret)
        if len(self._verdicts) < NAMES_CACHED_MAX and len(name) < NAME_CHARS_MAX:
            self._verdicts[name] = verdict
        return verdict

    # ---- texts ----

    def _string(self, text: str, work: _Work) -> str:
        """A string of a payload: without its matches, or at the full level its shape."""
        suspect = work.suspects is None or text in work.suspects
        redacted = self._settled(text, work.rules) if suspect else text
        if self._full and (redacted[:1] != "<" or not self._marker.fullmatch(redacted)):
            return shape_of(text)
        return redacted

    def _settled(self, text: str, rules: tuple[_Compiled, ...]) -> str:
        """The text, redacted until nothing changes; the very same one when nothing does."""
        parts = self._marker.split(text) if "<" in text else [text]
        assigns: bool | None = None
        until = len(rules)  # behind the rule that changed something last, nothing is new
        for _ in range(PASSES_MAX + 1):
            last = 0
            for number, rule in enumerate(rules, 1):
                if number > until and not last:
                    break
                if rule.group == FIELDS:
                    # Asked once: what is taken out meanwhile brings no name in front of a sign.
                    assigns = bool(self._signs.find(text, _folded(text))[1]) if assigns is None else assigns
                    if not assigns:
                        continue
                if self._apply(rule, parts):
                    last = number
            if not last:
                return text if len(parts) == 1 else "".join(parts)
            until = last
        return shape_of(text)

    def _apply(self, rule: _Compiled, parts: list[str]) -> bool:
        """Apply a rule to every other part. Those between are markers, which are left alone."""
        changed = False
        for at in range(len(parts) - 1, -1, -2):
            if parts[at] and rule.hint(parts[at]) and (found := self._without(rule, parts[at])):
                parts[at : at + 1] = found
                changed = True
        return changed

    def _without(self, rule: _Compiled, text: str) -> list[str]:
        """The text cut up: what stays and markers in turn. Empty when all of it stays."""
        parts: list[str] = []
        done = 0
        search = rule.search if "\\" in text or "%" in text or "\x1b" in text else rule.search_plain
        match = search(text)
        while match:
            start, end = match.span(match.lastindex or 0)
            behind = match.end()
            if rule.check:
                # What fails the check may hide what passes it, as the 20 of `%20` in front of a card does.
                # Not so for an IBAN, which takes long to check.
                end = start + rule.check(text[start:end])
                behind = behind if rule.check is _iban and end == start else end
            if end > start:
                parts += text[done:start], self._marked(rule.name, text[start:end], rule.fold)
                done = end
            at = max(behind, start + 1)
            match = search(text, at) if at < len(text) else None
        if parts:
            parts.append(text[done:])
        return parts

    def _marked(self, name: str, found: str, fold: Callable[[str], str] | None = None) -> str:
        if self._key is None:
            return f"<{name}>"
        value = (fold(found) if fold else found).encode("utf-8", "surrogatepass")
        return f"<{name}:{hmac.digest(self._key, value, hashlib.sha256).hex()[:TOKEN_HEX_DIGITS]}>"

    # ---- what is worth a look ----

    def _awake(self, woken: int) -> tuple[_Compiled, ...]:
        rules = self._rules_of.get(woken)
        if rules is None:
            rules = self._rules_of[woken] = tuple(rule for rule in self._rules if rule.group & woken)
        return rules

    def _places(self, look: _Look) -> Iterator[int]:
        finders = self._finders_of.get(look.woken)
        if finders is None:
            awake = [(view, sought) for group, view, sought in _PLACES if group & look.woken]
            finders = self._finders_of[look.woken] = awake
        views = look.raw, look.low, look.shape
        for view, sought in finders:
            if isinstance(sought, str):
                yield from _every(sought, views[view])
            else:
                for match in sought.finditer(views[view]):
                    yield match.start()

    def _look(self, text: str) -> _Look:
        data = text.encode("utf-8", "surrogatepass")
        raw = text if text.isascii() else data.decode("latin-1")
        escapes = "\\" in raw
        if escapes and _ESCAPED.search(raw):
            return _Look(EVERYTHING, raw)
        if (raw is not text or (escapes and "\\u" in raw)) and _RARE_GAP.search(raw):
            return _Look(EVERYTHING, raw)
        low = data.translate(_LOW).decode("latin-1")
        shape = data.translate(_SHAPE).decode("latin-1")
        woken, signs = self._signs.find(raw, low)
        woken |= self._woken_always | _wakes_keys(raw, low) | _wakes_numbers(raw, low, shape)
        if "@" in raw or ("%" in raw and "%40" in raw):
            woken |= EMAILS | LINKS
        if "=" in raw:
            woken |= LINKS
        return _Look(woken, raw, low, shape, signs) if woken else _NOTHING


class _NeedsParserError(Exception):
    """The quick way ends here."""


class _Segment(NamedTuple):
    """What stands between two quotation marks."""

    at: int
    """The first place of interest in it."""
    start: int
    end: int
    inside: bool
    """Whether it is a string, and not what stands between two strings."""


class _Edit(NamedTuple):
    start: int
    end: int
    new: str


def _segments(quotes: str, places: list[int]) -> Iterator[_Segment]:
    """Each segment that has such a place in it, once, in order."""
    places.sort()
    counted = done = 0
    inside = False
    for at in places:
        if at >= done:
            inside ^= bool(quotes.count('"', counted, at) & 1)
            counted = at
            end = quotes.find('"', at)
            done = len(quotes) if end < 0 else end
            yield _Segment(at, quotes.rfind('"', 0, at) + 1, done, inside)


def _edited(raw: str, edits: list[_Edit]) -> str:
    kept: list[str] = []
    done = 0
    for start, end, new in edits:
        kept += raw[done:start], new
        done = end
    kept.append(raw[done:])
    text = "".join(kept)
    return text if text.isascii() else text.encode("latin-1").decode()


def _is_json(text: str) -> bool:
    try:
        if _decode(text)[1] != len(text):
            json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _decoded(literal: str) -> str:
    """What stands between two quotation marks of a JSON text, of which each character is a byte."""
    text = literal if literal.isascii() else literal.encode("latin-1").decode()
    if "\\" not in text:
        return text
    decoded: str = json.loads(f'"{text}"', strict=False)
    return decoded


def _literal(text: str) -> str:
    literal = _encode(text)[1:-1]
    return literal if literal.isascii() else _encodable(literal).encode().decode("latin-1")


def _unescaped(raw: str) -> str:
    """The text with no quotation marks but those around strings."""
    return raw.replace("\\\\", "__").replace('\\"', "__")


def _custom(name: str, pattern: str) -> _Compiled:
    if not _NAME.fullmatch(name):
        raise ValueError(f'"{name}" names no pattern: small letters, digits, - and _, at most 32.')
    try:
        return _compiled(Rule(name, CUSTOM, pattern, ("",)), 0)
    except re.error as error:
        raise ValueError(f'The pattern "{name}" is no regular expression: {error}.') from None


def _distinct(name: Any, taken: Collection[Any]) -> str:
    number = 2
    while (candidate := f"{name}#{number}") in taken:
        number += 1
    return candidate
