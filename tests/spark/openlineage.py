"""A receiver of OpenLineage events that accepts what the specification allows, and nothing else.

The classes of `openlineage-python` are generated from the specification. They check little by themselves, so
every value is compared with the type of its field, and every schema with that of its class.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, NamedTuple, Union, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import attr
from openlineage.client import event_v2, facet_v2

FACETS: Final[dict[str, type]] = {
    "dataQualityAssertions": facet_v2.data_quality_assertions_dataset.DataQualityAssertionsDatasetFacet,
    "errorMessage": facet_v2.error_message_run.ErrorMessageRunFacet,
    "outputStatistics": facet_v2.output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet,
    "parent": facet_v2.parent_run.ParentRunFacet,
    "schema": facet_v2.schema_dataset.SchemaDatasetFacet,
    "version": facet_v2.dataset_version_dataset.DatasetVersionDatasetFacet,
}
Event = dict[str, Any]


class Received(NamedTuple):
    """What a receiver got."""

    url: str
    events: list[Event]
    refusals: list[str]


@contextmanager
def receiver() -> Iterator[Received]:
    """An HTTP server that answers a wrong event with 400, as a real one does."""
    got: list[Event] = []
    refused: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            event = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                require_event(event)
            except (TypeError, ValueError) as error:
                refused.append(str(error))
                self.send_error(400)
                return
            got.append(event)
            self.send_response(201)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Received(f"http://127.0.0.1:{server.server_port}/api/v1/lineage", got, refused)
        server.shutdown()
        thread.join()


def events_in(file: Path) -> list[Event]:
    """The events of a file, each of which has to follow the specification."""
    events = [json.loads(line) for line in file.read_text().splitlines()]
    for event in events:
        require_event(event)
    return events


def require_event(event: Event) -> None:
    """Raise unless an event follows the specification."""
    _require(event, event_v2.RunEvent, "event")


def edges(events: list[Event], below: Path | str) -> dict[str, set[str]]:
    """For each dataset that runs have written, what it was made of, by the names in a folder."""
    found: dict[str, set[str]] = {}
    for event in events:
        if event["eventType"] == "COMPLETE":
            for output in event["outputs"]:
                sources = {each["name"].removeprefix(f"{below}/") for each in event["inputs"]}
                found.setdefault(output["name"].removeprefix(f"{below}/"), set()).update(sources)
    return found


def _require(value: Any, kind: Any, place: str) -> None:
    """Raise unless a value has a type of the specification."""
    origin = get_origin(kind)
    if kind is Any:
        return
    if origin in (Union, UnionType):
        _require_one_of(value, get_args(kind), place)
    elif origin is list:
        _require_plain(value, list, place)
        for at, item in enumerate(value):
            _require(item, get_args(kind)[0], f"{place}[{at}]")
    elif origin is dict:
        _require_plain(value, dict, place)
        for name, item in value.items():
            member = FACETS[name] if place.lower().endswith("facets") else get_args(kind)[1]
            _require(item, member, f"{place}.{name}")
    elif attr.has(kind):
        _require_object(value, kind, place)
    elif issubclass(kind, Enum):
        kind(value)
    else:
        _require_plain(value, kind, place)


def _require_one_of(value: Any, kinds: tuple[Any, ...], place: str) -> None:
    [kind] = [one for one in kinds if one is not NoneType]  # the specification has optional members only
    if value is None:
        raise TypeError(f"{place} is null: JSON omits an optional member")
    _require(value, kind, place)


def _require_plain(value: Any, kind: type, place: str) -> None:
    if type(value) is not kind:
        raise TypeError(f"{place} is {type(value).__name__}, and not {kind.__name__}")


def _require_object(value: Any, kind: Any, place: str) -> None:
    _require_plain(value, dict, place)
    fields = {field.name: field for field in attr.fields(kind)}
    hints = get_type_hints(kind)
    if unknown := value.keys() - fields.keys():
        raise ValueError(f"{place} has no member {min(unknown)}")
    schemas = {name for name in fields if name.lower().endswith("schemaurl") or name == "_producer"}
    needed = {name for name, field in fields.items() if field.default is attr.NOTHING} | schemas
    if missing := needed - value.keys():
        raise ValueError(f"{place} lacks {min(missing)}")
    for name, item in value.items():
        _require(item, hints[name], f"{place}.{name}")
        if fields[name].validator is not None:
            fields[name].validator(None, name, item)
        if name.endswith("schemaURL") and item != kind._get_schema():
            raise ValueError(f"{place}.{name} is {item}, and not {kind._get_schema()}")
        if name.endswith("producer") and not urlsplit(item).scheme:
            raise ValueError(f"{place}.{name} is not a URI")
