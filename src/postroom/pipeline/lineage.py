"""OpenLineage events about the jobs of the pipeline, to a file or to an HTTP address.

Rule 1: lineage never fails a job. An event that cannot be delivered is reported and dropped.
Rule 2: a job is one run, without datasets. Each change that it makes to a table is a run of its own, whose
        parent is the run of the job. Its inputs are those that the table declares.
Rule 3: a table whose rows a job has not changed has no events.
Rule 4: nothing is emitted after the end of the job, so no run of a table outlives its parent.
"""

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from postroom.core.door import leaving
from postroom.errors import InvalidSetting, shown_address
from postroom.settings import is_address

if TYPE_CHECKING:
    from postroom.pipeline.delta.delta_log import Commit
    from postroom.pipeline.delta.storage import Storage
    from postroom.pipeline.delta.tables import Tables
    from postroom.pipeline.query.expectations import Measured

PRODUCER: Final = "urn:postroom:pipeline"
SPEC: Final = "https://openlineage.io/spec"
RUN_EVENT: Final = f"{SPEC}/2-0-2/OpenLineage.json#/$defs/RunEvent"
FACETS: Final = {
    "DataQualityAssertionsDatasetFacet": "1-1-0",
    "DatasetVersionDatasetFacet": "1-0-1",
    "ErrorMessageRunFacet": "1-0-1",
    "OutputStatisticsOutputDatasetFacet": "1-0-2",
    "ParentRunFacet": "1-2-0",
    "SchemaDatasetFacet": "1-2-0",
}
"""The facets that are used, and their versions."""
NAMESPACE: Final = "postroom"
SEND_TIMEOUT_S: Final = 10.0
BUCKETS: Final = {"s3a": "s3", "s3": "s3", "gs": "gs"}
"""Schemes of object stores. There, the name of a dataset is a key, which begins with no slash."""

Datasets = Sequence[Mapping[str, Any]]


class _Run(NamedTuple):
    """One run of a job, as its events name it."""

    job: str
    run_id: str
    facets: Mapping[str, Any]


class JobRun:
    """Emits the events of one run of a job, and of the runs of its tables."""

    def __init__(self, place: str | None, job: str, warn: Callable[[str], None] = lambda _: None) -> None:
        """Without a place, events are made and delivered nowhere."""
        if place is not None and "://" in place and not place.startswith(("http://", "https://")):
            raise InvalidSetting(
                f"{shown_address(place)} is no place for lineage: it is a file or an HTTP address"
            )
        self._place = place
        self._warn = warn
        self._run = _Run(job, str(uuid.uuid4()), {})
        self._is_over = False
        self._turn = Lock()
        """Held while an event is delivered: tables are refreshed in several threads."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """The block is the job. Emits START, then COMPLETE, FAIL with the error, or ABORT after a signal."""
        self._emit(self._run, "START")
        try:
            yield
        except Exception as error:
            self.end("FAIL", errorMessage=_error(error))
            raise
        except BaseException:
            self.end("ABORT")
            raise
        self.end("COMPLETE")

    def end(self, kind: str, inputs: Datasets = (), **facets: Any) -> dict[str, Any]:
        """Emit the last event of the job, and return it. Later events are not delivered."""
        return self._emit(self._run, kind, inputs, facets=facets, is_last=True)

    @contextmanager
    def table(
        self, tables: "Tables", name: str, sources: Iterable[str], streams: Datasets = ()
    ) -> Iterator[None]:
        """Emit the run that changes a table, with its inputs: other tables, and streams."""
        before, began = tables.version(name), _now()
        run = _Run(f"{self._run.job}.{name}", str(uuid.uuid4()), {"parent": self._parent()})
        try:
            yield
        except BaseException as error:
            self._emit(run, "START", at=began)
            self._emit(run, "FAIL", facets={"errorMessage": _error(error)})
            raise
        try:
            self._changed(run, began, tables, name, before, [*sources], streams)
        except Exception as error:  # noqa: BLE001 - rule 1: the table is committed already
            self._warn(f"warning: lineage of {name} is not known: {error}")

    def _changed(
        self,
        run: _Run,
        began: str,
        tables: "Tables",
        name: str,
        before: int,
        sources: Sequence[str],
        streams: Datasets,
    ) -> None:
        """Emit the run of a table, if it has other rows than those of version `before`."""
        commits = _commits(tables, name, before)
        if any(commit is None or commit.added or commit.removed for commit in commits):
            inputs = [*streams, *(_read(tables, name, source, before) for source in sources)]
            self._emit(run, "START", inputs, at=began)
            self._emit(run, "COMPLETE", inputs, [_written(tables, name, commits)])

    def _parent(self) -> dict[str, Any]:
        job = {"namespace": NAMESPACE, "name": self._run.job}
        return _facet("ParentRunFacet", run={"runId": self._run.run_id}, job=job)

    def _emit(
        self,
        run: _Run,
        kind: str,
        inputs: Datasets = (),
        outputs: Datasets = (),
        *,
        facets: Mapping[str, Any] | None = None,
        at: str | None = None,
        is_last: bool = False,
    ) -> dict[str, Any]:
        """Deliver one event, or warn."""
        event = _event(kind, run, inputs, outputs, facets or {}, at or _now())
        with self._turn:
            if self._place is None or self._is_over:
                return event
            self._is_over = is_last
            try:
                _deliver(self._place, json.dumps(event).encode())
            except (OSError, URLError, ValueError) as error:
                self._warn(f"warning: lineage was not delivered to {self._place}: {error}")
        return event


def emitting(
    job: JobRun | None, tables: "Tables", name: str, sources: Iterable[str], streams: Datasets = ()
) -> AbstractContextManager[None]:
    """The block changes a table. Emits its run, if the job has one."""
    return nullcontext() if job is None else job.table(tables, name, sources, streams)


def _deliver(place: str, event: bytes) -> None:
    if not place.startswith(("http://", "https://")):
        with Path(place).open("ab") as file:
            file.write(event + b"\n")
        return
    request = Request(place, event, {"Content-Type": "application/json"})  # noqa: S310 - http only
    with urlopen(request, timeout=SEND_TIMEOUT_S):  # noqa: S310 - http only
        pass


# ---- events ----------------------------------------------------------------------------------------------


def _event(
    kind: str, run: _Run, inputs: Datasets, outputs: Datasets, facets: Mapping[str, Any], at: str
) -> dict[str, Any]:
    return {
        "eventType": kind,
        "eventTime": at,
        "producer": PRODUCER,
        "schemaURL": RUN_EVENT,
        "run": {"runId": run.run_id, "facets": {**run.facets, **facets}},
        "job": {"namespace": NAMESPACE, "name": run.job},
        "inputs": list(inputs),
        "outputs": list(outputs),
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _facet(name: str, **fields: Any) -> dict[str, Any]:
    schema = f"{SPEC}/facets/{FACETS[name]}/{name}.json#/$defs/{name}"
    return {"_producer": PRODUCER, "_schemaURL": schema, **fields}


def _error(error: BaseException) -> dict[str, Any]:
    said = leaving(str(error)) or type(error).__name__
    return _facet("ErrorMessageRunFacet", message=said, programmingLanguage="PYTHON")


# ---- datasets --------------------------------------------------------------------------------------------


def dataset(storage: "Storage", name: str = "") -> dict[str, Any]:
    """A folder as a dataset, by the names that OpenLineage gives to places."""
    place = f"{storage.place}/{name}".rstrip("/")
    if not is_address(place):
        return {"namespace": "file", "name": place}
    url = urlsplit(place)
    if url.scheme in BUCKETS:
        return {"namespace": f"{BUCKETS[url.scheme]}://{url.netloc}", "name": url.path.lstrip("/")}
    return {"namespace": f"{url.scheme}://{url.netloc}", "name": url.path}


def measured(tables: "Tables", found: Iterable["Measured"]) -> list[dict[str, Any]]:
    """Tables as input datasets, with the expectations that were measured."""
    by_table: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        by_table.setdefault(one.table, []).append(_assertion(one))
    return [
        {
            **dataset(tables.storage, name),
            "facets": {"version": _version(tables.version(name))},
            "inputFacets": {
                "dataQualityAssertions": _facet("DataQualityAssertionsDatasetFacet", assertions=assertions)
            },
        }
        for name, assertions in by_table.items()
    ]


def _assertion(one: "Measured") -> dict[str, Any]:
    column = {"column": one.columns[0]} if len(one.columns) == 1 else {}
    return {"assertion": one.kind, "success": one.holds, "description": one.sentence, **column}


def _read(tables: "Tables", name: str, source: str, before: int) -> dict[str, Any]:
    """A table as an input, at the version that table `name` has read."""
    version = before if source == name else tables.last_txn(name, source)
    known = version if version >= 0 else tables.version(source)
    return {**dataset(tables.storage, source), "facets": {"version": _version(known)}}


def _written(tables: "Tables", name: str, commits: Sequence["Commit | None"]) -> dict[str, Any]:
    """A table as an output, with the files that were written. Rows of rewritten files count as written."""
    files = [file for commit in commits if commit is not None for file in commit.added.values()]
    statistics = _facet(
        "OutputStatisticsOutputDatasetFacet",
        rowCount=sum(file.rows for file in files),
        size=sum(file.size for file in files),
        fileCount=len(files),
    )
    return {
        **dataset(tables.storage, name),
        "facets": {"schema": _columns(tables, name), "version": _version(tables.version(name))},
        "outputFacets": {} if None in commits else {"outputStatistics": statistics},
    }


def _commits(tables: "Tables", name: str, before: int) -> list["Commit | None"]:
    """The commits after version `before`, or all if the table was created again. None: not in the log."""
    after = tables.version(name)
    first = before + 1 if before <= after else 0
    return [tables.read_commit(name, version) for version in range(first, after + 1)]


def _version(number: int) -> dict[str, Any]:
    return _facet("DatasetVersionDatasetFacet", datasetVersion=str(number))


def _columns(tables: "Tables", name: str) -> dict[str, Any]:
    fields = [
        {"name": field.name, "type": field.dataType.simpleString()} for field in tables.schema(name).fields
    ]
    return _facet("SchemaDatasetFacet", fields=fields)
