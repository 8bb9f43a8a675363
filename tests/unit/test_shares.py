"""Shares of what all callers of a server use, and the room for connections."""

import pytest

from postroom.errors import TooMany, Unavailable
from postroom.runtime.agents import Identity
from postroom.runtime.connections import Connections
from postroom.runtime.shares import Shares

BOSS = Identity("boss", "operator")
ONE, TWO, THREE = (Identity(name, "agent") for name in ("one", "two", "three"))


class Connection:
    closed = False

    def evict(self) -> None:
        self.closed = True


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


def test_what_is_given_back_can_be_taken_again() -> None:
    shares = Shares("things", total_max=2, each_max=1, reserve=0)
    for _ in range(3):
        shares.take(ONE)
        shares.give_back(ONE)
    assert shares.used == 0


def test_the_oldest_anonymous_connection_of_an_address_makes_room() -> None:
    room = Connections(64)
    assert (room.anonymous_max, room.anonymous_an_address_max) == (16, 8)
    quiet = Connection()
    room.open(quiet, "quiet")
    opened = [Connection() for _ in range(10)]
    for connection in opened:
        room.open(connection, "loud")
    assert [connection.closed for connection in opened] == [True] * 2 + [False] * 8
    assert not quiet.closed
    assert room.anonymous == 9


def test_the_address_with_the_most_anonymous_connections_makes_room() -> None:
    room = Connections(64)
    opened = [(Connection(), address) for address in ("a", "b", "c") for _ in range(8)]
    for connection, address in opened:
        room.open(connection, address)
    assert room.anonymous == 16
    assert {address for connection, address in opened if not connection.closed} == {"a", "b", "c"}
    for connection, address in opened:
        room.close(connection, address, None)
    assert room.anonymous == 0


def test_a_connection_with_a_token_is_not_closed_for_others() -> None:
    room = Connections(64)
    mine = Connection()
    room.open(mine, "here")
    room.identify(mine, "here", TWO)
    for _ in range(20):
        room.open(Connection(), "here")
    assert not mine.closed
    for _ in range(room.each_max):
        room.identify(Connection(), "here", ONE)
    with pytest.raises(TooMany):
        room.identify(Connection(), "here", ONE)
    room.close(mine, "here", TWO)
