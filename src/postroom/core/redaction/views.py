"""The text as the triggers see it, byte by byte.

`low`: small letters, every digit a 0, and p and x a k, because one jump from k to k is quicker than three.
`shape`: every digit a 0, every capital an A, one sign for what stands between groups.
"""

from typing import Final

_DIGITS: Final = b"0123456789"
_CAPITALS: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LOW: Final = bytes.maketrans(_CAPITALS + b"px" + _DIGITS, b"abcdefghijklmnokqrstuvwkyz" + b"kk" + b"0" * 10)
SHAPE: Final = bytes.maketrans(_CAPITALS + b" ()./" + _DIGITS, b"A" * 26 + b"-----" + b"0" * 10)


def folded(text: str) -> str:
    """The view `low`."""
    return text.encode("utf-8", "surrogatepass").translate(LOW).decode("latin-1")
