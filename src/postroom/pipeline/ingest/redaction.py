"""The redaction of the audit stream as Spark columns.

Rule 1: `core.redaction` is the only definition. It needs only the standard library, so its source is sent
        along with the function that uses it, and executors need no postroom.
Rule 2: a row whose text is NULL or encrypted is not processed.
Rule 3: neither is a row whose segment the shipper has redacted by the same rules, at this level or a stricter
        one. The mark of its redaction says so; see `audit.redaction_marks`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pyarrow as pa  # type: ignore[import-untyped]
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from postroom.audit.redaction_marks import sufficient_marks
from postroom.core import redaction
from postroom.core.redaction import Level, Redactor
from postroom.pipeline.schema import MARK

ENCRYPTED: Final = "enc:"
PACKAGE: Final = "postroom_redaction"
"""The name of the package on an executor."""


def is_done(level: Level) -> Column:
    """Whether the shipper has already redacted a row of bronze as this level requires."""
    done = F.col(MARK).isin(sorted(sufficient_marks(level)))
    return F.coalesce(done, F.lit(False))  # noqa: FBT003 - a literal of SQL


def redacted(level: Level, done: Column | None = None) -> dict[str, Column]:
    """The columns that are redacted, by name. Rows that are `done` keep their values."""
    if level == "none":
        return {}
    payload, error = F.col("payload"), F.col("error")
    readable, text = F.when(~payload.startswith(ENCRYPTED), payload), error
    if done is not None:
        readable, text = F.when(~done, readable), F.when(~done, text)
    both = _redact(level, _texts())(readable, text)
    return {
        "payload": F.coalesce(both["payload"], payload),
        "error": F.coalesce(both["error"], error),
    }


def redacted_rows(level: Level) -> Callable[[pa.Table], pa.Table]:
    """A function that redacts rows in this process, without Python on an executor."""
    redactor = Redactor(level)
    sufficient = sufficient_marks(level)

    def redact(rows: pa.Table) -> pa.Table:
        marks = rows[MARK].to_pylist() if MARK in rows.column_names else [None] * len(rows)
        for name, change in (("payload", redactor.payload), ("error", redactor.text)):
            if level != "none" and name in rows.column_names:
                kept = ENCRYPTED if name == "payload" else None
                texts = [
                    text
                    if text is None or mark in sufficient or (kept and text.startswith(kept))
                    else change(text)
                    for text, mark in zip(rows[name].to_pylist(), marks, strict=True)
                ]
                rows = rows.set_column(
                    rows.column_names.index(name), rows.field(name), pa.array(texts, pa.string())
                )
        return rows

    return redact


def _texts() -> dict[str, str]:
    """The files of the package by name, each after the files that it imports."""
    folder = Path(redaction.__file__).parent
    return {
        name: (folder / f"{name}.py").read_text(encoding="utf-8").replace(redaction.__name__, PACKAGE)
        for name in redaction.MODULES
    }


def _redact(level: Level, texts: dict[str, str]) -> Callable[..., Column]:
    """One function for both columns, so that a row goes to Python once.

    It is local and uses no name of this module, so that Spark sends its code and not a reference.
    """
    last = f"{PACKAGE}.{redaction.MODULES[-1]}"
    parts = {f"{PACKAGE}.{name}": text for name, text in texts.items()}

    def redact(payload: pa.Array, error: pa.Array) -> pa.Array:
        import sys  # noqa: PLC0415 - an executor has only this function
        import types  # noqa: PLC0415 - the same

        import pyarrow  # noqa: ICN001, PLC0415 - the same

        if last not in sys.modules:
            for name, text in parts.items():
                module = types.ModuleType(name)
                sys.modules[name] = module
                exec(compile(text, name, "exec"), module.__dict__)  # noqa: S102 - the text of our own file
        redactor = sys.modules[last].Redactor(level)
        columns = [
            pyarrow.array([None if text is None else change(text) for text in column.to_pylist()], "string")
            for column, change in ((payload, redactor.payload), (error, redactor.text))
        ]
        return pyarrow.StructArray.from_arrays(columns, ["payload", "error"])

    made: Callable[..., Column] = F.arrow_udf(redact, "payload string, error string")  # type: ignore[attr-defined]
    return made
