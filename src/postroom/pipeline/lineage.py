"""OpenLineage events about the jobs of the pipeline, to a file or to an HTTP address.

Rule 1: lineage never fails a job. An event that cannot be delivered is reported and dropped.
Rule 2: a job is one run, without datasets. Each change that it makes to a table is a run of its own, whose
        parent is the run of the job. Its inputs are those that the table declares.
Rule 3: a table whose rows a job has not changed has no events.
Rule 4: nothing is emitted after the end of the job, so no run of a table outlives its parent.
"""

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import msgspec
from openlineage.client import set_producer
from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
from openlineage.client.facet_v2 import (
    data_quality_assertions_dataset,
    dataset_version_dataset,
    error_message_run,
    output_statistics_output_dataset,
    parent_run,
    schema_dataset,
)
from openlineage.client.serde import Serde

from postroom.core.door import leaving
from postroom.errors import InvalidSetting, shown_address
from postroom.settings import is_address

if TYPE_CHECKING:
    from postroom.pipeline.delta.delta_log import Commit
    from postroom.pipeline.delta.storage import Storage
    from postroom.pipeline.delta.tables import Tables
    from postroom.pipeline.query.expectations import Measured

NAMESPACE: Final = "postroom"
SEND_TIMEOUT_S: Final = 10.0
BUCKETS: Final = {"s3a": "s3", "s3": "s3", "gs": "gs"}
"""Schemes of object stores. There, the name of a dataset is a key, which begins with no slash."""
HTTP: Final = ("http://", "https://")

set_producer("urn:postroom:pipeline")


class JobRun:
    """Emits the events of one run of a job, and of the runs of its tables."""

    def __init__(self, place: str | None, job: str, warn: Callable[[str], None] = lambda _: None) -> None:
        """Without a place, events are made and delivered nowhere."""
        if place is not None and "://" in place and not place.startswith(HTTP):
            raise InvalidSetting(
                f"{shown_address(place)} is not a place for lineage: it is a file or an HTTP address"
            )
        self._place = place
        self._warn = warn
        self._job = job
        self._run = Run(str(uuid.uuid4()))
        self._is_over = False
        self._turn = Lock()
        """Held while an event is delivered: tables are refreshed in several threads."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """The block is the job. Emits START, then COMPLETE, FAIL with the error, or ABORT after a signal."""
        self._emit(RunState.START, self._job, self._run)
        try:
            yield
        except Exception as error:
            self._run.facets = {"errorMessage": _error(error)}
            self.end("FAIL")
            raise
        except BaseException:
            self.end("ABORT")
            raise
        self.end("COMPLETE")

    def end(self, state: str, inputs: Sequence[InputDataset] = ()) -> dict[str, Any]:
        """Emit the last event of the job, and return it. Later events are not delivered."""
        return self._emit(RunState[state], self._job, self._run, inputs, is_last=True)

    @contextmanager
    def table(
        self, tables: "Tables", name: str, sources: Iterable[str], streams: "Iterable[Storage]" = ()
    ) -> Iterator[None]:
        """Emit the run that changes a table, with its inputs: other tables, and streams."""
        before, began, job = tables.version(name), _now(), f"{self._job}.{name}"
        parent = parent_run.ParentRunFacet(
            parent_run.Run(self._run.runId), parent_run.Job(NAMESPACE, self._job)
        )
        run = Run(str(uuid.uuid4()), {"parent": parent})
        try:
            yield
        except BaseException as error:
            self._emit(RunState.START, job, run, at=began)
            failed = Run(run.runId, {"parent": parent, "errorMessage": _error(error)})
            self._emit(RunState.FAIL, job, failed)
            raise
        try:
            after = tables.version(name)
            first = before + 1 if before <= after else 0  # the table was created again
            commits = [tables.read_commit(name, version) for version in range(first, after + 1)]
            if any(commit is None or commit.added or commit.removed for commit in commits):
                inputs = [InputDataset(**dataset(stream)) for stream in streams]
                inputs += [_read(tables, name, source, before) for source in sources]
                self._emit(RunState.START, job, run, inputs, at=began)
                self._emit(RunState.COMPLETE, job, run, inputs, [_written(tables, name, commits)])
        except Exception as error:  # noqa: BLE001 - rule 1: the table is committed already
            self._warn(f"warning: lineage of {name} is not known: {error}")

    def _emit(
        self,
        state: RunState,
        job: str,
        run: Run,
        inputs: Sequence[InputDataset] = (),
        outputs: Sequence[OutputDataset] = (),
        *,
        at: str | None = None,
        is_last: bool = False,
    ) -> dict[str, Any]:
        """Deliver one event, or warn."""
        event = Serde.to_dict(
            RunEvent(
                eventType=state,
                eventTime=at or _now(),
                run=run,
                job=Job(NAMESPACE, job),
                inputs=list(inputs),
                outputs=list(outputs),
            )
        )
        with self._turn:
            if self._place is None or self._is_over:
                return event
            self._is_over = is_last
            try:
                _deliver(self._place, msgspec.json.encode(event))
            except (OSError, URLError, ValueError) as error:
                self._warn(f"warning: lineage was not delivered to {self._place}: {error}")
        return event


def _deliver(place: str, event: bytes) -> None:
    if not place.startswith(HTTP):
        with Path(place).open("ab") as file:
            file.write(event + b"\n")
        return
    request = Request(place, event, {"Content-Type": "application/json"})  # noqa: S310 - http only
    with urlopen(request, timeout=SEND_TIMEOUT_S):  # noqa: S310 - http only
        pass


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _error(error: BaseException) -> error_message_run.ErrorMessageRunFacet:
    said = leaving(str(error)) or type(error).__name__
    return error_message_run.ErrorMessageRunFacet(said, programmingLanguage="PYTHON")


# ---- datasets --------------------------------------------------------------------------------------------


def dataset(storage: "Storage", name: str = "") -> dict[str, Any]:
    """The namespace and the name of a folder, by the names that OpenLineage gives to places."""
    place = f"{storage.place}/{name}".rstrip("/")
    if not is_address(place):
        return {"namespace": "file", "name": place}
    url = urlsplit(place)
    if url.scheme in BUCKETS:
        return {"namespace": f"{BUCKETS[url.scheme]}://{url.netloc}", "name": url.path.lstrip("/")}
    return {"namespace": f"{url.scheme}://{url.netloc}", "name": url.path}


def measured(tables: "Tables", found: Iterable["Measured"]) -> list[InputDataset]:
    """Tables as input datasets, with the expectations that were measured."""
    facets = data_quality_assertions_dataset
    by_table: dict[str, list[facets.Assertion]] = {}
    for one in found:
        column = one.columns[0] if len(one.columns) == 1 else None
        assertion = facets.Assertion(one.kind, one.holds, column, description=one.sentence, params=None)
        by_table.setdefault(one.table, []).append(assertion)
    return [
        InputDataset(
            **dataset(tables.storage, name),
            facets=_version(tables.version(name)),
            inputFacets={"dataQualityAssertions": facets.DataQualityAssertionsDatasetFacet(assertions)},
        )
        for name, assertions in by_table.items()
    ]


def _read(tables: "Tables", name: str, source: str, before: int) -> InputDataset:
    """A table as an input, at the version that table `name` has read."""
    version = before if source == name else tables.last_txn(name, source)
    known = version if version >= 0 else tables.version(source)
    return InputDataset(**dataset(tables.storage, source), facets=_version(known))


def _written(tables: "Tables", name: str, commits: Sequence["Commit | None"]) -> OutputDataset:
    """A table as an output, with the files that were written. Rows of rewritten files count as written."""
    files = [file for commit in commits if commit is not None for file in commit.added.values()]
    statistics = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
        rowCount=sum(file.rows for file in files), size=sum(file.size for file in files), fileCount=len(files)
    )
    columns = [
        schema_dataset.SchemaDatasetFacetFields(field.name, field.dataType.simpleString())
        for field in tables.schema(name).fields
    ]
    return OutputDataset(
        **dataset(tables.storage, name),
        facets={"schema": schema_dataset.SchemaDatasetFacet(columns), **_version(tables.version(name))},
        outputFacets={} if None in commits else {"outputStatistics": statistics},
    )


def _version(number: int) -> dict[str, Any]:
    return {"version": dataset_version_dataset.DatasetVersionDatasetFacet(str(number))}
