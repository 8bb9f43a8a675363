"""Views of a text for the triggers, one character per byte.

`low`: lower-case letters, every digit as 0, p and x as k, _ as a dot, and ( as [: one search
for a character costs less than several.
`shape`: every digit as 0, every capital as A, and every separator between groups as a dash.
"""

from typing import Final

_DIGITS: Final = b"0123456789"
_CAPITALS: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LOW: Final = bytes.maketrans(
    _CAPITALS + b"px_(" + _DIGITS, b"abcdefghijklmnokqrstuvwkyz" + b"kk.[" + b"0" * 10
)
SHAPE: Final = bytes.maketrans(_CAPITALS + b" ()./" + _DIGITS, b"A" * 26 + b"-----" + b"0" * 10)


def folded(text: str) -> str:
    """The view `low`."""
    return text.encode("utf-8", "surrogatepass").translate(LOW).decode("latin-1")
