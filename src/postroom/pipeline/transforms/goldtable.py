"""How a gold table tells the jobs what it is made of."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class GoldTable(NamedTuple):
    """A table that is derived from others, and how much of it a change touches."""

    build: "Callable[..., DataFrame]"
    """Pure. It gets one DataFrame for each name of `inputs`, in that order."""
    inputs: tuple[str, ...]
    """Silver tables, or gold tables that are listed before it."""
    partition_by: tuple[str, ...] = ()
    scope: Literal["all", "days"] = "all"
    """`days`: the inputs hold only the days that changed, and the result replaces exactly these days.
    `all`: the inputs hold everything, and the result replaces the table."""
