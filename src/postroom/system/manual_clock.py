"""A clock that tests move by hand."""

from postroom.core.lifecycle.lifecycle import NANOS_PER_S

MICROS_PER_S = 1_000_000
FIRST_WALL_US = 1_770_000_000 * MICROS_PER_S  # some day in 2026
FIRST_BOOT_NS = 1_000 * NANOS_PER_S


class ManualClock:
    """Both clocks of a store. They stand still until a test moves them."""

    def __init__(self) -> None:
        self._boot = 1
        self._boot_ns = FIRST_BOOT_NS
        self._wall_us = FIRST_WALL_US

    def boot_id(self) -> str:
        """The simulated boot that `boot_ns` counts from."""
        return f"boot-{self._boot}"

    def boot_ns(self) -> int:
        """The steady clock, in nanoseconds since the simulated boot."""
        return self._boot_ns

    def wall_us(self) -> int:
        """The wall clock, in microseconds of UTC."""
        return self._wall_us

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks."""
        if seconds < 0:
            raise ValueError("time does not run backwards: step_wall() sets the wall clock")
        self._boot_ns += round(seconds * NANOS_PER_S)
        self._wall_us += round(seconds * MICROS_PER_S)

    def step_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an operator or NTP does. The steady clock does not move."""
        self._wall_us += round(seconds * MICROS_PER_S)

    def reboot(self) -> None:
        """Simulate a reboot. Open every store again after it, because no process survives a reboot."""
        self._boot += 1
        self._boot_ns = NANOS_PER_S
