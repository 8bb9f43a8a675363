"""Orders of operators on a full disk: they have space of their own."""

import asyncio
import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from postroom import Engine, Tasks
from postroom.errors import InvalidMessage, WriteFailed
from postroom.server.access.registry import Agents
from postroom.server.access.tokens import TokenRegistry
from postroom.stores.disk_reserve import (
    BLOCK_BYTES,
    CONTROL_RESERVE,
    CONTROL_RESERVE_BYTES,
    keep_control_reserve,
)
from tests.integration.commandline import isolate, postroom
from tests.integration.ups import Running, running
from tests.smalldisk import fill, small_disk
from tests.waiting import HANG_GUARD_S, until

__all__ = ["small_disk"]  # a fixture

REVOKED = 20


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    isolate(monkeypatch, tmp_path)
    yield
    monkeypatch.chdir("/")  # a disk that is a working folder cannot be unmounted


def post(up: Running, path: str, body: object = None) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {up.token}", "content-type": "application/json"}
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(up.http + path, data, headers)  # noqa: S310 - our own server
    try:
        with urllib.request.urlopen(request, timeout=HANG_GUARD_S) as answer:  # noqa: S310
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def order(up: Running, path: str, body: object = None) -> None:
    status, answer = post(up, path, body)
    assert status == HTTPStatus.ACCEPTED, answer


def enqueue(up: Running, size: int = 10) -> int:
    return post(up, "/queue/enqueue", {"agent": "triage", "payload": "x" * size})[0]


def dead_letter(data: Path) -> str:
    """Run a message that fails for good."""

    async def scenario() -> str:
        async with Engine.open(f"sqlite:///{data / 'queue.db'}") as engine:

            @engine.handler("tool_call")
            async def tool(_message: Any, _ctx: Any) -> Any:
                raise InvalidMessage("it never works")

            worker = asyncio.create_task(engine.run())
            await engine.submit(
                type="tool_call", org_id="acme", agent_id="planner", payload={}, max_retries=0
            )
            while not (letters := await engine.dlq.list()):  # noqa: ASYNC110 - a store has no event for it
                await asyncio.sleep(0.01)
            await engine.stop()
            await worker
            return letters[0].message_id

    return asyncio.run(scenario())


def use_up_the_room_of_completions(data: Path, disk: Path) -> None:
    """Complete tasks until the disk reserve of the store is gone, too."""
    with Tasks.open(f"sqlite:///{data / 'queue.db'}") as tasks:
        tasks.enqueue_many([{"agent": "busy", "payload": "x"}] * 100)
        claimed = tasks.claim(agent="busy", limit=100)
        fill(disk)
        try:
            for task in claimed:
                tasks.complete(task.task_id, task.lease, "y" * 50_000)
        except WriteFailed:
            fill(disk)
            return
    raise AssertionError("the reserve of the store was not used up")


def test_orders_of_operators_work_while_the_disk_is_full(small_disk: Path) -> None:
    data = small_disk / "run"
    with running(data) as up:
        made = [TokenRegistry(data).create("agent", "acme", f"a{n}") for n in range(REVOKED)]
        assert post(up, "/bus/news/messages", {"type": "FACT", "project_id": "p"})[0] == HTTPStatus.CREATED
        letter = dead_letter(data)
        use_up_the_room_of_completions(data, small_disk)
        assert enqueue(up, 500_000) == HTTPStatus.SERVICE_UNAVAILABLE
        for token in made[:-1]:
            order(up, f"/tokens/{token.token_id}/revoke")
            until(lambda token=token: up.get("/whoami", token.token)[0] == HTTPStatus.UNAUTHORIZED)  # type: ignore[misc]
            fill(small_disk)
        assert postroom("token", "revoke", made[-1].token_id, "--data", data).code == 0
        fill(small_disk)
        order(up, "/engine/pause", {"kill": True})
        fill(small_disk)
        order(up, "/engine/resume", {})
        fill(small_disk)
        order(up, "/engine/pause", {"org_id": "acme"})
        order(up, "/engine/dlq/purge", {"message_ids": [letter]})
        fill(small_disk)
        assert enqueue(up, 500_000) == HTTPStatus.SERVICE_UNAVAILABLE
        (small_disk / "filler").unlink()
        until(lambda: (data / CONTROL_RESERVE).stat().st_size == CONTROL_RESERVE_BYTES)
        assert enqueue(up) == HTTPStatus.CREATED
    assert postroom("verify", "--data", data).code == 0


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_up_starts_on_a_full_disk(small_disk: Path, end: signal.Signals) -> None:
    data = small_disk / "run"
    with running(data) as up:
        admin = up.token
        token = TokenRegistry(data).create("agent", "acme", "a")
        use_up_the_room_of_completions(data, small_disk)
        up.process.send_signal(end)
        up.process.wait(HANG_GUARD_S)
    fill(small_disk)
    with running(data) as up:
        up.token = admin
        assert {part["state"] for part in up.parts(data).values()} == {"running"}
        assert enqueue(up, 500_000) == HTTPStatus.SERVICE_UNAVAILABLE
        order(up, f"/tokens/{token.token_id}/revoke")
        order(up, "/engine/pause", {})
        (small_disk / "filler").unlink()
        until(lambda: enqueue(up) == HTTPStatus.CREATED)


def test_first_change_of_a_registry_makes_the_reserve(tmp_path: Path) -> None:
    Agents(tmp_path).add("triage")
    assert (tmp_path / CONTROL_RESERVE).stat().st_size == CONTROL_RESERVE_BYTES


def test_reserve_gives_up_only_what_an_order_needs(small_disk: Path) -> None:
    tokens = TokenRegistry(small_disk)
    made = [tokens.create("operator") for _ in range(3)]
    for token in made:
        fill(small_disk)
        tokens.revoke(token.token_id)
        assert (small_disk / CONTROL_RESERVE).stat().st_size > CONTROL_RESERVE_BYTES * 3 // 4
    (small_disk / "filler").unlink()
    keep_control_reserve(small_disk)
    assert (small_disk / CONTROL_RESERVE).stat().st_size == CONTROL_RESERVE_BYTES


def test_reserve_is_refilled_as_far_as_there_is_space(small_disk: Path) -> None:
    keep_control_reserve(small_disk)
    reserve = small_disk / CONTROL_RESERVE
    fill(small_disk)
    os.truncate(reserve, CONTROL_RESERVE_BYTES - 3 * BLOCK_BYTES)
    (small_disk / "order").write_bytes(bytes(BLOCK_BYTES))
    keep_control_reserve(small_disk)
    assert reserve.stat().st_size == CONTROL_RESERVE_BYTES - BLOCK_BYTES


def test_without_any_space_an_order_is_refused(small_disk: Path) -> None:
    tokens = TokenRegistry(small_disk)
    token = tokens.create("operator")
    (small_disk / CONTROL_RESERVE).unlink()
    fill(small_disk)
    with pytest.raises(WriteFailed, match="No space left on device"):
        tokens.revoke(token.token_id)
    assert [known.token_id for known in tokens.list()] == [token.token_id]
