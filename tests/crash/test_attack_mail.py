"""The attacks on the mail server, each for a moment; `make crash` runs them longer."""

import secrets

from tests.crash import attack_mail


def test_hostile_clients_neither_exhaust_the_server_nor_stop_a_good_one() -> None:
    few = attack_mail.AttackSizes(attack_s=0.5, unfinished_connections=100, wrong_passwords=3)
    seed = secrets.randbits(32)
    print(f"python -m tests.crash.run --only attack-mail --seed {seed}")
    tally = attack_mail.run(1, seed, lambda _: None, few)
    assert tally.acknowledged > 0
    assert tally.facts["refused"] > 0
    assert tally.ok, tally
