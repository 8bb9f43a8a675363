"""Names: those that become file names (agents, sessions, recipients), and those that are any text.

Rule 1: a name that becomes a file name is ASCII, so that it cannot be confused with another.
Rule 2: a name that may be any text (a mailbox, an agent's card) is refused when it could be confused with
        another: with invisible or non-normalized characters, letters of two alphabets, or only letters of
        another alphabet that look like ASCII letters.
Rule 3: only new names are checked. Stored names stay readable.
"""

import re
import unicodedata
from functools import lru_cache

from postroom.calls.fields import NAME_CHARS_MAX
from postroom.errors import InvalidName

_SCOPE, _SCOPE_END = "@", ":"  # no name has these, and both may stand in the path of a URL
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_SCRIPT = re.compile(r"[A-Z]+")
# Scripts without letters that look alike, so that one name may mix them.
_TOGETHER = frozenset({"LATIN", "CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO"})
_UNSEEN_CATEGORIES = frozenset({"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs"})
# Invisible characters (Unicode's Default_Ignorable_Code_Point) in other categories, and the Braille blank.
_UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\ufe00-\ufe0f\U000e0100-\U000e01ef]")
_MARK = "COMBINING "  # the start of the Unicode names of marks that belong to no script
_TWINS = frozenset(
    # dashes, quotes, slashes and a colon
    "\u02d7\u2010\u2012\u2013\u2014\u2015\u2043\u2212\u02bc\u02c8\u2018\u2019\u201a\u2032\u2044\u2215\u2236"
    # Latin letters for phonetics: a g l ! c o s v w z
    "\u0251\u0261\u01c0\u01c3\u1d04\u1d0f\ua731\u1d20\u1d21\u1d22"
)
_LIKE_ASCII = frozenset(
    # Cyrillic: a e o p c y x s i j h d q w, and A B E K M H O P C T Y X S I J
    "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0455\u0456\u0458\u04bb\u0501\u051b\u051d"
    "\u0410\u0412\u0415\u041a\u041c\u041d\u041e\u0420\u0421\u0422\u0423\u0425\u0405\u0406\u0408"
    # Greek: a i v o p u, and A B E Z H I K M N O P T Y X
    "\u03b1\u03b9\u03bd\u03bf\u03c1\u03c5"
    "\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7"
    # Armenian: q h n u g o, and L U S O
    "\u0566\u0570\u0578\u057d\u0581\u0585\u053c\u054d\u054f\u0555"
    # Cherokee: D R T i y A J E W M H Y G h Z b R W S V S L C P K d B
    "\u13a0\u13a1\u13a2\u13a5\u13a9\u13aa\u13ab\u13ac\u13b3\u13b7\u13bb\u13bd\u13c0\u13c2\u13c3\u13cf\u13d2\u13d4"
    "\u13d5\u13d9\u13da\u13de\u13df\u13e2\u13e6\u13e7\u13f4"
    # Lisu: B P D T G K J C Z F M N L S R V H W X Y A E I O U
    "\ua4d0\ua4d1\ua4d3\ua4d4\ua4d6\ua4d7\ua4d9\ua4da\ua4dc\ua4dd\ua4df\ua4e0\ua4e1\ua4e2\ua4e3\ua4e6\ua4e7\ua4ea"
    "\ua4eb\ua4ec\ua4ee\ua4f0\ua4f2\ua4f3\ua4f4"
)


def plain(text: str) -> str:
    """The text as a plain `str`. A member of a `str` enumeration would be formatted by its own name."""
    return text if type(text) is str else str.__str__(text)


def checked_name(kind: str, name: object) -> str:
    """`name` when it is a safe file name on every system, else `InvalidName`."""
    if type(name) is str and is_name(name):
        return name
    if not isinstance(name, str) or not is_name(name):
        raise InvalidName(kind, name)
    return plain(name)


def scoped(org: str, name: str) -> str:
    """A name within an organization, as the store has it: `@ORG:NAME`. The name itself within none."""
    return f"{_SCOPE}{org}{_SCOPE_END}{name}" if org else name


def unscoped(org: str, name: str) -> str:
    """A name of the store as the organization itself sees it."""
    return name.removeprefix(scoped(org, "")) if org else name


def unscoped_text(org: str, text: str) -> str:
    """A sentence with the names of the store as the organization itself sees them."""
    return text.replace(scoped(org, ""), "") if org else text


def is_scoped(name: str) -> bool:
    """Whether a name of the store is one within an organization."""
    return name.startswith(_SCOPE)


@lru_cache(maxsize=1024)  # for each task that is stored
def split_scoped(name: str) -> tuple[str, str]:
    """The organization of a name of the store, which is empty for none, and the name within it."""
    org, end, inner = name.removeprefix(_SCOPE).partition(_SCOPE_END)
    return (org, inner) if end and name.startswith(_SCOPE) else ("", name)


def checked_scoped_name(kind: str, name: object) -> str:
    """`name` when it is a name, or one within an organization. Else `InvalidName`."""
    if type(name) is str and is_name(name):
        return name
    if isinstance(name, str):
        org, inner = split_scoped(name)
        if org and is_name(org) and is_name(inner):
            return plain(name)
    return checked_name(kind, name)


@lru_cache(maxsize=1024)  # every send and poll checks a name, and a machine has few agents
def is_name(text: str) -> bool:
    """Whether the whole text is a name."""
    return len(text) <= NAME_CHARS_MAX and _NAME.fullmatch(text) is not None


def look_alike_fault(text: str) -> str:
    """Why a name could be confused with another; empty when it could not."""
    if text != text.strip(" ") or "  " in text:
        return "begins or ends with a blank, or has several in a row"
    if text.isascii():
        return "" if text.isprintable() else "has invisible characters"
    if unicodedata.normalize("NFKC", text) != text:
        return "is not in the Unicode normal form NFKC"
    categories = {unicodedata.category(char) for char in text if char != " "}
    if _UNSEEN.search(text) or not _UNSEEN_CATEGORIES.isdisjoint(categories):
        return "has invisible characters"
    if any(unicodedata.name(char, "").startswith(_MARK) for char in text):
        return "has stray combining marks"
    return _script_fault(text)


def _script_fault(text: str) -> str:
    if not _TWINS.isdisjoint(text):
        return "has characters that look like ASCII characters"
    letters = [  # also marks, and digits other than 0 to 9
        char
        for char in text
        if unicodedata.category(char)[0] == "M" or (char.isalnum() and not "0" <= char <= "9")
    ]
    # The first word of a character's Unicode name is its script.
    scripts = {match[0] if (match := _SCRIPT.match(unicodedata.name(one, ""))) else "" for one in letters}
    if len(scripts) > 1 and not scripts <= _TOGETHER:
        return f"mixes letters of different scripts ({', '.join(sorted(scripts)).lower()})"
    if letters and _LIKE_ASCII.issuperset(letters):
        return "has only letters that look like Latin letters"
    return ""
