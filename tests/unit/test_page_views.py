"""The pure parts of the live page: batches of events, patterns and previews of dead letters, trees, lists."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from msgspec import json

from postroom import Engine
from postroom.core.lifecycle import lifecycle
from postroom.engine import dlq
from postroom.engine.dlq import DeadLetter, FoundLetters
from postroom.engine.inspection import BreakerStatus, EngineStatus
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.routes import HandlerRoute
from postroom.message import Event
from postroom.page import messages
from postroom.page.letters import patterns, preview
from postroom.page.live import Batch, happenings_of
from postroom.page.messages import tree
from postroom.page.reports import REPORT_BYTES_MAX, Files, content_of, files_in, is_stale
from postroom.server.http.exchange import Refusal
from postroom.stores.base import ByIds
from tests.waiting import HANG_GUARD_S

IDLE = EngineStatus({}, 0, 0, {}, 0, {}, [])


def event(number: int, queue: str, kind: str = "created") -> Event:
    return Event(number, 0, kind, queue, f"m{number}", "QUEUED")  # type: ignore[arg-type]


def seen(batch: Batch, org_id: str | None) -> list[str]:
    data = batch.encoded(org_id)
    return [] if not data else [one["message_id"] for one in json.decode(data.split(b"data: ")[1])["events"]]


def test_a_batch_holds_only_what_its_reader_may_see() -> None:
    events = [event(1, "org:a"), event(2, "org:b"), event(3, "ada"), event(4, "org:a", "heartbeat")]
    batch = Batch(0, 4, "place", happenings_of(events, str))
    assert seen(batch, None) == ["m1", "m2", "m3"]
    assert (seen(batch, "a"), seen(batch, "b"), seen(batch, "c"), seen(batch, "")) == (["m1"], ["m2"], [], [])
    assert batch.encoded(None).startswith(b"id: place\nevent: events\n")
    assert b'"skipped":true' in Batch(
        0, 9, "", happenings_of([event(9, "org:b")], str), skipped=True
    ).encoded("a")


def letter(
    number: int, error_type: str, state: str = "DEAD_LETTER", *, can_replay: bool = True
) -> DeadLetter:
    errors: Any = [{"attempt": 1, "error_type": error_type, "error": f"text {number}"}]
    original = {"org_id": "a", "type": "call"}
    return DeadLetter(f"m{number}", original, "", errors, can_replay, f"2026-01-0{number}", state)


def test_dead_letters_of_the_same_error_are_one_pattern() -> None:
    found = patterns([letter(1, "A"), letter(2, "B"), letter(3, "B", "QUARANTINED")])
    assert [(one.error_type, one.count, one.quarantined, one.newest) for one in found] == [
        ("B", 2, 1, "2026-01-03"),
        ("A", 1, 0, "2026-01-01"),
    ]
    assert found[0].error == "text 3"


def test_a_preview_says_what_stays_and_what_holds_messages_up() -> None:
    letters = [letter(1, "A"), letter(2, "A", "QUARANTINED"), letter(3, "A", can_replay=False)]
    status = EngineStatus({}, 0, 0, {}, 0, {"mail": BreakerStatus("open", 12.0)}, [])
    found = preview(letters, status, [("a", "")], {"call": [HandlerRoute("mail")]}, is_named=False)
    assert (found.message_ids, found.kinds) == (["m1"], {"a: call": 1})
    assert sum(found.left_out.values()) == 2
    assert len(found.notes) == 3
    assert preview(letters, IDLE, [], {}, is_named=True).message_ids == ["m1", "m2"]
    assert preview([], IDLE, [], {}, is_named=False).notes == []


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    with Engine.open(f"sqlite:///{tmp_path / 'queue.db'}") as found:
        yield found


def wait(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def submitted(engine: Engine, count: int, org_id: str = "a", **fields: Any) -> list[str]:
    message: Any = {"type": "tool_call", "org_id": org_id, "payload": {}, **fields}
    return [handle.message_id for handle in wait(engine.submit_many([message] * count))]


def test_dead_letter_search_stops_at_its_bound_and_continues(engine: Engine) -> None:
    ids = submitted(engine, 6)
    engine.store.write(
        lambda transaction: transaction.apply(
            ByIds(tuple(ids)), lambda record, moment: lifecycle.quarantine(record, moment, "it is bad")
        )
    )

    def search(looked_max: int, **filters: Any) -> FoundLetters:
        wanted = dlq.checked_filters(filters)
        return engine.store.read(lambda t: dlq.search(Operations(t, engine.policy), wanted, looked_max))

    assert search(4, type="none")[:2] == ([], ids[3])  # a million that do not fit cost four
    assert search(4, type="none", after=ids[3]) == FoundLetters([], "", 0)
    found = search(100, limit=2)
    assert ([letter.message_id for letter in found.letters], found.last) == (ids[:2], ids[1])


def test_the_tree_of_a_message_has_its_ancestors_and_descendants(engine: Engine) -> None:
    handles: list[Any] = []

    @engine.handler("tool_call")
    async def call(message: Any, ctx: Any) -> None:
        children = message.payload["children"]
        for number in range(children):
            payload = {"children": children - 1, "n": number}
            handles.append(await ctx.submit(type="tool_call", payload=payload))

    async def story() -> str:
        root = await engine.submit(type="tool_call", org_id="a", payload={"children": 2})
        worker = asyncio.create_task(engine.run())
        await root.result(timeout_s=HANG_GUARD_S)
        for handle in handles:  # each one has added its children by then
            await handle.result(timeout_s=HANG_GUARD_S)
        await engine.stop()
        await worker
        return root.message_id

    root = wait(story())

    def nodes(message_id: str) -> list[tuple[str, int]]:
        def work(transaction: Any) -> list[messages.TreeNode]:
            operations = Operations(transaction, engine.policy)
            return tree(operations, operations.loaded(message_id))

        return [(node.message_id, node.depth) for node in engine.store.read(work)]

    whole = nodes(root)
    assert [depth for _, depth in whole] == [0, 1, 2, 1, 2]
    leaf = whole[2][0]
    assert nodes(leaf) == [(root, 0), (whole[1][0], 1), (leaf, 2)]


def test_a_report_is_stale_when_tables_are_newer(tmp_path: Path) -> None:
    assert not is_stale(files_in(tmp_path), None)
    (tmp_path / "tables" / "gold_flow" / "_delta_log").mkdir(parents=True)
    assert is_stale(files_in(tmp_path), None)
    (tmp_path / "report.html").write_text("")
    assert not is_stale(files_in(tmp_path), None)
    later = Files(tables=20.0, report=30.0)  # the tables have changed while the report was written
    assert (is_stale(later, None), is_stale(later, 10.0), is_stale(later, 20.0)) == (False, True, False)


def test_a_report_that_is_a_symlink_is_not_a_report(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not for the page")
    data = tmp_path / "run"
    (data / "tables" / "gold_flow" / "_delta_log").mkdir(parents=True)
    report = data / "report.html"
    report.symlink_to(secret)
    assert is_stale(files_in(data), None)  # a new report replaces the link
    with pytest.raises(Refusal, match="is a symlink") as refused:
        content_of(report)
    assert refused.value.status == 404
    report.unlink()
    report.write_text("<html>")
    assert content_of(report) == b"<html>"


def test_a_report_that_is_too_long_is_not_served(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    with report.open("wb") as file:
        file.truncate(REPORT_BYTES_MAX + 1)
    with pytest.raises(Refusal, match="there is no report"):
        content_of(report)
