"""What a silver table declares: its transform, its inputs, and how new input rows update it."""

from collections.abc import Callable
from typing import NamedTuple

from pyspark.sql import DataFrame

from postroom.pipeline.delta.file_groups import FileGroups


class Append(NamedTuple):
    """Append the new rows, without those that repeat an earlier row."""


class Fold(NamedTuple):
    """Fold the new rows into the rows of their keys. Only files that hold one of the keys are rewritten."""

    keys: Callable[[DataFrame], DataFrame]
    """The keys of the table's rows that input rows change."""
    observes_renames: bool = False
    """Whether the transform takes an `Observation` (`seen`), and counts in it the keys that are `renamed`."""


class Tree(NamedTuple):
    """Place the new rows in trees. This runs queries over the rows that the table already has."""


class SilverTable(NamedTuple):
    """A table with one row a key, and how it follows its input."""

    build: Callable[..., DataFrame]
    """Pure. It gets the rows of the first input; a fold gets the rows to fold them into as well."""
    inputs: tuple[str, ...]
    """The table that it is built from. A second input can only be `silver_messages`: it supplies the type and
    the organization of a message where an event lacks them."""
    update: Append | Fold | Tree
    partition_by: tuple[str, ...] = ("day",)
    file_groups: Callable[[], FileGroups] | None = None
    """None: the rows of a day share files."""

    @property
    def source(self) -> str:
        return self.inputs[0]

    @property
    def takes_names(self) -> bool:
        return len(self.inputs) > 1
