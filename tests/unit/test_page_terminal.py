"""The overview in a terminal: the lines that fit, without control characters of names."""

import asyncio

from postroom import Engine
from postroom.page.terminal import StoreReader, drawn, without_colors


def lines_of(columns: int = 100, lines: int = 40, where: str = "run") -> list[str]:
    async def submit(engine: Engine) -> None:
        for priority in (0, 1, 1, 3):
            await engine.submit(type="tool_call", org_id="acme", payload={}, priority=priority)

    with Engine.open("memory://") as engine:
        asyncio.run(submit(engine))
        return drawn(StoreReader(engine.store, engine.policy).snapshot(), where, columns, lines)


def test_the_depth_of_each_lane_is_shown() -> None:
    rows = [without_colors(line).split() for line in lines_of()]
    assert ["acme", "1", "2", "0", "1", "4", "0", "0", "0", "0", "0"] in rows
    assert ["workers", "0", "(wanted", "1),", "0", "of", "0", "slots", "busy"] in rows


def test_delayed_messages_are_counted_apart_from_waiting_ones() -> None:
    with Engine.open("memory://") as engine:
        asyncio.run(engine.submit(type="tool_call", org_id="acme", payload={}, delay_s=60))
        shown = StoreReader(engine.store, engine.policy).snapshot()
    lines = [without_colors(line) for line in drawn(shown, "run", 100, 40)]
    assert lines[1].startswith("waiting 0   delayed 1 ")
    assert ["acme", "0", "0", "0", "0", "0", "1", "0", "0"] in [line.split()[:9] for line in lines]


def test_no_line_is_wider_and_no_view_longer_than_the_terminal() -> None:
    for columns, lines in ((10, 5), (40, 3), (200, 60)):
        found = lines_of(columns, lines)
        assert len(found) <= lines
        assert max(len(without_colors(line)) for line in found) <= columns


def test_a_name_cannot_change_the_terminal() -> None:
    assert "run?[2J" in without_colors(lines_of(where="run\x1b[2J")[0])


def test_each_event_is_counted_once() -> None:
    with Engine.open("memory://") as engine:
        reader = StoreReader(engine.store, engine.policy)
        asyncio.run(engine.submit(type="tool_call", org_id="acme", payload={}))
        reader.snapshot()
        facts = reader.snapshot()
        later_us = round(facts.at.timestamp() * 1_000_000) + 1_000_000  # the second is over then
        assert sum(second.submitted for second in reader.activity.history(later_us)) == 1
