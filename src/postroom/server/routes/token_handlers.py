"""Handlers of the HTTP routes for tokens. Only admins may send them.

Rule 1: an admin of one organization sees and changes the tokens of that organization alone. Those of others
        are answered like unknown ones.
Rule 2: the names of agents that it gives to a token are those within its organization.
Rule 3: a token is answered once, when it is made.
Rule 4: each change is a line in the log of the server, without the token.
Rule 5: a token ends at the latest with that of the admin who made or rotated it.
"""

from datetime import UTC, datetime

from postroom.calls.tokens import (
    CreateToken,
    MadeTokenAnswer,
    RevokedAnswer,
    RotateToken,
    TokensAnswer,
)
from postroom.core.gate import Owner, permit
from postroom.errors import InvalidMessage, UnknownToken
from postroom.server.access.tokens import MORE_RIGHTS, Permissions, RegisteredToken, permissions_of
from postroom.server.http.exchange import HttpRequest, check_allowed
from postroom.server.http.task_server import TaskServer


async def tokens(server: TaskServer, request: HttpRequest) -> TokensAnswer:
    identity, now = request.identity, datetime.now(UTC)

    def listed() -> TokensAnswer:
        known = server.agents.tokens.list()
        seen = [each for each in known if permit(identity, "token.list", Owner(each.org))]
        return TokensAnswer([each.line(now) for each in seen])

    found: TokensAnswer = await server.on_tokens(request, listed)
    return found


async def create(server: TaskServer, request: HttpRequest) -> MadeTokenAnswer:
    call: CreateToken = request.call
    identity = request.identity
    org = identity.org if call.org is None else call.org
    check_allowed(identity, "token.create", Owner(org))
    allowed = _permissions(call, org)
    made = await server.on_tokens(
        request,
        lambda: server.agents.tokens.create(
            call.role, org, call.agent or "", call.expires_s, allowed, call.rate, identity.token_id
        ),
    )
    if not identity.org:
        await server.on_tokens(request, lambda: server.agents.adopt(call.agent or "", org))
    facts = {"role": call.role, "token_org": org, "token_agent": call.agent or ""}
    _log(server, request, "token_created", token_id=made.token_id, **facts)
    return MadeTokenAnswer(made.token, made.token_id)


async def revoke(server: TaskServer, request: HttpRequest) -> RevokedAnswer:
    ended = await _known(server, request)
    await server.on_tokens(request, lambda: server.agents.tokens.revoke(ended.token_id))
    server.open_calls.check()
    _log(server, request, "token_revoked", **_facts(ended))
    return RevokedAnswer(ended.token_id)


async def rotate(server: TaskServer, request: HttpRequest) -> MadeTokenAnswer:
    call: RotateToken = request.call
    ended = await _known(server, request)
    maker_id = request.identity.token_id
    made = await server.on_tokens(
        request, lambda: server.agents.tokens.rotate(ended.token_id, call.overlap_s, maker_id)
    )
    server.open_calls.check()
    _log(server, request, "token_rotated", **_facts(ended), new_token_id=made.token_id)
    return MadeTokenAnswer(made.token, made.token_id)


async def _known(server: TaskServer, request: HttpRequest) -> RegisteredToken:
    """The token of the path, when the caller may see it. The organization of a token never changes."""
    token_id, identity = request.call.token_id, request.identity
    for known in await server.on_tokens(request, server.agents.tokens.list):
        if known.token_id == token_id and permit(identity, "token.end", Owner(known.org)):
            return known
    raise UnknownToken(token_id)


def _log(server: TaskServer, request: HttpRequest, event: str, **facts: str) -> None:
    """Log what an admin changed. Commands on the folder have no admin, and no log."""
    admin = request.identity
    server.server_log.write(event, agent=admin.name, admin_token_id=admin.token_id, **facts)


def _facts(token: RegisteredToken) -> dict[str, str]:
    return {
        "token_id": token.token_id,
        "role": token.role,
        "token_org": token.org,
        "token_agent": token.agent,
    }


def _permissions(body: CreateToken, org: str) -> Permissions:
    given = [name for name in MORE_RIGHTS if getattr(body, name)]
    if given and body.role != "agent" and not org:
        raise InvalidMessage(f"{given[0]} has no effect: an {body.role} of all organizations has every right")
    return permissions_of(body)
