"""Which agents need a sandbox, and what limits mean.

Rule 1: an agent needs a sandbox if one of its tools runs code that others wrote.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

_UNITS: Final = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_AMOUNT: Final = re.compile(r"([1-9]\d{0,8})\s?(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)", re.ASCII)
_CODE_WORDS: Final = frozenset(
    {"bash", "browser", "code", "compile", "exec", "execute", "interpreter", "notebook", "python", "script",
     "shell", "sql", "terminal"}
)  # fmt: skip
_WORD: Final = re.compile(r"[a-z]+")


def bytes_of(amount: str) -> int:
    """How many bytes an amount such as 256MB is. Raises `ValueError`."""
    found = _AMOUNT.fullmatch(amount)
    if found is None:
        raise ValueError(f'an amount of memory is a text such as "256MB", not {amount!r}')
    return int(found[1]) * _UNITS[found[2]]


def needs_sandbox(tools: Iterable[Any]) -> bool:
    """Whether an agent with these tools needs a sandbox: one of them runs code."""
    return any(_runs_code(tool) for tool in tools)


def _runs_code(tool: Any) -> bool:
    if isinstance(tool, Mapping):
        if isinstance(tool.get("sandbox"), bool):
            return bool(tool["sandbox"])
        tool = tool.get("name", "")
    return not _CODE_WORDS.isdisjoint(_WORD.findall(str(tool).casefold()))
