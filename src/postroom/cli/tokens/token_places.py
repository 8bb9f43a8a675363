"""Where the tokens are: in a data folder, or at a server with an address."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import click

from postroom.cli.render import rfc3339
from postroom.cli.shell import Shell
from postroom.cli.tasks.options import starting_folder
from postroom.cli.tasks.places import check_place, needed_token
from postroom.errors import UnknownToken

if TYPE_CHECKING:
    from datetime import datetime

    from postroom.calls.tokens import TokenLine
    from postroom.client.calls import HttpClient
    from postroom.server.access.tokens import NewToken, Permissions, RegisteredToken, Tokens


class Wish(NamedTuple):
    """What `token create` asks for."""

    role: str
    org: str
    agent: str
    expires_s: float | None
    rate: float
    permissions: "Permissions"


class Place(Protocol):
    """Tokens that can be made, listed, revoked and rotated."""

    def organization(self, org: str) -> str:
        """The organization of a new token for which `org` was given; empty for all organizations."""
        ...

    def create(self, wish: Wish) -> "NewToken": ...

    def list(self) -> "list[dict[str, Any]]": ...

    def revoke(self, token_id: str) -> None: ...

    def rotate(self, token_id: str, overlap_s: float) -> "NewToken": ...


class Folder:
    """The tokens of a data folder."""

    def __init__(self, shell: Shell, data: Path) -> None:
        self._shell = shell
        self._data = data

    def organization(self, org: str) -> str:
        return org

    def create(self, wish: Wish) -> "NewToken":
        from postroom.server.access.registry import Agents

        agents = Agents(self._data)
        with starting_folder(self._shell, self._data):
            made = agents.tokens.create(
                wish.role, wish.org, wish.agent, wish.expires_s, wish.permissions, wish.rate
            )
            agents.adopt(wish.agent, wish.org)
        return made

    def list(self) -> "list[dict[str, Any]]":
        from datetime import UTC, datetime

        now = datetime.now(UTC)
        return [
            _row(known, known.permissions, known.expires, valid=not known.is_expired(now))
            for known in existing(self._data).list()
        ]

    def revoke(self, token_id: str) -> None:
        existing(self._data).revoke(token_id)

    def rotate(self, token_id: str, overlap_s: float) -> "NewToken":
        return existing(self._data).rotate(token_id, overlap_s)


class Remote:
    """The tokens of a server, over HTTP. Changes are sent once: a repeated one could make a second token."""

    def __init__(self, shell: Shell, client: "HttpClient") -> None:
        self._shell = shell
        self._client = client

    def organization(self, org: str) -> str:
        """The organization of a new token: `org`, or without one the organization of the admin."""
        return org or str(self._client.request("GET", "/whoami").get("org") or "")

    def create(self, wish: Wish) -> "NewToken":
        from postroom.server.access.tokens import checked_permissions

        allowed = checked_permissions(*wish)
        body = {
            "role": wish.role, "org": wish.org or None, "agent": wish.agent or None, "rate": wish.rate,
            "expires_s": wish.expires_s, "may_send_to": allowed.may_send_to, "may_claim": allowed.may_claim,
            "may_read": allowed.may_read, "only_message": allowed.only_message,
            "only_buses": allowed.only_buses, "read_only": allowed.is_read_only,
        }  # fmt: skip
        return self._made("/tokens", body)

    def list(self) -> "list[dict[str, Any]]":
        import msgspec

        from postroom.calls.tokens import TokensAnswer
        from postroom.server.routes.token_handlers import permissions_of

        found = msgspec.convert(self._client.request("GET", "/tokens"), TokensAnswer)
        return [_row(line, permissions_of(line), line.expires, valid=line.valid) for line in found.tokens]

    def revoke(self, token_id: str) -> None:
        self._client.request("POST", _path(token_id, "revoke"), {}, retries=0)

    def rotate(self, token_id: str, overlap_s: float) -> "NewToken":
        return self._made(_path(token_id, "rotate"), {"overlap_s": overlap_s})

    def _made(self, path: str, body: dict[str, Any]) -> "NewToken":
        from postroom.server.access.tokens import NewToken

        answer = self._client.request("POST", path, body, retries=0)
        return NewToken(answer["token"], answer["token_id"])


def existing(data: Path) -> "Tokens":
    """The tokens of a folder that must be a data folder."""
    from postroom.server.access.tokens import Tokens
    from postroom.server.folder.layout import checked_data_folder

    return Tokens(checked_data_folder(data))


def _row(
    known: "RegisteredToken | TokenLine",
    permissions: "Permissions",
    expires: "datetime | None",
    *,
    valid: bool,
) -> dict[str, Any]:
    return {
        "token_id": known.token_id, "role": known.role, "org": known.org, "agent": known.agent,
        "created": rfc3339(known.created), "expires": None if expires is None else rfc3339(expires),
        "rate": known.rate or None, "permissions": permissions.shown(), "valid": valid,
    }  # fmt: skip


def _path(token_id: str, verb: str) -> str:
    if not (token_id.isascii() and token_id.isalnum()):  # no server has such an id, and no path holds it
        raise UnknownToken(token_id)
    return f"/tokens/{token_id}/{verb}"


@contextmanager
def open_tokens(shell: Shell, data: Path | None, url: str | None, token: str | None) -> Iterator[Place]:
    """The tokens of `--data`, or those of the server at `--url`."""
    data = shell.default_place(data, url)
    check_place(data, url, "tokens")
    if data is not None:
        if token is not None:
            raise click.UsageError("--token has no effect on a data folder: leave it out")
        yield Folder(shell, data)
        return
    from postroom.client.calls import HttpClient

    with HttpClient(str(url), needed_token(token)) as client:
        yield Remote(shell, client)
