"""Shares of a resource that all callers of a server use."""

import pytest

from postroom.errors import TooMany, Unavailable
from postroom.server.access.registry import Identity
from postroom.server.access.shares import Shares

BOSS = Identity("boss", "operator")
ONE, TWO, THREE = (Identity(name, "agent") for name in ("one", "two", "three"))


def test_one_agent_has_a_share_and_operators_have_a_reserve() -> None:
    shares = Shares("things", total_max=10, each_max=4, reserve=3)
    shares.take(ONE, 4)
    with pytest.raises(TooMany, match="'one' may have at most 4 things"):
        shares.take(ONE)
    shares.take(TWO, 3)
    with pytest.raises(Unavailable, match="at most 7 things") as caught:
        shares.take(THREE)
    assert not isinstance(caught.value, TooMany)
    shares.take(BOSS, 3)
    with pytest.raises(Unavailable, match="at most 10 things"):
        shares.take(BOSS)
    shares.give_back(ONE, 2)
    shares.take(BOSS, 2)
    assert shares.used == 10


def test_returned_units_can_be_taken_again() -> None:
    shares = Shares("things", total_max=2, each_max=1, reserve=0)
    for _ in range(3):
        shares.take(ONE)
        shares.give_back(ONE)
    assert shares.used == 0


def test_agents_of_the_same_name_in_two_organizations_have_own_shares() -> None:
    shares = Shares("things", total_max=10, each_max=1, reserve=0)
    twins = [Identity("ada", "agent", org=org) for org in ("acme", "other")]
    for twin in twins:
        shares.take(twin)
    for twin in twins:
        with pytest.raises(TooMany):
            shares.take(twin)
        shares.give_back(twin)
    assert shares.used == 0


def test_an_organization_leaves_half_of_what_agents_may_use() -> None:
    shares = Shares("things", total_max=10, each_max=4, reserve=2)
    for name in "abcd":
        shares.take(Identity(name, "agent", org="acme"))
    with pytest.raises(TooMany, match="'acme' may have at most 4 things"):
        shares.take(Identity("e", "agent", org="acme"))
    with pytest.raises(TooMany, match="'acme' may have at most 4 things"):
        shares.take(Identity("chief", "operator", org="acme"))
    shares.take(Identity("a", "agent", org="other"), 4)
    shares.give_back(Identity("a", "agent", org="acme"))
    shares.give_back(Identity("a", "agent", org="other"))
    shares.take(Identity("e", "agent", org="acme"))


def test_agents_without_an_organization_have_no_common_share() -> None:
    shares = Shares("things", total_max=10, each_max=4, reserve=2)
    for who in (ONE, TWO):
        shares.take(who, 4)
    assert shares.used == 8
