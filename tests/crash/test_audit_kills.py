"""25 kills of shippers and of the programs whose events they ship; `make crash` does the same 1,000 times."""

import secrets

from tests.crash import auditing

KILLS = 25
CARELESS_KILLS = 10  # some kills come before anything was shipped


def test_kills_leave_every_committed_event_in_the_stream_once() -> None:
    seed = secrets.randbits(32)
    print(f"python -m tests.crash.run --only kills-audit --kills {KILLS} --seed {seed}")
    tally = auditing.run(KILLS, seed)
    assert tally.facts["kills"] == KILLS
    assert tally.facts["repeated"] == 0
    assert tally.acknowledged > 0
    assert tally.ok, tally


def test_a_shipper_that_leaves_events_out_is_caught() -> None:
    tally = auditing.run(CARELESS_KILLS, seed=1, sabotage="careless")
    assert tally.lost > 0
    assert any(sentence.startswith("gap") for sentence in tally.broken)
