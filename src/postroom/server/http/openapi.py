"""The OpenAPI document, generated from the structs that the server decodes and encodes."""

from collections.abc import Collection, Iterable
from http import HTTPStatus
from typing import Any

import msgspec

from postroom.calls.fields import Id, Name
from postroom.calls.server import ErrorAnswer
from postroom.calls.verb import EVENT_STREAM
from postroom.server.http.endpoint import ServedRoute

JSON = "application/json"
_REF = "#/components/schemas/{name}"


def document(routes: Iterable[ServedRoute], version: str, open_paths: Collection[str]) -> dict[str, Any]:
    """Build the document. The routes of `open_paths` need no token."""
    routes = list(routes)
    types = _types(routes)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for served in routes:
        operations = paths.setdefault(served.route.path, {})
        operation = operations[served.route.method.lower()] = _operation(served, by_type, components)
        if served.route.path in open_paths:
            operation["security"] = []
    for struct in {served.query for served in routes}:
        components.pop(struct.__name__, None)
    bodies = {body.__name__: body_name(body) for served in routes for body in served.bodies}
    built = {
        "openapi": "3.1.0",
        "info": {"title": "postroom tasks", "version": version},
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": {bodies.get(name, name): schema for name, schema in components.items()},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
    encoded = msgspec.json.encode(built).decode()  # a default may be a tuple
    for name, shown in bodies.items():
        encoded = encoded.replace(f'"{_REF.format(name=name)}"', f'"{_REF.format(name=shown)}"')
    found: dict[str, Any] = _with_lists(msgspec.json.decode(encoded))
    return found


def _with_lists(schema: Any) -> Any:
    """A pair as a list of two: tools read the `prefixItems` of a tuple in different ways."""
    if isinstance(schema, list):
        return [_with_lists(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "prefixItems" in schema:
        schema = schema | {"items": schema["prefixItems"][0]}
    return {name: _with_lists(value) for name, value in schema.items() if name != "prefixItems"}


def body_name(body: type) -> str:
    """The name of the schema of a body."""
    return f"{body.__name__}Body"


def _types(routes: list[ServedRoute]) -> list[Any]:
    found: dict[Any, None] = {ErrorAnswer: None}
    for served in routes:
        for answer in served.route.answers.values():
            found.update(dict.fromkeys(answer if isinstance(answer, tuple) else ()))
        found.update(dict.fromkeys([*served.bodies, served.query]))
    return list(found)


def _one_of(types: tuple[Any, ...], by_type: dict[Any, Any]) -> Any:
    return by_type[types[0]] if len(types) == 1 else {"oneOf": [by_type[kind] for kind in types]}


def _operation(served: ServedRoute, by_type: dict[Any, Any], components: dict[str, Any]) -> dict[str, Any]:
    route = served.route
    operation: dict[str, Any] = {
        "summary": served.summary,
        "operationId": f"{route.method.lower()}{route.path}".replace("/", "_").translate(_BRACES),
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": _PATH_SCHEMAS[name]}
                for name in route.names
            ),
            *(
                {"name": name, "in": "query", "required": False, "schema": schema}
                for name, schema in components[served.query.__name__].get("properties", {}).items()
            ),
        ],
        "responses": {},
    }
    if served.bodies:
        schema = _one_of(served.bodies, by_type)
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
