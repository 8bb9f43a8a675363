"""How much is measured."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """The quick one only shows that everything runs."""

    rate: float = 200.0
    duration_s: float = 20.0
    aged: int = 5_000
    """P3 messages that have waited for a minute when the load begins."""

    ours: int = 10_000
    celery: int = 2_000
    dramatiq: int = 4_000
    dbos: int = 300
    """Messages of one repeat. A rate does not depend on them, but the time that the bench takes does."""

    empty: int = 10_000
    burning: int = 1_500
    workers: int = 4

    cycles: int = 100
    cycle_turns: int = 5

    waiting: tuple[int, ...] = (1_000, 100_000, 1_000_000)
    organizations: tuple[int, ...] = (1, 100, 10_000)
    waiting_of_all: int = 100_000
    """Messages that wait, however many organizations they are of."""
    claims: int = 10
    claim_turns: int = 5

    idle: int = 200
    flood: int = 10_000
    singles: int = 20

    decisions: int = 100_000


QUICK = Sizes(
    rate=100.0,
    duration_s=0.5,
    aged=50,
    ours=50,
    celery=20,
    dramatiq=20,
    dbos=5,
    empty=50,
    burning=10,
    workers=2,
    cycles=2,
    cycle_turns=1,
    waiting=(40, 60, 100),
    organizations=(1, 5, 20),
    waiting_of_all=100,
    claims=2,
    claim_turns=1,
    idle=10,
    flood=100,
    singles=3,
    decisions=50,
)
