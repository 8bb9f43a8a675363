"""Text made safe for display: control characters are shown as escapes, so that no terminal executes them.

Rule 1: these are escaped: C0, DEL and C1 controls, characters that change the reading direction, surrogates,
        and tag characters, which hide text from people but not from models.
Rule 2: newlines and tabs stay, except in `visible_line`.
"""

import re

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_LATIN1_END = 0x100
_BMP_END = 0x10000


def visible(text: str) -> str:
    """`text` with every unsafe character written as an escape."""
    return _UNSAFE.sub(_escape, text)


def visible_line(text: str) -> str:
    """As `visible`, on one line."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def visible_json(encoded: str) -> str:
    """An equivalent line of JSON, with unsafe characters as JSON escapes."""
    if encoded.isascii() and "\x7f" not in encoded:
        return encoded  # JSON has escaped the other controls; most messages take this path
    return _UNSAFE.sub(_json_escape, encoded)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < _LATIN1_END:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < _BMP_END else f"\\U{code:08x}"


def _json_escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < _BMP_END:
        return f"\\u{code:04x}"
    high, low = divmod(code - _BMP_END, 0x400)  # JSON escapes these as a surrogate pair
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"
