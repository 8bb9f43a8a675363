"""Addresses and paths as text. Nothing here imports Spark, Arrow or the tables."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from postroom.settings import is_address


def normalized(place: Path | str) -> str:
    """The absolute path of a folder of this machine, or an address without a slash at its end."""
    text = str(place)
    if text.startswith("file:"):
        return unquote(urlsplit(text).path).rstrip("/") or "/"
    return text.rstrip("/") if is_address(text) else str(Path(text).absolute())
