"""The real server behaves as its OpenAPI document says, also for generated requests."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings

from postroom.calls.fields import WAIT_S_MAX
from postroom.server.routes.table import ROUTES, openapi
from tests.integration.servers import Server, serving
from tests.waiting import HANG_GUARD_S

EXAMPLES = 8
# A lease of 7.0 and an invalid time of a bus message are refused; a schema cannot express that.
NOT_ALL_CAN_BE_SAID = schemathesis.checks.positive_data_acceptance


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("openapi") / "data") as running:
        for number in range(5):
            running.enqueue("triage", number)
        yield running


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """One connection for all requests."""
    with requests.Session() as session:
        session.trust_env = False  # no search for proxies before each request
        yield session


schema = schemathesis.openapi.from_dict(openapi())
# A body that is too long is refused before it is looked at, also when more is wrong with it.
schema.config.checks.negative_data_rejection.expected_statuses.append("413")
# The stream never ends, and has its own tests.
finite = schema.exclude(path="/events")


@finite.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.function_scoped_fixture,
    ],
)
def test_the_server_does_what_its_document_says(
    case: "schemathesis.Case[Any]", server: Server, session: requests.Session
) -> None:
    without_waiting(case.body)
    without_waiting(case.query)
    case.call_and_validate(
        base_url=f"http://127.0.0.1:{server.port}",
        headers={"Authorization": f"Bearer {server.tokens['boss']}"},
        timeout=HANG_GUARD_S,
        session=session,
        excluded_checks=[NOT_ALL_CAN_BE_SAID],
    )


def without_waiting(values: Any) -> None:
    """Long polls have their own tests. In a query, numbers are text."""
    wait_s = values.get("wait_s") if isinstance(values, dict) else None
    if isinstance(wait_s, str):
        with contextlib.suppress(ValueError):
            wait_s = float(wait_s)
    if isinstance(wait_s, (int, float)) and 0 <= wait_s <= WAIT_S_MAX:
        values["wait_s"] = type(values["wait_s"])(0)


def test_the_document_names_every_route(server: Server) -> None:
    document = server.get("triage", "/openapi.json").json
    assert document == openapi()
    served = {(route.path, route.method.lower()) for route in (entry.route for entry in ROUTES)}
    named = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert named == served


def test_every_route_but_health_and_ready_is_documented_with_a_token() -> None:
    document = openapi()
    free = [
        path
        for path, methods in document["paths"].items()
        for operation in methods.values()
        if operation.get("security") == []
    ]
    assert document["security"] == [{"token": []}]
    assert free == ["/health", "/ready"]


def test_every_reference_in_the_document_resolves() -> None:
    document = openapi()
    names = set(document["components"]["schemas"])
    found: set[str] = set()

    def walk(value: object) -> None:
        if isinstance(value, dict):
            found.update({str(value["$ref"]).rpartition("/")[2]} if "$ref" in value else ())
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(document)
    assert found <= names
    assert {"NextBody", "CompleteBody", "EnqueueBody", "ErrorAnswer", "TaskInfo"} <= found
