"""The OpenAPI document, generated from the structs that the server decodes and encodes."""

from collections.abc import Collection, Iterable
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from postroom.server.routes.task_schemas import ErrorAnswer, Id, Name, NoQuery

JSON = "application/json"
EVENT_STREAM = "text/event-stream"
TEXT = "text/plain"
_REF = "#/components/schemas/{name}"


class Route(NamedTuple):
    """The description of one method of one path."""

    method: str
    path: str
    summary: str
    answers: dict[int, Any]
    """By status: the types of a success, None for an empty body, or a content type other than JSON."""
    refusals: tuple[int, ...]
    bodies: tuple[type, ...] = ()
    query: type = NoQuery
    streams: bool = False
    """Whether the route can also send an event stream."""


def document(routes: Iterable[Route], version: str, open_paths: Collection[str]) -> dict[str, Any]:
    """Build the document. The routes of `open_paths` need no token."""
    routes = list(routes)
    types = _types(routes)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_type, components)
        if route.path in open_paths:
            paths[route.path][route.method.lower()]["security"] = []
    for struct in {route.query for route in routes}:
        components.pop(struct.__name__, None)
    built = {
        "openapi": "3.1.0",
        "info": {"title": "postroom tasks", "version": version},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(built))  # a default may be a tuple
    return found


def _types(routes: list[Route]) -> list[Any]:
    found: dict[Any, None] = {ErrorAnswer: None}
    for route in routes:
        for answer in route.answers.values():
            found.update(dict.fromkeys(answer if isinstance(answer, tuple) else ()))
        found.update(dict.fromkeys([*route.bodies, route.query]))
    return list(found)


def _one_of(types: tuple[Any, ...], by_type: dict[Any, Any]) -> Any:
    return by_type[types[0]] if len(types) == 1 else {"oneOf": [by_type[kind] for kind in types]}


def _operation(route: Route, by_type: dict[Any, Any], components: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{route.path}".replace("/", "_").translate(_BRACES),
        "parameters": [*_in_path(route.path), *_in_query(components[route.query.__name__])],
        "responses": {},
    }
    if route.bodies:
        schema = _one_of(route.bodies, by_type)
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    for status, answer in route.answers.items():
        operation["responses"][str(status)] = _response(status, answer, by_type, streams=route.streams)
    for status in route.refusals:
        operation["responses"][str(status)] = _response(status, (ErrorAnswer,), by_type)
    return operation


_PATH_SCHEMAS = {"id": msgspec.json.schema(Id), "name": msgspec.json.schema(Name)}
_BRACES = str.maketrans("", "", "{}")


def _response(status: int, answer: Any, by_type: dict[Any, Any], *, streams: bool = False) -> dict[str, Any]:
    response: dict[str, Any] = {"description": HTTPStatus(status).phrase}
    content: dict[str, Any] = {}
    if isinstance(answer, str):
        content[answer] = {"schema": {"type": "string"}}
    elif answer is not None:
        content[JSON] = {"schema": _one_of(answer, by_type)}
    if streams:
        content[EVENT_STREAM] = {"schema": {"type": "string"}}
    if content:
        response["content"] = content
    return response


def _in_path(path: str) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    return [{"name": name, "in": "path", "required": True, "schema": _PATH_SCHEMAS[name]} for name in names]


def _in_query(struct: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in struct.get("properties", {}).items()
    ]
