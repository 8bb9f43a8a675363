"""Which connections of a server are closed when there are too many."""

import pytest

from postroom.errors import TooMany
from postroom.server.access.registry import Identity
from postroom.server.http.connections import ConnectionLimits

ONE, TWO = (Identity(name, "agent") for name in ("one", "two"))


class Connection:
    closed = False

    def evict(self) -> None:
        self.closed = True


def test_the_oldest_anonymous_connection_of_an_address_is_evicted() -> None:
    connections = ConnectionLimits(64)
    assert (connections.anonymous_max, connections.anonymous_an_address_max) == (16, 8)
    quiet = Connection()
    connections.open(quiet, "quiet")
    opened = [Connection() for _ in range(10)]
    for connection in opened:
        connections.open(connection, "loud")
    assert [connection.closed for connection in opened] == [True] * 2 + [False] * 8
    assert not quiet.closed
    assert connections.anonymous == 9


def test_the_address_with_the_most_anonymous_connections_is_evicted_first() -> None:
    connections = ConnectionLimits(64)
    opened = [(Connection(), address) for address in ("a", "b", "c") for _ in range(8)]
    for connection, address in opened:
        connections.open(connection, address)
    assert connections.anonymous == 16
    assert {address for connection, address in opened if not connection.closed} == {"a", "b", "c"}
    for connection, address in opened:
        connections.close(connection, address, None)
    assert connections.anonymous == 0


def test_addresses_of_one_ipv6_network_are_one_client() -> None:
    connections = ConnectionLimits(64)
    quiet = [(Connection(), address) for address in ("2001:db8:0:1::1", "192.0.2.1")]
    loud = [(Connection(), f"2001:db8:0:2::{number:x}") for number in range(20)]
    for connection, address in (*quiet, *loud):
        connections.open(connection, address)
    assert not any(connection.closed for connection, _ in quiet)
    assert [connection.closed for connection, _ in loud] == [True] * 12 + [False] * 8
    for connection, address in (*quiet, *loud):
        connections.close(connection, address, None)
    assert connections.anonymous == 0


def test_a_connection_with_a_token_is_not_closed_for_others() -> None:
    connections = ConnectionLimits(64)
    mine = Connection()
    connections.open(mine, "here")
    connections.identify(mine, "here", TWO)
    for _ in range(20):
        connections.open(Connection(), "here")
    assert not mine.closed
    for _ in range(connections.each_max):
        connections.identify(Connection(), "here", ONE)
    with pytest.raises(TooMany):
        connections.identify(Connection(), "here", ONE)
    connections.close(mine, "here", TWO)
