"""The report of a seeded world."""

from typing import ClassVar

import msgspec

from postroom.testing.world_checker import Broken


class SeedReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one seed."""

    program: ClassVar[str]
    """The module that runs one seed."""
    seed: int
    broken: list[Broken]
    actions: dict[str, int]
    """How often each action happened."""
    trace: list[str]

    @property
    def ok(self) -> bool:
        """Whether every rule held."""
        return not self.broken

    @property
    def command(self) -> str:
        """The command that replays the seed."""
        return f"python -m {self.program} --seed {self.seed}"

    def __str__(self) -> str:
        lines = [f"{one.rule}: message {one.message_id or '-'}: {one.sentence}" for one in self.broken]
        return "\n".join([f"seed {self.seed}: {len(lines)} broken rules", *lines, self.command])
