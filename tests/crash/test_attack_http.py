"""A small version of `attack-http`. The large one: `python -m tests.crash.run --only attack-http`."""

from tests.crash import attack_http


def test_hostile_clients_do_not_affect_well_behaved_ones() -> None:
    tally = attack_http.run(1, 7, lambda _: None, attack_http.SMALL)
    assert tally.ok, tally
    assert tally.acknowledged > 0
    assert tally.facts["refused"] > 0
