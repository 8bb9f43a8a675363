"""Turns of organizations and tokens, and threads that work in turns."""

import asyncio
import threading
from collections.abc import Iterator
from itertools import count

import pytest

from postroom.server.access.registry import Identity
from postroom.server.access.turns import SharedThreads, Turns
from tests.waiting import HANG_GUARD_S


def token(name: str, org: str = "acme") -> Identity:
    return Identity(name, "agent", org=org)


ADA, BOB, EVE, BOSS = token("ada"), token("bob"), token("eve", "umbrella"), Identity("boss", "operator")


def taken(turns: "Turns[str]") -> Iterator[str]:
    while (item := turns.take(lambda _: True)) is not None:
        yield item


def test_organizations_take_turns_and_in_theirs_the_tokens_of_each() -> None:
    turns: Turns[str] = Turns()
    for number in (1, 2):
        for identity in (ADA, BOB, EVE, BOSS):
            turns.add(identity, f"{identity.name}{number}")
    assert turns
    assert [*taken(turns)] == ["ada1", "eve1", "boss1", "bob1", "eve2", "boss2", "ada2", "bob2"]
    assert not turns


def test_what_does_not_fit_keeps_its_turn() -> None:
    turns: Turns[str] = Turns()
    for identity, item in ((ADA, "large"), (BOB, "small"), (EVE, "other")):
        turns.add(identity, item)
    assert turns.take(lambda item: item != "large", without={"acme"}) == "other"
    assert turns.take(lambda item: item != "large") == "small"
    assert turns.take(lambda item: item != "large") is None
    assert [*taken(turns)] == ["large"]


async def within_limit(waiting: "asyncio.Future[str]") -> str:
    return await asyncio.wait_for(waiting, HANG_GUARD_S)


@pytest.mark.parametrize(("threads", "a_token"), [(2, 1), (8, 2)])
def test_one_organization_leaves_threads_to_others(threads: int, a_token: int) -> None:
    async def main() -> None:
        shared, gate = SharedThreads("test", threads, a_token), threading.Event()
        flood = [
            shared.run(token(f"t{number}"), lambda: gate.wait(HANG_GUARD_S)) for number in range(2 * threads)
        ]
        try:
            for identity in (EVE, BOSS):
                assert await within_limit(shared.run(identity, lambda: "done")) == "done"
            assert not any(call.done() for call in flood)
        finally:
            gate.set()
        assert all(await asyncio.gather(*flood))
        shared.close()

    asyncio.run(main())


def test_one_token_leaves_threads_to_its_organization() -> None:
    async def main() -> None:
        shared, gate = SharedThreads("test", 8, 2), threading.Event()
        flood = [shared.run(ADA, lambda: gate.wait(HANG_GUARD_S)) for _ in range(8)]
        assert await within_limit(shared.run(BOB, lambda: "done")) == "done"
        gate.set()
        await asyncio.gather(*flood)
        shared.close()

    asyncio.run(main())


def test_errors_reach_their_caller_and_callers_that_have_left_have_no_turn() -> None:
    async def main() -> None:
        shared, gate, ran = SharedThreads("test", 2, 1), threading.Event(), count()
        first = shared.run(ADA, lambda: gate.wait(HANG_GUARD_S))
        left = shared.run(ADA, lambda: next(ran))
        wrong = shared.run(ADA, lambda: int("x"))
        left.cancel()
        gate.set()
        assert await first
        with pytest.raises(ValueError, match="invalid literal"):
            await wrong
        assert next(ran) == 0
        shared.close()

    asyncio.run(main())
