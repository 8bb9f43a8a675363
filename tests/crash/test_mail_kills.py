"""25 kills of the mail server under load; `make crash` does the same 2,000 times."""

import secrets

import pytest

from tests.crash import mailing
from tests.crash.ledger import Tally

KILLS = 25


def test_server_kills_lose_nothing_acknowledged_and_duplicate_no_delivery() -> None:
    seed = secrets.randbits(32)
    print(f"python -m tests.crash.run --only kills-mail --kills {KILLS} --seed {seed}")
    tally = mailing.run(KILLS, seed)
    assert tally.facts["kills"] == KILLS
    for fact in ("pushed", "pulled", "deleted", "mailboxes"):
        assert tally.facts[fact] > 0
    assert tally.acknowledged > 0
    assert tally.ok, tally


@pytest.mark.parametrize("sabotage", ["early", "twice", "undead"])
def test_a_server_that_breaks_a_promise_is_caught(sabotage: str) -> None:
    tally = Tally()
    caught = False
    for seed in range(5):
        tally.add(mailing.run(3, seed, sabotage=sabotage))
        found = {"early": tally.lost, "twice": tally.doubled, "undead": "came again" in str(tally.broken)}
        caught = bool(found[sabotage])
        if caught:
            break
    assert caught, tally
