"""60 kills -9 at random points of every update: nothing acknowledged is lost, torn or duplicated.

`make crash` does the same 10,000 times. A failed seed is run again with
`python -m tests.crash.run --only NAME --kills N --seed SEED`.
"""

import secrets
from pathlib import Path

import pytest

from tests.crash import kills
from tests.crash.ledger import (
    AppendOnly,
    Delivery,
    Tally,
    body_of,
    check_writers_in_order,
    compare,
    token_of,
)

KILLS = {
    "kills-append": 8,
    "kills-append-pages": 8,
    "kills-append-many": 8,
    "kills-rotation": 9,
    "kills-side-file": 9,
    "kills-cursor": 9,
    "kills-expire": 9,
}


def test_every_update_gets_its_share_of_60_kills() -> None:
    assert KILLS.keys() == kills.SCENARIOS.keys()
    assert sum(KILLS.values()) == 60


@pytest.mark.parametrize("scenario", KILLS)
def test_kills_lose_tear_and_duplicate_nothing(scenario: str) -> None:
    seed = secrets.randbits(32)
    print(f"python -m tests.crash.run --only {scenario} --kills {KILLS[scenario]} --seed {seed}")
    tally = kills.run(scenario, KILLS[scenario], seed)
    assert tally.facts["kills"] == KILLS[scenario]
    assert tally.ok, tally


# ---- the harness itself can fail -------------------------------------------------------------------


@pytest.mark.parametrize("scenario", ["kills-append", "kills-append-many", "kills-side-file"])
def test_a_writer_that_acknowledges_too_early_is_caught(scenario: str) -> None:
    assert kills.run(scenario, 3, seed=1, sabotage="early").lost > 0


def test_a_consumer_that_moves_its_cursor_too_late_is_caught() -> None:
    assert kills.run("kills-cursor", 3, seed=1, sabotage="late").doubled > 0


def delivery(number: int, *, size: int = 50) -> Delivery:
    token = token_of("w", number, size)
    return Delivery(token, f"id-{number}", body_of(token))


def test_the_checker_counts_lost_torn_and_duplicated_messages() -> None:
    one, two, three = (delivery(number) for number in range(3))
    acknowledged = {one.token: one.msg_id, two.token: two.msg_id}
    tally = Tally()
    compare(acknowledged, [one, one, three._replace(body="half"), Delivery("forged", "id-9", "x")], tally)
    assert (tally.lost, tally.torn, tally.doubled) == (1, 2, 1)
    assert not tally.ok


def test_the_checker_detects_a_gap_in_the_messages_of_a_writer() -> None:
    tally = Tally()
    check_writers_in_order([delivery(0).token, delivery(2).token], tally)
    assert tally.broken


def test_the_checker_detects_a_removed_torn_tail(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"whole\nto")
    kept = AppendOnly(log)
    kept.look()
    log.write_bytes(b"whole\nto\nnext\n")
    kept.look()
    fine = Tally()
    kept.check(fine)
    assert fine.ok
    log.write_bytes(b"whole\nnext\nafter that\n")
    tally = Tally()
    kept.check(tally)
    assert tally.broken


def test_the_checker_distinguishes_an_interrupted_delivery_from_a_loss() -> None:
    order = [f"ask t{number} id{number}" for number in range(6)]
    cut_off = Tally()
    kills.check_hand_overs(order, [order[:2], order[4:]], cut_off)
    assert cut_off.ok
    assert cut_off.facts["cut_off_by_a_kill"] == 2
    lost = Tally()
    kills.check_hand_overs(order, [[order[0], order[2]], order[3:]], lost)
    assert lost.lost == 1
    doubled = Tally()
    kills.check_hand_overs(order, [order[:4], order[3:]], doubled)
    assert doubled.doubled == 1
