"""Which refused calls become events, and the rate of calls that a token may make."""

import asyncio
from typing import Any

from postroom import Tasks
from postroom.core.call_limits import RefusalWindow, allowance
from postroom.server.access.refusal_events import (
    CLIENTS_MAX,
    EVENTS_ALL_MAX,
    EVENTS_EACH_MAX,
    RefusalEvents,
    RefusedCall,
)
from postroom.server.access.registry import Identity
from postroom.server.telemetry.server_log import ServerLog

NOBODY = Identity("", "agent")


def window(each_max: int = 2, all_max: int = 10, clients_max: int = 3) -> "RefusalWindow[int]":
    return RefusalWindow(each_max=each_max, all_max=all_max, clients_max=clients_max)


def test_a_caller_without_a_token_is_its_network() -> None:
    def client(address: str) -> str:
        return RefusedCall(NOBODY, address, "http", "connect", 400, "TlsFailed", "why").client

    assert client("[2001:db8::1]:1") == client("2001:db8::2:7") == "address:2001:db8::/64"
    assert client("192.0.2.1:5") == "address:192.0.2.1"


def test_each_client_has_a_few_events_and_one_sum() -> None:
    refusals = window()
    assert [refusals.add("acme", "a", number) for number in range(5)] == [True, True, False, False, False]
    assert refusals.add("acme", "b", 7)
    assert [(one.last, one.calls, one.is_shared) for one in refusals.end()] == [(4, 3, False)]
    assert refusals.add("acme", "a", 0)
    assert refusals.end() == []


def test_many_clients_share_one_sum_and_the_total_is_bounded() -> None:
    refusals = window(each_max=1, all_max=4, clients_max=3)
    events = sum(refusals.add(f"org-{number}", f"client-{number}", number) for number in range(1_000))
    sums = refusals.end()
    assert events == 4
    assert len(sums) == 4
    assert sum(one.calls for one in sums) == 996
    assert [one.is_shared for one in sums] == [False, False, False, True]


def test_one_organization_uses_half_of_the_events_and_sums() -> None:
    refusals = window(each_max=1, all_max=4, clients_max=4)
    flood = [refusals.add("flood", f"client-{number}", number) for number in range(100)]
    assert flood == [True, True] + [False] * 98
    assert [refusals.add("acme", "a", number) for number in range(3)] == [True, False, False]
    assert [(one.last, one.calls, one.is_shared) for one in refusals.end()] == [
        (2, 1, False), (3, 1, False), (99, 96, True), (2, 2, False),
    ]  # fmt: skip


def test_a_flood_of_refused_calls_makes_few_events_that_count_every_call() -> None:
    written: list[dict[str, Any]] = []

    async def run() -> None:
        with Tasks.open("memory://") as tasks:

            def submit(call: Any, _identity: Identity) -> "asyncio.Future[Any]":
                future = asyncio.get_running_loop().create_future()
                future.set_result(tasks.run_many([call]))
                return future

            refusals = RefusalEvents(submit, ServerLog())
            for number in range(10_000):
                client = f"10.0.{number % 100}.1:5"
                refusals.note(
                    RefusedCall(
                        Identity("", "agent"), client, "http", "GET /x", 401, "Unauthorized", "w" * 500
                    )
                )
            await refusals.close()
            written.extend({"error": one.error, **one.detail} for one in tasks.store.events())

    asyncio.run(run())
    assert len(written) <= EVENTS_ALL_MAX + CLIENTS_MAX + 1
    assert sum(event.get("refused", 1) for event in written) == 10_000
    assert max(len(event["error"]) for event in written) <= 200
    assert EVENTS_EACH_MAX < EVENTS_ALL_MAX


def test_rate_allows_a_burst_of_one_second_then_single_calls() -> None:
    found = allowance(0.0, 5.0, 8, 100.0)
    assert found.calls == 5
    assert allowance(found.paid_until_s, 5.0, 1, 100.0).calls == 0
    later = allowance(found.paid_until_s, 5.0, 3, 100.2)
    assert later.calls == 1
    assert 0 < allowance(later.paid_until_s, 5.0, 1, 100.25).wait_s <= 0.2


def test_a_rate_below_one_allows_one_call() -> None:
    found = allowance(0.0, 0.1, 1, 100.0)
    assert found.calls == 1
    assert allowance(found.paid_until_s, 0.1, 1, 109.0).calls == 0
    assert allowance(found.paid_until_s, 0.1, 1, 110.0).calls == 1
