"""Where the messages are: in a data folder, or on a server."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from postroom.cli.program import TOKEN_VARIABLE
from postroom.cli.render import warn
from postroom.cli.shell import Shell, StoreAddress
from postroom.cli.tasks.places import DATABASE

if TYPE_CHECKING:
    from postroom.client import EngineClient
    from postroom.goals.engine import Engine


class Folder:
    """The messages of a data folder."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._blocking = engine.blocking

    def submit(self, fields: dict[str, Any]) -> str:
        return self._blocking.submit(**fields).message_id

    def result(self, message_id: str, timeout_s: float) -> Any:
        return self._blocking.wait(self._engine.handle(message_id).result(timeout_s=timeout_s))

    def status(self) -> dict[str, Any]:
        return _builtins(self._blocking.status())

    def agents(self, org_id: str | None) -> list[dict[str, Any]]:
        return [_builtins(info) for info in self._blocking.agents(org_id)]

    def bounces(self, org_id: str | None, created_by: str | None) -> list[dict[str, Any]]:
        found = self._blocking.bounces.list(org_id, created_by=created_by)
        return [_builtins(bounce) for bounce in found]

    def bounces_done(self, keys: Sequence[str]) -> list[str]:
        return list(self._blocking.bounces.done(*keys))

    def tokens(self) -> dict[str, Any]:
        return _builtins(self._blocking.tokens.status())

    def explain(self, message_id: str) -> str:
        return self._blocking.explain(message_id)

    def cancel(self, message_id: str) -> None:
        self._blocking.cancel(message_id)

    def pause(self, **scope: Any) -> None:
        self._blocking.pause(**scope)

    def resume(self, **scope: Any) -> None:
        self._blocking.resume(**scope)

    def dead_letters(self, **filters: Any) -> list[dict[str, Any]]:
        from postroom.engine.dlq import as_json

        return [as_json(letter) for letter in self._blocking.dlq.list(**filters)]

    def dead_letter(self, message_id: str) -> dict[str, Any]:
        from postroom.engine.dlq import as_json

        return as_json(self._blocking.dlq.show(message_id))

    def replay(self, message_ids: list[str] | None, **options: Any) -> list[str]:
        return list(self._blocking.dlq.replay(message_ids, **options))

    def purge(self, message_ids: list[str] | None, **options: Any) -> list[str]:
        return list(self._blocking.dlq.purge(message_ids, **options))

    def goals(self) -> list[dict[str, Any]]:
        return [_builtins(one) for one in self._blocking.wait(self._engine.goals.list())]

    def goal(self, goal_id: str) -> dict[str, Any]:
        return _builtins(self._blocking.wait(self._engine.goals.status(goal_id)))

    def checkpoints(self, goal_id: str) -> list[dict[str, Any]]:
        return [_builtins(one) for one in self._blocking.wait(self._engine.goals.checkpoints(goal_id))]

    def decisions(self) -> list[dict[str, Any]]:
        return [_builtins(one) for one in self._blocking.wait(self._engine.decisions.list())]

    def decision(self, decision_id: str) -> dict[str, Any]:
        return _builtins(self._blocking.wait(self._engine.decisions.show(decision_id)))

    def answer(self, decision_id: str, choice: str) -> None:
        self._blocking.wait(self._engine.decisions.answer(decision_id, choice))

    def conflicts(self) -> dict[str, Any]:
        active = self._blocking.wait(self._engine.conflicts.active())
        waiting = self._blocking.wait(self._engine.conflicts.waiting())
        return {
            "active": [_builtins(one) for one in active],
            "waiting": [_builtins(one) for one in waiting],
        }


class Remote:
    """The messages of a server, over HTTP."""

    def __init__(self, client: "EngineClient") -> None:
        self._client = client

    def submit(self, fields: dict[str, Any]) -> str:
        return self._client.submit(**fields)

    def result(self, message_id: str, timeout_s: float) -> Any:
        return self._client.result(message_id, timeout_s)

    def status(self) -> dict[str, Any]:
        return self._client.status()

    def agents(self, org_id: str | None) -> list[dict[str, Any]]:
        return self._client.agents(org_id)

    def bounces(self, org_id: str | None, created_by: str | None) -> list[dict[str, Any]]:
        return self._client.bounces.list(org_id, created_by=created_by)

    def bounces_done(self, keys: Sequence[str]) -> list[str]:
        return self._client.bounces.done(*keys)

    def tokens(self) -> dict[str, Any]:
        return self._client.tokens()

    def explain(self, message_id: str) -> str:
        return self._client.explain(message_id)

    def cancel(self, message_id: str) -> None:
        self._client.cancel(message_id)

    def pause(self, **scope: Any) -> None:
        self._client.pause(**scope)

    def resume(self, **scope: Any) -> None:
        self._client.resume(**scope)

    def dead_letters(self, **filters: Any) -> list[dict[str, Any]]:
        return self._client.dlq.list(**filters)

    def dead_letter(self, message_id: str) -> dict[str, Any]:
        return self._client.dlq.show(message_id)

    def replay(self, message_ids: list[str] | None, **options: Any) -> list[str]:
        return self._client.dlq.replay(message_ids, **options)

    def purge(self, message_ids: list[str] | None, **options: Any) -> list[str]:
        return self._client.dlq.purge(message_ids, **options)

    def goals(self) -> list[dict[str, Any]]:
        return list(self._client.request("GET", "/engine/goals")["goals"])

    def goal(self, goal_id: str) -> dict[str, Any]:
        return dict(self._client.request("GET", f"/engine/goals/{_quoted(goal_id)}"))

    def checkpoints(self, goal_id: str) -> list[dict[str, Any]]:
        answer = self._client.request("GET", f"/engine/goals/{_quoted(goal_id)}/checkpoints")
        return list(answer["checkpoints"])

    def decisions(self) -> list[dict[str, Any]]:
        return list(self._client.request("GET", "/engine/decisions")["decisions"])

    def decision(self, decision_id: str) -> dict[str, Any]:
        return dict(self._client.request("GET", f"/engine/decisions/{_quoted(decision_id)}"))

    def answer(self, decision_id: str, choice: str) -> None:
        path = f"/engine/decisions/{_quoted(decision_id)}/answer"
        self._client.request("POST", path, {"choice": choice})

    def conflicts(self) -> dict[str, Any]:
        return dict(self._client.request("GET", "/engine/conflicts"))


def _quoted(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe="")


def _builtins(struct: Any) -> dict[str, Any]:
    import msgspec

    return dict(msgspec.to_builtins(struct))


# ---- opening -------------------------------------------------------------------------------------------


@contextmanager
def open_place(
    shell: Shell,
    data: Path | None,
    url: str | None,
    token: str | None,
    *,
    app: str | None = None,
    create: bool = False,
) -> Iterator[Folder | Remote]:
    data = shell.default_place(data, url, app)
    if data is not None and url is not None:
        raise click.UsageError("--data and --url name two places for the messages: give one of them")
    if data is None and url is None and app is None:
        raise click.UsageError("say where the messages are: --data DIR, or --url URL with --token TOKEN")
    if url is None:
        shell.show_warnings()
        with open_engine(shell, data, app, create=create) as engine:
            yield Folder(engine)
        return
    if app is not None:
        raise click.UsageError("--app is not for --url: a server knows its types and rules itself")
    with open_client(url, token) as client:
        yield Remote(client)


def open_engine(shell: Shell, data: Path | None, app: str | None, *, create: bool) -> "Engine":
    """The engine of a data folder, with the types and the rules of an app; else the app's own engine."""
    from postroom.goals.engine import Engine

    if data is None:
        from postroom.server.harness.engine_workers import load_app

        return load_app(str(app))
    store = store_in(shell, data, create=create)
    if app is None:
        return Engine.open(store)
    from postroom.server.harness.engine_workers import load_app
    from postroom.stores.open import open_store

    return load_app(app).on(open_store(store))


def store_in(shell: Shell, data: Path, *, create: bool) -> str:
    """The address of the store of a data folder."""
    place = shell.store_place(data)
    if isinstance(place, StoreAddress):
        return place.url
    database = data / DATABASE
    if not database.exists():
        if not create:
            from postroom.server.folder.layout import nothing_in

            raise nothing_in(data, "messages")
        warn(shell.program, f"warning: there was no store in {data}: a new one is made")
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
    return f"sqlite:///{database}"


def open_client(url: str, token: str | None) -> "EngineClient":
    from postroom.client import EngineClient

    token = token or os.environ.get(TOKEN_VARIABLE)
    if not token:
        raise click.UsageError(f"--url needs a token: pass --token, or set {TOKEN_VARIABLE}")
    return EngineClient(url, token)
