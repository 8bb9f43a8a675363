"""Text made safe to show: control characters become visible and are never executed by a terminal.

Rule 1: escaped is what a terminal obeys (C0, DEL and C1 controls), what turns the reading direction, what is
        no Unicode text (surrogates), and the tag characters, which hide text from people but not from models.
Rule 2: a newline and a tab stay, unless one line is wanted.
"""

import re

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_LATIN1_END = 0x100
_BMP_END = 0x10000


def visible(text: str) -> str:
    """`text` with every control, direction-changing or undecodable character written as an escape."""
    return _UNSAFE.sub(_escape, text)


def visible_line(text: str) -> str:
    """As `visible`, on one line."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def visible_json(encoded: str) -> str:
    """One line of JSON that means the same, with those characters as JSON escapes."""
    if encoded.isascii() and "\x7f" not in encoded:
        return encoded  # JSON itself has escaped the rest, and most messages end here
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
    high, low = divmod(code - _BMP_END, 0x400)  # JSON writes these as a pair of surrogates
    return f"\\u{0xD800 + high:04x}\\u{0xDC00 + low:04x}"
