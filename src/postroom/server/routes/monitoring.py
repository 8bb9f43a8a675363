"""The routes for monitoring: health, metrics and the OpenAPI document."""

import msgspec

from postroom.calls.server import CallerAnswer, ErrorAnswer
from postroom.core.health.health import judge
from postroom.server.http.exchange import HttpReply, HttpRequest
from postroom.server.http.task_server import TaskServer
from postroom.server.routes.answers import HealthAnswer
from postroom.server.routes.engine_handlers import engine_status

_encode = msgspec.json.Encoder().encode


async def health(server: TaskServer, request: HttpRequest) -> HealthAnswer | HttpReply:  # noqa: ARG001 - needs no caller
    if server.tasks.store.trouble:
        return _unavailable("the store cannot be written to at present")
    if not (server.writer.alive and server.harness.alive):
        return _unavailable("a thread of the server has ended: restart it")
    states, facts = await server.health()
    verdict = judge(facts)
    if verdict.level == "ok":
        return HealthAnswer("ok", states)
    return HealthAnswer("degraded", states, verdict)


async def ready(server: TaskServer, request: HttpRequest) -> HealthAnswer | HttpReply:
    """Like `health`, but broken parts are a refusal: a load balancer should choose another server.

    Messages that wait, and the broker of RabbitMQ, are the same for every server.
    """
    reply = await health(server, request)
    parts = (await server.part_facts()).broken
    return _unavailable("; ".join(f"{name}: {why}" for name, why in parts.items())) if parts else reply


async def caller(server: TaskServer, request: HttpRequest) -> CallerAnswer:  # noqa: ARG001 - the token is enough
    identity = request.identity
    return CallerAnswer(identity.name, identity.role, identity.org)


def _unavailable(message: str) -> HttpReply:
    return HttpReply(503, _encode(ErrorAnswer("Unavailable", message)))


async def metrics(server: TaskServer, request: HttpRequest) -> HttpReply:
    from postroom.server.http.metrics import CONTENT_TYPE, ServerCounters, metrics_text  # noqa: PLC0415 - takes 25 ms, and many servers are never scraped

    status = await server.read_for(request, server.tasks.status)
    engine = await server.read_for(request, lambda: engine_status(server))
    events = await server.counted_events()
    counters = ServerCounters(
        server.harness.status(), server.long_polls.count, server.writer.turns, server.requests, events
    )
    headers = ((b"content-type", CONTENT_TYPE.encode()),)
    text = await server.read_for(request, lambda: metrics_text(status, engine, counters))
    return HttpReply(200, text, headers)


async def openapi(server: TaskServer, request: HttpRequest) -> HttpReply:  # noqa: ARG001 - needs no caller
    return HttpReply(200, server.openapi_json())
