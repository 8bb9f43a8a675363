"""The verbs of a server: events, health, the caller, and buses."""

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from postroom.calls.fields import BUS_POST_BYTES_MAX, PAGE_DEFAULT, Name, Number, Page, Scope
from postroom.calls.verb import EVENT_STREAM, TEXT, Route, Verb, get, post
from postroom.message import Alert, BusMessage


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The body of every refusal."""

    error: str
    message: str


class FollowEvents(Verb, frozen=True, kw_only=True):
    """Events as they happen."""

    after: Number = 0

    route: ClassVar[Route] = get("/events", "task.list", others={200: EVENT_STREAM})


class ReadMetrics(Verb, frozen=True, kw_only=True):
    """Metrics for Prometheus."""

    route: ClassVar[Route] = get("/metrics", "server.measure", others={200: TEXT})


class ListAlerts(Verb, frozen=True, kw_only=True):
    """Alerts that go on, and those that were over in the last seven days."""

    route: ClassVar[Route] = get("/alerts", "server.measure", list[Alert], engine="alerts")


class CallerAnswer(msgspec.Struct, frozen=True):
    """The owner of the token. An empty `org` means all organizations for an operator or an admin."""

    name: str
    role: str
    org: str


class ReadCaller(Verb, frozen=True, kw_only=True):
    """The owner of the token."""

    route: ClassVar[Route] = get("/whoami", "server.read", CallerAnswer)


class ReadHealth(Verb, frozen=True, kw_only=True):
    """Whether the server runs."""

    route: ClassVar[Route] = get("/health", "server.look", refusals=(400, 413, 503))


class ReadReadiness(Verb, frozen=True, kw_only=True):
    """Whether all parts run."""

    route: ClassVar[Route] = get("/ready", "server.look", refusals=(400, 413, 503))


class ReadOpenApi(Verb, frozen=True, kw_only=True):
    """The OpenAPI document of this server."""

    route: ClassVar[Route] = get(
        "/openapi.json", "server.read", dict[str, Any], refusals=(400, 401, 413, 429, 503)
    )


# ---- buses -------------------------------------------------------------------------------------------


class BusesAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The buses that the caller may read, by name.

    An operator of all organizations also sees those of each organization.
    """

    buses: list[str]
    organizations: dict[str, list[str]] = {}


class ListBuses(Verb, frozen=True, kw_only=True):
    """Buses by name."""

    route: ClassVar[Route] = get("/bus", "bus.list", BusesAnswer)


class BusAnswer(msgspec.Struct, frozen=True):
    """A page of a bus. The next page begins after the last `msg_id`."""

    messages: list[BusMessage]


class _OfBus(Verb, frozen=True, kw_only=True):
    """An operator of all organizations may name one as `org_id`."""

    bus: Name = msgspec.field(name="name")
    org_id: Scope = ""


class ReadBus(_OfBus, frozen=True, kw_only=True):
    """Messages of a bus."""

    since: str = ""
    limit: Page = PAGE_DEFAULT

    route: ClassVar[Route] = get("/bus/{name}/messages", "bus.read", BusAnswer, streams=True)


class BusIdAnswer(msgspec.Struct, frozen=True):
    """The id of the appended message."""

    msg_id: str


class PostToBus(_OfBus, frozen=True, kw_only=True):
    """Append to a bus.

    The fields are the keywords of `Bus.append`. An operator of all organizations may name one as `org_id`.
    """

    type: Annotated[str, Meta(min_length=1)]
    project_id: Annotated[str, Meta(min_length=1)]
    task_id: str = ""
    run_id: str = ""
    parents: list[str] = msgspec.field(default_factory=list)
    attachment: str | None = None
    body: str = ""
    ts: str | None = None

    route: ClassVar[Route] = post(
        "/bus/{name}/messages",
        "bus.post",
        BusIdAnswer,
        status=201,
        refusals=(400, 401, 403, 413, 429, 503, 507),
        bytes_max=BUS_POST_BYTES_MAX,
    )


class RemovedBusAnswer(msgspec.Struct, frozen=True):
    """The bus that was removed, and its organization."""

    bus: str
    org_id: str


class RemoveBus(_OfBus, frozen=True, kw_only=True):
    """Remove a bus with its archives."""

    route: ClassVar[Route] = post("/bus/{name}/remove", "bus.remove", RemovedBusAnswer, in_query=True)
