"""What tools of MCP cost: waits are counted, inboxes are read once, answers have a limited length."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom import Tasks
from postroom.calls.agents import Beat, ReadInbox, Send
from postroom.calls.messages import Submit
from postroom.calls.verb import Verb
from postroom.errors import InvalidMessage, NotAllowed, TooMany
from postroom.mcp.backend import LocalBackend
from postroom.mcp.excerpts import ANSWER_CHARS_MAX, in_lines, labelled
from postroom.mcp.resources import RESOURCE_CHARS_MAX, read
from postroom.mcp.tools import (
    ClaimArguments,
    ReplyArguments,
    ResultArguments,
    WaitForArguments,
    claim,
    reply,
    result,
    wait_for,
)
from postroom.server.access.registry import Agents, Identity
from postroom.server.access.tokens import TokenRegistry
from postroom.server.app import TasksApp, create_app
from postroom.server.http.task_server import STREAMS_A_TOKEN_MAX, TaskServer
from tests.waiting import HANG_GUARD_S, eventually


class Recording(LocalBackend):
    """A backend that notes the inbox pages that it read."""

    pages: list[list[str]]

    async def ask(self, verb: Verb, **options: Any) -> Any:
        found = await super().ask(verb, **options)
        if isinstance(verb, ReadInbox) and verb.peek and found["messages"]:
            self.pages.append([line["key"] for line in found["messages"]])
        return found


@pytest.fixture
def app(tmp_path: Path) -> Iterator[TasksApp]:
    data = tmp_path / "run"
    data.mkdir()
    with Tasks.open(f"sqlite:///{data / 'queue.db'}") as tasks:
        yield create_app(data, tasks, agents=Agents(data))


def backend_of(app: TasksApp, name: str) -> Recording:
    agents = app.running_server().agents
    token = agents.add(name, org="acme")
    identity = agents.identify(token)
    assert identity is not None
    found = Recording(app, identity, token=token)
    found.pages = []
    return found


async def asked(ada: Recording, bob: Recording, text: str) -> str:
    await bob.ask(Beat(agent_id="bob"))
    question = Send(agent_id="ada", to="bob", payload={"kind": "question", "body": text})
    return str((await ada.ask(question))["message_id"])


def test_a_tool_that_waits_counts_as_a_stream_and_reads_each_message_once(app: TasksApp) -> None:
    async def story() -> None:
        async with app.router.lifespan_context(app):
            ada, bob = backend_of(app, "ada"), backend_of(app, "bob")
            question_id = await asked(ada, bob, "why?")
            for number in range(3):
                await bob.ask(Send(agent_id="bob", to="ada", payload=f"{number}"))
            waits = [
                asyncio.ensure_future(wait_for(ada, WaitForArguments(id=question_id, wait_s=30)))
                for _ in range(STREAMS_A_TOKEN_MAX)
            ]
            share = app.running_server().stream_share
            await eventually(lambda: share.used == STREAMS_A_TOKEN_MAX and len(ada.pages) == len(waits))
            with pytest.raises(TooMany, match="event streams"):
                await wait_for(ada, WaitForArguments(id=question_id, wait_s=30))
            for one in waits[1:]:
                one.cancel()
            await asyncio.wait(waits[1:])
            ada.pages.clear()
            await reply(bob, ReplyArguments(message_id=question_id, body="because"))
            assert (await waits[0])["body"] == "because"
            assert [len(keys) for keys in ada.pages] == [1]
            assert share.used == 0

    asyncio.run(story())


@pytest.mark.parametrize("is_revoked", [True, False])
@pytest.mark.parametrize("tool", ["inbox", "question", "message", "claim"])
def test_a_tool_that_waits_ends_with_its_token(app: TasksApp, tool: str, *, is_revoked: bool) -> None:
    """The token is revoked by another process, or expires."""

    async def story() -> None:
        async with app.router.lifespan_context(app):
            server = app.running_server()
            ada, bob = backend_of(app, "ada"), backend_of(app, "bob")
            question_id = await asked(ada, bob, "why?")
            message = Submit(type="tool_call", payload={}, delay_s=3600)
            message_id = (await ada.ask(message))["message_id"]
            tokens = TokenRegistry(server.agents.data)
            made = tokens.create("agent", "acme", "ada", expires_s=None if is_revoked else 2.0)
            ending = LocalBackend(app, identified(server, made.token), token=made.token)
            waits = {
                "inbox": lambda: wait_for(ending, WaitForArguments(wait_s=30)),
                "question": lambda: wait_for(ending, WaitForArguments(id=question_id, wait_s=30)),
                "message": lambda: wait_for(ending, WaitForArguments(id=message_id, wait_s=30)),
                "claim": lambda: claim(ending, ClaimArguments(wait_s=30)),
            }
            waiting = asyncio.ensure_future(waits[tool]())
            shares = server.stream_share, server.poll_share
            await eventually(lambda: sum(share.used for share in shares) == 1)
            if is_revoked:
                tokens.revoke(made.token_id)
            with pytest.raises(NotAllowed, match="the token has expired or was revoked"):
                await asyncio.wait_for(waiting, HANG_GUARD_S)
            assert [share.used for share in shares] == [0, 0]

    asyncio.run(story())


def identified(server: TaskServer, token: str) -> Identity:
    identity = server.agents.identify(token)
    assert identity is not None
    return identity


def test_a_long_message_is_clipped_read_in_parts_and_refused_as_a_resource(app: TasksApp) -> None:
    async def story() -> None:
        async with app.router.lifespan_context(app):
            ada = backend_of(app, "ada")
            text = "".join(map(str, range(RESOURCE_CHARS_MAX // 6)))
            payload = {"text": text[:30_000]}
            long = (await ada.ask(Submit(type="tool_call", payload=payload)))["message_id"]
            first = await result(ada, ResultArguments(id=long, part=1))
            parts = [
                (await result(ada, ResultArguments(id=long, part=number)))["text"]
                for number in range(1, first["parts"] + 1)
            ]
            assert json.loads("".join(parts))["message"]["payload"] == payload
            assert all(len(in_lines(labelled({"text": part}))) <= ANSWER_CHARS_MAX for part in parts)
            longer = (await ada.ask(Submit(type="tool_call", payload={"text": text * 2})))["message_id"]
            with pytest.raises(InvalidMessage, match="MCP gives at most 2097152"):
                await read(ada, f"postroom://messages/{longer}")
            short = (await ada.ask(Submit(type="tool_call", payload={})))["message_id"]
            assert json.loads(await read(ada, f"postroom://messages/{short}"))["message"]["payload"] == {}

    asyncio.run(story())
