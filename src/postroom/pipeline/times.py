"""Units of time in microseconds."""

from typing import Final

MICROS_PER_S: Final = 1_000_000
MINUTE_US: Final = 60 * MICROS_PER_S
HOUR_US: Final = 60 * MINUTE_US
HOURS_A_DAY: Final = 24
DAY_US: Final = HOURS_A_DAY * HOUR_US
