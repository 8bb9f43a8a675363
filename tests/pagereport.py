"""A report of the pipeline as `postroom pipeline report` writes it, from made-up figures of one day."""

from decimal import Decimal

from postroom.pipeline.report.facts import Percentiles, QueueFacts, ReportFacts
from postroom.pipeline.report.page import page
from postroom.pipeline.times import DAY_US, HOUR_US

FROM_US = 20_000 * DAY_US


def report() -> str:
    """The page."""
    hours = [FROM_US + number * HOUR_US for number in range(24)]
    waits = {at: Percentiles(900, 2_000, 9_000 + n % 5 * 900, 40_000) for n, at in enumerate(hours)}
    done = {at: 800 + 90 * (n % 7) for n, at in enumerate(hours)}
    return page(
        ReportFacts(
            since_us=FROM_US,
            until_us=FROM_US + DAY_US,
            step_us=HOUR_US,
            events=84_000,
            outcomes={"completed": 20_700, "dead_letter": 120},
            latency={0: waits, 2: waits},
            overall={0: waits[FROM_US], 2: waits[FROM_US]},
            targets_us={},
            sla={},
            throughput={"completed": done, "dead letters": dict.fromkeys(hours, 5)},
            depth={at: 20 + 3 * (n % 9) for n, at in enumerate(hours)},
            queues=[QueueFacts("org:acme", 14_000, 60, 3), QueueFacts("org:beta", 6_820, 60, 1)],
            errors={"ValidationError": dict.fromkeys(hours, 5)},
            tokens={},
            spending={},
            cost_usd=Decimal(0),
            traffic=[],
            patterns=[],
            suspects=[],
            goals=[],
            decisions={},
            decision_queue=None,
            lapses=0,
            timeouts=0,
        )
    )
