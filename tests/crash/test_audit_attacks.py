"""The hostile input of `python -m tests.crash.run --only attack-audit`, with fewer lines."""

from tests.crash import attack_audit

EVENTS = 100


def test_hostile_input_loses_no_event_and_ends_no_command() -> None:
    tally = attack_audit.run(1, 7, lambda _: None, events=EVENTS, thorough=False)
    assert tally.acknowledged > 2 * EVENTS
    assert tally.facts["refused"] > 0
    assert tally.ok, tally
