"""Where the messages are: in a data folder, or on a server."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from postroom.cli.engine.options import default_data_option, where_options
from postroom.cli.places import check_place, needed_token, store_in
from postroom.cli.shell import Shell

if TYPE_CHECKING:
    from postroom.calls.verb import Verb
    from postroom.client import EngineClient
    from postroom.goals.engine import BlockingEngine, Engine


Place: TypeAlias = "BlockingEngine | EngineClient"
"""The messages of a data folder, or of a server. Both have the same verbs."""


def plain(answer: Any) -> Any:
    """An answer of a place as JSON values: a folder gives structs, a server decoded JSON."""
    import msgspec

    return msgspec.to_builtins(answer)


def call(place: Place, verb: "Verb") -> Any:
    """The answer to a verb that names a method of the engine, as JSON values."""
    from operator import attrgetter

    import msgspec

    from postroom.client import EngineClient

    if isinstance(place, EngineClient):
        return place.call(verb)
    given = {
        name: value for name, value in msgspec.structs.asdict(verb).items() if value is not msgspec.UNSET
    }
    return plain(attrgetter(verb.route.engine)(place)(**given))


# The verbs whose answers differ in more than their types.


def submitted(place: Place, fields: dict[str, Any]) -> str:
    """Submit a message and return its id."""
    stored = place.submit(**fields)
    return stored if isinstance(stored, str) else stored.message_id


def result_of(place: Place, message_id: str, timeout_s: float) -> Any:
    """Wait for the result of a message."""
    from postroom.client import EngineClient

    if isinstance(place, EngineClient):
        return place.result(message_id, timeout_s)
    return place.wait(place.of.handle(message_id).result(timeout_s=timeout_s))


def token_budgets(place: Place) -> dict[str, Any]:
    """The token budgets of models."""
    from postroom.client import EngineClient

    found: dict[str, Any] = plain(
        place.tokens() if isinstance(place, EngineClient) else place.tokens.status()
    )
    return found


def conflicts_of(place: Place) -> dict[str, Any]:
    """The operations that are under way, and the messages that wait for them."""
    from postroom.client import EngineClient

    if isinstance(place, EngineClient):
        return place.conflicts()
    return {"active": plain(place.conflicts.active()), "waiting": plain(place.conflicts.waiting())}


# ---- opening -------------------------------------------------------------------------------------------


def on_place(run: Callable[..., None], *, create: bool = False) -> Callable[..., None]:
    """A command on the messages of a data folder or of a server: it gets the shell and the place."""

    def command(
        shell: Shell, data: Path | None, url: str | None, token: str | None, **arguments: Any
    ) -> None:
        with open_place(shell, data, url, token, create=create) as place:
            run(shell, place, **arguments)

    return where_options(click.pass_obj(functools.update_wrapper(command, run)))


def on_folder(run: Callable[..., None]) -> Callable[..., None]:
    """A command on the engine of an existing data folder: it gets the shell and the engine."""

    def command(shell: Shell, data: Path | None, **arguments: Any) -> None:
        with open_engine(shell, shell.data_place(data), None, create=False) as engine:
            run(shell, engine, **arguments)

    return default_data_option(click.pass_obj(functools.update_wrapper(command, run)))


@contextmanager
def open_place(
    shell: Shell,
    data: Path | None,
    url: str | None,
    token: str | None,
    *,
    app: str | None = None,
    create: bool = False,
) -> Iterator[Place]:
    data = shell.default_place(data, url, app)
    if app is None or data is not None:
        check_place(data, url, "messages")
    if url is None:
        shell.show_warnings()
        with open_engine(shell, data, app, create=create) as engine:
            yield engine.blocking
        return
    if app is not None:
        raise click.UsageError("--app is not for --url: a server knows its types and rules itself")
    from postroom.client import EngineClient

    with EngineClient(url, needed_token(token)) as client:
        yield client


def open_engine(shell: Shell, data: Path | None, app: str | None, *, create: bool) -> "Engine":
    """The engine of a data folder, with the types and the rules of an app; else the app's own engine."""
    from postroom.goals.engine import Engine

    if data is None:
        from postroom.server.harness.engine_workers import load_app

        return load_app(str(app))
    store = store_in(shell, data, "messages", create=create)
    if app is None:
        return Engine.open(store)
    from postroom.server.harness.engine_workers import load_app
    from postroom.stores.open import open_store

    return load_app(app).on(open_store(store))
