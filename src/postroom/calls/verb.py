"""A verb as a struct, and how it goes over HTTP.

Rule 1: the fields of a struct are the arguments of its verb, and the first line of its docstring says what
        the verb does. Its `route` has the path, the permission and the answers.
Rule 2: a field whose name stands in the path is a part of the path. The others are the body of a POST or a
        PUT, and the query of a GET.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, NamedTuple
from urllib.parse import quote, urlencode

import msgspec
from msgspec import UNSET

from postroom.calls.fields import SMALL_BODY_BYTES_MAX

EVENT_STREAM = "text/event-stream"
TEXT = "text/plain"

REFUSED = (400, 401, 403, 413, 429, 503)
READ_REFUSED = (400, 401, 403, 404, 413, 429, 503)
CHANGE_REFUSED = (400, 401, 403, 404, 409, 413, 429, 503)


class Route(NamedTuple):
    """Where a verb is on a server, and who may call it."""

    method: str
    path: str
    permission: str
    """Its entry in the table of `core.gate`."""
    answers: Mapping[int, Any]
    """By status: the types of a success, None for an empty body, or a content type other than JSON."""
    refusals: tuple[int, ...] = ()
    bytes_max: int = SMALL_BODY_BYTES_MAX
    """Bytes of a body."""
    in_query: bool = False
    """Whether the fields of a POST are its query."""
    streams: bool = False
    """Whether the route can also send an event stream."""
    engine: str = ""
    """The method of the engine with the same arguments, such as `pause` or `goals.list`.

    Without a handler of its own the route calls it. `org_id` is then the caller's organization.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the path."""
        return tuple(re.findall(r"{(\w+)}", self.path))


def get(
    path: str,
    permission: str,
    *answers: Any,
    refusals: tuple[int, ...] = READ_REFUSED,
    others: Mapping[int, Any] | None = None,
    streams: bool = False,
    engine: str = "",
) -> Route:
    """A route that reads. `others` are answers with another status than 200."""
    all_answers = {200: answers, **(others or {})}
    return Route("GET", path, permission, all_answers, refusals, streams=streams, engine=engine)


def post(
    path: str,
    permission: str,
    *answers: Any,
    status: int = 202,
    refusals: tuple[int, ...] = CHANGE_REFUSED,
    bytes_max: int = SMALL_BODY_BYTES_MAX,
    others: Mapping[int, Any] | None = None,
    in_query: bool = False,
    engine: str = "",
) -> Route:
    """A route that changes something."""
    all_answers = {status: answers, **(others or {})}
    return Route("POST", path, permission, all_answers, refusals, bytes_max, in_query, engine=engine)


def put(path: str, permission: str, *answers: Any, bytes_max: int) -> Route:
    """A route that replaces something."""
    return Route("PUT", path, permission, {200: answers}, CHANGE_REFUSED, bytes_max)


def part_of_path(name: str, value: Any) -> str:  # noqa: ARG001 - a client checks the value by its name
    """A value as one part of a path."""
    return quote(str(value), safe="")


class Verb(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of all verbs."""

    route: ClassVar[Route]

    def target(self, part: Callable[[str, Any], str] = part_of_path) -> tuple[str, dict[str, Any] | None]:
        """The path of this call with its query, and its body.

        Omits unset fields, and fields that are None by default. With `omit_defaults`, omits every default.
        """
        shape, path, given = _shape_of(type(self)), self.route.path, {}
        for field, name in shape.in_path:
            path = path.replace(f"{{{name}}}", part(field, getattr(self, field)))
        for field, name, default in shape.sent:
            value = getattr(self, field)
            if value is not UNSET and (value != default or not (shape.omits or value is None)):
                given[name] = value
        if shape.is_body:
            return path, given
        return f"{path}?{urlencode(given)}" if given else path, None


class _Shape(NamedTuple):
    """How the fields of a verb are sent, by field and name on the wire."""

    is_body: bool
    omits: bool
    """Whether every default is left out."""
    in_path: tuple[tuple[str, str], ...]
    sent: tuple[tuple[str, str, Any], ...]
    """With their defaults."""


@cache
def _shape_of(kind: type[Verb]) -> _Shape:
    names, fields = kind.route.names, msgspec.structs.fields(kind)
    is_body = has_body(kind.route, sent_type(kind, names))
    return _Shape(
        is_body,
        not is_body or kind.__struct_config__.omit_defaults,
        tuple((one.name, one.encode_name) for one in fields if one.encode_name in names),
        tuple((one.name, one.encode_name, one.default) for one in fields if one.encode_name not in names),
    )


def engine_verbs(base: type[Verb] = Verb) -> Iterator[type[Verb]]:
    """All declared verbs that name a method of the engine."""
    for kind in base.__subclasses__():
        if "route" in vars(kind) and kind.route.engine:
            yield kind
        yield from engine_verbs(kind)


def has_body(route: Route, rest: type[msgspec.Struct]) -> bool:
    """Whether the fields of a call, without those of its path, are the body of its request."""
    return route.method in ("POST", "PUT") and not route.in_query and bool(rest.__struct_fields__)


@cache
def sent_type(kind: type[msgspec.Struct], names: tuple[str, ...]) -> type[msgspec.Struct]:
    """A struct without the fields of these names, which are in the path."""
    fields = msgspec.structs.fields(kind)
    if not any(field.encode_name in names for field in fields):
        return kind
    again: Any = msgspec.field  # its type does not allow for both, of which one is never set
    rest = [
        (field.name, field.type, again(default=field.default, default_factory=field.default_factory))
        for field in fields
        if field.encode_name not in names
    ]
    return msgspec.defstruct(
        kind.__name__, rest, namespace={"__doc__": kind.__doc__}, frozen=True, kw_only=True,
        forbid_unknown_fields=kind.__struct_config__.forbid_unknown_fields,
    )  # fmt: skip


def summary_of(kind: type) -> str:
    """What a verb does: the first line of its docstring."""
    return (kind.__doc__ or "").partition("\n")[0].removesuffix(".")
