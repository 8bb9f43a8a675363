"""Names: those that become file names (agents, sessions, recipients), and those that are any text.

Rule 1: a name that becomes a file name is ASCII, so nothing in it looks like something else.
Rule 2: a name that may be any text (a mailbox, an agent's card) is refused when it can be taken for another
        one: letters of two alphabets, or of another alphabet that all look like ASCII letters.
Rule 3: only new names are checked. What is stored already stays readable.
"""

import re
import unicodedata
from functools import lru_cache

from postroom.errors import InvalidName

NAME_CHARS_MAX = 128  # leaves room for every suffix we add below the usual limit of 255

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_SCRIPT = re.compile(r"[A-Z]+")
# Scripts whose letters look like nothing in another of them, so that one name may hold several.
_TOGETHER = frozenset({"LATIN", "CJK", "HIRAGANA", "KATAKANA", "HANGUL", "BOPOMOFO"})
_LIKE_ASCII = frozenset(
    # Cyrillic: a e o p c y x s i j h d q w, and A B E K M H O P C T Y X S I J
    "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0455\u0456\u0458\u04bb\u0501\u051b\u051d"
    "\u0410\u0412\u0415\u041a\u041c\u041d\u041e\u0420\u0421\u0422\u0423\u0425\u0405\u0406\u0408"
    # Greek: a i v o p u, and A B E Z H I K M N O P T Y X
    "\u03b1\u03b9\u03bd\u03bf\u03c1\u03c5"
    "\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7"
)


def plain(text: str) -> str:
    """The text itself. A member of a `str` enumeration would otherwise be written by its own name."""
    return text if type(text) is str else str.__str__(text)


def checked_name(kind: str, name: object) -> str:
    """`name` itself when it is safe as a file name on every system, else `InvalidName`."""
    if type(name) is str and is_name(name):
        return name
    if not isinstance(name, str) or not is_name(name):
        raise InvalidName(kind, name)
    return plain(name)


@lru_cache(maxsize=1024)  # every send and poll asks, and the agents of a machine are few
def is_name(text: str) -> bool:
    """Whether the whole text is a name."""
    return len(text) <= NAME_CHARS_MAX and _NAME.fullmatch(text) is not None


def look_alike_fault(text: str) -> str:
    """Why a name of any text could be taken for another one; empty when it could not."""
    if text.isascii():
        return ""
    if unicodedata.normalize("NFKC", text) != text:
        return "has characters in another form than the usual one"
    if any(unicodedata.category(char) == "Cf" for char in text):
        return "has characters that nobody sees"
    letters = [char for char in text if char.isalnum() and not ("0" <= char <= "9")]
    scripts = {_script(char) for char in letters}
    if len(scripts) > 1 and not scripts <= _TOGETHER:
        return f"mixes letters of different scripts ({', '.join(sorted(scripts)).lower()})"
    if letters and _LIKE_ASCII.issuperset(letters):
        return "has only letters that look like those of another script"
    return ""


def _script(char: str) -> str:
    """The first word of a character's name, which is that of its script."""
    match = _SCRIPT.match(unicodedata.name(char, ""))
    return match[0] if match is not None else ""
