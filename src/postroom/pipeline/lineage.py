"""OpenLineage events about the jobs of the pipeline, to a file or to an HTTP address.

Rule: lineage never fails a job. An event that cannot be delivered is reported and dropped.
"""

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from postroom.errors import InvalidSetting
from postroom.pipeline.places import is_address

if TYPE_CHECKING:
    from postroom.pipeline.expectations import Measured
    from postroom.pipeline.storage import Storage
    from postroom.pipeline.tables import Tables

PRODUCER: Final = "https://pypi.org/project/postroom"
SCHEMA: Final = "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
FACETS: Final = "https://openlineage.io/spec/facets"
STATISTICS: Final = f"{FACETS}/1-0-2/OutputStatisticsOutputDatasetFacet.json"
COLUMNS: Final = f"{FACETS}/1-1-1/SchemaDatasetFacet.json"
ASSERTIONS: Final = f"{FACETS}/1-0-1/DataQualityAssertionsDatasetFacet.json"
ERROR: Final = f"{FACETS}/1-0-1/ErrorMessageRunFacet.json"
NAMESPACE: Final = "postroom"
SEND_TIMEOUT_S: Final = 10.0

Datasets = Sequence[Mapping[str, Any]]


class Lineage:
    """Emits the events of one run of a job."""

    def __init__(self, place: str, job: str, warn: Callable[[str], None] = lambda _: None) -> None:
        if "://" in place and not place.startswith(("http://", "https://")):
            raise InvalidSetting(f"{place} is no place for lineage: it is a file or an HTTP address")
        self._place = place
        self._warn = warn
        self._run_id = str(uuid.uuid4())
        self._job = job

    @contextmanager
    def run(self, inputs: Datasets, outputs: Callable[[], Datasets]) -> Iterator[None]:
        """Emit START, and at the end COMPLETE with the outputs, or FAIL with the error."""
        self.emit("START", inputs, ())
        try:
            yield
        except BaseException as error:
            facet = _facet(ERROR, message=str(error) or type(error).__name__, programmingLanguage="PYTHON")
            self.emit("FAIL", inputs, (), errorMessage=facet)
            raise
        self.emit("COMPLETE", inputs, outputs())

    def emit(self, kind: str, inputs: Datasets, outputs: Datasets, **facets: Any) -> None:
        """Deliver one event, or warn."""
        event = {
            "eventType": kind,
            "eventTime": datetime.now(UTC).isoformat(),
            "producer": PRODUCER,
            "schemaURL": SCHEMA,
            "run": {"runId": self._run_id, "facets": facets},
            "job": {"namespace": NAMESPACE, "name": self._job},
            "inputs": list(inputs),
            "outputs": list(outputs),
        }
        try:
            self._deliver(json.dumps(event).encode())
        except (OSError, URLError, ValueError) as error:
            self._warn(f"warning: lineage was not delivered to {self._place}: {error}")

    def _deliver(self, event: bytes) -> None:
        if not self._place.startswith(("http://", "https://")):
            with Path(self._place).open("ab") as file:
                file.write(event + b"\n")
            return
        request = Request(self._place, event, {"Content-Type": "application/json"})  # noqa: S310 - http only
        with urlopen(request, timeout=SEND_TIMEOUT_S):  # noqa: S310 - http only
            pass


def dataset(storage: "Storage", name: str = "") -> dict[str, Any]:
    """A folder as a dataset, by the names that OpenLineage gives to places."""
    if not is_address(storage.place):
        return {"namespace": "file", "name": f"{storage.place}/{name}".rstrip("/")}
    url = urlsplit(storage.place)
    return {"namespace": f"{url.scheme}://{url.netloc}", "name": f"{url.path}/{name}".rstrip("/")}


def written(tables: "Tables", names: Iterable[str]) -> list[dict[str, Any]]:
    """Tables as output datasets, with their columns and sizes."""
    return [
        {
            **dataset(tables.storage, name),
            "facets": {"schema": _columns(tables, name)},
            "outputFacets": {"outputStatistics": _statistics(tables, name)},
        }
        for name in names
    ]


def measured(tables: "Tables", found: Iterable["Measured"]) -> list[dict[str, Any]]:
    """Tables as input datasets, with the expectations that were measured."""
    by_table: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        assertion = {"assertion": one.kind, "success": one.holds}
        column = {"column": one.columns[0]} if len(one.columns) == 1 else {}
        by_table.setdefault(one.table, []).append(assertion | column)
    return [
        {
            **dataset(tables.storage, name),
            "inputFacets": {"dataQualityAssertions": _facet(ASSERTIONS, assertions=assertions)},
        }
        for name, assertions in by_table.items()
    ]


def _columns(tables: "Tables", name: str) -> dict[str, Any]:
    fields = [
        {"name": field.name, "type": field.dataType.simpleString()} for field in tables.schema(name).fields
    ]
    return _facet(COLUMNS, fields=fields)


def _statistics(tables: "Tables", name: str) -> dict[str, Any]:
    files = tables.listing(name)
    return _facet(STATISTICS, rowCount=files.rows, size=files.bytes, fileCount=len(files))


def _facet(schema: str, **fields: Any) -> dict[str, Any]:
    return {"_producer": PRODUCER, "_schemaURL": schema, **fields}
