"""The data pipeline: tables, checks and reports over the whole audit stream.

It reads what the system wrote: segments, stores, bus and queue files. The server is never imported. Inside,
imports go from `jobs`, `retention`, `replay` and `report` by way of `query` to `gold`, `silver`, `follow`,
`ingest`, `delta` and `spark`, as `pyproject.toml` says.

`Pipeline` and `Tables` are the API for an existing Spark session. They are imported on first use, because
commands that need no Spark import modules of this package.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postroom.pipeline.delta.tables import Tables as Tables
    from postroom.pipeline.jobs import Pipeline as Pipeline

__all__ = ["Pipeline", "Tables"]


def __getattr__(name: str) -> Any:
    if name == "Pipeline":
        from postroom.pipeline.jobs import Pipeline  # noqa: PLC0415 - lazy

        return Pipeline
    if name == "Tables":
        from postroom.pipeline.delta.tables import Tables  # noqa: PLC0415 - lazy

        return Tables
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
